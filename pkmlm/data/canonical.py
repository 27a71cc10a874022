"""Canonical ids: tokens that are the same word to a reader, such as "The", " the" and "thé", share one.

Memories look rows up by them (Cheng et al. 2026, arXiv 2601.07372, sec. 2.2).

V: rows of the embedding.
"""

import unicodedata
from typing import Any

import numpy as np

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError


def canonical_ids(tokenizer: Tokenizer, rows: int, merge: bool = True) -> np.ndarray:
    """The canonical id of each token: int64, (V,), below V.

    0 is the id of the tokens that end and begin a document, beyond which n-grams do not look back, and also means "no
    token". The others are numbered from 1 in the order of their first tokens. A token that is not text by itself, such
    as a control token or a part of a character, has an id of its own.

    Args:
        rows: rows of the embedding (V); at least the tokenizer's size.
        merge: False gives every token an id of its own.
    """
    ends = (tokenizer.eos, tokenizer.begin)
    names: dict[str | int, int] = dict.fromkeys(ends, 0)
    ids = []
    for token in range(rows):
        name: str | int = token
        if merge and token < tokenizer.size and token not in ends:
            piece = tokenizer.piece(token)
            if tokenizer.decode([token]) == piece:
                name = canonical_text(piece) or token
        ids.append(names.setdefault(name, len(names) - len({*ends}) + 1))
    return np.array(ids, np.int64)


def host_canonical_ids(config: Any, rows: int, tokenizer: Tokenizer | None) -> np.ndarray:
    """The canonical ids of the tokens of a transformers model: int64, (V,), below V. All tokens that its config calls
    the beginning or the end of a text have id 0, and so has the tokenizer's end-of-document token.

    Args:
        config: the model's text config.
        rows: rows of its embedding (V).
        tokenizer: the model's tokenizer, to merge tokens by their text; None: every other token has an id of its own.

    Raises:
        UserError: the tokenizer is larger than the model's embedding, or no token begins or ends a document.
    """
    named = [getattr(config, key, None) for key in ("eos_token_id", "bos_token_id")]
    tokens = [token for each in named for token in (each if isinstance(each, list) else [each])]
    begins = sorted({token for token in tokens if token is not None and 0 <= token < rows})
    if tokenizer is not None:
        if tokenizer.size > rows:
            message = f"{tokenizer.name} has {tokenizer.size:,} tokens (expected at most {rows:,}, as in the model)"
            raise UserError(message, "give the folder of the model's own tokenizer")
        ids = canonical_ids(tokenizer, rows)
    elif begins:
        ids = np.arange(rows)
        ids[0] = begins[0]  # 0 is taken, and this id is free
    else:
        message = "the model's config names no token of its vocabulary that begins or ends a document"
        raise UserError(message, "set its eos_token_id")
    ids[begins] = 0
    return ids


def canonical_text(text: str) -> str:
    """A text in Unicode's form NFKC, without accents, in lower case, with single spaces between words and none around
    it; white space alone becomes one space.
    """
    apart = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in apart if unicodedata.category(c) != "Mn").lower()
    return " ".join(bare.split()) or " " * bool(bare)
