"""`pkmlm eval` and `pkmlm generate` on trained runs."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import checkpoint_digest
from tests.conftest import pkmlm, rewrite
from tests.task_rows import write_rows


def test_json_has_the_shape_of_the_contract(trained):
    result = json.loads(pkmlm("eval", trained("product-key"), "--json").stdout)
    assert result.keys() == {"run", "step", "stride", "source", "perplexity", "tasks", "average_acc"}
    assert result["step"] == 30
    assert result["perplexity"].keys() == {
        *("split", "tokens", "words", "bytes", "nll", "token_ppl", "word_ppl", "byte_ppl", "bits_per_byte")
    }
    assert result["source"].keys() == {"folder", "sha256", "documents"}
    digest = checkpoint_digest(RunDirectory(trained("product-key")).checkpoint(30))
    kept = json.loads((trained("product-key") / "eval/test-step-30.json").read_text())
    assert kept == {**result, "checkpoint": digest}


def test_texts_of_one_name_say_what_they_are(trained, tmp_path):
    run = shutil.copytree(trained("dense"), tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    long = "\u6f22" * 80 + ".txt"  # 244 bytes
    texts = {tmp_path / "a" / long: b"one text", tmp_path / "b" / long: b"another\n\ntext"}
    for path, content in texts.items():
        path.parent.mkdir()
        path.write_bytes(content)
    asked = [["--text", path] for path in texts] + [["--text", path, "--separator", r"\n\n"]]
    found = [json.loads(pkmlm("eval", run, "-q", "--json", *each).stdout) for each in asked]
    found.append(json.loads(pkmlm("eval", run, "-q", "--json", "--text", "-", stdin=b"one text").stdout))
    kept = [json.loads(file.read_text())["source"] for file in (run / "eval").glob("text-\u6f22*")]
    assert sorted(map(str, kept)) == sorted(map(str, (found[0]["source"], found[2]["source"]))), "the last of each text"
    assert [each["source"] for each in found] == [
        {
            "file": str(path),
            "sha256": hashlib.sha256(content).hexdigest(),
            "separator": separator,
            "field": "text",
            "documents": documents,
        }
        for path, content, separator, documents in (
            *((path, content, None, 1) for path, content in texts.items()),
            (path, content, "\n\n", 2),
            ("-", b"one text", None, 1),
        )
    ]


def test_several_texts_and_standard_input_have_names(trained, tmp_path, monkeypatch):
    """In the heading, and in the result's file, where a blank or a sign of the shell is a nuisance."""
    shutil.copytree(trained("dense"), tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    monkeypatch.chdir(tmp_path)
    Path("c").mkdir()
    for name in ("a b.txt", "c.txt"):
        (Path("c") / name).write_text("some text")
    for text, name in (("c/*", "2 files of c/*"), ("c/a*", "a b.txt"), ("-", "standard input")):
        said = pkmlm("eval", "run", "-q", "--text", text, stdin="some text").stdout
        assert said.startswith(f"run at step 30, {name}\n")
        head, byte = (said.splitlines()[line].split() for line in (2, 4))
        assert (head[1], byte[0]) == ("bits", "byte"), "bits per byte is the first number"
        assert all(len(line) <= 80 for line in said.splitlines())
    names = ("2_files_of_c_", "a_b.txt", "standard_input")
    found = {re.sub(r"-[0-9a-f]{8}-step-30.json$", "", file.name) for file in Path("run/eval").iterdir()}
    assert found == {f"text-{name}" for name in names}
    Path("d").mkdir()
    Path("d/c.txt").write_text("other text")  # of the same name: it takes no other's place
    for text in ("c/c.txt", "d/c.txt"):
        pkmlm("eval", "run", "-q", "--text", text)
    assert len([*Path("run/eval").iterdir()]) == 5
    assert "standard input" in pkmlm("eval", "run", "--text", "-", stdin="", code=2).stderr


def test_validation_during_training_is_eval_on_valid(tmp_path, write_recipe):
    run = tmp_path / "run"
    whole = ["-s", "eval.tokens=null", "-s", "train.steps=8", "-s", "model.dropout=0.3"]
    pkmlm("train", write_recipe(tmp_path, "product-key"), "-o", run, "-q", *whole)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["event"] == "valid"][-1]
    result = json.loads(pkmlm("eval", run, "--json", "--split", "valid").stdout)["perplexity"]
    assert last["loss"] == pytest.approx(result["nll"] / result["tokens"], rel=1e-6)
    assert last["word_ppl"] == pytest.approx(result["word_ppl"], rel=1e-6)


def test_a_text_of_one_long_word_has_no_perplexity_of_words(trained, tmp_path):
    shutil.copytree(trained("dense"), tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (tmp_path / "dna.txt").write_text("GATTACA" * 200)
    words = ["eval", tmp_path / "run", "--text", tmp_path / "dna.txt"]
    found = json.loads(pkmlm(*words, "--json").stdout)["perplexity"]
    assert (found["words"], found["word_ppl"]) == (1, None)
    assert found["nll"] > 710
    assert found["byte_ppl"] == pytest.approx(2 ** found["bits_per_byte"])
    assert re.search(r"^word .* over 1e308 +1$", pkmlm(*words).stdout, re.M)


def test_a_stride_scores_the_same_tokens_with_more_context(trained):
    run = trained("dense")
    plain, close = (
        json.loads(pkmlm("eval", run, "--json", *extra).stdout)["perplexity"] for extra in ([], ["--stride", 8])
    )
    assert close["tokens"] == plain["tokens"]
    assert close["nll"] != plain["nll"]


def test_best_and_numbered_steps(trained):
    run = trained("dense")
    assert json.loads(pkmlm("eval", run, "--json", "--step", "20").stdout)["step"] == 20
    best = int((run / "best").read_text().strip()[5:])
    assert json.loads(pkmlm("eval", run, "--json", "--step", "best").stdout)["step"] == best
    assert "step 7" in pkmlm("eval", run, "--step", 7, code=2).stderr


def test_mistakes_are_told_in_one_line(trained, tmp_path):
    run = trained("dense")
    assert "does not exist" in pkmlm("eval", tmp_path / "none", code=2).stderr
    assert "run directory" in pkmlm("eval", tmp_path, code=2).stderr
    assert "'tset'" in pkmlm("eval", run, "--split", "tset", code=2).stderr
    (tmp_path / "a.jsonl").write_text('{"text": "It was"}')
    (tmp_path / "empty.txt").write_text("")
    pkmlm("eval", run, "--text", tmp_path / "a.jsonl", "--field", "text")
    for option, *others in (
        ("--split", "test", "--text", "x"),
        ("--text", "x", "--text", "y"),
        ("--separator", "x"),
        ("--field", "text", "--split", "test"),
        ("--separator", "x", "--text", tmp_path / "a.jsonl"),
        ("--field", "body", "--text", tmp_path / "empty.txt"),
    ):
        assert option in pkmlm("eval", run, option, *others, code=2).stderr
    assert "empty.txt" in pkmlm("eval", run, "--text", tmp_path / "empty.txt", code=2).stderr
    broken = shutil.copytree(run, tmp_path / "broken")
    (broken / "tokenizer.model").write_bytes(b"garbage")
    assert "tokenizer.model" in pkmlm("eval", broken, code=1).stderr
    (broken / "tokenizer.model").unlink()
    assert "tokenizer.model" in pkmlm("eval", broken, code=1).stderr


def test_a_run_without_a_checkpoint_says_why(trained, tmp_path):
    run = shutil.copytree(trained("dense"), tmp_path / "run", ignore=shutil.ignore_patterns("step-*"))
    facts = json.loads((run / "run.json").read_text())
    assert "gone" in pkmlm("eval", run, code=2).stderr
    (run / "done").unlink()
    for status, said in (("running", "no checkpoint yet"), ("diverged", "diverged before its first checkpoint")):
        (run / "run.json").write_text(json.dumps({**facts, "status": status}))
        assert said in pkmlm("eval", run, code=2).stderr


def move_tokens(run, folder):
    """Let the recipe of a run's checkpoint say that its tokens are in a folder."""
    checkpoint = RunDirectory(run).checkpoint(30)
    recipe = yaml.safe_load((checkpoint / "recipe.yaml").read_text())
    rewrite(checkpoint, "recipe.yaml", yaml.safe_dump({**recipe, "data": {**recipe["data"], "dir": str(folder)}}))


def test_tokens_that_were_made_anew_since_are_warned_of(trained, novels, tmp_path):
    run = shutil.copytree(trained("product-key"), tmp_path / "run")
    assert pkmlm("eval", run, "-q").stderr == ""
    move_tokens(run, tmp_path / "new")
    kept = ["--tokenizer", run / "tokenizer.model", "-o", tmp_path / "new", "-q"]
    kept.append(f"--test={novels}/test.txt")  # they need no valid split
    pkmlm("tokenize", novels / "valid.txt", *kept)
    for command in ("eval", "usage-report", "usage-report", "slots"):  # what is kept is doubtful still
        said = pkmlm(command, run, "-q").stderr
        assert said.startswith(f"warning: the train tokens in {tmp_path / 'new'} "), command
        assert said.count("\n") == 1
    assert pkmlm("eval", run, "-q", "--text", novels / "test.txt").stderr == ""
    pkmlm("tokenize", novels / "train.txt", *kept, "--force")
    assert pkmlm("eval", run, "-q").stderr == ""


def test_tokens_that_have_moved_are_named_with_data(trained, tokens, novels, tmp_path):
    run = shutil.copytree(trained("product-key"), tmp_path / "run", ignore=shutil.ignore_patterns("eval", "usage"))
    move_tokens(run, tmp_path / "gone")
    pkmlm("export", run, "-o", tmp_path / "exported")
    kept = ["--tokenizer", run / "tokenizer.model", f"--test={novels}/test.txt", "-o", tmp_path / "others", "-q"]
    pkmlm("tokenize", novels / "valid.txt", *kept)
    exported = tmp_path / "exported"
    for command, path in (("eval", run), ("eval", exported), ("usage-report", run), ("slots", exported)):
        said = pkmlm(command, path, "-q", code=2).stderr
        assert f"{path} are not in {tmp_path / 'gone'}" in said
        assert "--data" in said
        found = pkmlm(command, path, "-q", "--data", tokens)
        assert found.stderr == ""
        before = pkmlm(command, trained("product-key"), "-q").stdout
        assert found.stdout.splitlines()[5:] == before.splitlines()[5:]
    for command in ("eval", "usage-report", "slots"):
        said = pkmlm(command, run, "--data", tmp_path / "others", code=2).stderr
        assert f"the train tokens in {tmp_path / 'others'} are not those" in said
    assert "--text" in pkmlm("eval", run, "--data", tokens, "--text", "x", code=2).stderr
    for missing in (tmp_path / "nowhere", run):
        assert f"--data {missing}" in pkmlm("eval", run, "--data", missing, code=2).stderr
    kept_results = [json.loads((run / f"{name}/test-step-30.json").read_text()) for name in ("eval", "usage")]
    assert kept_results[0]["source"]["folder"] == str(tokens)
    assert "PROMPT excludes" in pkmlm("slots", run, "It was", "--data", tokens, code=2).stderr
    tasks = ["--tasks", "piqa", "--task-data", write_rows(tmp_path / "tasks")]
    result = json.loads(pkmlm("eval", run, "-q", "--json", "--data", tokens, *tasks).stdout)
    assert result["perplexity"]["split"] == "test"


def test_tokens_are_found_from_any_directory(tokens, write_recipe, tmp_path, monkeypatch):
    """A relative data.dir: in the working directory, or beside the recipe, or where the run was trained."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "recipes").mkdir(parents=True)
    elsewhere.mkdir()
    shutil.copytree(tokens, project / "data")
    (project / "base.yaml").write_text(write_recipe(tmp_path, "dense").read_text().replace(str(tokens), "data"))
    (project / "recipes" / "own.yaml").write_text("base: ../base.yaml\ntrain: {steps: 2}\n")
    monkeypatch.chdir(project)
    pkmlm("train", "base.yaml", "-o", "one", "-q", "-s", "train.steps=2")
    monkeypatch.chdir(elsewhere)
    pkmlm("train", "../project/recipes/own.yaml", "-o", "../two", "-q")
    assert "data.dir" not in pkmlm("train", "../project/recipes/own.yaml", "-o", "../two", "-s", "train.steps=3").stderr
    assert "no tokens" in pkmlm("train", project / "base.yaml", "-o", "x", "-s", "data.dir=data", code=2).stderr
    monkeypatch.chdir("/")
    shown = [pkmlm("eval", run, "-q").stdout.partition("\n")[2] for run in (project / "one", tmp_path / "two")]
    assert "token" in shown[0]
    assert json.loads((project / "one/run.json").read_text())["data_dir"] == str(project / "data")
    (project / "one/run.json").unlink()
    assert "--data" in pkmlm("eval", project / "one", code=2).stderr
    monkeypatch.chdir(project)
    assert pkmlm("eval", "one", "-q").stdout.partition("\n")[2] == shown[0]


def test_tokens_of_another_tokenizer_are_refused(trained, novels, tmp_path):
    pkmlm("export", trained("product-key"), "-o", tmp_path / "exported")
    pkmlm("tokenize", novels / "train.txt", "--vocab-size", 500, "-o", tmp_path / "other", "-q")
    run, exported = trained("product-key"), tmp_path / "exported"
    for command, place in (("eval", run), ("eval", exported), ("usage-report", run), ("slots", exported)):
        said = pkmlm(command, place, "-q", "--split", "train", "--data", tmp_path / "other", code=2).stderr
        assert str(tmp_path / "other") in said
        assert f"--tokenizer {place / 'tokenizer.model'}" in said


def test_a_text_that_is_not_divided_as_the_tokens_were_is_warned_of(trained, novels, tmp_path):
    run = shutil.copytree(trained("product-key"), tmp_path / "run")
    move_tokens(run, tmp_path / "divided")
    kept = ["--tokenizer", run / "tokenizer.model", "-o", tmp_path / "divided", "-q"]
    pkmlm("tokenize", novels / "train.txt", "--separator", r"\n\n", *kept)
    (tmp_path / "x.txt").write_text("one\n\ntwo\n\nthree")
    for command in ("eval", "usage-report", "usage-report", "slots"):  # the second time from what is kept
        said = pkmlm(command, run, "-q", "--text", tmp_path / "x.txt").stderr
        assert said.startswith("warning: x.txt: read as 1 document"), command
        assert r"--separator '\n\n'" in said
        assert pkmlm(command, run, "-q", "--text", tmp_path / "x.txt", "--separator", r"\n\n").stderr == ""
        said = pkmlm(command, run, "-q", "--text", tmp_path / "x.txt", "--separator", "---").stderr
        assert said.startswith(f"warning: {tmp_path / 'x.txt'}: the separator '---' does not occur"), command
    (tmp_path / "y.txt").write_bytes(b"four\r\rfive")
    said = pkmlm("eval", run, "-q", "--text", tmp_path / "[xy].txt", "--separator", r"\n\n").stderr
    assert said.startswith(f"warning: {tmp_path / 'y.txt'}: "), "only the file that is not divided"
    for text, divided in (("one " * 3000 + "\n\n" + "two " * 3000, True), ("one\n\n", False)):
        (tmp_path / "w.txt").write_text(text)
        assert ("read as 1 document" in pkmlm("eval", run, "-q", "--text", tmp_path / "w.txt").stderr) == divided
    (tmp_path / "z.jsonl").write_text(json.dumps({"text": "one\n\ntwo"}))
    assert pkmlm("eval", run, "-q", "--text", tmp_path / "z.jsonl").stderr == ""


def test_generate_continues_a_prompt_the_same_way_for_a_seed(trained):
    run = trained("product-key")
    first = pkmlm("generate", run, "It was", "-n", 50, "--seed", 3).stdout
    assert first.startswith("It was")
    assert len(first) > 30
    assert pkmlm("generate", run, "It was", "-n", 50, "--seed", 3).stdout == first
    assert pkmlm("generate", run, "It was", "-n", 50, "--seed", 4).stdout != first
    for typed in ("It was", "\ufeffIt was"):  # some editors begin a file with a byte-order mark
        assert pkmlm("generate", run, "-n", 50, "--seed", 3, stdin=typed).stdout == first
    assert pkmlm("generate", run, "-n", 5).stdout


def test_a_model_with_more_rows_than_pieces_generates_pieces_alone(tmp_path, write_recipe):
    larger = ["-s", "model.vocab_size=4096", "-s", "train.steps=1", "-s", "eval.sample=It was"]
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", *larger)
    assert pkmlm("generate", tmp_path / "run", "It was", "-n", 100).stdout.startswith("It was")
