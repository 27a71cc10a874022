"""Measures taken by several processes are those of one, and are told once."""

import json
import shutil

import pytest

from tests.conftest import pkmlm
from tests.task_rows import write_rows


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    return shutil.copytree(trained("product-key"), tmp_path_factory.mktemp("evaluate") / "run")


def test_perplexity(ranks, run):
    for size, options in ((2, []), (3, ["--stride", 7]), (2, ["--split", "valid"])):
        first, *others = ranks.pkmlm(size, "eval", run, *options, "--json")
        kept = {path.name: path.read_text() for path in (run / "eval").iterdir()}
        alone = pkmlm("eval", run, *options, "--json")
        found, expected = (json.loads(done.stdout)["perplexity"] for done in (first, alone))
        assert found == {**expected, **{key: pytest.approx(expected[key], rel=1e-6) for key in PPL}}
        assert {(other.stdout, other.stderr) for other in others} == {("", "")}
        assert kept.keys() == {path.name for path in (run / "eval").iterdir()}


PPL = ("nll", "token_ppl", "word_ppl", "byte_ppl", "bits_per_byte")


def test_tasks(ranks, run, tmp_path):
    rows = write_rows(tmp_path / "rows", "piqa", "arc_easy", "boolq", "wikitext")
    options = ["--tasks", "piqa,arc_easy,boolq,wikitext", "--task-data", rows, "--batch-size", 1, "--json"]
    together, alone = (
        json.loads(done.stdout) for done in (ranks.pkmlm(2, "eval", run, *options)[0], pkmlm("eval", run, *options))
    )
    assert together["harness"].pop("processes") == 2
    assert alone["harness"].pop("processes") == 1
    assert together["harness"] == alone["harness"]
    for name, facts in alone["tasks"].items():  # boolq has fewer documents than there are processes
        assert together["tasks"][name] == {**facts, "metrics": pytest.approx(facts["metrics"], rel=1e-6)}


def test_a_text_of_fewer_batches_than_processes(ranks, run, tmp_path):
    (tmp_path / "short.txt").write_text("It was a dark night.")
    first, *_ = ranks.pkmlm(3, "eval", run, "--text", tmp_path / "short.txt")
    assert first.stdout == pkmlm("eval", run, "--text", tmp_path / "short.txt").stdout


@pytest.mark.parametrize("kind", ["product-key", "hash", "ngram"])
def test_usage(ranks, trained, tmp_path, kind):
    run = shutil.copytree(trained(kind), tmp_path / kind)

    def report(size, *options):
        shutil.rmtree(run / "usage", ignore_errors=True)
        arguments = ["usage-report", run, *options, "--format", "json"]
        if size == 1:
            return json.loads(pkmlm(*arguments).stdout)
        first, *others = ranks.pkmlm(size, *arguments)
        assert {(other.stdout, other.stderr) for other in others} == {("", "")}
        return json.loads(first.stdout)

    assert rounded(report(2)) == rounded(report(1))
    assert rounded(report(2, "--split", "valid", "--step", "20,30")) == rounded(
        report(1, "--split", "valid", "--step", "20,30")
    )


@pytest.mark.parametrize("arguments", [["eval", "--split", "valid"], ["usage-report", "--split", "valid"]])
def test_the_work_is_shared(ranks, run, arguments):
    name, *options = arguments
    taken = []
    for size in (1, 3):
        shutil.rmtree(run / "usage", ignore_errors=True)
        ended = ranks.run(size, "command_counted", words=[name, str(run), *options])
        taken.append([int(rank.stderr.rpartition("forwards: ")[2]) for rank in ended])
    (alone,) = taken[0]
    assert alone % 3 > 0
    assert sum(taken[1]) == alone
    assert max(taken[1]) == -(-alone // 3)


def rounded(value):
    """JSON with numbers to 9 digits: masses are summed in another order."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.slow
def test_a_kept_report_is_read_by_all_and_a_page_is_written_by_one(ranks, run, tmp_path):
    shutil.rmtree(run / "usage", ignore_errors=True)
    measured = ranks.pkmlm(2, "usage-report", run)[0].stdout
    (kept,) = (run / "usage").glob("test-step-*.json")
    written = kept.stat().st_mtime_ns
    assert ranks.pkmlm(2, "usage-report", run)[0].stdout == measured
    assert kept.stat().st_mtime_ns == written
    page = tmp_path / "memory.html"
    assert ranks.pkmlm(2, "usage-report", run, "--html", page)[0].stdout == measured
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--split", "nosuch"], "has no split 'nosuch'"),
        (["eval", "--step", "7"], "has no checkpoint at step 7"),
        (["eval", "--text", "-"], "several processes cannot read one standard input"),
        (["usage-report", "--step", "7"], "has no checkpoint at step 7"),
        (["usage-report", "--text", "nosuch.txt"], "cannot read nosuch.txt"),
    ],
)
def test_a_mistake_is_told_once(ranks, run, arguments, message):
    command, *options = arguments
    first, second = ranks.pkmlm(2, command, run, *options, code=2)
    assert first.stderr.startswith("error: ")
    assert message in first.stderr
    assert (first.stdout, second.stdout, second.stderr) == ("", "", "")


@pytest.mark.parametrize("command", ["eval", "usage-report"])
def test_damage_that_all_meet_is_told_once(ranks, run, tmp_path, command):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "usage", ignore_errors=True)
    weights = copy / "checkpoints" / (copy / "latest").read_text().strip() / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    first, second = ranks.pkmlm(2, command, copy, code=1)
    assert first.stderr.startswith("error: ")
    assert "weights.safetensors: " in first.stderr
    assert second.stderr == ""
