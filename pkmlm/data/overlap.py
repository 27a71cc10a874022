"""Documents that two splits of a corpus share: a score on text seen in training means nothing."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from typing import NamedTuple

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer

LEAST = 16  # tokens: shorter documents ("Yes.", a heading) repeat by nature
BLOCK = 1 << 17  # tokens read at a time


def overlap_warnings(splits: Mapping[str, Corpus], tokenizer: Tokenizer) -> list[str]:
    """A warning for each pair of splits that share documents."""
    warnings = []
    for earlier, later, shared, documents in overlaps(splits, tokenizer):
        if shared:
            occurs = "also occurs" if shared == 1 else "also occur"
            found = f"{shared:,} of {documents:,} {later} document{'s' * (documents != 1)} of at least {LEAST} tokens"
            warnings.append(f"{found} {occurs} word for word in {earlier}")
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
    """
    if len(splits) == 1:
        return []
    ids = tokenizer.encode("\n")
    newline = ids[0] if len(ids) == 1 else -1
    counts = {name: Counter(document_hashes(splits[name], newline)) for name in ("valid", "test") if name in splits}
    in_train = set().union(*counts.values()).intersection(document_hashes(splits["train"], newline))
    seen = {"train": in_train, **counts}
    found = []
    for earlier, later in combinations(seen, 2):
        shared = sum(count for digest, count in counts[later].items() if digest in seen[earlier])
        found.append(Overlap(earlier, later, shared, counts[later].total()))
    return found


def document_hashes(corpus: Corpus, newline: int) -> Iterator[bytes]:
    """The hash of every document of LEAST tokens or more, without a newline at its ends.

    Args:
        newline: the id of a newline; -1: there is none.
    """
    for start, end in pairwise(map(int, corpus.boundaries(0, corpus.documents))):
        stop = end - 1  # without the end-of-document token
        if stop - start < LEAST:
            continue
        tokens, digest = 0, hashlib.blake2b(digest_size=16)
        for place in range(start, stop, BLOCK):
            ids = corpus.read(place, min(place + BLOCK, stop))
            if place == start and ids[0] == newline:
                ids = ids[1:]
            if place + BLOCK >= stop and ids[-1] == newline:
                ids = ids[:-1]
            tokens += len(ids)
            digest.update(ids.astype("<u4").data)
        if tokens >= LEAST:
            yield digest.digest()
