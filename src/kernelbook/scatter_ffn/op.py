"""The public functions in the order of a call: observed or not, plan, new memory, launches; then the gradients the same way."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, composite, launcher, operator, sources
from kernelbook.linear import linear, product
from kernelbook.memory import accumulator, empty, present, tl_accumulator
from kernelbook.observed import are_tensors, form, in_mode_of_forward, is_aligned, keep_mode, observed, wants_gradient
from kernelbook.plans import KeptPlans
from kernelbook.scatter_ffn import kernels
from kernelbook.tensors import has_aligned_rows, matrix, strided

__all__ = ["ACTIVATIONS", "gather_matmul", "scatter_ffn"]

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_FUNCTIONS)
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
        return _gather_matmul_whole(x, weight, rows, activation, bias, SOURCES)  # type: ignore[no-any-return]
    return _call("gather_matmul", _Network(x, weight, b_up=bias), rows, activation)


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
        not listed. ``plan`` in the room's ``kernels.py`` says which kernels run for which shape.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``activation`` or (where they are checked) an id is not as above.
    """
    network = _Network(x, w_up, w_down, w_gate, b_up, b_gate, b_down)
    if is_dynamo_compiling() and are_tensors(*network, neurons):
        return _scatter_ffn_whole(*network, neurons, activation, SOURCES)  # type: ignore[no-any-return]
    return _call("scatter_ffn", network, neurons, activation)


class _Network(NamedTuple):
    """What a call is given beside the listed rows; the product that :func:`gather_matmul` computes is one without down."""

    x: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor | None = None
    w_gate: torch.Tensor | None = None
    b_up: torch.Tensor | None = None
    b_gate: torch.Tensor | None = None
    b_down: torch.Tensor | None = None


def _call(op: str, network: _Network, rows: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    network = _Network(*arguments.in_autocast_dtype(*network))
    if observed(*network, rows):
        _check(op, network, rows, activation)
        if rows is not None:
            return _operator(*network, rows, activation)  # type: ignore[no-any-return]
    else:
        plan = _plan(op, network, rows, activation)
        if rows is not None and wants_gradient(*network):
            return _FFN.apply(*network, rows, plan)  # type: ignore[no-any-return]
        if rows is not None:
            return _forward(plan, network, rows)
    assert network.w_down is not None and activation is not None
    act = _FUNCTIONS[activation]
    h = linear(network.x, network.w_up, network.b_up)
    h = act(h) if network.w_gate is None else act(linear(network.x, network.w_gate, network.b_gate)) * h
    return linear(h, network.w_down.t(), network.b_down)


def _check(op: str, network: _Network, rows: Any, activation: Any) -> None:
    given: tuple[Any, ...] = network
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = given
    is_gather = op == "gather_matmul"
    arguments.check_linear(op, x, "weight" if is_gather else "w_up", w_up)
    n = w_up.shape[0]
    floating: dict[str, Any] = {"x": x}
    vectors = {"bias": (b_up, n)}
    if not is_gather:
        arguments.check_tensor(op, "w_down", w_down)
        if w_down.ndim != 2 or w_down.shape[0] != n:
            raise ValueError(f"{op}: w_down must have shape ({n}, K_out), one row a neuron, got {tuple(w_down.shape)}")
        if w_gate is not None:
            arguments.check_tensor(op, "w_gate", w_gate)
            arguments.check_shape(op, "w_gate", w_gate, w_up.shape)
        floating |= {"w_down": w_down, "w_gate": w_gate}
        vectors = {"b_up": (b_up, n), "b_gate": (b_gate, n), "b_down": (b_down, w_down.shape[1])}
    for name, (vector, size) in vectors.items():
        if vector is not None:
            arguments.check_tensor(op, name, vector)
            arguments.check_shape(op, name, vector, (size,))
        floating[name] = vector
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{op}: b_gate must be None where w_gate is None, got a tensor")
    if activation is not None or not is_gather:
        arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    if rows is not None or is_gather:
        arguments.check_indices(op, "rows" if is_gather else "neurons", rows)
    arguments.check_same_dtype(op, **floating)
    arguments.check_same_device(op, **floating, **{"rows" if is_gather else "neurons": rows})


# --- plans ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Product:
    """A product with listed rows, up or down."""

    activation: str | None = None
    launch: Launch | None = None  # None: rows are copied together for cuBLAS
    grid: tuple[int, ...] = ()
    split: int = 1  # parts of the reduction
    is_vector: bool = False  # or by tiles


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """What is decided for a kind of forward pass."""

    activation: str | None
    shape: tuple[int, ...]  # of the result
    padded: int  # columns of h
    up: _Product
    down: _Product = _Product()
    counters: int = 0  # of the down kernel, which the up kernel sets to zero


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _BackwardPlan:
    """What is decided for a kind of backward pass. Products are recomputed: they are cheap beside the weights' gradients."""

    activation: str | None
    padded: int
    wanted: tuple[bool, ...]  # gradients, in the order of a network
    up: _Product
    dx: _Product
    gate: _Product
    dx_by_gate: _Product
    dh: _Product  # with the same rows that h is multiplied by


_plans = KeptPlans[_Plan]()
_backward_plans = KeptPlans[_BackwardPlan]()


def _key(network: _Network, rows: Any, activation: str | None) -> tuple[Any, ...]:
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = network
    weights = form(w_up), form(w_down), form(w_gate), is_aligned(w_up), is_aligned(w_down), is_aligned(w_gate)
    biases = form(b_up), form(b_gate), form(b_down)
    return form(x), weights, biases, form(rows), activation, runtime.plan_mode()


def _plan(op: str, network: _Network, rows: Any, activation: str | None) -> _Plan:
    """The plan for calls like this one: the one that is kept, or a new one, for which the arguments are checked."""
    if type(activation) not in (str, NoneType):
        _check(op, network, rows, activation)
    key = (op, _key(network, rows, activation))
    plan = _plans.get(key)
    if plan is None:
        _check(op, network, rows, activation)
        plan = _new_plan(network, 0 if rows is None else rows.shape[0], activation)
        _plans.keep(key, plan)
    return plan


def _new_plan(network: _Network, count: int, activation: str | None) -> _Plan:
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = network
    m, padded = math.prod(x.shape[:-1]), _padded(count)
    gated, has_bias, has_gate_bias = w_gate is not None, b_up is not None, b_gate is not None
    shape = (*x.shape[:-1], count if w_down is None else w_down.shape[1])
    if count == 0 or math.prod(shape) == 0:
        return _Plan(activation, shape, padded, _Product())
    if w_down is None:
        return _Plan(activation, shape, padded, _up(_cut(x, x.shape[-1], count), m, count, w_up, activation, has_bias))
    cut = _cut(x, w_down.shape[1], count, gated)
    pdl = (cut.strategy == "vector" or count <= kernels.EARLY) and runtime.properties(x.device).has_pdl
    down = _down(cut, m, w_down, b_down is not None, pdl)
    counters = down.grid[0] if down.split > 1 else 0
    up = _up(cut, m, padded, w_up, activation, has_bias, gated, has_gate_bias, pdl)
    return _Plan(activation, shape, padded, up, down, counters)


def _backward_plan(
    network: _Network, rows: torch.Tensor, activation: str | None, wanted: tuple[bool, ...]
) -> _BackwardPlan:
    key = (wanted, _key(network, rows, activation))
    plan = _backward_plans.get(key)
    if plan is None:
        x, w_up, w_down, w_gate, b_up, b_gate, _ = network
        m, padded = math.prod(x.shape[:-1]), _padded(rows.shape[0])
        cut = _cut(x, x.shape[-1] if w_down is None else w_down.shape[1], rows.shape[0])
        gate = dx_by_gate = dh = _Product()
        if w_gate is not None:
            gate, dx_by_gate = _up(cut, m, padded, w_gate, None, b_gate is not None), _down(cut, m, w_gate)
        if w_down is not None:
            dh = _up(cut, m, padded, w_down, None)
        up, dx = _up(cut, m, padded, w_up, None, b_up is not None), _down(cut, m, w_up)
        plan = _BackwardPlan(activation, padded, wanted, up, dx, gate, dx_by_gate, dh)
        _backward_plans.keep(key, plan)
    return plan


def _cut(x: torch.Tensor, k_out: int, count: int, gated: bool = False) -> kernels.Plan:
    m, k, dtype = math.prod(x.shape[:-1]), x.shape[-1], str(x.dtype).removeprefix("torch.")
    return kernels.plan(m, k, k_out, count, dtype, gated, runtime.properties(x.device))


def _padded(count: int) -> int:
    return cdiv(count, kernels.PAD) * kernels.PAD


def _wide(weight: torch.Tensor) -> bool:
    """Whether rows are contiguous, begin on 16 bytes and end there."""
    return has_aligned_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0


def _up(
    cut: kernels.Plan, m: int, columns: int, weight: torch.Tensor, activation: str | None, has_bias: bool = False,
    gated: bool = False, has_gate_bias: bool = False, pdl: bool = False,
) -> _Product:  # fmt: skip
    if cut.strategy == "packed":
        return _Product(activation)
    assert cut.up is not None
    blocks, is_vector = cut.up.kwargs, cut.strategy == "vector"
    constants = {
        "ACTIVATION": activation or "none", "HAS_BIAS": has_bias, "GATED": gated, "HAS_GATE_BIAS": has_gate_bias,
        "ACC": tl_accumulator(weight.dtype), "PDL": pdl, "num_warps": cut.up.num_warps,
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
        return _Product()
    assert cut.down is not None
    blocks, split, is_vector = cut.down.kwargs, cut.down_split, cut.strategy == "vector"
    constants = {
        "HAS_BIAS": has_bias, "ACC": tl_accumulator(weight.dtype), "SPLIT": split > 1, "PDL": pdl,
        "num_warps": cut.down.num_warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    columns = cdiv(weight.shape[1], blocks["BLOCK_C"])
    if is_vector:
        launch = launcher(kernels._scatter_ffn_fwd_down_vector_kernel, **constants, **blocks)
        return _Product(None, launch, (columns, split), split, is_vector)
    if not (pdl and _wide(weight)):
        blocks = {**blocks, "AHEAD": 0}
    launch = launcher(kernels._scatter_ffn_fwd_down_tiles_kernel, **constants, PRECISION=PRECISION, **blocks)
    return _Product(None, launch, (cdiv(m, blocks["BLOCK_M"]) * columns, split), split, is_vector)


# --- forward --------------------------------------------------------------------------------------------------------
# What PyTorch computes, here and below, goes to ``out=``, which autocast leaves alone.


def _forward(plan: _Plan, network: _Network, rows: torch.Tensor) -> torch.Tensor:
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = network
    op, name = ("gather_matmul", "rows") if w_down is None else ("scatter_ffn", "neurons")
    arguments.check_index_values(op, name, rows, w_up.shape[0])
    result = empty(plan.shape, x.dtype, x)
    if plan.padded == 0 or result.numel() == 0:
        return result.zero_() if b_down is None else result.copy_(b_down)
    x, y, rows = matrix(x), matrix(result), rows.contiguous()
    if w_down is None:
        _gathered(plan.up, y, x, w_up, b_up, w_gate, b_gate, rows)
        return result
    h = empty((x.shape[0], plan.padded), x.dtype, x)
    counters = empty((plan.counters,), torch.int32, x) if plan.counters else None
    _gathered(plan.up, h, x, w_up, b_up, w_gate, b_gate, rows, counters)
    _scattered(plan.down, y, h, w_down, b_down, rows, counters)
    return result


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
    if up.is_vector and x.shape[0] * x.stride(0) >= 2**31:  # the kernel finds its few rows by 32 bits
        x = x.contiguous()
    (m, k), columns = x.shape, out.shape[1]
    operands = (
        rows,
        x, *x.stride(),
        weight, *weight.stride(),
        *strided(bias, 1, x), *strided(gate, 2, x), *strided(gate_bias, 1, x),
        out, out.stride(0),
    )  # fmt: skip
    to_zero, semaphores = (rows, 0) if counters is None else (counters, counters.shape[0])
    numbers = (m, weight.shape[0], k, rows.shape[0], columns, semaphores)
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
    activation: str | None, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any,
    rows: torch.Tensor, packed: dict[int, torch.Tensor] | None,
) -> None:  # fmt: skip
    padded = (x.shape[0], _padded(rows.shape[0]))
    whole = out if out.shape == padded else empty(padded, x.dtype, x)
    plain = activation is None and gate is None
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
    product(x, packed, bias, out=y)


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
    h: torch.Tensor, u: torch.Tensor, g: Any, activation: str | None, dh: Any = None, du: Any = None, dg: Any = None
) -> None:
    """Fills h, and with dh also du and dg (if there is a g). All are as u (M, L_pad), and zero from L on as it is."""
    m, columns = u.shape
    if h.numel():
        config = kernels.HIDDEN_CONFIG
        launch = launcher(
            kernels._scatter_ffn_hidden_kernel, ACTIVATION=activation or "none", GATED=g is not None,
            WITH_GRADIENTS=dh is not None, ACC=tl_accumulator(u.dtype), **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        tensors = (u if t is None else t for t in (g, dh, h, du, dg))
        grid = (cdiv(columns, config.kwargs["BLOCK_L"]), cdiv(m, config.kwargs["BLOCK_M"]))
        launch(grid, u, u.stride(0), *tensors, m, columns)


# --- backward -------------------------------------------------------------------------------------------------------


def _backward(
    plan: _BackwardPlan, dy: torch.Tensor, network: _Network, rows: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of the network, ``None`` where not wanted."""
    x, w_up, w_down, w_gate, b_up, b_gate, _ = network
    results = dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down = _new_gradients(network, plan.wanted)
    x, dy, rows, packed = matrix(x), matrix(dy), rows.contiguous(), dict[int, torch.Tensor]()
    g = h = dg = None
    if w_down is None:
        dh = F.pad(dy, (0, extra)) if (extra := plan.padded - rows.shape[0]) else dy.contiguous()
    else:
        dh = empty((x.shape[0], plan.padded), x.dtype, x)
    if w_down is None and plan.activation is None:
        du = dh
    else:
        u, h, du = torch.empty_like(dh), torch.empty_like(dh), torch.empty_like(dh)
        _gathered(plan.up, u, x, w_up, b_up, None, None, rows, None, packed)
        if w_gate is not None:
            g, dg = torch.empty_like(dh), torch.empty_like(dh)
            _gathered(plan.gate, g, x, w_gate, b_gate, None, None, rows, None, packed)
        if w_down is not None:
            _gathered(plan.dh, dh, dy, w_down, None, None, None, rows, None, packed)
        _hidden(h, u, g, plan.activation, dh, du, dg)
    if dx is not None:
        dx = matrix(dx)
        _scattered(plan.dx, dx, du, w_up, None, rows, None, packed)
        if dg is not None and w_gate is not None:
            by_gate = torch.empty_like(dx)
            _scattered(plan.dx_by_gate, by_gate, dg, w_gate, None, rows, None, packed)
            torch.add(dx, by_gate, out=dx)
    products = ((du, x, dw_up), (h, dy, dw_down), (dg, x, dw_gate), (du, None, db_up), (dg, None, db_gate))
    pairs = [(_of_rows(a, b), out) for a, b, out in products if a is not None and out is not None]
    _place(rows, w_up.shape[0], pairs)
    if db_down is not None:
        torch.sum(dy, 0, out=db_down)
    return results


def _new_gradients(network: _Network, wanted: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    x, up, down = network.x, network.w_up.shape, () if network.w_down is None else network.w_down.shape
    pairs = zip((x.shape, up, down, up, up[:1], up[:1], down[1:]), wanted, strict=True)
    return tuple(empty(shape, x.dtype, x) if needed else None for shape, needed in pairs)


def _of_rows(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """A gradient of the listed rows: a^T b, or of a bias the sums of a's columns."""
    if b is None:
        return torch.sum(a, 0, out=empty(a.shape[1:], a.dtype, a))
    return torch.mm(a.t(), b, out=empty((a.shape[1], b.shape[1]), a.dtype, a))


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


class _FFN(torch.autograd.Function):
    """A call that autograd records, where nobody observes it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *network, rows, plan = inputs
        _keep(ctx, (*network, rows, plan.activation), None)
        return _forward(plan, _Network(*network), rows)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *network, _b_down, rows, ctx.activation = inputs
    keep_mode(ctx)
    ctx.save_for_backward(*network, rows)


@in_mode_of_forward
def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """-> the gradients of the network."""
    (*tensors, rows), activation, wanted = ctx.saved_tensors, ctx.activation, tuple(ctx.needs_input_grad[:7])
    if torch.is_grad_enabled() or observed(dy, *tensors, rows):
        found = _backward_operator(dy, *tensors, rows, activation, wanted)
        return tuple(gradient if needed else None for gradient, needed in zip(found, wanted, strict=True))
    network = _Network(*tensors)
    return _backward(_backward_plan(network, rows, activation, wanted), dy, network, rows)


# --- where somebody observes: operators -----------------------------------------------------------------------------


def _run(*given: Any) -> torch.Tensor:
    *tensors, rows, activation = given
    network = _Network(*tensors)
    op = "scatter_ffn" if network.w_down is not None else "gather_matmul"
    return _forward(_plan(op, network, rows, activation), network, rows)


def _run_backward(dy: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    *tensors, rows, activation, wanted = given
    network = _Network(*tensors)
    return present(_backward(_backward_plan(network, rows, activation, tuple(wanted)), dy, network, rows), dy)


_operator = operator(
    "scatter_ffn(Tensor x, Tensor w_up, Tensor? w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, Tensor? b_down, "
    "Tensor neurons, str? activation) -> Tensor",
    outputs=lambda x, w_up, w_down, *others: empty(
        (*x.shape[:-1], others[-2].shape[0] if w_down is None else w_down.shape[1]), x.dtype, x
    ),
    run=_run,
    setup_context=_keep,
    backward=lambda ctx, dy: (*_gradients(ctx, dy), None, None),
)
_backward_operator = operator(
    "scatter_ffn_backward(Tensor dy, Tensor x, Tensor w_up, Tensor? w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, "
    "Tensor neurons, str? activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda dy, *given: present(_new_gradients(_Network(*given[:6]), given[-1]), dy),
    run=_run_backward,
)

SOURCES = sources()
_gather_matmul_whole = composite(
    "gather_matmul_whole(Tensor x, Tensor weight, Tensor rows, str? activation, Tensor? bias) -> Tensor",
    lambda x, weight, rows, activation, bias: _call("gather_matmul", _Network(x, weight, b_up=bias), rows, activation),
)
_scatter_ffn_whole = composite(
    "scatter_ffn_whole(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, Tensor? b_down, "
    "Tensor? neurons, str activation) -> Tensor",
    lambda *given: _call("scatter_ffn", _Network(*given[:7]), *given[7:]),
)
