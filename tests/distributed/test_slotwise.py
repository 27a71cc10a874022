"""Slot-wise fine-tuning on several ranks: they count, choose and move what one process does."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from pkmlm.measure.background import Background
from tests.conftest import given, pkmlm
from tests.distributed.test_runs import losses, tensors

LAYOUTS = {"data": [], "columns": ["parallel.memory=2"]}


@pytest.fixture(scope="module")
def background(trained, ranks, tmp_path_factory):
    """A function that counts the background of a tiny run on two ranks."""
    folder = tmp_path_factory.mktemp("backgrounds")

    def count(kind: str) -> Path:
        if not (folder / kind).exists():
            ranks.pkmlm(2, "usage-report", trained(kind), "--background", folder / kind, "--batches", 21)
        return folder / kind

    return count


def test_two_ranks_count_what_one_does(trained, background, tmp_path):
    pkmlm("usage-report", trained("product-key"), "--background", tmp_path / "one", "--batches", 21)
    one, two = Background.read(tmp_path / "one"), Background.read(background("product-key"))
    assert one.batches == 21
    assert one.digest == two.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "optimizer"),
    [("memory-plus", "plus", "row-adam"), ("peer", "experts", "row-sgd")],
)
def test_two_ranks_move_what_one_does_and_go_on_to_the_bit(kind, name, optimizer, trained, background, ranks, tmp_path):
    start = trained(kind)
    keys = [f"train.init_from={start}", "train.only=values", "finetune.slots=tfidf", "finetune.top=7", "train.steps=6"]
    optim = f"model.memories.{name}.optim"
    keys += [f"finetune.background={background(kind)}", f"{optim}.optimizer={optimizer}", f"{optim}.lr=2e-2"]
    keys += [f"{optim}.clip=0.05", "checkpoint.every=3", "eval.every=3", "train.micro_batch=2"]
    words = ["train", start / "recipe.yaml", *given(*keys), "-o"]
    pkmlm(*words, tmp_path / "one", "-q")
    before, one = tensors(start, 30), tensors(tmp_path / "one", 6)
    tables = [name for name in one if name.endswith(".weight_KD")]
    assert len(tables) == (2 if kind == "peer" else 1)
    for layout, more in LAYOUTS.items():
        run = tmp_path / layout
        ranks.pkmlm(2, *words, run, *given(*more))
        assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        assert len(list((run / "checkpoints/step-00000006").glob("weights*"))) == (1 if layout == "data" else 3)
        if layout == "data":
            two = tensors(run, 6)
            for name in tables:
                moved = [(each[name] != before[name]).any(1) for each in (one, two)]
                assert np.array_equal(*moved)
                assert 7 <= moved[0].sum() <= 6 * 7
                np.testing.assert_allclose(two[name], one[name], rtol=1e-4, atol=1e-6)
            for name in two.keys() & before.keys() - set(tables):
                assert "|" in name or np.array_equal(two[name], before[name]), name
        shutil.copytree(run, tmp_path / "half")
        shutil.rmtree(tmp_path / "half/checkpoints/step-00000006")
        (tmp_path / "half/done").unlink()
        ranks.pkmlm(2, *words, tmp_path / "half", *given(*more))
        for path in (run / "checkpoints/step-00000006").glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "half/checkpoints/step-00000006" / path.name).read_bytes(), path
        shutil.rmtree(tmp_path / "half")
