"""`pkmlm bench`: every benchmark runs at a tiny size and prints what it says."""

import json

import pytest

from tests.conftest import pkmlm

TINY = ["--dim", 16, "--heads", 2, "--topk", 4, "--key-dim", 8, "--tokens", 8, "--rounds", 1]


def test_bench_memory_times_layers_side_by_side():
    found = json.loads(pkmlm("bench", "memory", *TINY, "--slots", "64,256", "--json").stdout)
    assert found["shape"] == {"dim": 16, "heads": 2, "topk": 4, "key_dim": 8, "tokens": 8}
    assert [size["slots"] for size in found["sizes"]] == [64, 256]
    for size in found["sizes"]:
        assert list(size["layers"]) == ["pkmlm", "plain-adam", "plain-fused", "plain-sparse", "ffn"]
        step = size["layers"]["plain-adam"]["step"]
        assert set(step) == {"seconds", "median", "ratio", "bytes_per_second", "share_of_copy"}
        assert step["ratio"] == pytest.approx(step["median"] / size["layers"]["pkmlm"]["step"]["median"])
        assert size["layers"]["ffn"]["step"]["bytes_per_second"] is None
        assert size["copy_bytes_per_second"] > 1e8
    assert found["machine"]["torch"]
    assert found["machine"]["cpu"]


def test_bench_memory_prints_tables_and_growth():
    said = pkmlm("bench", "memory", *TINY, "--slots", "64,256,64", "--only", "pkmlm").stdout
    assert "256 slots of width 16, 8 tokens reading 2 x 4 each" in said
    assert "Step, 256 over 64 slots: pkmlm " in said
    assert "plain" not in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--slots", "17k"], "'17k'"),
        (["--slots", "65000"], "'65000'"),
        (["--only", "pkmlm,plain"], "'plain'"),
        (["--slots", "64"], "--topk"),
        (["--slots", "1k", "--key-dim", "7"], "--key-dim"),
    ],
)
def test_bench_memory_refuses(arguments, named):
    assert named in " ".join(pkmlm("bench", "memory", *arguments, code=2).stderr.split())


def test_bench_generate_times_models_side_by_side(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    short = ["--rounds", 1, "--tokens", 2]
    found = json.loads(pkmlm("bench", "generate", recipe, *short, "--slots", "64,256", "--json").stdout)
    models = {model["name"]: model for model in found["models"]}
    assert list(models) == ["dense-2L", "memory-64", "memory-256", "dense-4L", "hash-2L"]
    assert (found["decoded"], found["scored"]) == (2, 32)
    assert 1e8 < found["copy_bytes_per_second"] < 1e14
    for model in models.values():
        assert [(time["what"], time["batch"]) for time in model["times"]] == [
            (what, batch) for what in ("decode", "score") for batch in (1, 8)
        ]
        assert all(time["tokens_per_second"] > 0 for time in model["times"])
    assert models["hash-2L"]["flops_per_token"] < models["dense-2L"]["flops_per_token"]
    said = pkmlm("bench", "generate", recipe, *short, "--only", "double,dense", "--batch", 2).stdout
    assert said.index("dense-2L") < said.index("dense-4L")
    assert "memory-" not in said
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "One token" not in said, "a batch of two reads the dense weights for both"
    said = pkmlm("bench", "generate", recipe, *short, "--only", "memory", "--batch", 1).stdout
    (row,) = [line.split() for line in said[said.index("One token") :].splitlines() if line.startswith("memory-")]
    assert float(row[1]) == round(models["memory-256"]["bytes_read_per_token"] / 1e6, 1) > 0
    hashed = write_recipe(tmp_path, "hash")
    found = json.loads(pkmlm("bench", "generate", hashed, *short, "--only", "memory", "--json").stdout)
    assert [model["name"] for model in found["models"]] == ["memory-512"], "8 tables of 64 rows"
    dense = write_recipe(tmp_path, "dense")
    assert "model.memories" in pkmlm("bench", "generate", dense, "--only", "memory", code=2).stderr
    assert "'fast'" in pkmlm("bench", "generate", hashed, "--only", "fast", code=2).stderr
    assert "--slots" in pkmlm("bench", "generate", hashed, "--slots", "64", code=2).stderr
    assert "--batch" in pkmlm("bench", "generate", hashed, "--batch", "0", code=2).stderr


def test_bench_train_needs_no_data(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, "product-key")
    anywhere = ["-s", "data.dir=null", "-s", "model.vocab_size=50", "--rounds", 1]
    found = json.loads(pkmlm("bench", "train", recipe, *anywhere, "--json").stdout)
    assert [model["kind"] for model in found["models"]] == ["dense", "memory", "double", "hash"]
    for model in found["models"]:
        assert [(time["what"], time["batch"]) for time in model["times"]] == [
            ("forward", 4),
            ("step", 8),
            ("decode", 1),
        ]
        assert all(time["median"] > 0 for time in model["times"])
    assert found["precision"] == "fp32"
    said = pkmlm("bench", "train", recipe, *anywhere, "--only", "hash").stdout
    assert "one token of one sequence, fp32" in said
    assert "One token of one sequence; a copy: " in said
    assert "model.vocab_size" in pkmlm("bench", "train", recipe, "-s", "data.dir=null", code=2).stderr
