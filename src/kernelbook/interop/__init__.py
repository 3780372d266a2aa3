"""Other libraries: each optional, and imported only where one of these modules is used."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def base_model(model: Any) -> Any:
    """The model of transformers that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Within the context others' code is tried on the CPU in float32, whatever the caller has set; nothing is drawn or recorded."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
