"""lm_eval's own command line with the model `pkmlm`: `python -m pkmlm.cli.lm_eval run --model pkmlm ...`.

lm-eval finds models of other packages by their entry point only after 0.4.13.
"""

import sys


def main() -> None:
    """Register the model and hand over to lm_eval; `pkmlm eval` tells of a mistake in the same way."""
    import lm_eval.models  # noqa: F401 (before ours: lm_eval loads its own models only into an empty registry)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    from pkmlm.cli import report
    from pkmlm.errors import UserError
    from pkmlm.evaluate.adapter import PkmLM
    from pkmlm.runtime.distributed import joined

    if "pkmlm" not in MODEL_REGISTRY:
        register_model("pkmlm")(PkmLM)
    try:
        with joined():
            cli_evaluate()
    except UserError as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()
