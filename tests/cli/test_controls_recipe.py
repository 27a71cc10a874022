"""The text of the controls, and the model of books: what recipes bring along beside grids."""

import json
import subprocess
import sys

import zstandard

from pkmlm.recipe.load import load_recipe
from pkmlm.runs.directory import RunDirectory
from tests import PATIENCE
from tests.conftest import ROOT, pkmlm

BOOKS = ROOT / "recipes" / "pretrained" / "books-128"


def test_the_first_megabytes_of_several_files(tmp_path):
    texts = ["one é\n\n\ntwo", "three é four"]
    (tmp_path / "b.txt").write_text(texts[1])
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(texts[0].encode()))
    whole = "\n\n\n".join(texts).encode()
    for size in (4, 5, 13, 20, 26, 1000):  # between the bytes of the first é, within a separator, more than there is
        command = [
            sys.executable,
            ROOT / "recipes" / "controls" / "sample.py",
            tmp_path / "b.txt",
            tmp_path / "a.txt.zst",
        ]
        command += ["--megabytes", size / 1e6, "-o", tmp_path / "new" / "out.txt"]
        subprocess.run(list(map(str, command)), check=True, timeout=PATIENCE)
        found = (tmp_path / "new" / "out.txt").read_bytes()
        assert found == whole[:size].decode(errors="ignore").encode()


def test_the_model_of_books_is_the_one_that_the_grid_trains_further(tmp_path):
    pkmlm("import", BOOKS, "-o", tmp_path / "run", "-q")
    theirs = RunDirectory(tmp_path / "run").recipe().model
    ours = load_recipe(ROOT / "recipes" / "pretrained" / "continued.yaml").model
    for name in ("dim", "layers", "heads", "context", "qk_norm", "rotary_base", "tie_embeddings", "document_mask"):
        assert getattr(theirs, name) == getattr(ours, name), name
    text = zstandard.ZstdDecompressor().stream_reader((ROOT / "recipes/demo/test.txt.zst").open("rb")).read(20_000)
    (tmp_path / "text.txt").write_text(text.decode(errors="ignore"))
    measured = json.loads(pkmlm("eval", tmp_path / "run", "--text", tmp_path / "text.txt", "--json").stdout)
    assert 1.3 < measured["perplexity"]["bits_per_byte"] < 1.8, "of a novel; 8 without a model"
