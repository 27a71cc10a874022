"""`pkmlm export`: a trained model as a folder for `transformers`."""

from dataclasses import replace
from pathlib import Path

import click

from pkmlm.cli.options import PATH, force_option, step_option
from pkmlm.cli.outputs import refuse_fixed
from pkmlm.errors import UserError, printable


@click.command()
@click.argument("run_path", type=PATH, metavar="RUN")
@click.option("-o", "--output", required=True, type=PATH, metavar="DIR", help="The folder to write.")
@step_option
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    help="Precision of the weights; of a memory, only tables: its queries, keys and maps stay in fp32.",
)
@click.option(
    "--table-bits",
    type=click.Choice(["8", "4"]),
    help="Bits per entry of the tables of memories, with one scale per row. Default: as --dtype.",
)
@force_option
def command(run_path: str, output: str, step: str, dtype: str, table_bits: str | None, force: bool) -> None:
    """Write RUN's model as a folder that transformers loads.

    The folder holds weights (safetensors), configuration, tokenizer and model card. A model without memories becomes a
    Llama, Qwen2, Qwen3, GPT-NeoX or GPT-2, if it computes what one of these does; any other model also has its code in
    the folder, which does not need pkmlm. `pkmlm eval`, `generate`, `slots`, `probe` and `usage-report` also take such
    a folder in place of a run.

    \b
    Examples:
      pkmlm export runs/demo -o exported
      pkmlm export runs/demo -o exported --step best --dtype bf16
      pkmlm export runs/demo -o small --table-bits 4
      pkmlm eval exported
    """
    import torch

    from pkmlm.data.tokenizer_file import SENTENCEPIECE_FILE
    from pkmlm.evaluate.load import load_run
    from pkmlm.export.card import card_of, known_scores
    from pkmlm.export.config import Origin
    from pkmlm.export.folder import check_free, write_export
    from pkmlm.memory.base import memories
    from pkmlm.model.convert import architecture_of, qwen2
    from pkmlm.model.transformer import Transformer
    from pkmlm.runs.directory import RunDirectory

    folder = Path(output).absolute()
    refuse_fixed(output, folder.resolve())
    check_free(folder, force)
    run = RunDirectory.existing(run_path)
    loaded = load_run(run.path, step, torch.device("cpu"))
    bits = None if table_bits is None else int(table_bits)
    if bits is not None and not memories(loaded.model):
        raise UserError(f"--table-bits: {printable(loaded.name)} has no tables", "leave it out")
    origin = Origin(loaded.name, loaded.step, loaded.tokens)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert isinstance(loaded.model, Transformer)  # as every run's is
    rows = loaded.model.embedding.num_embeddings
    architecture = architecture_of(replace(loaded.recipe.model, vocab_size=rows))
    if architecture is qwen2 and loaded.tokenizer.file == SENTENCEPIECE_FILE:
        architecture = None  # with a Qwen2, transformers reads no tokenizer but a byte-level BPE
    scores = known_scores(run, loaded.step)
    card = card_of(loaded.recipe, origin, parameters, dtype, bits, scores, code=architecture is None)
    size = write_export(
        folder,
        loaded.model,
        loaded.recipe,
        loaded.tokenizer,
        origin,
        card,
        architecture=architecture,
        dtype=dtype,
        table_bits=bits,
        force=force,
    )
    kind = "" if architecture is None else f", as {architecture.CLASS}"
    click.echo(
        f"{printable(output)}: {printable(loaded.name)} at step {loaded.step:,}, {parameters:,} parameters, "
        f"{size / 1e6:,.1f} MB in {dtype}{f', tables in {bits} bits' if bits else ''}{kind}"
    )
