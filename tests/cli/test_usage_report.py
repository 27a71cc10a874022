"""`pkmlm usage-report` on small trained runs."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import PATIENCE
from tests.conftest import pkmlm
from tests.torture.disks import small_disk

Trained = Callable[[str], Path]


@pytest.fixture
def run_of(trained: Trained, tmp_path: Path) -> Callable[[str], Path]:
    """A function that gives a copy of a trained run, to write into."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(trained(kind), tmp_path / kind, ignore=shutil.ignore_patterns("usage", "eval")))

    return copy


def report(*arguments: object) -> list[dict]:
    runs: list[dict] = json.loads(pkmlm("usage-report", *arguments, "--format", "json").stdout)["runs"]
    return runs


def test_json_of_a_product_key_run_counts_every_scored_token_once(run_of: Callable[[str], Path]) -> None:
    run = run_of("product-key")
    (entry,) = report(run)
    scored = json.loads(pkmlm("eval", run, "--json").stdout)["perplexity"]["tokens"]
    assert (entry["run"], entry["step"], entry["split"]) == ("product-key", 30, "test")
    (memory,) = entry["memories"]
    assert memory["tokens"] == scored, "padding and overlapping windows are not counted"
    assert memory["reads"] == scored * 2 * 4
    assert list(memory)[:3] == ["memory", "layer", "kind"]
    assert [memory[key] for key in ("memory", "layer", "kind", "slots")] == ["pkm", 2, "product-key", 256]
    assert "part" not in memory
    assert len(memory["heads"]) == 2
    assert 0 < memory["mass"]["usage"] <= memory["count"]["usage"] <= memory["uniform"]["usage"] <= 1
    assert memory["mass"]["kl"] > memory["uniform"]["kl"]
    assert 0 <= memory["head_overlap"] <= 1
    assert memory["head_overlap_uniform"] == 4 / 256
    kept = json.loads((run / "usage" / "test-step-30.json").read_text())
    assert kept == entry
    with np.load(run / "usage" / "test-step-30.npz") as arrays:
        assert arrays["0-counts_HK"].sum() == memory["reads"]
        assert arrays["0-masses_HK"].sum() == pytest.approx(scored * 2, rel=1e-5)


def test_a_folder_for_plots_that_cannot_be_written_costs_no_pass(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("product-key")
    with small_disk(tmp_path / "disk", 8192) as disk:
        if disk is None:
            pytest.skip("no right to mount a small disk")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=PATIENCE)
        said = pkmlm("usage-report", run, "--plots", disk / "new" / "plots", code=1).stderr
    assert str(disk / "new" / "plots") in said
    assert not (run / "usage").exists()


def test_the_second_report_needs_no_forward_pass(run_of: Callable[[str], Path]) -> None:
    run = run_of("product-key")
    before = report(run)
    program = (
        "import sys; from pkmlm.cli import cli; cli.main(sys.argv[1:], standalone_mode=False);"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, "usage-report", str(run), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == before


def test_what_is_stale_or_damaged_is_measured_again(run_of: Callable[[str], Path]) -> None:
    run = run_of("product-key")
    before = report(run)
    kept, arrays = (run / "usage" / f"test-step-30.{ending}" for ending in ("json", "npz"))
    true, whole = kept.read_text(), arrays.read_bytes()
    stale = true.replace('"checkpoint": "', '"checkpoint": "0')
    assert stale != true
    for file, content in ((kept, b"[]"), (arrays, whole[:-30]), (kept, stale.encode())):
        file.write_bytes(content)
        done = pkmlm("usage-report", run, "--format", "json")
        assert json.loads(done.stdout)["runs"] == before
        assert (file.name in done.stderr) == (content != stale.encode())
        assert kept.read_text() == true


def test_text_equals_its_split_and_steps_differ(run_of: Callable[[str], Path], novels: Path) -> None:
    run = run_of("flat-key")
    (split,), (text,) = report(run), report(run, "--text", novels / "test.txt")
    assert text["split"] == "test.txt"
    assert text["memories"] == split["memories"]
    (earlier,) = report(run, "--step", "20")
    assert earlier["step"] == 20
    assert earlier["memories"] != split["memories"]
    assert len(list((run / "usage").glob("*.json"))) == 3


def test_a_text_of_the_same_name_is_measured_anew(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("product-key")
    texts = [tmp_path / "a" / "my text.txt", tmp_path / "b" / "my text.txt"]
    for text in texts:
        text.parent.mkdir()
        text.write_text(f"the text in {text.parent.name}\n\nand more")
    asked = [["--text", text] for text in texts] + [["--text", texts[1], "--separator", r"\n\n"]]
    found = [report(run, *each)[0] for each in asked]
    assert len({str(entry["memories"]) for entry in found}) == 3
    (kept,) = (run / "usage").glob("text-my_text.txt-*.json")
    assert json.loads(kept.read_text()) == found[2]
    both = [report(run, "--text", tmp_path / "*" / "my*.txt")[0] for _ in range(2)]
    assert both[0] == both[1]
    texts[0].write_text("another text")
    assert report(run, "--text", tmp_path / "*" / "my*.txt")[0]["memories"] != both[0]["memories"]


def test_tables_of_several_runs(run_of: Callable[[str], Path]) -> None:
    runs = [run_of(kind) for kind in ("dense", "product-key", "hash")]
    text = pkmlm("usage-report", *runs).stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    assert sum(line.startswith("product-key") for line in text.splitlines()) == 1 + 1 + 1 + 4 + 1
    assert sum(line.startswith("dense") for line in text.splitlines()) == 1, "it has no memory"
    rows = list(csv.DictReader(io.StringIO(pkmlm("usage-report", *runs, "--format", "csv").stdout)))
    assert [row["run"] for row in rows] == ["product-key"] + ["hash"] * 6
    (entry,) = report(runs[1])
    assert float(rows[0]["mass_kl"]) == entry["memories"][0]["mass"]["kl"]
    markdown = pkmlm("usage-report", *runs, "--format", "md").stdout
    assert "| product-key | 2 pkm | mass |" in markdown


def test_models_without_a_memory_are_refused_before_any_work(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    dense = run_of("dense")
    pkmlm("export", dense, "-o", tmp_path / "export", "-q")
    for model in (dense, tmp_path / "export"):
        for options in ((), ("--format", "json"), ("--plots", tmp_path / "new"), ("--export", tmp_path / "new")):
            done = pkmlm("usage-report", model, *options, code=2)
            assert re.match(rf"error: {model.name}: .*no memory", done.stderr)
            assert done.stdout == ""
            assert not (tmp_path / "new").exists()


def test_an_ngram_memory_alone_is_a_memory(tmp_path: Path, write_recipe: Callable[[Path, str], Path]) -> None:
    changes = ("-s", "model.memories.ngrams.layers=[1]", "-s", "train.steps=1")
    pkmlm("train", write_recipe(tmp_path, "ngram"), "-o", tmp_path / "run", "-q", *changes)
    assert [memory["memory"] for memory in report(tmp_path / "run")[0]["memories"]] == ["ngrams"]
    text = pkmlm("usage-report", tmp_path / "run").stdout
    assert re.findall(r"^1 ngrams +(mass|count|random) ", text, re.MULTILINE) == ["count", "random"], "all weigh 1"
    assert "Tables" in text
    assert "Heads" not in text


def test_plots_and_force(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run, folder = run_of("product-key"), tmp_path / "pictures"
    folder.mkdir()
    (folder / "product-key-slot-mass.png").write_bytes(b"")
    assert str(folder) in pkmlm("usage-report", run, "--plots", folder, code=2).stderr
    done = pkmlm("usage-report", run, "--plots", folder, "--force", "--format", "json")
    assert json.loads(done.stdout), "standard output stays JSON"
    assert len(list(folder.glob("product-key-*.png"))) == len(list(folder.iterdir())) == 4
    assert (folder / "product-key-slot-mass.png").stat().st_size > 10_000
    assert done.stderr.count("warning") == 0


def test_the_same_text_of_files_with_other_names_has_the_same_results(
    run_of: Callable[[str], Path], novels: Path, tmp_path: Path
) -> None:
    run = run_of("product-key")
    before = report(run)
    for split in ("train", "valid", "test"):
        shutil.copy(novels / f"{split}.txt", tmp_path / f"renamed-{split}.txt")
    train, valid, test = (tmp_path / f"renamed-{split}.txt" for split in ("train", "valid", "test"))
    options = ("--valid", valid, "--test", test, "--tokenizer", run / "tokenizer.model", "-o", tmp_path / "tokens")
    pkmlm("tokenize", train, *options)
    again = pkmlm("usage-report", run, "--data", tmp_path / "tokens", "--format", "json")
    assert again.stderr == "", "kept from before"
    assert json.loads(again.stdout)["runs"] == before


def test_errors_are_one_line(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("product-key")
    for arguments, said in (
        ([tmp_path / "none"], "none"),
        ([tmp_path], str(tmp_path)),
        ([run, "--step", "30,7"], "20, 30"),
        ([run, "--text", tmp_path / "no.txt"], "no.txt"),
        ([run, "--text", tmp_path / "no*.txt"], "no*.txt"),
        ([run, "--split", "unknown"], "unknown"),
        ([run, "--format", "xml"], "xml"),
        ([run, "--html", tmp_path / "one", "--export", tmp_path / "one"], str(tmp_path / "one")),
        ([run, "--batches", 9], "--batches requires --background"),
        ([run, "--batch-tokens", 64], "--batch-tokens requires --background"),
        ([run, "--base", run], "--base requires an attached memory"),
        ([run, "--background", tmp_path / "b.npz", "--base", run], "--base requires an attached memory"),
        ([run, "--background", tmp_path / "b.npz", "--plot-width", 3], "--plot-width requires --plots"),
        ([], "RUN"),
    ):
        done = pkmlm("usage-report", *arguments, code=2)
        assert said in done.stderr
        assert done.stdout == ""
    assert not (run / "usage").exists()


def test_a_text_that_can_be_read_once_is_refused(trained: Trained, tmp_path: Path) -> None:
    pkmlm("export", trained("product-key"), "-o", tmp_path / "exported")
    for place in (trained("product-key"), tmp_path / "exported"):
        said = pkmlm("usage-report", place, "--text", "-", stdin="some text", code=2).stderr
        assert "--text -" in said


def test_a_run_that_cannot_be_written_is_still_reported(run_of: Callable[[str], Path]) -> None:
    run = run_of("product-key")
    (run / "usage").write_text("a file in the way")
    done = pkmlm("usage-report", run, "--format", "json")
    assert json.loads(done.stdout)["runs"][0]["memories"]
    assert "not kept" in done.stderr
