"""`pkmlm doctor` as a user runs it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pkmlm import __version__
from pkmlm.cli.doctor import GIGA, NEEDED, OLDEST_TORCH, OPTIONAL, examine, problems
from tests import PATIENCE
from tests.conftest import ROOT, pkmlm


def test_json_names_versions_devices_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    done = pkmlm("doctor", "--json")
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts["versions"]["pkmlm"] == __version__
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_bytes"] > GIGA
    assert facts["disk"] == {**facts["disk"], "folder": str(tmp_path), "writable": True}
    assert facts["torch"]["precision"] in ("fp32", "bf16", "fp16")
    threads = [problem for problem in facts["problems"] if "OMP_NUM_THREADS=99" in problem["what"]]
    assert len(threads) == 1
    assert not threads[0]["broken"]


def test_text_is_for_a_person() -> None:
    labels = [line[:20].strip() for line in pkmlm("doctor").stdout.splitlines()]
    assert {"python", "huggingface-hub", "pkmlm", "torch", "system", "cores", "memory", "disk", "device"} <= set(labels)


def test_a_torch_that_does_not_import_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file\\nmore')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pkmlm", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = [problem for problem in json.loads(done.stdout)["problems"] if problem["broken"]]
    assert problem["what"] == "torch does not work: libcudart.so.12: no such file"


@pytest.mark.parametrize(
    ("section", "key", "value", "what", "broken"),
    [
        ("versions", "torch", "2.9.1", "torch 2.9.1", True),
        ("versions", "psutil", None, "psutil", True),
        ("torch", "kernels_lack", ["A", "B"], "A and no B", True),
        ("disk", "free_bytes", GIGA, "1.0 GB of disk", False),
        ("disk", "writable", False, "cannot write to ", False),
        ("machine", "memory_free_bytes", GIGA // 2, "0.5 GB of memory", False),
    ],
)
def test_what_is_wrong_is_named(section: str, key: str, value: object, what: str, broken: bool) -> None:
    healthy = examine()
    healthy["machine"].update(omp_num_threads=None, memory_free_bytes=8 * GIGA)
    healthy["disk"].update(free_bytes=100 * GIGA, writable=True)
    healthy["versions"]["wandb"] = None  # an optional package that is missing is no problem
    if "error" not in healthy["torch"] and not healthy["torch"]["cuda"]:
        healthy["torch"]["cuda"] = [{}]  # a GPU that this torch cannot use is another test's matter
    healthy["torch"]["kernels_lack"] = []
    assert problems(healthy) == []
    (found,) = problems({**healthy, section: {**healthy[section], key: value}})
    assert what in found["what"]
    assert found["broken"] is broken
    assert found["todo"]


def test_what_is_looked_for_is_what_setup_installs() -> None:
    (call,) = [
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    ]
    given = {each.arg: each.value for each in call.keywords}
    listed, extras = (ast.literal_eval(given[key]) for key in ("install_requires", "extras_require"))
    assert "torch>={}.{},<3".format(*OLDEST_TORCH) in listed
    for names, requirements in ((NEEDED, listed), (OPTIONAL, extras["hf"] + extras["sinks"])):
        assert sorted(names) == sorted(re.split("[<>=]", requirement)[0] for requirement in requirements)
