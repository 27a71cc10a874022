"""`pkmlm probe`: what a memory is worth to a trained model."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import COUNT, PATH, base_option, force_option, quiet_option, step_option, text_options
from pkmlm.cli.show import DRAW, NO_CSV, Output, report_options

if TYPE_CHECKING:
    from pkmlm.evaluate.documents import TextChoice
    from pkmlm.report.plots import Look


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@click.option(
    "--dense",
    "twin_paths",
    type=PATH,
    multiple=True,
    metavar="RUN",
    help="A run without memory to compare with, at the same --step. May be repeated.",
)
@partial(text_options, reads_train=True)
@click.option(
    "--fit-tokens",
    default=1_000_000,
    **COUNT,
    help="Tokens of the train split, evenly spaced, over which means are taken. More tokens cover more pairs.",
)
@base_option
@force_option
@step_option
@report_options(NO_CSV, plots=DRAW)
@quiet_option
def command(
    run_path: str,
    twin_paths: tuple[str, ...],
    choice: "TextChoice",
    fit_tokens: int,
    base: str | None,
    force: bool,
    step: str,
    out: Output,
    quiet: bool,
) -> None:
    """Measure what RUN's memories are worth: the text's perplexity after a memory's output is replaced.

    Nothing is trained. The output is replaced by zero; by that of redrawn values; by that of random slots; by its mean
    for the token (over the train split); by its mean for the token and the one before it; and by the output at another
    position of the same token. For each, the loss above the real one is given in nats per token, with an interval over
    documents, and as a share of the memory's gain: 100 % is as good as the memory, 0 % as bad as zero, less is worse.
    If the token's mean keeps all of the gain, the memory is only a token table.

    The rest of the model was trained with the memory, so zero overstates its worth; --dense shows what a model without
    it learns. A memory is probed in each of its layers (hash tables: each part, in all of its layers); if there are
    several memories, each is also probed as a whole; and in the end all together. Results are printed, not stored.

    \b
    Examples:
      pkmlm probe runs/demo
      pkmlm probe runs/demo --dense runs/dense --plots pictures
      pkmlm probe runs/demo --text my.txt --json
      pkmlm probe runs/demo --format latex > worth.tex
      pkmlm probe attached --base gpt2 --data tokens
      pkmlm probe exported/demo --data tokens --split valid
    """
    from pkmlm.evaluate.load import load_run
    from pkmlm.export.config import is_attached
    from pkmlm.measure.probe import probe_run
    from pkmlm.report.tables import probe_notes, probe_table

    out.refuse_plots(force)
    run = load_run(run_path, step, base=base)
    twins = [load_run(path, step, base=base if is_attached(Path(path)) else None) for path in twin_paths]
    record, warnings = probe_run(run, twins, choice, fit_tokens, quiet)

    def draw(folder: Path, look: "Look") -> list[Path]:
        from pkmlm.report.plots import draw_probes

        return draw_probes(folder, record, look)

    out.show(record, [probe_table(record), probe_notes(record)], draw=draw, warnings=warnings)
