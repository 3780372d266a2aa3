"""What no other test noticed when faults were planted in kernels (``make evidence``): each test here kills some of them."""

import functools

import kernelbook as kb

# isort: split
import pytest
import torch
import torch.nn.functional as F
import triton
from tensors import randn

from kernelbook import check, runtime
from kernelbook.lab.compiled import compile_calls
from kernelbook.layer_norm import kernels, rms_norm_reference
from kernelbook.nf4 import kernels as nf4_kernels
from kernelbook.nf4.reference import nested_absmax_reference, nf4_dequantize_reference, nf4_quantize_reference
from kernelbook.scatter_ffn.cases import CASES
from kernelbook.study import layer_norm as study

# --- layer_norm -----------------------------------------------------------------------------------------------------


def _far_from_zero(m: int, n: int, period: int) -> torch.Tensor:
    """Whole numbers near 2^23, where float32 has no others, so that no mean can be exact: each stretch of ``period`` columns
    holds the same numbers, 0.3 above 2^23 on average, in an order of its own."""
    numbers = (torch.arange(period) % 10 < 3).to(torch.float64) + 3 * ((torch.arange(period) // 10) % 2) - 1.5
    numbers = numbers - 0.5 * (numbers % 1 != 0)
    stretches = [torch.stack([numbers[torch.randperm(period)] for _ in range(m)]) for _ in range(-(-n // period))]
    return (2.0**23 + torch.cat(stretches, dim=1)[:, :n]).to(runtime.DEVICE, torch.float32)


def _centered(y: torch.Tensor) -> torch.Tensor:
    return y.to(torch.float64) - y.to(torch.float64).mean(dim=-1, keepdim=True)


TILE = kernels.looped_config(4).kwargs["BLOCK_N"]


@pytest.mark.parametrize(("n", "period"), ((1000, 1000), (10 * TILE, TILE)), ids=("registers", "looped"))
def test_the_variance_is_that_of_exact_deviations(n: int, period: int) -> None:
    """The mean of such rows is wrong by up to a half in float32, the deviations from it and their squares are not."""
    x = _far_from_zero(3, n, period)
    y, truth = kb.layer_norm(x), F.layer_norm(x.to(torch.float64), (n,))
    # The baseline is the truth itself, rounded: the rule then allows a few roundings.
    check.compare("deviations", _centered(y).float(), _centered(truth), _centered(truth).float()).require()


def test_the_mean_is_corrected_by_what_rounding_took_from_it() -> None:
    x = _far_from_zero(3, 1000, 1000)
    truth = F.layer_norm(x.to(torch.float64), (1000,))
    check.compare("out", kb.layer_norm(x), truth, truth.float()).require()


def _around_a_whole_number(m: int, n: int, period: int) -> torch.Tensor:
    """Whole numbers near 2^23, in row r nearly all 2^23 + r, which is the mean of each stretch of ``period`` columns.

    Their sum in float32 is rounded the same way again and again, so that in many rows the quotient is another whole number.
    """
    off = torch.zeros(period, dtype=torch.float64)
    off[:20], off[20:40] = 8, -8
    rows = [torch.cat([off[torch.randperm(period)] for _ in range(n // period)]) for _ in range(m)]
    return (2.0**23 + torch.arange(m)[:, None] + torch.stack(rows)).to(runtime.DEVICE, torch.float32)


@pytest.mark.parametrize(("m", "n", "period"), ((40, 1000, 1000), (6, 9 * TILE, TILE)), ids=("registers", "looped"))
def test_the_mean_that_is_kept_is_the_corrected_one(m: int, n: int, period: int) -> None:
    x = _around_a_whole_number(m, n, period).requires_grad_()
    w, dy = torch.ones(n, device=x.device, requires_grad=True), randn(m, n)
    y = kb.layer_norm(x, w)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    wide = [t.detach().to(torch.float64).requires_grad_() for t in (x, w)]
    truth = F.layer_norm(wide[0], (n,), wide[1])
    true_dx, true_dw = torch.autograd.grad(truth, wide, dy.to(torch.float64))
    for name, ours, true in (("out", y, truth), ("dx", dx, true_dx), ("dweight", dw, true_dw)):
        check.compare(name, ours.detach(), true.detach(), true.detach().float()).require()


ROWS = 2 * kernels.FEW_TILES + 3  # tiles of two rows enough for several programs, the last tile not full


def _small_tiles(monkeypatch: pytest.MonkeyPatch, forward: triton.Config | None, backward: triton.Config) -> None:
    monkeypatch.setattr(kernels, "plan_forward", lambda *_: forward)
    monkeypatch.setattr(kernels, "looped_config", lambda *_: triton.Config({"BLOCK_N": 64}, num_warps=4))
    monkeypatch.setattr(kernels, "plan_backward", lambda *_: kernels.BackwardPlan(backward, 2))


@pytest.fixture
def _looped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are looped over too, in small tiles, so that the kernels for long ones run in a moment."""
    _small_tiles(monkeypatch, None, triton.Config({"BLOCK_M": 2, "BLOCK_N": 32}, num_warps=4))


@pytest.fixture
def _in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows stay in registers as several small tiles, and two programs share one in the backward pass."""
    forward = triton.Config({"BLOCK_M": 1, "BLOCK_N": 64, "NUM_BLOCKS": 5}, num_warps=4)
    tiles = {"BLOCK_M": 2, "BLOCK_N": 32, "NUM_BLOCKS": 5, "SPLIT": 2, "STAGES": 1}
    _small_tiles(monkeypatch, forward, triton.Config(tiles, num_warps=4))


@pytest.mark.usefixtures("_looped")
def test_the_mean_of_each_tile_is_corrected() -> None:
    """Two tiles of 64 columns a row, each of which has the whole number in its middle for a mean, and a sum that is rounded."""
    off = torch.randint(1, 16, (120, 32)).to(torch.float64)
    off = torch.cat([off, -off], 1)[:, torch.randperm(64)].view(60, 128)
    x = (2.0**23 + torch.arange(60)[:, None] + off).to(runtime.DEVICE, torch.float32)
    truth = F.layer_norm(x.to(torch.float64), (128,))
    check.compare("out", kb.layer_norm(x), truth, truth.float()).require()


@pytest.mark.parametrize(("small", "n"), (("_in_tiles", 301), ("_looped", 64), ("_looped", 301)))
@pytest.mark.parametrize(
    ("norm", "others"),
    (
        ("layer", ()),
        ("layer", ("weight",)),
        ("layer", ("weight", "bias")),
        ("rms", ("weight",)),
        ("rms", ("weight", "residual")),
    ),
)
def test_rows_in_several_tiles(
    norm: str, others: tuple[str, ...], small: str, n: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(small)
    given = {"weight": randn(n), "bias": randn(n), "residual": randn(ROWS, n + 7)[:, 4:-3]}
    inputs = {"x": randn(2 * ROWS, n + 3)[::2, 1:-2] + 3, **{name: given[name] for name in others}}
    if norm == "rms":
        check.check_op(kb.rms_norm, rms_norm_reference, inputs, grads=tuple(inputs))
    else:
        reference = functools.partial(F.layer_norm, normalized_shape=(n,))
        check.check_op(kb.layer_norm, lambda x, **t: reference(x, **t), inputs, grads=tuple(inputs))


@pytest.mark.parametrize("small", ("_looped", "_in_tiles"))
def test_gradients_that_come_with_strides_of_their_own(small: str, request: pytest.FixtureRequest) -> None:
    """Those of the norm and of the sum, whose rows lie apart in other ways, and x in another again."""
    request.getfixturevalue(small)
    x, r, w = randn(9, 301)[:, :300].requires_grad_(), randn(9, 300).requires_grad_(), randn(300).requires_grad_()
    ups = randn(9, 340)[:, 17:317], randn(1, 300).expand(9, 300)
    for norm in (
        lambda: kb.rms_norm(x, w, residual=r),
        lambda: (kb.layer_norm(x, w),),
        lambda: (study.layer_norm_with_locks(x, w),),
    ):
        results = norm()
        found, expected = (
            torch.autograd.grad(results, (x, w), given[: len(results)], retain_graph=True)
            for given in (ups, tuple(up.contiguous() for up in ups))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# --- scatter_ffn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", (1, 20))
@pytest.mark.parametrize("activation", ("relu", "leaky_relu", "gelu", "gelu_tanh", "silu"))
def test_nan_goes_through_every_activation(activation: str, tokens: int) -> None:
    inputs = {"x": randn(tokens, 40), "w_up": randn(30, 40), "w_down": randn(30, 24)}
    inputs["x"][0, 3] = float("nan")
    rows = torch.tensor([3, 29, 0], device=runtime.DEVICE)
    given = {"neurons": rows, "activation": activation}
    y = kb.scatter_ffn(**inputs, **given)
    assert y[0].isnan().all() and y[1:].isfinite().all()
    # NaN has to stand where the reference has it, in gradients too: those of relu let a NaN pass.
    CASES["scatter_ffn"].check(inputs | given)


def test_tickets_are_taken_with_acquire_and_release() -> None:
    """What the program with the last ticket reads is ordered by the ticket alone, on the GPU too."""
    code = """
import torch, kernelbook as kb
kb.scatter_ffn(*(torch.empty(n, 4096, dtype=torch.bfloat16) for n in (1, 16384, 16384)), torch.arange(1638))
kb.scatter_ffn(*(torch.empty(n, 4096, dtype=torch.bfloat16) for n in (16, 16384, 16384)), torch.arange(1638))
"""
    atomics = [line for k in compile_calls(code, asm=("ptx",)) for line in k.asm["ptx"].splitlines() if "atom." in line]
    assert atomics and all(".gpu.acq_rel." in line for line in atomics), atomics


# --- nf4 ------------------------------------------------------------------------------------------------------------


def test_full_blocks_are_multiplied_by_the_reciprocal_and_short_ones_divided() -> None:
    """As bitsandbytes does it: beside the middle of two codes the two differ in the last bit."""
    code = torch.tensor(kb.nf4_quantize(randn(64)).code.tolist())
    middles = (code[1:] + code[:-1]) / 2
    largest = 1 + torch.arange(200) / 64
    near = (middles * largest[:, None]).repeat_interleave(4, 1)
    near = torch.cat([near, largest[:, None], torch.zeros(200, 3)], 1)  # 64 of each block
    near[:, 0:60:4] = torch.nextafter(near[:, 0:60:4], torch.tensor(9.0))
    near[:, 1:60:4] = torch.nextafter(near[:, 1:60:4], torch.tensor(-9.0))
    packed, absmax = nf4_quantize_reference(near, code)
    divided = torch.bucketize(near / largest[:, None], middles).view(-1, 2)
    assert (divided[:, 0] << 4 | divided[:, 1]).to(torch.uint8).ne(packed).any(), "this test tells nothing"
    q = kb.nf4_quantize(near.to(runtime.DEVICE))
    assert torch.equal(q.packed.cpu().view(-1), packed) and torch.equal(q.absmax.cpu().view(-1), absmax)
    for row in near[1:60, :61]:
        q = kb.nf4_quantize(row.to(runtime.DEVICE))
        assert torch.equal(q.packed.cpu().view(-1), nf4_quantize_reference(row, code)[0])


@pytest.mark.parametrize("shape", ((2, 128, 160), (3, 37, 457)))
def test_quantized_scales_of_later_experts(shape: tuple[int, ...]) -> None:
    """Their blocks begin within the 256 that share a scale of the scales."""
    q = kb.nf4_quantize(randn(*shape), double_quant=True)
    absmax = nested_absmax_reference(q.absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    expected = nf4_dequantize_reference(q.packed, absmax, q.code, q.shape, q.block_size)
    assert torch.equal(kb.nf4_dequantize(q, dtype=torch.float32), expected)
    experts = torch.tensor([shape[0] - 1, 1], device=expected.device)
    assert torch.equal(kb.nf4_dequantize(q, experts=experts, dtype=torch.float32), expected[experts])


def test_a_tile_that_ends_with_the_blocks_of_a_scale() -> None:
    """No scale of scales comes after the 256 blocks."""
    w = randn(256 * 32)
    q = kb.nf4_quantize(w, block_size=32, double_quant=True)
    absmax = nested_absmax_reference(q.absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    expected = nf4_dequantize_reference(q.packed, absmax, q.code, w.shape, 32)
    assert torch.equal(kb.nf4_dequantize(q, dtype=torch.float32), expected)


@pytest.fixture
def _small_nf4_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 x 16 words, of 64 elements, and of two rows by two tokens: small matrices have many, and rows share them."""
    words = {"BLOCK_W": 16, "UNROLL": 2, "AHEAD": 4, "SPAN": 2}
    matmul = {"ROWS": 2, "BLOCK_W": 8, "UNROLL": 2}
    monkeypatch.setattr(nf4_kernels, "words_config", lambda *_: triton.Config(words, num_warps=1))
    monkeypatch.setattr(nf4_kernels, "ELEMENTS_CONFIG", triton.Config({"BLOCK": 64}, num_warps=1))
    monkeypatch.setattr(nf4_kernels, "quantize_config", lambda _: triton.Config({"BLOCKS": 2}, num_warps=1))
    monkeypatch.setattr(nf4_kernels, "matmul_config", lambda *_: triton.Config(matmul, num_warps=1))
    monkeypatch.setattr(nf4_kernels, "MATMUL_TOKENS", 2)


@pytest.mark.skipif(not runtime.INTERPRET, reason="tiles that no GPU would be given")
@pytest.mark.parametrize("double", (False, True))
@pytest.mark.parametrize(("shape", "block"), (((3, 5, 72), 32), ((4, 2, 400), 32), ((3, 3, 37), 64)), ids=str)
@pytest.mark.usefixtures("_small_nf4_tiles")
def test_nf4_in_many_tiles(shape: tuple[int, ...], block: int, double: bool) -> None:
    w = randn(*shape) * torch.logspace(-3, 3, shape[1], device=runtime.DEVICE)[:, None]
    q = kb.nf4_quantize(w, block_size=block, double_quant=double)
    plain = kb.nf4_quantize(w, block_size=block)
    packed, absmax = nf4_quantize_reference(w.reshape(-1), plain.code, block)
    assert torch.equal(plain.packed.view(-1), packed) and torch.equal(plain.absmax.view(-1), absmax)
    absmax = q.absmax
    if double:
        absmax = nested_absmax_reference(absmax, q.nested_absmax, q.nested_code, q.nested_offset)
    dense = nf4_dequantize_reference(q.packed, absmax, q.code, q.shape, q.block_size)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(kb.nf4_dequantize(q, dtype=dtype), dense.to(dtype))
    for listed in ([2, 0, 2], [1]):
        experts = torch.tensor(listed, device=w.device)
        assert torch.equal(kb.nf4_dequantize(q, experts=experts, dtype=torch.float32), dense[experts])
    for m in (1, 3, 8):
        for expert in (1, torch.tensor([2], device=w.device)):
            check.check_op(
                lambda x, expert=expert: kb.nf4_matmul(x, q, expert),
                lambda x, expert=expert: x @ dense[int(expert)].to(x.dtype).t(),
                {"x": randn(m, shape[2])},
            )


@pytest.mark.usefixtures("_small_nf4_tiles")
def test_nf4_of_nan_zeros_and_next_to_nothing() -> None:
    """A NaN makes its block's scale one, and no other's; blocks of zeros, and of numbers too small for a reciprocal."""
    w = randn(7, 32)
    w[1, 3], w[2], w[3] = float("nan"), 0.0, w[3] * 1e-39
    w[4] *= 1e-38
    for length in (7 * 32, 6 * 32 + 9):  # the last block is full, or short
        flat = w.reshape(-1)[:length].clone()
        for last in (1.0, 1e-39, float("nan"), 0.0):
            flat[-3] = last
            if last == 0.0:
                flat[6 * 32 :] *= 1e-39
            q = kb.nf4_quantize(flat, block_size=32)
            packed, absmax = nf4_quantize_reference(flat, q.code, 32)
            torch.testing.assert_close(q.absmax.view(-1), absmax, rtol=0, atol=0, equal_nan=True)
            expected = nf4_dequantize_reference(packed, absmax, q.code, flat.shape, 32)
            torch.testing.assert_close(
                kb.nf4_dequantize(q, dtype=torch.float32), expected, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("m", (5, 9))
def test_locked_sums_of_more_rows_than_buffers(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, dy = randn(m, 70).requires_grad_(), randn(70).requires_grad_(), randn(70).requires_grad_(), randn(m, 70)
    add = study.launch_locks
    monkeypatch.setattr(study, "launch_locks", lambda *args, **kwargs: add(*args, **{**kwargs, "buffers": 2}))
    ours = torch.autograd.grad(study.layer_norm_with_locks(x, w, b), (x, w, b), dy)
    exact = torch.autograd.grad(F.layer_norm(x, (70,), w, b), (x, w, b), dy)
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
