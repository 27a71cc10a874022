"""`pkmlm eval --tasks` on a tiny run and invented rows."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

from pkmlm.distributed import World
from pkmlm.evaluate.documents import TextChoice
from pkmlm.evaluate.evaluation import evaluate_run
from pkmlm.evaluate.load import load_run
from pkmlm.runs.results import tasks_file
from tests import PATIENCE
from tests.conftest import pkmlm
from tests.task_rows import ROWS, write_rows
from tests.torture.disks import small_disk

PAPER = ["piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa"]


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory) -> Path:
    """A run of one's own to write results into."""
    import shutil

    return Path(shutil.copytree(trained("product-key"), tmp_path_factory.mktemp("zero-shot") / "tiny"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "tasks")


def scored(run: Path, rows: Path, tasks: str, *options: object) -> tuple[dict, list[dict]]:
    """The JSON record and the samples of tasks."""
    samples = rows / "samples.jsonl"
    done = pkmlm(
        "eval", run, "--tasks", tasks, "--task-data", rows, "--json", "--log-samples", samples, "--force", *options
    )
    assert all("requests are longer than the context of 32" in line for line in done.stderr.splitlines())
    return json.loads(done.stdout), [json.loads(line) for line in samples.read_text().splitlines()]


def test_every_stock_task_of_the_readme_in_one_command(run, rows):
    record, samples = scored(run, rows, ",".join(ROWS))
    assert record["tasks"].keys() == ROWS.keys()
    assert [facts["n"] for facts in record["tasks"].values()] == [len(each) for each in ROWS.values()]
    assert len(samples) == sum(map(len, ROWS.values()))
    keys = {
        "n",
        "acc",
        "acc_stderr",
        "acc_norm",
        "acc_norm_stderr",
        "chance",
        "truncated",
        "spanning",
        "version",
        "data",
    }
    for name, facts in record["tasks"].items():
        assert keys <= facts.keys(), name
        assert (facts["acc"] is None) == (name == "wikitext")
    tasks = record["tasks"]
    assert tasks["wikitext"]["metrics"].keys() == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert tasks["wikitext"]["requests"] == len(ROWS["wikitext"])
    assert tasks["lambada_openai"]["metrics"]["perplexity"] > 1
    assert tasks["arc_easy"]["chance"] == pytest.approx((1 / 4 + 1 / 3 + 1 / 4) / 3)
    assert tasks["wsc"]["always"] == {"no": pytest.approx(2 / 3), "yes": pytest.approx(1 / 3)}
    assert tasks["piqa"]["always"] is None
    assert tasks["piqa"]["truncated"] == 1  # 30 ladders do not fit the context of 32
    assert all(facts["spanning"] == 0 for facts in tasks.values()), "their answers begin with a space"
    assert tasks["piqa"]["acc_stderr"] == pytest.approx(
        math.sqrt(tasks["piqa"]["acc"] * (1 - tasks["piqa"]["acc"]) / (5 - 1))
    )
    assert record["average_acc"] is None, "lambada has no answers to choose from"
    assert record["perplexity"] is None
    assert record["stride"] is None


@pytest.mark.parametrize(
    ("page", "kept"),
    [("x" * 5000, {"byte_perplexity", "bits_per_byte"}), ("", {"word_perplexity"})],
    ids=["one endless word", "nothing"],
)
def test_perplexities_that_no_number_holds_are_left_out(run, tmp_path, page, kept):
    (tmp_path / "wikitext.jsonl").write_text(json.dumps({"page": page}))
    record, _ = scored(run, tmp_path, "wikitext")
    assert record["tasks"]["wikitext"]["metrics"].keys() == kept


def independent(run: Path, context: str, continuation: str) -> tuple[float, bool]:
    """log p of a continuation from the model's raw logits, in a few lines of its own."""
    loaded = load_run(run, "latest")
    ids = loaded.tokenizer.encode(context + continuation)
    first = len(loaded.tokenizer.encode(context))
    window, answer = ids[-33:], len(ids) - first
    with torch.no_grad():
        logits = loaded.model(torch.tensor([window[:-1]]))[0, -answer:].double()
    total = sum(row.log_softmax(-1)[token].item() for row, token in zip(logits, window[-answer:], strict=True))
    return total, all(int(row.argmax()) == token for row, token in zip(logits, window[-answer:], strict=True))


def test_piqa_and_arc_easy_agree_with_raw_logits_on_every_example(run, tmp_path):
    write_rows(tmp_path, "arc_easy", "piqa")
    short = [json.dumps(row) + "\n" for row in ROWS["piqa"] if len(row["sol1"]) < 50]
    (tmp_path / "piqa.jsonl").write_text("".join(short))
    record, samples = scored(run, tmp_path, "piqa,arc_easy")
    right: dict[str, list[int]] = {"piqa": [], "arc_easy": []}
    for sample in samples:
        row, task = sample["doc"], sample["task"]
        if task == "piqa":
            context, choices, answer = f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]
        else:
            context, choices = f"Question: {row['question']}\nAnswer:", row["choices"]["text"]
            answer = row["choices"]["label"].index(row["answerKey"])
        expected = [independent(run, context, f" {choice}") for choice in choices]
        for (value, greedy), (found, found_greedy) in zip(expected, sample["filtered_resps"], strict=True):
            assert found == pytest.approx(value, abs=1e-4)
            assert found_greedy == greedy
        sums = [value for value, _ in expected]
        by_length = [value / len(choice) for value, choice in zip(sums, choices, strict=True)]
        assert sample["acc"] == (sums.index(max(sums)) == answer)
        assert sample["acc_norm"] == (by_length.index(max(by_length)) == answer)
        right[task].append(int(sample["acc"]))
    for task, found in right.items():
        assert record["tasks"][task]["acc"] == pytest.approx(sum(found) / len(found))


def test_mistakes_about_the_text_are_told_before_tasks_are_scored(run, rows, tmp_path):
    told = ["--tasks", "piqa", "--task-data", rows, "--log-samples", tmp_path / "samples.jsonl"]
    for mistake in (["--split", "tset"], ["--split", "test", "--stride", 33], ["--text", tmp_path / "none.txt"]):
        assert pkmlm("eval", run, *told, *mistake, code=2).stdout == ""
        assert not list(tmp_path.iterdir()), mistake


def test_the_result_is_kept_with_the_run_and_compared(run, rows):
    record, _ = scored(run, rows, "memoryformer", "--batch-size", 1)
    assert list(record["tasks"]) == PAPER
    assert record["harness"]["batch_size"] == 1
    kept = json.loads((run / "eval" / f"tasks-{'-'.join(PAPER)}-step-30.json").read_text())
    assert kept == record | {"checkpoint": kept["checkpoint"]}
    assert record["average_acc"] == pytest.approx(sum(facts["acc"] for facts in record["tasks"].values()) / 6)
    assert kept["harness"]["versions"].keys() == {"pkmlm", "lm_eval", "datasets", "torch"}
    assert kept["harness"]["dtype"] == "float32"
    assert len(kept["tasks"]["piqa"]["data"]["sha256"]) == 64
    assert "Zero-shot accuracy" in pkmlm("compare", run).stdout
    first, _ = scored(run, rows, "wsc", "--limit", 1)
    assert first["tasks"]["wsc"]["n"] == 1
    assert (run / "eval" / "tasks-wsc-step-30-limit-1.json").exists()


def test_tables_for_people_fit_a_terminal(run, rows):
    said = pkmlm("eval", run, "--tasks", ",".join(ROWS), "--task-data", rows, "--limit", 1).stdout
    assert all(len(line) <= 80 for line in said.splitlines())
    assert "average" not in said
    for word in ("stderr", "chance", "word_perplexity", "cut", "only the first 1 documents"):
        assert word in said
    first = next(line.split() for line in said.splitlines() if line.startswith("logiqa "))
    assert first[-1] == "all"
    two = pkmlm("eval", run, "--tasks", "arc_easy,logiqa,piqa", "--task-data", rows)
    average, piqa = (next(x.split() for x in two.stdout.splitlines() if x.startswith(name)) for name in ("ave", "piqa"))
    assert average[-2] == f"{((1 / 4 + 1 / 3 + 1 / 4) / 3 + 1 / 4 + 1 / 2) / 3:.4f}"
    assert piqa[-1] == "10.0%"
    assert "warning: logiqa: 4 of 4 requests" in two.stderr
    assert "piqa" not in two.stderr
    both = pkmlm("eval", run, "--tasks", "wsc", "--task-data", rows, "--split", "valid").stdout
    assert "nats" in both
    assert "wsc   yes" in both


def test_a_perplexity_is_kept_though_the_tasks_behind_it_end_early(run, rows, tmp_path, monkeypatch):
    """As by Ctrl-C, in the hours that tasks may take."""

    def stopped(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "mine.txt").write_text("A text of one's own.")
    monkeypatch.setattr("pkmlm.evaluate.lm_eval.score_tasks", stopped)
    choice = TextChoice(text=str(tmp_path / "mine.txt"))
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(str(run), "latest", choice, World(), tasks="piqa", task_data=str(rows), quiet=True)
    (kept,) = (run / "eval").glob("text-mine*")
    assert json.loads(kept.read_text())["perplexity"]["tokens"] > 0
    kept.unlink()


def test_a_disk_that_takes_no_samples_costs_no_result(run, tmp_path):
    rows = write_rows(tmp_path / "tasks", "copa")
    (rows / "copa.jsonl").write_text((rows / "copa.jsonl").read_text() * 20)
    kept = run / "eval/tasks-copa-step-30.json"
    with small_disk(tmp_path / "disk", 8192) as disk:
        if disk is None:
            pytest.skip("no right to mount a small disk")
        told = ["eval", run, "--tasks", "copa", "--task-data", rows, "--log-samples", disk / "samples.jsonl"]
        full = pkmlm(*told, code=1)
        assert "samples.jsonl" in full.stderr
        assert "copa  40" in full.stdout
        kept.unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=PATIENCE)
        refused = pkmlm(*told, code=1)
    assert "--log-samples" in refused.stderr
    assert not refused.stdout
    assert not kept.exists(), "nothing was evaluated"


def test_the_name_of_results_fits_a_file_whatever_tasks_are_called():
    def name(*tasks):
        facts = {task: {"num_fewshot": 0} for task in tasks}
        return tasks_file({"tasks": facts, "step": 30, "harness": {"limit": None}})

    assert name(*PAPER) == f"tasks-{'-'.join(PAPER)}-step-30.json"
    assert len(name("\u4e8c" * 90).encode()) < 255
    assert name("a b/c") == "tasks-a_b_c-step-30.json"
    assert name("e" * 90, "one") != name("e" * 90, "two"), "or the second would take the first's place"


def test_examples_before_the_question_come_from_their_own_file(run, tmp_path):
    rows = write_rows(tmp_path / "tasks", "arc_easy")
    done = pkmlm("eval", run, "--tasks", "arc_easy", "--task-data", rows, "--num-fewshot", 2, code=2)
    assert "arc_easy.train.jsonl" in done.stderr
    (rows / "arc_easy.train.jsonl").write_text((rows / "arc_easy.jsonl").read_text())
    few = pkmlm("eval", run, "--tasks", "arc_easy", "--task-data", rows, "--num-fewshot", 4, code=2).stderr
    assert "arc_easy.train.jsonl" in few
    record, samples = scored(run, rows, "arc_easy", "--num-fewshot", 2)
    assert samples[0]["arguments"][0][0].count("Question:") == 3
    assert record["tasks"]["arc_easy"]["num_fewshot"] == 2
    assert (run / "eval" / "tasks-arc_easy-shots-2-step-30.json").exists()


OWN = """task: colours
test_split: test
output_type: multiple_choice
doc_to_text: "{{thing}} is"
doc_to_choice: [white, black]
doc_to_target: colour
"""


def test_a_task_of_ones_own(run, tmp_path):
    (tmp_path / "colours.jsonl").write_text('{"thing": "Snow", "colour": 0}\n{"thing": "Soot", "colour": 1}\n')
    (tmp_path / "own.yaml").write_text(OWN)
    record, samples = scored(run, tmp_path, str(tmp_path / "own.yaml"))
    assert record["tasks"]["colours"]["n"] == 2
    assert samples[0]["arguments"][0] == ["Snow is", " white"]


def test_answers_that_begin_within_a_token_are_counted_and_told_of(run, tmp_path):
    tokenizer = load_run(run, "latest").tokenizer
    whole = next(word for word in ("the", "and", "was", "her", "you") if len(tokenizer.encode(f" {word}")) == 1)
    rows = [{"thing": f"So {whole[:-1]}", "choices": [whole[-1], "?"]}, {"thing": "So", "choices": [" it", "?"]}]
    (tmp_path / "joined.jsonl").write_text("".join(json.dumps({**row, "right": 0}) + "\n" for row in rows))
    own = OWN.replace("colours", "joined").replace("{{thing}} is", "{{thing}}").replace("colour", "right")
    own = own.replace("[white, black]", '"{{choices}}"') + 'target_delimiter: ""\n'
    (tmp_path / "own.yaml").write_text(own)
    record, samples = scored(run, tmp_path, str(tmp_path / "own.yaml"))
    assert [argument[1] for argument in samples[0]["arguments"]] == rows[0]["choices"]
    assert (record["tasks"]["joined"]["spanning"], record["tasks"]["joined"]["requests"]) == (1, 4)
    said = pkmlm("eval", run, "--tasks", tmp_path / "own.yaml", "--task-data", tmp_path).stdout
    assert re.search("joined: .*1 of 4 requests", said)
    assert all(len(line) <= 80 for line in said.splitlines())


def test_a_metric_that_fails_is_told_with_its_task(run, tmp_path):
    (tmp_path / "colours.jsonl").write_text('{"thing": "Snow", "colour": 0}\n{"thing": "Soot", "colour": 1}\n')
    path = tmp_path / "own.yaml"
    path.write_text(f"{OWN}metric_list: [{{metric: acc, aggregation: weighted_perplexity}}]\n")
    said = pkmlm("eval", run, "--tasks", path, "--task-data", tmp_path, code=2)
    assert str(path) in said.stderr
    assert not said.stdout


def test_mistakes_are_told_in_one_line(run, rows, tmp_path):
    def told(*options: object) -> str:
        said = pkmlm("eval", run, *options, code=2)
        assert said.stdout == ""
        assert len([line for line in said.stderr.splitlines() if not line.startswith("hint: ")]) == 1
        return said.stderr

    assert "--tasks" in told("--limit", 3)
    assert "--task-data" in told("--tasks", "piqa", "--task-data", tmp_path / "none")
    assert "--stride" in told("--tasks", "wsc", "--task-data", rows, "--stride", 4)
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    assert "already exists" in told("--tasks", "wsc", "--task-data", rows, "--log-samples", taken)
    assert taken.read_text() == "mine"
    bad = write_rows(tmp_path / "bad", "piqa")
    with (bad / "piqa.jsonl").open("a") as file:
        file.write('{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}\n')
    unread = told("--tasks", "piqa", "--task-data", bad, "--step", 999_999)
    assert "piqa.jsonl:6" in unread  # told before a checkpoint is looked for
