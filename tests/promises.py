"""A call of every public function, for the tests of what all of them owe their callers and for the table of what each supports."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import kernelbook as kb
from kernelbook import nn, runtime
from kernelbook.interop.rotary import rotate
from kernelbook.nn.swiglu import swiglu

Given = dict[str, Any]
DEVICE = runtime.DEVICE


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=DEVICE)


def shares(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float32, device=DEVICE)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def _routing(top_k: int = 2) -> kb.Routing:
    return kb.route(ids(0, 1, 2, 0, 1, 1, 0, 2)[: 4 * top_k].view(4, top_k), 3)


def _packed() -> kb.NF4Tensor:
    return kb.nf4_quantize(draw(3, 32, 64))


def _given_experts() -> Given:
    return {
        "x": draw(4, 64), "gate_up": draw(3, 64, 64) / 8, "down": draw(3, 64, 32) / 8,
        "expert_ids": _routing().expert_ids, "gates": shares(4, 2),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Promise:
    """A public function, arguments for it, and what it does not promise."""

    function: Callable[..., Any]
    given: Callable[[], Given]  # in float32
    rows: str = "x"  # the arguments whose first dimension may be empty, all of them at once
    but: tuple[str, ...] = ()  # the properties that it has not, or that have a test of their own
    op: str = ""  # what messages call it
    grads: tuple[str, ...] | None = None  # the arguments that have gradients; by default all that are floating point

    def call(self, given: Given) -> Any:
        return self.function(**given)


PROMISES = {
    "layer_norm": Promise(kb.layer_norm, lambda: {"x": draw(4, 32), "weight": draw(32), "bias": draw(32)}),
    "rms_norm": Promise(kb.rms_norm, lambda: {"x": draw(4, 32), "weight": draw(32)}),
    "rms_norm of a sum": Promise(
        kb.rms_norm, lambda: {"x": draw(4, 32), "weight": draw(32), "residual": draw(4, 32)}, rows="x residual",
    ),
    "sparse_linear": Promise(
        kb.sparse_linear,
        lambda: {
            "x": draw(4, 32), "weight": draw(48, 32), "bias": draw(48), "active_chunks": ids(2, 0, 1), "chunk_size": 16,
            "mode": "sparse_dw_dx",
        },
    ),
    "sparse_forward": Promise(
        kb.sparse_forward,
        lambda: {
            "x": draw(4, 32), "weight": draw(48, 32), "bias": draw(48), "active_chunks": ids(2, 0), "chunk_size": 16,
        },
    ),
    "sparse_dw": Promise(
        kb.sparse_dw,
        lambda: {"x": draw(4, 32), "dy": draw(4, 48), "active_chunks": ids(2, 0), "chunk_size": 16},
        rows="x dy", op="sparse_dw",
    ),
    "sparse_dx": Promise(
        kb.sparse_dx,
        lambda: {"dy": draw(4, 48), "weight": draw(48, 32), "active_chunks": ids(2, 0), "chunk_size": 16},
        rows="dy",
    ),
    "sparse_backward": Promise(
        kb.sparse_backward,
        lambda: {
            "x": draw(4, 32), "weight": draw(48, 32), "dy": draw(4, 48), "active_chunks": ids(2, 0), "chunk_size": 16,
        },
        rows="x dy", grads=("x", "dy"),  # of dW, the first result
    ),
    "flash_attention": Promise(
        kb.flash_attention,
        lambda: {"q": draw(2, 4, 20, 16), "k": draw(2, 2, 20, 16), "v": draw(2, 2, 20, 16), "causal": True},
        rows="q k v", but=("in place",),
    ),
    "attention with sinks": Promise(
        kb.flash_attention,
        lambda: {
            "q": draw(2, 4, 20, 16), "k": draw(2, 2, 20, 16), "v": draw(2, 2, 20, 16), "causal": True, "window": 7,
            "sinks": draw(4), "softcap": 2.0,
        },
        rows="q k v", but=("in place",), op="flash_attention",
    ),
    "attention of packed sequences": Promise(
        kb.flash_attention,
        lambda: {
            "q": draw(1, 4, 20, 16), "k": draw(1, 2, 20, 16), "v": draw(1, 2, 20, 16), "causal": True,
            "cu_seqlens": ids(0, 7, 8, 8, 19),
        },
        rows="q k v", but=("in place",), op="flash_attention",
    ),
    "decoding": Promise(
        kb.flash_attention, lambda: {"q": draw(2, 4, 1, 16), "k": draw(2, 2, 20, 16), "v": draw(2, 2, 20, 16)},
        rows="q k v", but=("in place",), op="flash_attention",
    ),
    "paged_attention": Promise(
        kb.paged_attention,
        lambda: {
            "q": draw(1, 4, 1, 16), "k_pages": draw(4, 2, 16, 16), "v_pages": draw(4, 2, 16, 16),
            "block_table": ids(3, 1)[None], "lengths": ids(20),
        },
        rows="q block_table lengths", grads=(),
    ),
    "append_to_pages": Promise(
        kb.append_to_pages,
        lambda: {
            "k": draw(1, 2, 1, 16), "v": draw(1, 2, 1, 16), "k_pages": draw(4, 2, 16, 16),
            "v_pages": draw(4, 2, 16, 16), "block_table": ids(3, 1)[None], "lengths": ids(20),
        },
        rows="", grads=(), but=("empty",),  # pages stay as they are
    ),
    "gather_matmul": Promise(
        kb.gather_matmul, lambda: {"x": draw(4, 32), "weight": draw(9, 32), "rows": ids(1, 7, 4), "activation": "silu"}
    ),
    "scatter_ffn": Promise(
        kb.scatter_ffn,
        lambda: {
            "x": draw(4, 32), "w_up": draw(9, 32), "w_down": draw(9, 24), "neurons": ids(1, 7, 4),
            "w_gate": draw(9, 32), "activation": "silu",
        },
    ),
    "nf4_quantize": Promise(lambda w: _parts(kb.nf4_quantize(w)), lambda: {"w": draw(3, 64)}, rows="w", grads=()),
    "nf4_dequantize": Promise(
        kb.nf4_dequantize, lambda: {"q": _packed(), "experts": ids(2, 0)}, rows="experts", grads=(), but=("strides", "forward mode")
    ),
    "fp4_quantize": Promise(lambda w: _parts(kb.fp4_quantize(w)), lambda: {"w": draw(3, 64)}, rows="w", grads=(), but=("opcheck", "forward mode")),
    "fp4_tensor": Promise(
        lambda packed, scales, dtype: _parts(kb.fp4_tensor(packed, scales, dtype=dtype)),
        lambda: {
            "packed": ids(*range(64)).byte().view(2, 32), "scales": ids(127, 126, 125, 0).byte().view(2, 2), "dtype": torch.float32,
        },
        rows="packed scales", grads=(), but=("opcheck", "bad input", "forward mode"),  # no operator; of two that do not fit the first is named
    ),
    "nf4_matmul": Promise(
        kb.nf4_matmul, lambda: {"x": draw(4, 64), "q": _packed(), "expert": 1}, but=("gradcheck",)  # no float64
    ),
    "nf4_matmul, scales in 8 bits": Promise(
        kb.nf4_matmul,
        lambda: {"x": draw(2, 64), "q": kb.nf4_quantize(draw(3, 32, 64), double_quant=True), "expert": ids(2)},
        but=("gradcheck", "bad input"),
    ),
    "sparse_dw, compact": Promise(
        kb.sparse_dw,
        lambda: {"x": draw(4, 32), "dy": draw(4, 48), "active_chunks": ids(2, 0), "chunk_size": 16, "compact": True},
        rows="x dy", op="sparse_dw",
    ),
    "sparse_forward, compact": Promise(
        kb.sparse_forward,
        lambda: {
            "x": draw(4, 32), "weight": draw(48, 32), "bias": None, "active_chunks": ids(2, 0), "chunk_size": 16,
            "compact": True,
        },
    ),
    "scatter_ffn, plain": Promise(
        kb.scatter_ffn,
        lambda: {
            "x": draw(4, 32), "w_up": draw(9, 32), "w_down": draw(9, 24), "neurons": ids(1, 7, 4), "b_up": draw(9),
            "b_down": draw(24), "activation": "gelu",
        },
    ),
    "moe_lora, in order of experts": Promise(
        kb.moe_lora,
        lambda: {
            "x": draw(8, 32), "w": draw(3, 32, 24), "lora_a": draw(3, 2, 32), "lora_b": draw(3, 24, 2),
            "routing": _routing(), "grouped_in": True, "grouped_out": True, "strategy": "fused", "scaling": 0.5,
        },
        rows="x routing",
    ),
    "scatter2scatter": Promise(
        kb.scatter2scatter, lambda: {"x": draw(4, 32), "w": draw(3, 32, 24), "routing": _routing()}, rows="x routing"
    ),
    "moe_lora": Promise(
        kb.moe_lora,
        lambda: {
            "x": draw(4, 32), "w": draw(3, 32, 24), "lora_a": draw(3, 2, 32), "lora_b": draw(3, 24, 2),
            "routing": _routing(), "bias": draw(3, 24), "gates": shares(4, 2),
        },
        rows="x routing gates",
    ),
    "moe_lora in 4 bits": Promise(
        kb.moe_lora,
        lambda: {
            "x": draw(4, 64), "w": _packed(), "lora_a": draw(3, 2, 64), "lora_b": draw(3, 32, 2), "routing": _routing(),
        },
        rows="x routing",
    ),
    "route": Promise(
        lambda expert_ids, num_experts: kb.route(expert_ids, num_experts).lists[:17],
        lambda: {"expert_ids": _routing().expert_ids, "num_experts": 3}, rows="expert_ids", op="route", grads=(), but=("forward mode",),
    ),
    "gated_experts": Promise(nn.gated_experts, _given_experts, rows="x expert_ids gates"),
}  # fmt: skip


def _parts(q: kb.NF4Tensor) -> tuple[torch.Tensor, ...]:
    return q.packed, q.absmax


# --- modules --------------------------------------------------------------------------------------------------------


def _call(module: torch.nn.Module, **given: Any) -> Any:
    """The module with what is given by its parameters' names in their place, and all else as its inputs."""
    names = dict(module.named_parameters())
    parameters = {n: value for n, value in given.items() if n in names}
    inputs = tuple(value for n, value in given.items() if n not in names)
    return torch.func.functional_call(module, parameters, inputs)


def _module(make: Callable[[], torch.nn.Module], inputs: Callable[[], Given], **how: Any) -> Promise:
    """A module as a function of its inputs and of the parameters that it trains."""

    def given() -> Given:
        with DEVICE:
            module = make()
        trained = {n: draw(*p.shape) / 4 for n, p in module.named_parameters() if p.requires_grad}
        return {"module": module, **inputs(), **trained}

    return Promise(_call, given, **how)


def _with(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _experts() -> nn.GatedExperts:
    return nn.GatedExperts(3, 64, 32)


def _tokens() -> Given:
    return {"x": draw(4, 64)}


def routed() -> Given:
    return {"x": draw(4, 64), "expert_ids": _routing().expert_ids, "gates": shares(4, 2)}


def _packed_experts(active: str, **how: Any) -> Promise:
    """Experts in 4 bits, and what reaches the products of them."""

    def given() -> Given:
        more = _given_experts()
        packed = {name: kb.nf4_quantize(more.pop(name)) for name in ("gate_up", "down")}
        return more | packed | {"active": active}

    return Promise(nn.gated_experts, given, **how)


def _float8(w: torch.Tensor) -> nn.Float8Tensor:
    return nn.Float8Tensor(w.to(torch.float8_e4m3fn), torch.ones(3, 1, 1, device=DEVICE))


def _float8_experts() -> Given:
    more = _given_experts()
    return more | {name: _float8(more[name]) for name in ("gate_up", "down")}


def _same_bits_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    with kb.same_bits():
        return nn.linear(x, weight, bias)


MODULES = {
    "LayerNorm": _module(lambda: nn.LayerNorm(32), lambda: {"x": draw(4, 32)}),
    "RMSNorm": _module(lambda: nn.RMSNorm(32), lambda: {"x": draw(4, 32), "residual": draw(4, 32)}),
    "SparseLinear": _module(lambda: _with(nn.SparseLinear(32, 48, chunk_size=16), active_chunks=ids(2, 0)), lambda: {"x": draw(4, 32)}),
    "SparseLinear, compact": _module(
        lambda: _with(nn.SparseLinear(32, 48, chunk_size=16, compact_gradient=True), active_chunks=ids(2, 0)),
        lambda: {"x": draw(4, 32)},
    ),
    "SparseFFN": _module(
        lambda: _with(nn.SparseFFN(32, 9, gated=True, bias=True, activation="silu"), neurons=ids(1, 7, 4)), lambda: {"x": draw(4, 32)},
    ),
    "SameBitsLinear": _module(lambda: nn.SameBitsLinear(32, 24), lambda: {"x": draw(4, 32)}),
    "linear": Promise(_same_bits_linear, lambda: {"x": draw(4, 32), "weight": draw(24, 32), "bias": draw(24)}),
    "ClampedSwiGLU": Promise(lambda h: nn.ClampedSwiGLU()(h), lambda: {"h": draw(4, 32)}),
    "rotate": Promise(
        rotate,
        lambda: {"q": draw(1, 2, 4, 16), "k": draw(1, 1, 4, 16), "cos": draw(1, 4, 16), "sin": draw(1, 4, 16)},
        but=("forward mode",),  # transformers' own function is called then
        grads=("q", "k"),
    ),
    "swiglu": Promise(swiglu, lambda: {"h": draw(4, 32)}),
    "compact_sparse_linear": Promise(
        nn.compact_sparse_linear,
        lambda: {
            "x": draw(4, 32), "weight": draw(48, 32), "bias": draw(48), "active_chunks": ids(2, 0), "chunk_size": 16,
            "mode": "sparse_dw_dx",
        },
    ),
    "load_balancing_loss": Promise(
        nn.load_balancing_loss, lambda: {"probabilities": shares(4, 3), "expert_ids": _routing().expert_ids},
        but=("forward mode",),  # which is PyTorch's
    ),
    "NF4Linear": _module(lambda: nn.NF4Linear(64, 32), _tokens),
    "NF4Linear with LoRA": _module(lambda: nn.NF4Linear(64, 32).add_lora(2), _tokens),
    "GatedExperts": _module(_experts, routed),
    "GatedExperts with LoRA": _module(lambda: _experts().add_lora(2), routed),
    "GatedExperts in 4 bits": _module(lambda: _experts().quantize(), routed),
    "GatedExperts in 4 bits with LoRA": _module(lambda: _with(_experts().quantize().add_lora(2), active="all"), routed),
    "MoELayer": _module(lambda: nn.MoELayer(3, 64, 32, slots=2), _tokens),
    "gated_experts, bound": _packed_experts("bound"),
    "gated_experts, count": _packed_experts("count"),
    "gated_experts in float8": Promise(nn.gated_experts, _float8_experts),
    "GPT": _module(
        lambda: nn.GPT(nn.GPTConfig(11, context=8, width=32, heads=2, depth=1, chunk_size=16)), lambda: {"tokens": ids(1, 5, 3, 0)[None]}
    ),
}  # fmt: skip
