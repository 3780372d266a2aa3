"""Captured steps and captured generation of transformers' models, with PEFT and with its Trainer."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from emulated_graphs import emulate  # noqa: E402
from tiny_models import COMMON, tiny_model, tokens  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from kernelbook import runtime  # noqa: E402
from kernelbook.interop import transformers as interop  # noqa: E402
from kernelbook.interop import transformers_attention  # noqa: E402
from kernelbook.nn import named_attention, swap  # noqa: E402
from kernelbook.train import CapturedStep  # noqa: E402
from kernelbook.train.step import loss_of  # noqa: E402

GPU = runtime.DEVICE.type == "cuda"
EVERYWHERE = pytest.mark.gpu if GPU else lambda test: test  # in make test, and in make test-gpu too
LENGTHS = (24, 17, 24)
pytestmark = [] if GPU else [pytest.mark.filterwarnings("ignore:.*there is no GPU")]


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**(COMMON | {"intermediate_size": 48} | changes))
    return LlamaForCausalLM(config).to(runtime.DEVICE).eval()


def with_pairs(model: Any) -> Any:
    """PEFT's LoRA on attention and on every expert, both parts random."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=interop.expert_parameters(model),
        init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


def on_kernels(kind: str) -> Any:
    """A tiny model that runs on the kernels; mixtures in 4 bits, with PEFT's pairs."""
    if kind == "llama":
        model = llama()
    else:
        model = tiny_model(kind)
        interop.quantize_experts(model)
        model = interop.use_kernels(with_pairs(model))
    swap(model.get_base_model() if kind != "llama" else model, quiet=True)
    return model.train()


def data(count: int, *lengths: int) -> list[dict[str, torch.Tensor]]:
    found = []
    for i in range(count):
        ids = tokens(2, lengths[i % len(lengths)])
        found.append({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    return found


def adam(model: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = torch.tensor(1e-2, device=runtime.DEVICE)
    return torch.optim.AdamW(trained, lr=lr, fused=True, capturable=True)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoints", (False, True))
@pytest.mark.parametrize("kind", ("llama", "qwen3_moe", "olmoe"))
def test_a_captured_step_is_the_step(kind: str, checkpoints: bool) -> None:
    batches = data(14, *LENGTHS)
    model, plain = on_kernels(kind), on_kernels(kind)
    for each in (model, plain):
        if checkpoints:
            how = {"use_reentrant": False, "preserve_rng_state": False}
            base = each.get_base_model() if kind != "llama" else each
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    step = CapturedStep(model, adam(model), clip=1.0, autocast=torch.bfloat16)
    losses = [step(**interop.known_masks(model, batch)) for batch in batches]
    optimizer, expected = adam(plain), []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert step.why_eager is None
    assert len(step._calls) == 2
    assert [loss.item() for loss in losses] == expected


def test_masks_that_leave_nothing_out_are_known() -> None:
    model = llama()
    [batch] = data(1, 9)
    assert interop.known_masks(model, batch) == batch  # attention is transformers' own
    swap(model, quiet=True)
    for given in (batch, {"input_ids": batch["input_ids"]}):
        found = interop.known_masks(model, given)
        assert found["attention_mask"].shape == (0, 1, 1, 1)
        with torch.no_grad():
            assert torch.equal(model(**found).logits, model(**given).logits)
    elsewhere = interop.known_masks(model, {"input_ids": batch["input_ids"].to("meta")})
    assert elsewhere["attention_mask"].is_meta
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, -2:] = 0
    assert interop.known_masks(model, batch)["attention_mask"] is batch["attention_mask"]
    packed = {"input_ids": batch["input_ids"], "position_ids": torch.arange(9)[None] % 5}
    assert interop.known_masks(model, packed) == packed
    begins = torch.tensor([0, 5, 8], dtype=torch.int32)
    found = interop.known_masks(model, packed | {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 5})
    assert found.keys() == {*packed, "cu_seq_lens_q", "cu_seq_lens_k"}
    assert found["cu_seq_lens_q"].dtype == torch.int32
    rows = batch["input_ids"].numel()
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 5, *[8] * (rows - 1)]
    model.config.sliding_window = 4  # of which Llama's own code makes no masks
    assert "attention_mask" not in interop.known_masks(model, {"input_ids": batch["input_ids"]})
    model.config.sliding_window = None
    for name, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        setattr(model.config, name, value)
        assert "attention_mask" not in interop.known_masks(model, {"input_ids": batch["input_ids"]})
        delattr(model.config, name)
    assert "attention_mask" in interop.known_masks(model, {"input_ids": batch["input_ids"]})


WITH_WINDOWS = ("gemma2", "gpt_oss", "mistral")


def windowed(kind: str) -> Any:
    """A tiny model with sliding windows of four keys, in some layers or in all."""
    torch.manual_seed(0)
    sizes = COMMON | {"intermediate_size": 48, "head_dim": 8, "sliding_window": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model: Any = {
        "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, query_pre_attn_scalar=8)),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**sizes, num_local_experts=3, rope_parameters=rope)
        ),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)),
    }[kind]()
    if kind == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
        model.set_experts_implementation("eager")
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")
    return model.to(runtime.DEVICE).eval()


@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("kind", ("llama", *WITH_WINDOWS))
def test_a_captured_step_has_our_attention_in_all_layers(
    kind: str, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama() if kind == "llama" else windowed(kind)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    transformers_attention.register()
    model.set_attn_implementation("kernelbook")
    windows: list[int | None] = []
    kernel = named_attention.flash_attention

    def count(*tensors: torch.Tensor, window: int | None, **how: Any) -> torch.Tensor:
        windows.append(window)
        return kernel(*tensors, window=window, **how)

    monkeypatch.setattr(named_attention, "flash_attention", count)
    monkeypatch.setattr(transformers_attention, "_captured", lambda: True)
    batch = {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})
    with torch.no_grad():
        logits = model(**interop.known_masks(model, batch), use_cache=False).logits
    assert windows == {"llama": [None, None], "mistral": [4, 4], "gemma2": [4, None], "gpt_oss": [4, None]}[kind]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ("position_ids", "cu_seq_lens"))
@pytest.mark.parametrize("kind", ("llama", *WITH_WINDOWS))
def test_a_captured_step_follows_packed_batches(kind: str, how: str) -> None:
    """One graph for all boundaries, also if the steps before the capture had one sequence each."""
    model = llama() if kind == "llama" else windowed(kind)
    swap(model, quiet=True)
    if kind == "gpt_oss":
        interop.use_kernels(model)  # transformers' own experts wait for the device
    plain = copy.deepcopy(model)
    batches = []
    for lengths in ((24,), (24,), (24,), (5, 1, 11, 7), (20, 4), (24,), (1,) * 24, (9, 9, 6)):
        ids = tokens(1, 24)
        places = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
        batch = {"input_ids": ids, "labels": ids, "position_ids": places, "use_cache": False}
        if how == "cu_seq_lens":
            ends = torch.tensor((0, *lengths), device=ids.device).cumsum(0, dtype=torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths)}
        batches.append(batch)
    step = CapturedStep(model, adam(model))
    losses = torch.stack([step(**interop.known_masks(model, batch)) for batch in batches])
    optimizer, expected = adam(plain), []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    assert step.why_eager is None and len(step._calls) == 1
    torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-3, atol=0)


def test_the_loss_in_pieces_is_the_loss() -> None:
    model = llama().train()
    [batch] = data(1, 9)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :4] = -100
    found, caches = [], []
    model.model.register_forward_hook(lambda _module, _inputs, out: caches.append(out.past_key_values))
    for loss in (lambda: model(**batch, use_cache=False).loss, lambda: interop.loss_in_pieces(model, **batch, piece=4)):
        model.zero_grad()
        value = loss()
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert caches == [None] * 3  # the second, to compare logits


KEYWORDS: dict[str, dict[str, Any]] = {
    "a tensor of one": {"num_items_in_batch": torch.tensor(40)},
    "all": {"num_items_in_batch": 7, "shift_labels": torch.arange(18).view(2, 9) % 7, "ignore_index": 3},
    "a tuple": {"return_dict": False},
    "what changes nothing": {
        "logits_to_keep": 0,
        "output_router_logits": False,
        "position_ids": torch.arange(9)[None] + 2,
    },
}


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_the_loss_in_pieces_takes_what_the_models_own_takes(keywords: str) -> None:
    model = llama().train()
    ids = torch.arange(18, device=runtime.DEVICE).view(2, 9) % 5
    more = {
        name: value.to(runtime.DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in KEYWORDS[keywords].items()
    }
    with torch.no_grad():
        theirs = loss_of(model, input_ids=ids, labels=ids, **more)
        ours = interop.loss_in_pieces(model, ids, ids, piece=4, **more)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"loss_in_pieces: logits_to_keep must be left out, got .* LlamaForCausalLM"):
        interop.loss_in_pieces(model, ids, ids, logits_to_keep=3)


def test_the_first_loss_in_pieces_under_autocast_has_all_gradients() -> None:
    model = llama().train()
    [batch] = data(1, 9)
    with torch.autocast(runtime.DEVICE.type, torch.bfloat16):
        interop.loss_in_pieces(model, **batch).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.model.layers.parameters())
    assert model.lm_head.weight.grad.any()


OTHER_LOGITS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft cap": ("Gemma2", {"final_logit_softcapping": 0.7, "head_dim": 8}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
    "multiplied": ("Cohere", {"logit_scale": 0.3, "bos_token_id": 1, "eos_token_id": 2}),
}


@pytest.mark.parametrize("kind", OTHER_LOGITS)
def test_the_loss_in_pieces_is_that_of_the_models_logits(kind: str) -> None:
    """Of models that do something to what their output layer gives."""
    name, changes = OTHER_LOGITS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, intermediate_size=48, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(runtime.DEVICE).train()
    [batch] = data(1, 9)
    with torch.no_grad():
        ours, theirs = interop.loss_in_pieces(model, **batch, piece=4), model(**batch).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Halved(LlamaForCausalLM):  # type: ignore[misc]
    """A model that does something of which no configuration tells; ``where`` it does."""

    where = 30.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = torch.where(out.logits > self.where, out.logits / 2, out.logits)
        return out


def test_a_loss_in_pieces_that_would_be_another_is_refused() -> None:
    [batch] = data(1, 9)
    model = llama().train()
    model.__class__ = Halved
    hooks = len(model.model._forward_hooks)
    with pytest.raises(
        ValueError, match=r"loss_in_pieces: model must make its logits by its output layer.* got Halved"
    ):
        interop.loss_in_pieces(model, **batch)
    assert all(module.training for module in model.modules()) and len(model.model._forward_hooks) == hooks
    model = llama()
    model.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(ValueError, match="loss_in_pieces: model must have transformers' loss"):
        interop.loss_in_pieces(model, **batch)
    with pytest.raises(TypeError, match=r"loss_in_pieces: model must be a transformers model or .* got Seq"):
        interop.loss_in_pieces(torch.nn.Sequential(model), **batch)


@pytest.mark.parametrize("kind", ("PromptTuningConfig", "AdaLoraConfig"))
def test_what_peft_adds_around_a_model_stays(kind: str) -> None:
    """Learned tokens before a batch's, of which masks have to know, or a loss: neither is the inner model's."""
    peft = pytest.importorskip("peft")
    own = {"num_virtual_tokens": 3} if kind == "PromptTuningConfig" else {"target_modules": ["q_proj"], "total_step": 9}
    model = llama()
    swap(model, quiet=True)
    model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **own)).to(runtime.DEVICE)
    [batch] = data(1, 9)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    known = interop.known_masks(model, batch)
    torch.testing.assert_close(model(**known).loss, model(**batch).loss)
    with pytest.raises(ValueError, match="loss_in_pieces: model must be a PeftModel that adds nothing around LlamaFor"):
        interop.loss_in_pieces(model, **batch)


# --- transformers' Trainer ------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of two lengths, in batches of one length each."""

    def __init__(self, count: int) -> None:
        self.rows = [tokens(1, 12 if i % 4 < 2 else 16)[0].cpu() for i in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i], "attention_mask": torch.ones_like(self.rows[i])}


def trained(
    kind: Any, folder: Path, model: Any, *, resume: str | None = None, callbacks: Any = None, **changes: Any
) -> Any:
    pytest.importorskip("accelerate")
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 12, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": not GPU, "dataloader_pin_memory": False,
        "lr_scheduler_type": "cosine", "seed": 3, "optim": "adamw_torch",
    }  # fmt: skip
    torch.manual_seed(0)
    rows = Rows(64)
    arguments = transformers.TrainingArguments(str(folder), **(settings | changes))

    class InOrder(kind):  # type: ignore[misc]
        """Batches in the order of the data, whose lengths fit so."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    trainer = InOrder(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, *names: str) -> list[Any]:
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
        {"gradient_checkpointing": True, "bf16": True},
    ],
    ids=["plain", "accumulated", "checkpoints"],
)
@pytest.mark.parametrize("kind", ("llama", "qwen3_moe"))
def test_a_captured_trainer_is_the_trainer(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ours = trained(interop.CapturedTrainer, tmp_path / "a", on_kernels(kind), **changes)
    theirs = trained(transformers.Trainer, tmp_path / "b", on_kernels(kind), **changes)
    assert ours.calls.why_eager is None
    assert len(ours.calls) == 2
    columns = ("loss", "grad_norm", "learning_rate")
    assert logged(ours, *columns) == logged(theirs, *columns)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.gpu
def test_a_captured_trainer_is_resumed(tmp_path: Path) -> None:
    saved = tmp_path / "a" / "checkpoint-4"
    whole = trained(interop.CapturedTrainer, saved.parent, on_kernels("llama"), save_strategy="steps", save_steps=4)
    again = trained(interop.CapturedTrainer, saved.parent, on_kernels("llama"), resume=str(saved))
    assert len(again.calls) == 2
    assert logged(again, "loss") == logged(whole, "loss")


@pytest.mark.gpu
def test_a_trainer_that_cannot_be_captured_goes_on(tmp_path: Path) -> None:
    class Counting(interop.CapturedTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(model, inputs, *args, **kwargs)
            assert float(found) > 0
            return found

    with pytest.warns(
        UserWarning, match=r"CapturedTrainer: goes on .*test_captured_models.py.*assert float\(found\) > 0"
    ):
        ours = trained(Counting, tmp_path / "a", on_kernels("llama"))
    theirs = trained(transformers.Trainer, tmp_path / "b", on_kernels("llama"))
    assert logged(ours, "loss") == logged(theirs, "loss")


def noisy(kind: str) -> Any:
    """Models that draw, by something that no module and no setting named dropout tells of."""
    if kind == "a router's noise":
        return tiny_model("mixtral", router_jitter_noise=0.3).train()
    model = llama().train()
    if kind == "an alpha dropout":
        model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.AlphaDropout(0.3))
    return model


@pytest.mark.parametrize("kind", ("nothing", "a router's noise", "an alpha dropout"))
def test_checkpoints_of_a_model_that_draws_draw_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where a captured step draws nothing, no state of a generator is kept."""
    if GPU:
        pytest.skip("there is a GPU")
    kept: list[object] = []
    state = torch.get_rng_state
    checkpointed = torch.utils.checkpoint

    def count() -> torch.Tensor:
        if sys._getframe(1).f_code.co_filename == checkpointed.__file__:
            kept.append(None)
        return state()

    emulate(monkeypatch)
    monkeypatch.setattr(torch, "get_rng_state", count)
    how: dict[str, Any] = {"max_steps": 12, "lr_scheduler_type": "constant"}
    model = noisy(kind)
    ours = trained(interop.CapturedTrainer, tmp_path / "a", model, gradient_checkpointing=True, **how)
    monkeypatch.undo()
    if kind == "nothing":
        # of two lengths, three steps each
        assert len(kept) == 2 * 3 * model.config.num_hidden_layers
        assert len(ours.calls) == 2 and ours.calls.why_eager is None
    else:
        assert len(kept) == 12 * model.config.num_hidden_layers
        assert "random numbers are drawn on the host" in str(ours.calls.why_eager)
    theirs = trained(transformers.Trainer, tmp_path / "b", noisy(kind), **how)
    columns = ("loss", "grad_norm")
    for mine, other in zip(logged(ours, *columns), logged(theirs, *columns), strict=True):
        assert mine == pytest.approx(other, rel=1e-3)


def test_without_a_gpu_a_captured_trainer_is_the_trainer(tmp_path: Path) -> None:
    if GPU:
        pytest.skip("there is a GPU")
    ours = trained(interop.CapturedTrainer, tmp_path / "a", llama(), max_steps=2)
    theirs = trained(transformers.Trainer, tmp_path / "b", llama(), max_steps=2)
    assert ours.calls.why_eager == "there is no GPU"
    assert logged(ours, "loss", "grad_norm") == logged(theirs, "loss", "grad_norm")


class Thawing(transformers.TrainerCallback):
    """A layer is frozen and trained in turn."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.inner.requires_grad_(state.global_step // 7 % 2 == 1)


class Layers(torch.nn.Module):
    """A model of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = torch.nn.Embedding(67, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 67)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.inner(self.embed(input_ids))))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().to(runtime.DEVICE)


@EVERYWHERE
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_a_captured_trainer_sees_what_is_trained(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    settings: dict[str, Any] = {"max_steps": 28, "weight_decay": 0.1, "callbacks": [Thawing()]} | changes
    ours = trained(interop.CapturedTrainer, tmp_path / "a", layers(), **settings)
    theirs = trained(transformers.Trainer, tmp_path / "b", layers(), **settings)
    assert ours.calls.why_eager is None
    assert len(ours.calls) >= 2
    assert logged(ours, "loss", "grad_norm") == logged(theirs, "loss", "grad_norm")
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


# --- generation -----------------------------------------------------------------------------------------------------


def prompt(rows: int, length: int, *, padded: bool) -> dict[str, torch.Tensor]:
    ids = tokens(rows, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
        ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def graphs_of(model: Any) -> Any:
    return model.__dict__["get_compiled_call"]._calls


@pytest.mark.parametrize(
    "kind",
    ["theirs", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in ("llama", "qwen3_moe", "olmoe"))],
)
def test_fast_generation_gives_the_same_tokens(kind: str) -> None:
    """As generate with transformers' growing cache, for batches, lengths and padding in turn."""
    model = (llama() if kind == "theirs" else on_kernels(kind)).eval()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    asked = [
        prompt(1, 7, padded=False),
        prompt(3, 9, padded=True),
        prompt(1, 5, padded=False),
        prompt(3, 4, padded=False),
    ]
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(**given, **how) for given in asked]
    assert interop.fast_generate(model) is model
    if not GPU:  # the way through our call is the same
        how["compile_config"] = transformers.CompileConfig()
        how["compile_config"]._compile_all_devices = True
    found = [model.generate(**given, **how) for given in asked * 2]
    for out, ref in zip(found, expected * 2, strict=True):
        assert torch.equal(out, ref)
    if GPU:
        assert graphs_of(base).why_eager is None
        assert len(graphs_of(base)) >= 2
        before = len(graphs_of(base))
        model.generate(**asked[0], **how)
        assert len(graphs_of(base)) == before  # the cache is used again


@pytest.mark.gpu
def test_fast_generation_stops_and_samples() -> None:
    model = llama()
    given = prompt(2, 6, padded=True)
    greedy: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**given, **greedy)
    stop = int(expected[0, 10])
    expected = model.generate(**given, **greedy, eos_token_id=stop)
    beams = model.generate(**given, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    interop.fast_generate(model, max_length=64)
    assert torch.equal(model.generate(**given, **greedy, eos_token_id=stop), expected)
    drawn = {
        tuple(model.generate(**given, max_new_tokens=12, do_sample=True, pad_token_id=0)[0].tolist()) for _ in range(4)
    }
    assert len(drawn) == 4
    found = model.generate(**given, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(found, beams)


@pytest.mark.gpu
def test_what_fast_generation_returned_stays() -> None:
    """Scores and caches of one call are not overwritten by the next."""
    model = interop.fast_generate(llama())
    how: dict[str, Any] = {
        "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True,
        "output_hidden_states": True, "output_scores": True,
    }  # fmt: skip
    first = model.generate(**prompt(1, 6, padded=False), **how)
    kept = copy.deepcopy((first.scores, first.hidden_states, first.past_key_values.layers[0].keys))
    model.generate(**prompt(1, 6, padded=False), **how)
    assert all(torch.equal(a, b) for a, b in zip(first.scores, kept[0], strict=True))
    for mine, other in zip(first.hidden_states, kept[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert torch.equal(first.past_key_values.layers[0].keys, kept[2])


@pytest.mark.gpu
def test_other_weights_and_adapters_are_seen() -> None:
    model = on_kernels("qwen3_moe").eval()
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = prompt(2, 6, padded=False)
    with_adapter = model.generate(**given, **how)
    with model.disable_adapter():
        without = model.generate(**given, **how)
    assert not torch.equal(with_adapter, without)
    interop.fast_generate(model)
    for _ in range(2):
        assert torch.equal(model.generate(**given, **how), with_adapter)
        with model.disable_adapter():
            assert torch.equal(model.generate(**given, **how), without)


@EVERYWHERE
@pytest.mark.parametrize("cast", (False, True), ids=("in another place", "under autocast"))
def test_other_weights_are_seen(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the caller's autocast has kept casts of the weights that were there before."""
    emulate(monkeypatch)
    model, other = map(interop.fast_generate, (llama(), llama(initializer_range=0.5)))
    swap(model, quiet=True), swap(other, quiet=True)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = prompt(1, 3, padded=False)
    if not GPU:
        how["compile_config"] = transformers.CompileConfig()
        how["compile_config"]._compile_all_devices = True

    def generate(model: Any) -> torch.Tensor:
        with torch.autocast(runtime.DEVICE.type, torch.bfloat16, enabled=cast):
            return model.generate(**given, **how)  # type: ignore[no-any-return]

    expected = [generate(each) for each in (other, model)]
    assert graphs_of(model).why_eager is None and len(graphs_of(model)) == 1 and not torch.equal(*expected)
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = mine.data.copy_(new) if cast else new.data
    assert torch.equal(generate(model), expected[0])


def test_what_is_not_one_token_is_run_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of a prompt; embeddings."""
    model = interop.fast_generate(llama())
    graphs, ids = model.get_compiled_call, tokens(1, 3)
    monkeypatch.setattr(type(graphs._calls), "__call__", lambda *_: pytest.fail("it went to the graphs"))
    with torch.no_grad():
        for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
            cache = transformers.StaticCache(config=model.config, max_cache_len=8)
            ours = graphs.forward(**given, past_key_values=cache).logits
            torch.testing.assert_close(ours, model(**given, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_model_that_generates_fast_is_whole() -> None:
    model = interop.fast_generate(llama())
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = prompt(1, 6, padded=False)
    expected = model.generate(**given, **how)
    other = copy.deepcopy(model)
    assert other.get_compiled_call._owner() is other
    assert torch.equal(other.generate(**given, **how), expected)


@pytest.mark.parametrize("attention", ("eager", "kernelbook"))
@pytest.mark.parametrize("kind", WITH_WINDOWS)
def test_windows_are_decoded_in_a_graph(kind: str, attention: str) -> None:
    """Before they are full and from then on, alone, in batches and with padding; the cache can be gone on with."""
    model = windowed(kind)
    asked = [
        prompt(1, 2, padded=False),
        prompt(3, 9, padded=True),
        prompt(2, 4, padded=True),
        prompt(2, 3, padded=False),
    ]
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(**given, **how) for given in asked]
    transformers_attention.register()
    model.set_attn_implementation(attention)
    if GPU and kind == "gpt_oss":  # whose eager experts ask the device which of them are used
        interop.use_kernels(model)
    if not GPU:
        how["compile_config"] = transformers.CompileConfig()
        how["compile_config"]._compile_all_devices = True
    interop.fast_generate(model)
    assert graphs_of(model).why_eager == (None if GPU else "there is no GPU")
    for out, ref in zip([model.generate(**given, **how) for given in asked * 2], expected * 2, strict=True):
        assert torch.equal(out, ref)
    if GPU:
        assert graphs_of(model).why_eager is None and len(graphs_of(model)) >= 2
    half = model.generate(**asked[0], **(how | {"max_new_tokens": 4, "return_dict_in_generate": True}))
    cache = half.past_key_values
    windows = [layer for layer in cache.layers if layer.is_sliding]
    assert {type(layer).__name__ for layer in windows} == {"StaticSlidingWindowLayer"}
    assert {layer.cumulative_length_int for layer in windows} == {5}


def test_windows_without_masks_or_positions_are_decoded_from_python() -> None:
    """The model would make them by counts of Python's, and a graph would repeat these."""
    model = interop.fast_generate(windowed("mistral"))
    graphs, ids = model.get_compiled_call, tokens(1, 1)
    positions = torch.ones(1, 1, dtype=torch.int64, device=runtime.DEVICE)
    layer = transformers.cache_utils.StaticSlidingWindowLayer(max_cache_len=16, sliding_window=4)
    assert "no positions" in str(graphs._unknown({"input_ids": ids}, [layer]))
    given = {"input_ids": ids, "position_ids": positions}
    assert "no mask" in str(graphs._unknown(given, [layer]))
    for mask in ({"sliding_attention": None}, torch.ones(1, 1, 1, 4, device=runtime.DEVICE)):
        assert graphs._unknown(given | {"attention_mask": mask}, [layer]) is None
    assert "no mask" in str(graphs._unknown(given | {"attention_mask": ids}, [layer]))
    layer.cumulative_length_int = 3
    assert graphs._unknown(given, [layer]) is None
    model.config.attention_chunk_size = 4
    assert "no mask" in str(graphs._unknown(given, [layer]))


def test_a_model_that_generate_would_not_compile_stays_as_it_is() -> None:
    class Quantizer:
        is_compileable = False

    for name, value in (("hf_quantizer", Quantizer()), ("hf_device_map", {"model": "cpu", "lm_head": 0})):
        model = llama()
        setattr(model, name, value)
        with pytest.warns(UserWarning, match="fast_generate: leaves the model as it is"):
            interop.fast_generate(model)
        assert model.generation_config.cache_implementation is None and "get_compiled_call" not in model.__dict__


def test_a_model_that_does_not_generate_is_refused() -> None:
    checkpointed = llama().train()
    checkpointed.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"fast_generate: model must be in eval\(\) where gradient checkpoints are on"):
        interop.fast_generate(checkpointed)
    assert interop.fast_generate(checkpointed.eval()) is checkpointed
    with pytest.raises(ValueError, match="fast_generate: model must be a transformers model that generates"):
        interop.fast_generate(torch.nn.Linear(2, 2))
