"""Public functions, then two operators: the block of listed neurons, or its first product alone, and the gradients of both."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.linear import linear, product
from kernelbook.memory import accumulator, counters, empty, tl_accumulator
from kernelbook.operators import Op
from kernelbook.scatter_ffn import kernels
from kernelbook.tensors import has_aligned_rows, matrix, strided

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_FUNCTIONS)


def gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, *, activation: str | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``act(x weight[rows]^T + bias[rows])`` without copying the rows together; differentiable.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        weight: (N, K), the dtype of ``x``, any strides; wide loads need contiguous rows.
        rows: (L,) int64 or int32 ids in [0, N), in any order; one that is listed twice gives two columns. On the CPU and
            under ``KERNELBOOK_DEBUG=1`` they are checked; on a GPU without it an id out of range stands for a row of zeros
            (and a bias of zero).
        activation: as in :func:`scatter_ffn`, or ``None``.
        bias: (N,), the dtype of ``x``, or ``None``.

    Returns:
        (..., L) in the dtype of ``x``; sums are in float32 and rounded once. Under autocast in its dtype.

    Raises: as :func:`scatter_ffn`.
    """
    return _ffn(x, weight, None, None, bias, None, None, rows, activation)  # type: ignore[no-any-return]


def scatter_ffn(
    x: torch.Tensor, w_up: torch.Tensor, w_down: torch.Tensor, neurons: torch.Tensor | None, *,
    w_gate: torch.Tensor | None = None, activation: str = "relu",
    b_up: torch.Tensor | None = None, b_gate: torch.Tensor | None = None, b_down: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the listed neurons of a feed-forward block and no others; differentiable.

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
        b_up, b_gate: (N,) or ``None``.
        b_down: (K_out,) or ``None``.

    Returns:
        (..., K_out) in the dtype of ``x``, summed in float32 and rounded once; h is rounded to the dtype of ``x`` between the
        products, as in PyTorch. Under autocast in its dtype. Gradients of the weights have zeros in rows of neurons that are
        not listed. The same bits in every run: nothing is added atomically. ``plan`` in the package's ``kernels.py`` says
        which kernels run for which shape.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``activation`` or (where they are checked) an id is not as above.
    """
    arguments.check_choice("scatter_ffn", "activation", activation, ACTIVATIONS)
    if w_down is None:
        arguments.check_tensor("scatter_ffn", "w_down", w_down)
    if neurons is not None:
        return _ffn(x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, activation)  # type: ignore[no-any-return]
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = arguments.in_autocast_dtype(
        x, w_up, w_down, w_gate, b_up, b_gate, b_down
    )
    _ffn.check_once(x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, activation)
    act, h = _FUNCTIONS[activation], linear(x, w_up, b_up)
    h = act(h) if w_gate is None else act(linear(x, w_gate, b_gate)) * h
    return linear(h, w_down.t(), b_down)


# --- a product with listed rows, up or down -------------------------------------------------------------------------


class _Product(NamedTuple):
    """A product with listed rows, up or down."""

    activation: str | None = None
    launch: Launch | None = None  # None: rows are copied together for cuBLAS
    grid: tuple[int, ...] = ()
    split: int = 1  # parts of the reduction
    is_vector: bool = False  # or by tiles


def _choose_tiles(x: torch.Tensor, k_out: int, count: int, gated: bool = False) -> kernels.Plan:
    m, k, dtype = math.prod(x.shape[:-1]), x.shape[-1], str(x.dtype).removeprefix("torch.")
    return kernels.plan(m, k, k_out, count, dtype, gated, runtime.properties(x.device))


def _padded(count: int) -> int:
    return cdiv(count, kernels.PAD) * kernels.PAD


def _wide(weight: torch.Tensor) -> bool:
    """Tell whether rows are contiguous, begin on 16 bytes and end there."""
    return has_aligned_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0


def _plan_up(
    tiles: kernels.Plan, m: int, columns: int, weights: Sequence[Any], activation: str | None, pdl: bool = False
) -> _Product:
    if tiles.strategy == "packed":
        return _Product(activation)
    assert tiles.up is not None
    blocks, is_vector = tiles.up.kwargs, tiles.strategy == "vector"
    kernel, grid = kernels._gather_matmul_fwd_vector_kernel, [cdiv(columns, blocks["BLOCK_L"])]
    if not is_vector:
        kernel, grid = kernels._gather_matmul_fwd_tiles_kernel, [grid[0] * cdiv(m, blocks["BLOCK_M"]), tiles.up_split]
    elif not all(_wide(weight) for weight in weights if weight is not None):
        blocks = {**blocks, "BLOCK_K": min(blocks["BLOCK_K"], 512)}  # loads of one element: fewer at a time
    launch = launcher(
        kernel, ACTIVATION=activation or "none", ACC=tl_accumulator(weights[0].dtype), PDL=pdl, **blocks,
        num_warps=tiles.up.num_warps, repeatable=is_vector,
    )  # fmt: skip
    return _Product(activation, launch, tuple(grid), tiles.up_split, is_vector)


def _plan_down(tiles: kernels.Plan, m: int, weight: torch.Tensor, pdl: bool = False) -> _Product:
    """Plan the product; the first number of its grid is the tiles of the result."""
    if tiles.strategy == "packed":
        return _Product()
    assert tiles.down is not None
    blocks, split, is_vector = tiles.down.kwargs, tiles.down_split, tiles.strategy == "vector"
    kernel, results = kernels._scatter_ffn_fwd_down_vector_kernel, cdiv(weight.shape[1], blocks["BLOCK_C"])
    if not is_vector:
        kernel, results = kernels._scatter_ffn_fwd_down_tiles_kernel, results * cdiv(m, blocks["BLOCK_M"])
        blocks = blocks if pdl and _wide(weight) else {**blocks, "AHEAD": 0}
    options = {"num_warps": tiles.down.num_warps, **({"launch_pdl": True} if pdl else {})}
    launch = launcher(kernel, ACC=tl_accumulator(weight.dtype), PDL=pdl, **blocks, **options)
    return _Product(None, launch, (results, split), split, is_vector)


def _run_up(
    up: _Product, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, gate: Any, gate_bias: Any,
    rows: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    """Fill out (M, L or L_pad) with act(x weight[rows]^T) or its gated form, zero from L on. x (M, K). ``pack``: :func:`_pack`."""
    if out.numel() == 0:
        return
    if up.launch is None:
        padded = (x.shape[0], _padded(rows.shape[0]))
        whole = out if out.shape == padded else empty(padded, x.dtype, x)
        plain = up.activation is None and gate is None
        products = []
        for w, b in ((weight, bias), (gate, gate_bias)):
            if w is not None:
                products.append(whole if plain else empty(padded, x.dtype, x))
                # The bias goes into the product: added later it would meet a rounded sum, and near zero an activation's
                # slope jumps.
                packed_bias = None if b is None else pack(b[:, None])[:, 0]
                product(x, pack(w).t(), packed_bias, out=products[-1])
        if not plain:
            _run_hidden(whole, products[0], None if gate is None else products[1], up.activation)
        if whole is not out:
            out.copy_(whole[:, : out.shape[1]])
        return
    if up.is_vector and x.shape[0] * x.stride(0) >= 2**31:  # the kernel finds its few rows by 32 bits
        x = x.contiguous()
    (m, k), columns = x.shape, out.shape[1]
    operands = (
        rows,
        x, *x.stride(),
        weight, *weight.stride(),
        *strided(bias, 1), *strided(gate, 2), *strided(gate_bias, 1),
        out, out.stride(0),
    )  # fmt: skip
    numbers = (m, weight.shape[0], k, rows.shape[0], columns)
    if up.is_vector:
        up.launch(up.grid, *operands, *numbers)
    else:
        shares = _memory_of_shares(up, (1 if gate is None else 2, m, columns), x)
        up.launch(up.grid, *operands, *shares, *numbers, up.split)


def _memory_of_shares(product: _Product, shape: tuple[int, int, int], x: torch.Tensor) -> tuple[Any, int, Any]:
    """-> partial sums of this shape, the elements of a share, and semaphores of the tiles; where nothing is shared, ``None``."""
    results, m, columns = shape
    if product.split == 1:
        return None, 0, None
    partial = empty((results * product.split, m, columns), accumulator(x.dtype), x)
    return partial, m * columns, counters(product.grid[0], x.device)


def _run_down(
    down: _Product, y: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: Any, rows: torch.Tensor,
    pack: Callable[[torch.Tensor], torch.Tensor],
) -> None:  # fmt: skip
    """Fill y (M, K_out) with h[:, :L] weight[rows] + bias. h (M, L_pad) is zero from L on."""
    if down.launch is None:
        product(h, pack(weight), bias, out=y)
        return
    if y.numel() == 0:
        return
    m, k_out = y.shape
    down.launch(
        down.grid,
        rows,
        h, h.stride(0),
        weight, *weight.stride(),
        *strided(bias, 1),
        y, y.stride(0),
        *_memory_of_shares(down, (1, m, k_out), h),
        m, weight.shape[0], k_out, rows.shape[0], *(() if down.is_vector else (h.shape[1],)), down.split,
    )  # fmt: skip


def _pack(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """-> (L_pad, K), the listed rows; zeros for an id out of range, and from L on: cuBLAS is fast with whole sixteens."""
    (n, k), count = weight.shape, rows.shape[0]
    out = empty((_padded(count), k), weight.dtype, weight)
    if out.numel():
        config = kernels.COPY_CONFIG
        grid = (cdiv(out.shape[0], config.kwargs["BLOCK_L"]), cdiv(k, config.kwargs["BLOCK_K"]))
        launch = launcher(kernels._scatter_ffn_pack_kernel, **config.kwargs, num_warps=config.num_warps)
        launch(grid, rows, weight, *weight.stride(), out, n, k, count, out.shape[0])
    return out


def _run_hidden(
    h: torch.Tensor, u: torch.Tensor, g: Any, activation: str | None, dh: Any = None, du: Any = None, dg: Any = None
) -> None:
    """Fill h, and with dh also du and dg (if there is a g). All are as u (M, L_pad), and zero from L on as it is."""
    m, columns = u.shape
    if h.numel():
        config = kernels.HIDDEN_CONFIG
        launch = launcher(
            kernels._scatter_ffn_hidden_kernel, ACTIVATION=activation or "none", ACC=tl_accumulator(u.dtype),
            **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        grid = (cdiv(columns, config.kwargs["BLOCK_L"]), cdiv(m, config.kwargs["BLOCK_M"]))
        launch(grid, u, u.stride(0), g, dh, h, du, dg, m, columns)


# --- the block of listed neurons, or without w_down its first product ---------------------------------------------------
# What PyTorch computes, here and below, goes to ``out=``, which autocast leaves alone.


def check(
    x: Any, w_up: Any, w_down: Any, w_gate: Any, b_up: Any, b_gate: Any, b_down: Any, neurons: Any, activation: Any,
    op: str = "scatter_ffn",
) -> None:  # fmt: skip
    """Raise unless the arguments are right for a block of the public function ``op``, or without ``w_down`` for the other one."""
    choices: Sequence[object] = ACTIVATIONS
    up, bias, ids, down = "w_up", "b_up", "neurons", ()
    if w_down is None:
        op, up, bias, ids, choices = "gather_matmul", "weight", "bias", "rows", (*ACTIVATIONS, None)
    arguments.check_linear(op, x, up, w_up)
    n = w_up.shape[0]
    if w_down is not None:
        arguments.check_tensor(op, "w_down", w_down)
        down = w_down.shape
        if len(down) != 2 or down[0] != n:
            raise ValueError(f"{op}: w_down must have shape ({n}, K_out), one row a neuron, got {tuple(down)}")
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{op}: b_gate must be None where w_gate is None, got a tensor")
    arguments.check_choice(op, "activation", activation, choices)
    shapes = {"w_down": (w_down, down), "w_gate": (w_gate, w_up.shape), bias: (b_up, (n,)), "b_gate": (b_gate, (n,))}
    arguments.check_alike(op, x, **shapes, b_down=(b_down, down[1:]))
    if neurons is not None or w_down is None:
        arguments.check_indices(op, ids, neurons)
        arguments.check_same_device(op, x=x, **{ids: neurons})


class _Plan(NamedTuple):
    """What is decided for a kind of forward or backward pass."""

    columns: int  # of h; 0: no neuron is listed
    up: _Product = _Product()
    down: _Product = _Product()


def _plan(*args: Any) -> _Plan | None:
    x, w_up, w_down, w_gate, _, _, b_down, neurons, activation = args
    m, count, weights = math.prod(x.shape[:-1]), neurons.shape[0], (w_up, w_gate)
    if m == 0 or (count == 0 and b_down is None) or (w_down is not None and w_down.shape[1] == 0):
        return None
    if count == 0:
        return _Plan(0)
    if w_down is None:
        return _Plan(count, _plan_up(_choose_tiles(x, x.shape[-1], count), m, count, weights, activation))
    tiles = _choose_tiles(x, w_down.shape[1], count, w_gate is not None)
    pdl = (tiles.strategy == "vector" or count <= kernels.EARLY) and runtime.properties(x.device).has_pdl
    up = _plan_up(tiles, m, _padded(count), weights, activation, pdl)
    return _Plan(_padded(count), up, _plan_down(tiles, m, w_down, pdl))


def _run(plan: _Plan, outputs: tuple[torch.Tensor], *args: Any) -> None:
    x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, _ = args
    names = ("gather_matmul", "rows") if w_down is None else ("scatter_ffn", "neurons")
    arguments.check_index_values(*names, neurons, w_up.shape[0])
    if plan.columns == 0:
        outputs[0].copy_(b_down)
        return
    x, y, neurons = matrix(x), matrix(outputs[0]), neurons.contiguous()
    h = y if w_down is None else empty((x.shape[0], plan.columns), x.dtype, x)
    pack = functools.partial(_pack, neurons)
    _run_up(plan.up, h, x, w_up, b_up, w_gate, b_gate, neurons, pack)
    if w_down is not None:
        _run_down(plan.down, y, h, w_down, b_down, neurons, pack)


def _outputs(*args: Any) -> tuple[torch.Tensor]:
    x, _, w_down, *_, neurons, _ = args
    columns = neurons.shape[0] if w_down is None else w_down.shape[1]
    return (empty((*x.shape[:-1], columns), x.dtype, x),)


def _gradients(call: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    needs = [dtype is not None for dtype in call.wanted[:7]]
    return ffn_backward(dy, *call.saved, *call.kept, call.activation, needs)  # type: ignore[no-any-return]


# --- gradients of both --------------------------------------------------------------------------------------------------


def _outputs_backward(
    dy: torch.Tensor, x: torch.Tensor, w_up: torch.Tensor, w_down: Any, *others: Any
) -> tuple[torch.Tensor | None, ...]:
    """-> gradients in the order of the block's arguments."""
    up, down = w_up.shape, () if w_down is None else w_down.shape
    pairs = zip((x.shape, up, down, up, up[:1], up[:1], down[1:]), others[-1], strict=True)
    return tuple(empty(shape, x.dtype, x) if needed else None for shape, needed in pairs)


def _plan_backward(*args: Any) -> _Plan | None:
    """Plan the gradients. Products are recomputed: they are cheap beside the weights' gradients."""
    dy, x, w_up, w_down, w_gate, _, _, rows, *_ = args
    if dy.numel() == 0:
        return None
    m, padded = math.prod(x.shape[:-1]), _padded(rows.shape[0])
    tiles = _choose_tiles(x, x.shape[-1] if w_down is None else w_down.shape[1], rows.shape[0])
    return _Plan(padded, _plan_up(tiles, m, padded, (w_up, w_gate, w_down), None), _plan_down(tiles, m, w_up))


def _run_backward(plan: _Plan, outputs: tuple[Any, ...], *args: Any) -> None:
    dy, x, w_up, w_down, w_gate, b_up, b_gate, rows, activation, _ = args
    dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down = outputs
    x, dy, rows = matrix(x), matrix(dy), rows.contiguous()
    pack = functools.cache(functools.partial(_pack, rows))  # two products want the same rows
    g = h = dg = None
    if w_down is None:
        dh = F.pad(dy, (0, extra)) if (extra := plan.columns - rows.shape[0]) else dy.contiguous()
    else:
        dh = empty((x.shape[0], plan.columns), x.dtype, x)
    if w_down is None and activation is None:
        du = dh
    else:
        u, h, du = torch.empty_like(dh), torch.empty_like(dh), torch.empty_like(dh)
        _run_up(plan.up, u, x, w_up, b_up, None, None, rows, pack)
        if w_gate is not None:
            g, dg = torch.empty_like(dh), torch.empty_like(dh)
            _run_up(plan.up, g, x, w_gate, b_gate, None, None, rows, pack)
        if w_down is not None:
            _run_up(plan.up, dh, dy, w_down, None, None, None, rows, pack)
        _run_hidden(h, u, g, activation, dh, du, dg)
    if dx is not None:
        dx = matrix(dx)
        _run_down(plan.down, dx, du, w_up, None, rows, pack)
        if dg is not None:
            by_gate = torch.empty_like(dx)
            _run_down(plan.down, by_gate, dg, w_gate, None, rows, pack)
            torch.add(dx, by_gate, out=dx)
    products = ((du, x, dw_up), (h, dy, dw_down), (dg, x, dw_gate), (du, None, db_up), (dg, None, db_gate))
    pairs = [(_wgrad(a, b), out) for a, b, out in products if a is not None and out is not None]
    _place(rows, w_up.shape[0], pairs)
    if db_down is not None:
        torch.sum(dy, 0, out=db_down)


def _wgrad(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
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


# --- operators ------------------------------------------------------------------------------------------------------

_ffn = Op(
    "scatter_ffn(Tensor x, Tensor w_up, Tensor? w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, Tensor? b_down, "
    "Tensor? neurons, str? activation) -> Tensor",
    check=check,
    outputs=_outputs,
    plan=_plan,
    run=_run,
    saves=("x", "w_up", "w_down", "w_gate", "b_up", "b_gate"),
    keeps=("neurons",),
    autocast=("x", "w_up", "w_down", "w_gate", "b_up", "b_gate", "b_down"),
    backward=_gradients,
)
ffn_backward = Op(
    "scatter_ffn_backward(Tensor dy, Tensor x, Tensor w_up, Tensor? w_down, Tensor? w_gate, Tensor? b_up, Tensor? b_gate, "
    "Tensor neurons, str? activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=_outputs_backward,
    plan=_plan_backward,
    run=_run_backward,
    results=7,
)
