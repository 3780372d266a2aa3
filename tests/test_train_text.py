"""Corpus, byte pairs and batches."""

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from kernelbook import runtime
from kernelbook.train import Corpus, TextData, book_encoding, text

TEXT = "\n\n".join(f"Paragraph {i}: the sparse chunk of {i * i} rows\n\tlearns, the others_rest." for i in range(200))
ENCODING = book_encoding(Corpus((("a", TEXT),)), 300)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


@hypothesis.given(st.text(max_size=60))
def test_round_trip_is_exact(sample: str) -> None:
    assert ENCODING.decode(ENCODING.encode(sample).ids) == sample


def test_pairs_that_come_often_are_tokens() -> None:
    assert ENCODING.get_vocab_size() == 300
    assert ENCODING.encode("the the the").tokens == ["the", "Ġthe", "Ġthe"]
    assert ENCODING.token_to_id(text.END) is not None
    with pytest.raises(ValueError, match="book_encoding: vocab_size must be at least 257"):
        book_encoding(Corpus((("a", TEXT),)), 256)


def test_pythons_own_texts_and_their_split() -> None:
    topics, everything = Corpus.of("topics"), Corpus.of("stdlib")
    names = [name for name, _ in everything.documents]
    assert names == sorted(set(names)) and {"json/decoder.py", "topics/if"} <= set(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert topics.digest == Corpus.of("topics").digest != everything.digest
    training, validation = everything.split()
    held_out = {name for name, _ in validation.documents}
    assert held_out and held_out.isdisjoint(name for name, _ in training.documents)
    assert len(training.documents) + len(validation.documents) == len(names)
    # Each document's place is its own, whatever else there is.
    assert held_out >= {name for name, _ in topics.split()[1].documents}


def test_links_that_lead_nowhere_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.py").write_text("a = 1\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing.py")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert ("here.py", "a = 1\n") in Corpus.of("stdlib").documents


def test_any_file(file: Path, tmp_path: Path) -> None:
    corpus = Corpus.of(file)
    assert "".join(part for _, part in corpus.documents).rstrip("\n") == TEXT
    assert all(part.documents for part in corpus.split())
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("one paragraph")
    binary.write_bytes(b"\xff\xfe\n\n\xff")
    with pytest.raises(ValueError, match=r"at least two paragraphs .*, got short\.txt"):
        Corpus.of(short)
    with pytest.raises(ValueError, match=r"text must be a UTF-8 file, got .*binary"):
        Corpus.of(binary)


def test_batches_follow_from_seed_and_step(file: Path) -> None:
    def data(seed: int) -> TextData:
        return TextData(file, vocab_size=300, batch_size=3, context=16, seed=seed)

    one, same, other = data(1), data(1), data(2)
    inputs, targets = one.batch(7)
    assert inputs.shape == targets.shape == (3, 16) and inputs.device.type == runtime.DEVICE.type
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, same.batch(7)[0])
    assert not torch.equal(inputs, one.batch(8)[0]) and not torch.equal(inputs, other.batch(7)[0])
    for (mine, _), (theirs, _) in zip(one.validation_batches(2), other.validation_batches(2), strict=True):
        assert torch.equal(mine, theirs)
    assert (one.train == one.encoding.token_to_id(text.END)).any()  # the mark between documents
    assert one.encoding.decode(inputs[0].tolist()) in TEXT + "\n\n"
    with pytest.raises(ValueError, match="TextData: the validation part must have more than 4000 tokens"):
        TextData(file, vocab_size=300, batch_size=1, context=4000)
