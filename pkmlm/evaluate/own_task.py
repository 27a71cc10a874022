"""A task's definition from a user's file: plain YAML with templates, in the harness's words. Nothing in it is code.

The harness's own reader imports the Python that `!function` names, and its metrics may be scripts of the hub; both are
for definitions that ship with it.
"""

from pathlib import Path
from typing import Any

import lm_eval.api.metrics  # noqa: F401 (fills the registry)
import yaml
from lm_eval.api.registry import METRIC_REGISTRY

from pkmlm.errors import UserError
from pkmlm.recipe.nodes import parse, yaml_text

KEYS = {
    *("task", "task_alias", "tag", "group", "task_list", "class", "include", "metadata", "output_type", "repeats"),
    *("dataset_path", "dataset_name", "dataset_kwargs"),
    *("training_split", "validation_split", "test_split", "fewshot_split", "num_fewshot", "fewshot_config"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "description", "gen_prefix"),
    *("target_delimiter", "fewshot_delimiter", "metric_list"),
    *("should_decontaminate", "doc_to_decontamination_query"),
}
HINT = "a task of your own holds data and templates; what needs Python runs with lm-eval's own command"


def read_definition(path: Path, inheritors: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The definition in a file, on top of those that it includes.

    Raises:
        UserError: it cannot be read; it is not plain YAML; it has keys that would run code, or none that tasks have.
    """
    whole = path.resolve()
    if whole in inheritors:
        raise UserError(f"{path} includes itself")
    text = yaml_text(path)
    parse(text, str(path))  # refuses tags, anchors, keys that are given twice
    try:
        own = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that is none, say
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(own, dict):
        raise UserError(f"{path}: found {type(own).__name__} (expected keys such as task: and doc_to_text:)")
    for key in own:
        if key not in KEYS:
            raise UserError(f"{path}: a task of one's own has no key {str(key)[:40]!r}", HINT)
    check_metrics(own.get("metric_list"), path)
    included: dict[str, Any] = {}
    names = own.pop("include", [])
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str):
            raise UserError(f"{path}: include: found {str(name)[:40]!r} (expected the name of a file)")
        included |= read_definition(path.parent / name, (*inheritors, whole))
    return included | own


def check_metrics(metrics: Any, path: Path) -> None:
    """Refuse metrics that do not ship with the harness: it would fetch and run a script of that name."""
    if metrics is None:
        return
    for metric in metrics if isinstance(metrics, list) else [None]:
        found = metric if isinstance(metric, dict) else {}
        name = found.get("metric")
        if not isinstance(name, str) or name not in METRIC_REGISTRY or found.get("hf_evaluate"):
            expected = "expected metric: with one of lm-eval's own, such as acc"
            raise UserError(f"{path}: metric_list: found {str(metric)[:60]!r} ({expected})", HINT)
