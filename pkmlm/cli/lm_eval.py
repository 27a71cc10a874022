"""lm_eval's own command line with the model `pkmlm`: `python -m pkmlm.cli.lm_eval run --model pkmlm ...`.

lm-eval finds models of other packages by their entry point only after 0.4.13. With `--task-data DIR`, its tasks take
their rows from a folder, as those of `pkmlm eval` do.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from pkmlm.environment import work_offline_without_hub


def register() -> None:
    """Register the model `pkmlm` with lm_eval, unless it is registered already."""
    import lm_eval.models  # noqa: F401 (before ours: lm_eval loads its own models only into an empty registry)
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from pkmlm.evaluate.lm_eval import PkmLM

    if "pkmlm" not in MODEL_REGISTRY:
        register_model("pkmlm")(PkmLM)


def take_rows_from(folder: Path) -> None:
    """Let the tasks of lm_eval's command have the rows of a folder; see `pkmlm.evaluate.tasks.load_tasks`."""
    import lm_eval

    from pkmlm.errors import UserError
    from pkmlm.evaluate.tasks import load_tasks

    plain = lm_eval.simple_evaluate

    def simple_evaluate(*, tasks: list[Any], num_fewshot: int | None, **options: Any) -> Any:
        if not all(isinstance(each, str) for each in tasks):  # lm_eval has read the files
            raise UserError("--task-data: --tasks names a file", "`pkmlm eval` takes rows for tasks of your own")
        found = load_tasks(",".join(tasks), folder, num_fewshot)
        return plain(tasks=[each.task for each in found], num_fewshot=num_fewshot, **options)

    lm_eval.simple_evaluate = simple_evaluate  # which its command imports from there


def main() -> None:
    """Hand over to lm_eval, and report a user's mistake as `pkmlm eval` does."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--task-data", type=Path)
    given, sys.argv[1:] = own.parse_known_args()
    if given.task_data is None:
        work_offline_without_hub()

    from lm_eval.__main__ import cli_evaluate

    from pkmlm.cli import print_error
    from pkmlm.errors import UserError, first_line
    from pkmlm.launched import init_distributed

    register()
    try:
        if given.task_data is not None:
            take_rows_from(given.task_data)
        with init_distributed():
            cli_evaluate()
    except UserError as error:
        sys.exit(print_error(error))
    except ConnectionError as error:  # no rows on this machine, and no network
        hint = "--task-data DIR takes rows from files: see `pkmlm help evaluation`"
        sys.exit(print_error(UserError(first_line(error), hint, exit_code=1)))


if __name__ == "__main__":
    main()
