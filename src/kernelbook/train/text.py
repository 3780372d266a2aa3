"""Real text that every machine has, and tokens for it.

The corpus is Python's own: the sources of the standard library and the language reference that ``help()`` shows
(``pydoc_data.topics``), or any file. The tokens are byte pairs (Sennrich, Haddow and Birch, "Neural machine translation of
rare words with subword units", 2016), which the ``tokenizers`` package finds on the corpus itself.
"""

import contextlib
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kernelbook import runtime
from kernelbook.train.seeds import generator

OWN_TEXTS = ("stdlib", "topics")
END = "<|endoftext|>"
# Words with the blank or underscore before them, numbers of up to three digits, runs of punctuation, runs of white space.
# Every character is one of these, so that the pieces of a text are the text.
PATTERN = r"[ _]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Not on every machine, or not text: tests, and what other programs installed.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data", "encodings"}
VALIDATION_SHARE = 0.05


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
        if what in OWN_TEXTS:
            from pydoc_data.topics import topics

            found = [(f"topics/{name}", text) for name, text in topics.items()]
            return cls(tuple(sorted(found if what == "topics" else [*found, *_sources()])))
        path = Path(what)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"Corpus: text must be a UTF-8 file, got {path} ({error.reason})") from None
        paragraphs = text.split("\n\n")
        if len(paragraphs) < 2:
            raise ValueError(
                f"Corpus: text must have at least two paragraphs (with an empty line between), got {path.name}"
            )
        size = max(1, len(paragraphs) // 40)  # some forty documents, since a split needs something to part
        parts = [paragraphs[i : i + size] for i in range(0, len(paragraphs), size)]
        return cls(tuple((f"{path.name}/{i:05d}", "\n\n".join(part) + "\n\n") for i, part in enumerate(parts)))

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that change with any document: they tie a run to its text."""
        digest = hashlib.sha256()
        for name, text in self.documents:
            digest.update(name.encode() + b"\0" + text.encode() + b"\0")
        return digest.hexdigest()[:16]

    def split(self) -> tuple["Corpus", "Corpus"]:
        """Training and validation, by document: the hash of its name decides, whatever else the corpus holds."""
        hashes = {name: hashlib.sha256(name.encode()).digest()[:4] for name, _ in self.documents}
        place = {name: int.from_bytes(found, "little") / 2**32 for name, found in hashes.items()}
        held_out = {name for name in place if place[name] < VALIDATION_SHARE} or {min(place, key=place.__getitem__)}
        training = tuple(document for document in self.documents if document[0] not in held_out)
        return Corpus(training), Corpus(tuple(document for document in self.documents if document[0] in held_out))


def _sources() -> Iterable[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in LEFT_OUT and not f.startswith("config-"))
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            with contextlib.suppress(UnicodeDecodeError, OSError):  # a link that leads nowhere
                text = path.read_text(encoding="utf-8")
                if text.strip():
                    yield path.relative_to(root).as_posix(), text


def book_encoding(corpus: Corpus, vocab_size: int) -> Any:
    """Return a ``tokenizers.Tokenizer`` of ``vocab_size`` tokens found on ``corpus``: :data:`END`, all bytes, frequent pairs.

    There are fewer where no pair is left. Decoding what was encoded gives the text back.

    Raises:
        ValueError: there are less than 257 tokens.
    """
    import tokenizers  # of the extra [train]

    if vocab_size < 257:
        raise ValueError(f"book_encoding: vocab_size must be at least 257 (all bytes and {END}), got {vocab_size}")
    cut = tokenizers.pre_tokenizers
    by_byte = cut.ByteLevel(add_prefix_space=False, use_regex=False)
    encoding = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoding.pre_tokenizer = cut.Sequence([cut.Split(tokenizers.Regex(PATTERN), "isolated"), by_byte])
    encoding.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=by_byte.alphabet(), show_progress=False
    )
    encoding.train_from_iterator((text for _, text in corpus.documents), trainer)
    return encoding


class TextData:
    """Tokens of a corpus on the device, and batches of them that depend on the seed and the step alone.

    Args:
        corpus: ``"stdlib"``, ``"topics"`` or a file, see :meth:`Corpus.of`; or a :class:`Corpus`.
        encoding: a ``tokenizers.Tokenizer`` that has :data:`END`; default :func:`book_encoding` of ``vocab_size`` tokens.
        batch_size, context: sequences in a batch and tokens in a sequence.
        seed: of the order.

    Attributes:
        vocab_size: tokens of the encoding. digest: of the corpus. train, validation: (T,) int32 tokens.

    Raises:
        ValueError: a part of the corpus is shorter than one sequence; or as :class:`Corpus` and :func:`book_encoding`.
    """

    def __init__(
        self,
        corpus: "str | Path | Corpus" = "stdlib",
        *,
        encoding: Any = None,
        vocab_size: int = 4096,
        batch_size: int,
        context: int,
        seed: int = 0,
    ) -> None:
        whole = corpus if isinstance(corpus, Corpus) else Corpus.of(corpus)
        training, validation = whole.split()
        # Trained on the training documents alone: what is held out shapes nothing.
        self.encoding = book_encoding(training, vocab_size) if encoding is None else encoding
        self.vocab_size = self.encoding.get_vocab_size()
        self.digest = whole.digest
        self.batch_size, self.context, self.seed = batch_size, context, seed
        self.train, self.validation = self._tokens("training", training), self._tokens("validation", validation)

    def _tokens(self, name: str, part: Corpus) -> torch.Tensor:
        end = self.encoding.token_to_id(END)
        texts = self.encoding.encode_batch_fast([text for _, text in part.documents])
        tokens = torch.tensor([token for text in texts for token in (*text.ids, end)], dtype=torch.int32)
        if len(tokens) <= self.context:
            raise ValueError(
                f"TextData: the {name} part must have more than {self.context} tokens, one sequence, got {len(tokens)}"
            )
        return tokens.to(runtime.DEVICE)

    def _windows(self, tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        within = torch.arange(self.context + 1, device=tokens.device)
        rows = tokens[starts.to(tokens.device, non_blocking=True)[:, None] + within].long()
        return rows[:, :-1], rows[:, 1:]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (batch_size, context) int64 of one training step."""
        chance = generator("batch", self.seed, step)
        return self._windows(
            self.train, torch.randint(len(self.train) - self.context, (self.batch_size,), generator=chance)
        )

    def validation_batches(self, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` batches whose sequences are spread evenly over the validation part; always the same."""
        starts = torch.linspace(
            0, len(self.validation) - self.context - 1, count * self.batch_size, dtype=torch.float32
        ).long()
        for rows in starts.split(self.batch_size):
            yield self._windows(self.validation, rows)
