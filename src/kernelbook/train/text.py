"""Real text that every machine has, and tokens for it.

The corpus is Python's own: the sources of the standard library and the language reference that ``help()`` shows
(``pydoc_data.topics``), or any file. The tokens are byte pairs (Sennrich, Haddow and Birch, "Neural machine translation of
rare words with subword units", 2016), found on the corpus itself, in a ``tiktoken.Encoding``.
"""

import base64
import dataclasses
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelbook import runtime
from kernelbook.train.files import kept
from kernelbook.train.seeds import generator

__all__ = ["Corpus", "TextData", "book_encoding", "get_encoding", "train_ranks"]

END = "<|endoftext|>"
# Words with the blank or underscore before them, numbers of up to three digits, runs of punctuation, runs of white space.
# Every character is one of these, so that the pieces of a text are the text.
PATTERN = r"[ _]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Not on every machine, or not text: tests, and what other programs installed.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "encodings"}
VALIDATION_SHARE = 0.05
STAGED = 64  # steps whose batches are drawn at once


# --- the corpus -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by name, in order of their names."""

    documents: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, what: str | Path) -> "Corpus":
        """``"stdlib"``: sources and topics of this Python. ``"topics"``: the topics alone. Else a UTF-8 text file.

        Raises:
            ValueError: the file holds less than two paragraphs, or is not UTF-8.
            OSError: the file cannot be read.
        """
        if what == "stdlib":
            return cls(tuple(sorted([*_topics(), *_sources()])))
        if what == "topics":
            return cls(tuple(sorted(_topics())))
        path = Path(what)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Corpus: text must be a UTF-8 file, got {path} ({error.reason})") from None
        return cls(tuple(_sections(path.name, text)))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any document: they tie a run to its text."""
        digest = hashlib.sha256()
        for name, text in self.documents:
            digest.update(name.encode() + b"\0" + text.encode() + b"\0")
        return digest.hexdigest()[:16]

    @property
    def bytes(self) -> int:
        """Return the size in UTF-8."""
        return sum(len(text.encode()) for _, text in self.documents)

    def split(self) -> tuple["Corpus", "Corpus"]:
        """Training and validation, by document: the hash of its name decides, whatever else the corpus holds."""

        def place(name: str) -> float:
            return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") / 2**32

        ordered = sorted(self.documents, key=lambda document: place(document[0]))
        held_out = {name for name, _ in ordered if place(name) < VALIDATION_SHARE} or {ordered[0][0]}
        parts = (
            tuple(document for document in self.documents if (document[0] in held_out) == wanted)
            for wanted in (False, True)
        )
        training, validation = (Corpus(part) for part in parts)
        return training, validation


def _topics() -> Iterable[tuple[str, str]]:
    from pydoc_data.topics import topics

    return ((f"topics/{name}", text) for name, text in topics.items())


def _sources() -> Iterable[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in LEFT_OUT and not f.startswith("config-"))
        for file in files:
            path = Path(folder, file)
            if path.suffix != ".py":
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield path.relative_to(root).as_posix(), text


def _sections(name: str, text: str) -> list[tuple[str, str]]:
    """Return one file as documents: runs of paragraphs of about a twentieth of it, since a split needs something to part."""
    paragraphs = text.split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(f"Corpus: text must have at least two paragraphs (with an empty line between), got {name}")
    size = max(1, len(text) // 40)
    sections: list[list[str]] = [[]]
    for paragraph in paragraphs:
        if sections[-1] and sum(map(len, sections[-1])) >= size:
            sections.append([])
        sections[-1].append(paragraph)
    if len(sections) == 1:
        half = len(paragraphs) // 2
        sections = [paragraphs[:half], paragraphs[half:]]
    return [(f"{name}/{i:05d}", "\n\n".join(section) + "\n\n") for i, section in enumerate(sections)]


# --- byte pairs -----------------------------------------------------------------------------------------------------


def train_ranks(texts: Iterable[str], size: int, pattern: str = PATTERN) -> dict[bytes, int]:
    """Return the 256 bytes, and then the pairs that come most often, each with those before it merged.

    The ``tokenizers`` package counts; of equally frequent pairs it takes the one whose parts it knew first.

    Args:
        texts: the corpus. size: how many tokens, at least 256. pattern: cuts a text into words; pairs never cross them.

    Returns:
        Up to ``size`` tokens with their ranks, as ``tiktoken.Encoding`` takes them; fewer where no pair is left.

    Example: of "aaab aab" with size 257, ``aa`` is token 256: it comes three times, twice in the first word.
    """
    if size < 256:
        raise ValueError(f"train_ranks: size must be at least 256, got {size}")
    tokenizers = _package("tokenizers")
    cut = tokenizers.pre_tokenizers
    by_byte = cut.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = cut.Sequence([cut.Split(tokenizers.Regex(pattern), "isolated"), by_byte])
    alphabet = by_byte.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # Byte level: a printable character of Latin-1 stands for its own byte, those from 256 on for the other bytes in order.
    others = iter(sorted(set(range(256)) - {ord(character) for character in alphabet}))
    byte_of = {c: ord(c) if ord(c) < 256 else next(others) for c in sorted(alphabet)}
    vocabulary = tokenizer.get_vocab()
    tokens = (bytes(byte_of[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__))
    pairs = (token for token in tokens if len(token) > 1)
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *pairs])}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name}, which encodings of text need, must be installed: pip install 'kernelbook[train]'", name=error.name
        ) from None


def book_encoding(corpus: Corpus, vocab_size: int) -> Any:
    """Return a ``tiktoken.Encoding`` of ``vocab_size`` tokens trained on ``corpus``, the last one :data:`END`; kept on disk.

    Raises ``ValueError`` for less than 257 tokens.
    """
    tiktoken = _package("tiktoken")
    if vocab_size < 257:
        raise ValueError(f"book_encoding: vocab_size must be at least 257 (all bytes and {END}), got {vocab_size}")
    name = f"book-bpe-{hashlib.sha256(PATTERN.encode()).hexdigest()[:4]}-{corpus.digest}-{vocab_size}"
    path = runtime.cache_dir() / "text" / f"{name}.tiktoken"

    def read(path: Path) -> dict[bytes, int]:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if list(ranks.values()) != list(range(len(lines))) or len(lines) < 256:
            raise ValueError("not the ranks of tokens")
        return ranks

    ranks = kept(
        path,
        lambda: train_ranks((text for _, text in corpus.documents), vocab_size - 1),
        read,
        lambda file, ranks: file.writelines(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()),
    )
    return tiktoken.Encoding(name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


def get_encoding(name: str, corpus: Corpus, vocab_size: int) -> Any:
    """``"book"``: :func:`book_encoding`. Else one of tiktoken's own, such as ``"gpt2"``, cached or downloaded by it.

    Raises:
        ValueError: tiktoken has no encoding of that name.
        RuntimeError: tiktoken has it neither cached nor could download it.
    """
    tiktoken = _package("tiktoken")
    if name == "book":
        return book_encoding(corpus, vocab_size)
    if name not in tiktoken.list_encoding_names():
        raise ValueError(
            f"get_encoding: name must be 'book' or one of {', '.join(tiktoken.list_encoding_names())}, got {name!r}"
        )
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the download raises
        raise RuntimeError(
            f"get_encoding: tiktoken has {name!r} neither in its cache (TIKTOKEN_CACHE_DIR) nor could it download it "
            f"({type(error).__name__}). Use the encoding 'book', which is trained on the corpus."
        ) from error


# --- batches --------------------------------------------------------------------------------------------------------


class TextData:
    """Tokens of a corpus on the device, and batches of them that depend on the seed and the step alone.

    Args:
        corpus: ``"stdlib"``, ``"topics"`` or a file, see :meth:`Corpus.of`; or a :class:`Corpus`.
        encoding: ``"book"`` or a name that tiktoken knows, or a ``tiktoken.Encoding``. vocab_size: of ``"book"``.
        batch_size, context: sequences in a batch and tokens in a sequence.
        seed: of the order. device: where the tokens live.

    Attributes:
        vocab_size: tokens of the encoding. digest: of the corpus. train, validation: (T,) int32 tokens.

    Raises:
        ValueError: a part of the corpus is shorter than one sequence; or as :class:`Corpus` and :func:`get_encoding`.
    """

    def __init__(
        self,
        corpus: "str | Path | Corpus" = "stdlib",
        *,
        encoding: Any = "book",
        vocab_size: int = 4096,
        batch_size: int,
        context: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        whole = corpus if isinstance(corpus, Corpus) else Corpus.of(corpus)
        training, validation = whole.split()
        # Trained on the training documents alone: what is held out shapes nothing.
        self.encoding = get_encoding(encoding, training, vocab_size) if isinstance(encoding, str) else encoding
        self.vocab_size = self.encoding.n_vocab
        self.digest = whole.digest
        self.batch_size, self.context, self.seed = batch_size, context, seed
        device = runtime.DEVICE if device is None else device
        parts = []
        for name, part in (("training", training), ("validation", validation)):
            tokens = torch.from_numpy(self._tokens(part))
            if len(tokens) <= context:
                raise ValueError(
                    f"TextData: the {name} part must have more than {context} tokens, one sequence, got {len(tokens)}"
                )
            parts.append(tokens.to(device))
        self.train, self.validation = parts
        self._staged: tuple[tuple[int, int], torch.Tensor] = (-1, -1), torch.empty(0)

    def _tokens(self, part: Corpus) -> np.ndarray:
        path = runtime.cache_dir() / "text" / f"{self.encoding.name}-{part.digest}.npy"

        def make() -> np.ndarray:
            end = self.encoding.encode_single_token(END)
            texts = [text for _, text in part.documents]
            pieces = self.encoding.encode_ordinary_batch(texts, num_threads=min(8, os.cpu_count() or 1))
            return np.fromiter((t for piece in pieces for t in (*piece, end)), dtype=np.int32)

        def read(path: Path) -> np.ndarray:
            tokens = np.load(path)
            if tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens.size and tokens.max() >= self.vocab_size):
                raise ValueError("not the tokens of a text")
            return tokens

        tokens: np.ndarray = kept(path, make, read, np.save)
        return tokens

    def _windows(self, tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        within = torch.arange(self.context + 1, device=tokens.device)
        rows = tokens[starts.to(tokens.device, non_blocking=True)[:, None] + within].long()
        return rows[:, :-1], rows[:, 1:]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch_size, context) int64 of one training step."""
        return self._windows(self.train, self._starts(self.seed, step // STAGED)[step % STAGED])

    def _starts(self, seed: int, block: int) -> torch.Tensor:
        """(STAGED, batch_size) int64 on the device: where the sequences of that many steps begin, copied at once."""
        if self._staged[0] != (seed, block):
            drawn = [
                torch.randint(
                    len(self.train) - self.context, (self.batch_size,), generator=generator("batch", seed, step)
                )
                for step in range(block * STAGED, (block + 1) * STAGED)
            ]
            starts = torch.stack(drawn)
            if self.train.is_cuda:
                starts = starts.pin_memory().to(self.train.device, non_blocking=True)
            self._staged = (seed, block), starts
        return self._staged[1]

    def validation_batches(self, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` batches whose sequences are spread evenly over the validation part; always the same."""
        starts = torch.linspace(
            0, len(self.validation) - self.context - 1, count * self.batch_size, dtype=torch.float32
        ).long()
        for rows in starts.split(self.batch_size):
            yield self._windows(self.validation, rows)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        return str(self.encoding.decode(list(tokens)))
