"""The public functions in the order of a call: observed or not, plan, new memory, launch; their operators beside them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher, operator
from kernelbook.linear import linear, product
from kernelbook.memory import empty
from kernelbook.nf4 import kernels
from kernelbook.observed import form, in_mode_of_forward, keep_mode, observed, wants_gradient
from kernelbook.packed import BLOCK_SIZES, DTYPES, FP4, NF4, CodeBook, NF4Tensor, products, quantized_scales
from kernelbook.plans import KeptPlans
from kernelbook.tensors import without_autocast

__all__ = ["BLOCK_SIZES", "FP4", "NF4", "CodeBook", "NF4Tensor", "nf4_dequantize", "nf4_matmul", "nf4_quantize"]

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
    tensors = *_parts(q), experts
    if observed(*tensors):
        _check_dequantize(q.packed, experts, len(q.shape))
        return _dequantize_operator(*tensors, None, q.shape, q.block_size, dtype)  # type: ignore[no-any-return]
    return _dequantize(*tensors, None, q.shape, q.block_size, dtype)


def _parts(q: NF4Tensor) -> tuple[Any, Any, Any, Any, Any, Any]:
    return q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset


def _check_dequantize(packed: torch.Tensor, experts: Any, dims: int) -> None:
    arguments.check_tensor("nf4_dequantize", "q.packed", packed, dtypes=(torch.uint8,))
    if experts is not None:
        arguments.check_indices("nf4_dequantize", "experts", experts)
        if not dims:
            raise ValueError("nf4_dequantize: experts must be None for a q without dimensions, got a tensor")
        arguments.check_same_device("nf4_dequantize", q=packed, experts=experts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _DequantizePlan:
    """What is decided for a kind of call."""

    shape: tuple[int, ...]  # of the result
    experts: int  # to choose from; without a choice the whole tensor is one expert
    length: int  # of an expert, in words or elements
    tiles: int  # of an expert
    launch: Launch | None  # None: there is nothing to decode
    grid: tuple[int]


_dequantize_plans = KeptPlans[_DequantizePlan]()


def _dequantize_plan(
    packed: torch.Tensor, nested: bool, experts: torch.Tensor | None, by_number: bool, shape: Sequence[int],
    block_size: int, dtype: torch.dtype,
) -> _DequantizePlan:  # fmt: skip
    """``by_number``: one expert is asked for, without a tensor of ids."""
    shape, words = tuple(shape), packed.data_ptr() % 4 == 0
    key = (packed.device, words, nested, form(experts), by_number, shape, block_size, dtype, runtime.plan_mode())
    plan = _dequantize_plans.get(key)
    if plan is not None:
        return plan
    _check_dequantize(packed, experts, len(shape))
    whole = experts is None and not by_number
    available, chosen = 1 if whole else shape[0], 1 if experts is None else experts.shape[0]
    out = shape if whole else (chosen, *shape[1:])
    length, tiles, launch = 0, 0, None
    if math.prod(out) and available:
        size, properties = math.prod(out) // chosen, runtime.properties(packed.device)
        if words and size % 8 == 0:
            kernel, config = kernels._nf4_dequantize_fwd_words_kernel, kernels.words_config(nested, properties)
            # By PTX, which is NVIDIA's, or by loads in the interpreter, where there is none.
            more = {"PREFETCH": "load" if runtime.INTERPRET else "instruction" if properties.is_nvidia else "none"}
            length, tile = size // 8, config.kwargs["BLOCK_W"] * config.kwargs["UNROLL"]
        else:
            kernel, config, more = kernels._nf4_dequantize_fwd_elements_kernel, kernels.ELEMENTS_CONFIG, {}
            length, tile = size, config.kwargs["BLOCK"]
        tiles = cdiv(length, tile)
        launch = launcher(
            kernel,
            HAS_EXPERTS=experts is not None, NESTED=nested, BLOCK_SIZE=block_size, NESTED_BLOCK=kernels.NESTED_BLOCK,
            **config.kwargs, **more, num_warps=config.num_warps,
            # A multiplication fused with the addition of the offset would round once, bitsandbytes rounds twice.
            enable_fp_fusion=False,
        )  # fmt: skip
    plan = _DequantizePlan(out, available, length, tiles, launch, (chosen * tiles,))
    _dequantize_plans.keep(key, plan)
    return plan


def _dequantize(
    packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, nested_absmax: Any, nested_code: Any,
    nested_offset: Any, experts: torch.Tensor | None, expert: int | None, shape: Sequence[int], block_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """-> (A, *shape[1:]) with ``experts``, (1, *shape[1:]) with one ``expert``, or shape."""
    plan = _dequantize_plan(packed, nested_absmax is not None, experts, expert is not None, shape, block_size, dtype)
    if experts is not None:
        arguments.check_index_values("nf4_dequantize", "experts", experts, plan.experts)
        experts = experts.contiguous()
    out = empty(plan.shape, dtype, packed)
    if plan.launch is None:
        return out.zero_()
    nested = (code, code, code) if nested_absmax is None else (nested_absmax, nested_code, nested_offset)
    listed = code if experts is None else experts
    plan.launch(
        plan.grid, packed, absmax, *nested, code, listed, expert or 0, out, plan.experts, plan.length, plan.tiles
    )
    return out


def _empty_dequantized(packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, experts, expert, shape, _, dtype = rest
    if experts is not None or expert is not None:
        shape = (1 if experts is None else experts.shape[0], *shape[1:])
    return empty(shape, dtype, packed)


_PARTS = "Tensor packed, Tensor absmax, Tensor code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset"

_dequantize_operator = operator(
    f"nf4_dequantize({_PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size, ScalarType dtype) "
    "-> Tensor",
    outputs=_empty_dequantized,
    run=_dequantize,
)


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
        code: the code book: ``NF4`` or ``FP4`` of ``kernelbook.nf4``, or another ``CodeBook`` of 16 values, which should lie
            in [-1, 1].

    Raises:
        TypeError: ``w`` is not a tensor of a supported dtype, ``block_size`` no integer, or ``code`` no ``CodeBook``.
        ValueError: ``block_size`` is another number, or ``code`` has not 16 values.
    """
    arguments.check_tensor("nf4_quantize", "w", w, dtypes=DTYPES)
    block_size = arguments.integer("nf4_quantize", "block_size", block_size)
    arguments.check_choice("nf4_quantize", "block_size", block_size, BLOCK_SIZES)
    if not isinstance(code, CodeBook):
        raise TypeError(f"nf4_quantize: code must be a CodeBook, got {type(code).__name__}")
    if len(code.values) != 16:
        raise ValueError(f"nf4_quantize: code must have 16 values, got {len(code.values)}")
    w = w.detach()  # codes have no gradient; with the mean of absmax autograd would keep one
    values = torch.tensor(code.values, dtype=torch.float32, device=w.device)
    packed, absmax = _quantize_operator(w, values, block_size) if observed(w) else _quantize(w, values, block_size)
    scales = quantized_scales(absmax) if double_quant else {"absmax": absmax}
    shape = tuple(w.shape)
    return NF4Tensor(
        packed, shape=shape, block_size=block_size, code=values, code_name=code.name, dtype=w.dtype, **scales
    )


def _quantize(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed, absmax = _quantized(w, code, block_size)
    if absmax.numel() == 0:
        return packed, absmax
    values, order = code.sort(stable=True)  # stable: FP4 has two zeros, and the first one takes the values below
    config = kernels.quantize_config(block_size)
    launch = launcher(
        kernels._nf4_quantize_fwd_kernel, BLOCK_SIZE=block_size, **config.kwargs, num_warps=config.num_warps
    )
    launch(
        (cdiv(absmax.numel(), config.kwargs["BLOCKS"]),),
        w.contiguous(), (values[:-1] + values[1:]) / 2, order.to(torch.int32), packed, absmax, w.numel(),
    )  # fmt: skip
    return packed, absmax


def _quantized(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> packed (ceil(n / 2),), absmax (ceil(n / block_size),)."""
    n = w.numel()
    return empty((-(-n // 2),), torch.uint8, w), empty((-(-n // block_size),), torch.float32, w)


_quantize_operator = operator(
    "nf4_quantize(Tensor w, Tensor code, SymInt block_size) -> (Tensor, Tensor)", outputs=_quantized, run=_quantize
)


# --- multiply -------------------------------------------------------------------------------------------------------


def nf4_matmul(x: torch.Tensor, q: NF4Tensor, expert: int | torch.Tensor) -> torch.Tensor:
    """``x @ W.T`` for the matrix W of one expert, without W in memory where ``x`` has few rows.

    On Hopper GPUs up to 64 rows of 16 bits (K a multiple of 64) go through tensor cores, which take W as it is decoded.
    With blocks of 64 or more and a W of 8 million elements or more, from 9 rows on of 4 million, they take the values of the
    code book in the dtype of ``x``, and the scales multiply sums in float32. With 64 rows, or blocks of 32, and a W of 32 rows
    a multiprocessor or more, they take W as :func:`nf4_dequantize` gives it. Otherwise up to 8 rows are multiplied in
    float32, with W as it is; more rows share the cost of dequantizing: W is dequantized first and multiplied by PyTorch.
    Within :func:`kernelbook.same_bits` any number of rows goes the same way: through tensor cores where the last of these
    kernels can, else W is made dense.

    Args:
        x: (..., K) float32, float16 or bfloat16, any strides.
        q: of shape (E, N, K).
        expert: an index into E, as a number or as a tensor of one integer, which is not synchronised on.

    Returns:
        (..., N) in the dtype of ``x``; differentiable in ``x``. On a GPU a tensor that is out of range gives zeros.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit, or ``expert`` is out of range: a number anywhere, a
            tensor on the CPU.
    """
    if not isinstance(q, NF4Tensor):
        raise TypeError(f"nf4_matmul: q must be an NF4Tensor, got {type(q).__name__}")
    experts, number = None, None
    if isinstance(expert, torch.Tensor):
        experts = expert if expert.ndim == 1 else expert.reshape(-1)
    else:
        number = arguments.integer("nf4_matmul", "expert", expert, "an integer or a tensor of one")
    tensors, settings = (x, *_parts(q), experts), (number, q.shape, q.block_size)
    if observed(*tensors):
        _check_matmul(x, q.packed, experts, q.shape)
        return _matmul_operator(*tensors, *settings)  # type: ignore[no-any-return]
    if wants_gradient(x):
        return _Matmul.apply(*tensors, *settings)  # type: ignore[no-any-return]
    return _matmul(*tensors, *settings)


def _check_matmul(x: torch.Tensor, packed: torch.Tensor, experts: Any, shape: Sequence[int]) -> None:
    arguments.check_tensor("nf4_matmul", "x", x, dtypes=DTYPES)
    if len(shape) != 3:
        raise ValueError(f"nf4_matmul: q must have shape (E, N, K), got {shape}")
    if x.ndim == 0 or x.shape[-1] != shape[2]:
        raise ValueError(f"nf4_matmul: x must have shape (..., {shape[2]}), got {tuple(x.shape)}")
    if experts is not None:
        arguments.check_indices("nf4_matmul", "expert", experts)
        arguments.check_shape("nf4_matmul", "expert", experts, (1,))
    arguments.check_same_device("nf4_matmul", x=x, q=packed, expert=experts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _MatmulPlan:
    """What is decided for a kind of product. Without a plan for tensor cores and without a launch W is made dense."""

    shape: tuple[int, ...]  # of the result
    m: int
    n: int
    k: int
    experts: int
    tensor_cores: products.Plan | None
    launch: Launch | None
    grid: tuple[int, int]


_matmul_plans = KeptPlans[_MatmulPlan]()


def _matmul_plan(
    x: torch.Tensor, packed: torch.Tensor, nested: bool, experts: torch.Tensor | None, shape: Sequence[int],
    block_size: int,
) -> _MatmulPlan:  # fmt: skip
    shape, alignment = tuple(shape), packed.data_ptr() % 16
    key = (form(x), packed.device, alignment, nested, form(experts), shape, block_size, runtime.plan_mode())
    plan = _matmul_plans.get(key)
    if plan is not None:
        return plan
    _check_matmul(x, packed, experts, shape)
    (num_experts, n, k), m, properties = shape, math.prod(x.shape[:-1]), runtime.properties(x.device)
    some = m > 0 and n > 0 and num_experts > 0
    same_bits = properties.same_bits  # then one way for any number of rows: through tensor cores, or W made dense
    tensor_cores, launch, grid = None, None, (0, 0)
    if some and alignment == 0 and (same_bits or kernels.for_tensor_cores(m, n, k, block_size, properties)):
        which = x.dtype, block_size, nested
        tensor_cores = products.plan(m, (1, n, k), False, *which, 0, False, True, True, False, properties)
    words = k > 0 and k % 8 == 0 and alignment % 4 == 0
    if some and tensor_cores is None and words and m <= kernels.MAX_MATMUL_M and not same_bits:
        tokens = min(1 << (m - 1).bit_length(), kernels.MATMUL_TOKENS)
        config = kernels.matmul_config(tokens, n, properties)
        launch = launcher(
            kernels._nf4_matmul_fwd_kernel,
            HAS_EXPERT=experts is not None, NESTED=nested, BLOCK_SIZE=block_size, NESTED_BLOCK=kernels.NESTED_BLOCK,
            BLOCK_M=tokens, **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        grid = cdiv(n, config.kwargs["ROWS"]), cdiv(m, tokens)
    plan = _MatmulPlan((*x.shape[:-1], n), m, n, k, num_experts, tensor_cores, launch, grid)
    _matmul_plans.keep(key, plan)
    return plan


def _matmul(
    x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, nested_absmax: Any,
    nested_code: Any, nested_offset: Any, experts: torch.Tensor | None, expert: int | None, shape: Sequence[int],
    block_size: int,
) -> torch.Tensor:  # fmt: skip
    """-> (..., N) from x (..., K) and one expert, a tensor or a number."""
    plan = _matmul_plan(x, packed, nested_absmax is not None, experts, shape, block_size)
    m, n, k = plan.m, plan.n, plan.k
    if experts is not None:
        arguments.check_index_values("nf4_matmul", "expert", experts, plan.experts)
    elif expert is None or not 0 <= expert < plan.experts:
        raise ValueError(f"nf4_matmul: expert must lie in [0, {plan.experts}), got {expert}")
    y = empty(plan.shape, x.dtype, x)
    if m * n == 0:
        return y
    nested = nested_absmax, nested_code, nested_offset
    if plan.tensor_cores is not None:
        x = x.reshape(m, k)
        # Kernels for a single matrix find a row of x, of 64 pairwise, of 16 by elements, by 32 bits.
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) >= 2**26:
            x = x.clone(memory_format=torch.contiguous_format)
        w = products.Matrices(packed, absmax, code, nested, block_size, (plan.experts, k, n))
        which, tiles = expert if experts is None else experts, cdiv(m, plan.tensor_cores.height)
        products.launch(plan.tensor_cores, None, 0, tiles, which, x, w, None, None, None, y.view(m, n), 1)
    elif plan.launch is not None:
        nested = (code, code, code) if nested_absmax is None else nested
        listed = code if experts is None else experts
        plan.launch(
            plan.grid, x.contiguous(), packed, absmax, *nested, code, listed, expert or 0, y, plan.experts, m, n, k // 8
        )
    else:
        [dense] = _dequantize(packed, absmax, code, *nested, experts, expert, shape, block_size, x.dtype)
        product(x.reshape(m, k), dense.t(), out=y.view(m, n))  # out=: autocast leaves it alone
    return y


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *tensors, expert, shape, block_size = inputs
    keep_mode(ctx)
    ctx.save_for_backward(*tensors)
    ctx.settings = expert, shape, block_size


@in_mode_of_forward
def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors  # once: activation checkpointing unpacks them no second time
    args = *tensors, *ctx.settings, dy.dtype
    w = _dequantize_operator(*args) if observed(dy, *tensors) else _dequantize(*args)
    with without_autocast(dy):
        return (linear(dy, w[0].t()) if ctx.same_bits else dy @ w[0], *[None] * 10)


class _Matmul(torch.autograd.Function):
    """A product that autograd records, where nobody observes the call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        _keep(ctx, inputs, None)
        return _matmul(*inputs)

    backward = staticmethod(_gradients)


_matmul_operator = operator(
    f"nf4_matmul(Tensor x, {_PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size) -> Tensor",
    outputs=lambda x, *rest: empty((*x.shape[:-1], rest[-2][1]), x.dtype, x),
    run=_matmul,
    setup_context=_keep,
    backward=_gradients,
)
