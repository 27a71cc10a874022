"""A trained run, or a model exported from one, ready to be measured."""

from dataclasses import dataclass
from pathlib import Path

import torch

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.export.config import is_export
from pkmlm.export.folder import read_export
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Recipe
from pkmlm.runtime.device import choose_device
from pkmlm.runtime.distributed import World
from pkmlm.runtime.rundir import RunDirectory
from pkmlm.train import checkpoint


@dataclass(frozen=True)
class LoadedRun:
    """A model with what it needs to read and write text.

    Attributes:
        path, name: of the run directory or the exported folder.
        step: of the checkpoint that the weights come from.
        exported: it is an exported folder, a product that no results are written into.
        model: in evaluation mode, in fp32.
    """

    path: Path
    name: str
    step: int
    recipe: Recipe
    model: Transformer
    tokenizer: Tokenizer
    device: torch.device
    exported: bool = False


def load_run(path: str | Path, step: str = "latest", device: torch.device | None = None) -> LoadedRun:
    """Load a checkpoint of a run: "latest", "best" or a step; or an exported folder, which holds one step.

    Raises:
        UserError: no such run or checkpoint, or it is damaged.
    """
    if is_export(Path(path)):
        return load_export(Path(path), step, device or choose_device())
    run = RunDirectory.existing(path)
    run.check_tokenizer()
    recipe, tokenizer = run.recipe(), Tokenizer.load(run.tokenizer_file)
    device = device or choose_device()
    empty = build_model(recipe, recipe.model.vocab_size or tokenizer.size, "meta")
    while True:
        number = run.resolve(step)
        try:
            checkpoint.verify(run.checkpoint(number))
            checkpoint.check_weights(run.checkpoint(number), empty)
            model = empty.to_empty(device=device)
            checkpoint.load_weights(run.checkpoint(number), model)
            trained_with = checkpoint.progress_at(run.checkpoint(number)).data.get("tokenizer", tokenizer.sha256)
            break
        except UserError:
            if run.checkpoint(number).exists():
                raise
            # a training process has replaced it since: look again
    if tokenizer.sha256 != trained_with:
        message = f"{run.tokenizer_file} is not the tokenizer that the run was trained with"
        raise UserError(message, "copy it again from the tokens that the run was trained on")
    refuse_strange(model, run.checkpoint(number))
    return LoadedRun(run.path, run.name, number, recipe, model.eval(), tokenizer, device)


def load_same(path: str | Path, step: str, world: World | None) -> LoadedRun:
    """Load a run in all processes, from the same checkpoint, also where one appears meanwhile; damage is told once."""
    if world is None:
        return load_run(path, step)
    with world.together():
        run = load_run(path, step)
    newest = max(world.gather_objects(run.step))
    return run if run.step == newest else load_run(path, str(newest))


def load_export(path: Path, step: str, device: torch.device) -> LoadedRun:
    """Load what `pkmlm export` wrote.

    Raises:
        UserError: another step was asked for, or see `read_export`.
    """
    export = read_export(path, device)
    held = export.origin.step
    if step not in ("latest", str(held)):
        raise UserError(f"{path} is an export of step {held} (found --step {step})", "leave --step out")
    recipe, model, tokenizer = export.recipe, export.model, export.tokenizer
    refuse_strange(model, path)
    return LoadedRun(path, path.resolve().name, held, recipe, model, tokenizer, device, exported=True)


def refuse_strange(model: Transformer, path: Path) -> None:
    """Refuse weights that no training saves, whatever their hashes say.

    Raises:
        UserError: (exit code 1) one is not finite, or a variance is negative.
    """
    for name, tensor in model.state_dict().items():
        least = tensor.min() if tensor.numel() else torch.zeros(())
        if not torch.isfinite(tensor).all() or (name.endswith("running_var") and least < 0):
            what = "has a negative variance" if torch.isfinite(tensor).all() else "is not finite"
            raise UserError(f"{path}: {name} {what}", "evaluate another step, or train it again", exit_code=1)
