"""Captured steps and captured generation of transformers' models, with PEFT and with its Trainer."""

import copy
import warnings
from collections.abc import Iterator
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
from kernelbook.nn import swap  # noqa: E402
from kernelbook.train import CapturedStep  # noqa: E402

GPU = runtime.DEVICE.type == "cuda"
EVERYWHERE = pytest.mark.gpu if GPU else lambda test: test  # in make test, and in make test-gpu too
LENGTHS = (24, 17, 24)


@pytest.fixture(autouse=True)
def _quiet_without_a_gpu() -> Iterator[None]:
    with warnings.catch_warnings():
        if not GPU:
            warnings.filterwarnings("ignore", message=".*there is no GPU")
        yield


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
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, -2:] = 0
    assert interop.known_masks(model, batch)["attention_mask"] is batch["attention_mask"]
    packed = {"input_ids": batch["input_ids"], "position_ids": torch.arange(9)[None] % 5}
    assert interop.known_masks(model, packed) == packed
    model.config.sliding_window = 4
    assert "attention_mask" not in interop.known_masks(model, {"input_ids": batch["input_ids"]})


def test_the_loss_in_pieces_is_the_loss() -> None:
    model = llama().train()
    [batch] = data(1, 9)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :4] = -100
    found = []
    for loss in (lambda: model(**batch).loss, lambda: interop.loss_in_pieces(model, **batch, piece=4)):
        model.zero_grad()
        value = loss()
        value.backward()
        found.append([value, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


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


def test_a_trainer_whose_model_is_not_on_the_gpu_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**(COMMON | {"intermediate_size": 48})))
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setattr(runtime, "DEVICE", torch.device("cuda"))
    with pytest.warns(UserWarning, match="the model is on the cpu"):
        ours = interop.CapturedTrainer(model, arguments)
    assert ours.calls.why_eager == "the model is on the cpu"


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


def test_a_copy_of_a_model_that_generates_fast_is_whole() -> None:
    model = interop.fast_generate(llama())
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = prompt(1, 6, padded=False)
    expected = model.generate(**given, **how)
    other = copy.deepcopy(model)
    assert other.get_compiled_call._owner() is other
    assert torch.equal(other.generate(**given, **how), expected)


@pytest.mark.gpu
def test_a_sliding_cache_is_decoded_from_python() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**(COMMON | {"intermediate_size": 48, "sliding_window": 8}))
    model = transformers.MistralForCausalLM(config).to(runtime.DEVICE).eval()
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given = prompt(2, 6, padded=False)
    expected = model.generate(**given, **how)
    with pytest.warns(UserWarning, match="fast_generate: goes on without a CUDA graph: its cache has StaticSliding"):
        found = interop.fast_generate(model).generate(**given, **how)
    assert torch.equal(found, expected)


def test_a_model_that_does_not_generate_is_refused() -> None:
    with pytest.raises(ValueError, match="fast_generate: model must be a transformers model that generates"):
        interop.fast_generate(torch.nn.Linear(2, 2))
