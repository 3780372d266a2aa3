"""Public functions, each followed by its operator: check, outputs, plan, run."""

import dataclasses
import math
from typing import Any

import torch

from kernelbook import arguments, runtime  # before Triton, which it sets up
from kernelbook.launch import Launch, cdiv, launcher
from kernelbook.linear import linear, product
from kernelbook.memory import empty
from kernelbook.nf4 import kernels
from kernelbook.operators import Op
from kernelbook.packed import (
    BLOCK_SIZES,
    DTYPES,
    FP4,
    NF4,
    CodeBook,
    NF4Tensor,
    kind_of_scale,
    products,
    quantized_scales,
)

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
    return _dequantize(*_parts(q), experts, None, q.shape, q.block_size, dtype)  # type: ignore[no-any-return]


PARTS = "Tensor packed, Tensor absmax, Tensor code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset"


def _parts(q: NF4Tensor) -> tuple[Any, Any, Any, Any, Any, Any]:
    return q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset


def _check_dequantize(*args: Any) -> None:
    packed, *_, experts, _, shape, _, dtype = args
    arguments.check_choice("nf4_dequantize", "dtype", dtype, DTYPES)
    arguments.check_tensor("nf4_dequantize", "q.packed", packed, dtypes=(torch.uint8,))
    if experts is not None:
        arguments.check_indices("nf4_dequantize", "experts", experts)
        if not shape:
            raise ValueError("nf4_dequantize: experts must be None for a q without dimensions, got a tensor")
        arguments.check_same_device("nf4_dequantize", q=packed, experts=experts)


def _outputs_dequantize(*args: Any) -> tuple[torch.Tensor]:
    """-> (A, *shape[1:]) with ``experts``, (1, *shape[1:]) with one ``expert``, or shape."""
    packed, *_, experts, expert, shape, _, dtype = args
    if experts is not None or expert is not None:
        shape = (1 if experts is None else experts.shape[0], *shape[1:])
    return (empty(tuple(shape), dtype, packed),)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _DequantizePlan:
    experts: int  # to choose from; without a choice the whole tensor is one expert
    length: int  # of an expert, in words or elements
    tiles: int  # of an expert
    launch: Launch | None  # None: there is nothing to decode
    grid: tuple[int]


def _plan_dequantize(*args: Any) -> _DequantizePlan:
    packed, _, _, nested_absmax, _, nested_offset, experts, expert, shape, block_size, _ = args
    whole, scale = experts is None and expert is None, kind_of_scale(block_size, nested_absmax, nested_offset)
    available, chosen = 1 if whole else shape[0], 1 if experts is None else experts.shape[0]
    size = math.prod(shape if whole else shape[1:])
    if chosen * size * available == 0:
        return _DequantizePlan(available, 0, 0, None, (0,))
    properties = runtime.properties(packed.device)
    constants = {"HAS_EXPERTS": experts is not None, "SCALE": scale, "BLOCK_SIZE": block_size}
    # A multiplication fused with the addition of the offset would round once, bitsandbytes rounds twice.
    options = {"enable_fp_fusion": False}
    if packed.data_ptr() % 4 == 0 and size % 8 == 0:
        config = kernels.words_config(scale == "nested", properties)
        length, tile = size // 8, config.kwargs["BLOCK_W"] * config.kwargs["UNROLL"]
        # By PTX, which is NVIDIA's, or by loads in the interpreter, where there is none.
        prefetch = "load" if runtime.INTERPRET else "instruction" if properties.is_nvidia else "none"
        launch = launcher(
            kernels._nf4_dequantize_fwd_words_kernel,
            **constants, PREFETCH=prefetch, **config.kwargs, num_warps=config.num_warps, **options,
        )  # fmt: skip
    else:
        config = kernels.ELEMENTS_CONFIG
        length, tile = size, config.kwargs["BLOCK"]
        launch = launcher(
            kernels._nf4_dequantize_fwd_elements_kernel,
            **constants, **config.kwargs, num_warps=config.num_warps, **options,
        )  # fmt: skip
    tiles = cdiv(length, tile)
    return _DequantizePlan(available, length, tiles, launch, (chosen * tiles,))


def _run_dequantize(plan: _DequantizePlan, outputs: tuple[torch.Tensor], *args: Any) -> None:
    packed, absmax, code, *nested, experts, expert, _, _, _ = args
    [out] = outputs
    if experts is not None:
        arguments.check_index_values("nf4_dequantize", "experts", experts, plan.experts)
    if plan.launch is None:
        out.zero_()
        return
    nested = [code, code, code] if nested[0] is None else nested
    ids = code if experts is None else experts.contiguous()
    plan.launch(plan.grid, packed, absmax, *nested, code, ids, expert or 0, out, plan.experts, plan.length, plan.tiles)


_dequantize = Op(
    f"nf4_dequantize({PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size, ScalarType dtype) "
    "-> Tensor out",
    check=_check_dequantize,
    outputs=_outputs_dequantize,
    plan=_plan_dequantize,
    run=_run_dequantize,
)


# --- quantize -------------------------------------------------------------------------------------------------------


def nf4_quantize(
    w: torch.Tensor, *, block_size: int = 64, double_quant: bool = False, code: CodeBook = NF4
) -> NF4Tensor:
    """Quantizes ``w`` to 4 bits an element with one absmax a block (Dettmers et al. 2023, section 3).

    Packed bytes and absmax are, on every device, those of bitsandbytes' CPU backend. (Its GPU kernels multiply by an
    approximate reciprocal of absmax, so there a value next to the middle of two codes may go to the other one.) With
    double quantization absmax minus its mean goes to the nearest of 256 values, in blocks of 256. The host waits for the
    device, to which it copies the code book; so no CUDA graph takes it.

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
    packed, absmax = _quantize(w, values, block_size)
    scales = quantized_scales(absmax) if double_quant else {"absmax": absmax}
    shape = tuple(w.shape)
    return NF4Tensor(
        packed, shape=shape, block_size=block_size, code=values, code_name=code.name, dtype=w.dtype, **scales
    )


def _outputs_quantize(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> packed (ceil(n / 2),), absmax (ceil(n / block_size),)."""
    n = w.numel()
    return empty((-(-n // 2),), torch.uint8, w), empty((-(-n // block_size),), torch.float32, w)


def _plan_quantize(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[Launch, tuple[int]] | None:
    """-> what is launched, and its grid."""
    if w.numel() == 0:
        return None
    config = kernels.quantize_config(block_size)
    launch = launcher(
        kernels._nf4_quantize_fwd_kernel, BLOCK_SIZE=block_size, **config.kwargs, num_warps=config.num_warps
    )
    return launch, (cdiv(cdiv(w.numel(), block_size), config.kwargs["BLOCKS"]),)


def _run_quantize(
    plan: tuple[Launch, tuple[int]], outputs: tuple[torch.Tensor, ...], w: torch.Tensor, code: torch.Tensor, _: int
) -> None:
    launch, grid = plan
    values, order = code.sort(stable=True)  # stable: FP4 has two zeros, and the first one takes the values below
    edges = (values[:-1] + values[1:]) / 2
    launch(grid, w.contiguous(), edges, order.to(torch.int32), *outputs, w.numel())


_quantize = Op(
    "nf4_quantize(Tensor w, Tensor code, SymInt block_size) -> (Tensor packed, Tensor absmax)",
    outputs=_outputs_quantize,
    plan=_plan_quantize,
    run=_run_quantize,
    results=2,
)


# --- multiply -------------------------------------------------------------------------------------------------------


def nf4_matmul(x: torch.Tensor, q: NF4Tensor, expert: int | torch.Tensor) -> torch.Tensor:
    """``x @ W.T`` for the matrix W of one expert, without W in memory where ``x`` has few rows.

    On Hopper GPUs up to 128 rows of 16 bits (K a multiple of 64), and up to 512 where their tiles fill the GPU, go through
    tensor cores, which take W as it is decoded: from a W of 8 million elements on, from 9 rows on of 4 million. Up to 16 rows
    an element is a code's value in the dtype of ``x`` times the scale, rounded once more; from 17 rows on NF4 and FP4 are what
    :func:`nf4_dequantize` gives. NVFP4's float32 multiplies a row's sum, in float32, for any number of rows there. Otherwise up
    to 8 rows are multiplied in float32, with W as it is; more rows share the cost of dequantizing: W is dequantized first and
    multiplied by PyTorch.
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
    return _matmul(x, *_parts(q), experts, number, q.shape, q.block_size)  # type: ignore[no-any-return]


def _check_matmul(*args: Any) -> None:
    x, packed, *_, experts, expert, shape, _ = args
    arguments.check_tensor("nf4_matmul", "x", x, dtypes=DTYPES)
    if len(shape) != 3:
        raise ValueError(f"nf4_matmul: q must have shape (E, N, K), got {tuple(shape)}")
    if x.ndim == 0 or x.shape[-1] != shape[2]:
        raise ValueError(f"nf4_matmul: x must have shape (..., {shape[2]}), got {tuple(x.shape)}")
    if experts is not None:
        arguments.check_indices("nf4_matmul", "expert", experts)
        arguments.check_shape("nf4_matmul", "expert", experts, (1,))
    elif isinstance(expert, int) and not 0 <= expert < shape[0]:  # a symbolic one is looked at when it is a number
        raise ValueError(f"nf4_matmul: expert must lie in [0, {shape[0]}), got {expert}")
    arguments.check_same_device("nf4_matmul", x=x, q=packed, expert=experts)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _MatmulPlan:
    """Without ``tensor_cores`` and ``launch`` W is made dense."""

    m: int
    n: int
    k: int
    experts: int
    tensor_cores: products.Plan | None
    launch: Launch | None
    grid: tuple[int, int]


def _plan_matmul(*args: Any) -> _MatmulPlan:
    x, packed, _, _, nested_absmax, _, nested_offset, experts, _, shape, block_size = args
    (num_experts, n, k), m, properties = shape, math.prod(x.shape[:-1]), runtime.properties(x.device)
    scale, alignment = kind_of_scale(block_size, nested_absmax, nested_offset), packed.data_ptr() % 16
    same_bits = properties.same_bits  # then one way for any number of rows: through tensor cores, or W made dense
    tensor_cores, launch, grid = None, None, (0, 0)
    some = m * n * num_experts > 0
    if some and alignment == 0 and (same_bits or kernels.for_tensor_cores(m, n, k)):
        tensor_cores = products.plan(
            m, (1, n, k), False, x.dtype, block_size, scale, rank=0, has_bias=False, x_grouped=True, y_grouped=True,
            routed=False, properties=properties,
        )  # fmt: skip
    words = k > 0 and k % 8 == 0 and alignment % 4 == 0
    if some and tensor_cores is None and words and m <= kernels.MAX_MATMUL_M and not same_bits:
        tokens = min(1 << (m - 1).bit_length(), kernels.MATMUL_TOKENS)
        config = kernels.matmul_config(tokens, n, properties)
        launch = launcher(
            kernels._nf4_matmul_fwd_kernel,
            HAS_EXPERT=experts is not None, SCALE=scale, BLOCK_SIZE=block_size, BLOCK_M=tokens, **config.kwargs, num_warps=config.num_warps,
        )  # fmt: skip
        grid = cdiv(n, config.kwargs["ROWS"]), cdiv(m, tokens)
    return _MatmulPlan(m, n, k, num_experts, tensor_cores, launch, grid)


def _run_matmul(plan: _MatmulPlan, outputs: tuple[torch.Tensor], *args: Any) -> None:
    x, packed, absmax, code, *nested, experts, expert, shape, block_size = args
    [y], m, n, k = outputs, plan.m, plan.n, plan.k
    if experts is not None:
        arguments.check_index_values("nf4_matmul", "expert", experts, plan.experts)
    if m * n == 0:
        return
    if plan.tensor_cores is not None:
        x = x.reshape(m, k)
        # Kernels for a single matrix find a row of x, of 64 pairwise, of 16 by elements, by 32 bits.
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) >= 2**26:
            x = x.clone(memory_format=torch.contiguous_format)
        w = products.Matrices(packed, absmax, code, tuple(nested), block_size, (plan.experts, k, n))
        products.multiply_one(plan.tensor_cores, x, w, (expert or 0) if experts is None else experts, y.view(m, n))
    elif plan.launch is not None:
        nested = [code, code, code] if nested[0] is None else nested
        ids = code if experts is None else experts
        operands = (x.contiguous(), packed, absmax, *nested, code, ids, expert or 0, y)
        plan.launch(plan.grid, *operands, plan.experts, m, n, k // 8)
    else:
        [w] = _dequantize(packed, absmax, code, *nested, experts, expert, shape, block_size, x.dtype)
        product(x.reshape(m, k), w.t(), out=y.view(m, n))  # out=: autocast leaves it alone


def _gradients_matmul(call: Any, dy: torch.Tensor) -> tuple[torch.Tensor]:
    [w] = _dequantize(*call.kept, call.expert, call.shape, call.block_size, dy.dtype)
    return (linear(dy, w.t()),)


_matmul = Op(
    f"nf4_matmul(Tensor x, {PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size) -> Tensor y",
    check=_check_matmul,
    outputs=lambda x, *others: (empty((*x.shape[:-1], others[-2][1]), x.dtype, x),),
    plan=_plan_matmul,
    run=_run_matmul,
    keeps=("packed", "absmax", "code", "nested_absmax", "nested_code", "nested_offset", "experts"),
    backward=_gradients_matmul,
)
