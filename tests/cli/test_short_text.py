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
    dry = pkmlm("train", "a.yaml", "--dry-run")
    (warning,) = dry.stderr.splitlines()
    assert warning.startswith(f"warning: tokens: train has {count} tokens")
    assert warning.endswith("60 times")
    pkmlm("train", "a.yaml", "-o", "run", "-q")
    events = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    warned = [(event["step"], event["text"]) for event in events if event["event"] == "warn"]
    assert warned == [(0, warning.removeprefix("warning: "))]
    assert f"warning: step 0: {warned[0][1]}" in (tmp_path / "run/train.log").read_text()


@pytest.mark.parametrize(("words", "passes"), [(25, 30), (40, 0)])
def test_a_text_that_is_read_more_than_twenty_times_is_warned_of(tmp_path, monkeypatch, words, passes):
    """Of two sequences it is; of three, which are read twenty times, it is not."""
    monkeypatch.chdir(tmp_path)
    count = write(tmp_path, words)
    assert -(-count // 32) == (2 if passes else 3)
    warnings = pkmlm("train", "a.yaml", "--dry-run").stderr.splitlines()
    assert [f"{count} tokens" in line and line.endswith(f"{passes} times") for line in warnings] == [True] * bool(
        passes
    )
