"""The kernels between the collectives, several ranks in one process, in whole numbers: every bit has to be right."""

import kernelbook  # noqa: F401

# isort: split
import pytest
import ranks_in_one_process as ranks
import torch

from kernelbook import runtime
from kernelbook.distributed import exchange, kernels


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several tiles, the last not full, and tokens of several blocks."""
    monkeypatch.setattr(kernels, "BLOCK_H", 16)
    monkeypatch.setattr(kernels, "WARPS", 4)


def _inputs(tokens: list[int], hidden: int, slots: int, experts: int, outside: bool) -> tuple[list[torch.Tensor], ...]:
    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, device=runtime.DEVICE).float()

    xs, grads = ([whole(t, hidden) for t in tokens] for _ in range(2))
    gates = [whole(t, slots) for t in tokens]
    ids = [torch.rand(t, experts, device=runtime.DEVICE).argsort(1)[:, :slots].to(torch.int32) for t in tokens]
    if outside:  # slots to skip, on both sides
        ids = [i.masked_fill(torch.rand(i.shape, device=i.device) < 0.2, -1) for i in ids]
        ids = [i.masked_fill(torch.rand(i.shape, device=i.device) < 0.2, experts) for i in ids]
    return xs, gates, ids, grads


CASES = (
    ([5, 5, 5], 40, 3, 7, 3, True),  # the last rank has fewer experts
    ([4, 4], 16, 2, 4, 2, False),
    ([6, 6, 6], 33, 1, 3, 1, True),
    ([3, 0, 9], 24, 2, 6, 2, True),  # ranks that bring different numbers of tokens
)


def _assert_same(found: ranks.Passed, expected: ranks.Passed) -> None:
    for name, ours, true in zip(found._fields, found, expected, strict=True):
        for rank, (a, b) in enumerate(zip(ours, true, strict=True)):
            assert torch.equal(a, b), (name, rank)


@pytest.mark.parametrize(("tokens", "hidden", "slots", "experts", "share", "outside"), CASES)
def test_messages(tokens: list[int], hidden: int, slots: int, experts: int, share: int, outside: bool) -> None:
    inputs = _inputs(tokens, hidden, slots, experts, outside)
    _assert_same(ranks.by_messages(*inputs, experts, share), ranks.reference(*inputs, experts))


@pytest.mark.unwatched  # the windows are no tensors of the launch
@pytest.mark.parametrize(("tokens", "hidden", "slots", "experts", "share", "outside"), CASES)
def test_windows(tokens: list[int], hidden: int, slots: int, experts: int, share: int, outside: bool) -> None:
    inputs = _inputs(tokens, hidden, slots, experts, outside)
    _assert_same(ranks.by_windows(*inputs, experts, share), ranks.reference(*inputs, experts))


def test_places_of_more_tokens_than_a_block_has() -> None:
    """4,096 slots a step: places and pairs go on where the step before left off."""
    ids = torch.randint(-1, 5, (1500, 4), device=runtime.DEVICE, dtype=torch.int32)
    counts = torch.empty(2, 2, dtype=torch.int32, device=ids.device)
    places, firsts = exchange._place(ids, 4, 2, 2, counts)
    for rank in range(2):
        here = ((ids >= 2 * rank) & (ids < 2 * rank + 2)).sum(1)
        goes = here > 0
        assert torch.equal(places[:, rank], torch.where(goes, goes.cumsum(0) - 1, -1).int())
        assert torch.equal(firsts[:, rank], (here.cumsum(0) - here).int())
        assert counts[rank].tolist() == [int(goes.sum()), int(here.sum())]


def test_slots_for_this_ranks_experts_among_everybodys() -> None:
    """Ids of all experts, and of none, in more slots than a program has."""
    tokens, slots, experts, first, own = 400, 3, 7, 2, 3
    x, gates = torch.randn(tokens, 8, device=runtime.DEVICE), torch.rand(tokens, slots, device=runtime.DEVICE)
    for last in (experts, first + own - 1):  # some of this rank's experts do not exist
        message = exchange._Message.empty(tokens, x, gates)
        message.weights.copy_(gates)
        message.ids[:, :slots] = torch.randint(-2, experts + 3, (tokens, slots), device=x.device)
        weights, ids = exchange._own(message, first, own, last)
        there = message.ids[:, :slots]
        mine = (there >= first) & (there < min(first + own, last))
        assert torch.equal(weights, gates) and torch.equal(ids, torch.where(mine, there - first, own))
