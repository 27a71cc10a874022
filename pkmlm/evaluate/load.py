"""A trained run, a model exported from one, or a model with a memory attached, ready to be measured."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pkmlm.data.tokenizer import Tokenizer
from pkmlm.device import check_device, default_device
from pkmlm.distributed import World
from pkmlm.errors import UserError, read_errors
from pkmlm.export.config import ATTACHED, is_attached, is_export, is_pretrained
from pkmlm.export.folder import read_export
from pkmlm.export.pretrained import read_pretrained_model
from pkmlm.files import sha256_of
from pkmlm.memory.table import table_ranks
from pkmlm.model.language_model import LanguageModel
from pkmlm.model.transformer import Transformer, build_model
from pkmlm.recipe.schema import Recipe
from pkmlm.runs import checkpoint
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.record import Progress, checkpoint_digest, read_progress

# Opens attachments. It is imported by name: attaching builds on measuring and training, and so lies above this room.
OPENER = "pkmlm.attach.hosted"


@dataclass(frozen=True)
class LoadedRun:
    """A model with what it needs to read and write text.

    Attributes:
        path: of the run directory, the export or the attachment.
        step: of the checkpoint that the weights come from.
        tokens: trained on until then; 0 for an attachment.
        checkpoint: its digest, by which results name it; empty for an export or an attachment.
        model: in evaluation mode, in fp32; but tables of an export may be in 8 or 4 bits, and a model with a memory
            attached is in its own dtype.
        begin: the token that begins a text, if it is not the tokenizer's.
        data: sha256 of "tokenizer" and of the splits "train" and "valid" that it was trained on; empty for an export.
    """

    path: Path
    step: int
    tokens: int
    recipe: Recipe
    model: LanguageModel
    tokenizer: Tokenizer
    device: torch.device
    checkpoint: str = ""
    begin: int | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def exported(self) -> bool:
        """Whether it is an export or an attachment, not a run directory: no results are written into it."""
        return not self.checkpoint

    @property
    def name(self) -> str:
        """What reports call it: the name of its folder."""
        return self.path.resolve().name

    @property
    def prefix(self) -> int:
        """The token that is put before a text: the tokenizer's `begin`, as in training; for a model with a memory
        attached, the `bos_token_id` of its config if there is one, as in lm-eval's own backend.
        """
        return self.tokenizer.begin if self.begin is None else self.begin


def load_run(
    path: str | Path,
    step: str | int = "latest",
    device: str | torch.device | None = None,
    base: str | Path | None = None,
) -> LoadedRun:
    """Load a checkpoint of a run, an export, or an attachment that `Attachment.save` wrote; the last two hold one step.

    Args:
        path: the run directory or the folder.
        step: "latest", "best" (by validation loss) or a number; for an export, either word means its only step.
        device: None: CUDA if available, else the CPU.
        base: the folder of the model that an attachment belongs to; None: the one that it records.

    Raises:
        UserError: no such run or checkpoint, or it is damaged; `step` is not that of the export; the device is neither
            the CPU nor a CUDA device.
    """
    device = torch.device(device) if device else default_device()
    check_device(device)
    path, step = Path(path), str(step)
    attached = is_attached(path)
    if base is not None and not attached:
        message = f"--base {base} is for an attached memory, which {path} is not (no {ATTACHED} in it)"
        raise UserError(message, "leave --base out")
    if is_export(path):
        if attached:
            opened: LoadedRun = importlib.import_module(OPENER).open_attached(path, base, device)
        else:
            read = read_pretrained_model if is_pretrained(path) else read_export
            recipe, (_, held, tokens), model, tokenizer = read(path, device)
            opened = LoadedRun(path, held, tokens, recipe, model, tokenizer, device)
        if step not in ("best", "latest", str(opened.step)):
            raise UserError(f"{path} holds only step {opened.step} (found --step {step})", "leave --step out")
        check_ids(opened.model, path)
        opened.model.eval().requires_grad_(False)
        return opened
    run = RunDirectory.existing(path)

    def load(folder: Path) -> tuple[Progress, Recipe, str, Transformer]:
        checkpoint.verify(folder, optimizer=False)
        progress, digest = read_progress(folder), checkpoint_digest(folder)
        recipe = run.recipe_of(progress.step)
        model = build_model(recipe, progress.vocab_size, device, init_weights=False)
        checkpoint.load_weights(folder, model.state_dict(), table_ranks(model))
        return progress, recipe, digest, model

    progress, recipe, digest, model = run.of(step, load)
    with read_errors(run.tokenizer_file, exit_code=1):
        tokenizer_sha256 = sha256_of(run.tokenizer_file)
    if tokenizer_sha256 != progress.data["tokenizer"]:
        message = f"{run.tokenizer_file} is not the tokenizer that the run was trained with"
        raise UserError(message, "copy it again from the tokens that the run was trained on", exit_code=1)
    tokenizer = Tokenizer.load(run.tokenizer_file)
    frozen = model.eval().requires_grad_(False)
    return LoadedRun(
        run.path, progress.step, progress.tokens, recipe, frozen, tokenizer, device, digest, data=progress.data
    )


def load_on_all_ranks(path: str | Path, step: str, world: World | None, base: str | Path | None = None) -> LoadedRun:
    """Load the same checkpoint of a run on all ranks, even if a new one appears meanwhile; one rank reports damage."""
    world = world or World()
    with world.collective_errors():
        run = load_run(path, step, base=base)
    newest = max(world.gather_objects(run.step))
    with world.collective_errors():
        return run if run.step == newest else load_run(path, str(newest), base=base)


def check_ids(model: LanguageModel, path: Path) -> None:
    """Refuse (exit code 1) ids of tokens for which a table has no rows."""
    for name, ids in model.named_buffers():
        last = name.rpartition(".")[2]
        limit = len(ids) if last == "ids_V" else 2**32 if last == "multipliers_HG" else None
        if limit is not None and not bool(((ids >= 0) & (ids < limit)).all()):  # rows would lie beyond the table
            raise UserError(f"{path}: {name} holds numbers that training cannot produce", "copy it again", exit_code=1)
