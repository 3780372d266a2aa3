"""The public functions, their operators, and the launches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.scatter_ffn import kernels

__all__ = ["ACTIVATIONS", "gather_matmul", "scatter_ffn"]

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")
PRECISION = "ieee"  # of float32 in tiles, which only tests multiply so: it is left to cuBLAS


# --- public functions -----------------------------------------------------------------------------------------------


@launching.repeated(launching.settings)
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
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    _check_gather(x, weight, rows, activation, bias)
    out: torch.Tensor = _gather(x, weight, bias, rows, activation or "none")
    return out


@launching.repeated(launching.settings)
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
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = arguments.in_autocast_dtype(
        x, w_up, w_down, w_gate, b_up, b_gate, b_down
    )
    _check_ffn(x, w_up, w_down, neurons, w_gate, b_up, b_gate, b_down, activation)
    if neurons is None:
        return _dense(x, w_up, w_down, w_gate, b_up, b_gate, b_down, activation)
    y: torch.Tensor = _ffn(x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, activation, deterministic)
    return y


def _dense(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, activation: str
) -> torch.Tensor:  # fmt: skip
    act = functools.partial(F.gelu, approximate="tanh") if activation == "gelu_tanh" else getattr(F, activation)
    up = F.linear(x, w_up, b_up)
    return F.linear(act(up) if w_gate is None else act(F.linear(x, w_gate, b_gate)) * up, w_down.t(), b_down)


# --- checks ---------------------------------------------------------------------------------------------------------


@arguments.once
def _check_gather(x: Any, weight: Any, rows: Any, activation: str | None, bias: Any) -> None:
    op = "gather_matmul"
    arguments.check_linear(op, x, "weight", weight)
    _check_vectors(op, bias=(bias, weight.shape[0]))
    if activation is not None:
        arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    arguments.check_indices(op, "rows", rows)
    arguments.check_same_dtype(op, x=x, bias=bias)
    arguments.check_same_device(op, x=x, bias=bias, rows=rows)


@arguments.once
def _check_ffn(
    x: Any, w_up: Any, w_down: Any, neurons: Any, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, activation: str
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


# --- launches -------------------------------------------------------------------------------------------------------
# A whole call can be over in ten microseconds, so what the host does here counts. What PyTorch computes goes to ``out=``,
# which autocast leaves alone.

_launch = functools.cache(Launch)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in arguments.FLOATING}


@functools.lru_cache(maxsize=4096)
def _up_launch(
    plan: kernels.Plan, m: int, columns: int, dtype: torch.dtype, activation: str,
    has_bias: bool, gated: bool, has_gate_bias: bool, wide: bool, tickets: int, pdl: bool,
) -> tuple[Launch, tuple[int, ...]]:  # fmt: skip
    config = plan.up
    assert config is not None
    blocks = config.kwargs
    constants = {
        "ACTIVATION": activation, "HAS_BIAS": has_bias, "GATED": gated, "HAS_GATE_BIAS": has_gate_bias,
        "ACC": launching.tl_accumulator(dtype), "TICKETS": tickets, "PDL": pdl, "num_warps": config.num_warps,
    }  # fmt: skip
    if plan.strategy == "vector":
        if not wide:
            blocks = {**blocks, "BLOCK_K": min(blocks["BLOCK_K"], 512)}  # loads of one element: fewer at a time
        launch = _launch(kernels._gather_matmul_fwd_vector_kernel, **constants, **blocks)
        return launch, (cdiv(columns, blocks["BLOCK_L"]),)
    constants |= {"PRECISION": PRECISION, "SPLIT": plan.up_split > 1}
    tiles = cdiv(m, blocks["BLOCK_M"]) * cdiv(columns, blocks["BLOCK_L"])
    return _launch(kernels._gather_matmul_fwd_tiles_kernel, **constants, **blocks), (tiles, plan.up_split)


def _run_up(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any, rows: torch.Tensor,
    activation: str, plan: kernels.Plan, tickets: torch.Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Fills out (M, L_out). ``tickets`` become zero, for the kernel that comes next and may start early if ``pdl``."""
    (m, k), columns, split = x.shape, out.shape[1], plan.up_split
    launch, grid = _up_launch(
        plan, m, columns, x.dtype, activation, bias is not None, gate is not None, gate_bias is not None, _wide(weight),
        0 if tickets is None else tickets.shape[0], pdl,
    )  # fmt: skip
    operands = (
        rows,
        x, *x.stride(),
        weight, *weight.stride(),
        *launching.strided(bias, 1, x),
        *launching.strided(gate, 2, x),
        *launching.strided(gate_bias, 1, x),
        out, out.stride(0),
    )  # fmt: skip
    numbers = (m, weight.shape[0], k, rows.shape[0], columns)
    tickets = rows if tickets is None else tickets
    if plan.strategy == "vector":
        launch(grid, *operands, tickets, *numbers)
        return
    partial, own_tickets = out, out
    if split > 1:
        shape = (split if gate is None else 2 * split, m, columns)
        partial = launching.empty(shape, launching.accumulator(x.dtype), x)
        own_tickets = x.new_zeros(grid[0], dtype=torch.int32)
    launch(grid, *operands, partial, m * columns, own_tickets, tickets, *numbers, split)


@functools.lru_cache(maxsize=4096)
def _down_launch(
    plan: kernels.Plan, m: int, k_out: int, dtype: torch.dtype, has_bias: bool, wide: bool, pdl: bool
) -> tuple[Launch, tuple[int, ...]]:
    """-> the launch and its grid, the first number of which is the tiles of y."""
    config, split = plan.down, plan.down_split
    assert config is not None
    blocks = config.kwargs
    constants = {
        "HAS_BIAS": has_bias, "ACC": launching.tl_accumulator(dtype), "SPLIT": split > 1, "PDL": pdl,
        "num_warps": config.num_warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip
    columns = cdiv(k_out, blocks["BLOCK_C"])
    if plan.strategy == "vector":
        return _launch(kernels._scatter_ffn_fwd_down_vector_kernel, **constants, **blocks), (columns, split)
    if not (pdl and wide):
        blocks = {**blocks, "AHEAD": 0}
    launch = _launch(kernels._scatter_ffn_fwd_down_tiles_kernel, **constants, PRECISION=PRECISION, **blocks)
    return launch, (cdiv(m, blocks["BLOCK_M"]) * columns, split)


def _run_down(
    y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, plan: kernels.Plan,
    tickets: torch.Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Fills y (M, K_out) from h (M, L_pad). ``tickets`` are set to zero by the kernel before, if there are any."""
    (m, k_out), split = y.shape, plan.down_split
    launch, grid = _down_launch(plan, m, k_out, h.dtype, bias is not None, _wide(weight), pdl)
    partial = y
    if split > 1:
        partial = launching.empty((split, m, k_out), launching.accumulator(h.dtype), h)
        tickets = h.new_zeros(grid[0], dtype=torch.int32) if tickets is None else tickets
    launch(
        grid,
        rows,
        h, h.stride(0),
        weight, *weight.stride(),
        *launching.strided(bias, 1, h),
        y, y.stride(0),
        partial, m * k_out,
        rows if tickets is None else tickets,
        m, weight.shape[0], k_out, rows.shape[0], *(() if plan.strategy == "vector" else (h.shape[1],)), split,
    )  # fmt: skip


def _wide(weight: torch.Tensor) -> bool:
    """Whether rows are contiguous, begin on 16 bytes and end there."""
    return launching.has_aligned_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0


def _pack(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """-> (L_pad, K), the listed rows; zeros for an id out of range, and from L on: cuBLAS is fast with whole sixteens."""
    (n, k), count = weight.shape, rows.shape[0]
    out = launching.empty((_padded(count), k), weight.dtype, weight)
    if out.numel():
        config = kernels.COPY_CONFIG
        grid = (cdiv(out.shape[0], config.kwargs["BLOCK_L"]), cdiv(k, config.kwargs["BLOCK_K"]))
        launch = _launch(kernels._scatter_ffn_pack_kernel, **config.kwargs, num_warps=config.num_warps)
        launch(grid, rows, weight, *weight.stride(), out, n, k, count, out.shape[0])
    return out


def _hidden(
    h: torch.Tensor, u: torch.Tensor, g: Any, activation: str, dh: Any = None, du: Any = None, dg: Any = None
) -> None:
    """Fills h, and with dh also du and dg (if there is a g). All are as u (M, L_pad), and zero from L on as it is."""
    m, columns = u.shape
    if h.numel():
        config = kernels.HIDDEN_CONFIG
        launch = _launch(
            kernels._scatter_ffn_hidden_kernel, ACTIVATION=activation, GATED=g is not None, WITH_GRADIENTS=dh is not None,
            ACC=launching.tl_accumulator(u.dtype), **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        tensors = (u if t is None else t for t in (g, dh, h, du, dg))
        grid = (cdiv(columns, config.kwargs["BLOCK_L"]), cdiv(m, config.kwargs["BLOCK_M"]))
        launch(grid, u, u.stride(0), *tensors, m, columns)


def _place(rows: torch.Tensor, n: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Each pair is a gradient (L, K) or (L,), one a place of the list, and what that of all N rows is written to."""
    if not pairs:
        return
    by_row, order = launching.empty(rows.shape, rows.dtype, rows), launching.empty(rows.shape, torch.int64, rows)
    torch.sort(rows, stable=True, out=(by_row, order))
    numbers, bounds = (launching.empty((n + 1,), dtype, rows) for dtype in (rows.dtype, torch.int64))
    torch.searchsorted(by_row, torch.arange(n + 1, out=numbers), out=bounds)
    for gradient, out in pairs:
        k = gradient.shape[1] if gradient.ndim == 2 else 1
        if out.numel():
            config = kernels.PLACE_CONFIG if gradient.ndim == 2 else kernels.PLACE_VECTOR_CONFIG
            launch = _launch(
                kernels._scatter_ffn_place_kernel, ACC=launching.tl_accumulator(out.dtype), **config.kwargs,
                num_warps=config.num_warps,
            )  # fmt: skip
            grid = (cdiv(n, config.kwargs["BLOCK_N"]), cdiv(k, config.kwargs["BLOCK_K"]))
            launch(grid, order, bounds, gradient, out, n, k)


def _product(y: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
    torch.mm(x, packed, out=y) if bias is None else torch.addmm(bias, x, packed, out=y)


def _gathered(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any, rows: torch.Tensor,
    activation: str, plan: kernels.Plan, pack: Callable[..., torch.Tensor] = _pack,
) -> None:  # fmt: skip
    """Fills out (M, L or L_pad) with act(x weight[rows]^T) or its gated form, zero from L on. x (M, K)."""
    if out.numel() == 0:
        return
    if plan.strategy != "packed":
        _run_up(out, x, weight, bias, gate, gate_bias, rows, activation, plan)
        return
    padded = (x.shape[0], _padded(rows.shape[0]))
    whole = out if out.shape == padded else launching.empty(padded, x.dtype, x)
    plain = activation == "none" and gate is None
    products = []
    for w, b in ((weight, bias), (gate, gate_bias)):
        if w is not None:
            products.append(whole if plain else launching.empty(padded, x.dtype, x))
            # The bias goes into the product: added later it would meet a rounded sum, and near zero an activation's slope
            # jumps.
            _product(products[-1], x, pack(w, rows).t(), None if b is None else pack(b[:, None], rows)[:, 0])
    if not plain:
        _hidden(whole, products[0], None if gate is None else products[1], activation)
    if whole is not out:
        out.copy_(whole[:, : out.shape[1]])


def _scattered(
    y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, plan: kernels.Plan,
    pack: Callable[..., torch.Tensor] = _pack,
) -> None:  # fmt: skip
    """Fills y (M, K_out) with h[:, :L] weight[rows] + bias. h (M, L_pad) is zero from L on."""
    if plan.strategy == "packed":
        _product(y, h, pack(weight, rows), bias)
    elif y.numel():
        _run_down(y, h, weight, bias, rows, plan)


def _plan(x: torch.Tensor, k_out: int, rows: torch.Tensor, *, gated: bool = False) -> kernels.Plan:
    m, k = x.shape
    return kernels.plan(m, k, k_out, rows.shape[0], _NAMES[x.dtype], gated, runtime.properties(x.device))


def _padded(count: int) -> int:
    return cdiv(count, kernels.PAD) * kernels.PAD


# --- operators ------------------------------------------------------------------------------------------------------
# Products are recomputed in the backward pass, not kept: they are cheap beside the gradients of the weights.


def _empty(x: torch.Tensor, shapes: Sequence[Sequence[int]], needs: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """For each shape a tensor as ``x``; empty where none is needed."""
    return tuple(
        launching.empty(shape if needed else (0,), x.dtype, x) for shape, needed in zip(shapes, needs, strict=True)
    )


def _autograd(backward: Any, number: int, ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the first ``number`` arguments, by the operator ``backward``."""
    needs = ctx.needs_input_grad
    grads = backward(dy, *ctx.saved_tensors, ctx.activation, needs[:number])
    wanted = (grad if needed else None for grad, needed in zip(grads, needs, strict=False))
    return *wanted, *(None for _ in needs[number:])


def _run_gather(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor, activation: str
) -> None:
    arguments.check_index_values("gather_matmul", "rows", rows, weight.shape[0])
    x, rows = launching.matrix(x), rows.contiguous()
    plan = _plan(x, x.shape[1], rows)
    _gathered(launching.matrix(out), x, weight, bias, None, None, rows, activation, plan)


def _run_gather_backward(
    results: tuple[torch.Tensor, ...], dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any,
    rows: torch.Tensor, activation: str, needs: Sequence[bool],
) -> None:  # fmt: skip
    (dx, dw, db), (needs_dx, needs_dw, needs_db) = results, needs
    x, dz, rows = launching.matrix(x), launching.matrix(dout), rows.contiguous()
    plan, extra, pack = _plan(x, x.shape[1], rows), _padded(rows.shape[0]) - rows.shape[0], functools.cache(_pack)
    with launching.without_autocast(x):
        dz = F.pad(dz, (0, extra)) if extra else dz.contiguous()
        if activation != "none":
            z, h, dh = torch.empty_like(dz), torch.empty_like(dz), dz
            dz = torch.empty_like(dz)
            _gathered(z, x, weight, bias, None, None, rows, "none", plan, pack)
            _hidden(h, z, None, activation, dh, dz)
        if needs_dx:
            _scattered(launching.matrix(dx), dz, weight, None, rows, plan, pack)
        pairs = [(_transposed_product(dz, x), dw)] if needs_dw else []
        _place(rows, weight.shape[0], pairs + ([(_column_sums(dz), db)] if needs_db else []))


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b, out=launching.empty((a.shape[1], b.shape[1]), a.dtype, a))


def _column_sums(dz: torch.Tensor) -> torch.Tensor:
    return torch.sum(dz, 0, out=launching.empty(dz.shape[1:], dz.dtype, dz))


_gather_backward = launching.operator(
    "gather_matmul_backward(Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor rows, str activation, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    outputs=lambda dout, x, weight, bias, rows, activation, needs: _empty(
        x, (x.shape, weight.shape, weight.shape[:1]), needs
    ),
    run=_run_gather_backward,
    repeated=launching.settings,
)


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


_gather = launching.operator(
    "gather_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor rows, str activation) -> Tensor",
    outputs=lambda x, weight, bias, rows, activation: launching.empty((*x.shape[:-1], rows.shape[0]), x.dtype, x),
    run=_run_gather,
    repeated=launching.settings,
    setup_context=_setup_gather,
    backward=functools.partial(_autograd, _gather_backward, 3),
)


def _run_ffn(
    y: torch.Tensor, x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, w_gate: Any, b_up: Any, b_gate: Any,
    b_down: Any, rows: torch.Tensor, activation: str, deterministic: bool,
) -> None:  # fmt: skip
    arguments.check_index_values("scatter_ffn", "neurons", rows, w_up.shape[0])
    x, y, rows = launching.matrix(x), launching.matrix(y), rows.contiguous()
    (m, k_out), count = y.shape, rows.shape[0]
    if y.numel() == 0 or count == 0:
        y.zero_() if b_down is None else y.copy_(b_down)
        return
    plan = _plan(x, k_out, rows, gated=w_gate is not None)
    h = launching.empty((m, _padded(count)), x.dtype, x)
    if plan.strategy == "packed":
        _gathered(h, x, w_up, b_up, w_gate, b_gate, rows, activation, plan)
        _scattered(y, h, w_down, b_down, rows, plan)
        return
    pdl = (plan.strategy == "vector" or count <= kernels.EARLY) and kernels.has_pdl(runtime.properties(x.device))
    tickets = None
    if plan.down_split > 1:
        _, (tiles, _) = _down_launch(plan, m, k_out, x.dtype, b_down is not None, _wide(w_down), pdl)
        tickets = launching.empty((tiles,), torch.int32, x)
    _run_up(h, x, w_up, b_up, w_gate, b_gate, rows, activation, plan, tickets, pdl)
    _run_down(y, h, w_down, b_down, rows, plan, tickets, pdl)


def _run_ffn_backward(
    results: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor,
    w_gate: Any, b_up: Any, b_gate: Any, rows: torch.Tensor, activation: str, needs: Sequence[bool],
) -> None:  # fmt: skip
    dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down = (
        result if needed else None for result, needed in zip(results, needs, strict=True)
    )
    x, dy, rows = launching.matrix(x), launching.matrix(dy), rows.contiguous()
    plan = _plan(x, w_down.shape[1], rows)
    u, dh, h, du = (launching.empty((x.shape[0], _padded(rows.shape[0])), x.dtype, x) for _ in range(4))
    g, dg = (None, None) if w_gate is None else (torch.empty_like(u), torch.empty_like(u))
    pack = functools.cache(_pack)  # of rows that two products want
    with launching.without_autocast(x):
        _gathered(u, x, w_up, b_up, None, None, rows, "none", plan, pack)
        if g is not None:
            _gathered(g, x, w_gate, b_gate, None, None, rows, "none", plan, pack)
        # The gradient of h is a product with the same rows that h is multiplied by.
        _gathered(dh, dy, w_down, None, None, None, rows, "none", plan, pack)
        _hidden(h, u, g, activation, dh, du, dg)
        if dx is not None:
            dx = launching.matrix(dx)
            _scattered(dx, du, w_up, None, rows, plan, pack)
            if dg is not None:
                by_gate = torch.empty_like(dx)
                _scattered(by_gate, dg, w_gate, None, rows, plan, pack)
                torch.add(dx, by_gate, out=dx)
        matrices = ((du, x, dw_up), (h, dy, dw_down), (dg, x, dw_gate))
        pairs = [(_transposed_product(a, b), out) for a, b, out in matrices if a is not None and out is not None]
        pairs += [
            (_column_sums(a), out) for a, out in ((du, db_up), (dg, db_gate)) if a is not None and out is not None
        ]
        _place(rows, w_up.shape[0], pairs)
        if db_down is not None:
            torch.sum(dy, 0, out=db_down)


_ffn_backward = launching.operator(
    "scatter_ffn_backward(Tensor dy, Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, "
    "Tensor neurons, str activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=lambda dy, x, up, down, gate, b_up, b_gate, neurons, activation, needs: _empty(
        x, (x.shape, up.shape, down.shape, up.shape, up.shape[:1], up.shape[:1], down.shape[1:]), needs
    ),
    run=_run_ffn_backward,
    repeated=launching.settings,
)


def _setup_ffn(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, _b_down, neurons, ctx.activation, _ = inputs
    ctx.save_for_backward(*tensors, neurons)


_ffn = launching.operator(
    "scatter_ffn(Tensor x, Tensor w_up, Tensor w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, Tensor? b_down, "
    "Tensor neurons, str activation, bool deterministic) -> Tensor",
    outputs=lambda x, w_up, w_down, *_: launching.empty((*x.shape[:-1], w_down.shape[1]), x.dtype, x),
    run=_run_ffn,
    repeated=launching.settings,
    setup_context=_setup_ffn,
    backward=functools.partial(_autograd, _ffn_backward, 7),
)
