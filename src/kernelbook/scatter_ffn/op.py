"""The public functions in the order of a call: observed or not, plan, new memory, launches; then the gradients the same way."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import (
    Launch,
    are_tensors,
    cdiv,
    composite,
    form,
    is_aligned,
    launcher,
    observed,
    operator,
    sources,
    wants_gradient,
)
from kernelbook.memory import accumulator, empty, tl_accumulator
from kernelbook.plans import KeptPlans
from kernelbook.scatter_ffn import kernels
from kernelbook.tensors import has_aligned_rows, matrix, strided

__all__ = ["ACTIVATIONS", "gather_matmul", "scatter_ffn"]

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")
PRECISION = "ieee"  # of float32 in tiles, which only tests multiply so: it is left to cuBLAS


def gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, *, activation: str | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``act(x weight[rows]^T + bias[rows])`` without copying the rows together; differentiable.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), the dtype of ``x``, any strides; wide loads need contiguous rows.
        rows: (L,) int64 or int32 ids in [0, N), in any order; one that is listed twice gives two columns. On the CPU and
            under ``KERNELBOOK_DEBUG=1`` they are checked; on a GPU without it an id out of range stands for a row of zeros
            (and a bias of zero).
        activation: ``"relu"``, ``"leaky_relu"`` (slope 0.01), ``"gelu"`` (with erf), ``"gelu_tanh"`` (the approximation that
            GPT-2 uses), ``"silu"``, or ``None``.
        bias: (N,), the dtype of ``x``, or ``None``.

    Returns:
        (..., L) in the dtype of ``x``; sums are in float32 and rounded once. Under autocast in its dtype.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``activation`` or (where they are checked) an id is not as above.
    """
    if is_dynamo_compiling() and are_tensors(x, weight, rows, bias):
        return _gather_whole(x, weight, rows, activation, bias, SOURCES)  # type: ignore[no-any-return]
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    if observed(x, weight, rows, bias):
        _check_gather(x, weight, rows, activation, bias)
        return _gather_operator(x, weight, bias, rows, activation or "none")  # type: ignore[no-any-return]
    plan = _gather_plan(x, weight, bias, rows, activation)
    if wants_gradient(x, weight, bias):
        return _Gather.apply(x, weight, bias, rows, plan)  # type: ignore[no-any-return]
    return _gather(plan, x, weight, bias, rows)


def scatter_ffn(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, neurons: torch.Tensor | None, *,
    w_gate: torch.Tensor | None = None, activation: str = "relu", deterministic: bool = False,
    b_up: torch.Tensor | None = None, b_gate: torch.Tensor | None = None, b_down: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A feed-forward block of which only the listed neurons are computed; differentiable.

    ``h = act(x w_up[neurons]^T + b_up[neurons])``, or with a gate
    ``h = act(x w_gate[neurons]^T + b_gate[neurons]) * (x w_up[neurons]^T + b_up[neurons])``; then ``h w_down[neurons] + b_down``.
    Each weight matrix has one row a neuron, and the rows of other neurons are not read. The idea of choosing neurons by the
    input is from Liu et al., "Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time" (2023), section 3.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        w_up: (N, K).
        w_down: (N, K_out): the transpose of what ``torch.nn.Linear`` stores. The dtype of ``x``, any strides;
            wide loads need contiguous rows.
        neurons: (L,) int64 or int32 ids in [0, N), in any order. A neuron that is listed twice counts twice. On the CPU and
            under ``KERNELBOOK_DEBUG=1`` they are checked; on a GPU without it an id out of range counts as no neuron.
            ``None``: every neuron, as a dense network (three calls of PyTorch).
        w_gate: (N, K) or ``None``.
        activation: ``"relu"``, ``"leaky_relu"`` (slope 0.01), ``"gelu"`` (with erf), ``"gelu_tanh"`` (the approximation that
            GPT-2 uses) or ``"silu"``.
        deterministic: ask for the same bits in every run. All kernels that the rules choose give them anyway, without atomic
            additions of floating-point numbers, so this and ``torch.use_deterministic_algorithms`` change nothing here.
        b_up, b_gate: (N,) or ``None``.
        b_down: (K_out,) or ``None``.

    Returns:
        (..., K_out) in the dtype of ``x``, summed in float32 and rounded once; h is rounded to the dtype of ``x`` between the
        products, as in PyTorch. Under autocast in its dtype. Gradients of the weights have zeros in rows of neurons that are
        not listed. ``plan`` in the room's
        ``kernels.py`` says which kernels run for which shape.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``activation`` or (where they are checked) an id is not as above.
    """
    if is_dynamo_compiling() and are_tensors(x, w_up, w_down, neurons, w_gate, b_up, b_gate, b_down):
        given = x, w_up, w_down, neurons, w_gate, activation, deterministic, b_up, b_gate, b_down
        return _ffn_whole(*given, SOURCES)  # type: ignore[no-any-return]
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = arguments.in_autocast_dtype(
        x, w_up, w_down, w_gate, b_up, b_gate, b_down
    )
    network = (x, w_up, w_down, w_gate, b_up, b_gate, b_down)
    if observed(*network, neurons):
        _check_ffn(*network, neurons, activation)
        if neurons is not None:
            return _ffn_operator(*network, neurons, activation, bool(deterministic))  # type: ignore[no-any-return]
    else:
        plan = _ffn_plan(*network, neurons, activation)
        if neurons is not None:
            recorded = wants_gradient(*network)
            return _FFN.apply(*network, neurons, plan) if recorded else _ffn(plan, *network, neurons)  # type: ignore[no-any-return]
    return _dense(*network, activation)


def _dense(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, activation: str
) -> torch.Tensor:  # fmt: skip
    act = functools.partial(F.gelu, approximate="tanh") if activation == "gelu_tanh" else getattr(F, activation)
    up = F.linear(x, w_up, b_up)
    return F.linear(act(up) if w_gate is None else act(F.linear(x, w_gate, b_gate)) * up, w_down.t(), b_down)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_gather(x: Any, weight: Any, rows: Any, activation: str | None, bias: Any) -> None:
    op = "gather_matmul"
    arguments.check_linear(op, x, "weight", weight)
    _check_vectors(op, bias=(bias, weight.shape[0]))
    if activation is not None:
        arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    arguments.check_indices(op, "rows", rows)
    arguments.check_same_dtype(op, x=x, bias=bias)
    arguments.check_same_device(op, x=x, bias=bias, rows=rows)


def _check_ffn(
    x: Any, w_up: Any, w_down: Any, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, neurons: Any, activation: str
) -> None:
    op = "scatter_ffn"
    arguments.check_linear(op, x, "w_up", w_up)
    n = w_up.shape[0]
    arguments.check_tensor(op, "w_down", w_down)
    if w_down.ndim != 2 or w_down.shape[0] != n:
        raise ValueError(f"{op}: w_down must have shape ({n}, K_out), one row a neuron, got {tuple(w_down.shape)}")
    if w_gate is not None:
        arguments.check_tensor(op, "w_gate", w_gate)
        arguments.check_shape(op, "w_gate", w_gate, w_up.shape)
    _check_vectors(op, b_up=(b_up, n), b_gate=(b_gate, n), b_down=(b_down, w_down.shape[1]))
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{op}: b_gate must be None where w_gate is None, got a tensor")
    arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    if neurons is not None:
        arguments.check_indices(op, "neurons", neurons)
    floating = {"x": x, "w_down": w_down, "w_gate": w_gate, "b_up": b_up, "b_gate": b_gate, "b_down": b_down}
    arguments.check_same_dtype(op, **floating)
    arguments.check_same_device(op, **floating, neurons=neurons)


def _check_vectors(op: str, **vectors: tuple[Any, int]) -> None:
    for name, (value, size) in vectors.items():
        if value is not None:
            arguments.check_tensor(op, name, value)
            arguments.check_shape(op, name, value, (size,))


# --- plans ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Product:
    """A product with listed rows, up or down."""

    activation: str  # of ACTIVATIONS or "none"; down there is none
    launch: Launch | None = None  # None: rows are copied together for cuBLAS
    grid: tuple[int, ...] = ()
    split: int = 1  # parts of the reduction
    is_vector: bool = False  # or by tiles


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for a kind of forward pass."""

    activation: str
    shape: tuple[int, ...]  # of the result
    padded: int  # columns of h
    up: _Product
    down: _Product
    counters: int = 0  # of the down kernel, which the up kernel sets to zero


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass. Products are recomputed: they are cheap beside the weights' gradients."""

    activation: str
    padded: int
    wanted: tuple[bool, ...]  # gradients, in the order of the tensors
    up: _Product
    gate: _Product
    of_h: _Product  # its gradient is a product with the same rows that h is multiplied by
    dx: _Product
    dx_by_gate: _Product


_plans = KeptPlans[_Plan]()
_backward_plans = KeptPlans[_BackwardPlan]()


def _gather_plan(x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, activation: str | None) -> _Plan:
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    if type(activation) not in (str, NoneType):
        _check_gather(x, weight, rows, activation, bias)
    key = (form(x), form(weight), form(bias), form(rows), is_aligned(weight), activation, runtime.compile_target)
    plan = _plans.get(key)
    if plan is None:
        _check_gather(x, weight, rows, activation, bias)
        m, k, count, act = math.prod(x.shape[:-1]), x.shape[-1], rows.shape[0], activation or "none"
        up = _up(_cut(x, k, rows), m, count, weight, act, bias is not None)
        plan = _Plan(act, (*x.shape[:-1], count), _padded(count), up, _Product("none"))
        _plans.keep(key, plan)
    return plan


def _ffn_plan(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, rows: Any,
    activation: str,
) -> _Plan:  # fmt: skip
    """As :func:`_gather_plan`."""
    network = (x, w_up, w_down, w_gate, b_up, b_gate, b_down)
    if type(activation) is not str:
        _check_ffn(*network, rows, activation)
    forms = form(x), form(w_up), form(w_down), form(w_gate), form(b_up), form(b_gate), form(b_down), form(rows)
    key = (forms, is_aligned(w_up), is_aligned(w_down), activation, runtime.compile_target)
    plan = _plans.get(key)
    if plan is None:
        _check_ffn(*network, rows, activation)
        plan = _new_ffn_plan(*network, rows, activation)
        _plans.keep(key, plan)
    return plan


def _new_ffn_plan(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, rows: Any,
    activation: str,
) -> _Plan:  # fmt: skip
    m, k_out, count = math.prod(x.shape[:-1]), w_down.shape[1], 0 if rows is None else rows.shape[0]
    shape, padded = (*x.shape[:-1], k_out), _padded(count)
    if count == 0 or math.prod(shape) == 0:
        return _Plan(activation, shape, padded, _Product(activation), _Product("none"))
    cut = _cut(x, k_out, rows, gated=w_gate is not None)
    pdl = (cut.strategy == "vector" or count <= kernels.EARLY) and kernels.has_pdl(runtime.properties(x.device))
    down = _down(cut, m, w_down, b_down is not None, pdl)
    counters = down.grid[0] if down.split > 1 else 0
    biases = b_up is not None, b_gate is not None
    up = _up(cut, m, padded, w_up, activation, biases[0], w_gate is not None, biases[1], counters, pdl)
    return _Plan(activation, shape, padded, up, down, counters)


def _cut(x: torch.Tensor, k_out: int, rows: torch.Tensor, *, gated: bool = False) -> kernels.Plan:
    m, k, dtype = math.prod(x.shape[:-1]), x.shape[-1], str(x.dtype).removeprefix("torch.")
    return kernels.plan(m, k, k_out, rows.shape[0], dtype, gated, runtime.properties(x.device))


def _padded(count: int) -> int:
    return cdiv(count, kernels.PAD) * kernels.PAD


def _wide(weight: torch.Tensor) -> bool:
    """Whether rows are contiguous, begin on 16 bytes and end there."""
    return has_aligned_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0


def _up(
    cut: kernels.Plan, m: int, columns: int, weight: torch.Tensor, activation: str, has_bias: bool = False,
    gated: bool = False, has_gate_bias: bool = False, counters: int = 0, pdl: bool = False,
) -> _Product:  # fmt: skip
    if cut.strategy == "packed":
        return _Product(activation)
    assert cut.up is not None
    blocks, is_vector = cut.up.kwargs, cut.strategy == "vector"
    constants = {
        "ACTIVATION": activation, "HAS_BIAS": has_bias, "GATED": gated, "HAS_GATE_BIAS": has_gate_bias,
        "ACC": tl_accumulator(weight.dtype), "TICKETS": counters, "PDL": pdl, "num_warps": cut.up.num_warps,
    }  # fmt: skip
    if is_vector:
        if not _wide(weight):
            blocks = {**blocks, "BLOCK_K": min(blocks["BLOCK_K"], 512)}  # loads of one element: fewer at a time
        launch = launcher(kernels._gather_matmul_fwd_vector_kernel, **constants, **blocks)
        return _Product(activation, launch, (cdiv(columns, blocks["BLOCK_L"]),), cut.up_split, is_vector)
    constants |= {"PRECISION": PRECISION, "SPLIT": cut.up_split > 1}
    tiles = cdiv(m, blocks["BLOCK_M"]) * cdiv(columns, blocks["BLOCK_L"])
    launch = launcher(kernels._gather_matmul_fwd_tiles_kernel, **constants, **blocks)
    return _Product(activation, launch, (tiles, cut.up_split), cut.up_split, is_vector)


def _down(cut: kernels.Plan, m: int, weight: torch.Tensor, has_bias: bool = False, pdl: bool = False) -> _Product:
    """The first number of its grid is the tiles of the result."""
    if cut.strategy == "packed":
        return _Product("none")
    assert cut.down is not None
    blocks, split, is_vector = cut.down.kwargs, cut.down_split, cut.strategy == "vector"
    constants = {
        "HAS_BIAS": has_bias, "ACC": tl_accumulator(weight.dtype), "SPLIT": split > 1, "PDL": pdl,
        "num_warps": cut.down.num_warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    columns = cdiv(weight.shape[1], blocks["BLOCK_C"])
    if is_vector:
        launch = launcher(kernels._scatter_ffn_fwd_down_vector_kernel, **constants, **blocks)
        return _Product("none", launch, (columns, split), split, is_vector)
    if not (pdl and _wide(weight)):
        blocks = {**blocks, "AHEAD": 0}
    launch = launcher(kernels._scatter_ffn_fwd_down_tiles_kernel, **constants, PRECISION=PRECISION, **blocks)
    return _Product("none", launch, (cdiv(m, blocks["BLOCK_M"]) * columns, split), split, is_vector)


# --- forward --------------------------------------------------------------------------------------------------------
# What PyTorch computes, here and below, goes to ``out=``, which autocast leaves alone.


def _gather(plan: _Plan, x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor) -> torch.Tensor:
    arguments.check_index_values("gather_matmul", "rows", rows, weight.shape[0])
    out = empty(plan.shape, x.dtype, x)
    _gathered(plan.up, matrix(out), matrix(x), weight, bias, None, None, rows.contiguous())
    return out


def _ffn(
    plan: _Plan, x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any,
    b_down: Any, rows: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    arguments.check_index_values("scatter_ffn", "neurons", rows, w_up.shape[0])
    y = empty(plan.shape, x.dtype, x)
    if plan.padded == 0 or y.numel() == 0:
        return y.zero_() if b_down is None else y.copy_(b_down)
    x, rows = matrix(x), rows.contiguous()
    h = empty((x.shape[0], plan.padded), x.dtype, x)
    counters = empty((plan.counters,), torch.int32, x) if plan.counters else None
    _gathered(plan.up, h, x, w_up, b_up, w_gate, b_gate, rows, counters)
    _scattered(plan.down, matrix(y), h, w_down, b_down, rows, counters)
    return y


def _gathered(
    up: _Product, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any,
    rows: torch.Tensor, counters: torch.Tensor | None = None, packed: dict[int, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Fills out (M, L or L_pad) with act(x weight[rows]^T) or its gated form, zero from L on. x (M, K).

    ``counters`` become zero, for the kernel that comes next, which may start early.
    """
    if out.numel() == 0:
        return
    if up.launch is None:
        _gathered_by_cublas(up.activation, out, x, weight, bias, gate, gate_bias, rows, packed)
        return
    (m, k), columns = x.shape, out.shape[1]
    operands = (
        rows,
        x, *x.stride(),
        weight, *weight.stride(),
        *strided(bias, 1, x), *strided(gate, 2, x), *strided(gate_bias, 1, x),
        out, out.stride(0),
    )  # fmt: skip
    numbers = (m, weight.shape[0], k, rows.shape[0], columns)
    to_zero = rows if counters is None else counters
    if up.is_vector:
        up.launch(up.grid, *operands, to_zero, *numbers)
        return
    partial, own_counters = out, out
    if up.split > 1:
        shape = (up.split if gate is None else 2 * up.split, m, columns)
        partial = empty(shape, accumulator(x.dtype), x)
        own_counters = x.new_zeros(up.grid[0], dtype=torch.int32)
    up.launch(up.grid, *operands, partial, m * columns, own_counters, to_zero, *numbers, up.split)


def _gathered_by_cublas(
    activation: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any,
    rows: torch.Tensor, packed: dict[int, torch.Tensor] | None,
) -> None:  # fmt: skip
    padded = (x.shape[0], _padded(rows.shape[0]))
    whole = out if out.shape == padded else empty(padded, x.dtype, x)
    plain = activation == "none" and gate is None
    products = []
    for w, b in ((weight, bias), (gate, gate_bias)):
        if w is not None:
            products.append(whole if plain else empty(padded, x.dtype, x))
            # The bias goes into the product: added later it would meet a rounded sum, and near zero an activation's slope
            # jumps.
            packed_bias = None if b is None else _pack(b[:, None], rows)[:, 0]
            _multiply(products[-1], x, _pack(w, rows, packed).t(), packed_bias)
    if not plain:
        _hidden(whole, products[0], None if gate is None else products[1], activation)
    if whole is not out:
        out.copy_(whole[:, : out.shape[1]])


def _scattered(
    down: _Product, y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor,
    counters: torch.Tensor | None = None, packed: dict[int, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Fills y (M, K_out) with h[:, :L] weight[rows] + bias. h (M, L_pad) is zero from L on."""
    if down.launch is None:
        _multiply(y, h, _pack(weight, rows, packed), bias)
        return
    if y.numel() == 0:
        return
    (m, k_out), partial = y.shape, y
    if down.split > 1:
        partial = empty((down.split, m, k_out), accumulator(h.dtype), h)
        counters = h.new_zeros(down.grid[0], dtype=torch.int32) if counters is None else counters
    down.launch(
        down.grid,
        rows,
        h, h.stride(0),
        weight, *weight.stride(),
        *strided(bias, 1, h),
        y, y.stride(0),
        partial, m * k_out,
        rows if counters is None else counters,
        m, weight.shape[0], k_out, rows.shape[0], *(() if down.is_vector else (h.shape[1],)), down.split,
    )  # fmt: skip


def _multiply(y: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
    torch.mm(x, packed, out=y) if bias is None else torch.addmm(bias, x, packed, out=y)


def _pack(weight: torch.Tensor, rows: torch.Tensor, packed: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
    """-> (L_pad, K), the listed rows; zeros for an id out of range, and from L on: cuBLAS is fast with whole sixteens.

    ``packed`` keeps what two products want.
    """
    if packed is not None and id(weight) in packed:
        return packed[id(weight)]
    (n, k), count = weight.shape, rows.shape[0]
    out = empty((_padded(count), k), weight.dtype, weight)
    if out.numel():
        config = kernels.COPY_CONFIG
        grid = (cdiv(out.shape[0], config.kwargs["BLOCK_L"]), cdiv(k, config.kwargs["BLOCK_K"]))
        launch = launcher(kernels._scatter_ffn_pack_kernel, **config.kwargs, num_warps=config.num_warps)
        launch(grid, rows, weight, *weight.stride(), out, n, k, count, out.shape[0])
    if packed is not None:
        packed[id(weight)] = out
    return out


def _hidden(
    h: torch.Tensor, u: torch.Tensor, g: Any, activation: str, dh: Any = None, du: Any = None, dg: Any = None
) -> None:
    """Fills h, and with dh also du and dg (if there is a g). All are as u (M, L_pad), and zero from L on as it is."""
    m, columns = u.shape
    if h.numel():
        config = kernels.HIDDEN_CONFIG
        launch = launcher(
            kernels._scatter_ffn_hidden_kernel, ACTIVATION=activation, GATED=g is not None, WITH_GRADIENTS=dh is not None,
            ACC=tl_accumulator(u.dtype), **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        tensors = (u if t is None else t for t in (g, dh, h, du, dg))
        grid = (cdiv(columns, config.kwargs["BLOCK_L"]), cdiv(m, config.kwargs["BLOCK_M"]))
        launch(grid, u, u.stride(0), *tensors, m, columns)


# --- backward -------------------------------------------------------------------------------------------------------


def _gather_backward_plan(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, activation: str, wanted: tuple[bool, ...], has_bias: bool
) -> _BackwardPlan:
    key = (form(x), form(weight), form(rows), is_aligned(weight), activation, wanted, has_bias, runtime.compile_target)
    plan = _backward_plans.get(key)
    if plan is None:
        m, padded, cut = math.prod(x.shape[:-1]), _padded(rows.shape[0]), _cut(x, x.shape[-1], rows)
        none = _Product("none")
        up, dx = _up(cut, m, padded, weight, "none", has_bias), _down(cut, m, weight)
        plan = _BackwardPlan(activation, padded, wanted, up, none, none, dx, none)
        _backward_plans.keep(key, plan)
    return plan


def _gather_backward(
    plan: _BackwardPlan, dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, weight and bias, ``None`` where not wanted."""
    dx, dw, db = _new_gradients(plan.wanted, (x.shape, weight.shape, weight.shape[:1]), x)
    x, dz, rows = matrix(x), matrix(dout), rows.contiguous()
    extra, packed = plan.padded - rows.shape[0], dict[int, torch.Tensor]()
    dz = F.pad(dz, (0, extra)) if extra else dz.contiguous()
    if plan.activation != "none":
        z, h, dh = torch.empty_like(dz), torch.empty_like(dz), dz
        dz = torch.empty_like(dz)
        _gathered(plan.up, z, x, weight, bias, None, None, rows, None, packed)
        _hidden(h, z, None, plan.activation, dh, dz)
    if dx is not None:
        _scattered(plan.dx, matrix(dx), dz, weight, None, rows, None, packed)
    pairs = [(_transposed_product(dz, x), dw)] if dw is not None else []
    _place(rows, weight.shape[0], pairs + ([(_column_sums(dz), db)] if db is not None else []))
    return dx, dw, db


def _ffn_backward_plan(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any, rows: torch.Tensor,
    activation: str, wanted: tuple[bool, ...],
) -> _BackwardPlan:  # fmt: skip
    biases = b_up is not None, b_gate is not None
    forms = form(x), form(w_up), form(w_down), form(w_gate), form(rows), biases
    key = (forms, is_aligned(w_up), is_aligned(w_down), is_aligned(w_gate), activation, wanted, runtime.compile_target)
    plan = _backward_plans.get(key)
    if plan is None:
        m, padded, cut = math.prod(x.shape[:-1]), _padded(rows.shape[0]), _cut(x, w_down.shape[1], rows)
        gate, dx_by_gate = _Product("none"), _Product("none")
        if w_gate is not None:
            gate, dx_by_gate = _up(cut, m, padded, w_gate, "none", biases[1]), _down(cut, m, w_gate)
        up, of_h = _up(cut, m, padded, w_up, "none", biases[0]), _up(cut, m, padded, w_down, "none")
        plan = _BackwardPlan(activation, padded, wanted, up, gate, of_h, _down(cut, m, w_up), dx_by_gate)
        _backward_plans.keep(key, plan)
    return plan


def _ffn_backward(
    plan: _BackwardPlan, dy: torch.Tensor, x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any,
    b_gate: Any, rows: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """-> the gradients of the tensors and of b_down, ``None`` where not wanted."""
    results = _new_gradients(plan.wanted, _shapes(x, w_up, w_down), x)
    dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down = results
    x, dy, rows = matrix(x), matrix(dy), rows.contiguous()
    u, dh, h, du = (empty((x.shape[0], plan.padded), x.dtype, x) for _ in range(4))
    g, dg = (None, None) if w_gate is None else (torch.empty_like(u), torch.empty_like(u))
    packed = dict[int, torch.Tensor]()
    _gathered(plan.up, u, x, w_up, b_up, None, None, rows, None, packed)
    if g is not None:
        _gathered(plan.gate, g, x, w_gate, b_gate, None, None, rows, None, packed)
    _gathered(plan.of_h, dh, dy, w_down, None, None, None, rows, None, packed)
    _hidden(h, u, g, plan.activation, dh, du, dg)
    if dx is not None:
        dx = matrix(dx)
        _scattered(plan.dx, dx, du, w_up, None, rows, None, packed)
        if dg is not None:
            by_gate = torch.empty_like(dx)
            _scattered(plan.dx_by_gate, by_gate, dg, w_gate, None, rows, None, packed)
            torch.add(dx, by_gate, out=dx)
    matrices = ((du, x, dw_up), (h, dy, dw_down), (dg, x, dw_gate))
    pairs = [(_transposed_product(a, b), out) for a, b, out in matrices if a is not None and out is not None]
    pairs += [(_column_sums(a), out) for a, out in ((du, db_up), (dg, db_gate)) if a is not None and out is not None]
    _place(rows, w_up.shape[0], pairs)
    if db_down is not None:
        torch.sum(dy, 0, out=db_down)
    return results


def _shapes(x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor) -> tuple[Sequence[int], ...]:
    """Of x, w_up, w_down, w_gate, b_up, b_gate and b_down."""
    return x.shape, w_up.shape, w_down.shape, w_up.shape, w_up.shape[:1], w_up.shape[:1], w_down.shape[1:]


def _new_gradients(
    wanted: Sequence[bool], shapes: Sequence[Sequence[int]], x: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    return tuple(empty(shape, x.dtype, x) if needed else None for needed, shape in zip(wanted, shapes, strict=True))


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b, out=empty((a.shape[1], b.shape[1]), a.dtype, a))


def _column_sums(dz: torch.Tensor) -> torch.Tensor:
    return torch.sum(dz, 0, out=empty(dz.shape[1:], dz.dtype, dz))


def _place(rows: torch.Tensor, n: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each pair is a gradient (L, K) or (L,), one a place of the list, and what that of all N rows is written to."""
    if not pairs:
        return
    by_row, order = empty(rows.shape, rows.dtype, rows), empty(rows.shape, torch.int64, rows)
    torch.sort(rows, stable=True, out=(by_row, order))
    numbers, bounds = (empty((n + 1,), dtype, rows) for dtype in (rows.dtype, torch.int64))
    torch.searchsorted(by_row, torch.arange(n + 1, out=numbers), out=bounds)
    for gradient, out in pairs:
        k = gradient.shape[1] if gradient.ndim == 2 else 1
        if out.numel():
            config = kernels.PLACE_CONFIG if gradient.ndim == 2 else kernels.PLACE_VECTOR_CONFIG
            launch = launcher(
                kernels._scatter_ffn_place_kernel, ACC=tl_accumulator(out.dtype), **config.kwargs,
                num_warps=config.num_warps,
            )  # fmt: skip
            grid = (cdiv(n, config.kwargs["BLOCK_N"]), cdiv(k, config.kwargs["BLOCK_K"]))
            launch(grid, order, bounds, gradient, out, n, k)


# --- gradients ------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """:func:`gather_matmul` that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, plan: _Plan
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, rows)
        ctx.activation = plan.activation
        return _gather(plan, x, weight, bias, rows)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_gather_gradients(ctx, dout), None, None


def _gather_gradients(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, weight and bias."""
    (x, weight, bias, rows), wanted = ctx.saved_tensors, tuple(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled() or observed(dout, x, weight, bias, rows):
        return _only(wanted, _gather_backward_operator(dout, x, weight, bias, rows, ctx.activation, wanted))
    plan = _gather_backward_plan(x, weight, rows, ctx.activation, wanted, bias is not None)
    return _gather_backward(plan, dout, x, weight, bias, rows)


class _FFN(torch.autograd.Function):
    """:func:`scatter_ffn` that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *network, rows, plan = inputs
        ctx.save_for_backward(*network[:6], rows)
        ctx.activation = plan.activation
        return _ffn(plan, *network, rows)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_ffn_gradients(ctx, dy), None, None


def _ffn_gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of x, w_up, w_down, w_gate, b_up, b_gate and b_down."""
    tensors, wanted = ctx.saved_tensors, tuple(ctx.needs_input_grad[:7])
    if torch.is_grad_enabled() or observed(dy, *tensors):
        return _only(wanted, _ffn_backward_operator(dy, *tensors, ctx.activation, wanted))
    return _ffn_backward(_ffn_backward_plan(*tensors, ctx.activation, wanted), dy, *tensors)


def _only(wanted: Sequence[bool], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return tuple(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _run_gather(x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, activation: str) -> torch.Tensor:
    plan = _gather_plan(x, weight, bias, rows, None if activation == "none" else activation)
    return _gather(plan, x, weight, bias, rows)


def _run_gather_backward(
    dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, activation: str,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    plan = _gather_backward_plan(x, weight, rows, activation, tuple(needs), bias is not None)
    return _present(_gather_backward(plan, dout, x, weight, bias, rows), x)


def _run_ffn(*given: Any) -> torch.Tensor:
    *network, rows, activation, _ = given
    return _ffn(_ffn_plan(*network, rows, activation), *network, rows)


def _run_ffn_backward(dy: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    *tensors, activation, needs = given
    plan = _ffn_backward_plan(*tensors, activation, tuple(needs))
    return _present(_ffn_backward(plan, dy, *tensors), tensors[0])


def _present(gradients: Sequence[torch.Tensor | None], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients, with an empty tensor for what is not wanted."""
    return tuple(empty((0,), like.dtype, like) if gradient is None else gradient for gradient in gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *network, rows, ctx.activation = inputs
    ctx.save_for_backward(*network[:6], rows)


_gather_operator = operator(
    "gather_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor rows, str activation) -> Tensor",
    outputs=lambda x, weight, bias, rows, activation: empty((*x.shape[:-1], rows.shape[0]), x.dtype, x),
    run=_run_gather,
    setup_context=_keep,
    backward=lambda ctx, dout: (*_gather_gradients(ctx, dout), None, None),
)
_gather_backward_operator = operator(
    "gather_matmul_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor rows, str activation, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    outputs=lambda dout, x, weight, bias, rows, activation, needs: _present(
        _new_gradients(needs, (x.shape, weight.shape, weight.shape[:1]), x), x
    ),
    run=_run_gather_backward,
)
_ffn_operator = operator(
    "scatter_ffn(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, Tensor? b_down, "
    "Tensor neurons, str activation, bool deterministic) -> Tensor",
    outputs=lambda x, w_up, w_down, *_: empty((*x.shape[:-1], w_down.shape[1]), x.dtype, x),
    run=_run_ffn,
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs[:-1], output),
    backward=lambda ctx, dy: (*_ffn_gradients(ctx, dy), None, None, None),
)
_ffn_backward_operator = operator(
    "scatter_ffn_backward(Tensor dy, Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, "
    "Tensor neurons, str activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda dy, x, up, down, gate, b_up, b_gate, neurons, activation, needs: _present(
        _new_gradients(needs, _shapes(x, up, down), x), x
    ),
    run=_run_ffn_backward,
)

SOURCES = sources()
_gather_whole = composite(
    "gather_matmul_whole(Tensor x, Tensor weight, Tensor rows, str? activation, Tensor? bias) -> Tensor",
    lambda x, weight, rows, activation, bias: gather_matmul(x, weight, rows, activation=activation, bias=bias),
)
_ffn_whole = composite(
    "scatter_ffn_whole(Tensor x, Tensor w_up, Tensor w_down, Tensor? neurons, Tensor? w_gate, str activation, "
    "bool deterministic, Tensor? b_up, Tensor? b_gate, Tensor? b_down) -> Tensor",
    lambda x, up, down, neurons, gate, activation, deterministic, b_up, b_gate, b_down: scatter_ffn(
        x, up, down, neurons, w_gate=gate, activation=activation, deterministic=deterministic, b_up=b_up, b_gate=b_gate,
        b_down=b_down,
    ),
)  # fmt: skip
