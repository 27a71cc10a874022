"""Documents that two splits of a corpus share: a score on text seen in training means nothing."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer

LEAST = 16  # tokens: shorter documents ("Yes.", a heading) repeat by nature
RUN = 1 << 17  # tokens read at a time
GROUP = 1 << 16  # documents whose places are read at a time


def overlap_warnings(splits: Mapping[str, Corpus], tokenizer: Tokenizer) -> list[str]:
    """A warning for each pair of splits that share documents."""
    warnings = []
    for earlier, later, shared, documents in overlaps(splits, tokenizer):
        if shared:
            found = f"{shared:,} of {documents:,} document{'s' * (documents != 1)} of {later}"
            are = "is" if shared == 1 else "are"
            warnings.append(f"{found} (of {LEAST} tokens or more) {are} in {earlier} too, word for word")
    return warnings


class Overlap(NamedTuple):
    """`shared` of the `documents` of the split `later` are in the split `earlier` too."""

    earlier: str
    later: str
    shared: int
    documents: int


def overlaps(splits: Mapping[str, Corpus], tokenizer: Tokenizer) -> list[Overlap]:
    """How many documents of valid and test, of LEAST tokens or more, are in train, and how many of test in valid.

    Whole documents are compared, by hashes of 128 bits (BLAKE2b) of their tokens, which are equal if and only if the
    texts are: the tokenizer loses nothing. One newline at either end is left out, as the last document of a file often
    has one more than the same document elsewhere. Documents that differ in any other way are not the same.

    Memory holds the hashes of valid and test, not of train: there, only documents that may be as long as one of these
    are read, once, and hashed.
    """
    ids = tokenizer.encode("\n")
    newline = ids[0] if len(ids) == 1 else -1
    counts: dict[str, Counter[bytes]] = {}
    lengths: set[int] = set()
    for name in ("valid", "test"):
        if name in splits:
            counts[name] = Counter()
            for length, digest in document_hashes(splits[name], newline):
                counts[name][digest] += 1
                lengths.add(length)
    if not counts:
        return []
    wanted = set().union(*counts.values())
    in_train = {digest for _, digest in document_hashes(splits["train"], newline, lengths) if digest in wanted}
    seen: dict[str, Collection[bytes]] = {"train": in_train, **counts}
    found = []
    for earlier, later in (("train", "valid"), ("train", "test"), ("valid", "test")):
        if earlier in seen and later in counts:
            shared = sum(count for digest, count in counts[later].items() if digest in seen[earlier])
            found.append(Overlap(earlier, later, shared, counts[later].total()))
    return found


def document_hashes(
    corpus: Corpus, newline: int, lengths: Collection[int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """The length in tokens and the hash of every document of LEAST tokens or more, without a newline at its ends.

    Args:
        newline: the id of a newline; -1: there is none.
        lengths: skip documents that cannot have one of these lengths; None: skip none.
    """
    begin, buffer = 0, corpus.read(0, 0)

    def read(start: int, stop: int) -> np.ndarray:
        """At most RUN tokens; those that follow are probably wanted next."""
        nonlocal begin, buffer
        if not begin <= start <= stop <= begin + len(buffer):
            begin, buffer = start, corpus.read(start, min(start + RUN, corpus.tokens))
        return buffer[start - begin : stop - begin]

    sizes = np.array(sorted({length + more for length in lengths or () for more in (1, 2, 3)}), np.int64)
    for first in range(0, corpus.documents, GROUP):
        places = corpus.boundaries(first, min(first + GROUP, corpus.documents))
        found = np.diff(places)  # with the end-of-document token, and maybe newlines
        chosen = found > LEAST if lengths is None else np.isin(found, sizes)
        for start, stop in zip(places[:-1][chosen].tolist(), (places[1:][chosen] - 1).tolist(), strict=True):
            start += int(read(start, start + 1)[0] == newline)
            stop -= int(read(stop - 1, stop)[0] == newline)
            if stop - start >= LEAST:
                digest = hashlib.blake2b(digest_size=16)
                for place in range(start, stop, RUN):
                    digest.update(read(place, min(place + RUN, stop)).data)
                yield stop - start, digest.digest()
