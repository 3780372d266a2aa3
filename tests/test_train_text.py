"""Corpus, byte pairs and batches."""

import collections
import itertools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from kernelbook import runtime
from kernelbook.train import Corpus, TextData, book_encoding, get_encoding, text, train_ranks

TEXT = "\n\n".join(f"Paragraph {i}: the sparse chunk of {i * i} rows\n\tlearns, the others_rest." for i in range(200))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    return path


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    new: list[bytes] = []
    for part in word:
        # A part that was merged already is longer than the pair's first one, so that "aaa" becomes "aa", "a".
        if new and (new[-1], part) == pair:
            new[-1] += part
        else:
            new.append(part)
    return new


def _ranks_by_recounting(words: list[str], size: int) -> dict[bytes, int]:
    """The definition: count all pairs anew before each merge; of equally frequent ones the oldest parts."""
    split = [[bytes([b]) for b in word.encode()] for word in words]
    ranks = {bytes([b]): b for b in range(256)}
    # In byte-level tokens printable bytes come before the others.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    ages = {token: (b not in printable, rank) for token, rank in ranks.items() for b in token}
    while len(ranks) < size:
        counts = collections.Counter(pair for word in split for pair in itertools.pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], ages[pair[0]], ages[pair[1]]))
        ranks.setdefault(best[0] + best[1], len(ranks))
        ages.setdefault(best[0] + best[1], (True, len(ages)))
        split = [_merged(word, best) for word in split]
    return ranks


@hypothesis.given(st.text("abc é1_ \n", max_size=80))
def test_ranks_are_those_of_the_definition(sample: str) -> None:
    import regex

    words = regex.findall(text.PATTERN, sample)
    assert "".join(words) == sample
    found = train_ranks([sample], 270)
    assert found == _ranks_by_recounting(words, 270)
    assert list(found.values()) == list(range(len(found)))


def test_ranks_need_all_bytes() -> None:
    with pytest.raises(ValueError, match="train_ranks: size must be at least 256, got 255"):
        train_ranks(["a"], 255)


@hypothesis.given(st.text(max_size=60))
def test_round_trip_is_exact(sample: str) -> None:
    encoding = book_encoding(Corpus((("a", TEXT),)), 300)
    assert encoding.decode(encoding.encode_ordinary(sample)) == sample


def test_the_encoding_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    corpus = Corpus((("a", TEXT),))
    first = book_encoding(corpus, 300)
    assert first.n_vocab == 300 and first.encode_single_token(text.END) == 299
    kept = list((tmp_path / "text").iterdir())
    assert [path.suffix for path in kept] == [".tiktoken"]
    monkeypatch.setattr(text, "train_ranks", lambda *_: pytest.fail("trained again"))
    again = book_encoding(corpus, 300)
    assert again.encode_ordinary(TEXT) == first.encode_ordinary(TEXT)
    with pytest.raises(ValueError, match="book_encoding: vocab_size must be at least 257"):
        book_encoding(corpus, 256)


@pytest.mark.parametrize("damage", (b"", b"\x93NUMPY", b"QQ== 0\n", b"not base 64\n", b"a b\n" * 300))
def test_a_damaged_cache_is_made_anew(
    damage: bytes, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))

    def tokens() -> torch.Tensor:
        return TextData(file, vocab_size=300, batch_size=1, context=4, device=torch.device("cpu")).train

    first = tokens()
    for path in (tmp_path / "text").iterdir():
        path.write_bytes(damage)
    assert torch.equal(tokens(), first)
    assert all(path.read_bytes() != damage for path in (tmp_path / "text").iterdir())


def test_a_cache_that_cannot_be_written_is_done_without(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot be kept for the next time .*; see KERNELBOOK_CACHE"):
        assert len(TextData(file, vocab_size=300, batch_size=1, context=4, device=torch.device("cpu")).train)


def test_encodings_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    corpus = Corpus((("a", TEXT),))

    def offline(name: str) -> None:
        raise ConnectionError(name)

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(RuntimeError, match=r"tiktoken has 'gpt2' neither in its cache .* Use the encoding 'book'"):
        get_encoding("gpt2", corpus, 300)
    with pytest.raises(ValueError, match=r"get_encoding: name must be 'book' or one of .*gpt2.*, got 'gpt9'"):
        get_encoding("gpt9", corpus, 300)


def test_pythons_own_texts() -> None:
    topics, everything = Corpus.of("topics"), Corpus.of("stdlib")
    assert topics.bytes > 200_000 and everything.bytes > 3_000_000
    names = [name for name, _ in everything.documents]
    assert names == sorted(set(names)) and {"json/decoder.py", "topics/if"} <= set(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert topics.digest == Corpus.of("topics").digest != everything.digest


def test_the_split_never_overlaps() -> None:
    whole = Corpus.of("stdlib")
    training, validation = whole.split()
    held_out = {name for name, _ in validation.documents}
    assert held_out and held_out.isdisjoint(name for name, _ in training.documents)
    assert len(training.documents) + len(validation.documents) == len(whole.documents)
    # Each document's place is its own, whatever else there is.
    assert held_out >= {name for name, _ in Corpus.of("topics").split()[1].documents}


def test_any_file(file: Path, tmp_path: Path) -> None:
    corpus = Corpus.of(file)
    assert "".join(part for _, part in corpus.documents).rstrip("\n") == TEXT
    parts = corpus.split()
    assert all(part.documents for part in parts)
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("one paragraph")
    binary.write_bytes(b"\xff\xfe\n\n\xff")
    with pytest.raises(ValueError, match=r"at least two paragraphs .*, got short\.txt"):
        Corpus.of(short)
    with pytest.raises(ValueError, match=r"text must be a UTF-8 file, got .*binary"):
        Corpus.of(binary)
    with pytest.raises(FileNotFoundError):
        Corpus.of(tmp_path / "none.txt")


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
    assert int(one.train.max()) == one.vocab_size - 1  # the mark between documents
    assert one.decode(one.encoding.encode_ordinary("learns, the")) == "learns, the"


def test_batches_are_drawn_ahead_and_yet_by_step(file: Path) -> None:
    data = TextData(file, vocab_size=300, batch_size=3, context=8)
    there, back = (torch.cat([data.batch(step)[0] for step in steps]) for steps in (range(70), reversed(range(70))))
    assert torch.equal(there, back.view(70, 3, 8).flip(0).flatten(0, 1))
    data.seed = 1
    other = data.batch(69)[0]
    data.seed = 0
    assert torch.equal(data.batch(69)[0], there[-3:]) and not torch.equal(other, there[-3:])
    assert TextData(file, vocab_size=300, batch_size=3, context=8, seed=-1).batch(64)[0].shape == (3, 8)


def test_a_text_that_is_too_short_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="TextData: the validation part must have more than 4000 tokens"):
        TextData(file, vocab_size=300, batch_size=1, context=4000)
