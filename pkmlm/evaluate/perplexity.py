"""Perplexity as lm-evaluation-harness defines it for rolling tasks: documents never share context.

B: windows of a batch; T: positions; N: both; D: model width; M: scored positions of a batch.
"""

import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pkmlm.data.corpus import Corpus, refuse_forged
from pkmlm.data.sources import find_sources
from pkmlm.data.text import FIELD, check_options, read_documents
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.distributed import World
from pkmlm.errors import NotFinite, UserError
from pkmlm.evaluate.likelihood import Window, score_targets
from pkmlm.model.transformer import Transformer

BATCH = 16  # windows a forward


@dataclass(frozen=True)
class Documents:
    """Tokenized documents and what their text counts.

    Attributes:
        name: of the split or the file; of several files, how many, and of what pattern.
        ids: the documents' token ids, without the end-of-document token; may be read once.
        tokens: ids in all; words: as `len(re.split(r"\\s+", text))` summed over documents; bytes: of UTF-8.
        source: what results keep of where they come from; doubts: what to warn of.
    """

    name: str
    ids: Iterable[np.ndarray]
    tokens: int
    words: int
    bytes: int
    source: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Perplexity:
    """The negative log-likelihood of documents and what follows from it.

    Attributes:
        tokens: scored tokens: all but the end-of-document tokens.
        nll: their sum of -log p, nats.
        token_ppl, word_ppl, byte_ppl: exp(nll / count); None where that is more than a float holds, as where a text
            without white space is a single word.
        bits_per_byte: nll / bytes / log 2.
    """

    split: str
    tokens: int
    words: int
    bytes: int
    nll: float
    token_ppl: float | None
    word_ppl: float | None
    byte_ppl: float | None
    bits_per_byte: float

    @classmethod
    def of(cls, split: str, tokens: int, words: int, bytes_: int, nll: float) -> "Perplexity":
        most = math.log(sys.float_info.max)
        token, word, byte = (
            math.exp(nats) if (nats := nll / count) < most else None for count in (tokens, words, bytes_)
        )
        return cls(split, tokens, words, bytes_, nll, token, word, byte, nll / bytes_ / math.log(2))

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens


def windows(ids: np.ndarray, prefix: int, context: int, stride: int) -> Iterator[Window]:
    """Cut a document into windows in which each token is scored once.

    The first window scores up to `context` tokens after the prefix token; each later one the next `stride`, with as
    much context before them as fits. With stride = context this is the harness's rule: only the last window overlaps
    another.
    """
    stream = np.concatenate([[prefix], ids])
    done = 0
    while done < len(ids):
        stop = min(len(ids), done + (context if done == 0 else stride))
        yield Window(stream[max(0, stop - context) : stop], stream[done + 1 : stop + 1])
        done = stop


def open_split(directory: str, split: str, tokenizer: Tokenizer) -> Corpus:
    """A tokenized split; its tokens are checked when they are first read.

    Raises:
        UserError: no such split, or it was made with another tokenizer.
    """
    corpus = Corpus(directory, split)
    if corpus.tokenizer_sha256 != tokenizer.sha256:
        raise UserError(
            f"{directory} was tokenized with another tokenizer ({corpus.tokenizer_sha256[:12]}) than {tokenizer.name} "
            f"({tokenizer.sha256[:12]})",
            f"tokenize the text again with --tokenizer {tokenizer.name}",
        )
    refuse_forged(corpus.folder, (corpus.vocab_size, corpus.eos), tokenizer)
    return corpus


def documents_of_split(corpus: Corpus, tokenizer: Tokenizer, tokens: int | None = None) -> Documents:
    """The documents of an open split, for one pass, or (with `tokens`) as many as hold its first so many tokens, the
    last one cut, between characters.

    Raises:
        UserError: its files are damaged, which may also show when the documents are read.
    """
    split = corpus.split
    whole = (corpus.document(i) for i in range(corpus.documents))
    if tokens is None or tokens >= corpus.tokens - corpus.documents:
        source = {"folder": str(corpus.folder), "sha256": corpus.sha256, "documents": corpus.documents}
        return Documents(split, whole, corpus.tokens - corpus.documents, corpus.words, corpus.bytes, source)
    first: list[np.ndarray] = []
    while tokens > 0:
        document = next(whole)
        first.append(document[: whole_characters(document, tokens, tokenizer)])
        tokens -= min(tokens, len(document))
    return documents_of_texts(split, first, [tokenizer.decode(ids.tolist()) for ids in first])


def whole_characters(ids: np.ndarray, tokens: int, tokenizer: Tokenizer) -> int:
    """How many ids to keep of at most so many, at least one, so that the last is not of the first bytes of a character:
    these would be decoded to U+FFFD each.
    """
    if tokens >= len(ids):
        return len(ids)
    following = tokenizer.decode(ids[: tokens + 3].tolist())  # a character has at most four bytes
    fewer = range(tokens, max(0, tokens - 4), -1)
    return next((each for each in fewer if following.startswith(tokenizer.decode(ids[:each].tolist()))), tokens)


def documents_of_text(
    path: str, tokenizer: Tokenizer, separator: str | None = None, field: str = FIELD, usual: str | None = None
) -> Documents:
    """The documents of a text file (any kind that `pkmlm tokenize` reads); "-" is standard input.

    Args:
        usual: what separates the documents of the run's tokens: a text that it would divide, and that nothing divides,
            is doubtful.

    Raises:
        UserError: it cannot be read, holds no text, or is none that a separator could divide.
    """
    sources = find_sources([path])
    plain = any(source.format == "txt" for source in sources)
    check_options(sources, separator, field)
    digest = hashlib.sha256()  # of the stored bytes of all files, one after another
    texts: list[str] = []
    for source in sources:
        with source.open() as stream:
            stream.digest = digest
            texts += read_documents(stream, separator, field)
    one = "standard input" if path == "-" else sources[0].plain_name
    if not texts:
        raise UserError(f"{one if path == '-' else path} holds no text")
    name = one if len(sources) == 1 else f"{len(sources)} files of {path}"
    doubts: tuple[str, ...] = ()
    if usual is not None and plain and separator is None:
        divided = sum(bool(part) for text in texts for part in text.split(usual))
        if divided > len(texts):
            few = f"{len(texts):,} document{'s' * (len(texts) > 1)}"
            more = f"--separator {usual!r}, as the run's tokens had it, divides it into {divided:,}"
            doubts = (f"{name}: read as {few}, but {more}",)
    read = {"file": path, "sha256": digest.hexdigest(), "separator": separator, "field": field, "documents": len(texts)}
    documents = documents_of_texts(name, [np.array(tokenizer.encode(text)) for text in texts], texts)
    return replace(documents, source=read, doubts=doubts)


def documents_of_texts(name: str, ids: list[np.ndarray], texts: list[str]) -> Documents:
    """Documents of which both tokens and texts are known."""
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    return Documents(name, ids, sum(map(len, ids)), words, sum(len(text.encode()) for text in texts))


@torch.no_grad()
def score(
    model: Transformer,
    documents: Documents,
    prefix: int,
    *,
    stride: int | None = None,
    batch: int = BATCH,
    watch: Callable[[Tensor], None] | None = None,
    advance: Callable[[int], bool] | None = None,
    world: World | None = None,
) -> Perplexity | None:
    """Score documents with a model in evaluation mode; in the model's own precision, sums in float64.

    Args:
        prefix: the token that stands before every document (the end-of-document token).
        stride: tokens scored by each window after a document's first; None: the context.
        batch: windows a forward.
        watch: called before each forward with the positions that are scored, a bool tensor (B * T,).
        advance: called after each forward with the tokens scored so far; False ends the pass.
        world: processes that take turns at the batches, each with the whole model and all documents; each of them gets
            the result, which is that of one process. All take as many forwards: where they divide the model's
            parameters, they fetch them together. None: this one alone.

    Returns:
        None if `advance` ended it.

    Raises:
        UserError: stride outside 1 ... context; a score that is not finite (NotFinite, exit code 1).
    """
    stride, world = stride or model.context, world or World()
    if not 1 <= stride <= model.context:
        raise UserError(f"--stride {stride} is not possible (expected 1 to the model's context, {model.context})")
    tokens = 0
    sums: list[float] = []  # of batches: adding them up in their order gives the same bits in any world
    stream = (window for ids in documents.ids for window in windows(ids, prefix, model.context, stride))
    nothing: list[Window] = []
    while group := list(itertools.islice(stream, batch)):
        tokens += sum(len(window.targets) for window in group)
        nothing = [Window(group[0].tokens, group[0].targets[:0])]
        if len(sums) % world.size != world.rank:
            sums.append(0.0)
            continue
        sums.append(sum(float(nll.sum()) for nll in score_windows(model, group, watch)))
        if advance is not None and not advance(tokens):
            return None
    # Ranks without a batch in the last round run an empty one: FSDP needs as many forwards on each.
    if 0 < len(sums) % world.size <= world.rank:
        score_windows(model, nothing, watch)
    total = sum(world.all_sum(torch.tensor(sums, dtype=torch.float64)).tolist())
    if not math.isfinite(total):
        raise NotFinite(f"the model's scores on {documents.name} are not finite", exit_code=1)
    if tokens == 0:
        raise UserError(f"{documents.name} holds no tokens")
    return Perplexity.of(documents.name, tokens, documents.words, documents.bytes, total)


def score_windows(
    model: Transformer, group: list[Window], watch: Callable[[Tensor], None] | None = None
) -> list[Tensor]:
    """-log p of the targets of each window of a batch, in float64 (padded on the right, which a causal model does not
    see).
    """
    device = next(model.parameters()).device
    longest = max(len(window.tokens) for window in group)
    tokens_BT = np.zeros((len(group), longest), dtype=np.int64)
    scored_BT = np.zeros((len(group), longest), dtype=bool)
    for row, window in enumerate(group):
        tokens_BT[row, : len(window.tokens)] = window.tokens
        scored_BT[row, len(window.tokens) - len(window.targets) : len(window.tokens)] = True
    mask_N = torch.from_numpy(scored_BT).flatten().to(device)
    if watch is not None:
        watch(mask_N)
    h_MD = model.hidden(torch.from_numpy(tokens_BT).to(device)).flatten(0, 1)[mask_N]
    targets_M = torch.from_numpy(np.concatenate([window.targets for window in group])).to(device)
    return list(score_targets(model, h_MD, targets_M)[0].cpu().split([len(window.targets) for window in group]))
