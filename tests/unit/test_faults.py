"""Faults caused for real, a few of each kind that `make torture` tries by the hundred."""

import itertools
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm.errors import UserError
from pkmlm.files import json_text
from pkmlm.recipe.schema import Log
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.log import TrainingLog
from tests import PATIENCE
from tests.conftest import ROOT
from tests.forks import Ended, Forks
from tests.torture import crashes, damage, disks, kills, sizes, stops
from tests.torture.oracle import Ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("the trials look into /proc")
    folder = tmp_path_factory.mktemp("ground")
    with Forks(folder / "said", "tests.torture.jobs") as forks:
        yield Ground(folder, forks).make()


@pytest.mark.parametrize("how", ["crash", "ENOSPC"])
@pytest.mark.parametrize("what", ["tokenize", "replace", "train"])
@pytest.mark.slow
def test_a_crash_or_a_failed_write_anywhere_loses_nothing(ground, what, how):
    operations = crashes.operations(ground, what)
    at = {2, len(operations) // 2}  # 2: the sync of the folder in which a folder has been made
    if how == "crash":
        at |= {1, len(operations)}
    if how == "crash" and what == "replace":
        at |= {n for n, line in enumerate(operations, 1) if re.search(r" rename ", line)}
    if how == "crash" and what == "train":  # in the midst of an old checkpoint's deletion; at the run's very end
        at |= {next(n for n, line in enumerate(operations, 1) if " unlink weights" in line) + 1}
        at |= {
            max(n for n, line in enumerate(operations, 1) if re.search(end, line)) for end in (r"/latest$", r"/done$")
        }
    for n in sorted(at):
        survived, said = crashes.fail_at(ground, what, how, n)
        assert survived, said


def test_what_power_loss_asks_for_is_done_in_order(ground):
    """Every file is synced before its folder is renamed, the folder before that and its parent after, and only then
    does an older checkpoint go.
    """
    every = [line.split(" ") for line in crashes.operations(ground, "train")]
    logs = re.compile(r"\.(jsonl|log)$|/usage")  # training goes on with these while a thread saves
    lines = [line for line in every if not logs.search(line[2])]
    names = [(name, path.rstrip("/")) for _, name, path, *_ in lines]
    renamed = 0
    for place, (_, name, path, other) in enumerate(lines):
        if name == "rename" and re.search(r"/\.tmp-\w+-step-\d+$", path):
            renamed += 1
            begun = max(i for i in range(place) if names[i] == ("mkdir", path))
            made = {inner for kind, inner in names[begun:place] if kind == "open"}
            for inner in made:
                changes = ("open", "write")
                last = max(i for i in range(begun, place) if names[i][1] == inner and names[i][0] in changes)
                assert ("fsync", inner) in names[last + 1 : place], inner
            assert len(made) == 6
            assert names[place - 1] == ("fsync", path)
            assert names[place + 1] == ("fsync", str(Path(other).parent))
        elif name in ("replace", "rename") and "/.tmp-" not in other:
            assert names[place - 1] == ("fsync", path)
            assert names[place + 1] == ("fsync", str(Path(other).parent))
    assert renamed >= 5
    gone = next(i for i, line in enumerate(lines) if line[1] == "rename" and "/.tmp-" in line[3])
    before = [i for i in range(gone) if names[i][0] == "rename" and "/.tmp-" in names[i][1]]
    assert len(before) == 3  # two are kept
    synced = [i for i, line in enumerate(every) if line[1] == "fsync" and line[2].endswith("metrics.jsonl")]
    begun = [i for i, line in enumerate(every) if line[1] == "mkdir" and re.search(r"/\.tmp-\w+-step", line[2])]
    for before, place in zip([0, *begun], begun, strict=False):  # a checkpoint builds on events that are on the disk
        assert any(before < i < place for i in synced)


@pytest.mark.slow
def test_kills_of_training_lose_nothing(ground):
    told = []
    for number in range(6):
        survived, said = kills.kill_training(ground, number)
        assert survived, said
        told.append(said)
    assert any(" with 0 checkpoints" not in said for said in told), told


def test_kills_of_tokenizing_lose_nothing(ground):
    for number in range(4):
        survived, said = kills.kill_tokenizing(ground, number)
        assert survived, said


@pytest.mark.slow
def test_damaged_checkpoints_are_found(ground):
    for number in range(6):
        survived, said = damage.spoil_checkpoint(ground, number)
        assert survived, said


@pytest.mark.slow
def test_damaged_tokens_are_found(ground):
    for number in range(6):
        survived, said = damage.spoil_tokens(ground, number)
        assert survived, said


def test_a_damaged_newest_checkpoint_is_set_aside_with_a_warning(ground):
    run = ground.folder / "fallen"
    ground.stopped_at("product-key", 9, run)
    path = run / "checkpoints/step-00000009/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    said = ground.train("product-key", run, "-q").stderr
    assert re.match(r"warning: .*damaged-step-00000009", said)
    assert (run / "checkpoints/damaged-step-00000009/weights.safetensors").read_bytes() == data
    assert "warning: step 8: " in (run / "train.log").read_text()
    assert any(event["event"] == "warn" for event in RunDirectory(run).metrics())
    expected = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"warn"' not in line]
    (run / "metrics.jsonl").write_text("\n".join(expected) + "\n")
    assert not ground.differences("product-key", run)


def test_where_no_checkpoint_is_whole_nothing_is_touched(ground):
    run = ground.stopped_at("product-key", 6, ground.folder / "ruined")
    for step in RunDirectory(run).steps():
        (run / f"checkpoints/step-{step:08d}/state.json").unlink()
    before = sorted(path.name for path in run.rglob("*"))
    said = ground.train("product-key", run, code=1).stderr
    assert re.match(r"error: .*state.json", said)
    assert sorted(path.name for path in run.rglob("*") if path.name != ".lock") == [n for n in before if n != ".lock"]
    other = ground.stopped_at("product-key", 6, ground.folder / "newer")
    manifest = other / "checkpoints/step-00000006/manifest.json"
    manifest.write_text(json_text({**json.loads(manifest.read_text()), "version": 99}))
    assert "version 99" in ground.train("product-key", other, code=2).stderr
    assert manifest.exists()


def test_a_resume_with_another_tokenizer_or_other_tokens_names_both(ground):
    other = ground.folder / "others"
    valid = ground.folder / "valid.txt"
    if not other.exists():
        ground.forks.pkmlm("tokenize", valid, "--valid", valid, "-o", other, "--vocab-size", 350)
    run = ground.stopped_at("product-key", 6, ground.folder / "mixed")
    said = ground.train("product-key", run, "-s", f"data.dir={other}", code=2).stderr
    assert "another tokenizer" in said
    model = ground.tokens / "tokenizer.model"
    tokens = ground.folder / "other-tokens"
    ground.forks.pkmlm("tokenize", valid, "--valid", valid, "-o", tokens, "--tokenizer", model)
    for dry in ([], ["--dry-run"]):
        said = ground.train("product-key", run, "-s", f"data.dir={tokens}", *dry, code=2).stderr
        assert "other tokens" in said
    (run / "run.json").unlink()  # only a record: what the checkpoint was made from stands in the checkpoint
    said = ground.train("product-key", run, "-s", f"data.dir={tokens}", code=2).stderr
    assert "other tokens" in said
    (run / "tokenizer.model").write_bytes((other / "tokenizer.model").read_bytes())
    assert "tokenizer.model" in ground.forks.pkmlm("eval", run, code=1).stderr


def test_a_resume_with_another_text_to_validate_on_is_refused(ground):
    run = ground.stopped_at("product-key", 6, ground.folder / "validated")
    tokens, model = ground.folder / "other-valid", ground.tokens / "tokenizer.model"
    command = ["tokenize", ground.text, "-o", tokens, "--tokenizer", model]
    ground.forks.pkmlm(*command, "--valid", ground.text)
    said = ground.train("product-key", run, "-s", f"data.dir={tokens}", code=2).stderr
    assert "validated on other text" in said
    ground.forks.pkmlm(*command, "--force")
    ended = ground.train("product-key", run, "-s", f"data.dir={tokens}")
    assert "has no valid split" in ended.stderr
    state = json.loads((run / "checkpoints/step-00000012/state.json").read_text())
    assert state["data"].keys() == {"tokenizer", "train", "valid"}, "the split that went is remembered"


def test_an_export_that_crashes_leaves_nothing_half_written(ground):
    count = len(crashes.operations(ground, "export"))
    assert count > 20
    for how, at in (("crash", count // 2), ("ENOSPC", count // 3), ("crash", count)):
        survived, said = crashes.fail_at(ground, "export", how, at)
        assert survived, said


@pytest.mark.slow
def test_a_full_disk_at_several_stages(ground):
    told = set()
    for size in (4096, 45056, 180224):
        survived, said = disks.fill_training(ground, size)
        assert survived, said
        told.add(said)
    if any("no right to mount" in said for said in told):
        pytest.skip("no right to mount a small disk")
    assert len(told) >= 2, told
    for size in (8192, 65536):
        survived, said = disks.fill_tokenizing(ground, size)
        assert survived, said


def test_what_is_told_is_the_first_write_that_failed(ground):
    """No later one, such as noting the failure in run.json or closing the log, takes its place."""
    lines = crashes.operations(ground, "train")
    at = next(n for n, line in enumerate(lines, 1) if " open " in line and "weights.safetensors" in line)
    words, _ = crashes.prepared(ground, "train")
    ended = ground.forks.pkmlm(*words, code=1, disk={"at": at, "how": "ENOSPC"}, **crashes.scale("train"))
    assert re.search(
        r"^error: cannot write \S+(weights.safetensors|metrics.jsonl|train.log)", ended.stderr, re.MULTILINE
    )
    assert "run.json" not in ended.stderr


def test_a_full_disk_under_the_log_is_told_once(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = pytest.raises(UserError, match=r"cannot write \S+metrics.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with told, TrainingLog(tmp_path, "x", 4, Log(), quiet=True) as log:
            log.event("train", 1, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_size_limit_is_a_full_disk(ground):
    run = ground.folder / "limited"
    ended = ground.train("product-key", run, code=1, file_size=20_000)
    assert re.search(r"^error: cannot write ", ended.stderr, re.MULTILINE), ended
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    ground.train("product-key", run)
    assert not ground.differences("product-key", run)


def test_standard_output_on_a_full_disk():
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "pkmlm", "recipe", "keys"]
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*standard output.*\n", done.stderr)


def test_sigterm_saves_wherever_it_comes(ground):
    for number in range(2):
        survived, said = stops.stop_training(ground, number)
        assert survived, said


def test_out_of_memory_says_what_to_lower(ground):
    arguments = ["-s", "model.memories.pkm.num_keys=1024", "-s", "model.dim=64", "-s", "model.memories.pkm.topk=4"]
    # The weights, of 256 MiB, are to fit; what training them takes is not.
    said = ground.train("product-key", ground.folder / "oom", *arguments, code=1, memory=400 << 20).stderr
    assert re.search(r"^error: out of memory.* [\d,]+ MB", said, re.MULTILINE), said
    assert "hint: lower model.memories.pkm.num_keys" in said
    assert said.count("error: ") == 1
    # Needs some 700 MB: far more than a forked child finds free in what its parent holds.
    big = ["-s", "train.batch_tokens=262144", "-s", "train.micro_batch=16384", "-s", "train.precision=fp32"]
    said = ground.train("product-key", ground.folder / "oom", *big, code=1, memory=64 << 20).stderr
    assert "hint: lower train.micro_batch" in said
    assert json.loads((ground.folder / "oom/run.json").read_text())["status"] == "failed"
    dry = ground.train("product-key", ground.folder / "dry", *big, "--dry-run", code=1, memory=64 << 20).stderr
    assert dry.splitlines()[-2:] == said.splitlines()[-2:]


def test_too_large_a_run_is_warned_of(ground):
    said = ground.train(
        "product-key", ground.folder / "too-large", "-s", "model.memories.pkm.num_keys=46340", code=1, memory=1 << 30
    ).stderr
    warning = r"warning: step 0: .* [\d,]{7,} MB; [\d,]+ MB are free: lower model\.memories\.pkm\.num_keys"
    assert re.search(warning, said)
    assert re.search(r"^error: .*memory", said, re.MULTILINE)
    dry = ground.train(
        "product-key",
        ground.folder / "dry",
        "-s",
        "model.memories.pkm.num_keys=46340",
        "--dry-run",
        code=1,
        memory=1 << 30,
    ).stderr
    assert re.search(warning.replace("step 0: ", ""), dry)
    fits = ground.train("product-key", ground.folder / "fits").stderr
    assert "MB are free" not in fits


def test_one_long_line_is_tokenized(ground):
    survived, said = sizes.one_long_line(ground, size=1_000_000, memory=512 << 20)
    assert survived, said


def test_torn_and_strange_lines_of_metrics_are_dropped(ground):
    run = ground.stopped_at("product-key", 6, ground.folder / "torn")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4}\n[1, 2]\n{"event": "valid", "step": 4}\nnull\n{"event": "train", "step": 5, "lo')
    ground.train("product-key", run)
    strange = '{"event": "valid", "step": 4}'
    kept = [line for line in (run / "metrics.jsonl").read_text().splitlines() if line != strange]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    assert not ground.differences("product-key", run)


def test_the_trials_can_be_lost(ground):
    """The judges themselves: a run that differs in one bit, half a folder, an error in two lines."""
    run = ground.folder / "copied"
    shutil.copytree(ground.reference("mixed"), run, dirs_exist_ok=True)
    assert not ground.differences("mixed", run)
    path = run / "checkpoints/step-00000012/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert ground.differences("mixed", run) == ["step-00000012: optimizer"]
    (run / ".tmp-x").touch()
    assert ground.differences("mixed", run) == ["leftovers", "step-00000012: optimizer"]
    half = shutil.copytree(ground.tokens, ground.folder / "half")
    assert kills.same(half, ground.tokens)
    (half / "train.documents").unlink()
    assert not kills.whole(ground, half, force=False)
    assert crashes.untold(1, "error: cannot write x: No space left on device\n") == []
    for code, said in itertools.product((1, 2, 99), ("", "Traceback\n", "error: a\nerror: b\n")):
        assert crashes.untold(code, said)
    assert damage.refused(Ended(1, "", "error: a\nhint: b\n", 0.0), (1,))
    assert not damage.refused(Ended(0, "", "", 0.0), (1,))
    assert not damage.refused(Ended(1, "", "error: a\nmore\n", 0.0), (1,))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # limits stay in the children
