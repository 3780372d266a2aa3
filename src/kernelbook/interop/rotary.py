"""Rotary position embedding of transformers' models in one launch; :func:`kernelbook.nn.swap` puts it there.

transformers turns queries and keys in ten small kernels, each of which reads and writes all of them. Here one program turns
all heads of a token: ``q cos + rotated(q) sin`` with the two halves of a head's features as the pairs, computed in float32
and rounded once. Memory: q and k read and written once, cos and sin read once a token. The gradient is the same with the
transposed rotation. An attention class is taken by what its function of that name computes.
"""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from kernelbook import launching  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv

# isort: split
import triton
import triton.language as tl

__all__ = ["attentions", "rotate"]

FUNCTION = "apply_rotary_pos_emb"
BLOCK_H = 16


@triton.jit(do_not_specialize=["N"])
def _rotate_kernel(
    q_ptr, stride_qb, stride_qh, stride_qn,  # (B, HQ, N, D), features contiguous
    k_ptr, stride_kb, stride_kh, stride_kn,  # (B, HK, N, D), likewise
    cos_ptr, stride_cb, stride_cn,  # (B, N, D), likewise
    sin_ptr, stride_sb, stride_sn,  # (B, N, D), likewise
    q_out_ptr, stride_ob, stride_oh, stride_on,  # as q
    k_out_ptr, stride_pb, stride_ph, stride_pn,  # as k
    N, HQ, HK,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token, the queries' first. BACK: the transposed rotation."""
    token, block = tl.program_id(0), tl.program_id(1)
    b, n = (token // N).to(tl.int64), (token % N).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_d < HALF
    cos_ptrs = cos_ptr + b * stride_cb + n * stride_cn + offs_d
    sin_ptrs = sin_ptr + b * stride_sb + n * stride_sn + offs_d
    c1 = tl.load(cos_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    blocks_q = tl.cdiv(HQ, BLOCK_H)
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
    x_ptr, out_ptr, count = q_ptr + b * stride_qb + n * stride_qn, q_out_ptr + b * stride_ob + n * stride_on, HQ
    stride_xh, stride_yh = stride_qh, stride_oh
    if block >= blocks_q:
        heads -= blocks_q * BLOCK_H
        x_ptr, out_ptr, count = k_ptr + b * stride_kb + n * stride_kn, k_out_ptr + b * stride_pb + n * stride_pn, HK
        stride_xh, stride_yh = stride_kh, stride_ph
    mask = (heads < count)[:, None] & inside[None, :]
    x_ptrs = x_ptr + heads.to(tl.int64)[:, None] * stride_xh + offs_d[None, :]
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        y1, y2 = x1 * c1 + x2 * s2, x2 * c2 - x1 * s1
    else:
        y1, y2 = x1 * c1 - x2 * s1, x2 * c2 + x1 * s2
    out_ptrs = out_ptr + heads.to(tl.int64)[:, None] * stride_yh + offs_d[None, :]
    tl.store(out_ptrs, y1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + HALF, y2.to(out_ptr.dtype.element_ty), mask=mask)


_launch = functools.cache(Launch)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(results: tuple[torch.Tensor, ...], q: Any, k: Any, cos: Any, sin: Any, back: bool) -> None:
    q_out, k_out = results
    q, k, cos, sin = map(_rows, (q, k, cos, sin))
    batch, heads, n, size = q.shape
    cos, sin = (table.expand(batch, n, size) for table in (cos, sin))
    half = size // 2
    launch = _launch(_rotate_kernel, HALF=half, BLOCK_D=triton.next_power_of_2(half), BLOCK_H=BLOCK_H, BACK=back, num_warps=4)
    if batch * n:
        launch(
            (batch * n, cdiv(heads, BLOCK_H) + cdiv(k.shape[1], BLOCK_H)),
            q, *q.stride()[:3], k, *k.stride()[:3], cos, *cos.stride()[:2], sin, *sin.stride()[:2],
            q_out, *q_out.stride()[:3], k_out, *k_out.stride()[:3],
            n, heads, k.shape[1],
        )  # fmt: skip


def _outputs(q: torch.Tensor, k: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order of dimensions that q and k have in memory, with contiguous features."""
    return tuple(torch.empty_like(_rows(x)) for x in (q, k))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_rotate(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


_rotate = launching.operator(
    "rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
    outputs=_outputs,
    run=_run,
    setup_context=_setup,
    backward=_backward,
)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' function of the name :data:`FUNCTION` computes, for q (B, HQ, N, D), k (B, HK, N, D), tables (B or 1, N, D)."""
    q, k = _rotate(q, k, cos, sin, False)
    return q, k


def _is_rotation(function: Any) -> bool:
    """Whether the function turns the two halves of each head's features against each other, called with four tensors."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        q, k, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
        try:
            found = function(q, k, cos, sin)
        except Exception:  # whatever a function raises that has other arguments
            return False

    def expected(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return all(
        isinstance(out, torch.Tensor) and out.shape == x.shape and torch.allclose(out, expected(x), atol=1e-5)
        for out, x in zip(found, (q, k), strict=True)
    )


def _with_kernel(kind: type[torch.nn.Module]) -> type[torch.nn.Module] | None:
    """The attention class with :func:`rotate` in the place of its module's function; ``None`` where that cannot be."""
    forward: Any = kind.forward
    names = getattr(forward, "__globals__", {})
    if inspect.unwrap(forward) is not forward or FUNCTION not in forward.__code__.co_names or FUNCTION not in names:
        return None
    calls = inspect.getsource(forward).count(f"{FUNCTION}(query_states, key_states, cos, sin)")
    if calls != 1 or not _is_rotation(names[FUNCTION]):
        return None
    own = types.FunctionType(forward.__code__, {**names, FUNCTION: rotate}, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": own, "__module__": __name__})


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, type[torch.nn.Module]]]:
    """The attention modules of ``model`` that turn queries and keys so: name, module, and its class on the kernel."""
    kinds: dict[type, type | None] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__ == __name__:
            continue
        if kind not in kinds:
            kinds[kind] = _with_kernel(kind)
        new = kinds[kind]
        if new is not None:
            yield name, module, new
