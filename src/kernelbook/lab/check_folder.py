"""``python -m kernelbook check-model``: a model in a folder on the kernels, compared layer by layer with plain PyTorch."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from kernelbook import check, runtime

FILES = ("config.json", "adapter_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``python -m kernelbook check-model``."""
    parser.add_argument("folder", type=Path, help="a model's folder, or that of an adapter of PEFT")
    parser.add_argument("--tokens", type=_count, default=64, help="in each of two random sequences (default: 64)")
    parser.add_argument("--nf4", action="store_true", help="hold the experts' weights in 4 bits")


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**31:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number above zero, got {text}")


def check_folder(given: argparse.Namespace) -> int:
    """Runs the command; 0 if the model is right, 1 if not, 2 if there is none."""
    try:
        has_config, has_adapter = ((given.folder / name).is_file() for name in FILES)
    except OSError:  # such as a name that is too long
        has_config = has_adapter = False
    if not (has_config or has_adapter):
        print(f"check-model: the folder must have a {' or an '.join(FILES)}, got {given.folder}", file=sys.stderr)
        return 2
    import transformers

    from kernelbook.interop import base_model
    from kernelbook.interop import transformers as interop
    from kernelbook.nn import swap

    how: dict[str, Any] = {"dtype": "auto", "quantization_config": interop.NF4ExpertsConfig() if given.nf4 else None}
    try:
        if has_adapter:
            import peft

            model: Any = peft.AutoPeftModelForCausalLM.from_pretrained(given.folder, is_trainable=True, **how)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(given.folder, **how)
        model = model.to(runtime.DEVICE)
        if any(True for _ in interop.expert_modules(model)):
            interop.use_kernels(model)
    except (OSError, ValueError, ImportError) as error:
        print(f"check-model: {error}", file=sys.stderr)
        return 2
    swap(base_model(model))
    torch.manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    found = check.model(model, torch.randint(vocabulary, (2, given.tokens), device=runtime.DEVICE))
    print(f"\n{found}")
    return 0 if found.ok else 1
