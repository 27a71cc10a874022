"""A byte-level BPE, such as GPT-2's or Pythia's, from a tokenizer.json of the library `tokenizers`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import tokenizers
from pydantic import Field
from typing_extensions import TypedDict

from pkmlm.data.text import AFTER_WORDS
from pkmlm.data.tokenizer_file import BYTE_LEVEL_FILE
from pkmlm.errors import UserError
from pkmlm.files import check_json

# What tokenizers call the end of a text, and those of chats the end of a turn.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
HINT = "a tokenizer.json must be a byte-level BPE, such as GPT-2's"
SENTENCEPIECE_HINT = "it was made of a SentencePiece model: give that model, mostly a file called tokenizer.model"
# How vocabularies write bytes: those that are printable in Latin-1 as that character, the others as U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
LETTERS = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
STRAY_BYTE = re.compile("[\udc80-\udcff]")  # as "surrogateescape" decodes it


Id = Annotated[int, Field(ge=0, lt=1 << 24)]  # the library takes hours to write a vocabulary with large gaps


class AddedToken(TypedDict):
    id: Id
    content: str
    special: bool


class BPE(TypedDict):
    vocab: dict[str, Id]


class File(TypedDict):
    """The keys of a tokenizer.json that are checked here; the library checks the rest."""

    added_tokens: list[AddedToken]
    model: BPE


class ByteLevelBPE:
    """A byte-level BPE, as used by `Tokenizer`, which documents the attributes and methods.

    `model_bytes` is the file without what would change a text or its ids (an NFC normalizer, truncation, padding,
    dropout), and with a template that puts `begin` before a text. The name of a special token in a text is plain text.
    """

    file = BYTE_LEVEL_FILE
    cuts = AFTER_WORDS
    unknown = -1

    def __init__(self, model_bytes: bytes, name: str):
        """Load a tokenizer; see `Tokenizer`.

        Raises:
            UserError: the file is not a tokenizer.json; or the tokenizer is of another kind, changes text, cannot spell
                every byte, loses its own added tokens or has no token to end a text with.
        """
        self.name = name
        try:
            spec = json.loads(model_bytes)
            check_kind(spec, name)
            check_json(spec, File)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{name} is not a tokenizer.json, or is damaged: {error}", HINT) from None
        end = end_of(spec["added_tokens"], name)
        begin = beginning_of(spec) or end
        self.model_bytes = settled(spec, begin)
        self._backend = self._parse(self.model_bytes)
        # A file that this class wrote is kept as it is: its digest must not depend on how a later library writes it.
        if self.model_bytes != model_bytes:
            self.model_bytes = settled(json.loads(self._backend.to_str()), begin)
        vocabulary, added = self._backend.get_vocab(), self._backend.get_added_tokens_decoder()
        self.size = 1 + max(vocabulary.values())
        needed = {letter: byte for letter, byte in LETTERS.items() if byte not in NOT_IN_UTF8}
        if lacking := [f"0x{byte:02X}" for letter, byte in needed.items() if letter not in vocabulary]:
            raise UserError(
                f"{name} cannot spell every text: it lacks {len(lacking)} of the bytes of UTF-8, such as {lacking[0]}",
                "learn it with initial_alphabet=pre_tokenizers.ByteLevel.alphabet()",
            )
        self._spelt = [b""] * self.size
        for token, i in vocabulary.items():
            self._spelt[i] = bytes(LETTERS[c] for c in token) if LETTERS.keys() >= set(token) else token.encode()
        for i, token in added.items():
            self._spelt[i] = b"" if token.special else token.content.encode()
        self.eos = self.pad = vocabulary[end]
        self.begin = vocabulary[begin]
        self._ids("".join(f"a {token.content} b" for token in added.values()))

    def as_json(self) -> bytes:
        return self.model_bytes

    def encode(self, texts: Sequence[str], threads: int) -> list[np.ndarray]:
        if threads == 1:
            return [self._ids(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self._ids, texts))

    def decode(self, ids: Sequence[int]) -> str:
        if ids and min(ids) < 0:
            raise IndexError(f"id {min(ids)}")
        return b"".join(self._spelt[i] for i in ids).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        if not self._spelt[token]:
            return self._backend.id_to_token(token) or f"<{token}>"
        text = self._spelt[token].decode("utf-8", "surrogateescape")
        return STRAY_BYTE.sub(lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)

    def _ids(self, text: str) -> np.ndarray:
        """The ids of a text, checked to decode to the same bytes."""
        with library_errors(f"{self.name} cannot encode {text[:20]!a}"):
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        given, kept = text.encode(), b"".join(map(self._spelt.__getitem__, encoding.ids))
        if kept != given:
            same = next((i for i, (a, b) in enumerate(zip(given, kept, strict=False)) if a != b), len(kept))
            place = max(0, same - 8)
            shown = ascii(given[place : place + 40].decode("utf-8", "ignore"))
            raise UserError(f"{self.name} is lossy: {shown} is not restored by decoding", HINT)
        return np.array(encoding.ids, np.int32)

    def _parse(self, content: bytes) -> Any:
        with library_errors(f"{self.name} is not a tokenizer.json, or is damaged"):
            backend: Any = tokenizers.Tokenizer.from_str(content.decode())
        if not isinstance(backend.model, tokenizers.models.BPE):
            raise UserError(f"{self.name} is a {type(backend.model).__name__} (expected a byte-level BPE)", HINT)
        backend.encode_special_tokens = True
        return backend


def check_kind(spec: Mapping[str, Any], name: str) -> None:
    """Refuse (UserError) a tokenizer that is not byte-level, or that changes text before it encodes it."""
    if "model" not in spec:
        raise ValueError("it has no key 'model'")
    decoder, pre_tokenizer = kinds(spec.get("decoder")), kinds(spec.get("pre_tokenizer"))
    if decoder != ["ByteLevel"] or "ByteLevel" not in pre_tokenizer:
        found = f"decoder {', '.join(decoder) or 'none'}, pre_tokenizer {', '.join(pre_tokenizer) or 'none'}"
        hint = SENTENCEPIECE_HINT if "ByteFallback" in decoder else HINT
        raise UserError(f"{name} is not byte-level: found {found} (expected ByteLevel)", hint)
    if others := [each for each in kinds(spec.get("normalizer")) if each != "NFC"]:
        raise UserError(f"{name} is lossy: its normalizer {others[0]} changes text", HINT)
    model = spec.get("model")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model, dict) and model.get(key):
            raise UserError(f"{name} is lossy: its {key} is not part of the text", HINT)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn the library's errors (it has no exception class of its own) and panics into one line."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}", HINT) from None


def parts(part: Any) -> list[dict[str, Any]]:
    """A part of a tokenizer; of a Sequence, its members."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [each for value in part.values() if isinstance(value, list) for inner in value for each in parts(inner)]


def kinds(part: Any) -> list[str]:
    """The type of a part of a tokenizer; of a Sequence, the types of its members."""
    return [str(each.get("type")) for each in parts(part)]


def end_of(tokens: Sequence[AddedToken], name: str) -> str:
    """The special token that ends a text: one with a usual name, or the only special token.

    Raises:
        UserError: there is none.
    """
    specials = [token["content"] for token in tokens if token["special"] and token["content"]]
    end = next((each for each in ENDS if each in specials), specials[0] if len(specials) == 1 else None)
    if end is None:
        raise UserError(
            f"{name} has no token that ends a text (expected a special token {' or '.join(ENDS)})",
            'tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"}) of transformers adds one; save it again',
        )
    return end


def beginning_of(spec: Mapping[str, Any]) -> str | None:
    """The special token that the file puts before a text; None: there is none."""
    specials = {token["content"] for token in spec["added_tokens"] if token["special"]}
    for part in parts(spec.get("post_processor")):
        template = part.get("single")
        first = template[0] if isinstance(template, list) and template else None
        inner = first.get("SpecialToken") if isinstance(first, dict) else None
        if isinstance(inner, dict) and inner.get("id") in specials:
            return str(inner["id"])
    return None


def settled(spec: Mapping[str, Any], begin: str) -> bytes:
    """A tokenizer.json that changes no text and puts `begin` before it, always written the same way."""
    place = next(token["id"] for token in spec["added_tokens"] if token["content"] == begin)
    first, text = {"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [place], "tokens": [begin]}},
    }
    content = {
        **spec,
        "model": {**spec["model"], "dropout": None},
        **dict.fromkeys(("normalizer", "truncation", "padding")),
        "post_processor": template,
    }
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
