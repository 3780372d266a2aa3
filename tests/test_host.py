"""The bench of the host's times; their size is a GPU machine's business."""

import pytest

from bench import host
from kernelbook.lab import timing


def test_every_call_is_measured_beside_what_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(call: object) -> float:
        assert callable(call)
        call()
        return 1.0

    monkeypatch.setattr(timing, "host_us", once)
    for name, value in {"NEW_SHAPES": 1, "CALLS": 3, "CACHE": 40, "GROWTH": 3}.items():
        monkeypatch.setattr(host, name, value)
    rows = host.measured()
    assert rows[0][:2] == ("torch", "u") and len({row[:2] for row in rows}) == len(rows)
    for call in ("layer_norm", "rms_norm", "linear", "sdpa", "ffn"):
        for part in ("", ", forward and backward"):
            assert {provider for provider, name, _ in rows if name == call + part} == {"kernelbook", "torch"}
    assert sum("a new shape" in name for _, name, _ in rows) == 20
    assert all(us > 0 for *_, us in rows)
