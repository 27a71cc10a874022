"""Continuations cut into windows, trees of windows, and their scores against reading each window by itself."""

import numpy as np
import pytest
import torch

from pkmlm.evaluate import likelihood
from pkmlm.evaluate.likelihood import (
    Window,
    attention_layout,
    build_prefix_tree,
    build_prefix_trees,
    continuation_windows,
    score_targets,
    score_trees,
)
from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Train
from tests.conftest import model_2019, recipe_2019

KEYS = {"num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8}

MODELS = {
    "dense": {},
    "rotary": {"positions": "rotary", "residual": "parallel"},
    "product-key": {"memories": {"pkm": ProductKeySpec(layers=("2",), **KEYS)}},
    "flat-key": {"memories": {"flat": FlatKeySpec(layers=("1+",), **KEYS)}},
    "hash": {"memories": {"tables": HashSpec(bits=4)}},
}


def model_of(kind: str) -> torch.nn.Module:
    model = model_2019(dim=16, layers=2, heads=2, context=12, **MODELS[kind])
    built = build_model(recipe_2019(model=model, train=Train(batch_tokens=24, micro_batch=2)), 30).eval()
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "attention.qkv" in name:
                parameter.mul_(20)  # a new model attends to all alike, whatever their positions
    return built


def cut(before: int, continuation: int, context: int) -> list[tuple[list[int], list[int]]]:
    ids = list(range(before + continuation))
    found = continuation_windows(ids[:before], ids[before:], context)
    return [(window.tokens.tolist(), window.targets.tolist()) for window in found]


def test_windows_of_a_continuation_by_hand():
    assert cut(2, 2, 4) == [([0, 1, 2], [2, 3])]
    assert cut(3, 2, 4) == [([0, 1, 2, 3], [3, 4])]
    assert cut(5, 2, 4) == [([2, 3, 4, 5], [5, 6])]  # the beginning is lost
    assert cut(2, 4, 4) == [([1, 2, 3, 4], [2, 3, 4, 5])]
    assert cut(1, 5, 4) == [([0, 1], [1, 2]), ([0, 1, 2, 3], [3, 4]), ([1, 2, 3, 4], [5])]
    assert cut(2, 6, 4) == [([0, 1, 2], [2, 3]), ([1, 2, 3, 4], [4, 5]), ([3, 4, 5, 6], [6, 7])]  # by half a context
    assert cut(3, 0, 4) == []


@pytest.mark.parametrize("context", [1, 2, 5, 8])
def test_every_token_of_a_continuation_is_scored_once(context):
    for before in range(1, 12):
        for length in range(1, 30):
            scored = []
            for tokens, targets in cut(before, length, context):
                assert len(tokens) <= context
                assert tokens[len(tokens) - len(targets) :] == [target - 1 for target in targets]
                scored += targets
            assert scored == list(range(before, before + length))


def windows_of(texts: list[list[int]], scored: int = 2) -> list[Window]:
    return [Window(np.array(ids[:-1]), np.array(ids[-scored:])) for ids in texts]


QUESTIONS = windows_of(
    [
        *([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 9, 9, 9]),  # three choices, two of which differ at the end
        *([7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 2, 3]),  # the same twice
        *([20, 21, 22], [11, 12, 13, 14, 15, 16, 17, 18, 19]),  # nothing in common
    ]
)


def test_beginnings_stand_in_a_tree_once():
    trees = build_prefix_trees(QUESTIONS, 100)
    assert [sorted(each.windows) for each in trees] == [[0, 1, 2], [3, 4], [5], [6]]
    assert sorted(trees[0].tokens.tolist()) == [1, 2, 3, 4, 9, 9]
    assert len(trees[1].tokens) == 5
    for each in trees:
        for window, path in zip(each.windows, each.paths, strict=True):
            assert each.tokens[path].tolist() == QUESTIONS[window].tokens.tolist()


def test_a_tree_ends_where_it_would_grow_too_large():
    assert [each.windows for each in build_prefix_trees(QUESTIONS[:3], 5)] == [[0, 1], [2]]


def test_padding_sees_itself():
    layout = attention_layout(build_prefix_trees(QUESTIONS, 100), 8, torch.device("cpu"))
    assert layout.mask_BTT.any(-1).all()  # what sees nothing is NaN in some of torch's kernels, and spoils the rest
    assert layout.positions_BT.tolist()[0] == [0, 1, 2, 3, 3, 4, 0, 0]


@pytest.mark.parametrize("kind", MODELS)
def test_a_tree_scores_as_its_windows_do_one_by_one(kind):
    model = model_of(kind)
    found = dict(score_trees(model, build_prefix_trees(QUESTIONS, 100)))
    alone = dict(score_trees(model, [build_prefix_tree(QUESTIONS, [index]) for index in range(len(QUESTIONS))]))
    assert sorted(found) == sorted(alone) == list(range(len(QUESTIONS)))
    with torch.no_grad():
        for index, window in enumerate(QUESTIONS):
            logits = model(torch.from_numpy(window.tokens)[None])[0, -len(window.targets) :]
            expected = logits.double().log_softmax(-1)[range(len(window.targets)), window.targets].sum().item()
            greedy = bool((logits.argmax(-1).numpy() == window.targets).all())
            for score in (found[index], alone[index]):
                assert score.log_likelihood == pytest.approx(expected, abs=1e-5)
                assert score.greedy == greedy


def test_scores_do_not_depend_on_the_shape_of_numpys_inverse(monkeypatch):
    model, trees, unique = model_of("dense"), build_prefix_trees(QUESTIONS, 100), np.unique
    expected = dict(score_trees(model, trees))

    def as_in_numpy_2_0_0(*arguments, **options):
        values, inverse = unique(*arguments, **options)
        return values, inverse.reshape(1, -1)

    monkeypatch.setattr(np, "unique", as_in_numpy_2_0_0)
    assert dict(score_trees(model, trees)) == expected


def test_greedy_targets_are_known_as_such():
    model = model_of("dense")
    ids = [3, 4]
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 30]
    found = dict(score_trees(model, build_prefix_trees(windows_of([ids, other], 3), 100)))
    assert (found[0].greedy, found[1].greedy) == (True, False)


def test_one_of_equally_likely_tokens_is_greedy():
    model = model_of("dense")
    with torch.no_grad():
        model.embedding.weight.zero_()  # also the head's
    targets_M = torch.arange(30)
    greedy_M = score_targets(model, torch.randn(30, 16), targets_M)[1]
    assert torch.equal(greedy_M, targets_M == torch.zeros(30).argmax())


def test_the_head_in_parts_gives_the_same(monkeypatch):
    model = model_of("dense")
    h_MD, targets_M = torch.randn(7, 16), torch.arange(7)
    whole = score_targets(model, h_MD, targets_M)
    monkeypatch.setattr(likelihood, "LOGITS", 60)
    parts = score_targets(model, h_MD, targets_M)
    assert whole[0].dtype == torch.float64
    assert torch.allclose(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
