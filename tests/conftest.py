"""Shared ground: a few pages of real text, their tokens, and small trained runs, made by the commands themselves."""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from pkmlm.cli import main
from tests.forks import Children, Ended, Forks

# A shell that runs the tests in the background ignores Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "2")
# The tests are of a CPU, also where there is a GPU: its kernels have their own, in unit/test_cuda_kernels.py.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as commands do, before any other process loads torch
os.environ["HF_HUB_OFFLINE"] = "1"  # without a network, a look at the hub is tried again for 20 seconds


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: seconds of processes, kills or browsers; `make test-all` runs it, too")


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def pkmlm(*arguments: object, code: int = 0, stdin: str | bytes = "") -> Done:
    """Run the command line as a user does, in this process (importing torch takes seconds); check its exit code."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    given = stdin if isinstance(stdin, bytes) else stdin.encode()
    sys.argv, sys.stdin = ["pkmlm", *map(str, arguments)], io.TextIOWrapper(io.BytesIO(given))
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            main()
    finally:
        sys.argv, sys.stdin = before
    done = Done(int(end.value.code or 0), out.getvalue(), err.getvalue())
    assert done.returncode == code, f"{arguments}: {done}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def given(*settings: str) -> list[str]:
    """The words with which a command line overrides keys."""
    return [word for setting in settings for word in ("-s", setting)]


@pytest.fixture(scope="session")
def foreign_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each module that a process of ours might import; none of them may be run."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in {*sys.stdlib_module_names, "pkmlm", "torch", "numpy", "click", "rich", "yaml"}:
        (folder / f"{name}.py").write_text("raise SystemExit('code of the working folder')\n")
    return folder


@pytest.fixture(scope="session")
def novels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt, valid.txt and test.txt: the beginnings of the demo's novels."""
    folder = tmp_path_factory.mktemp("novels")
    for split, size in (("train", 150_000), ("valid", 12_000), ("test", 15_000)):
        stored = (ROOT / "recipes" / "demo" / f"{split}.txt.zst").read_bytes()
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stored), encoding="utf-8", newline="")
        (folder / f"{split}.txt").write_bytes(text.read(size).encode())
    return folder


@pytest.fixture(scope="session")
def tokens(novels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokens of `novels`: vocabulary 600."""
    folder = tmp_path_factory.mktemp("tokens") / "novels"
    splits = [f"--{split}={novels / split}.txt" for split in ("valid", "test")]
    pkmlm("tokenize", novels / "train.txt", *splits, "-o", folder, "--vocab-size", 600)
    return folder


def model_2019(**keys: Any) -> Any:
    """The section `model` of a recipe, with the block of 2019 where the keys do not say otherwise."""
    from pkmlm.recipe.schema import Model

    return Model(**{**OLD_MODEL, **keys})


def optim_2019(**keys: Any) -> Any:
    """The section `optim`, likewise."""
    from pkmlm.recipe.schema import Optim

    return Optim(**{**OLD_OPTIM, **keys})


def recipe_2019(**sections: Any) -> Any:
    """A recipe, likewise."""
    from pkmlm.recipe.schema import Recipe

    return Recipe(**{"model": model_2019(), "optim": optim_2019(), **sections})


# As in recipes/block-2019.yaml.
OLD_MODEL: dict[str, Any] = {
    **{"norm": "layer", "ffn": "gelu", "positions": "learned", "qk_norm": False, "document_mask": False},
    **{"bias": "all", "tie_embeddings": True, "init": "small"},
}
OLD_OPTIM: dict[str, Any] = {
    **{"lr": 2.5e-4, "matrices": "adamw", "betas": (0.9, 0.98), "schedule": "inverse-sqrt", "warmup_steps": 4000},
}
KEYS = "heads: 2, topk: 4, key_dim: 16, optim: {lr: 4e-3}"
MODELS = {
    "dense": "null",
    "product-key": f"{{pkm: {{kind: product-key, layers: 2, num_keys: 16, {KEYS}}}}}",
    "flat-key": f"{{flat: {{kind: flat-key, layers: 2, num_keys: 8, {KEYS}}}}}",
    "memory-plus": f"{{plus: {{kind: product-key, layers: [1+, 2], num_keys: 16, {KEYS}, share_values: true, "
    "gate: silu, value_dim: 24, key_norm: rms, query_norm: none}}",
    "peer": f"{{experts: {{kind: peer, layers: 2, num_keys: 16, {KEYS}}}}}",
    "ngram": "{ngrams: {kind: ngram, layers: [1, 2], orders: [2, 3], heads: 2, rows: 251, row_dim: 8}}",
    "hash": "{tables: {kind: hash, bits: 4, extra_bits: 2}}",
    "modern": f"{{pkm: {{kind: product-key, layers: 2, num_keys: 16, {KEYS}}}}}",
    "mixed": "{ngrams: {kind: ngram, layers: 1, orders: [2], heads: 2, rows: 251, row_dim: 8}, "
    f"tables: {{kind: hash, layers: 1, bits: 4}}, pkm: {{kind: product-key, layers: [1+, 2], num_keys: 16, {KEYS}}}}}",
}


@pytest.fixture(scope="session")
def write_recipe(tokens: Path) -> Callable[[Path, str], Path]:
    """A function that writes a tiny recipe of a kind of model and returns its path."""

    def write(folder: Path, kind: str) -> Path:
        path = folder / f"{kind}.yaml"
        path.write_text(
            f"""{"" if kind == "modern" else "base: block-2019"}
name: tiny-{kind}
data: {{dir: {tokens}}}
model:
  {"kv_heads: 1" if kind == "modern" else ""}
  {"smear: true" if kind == "modern" else ""}
  dim: 32
  layers: 2
  heads: 2
  context: 32
  memories: {MODELS[kind]}
optim: {{lr: 3e-3, schedule: cosine, warmup_steps: 5}}
train: {{steps: 30, batch_tokens: 256, micro_batch: 4}}
eval: {{every: 15, tokens: 600}}
checkpoint: {{every: 10}}
log: {{every: 10}}
"""
        )
        return path

    return write


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, write_recipe: Callable[[Path, str], Path]
) -> Callable[[str], Path]:
    """A function that gives the finished tiny run of a kind of model, trained once a session. Do not write into it."""
    folder = tmp_path_factory.mktemp("runs")

    def run(kind: str) -> Path:
        if not (folder / kind).exists():
            pkmlm("train", write_recipe(folder, kind), "-o", folder / kind, "-q")
        return folder / kind

    return run


class Ranks:
    """Starts ranks, as children of one server."""

    def __init__(self, forks: Forks):
        self.forks = forks

    def start(self, size: int, job: str, limit: float = 60.0, **arguments: Any) -> Children:
        """Let `size` ranks begin a job of `tests.distributed.jobs`."""
        return self.forks.start(job, size, limit, **arguments)

    def run(self, size: int, job: str, code: int | None = 0, **arguments: Any) -> list[Ended]:
        """Run a job on `size` ranks to its end, and check their exit codes (None: any)."""
        ended = self.start(size, job, **arguments).end()
        assert code is None or {rank.code for rank in ended} == {code}, ended
        return ended

    def pkmlm(self, size: int, *words: object, code: int | None = 0) -> list[Ended]:
        """Run a command line on `size` ranks."""
        return self.run(size, "command", code, words=[str(word) for word in words])


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Forks(tmp_path_factory.mktemp("ranks"), "tests.distributed.jobs") as forks:
        forks.run("warm", here=True)
        yield Ranks(forks)


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[Any], object]) -> None:
    """Let something be done, in this process, when training has taken a step."""
    from pkmlm.train import loop

    queue_step = loop.queue_step

    def taken(state: Any, number: int) -> Any:
        result = queue_step(state, number)
        if number == step:
            do(state)
        return result

    monkeypatch.setattr(loop, "queue_step", taken)


def rewrite(checkpoint: Path, name: str, text: str) -> None:
    """Write a small file of a checkpoint, and what its manifest says of it."""
    from pkmlm.files import entry_of, write_json, write_text

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    write_text(checkpoint / name, text)
    manifest["files"][name] = entry_of(checkpoint / name)
    write_json(file, manifest)


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    rewrite(checkpoint, "state.json", json.dumps(state))


def write_checkpoint(run: Path, recipe: Any, progress: Any) -> Path:
    """Write a checkpoint as training does, but without its tensors, which only those need who load it."""
    from pkmlm.files import make_folder, write_json
    from pkmlm.recipe.schema import dump_recipe
    from pkmlm.runs.directory import RunDirectory
    from pkmlm.runs.record import CHECKPOINT_VERSION

    folder = RunDirectory(run).checkpoint(progress.step)
    make_folder(folder)
    write_json(folder / "manifest.json", {"version": CHECKPOINT_VERSION, "step": progress.step, "files": {}})
    write_state(folder, asdict(progress))
    rewrite(folder, "recipe.yaml", dump_recipe(recipe))
    return folder
