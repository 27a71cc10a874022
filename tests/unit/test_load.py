"""Which checkpoint is read."""

import json
import shutil

from pkmlm import load_run
from pkmlm.runs.directory import RunDirectory
from tests.conftest import pkmlm


def test_python_and_commands_read_the_same_checkpoint(trained, tmp_path):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(trained("product-key"), run.path)
    first, *_, last = run.steps()
    run.set_pointer("best", first)
    for words in (["eval", run.path, "--json", "-q"], ["slots", run.path, "--json"]):
        assert json.loads(pkmlm(*words).stdout)["step"] == load_run(run.path).step == last
    assert load_run(run.path, "best").step == first
