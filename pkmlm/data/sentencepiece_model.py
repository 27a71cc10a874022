"""A SentencePiece model, learnt here or given."""

import heapq
import io
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from pkmlm.data.text import AT_LINES, WINDOW
from pkmlm.data.tokenizer_file import SENTENCEPIECE_FILE
from pkmlm.errors import UserError

MARK = "\u2581"  # how SentencePiece writes a space; where the text itself has this character, it is spelt in bytes
# A chunk of `AT_LINES`, as the library `tokenizers` finds it.
CHUNK = tokenizers.Regex(
    rf"[\s\S]{{1,{WINDOW}}}\z|[\s\S]{{0,{WINDOW - 1}}}\n|[\s\S]{{0,{WINDOW - 2}}}[^ ](?= [^ ])|[\s\S]{{{WINDOW}}}"
)
RESERVED = "\u2585"  # SentencePiece learns nothing from a sentence with this character, which progress bars use
# Serialized `normalizer_spec {add_dummy_prefix: false}` of a ModelProto, in which the last value of a field counts.
NO_PREFIX = b"\x1a\x02\x18\x00"
VOCABULARY = 8192  # ids, by default
LEAST_VOCABULARY = 261  # bytes, the unknown and the end token, a newline, a space, a character
SAMPLE = 32 << 20  # bytes of text to learn from
HINT = "use a tokenizer that `pkmlm tokenize` learns"
UNIGRAM, BPE = 1, 2  # kinds of models in a ModelProto
SEED = 0  # of the random choice of the text to learn from
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


class SentencePieceModel:
    """A SentencePiece model, as used by `Tokenizer`, which documents the attributes and methods.

    `model_bytes` is the file without the setting that puts a space before a text, as Llama's and Mistral's have it.
    """

    file = SENTENCEPIECE_FILE
    cuts = AT_LINES

    def __init__(self, model_bytes: bytes, name: str):
        """Load a model; see `Tokenizer`.

        Raises:
            UserError: it is not a SentencePiece model, has no token to end a document with, or cannot spell every text.
        """
        try:
            if not model_bytes:
                raise RuntimeError("no data")
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
            if self._processor.encode_as_pieces("a")[0].startswith(MARK):
                model_bytes += NO_PREFIX
                self._processor = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except (RuntimeError, UnicodeDecodeError):  # the latter where the library's message quotes damaged bytes
            raise UserError(f"{name} is not a SentencePiece model or a tokenizer.json, or is damaged") from None
        self.model_bytes = model_bytes
        self.size = int(self._processor.vocab_size())
        self.unknown = self.pad = int(self._processor.unk_id())
        ends = [int(i) for i in (self._processor.eos_id(), self._processor.bos_id()) if i >= 0]
        self.eos, self.begin = (ends[0], ends[-1]) if ends else (-1, -1)
        self._mark = np.array([self._processor.piece_to_id(f"<0x{b:02X}>") for b in MARK.encode()], np.int32)
        if self.eos < 0:
            raise UserError(f"{name} has neither an end nor a beginning token to separate documents with", HINT)
        if not all(self._processor.is_byte(int(i)) for i in self._mark):
            raise UserError(f"{name} has no byte pieces: it cannot spell every text (expected byte_fallback)", HINT)

    def encode(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        encoded: list[np.ndarray]
        if len(texts) == 1:  # encoding a list starts a thread, which takes 50 times as long as a short text
            encoded = [self._processor.encode(texts[0], return_type="numpy")]
        else:
            encoded = self._processor.encode(texts, num_threads=threads, return_type="numpy")
        for i, text in enumerate(texts):
            if MARK in text:
                encoded[i] = self._encode_marks(text)
        return encoded

    def as_json(self) -> bytes:
        """As a tokenizer.json: texts are cut as in training, pieces are spelt with spaces, so that a text is encoded as
        it is, and what has no piece of its own (as `MARK`, where the text has it) falls back to bytes.

        Raises:
            UserError: the model is neither BPE nor unigram, or of two merges with the same score the first in a text
                comes first, which a tokenizer.json cannot say.
        """
        processor, ids = self._processor, range(self.size)
        names, scores = processor.id_to_piece([*ids]), processor.get_score([*ids])
        special = {i for i in ids if processor.is_control(i) or processor.is_unknown(i)}
        bare = {i for i in ids if i in special or processor.is_byte(i) or processor.is_unused(i)}  # in no text
        pieces = [name if i in bare else name.replace(MARK, " ") for i, name in enumerate(names)]
        apart = {i for i in user_defined(self.model_bytes) if len(pieces[i]) > 1}  # cut out of a text before all else
        plain = {piece: None for i, piece in enumerate(pieces) if i not in bare | apart}
        unknown, cuts = pieces[self.unknown], [tokenizers.pre_tokenizers.Split(CHUNK, "isolated")]
        kind = model_type(self.model_bytes)
        if kind == BPE:
            score_of = {piece: scores[i] for i, piece in enumerate(pieces)}
            merges = [(a, b) for piece in plain for a, b in halves(piece) if a in plain and b in plain]
            merges.sort(key=lambda pair: -score_of["".join(pair)])  # of one piece, in their order
            order = [*dict.fromkeys("".join(pair) for pair in merges)]
            for a, b in itertools.pairwise(order):
                if score_of[a] == score_of[b]:
                    raise UserError(f"no tokenizer.json gives its ids: {a!r} and {b!r} have the same score", HINT)
            vocabulary = {piece: i for i, piece in enumerate(pieces)}
            model: Any = tokenizers.models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True)
        elif kind != UNIGRAM:
            raise UserError("no tokenizer.json gives its ids: it is neither a BPE nor a unigram model", HINT)
        else:
            # A text that reads as the name of a bare piece is spelt by others: those are likelier, and a character of
            # such names that no piece has stands by itself.
            least = 1000 * min(scores)
            scored = [(piece, least if i in bare else scores[i]) for i, piece in enumerate(pieces)]
            model = tokenizers.models.Unigram(scored, unk_id=self.unknown, byte_fallback=True)
            alone = sorted({*"".join(pieces[i] for i in bare)} - {*"".join(plain)})
            apart = {i for i in apart if {*alone} & {*pieces[i]}}
            if alone:
                pattern = tokenizers.Regex(f"[{re.escape(''.join(alone))}]")
                cuts.append(tokenizers.pre_tokenizers.Split(pattern, "isolated"))
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(cuts)
        backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
        backend.add_special_tokens([tokenizers.AddedToken(pieces[i], normalized=False) for i in sorted(special)])
        backend.add_tokens([tokenizers.AddedToken(pieces[i], normalized=False) for i in sorted(apart)])
        begin = pieces[self.begin]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, self.begin)]
        )
        return backend.to_str().encode()

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode(ids)
        return text

    def piece(self, token: int) -> str:
        name: str = self._processor.id_to_piece(token)
        bare = self._processor.is_byte(token) or self._processor.is_control(token) or self._processor.is_unknown(token)
        return name if bare else name.replace(MARK, " ")

    def _encode_marks(self, text: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        for part in self._processor.encode(text.split(MARK), return_type="numpy"):
            parts += [self._mark, part]
        return np.concatenate(parts[1:])


def halves(piece: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a piece in two."""
    return ((piece[:at], piece[at:]) for at in range(1, len(piece)))


def model_type(model_bytes: bytes) -> int:
    """What a ModelProto says of how it cuts texts, as in `TrainerSpec`: `UNIGRAM`, `BPE` or another."""
    trainer = b"".join(v for number, v in message_fields(model_bytes) if number == 2 and isinstance(v, bytes))
    found = dict(message_fields(trainer)).get(3, UNIGRAM)
    return found if isinstance(found, int) else UNIGRAM


def user_defined(model_bytes: bytes) -> list[int]:
    """The ids of the pieces that a ModelProto says were given by a user, which the processor does not tell."""
    messages = (value for number, value in message_fields(model_bytes) if number == 1 and isinstance(value, bytes))
    pieces = [dict(message_fields(message)) for message in messages]
    return [i for i, piece in enumerate(pieces) if piece.get(3) == 4]  # its type


def message_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message of protobuf: (number, value). The library's own module of messages would read them, but
    it needs the newest protobuf, which many an environment holds back.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        else:
            size = varint() if key & 7 == 2 else 8 if key & 7 == 1 else 4
            yield key >> 3, message[at : at + size]
            at += size


def learn(texts: Iterable[str], vocab_size: int | None, model_type: str) -> bytes:
    """The content of a learnt model's file; see `Tokenizer.learn`."""
    chunks, size = sampled(texts, SAMPLE), vocab_size or VOCABULARY

    def train(sentences: Iterable[str], **changes: Any) -> bytes:
        model, options = io.BytesIO(), {**LEARNING, "vocab_size": size, "model_type": model_type, **changes}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
        return model.getvalue()

    try:
        return train(part for text in chunks for part in text.split(RESERVED) if part)
    except RuntimeError as error:
        message, room = str(error), size - LEAST_VOCABULARY
    if "required_chars" in message and room >= 0:
        for count in (1 + room * 3 // 4, 1 + room):  # all of the room where too few longer pieces repeat
            try:
                return train(frequent_characters(chunks, count), character_coverage=1.0)
            except RuntimeError as error:
                message = str(error)
    raise learning_error(message, vocab_size)


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
    """The texts with their `count` most frequent characters; a newline, which no piece crosses, replaces the others."""
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
        hint = "give more text, or an existing tokenizer with --tokenizer FILE"
        return UserError("the training text is too small to learn a tokenizer from", hint)
    return UserError(f"SentencePiece cannot learn a tokenizer: {message}")
