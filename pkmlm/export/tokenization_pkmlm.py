"""The tokenizer of a pkmlm model for `transformers`. Part of an exported model: it stands alone."""

import os
import re
from collections.abc import Iterator
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer

MARK = "\u2581"  # SentencePiece's sign for a space; one in a text is encoded in bytes
MARK_PIECES = ["<0xE2>", "<0x96>", "<0x81>"]
WINDOW = 2048  # characters encoded at a time, as in training
LAST_SINGLE_SPACE = re.compile(r".*[^ ](?= [^ ])", re.DOTALL)


def chunks(text: str) -> Iterator[str]:
    """Cut after the last newline of each window, else before its last single space, else at its end."""
    start = 0
    while len(text) - start > WINDOW:
        stop = start + WINDOW
        newline = text.rfind("\n", start, stop)
        space = None if newline >= 0 else LAST_SINGLE_SPACE.match(text, start, stop + 1)
        end = newline + 1 if newline >= 0 else space.end() if space else stop
        yield text[start:end]
        start = end
    yield text[start:]


class PkmlmTokenizer(PreTrainedTokenizer):
    """A lossless SentencePiece model: decoding returns every text unchanged.

    The end-of-document token is put before every text, as in training; `add_special_tokens=False` leaves it out.
    Nothing in a text is read as a special token, unless `split_special_tokens=False`. Padding is the unknown token,
    which no text needs.

    Args:
        vocab_file: the SentencePiece model.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012 (as the library has it)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **kwargs: Any):
        self.vocab_file = vocab_file
        self.processor: Any = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        ends = [i for i in (self.processor.eos_id(), self.processor.bos_id()) if i >= 0]
        end, begin = self.processor.id_to_piece([ends[0], ends[-1]])
        unknown = self.processor.id_to_piece(self.processor.unk_id())
        given = {"bos_token": begin, "eos_token": end, "unk_token": unknown, "pad_token": unknown}
        plain = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
        super().__init__(**{**given, **plain, **kwargs})

    def __call__(self, *args: Any, return_offsets_mapping: bool = False, **options: Any) -> Any:
        """As in the library, which leaves offsets out without a word.

        Raises:
            NotImplementedError: offsets are asked for.
        """
        if return_offsets_mapping:
            raise NotImplementedError("this tokenizer gives no offsets: it encodes texts in Python")
        return super().__call__(*args, **options)

    @property
    def vocab_size(self) -> int:
        return self.processor.vocab_size()

    def get_vocab(self) -> dict[str, int]:
        pieces = self.processor.id_to_piece(list(range(self.vocab_size)))
        return {**{piece: i for i, piece in enumerate(pieces)}, **self._added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        pieces: list[str] = []
        for chunk in chunks(text):
            for place, part in enumerate(chunk.split(MARK)):
                pieces += MARK_PIECES if place else []
                pieces += self.processor.encode(part, out_type=str)
        return pieces

    def _convert_token_to_id(self, token: str) -> int:
        return self.processor.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        """The piece of an id; an id beyond the pieces, which a model with more rows may give, is unknown."""
        return self.processor.id_to_piece(index if index < self.vocab_size else self.processor.unk_id())

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of pieces; special tokens appear in it under their names."""
        texts: list[str] = []
        ids: list[int] = []
        for token in tokens:
            if token in self._added_tokens_encoder:
                texts += [self.processor.decode(ids), token]
                ids = []
            else:
                ids.append(self.processor.piece_to_id(token))
        return "".join(texts) + self.processor.decode(ids)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self.bos_token_id, *token_ids_0, *(token_ids_1 or [])]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            return [int(i in self.all_special_ids) for i in token_ids_0]
        return [1] + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * (1 + len(token_ids_0) + len(token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        path = os.path.join(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + "tokenizer.model")
        with open(path, "wb") as file:
            file.write(self.processor.serialized_model_proto())
        return (path,)
