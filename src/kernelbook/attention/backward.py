"""The backward pass of attention: which kernels compute the gradients, their launches, and the operator."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernelbook.attention import kernels, launches
from kernelbook.attention.launches import Problem, Tiles, is_readable, kernel_arg, like, readable
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.memory import counters, empty, tl_accumulator
from kernelbook.operators import Op

__all__ = ["attention_backward"]


NO_DQ = (None,) * 3  # the arguments of a kernel for Hopper that say where dq goes, where it does not compute dq


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GradientKernels:
    dkdv: Tiles
    dq: Tiles | tuple[int, int]  # tiles of dq and their size: the kernel for dk and dv adds dq up too, in float32
    n_padded: int  # rows that the kernels want of lse and delta
    splits: int  # so many programs share the query heads of one key head; each has dk and dv of its own


def choose_kernels(p: Problem) -> GradientKernels:
    at_once = None if p.packed or (p.causal and p.s < p.n) else _all_gradients(p)
    if at_once is not None:
        return at_once
    n_padded, splits, config = p.n, 1, launches.hopper_config("dkdv", p)
    if config is None:
        dkdv = launches.plain_tiles("dkdv", kernels._flash_attention_bwd_dkdv_kernel, p, p.s, p.h_kv, p.n, n_padded)
    else:
        hopper = launches.kernels_hopper
        n_padded = cdiv(p.n, hopper.PADDING) * hopper.PADDING
        splits = hopper.parts(p.b * p.h_kv, p.s, p.group, p.d, p.properties.num_sms)
        kernel, heads = hopper._flash_attention_bwd_hopper_kernel, p.h_kv * splits
        rows = config.kwargs["ROWS"] * (2 if config.kwargs["BLOCK_D"] <= 128 else 1)
        grid, sizes = cdiv(p.s, rows) * p.b * heads, (n_padded, launches.section(p, p.n, heads))
        dkdv = launches.hopper_tiles(kernel, config, p, grid, sizes, D=p.d, PARTS=splits, RAGGED=False)
    config = launches.hopper_config("dq", p)
    if config is None:
        dq = launches.plain_tiles("dq", kernels._flash_attention_bwd_dq_kernel, p, p.n, p.h, p.s, n_padded)
    else:
        kernel = launches.kernels_hopper._flash_attention_bwd_dq_hopper_kernel
        grid, sizes = cdiv(p.n, 2 * config.kwargs["ROWS"]) * p.b * p.h, (n_padded, launches.section(p, p.s, p.h))
        dq = launches.hopper_tiles(kernel, config, p, grid, sizes)
    return GradientKernels(dkdv, dq, n_padded, splits)


def _all_gradients(p: Problem) -> GradientKernels | None:
    """One kernel for dq, dk and dv; ``None`` where two are to be used."""
    config = launches.hopper_config("bwd", p)
    if config is None:
        return None
    hopper, num_sms = launches.kernels_hopper, p.properties.num_sms
    block_m, block_n, width = config.kwargs["BLOCK_M"], 2 * config.kwargs["ROWS"], config.kwargs["BLOCK_D"]
    splits = hopper.parts(p.b * p.h_kv, p.s, p.group, p.d, num_sms)
    heads, members = p.b * p.h_kv * splits, p.group // splits
    fitting = kernels.section(p.n, heads, p.d, p.dtype.itemsize, True, p.properties)
    section = hopper.all_gradients_section(heads, fitting, p.causal, num_sms)
    if not hopper.programs_wait_little(heads, p.n, p.s, members, p.causal, section, block_m, num_sms):
        return None
    tiles = p.b * p.h * cdiv(p.n, block_m)
    n_padded = cdiv(p.n, hopper.PADDING) * hopper.PADDING
    dkdv = launches.hopper_tiles(
        hopper._flash_attention_bwd_hopper_kernel, config, p, cdiv(p.s, block_n) * heads, (n_padded, section),
        D=p.d, PARTS=splits, RAGGED=not p.causal and p.s % block_n > 0,
    )  # fmt: skip
    return GradientKernels(dkdv, (tiles, block_m * width), n_padded, splits)


# --- the operator ---------------------------------------------------------------------------------------------------


def _outputs(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """-> dq, dk, dv and dsinks, like q, k, v and sinks."""
    return like(q), like(k), like(v), None if sinks is None else empty(sinks.shape, sinks.dtype, sinks)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BackwardPlan:
    readable: bool  # kernels can read the tensors as they lie
    scaling: launches.Scaling
    delta: Launch
    delta_grid: tuple[int]
    copies: int  # of lse and delta
    dsinks: Launch
    kernels: GradientKernels


def _plan(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, sinks: Any, lengths: Any, cu_seqlens: Any,
    causal: bool, scale: Any, window: Any, softcap: Any, gluon: bool,
) -> BackwardPlan | None:  # fmt: skip
    if k.numel() == 0 or o.numel() == 0:
        return None
    p = launches.problem(q, k, lengths, sinks, causal, window, softcap, cu_seqlens=cu_seqlens)
    chosen = choose_kernels(launches.with_tma(p, gluon, (q, k, v, do), (q, k, v)))
    padded = chosen.dkdv.vectors is not None
    copies = launches.kernels_hopper.COPIES.value if padded and p.packed else 1
    config, acc, scaling = kernels.DELTA_CONFIG, tl_accumulator(p.dtype), launches.scaling(q, scale)
    delta = launcher(
        kernels._flash_attention_bwd_delta_kernel, D=p.d, ACC=acc, PADDED=padded, COPIES=copies,
        BLOCK_D=kernels.block_d(p.d), **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    delta_grid = (cdiv(chosen.n_padded, config.kwargs["BLOCK_M"]) * p.b * p.h,)
    config, kernel = kernels.DSINKS_CONFIG, kernels._flash_attention_bwd_sinks_kernel
    dsinks = launcher(kernel, ACC=acc, **config.kwargs, num_warps=config.num_warps)
    # A hook of saved tensors may have brought an lse with other strides.
    as_they_lie = scaling.queries == 1 and lse.is_contiguous() and all(map(is_readable, (do, q, k, v, o)))
    return BackwardPlan(as_they_lie, scaling, delta, delta_grid, copies, dsinks, chosen)


def _run(
    plan: BackwardPlan, outputs: tuple[Any, ...], do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    sinks: Any, lengths: Any, cu_seqlens: Any, *_: Any,
) -> None:  # fmt: skip
    (b, h, n), (h_kv, s, d), (dq, dk, dv, dsinks) = q.shape[:3], k.shape[1:], outputs
    scaling, dkdv, splits, n_padded = plan.scaling, plan.kernels.dkdv, plan.kernels.splits, plan.kernels.n_padded
    q = scaling.scale_queries(q)
    if not plan.readable:
        do, q, k, v, o = map(readable, (do, q, k, v, o))
        lse = lse.contiguous()
    rows = plan.copies * (b * h * n_padded + 1)
    delta = empty((rows,), lse.dtype, q)
    padded = lse if dkdv.vectors is None else empty((rows,), lse.dtype, q)
    plan.delta(plan.delta_grid, kernel_arg(None, o), kernel_arg(None, do), lse, delta, padded, h, n, n_padded)
    if sinks is not None:
        plan.dsinks((h,), padded, delta, sinks, *sinks.stride(), dsinks, b, h, n_padded)

    def launch(tiles: Tiles, *results: Any) -> None:
        vectors: Any = padded, delta
        if tiles.vectors is not None:
            vectors = kernel_arg(tiles.vectors, padded), kernel_arg(tiles.vectors, delta)
        tiles.launch(
            tiles.grid, kernel_arg(tiles.queries, q), kernel_arg(tiles.keys, k), kernel_arg(tiles.keys, v),
            kernel_arg(tiles.queries, do), *vectors, *results,
            *tiles.sizes, *tiles.mask_args(lengths, cu_seqlens, padded), scaling.scores, scaling.gradients,
        )  # fmt: skip

    to_dk, to_dv, to_dq = dk, dv, plan.kernels.dq
    if splits > 1:
        to_dk, to_dv = (empty((b, h_kv * splits, s, d), t.dtype, t) for t in (k, v))
    results = kernel_arg(dkdv.results, to_dk), kernel_arg(dkdv.results, to_dv)
    if isinstance(to_dq, tuple):
        launch(dkdv, *results, kernel_arg(None, dq), empty(to_dq, lse.dtype, q), counters(to_dq[0], q.device))
    else:
        launch(dkdv, *results, *(NO_DQ if dkdv.window is None else ()))
        launch(to_dq, kernel_arg(to_dq.results, dq))
    if splits > 1:
        for result, parts in ((dk, to_dk), (dv, to_dv)):
            torch.sum(parts.unflatten(1, (h_kv, splits)), 2, out=result)
    if scaling.dq != 1:
        dq *= scaling.dq
    if scaling.dk != 1:
        dk *= scaling.dk


attention_backward = Op(
    "flash_attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? sinks, "
    "Tensor? lengths, Tensor? cu_seqlens, bool causal, float? scale, SymInt? window, float? softcap, bool gluon) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    check=lambda *_: None,
    outputs=_outputs,
    plan=_plan,
    run=_run,
    results=4,
)
