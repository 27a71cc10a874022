"""`pkmlm bench train`."""

import json

from tests.conftest import pkmlm


def test_bench_train_times_both_loops(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    half = ["-s", "train.micro_batch=4"]
    found = json.loads(pkmlm("bench", "train", recipe, *half, "--rounds", 2, "--steps", 2, "--json").stdout)
    assert len(found["loop"]) == len(found["bare"]) == 2
    assert min(found["loop"] + found["bare"]) > 0
    assert found["tokens"] == 256
    said = pkmlm("bench", "train", recipe, "--rounds", 1, "--steps", 1).stdout
    assert "times the bare loop" in said
    assert "data.dir is not set" in pkmlm("bench", "train", recipe, "-s", "data.dir=null", code=2).stderr


def test_bench_tokenize_times_both(novels):
    arguments = ["bench", "tokenize", novels / "train.txt", "--vocab-size", 600, "--rounds", 1]
    found = json.loads(pkmlm(*arguments, "--json").stdout)
    assert found["bytes"] == (novels / "train.txt").stat().st_size
    assert found["ratio"] == found["bare"][0] / found["whole"][0]
    assert "of the speed of the bare encoding" in pkmlm(*arguments).stdout
