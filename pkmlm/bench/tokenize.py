"""What `pkmlm tokenize` costs beside the bare encoding of the same text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pkmlm.bench.rounds import Overhead, in_turn
from pkmlm.data.shards import Encoding, write_corpus
from pkmlm.data.sources import Source
from pkmlm.data.text import read_chunks
from pkmlm.data.tokenizer import Tokenizer


def tokenize_cost(
    sources: Sequence[Source],
    separator: str | None,
    vocab_size: int,
    jobs: int,
    rounds: int,
    say: Callable[[str], None],
) -> Overhead:
    """Time reading, encoding, counting and writing a text beside SentencePiece alone on it in memory, with a tokenizer
    that is learnt from it before; the amount is its bytes, in UTF-8.
    """
    chunks = []
    for source in sources:
        with source.open() as stream:
            chunks += [chunk.text for chunk in read_chunks(stream, separator)]
    say("learning a tokenizer")
    tokenizer = Tokenizer.learn(chunks, vocab_size)
    encoding = Encoding(tokenizer, separator, jobs=jobs)

    def whole() -> None:
        with TemporaryDirectory() as folder:
            write_corpus(Path(folder) / "tokens", {"train": sources}, encoding)

    def bare() -> None:
        tokenizer.encode_chunks(chunks, jobs)

    times = in_turn({"whole": whole, "bare": bare}, rounds, torch.device("cpu"), say)
    return Overhead(times["whole"], times["bare"], sum(len(text.encode()) for text in chunks))
