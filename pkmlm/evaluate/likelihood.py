"""Log-likelihoods of continuations, many of which share a prefix.

The choices of a question share their context, and often more. They are laid out as a prefix tree: each shared prefix
is read once, and a token attends to its own ancestors. N-gram memories look up a token's ancestors, and all other
parts work on single tokens, so only the order of sums differs from reading each sequence by itself.

B: rows of a batch; T: tokens of a row; D: model width; M: scored tokens of a batch; C: of a chunk; V: vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pkmlm.kernels.matmul import at_least_fp32
from pkmlm.model.attention import AttentionLayout
from pkmlm.model.language_model import LanguageModel

LOGITS = 1 << 24  # logits of a chunk: 64 MB in fp32
MIN_SHARED = 1 / 4  # share of its tokens that a sequence must have in common with the one before it to join its tree


class Window(NamedTuple):
    """A sequence that the model reads, and the targets to score in it.

    Attributes:
        tokens: input ids.
        targets: the ids that follow its last len(targets) positions, one each.
    """

    tokens: np.ndarray
    targets: np.ndarray


class Score(NamedTuple):
    """The sum of log p of a window's targets (nats, float64), and whether each target was the most likely token."""

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class PrefixTree:
    """Windows that are read together, each shared prefix once.

    Attributes:
        windows: their places in the list that they come from.
        tokens: (T,) ids; a parent comes before its children.
        paths: for each window, the places of its tokens in `tokens`.
        targets: for each window, its targets.
    """

    windows: list[int]
    tokens: np.ndarray
    paths: list[np.ndarray]
    targets: list[np.ndarray]


def continuation_windows(before: Sequence[int], continuation: Sequence[int], context: int) -> list[Window]:
    """Windows that score each token of a continuation once.

    Each window has as many tokens before its targets as fit into the context, at least one. A continuation that is
    itself longer than the context is scored half a context at a time.

    Args:
        before: ids before the continuation, at least one.
        continuation: ids to score.
        context: the most tokens that the model reads.
    """
    whole = np.array([*before, *continuation], dtype=np.int64)
    size = len(continuation) if len(continuation) <= context else max(1, context // 2)
    found = []
    for start in range(len(before), len(whole), size or 1):
        stop = min(len(whole), start + size)
        found.append(Window(whole[max(0, stop - 1 - context) : stop - 1], whole[start:stop]))
    return found


def build_prefix_trees(windows: Sequence[Window], max_tokens: int) -> list[PrefixTree]:
    """Trees of neighbouring windows that share enough to be read together.

    Args:
        max_tokens: most tokens of a tree; a longer window gets a tree of its own.
    """
    groups: list[list[int]] = []
    size = 0
    for index, window in enumerate(windows):
        shared = shared_prefix(windows[groups[-1][-1]].tokens, window.tokens) if groups else 0
        if shared >= MIN_SHARED * len(window.tokens) and size + len(window.tokens) - shared <= max_tokens:
            groups[-1].append(index)
            size += len(window.tokens) - shared
        else:
            groups.append([index])
            size = len(window.tokens)
    return [build_prefix_tree(windows, group) for group in groups]


def build_prefix_tree(windows: Sequence[Window], group: Sequence[int]) -> PrefixTree:
    """The tree of a group of windows, given by their places. In sorted order each shares most with the one before."""
    order = sorted(group, key=lambda index: windows[index].tokens.tolist())
    paths: list[np.ndarray] = []
    parts: list[np.ndarray] = []
    count = 0
    for place, index in enumerate(order):
        ids = windows[index].tokens
        shared = shared_prefix(windows[order[place - 1]].tokens, ids) if place else 0
        new = np.arange(count, count + len(ids) - shared)
        paths.append(np.concatenate([paths[-1][:shared], new]) if place else new)
        parts.append(ids[shared:])
        count += len(new)
    return PrefixTree(order, np.concatenate(parts), paths, [windows[index].targets for index in order])


def shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the longest common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


@torch.no_grad()
def score_trees(model: LanguageModel, trees: Sequence[PrefixTree]) -> Iterator[tuple[int, Score]]:
    """The score of each window of a batch of trees, with its place in the list of windows; in the model's precision."""
    device = next(model.parameters()).device
    longest = max(len(each.tokens) for each in trees)
    tokens_BT = np.zeros((len(trees), longest), dtype=np.int64)
    for row, each in enumerate(trees):
        tokens_BT[row, : len(each.tokens)] = each.tokens
    layout = None if all(len(each.paths) == 1 for each in trees) else attention_layout(trees, longest, device)
    h_BTD = model.hidden(torch.from_numpy(tokens_BT).to(device), layout=layout)
    windows = [window for each in trees for window in each.windows]
    targets = [ids for each in trees for ids in each.targets]
    at = [
        row * longest + path[len(path) - len(ids) :]
        for row, each in enumerate(trees)
        for path, ids in zip(each.paths, each.targets, strict=True)
    ]
    # Windows with a shared prefix may score the same token after the same state: the head runs once for such a pair.
    pairs, inverse = np.unique(np.stack([np.concatenate(at), np.concatenate(targets)]), axis=1, return_inverse=True)
    at_M, targets_M = torch.from_numpy(pairs).to(device)
    inverse = inverse.reshape(-1)  # numpy 2.0.0 gives (1, M), all others (M,)
    nll_M, greedy_M = (part.cpu()[inverse] for part in score_targets(model, h_BTD.flatten(0, 1)[at_M], targets_M))
    ends = np.cumsum([len(ids) for ids in targets])[:-1].tolist()
    for window, nll, greedy in zip(windows, nll_M.tensor_split(ends), greedy_M.tensor_split(ends), strict=True):
        yield window, Score(-float(nll.sum()), bool(greedy.all()))


def attention_layout(trees: Sequence[PrefixTree], longest: int, device: torch.device) -> AttentionLayout:
    """Each token at its depth, attending to its ancestors and itself (padding, up to `longest`, to itself alone)."""
    positions_BT = np.zeros((len(trees), longest), dtype=np.int64)
    mask_BTT = np.zeros((len(trees), longest, longest), dtype=bool)
    mask_BTT[:, range(longest), range(longest)] = True
    for row, each in enumerate(trees):
        for path in each.paths:
            positions_BT[row, path] = np.arange(len(path))
            mask_BTT[row, path[:, None], path[None, :]] = np.tri(len(path), dtype=bool)
    return AttentionLayout(torch.from_numpy(positions_BT).to(device), torch.from_numpy(mask_BTT).to(device))


def score_targets(model: LanguageModel, h_MD: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each target after its hidden state (float64, from an fp32 log-softmax), and whether it is the most
    likely token: of equally likely ones, the one that argmax takes. The head runs on a chunk of the states at a time.
    """
    nll, greedy = [], []
    chunk_size = max(1, LOGITS // model.embedding.num_embeddings)
    for h_CD, targets_C in zip(h_MD.split(chunk_size), targets_M.split(chunk_size), strict=True):
        logits_CV = at_least_fp32(model.head(h_CD))
        nll.append(cross_entropy(logits_CV, targets_C, reduction="none").double())
        best_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] == logits_CV.amax(-1)
        at_B = best_C.nonzero()[:, 0]  # argmax takes nearly as long as the loss: only where it may differ
        greedy.append(best_C.index_copy(0, at_B, logits_CV[at_B].argmax(-1) == targets_C[at_B]))
    return torch.cat(nll), torch.cat(greedy)
