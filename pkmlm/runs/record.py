"""What a checkpoint says of itself besides its tensors: how far training was, the recipe, the digests of its files.

A checkpoint stands for itself: its manifest holds the size and sha256 of each of its files, and the sha256 of the
manifest is the checkpoint's digest, by which results name the weights that they were measured on. Needs no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pkmlm.errors import UserError
from pkmlm.files import MANIFEST, Damaged, Manifest, ManifestEntry, check_files, read_json, read_manifest, sha256_of
from pkmlm.recipe.load import load_recipe
from pkmlm.recipe.schema import Recipe

CHECKPOINT_VERSION = 2
STATE, RECIPE = "state.json", "recipe.yaml"


@dataclass
class Validations:
    """What the validations of a run have shown.

    Attributes:
        step: of the last one; None: there was none.
        best_step, best_loss: of the best one (nats per token).
        worse: validations since the best one.
        due: whether a stop request has cut short the validation of the saved step.
        tokens: number of tokens that each of them scored; None: not known. If it changes, the best is reset.
    """

    step: int | None = None
    best_step: int | None = None
    best_loss: float | None = None
    worse: int = 0
    due: bool = False
    tokens: int | None = None

    def add(self, step: int, loss: float, tokens: int | None) -> bool:
        """Record a validation; return whether it is the best so far."""
        if tokens != self.tokens and self.tokens is not None:  # `eval.tokens` has changed: another text
            self.best_step, self.best_loss, self.worse = None, None, 0
        self.step, self.due, self.tokens = step, False, tokens
        if self.best_loss is None or loss < self.best_loss:
            self.best_step, self.best_loss, self.worse = step, loss, 0
            return True
        self.worse += 1
        return False


@dataclass
class Progress:
    """How far a run is: state.json of a checkpoint.

    Attributes:
        step: steps taken.
        tokens: training tokens scored.
        skips: fp16 steps skipped in a row.
        scaler: state of the loss scaler; empty without one.
        seconds: time spent in training steps.
        vocab_size: rows of the model's embedding.
        parameters: their numbers, as `pkmlm cost` counts them: "dense", "memory", "read_per_token".
        data: the sha256 of all that a resume must find again, such as tokens and tokenizer (`train.job.hashes_of`).
        validations: which determine the best checkpoint and the end of patience.
    """

    step: int = 0
    tokens: int = 0
    skips: int = 0
    scaler: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    vocab_size: int = 0
    parameters: dict[str, int] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    validations: Validations = field(default_factory=Validations)


class CheckpointManifest(Manifest):
    """manifest.json of a checkpoint."""

    step: int


def damaged_hint(folder: Path) -> str:
    """The hint for a damaged checkpoint; it depends on whether there is an earlier one, which may be intact."""
    if any(other.name < folder.name for other in folder.parent.glob("step-*")):
        return "the checkpoint is damaged: `pkmlm train` goes back to the one before it"
    return "the checkpoint is damaged, and there is none before it: copy the run's folder again, or train it again"


def checkpoint_digest(folder: Path) -> str:
    """The sha256 of a checkpoint's manifest, and so of all of its files."""
    return sha256_of(folder / MANIFEST)


def read_checkpoint_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """What a checkpoint's manifest says of its files.

    Raises:
        Damaged: (exit code 1) it is missing, not what was written, or that of another step than the folder's.
        UserError: (1) it cannot be read; (2) the checkpoint is of another version.
    """
    hint = damaged_hint(folder)
    manifest: CheckpointManifest = read_manifest(folder, "checkpoint", CHECKPOINT_VERSION, hint, CheckpointManifest)
    if folder.name != f"step-{manifest['step']:08d}":
        raise Damaged(f"{folder / MANIFEST} belongs to step {str(manifest['step'])[:20]}", hint, exit_code=1)
    if missing := {STATE, RECIPE} - manifest["files"].keys():
        raise Damaged(f"{folder / MANIFEST} does not list {min(missing)}", hint, exit_code=1)
    return manifest["files"]


def read_progress(folder: Path) -> Progress:
    """How far the run was at a checkpoint.

    Raises:
        Damaged: (exit code 1) a file is missing, or not what was written.
        UserError: (1) one cannot be read; (2) the checkpoint is of another version.
    """
    hint = damaged_hint(folder)
    check_files(folder, read_checkpoint_manifest(folder), [STATE], hint)
    progress: Progress = read_json(folder / STATE, "the checkpoint's state", hint, exit_code=1, schema=Progress)
    return progress


def read_recipe(folder: Path) -> Recipe:
    """The recipe that a checkpoint was trained with; raises as `read_progress` does."""
    hint = damaged_hint(folder)
    check_files(folder, read_checkpoint_manifest(folder), [RECIPE], hint)
    try:
        return load_recipe(folder / RECIPE)
    except UserError as error:
        raise UserError(error.message, "this version of pkmlm has other keys: train it again", exit_code=1) from None
