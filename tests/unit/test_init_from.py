"""What a run takes from another run's weights, what it draws, and what it says of both."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pkmlm.data.corpus import Corpus
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import DeviceSettings
from pkmlm.distributed import ProcessGroups
from pkmlm.errors import UserError
from pkmlm.files import MANIFEST, entry_of, read_json, write_json
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.load import load_recipe
from pkmlm.runs.checkpoint import write_tensors
from pkmlm.runs.directory import RunDirectory
from pkmlm.train.init_from import check_init_from
from pkmlm.train.job import Job
from pkmlm.train.run import initial_model
from tests.conftest import pkmlm

FACTS = ("kind=product-key", "num_keys=16", "heads=2", "topk=4", "key_dim=16")
MEMORY = [f"model.memories.facts.{each}" for each in FACTS]


def job_from(source: Path, *changes: str) -> Job:
    """That of the recipe of a run, changed, to start from the run's weights with another seed."""
    run = RunDirectory(source)
    recipe = load_recipe(run.recipe_file, [f"train.init_from={source}", "train.seed=9", *changes])
    return Job(recipe, Corpus(recipe.data.dir, "train"), Tokenizer.load(run.tokenizer_file))


def started(job: Job) -> Transformer:
    step = RunDirectory(str(job.recipe.train.init_from)).resolve("best")
    return initial_model(job, DeviceSettings(torch.device("cpu"), "fp32", ""), ProcessGroups(), step)


def warnings_of(job: Job) -> list[str]:
    return check_init_from(job)[1]


def test_the_same_text_in_the_same_order_is_warned_of(trained):
    source = trained("dense")
    (warning,) = warnings_of(job_from(source, f"train.seed={RunDirectory(source).recipe().train.seed}"))
    assert "train.init_from" in warning
    assert "train.seed" in warning
    assert not warnings_of(job_from(source))


@pytest.mark.parametrize(
    ("kind", "changes", "missing", "unexpected"),
    [
        ("dense", [*MEMORY, "model.memories.facts.layers=2+"], ["facts (layer 2)"], []),
        ("dense", [*MEMORY, "model.memories.facts.layers=[1+, 2]"], ["facts (layers 1, 2)"], ["ffn (layer 2)"]),
        ("dense", ["model.layers=4"], ["ffn (layers 3, 4)"], []),
        ("dense", ["model.bias=none", "model.positions=rotary"], [], ["ffn.up.bias (layers 1, 2)", "positions"]),
        (
            "dense",
            ["model.memories.tables.kind=hash", "model.memories.tables.bits=4"],
            ["attention (layers 1, 2)", "tables (layers 1, 2)"],
            ["attention (layers 1, 2)", "ffn (layers 1, 2)"],
        ),
        ("product-key", ["model.memories=null"], ["ffn (layer 2)"], ["pkm (layer 2)"]),
        ("product-key", [*MEMORY, "model.memories.facts.layers=1"], ["facts (layer 1)"], ["ffn (layer 1)"]),
        ("product-key", [*MEMORY, "model.memories.facts.layers=1+"], ["facts (layer 1)"], []),
        ("memory-plus", ["model.memories.plus=null"], ["ffn (layer 2)"], ["plus (layers 1, 2), plus.values.weight_KD"]),
        ("ngram", ["model.memories.ngrams.layers=2"], [], ["ngrams (layer 1)"]),
    ],
)
def test_what_both_have_is_loaded_and_the_rest_is_drawn_and_named(trained, kind, changes, missing, unexpected):
    job, source = job_from(trained(kind), *changes), RunDirectory(trained(kind))
    model, fresh = started(job).state_dict(), build_model(job.recipe, job.vocab_size).state_dict()
    stored = load_file(source.checkpoint(int(source.best() or 0)) / "weights.safetensors")
    assert all(torch.equal(tensor, stored.get(name, fresh[name])) for name, tensor in model.items())
    (warning,) = warnings_of(job)
    there, _, here = warning.partition("left out: ")
    assert all(module in there for module in missing), warning
    assert all(module in here for module in unexpected), warning
    assert ("new here" in there, bool(here)) == (bool(missing), bool(unexpected))


def test_the_same_model_starts_with_all_weights_and_no_warning(trained, tmp_path):
    """Moments are not read, and need not be whole."""
    run = Path(shutil.copytree(trained("dense"), tmp_path / "run"))
    for file in run.glob("checkpoints/*/optimizer.safetensors"):
        file.write_bytes(b"")
    job = job_from(run)
    stored = load_file(RunDirectory(run).checkpoint(30) / "weights.safetensors")
    model = started(job).state_dict()
    assert model.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.items())
    assert warnings_of(job) == []


def test_a_run_says_which_step_it_started_from_and_all_ranks_start_from_it(trained, write_recipe, tmp_path):
    source = Path(shutil.copytree(trained("dense"), tmp_path / "source", symlinks=True))
    job, (first, last) = job_from(source), RunDirectory(source).steps()
    (source / "checkpoints" / f"step-{last:08d}").rename(tmp_path / "later")
    step, _ = check_init_from(job)
    assert step == first
    (tmp_path / "later").rename(RunDirectory(source).checkpoint(last))  # meanwhile it trains on
    device = DeviceSettings(torch.device("cpu"), "fp32", "")
    model, at = initial_model(job, device, ProcessGroups(), step).state_dict(), RunDirectory(source).checkpoint(first)
    assert all(torch.equal(model[name], tensor) for name, tensor in load_file(at / "weights.safetensors").items())
    given = ("-s", f"train.init_from={source}", "-s", "train.steps=1", "-q")
    pkmlm("train", write_recipe(tmp_path, "dense"), "-o", tmp_path / "run", *given)
    assert RunDirectory(tmp_path / "run").facts()["init_from_step"] == last


def test_what_the_same_weights_mean_is_told_where_it_changes(trained):
    spelt_out = ("model.kv_heads=2", "model.head_dim=16", "model.norm_eps=1e-5", "model.ffn_dim=128")
    assert warnings_of(job_from(trained("dense"), *spelt_out)) == []
    (warning,) = warnings_of(job_from(trained("dense"), "model.heads=4", "model.rotary_fraction=0.5"))
    assert "model.heads is 2 there and 4 here" in warning
    assert "rotary" not in warning, "it has no effect"
    changes = ("model.ffn=relu", "model.document_mask=false", "model.rotary_base=500")
    (warning,) = warnings_of(job_from(trained("modern"), *changes[1:]))
    assert "model.document_mask is true there and false here" in warning
    assert "model.rotary_base is 10000.0 there and 500.0 here" in warning
    (warning,) = warnings_of(job_from(trained("dense"), changes[0]))
    assert "model.ffn is gelu there and relu here" in warning
    (warning,) = warnings_of(job_from(trained("ngram"), "model.memories.ngrams.canonical=false"))
    assert "model.memories.ngrams.canonical is true there and false here" in warning
    assert "ids_V" not in warning, "the tokenizer gives them"


def test_a_tied_head_starts_an_untied_one(trained):
    tokens = torch.arange(20)[None]
    tied, untied = job_from(trained("dense")), job_from(trained("dense"), "model.tie_embeddings=false")
    model = started(untied)
    assert torch.equal(model(tokens), started(tied)(tokens))
    assert model.untied_head.weight.data_ptr() != model.embedding.weight.data_ptr()
    (warning,) = warnings_of(untied)
    assert "untied_head" in warning
    assert "anew" not in warning


@pytest.mark.parametrize(
    ("changes", "tensor", "differing"),
    [
        (["model.dim=64"], "embedding.weight", "model.dim is 32 there and 64 here"),
        (["model.memories=null", "model.ffn_dim=8"], "up.weight", "model.ffn_dim is 128"),
        (["model.memories.pkm.num_keys=8", "model.memories.pkm.optim.lr=1e-3"], "subkeys", "pkm.num_keys is 16 there"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_the_keys_that_differ(trained, changes, tensor, differing):
    job = job_from(trained("product-key"), *changes)
    for begin in (check_init_from, started):
        with pytest.raises(UserError, match=f"^train.init_from: .*{tensor}") as error:
            begin(job)
        assert error.value.exit_code == 2
        assert differing in error.value.hint
        assert "lr" not in error.value.hint, "it makes no shape"


def test_a_run_without_any_tensor_of_the_model_is_refused(trained, tmp_path):
    run = Path(shutil.copytree(trained("dense"), tmp_path / "run"))
    for path in (run / "checkpoints").iterdir():
        file, manifest = path / "weights.safetensors", read_json(path / MANIFEST, "the manifest")
        write_tensors(file, {f"old.{name}": tensor.clone() for name, tensor in load_file(file).items()})
        manifest["files"][file.name] = entry_of(file)
        write_json(path / MANIFEST, manifest)
    with pytest.raises(UserError, match=r"^train.init_from: .*weights.safetensors has no tensor"):
        check_init_from(job_from(run))
