"""The share of slots that the progress line tells."""

import pytest
import torch

from pkmlm.data.batches import Batches
from pkmlm.distributed import World
from pkmlm.model.memory.base import memories
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Memory, Model, Recipe, Train
from pkmlm.train import read_slots
from pkmlm.train.read_slots import RecentReads
from pkmlm.train.state import TrainState
from pkmlm.train.step import train_step
from tests.golden.test_curves import Stream

MEMORY = Memory(kind="product-key", layers=("2",), num_keys=32, heads=2, topk=2, key_dim=8)
MODEL = Model(dim=16, layers=2, heads=2, context=16, memory=MEMORY)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_a_window_is_so_many_steps(monkeypatch, recompute, micro_batch):
    monkeypatch.setattr(read_slots, "WINDOW", 3)
    train = Train(steps=9, batch_tokens=128, micro_batch=micro_batch, recompute=recompute)
    recipe = Recipe(model=MODEL, train=train)
    model = build_model(recipe, 40)
    state = TrainState(recipe, model, Batches(Stream(), 16, 8, 1), "fp32")
    (memory,) = memories(model)
    tap, reads, seen = memory.tap, RecentReads(memory, World()), []
    tap.register_forward_hook(lambda _, inputs, out: seen.append(out[0].flatten()))
    told = []
    for step in range(1, 7):
        train_step(state, step)
        if step in (1, 4):
            model.eval()
            model(torch.arange(16)[None])  # no training: nobody counts it
            seen.pop()
        told.append(reads.after_step())
    half = len(seen) // 2
    shares = [len(torch.cat(part).unique()) / tap.slots for part in (seen[:half], seen[half:])]
    first, second = (f"layer 2 reads {share:.0%}" for share in shares)
    assert told == ["", "", first, first, first, second]
