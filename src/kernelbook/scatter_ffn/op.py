"""The public functions, their custom operators, and the launches."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.scatter_ffn import kernels

__all__ = ["ACTIVATIONS", "fused_ffn", "gather_matmul", "scatter_ffn"]

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu")


# --- public functions -----------------------------------------------------------------------------------------------


def gather_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    *,
    activation: str | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
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
    op = "gather_matmul"
    x, weight, bias = arguments.in_autocast_dtype(x, weight, bias)
    arguments.check_linear(op, x, "weight", weight)
    _check_vector(op, x, "bias", bias, weight.shape[0])
    if activation is not None:
        arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    _check_ids(op, "rows", rows, x)
    out: torch.Tensor = _gather(x, weight, bias, rows, activation or "none")
    return out


def scatter_ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    neurons: torch.Tensor | None,
    *,
    w_gate: torch.Tensor | None = None,
    activation: str = "relu",
    deterministic: bool = False,
    b_up: torch.Tensor | None = None,
    b_gate: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """A feed-forward block of which only the listed neurons are computed; differentiable.

    ``h = act(x w_up[neurons]^T + b_up[neurons])``, or with a gate
    ``h = act(x w_gate[neurons]^T + b_gate[neurons]) * (x w_up[neurons]^T + b_up[neurons])``; then ``h w_down[neurons] + b_down``.
    Each weight matrix has one row a neuron, and the rows of other neurons are not read. The idea of choosing neurons by the
    input is from Liu et al., "Deja Vu: Contextual Sparsity for Efficient LLMs at Inference Time" (2023), section 3.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64, any strides.
        w_up: (N, K). w_down: (N, K_out): the transpose of what ``torch.nn.Linear`` stores. The dtype of ``x``, any strides;
            wide loads need contiguous rows.
        neurons: (L,) int64 or int32 ids in [0, N), in any order. A neuron that is listed twice counts twice. On the CPU and
            under ``KERNELBOOK_DEBUG=1`` they are checked; on a GPU without it an id out of range counts as no neuron.
            ``None``: every neuron, as a dense network (three calls of PyTorch).
        w_gate: (N, K) or ``None``.
        activation: ``"relu"``, ``"leaky_relu"`` (slope 0.01), ``"gelu"`` (with erf), ``"gelu_tanh"`` (the approximation that
            GPT-2 uses) or ``"silu"``.
        deterministic: ask for the same bits in every run. All kernels that the rules choose give them anyway, without atomic
            additions of floating-point numbers, so this and ``torch.use_deterministic_algorithms`` change nothing here.
        b_up, b_gate: (N,) or ``None``. b_down: (K_out,) or ``None``.

    Returns:
        (..., K_out) in the dtype of ``x``, summed in float32 and rounded once; h is rounded to the dtype of ``x`` between the
        products, as in PyTorch. Under autocast in its dtype. Gradients of the weights have zeros in rows of neurons that are
        not listed. ``plan`` in the room's
        ``kernels.py`` says which kernels run for which shape.

    Raises:
        TypeError: an argument is not a tensor of a supported dtype, or dtypes differ.
        ValueError: a shape, a device, ``activation`` or (where they are checked) an id is not as above.
    """
    op = "scatter_ffn"
    x, w_up, w_down, w_gate, b_up, b_gate, b_down = arguments.in_autocast_dtype(
        x, w_up, w_down, w_gate, b_up, b_gate, b_down
    )
    arguments.check_linear(op, x, "w_up", w_up)
    n = w_up.shape[0]
    arguments.check_tensor(op, "w_down", w_down)
    if w_down.ndim != 2 or w_down.shape[0] != n:
        raise ValueError(f"{op}: w_down must have shape ({n}, K_out), one row a neuron, got {tuple(w_down.shape)}")
    if w_gate is not None:
        arguments.check_tensor(op, "w_gate", w_gate)
        arguments.check_shape(op, "w_gate", w_gate, w_up.shape)
    arguments.check_same_dtype(op, x=x, w_down=w_down, w_gate=w_gate)
    arguments.check_same_device(op, x=x, w_down=w_down, w_gate=w_gate)
    _check_vector(op, x, "b_up", b_up, n)
    _check_vector(op, x, "b_gate", b_gate, n)
    _check_vector(op, x, "b_down", b_down, w_down.shape[1])
    if b_gate is not None and w_gate is None:
        raise ValueError(f"{op}: b_gate must be None where w_gate is None, got a tensor")
    arguments.check_choice(op, "activation", activation, ACTIVATIONS)
    if neurons is None:
        return _dense(x, w_up, w_down, w_gate, b_up, b_gate, b_down, activation)
    _check_ids(op, "neurons", neurons, x)
    y: torch.Tensor = _ffn(x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, activation, deterministic)
    return y


def fused_ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    neurons: torch.Tensor,
    *,
    activation: str = "relu",
    block_l: int = 32,
    add: bool = True,
) -> torch.Tensor:
    """What :func:`scatter_ffn` computes, in one kernel that adds into its result atomically: for comparison.

    Its sums depend on the order in which programs come, so its bits do. It needs zeros to begin with and one more pass that
    rounds. Not differentiable.

    Args:
        x: (M, K). w_up: (N, K). w_down: (N, K_out). neurons: (L,). activation: as in :func:`scatter_ffn`.
        block_l: neurons of one program, a power of two of at least 16.
        add: ``False`` stores without adding: a wrong result, to measure what the additions cost.

    Returns:
        (M, K_out) in the dtype of ``x``.
    """
    (m, k), k_out, dtype = x.shape, w_down.shape[1], x.dtype
    x, w_up, w_down = launching.in_kernel_dtype(x, w_up, w_down)
    neurons = neurons.contiguous()
    acc = launching.accumulator(x.dtype)
    y = torch.zeros((m, k_out), dtype=acc, device=x.device)
    config = kernels.fused_config(block_l)
    if m and k_out and neurons.shape[0]:
        with runtime.on_device_of(x):
            grid = (launching.cdiv(neurons.shape[0], block_l), launching.cdiv(m, config.kwargs["BLOCK_M"]))
            kernels._scatter_ffn_fwd_fused_kernel[grid](
                neurons,
                x, *x.stride(),
                w_up, *w_up.stride(),
                w_down, *w_down.stride(),
                y,
                m, w_up.shape[0], k, k_out, neurons.shape[0],
                ACTIVATION=activation, ADD=add, ACC=launching.tl_accumulator(acc), PRECISION=launching.precision(),
                **config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip
    return y.to(dtype)


def _dense(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    b_down: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    h = F.linear(x, w_up, b_up)
    h = (
        _torch_activation(h, activation)
        if w_gate is None
        else _torch_activation(F.linear(x, w_gate, b_gate), activation) * h
    )
    return F.linear(h, w_down.t(), b_down)


def _torch_activation(z: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    result: torch.Tensor = getattr(F, activation)(z)
    return result


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_vector(op: str, x: torch.Tensor, name: str, value: torch.Tensor | None, size: int) -> None:
    if value is not None:
        arguments.check_tensor(op, name, value)
        arguments.check_shape(op, name, value, (size,))
        arguments.check_same_dtype(op, x=x, **{name: value})
        arguments.check_same_device(op, x=x, **{name: value})


def _check_ids(op: str, name: str, ids: object, x: torch.Tensor) -> None:
    arguments.check_indices(op, name, ids)
    assert isinstance(ids, torch.Tensor)
    arguments.check_same_device(op, x=x, **{name: ids})


# --- custom operators -----------------------------------------------------------------------------------------------
# Products are recomputed in the backward pass, not kept: they are cheap beside the gradients of the weights.


@torch.library.custom_op("kernelbook::gather_matmul", mutates_args=())
def _gather(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
    rows: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    arguments.check_index_values("gather_matmul", "rows", rows, weight.shape[0])
    return _run_gather(x, weight, bias, rows, activation)


@_gather.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, activation: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows.shape[0]))


@torch.library.custom_op("kernelbook::gather_matmul_backward", mutates_args=())
def _gather_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045
    rows: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dx, dweight, dbias; empty where not needed."""
    return _run_gather_backward(dout, x, weight, bias, rows, activation, needs)


@_gather_backward.register_fake
def _(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(x.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True))  # type: ignore[return-value]


def _setup_gather(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, rows, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, rows)


def _gather_autograd(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    grads = _gather_backward(dout, *ctx.saved_tensors, ctx.activation, needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None, None


_gather.register_autograd(_gather_autograd, setup_context=_setup_gather)


@torch.library.custom_op("kernelbook::scatter_ffn", mutates_args=())
def _ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: Optional[torch.Tensor],  # noqa: UP045
    b_up: Optional[torch.Tensor],  # noqa: UP045
    b_gate: Optional[torch.Tensor],  # noqa: UP045
    b_down: Optional[torch.Tensor],  # noqa: UP045
    neurons: torch.Tensor,
    activation: str,
    deterministic: bool,
) -> torch.Tensor:
    arguments.check_index_values("scatter_ffn", "neurons", neurons, w_up.shape[0])
    return _run_ffn(x, w_up, w_down, w_gate, b_up, b_gate, b_down, neurons, activation)


@_ffn.register_fake
def _(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    b_down: torch.Tensor | None,
    neurons: torch.Tensor,
    activation: str,
    deterministic: bool,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[1]))


@torch.library.custom_op("kernelbook::scatter_ffn_backward", mutates_args=())
def _ffn_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: Optional[torch.Tensor],  # noqa: UP045
    b_up: Optional[torch.Tensor],  # noqa: UP045
    b_gate: Optional[torch.Tensor],  # noqa: UP045
    neurons: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """-> dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down; empty where not needed."""
    return _run_ffn_backward(dy, x, w_up, w_down, w_gate, b_up, b_gate, neurons, activation, needs)


@_ffn_backward.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    neurons: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    shapes = (x.shape, w_up.shape, w_down.shape, w_up.shape, w_up.shape[:1], w_up.shape[:1], w_down.shape[1:])
    return [x.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True)]


def _setup_ffn(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, _b_down, neurons, ctx.activation, _ = inputs
    ctx.save_for_backward(*tensors, neurons)


def _ffn_autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:7])
    grads = _ffn_backward(dy, *ctx.saved_tensors, ctx.activation, needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), None, None, None


_ffn.register_autograd(_ffn_autograd, setup_context=_setup_ffn)


# --- launches -------------------------------------------------------------------------------------------------------
# A whole call can be over in ten microseconds, so what the host does here counts.


def _run_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
    plan: kernels.Plan,
    out: torch.Tensor,
    tickets: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fills out (M, L_out). ``tickets`` become zero, for the kernel that comes next and may start early if ``pdl``."""
    (m, k), count, columns = x.shape, rows.shape[0], out.shape[1]
    acc = launching.accumulator(x.dtype)
    operands = (
        rows,
        x, *x.stride(),
        *launching.strided(weight, 2, x),
        *launching.strided(bias, 1, x),
        *launching.strided(gate, 2, x),
        *launching.strided(gate_bias, 1, x),
        out, out.stride(0),
    )  # fmt: skip
    constants = {
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "GATED": gate is not None,
        "HAS_GATE_BIAS": gate_bias is not None,
        "ACC": launching.tl_accumulator(acc),
        "TICKETS": 0 if tickets is None else tickets.shape[0],
        "PDL": pdl,
    }
    tickets = rows if tickets is None else tickets
    config = plan.up
    assert config is not None
    blocks = config.kwargs
    if plan.strategy == "vector":
        if not _wide(weight):
            blocks = {**blocks, "BLOCK_K": min(blocks["BLOCK_K"], 512)}  # loads of one element: fewer at a time
        kernels._gather_matmul_fwd_vector_kernel[(launching.cdiv(columns, blocks["BLOCK_L"]),)](
            *operands, tickets, m, weight.shape[0], k, count, columns,
            **constants, **blocks, num_warps=config.num_warps,
        )  # fmt: skip
        return
    split = plan.up_split
    tiles = launching.cdiv(m, blocks["BLOCK_M"]) * launching.cdiv(columns, blocks["BLOCK_L"])
    partial, own_tickets = out, out
    if split > 1:
        partial = torch.empty((split * (1 if gate is None else 2), m, columns), dtype=acc, device=x.device)
        own_tickets = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    kernels._gather_matmul_fwd_tiles_kernel[(tiles, split)](
        *operands, partial, m * columns, own_tickets, tickets, m, weight.shape[0], k, count, columns, split,
        **constants, PRECISION=launching.precision(), SPLIT=split > 1, **blocks, num_warps=config.num_warps,
    )  # fmt: skip


def _run_down(
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    plan: kernels.Plan,
    y: torch.Tensor,
    tickets: torch.Tensor,
    pdl: bool = False,
) -> None:
    """Fills y (M, K_out) from h (M, L_pad). ``tickets`` are zero, or are to be by the kernel before."""
    m, k_out = y.shape
    acc = launching.accumulator(h.dtype)
    config, split = plan.down, plan.down_split
    assert config is not None
    blocks = config.kwargs
    partial = torch.empty((split, m, k_out), dtype=acc, device=h.device) if split > 1 else y
    operands = (
        rows,
        h, h.stride(0),
        *launching.strided(weight, 2, h),
        *launching.strided(bias, 1, h),
        y, y.stride(0),
        partial, m * k_out,
        tickets,
        m, weight.shape[0], k_out, rows.shape[0],
    )  # fmt: skip
    constants = {"HAS_BIAS": bias is not None, "ACC": launching.tl_accumulator(acc), "SPLIT": split > 1, "PDL": pdl}
    launch = {"num_warps": config.num_warps, **({"launch_pdl": True} if pdl else {})}
    columns = launching.cdiv(k_out, blocks["BLOCK_C"])
    if plan.strategy == "vector":
        kernels._scatter_ffn_fwd_down_vector_kernel[(columns, split)](*operands, split, **constants, **blocks, **launch)
    else:
        if not (pdl and _wide(weight)):
            blocks = {**blocks, "AHEAD": 0}
        kernels._scatter_ffn_fwd_down_tiles_kernel[(launching.cdiv(m, blocks["BLOCK_M"]) * columns, split)](
            *operands, h.shape[1], split, **constants, PRECISION=launching.precision(), **blocks, **launch
        )


def _wide(weight: torch.Tensor) -> bool:
    """Whether rows are contiguous, begin on 16 bytes and end there."""
    return launching.has_aligned_rows(weight) and weight.shape[1] * weight.element_size() % 16 == 0


def _tickets(m: int, k_out: int, plan: kernels.Plan) -> int:
    """Tiles of y, each of which has a ticket if its sum is shared."""
    assert plan.down is not None
    blocks = plan.down.kwargs
    return (
        launching.cdiv(m, blocks.get("BLOCK_M", m)) * launching.cdiv(k_out, blocks["BLOCK_C"])
        if plan.down_split > 1
        else 0
    )


def _pack(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """-> (L_pad, K), the listed rows; zeros for an id out of range, and from L on: cuBLAS is fast with whole sixteens."""
    (n, k), count = weight.shape, rows.shape[0]
    out = torch.empty((_padded(count), k), dtype=weight.dtype, device=weight.device)
    if out.numel():
        blocks = kernels.COPY_CONFIG.kwargs
        grid = (launching.cdiv(out.shape[0], blocks["BLOCK_L"]), launching.cdiv(k, blocks["BLOCK_K"]))
        kernels._scatter_ffn_pack_kernel[grid](
            rows, weight, *weight.stride(), out, n, k, count, out.shape[0], **blocks,
            num_warps=kernels.COPY_CONFIG.num_warps,
        )  # fmt: skip
    return out


def _hidden(
    u: torch.Tensor, g: torch.Tensor | None, activation: str, dh: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """-> h, and with dh also du and dg (if there is a g). All are as u (M, L_pad), and zero from L on as it is."""
    h = torch.empty_like(u)
    du = None if dh is None else torch.empty_like(u)
    dg = None if dh is None or g is None else torch.empty_like(u)
    m, columns = u.shape
    if h.numel():
        blocks = kernels.HIDDEN_CONFIG.kwargs
        grid = (launching.cdiv(columns, blocks["BLOCK_L"]), launching.cdiv(m, blocks["BLOCK_M"]))
        kernels._scatter_ffn_hidden_kernel[grid](
            u, u.stride(0),
            u if g is None else g,
            u if dh is None else dh,
            h, u if du is None else du, u if dg is None else dg,
            m, columns,
            ACTIVATION=activation, GATED=g is not None, WITH_GRADIENTS=dh is not None,
            ACC=launching.tl_accumulator(u.dtype),
            **blocks, num_warps=kernels.HIDDEN_CONFIG.num_warps,
        )  # fmt: skip
    return h, du, dg


def _place(rows: torch.Tensor, n: int, *gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
    """For each gradient (L, K) or (L,), one a place of the list, that of all N rows."""
    if all(gradient is None for gradient in gradients):
        return list(gradients)
    by_row, order = torch.sort(rows, stable=True)
    bounds = torch.searchsorted(by_row, torch.arange(n + 1, dtype=rows.dtype, device=rows.device))
    placed: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is None:
            placed.append(None)
            continue
        k = gradient.shape[1] if gradient.ndim == 2 else 1
        out = torch.empty((n, *gradient.shape[1:]), dtype=gradient.dtype, device=rows.device)
        if out.numel():
            blocks = kernels.PLACE_CONFIG.kwargs if gradient.ndim == 2 else kernels.PLACE_VECTOR_CONFIG.kwargs
            grid = (launching.cdiv(n, blocks["BLOCK_N"]), launching.cdiv(k, blocks["BLOCK_K"]))
            kernels._scatter_ffn_place_kernel[grid](
                order, bounds, gradient, out, n, k,
                ACC=launching.tl_accumulator(out.dtype), **blocks, num_warps=kernels.PLACE_CONFIG.num_warps,
            )  # fmt: skip
        placed.append(out)
    return placed


def _packed_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """x weight[rows]^T + bias[rows], (M, L_pad)."""
    packed = _pack(weight, rows).t()
    # The bias goes into the product: added later it would meet a rounded sum, and near zero an activation's slope jumps.
    return torch.mm(x, packed) if bias is None else torch.addmm(_pack(bias[:, None], rows)[:, 0], x, packed)


def _products(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
    plan: kernels.Plan,
    columns: int,
) -> torch.Tensor:
    """act(x weight[rows]^T) or its gated form, (M, columns), of which those from L on are zero. x (M, K)."""
    if plan.strategy == "packed":
        out = _packed_product(x, weight, bias, rows)
        if activation != "none" or gate is not None:
            out = _hidden(out, None if gate is None else _packed_product(x, gate, gate_bias, rows), activation)[0]
        return out[:, :columns].contiguous()
    out = torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
    if out.numel():
        _run_up(x, weight, bias, gate, gate_bias, rows, activation, plan, out)
    return out


def _scattered(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, plan: kernels.Plan
) -> torch.Tensor:
    """h[:, :L] weight[rows] + bias, (M, K_out). h (M, L_pad) is zero from L on."""
    if plan.strategy == "packed":
        packed = _pack(weight, rows)
        return torch.mm(h, packed) if bias is None else torch.addmm(bias, h, packed)
    y = torch.empty((h.shape[0], weight.shape[1]), dtype=h.dtype, device=h.device)
    if y.numel():
        tickets = torch.zeros(_tickets(y.shape[0], y.shape[1], plan), dtype=torch.int32, device=h.device)
        _run_down(h, weight, bias, rows, plan, y, tickets)
    return y


def _plan(
    x: torch.Tensor, k: int, k_out: int, rows: torch.Tensor, dtype: torch.dtype, *, gated: bool = False
) -> kernels.Plan:
    name = str(dtype).removeprefix("torch.")
    return kernels.plan(x.shape[0], k, k_out, rows.shape[0], name, gated, runtime.properties())


def _padded(count: int) -> int:
    return launching.cdiv(count, kernels.PAD) * kernels.PAD


def _run_gather(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, activation: str
) -> torch.Tensor:
    leading, dtype = x.shape[:-1], x.dtype
    x = launching.matrix(x)
    weight, bias = launching.in_kernel_dtype(weight, bias)
    rows = rows.contiguous()
    with runtime.on_device_of(x), launching.without_autocast(x):
        plan = _plan(x, x.shape[1], x.shape[1], rows, dtype)
        out = _products(x, weight, bias, None, None, rows, activation, plan, rows.shape[0])
    return launching.reshaped(out.to(dtype), *leading, rows.shape[0])


def _run_ffn(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    b_down: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    leading, dtype = x.shape[:-1], x.dtype
    x = launching.matrix(x)
    w_up, w_down, w_gate = launching.in_kernel_dtype(w_up, w_down, w_gate)
    b_up, b_gate, b_down = launching.in_kernel_dtype(b_up, b_gate, b_down)
    rows = rows.contiguous()
    (m, k), k_out, count = x.shape, w_down.shape[1], rows.shape[0]
    with runtime.on_device_of(x), launching.without_autocast(x):
        plan = _plan(x, k, k_out, rows, dtype, gated=w_gate is not None)
        if m == 0 or count == 0 or k_out == 0:
            y = torch.zeros((m, k_out), dtype=x.dtype, device=x.device)
            y = y if b_down is None else y + b_down
        elif plan.strategy == "packed":
            h = _products(x, w_up, b_up, w_gate, b_gate, rows, activation, plan, _padded(count))
            y = _scattered(h, w_down, b_down, rows, plan)
        else:
            h = torch.empty((m, _padded(count)), dtype=x.dtype, device=x.device)
            y = torch.empty((m, k_out), dtype=x.dtype, device=x.device)
            num_tickets = _tickets(m, k_out, plan)
            tickets = torch.empty(num_tickets, dtype=torch.int32, device=x.device) if num_tickets else None
            pdl = kernels.has_pdl(runtime.properties()) and (plan.strategy == "vector" or count <= kernels.EARLY)
            _run_up(x, w_up, b_up, w_gate, b_gate, rows, activation, plan, h, tickets, pdl)
            _run_down(h, w_down, b_down, rows, plan, y, rows if tickets is None else tickets, pdl)
    return launching.reshaped(y.to(dtype), *leading, k_out)


def _run_gather_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs_dx, needs_dw, needs_db = needs
    leading, dtype, (n, k) = x.shape[:-1], x.dtype, weight.shape
    x, dout = launching.matrix(x), launching.matrix(dout)
    weight, bias = launching.in_kernel_dtype(weight, bias)
    rows = rows.contiguous()
    with runtime.on_device_of(x), launching.without_autocast(x):
        plan = _plan(x, k, k, rows, dtype)
        columns = _padded(rows.shape[0])
        dz = _pad(dout, columns)
        if activation != "none":
            z = _products(x, weight, bias, None, None, rows, "none", plan, columns)
            _, du, _ = _hidden(z, None, activation, dz)
            assert du is not None
            dz = du
        dx = _scattered(dz, weight, None, rows, plan) if needs_dx else x.new_empty(0)
        dw, db = _place(rows, n, torch.mm(dz.t(), x) if needs_dw else None, _column_sums(dz) if needs_db else None)
    return (
        dx.to(dtype).reshape(*leading, k) if needs_dx else dx.to(dtype),
        x.new_empty(0, dtype=dtype) if dw is None else dw.to(dtype),
        x.new_empty(0, dtype=dtype) if db is None else db.to(dtype),
    )


def _column_sums(dz: torch.Tensor) -> torch.Tensor:
    return dz.sum(0, dtype=launching.accumulator(dz.dtype)).to(dz.dtype)


def _pad(h: torch.Tensor, columns: int) -> torch.Tensor:
    """(M, columns), contiguous rows, with zeros from where h ends."""
    if h.shape[1] == columns:
        return h.contiguous()
    return F.pad(h, (0, columns - h.shape[1]))


def _run_ffn_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    w_gate: torch.Tensor | None,
    b_up: torch.Tensor | None,
    b_gate: torch.Tensor | None,
    rows: torch.Tensor,
    activation: str,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    needs_dx, needs_up, needs_down, needs_gate, needs_bu, needs_bg, needs_bd = needs
    leading, dtype, (n, k), k_out = x.shape[:-1], x.dtype, w_up.shape, w_down.shape[1]
    x, dy = launching.matrix(x), launching.matrix(dy)
    w_up, w_down, w_gate = launching.in_kernel_dtype(w_up, w_down, w_gate)
    b_up, b_gate = launching.in_kernel_dtype(b_up, b_gate)
    rows = rows.contiguous()
    count = rows.shape[0]
    with runtime.on_device_of(x), launching.without_autocast(x):
        plan = _plan(x, k, k_out, rows, dtype)
        columns = _padded(count)
        u = _products(x, w_up, b_up, None, None, rows, "none", plan, columns)
        g = None if w_gate is None else _products(x, w_gate, b_gate, None, None, rows, "none", plan, columns)
        # The gradient of h is a product with the same rows that h is multiplied by.
        dh = _products(dy, w_down, None, None, None, rows, "none", plan, columns)
        h, du, dg = _hidden(u, g, activation, dh)
        assert du is not None
        dx = None
        if needs_dx:
            dx = _scattered(du, w_up, None, rows, plan)
            if dg is not None and w_gate is not None:
                dx = dx + _scattered(dg, w_gate, None, rows, plan)
        dw_up, dw_down, dw_gate, db_up, db_gate = _place(
            rows, n,
            torch.mm(du.t(), x) if needs_up else None,
            torch.mm(h.t(), dy) if needs_down else None,
            torch.mm(dg.t(), x) if needs_gate and dg is not None else None,
            _column_sums(du) if needs_bu else None,
            _column_sums(dg) if needs_bg and dg is not None else None,
        )  # fmt: skip
        db_down = _column_sums(dy) if needs_bd else None
        dx = None if dx is None else dx.reshape(*leading, k)
    found = (dx, dw_up, dw_down, dw_gate, db_up, db_gate, db_down)
    return [x.new_empty(0, dtype=dtype) if t is None else t.to(dtype) for t in found]
