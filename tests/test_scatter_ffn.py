"""The room scatter_ffn: every output and gradient by the rule of check.py, and everything around it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import far_apart, guarded_memory, randn, refused

import kernelbook as kb
from kernelbook import arguments, operators, runtime
from kernelbook.cases import floats
from kernelbook.nn import SparseFFN
from kernelbook.scatter_ffn import ACTIVATIONS, activation_reference, dense_ffn, kernels, scatter_ffn_reference
from kernelbook.scatter_ffn.cases import CASES

Tensors = dict[str, torch.Tensor]


def _network(
    m: int, k: int, n: int, k_out: int, dtype: torch.dtype = torch.float32, *, gated: bool = False, bias: bool = False
) -> Tensors:
    """Random arguments of scatter_ffn, with weights of the size that keeps products near one."""
    given = CASES["scatter_ffn"].of(dtype, m=m, k=k, n=n, k_out=k_out, gated=gated, biases=bias)
    return {name: given[name] for name in floats(given)}


def _neurons(n: int, count: int) -> torch.Tensor:
    """``count`` different neurons, unsorted."""
    return torch.randperm(n, device=runtime.DEVICE)[:count]


# --- every way to compute it ----------------------------------------------------------------------------------------


def _up(**changes: int) -> kernels.triton.Config:
    blocks = {"BLOCK_M": 16, "BLOCK_L": 16, "BLOCK_K": 16, "SHARES": 1, "GROUP": 2, "STAGES": 2} | changes
    return kernels.triton.Config(blocks, num_warps=4)


def _down(**changes: int) -> kernels.triton.Config:
    blocks = {
        "BLOCK_M": 16,
        "BLOCK_L": 16,
        "BLOCK_C": 16,
        "GROUP": 2,
        "STAGES": 2,
        "LISTED": 32,
        "AHEAD": 16,
    }
    return kernels.triton.Config(blocks | changes, num_warps=4)


VECTOR_UP = kernels.triton.Config({"TOKENS": 4, "BLOCK_L": 16, "BLOCK_K": 32, "STAGES": 1}, num_warps=4)
VECTOR_DOWN = kernels.triton.Config({"TOKENS": 4, "BLOCK_L": 8, "BLOCK_C": 16, "UNROLL": 2}, num_warps=4)
PLANS = {
    "vector": kernels.Plan("vector", VECTOR_UP, 1, VECTOR_DOWN, 1),
    "vector, shared": kernels.Plan("vector", VECTOR_UP, 1, VECTOR_DOWN, 3),
    "tiles": kernels.Plan("tiles", _up(), 1, _down(), 1),
    "tiles, shared": kernels.Plan("tiles", _up(), 2, _down(), 3),
    "tiles, by warps": kernels.Plan("tiles", _up(SHARES=2), 1, _down(), 1),
    "tiles, by warps, shared": kernels.Plan("tiles", _up(SHARES=2), 2, _down(), 2),
    "packed": kernels.Plan("packed", _up(), 1, _down(), 1),
}


@contextlib.contextmanager
def _planned(plan: kernels.Plan) -> Iterator[None]:
    """Within the context every call takes this plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "plan", lambda *args: plan)
        operators.forget_plans()  # a call of another plan is not repeated
        yield
    operators.forget_plans()


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("name", PLANS)
def test_every_way_to_compute_it(name: str, gated: bool) -> None:
    """Steps and shares of a sum that are not full; nobody looks at neurons that are not listed."""
    network = _network(3 if "vector" in name else 21, 88, 90, 40, torch.float16, gated=gated, bias=True)
    neurons = torch.cat([_neurons(90, 50), _neurons(90, 3)])  # three of them may come twice
    unlisted = ~torch.isin(torch.arange(90, device=neurons.device), neurons)
    for key in {"w_up", "w_gate", "w_down", "b_up", "b_gate"} & network.keys():
        network[key][unlisted] = torch.nan
    with _planned(PLANS[name]):
        CASES["scatter_ffn"].check(network | {"neurons": neurons, "activation": "silu" if gated else "gelu"})
        one = {"x": network["x"], "weight": network["w_up"], "bias": network["b_up"]}
        CASES["gather_matmul"].check(one | {"rows": neurons, "activation": "gelu_tanh"}, grads=())


# --- values and gradients -------------------------------------------------------------------------------------------


def test_activations_are_those_of_pytorch_also_far_out() -> None:
    z = torch.tensor([-1e4, -50.0, -3.0, -0.0, 0.0, 1e-3, 3.0, 50.0, 1e4, float("nan")], device=runtime.DEVICE)
    one = torch.ones(1, 1, device=runtime.DEVICE)
    for activation in ACTIVATIONS:
        # One row for each value: the product is that value.
        ours = kb.gather_matmul(one, z[:, None], torch.arange(len(z), device=z.device), activation=activation)
        torch.testing.assert_close(ours[0], activation_reference(z, activation), equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_no_neuron_and_none_given(gated: bool) -> None:
    """No neuron: what is left is the bias. ``None``: a dense network."""
    network = _network(4, 24, 40, 16, gated=gated, bias=True)
    nothing = _neurons(40, 0)
    CASES["scatter_ffn"].check(network | {"neurons": nothing, "activation": "relu"})
    y = kb.scatter_ffn(**network, neurons=nothing)
    assert torch.equal(y, network["b_down"].expand(4, 16))
    assert not kb.scatter_ffn(*(network[name] for name in ("x", "w_up", "w_down")), nothing).any()
    assert kb.gather_matmul(network["x"], network["w_up"], nothing).shape == (4, 0)
    for activation in ACTIVATIONS:
        leaves = {name: t.clone().requires_grad_() for name, t in network.items()}
        ours = kb.scatter_ffn(**leaves, neurons=None, activation=activation)
        theirs = dense_ffn(**leaves, activation=activation)
        assert torch.equal(ours, theirs)
        by_list = kb.scatter_ffn(**leaves, neurons=_neurons(40, 40), activation=activation)
        torch.testing.assert_close(by_list, theirs, rtol=1e-4, atol=1e-5)


# --- what is not listed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ([1, 40], [-1, 2]), ids=("too large", "negative"))
def test_bad_ids_raise(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELBOOK_DEBUG", "1")
    ids, network = torch.tensor(bad, device=runtime.DEVICE), _network(2, 8, 40, 8)
    with pytest.raises(ValueError, match=r"scatter_ffn: neurons must lie in \[0, 40\)"):
        kb.scatter_ffn(**network, neurons=ids)
    with pytest.raises(ValueError, match=r"gather_matmul: rows must lie in \[0, 40\)"):
        kb.gather_matmul(network["x"], network["w_up"], ids)


@pytest.mark.parametrize("name", PLANS)
def test_ids_out_of_range_count_as_no_neuron(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU such ids are not looked for: nothing is read or written for them."""
    monkeypatch.setattr(arguments, "check_index_values", lambda *args, **kwargs: None)
    network = _network(3, 24, 40, 16, torch.float16, gated=True, bias=True)
    good = torch.tensor([3, 39, 0], device=runtime.DEVICE)
    bad = torch.tensor([-1, 3, 40, 10**12, 39, -(10**12), 0], device=runtime.DEVICE)
    untouched = guarded_memory(monkeypatch)
    results = []
    with _planned(PLANS[name]):
        for ids in (good, bad):
            leaves = {key: t.clone().requires_grad_() for key, t in network.items()}
            y = kb.scatter_ffn(**leaves, neurons=ids, activation="silu")
            gathered = kb.gather_matmul(leaves["x"], leaves["w_up"], ids, bias=leaves["b_up"])
            columns = torch.tensor([i for i, j in enumerate(ids.tolist()) if 0 <= j < 40], device=y.device)
            assert len(columns) == 3 and not gathered.detach().clone().index_fill_(1, columns, 0).any()
            gathered = gathered[:, columns]
            results.append((y, gathered, *torch.autograd.grad(y.sum() + gathered.sum(), tuple(leaves.values()))))
    monkeypatch.undo()
    assert untouched()
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


# --- the module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_a_module_computes_and_trains_its_neurons(gated: bool) -> None:
    block = SparseFFN(24, 40, 16, gated=gated, bias=True, activation="silu", device=runtime.DEVICE)
    other = SparseFFN(24, 40, 16, gated=gated, bias=True, activation="silu", device=runtime.DEVICE)
    other.load_state_dict(block.state_dict())
    x = randn(2, 3, 24)
    dense = block(x)
    assert dense.shape == (2, 3, 16) and torch.equal(other(x), dense)
    assert f"gated={gated}" in repr(block) and "'silu'" in repr(block)
    block.neurons = torch.tensor([7, 3], device=runtime.DEVICE)
    other.router = lambda x: torch.tensor([3, 7], device=x.device)
    torch.testing.assert_close(other(x), block(x))
    before = block.w_up.detach().clone()
    block(x).square().sum().backward()
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    assert set((block.w_up != before).any(1).nonzero().flatten().tolist()) <= {3, 7}
    with pytest.raises(ValueError, match="SparseFFN: activation must be one of 'relu'"):
        SparseFFN(24, 40, activation="tanh")


def test_a_module_draws_its_parameters_as_pytorchs_linear() -> None:
    block = SparseFFN(64, 400, bias=True, gated=True)
    for name, parameter in block.named_parameters():
        bound = 400**-0.5 if "down" in name else 64**-0.5
        assert 0.9 * bound < parameter.abs().max() <= bound, name


def test_a_router_that_is_a_module_belongs_to_the_block() -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Linear(24, 40, device=runtime.DEVICE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scores(x).flatten(0, -2).mean(0).topk(10).indices

    block = SparseFFN(24, 40, router=Router(), device=runtime.DEVICE)
    x = randn(3, 24)
    assert "router.scores.weight" in block.state_dict()
    torch.testing.assert_close(block(x), kb.scatter_ffn(x, block.w_up, block.w_down, block.router(x)))


def _sequential(activation: torch.nn.Module) -> torch.nn.Module:
    up, down = torch.nn.Linear(24, 40), torch.nn.Linear(40, 16)
    return torch.nn.Sequential(up, activation, torch.nn.Dropout(0.0), down)


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    block = GPT2MLP(40, GPT2Config(n_embd=24, resid_pdrop=0.0))
    for parameter in block.parameters():  # its biases begin as zeros
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def _llama(mlp_bias: bool = False) -> torch.nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4, mlp_bias=mlp_bias))


def _random_state() -> torch.Tensor:
    return torch.get_rng_state() if runtime.INTERPRET else torch.cuda.get_rng_state()


BLOCKS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "Sequential, relu": (lambda: _sequential(torch.nn.ReLU()), "relu"),
    "Sequential, leaky_relu": (lambda: _sequential(torch.nn.LeakyReLU()), "leaky_relu"),
    "Sequential, gelu": (lambda: _sequential(torch.nn.GELU()), "gelu"),
    "Sequential, gelu_tanh": (lambda: _sequential(torch.nn.GELU(approximate="tanh")), "gelu_tanh"),
    "GPT-2": (_gpt2, "gelu_tanh"),
    "Llama": (_llama, "silu"),
    "Llama with biases": (lambda: _llama(True), "silu"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_module_from_another(name: str) -> None:
    make, activation = BLOCKS[name]
    if "GPT" in name or "Llama" in name:
        pytest.importorskip("transformers")
    theirs, state = make().to(runtime.DEVICE), _random_state()
    ours = SparseFFN.from_dense(theirs)
    assert ours.activation == activation and torch.equal(_random_state(), state)
    x = randn(2, 5, 24)
    for neurons in (None, _neurons(40, 40)):
        ours.neurons = neurons
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    for weight in (ours.w_up, ours.w_down, ours.w_gate):
        assert weight is None or (weight.is_contiguous() and weight.shape[0] == 40)
    pointers = {p.data_ptr() for p in theirs.parameters()}
    assert not pointers & {p.data_ptr() for p in ours.parameters()}
    ours.neurons = _neurons(40, 10)
    leaves = dict(ours.named_parameters())
    expected = scatter_ffn_reference(x, **leaves, neurons=ours.neurons, activation=activation)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


def test_a_module_from_what_is_none() -> None:
    with pytest.raises(TypeError, match=r"SparseFFN.from_dense: block must be .*; got Linear"):
        SparseFFN.from_dense(torch.nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"the block's activation must be one of relu, .*, got Tanh\(\)"):
        SparseFFN.from_dense(_sequential(torch.nn.Tanh()))


class _Other(torch.nn.Module):
    """A block with the attributes of one that is known, and a forward pass of its own."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], gated: bool = False) -> None:
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)
        if gated:
            self.gate_proj = torch.nn.Linear(24, 40)
        self.act_fn, self.between = torch.nn.SiLU(), between
        torch.nn.init.zeros_(self.down_proj.weight)  # as where training begins: hides all that comes before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up_proj(x)
        return self.down_proj(
            self.between(self.act_fn(self.gate_proj(x)) * h if hasattr(self, "gate_proj") else self.act_fn(h))
        )


@pytest.mark.parametrize("act", (torch.nn.ReLU6(), torch.nn.Hardtanh(0, 900), torch.nn.Threshold(-900, 0)), ids=str)
def test_an_activation_that_is_another_one_far_away_is_refused(act: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="the block's activation must be one of relu"):
        SparseFFN.from_dense(_sequential(act))


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_a_block_that_computes_something_else_beside_is_refused(gated: bool) -> None:
    assert SparseFFN.from_dense(_Other(lambda h: h, gated)).activation == "silu"
    changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda h: 1.01 * h,
        lambda h: h.clamp(max=100),
        lambda h: torch.where(h >= h.topk(39).values[..., -1:], h, 0),
        lambda h: F.dropout(h, 0.5),
    )
    for change in changes:
        with pytest.raises(
            ValueError, match=r"block must compute act.*, then down, .*but the output of _Other differs by"
        ):
            SparseFFN.from_dense(_Other(change, gated))
    with pytest.raises(ValueError, match=r"it has between \(LayerNorm\) beside them"):
        SparseFFN.from_dense(_Other(torch.nn.LayerNorm(40), gated))
    with pytest.raises(
        ValueError, match=r"block must map \(\.\.\., 24\) to \(\.\.\., 24\), and _Other raised TypeError"
    ):
        SparseFFN.from_dense(_Other(lambda h, more: h, gated))  # type: ignore[misc, arg-type]


def test_a_decoder_layer_with_the_names_of_a_block_is_refused() -> None:
    pytest.importorskip("transformers")
    from transformers import OPTConfig
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    layer = OPTDecoderLayer(OPTConfig(hidden_size=24, ffn_dim=40, num_attention_heads=2, word_embed_proj_dim=24), 0)
    with pytest.raises(ValueError, match=r"SparseFFN.from_dense: block must"):
        SparseFFN.from_dense(layer)


def test_a_block_that_drops_out_is_refused_in_training_mode() -> None:
    block = torch.nn.Sequential(*_sequential(torch.nn.GELU()), torch.nn.Dropout(0.25)).to(runtime.DEVICE)
    with pytest.raises(ValueError, match=r"must drop out nothing, got Dropout\(p=0.25\); set it to 0, or call eval"):
        SparseFFN.from_dense(block)
    ours, x = SparseFFN.from_dense(block.eval()), randn(3, 24)
    torch.testing.assert_close(ours(x), block(x), rtol=1e-4, atol=1e-5)


def test_projections_of_another_kind_are_named() -> None:
    class Linear(torch.nn.Module):
        weight, bias = torch.ones(40, 24), None

    block = _llama()
    block.up_proj = Linear()
    with pytest.raises(TypeError, match=r"projections must be .*, got .*test_scatter_ffn.*Linear; merge adapters"):
        SparseFFN.from_dense(block)
    block.up_proj = torch.nn.Linear(24, 40)
    block.up_proj.weight = torch.nn.Parameter(torch.zeros(480, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(TypeError, match=r"with a dense floating-point weight, got torch.nn.modules.linear.Linear"):
        SparseFFN.from_dense(block)


# --- edges ----------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "w_up of another width": ({"w_up": lambda: randn(40, 9)}, r"w_up must have shape \(40, 8\), got \(40, 9\)"),
    "w_down the other way round": (
        {"w_down": lambda: randn(6, 40)},
        r"w_down must have shape \(40, K_out\), one row a neuron, got \(6, 40\)",
    ),
    "w_down of another dtype": (
        {"w_down": lambda: randn(40, 6).half()},
        r"w_down must have the dtype of x \(torch.float32\), got torch.float16",
    ),
    "w_gate of another shape": ({"w_gate": lambda: randn(40, 9)}, r"w_gate must have shape \(40, 8\), got \(40, 9\)"),
    "bias of another length": ({"b_down": lambda: randn(7)}, r"b_down must have shape \(6,\), got \(7,\)"),
    "a gate's bias without a gate": (
        {"b_gate": lambda: randn(40)},
        "b_gate must be None where w_gate is None, got a tensor",
    ),
    "unknown activation": (
        {"activation": "tanh"},
        "activation must be one of 'relu', 'leaky_relu', 'gelu', 'gelu_tanh', 'silu', got 'tanh'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name: str) -> None:
    changes, message = BAD[name]
    given = _network(4, 8, 40, 6) | {"neurons": torch.tensor([1], device=runtime.DEVICE)}
    refused(kb.scatter_ffn, given, changes, f"scatter_ffn: {message}")


def test_a_product_of_rows_says_what_is_wrong() -> None:
    given = {"x": randn(2, 8), "weight": randn(4, 8), "rows": torch.tensor([1], device=runtime.DEVICE)}
    refused(kb.gather_matmul, given, {"activation": "tanh"}, "gather_matmul: activation must be one of 'relu'")
    refused(kb.gather_matmul, given, {"rows": None}, "gather_matmul: rows must be a torch.Tensor, got NoneType")


@pytest.mark.skipif(not runtime.INTERPRET, reason="the interpreter's overflow check")
@pytest.mark.parametrize("name", ("vector, shared", "tiles, shared", "tiles, by warps", "packed"))
def test_offsets_are_64_bit(name: str, overflow_raises: Callable[[], None]) -> None:
    """Rows of the weights lie 2^26 elements apart, 40 of them, and the two rows of x 2^31 elements."""
    dense = _network(2, 24, 40, 16, torch.float16)
    far, step = 2**31 + 8, 2**26 + 8
    spread = {key: far_apart(t, stride) for (key, t), stride in zip(dense.items(), (far, step, step), strict=True)}
    neurons = torch.tensor([39, 0, 38])
    with _planned(PLANS[name]):
        expected = kb.scatter_ffn(**dense, neurons=neurons)
        overflow_raises()
        torch.testing.assert_close(kb.scatter_ffn(**spread, neurons=neurons), expected)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.alone
def test_calls_follow_each_other_closely() -> None:
    """Kernels that start early must not overtake what they wait for, also when calls share their buffers."""
    network = _network(1, 2048, 8192, 2048, torch.bfloat16)
    lists = [_neurons(8192, count) for count in (200, 1000, 3000)]
    expected = [kb.scatter_ffn(**network, neurons=ids).clone() for ids in lists]
    torch.cuda.synchronize()
    x = network["x"].clone()
    for _ in range(200):
        # The input comes from a kernel right before, and each output goes into one right after.
        results = [kb.scatter_ffn(**{**network, "x": x * 1.0}, neurons=ids) + 0 for ids in lists]
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
