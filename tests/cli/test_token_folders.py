"""`data.dir` as a list: the folders of several machines are read as the folder that one machine writes."""

import json
import os
import shutil
import signal

import numpy as np
import pytest

from pkmlm.data.corpus import Corpus
from pkmlm.errors import UserError
from pkmlm.runs.directory import RunDirectory
from tests.conftest import after_step, pkmlm

SEPARATOR = ("--separator", r"\n\n")


@pytest.fixture(scope="module")
def made(novels, tokens, tmp_path_factory):
    """Three texts as `whole`, and as the folders `a` (without a valid split), `b` and `c`; and `other`'s tokenizer."""
    folder = tmp_path_factory.mktemp("folders")
    text = (novels / "train.txt").read_text()
    for name, start, stop in (("a", 0, 60_000), ("b", 60_000, 61_000), ("c", 61_000, 120_000)):
        (folder / f"{name}.txt").write_text(text[start:stop].strip())
    common = [*SEPARATOR, "--tokenizer", tokens / "tokenizer.model", "-q"]
    valid, test = novels / "valid.txt", novels / "test.txt"
    for name, words in (
        ("whole", [*(folder / f"{name}.txt" for name in "abc"), "--valid", test, valid, "--test", test]),
        ("a", [folder / "a.txt"]),
        ("b", [folder / "b.txt", "--valid", test]),
        ("c", [folder / "c.txt", "--valid", valid, "--test", test]),
    ):
        pkmlm("tokenize", *words, *common, "-o", folder / name)
    pkmlm("tokenize", folder / "a.txt", "--vocab-size", 500, "-o", folder / "other", "-q")
    return folder


def listed(folder, names="abc"):
    return [folder / name for name in names]


def setting(folder, names="abc"):
    return ["-s", f"data.dir=[{', '.join(map(str, listed(folder, names)))}]"]


@pytest.fixture(scope="module")
def runs(made, write_recipe):
    """The folder with two runs, on `whole` and on the list."""
    recipe = write_recipe(made, "product-key")
    pkmlm("train", recipe, "-s", f"data.dir={made / 'whole'}", "-o", made / "runs/whole", "-q")
    pkmlm("train", recipe, *setting(made), "-o", made / "runs/parts", "-q")
    return made / "runs"


# Reading


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_folders_are_read_one_after_the_other(made, split):
    whole, several = Corpus(made / "whole", split), Corpus(listed(made), split)
    for name in ("tokens", "documents", "words", "bytes", "eos", "vocab_size", "tokenizer_sha256", "splits"):
        assert getattr(several, name) == getattr(whole, name), name
    draw = np.random.default_rng(0)
    for _ in range(100):
        start, stop = sorted(draw.integers(0, whole.tokens + 1, 2).tolist())
        assert np.array_equal(several.read(start, stop), whole.read(start, stop))
        first, last = sorted(draw.integers(0, whole.documents + 1, 2).tolist())
        if first < last:
            assert np.array_equal(several.boundaries(first, last), whole.boundaries(first, last))
    for i in range(whole.documents):
        assert np.array_equal(several.document(i), whole.document(i))
    several.verify()


def test_a_list_of_one_folder_is_that_folder_and_the_order_counts(made):
    assert Corpus([made / "b"], "valid").hashes == Corpus(made / "b", "valid").hashes
    assert Corpus(listed(made, "ac"), "train").sha256 != Corpus(listed(made, "ca"), "train").sha256
    assert Corpus(listed(made, "ac"), "valid").sha256 == Corpus(made / "c", "valid").sha256
    with pytest.raises(UserError, match="test"):
        Corpus(listed(made, "ab"), "test")


def test_folders_of_two_tokenizers_are_refused_by_name(made, write_recipe):
    said = pkmlm("train", write_recipe(made, "dense"), *setting(made, ["a", "b", "other"]), "--dry-run", code=2).stderr
    assert str(made / "other") in said
    assert str(made / "a") in said
    assert str(made / "b") not in said


def test_damage_to_any_folder_is_found(made, write_recipe, tmp_path):
    for name in "ab":
        shutil.copytree(made / name, tmp_path / name)
    command = ("train", write_recipe(made, "dense"), *setting(tmp_path, "ab"), "--verify", "--dry-run")
    pkmlm(*command)
    for path in sorted((tmp_path / "b").iterdir()):
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert str(path) in pkmlm(*command, code=2).stderr
        path.write_bytes(whole)


# Using


def losses(run):
    return [line["loss"] for line in RunDirectory(run).metrics() if line["event"] in ("train", "valid")]


def weights(run):
    return (run / "checkpoints/step-00000030/weights.safetensors").read_bytes()


def test_training_on_folders_is_training_on_one(runs, made):
    assert losses(runs / "parts") == losses(runs / "whole")
    assert weights(runs / "parts") == weights(runs / "whole")
    facts = [json.loads((runs / name / "run.json").read_text()) for name in ("parts", "whole")]
    assert [each["data_dir"] for each in facts] == [[str(made / name) for name in "abc"], str(made / "whole")]


def test_stopped_and_resumed_is_the_same_run_to_the_bit(runs, made, write_recipe, tmp_path, monkeypatch):
    """Also where the folders have moved; other folders, or another order, are refused."""
    recipe = write_recipe(tmp_path, "product-key")
    after_step(monkeypatch, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    pkmlm("train", recipe, *setting(made), "-o", tmp_path / "run", code=75)
    for names in ("acb", "ab"):
        assert "tokens" in pkmlm("train", recipe, *setting(made, names), "-o", tmp_path / "run", code=2).stderr
    for name in "abc":
        shutil.copytree(made / name, tmp_path / name)
    pkmlm("train", recipe, *setting(tmp_path), "-o", tmp_path / "run")
    assert "resuming at step 3" in (tmp_path / "run/train.log").read_text()
    assert losses(tmp_path / "run") == losses(runs / "parts")
    assert weights(tmp_path / "run") == weights(runs / "parts")


def test_every_command_that_reads_tokens_takes_folders(runs, made, tmp_path):
    run = runs / "parts"
    told = [json.loads(pkmlm("eval", runs / name, "-q", "--json").stdout)["perplexity"] for name in ("parts", "whole")]
    assert told[0] == told[1]
    for command in (["usage-report"], ["slots"], ["probe"]):
        shown = [pkmlm(*command, runs / name, "-q").stdout.replace("whole", "parts") for name in ("parts", "whole")]
        assert shown[0] == shown[1] != ""
    assert "parts" in pkmlm("compare", run, runs / "whole").stdout
    for name in "abc":
        shutil.copytree(made / name, tmp_path / name)
    moved = [word for name in "abc" for word in ("--data", tmp_path / name)]
    assert json.loads(pkmlm("eval", run, "-q", "--json", *moved).stdout)["perplexity"] == told[0]
    assert "--data" in pkmlm("eval", run, *moved[:2], "--split", "train", code=2).stderr
    assert str(tmp_path / "no") in pkmlm("eval", run, *moved[:2], "--data", tmp_path / "no", code=2).stderr
    assert "memory" in pkmlm("cost", run / "recipe.yaml").stdout
    pkmlm("bench", "train", run / "recipe.yaml", "--rounds", 1)


def test_folders_are_found_from_any_directory(made, write_recipe, tmp_path, monkeypatch):
    """Next to the recipe, and from elsewhere where the run was trained."""
    for name in "bc":
        shutil.copytree(made / name, tmp_path / "project" / name)
    recipe = tmp_path / "project" / "own.yaml"
    recipe.write_text(f"base: {write_recipe(tmp_path, 'dense')}\ndata: {{dir: [b, c]}}\ntrain: {{steps: 2}}\n")
    monkeypatch.chdir(tmp_path)
    pkmlm("train", recipe, "-o", "next", "-q")
    monkeypatch.chdir(tmp_path / "project")
    pkmlm("train", recipe, "-o", "../here", "-q")
    monkeypatch.chdir(made)
    shutil.move(made / "b", made / "hidden")
    try:
        shown = [pkmlm("eval", tmp_path / run, "-q").stdout.partition("\n")[2] for run in ("next", "here")]
    finally:
        shutil.move(made / "hidden", made / "b")
    assert shown[0] == shown[1] != ""


def test_a_sweep_takes_folders(made, write_recipe, tmp_path):
    """Also where they have moved since its cells were trained."""
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"title: A width\nbase: {write_recipe(tmp_path, 'dense')}\nset: {{train.steps: 2, eval.every: 2}}\n"
        "axes: {width: {32: {model.dim: 32}}}\nmeasure: [perplexity]\n"
    )
    sweep = ("sweep", grid, "-o", tmp_path / "swept", "-q")
    pkmlm(*sweep, *setting(made, "bc"))
    for name in "bc":
        shutil.copytree(made / name, tmp_path / name)
    for results in (tmp_path / "swept").glob("cells/*/eval"):
        shutil.rmtree(results)
    (tmp_path / "swept/results.json").unlink()
    pkmlm(*sweep, *setting(tmp_path, "bc"))
    cells = json.loads((tmp_path / "swept/results.json").read_text())["cells"]
    assert [cell["test_token_ppl"] > 1 for cell in cells] == [True]
    assert "test" in pkmlm("sweep", grid, "-o", tmp_path / "new", *setting(made, "ab"), code=2).stderr
