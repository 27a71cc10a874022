"""Zero-shot tasks: the definitions that ship with lm-evaluation-harness, or a user's own, and where rows come from."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.tasks._yaml_loader import load_yaml

from pkmlm.errors import UserError
from pkmlm.evaluate.own_task import LOCAL, read_definition
from pkmlm.evaluate.task_rows import FIELDS, SUITES
from pkmlm.runs.files import sha256_of

KINDS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
NAME = re.compile(r"""^["']?(task|group)["']?:[ \t]*["']?([^\s"'#\[{]+)""", re.MULTILINE)
SCRIPTED = {"EleutherAI/logiqa"}  # on the hub these are Python scripts, which `datasets` runs no more
HINT = "give the rows with --task-data DIR, one JSON object a line in DIR/{}.jsonl"
HINT_SHOTS = "give examples, one JSON object a line, in {}/{}.train.jsonl (--task-data), or none: --num-fewshot 0"


@dataclass(frozen=True)
class TaskSource:
    """A task and the file of its rows.

    Attributes:
        config: the harness's definition, with its functions.
        file, sha256: of the rows; None: they come from where the definition says.
        shots: of the examples that come before a question (few-shot).
        own: the user's file that defines it; None: it ships with the harness.
    """

    name: str
    config: dict[str, Any]
    file: Path | None
    sha256: str | None
    shots: Path | None
    own: Path | None

    @property
    def hub(self) -> bool:
        """Whether the rows come from the hub."""
        return self.file is None and not is_local(self.config)

    @property
    def splits(self) -> tuple[str, list[str]]:
        """The split that is scored, by the harness's rule, and the others that the definition names."""
        named = [self.config.get(f"{split}_split") for split in ("test", "validation", "training", "fewshot")]
        scored, *others = dict.fromkeys(filter(None, named))
        return scored, others


def find_tasks(names: str, folder: Path | None, fewshot: int | None) -> list[TaskSource]:
    """The tasks of a list such as "piqa,wsc,mine.yaml", each once.

    Args:
        folder: where TASK.jsonl holds the rows of TASK (and TASK.train.jsonl the few-shot examples); None: elsewhere.
        fewshot: how many examples are asked for; None: as many as the definition says.

    Raises:
        UserError: no such task or file; not a task of log-likelihoods; rows that can be had nowhere.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    asked = list(dict.fromkeys(each for name in asked for each in SUITES.get(name, (name,))))
    if not asked:
        raise UserError("--tasks names no task", "for example --tasks piqa,wsc or --tasks memoryformer")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-data {folder} is not a folder (expected one with TASK.jsonl in it)")
    paths = stock([name for name in asked if not is_path(name)])
    sources = [source(name, paths.get(name, Path(name)), folder, fewshot) for name in asked]
    twice = [one.name for place, one in enumerate(sources) if one.name in {two.name for two in sources[:place]}]
    if twice:
        raise UserError(f"--tasks has two tasks named {twice[0]!r}", "rename the one of your own")
    return sources


def is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def stock(names: Sequence[str]) -> dict[str, Path]:
    """The files of the harness's own tasks, by their first keys: its index of all 14,000 takes seven seconds."""
    import lm_eval

    root = Path(lm_eval.__file__).parent / "tasks"
    found = {name: path for name in names for path in usual(root, name) if ("task", name) in keys(path)}
    if found.keys() >= set(names):
        return found
    everything = [(key, path) for path in sorted(root.rglob("*.yaml")) for key in keys(path)]
    tasks = {name: path for (what, name), path in reversed(everything) if what == "task"}
    for name in names:
        if name not in tasks:
            raise unknown(name, tasks, {name for (what, name), _ in everything if what == "group"})
    return {name: tasks[name] for name in names}


def usual(root: Path, name: str) -> list[Path]:
    """Where the definition of a task mostly is."""
    places = (f"{name}/{name}", f"{name}/default", f"{name.split('_')[0]}/{name}", f"super_glue/{name}/default")
    return [path for place in places if (path := root / f"{place}.yaml").is_file()]


def keys(path: Path) -> list[tuple[str, str]]:
    """("task", its name) or ("group", its name), as a definition says near its beginning."""
    return NAME.findall(path.read_text(encoding="utf-8", errors="replace"))


def unknown(name: str, tasks: Iterable[str], groups: Iterable[str]) -> UserError:
    """What to say of a name that is no task."""
    if name in groups:
        return UserError(f"--tasks: {name!r} is a group of tasks", "name the tasks themselves")
    known = [*SUITES, *FIELDS]
    near = difflib.get_close_matches(name, known) or difflib.get_close_matches(name, list(tasks))
    near = near or [other for other in tasks if name.lower() in other.lower()][:3]
    hint = f"did you mean {', '.join(near)}?" if near else f"for example {', '.join(known)}"
    return UserError(f"--tasks: lm-eval has no task {name!r}", hint)


def source(name: str, path: Path, folder: Path | None, fewshot: int | None) -> TaskSource:
    """A task from its definition."""
    if not path.is_file():
        raise UserError(f"--tasks: {path} does not exist")
    own = is_path(name)
    plain = read_definition(path) if own else definition(path, functions=False)
    title = plain.get("task")
    if not isinstance(title, str):
        raise UserError(f"{path}: no key 'task' with the task's name (expected an lm-eval task)")
    if "class" in plain:
        raise UserError(f"--tasks: {title} is a program, not a definition; it runs with lm-eval's own command only")
    kind = plain.get("output_type", "generate_until")  # the harness's default
    if kind not in KINDS:
        raise UserError(f"--tasks: {title} is a task of {kind} (expected {', '.join(KINDS)})")
    file, shots = rows_files(title, plain, folder)
    if shots is None and (plain.get("num_fewshot") if fewshot is None else fewshot):
        check_examples(title, plain, file, HINT_SHOTS.format(folder or "DIR", title))
    config = plain if own else definition(path, functions=True)
    for key in ("tag", "group", "task_list"):  # for the harness's index; a task does not accept them
        config.pop(key, None)
    if not any(config.get(f"{split}_split") for split in ("test", "validation")):
        raise UserError(f"{path}: neither test_split nor validation_split: nothing to score")
    sha256 = None if file is None else sha256_of(file)
    return TaskSource(title, config, file, sha256, shots, own=path if own else None)


def definition(path: Path, functions: bool) -> dict[str, Any]:
    """One of lm-eval's own definitions with what it includes; its functions as such or as their names."""
    try:
        found: dict[str, Any] = load_yaml(path, resolve_func=functions)
    except Exception as error:  # from the Python that it names: a package that this needs is missing, say
        raise UserError(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return found


def is_local(config: dict[str, Any]) -> bool:
    """Whether a definition (one's own) says itself where the rows are."""
    return config.get("dataset_path") in LOCAL or config.get("custom_dataset") is not None


def rows_files(task: str, config: dict[str, Any], folder: Path | None) -> tuple[Path | None, Path | None]:
    """Where the rows and the few-shot examples of a task are; None: where its definition says."""
    if folder is not None and (folder / f"{task}.jsonl").is_file():
        shots = folder / f"{task}.train.jsonl"
        return folder / f"{task}.jsonl", shots if shots.is_file() else None
    if folder is not None and not is_local(config):
        raise UserError(f"--task-data: no rows of {task} (expected {folder / task}.jsonl)")
    if config.get("dataset_path") in SCRIPTED:
        message = f"{task} cannot come from the hub: its copy there is a script, which datasets >= 4 does not run"
        raise UserError(message, HINT.format(task))
    return None, None


def check_examples(task: str, config: dict[str, Any], file: Path | None, hint: str) -> None:
    """Refuse few-shot examples that a definition takes from where there are none, or from its own questions: unless it
    says so by naming the test split, the harness does not leave out the one that is asked, with its answer.

    Args:
        file: of the rows, which are those of the split that is scored; None: all splits are where the definition says.
    """
    given = config.get("fewshot_config") or {}
    named = given.get("split") or config.get("fewshot_split")
    if given.get("samples") and named is None:
        return
    training, validation, test = (config.get(f"{split}_split") for split in ("training", "validation", "test"))
    scored = test or validation
    if (named or training or validation or test) == scored:
        if named is None or named != test:
            raise UserError(f"--num-fewshot: no examples for {task} but its own questions", hint)
    elif file is not None:
        raise UserError(f"--num-fewshot: no examples for {task}", hint)
