"""``make hub``: the kernel repository is whole, depends on nothing but PyTorch and Triton, and the library loads it offline."""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from programs import program
from tensors import randn
from torch import nn
from transformers import GptOssConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss

import kernelbook
from kernelbook import check, runtime

ROOT = Path(__file__).resolve().parents[1]
BACKEND = "cpu" if torch.version.cuda is None else "cuda"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of the repository."""
    folders = [tmp_path_factory.mktemp("hub") / str(version) for version in (1, 2)]
    for version, folder in enumerate(folders, 1):
        program("build_hub").build(folder, BACKEND, version)
    return folders


def _imports(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported absolutely while the module itself is."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            continue  # what only tables need is imported where they are made
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]
        yield from _imports(node)


def test_what_is_in_it(repositories: list[Path]) -> None:
    folder = repositories[0]
    settings = (folder / "build.toml").read_text().splitlines()
    assert {"[general]", 'name = "kernelbook"', "version = 1", "[torch-noarch]"} <= set(settings)
    names = ("CARD.md", "LICENSE", "flake.nix", "example.py", "tests/test_kernelbook.py", "benchmarks/benchmark.py")
    assert all((folder / name).is_file() for name in names)
    package = folder / "torch-ext" / "kernelbook"
    for path in package.rglob("*.py"):
        source = path.read_text()
        outside = set(_imports(ast.parse(source))) - set(sys.stdlib_module_names)
        assert outside <= {"torch", "triton"}, (path, outside)
        assert not re.search(r"[\"']kernelbook::", source), path
    # The builder writes this one.
    assert not (package / "_ops.py").exists()


def test_turing_is_supported(tmp_path: Path) -> None:
    """``kernels`` 0.17 refuses a build on a GPU below every capability of its metadata; the card begins with Turing."""
    variant = program("build_hub").build(tmp_path / "hub", "cuda")
    assert "7.5" in json.loads((variant / "metadata.json").read_text())["backend"]["archs"]


@pytest.fixture(scope="module")
def kernels() -> Any:
    return pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def loaded(kernels: Any, repositories: list[Path]) -> list[Any]:
    return [kernels.get_local_kernel(folder) for folder in repositories]


def test_two_versions_live_in_one_process(loaded: list[Any]) -> None:
    x, w = randn(3, 24), randn(24)
    results = [library.rms_norm(x, w) for library in (*loaded, kernelbook)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    names = {library.layer_norm.__module__ for library in loaded}
    assert len(names) == 2 and "kernelbook" not in {name.split(".")[0] for name in names}
    for library in loaded:
        assert set(library.__all__) == {*kernelbook.__all__, "attention_forward", "layers"}


def test_a_norm_gives_the_wider_dtype(loaded: list[Any]) -> None:
    """As transformers' own does for a weight in float32."""
    norm, x = loaded[0].layers.LlamaRMSNorm(), randn(3, 24).bfloat16()
    norm.weight, norm.variance_epsilon = nn.Parameter(randn(24)), 1e-6
    assert norm(x).dtype == torch.float32


def _kernelized(kernels: Any, model: nn.Module, folder: Path, layers: dict[type[nn.Module], str]) -> nn.Module:
    for kind, name in layers.items():
        kernels.replace_kernel_forward_from_hub(kind, name)
    device = runtime.DEVICE.type
    mapping = {name: {device: kernels.LocalLayerRepository(folder, layer_name=name)} for name in layers.values()}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        # Layers of transformers' that nobody maps stay as they are; those mapped here are to be taken.
        kept = {"use_fallback": kernels.KernelizeFallback.NO_LAYER}
        result = kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, **kept)
    return result  # type: ignore[no-any-return]


def _run(model: Any, embeddings: torch.Tensor) -> list[torch.Tensor]:
    """Logits, the gradient of the embeddings, and those of all parameters that have one."""
    embeddings = embeddings.detach().requires_grad_()
    model.zero_grad()
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    torch.manual_seed(1)
    logits.backward(torch.randn(logits.shape, device=logits.device).to(logits.dtype))
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logits.detach(), embeddings.grad, *grads]  # type: ignore[list-item]


def _require(ours: list[torch.Tensor], exact: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for i, (mine, true, theirs) in enumerate(zip(ours, exact, plain, strict=True)):
        factor = check.FORWARD_FACTOR if i == 0 else check.GRADIENT_FACTOR
        if true.abs().max() > 1e-5:  # else it is 0 but for rounding, and has no scale of its own
            check.compare(f"result {i}", mine, true, theirs, factor=factor).require()


@pytest.fixture
def attention(loaded: list[Any]) -> Iterator[str]:
    """The name under which transformers knows the repository's attention."""
    name = "kernelbook-hub"
    ALL_ATTENTION_FUNCTIONS.register(name, loaded[0].attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    yield name


def test_gpt2(kernels: Any, repositories: list[Path], attention: str) -> None:
    model = tiny_models.attention_model("gpt2", n_layer=1).train()
    x = randn(2, 9, 32)
    plain = _run(model, x)
    exact = _run(model.double(), x.double())
    model.float().set_attn_implementation(attention)
    _kernelized(kernels, model, repositories[0], {nn.LayerNorm: "LayerNorm"})
    assert "layer_norm" in model.transformer.ln_f.forward.__func__.__code__.co_names
    _require(_run(model, x), exact, plain)
    backend = "inductor" if runtime.DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    _require(_run(compiled, x), exact, plain)


def test_qwen3_moe(kernels: Any, repositories: list[Path], attention: str) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

    model = tiny_models.tiny_model("qwen3_moe", num_hidden_layers=1).train()
    x = randn(2, 9, tiny_models.COMMON["hidden_size"])
    plain = _run(model, x)
    exact = _run(model.double(), x.double())
    model.float().set_attn_implementation(attention)
    layers = {qwen.Qwen3MoeRMSNorm: "LlamaRMSNorm", qwen.Qwen3MoeExperts: "Experts"}
    _kernelized(kernels, model, repositories[1], layers)
    _require(_run(model, x), exact, plain)


@pytest.mark.parametrize("kind", ("dense", "mxfp4"))
def test_gpt_oss(kind: str, kernels: Any, repositories: list[Path], loaded: list[Any]) -> None:
    """Experts with biases and gates of their own: outputs and gradients, on dense weights and on a checkpoint's bytes."""
    torch.manual_seed(0)
    config = GptOssConfig(hidden_size=32, intermediate_size=64, num_local_experts=3)
    model = nn.ModuleDict({"experts": modeling_gpt_oss.GptOssExperts(config)}).to(runtime.DEVICE).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    ids, gates, x = torch.tensor([[0, 1], [2, 0], [1, 2]], device=runtime.DEVICE), randn(3, 2), randn(3, 32)
    weights = {}
    if kind == "mxfp4":
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(model.experts, name)
            weights[name] = loaded[0].fp4_quantize(weight.mT.contiguous())
            weight.requires_grad_(False).copy_(loaded[0].nf4_dequantize(weights[name], dtype=torch.float32).mT)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        out = model.experts(x, ids, gates.to(x.dtype))
        grads = torch.autograd.grad(out.sin().sum(), [x, *(p for p in model.parameters() if p.requires_grad)])
        return [out.detach(), *grads]

    model.experts.config._experts_implementation = "eager"
    plain = run(x)
    model.double()
    exact = run(x.double())
    model.float()
    for name, packed in weights.items():
        delattr(model.experts, name)
        setattr(model.experts, name, packed)
    _kernelized(kernels, model, repositories[0], {modeling_gpt_oss.GptOssExperts: "GptOssExperts"})
    _require(run(x), exact, plain)


@pytest.mark.parametrize("window", (None, 3))
@pytest.mark.parametrize("padded", (False, True))
def test_windows_and_padding(window: int | None, padded: bool, loaded: list[Any], attention: str) -> None:
    """They are in the masks of the mask function that has to be registered; with another one, or none, a call is an error."""
    model, ids = (
        tiny_models.attention_model("mistral", num_hidden_layers=1, sliding_window=window),
        tiny_models.tokens(),
    )
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[1, :4] = not padded
    with torch.no_grad():
        expected = model(ids, attention_mask=kept).logits
        greedy = {"attention_mask": kept, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        tokens = model.generate(ids, **greedy)
        model.set_attn_implementation(attention)
        assert torch.equal(model.generate(ids, **greedy), tokens)
        torch.testing.assert_close(model(ids, attention_mask=kept).logits[kept], expected[kept], rtol=1e-4, atol=1e-4)
        ALL_ATTENTION_FUNCTIONS.register("no-masks", loaded[0].attention_forward)
        ALL_ATTENTION_FUNCTIONS.register("other-masks", loaded[0].attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register("other-masks", flash_attention_mask)
        for name in ("no-masks", "other-masks"):
            model.set_attn_implementation(name)
            with pytest.raises(ValueError, match=r"attention_forward: .*sdpa_mask"):
                model(ids, attention_mask=kept)


def test_attention_says_what_it_cannot_do(loaded: list[Any]) -> None:
    module, q = nn.Module(), randn(2, 2, 9, 8)
    padding = torch.ones(2, 9, dtype=torch.bool, device=runtime.DEVICE)
    for given, message in (
        ({"attention_mask": padding}, r"attention_mask must be None or have four dimensions, .* got shape \(2, 9\)"),
        ({"sliding_window": 3}, "sliding_window must be part of attention_mask .* got 3 for 9 keys and no mask"),
        ({"softcap": 30.0, "dropout": 0.5}, "softcap must be None with dropout, .* got float"),
        ({"s_aux": q[0, :, 0, 0], "attention_mask": padding[:, None, None]}, "s_aux must be None .* got Tensor"),
        ({"unheard_of": padding}, "unheard_of must be None, got Tensor"),
    ):
        with pytest.raises(ValueError, match=f"attention_forward: {message}"):
            loaded[0].attention_forward(module, q, q, q, **{"attention_mask": None, **given})
    places = torch.arange(9, device=runtime.DEVICE).expand(2, -1)
    ours, _ = loaded[0].attention_forward(module, q, q, q, None, sliding_window=9, position_ids=places)
    assert torch.equal(ours, loaded[0].flash_attention(q, q, q, causal=True).transpose(1, 2))
    ours, _ = loaded[0].attention_forward(module, q, q, q, None, s_aux=q[0, :, 0, 0], softcap=2.0)
    expected = kernelbook.flash_attention(q, q, q, causal=True, sinks=q[0, :, 0, 0], softcap=2.0)
    assert torch.equal(ours, expected.transpose(1, 2))
