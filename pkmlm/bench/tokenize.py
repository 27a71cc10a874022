"""What `pkmlm tokenize` costs beside the bare encoding of the same text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pkmlm.data.shards import Encoding, write_corpus
from pkmlm.data.sources import Source
from pkmlm.data.text import read_chunks
from pkmlm.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizeCost:
    """Seconds of each round: reading, encoding, counting and writing; and of SentencePiece alone on text in memory.

    Attributes:
        bytes: of the text, in UTF-8.
    """

    whole: list[float]
    bare: list[float]
    bytes: int


def tokenize_cost(
    sources: Sequence[Source], separator: str | None, vocab_size: int, jobs: int, rounds: int
) -> TokenizeCost:
    """Time both in turn, after one round that is not counted, with a tokenizer that is learnt from the text before."""
    chunks = []
    for source in sources:
        with source.open() as stream:
            chunks += [chunk.text for chunk in read_chunks(stream, separator)]
    tokenizer = Tokenizer.learn(chunks, vocab_size)
    encoding = Encoding(tokenizer, separator, jobs=jobs)
    whole, bare = [], []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        tokenizer.encode_chunks(chunks, jobs)
        bare.append(time.perf_counter() - began)
        with TemporaryDirectory() as folder:
            began = time.perf_counter()
            write_corpus(Path(folder) / "tokens", {"train": sources}, encoding)
            whole.append(time.perf_counter() - began)
    return TokenizeCost(whole[1:], bare[1:], sum(len(text.encode()) for text in chunks))
