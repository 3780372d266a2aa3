"""The public functions, their operators, and the launches."""

import functools
from typing import Any

import torch

from kernelbook import arguments, launching, runtime  # before Triton, which it sets up
from kernelbook.launching import Launch, cdiv
from kernelbook.nf4 import kernels
from kernelbook.packed import BLOCK_SIZES, DTYPES, FP4, NF4, CodeBook, NF4Tensor, products
from kernelbook.plans import derived

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
    _check_dequantize(q.packed, experts, len(q.shape))
    out: torch.Tensor = _dequantize(*_parts(q), experts, None, q.shape, q.block_size, dtype)
    return out


def _parts(q: NF4Tensor) -> tuple[torch.Tensor | None, ...]:
    return q.packed, q.absmax, q.code, q.nested_absmax, q.nested_code, q.nested_offset


@arguments.once
def _check_dequantize(packed: torch.Tensor, experts: Any, dims: int) -> None:
    arguments.check_tensor("nf4_dequantize", "q.packed", packed, dtypes=(torch.uint8,))
    if experts is not None:
        arguments.check_indices("nf4_dequantize", "experts", experts)
        if not dims:
            raise ValueError("nf4_dequantize: experts must be None for a q without dimensions, got a tensor")
        arguments.check_same_device("nf4_dequantize", q=packed, experts=experts)


@derived
def _dequantize_launch(
    words: bool, has_experts: bool, nested: bool, block_size: int, properties: runtime.DeviceProperties
) -> tuple[Launch, int]:
    """-> the launch, and the words (or elements) of a program."""
    if words:
        kernel, config = kernels._nf4_dequantize_fwd_words_kernel, kernels.words_config(nested, properties)
        # By PTX, which is NVIDIA's, or by loads in the interpreter, where there is none.
        nvidia = properties.arch.startswith("sm_")
        more = {"PREFETCH": "load" if runtime.INTERPRET else "instruction" if nvidia else "none"}
        tile = config.kwargs["BLOCK_W"] * config.kwargs["UNROLL"]
    else:
        kernel, config, more = kernels._nf4_dequantize_fwd_elements_kernel, kernels.ELEMENTS_CONFIG, {}
        tile = config.kwargs["BLOCK"]
    launch = Launch(
        kernel,
        HAS_EXPERTS=has_experts, NESTED=nested, BLOCK_SIZE=block_size, NESTED_BLOCK=kernels.NESTED_BLOCK,
        **config.kwargs, **more, num_warps=config.num_warps,
        # A multiplication fused with the addition of the offset would round once, bitsandbytes rounds twice.
        enable_fp_fusion=False,
    )  # fmt: skip
    return launch, tile


def _run_dequantize(
    out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, nested_absmax: Any,
    nested_code: Any, nested_offset: Any, experts: torch.Tensor | None, expert: int | None, shape: Any, block_size: int,
    *_settings: Any,
) -> None:  # fmt: skip
    """Fills out (A, *shape[1:]) with ``experts``, (1, *shape[1:]) with one ``expert``, or shape."""
    if experts is not None:
        arguments.check_index_values("nf4_dequantize", "experts", experts, shape[0])
        experts = experts.contiguous()
    elements = out.numel()
    if elements == 0:
        return
    # Without experts the whole tensor is one expert.
    available = 1 if experts is None and expert is None else shape[0]
    chosen = 1 if experts is None else experts.shape[0]
    if available == 0:
        out.zero_()
        return
    size = elements // chosen
    words = size % 8 == 0 and packed.data_ptr() % 4 == 0
    launch, tile = _dequantize_launch(
        words, experts is not None, nested_absmax is not None, block_size, runtime.properties(packed.device)
    )
    length = size // 8 if words else size
    tiles = cdiv(length, tile)
    if chosen * tiles > MAX_PROGRAMS:
        raise ValueError(f"nf4_dequantize: the output must have fewer than {MAX_PROGRAMS} tiles, got {chosen * tiles}")
    nested = (code, code, code) if nested_absmax is None else (nested_absmax, nested_code, nested_offset)
    launch(
        (chosen * tiles,),
        packed, absmax, *nested, code,
        code if experts is None else experts, expert or 0,
        out,
        available, length, tiles,
    )  # fmt: skip


def _dequantized(packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, experts, expert, shape, _, dtype = rest
    if experts is not None:
        shape = (experts.shape[0], *shape[1:])
    elif expert is not None:
        shape = (1, *shape[1:])
    return torch.empty(shape, dtype=dtype, device=packed.device)


_PARTS = "Tensor packed, Tensor absmax, Tensor code, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset"

_dequantize = launching.operator(
    f"nf4_dequantize({_PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size, ScalarType dtype) "
    "-> Tensor",
    outputs=_dequantized,
    run=_run_dequantize,
    repeated=launching.settings,
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
        code: the code book, ``NF4``, ``FP4`` or any 16 values in [-1, 1].

    Raises:
        TypeError: ``w`` is not a tensor of a supported dtype.
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


@functools.cache
def _quantize_launch(block_size: int) -> tuple[Launch, int]:
    """-> the launch, and the blocks of a program."""
    config = kernels.quantize_config(block_size)
    launch = Launch(
        kernels._nf4_quantize_fwd_kernel, BLOCK_SIZE=block_size, **config.kwargs, num_warps=config.num_warps
    )
    return launch, config.kwargs["BLOCKS"]


def _quantized(w: torch.Tensor, code: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> packed (ceil(n / 2),), absmax (ceil(n / block_size),)."""
    n = w.numel()
    return w.new_empty(-(-n // 2), dtype=torch.uint8), w.new_empty(-(-n // block_size), dtype=torch.float32)


def _run_quantize(
    results: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor, code: torch.Tensor, block_size: int
) -> None:
    packed, absmax = results
    if absmax.numel() == 0:
        return
    values, order = code.sort(stable=True)  # stable: FP4 has two zeros, and the first one takes the values below
    launch, blocks = _quantize_launch(block_size)
    launch(
        (cdiv(absmax.numel(), blocks),),
        w.contiguous(), (values[:-1] + values[1:]) / 2, order.to(torch.int32), packed, absmax, w.numel(),
    )  # fmt: skip


_quantize = launching.operator(
    "nf4_quantize(Tensor w, Tensor code, SymInt block_size) -> (Tensor, Tensor)", outputs=_quantized, run=_run_quantize
)


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

    On Hopper GPUs rows of 16 bits (K a multiple of 64) go through tensor cores, which take W as it is decoded. Up to 16
    rows, with a W of 8 million elements or more in blocks of 64 or more, they take the values of the code book in the
    dtype of ``x``, and the scales multiply sums in float32. Up to 64 rows, with a W of 32 rows a multiprocessor or more,
    they take W as :func:`nf4_dequantize` gives it. Otherwise up to 8 rows are multiplied in float32, with W as it is; more
    rows share the cost of dequantizing: W is dequantized first and multiplied by PyTorch.

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
    _check_matmul(x, q.packed, experts, *q.shape)
    y: torch.Tensor = _matmul(x, *_parts(q), experts, number, q.shape, q.block_size)
    return y


@arguments.once
def _check_matmul(x: torch.Tensor, packed: torch.Tensor, experts: Any, *shape: int) -> None:
    arguments.check_tensor("nf4_matmul", "x", x, dtypes=DTYPES)
    if len(shape) != 3:
        raise ValueError(f"nf4_matmul: q must have shape (E, N, K), got {shape}")
    if x.ndim == 0 or x.shape[-1] != shape[2]:
        raise ValueError(f"nf4_matmul: x must have shape (..., {shape[2]}), got {tuple(x.shape)}")
    if experts is not None:
        arguments.check_indices("nf4_matmul", "expert", experts)
        arguments.check_shape("nf4_matmul", "expert", experts, (1,))
    arguments.check_same_device("nf4_matmul", x=x, q=packed, expert=experts)


@derived
def _matmul_launch(
    m: int, n: int, has_expert: bool, nested: bool, block_size: int, properties: runtime.DeviceProperties
) -> tuple[Launch, tuple[int, int]]:
    """-> the launch and its grid."""
    tokens = min(1 << (m - 1).bit_length(), kernels.MATMUL_TOKENS)
    config = kernels.matmul_config(tokens, n, properties)
    launch = Launch(
        kernels._nf4_matmul_fwd_kernel,
        HAS_EXPERT=has_expert, NESTED=nested, BLOCK_SIZE=block_size, NESTED_BLOCK=kernels.NESTED_BLOCK, TOKENS=tokens,
        **config.kwargs, num_warps=config.num_warps,
    )  # fmt: skip
    return launch, (cdiv(n, config.kwargs["ROWS"]), cdiv(m, tokens))


def _run_matmul(
    y: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, nested_absmax: Any,
    nested_code: Any, nested_offset: Any, experts: torch.Tensor | None, expert: int | None, shape: Any, block_size: int,
) -> None:  # fmt: skip
    """Fills y (..., N) from x (..., K) and one expert, a tensor or a number."""
    num_experts, n, k = shape
    if experts is not None:
        arguments.check_index_values("nf4_matmul", "expert", experts, num_experts)
    elif expert is None or not 0 <= expert < num_experts:
        raise ValueError(f"nf4_matmul: expert must lie in [0, {num_experts}), got {expert}")
    if y.numel() == 0:
        return
    m = y.numel() // n
    parts = (packed, absmax, code, nested_absmax, nested_code, nested_offset)
    properties = runtime.properties(x.device)
    if kernels.for_tensor_cores(m, n, k, block_size, properties) and _run_packed(
        y.view(m, n), x.reshape(m, k), parts, experts, expert, shape, block_size
    ):
        return
    if m > kernels.MAX_MATMUL_M or k % 8 or packed.data_ptr() % 4 or k == 0 or num_experts == 0:
        w = x.new_empty((1, n, k))
        _run_dequantize(w, *parts, experts, expert, shape, block_size)
        torch.mm(x.reshape(m, k), w[0].t(), out=y.view(m, n))  # out=: autocast leaves it alone
        return
    launch, grid = _matmul_launch(m, n, experts is not None, nested_absmax is not None, block_size, properties)
    nested = (code, code, code) if nested_absmax is None else parts[3:]
    launch(
        grid,
        x.contiguous(), packed, absmax, *nested, code,
        code if experts is None else experts, expert or 0,
        y,
        num_experts, m, n, k // 8,
    )  # fmt: skip


def _run_packed(
    y: torch.Tensor, x: torch.Tensor, parts: Any, experts: torch.Tensor | None, expert: int | None, shape: Any,
    block_size: int,
) -> bool:  # fmt: skip
    """By tensor cores, where there is a kernel for it -> whether there is."""
    (packed, absmax, code, *nested), (num_experts, n, k), m = parts, shape, x.shape[0]
    plan = products.plan(
        m, (1, n, k), False, x.dtype, block_size, nested[0] is not None, 0, False, True, True, False,
        runtime.properties(x.device),
    )  # fmt: skip
    if plan is None or packed.data_ptr() % 16 or num_experts == 0:
        return False
    # The kernel for one matrix finds a row of x, of sixteen at most, by 32 bits.
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16 or x.stride(0) >= 2**27:
        x = x.clone(memory_format=torch.contiguous_format)
    w = products.Matrices(packed, absmax, code, tuple(nested), block_size, (num_experts, k, n))
    tiles = cdiv(m, plan.height)
    products.launch(plan, None, 0, tiles, expert if experts is None else experts, x, w, None, None, None, y, 1)
    return True


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, *tensors, expert, shape, block_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = expert, shape, block_size


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    w = _dequantize(*ctx.saved_tensors, *ctx.settings, dy.dtype)
    with launching.without_autocast(dy):
        return (dy @ w[0], *[None] * 10)


_matmul = launching.operator(
    f"nf4_matmul(Tensor x, {_PARTS}, Tensor? experts, SymInt? expert, SymInt[] shape, SymInt block_size) -> Tensor",
    outputs=lambda x, *rest: x.new_empty((*x.shape[:-1], rest[-2][1])),
    run=_run_matmul,
    repeated=launching.settings,
    setup_context=_setup_context,
    backward=_autograd,
)
