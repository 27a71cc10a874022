"""Weights that no training saves are refused, though their hashes are right."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pkmlm.files import json_text, sha256_of
from tests.conftest import pkmlm


def forged(run: Path, folder: Path, name: str, value: float) -> Path:
    """A copy of a run in whose last checkpoint one number is another, and the hashes are right again."""
    shutil.copytree(run, folder)
    checkpoint = max((folder / "checkpoints").iterdir())
    path = checkpoint / "weights.safetensors"
    tensors = load_file(path)
    tensors[next(key for key in tensors if key.endswith(name))].view(-1)[0] = value
    save_file(tensors, path)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    (checkpoint / "manifest.json").write_text(json_text(manifest))
    return folder


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("values.weight_KD", float("inf"), "weight_KD"),
        ("running_var", -1.0, "running_var"),
    ],
)
def test_numbers_that_cannot_be(trained, tmp_path, name, value, said):
    run = forged(trained("product-key"), tmp_path / "run", name, value)
    for command in (["generate", run, "a"], ["export", run, "-o", tmp_path / "out"]):
        told = pkmlm(*command, code=1).stderr
        assert said in told
        assert told.startswith("error: ")
    assert not (tmp_path / "out").exists()
