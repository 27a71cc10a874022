"""Text to ids and back without loss: a SentencePiece model, learnt here or given."""

import hashlib
import heapq
import io
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from pkmlm.data.text import chunks_of, has_surrogate
from pkmlm.errors import UserError, read_errors
from pkmlm.runs.files import read_bytes

MARK = "\u2581"  # how SentencePiece writes a space; where the text itself has this character, it is spelt in bytes
RESERVED = "\u2585"  # SentencePiece learns nothing from a sentence with this character, which progress bars use
VOCABULARY = 8192  # ids, by default
LEAST_VOCABULARY = 261  # bytes, the unknown and the end token, a newline, a space, a character
SAMPLE = 32 << 20  # bytes of text to learn from
SEED = 0  # of the random choice of that text
LEARNING: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,  # a chunk must not begin with a space that the text does not have
    "byte_fallback": True,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": ["\n"],  # no piece has a newline and something else: a cut after one changes no id
    "required_chars": MARK,  # the space: the model must have it even if its text has none
    "character_coverage": 0.9995,
    "max_sentence_length": 1 << 20,  # SentencePiece silently drops longer sentences; chunks are 8 KiB at most
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
    "num_threads": 8,  # the model depends on this number: it must not be the machine's
    "minloglevel": 3,
}
PROBES = (
    " a\n\n b ",
    "\r\n\tone\ttwo  three   ",
    "\ufeffbyte-order mark, \x00 and \x1b",
    "\ufb01 \uff21 \u00bd \u2126 e\u0301 \u00e9",  # what NFKC would change
    "\u00a0\u2003\u2028\u200b\u0085\u3000",
    "\U00020bb7 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u0e01\u0633\u05d0",
    f"{MARK} {MARK}{MARK}a{MARK}",
    "<s> </s> <unk> <pad> <0x0A> \u2047 \u2585",
    "0123456789 00",
    "word " * 1000,
    "line\n" * 1000,
    "x" * 5000,
    "  " * 2500,
    f"\u00e9{MARK}" * 2500,
)


class Tokenizer:
    """A lossless SentencePiece model.

    Attributes:
        name: what errors call it, such as the path of its file.
        model_bytes: the content of its file; `sha256` is the digest of these bytes.
        size: the number of ids.
        eos: the id that ends a document, and that a language model sees before the first token of one.
        unknown: the id of what the tokenizer cannot spell.
    """

    def __init__(self, model_bytes: bytes, name: str = "the tokenizer"):
        """Load a model and check that it loses nothing.

        Args:
            model_bytes: the content of a SentencePiece model file.
            name: what errors call it.

        Raises:
            UserError: it is not a SentencePiece model, has no token to end a document with, or does not reproduce every
                probe text.
        """
        try:
            if not model_bytes:
                raise RuntimeError("no data")
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except (RuntimeError, UnicodeDecodeError):  # the second where its message quotes damaged bytes
            raise UserError(f"{name} is not a SentencePiece model, or is damaged") from None
        self.name = name
        self.model_bytes = model_bytes
        self.sha256 = hashlib.sha256(model_bytes).hexdigest()
        self.size = int(self._processor.vocab_size())
        self.unknown = int(self._processor.unk_id())
        specials = [int(self._processor.eos_id()), int(self._processor.bos_id())]
        self.eos = next((special for special in specials if special >= 0), -1)
        self._mark = np.array([self._processor.piece_to_id(f"<0x{b:02X}>") for b in MARK.encode()], np.int32)
        self._check()

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load and check a model file.

        Raises:
            UserError: the file cannot be read, or see the constructor.
        """
        with read_errors(f"the tokenizer {path}"):
            model_bytes = read_bytes(path)
        return cls(model_bytes, str(path))

    @classmethod
    def learn(
        cls, texts: Iterable[str], vocab_size: int | None = None, model_type: str = "bpe", sample: int = SAMPLE
    ) -> "Tokenizer":
        """Learn a model from chunks of text; the same texts give the same model, byte for byte.

        Where the vocabulary is too small to hold every usual character of the text, three quarters of what it has
        beside bytes go to the most frequent characters; bytes spell the others.

        Args:
            texts: chunks, read once.
            vocab_size: how many ids; None: 8192.
            model_type: "bpe" or "unigram".
            sample: bytes to learn from; of more text, a random part of that size is used.

        Raises:
            UserError: the text is too small for this vocabulary, or the vocabulary too small for any text.
        """
        chunks, size = sampled(texts, sample), vocab_size or VOCABULARY

        def train(sentences: Iterable[str], **changes: Any) -> bytes:
            model, options = io.BytesIO(), {**LEARNING, "vocab_size": size, "model_type": model_type, **changes}
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
            return model.getvalue()

        try:
            return cls(train(part for text in chunks for part in text.split(RESERVED) if part))
        except RuntimeError as error:
            message, room = str(error), size - LEAST_VOCABULARY
        if "required_chars" in message and room >= 0:
            for count in (1 + room * 3 // 4, 1 + room):  # all of it where too little else repeats
                try:
                    return cls(train(frequent_characters(chunks, count), character_coverage=1.0))
                except RuntimeError as error:
                    message = str(error)
        raise learning_error(message, vocab_size)

    def encode(self, text: str) -> list[int]:
        """The ids of one document, cut into chunks as a corpus cuts it; without `eos`.

        Raises:
            UserError: the text has a lone surrogate (which no UTF-8 text has).
        """
        if has_surrogate(text):
            raise UserError("the text has a lone surrogate, which is not Unicode text")
        chunks = self.encode_chunks(chunks_of(text))
        ids: list[int] = np.concatenate(chunks).tolist() if chunks else []
        return ids

    def encode_chunks(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """The ids (int32) of each text, which is not cut into chunks again; the same for any number of threads."""
        if not texts:
            return []
        encoded: list[np.ndarray] = self._processor.encode(texts, num_threads=threads, return_type="numpy")
        for i, text in enumerate(texts):
            if MARK in text:
                encoded[i] = self._encode_marks(text)
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for; `eos` and other control ids stand for nothing.

        Raises:
            IndexError: an id is not from 0 to `size` - 1.
        """
        text: str = self._processor.decode([int(i) for i in ids])
        return text

    def piece(self, token: int) -> str:
        """The text of one id; a byte or control token, which is no text by itself, in brackets: <0xE2>, </s>."""
        name: str = self._processor.id_to_piece(token)
        bare = self._processor.is_byte(token) or self._processor.is_control(token) or self._processor.is_unknown(token)
        return name if bare else name.replace(MARK, " ")

    def _encode_marks(self, text: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        for part in self._processor.encode(text.split(MARK), return_type="numpy"):
            parts += [self._mark, part]
        return np.concatenate(parts[1:])

    def _check(self) -> None:
        name, hint = self.name, "use a tokenizer that `pkmlm tokenize` learns"
        if self.eos < 0:
            raise UserError(f"{name} has neither an end nor a beginning token to separate documents with", hint)
        if not all(self._processor.is_byte(int(i)) for i in self._mark):
            raise UserError(f"{name} has no byte pieces: it cannot spell every text (expected byte_fallback)", hint)
        for probe in PROBES:
            if self.decode(self.encode(probe)) != probe:
                shown = ascii(probe if len(probe) < 60 else f"{probe[:20]}...")
                raise UserError(f"{name} is lossy: {shown} does not come back from decoding", hint)


def sampled(texts: Iterable[str], limit: int) -> list[str]:
    """At most `limit` UTF-8 bytes of the texts, in their order: all of them if they fit, else a random choice.

    Bottom-k sampling, in one pass and bounded memory: each text draws a number (from a fixed seed), and the texts with
    the smallest numbers are kept.
    """
    draw = random.Random(SEED).random
    kept: list[tuple[float, int, int, str]] = []  # (-number, place, bytes, text): a heap, largest number on top
    total = 0
    for place, text in enumerate(texts):
        size = len(text) if text.isascii() else len(text.encode())
        heapq.heappush(kept, (-draw(), place, size, text))
        total += size
        while total > limit:
            total -= heapq.heappop(kept)[2]
    return [text for _, _, _, text in sorted(kept, key=lambda entry: entry[1])]


def frequent_characters(texts: Sequence[str], count: int) -> Iterator[str]:
    """The texts with a newline, which no piece goes beyond, for all but the `count` most frequent characters."""
    found = Counter(itertools.chain.from_iterable(texts))
    for character in ("\n", " ", RESERVED):
        found.pop(character, None)
    kept = "".join(sorted(character for character, _ in found.most_common(count)))
    others = re.compile(f"[^\n {re.escape(kept)}]+")
    return (others.sub("\n", text) for text in texts)


def learning_error(message: str, vocab_size: int | None) -> UserError:
    """The error for a message of SentencePiece, in terms of our options."""
    size = f"--vocab-size: {vocab_size:,}" if vocab_size else f"--vocab-size: its default of {VOCABULARY:,}"
    if found := re.search(r"too high \(\d+\).*<= (\d+)", message):
        most = int(found[1])
        return UserError(
            f"{size} is too large for this text (expected at most {most:,})",
            f"use --vocab-size {most}, or more text",
        )
    if "required_chars" in message:
        return UserError(f"{size} is too small (256 bytes and a few characters need {LEAST_VOCABULARY})")
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return UserError("the training text is too small to learn a tokenizer from")
    return UserError(f"SentencePiece cannot learn a tokenizer: {message}")
