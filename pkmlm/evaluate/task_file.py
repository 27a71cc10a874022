"""What `--tasks` accepts besides lm-eval's own tasks: suites of them, and definitions in a user's files.

lm-eval's reader of definitions imports the Python that `!function` names, its metrics may be scripts from the hub, and
some readers of `datasets` unpickle. A user's file may therefore hold only data and templates, no code.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pkmlm.errors import UserError
from pkmlm.recipe.nodes import Node, parse, yaml_text

SUITES = {"memoryformer": ("piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa")}  # table 1 of its paper
LOCAL = ("json", "csv", "text", "parquet")  # readers of `datasets` for which a file is data and nothing else
HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
HINT = "a task of your own holds only data and templates; run one that needs Python with lm-eval's own command"


def data_source(value: str) -> str:
    """Accept a reader of plain data or a data set on the hub; refuse a local folder and other readers of `datasets`."""
    if value not in LOCAL and (not HUB.fullmatch(value) or Path(value).exists()):
        raise ValueError(f"expected {', '.join(LOCAL)}, or OWNER/NAME of a data set on the hub")
    return value


def shipped_metric(value: str) -> str:
    """Accept a metric that ships with lm-eval; for any other name, lm-eval would fetch and run a script."""
    import lm_eval.api.metrics  # noqa: F401 (fills the registry)
    from lm_eval.api.registry import METRIC_REGISTRY

    if value not in METRIC_REGISTRY:
        raise ValueError("expected one of lm-eval's own metrics, such as acc")
    return value


def file_or_folder(value: str) -> str:
    """Refuse a path to a pipe or a device, on which the readers of `datasets` would wait."""
    if os.path.exists(value) and not (os.path.isfile(value) or os.path.isdir(value)):
        raise ValueError("expected a regular file or a folder")
    return value


Name = Annotated[str, Field(min_length=1)]
# With a colon, a path may lead to another machine.
LocalPath = Annotated[str, Field(pattern=r"^[^:]+$"), AfterValidator(file_or_folder)]
Paths = LocalPath | list[LocalPath]
Version = str | int | Annotated[float, Field(allow_inf_nan=False)]


class Definition(BaseModel):
    """Keys whose values are data; any other key is refused, and null means absent."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Templates(Definition):
    """How a row becomes a question, an answer and choices."""

    doc_to_text: str | None = None
    doc_to_target: str | int | None = None
    doc_to_choice: Name | Annotated[list[Name], Field(min_length=1)] | dict[str, Name] | None = None
    gen_prefix: str | None = None
    target_delimiter: str | None = None
    fewshot_delimiter: str | None = None


class DataFiles(Definition):
    """Options of the reader of a data set."""

    data_files: Paths | dict[Name, Paths] | None = None
    data_dir: Paths | None = None
    field: str | None = None
    sep: str | None = None
    revision: str | None = None


class FewShot(Templates):
    """Where examples come from, and templates that only they use."""

    sampler: Literal["default", "first_n"] | None = None
    split: Name | None = None
    samples: list[dict[str, Any]] | None = None


class Metric(BaseModel):
    """A metric, and how it is aggregated over rows."""

    model_config = ConfigDict(extra="allow", strict=True)
    metric: Annotated[str, AfterValidator(shipped_metric)]
    aggregation: str | None = None
    hf_evaluate: Literal[False] | None = None


class Metadata(BaseModel):
    """Anything; the version is reported with the results."""

    model_config = ConfigDict(extra="allow", strict=True)
    version: Version | None = None


class TaskFile(Templates):
    """The keys of a user's task, with lm-eval's meaning."""

    task: Name | None = None
    include: Name | list[Name] | None = None
    tag: Any = None
    group: Any = None
    task_list: Any = None
    task_alias: str | None = None
    output_type: str | None = None
    description: str | None = None
    should_decontaminate: bool | None = None
    doc_to_decontamination_query: str | None = None
    metadata: Metadata | None = None
    repeats: Literal[1] | None = None  # a log-likelihood is the same each time
    dataset_path: Annotated[str, AfterValidator(data_source)] | None = None
    dataset_name: Name | None = None
    dataset_kwargs: DataFiles | None = None
    training_split: Name | None = None
    validation_split: Name | None = None
    test_split: Name | None = None
    fewshot_split: Name | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    fewshot_config: FewShot | None = None
    metric_list: list[Metric] | None = None


def read_task_file(path: Path, includers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A user's definition, with those that it includes; keys that are null are left out.

    Args:
        includers: the files that include this one.

    Raises:
        UserError: the file cannot be read or is not plain YAML; a key or a value is not one of `TaskFile`.
    """
    text = yaml_text(path)
    if path.resolve() in includers:
        raise UserError(f"{path} includes itself")
    tree = parse(text, str(path))  # refuses tags, anchors and keys that are given twice
    try:
        own = yaml.safe_load(text)
        TaskFile.model_validate(own)
    except ValidationError as error:
        raise UserError(misfit(error, tree), HINT) from None
    except (yaml.YAMLError, ValueError) as error:  # an impossible date, say
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    included: dict[str, Any] = {}
    names = own.pop("include", None) or []
    for name in [names] if isinstance(names, str) else names:
        try:
            included |= read_task_file(path.parent / name, (*includers, path.resolve()))
        except UserError as error:
            raise UserError(f"{path}: include: {error.message}", error.hint, error.exit_code) from None
    return {key: value for key, value in (included | own).items() if value is not None}


def misfit(error: ValidationError, tree: Node) -> str:
    """The first value that does not fit: where it is, what was found and what was expected."""
    first, *others = error.errors()
    same = (other for other in others if other["loc"][0] == first["loc"][0])  # the same value as another allowed type
    first = max([first, *same], key=lambda each: len(each["loc"]))
    node, names = tree, []
    for part in first["loc"]:
        inside = node.value
        if (isinstance(inside, dict) and part in inside) or (isinstance(inside, list) and isinstance(part, int)):
            node = inside[part]  # type: ignore[index]
            names.append(str(part))
    where = ": ".join(filter(None, (node.place, ".".join(names))))
    if not first["loc"]:
        return f"{where}: found {node.shown()} (expected a mapping of keys)"
    if first["type"] == "extra_forbidden":
        return f"{where}: a task of your own has no such key"
    if first["type"] == "missing":
        return f"{where}: no key {first['loc'][-1]!r}"
    return f"{where}: found {node.shown()} ({first['msg'].removeprefix('Value error, ')})"
