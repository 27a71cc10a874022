"""Text to ids and back without loss, by a SentencePiece model or a byte-level BPE; no other module depends on which."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pkmlm.data.byte_level_bpe import ByteLevelBPE
from pkmlm.data.sentencepiece_model import HINT, MARK, SentencePieceModel, learn
from pkmlm.data.text import chunks_of, has_surrogate
from pkmlm.data.tokenizer_file import SENTENCEPIECE_FILE, TOKENIZER_CONFIG, TOKENIZERS, kept_model, tokenizer_file
from pkmlm.errors import UserError, read_errors
from pkmlm.files import open_file

TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a token in base64 and its id
SAVE_HINT = "transformers' AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER) writes a tokenizer.json"
LARGEST = 256 << 20  # bytes of a tokenizer's file; of those in use, the largest have 40 MB
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
    """A lossless tokenizer.

    Attributes:
        name: what errors call it, such as the path of its file.
        model_bytes: what a folder keeps of it, in a file called `file`; `sha256` is the digest of these bytes.
        size: the number of ids.
        eos: the id that ends a document.
        begin: the id that a language model sees before the first token of a document; `eos`, unless the tokenizer has a
            token of its own for this.
        unknown: the id of what the tokenizer cannot spell; -1: it spells everything.
        pad: the id that fills up a batch.
        cuts: where long documents are cut.
    """

    def __init__(self, model_bytes: bytes, name: str = "the tokenizer"):
        """Load a tokenizer and check that it loses nothing.

        Args:
            model_bytes: the content of a SentencePiece model file, or of a tokenizer.json of a byte-level BPE.
            name: what errors call it.

        Raises:
            UserError: it is neither, has no token to end a document with, or does not reproduce every probe text.
        """
        if TIKTOKEN.match(model_bytes):
            message = f"{name} is a file of tiktoken (expected a SentencePiece model or a tokenizer.json)"
            raise UserError(message, SAVE_HINT)
        kind = ByteLevelBPE if model_bytes[:1] == b"{" else SentencePieceModel
        self._model: ByteLevelBPE | SentencePieceModel = kind(model_bytes, name)
        self.name = name
        self.model_bytes = self._model.model_bytes
        self.sha256 = hashlib.sha256(self.model_bytes).hexdigest()
        self.file, self.cuts = kind.file, kind.cuts
        self.size, self.eos, self.begin = self._model.size, self._model.eos, self._model.begin
        self.unknown, self.pad = self._model.unknown, self._model.pad
        for probe in PROBES:
            if self.decode(self.encode(probe)) != probe:
                shown = ascii(probe if len(probe) < 60 else f"{probe[:20]}...")
                raise UserError(f"{name} is lossy: {shown} is not restored by decoding", HINT)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load and check a file, or the one in a folder.

        Raises:
            UserError: the file cannot be read, or is larger than any tokenizer's; or see the constructor.
        """
        if path.is_dir():
            folder, path = path, tokenizer_file(path)
            if not path.exists():
                message = f"{folder} holds no tokenizer (expected {' or '.join(TOKENIZERS)})"
                raise UserError(message, SAVE_HINT)
            if path.name != SENTENCEPIECE_FILE and (kept := kept_model(folder)):
                return cls(kept, str(folder / TOKENIZER_CONFIG))
        with read_errors(f"the tokenizer {path}"), open_file(path) as file:
            model_bytes = file.read(LARGEST + 1)
        if len(model_bytes) > LARGEST:
            raise UserError(f"{path} is too large for a tokenizer (expected at most {LARGEST:,} bytes)", HINT)
        return cls(model_bytes, str(path))

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int | None = None, model_type: str = "bpe") -> "Tokenizer":
        """Learn a SentencePiece model from chunks of text; the same texts give the same model, byte for byte.

        If the vocabulary is too small to hold every usual character of the text, three quarters of it (bytes aside) go
        to the most frequent characters; bytes spell the others.

        Args:
            texts: chunks, read once.
            vocab_size: number of ids; None: 8192.
            model_type: "bpe" or "unigram".

        Raises:
            UserError: the text is too small for this vocabulary, or the vocabulary too small for any text.
        """
        return cls(learn(texts, vocab_size, model_type))

    def as_json(self) -> bytes:
        """The same tokenizer as a tokenizer.json of the library `tokenizers`. Of two spellings that a unigram model
        finds as likely, it may take the other.
        """
        return self._model.as_json()

    def encode(self, text: str) -> list[int]:
        """The ids of one document, cut into chunks as a corpus cuts it; without `eos`.

        Raises:
            UserError: the text has a lone surrogate (which no UTF-8 text has), or decoding would not restore it.
        """
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as an array, which takes a tenth of the memory of a list: int64, (n,)."""
        if has_surrogate(text):
            raise UserError("the text has a lone surrogate, which is not Unicode text")
        chunks = self.encode_chunks(chunks_of(text, self.cuts))
        return np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, np.int64)

    def encode_chunks(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """The ids (int32) of each text, which is not cut into chunks again; the same for any number of threads.

        Raises:
            UserError: decoding would not restore a text.
        """
        return self._model.encode(texts, threads) if texts else []

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for; `eos` and other control ids stand for nothing.

        Raises:
            IndexError: an id is not from 0 to `size` - 1.
        """
        return self._model.decode([int(i) for i in ids])

    def piece(self, token: int) -> str:
        """The text of one id; bytes and control tokens, which are not text by themselves, in brackets: <0xE2>, </s>."""
        return self._model.piece(token)
