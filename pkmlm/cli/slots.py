"""`pkmlm slots`: what single slots of a memory hold, and who reads them."""

import json
from typing import TYPE_CHECKING, Any

import click

from pkmlm.cli.options import PATH, json_option, prompt_argument, quiet_option, step_option, text_options
from pkmlm.console import warn_each
from pkmlm.errors import UserError, printable

if TYPE_CHECKING:
    from pkmlm.analysis.usage import MemoryUsage
    from pkmlm.console import Table
    from pkmlm.evaluate.documents import Documents
    from pkmlm.evaluate.load import LoadedRun
    from pkmlm.evaluate.text_choice import TextChoice

MOST = {"slots": 20, "contexts": 10, "token": 3}  # rows of each kind of report
ENOUGH = 10  # slots, to deal their contexts among them: of one alone they would come back
MOST_KEPT = 1 << 28  # contexts of all slots of a memory together, 12 bytes each: 3 GB
MOST_DESCRIBED = 10_000  # slots of one report: dealing their contexts at random takes 3 ms a slot


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@prompt_argument
@click.option("--layer", metavar="L", help="Which memory: 3, or 3:ffn1 where a layer has several. Default: the last.")
@click.option("--slot", metavar="N", help="One slot: its number, I:J by sub-keys, TABLE:BUCKET of hash tables.")
@text_options
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"How many to show. Default: {MOST['slots']} slots; with --slot, {MOST['contexts']} contexts of it; "
    f"with PROMPT, {MOST['token']} slots for each token.",
)
@step_option
@json_option
@quiet_option
def command(
    run_path: str,
    prompt: str | None,
    layer: str | None,
    slot: str | None,
    choice: "TextChoice",
    top: int | None,
    step: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """What the slots of RUN's memory hold, and who reads them.

    For a split or a text: the slots with most mass, what their values say, and what the contexts that read
    them have in common. With --slot: one slot in full. With PROMPT: the strongest slots of each of its tokens.

    What a value says is read off by the output head, without what later layers make of it: a rough approximation,
    the rougher the earlier the layer. A pattern is what at least half of a slot's ten strongest contexts share:
    their token, the next or the previous one, or the place in the model's window. "Shuffled" is how many slots have
    one by chance: with all contexts that are shown dealt at random among them.

    \b
    Examples:
      pkmlm slots runs/demo
      pkmlm slots runs/demo --slot 17:4
      pkmlm slots runs/demo "It was a dark night"
      pkmlm slots runs/hash --layer 2:ffn2 --slot 3:40
      pkmlm slots runs/demo --text my.txt --top 200 --json
    """
    from pkmlm.analysis.slot_details import find_memory
    from pkmlm.evaluate.documents import chosen_documents
    from pkmlm.evaluate.load import load_run

    if prompt is not None and (slot is not None or choice.explicit):
        raise UserError("PROMPT excludes --slot, --split, --text and --data", "leave one of them out")
    choice.refuse_standard_input("a text is read twice")
    run = load_run(run_path, step)
    memory = find_memory(run.model, layer)
    if prompt is not None:
        record, tables = of_prompt(run, memory, prompt, top or MOST["token"])
    else:
        documents = [chosen_documents(choice, run) for _ in range(2)]
        if slot is None:
            record, tables = of_memory(run, memory, documents, top or MOST["slots"], quiet)
        else:
            record, tables = of_slot(run, memory, documents, slot, top or MOST["contexts"], quiet)
    if as_json:
        click.echo(json.dumps(record, indent=2, allow_nan=False))
    else:
        click.echo("\n".join(table.render() for table in tables), nl=False)
        if found := record.get("patterns"):
            among = f"{found['patterned']} of {found['slots']} slots have contexts that share a pattern"
            by_chance = f"; shuffled: {found['shuffled']:.1f}" if found["slots"] >= ENOUGH else ""
            click.echo(f"\n{among}{by_chance}")
    if prompt is None:
        warn_each(documents[0].warnings)


def heading(run: "LoadedRun", memory: int) -> dict[str, Any]:
    """What every report begins with."""
    from pkmlm.model.memory.base import memories

    tap = memories(run.model)[memory].tap
    return {"run": run.name, "step": run.step, "layer": tap.layer, "name": tap.name, "kind": tap.kind}


def title(record: dict[str, Any]) -> str:
    """What a report is of."""
    where = f"{record['run']} at step {record['step']}, layer {record['layer']} {record['name']}"
    return where + (f", {record['split']}" if "split" in record else "")


def indexed(
    run: "LoadedRun", memory: int, documents: "Documents", contexts: int, quiet: bool
) -> "tuple[MemoryUsage, Any]":
    """The pass over a text."""
    from pkmlm.analysis.slot_details import index_slots
    from pkmlm.console import token_progress

    with token_progress(f"reading {printable(run.name)}", documents.tokens, quiet) as advance:
        (usage,), (strongest,) = index_slots(run, documents, advance, contexts, memory)
    return usage, strongest


def of_memory(
    run: "LoadedRun", memory: int, documents: "list[Documents]", top: int, quiet: bool
) -> "tuple[dict[str, Any], list[Table]]":
    """The slots with most mass."""
    from pkmlm.analysis.slot_contexts import CONTEXTS
    from pkmlm.analysis.slot_details import Wanted, describe
    from pkmlm.analysis.slots import most_read, patterned, slots_table

    if top > MOST_DESCRIBED:
        message = f"--top: found {top} (expected at most {MOST_DESCRIBED} slots)"
        raise UserError(message, "`pkmlm usage-report --export FILE` writes reads and mass of every slot")
    usage, strongest = indexed(run, memory, documents[0], CONTEXTS, quiet)
    (slots,) = describe(run, [Wanted(memory, usage, strongest, most_read(usage, top))], documents[1])
    record = heading(run, memory) | {"split": documents[0].name, "tokens": usage.tokens}
    found = patterned(slots)
    record |= {"patterns": found, "slots": [slot.as_json() for slot in slots]}
    return record, [slots_table(f"Slots with most mass: {title(record)}", slots)]


def of_slot(
    run: "LoadedRun", memory: int, documents: "list[Documents]", name: str, top: int, quiet: bool
) -> "tuple[dict[str, Any], list[Table]]":
    """One slot in full."""
    from pkmlm.analysis.slot_contexts import CONTEXTS
    from pkmlm.analysis.slot_details import Wanted, describe
    from pkmlm.analysis.slots import slot_number, slot_tables
    from pkmlm.model.memory.base import memories

    tap = memories(run.model)[memory].tap
    number = slot_number(name, tap.kind, tap.slots, tap.heads)
    if top * tap.slots > MOST_KEPT:
        most = MOST_KEPT // tap.slots
        raise UserError(
            f"--top: found {top} (expected at most {most}: as many are kept of each of {tap.slots:,} slots)"
        )
    usage, strongest = indexed(run, memory, documents[0], max(top, CONTEXTS), quiet)
    ((slot,),) = describe(run, [Wanted(memory, usage, strongest, [number])], documents[1])
    slot = slot._replace(contexts=slot.contexts[:top])
    record = heading(run, memory) | {"split": documents[0].name, "tokens": usage.tokens, "slots": [slot.as_json()]}
    later = len(run.model.blocks) - tap.layer
    note = f" (approximate: {later} later layer{'s' if later > 1 else ''} left out)" if later else ""
    return record, slot_tables(f"Slot {slot.name}: {title(record)}", slot, note)


def of_prompt(run: "LoadedRun", memory: int, prompt: str, top: int) -> "tuple[dict[str, Any], list[Table]]":
    """Each token's strongest slots."""
    from pkmlm.analysis.lens import Lens
    from pkmlm.analysis.slot_details import read_text
    from pkmlm.analysis.slots import reading_table, slot_name
    from pkmlm.model.memory.base import memories

    tap = memories(run.model)[memory].tap
    readings = read_text(run, memory, run.tokenizer.encode(prompt), top)
    lens = Lens(run, memory)
    distinct = sorted({slot for reading in readings for slot, _ in reading.slots})
    raised = (
        {slot: up for slot, (up, _) in zip(distinct, lens.words(distinct), strict=True)} if lens.reaches_output else {}
    )
    record = heading(run, memory)
    tokens = [
        {
            "token": token,
            "slots": [
                {
                    "slot": slot,
                    "name": slot_name(slot, tap.kind, tap.slots, tap.heads),
                    "weight": weight,
                    "raises": [word._asdict() for word in raised[slot]] if slot in raised else None,
                }
                for slot, weight in slots
            ],
        }
        for token, slots in readings
    ]
    record |= {"tokens": tokens}
    return record, [reading_table(f"Strongest slots of each token: {title(record)}", tokens)]
