"""The public functions, their custom operators, and the launches."""

from typing import Any, Optional

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.nf4 import kernels
from kernelbook.packed import BLOCK_SIZES, DTYPES, FP4, NF4, CodeBook, NF4Tensor

# isort: split
import triton

__all__ = ["BLOCK_SIZES", "FP4", "NF4", "CodeBook", "NF4Tensor", "nf4_dequantize", "nf4_matmul", "nf4_quantize"]

MAX_PROGRAMS = 2**31 - 1

# --- dequantize -----------------------------------------------------------------------------------------------------


def nf4_dequantize(
    q: NF4Tensor, *, experts: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The tensor that ``q`` stands for, or only some of its experts: nothing of the others is read.

    Every element is code * absmax in float32, rounded once to ``dtype``: bit for bit what bitsandbytes gives.

    Args:
        q: what :func:`nf4_quantize` or :meth:`NF4Tensor.from_bitsandbytes` returned.
        experts: (A,) int64 or int32, indices into the first dimension of ``q.shape``, in any order, repeated or none.
            ``None``: everything. On a GPU an id out of range gives zeros (``KERNELBOOK_DEBUG=1``: an error).
        dtype: float32, float16 or bfloat16.

    Returns:
        (A, *q.shape[1:]), or ``q.shape`` without ``experts``; contiguous. It is not differentiable.

    Raises:
        TypeError: ``q`` is not an NF4Tensor, or ``experts`` not a tensor of integers.
        ValueError: ``experts`` has another shape or device or, on the CPU, an entry out of range; ``dtype`` is another.
    """
    if not isinstance(q, NF4Tensor):
        raise TypeError(f"nf4_dequantize: q must be an NF4Tensor, got {type(q).__name__}")
    arguments.check_choice("nf4_dequantize", "dtype", dtype, DTYPES)
    arguments.check_tensor("nf4_dequantize", "q.packed", q.packed, dtypes=(torch.uint8,))
    if experts is not None:
        arguments.check_indices("nf4_dequantize", "experts", experts)
        if not q.shape:
            raise ValueError("nf4_dequantize: experts must be None for a q without dimensions, got a tensor")
        arguments.check_same_device("nf4_dequantize", q=q.packed, experts=experts)
    out: torch.Tensor = _dequantize(
        q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset,
        experts, list(q.shape), q.block_size, dtype,
    )  # fmt: skip
    return out


def _dequantized_shape(experts: torch.Tensor | None, shape: list[int]) -> list[int]:
    return list(shape) if experts is None else [experts.shape[0], *shape[1:]]


def _prefetch(device: torch.device) -> str:
    """How the word kernel prefetches: by PTX, which is NVIDIA's, or by loads where there is none."""
    if runtime.INTERPRET:
        return "load"
    return "instruction" if runtime.properties(device).arch.startswith("sm_") else "none"


@torch.library.custom_op("kernelbook::nf4_dequantize", mutates_args=())
def _dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: Optional[torch.Tensor],  # noqa: UP045
    nested_code: Optional[torch.Tensor],  # noqa: UP045
    nested_offset: Optional[torch.Tensor],  # noqa: UP045
    experts: Optional[torch.Tensor],  # noqa: UP045
    shape: list[int],
    block_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """-> (A, *shape[1:]) or shape."""
    out = torch.empty(_dequantized_shape(experts, shape), dtype=runtime.kernel_dtype(dtype), device=packed.device)
    if experts is not None:
        arguments.check_index_values("nf4_dequantize", "experts", experts, shape[0])
    if out.numel() == 0:
        return out.to(dtype)
    # Without experts the whole tensor is one expert.
    available, chosen = (1, 1) if experts is None else (shape[0], experts.shape[0])
    size = out.numel() // chosen
    packed, experts = packed.contiguous(), None if experts is None else experts.contiguous()
    if available == 0:
        return out.zero_().to(dtype)
    words = size % 8 == 0 and packed.data_ptr() % 4 == 0
    if words:
        config = kernels.words_config(nested_absmax is not None)
        kernel, length, tile = kernels._nf4_dequantize_fwd_words_kernel, size // 8, config.kwargs["BLOCK_W"]
        tile *= config.kwargs["UNROLL"]
        more = {"PREFETCH": _prefetch(packed.device)}
    else:
        config, more = kernels.ELEMENTS_CONFIG, {}
        kernel, length, tile = kernels._nf4_dequantize_fwd_elements_kernel, size, config.kwargs["BLOCK"]
    tiles = triton.cdiv(length, tile)
    if chosen * tiles > MAX_PROGRAMS:
        raise ValueError(f"nf4_dequantize: the output must have fewer than {MAX_PROGRAMS} tiles, got {chosen * tiles}")
    nested = (nested_absmax, nested_code, nested_offset)
    with runtime.on_device_of(packed):
        kernel[(chosen * tiles,)](
            packed.view(torch.int32) if words else packed,
            absmax.contiguous(),
            *(code if tensor is None else tensor.contiguous() for tensor in nested),
            code.contiguous(),
            code if experts is None else experts,
            out,
            available, length, tiles,
            experts is not None, nested_absmax is not None,
            block_size, kernels.NESTED_BLOCK,
            **config.kwargs, **more, num_warps=config.num_warps,
            # A multiplication fused with the addition of the offset would round once, bitsandbytes rounds twice.
            enable_fp_fusion=False,
        )  # fmt: skip
    return out.to(dtype)


@_dequantize.register_fake
def _(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    nested_offset: torch.Tensor | None,
    experts: torch.Tensor | None,
    shape: list[int],
    block_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty(_dequantized_shape(experts, shape), dtype=dtype, device=packed.device)


# --- quantize -------------------------------------------------------------------------------------------------------


def nf4_quantize(
    w: torch.Tensor, *, block_size: int = 64, double_quant: bool = False, code: CodeBook = NF4
) -> NF4Tensor:
    """Quantizes ``w`` to 4 bits an element with one absmax a block (Dettmers et al. 2023, section 3).

    Packed bytes and absmax are, on every device, those of bitsandbytes' CPU backend. (Its GPU kernels multiply by an
    approximate reciprocal of absmax, so there a value next to the middle of two codes may go to the other one.) With
    double quantization absmax minus its mean goes to the nearest of 256 values, in blocks of 256.

    Args:
        w: any shape and strides, float32, float16 or bfloat16; blocks run in the order of its elements, the last block
            may be short. For :func:`nf4_dequantize` the first dimension counts experts.
        block_size: 32, 64, ..., 4096.
        double_quant: quantize the absmax values too, to 8 bits.
        code: the code book, ``NF4``, ``FP4`` or any 16 values in [-1, 1].

    Raises:
        TypeError: ``w`` is not a tensor of a supported dtype.
        ValueError: ``block_size`` is another number, or ``code`` has not 16 values.
    """
    arguments.check_tensor("nf4_quantize", "w", w, dtypes=DTYPES)
    arguments.check_choice("nf4_quantize", "block_size", block_size, BLOCK_SIZES)
    if not isinstance(code, CodeBook):
        raise TypeError(f"nf4_quantize: code must be a CodeBook, got {type(code).__name__}")
    if len(code.values) != 16:
        raise ValueError(f"nf4_quantize: code must have 16 values, got {len(code.values)}")
    w = w.detach()  # codes have no gradient; with the mean of absmax autograd would keep one
    values = torch.tensor(code.values, dtype=torch.float32, device=w.device)
    packed, absmax = _quantize(w, values, block_size)
    nested = {}
    if double_quant:
        # The mean of no blocks would be NaN.
        offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
        nested_code = _dynamic_code().to(w.device)
        absmax, nested_absmax = _quantize_absmax(absmax - offset, nested_code)
        nested = {"nested_absmax": nested_absmax, "nested_code": nested_code, "nested_offset": offset}
    return NF4Tensor(
        packed=packed,
        absmax=absmax,
        shape=tuple(w.shape),
        block_size=block_size,
        code=values,
        code_name=code.name,
        dtype=w.dtype,
        **nested,
    )


@torch.library.custom_op("kernelbook::nf4_quantize", mutates_args=())
def _quantize(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> packed (ceil(n / 2),) uint8, absmax (ceil(n / block_size),) float32."""
    n = w.numel()
    packed = torch.empty(-(-n // 2), dtype=torch.uint8, device=w.device)
    absmax = torch.empty(-(-n // block_size), dtype=torch.float32, device=w.device)
    if n == 0:
        return packed, absmax
    values, order = code.sort(stable=True)  # stable: FP4 has two zeros, and the first one takes the values below
    config = kernels.quantize_config(block_size)
    with runtime.on_device_of(w):
        kernels._nf4_quantize_fwd_kernel[(triton.cdiv(absmax.numel(), config.kwargs["BLOCKS"]),)](
            w.to(runtime.kernel_dtype(w.dtype)).contiguous(),
            (values[:-1] + values[1:]) / 2, order.to(torch.int32),
            packed, absmax,
            n,
            block_size, **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
    return packed, absmax


@_quantize.register_fake
def _(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = w.numel()
    return w.new_empty(-(-n // 2), dtype=torch.uint8), w.new_empty(-(-n // block_size), dtype=torch.float32)


def _dynamic_code() -> torch.Tensor:
    """(256,): seven decades with 2, 4, ..., 128 values, zero, and one (Dettmers 2015)."""
    plain: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are where a model is loaded
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, **plain)
        positive.append(10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2))
    below_one = torch.cat(positive)
    return torch.cat([below_one, -below_one, torch.tensor([0.0, 1.0], **plain)]).sort().values


def _quantize_absmax(centered: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> indices (blocks,) uint8 into ``code``, and scales (ceil(blocks / 256),). One value in 64 or fewer comes here."""
    n, size = centered.numel(), kernels.NESTED_BLOCK
    groups = torch.nn.functional.pad(centered, (0, -n % size)).view(-1, size)
    scale = groups.abs().amax(1)
    scaled = (groups * (1.0 / scale.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    index = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2).to(torch.uint8)
    return index.view(-1)[:n].clone(), scale  # no view of the padding: it would be saved along


# --- multiply -------------------------------------------------------------------------------------------------------


def nf4_matmul(x: torch.Tensor, q: NF4Tensor, expert: int | torch.Tensor) -> torch.Tensor:
    """``x @ W.T`` for the matrix W of one expert, without W in memory where ``x`` has few rows.

    Up to 8 rows one kernel looks up each element of W in registers and multiplies there, in float32, without rounding
    W to the dtype of ``x``; more rows share the cost of dequantizing, so there W is dequantized first and multiplied by
    PyTorch.

    Args:
        x: (..., K) float32, float16 or bfloat16, any strides.
        q: of shape (E, N, K).
        expert: an index into E, as a number or as a tensor of one integer, which is not synchronised on.

    Returns:
        (..., N) in the dtype of ``x``; differentiable in ``x``. On a GPU an expert out of range gives zeros.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit, or ``expert`` is out of range on the CPU.
    """
    arguments.check_tensor("nf4_matmul", "x", x, dtypes=DTYPES)
    if not isinstance(q, NF4Tensor):
        raise TypeError(f"nf4_matmul: q must be an NF4Tensor, got {type(q).__name__}")
    if len(q.shape) != 3:
        raise ValueError(f"nf4_matmul: q must have shape (E, N, K), got {q.shape}")
    if x.ndim == 0 or x.shape[-1] != q.shape[2]:
        raise ValueError(f"nf4_matmul: x must have shape (..., {q.shape[2]}), got {tuple(x.shape)}")
    if isinstance(expert, torch.Tensor):
        experts = expert.reshape(-1)
        arguments.check_indices("nf4_matmul", "expert", experts)
        arguments.check_shape("nf4_matmul", "expert", experts, (1,))
    else:
        if not isinstance(expert, torch.SymInt) and not hasattr(expert, "__index__"):
            raise TypeError(f"nf4_matmul: expert must be an integer or a tensor of one, got {expert!r}")
        experts = torch.full((1,), expert, dtype=torch.int64, device=x.device)
    arguments.check_same_device("nf4_matmul", x=x, q=q.packed, expert=experts)
    y: torch.Tensor = _matmul(
        x.reshape(-1, x.shape[-1]), q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset,
        experts, list(q.shape), q.block_size,
    )  # fmt: skip
    return y.view(*x.shape[:-1], q.shape[1])


@torch.library.custom_op("kernelbook::nf4_matmul", mutates_args=())
def _matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: Optional[torch.Tensor],  # noqa: UP045
    nested_code: Optional[torch.Tensor],  # noqa: UP045
    nested_offset: Optional[torch.Tensor],  # noqa: UP045
    experts: torch.Tensor,
    shape: list[int],
    block_size: int,
) -> torch.Tensor:
    """x (M, K), one expert -> (M, N)."""
    num_experts, n, k = shape
    m = x.shape[0]
    arguments.check_index_values("nf4_matmul", "expert", experts, num_experts)
    y = torch.empty((m, n), dtype=runtime.kernel_dtype(x.dtype), device=x.device)
    if y.numel() == 0:
        return y.to(x.dtype)
    words = k % 8 == 0 and packed.is_contiguous() and packed.data_ptr() % 4 == 0
    if m > kernels.MAX_MATMUL_M or not words or k == 0 or num_experts == 0:
        w = _dequantize(
            packed, absmax, code, nested_absmax, nested_code, nested_offset, experts, shape, block_size, x.dtype
        )
        with launching.without_autocast(x):
            return x @ w[0].t()
    tokens = min(triton.next_power_of_2(m), kernels.MATMUL_TOKENS)
    config = kernels.matmul_config(tokens, n)
    nested = (nested_absmax, nested_code, nested_offset)
    with runtime.on_device_of(x):
        kernels._nf4_matmul_fwd_kernel[(triton.cdiv(n, config.kwargs["ROWS"]), triton.cdiv(m, tokens))](
            x.to(runtime.kernel_dtype(x.dtype)).contiguous(),
            packed.view(torch.int32),
            absmax.contiguous(),
            *(code if tensor is None else tensor.contiguous() for tensor in nested),
            code.contiguous(),
            experts,
            y,
            num_experts, m, n, k // 8,
            nested_absmax is not None,
            block_size, kernels.NESTED_BLOCK,
            tokens, **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
    return y.to(x.dtype)


@_matmul.register_fake
def _(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    nested_offset: torch.Tensor | None,
    experts: torch.Tensor,
    shape: list[int],
    block_size: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *tensors, shape, block_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.shape, ctx.block_size = shape, block_size


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w = _dequantize(*ctx.saved_tensors, ctx.shape, ctx.block_size, dy.dtype)
    with launching.without_autocast(dy):
        return (dy @ w[0], *[None] * 9)


_matmul.register_autograd(_autograd, setup_context=_setup_context)
