"""`pkmlm import`: a pretrained model of `transformers` as a run."""

from pathlib import Path

import click

from pkmlm.cli.options import PATH
from pkmlm.cli.outputs import refuse_fixed
from pkmlm.errors import UserError, printable


@click.command()
@click.argument("folder", type=PATH, metavar="FOLDER")
@click.option("-o", "--output", required=True, type=PATH, metavar="RUN", help="The run directory to write.")
def command(folder: str, output: str) -> None:
    """Turn a pretrained model of transformers into a run.

    FOLDER is what `save_pretrained` wrote, or a download: config.json, weights in safetensors and the tokenizer of a
    GPT-2, GPT-NeoX (Pythia), Llama (SmolLM, TinyLlama), Qwen2 or Qwen3. No code in it is executed, and no network is
    needed. Every command then takes RUN. To train it further, with a memory or without, start another run from it.

    \b
    Examples:
      pkmlm import SmolLM-135M -o runs/smol
      pkmlm eval runs/smol --text my.txt
      pkmlm tokenize my.txt --valid 5% --tokenizer runs/smol -o data/mine
      pkmlm train runs/smol/recipe.yaml -o runs/more -s data.dir=data/mine \\
        -s train.init_from=runs/smol -s train.steps=500
    """
    from pkmlm.export.pretrained import read_pretrained, write_run

    path = Path(output).absolute()
    refuse_fixed(output, path.resolve())
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"-o {output} exists already", "choose another folder")
    found = read_pretrained(Path(folder))
    parameters, model = write_run(path, found, folder), found.recipe.model
    click.echo(
        f"{printable(output)}: {found.architecture}, {parameters:,} parameters, {model.layers} layers of {model.dim}, "
        f"context {model.context:,}, vocabulary {model.vocab_size:,}"
    )
