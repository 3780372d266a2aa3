"""Puts the kernels into a model that is made of PyTorch's modules, and takes them out again."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from kernelbook import runtime  # before Triton, which it sets up
from kernelbook.attention import flash_attention
from kernelbook.linear import linear
from kernelbook.nn.layers import LayerNorm, RMSNorm
from kernelbook.nn.same_bits import SameBitsLinear, in_mode, with_linear

MAX_HEAD = 256  # features of a head, as far as flash_attention goes


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` on :func:`kernelbook.flash_attention` where a call asks for nothing but attention.

    A call that wants the weights, drops some of them out, or masks keys otherwise than causally is PyTorch's own, as is one
    with ``bias_k``, ``add_zero_attn`` or nested tensors.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in PyTorch."""
        plain = (
            not need_weights
            and key_padding_mask is None
            # With a mask, is_causal promises that it is the causal one: the first query then sees the first key only.
            and (attn_mask is None or is_causal)
            and not (
                is_causal and query.shape[-2 if self.batch_first else 0] != key.shape[-2 if self.batch_first else 0]
            )
            and not (self.training and self.dropout > 0)
            and self.bias_k is None
            and not self.add_zero_attn
            and not query.is_nested
        )
        if not plain and runtime.in_same_bits():
            raise ValueError(
                "MultiheadAttention: within same_bits() a call must ask for nothing but attention, causal or of all keys: no "
                "weights (need_weights=False), other masks, dropout, bias_k, add_zero_attn or nested tensors"
            )
        if not plain:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        swaps = query.ndim == 3 and not self.batch_first  # (N, B, features)
        q, k, v = (self._heads(t.transpose(0, 1) if swaps else t, i) for i, t in enumerate((query, key, value)))
        batched = q.ndim == 4
        mixed = flash_attention(*(t if batched else t.unsqueeze(0) for t in (q, k, v)), causal=is_causal)
        mixed = (mixed if batched else mixed.squeeze(0)).transpose(-3, -2).flatten(-2)
        out = linear(mixed, self.out_proj.weight, self.out_proj.bias)
        return (out.transpose(0, 1) if swaps else out), None

    def _heads(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """(..., N, features) -> (..., H, N, D): the projection to queries (0), keys (1) or values (2)."""
        if self._qkv_same_embed_dim:
            weight = self.in_proj_weight.chunk(3)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        return linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2)


class Swap:
    """Changes that :func:`swap` made. Printed, it lists them; as a context manager, it undoes them at the end.

    Attributes:
        changed: for each module that runs on a kernel now, its name in the model and what it became.
        left: for each that could not, its name and why not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._before: list[tuple[Any, str, Any, Any]] = []  # what was changed, where, from what, to what
        self._within: list[nn.Module] = []  # of the same bits: modules whose calls hold the mode

    def undo(self) -> None:
        """Make the modules what they were. Parameters, buffers and their hooks were never touched.

        Raises:
            RuntimeError: a module has got another class since, as by a parametrization or FSDP2. Nothing has been undone then.
        """
        for owner, name, _, given in self._before:
            if name == "__class__" and type(owner) is not given:
                raise RuntimeError(
                    f"Swap.undo: modules must have the class that swap gave them, {given.__name__}, got {type(owner).__name__}; "
                    f"take off first what was put on them since, such as a parametrization"
                )
        for module in self._within:
            del vars(module)["_call_impl"]
        self._within = []
        for owner, name, value, _ in reversed(self._before):
            setattr(owner, name, value)
        self._before, self.changed = [], {}

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        kinds = list(self.changed.values())
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)) or "nothing"
        lines = [f"swap: {type(self.model).__name__} runs {counts} on kernelbook"]
        return "\n".join(lines + [f"  left as it was: {name or 'the model'}: {why}" for name, why in self.left.items()])

    def _change(self, name: str, module: nn.Module, kind: type[nn.Module] | str, became: str) -> None:
        """Give the module another class, or leave it: where ``kind`` says why, or where no class decides what it does."""
        if isinstance(kind, str):
            self.left[name] = kind
        elif "forward" in vars(module):
            self.left[name] = "it has a forward of its own, as accelerate's hooks give it, which no class changes"
        else:
            self._set(module, "__class__", kind)
            self.changed[name] = became

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name), value))
        setattr(owner, name, value)


def swap(
    model: nn.Module,
    *,
    layer_norm: bool = True,
    rms_norm: bool = True,
    attention: bool = True,
    same_bits: bool = False,
    quiet: bool = False,
) -> Swap:
    """Run PyTorch's own layers inside ``model`` on the kernels, in place; print what changed.

    ``kernelbook.check.model(model, batch)`` says layer by layer whether it is still right; see :func:`kernelbook.check.model`.

    A module changes its class, and nothing else: parameters, buffers, hooks, names and the state dict stay. Modules of other
    classes, such as a subclass with a ``forward`` of its own, and modules whose instance has one are left alone. A model of
    transformers runs its attention on the kernels too, by its own interface for that (see
    :func:`kernelbook.interop.transformers_attention.register`), and so do its own classes of RMS norms that compute nothing
    else, and the rotation of queries and keys where it is the usual one. Sinks and soft caps are the kernel's own too. A model
    whose attention asks for what is not known here, such as the keys that an indexer selects, keeps its own.

    Where ``torch.nn.TransformerEncoderLayer`` holds a module that changed, its inference fast path is switched off: it would
    pass over the modules.

    With ``same_bits`` the model runs within :func:`kernelbook.same_bits`, whoever calls it or one of its blocks: a token's
    log-probabilities are the same bits in a packed or padded batch and in generation, alone or beside others. Its linear
    layers, a router's product and its experts run on the kernels too. Where a mask tells of padding, or where packed sequences
    begin, the host waits for the device once a forward pass. Packed sequences of which the mask does not tell are an error:
    most models make such a mask of ``position_ids`` where there is no cache and no other mask, and gpt-oss does not. PyTorch's
    softmax and log_softmax go row by row, and are left; on a GPU their rows have to begin on 16 bytes. What a ``forward`` of
    yours calls itself, such as ``torch.matmul`` or ``scaled_dot_product_attention``, is not looked at, and may depend on the
    batch.

    Args:
        model: any module; on a GPU when it is called, or under the interpreter.
        layer_norm: ``torch.nn.LayerNorm`` becomes :class:`kernelbook.nn.LayerNorm`.
        rms_norm: ``torch.nn.RMSNorm`` over one dimension becomes :class:`kernelbook.nn.RMSNorm`, and those of transformers'
            models run on :func:`kernelbook.rms_norm`.
        attention: ``torch.nn.MultiheadAttention`` runs :func:`kernelbook.flash_attention` where a call needs no weights, no
            dropout and no mask but the causal one. Other calls stay PyTorch's.
        same_bits: results depend on no other row of the batch, see above. Take it with all the others. On a CPU the model's
            own activations are PyTorch's, which round a width that is no multiple of 32 differently in different rows.
        quiet: print nothing.

    Returns:
        What was changed, with ``undo()``; as a context manager it undoes it at the end.

    Raises:
        TypeError: ``model`` is not a module, or ``same_bits`` not a bool.
        ValueError: with ``same_bits``: norms or attention are not to be changed, or the model has modules that change with
            the batch and have no kernel here.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap: model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(same_bits, bool):
        raise TypeError(f"swap: same_bits must be a bool, got {type(same_bits).__name__}")
    if same_bits and not (layer_norm and rms_norm and attention):
        raise ValueError(
            f"swap: layer_norm, rms_norm and attention must be True with same_bits=True, got {layer_norm}, {rms_norm} and "
            f"{attention}"
        )
    done = Swap(model)
    try:
        _swap(done, layer_norm, rms_norm, attention)
        if same_bits:
            _swap_same_bits(done)
    except BaseException:
        done.undo()
        raise
    if not quiet:
        against = "" if hasattr(model, "set_attn_implementation") else ", against=the model before"
        print(f"{done}\n  to check it: kernelbook.check.model(model, batch{against})")
    return done


def _swap(done: Swap, layer_norm: bool, rms_norm: bool, attention: bool) -> None:
    model = done.model
    kinds: list[tuple[bool, Any, Any]] = [
        (layer_norm, nn.LayerNorm, LayerNorm),
        (rms_norm, nn.RMSNorm, RMSNorm),
        (attention, nn.MultiheadAttention, MultiheadAttention),
    ]
    for name, module in model.named_modules():
        for wanted, theirs, ours in kinds:
            if not wanted or not isinstance(module, theirs) or isinstance(module, ours):
                continue
            became: Any = ours
            if type(module) is not theirs:
                became = f"{type(module).__name__} is a class of its own"
            elif isinstance(module, nn.RMSNorm) and len(module.normalized_shape) > 1:
                became = f"its normalized_shape {tuple(module.normalized_shape)} has more than one dimension"
            elif isinstance(module, nn.MultiheadAttention) and module.head_dim > MAX_HEAD:
                became = f"its heads have {module.head_dim} features, and flash_attention takes at most {MAX_HEAD}"
            done._change(name, module, became, theirs.__name__)
    changed = {module for name, module in model.named_modules() if name in done.changed}
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and changed & set(module.modules()):
            done._set(module, "activation_relu_or_gelu", 0)
        elif isinstance(module, nn.TransformerEncoder) and changed & set(module.modules()):
            done._set(module, "use_nested_tensor", False)  # what it would make of padded input only the fast path takes
    if rms_norm and hasattr(model, "set_attn_implementation"):
        from kernelbook.interop import transformers_norms

        for name, module, norm in list(transformers_norms.rms_norms(model)):
            done._change(name, module, norm, "RMSNorm")
    if attention and hasattr(model, "set_attn_implementation"):
        from kernelbook.interop import rotary

        _swap_attention_interface(model, done)
        for name, module, turning in list(rotary.attentions(model)):
            done._change(name, module, turning, "rotary embedding")


def _swap_attention_interface(model: Any, done: Swap) -> None:
    """Select the kernels as the attention implementation of a transformers model and of the models in it."""
    from kernelbook.interop import transformers_attention

    transformers_attention.register()
    configs = {id(part.config) for part in model.modules() if hasattr(part, "set_attn_implementation")}
    for name, part in model.named_modules():
        if not hasattr(part, "set_attn_implementation"):
            continue
        config: Any = part.config
        if config._attn_implementation == transformers_attention.NAME:
            continue  # the model around it has the same configuration
        # The second: gpt-oss, whose sinks PyTorch's attention has no place for.
        takes_others = part._supports_sdpa or getattr(part, "_supports_attention_backend", False)
        users = dict.fromkeys(type(module) for module in model.modules() if getattr(module, "config", None) is config)
        reasons = (f"{kind.__name__} {why}" for kind in users if (why := transformers_attention.why_not_ours(kind)))
        if not (part._can_set_attn_implementation() and takes_others):
            done.left[name] = f"{type(part).__name__} has an attention of its own kind"
        elif reason := next(reasons, None):
            done.left[name] = reason
        elif getattr(config, "output_attentions", False):
            done.left[name] = "its configuration asks for attention weights (output_attentions), which no kernel gives"
        else:
            # What set_attn_implementation() sets as well; the public name would set it for other models' configurations too.
            done._set(config, "_attn_implementation_internal", transformers_attention.NAME)
            # PEFT's modules_to_save are copies with configurations of their own, and get the same masks.
            for own in (getattr(module, "config", None) for module in part.modules()):
                if type(own) is type(config) and id(own) not in configs:
                    done._set(own, "_attn_implementation_internal", transformers_attention.NAME)
            done.changed[f"{name}.config" if name else "config"] = "attention implementation"


# --- the same bits --------------------------------------------------------------------------------------------------

# Modules with weights that look rows up or are the package's own; the last is MultiheadAttention's, which does not call it.
ROW_BY_ROW = (nn.Embedding, MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _swap_same_bits(done: Swap) -> None:
    """Swap what :func:`_swap` leaves to PyTorch, and put the mode around each module that has others in it."""
    model = done.model
    experts = _swap_experts(done)
    unknown: dict[str, str] = {}
    for name, module in model.named_modules():
        weights = dict(module.named_parameters(recurse=False))
        if type(module) is nn.Linear:
            done._change(name, module, SameBitsLinear, "Linear")
            continue
        if isinstance(module, nn.modules.batchnorm._NormBase):  # has no weights where affine is False
            unknown[name] = f"{type(module).__name__} normalizes over other rows"
            continue
        ours = type(module).__module__.startswith("kernelbook.")
        if ours or id(module) in experts or isinstance(module, ROW_BY_ROW) or set(weights) <= {"sinks"}:
            continue
        kind: Any = type(module)
        names = getattr(getattr(kind.forward, "__code__", None), "co_names", ())
        if "weight" in weights and weights["weight"].ndim == 2 and {"linear", "matmul"} & {*names}:  # a router
            done._change(name, module, with_linear(kind), kind.__name__)
        else:
            unknown[name] = f"{type(module).__name__} has weights, and no kernel of the package is known for it"
    unknown = done.left | unknown
    if unknown:
        listed = "; ".join(f"{name or 'the model'}: {why}" for name, why in unknown.items())
        raise ValueError(f"swap: same_bits must be False for this model, since it would not hold: {listed}")
    for name, module in model.named_modules():
        if (name == "" or any(True for _ in module.children())) and "_call_impl" not in vars(module):
            vars(module)["_call_impl"] = functools.partial(_call_in_mode, module)
            done._within.append(module)


def _swap_experts(done: Swap) -> set[int]:
    """Run a transformers model's experts on the kernels; return the modules that they are."""
    model: Any = done.model
    parts = [part for part in model.modules() if hasattr(part, "set_experts_implementation")]
    if not parts:
        return set()
    from kernelbook.interop import transformers as interop

    found = list(interop.expert_modules(model))
    if not found:
        return set()
    interop.check_experts(model)
    interop.register()
    for part in parts:
        if part.config._experts_implementation != interop.NAME:
            done._set(part.config, "_experts_implementation_internal", interop.NAME)
    for name, _ in found:
        done.changed[name] = "experts"
    return {id(module) for _, module in found}


def _call_in_mode(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Hold the mode while a module is called, in a checkpoint's second pass too, whatever ends the call."""
    caller = sys._getframe(1)
    if caller.f_code is nn.Module._wrapped_call_impl.__code__:
        module = caller.f_locals["self"]  # a shallow copy, as DataParallel makes them, has its original's attributes
    with in_mode(module, args, kwargs):
        return type(module)._call_impl(module, *args, **kwargs)
