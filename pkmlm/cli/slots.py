"""`pkmlm slots`: what single slots of a memory hold, and who reads them."""

from typing import TYPE_CHECKING

import click

from pkmlm.cli.options import COUNT, PATH, base_option, prompt_argument, quiet_option, step_option, text_options
from pkmlm.cli.show import NO_CSV, Output, report_options
from pkmlm.console import Table
from pkmlm.errors import UserError

if TYPE_CHECKING:
    from pkmlm.evaluate.documents import TextChoice

DEFAULT_TOP = {"slots": 20, "contexts": 10, "reads": 3}  # rows of each report


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@prompt_argument
@click.option("--memory", metavar="NAME", help="Which memory, by the recipe's name. Default: the last of the model.")
@click.option("--layer", metavar="L", help="In which layer: 3, or 3:ffn1 where hash tables have several parts.")
@click.option("--slot", metavar="N", help="One slot: its number, I:J (sub-keys) or TABLE:ROW.")
@text_options
@click.option(
    "--top",
    **COUNT,
    help=f"How many to show. Default: {DEFAULT_TOP['slots']} slots; with --slot, {DEFAULT_TOP['contexts']} contexts "
    f"of it; with PROMPT, {DEFAULT_TOP['reads']} slots for each token.",
)
@base_option
@step_option
@report_options(NO_CSV)
@quiet_option
def command(
    run_path: str,
    prompt: str | None,
    memory: str | None,
    layer: str | None,
    slot: str | None,
    choice: "TextChoice",
    top: int | None,
    base: str | None,
    step: str,
    out: Output,
    quiet: bool,
) -> None:
    """Show what the slots of a memory of RUN hold, and which tokens read them.

    For a split or a text: the slots with most mass, what their values say, and what the contexts that read
    them have in common. With --slot: one slot in full. With PROMPT: the strongest slots of each of its tokens.

    What a value says is read by the output head, without the effect of later layers: a rough approximation, and rougher
    for earlier layers. A gated memory's map is applied, but not its gate, which depends on the token. For PEER, the
    activation of an expert is left out, which multiplies its value and may change the sign; weights and masses are the
    router's.

    A pattern is what at least half of a slot's ten strongest contexts share: the token, the next or the previous token,
    or the position in the model's window. "Shuffled" is how many slots have one by chance, with all contexts shuffled
    among the slots shown.

    Reads of an n-gram memory all weigh 1, so its contexts and PROMPT's slots are the first ones, not the strongest. For
    such a memory the command also shows how many distinct n-grams are alone in their row, and how many would be with
    random rows; with --slot, the n-grams of the text that fall into the row.

    \b
    Examples:
      pkmlm slots runs/demo
      pkmlm slots runs/demo --slot 17:4
      pkmlm slots runs/demo "It was a dark night"
      pkmlm slots runs/hash --layer 2:ffn2 --slot 3:40
      pkmlm slots runs/mixture --memory ngrams --layer 1
      pkmlm slots attached --base gpt2 --text my.txt
      pkmlm slots runs/demo --text my.txt --top 200 --json
    """
    from pkmlm.evaluate.load import load_run
    from pkmlm.measure.slots import find_memory, report_prompt, report_slots
    from pkmlm.report.tables import collision_table, most_read_table, pattern_note, prompt_table, slot_tables

    if prompt is not None and (slot is not None or choice.explicit):
        raise UserError("PROMPT excludes --slot, --split, --text and --data", "leave one of them out")
    choice.refuse_standard_input("a text is read twice")
    run = load_run(run_path, step, base=base)
    found = find_memory(run.model, ":".join(filter(None, (layer, memory))) or None)
    warnings: tuple[str, ...] = ()
    if prompt is not None:
        record = report_prompt(run, found, prompt, top or DEFAULT_TOP["reads"])
        parts: list[Table | str] = [prompt_table(record)]
    else:
        shown = top or DEFAULT_TOP["slots" if slot is None else "contexts"]
        record, warnings = report_slots(run, found, choice, slot, shown, quiet)
        later_blocks = len(run.model.blocks) - found.tap.layer
        parts = [most_read_table(record)] if slot is None else [*slot_tables(record, later_blocks)]
        if "collisions" in record:
            parts.append(collision_table(record))
    if record.get("patterns"):
        parts.append(pattern_note(record))
    out.show(record, parts, warnings=warnings)
