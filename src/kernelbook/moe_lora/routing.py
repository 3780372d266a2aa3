"""Which token goes to which expert: the permutation that sorts routed tokens by expert, and the tiles that kernels work on."""

from typing import NamedTuple

import torch

from kernelbook import arguments  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import empty
from kernelbook.moe_lora import kernels
from kernelbook.operators import Op

MAX_ROWS = 2**30


class Routing(NamedTuple):
    """Which token goes to which expert, sorted by expert. Made by :func:`route`; R = T k.

    Attributes:
        expert_ids: (T, k), as given.
        lists: int32, the three lists below one behind the other, and the tiles that the kernels' programs work on, see
            ``kernels.py``; as one tensor they cost the host one allocation.
        num_experts: E.
    """

    expert_ids: torch.Tensor
    lists: torch.Tensor
    num_experts: int

    @property
    def slots(self) -> int:
        """k, the experts of a token (top_k)."""
        return self.expert_ids.shape[1]

    @property
    def rows(self) -> int:
        """R, the routed tokens."""
        return self.expert_ids.numel()

    @property
    def order(self) -> torch.Tensor:
        """(R,) int32, the permutation: the pair t*k + j at each sorted position; stable, slots to skip at the end."""
        return self.lists[: self.rows]

    @property
    def inverse(self) -> torch.Tensor:
        """(R,) int32, the sorted position of each pair."""
        return self.lists[self.rows : 2 * self.rows]

    @property
    def offsets(self) -> torch.Tensor:
        """(E + 1,) int32, the first sorted position of each expert; the last entry counts the rows not skipped."""
        return self.lists[2 * self.rows : 2 * self.rows + self.num_experts + 1]


def route(expert_ids: torch.Tensor, num_experts: int) -> Routing:
    """Sort the (token, slot) pairs by expert; without a host synchronisation.

    Args:
        expert_ids: (T, k) int64 or int32, any strides, entries in [0, E]; E marks a slot to skip, whose output row is
            zero. On the CPU and under ``KERNELBOOK_DEBUG=1`` the ids are checked; on a GPU without it an id out of range
            counts as a slot to skip.
        num_experts: E.

    Returns:
        The routing that :func:`scatter2scatter` and :func:`moe_lora` take; it can be used many times.

    Raises:
        TypeError: ``expert_ids`` is not a tensor of int64 or int32, or ``num_experts`` no integer.
        ValueError: a shape or (where they are checked) an id is not as above.
    """
    num_experts = arguments.integer("route", "num_experts", num_experts)
    return Routing(expert_ids, _route(expert_ids, num_experts), num_experts)


def _check(expert_ids: torch.Tensor, num_experts: int) -> None:
    arguments.check_tensor("route", "expert_ids", expert_ids, dtypes=(torch.int64, torch.int32), dims=2)
    arguments.integer("route", "num_experts", num_experts, least=1)


class _Plan(NamedTuple):
    launch_count: Launch | None  # where several programs share the pairs
    launch_place: Launch
    per_program: int
    counts_shape: tuple[int, int]  # (programs, BLOCK_E)


def _plan(expert_ids: torch.Tensor, experts: int) -> _Plan | None:
    rows = expert_ids.numel()
    if rows >= MAX_ROWS:
        raise ValueError(f"route: expert_ids must have fewer than 2^30 entries, got {rows}")
    if rows == 0:
        return None
    programs, block_e, block_p = kernels.route_blocks(rows, experts)
    block, warps = kernels.ROUTE_BLOCK, kernels.ROUTE_WARPS
    count = launcher(kernels._route_fwd_count_kernel, BLOCK=block, BLOCK_E=block_e, num_warps=warps)
    place = launcher(
        kernels._route_fwd_place_kernel, COUNTED=programs > 1, HEIGHTS=kernels.HEIGHTS, BLOCK=block, BLOCK_E=block_e,
        BLOCK_P=block_p, num_warps=warps,
    )  # fmt: skip
    per_program = cdiv(cdiv(rows, programs), block) * block
    return _Plan(count if programs > 1 else None, place, per_program, (programs, block_e))


def _run(plan: _Plan, outputs: tuple[torch.Tensor], expert_ids: torch.Tensor, experts: int) -> None:
    [lists], counts = outputs, None
    arguments.check_index_values("route", "expert_ids", expert_ids, experts + 1)
    grid = plan.counts_shape[:1]
    sizes = (expert_ids.numel(), expert_ids.shape[1], experts, plan.per_program)
    if plan.launch_count is not None:
        counts = empty(plan.counts_shape, torch.int32, expert_ids)
        plan.launch_count(grid, expert_ids, *expert_ids.stride(), counts, *sizes)
    plan.launch_place(grid, expert_ids, *expert_ids.stride(), counts, lists, *sizes)


def _capacity(rows: int, experts: int, height: int) -> int:
    """No routing needs more tiles of this height: each group but the empty ones has one that is not full."""
    least = min if type(rows) is int and type(experts) is int else torch.sym_min
    return rows // height + least(experts + 1, rows)


def tiles_of_height(rows: int, experts: int, height: int) -> tuple[int, int]:
    """Return where in a routing's lists the tiles of this height begin, and how many there can be."""
    before = sum(_capacity(rows, experts, h) for h in kernels.HEIGHTS if h < height)
    return 2 * rows + experts + 1 + 3 * before, _capacity(rows, experts, height)


def _outputs(expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor]:
    length, _ = tiles_of_height(expert_ids.numel(), experts, 1 + max(kernels.HEIGHTS))
    return (empty((length,), torch.int32, expert_ids),)


_route = Op(
    "route(Tensor expert_ids, SymInt experts) -> Tensor lists",
    check=_check,
    outputs=_outputs,
    plan=_plan,
    run=_run,
)
