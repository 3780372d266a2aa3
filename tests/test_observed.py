"""Calls of public functions where somebody observes: compilers, modes, traces, profilers, graphs of the GPU."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import compiled_graphs, python
from torch.fx.experimental.proxy_tensor import make_fx

import kernelbook as kb
from kernelbook import memory, nn, operators, runtime


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_observes() -> None:
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(not operators.needs_dispatcher())
        return x + 1 if found[-1] else x - 1

    x = torch.ones(2, 3)
    assert torch.equal(torch.compile(look, backend="eager")(x), x - 1)
    assert torch.equal(torch.vmap(look)(x), x - 1)
    assert torch.equal(make_fx(look)(x)(x), x - 1)
    assert torch.equal(torch.jit.trace(look, (x,), check_trace=False)(x), x - 1)
    assert not any(found)


def test_a_compiler_sees_that_vmap_wants_a_gradient() -> None:
    x = torch.randn(2, 3, 8, device=runtime.DEVICE)
    grads = []
    for call in (torch.compile(torch.vmap(kb.layer_norm), fullgraph=True, backend="aot_eager"), kb.layer_norm):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:Converting a tensor", "ignore::torch.jit.TracerWarning")
def test_torch_jit_trace_takes_a_norm_without_gradients() -> None:
    """And the trace is PyTorch's own check's, of another number of rows too. book/package.md promises no more."""
    norm, x = kb.nn.LayerNorm(8).to(runtime.DEVICE), torch.randn(5, 8, device=runtime.DEVICE)
    with torch.no_grad():
        traced = torch.jit.trace(norm, (x[:2],))
        assert torch.equal(traced(x), norm(x))


FIRST_CALL = """
import sys, torch
import kernelbook as kb
device = kb.runtime.DEVICE
ids = torch.tensor([[0, 1], [2, 0]], device=device)
x, a, b = (torch.randn(s, device=device, requires_grad=True) for s in ((2, 8), (3, 2, 8), (3, 6, 2)))
kb.moe_lora(x, torch.randn(3, 8, 6, device=device), a, b, kb.route(ids, 3)).sum().backward()
assert x.grad.any()
print("torch._dynamo" in sys.modules)
"""


def test_a_first_call_does_not_import_the_compiler() -> None:
    done = python(FIRST_CALL)
    assert done.stdout.split() == ["False"], done.stderr


# --- operators ------------------------------------------------------------------------------------------------------


def test_a_profiler_sees_our_operators() -> None:
    x, w = torch.ones(2, 4, device=runtime.DEVICE), torch.ones(4, device=runtime.DEVICE)
    with torch.profiler.profile() as profile:
        kb.rms_norm(x, w)
    assert [event.key for event in profile.key_averages() if event.key.startswith("kernelbook::")] == [
        "kernelbook::norm"
    ]


# --- public functions under the compiler ----------------------------------------------------------------------------


def test_messages_reach_through_the_compiler() -> None:
    x, w = (torch.randn(s, device=runtime.DEVICE) for s in ((6, 32), (32,)))
    for error, message, call in (
        (TypeError, r"a shape goes into normalized_shape=", lambda: kb.layer_norm(x, (32,))),
        (Exception, r"layer_norm: weight must have shape \(32,\), got \(3,\)", lambda: kb.layer_norm(x, w[:3])),
        (Exception, "layer_norm: eps must be a number that is not negative", lambda: kb.layer_norm(x, eps=-1.0)),
    ):
        with pytest.raises(error, match=message):
            torch.compile(call, backend="eager")()


def test_what_pytorch_keeps_of_a_graph_is_not_taken_after_a_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(operators, "__file__", str(tmp_path / "operators.py"))
    (tmp_path / "lab").mkdir()
    seen = [operators._hash_of_library()]
    for name in ("kernels.py", "op.py", "kernels.py", "lab/plots.py"):
        (tmp_path / name).write_text("#" * len(seen))
        seen.append(operators._hash_of_library())
    assert len(set(seen)) == 4 and seen[4] == seen[3]  # the laboratory is in no graph


# --- graphs that torch.compile makes --------------------------------------------------------------------------------


def _in_graphs() -> dict[str, Callable[[], tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]]]:
    """By name: what makes a function, and arguments for it, other ones each time."""
    how: dict[str, Any] = {"device": runtime.DEVICE, "dtype": torch.bfloat16}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, **how)

    def listed(count: int, rows: int) -> torch.Tensor:
        return torch.randperm(rows, device=runtime.DEVICE)[:count]

    def decoding() -> Any:
        def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return kb.flash_attention(2 * kb.flash_attention(q, k, v), k, v, lengths=lengths)

        k, v = draw(2, 2, 3000, 128), draw(2, 2, 3000, 128)
        return twice, lambda: (draw(2, 8, 1, 128), k, v, torch.randint(1, 3001, (2,), device=runtime.DEVICE))

    def paged() -> Any:
        k, v, table = draw(32, 2, 64, 128), draw(32, 2, 64, 128), torch.arange(32, device=runtime.DEVICE).view(2, 16)
        lengths = functools.partial(torch.randint, 1, 1025, (2,), device=runtime.DEVICE)
        return lambda q, n: 2 * kb.paged_attention(q, k, v, table, n), lambda: (draw(2, 8, 1, 128), lengths())

    def experts() -> Any:
        layer = nn.MoELayer(8, 256, 128, 2, **how)
        layer.experts.quantize(double_quant=True)
        return lambda x: layer(x) + x, lambda: (draw(3, 256),)

    def neurons() -> Any:
        up, down = draw(2048, 512), draw(2048, 512)
        return lambda x, ids: 2 * kb.scatter_ffn(x, up, down, ids), lambda: (draw(4, 512), listed(200, 2048))

    return {"decoding": decoding, "paged attention": paged, "experts in 4 bits": experts, "scatter_ffn": neurons}


@pytest.mark.gpu
@pytest.mark.parametrize("name", _in_graphs())
def test_a_first_call_may_be_one_of_a_compiled_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_counters", {})
    function, draw = _in_graphs()[name]()
    graphed = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    with compiled_graphs(), torch.no_grad():
        for _ in range(6):
            args = draw()
            torch.compiler.cudagraph_mark_step_begin()
            ours = graphed(*args).clone()
            torch.testing.assert_close(ours, function(*args), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_step_of_training_in_compiled_graphs() -> None:
    """Forward and backward, each a graph, of all that has gradients; other inputs and chunks each time."""
    how: dict[str, Any] = {"device": runtime.DEVICE, "dtype": torch.float32}
    torch.manual_seed(0)
    norm, layer = nn.LayerNorm(256, **how), nn.MoELayer(8, 256, 128, 2, **how)
    ffn, linear = nn.SparseFFN(256, 512, **how), torch.nn.Linear(256, 256, **how)
    leaves = [p for module in (norm, layer, ffn, linear) for p in module.parameters()]

    def loss(x: torch.Tensor, neurons: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        x = x + layer(norm(x))
        heads = x.view(2, 64, 4, 64).transpose(1, 2)
        x = x + kb.flash_attention(heads, heads, heads, causal=True).transpose(1, 2).reshape(x.shape)
        x = x + kb.scatter_ffn(x.flatten(0, 1), ffn.w_up, ffn.w_down, neurons).view(x.shape)
        return kb.sparse_linear(x, linear.weight, linear.bias, chunks, chunk_size=32).square().sum()

    graphed = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    with compiled_graphs():
        for _ in range(6):
            x = torch.randn(2, 64, 256, **how)
            ids = torch.randperm(512, device=runtime.DEVICE)[:100], torch.randperm(8, device=runtime.DEVICE)[:3]
            outcomes = []
            for each in (graphed, loss):
                torch.compiler.cudagraph_mark_step_begin()
                given = x.clone().requires_grad_()
                value = each(given, *ids)
                found = torch.autograd.grad(value, [given, *leaves])
                outcomes.append([value.detach().clone(), *(g.clone() for g in found)])
            for ours, plain in zip(*outcomes, strict=True):
                assert (ours - plain).norm() <= 1e-4 * plain.norm()
