"""Chunks of the layers of a model: their gradients' norms, prediction by neighbours, and the choice of the largest.

The launches of :mod:`kernelbook.train.kernels`. None of them synchronises with the host. What each computes is said in
plain PyTorch by the function of the same name with ``_reference``.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import cdiv, launcher
from kernelbook.train import kernels

# isort: split
import triton

EPS = 1e-6  # of a neighbour's weight


def int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=runtime.DEVICE)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chunks of several layers, one layer after the other, and how many of each may be active.

    Args:
        counts: chunks of each layer.
        active: how many of them are to be active, at least 1 and at most as many as there are.

    Raises:
        ValueError: there is no layer, the lengths differ, or a number is out of range.
    """

    counts: tuple[int, ...]
    active: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.active):
            raise ValueError(
                f"Layout: counts and active must have one entry for each layer, got {len(self.counts)} and {len(self.active)}"
            )
        for count, active in zip(self.counts, self.active, strict=True):
            if not 1 <= active <= count:
                raise ValueError(f"Layout: active must lie in [1, {count}] for a layer of {count} chunks, got {active}")

    @classmethod
    def of_fraction(cls, counts: Sequence[int], fraction: float) -> "Layout":
        """``fraction`` of each layer's chunks, rounded, at least one."""
        if not 0 < fraction <= 1:
            raise ValueError(f"Layout: fraction must lie in (0, 1], got {fraction!r}")
        return cls(tuple(counts), tuple(max(1, round(fraction * count)) for count in counts))

    @property
    def total(self) -> int:
        """Chunks of all layers."""
        return sum(self.counts)

    @property
    def total_active(self) -> int:
        """Active chunks of all layers."""
        return sum(self.active)

    def starts(self) -> torch.Tensor:
        """(L + 1,) int32: the first chunk of each layer, and the end of the last."""
        return int32([0, *itertools.accumulate(self.counts)])

    def slots(self, skip: Sequence[int] | None = None) -> torch.Tensor:
        """(L,) int32: where the ids of each layer begin, after the first ``skip`` of them."""
        begins = [0, *itertools.accumulate(self.active)][:-1]
        return int32([b + s for b, s in zip(begins, skip or [0] * len(begins), strict=True)])

    def layer_of_slot(self) -> torch.Tensor:
        """(total_active,) int64: the layer of each place in ids."""
        with runtime.DEVICE:
            return torch.repeat_interleave(torch.arange(len(self.active)), torch.tensor(self.active))

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(total_active,) -> for each layer its (A,), views."""
        return ids.split(list(self.active))


# --- norms ----------------------------------------------------------------------------------------------------------


def chunk_norms(grad: torch.Tensor, *, chunk_size: int = 64, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the Euclidean norm of each chunk of rows of a gradient.

    Of the compact gradient of A active chunks it reads what was just written, and nothing of the inactive ones.

    Args:
        grad: (N,) or (N, D), any floating-point dtype but float64; a vector counts as N rows of one.
        chunk_size: rows in a chunk; the last may be shorter.
        out: (ceil(N / chunk_size),) float32 to write to.

    Returns:
        (ceil(N / chunk_size),) float32.

    Raises:
        TypeError: ``grad`` is no tensor of such a dtype.
        ValueError: a shape is not as above.
    """
    op = "chunk_norms"
    arguments.check_tensor(op, "grad", grad, dtypes=(torch.float16, torch.bfloat16, torch.float32))
    if grad.ndim not in (1, 2):
        raise ValueError(f"{op}: grad must have one or two dimensions, got shape {tuple(grad.shape)}")
    chunk_size = arguments.integer(op, "chunk_size", chunk_size, least=1)
    grad = (grad if grad.ndim == 2 else grad[:, None]).detach()
    rows, d = grad.shape
    chunks = cdiv(rows, chunk_size)
    if out is not None:
        arguments.check_shape(op, "out", out, (chunks,))
    if rows == 0 or d == 0:
        zeros = torch.zeros(chunks, dtype=torch.float32, device=grad.device)
        return zeros if out is None else out.copy_(zeros)
    norms = torch.empty(chunks, dtype=torch.float32, device=grad.device) if out is None else out
    whole = rows // chunk_size
    for part, norm in ((grad[: whole * chunk_size], norms[:whole]), (grad[whole * chunk_size :], norms[whole:])):
        if norm.numel():
            of_chunks = part.unflatten(0, (norm.shape[0], -1))
            torch.linalg.vector_norm(of_chunks, dim=(1, 2), dtype=torch.float32, out=norm)
    return norms


def chunk_norms_reference(grad: torch.Tensor, *, chunk_size: int = 64) -> torch.Tensor:
    """:func:`chunk_norms` in plain PyTorch."""
    rows = grad.reshape(grad.shape[0], -1)
    return torch.stack([part.norm() for part in rows.split(chunk_size)])


# --- prediction by neighbours ---------------------------------------------------------------------------------------


def knn_scores(
    features: torch.Tensor,
    norms: torch.Tensor,
    seen: torch.Tensor,
    step: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    window: int,
    k: int = 4,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the norm of each chunk: as observed if that was lately, else as its nearest neighbours among those that were.

    The prediction is the mean of the ``k`` nearest lately observed chunks of the same layer, weighted by
    ``1 / (squared distance + 1e-6)``. Without any it is what was observed longer ago; infinite for what never was.

    Args:
        features: (R, N) float32, a column for each chunk. norms: (N,) float32 as observed last.
        seen: (N,) int32, the step of that; negative for never. step: (1,) int32, now.
        starts: (L + 1,) int32 as of :meth:`Layout.starts`. longest: chunks of the largest layer, at most 4,096.
        window: how many steps ago counts as lately. out: (N,) float32 to write to, contiguous.

    Returns:
        (N,) float32.
    """
    n = norms.shape[0]
    if not 1 <= longest <= 4096:
        raise ValueError(f"knn_scores: longest must lie in [1, 4096], got {longest}")
    scores = torch.empty(n, device=norms.device, dtype=torch.float32) if out is None else out
    block_c = max(16, triton.next_power_of_2(longest))
    block_q = max(1, min(16, kernels.KNN_TILE // block_c))
    launch = launcher(
        kernels._knn_scores_kernel, K=k, EPS=EPS, BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=4, repeatable=True
    )
    launch(
        (cdiv(longest, block_q), starts.shape[0] - 1),
        features.contiguous(), norms.contiguous(), seen.contiguous(), step, scores, starts.contiguous(),
        n, features.shape[0], window,
    )  # fmt: skip
    torch.autograd.graph.increment_version(scores)
    return scores


def knn_scores_reference(
    features: torch.Tensor,
    norms: torch.Tensor,
    seen: torch.Tensor,
    step: torch.Tensor,
    starts: torch.Tensor,
    *,
    window: int,
    k: int = 4,
) -> torch.Tensor:
    """:func:`knn_scores` in plain PyTorch, one chunk after the other."""
    scores = norms.clone()
    fresh = (seen >= 0) & (step - seen <= window)
    for first, last in itertools.pairwise(starts.tolist()):
        for q in range(first, last):
            if fresh[q]:
                continue
            others = torch.arange(first, last, device=norms.device)
            others = others[fresh[others] & (others != q)]
            if len(others) == 0:
                scores[q] = norms[q] if seen[q] >= 0 else float("inf")
                continue
            distance = (features[:, others] - features[:, q, None]).square().sum(0)
            near = distance.sort(stable=True).indices[:k]
            weight = 1 / (distance[near] + EPS)
            scores[q] = (weight * norms[others[near]]).sum() / weight.sum()
    return scores


# --- the largest ----------------------------------------------------------------------------------------------------


def top_chunks(
    scores: torch.Tensor | None,
    ids: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    *,
    longest: int,
    taken: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
    step: torch.Tensor | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Write the ids of each layer's best chunks into ``ids``, best first; of equal ones the first.

    Args:
        scores: (N,) float32; NaN counts as infinite. ``None``: chunks are drawn at random, by ``seed`` and ``step``.
        ids: (total,) int64, written in place: for layer ``l`` from ``slots[l]`` on, ``counts[l]`` ids within the layer.
        starts: (L + 1,) int32. slots, counts: (L,) int32. longest: chunks of the largest layer.
        taken: (N,) int32, chunks that are not to be chosen where it is not zero; at least ``counts`` others must remain.
        chosen: (N,) int32, set to 1 where taken or chosen, else 0; another tensor than ``taken``. Given where ``scores`` is not.
        step: (1,) int32.

    Returns:
        ``chosen``.
    """
    if chosen is None:
        chosen = torch.empty_like(scores, dtype=torch.int32)  # type: ignore[arg-type]
    block = kernels.TOP_BLOCK
    launch = launcher(
        kernels._top_chunks_kernel, RANDOM=scores is None, HAS_TAKEN=taken is not None, BLOCK=block, num_warps=4
    )
    launch(
        (cdiv(longest, block), counts.shape[0]),
        scores if scores is not None else chosen,
        taken if taken is not None else chosen,
        chosen, ids, starts, slots, counts,
        step if step is not None else starts,
        seed, chosen.shape[0], longest,
    )  # fmt: skip
    torch.autograd.graph.increment_version((ids, chosen))
    return chosen


def top_chunks_reference(scores: torch.Tensor, counts: Sequence[int], active: Sequence[int]) -> torch.Tensor:
    """Return the ids that :func:`top_chunks` writes for all slots of a layout, in plain PyTorch."""
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    parts = scores.split(list(counts))
    return torch.cat([p.sort(descending=True, stable=True).indices[:a] for p, a in zip(parts, active, strict=True)])
