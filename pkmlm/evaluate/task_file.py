"""What `--tasks` accepts besides lm-eval's own tasks: suites of them, and definitions in a user's files.

No file that is read can run code, but lm-eval imports the Python that a definition names (`!function`, `class`,
`process_docs`, `use_prompt`, a filter, ...) and fetches metrics that are scripts. Of a user's file it is therefore
given plain YAML with the keys in `KEYS` and metrics of its own, and nothing else.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from pkmlm.errors import UserError
from pkmlm.recipe.nodes import parse, yaml_text

SUITES = {"memoryformer": ("piqa", "winogrande", "wsc", "arc_easy", "arc_challenge", "logiqa")}  # table 1 of its paper
KEYS = {
    *("task", "task_alias", "tag", "include", "metadata", "output_type", "metric_list", "description"),
    *("dataset_path", "dataset_name", "dataset_kwargs"),
    *("training_split", "validation_split", "test_split", "fewshot_split"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix", "target_delimiter", "fewshot_delimiter"),
    *("num_fewshot", "fewshot_config", "should_decontaminate", "doc_to_decontamination_query"),
}
HINT = "a task of your own holds only data and templates; run one that needs Python with lm-eval's own command"


def read_task_file(path: Path) -> dict[str, Any]:
    """A user's definition, with those that it includes; keys that are null are left out.

    Raises:
        UserError: a file cannot be read or is not plain YAML; it has another key than `KEYS` or another metric than
            lm-eval's; it includes itself.
    """
    return _with_included(path, ())


def _with_included(path: Path, includers: tuple[Path, ...]) -> dict[str, Any]:
    """As `read_task_file`; `includers` are the files that include this one."""
    if path.resolve() in includers:
        raise UserError(f"{path} includes itself")
    text = yaml_text(path)
    tree = parse(text, str(path))  # refuses tags, anchors and keys that are given twice
    if not isinstance(tree.value, dict):
        raise UserError(f"{tree.place}: found {tree.shown()} (expected a mapping of keys)")
    for key, node in tree.value.items():
        if key not in KEYS:
            raise UserError(f"{node.place}: {key}: a task of your own has no such key", HINT)
    try:
        own = yaml.safe_load(text)
        json.dumps(own, allow_nan=False, ensure_ascii=False).encode()
    except (yaml.YAMLError, ValueError, TypeError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path}: {what} (expected texts, numbers, lists and mappings)", HINT) from None
    if own.get("metric_list") is not None and not shipped_metrics(own["metric_list"]):
        where, expected = tree.value["metric_list"].place, "a list of lm-eval's own, such as [{metric: acc}]"
        raise UserError(f"{where}: metric_list: found {json.dumps(own['metric_list']):.60} (expected {expected})", HINT)
    names = own.pop("include", None) or []
    included: dict[str, Any] = {}
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str):
            raise UserError(f"{tree.value['include'].place}: include: found {name} (expected a file)")
        included |= _with_included(path.parent / name, (*includers, path.resolve()))
    return {key: value for key, value in (included | own).items() if value is not None}


def shipped_metrics(metrics: Any) -> bool:
    """Whether all metrics ship with lm-eval; for another name, it would fetch and run a script."""
    import lm_eval.api.metrics  # noqa: F401 (fills the registry)
    from lm_eval.api.registry import METRIC_REGISTRY

    return isinstance(metrics, list) and all(
        isinstance(each, dict) and str(each.get("metric")) in METRIC_REGISTRY and not each.get("hf_evaluate")
        for each in metrics
    )
