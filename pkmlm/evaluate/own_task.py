"""A task's definition from a user's file: plain YAML with templates, in the harness's words. Nothing in it is code.

The harness's own reader imports the Python that `!function` names, its metrics may be scripts of the hub, and some of
the readers of `datasets` unpickle; all that is for definitions that ship with it.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.api.metrics  # noqa: F401 (fills the registry)
import yaml
from lm_eval.api.registry import AGGREGATION_REGISTRY, METRIC_REGISTRY, get_metric_aggregation

from pkmlm.errors import UserError
from pkmlm.evaluate.task_rows import are_texts, is_text
from pkmlm.recipe.nodes import Node, parse, yaml_text

LOCAL = ("json", "csv", "text", "parquet")  # readers of `datasets` for which a file is data and nothing else
HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
MEANS = ("mean", "median", "nanmean")
HINT = "a task of your own holds data and templates; what needs Python runs with lm-eval's own command"


class Value(NamedTuple):
    """What a key must hold, in words and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def is_name(value: Any) -> bool:
    return is_text(value) and bool(value)


def is_source(value: Any) -> bool:
    """Whether a data set's name stands for a reader of plain data, or for one of the hub; the name of a folder that is
    here, or of any other reader that some version of `datasets` has, does not.
    """
    return is_text(value) and (value in LOCAL or (HUB.fullmatch(value) is not None and not Path(value).exists()))


def is_path(value: Any) -> bool:
    """Whether it can only name files of this machine or of the data set; with a colon it may lead elsewhere."""
    return is_name(value) and ":" not in value


def are_paths(value: Any) -> bool:
    """Whether it is a path, a list of paths, or either of these by split."""
    if isinstance(value, dict):
        return all(
            is_name(split) and not isinstance(paths, dict) and are_paths(paths) for split, paths in value.items()
        )
    return all(map(is_path, value)) if isinstance(value, list) else is_path(value)


def are_choices(value: Any) -> bool:
    """Whether it is a template, or templates in a list or by name, none of them empty."""
    choices = list(value.values()) if isinstance(value, dict) else value
    return is_name(choices) or (are_texts(choices) and bool(choices) and all(choices))


def is_row(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value))


def is_metadata(value: Any) -> bool:
    """Whether it is a mapping whose version can be told with the results."""
    version = value.get("version", 0) if is_row(value) else None
    return is_text(version) or (isinstance(version, int | float) and math.isfinite(version))


ANY = Value("anything", lambda value: True)
TEXT = Value("a text", is_text)
NAME = Value("a text that is not empty", is_name)
PATHS = Value("paths of files, without a colon", are_paths)
TEMPLATES = {
    "doc_to_text": TEXT,
    "doc_to_target": Value("a text, or the place of a choice", lambda value: is_text(value) or type(value) is int),
    "doc_to_choice": Value("a text, or texts that are not empty: quote those such as no", are_choices),
    **dict.fromkeys(("gen_prefix", "target_delimiter", "fewshot_delimiter"), TEXT),
}
Keys = dict[str, "Value | Keys"]
KEYS: Keys = {
    "task": NAME,
    **dict.fromkeys(("tag", "group", "task_list", "class"), ANY),
    **dict.fromkeys(("task_alias", "output_type", "description", "doc_to_decontamination_query"), TEXT),
    "include": Value("the name of a file, or a list of such", lambda value: is_name(value) or are_texts(value)),
    "metadata": Value("a mapping, its version a number or a text", is_metadata),
    "repeats": Value("1: a log-likelihood is the same each time", lambda value: type(value) is int and value == 1),
    "dataset_path": Value(f"{', '.join(LOCAL)}, or OWNER/NAME of a data set of the hub", is_source),
    "dataset_name": NAME,
    "dataset_kwargs": {"data_files": PATHS, "data_dir": PATHS, **dict.fromkeys(("field", "sep", "revision"), TEXT)},
    **dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"), NAME),
    "num_fewshot": Value("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    "fewshot_config": {
        "sampler": Value("default or first_n", lambda value: value in ("default", "first_n")),
        "split": NAME,
        "samples": Value("a list of rows", lambda value: isinstance(value, list) and all(map(is_row, value))),
        **TEMPLATES,
    },
    **TEMPLATES,
    "metric_list": Value("a list of metrics", lambda value: isinstance(value, list)),
    "should_decontaminate": Value("true or false", lambda value: type(value) is bool),
}


def read_definition(path: Path, inheritors: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The definition in a file, on top of those that it includes; keys that are null are left out.

    Raises:
        UserError: it cannot be read; it is not plain YAML; it has keys that would run code, or none that tasks have; a
            key holds what it cannot.
    """
    text = yaml_text(path)
    whole = path.resolve()
    if whole in inheritors:
        raise UserError(f"{path} includes itself")
    tree = parse(text, str(path))  # refuses tags, anchors, keys that are given twice
    try:
        own = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # an impossible date, say
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(own, dict):
        raise UserError(f"{path}: found {type(own).__name__} (expected keys such as task: and doc_to_text:)")
    check_values(own, KEYS, tree, path)
    check_metrics(own.get("metric_list"), path)
    included: dict[str, Any] = {}
    names = own.pop("include", None) or []
    for name in names if isinstance(names, list) else [names]:
        included |= read_definition(path.parent / name, (*inheritors, whole))
    return {key: value for key, value in (included | own).items() if value is not None}


def check_values(found: dict[Any, Any], keys: Keys, tree: Node, path: Path, above: str = "") -> None:
    """Refuse keys that are not known, and values that they cannot hold, with their places."""
    for key, value in found.items():
        if key not in keys:
            raise UserError(f"{path}: a task of one's own has no key {above + str(key)[:40]!r}", HINT)
        assert isinstance(tree.value, dict)
        rule, node = keys[key], tree.value[key]
        if isinstance(rule, dict) and isinstance(value, dict):
            check_values(value, rule, node, path, f"{key}.")
        elif value is not None and (isinstance(rule, dict) or not rule.holds(value)):
            expected = f"keys such as {', '.join(rule)}" if isinstance(rule, dict) else rule.expected
            raise UserError(f"{node.place}: {above}{key}: found {node.shown()} (expected {expected})", HINT)


def check_metrics(metrics: list[Any] | None, path: Path) -> None:
    """Refuse metrics that do not ship with the harness (it would fetch and run a script of that name), and what does
    not sum them up."""
    for metric in metrics or []:
        found = metric if isinstance(metric, dict) else {}
        name = found.get("metric")
        if not isinstance(name, str) or name not in METRIC_REGISTRY or found.get("hf_evaluate"):
            expected = "expected metric: with one of lm-eval's own, such as acc"
            raise UserError(f"{path}: metric_list: found {str(metric)[:60]!r} ({expected})", HINT)
        usual = next(key for key, each in AGGREGATION_REGISTRY.items() if each is get_metric_aggregation(name))
        fitting = MEANS if usual in MEANS else (usual,)
        if found.get("aggregation", usual) not in fitting:
            told = f"metric {name}: aggregation {str(found['aggregation'])[:40]!r} (expected {' or '.join(fitting)})"
            raise UserError(f"{path}: metric_list: {told}")
