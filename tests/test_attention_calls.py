"""Which of transformers' attention classes :func:`kernelbook.nn.swap` may touch, by the sources of the installed version."""

import ast
import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", minversion="5")

from kernelbook.interop import transformers_attention as interop  # noqa: E402
from kernelbook.interop.attention_calls import why_not_by_source  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
REFUSED = {"indices", "block_indices"}  # of the keys that an indexer selects
# By the model that they are of: left alone for another reason than a keyword.
LEFT = {"deepseek_v4", "doge", "glm5_next", "parakeet", "qwen4_exp", "swin", "t5gemma2"}
TAKEN = {"gemma2", "gpt2", "gpt_oss", "llama", "mistral", "modernbert", "qwen2_5_vl", "t5", "whisper"}


def _parts(text: str) -> list[str]:
    """The classes and functions of a module."""
    return re.split(r"\n(?=class |def |@)", text)


def _function(part: str, name: str) -> ast.FunctionDef | None:
    functions = (node for node in ast.walk(ast.parse(part)) if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == name), None)


def test_each_attention_class_is_known_or_left_alone() -> None:
    """A class that passes a keyword of which attention_forward does not know fails here, until somebody has looked at it."""
    reasons: dict[str, set[str]] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        parts = _parts(text)
        eager = [
            _function(part, "eager_attention_forward") for part in parts if part.startswith("def eager_attention_f")
        ]
        read = interop.KNOWN.union(*({arg.arg for arg in function.args.args} for function in eager if function))
        found = reasons.setdefault(path.parent.name, set())
        for part in parts:
            if not re.search(r"\bALL_ATTENTION_FUNCTIONS[.[]", part) or not part.startswith("class "):
                continue
            forward = _function(part, "forward")
            assert forward is not None and "ALL_ATTENTION_FUNCTIONS" in ast.unparse(forward), (path, part[:60])
            found |= {why_not_by_source(forward, text, read) or "taken"}
            if "s_aux=" in part and eager:  # the eager attention has no argument of that name
                assert all("module.sinks" in ast.unparse(function) for function in eager if function), path
    unknown = {why.split()[1] for found in reasons.values() for why in found if why.startswith("passes ")}
    assert unknown <= REFUSED
    assert all(reasons[name] == {"taken"} for name in TAKEN & reasons.keys())
    assert not any("taken" in reasons[name] and len(reasons[name]) == 1 for name in LEFT & reasons.keys())


@pytest.mark.parametrize(
    ("body", "why"),
    (
        ("return {call}", None),
        ("return {call[:-1]}, unheard_of=self.x)", "passes unheard_of"),
        ("return {call[:-1]}, unheard_of=None)", None),
        ("mask = self.index(x, mask)\n    return {call}", "computes with its attention mask"),
        ("mask += self.bias\n    return {call}", "computes with its attention mask"),
        ("x = self.index(x, mask[:, 0])\n    return {call}", "computes with its attention mask"),
        ("mask = other if other is not None else mask\n    return {call}", None),
        ("if x is None:\n        return self.eager(x, mask + 1)\n    else:\n        return {call}", None),
        ("if self.config._attn_implementation == 'sdpa':\n        x = -x\n    return {call}", "asks for the name"),
    ),
)
def test_what_speaks_against_a_class(body: str, why: str | None) -> None:
    call = "attend(self, x, x, x, mask, dropout=0.0, **given)"
    body = body.replace("{call[:-1]}", call[:-1]).replace("{call}", call)
    text = (
        f"def forward(self, x, mask, other=None, **given):\n    attend = ALL_ATTENTION_FUNCTIONS['name']\n    {body}\n"
    )
    found = why_not_by_source(ast.parse(text), text, interop.KNOWN)
    assert found is None if why is None else found is not None and found.startswith(why)
