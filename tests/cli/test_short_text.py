"""`pkmlm train` on a text that is so short that it is read again and again."""

import json

import pytest

from tests.conftest import pkmlm

RECIPE = """
data: {dir: tokens}
model: {dim: 32, layers: 2, heads: 2, context: 32}
optim: {warmup_steps: 1}
train: {steps: 30, batch_tokens: 64, micro_batch: 2}
log: {every: 10}
"""


def write(folder, words):
    """Tokens of a text of so many words, and a recipe of 60 sequences for them; how many tokens there are."""
    (folder / "a.txt").write_text("a whale and the sea " * 20)
    (folder / "b.txt").write_text("sea " * words)
    (folder / "a.yaml").write_text(RECIPE)
    pkmlm("tokenize", "a.txt", "--vocab-size", 280, "-o", "model")
    kept = ("--tokenizer", "model/tokenizer.model", "-o", "tokens")
    result = pkmlm("tokenize", "b.txt", "--valid", "a.txt", *kept, "--json").stdout
    return json.loads(result)["splits"]["train"]["tokens"]


def test_a_text_of_less_than_one_sequence_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count = write(tmp_path, 4)
    assert count < 32
    told = f"tokens: train has {count} tokens, less than one sequence (model.context: 32): 30 steps read them 60 times"
    dry = pkmlm("train", "a.yaml", "--dry-run")
    assert dry.stderr == f"warning: {told}\n"
    assert f" 60.00 epochs of {count}" in " ".join(dry.stdout.split()), "the same count"
    one = pkmlm("train", "a.yaml", "--dry-run", "-s", "train.steps=1", "-s", "train.batch_tokens=1024")
    assert one.stderr == f"warning: {told.replace('30 steps read them 60', 'one step reads them 32')}\n"
    pkmlm("train", "a.yaml", "-o", "run", "-q")
    warned = [
        event
        for event in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if event["event"] == "warn"
    ]
    assert [(event["step"], event["text"]) for event in warned] == [(0, told)]
    assert f"warning: step 0: {told}" in (tmp_path / "run/train.log").read_text()


@pytest.mark.parametrize(("words", "passes"), [(25, 30), (40, 0)])
def test_a_text_that_is_read_more_than_twenty_times_is_warned_of(tmp_path, monkeypatch, words, passes):
    """Of two sequences it is; of three, which are read twenty times, it is not."""
    monkeypatch.chdir(tmp_path)
    count = write(tmp_path, words)
    assert -(-count // 32) == (2 if passes else 3)
    told = f"warning: tokens: train has {count} tokens: 30 steps read them {passes} times\n"
    assert pkmlm("train", "a.yaml", "--dry-run").stderr == told * bool(passes)
