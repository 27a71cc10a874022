"""`pkmlm eval`: how well a trained model predicts text."""

import json
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import COUNT, PATH, base_option, force_option, quiet_option, step_option, text_options
from pkmlm.cli.outputs import free_file
from pkmlm.cli.show import NO_CSV, Output, report_options
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.evaluate.documents import TextChoice


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@text_options
@click.option(
    "--stride",
    **COUNT,
    help="Tokens scored in each window; fewer give each token more context. Default and maximum: the context.",
)
@click.option("--answers", is_flag=True, help="Also answer the prompts of the split, and count the right answers.")
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="Zero-shot tasks of lm-eval, or files of your own (.yaml); memoryformer: the six of its paper.",
)
@click.option(
    "--task-data",
    type=PATH,
    metavar="DIR",
    help="Folder with each task's rows, DIR/TASK.jsonl. Default: the hub that lm-eval loads them from.",
)
@click.option("--limit", **COUNT, help="Only the first N documents of each task.")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    metavar="K",
    help="Examples before each question (from DIR/TASK.train.jsonl). Default: the task's, mostly 0.",
)
@click.option(
    "--batch-size", **COUNT, help="Questions per forward pass. Default: by their length; halved if memory runs out."
)
@click.option(
    "--log-samples",
    type=PATH,
    metavar="FILE",
    help="Write each answer, or the requests and scores of each document of a task, as JSON lines.",
)
@base_option
@force_option
@step_option
@report_options(NO_CSV)
@quiet_option
def command(
    run_path: str,
    choice: "TextChoice",
    stride: int | None,
    answers: bool,
    step: str,
    log_samples: str | None,
    base: str | None,
    force: bool,
    out: Output,
    quiet: bool,
    **options: Any,
) -> None:
    """Measure perplexity of RUN's model on a split or any text, and its accuracy on zero-shot tasks.

    Perplexity is that of lm-evaluation-harness for rolling tasks: documents never share context, words are split by
    white space, bytes are those of UTF-8. With --tasks it is computed only if --split, --text or --data asks for it.
    Results are also written to RUN/eval/. RUN may also be an exported folder; nothing is written into it. Under
    torchrun, processes share the work; the numbers are those of a single process.

    \b
    Examples:
      pkmlm eval runs/demo
      pkmlm eval runs/demo --text my.txt --stride 64
      zcat news.jsonl.gz | jq -r .body | pkmlm eval runs/demo --text -
      pkmlm eval runs/demo --step best --json
      pkmlm eval copied/demo --data moved/tokens
      pkmlm eval runs/demo --tasks piqa,arc_easy --task-data tasks
      pkmlm eval runs/facts --split valid --answers --log-samples answers.jsonl
      pkmlm eval attached --base gpt2 --text my.txt
      pkmlm eval runs/demo --tasks memoryformer --log-samples samples.jsonl
      torchrun --nproc-per-node 4 -m pkmlm eval runs/demo
    """
    from pkmlm.evaluate.evaluation import evaluate_run
    from pkmlm.files import write_text
    from pkmlm.launched import init_distributed
    from pkmlm.report.tables import evaluation_tables

    with init_distributed() as world, world.errors_on_rank_zero():
        if options["tasks"] is None:
            for name, value in options.items():
                if value is not None:
                    raise UserError(f"--{name.replace('_', '-')} requires --tasks")
            if log_samples is not None and not answers:
                raise UserError("--log-samples requires --tasks or --answers")
        elif stride is not None and not choice.explicit:
            raise UserError("--stride requires a perplexity", "with --tasks, also give --split or --text")
        if answers and (choice.text is not None or (options["tasks"] is not None and not choice.explicit)):
            raise UserError(
                "--answers: a text has none (expected a split of tokens)",
                "leave --text out; --data DIR gives other tokens, made with --prompt and --answer",
            )
        samples = free_file("--log-samples", log_samples, force)
        found = evaluate_run(
            run_path, step, choice, world, stride=stride, answers=answers, base=base, quiet=quiet, **options
        )
    if world.rank > 0:
        return
    warnings = list(found.warnings)

    def write() -> None:
        warnings.extend(found.keep())
        if samples is not None:
            lines = (json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in found.samples)
            write_text(samples, "".join(lines))

    out.show(found.record, evaluation_tables(found.record), write=write, warnings=warnings)
