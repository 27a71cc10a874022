"""Loss curves that must not move: 20 steps in float64 on one thread, for each kind of model.

A change of numbers that is meant is written down with `python tests/golden/test_curves.py`, and explained in the
commit.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pkmlm.memory.flat_key.spec import FlatKeySpec
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.key_spec import KeyedOptim
from pkmlm.memory.ngram.spec import NGramSpec
from pkmlm.memory.peer.spec import PEERSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.memory.spec import Spec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Model, Optim, Train
from pkmlm.train.step import TrainState, train_step
from tests.conftest import model_2019, optim_2019, recipe_2019

CURVES = Path(__file__).parent / "curves.json"


def with_memories(**memories: Spec) -> Model:
    return model_2019(dim=16, layers=2, heads=2, context=16, memories=memories)


KEYS = {"layers": ("2",), "num_keys": 8, "heads": 2, "topk": 4, "key_dim": 8, "optim": KeyedOptim(lr=4e-3)}
PLUS = {**KEYS, "layers": ("1+", "2"), "query_norm": "none", "value_dim": 12, "share_values": True}
MODELS = {
    "dense": with_memories(),
    "product-key": with_memories(pkm=ProductKeySpec(**KEYS)),
    "product-key mlp layer": with_memories(pkm=ProductKeySpec(**KEYS, query="mlp", query_norm="layer")),
    "flat-key": with_memories(flat=FlatKeySpec(**KEYS)),
    "memory-plus": with_memories(plus=ProductKeySpec(**PLUS, gate="silu", key_norm="rms")),
    "peer": with_memories(experts=PEERSpec(**KEYS)),
    "ngram": with_memories(ngrams=NGramSpec(layers=("1", "2"), heads=2, rows=31, row_dim=4)),
    "mixed": with_memories(
        ngrams=NGramSpec(layers=("1",), orders=(2,), heads=2, rows=31, row_dim=4),
        tables=HashSpec(layers=("1",), bits=4),
        pkm=ProductKeySpec(**{**KEYS, "layers": ("1+", "2")}, query="mlp"),
    ),
    "modern": Model(
        **{"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "context": 16, "smear": True},
        memories={"pkm": ProductKeySpec(**KEYS, query_norm="rms")},
    ),
    "hash": replace(with_memories(tables=HashSpec(bits=4)), positions="rotary", tie_embeddings=False, dropout=0.1),
}


class Stream:
    """A corpus made by arithmetic, so that the curves depend on no text, tokenizer or library version."""

    tokens, eos, has_answers = 5000, 1, False

    def read(self, start: int, stop: int) -> np.ndarray:
        place = np.arange(start, stop)
        return (place * place // 7 + place // 3) % 37 + 2

    def as_input(self, ids: np.ndarray) -> np.ndarray:
        return ids


def golden_optim(name: str) -> Optim:
    """Without Muon, whose products are in the precision that a CPU is fast in."""
    make = partial(Optim, matrices="adamw") if name == "modern" else optim_2019
    return make(lr=3e-3, schedule="cosine", warmup_steps=4, weight_decay=0.1)


def curve(name: str) -> list[float]:
    from pkmlm.data.batches import Batches

    recipe = recipe_2019(
        model=MODELS[name], optim=golden_optim(name), train=Train(steps=20, batch_tokens=128, micro_batch=4)
    )
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
