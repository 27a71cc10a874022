"""What `usage-report` measures: a checkpoint of a run, which keeps the result in RUN/usage/, or an exported folder."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pkmlm.console import warn
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.analysis.slots import Holding
    from pkmlm.analysis.usage import MemoryUsage
    from pkmlm.distributed import World
    from pkmlm.evaluate.text_choice import TextChoice
    from pkmlm.runs.directory import RunDirectory


class Report(NamedTuple):
    """An entry of the report, its counts, and (where they were asked for) what is shown of single slots."""

    entry: dict[str, Any]
    memories: "list[MemoryUsage]"
    holdings: "list[Holding]"


@dataclass(frozen=True)
class Subject:
    """A checkpoint of a run, or an exported folder: a product, into which nothing is written.

    Attributes:
        label: what the report calls it.
        run: of an exported folder only its path, name and metrics (none) are used.
        step: the number of the run's checkpoint; of an exported folder as it was asked for.
        stem: of the files that keep the run's report; None: an exported folder.
        origin: what the run's report depends on: hashes of the checkpoint and of the text or the tokens, and how the
            text is read.
    """

    label: str
    run: "RunDirectory"
    step: str
    stem: Path | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint still is."""
        return self.stem is None or self.run.checkpoint(int(self.step)).exists()

    def fingerprint(self) -> str:
        """The sha256 of the manifest of the checkpoint or the folder; of a folder without one (`transformers` has saved
        it again), of what a manifest would say.
        """
        from pkmlm.export.config import CONFIG
        from pkmlm.export.folder import TOKENIZER
        from pkmlm.runs.files import json_text, sha256_of
        from pkmlm.runs.manifest import MANIFEST, entry_of

        folder = self.run.path
        if self.stem is not None:
            return str(self.origin["checkpoint"])
        if (folder / MANIFEST).exists():
            return sha256_of(folder / MANIFEST)
        files = [folder / CONFIG, folder / TOKENIZER, *sorted(folder.glob("*.safetensors"))]
        return hashlib.sha256(json_text({file.name: entry_of(file) for file in files}).encode()).hexdigest()

    def kept(self) -> Report | None:
        """The report that an earlier command has left, if it is whole and of the same checkpoint and text."""
        from pkmlm.analysis.usage import load_usage

        found = self.stem and load_usage(self.stem, self.origin)
        return Report(*found, []) if found else None

    def keep(self, report: Report) -> Report:
        """The report, kept in the run for the next time."""
        from pkmlm.analysis.usage import save_usage

        if self.stem is None:
            return report
        report = report._replace(entry={**report.entry, "source": self.origin})
        try:
            save_usage(self.stem, report.entry, report.memories)
        except UserError as error:  # a folder that only another user may write, say: the report still stands
            warn(f"not kept for the next time: {error.message}")
        return report


def run_or_export(path: str) -> "RunDirectory":
    """A run, or an exported folder as if it were one."""
    from pkmlm.export.config import is_export
    from pkmlm.runs.directory import RunDirectory

    return RunDirectory(path) if is_export(Path(path)) else RunDirectory.existing(path)


def subject_of(label: str, run: "RunDirectory", step: str, choice: "TextChoice", world: "World | None") -> Subject:
    """What is at a step of a run or in an exported folder: the same in all processes.

    Raises:
        UserError: there is no such checkpoint or text.
    """
    from pkmlm.data.index import read_index
    from pkmlm.data.sources import expand_glob
    from pkmlm.export.config import is_export
    from pkmlm.runs.files import sha256_of
    from pkmlm.runs.manifest import MANIFEST
    from pkmlm.runs.results import USAGE, split_name, text_name, usage_stem

    texts = [] if choice.text is None else sorted(map(Path, expand_glob(choice.text)))
    for text in texts:
        if not text.is_file():
            raise UserError(f"--text {text} is not a file")
    if is_export(run.path):
        return Subject(label, run, step)
    number = run.resolve(step)
    number = world.broadcast(number) if world else number
    origin: dict[str, Any] = {"checkpoint": sha256_of(run.checkpoint(number) / MANIFEST)}
    if choice.text is not None:
        whole = " ".join(map(sha256_of, texts))
        origin |= {"text": whole, "separator": choice.separator, "field": choice.field}
        name = text_name(Path(choice.text).name, whole, choice.separator, choice.field)
    else:
        name = split = choice.split or "test"
        origin["tokens"] = read_index(Path(choice.tokens_folder(run.path, run.recipe()))).sha256
        if choice.data is not None and (world is None or world.rank == 0):  # the others keep nothing
            name = split_name(run.path / USAGE, split, "tokens", origin["tokens"])
            if name != split:
                warn(f"--data: the run has results of {split} on other tokens: these are kept as {name}")
    return Subject(label, run, str(number), usage_stem(run.path, name, number), origin)
