"""Every command that the README shows is run, in its order, on files of the names that it uses."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, pkmlm
from tests.task_rows import write_rows

README = (ROOT / "README.md").read_text()
SHOWN = [line[2:] for block in re.findall(r"```console\n(.*?)```", README, re.S) for line in block.splitlines()]
# What keeps a training of the README's short here, and in one process; the rest of the command is run as it stands.
SMALL = ["-s", "train.steps=3", "-s", "train.batch_tokens=512", "-s", "train.micro_batch=2", "-s", "eval.tokens=200"]
SMALL += ["--nproc", "1"]


@pytest.fixture(scope="module")
def _folder(novels: Path, tmp_path_factory: pytest.TempPathFactory):
    """A working directory with the README's files in it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for shown, split in (("my", "train"), ("more", "valid"), ("valid", "valid"), ("test", "test")):
        (folder / f"{shown}.txt").write_bytes((novels / f"{split}.txt").read_bytes())
    write_rows(folder / "tasks")
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)


@pytest.mark.usefixtures("_folder")
def test_every_command_of_the_readme():
    assert len(SHOWN) >= 10
    for line in SHOWN:
        program, *arguments = shlex.split(line)
        assert program == "pkmlm", line
        done = pkmlm(*arguments, *(SMALL if arguments[0] == "train" else []))
        assert done.stdout or arguments[0] == "train", line


def test_a_memory_in_a_network_of_your_own():
    (program,) = re.findall(r"```python\n([^`]*GPT2[^`]*)```", README)
    check = "assert memory.values.weight_KD.grad is None and all(optimizer.state for optimizer in optimizers)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program + check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert 50 < float(re.fullmatch(r"([0-9.]+)% of the slots were read\n", done.stdout)[1]) < 100


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    targets += [f"{path.parts[-3]}-{path.stem}" for path in (ROOT / "recipes").glob("*/grids/*.yaml")]
    shown = [word for line in re.findall(r"^make (.+)", README, re.M) for word in line.partition("#")[0].split()]
    named = [word for word in shown if "=" not in word] + re.findall(r"`make ([a-z0-9-]+)`", README)
    assert len(named) >= 8
    for target in named:
        assert target in targets, target
