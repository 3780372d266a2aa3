"""Random numbers that follow from what they are for, and from nothing that came before."""

import hashlib

import torch


def generator(*what: int | str) -> torch.Generator:
    """Return a generator on the CPU for ``what``, such as ``("batch", seed, step)``; others for others.

    PyTorch's generator on the CPU looks at 32 bits of its seed only, so that numbers put beside each other would collide.
    """
    digest = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
