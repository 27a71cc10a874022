"""Reports as tables: how memories are used, runs side by side, what slots hold, zero-shot tasks.

Each table is made from what the report prints as JSON, and needs no torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log
from statistics import fmean, stdev
from typing import Any

from pkmlm.console import SHARE, Column, Table, number
from pkmlm.errors import printable
from pkmlm.memory.address import memory_label
from pkmlm.report.compare import Group, flat_facts, several_tokenizers, shared_tasks
from pkmlm.report.equal import Equal
from pkmlm.report.metrics import EVENNESS, FLOORED, METRICS
from pkmlm.runs.results import average_accuracy

Entry = dict[str, Any]

COLLISIONS = "N-grams: the share that has a row to itself, in one table and in any"
ALONE = ("order", "distinct", "rows", "alone", "alone_expected", "alone_in_any", "alone_in_any_expected")
AMOUNTS = {"tokens": "{:,.0f}", "operations": "{:.4g}", "seconds": "{:,.3f}"}
ENOUGH = 10  # fewest slots for which the shuffled count is shown: a single slot would get its own contexts back
COUNT, ACCURACY = "{:,}", "{:.4f}"  # formats of numbers
USAGE, KL = METRICS["usage"], METRICS["kl"]
AT_STEP = number("at step", "{:,.0f}")
TOKENIZERS = "perplexity and nats per token are left out: the tokenizers differ"


def numbers(format: str, *names: str) -> list[Column]:
    """Columns of numbers in one format."""
    return [number(name, format) for name in names]


def columns_of(*names: str) -> dict[str, Column]:
    """Columns of `METRICS`, by the facts that they show."""
    return {METRICS[name].path: METRICS[name].column for name in names}


def usage_tables(entries: Sequence[Entry]) -> list[Table]:
    """The tables of a report: the texts, the memories, how evenly their slots are used, and each head or table."""
    several = len(entries) > 1
    rows: dict[str, list[list[Any]]] = defaultdict(list)
    for entry in entries:
        for each in entry.get("ngrams") or ():
            rows["ngrams"].append([entry["run"]] * several + [_where(each)] + [each[key] for key in ALONE])
        tokens = entry["memories"][0]["tokens"] if entry["memories"] else None
        memories = len({memory["memory"] for memory in entry["memories"]})
        rows["texts"].append([entry["run"], entry["step"], entry["split"], tokens, memories])
        for memory in entry["memories"]:
            start = [entry["run"]] * several + [_where(memory)]
            parts = "heads" if "heads" in memory else "tables"
            overlap = [memory["head_overlap"], memory["head_overlap_uniform"]] if parts == "heads" else []
            many = len(memory[parts]), memory["slots"], memory["reads"]
            rows[parts].append([*start, memory["kind"], *many, *overlap])
            if memory["effective"] is not None:
                rows["weights"].append([*start, memory["effective"], memory["top_weight"]])
            if "layers" in memory:
                rows["pools"].append([*start[:-1], ", ".join(map(str, memory["pool"])), memory["layer_overlap"]])
            by = {"mass": "mass", "uniform_mass": "random", "count": "count", "uniform": "random"}
            for group, weighing in by.items():
                if memory["mass"] == memory["count"] and "mass" in group:
                    continue  # every read weighs the same, as in n-gram tables
                rows["evenness"].append([*start, weighing, *(memory[group].get(key) for key in EVENNESS)])
            if len(memory[parts]) > 1 and memory["mass"]["usage"]:
                row = list(start)
                for key, worst in zip(FLOORED, (min, max), strict=True):
                    values = [part[key] for part in memory[parts] if part[key] is not None]
                    row += [worst(values), fmean(values), memory["uniform_head"][key]]
                rows[f"single {parts}"].append(row)
    where = [Column("Run")] * several + [Column("Layer")]
    kind = [*where, Column("Kind")]
    by_heads = [*kind, *numbers(COUNT, "Heads", "Slots", "Reads"), *numbers("{:.2%}", "Overlap", "random")]
    by_tables = [*kind, *numbers(COUNT, "Tables", "Slots", "Reads")]
    shared = [*where[:-1], Column("Layers"), number("Overlap", SHARE)]
    worth = [*where, *columns_of("effective", "top_weight").values()]
    even = [*where, Column("By"), *columns_of(*EVENNESS).values()]
    ends = [*where, *numbers(USAGE.format, f"Least {USAGE.heading.lower()}", "mean", "random")]
    ends += numbers(KL.format, f"Largest {KL.heading}", "mean", "random")
    text = [Column("Run"), number("Step"), Column("Text"), METRICS["tokens"].column, number("Memories")]
    tables = {
        "texts": ("How memories are used", text),
        "heads": ("Reads by heads; overlap: slots that two heads both read for a token", by_heads),
        "tables": ("Reads of tables: a token reads one slot of each", by_tables),
        "weights": ("Weights of a head: effective reads, share of the largest", worth),
        "pools": ("Tables that layers share: mass that two of them give to the same slots", shared),
        "evenness": ("Slots: share used, KL from uniform (nats), how many hold 50, 90 and 99 %", even),
        "single heads": ("Each head by itself, by mass (KL in nats)", ends),
        "single tables": ("Each table by itself, by mass (KL in nats)", ends),
        "ngrams": (COLLISIONS, [*where, *_of_ngrams()]),
    }
    return [Table(title, columns, rows[name]) for name, (title, columns) in tables.items() if rows[name]]


def usage_rows(entries: Sequence[Entry]) -> Table:
    """One row per memory with every number but those of its heads, for CSV."""
    facts = ("memory", "layer", "part", "kind", "slots", "tokens", "reads")
    more = ("effective", "top_weight", "head_overlap", "head_overlap_uniform", "layer_overlap")
    groups = {"uniform": FLOORED, "uniform_mass": FLOORED, "mass": EVENNESS, "count": EVENNESS}
    names = [*facts, *(f"{group}_{key}" for group, keys in groups.items() for key in keys), *more]
    rows = [
        [entry["run"], entry["step"], entry["split"]]
        + [memory.get(key) for key in facts]
        + [memory[group][key] for group, keys in groups.items() for key in keys]
        + [memory.get(key) for key in more]
        for entry in entries
        for memory in entry["memories"]
    ]
    return Table("", [Column(name) for name in ("run", "step", "split", *names)], rows)


def background_table(record: Entry) -> Table:
    """What a background holds: for each table, how its slots are read over batches."""
    keys = ("slots", "read", "every_batch", "mean_batches")
    rows = [[_table(each), *(each[key] for key in keys)] for each in record["tables"]]
    title = f"Slots over {record['batches']:,} batches of {record['batch_tokens']:,} tokens"
    where = f"{record['run']} at step {record['step']}, {record['split']}"
    columns = [Column("Table"), *numbers(COUNT, "Slots", "Read", "In every batch"), number("Batches a slot", "{:,.1f}")]
    return Table(f"{title}: {printable(where)}", columns, rows)


def compare_tables(groups: Sequence[Group], equals: Sequence[Equal]) -> list[Table]:
    """The tables of a comparison, with one row per group of runs; tables without a single value are left out.

    Args:
        equals: the points at which runs are compared; their facts are among those of the runs.
    """
    found = [quality_table(groups), parameter_table(groups), training_table(groups)]
    found += [equal_table(groups, equal) for equal in equals]
    found += [accuracy_table(groups), use_table(groups)]
    first = 1 + (len(groups) < len(runs_of(groups)))  # column after names and seeds
    return [each for each in found if any(value is not None for row in each.rows for value in row[first:])]


def runs_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The facts of all runs."""
    return [run for group in groups for run in group.runs]


def table_of_groups(
    title: str, groups: Sequence[Group], columns: Sequence[Column], cells: Iterable[Iterable[Any]], *notes: str
) -> Table:
    """A table with a row per group: its name, how many seeds it has if some have several, and its cells."""
    several = len(groups) < len(runs_of(groups))
    start = [Column("Run"), *([number("Seeds")] if several else [])]
    rows = [
        [group.name, *([len(group.runs)] if several else []), *row] for group, row in zip(groups, cells, strict=True)
    ]
    return noted(title, [*start, *columns], rows, *notes)


def quality_table(groups: Sequence[Group]) -> Table:
    """The best validation of each group, and its test split."""
    runs = runs_of(groups)
    shown = comparable_columns(runs, "valid_bits_per_byte", "valid_loss", "valid_perplexity") | {"valid_step": AT_STEP}
    shown |= comparable_columns(runs, "bits_per_byte", "perplexity", "word_perplexity") | {"test_step": AT_STEP}
    note = TOKENIZERS if several_tokenizers(runs) else ""
    cells = (_cells(group, shown) for group in groups)
    return table_of_groups("Best validation, and the test split", groups, [*shown.values()], cells, note)


def parameter_table(groups: Sequence[Group]) -> Table:
    """The kinds of memories, and the parameters."""
    shown = {"kind": Column("Kind")} | columns_of("dense", "memory", "total", "read_per_token")
    return table_of_groups("Parameters", groups, [*shown.values()], (_cells(group, shown) for group in groups))


def training_table(groups: Sequence[Group]) -> Table:
    """How long each group was trained; also how it ended, if a run has not finished."""
    shown = columns_of("step", "tokens", "seconds", "tokens_per_second")
    if any(run["status"] not in (None, "finished") for run in runs_of(groups)):
        shown["status"] = Column("Status")
    note = "~: measured while each run trained, not timed side by side"
    return table_of_groups("Training", groups, [*shown.values()], (_cells(group, shown) for group in groups), note)


def accuracy_table(groups: Sequence[Group]) -> Table:
    """The accuracy on zero-shot tasks."""
    runs = runs_of(groups)
    names, shared = list(dict.fromkeys(name for run in runs for name in run["tasks"])), shared_tasks(runs)
    notes = [] if shared == names else [f"average: over the tasks that all runs have: {', '.join(shared) or 'none'}"]
    average = METRICS["average_acc"].column
    columns = [*numbers(average.format, *names), average, *_step_column(runs, "tasks_step")]
    cells = []
    for group in groups:
        by_column = [[run["tasks"].get(name, {}).get("acc") for run in group.runs] for name in names]
        by_column += [[run[key] for run in group.runs] for key in ("average_acc", "tasks_step")]
        cells.append(map(_cell, by_column, columns))
    return table_of_groups("Zero-shot accuracy", groups, columns, cells, *notes)


def use_table(groups: Sequence[Group]) -> Table:
    """How the slots of each memory are used, one row per memory of a group."""
    columns = numbers(USAGE.format, USAGE.heading, "random") + numbers(KL.format, f"{KL.heading} (nats)", "random")
    columns += columns_of("gini", "effective", "top_weight").values()
    columns += _step_column(runs_of(groups), "usage_step")
    rows = []
    for group in groups:
        memories: dict[tuple[str, int], list[list[Any]]] = {}
        for run in group.runs:
            for memory in run["usage"]:
                values = [memory[by][key] for key in FLOORED for by in ("mass", "uniform_mass")]
                values += [memory["mass"]["gini"], memory["effective"], memory["top_weight"], run["usage_step"]]
                memories.setdefault((_where(memory), memory["slots"]), []).append(values)
        for where, found in memories.items():
            lacking = [[None] * len(found[0])] * (len(group.runs) - len(found))
            rows.append([group.name, *where, *map(_cell, zip(*found, *lacking, strict=True), columns)])
    columns = [Column("Run"), Column("Layer"), number("Slots"), *columns]
    return noted("Memory use on the test split, by mass", columns, rows)


def _step_column(runs: Sequence[Mapping[str, Any]], key: str) -> list[Column]:
    """A column for the step of what was not measured at the last step of every run."""
    return [AT_STEP] if any(run[key] not in (None, run["step"]) for run in runs) else []


def comparable_columns(runs: Iterable[Mapping[str, Any]], *names: str) -> dict[str, Column]:
    """`columns_of` these measures, without those by the token where tokenizers differ."""
    apart = several_tokenizers(runs)
    return columns_of(*(name for name in names if not (apart and METRICS[name].by_token)))


def noted(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]], *notes: str) -> Table:
    """A table with notes, the last of which explains the spreads in it, if there are any."""
    varies = any(isinstance(value, str) and "+-" in value for row in rows for value in row)
    spread = "+-: standard deviation over seeds" if varies else ""
    return Table(title, columns, rows, "; ".join(filter(None, (*notes, spread))))


def equal_table(groups: Sequence[Group], equal: Equal) -> Table:
    """Validation where all runs had taken as much as the shortest, one row per group."""
    over = equal.over
    shown = {
        f"{over}_per_step": number(f"{over} per step", AMOUNTS[over]),
        f"equal_{over}_step": AT_STEP,
        f"equal_{over}_between": number("between", "{:,.0f}"),
    }
    runs = runs_of(groups)
    losses = comparable_columns(runs, "valid_bits_per_byte", "valid_loss", "valid_perplexity")
    shown |= {f"equal_{over}_{key}": column for key, column in losses.items()}
    rows = [[group.name, *_cells(group, shown)] for group in groups]
    notes = ["between: interpolated between validations so many steps apart"]
    if any(0 < (run[f"equal_{over}_step"] or 0) < (run["step"] or 0) for run in runs):
        notes.append("a run that went on is in the middle of its schedule")
    if several_tokenizers(runs):
        notes.append(TOKENIZERS)
        notes += ["so many tokens are another amount of text for each tokenizer"] if over == "tokens" else []
    title = f"At equal {over}: {AMOUNTS[over].format(equal.amount)}, all that {printable(equal.shortest)} took"
    return noted(title, [Column("Run"), *shown.values()], rows, *notes)


def _cells(group: Group, columns: Mapping[str, Column]) -> list[Any]:
    """The cells of a group's row, for columns that are named by their facts."""
    return [_cell((run[key] for run in group.runs), column) for key, column in columns.items()]


def _cell(values: Iterable[Any], column: Column) -> Any:
    """The cell of a group's runs in a column: their value, or its mean and spread; and how many runs have it, if not
    all do.
    """
    found = list(values)
    known = [value for value in found if value is not None]
    if not known or found == [found[0]] * len(found):
        return found[0]
    if isinstance(known[0], str):
        return ", ".join(dict.fromkeys(known))
    few = f" (n={len(known)})" if len(known) < len(found) else ""
    return f"{with_spread(known, column.format)}{few}"


def with_spread(values: Sequence[float], format: str) -> str | None:
    """The mean, and the sample standard deviation (n - 1) of values that differ: `104.13 +-0.52`."""
    if not values:
        return None
    text = format.format(fmean(values))
    return f"{text} +-{format.format(stdev(values))}" if len(set(values)) > 1 else text


def compare_rows(groups: Sequence[Group]) -> Table:
    """One row per group of runs, for CSV: the facts, each task's accuracy, and the mean usage and KL over memories; for
    several seeds, the means. A number in which seeds differ also has a column of spreads, and one that not all seeds
    have a column that says how many do.
    """
    records = []
    for group in groups:
        first, *others = [flat_facts(run) for run in group.runs]
        alike = {key: value for key, value in first.items() if all(run.get(key) == value for run in others)}
        found = group.as_json()
        spreads = {f"{key}_spread": deviation for key, deviation in found["spread"].items() if key not in alike}
        spreads |= {f"{key}_n": count for key, count in found["n"].items()}
        statuses = dict.fromkeys(run["status"] for run in group.runs if run["status"])
        own = {"run": group.name, "seeds": len(group.runs), "status": ", ".join(statuses) or None}
        records.append(found["mean"] | alike | spreads | own)
    order = [key for group in groups for run in group.runs for key in flat_facts(run)]
    columns = dict.fromkeys(key for name in ("run", "seeds", *order) for key in (name, f"{name}_spread", f"{name}_n"))
    columns |= dict.fromkeys(key for record in records for key in record)
    names = [name for name in columns if any(name in record for record in records)]
    return Table("", [Column(name) for name in names], [[record.get(name) for name in names] for record in records])


def _where(entry: Entry) -> str:
    """What tables call the memory of an entry: "3 facts"; only "facts" for several layers."""
    return memory_label(entry).removeprefix("layer ")


def _table(entry: Entry) -> str:
    """What tables call one table of a memory: "3 facts", or "3 experts inputs" where it is not that of the values."""
    name = entry["table"].rpartition(".")[2]
    return _where(entry) if name == "values" else f"{_where(entry)} {name}"


def most_read_table(record: Entry) -> Table:
    """The slots with most mass: how much and by which head they are read, what they say, what their contexts share."""
    said = [Column(name) for name in ("Head", "Raises", "Pattern")]
    columns = [Column("Slot"), number("Reads"), number("Mass", "{:.2%}"), *said]
    rows = []
    for slot in record["slots"]:
        said_of = _by_heads(slot, 1, "{head} {share:.0%}"), _words(slot["raises"], 2), pattern_text(slot["pattern"])
        rows.append([slot["name"], slot["reads"], slot["share"], *said_of])
    return Table(f"Slots with most mass: {_slots_title(record)}", columns, rows)


def collision_table(record: Entry) -> Table:
    """Distinct n-grams of a text, and how many are alone in their row of one table, or of any of their order's."""
    return Table(COLLISIONS, _of_ngrams(), [[each[key] for key in ALONE] for each in record["collisions"]])


def _of_ngrams() -> list[Column]:
    shares = ("Alone", "expected", "In any", "expected")
    return [number("Order"), *numbers(COUNT, "Distinct", "Rows"), *numbers("{:.1%}", *shares)]


def slot_tables(record: Entry, later_blocks: int) -> list[Table]:
    """One slot: how it is read, its words, its contexts.

    Args:
        record: of `pkmlm slots RUN --slot N --json`.
        later_blocks: blocks after the memory's, which the words leave out.
    """
    (slot,) = record["slots"]
    columns = [number("Reads"), number("Mass", "{:.3%}"), Column("By heads"), Column("Pattern")]
    row = [slot["reads"], slot["share"], _by_heads(slot, 8, "{head}: {share:.0%}"), pattern_text(slot["pattern"])]
    tables = [Table(f"Slot {slot['name']}: {_slots_title(record)}", columns, [row])]
    if slot["raises"] is not None:
        later = f"{later_blocks} later layer{'s' if later_blocks > 1 else ''}" if later_blocks else ""
        left_out = ", ".join(filter(None, (later, *record["left_out"])))
        note = f" (approximate: {left_out} left out)" if left_out else ""
        words = [
            [quoted(up["token"]), up["logit"], quoted(down["token"]), down["logit"]]
            for up, down in zip(slot["raises"], slot["lowers"], strict=True)
        ]
        columns = [Column("Raises"), number("logit", "{:+.2f}"), Column("Lowers"), number("logit", "{:+.2f}")]
        tables.append(Table(f"What its value says{note}", columns, words))
    if "ngrams" in record:
        found = [[each["count"], " ".join(map(quoted, each["tokens"]))] for each in record["ngrams"]]
        title = "N-grams of the text that fall into this row, by the first token of each id"
        tables.append(Table(title, [number("Seen"), Column("Tokens")], found))
    contexts = [
        [context["weight"], context["document"], context["place"], "{before}[{token}]{after}".format(**context)]
        for context in slot["contexts"]
    ]
    columns = [number("Weight", "{:.3f}"), number("Doc"), number("Place"), Column("Context")]
    title = "Read with the largest weights at [ ]" if record["weighted"] else "Read with weight 1; the first at [ ]"
    if not contexts:
        title = "Not read in this text: its value may be old or untouched"
    return [*tables, Table(title, columns, contexts)]


def prompt_table(record: Entry) -> Table:
    """Each token of a prompt with its strongest slots."""
    columns = [Column("Token"), Column("Slot"), number("Weight", "{:.3f}"), Column("Raises")]
    rows = [
        ["" if rank else quoted(token["token"]), slot["name"], slot["weight"], _words(slot["raises"], 4)]
        for token in record["tokens"]
        for rank, slot in enumerate(token["slots"])
    ]
    which = "Strongest slots of each token" if record["weighted"] else "First slots of each token, which weigh the same"
    return Table(f"{which}: {_slots_title(record)}", columns, rows)


def pattern_text(pattern: Entry | None) -> str | None:
    """A pattern of contexts as text, such as: next " the" 7/10."""
    if pattern is None:
        return None
    what = pattern["what"] if pattern["kind"] == "place" else quoted(pattern["what"])
    return f"{pattern['kind']} {what} {pattern['shared']}/{pattern['contexts']}"


def pattern_note(record: Entry) -> str:
    """How many of the slots shown have contexts that share a pattern, and how many by chance."""
    found = record["patterns"]
    by_chance = f"; shuffled: {found['shuffled']:.1f}" if found["slots"] >= ENOUGH else ""
    return f"{found['patterned']} of {found['slots']} slots have contexts that share a pattern{by_chance}"


def quoted(token: str) -> str:
    """A token in quotation marks, so that its spaces show."""
    return f'"{token}"'


def _slots_title(record: Entry) -> str:
    gate = ", behind a gate" if "gate" in record["left_out"] else ""
    where = f"{record['run']} at step {record['step']}, {memory_label(record)}{gate}"
    return where + (f", {record['split']}" if "split" in record else "")


def _words(words: Sequence[Entry] | None, most: int) -> str | None:
    return None if words is None else " ".join(quoted(each["token"]) for each in words[:most])


def _by_heads(slot: Entry, most: int, format: str) -> str | None:
    """The heads that read a slot most, with their shares of its reads."""
    heads = slot["heads"][:most]
    return ", ".join(format.format(head=each["head"], share=each["reads"] / slot["reads"]) for each in heads) or None


def probe_table(record: Entry) -> Table:
    """The real perplexity, that of dense twins, and each probe of each memory.

    Args:
        record: of `pkmlm probe --json`.
    """
    keys = ("nats", "low", "high", "share", "token_ppl")
    rows = [[None, "real", 0.0, None, None, None, record["real"]["token_ppl"]]]
    rows += [[None, twin["run"], *(twin.get(key) for key in keys)] for twin in record["dense"]]
    for memory in record["memories"]:
        for name, probe in memory["probes"].items():
            rows.append([_where(memory), name.replace("_", " "), *(probe[key] for key in keys)])
    columns = [
        Column("Memory"),
        Column("Probe"),
        *numbers("{:+.4f}", "Nats per token, above real", "from", "to"),
        number("of the gain", SHARE),
        number("Perplexity", "{:,.2f}"),
    ]
    tokens = f"{record['tokens']:,} token{'s' * (record['tokens'] != 1)}"
    where = f"{record['run']} at step {record['step']}, {record['split']} ({tokens})"
    return Table(f"What the memory is worth: {where}", columns, rows)


def probe_notes(record: Entry) -> str:
    """What the intervals and means are over, and in sentences what the memory is worth and how dense twins compare."""
    interval, memory = record["interval"], record["memories"][-1]
    notes = [f"real: {record['real']['nats']:.4f} nats per token", f"means over {record['fit_tokens']:,} train tokens"]
    if interval["units"] > 1:
        notes.append(f"from, to: {interval['level']:.0%} bootstrap over {interval['units']:,} {interval['over']}")
    zero, token, bigram = (memory["probes"][name] for name in ("zero", "token_mean", "bigram_mean"))
    several = len({each["memory"] for each in record["memories"]} - {"all"}) > 1
    what = "All memories together are" if several else "The memory is"
    if zero["share"] is None:
        harms = zero["high"] is not None and zero["high"] < 0
        worth = "worse than nothing" if harms else "worth nothing"
        notes += ["", f"{what} {worth} on this text: {zero['nats']:+.4f} nats/token without it."]
    else:
        notes += ["", f"{what} worth {zero['nats']:.3f} nats per token to this model."]
        kept = f"The mean output for the token keeps {token['share']:.1%} of that"
        notes.append(f"{kept}; for the token and the one before it, {bigram['share']:.1%}.")
    for twin in record["dense"]:
        name = f"{printable(twin['run'])} at step {twin['step']}"
        if twin["low"] is not None and twin["low"] <= 0 <= twin["high"]:
            notes.append(f"Whether the model is better or worse than {name} is not known: the interval includes 0.")
        else:
            side = "better" if twin["nats"] > 0 else "worse"
            notes.append(f"The model is {abs(twin['nats']):.3f} nats {side} than {name}.")
    return "\n".join(notes)


def evaluation_tables(record: Entry) -> Iterator[Table | str]:
    """The perplexity and the scores on tasks, as far as they were measured, and notes on the tasks.

    Args:
        record: of `pkmlm eval --json`; "tasks" is described at `evaluate.lm_eval.task_record`.
    """
    if found := record["perplexity"]:
        title = f"{record['run']} at step {record['step']}, {found['split']}"
        columns = [Column("per"), *numbers("{:,.4f}", "bits", "nats"), number("perplexity", "{:,.3f}"), number("count")]
        rows = [
            [unit, found["nll"] / count / log(2), found["nll"] / count, found[f"{unit}_ppl"] or "over 1e308", count]
            for unit in ("byte", "word", "token")
            if (count := found[f"{unit}s"])
        ]
        yield Table(title, columns, rows)
    if said := record.get("answers"):
        columns = [number("answers", "{:,}"), number("exactly right", "{:.1%}")]
        yield Table(f"{record['run']} at step {record['step']}, answers", columns, [[said["n"], said["exact_match"]]])
    if record["tasks"]:
        yield from _task_tables(record)


def _task_tables(record: Entry) -> Iterator[Table | str]:
    tasks, harness = record["tasks"], record["harness"]
    right = {name: facts for name, facts in tasks.items() if facts["acc"] is not None}
    keys = ("n", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "chance")
    accuracies = [[name, *(facts[key] for key in keys), _cut(facts)] for name, facts in right.items()]
    average, chance = average_accuracy(right.values())
    if len(right) > 1 and average is not None:
        accuracies.append(["average", None, average, None, None, None, chance, None])
    constant = [
        [name, answer, share] for name, facts in tasks.items() for answer, share in (facts["always"] or {}).items()
    ]
    others = [
        [name, facts["n"], metric, value, _cut(facts)]
        for name, facts in tasks.items()
        for metric, value in facts["metrics"].items()
    ]
    start, cut = [Column("Task"), number("n")], Column("cut", "right")
    headings = numbers(ACCURACY, "acc", "stderr", "acc_norm", "stderr", "chance")
    answers = [Column("Task"), Column("Answer"), number("acc", ACCURACY)]
    tables = (
        Table(f"Zero-shot tasks: {record['run']} at step {record['step']}", [*start, *headings, cut], accuracies),
        Table("What the same answer to every question gives", answers, constant),
        Table("Other metrics", [*start, Column("Metric"), number("value", "{:,.4f}"), cut], others),
    )
    notes = []
    if any(facts["truncated"] for facts in tasks.values()):
        notes.append(f"cut: share of requests that lost their beginning: the context is {harness['context']} tokens")
    if spanning := {name: facts for name, facts in tasks.items() if facts["spanning"]}:
        for name, facts in spanning.items():
            where = f"{facts['spanning']:,} of {facts['requests']:,} requests"
            notes.append(f"{name}: in {where}, a token is part of question and answer")
        notes.append("such a token is scored with the answer; lm-eval's own models leave it out")
    if harness["limit"] is not None:
        notes.append(f"only the first {harness['limit']} documents of each task: not comparable with other results")
    shots = {name: facts["num_fewshot"] for name, facts in tasks.items() if facts["num_fewshot"]}
    notes += [f"{name}: {count} examples before each question" for name, count in shots.items()]
    yield from (table for table in tables if table.rows)
    if notes:
        yield "\n".join(notes)


def _cut(facts: dict[str, Any]) -> str:
    """The share of a task's requests that were cut; "all" and "0" are exact."""
    cut, requests = facts["truncated"], facts["requests"]
    if cut in (0, requests):
        return "all" if cut else "0"
    return f"{min(max(cut / requests, 0.001), 0.999):.1%}"
