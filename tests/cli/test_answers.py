"""Rows of prompts and answers: what is learnt, what is scored, and which answers are right."""

import json
import math
import shutil
from statistics import fmean

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import cross_entropy

from pkmlm import load_run
from pkmlm.bench.steps import step_amounts, timed_part
from pkmlm.data.batches import IGNORED, Batches, cut_length, mean_read
from pkmlm.data.corpus import Corpus
from pkmlm.measure.background import Background
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import perplexities
from pkmlm.sweep.budget import relative_steps
from pkmlm.sweep.cells import Cells
from pkmlm.sweep.grid import read_grid
from pkmlm.sweep.run import with_vocab_sizes
from tests.conftest import given, pkmlm

TOWNS = ("Paris", "London", "Rome", "Oslo", "Bern", "Wien", "Kiev", "Riga", "Lima", "Cairo", "Delhi", "Tokyo")
ROWS = [{"q": f"Where does number {i} live?", "a": f" In {town}.", "n": i} for i, town in enumerate(TOWNS)]


@pytest.fixture(scope="module")
def facts(tokens, tmp_path_factory):
    """A folder of tokens of prompts and answers."""
    folder = tmp_path_factory.mktemp("facts")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["--prompt", "q", "--answer", "a", "--tokenizer", tokens / "tokenizer.model", "-o", folder / "tokens"]
    pkmlm("tokenize", folder / "rows.jsonl", "--valid", folder / "rows.jsonl", *words)
    return folder / "tokens"


def parts_of(facts):
    """The ids of each row's prompt and answer, the end included."""
    tokenizer = load_tokenizer(facts)
    return [(tokenizer.encode(row["q"]), [*tokenizer.encode(row["a"]), tokenizer.eos]) for row in ROWS]


def load_tokenizer(facts):
    from pkmlm.data.corpus import open_tokenizer

    return open_tokenizer([facts])


def test_only_answers_are_targets(facts):
    corpus, parts = Corpus(facts, "train"), parts_of(facts)
    stream = [token for prompt, answer in parts for token in (*prompt, *answer)]
    learnt = [flag for prompt, answer in parts for flag in (*[False] * len(prompt), *[True] * len(answer))]
    assert corpus.read(0, corpus.tokens).tolist() == stream
    for start in range(0, corpus.tokens, 7):
        for stop in range(start, corpus.tokens, 11):
            assert corpus.learnt(start, stop).tolist() == learnt[start:stop]
    batches = Batches(corpus, 16, 4, seed=1)
    steps = -(-batches.pieces // 4)
    seen = 0
    for step in range(1, 2 * steps + 1):  # the second epoch is shuffled
        batch = batches.micro_batch(step, 0, 4)
        kept = batch.targets_BT != IGNORED
        assert int(kept.sum()) == batches.scored(step)
        seen += int(kept.sum())
        assert batch.tokens_BT.shape == (4, 16)
    assert seen in range(2 * sum(learnt) - 64, 2 * sum(learnt) + 65)
    assert corpus.words == sum(len(row["a"].split()) + 1 for row in ROWS)  # a word more: it begins with a space
    assert corpus.bytes == sum(len(row["a"]) for row in ROWS)


def test_a_row_in_each_sequence(facts, tmp_path):
    corpus, parts = Corpus(facts, "train"), parts_of(facts)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"data: {{dir: {facts}, pack: false}}\nmodel: {{context: 64}}\n")
    recipe = load_recipe(path, ["train.batch_tokens=256", "train.micro_batch=4"])
    batches = Batches.of(corpus, recipe)
    assert batches.pieces == len(ROWS)
    found, read = [], []
    for step in range(1, 1 + len(ROWS) // 4):
        batch, held = batches.micro_batch(step, 0, 4), 0
        assert int((batch.targets_BT != IGNORED).sum()) == batches.scored(step)
        for tokens, targets in zip(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), strict=True):
            scored = [at for at, target in enumerate(targets) if target != IGNORED]
            answer = [targets[at] for at in scored]
            assert tokens[0] == corpus.begin
            found.append((tokens[1 : scored[0] + 1], answer))
            assert set(tokens[scored[-1] + 1 :]) <= {corpus.begin}
            held += scored[-1] + 1
        assert batches.read(step) == held
        read.append(held)
        longest = max(at + 1 for row in batch.targets_BT.tolist() for at, target in enumerate(row) if target != IGNORED)
        assert longest <= batch.tokens_BT.shape[1] < longest + 8
        ranks = [batches.micro_batch(step, 0, 2, rank, 2) for rank in range(2)]  # equally long sequences on each
        assert torch.equal(torch.cat([each.tokens_BT for each in ranks]), batch.tokens_BT)
    assert sorted(found) == sorted(parts)
    assert batches.mean_read == mean_read(recipe) == pytest.approx(fmean(read))
    mean = cut_length(fmean(read) / 4, 64)
    timed = timed_part(recipe, 600, mean_read(recipe))
    assert (timed.model.context, timed.train.batch_tokens) == (mean, 4 * mean), "of sequences that are not as long"
    assert mean < 64
    short = Batches.of(corpus, load_recipe(path, ["model.context=8", "train.batch_tokens=128", "train.micro_batch=16"]))
    for targets in short.micro_batch(1, 0, 16).targets_BT.tolist():  # the ends of rows that are too long
        assert targets[-1] == corpus.eos
    assert short.read(1) <= 16 * 8


@pytest.mark.parametrize("over", ["tokens", "operations"])
def test_equal_budgets_are_of_what_is_read(facts, write_recipe, tmp_path, over):
    """Both contexts hold all rows, so that a step reads as much, whatever a full batch would be."""
    write_recipe(tmp_path, "dense")
    axes = "{size: {long: {}, longer: {model.context: 128, train.batch_tokens: 1024}, half: {train.batch_tokens: 256}}}"
    keys = f"{{data.dir: {facts}, data.pack: false, model.context: 64, train.batch_tokens: 512, train.micro_batch: 4}}"
    (tmp_path / "grid.yaml").write_text(f"base: dense.yaml\nset: {keys}\naxes: {axes}\nequal: [{over}]\n")
    cells = Cells(grid := read_grid(tmp_path / "grid.yaml")[0], tmp_path / "dense.yaml")
    relative = relative_steps(with_vocab_sizes(cells, None), grid, None, lambda line: None, retime=False)
    assert {point[0]: steps for (point, _), steps in relative.items()} == {"long": 1.0, "longer": 1.0, "half": 2.0}


def test_answers_are_learnt_scored_and_counted(facts, tokens, write_recipe, tmp_path):
    run = tmp_path / "run"
    keys = [f"data.dir={facts}", "data.pack=false", "train.steps=120", "eval.every=60", "train.batch_tokens=512"]
    keys += ["optim.lr=1e-2", "eval.tokens=null", "model.context=64", "train.micro_batch=8"]
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", run, *given(*keys), "-q")
    trained = RunDirectory(run)
    batches = Batches.of(Corpus(facts, "train"), trained.recipe())
    lines = [line for line in trained.metrics() if line["event"] == "train"]
    seconds = sum(batches.read(line["step"]) / line["tokens_per_second"] for line in lines)
    assert seconds == pytest.approx(trained.facts()["seconds"], rel=0.01)
    assert step_amounts("tokens", {"run": trained}, print) == {"run": batches.mean_read}
    dry = pkmlm("train", tmp_path / "dense.yaml", "--dry-run", *given(*keys)).stdout
    assert f" {round(120 * batches.mean_read):,} tokens" in dry
    record = json.loads(pkmlm("eval", run, "--split", "valid", "--answers", "--json").stdout)
    loaded, nll, count = load_run(run, "latest"), 0.0, 0
    for prompt, answer in parts_of(facts):
        ids = torch.tensor([loaded.prefix, *prompt, *answer[:-1]])
        logits = loaded.model(ids[None, :-1])[0, -(len(answer) - 1) :]
        nll += float(cross_entropy(logits, ids[-(len(answer) - 1) :], reduction="sum"))
        count += len(answer) - 1
    found = record["perplexity"]
    assert (found["tokens"], found["bytes"]) == (count, sum(len(row["a"]) for row in ROWS))
    assert found["nll"] == pytest.approx(nll, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nll / found["bytes"] / math.log(2), rel=1e-5)
    assert record["answers"] == {"n": len(ROWS), "exact_match": 1.0}  # it has learnt them
    books = ("--data", facts, "--data", tokens, "--split", "valid")  # whose documents ask nothing
    assert json.loads(pkmlm("eval", run, *books, "--answers", "--json").stdout)["answers"] == record["answers"]
    samples = tmp_path / "samples.jsonl"
    assert "100.0%" in pkmlm("eval", run, "--split", "valid", "--answers", "--log-samples", samples).stdout
    said = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [(each["prompt"], each["answer"], each["given"]) for each in said] == [
        (row["q"], row["a"], row["a"]) for row in ROWS
    ]


def test_other_questions_are_no_score_of_the_runs_own_text(trained, facts, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained("dense"), run, ignore=shutil.ignore_patterns("eval"))
    own = json.loads(pkmlm("eval", run, "--split", "valid", "--json").stdout)
    for more in ([], ["--answers"]):
        told = json.loads(pkmlm("eval", run, "--data", facts, "--split", "valid", *more, "--json").stdout)
        assert told["perplexity"]["split"] == f"valid of {facts}"
    kept = RunDirectory(run).evaluations()
    assert len(kept) == 3
    assert [each["perplexity"] for each in perplexities(kept, "valid", own["stride"])] == [own["perplexity"]]


def test_tables_and_wrong_rows(facts, tmp_path):
    rows = pyarrow.table({"q": [row["q"] for row in ROWS], "a": [row["a"] for row in ROWS]})
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    words = ["--prompt", "q", "--answer", "a", "--tokenizer", facts / "tokenizer.model"]
    said = pkmlm("tokenize", tmp_path / "rows.parquet", *words, "-o", tmp_path / "tokens", "--json").stdout
    answers = [len(answer) - 1 for _, answer in parts_of(facts)]
    expected = sum(len(row["a"]) for row in ROWS) / sum(answers)
    assert json.loads(said)["splits"]["train"]["bytes_per_token"] == pytest.approx(expected)
    one, other = Corpus(facts, "train"), Corpus(tmp_path / "tokens", "train")
    assert one.sha256 == other.sha256
    assert np.array_equal(one.answer_lengths(0, len(ROWS)), other.answer_lengths(0, len(ROWS)))
    (tmp_path / "bad.jsonl").write_text('{"q": "a", "a": "b"}\n\n{"q": "a", "a": ""}\n')
    assert "bad.jsonl:3: " in pkmlm("tokenize", tmp_path / "bad.jsonl", *words, "-o", tmp_path / "x", code=2).stderr
    (tmp_path / "text.txt").write_text("text")
    assert "--answer" in pkmlm("tokenize", tmp_path / "text.txt", *words, "-o", tmp_path / "x", code=2).stderr
    assert "--answer" in pkmlm("tokenize", tmp_path / "bad.jsonl", *words[:2], "-o", tmp_path / "x", code=2).stderr
    assert not (tmp_path / "x").exists()
    lengths = tmp_path / "tokens" / "train.answers"
    lengths.write_bytes(lengths.read_bytes()[:-1] + b"\1")
    with pytest.raises(Exception, match=r"train\.answers"):
        Corpus(tmp_path / "tokens", "train").answer_lengths(0, 1)


def test_reports_see_what_is_scored(facts, write_recipe, tmp_path):
    """Prompts are read, but not measured: by probes, backgrounds, and the contexts of slots."""
    run = tmp_path / "run"
    keys = [f"data.dir={facts}", "data.pack=false", "train.steps=40", "eval.every=0", "train.batch_tokens=512"]
    keys += ["optim.lr=1e-2", "model.context=64", "train.micro_batch=8"]
    pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", run, *given(*keys), "-q")
    split = ["--split", "valid"]
    scored = json.loads(pkmlm("eval", run, *split, "--json").stdout)["perplexity"]
    probed = json.loads(pkmlm("probe", run, *split, "--json").stdout)
    assert probed["tokens"] == scored["tokens"]
    assert probed["real"]["nats"] == pytest.approx(scored["nll"] / scored["tokens"], rel=1e-5)
    file, size = tmp_path / "background.npz", 8
    pkmlm("usage-report", run, *split, "--background", file, "--batches", 1000, "--batch-tokens", size)
    counted = Background.read(file)
    assert counted.batches <= scored["tokens"] / size
    assert all(reads.sum() == scored["tokens"] * 2 * 4 for reads in counted.reads.values())  # heads, top-k
    answers = {number: set(answer) for number, (_, answer) in enumerate(parts_of(facts))}
    pieces = load_run(run, "latest").tokenizer.piece
    described = json.loads(pkmlm("slots", run, *split, "--top", 20, "--json").stdout)
    contexts = [context for slot in described["slots"] for context in slot["contexts"]]
    assert contexts
    for context in contexts:
        assert context["next"] in {pieces(each) for each in answers[context["document"]]}


def test_what_cannot_be_answered_is_told_at_once(facts, tokens, write_recipe, tmp_path):
    keys = ["train.steps=1", "eval.every=0", "model.context=64"]
    plain, linear = tmp_path / "plain", tmp_path / "linear"
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", plain, *given(*keys), "-q")
    asked = pkmlm("eval", plain, "--answers", code=2)
    assert (asked.stdout, "has no prompts" in asked.stderr) == ("", True)
    (tmp_path / "null.jsonl").write_text(json.dumps({"q": None, "a": "Nobody asked."}) + "\n")
    words = ["--prompt", "q", "--answer", "a", "--tokenizer", tokens / "tokenizer.model", "-o", tmp_path / "null"]
    pkmlm("tokenize", tmp_path / "null.jsonl", "--test", tmp_path / "null.jsonl", *words)
    assert "has no prompts" in pkmlm("eval", plain, "--data", tmp_path / "null", "--answers", code=2).stderr
    untaught = ["--data", facts, "--split", "valid", "--answers", "--log-samples", tmp_path / "untaught.jsonl"]
    asked = pkmlm("eval", plain, *untaught, "--json")
    assert json.loads(asked.stdout)["answers"] == {"n": len(ROWS), "exact_match": 0.0}
    for row, line in zip(ROWS, (tmp_path / "untaught.jsonl").read_text().splitlines(), strict=True):
        said = json.loads(line)
        assert (said["prompt"], said["answer"], said["exact_match"]) == (row["q"], row["a"], False)
        assert said["given"] != row["a"]
    assert "not those that run plain was trained on" in asked.stderr
    keys += [f"data.dir={facts}", "model.attention=cosformer"]
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", linear, *given(*keys), "-q")
    asked = pkmlm("eval", linear, "--split", "valid", "--answers", code=2)
    assert (asked.stdout, "cosformer" in asked.stderr) == ("", True)
