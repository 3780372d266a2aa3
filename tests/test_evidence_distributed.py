"""The kernels between the collectives, several ranks in one process, in whole numbers: every bit has to be right."""

import kernelbook  # noqa: F401

# isort: split
from collections.abc import Callable, Iterator

import pytest
import ranks_in_one_process as ranks
import torch

from kernelbook import runtime
from kernelbook.distributed import exchange, kernels


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of several tiles, the last not full, tokens of several blocks, and memory that nobody set full of NaN."""
    monkeypatch.setattr(kernels, "BLOCK_H", 16)
    monkeypatch.setattr(kernels, "WARPS", 4)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _inputs(tokens: list[int], hidden: int, slots: int, experts: int, outside: bool) -> tuple[list[torch.Tensor], ...]:
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, device=runtime.DEVICE).float()

    xs = [whole(t, hidden) * 1025 for t in tokens]  # too many bits for float16
    grads = [whole(t, hidden) for t in tokens]
    gates = [whole(t, slots) for t in tokens]
    ids = [torch.rand(t, experts, device=runtime.DEVICE).argsort(1)[:, :slots].to(torch.int32) for t in tokens]
    if outside:  # slots to skip, on both sides
        for other in (-1, experts):
            ids = [i.masked_fill(torch.rand(i.shape, device=i.device) < 0.2, other) for i in ids]
        ids[0][0, 0], ids[-1][-1, -1] = -99, 99
    return xs, gates, ids, grads


CASES = (
    ([3, 3], 17, 5, 7, 4, True),  # the last rank has fewer experts
    ([2, 2], 17, 3, 3, 2, False),  # every token to every rank
    ([1, 1], 16, 2, 4, 2, False),
    ([2, 3, 3], 33, 1, 3, 1, True),
    ([3, 0, 5], 24, 2, 6, 2, True),  # ranks that bring different numbers of tokens
)


@pytest.mark.parametrize("by", (ranks.by_messages, ranks.by_windows), ids=("messages", "windows"))
@pytest.mark.parametrize(("tokens", "hidden", "slots", "experts", "share", "outside"), CASES)
def test_there_and_back(
    tokens: list[int], hidden: int, slots: int, experts: int, share: int, outside: bool, by: Callable[..., ranks.Passed]
) -> None:
    inputs = _inputs(tokens, hidden, slots, experts, outside)
    expected = ranks.reference(*inputs, experts)
    for name, ours, true in zip(expected._fields, by(*inputs, experts, share), expected, strict=True):
        for rank, (a, b) in enumerate(zip(ours, true, strict=True)):
            assert torch.equal(a, b), (name, rank)


def test_places_of_more_tokens_than_a_block_has() -> None:
    """4,096 slots a step: places and pairs go on where the step before left off."""
    ids = torch.randint(-1, 5, (1500, 4), device=runtime.DEVICE, dtype=torch.int32)
    counts = torch.empty(2, 2, dtype=torch.int32, device=ids.device)
    places, firsts = exchange._place(ids, 3, 2, 2, counts)
    for rank in range(2):
        here = ((ids >= 2 * rank) & (ids < min(2 * rank + 2, 3))).sum(1)
        goes = here > 0
        assert torch.equal(places[:, rank], torch.where(goes, goes.cumsum(0) - 1, -1).int())
        assert torch.equal(firsts[:, rank], (here.cumsum(0) - here).int())
        assert counts[rank].tolist() == [int(goes.sum()), int(here.sum())]
