"""Loss curves that must not move: 20 steps in float64 on one thread, for each kind of model.

A change of numbers that is meant is written down with `python tests/golden/test_curves.py`, and explained in the
commit.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Hash, Memory, Model, NGram, Optim, Recipe, Train, ValuesOptim
from pkmlm.train.step import TrainState, train_step

CURVES = Path(__file__).parent / "curves.json"
SMALL = {"dim": 16, "layers": 2, "heads": 2, "context": 16}
KEYS = {"layers": ("2",), "num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8}
MODELS = {
    "dense": Model(**SMALL),
    "product-key": Model(**SMALL, memory=Memory(kind="product-key", **KEYS)),
    "product-key mlp layer": Model(**SMALL, memory=Memory(kind="product-key", query="mlp", query_norm="layer", **KEYS)),
    "flat-key": Model(**SMALL, memory=Memory(kind="flat-key", **KEYS)),
    "memory-plus": Model(
        **SMALL,
        memory=Memory(
            **{"kind": "product-key", **KEYS, "layers": ("1+", "2")},
            share_values=True,
            gate="silu",
            value_dim=12,
            key_norm="rms",
            query_norm="none",
        ),
    ),
    "peer": Model(**SMALL, memory=Memory(kind="peer", **KEYS)),
    "ngram": Model(**SMALL, ngram=NGram(layers=(1, 2), heads=2, rows=31, row_dim=4)),
    "hash": Model(
        **SMALL, projections="hash", hash=Hash(bits=4), positions="rotary", tie_embeddings=False, dropout=0.1
    ),
}


class Stream:
    """A corpus made by arithmetic, so that the curves depend on no text, tokenizer or library version."""

    tokens, eos = 5000, 1

    def read(self, start: int, stop: int) -> np.ndarray:
        place = np.arange(start, stop)
        return (place * place // 7 + place // 3) % 37 + 2


def curve(name: str) -> list[float]:
    from pkmlm.data.batches import Batches

    optim = Optim(lr=3e-3, schedule="cosine", warmup_steps=4, weight_decay=0.1, values=ValuesOptim(lr=4e-3))
    recipe = Recipe(model=MODELS[name], optim=optim, train=Train(steps=20, batch_tokens=128, micro_batch=4))
    model = build_model(recipe, 40).double()
    batches = Batches(Stream(), 16, recipe.sequences, recipe.train.seed)
    state = TrainState(recipe, model, batches, "fp32")
    return [train_step(state, step).loss for step in range(1, 21)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_curve_has_not_moved(name):
    assert curve(name) == pytest.approx(json.loads(CURVES.read_text())[name], rel=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    CURVES.write_text(json.dumps({name: curve(name) for name in MODELS}, indent=1) + "\n")
