"""The ground of the trials, and the judge: whether a run that was hurt ended as one that was not."""

import hashlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import ROOT, Ended, Forks

STEPS = 12
RECIPE = """name: torture-{kind}
data: {{dir: {tokens}}}
model:
  dim: 16
  layers: 2
  heads: 2
  context: 16
  dropout: 0.1
  memories: {memories}
optim: {{lr: 3e-3, schedule: cosine, warmup_steps: 5}}
train: {{steps: {steps}, batch_tokens: 128, micro_batch: 4, precision: {precision}}}
eval: {{every: 4, tokens: 200}}
checkpoint: {{every: 3}}
log: {{every: 3}}
"""
PKM = "pkm: {kind: product-key, layers: 2, num_keys: 8, heads: 2, topk: 3, key_dim: 8, optim: {lr: 4e-3}}"
TABLES = "tables: {kind: hash, layers: 1, bits: 4}"
NGRAMS = "ngrams: {kind: ngram, layers: 1, orders: [2], heads: 2, rows: 31, row_dim: 4}"
KINDS = {  # of runs: the memories, the precision, the number of ranks
    "product-key": (f"{{{PKM}}}", "fp16", 1),
    "mixed": (f"{{{NGRAMS}, {TABLES}, {PKM}}}", "fp32", 1),
    "two-ranks": (f"{{{PKM}}}", "fp32", 2),
}
INIT_SCALE = 2.0**25  # fp16's first steps overflow, so that skips and the scale are worth saving


@dataclass(frozen=True)
class Ground:
    """What trials begin from: a text, its tokens, and for each kind of run a recipe and a run that nobody hurt."""

    folder: Path
    forks: Forks

    @property
    def text(self) -> Path:
        return self.folder / "train.txt"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    def recipe(self, kind: str) -> Path:
        return self.folder / f"{kind}.yaml"

    def reference(self, kind: str) -> Path:
        return self.folder / f"{kind}-reference"

    def train(self, kind: str, run: Path, *words: object, code: int | None = 0, **arguments: Any) -> Ended:
        """Train in a child for each rank; the end of the first. Another code than the expected one is an
        AssertionError.
        """
        given = [str(word) for word in ("train", self.recipe(kind), "-o", run, *words)]
        ended = self.forks.run("command", size=KINDS[kind][2], words=given, init_scale=INIT_SCALE, **arguments)
        assert code is None or all(one.code == code for one in ended), f"{given}: {ended}"
        return ended[0]

    def make(self) -> "Ground":
        """Make what is not there yet."""
        import zstandard

        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.text.exists():
            for name, size in (("train", 40_000), ("valid", 3_000)):
                stored = (ROOT / "recipes" / "demo" / f"{name}.txt.zst").read_bytes()
                text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(stored), encoding="utf-8")
                self.folder.joinpath(f"{name}.txt").write_text(text.read(size))
        valid = self.folder / "valid.txt"
        warm = ("tokenize", valid, "-o", self.folder / "warm-tokens", "--vocab-size", 320, "--force")
        self.forks.pkmlm(*warm, here=True)
        if not self.tokens.exists():
            self.forks.pkmlm("tokenize", self.text, "--valid", valid, "-o", self.tokens, "--vocab-size", 350)
        for kind, (memories, precision, ranks) in KINDS.items():
            text = RECIPE.format(kind=kind, tokens=self.tokens, memories=memories, precision=precision, steps=STEPS)
            self.recipe(kind).write_text(text)
            shutil.rmtree(self.folder / "warm", ignore_errors=True)
            if ranks == 1:
                self.forks.pkmlm("train", self.recipe(kind), "-o", self.folder / "warm", here=True)
            if not self.reference(kind).exists():
                self.train(kind, self.reference(kind), "-s", "checkpoint.keep=100")
        return self

    def stopped_at(self, kind: str, step: int, run: Path) -> Path:
        """A run as a kill right after the checkpoint of `step` leaves it."""
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.reference(kind), run)
        for folder in (run / "checkpoints").iterdir():
            if int(folder.name[5:]) > step:
                shutil.rmtree(folder)
        (run / "done").unlink()
        return run

    def differences(self, kind: str, run: Path) -> list[str]:
        """In what a finished run differs from the one that nobody hurt: losses, evaluations, weights, optimizer..."""
        expected, found = state_of(self.reference(kind)), state_of(run)
        there = [{path.name for path in one.glob("checkpoints/step-*")} for one in (self.reference(kind), run)]
        common = set.intersection(*there) | {f"step-{STEPS:08d}"}  # a request to stop saves at a step of its own
        compared = {n for n in expected.keys() | found.keys() if not n.startswith("step-") or n[:13] in common}
        return sorted(name for name in compared if expected.get(name) != found.get(name))


def state_of(run: Path) -> dict[str, Any]:
    """All that a finished run's outcome is, but for times."""
    state: dict[str, Any] = {}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in ("train", "valid", "drift", "warn"):
        chosen = [line for line in lines if line["event"] == event]
        state[event] = [exact({k: v for k, v in line.items() if k != "tokens_per_second"}) for line in chosen]
    for folder in run.glob("checkpoints/step-*"):
        for name in ("weights", "optimizer", "drift"):
            data = (folder / f"{name}.safetensors").read_bytes()
            state[f"{folder.name}: {name}"] = hashlib.sha256(data).hexdigest()
        progress = json.loads((folder / "state.json").read_text())
        passed = ("seconds", "validations")  # what validations have shown, `best` and the events say
        state[f"{folder.name}: progress"] = exact({k: v for k, v in progress.items() if k not in passed})
    state.update({name: (run / name).read_text() for name in ("best", "latest", "done")})
    facts = json.loads((run / "run.json").read_text())
    state["outcome"] = tuple(facts.get(key) for key in ("status", "exit_code", "step"))
    state["leftovers"] = sorted(path.name for path in run.rglob(".tmp-*"))
    return state


def exact(value: Any) -> Any:
    """A JSON value with its floats in hexadecimal."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {key: exact(part) for key, part in value.items()}
    return [exact(part) for part in value] if isinstance(value, list) else value
