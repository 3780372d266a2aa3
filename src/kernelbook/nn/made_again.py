"""Classes that are made while a program runs, from others, and modules of them that are copied and pickled all the same."""

from collections.abc import Callable
from typing import Any

import torch


class MadeAgain(torch.nn.Module):
    """Stands before the other class among the bases of one that ``make(other)`` has made, and makes again.

    Pickle finds classes by their names, which such a class does not have.
    """

    make: Callable[[Any], type[torch.nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).make, type(self).__bases__[1]), *reduced[2:]


def _new(make: Callable[[Any], type[torch.nn.Module]], kind: Any) -> torch.nn.Module:
    made = make(kind)
    return made.__new__(made)
