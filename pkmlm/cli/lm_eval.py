"""lm_eval's own command line with the model `pkmlm`: `python -m pkmlm.cli.lm_eval run --model pkmlm ...`.

lm-eval finds models of other packages by their entry point only after 0.4.13.
"""

import sys


def register() -> None:
    """Register the model `pkmlm` with lm_eval, unless it is registered already."""
    import lm_eval.models  # noqa: F401 (before ours: lm_eval loads its own models only into an empty registry)
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from pkmlm.evaluate.lm_eval import PkmLM

    if "pkmlm" not in MODEL_REGISTRY:
        register_model("pkmlm")(PkmLM)


def main() -> None:
    """Hand over to lm_eval, and report a user's mistake as `pkmlm eval` does."""
    from lm_eval.__main__ import cli_evaluate

    from pkmlm.cli import print_error
    from pkmlm.errors import UserError
    from pkmlm.launched import init_distributed

    register()
    try:
        with init_distributed():
            cli_evaluate()
    except UserError as error:
        sys.exit(print_error(error))


if __name__ == "__main__":
    main()
