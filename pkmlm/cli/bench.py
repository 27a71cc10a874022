"""`pkmlm bench`: speed on this machine."""

import math
from collections.abc import Callable

import click

from pkmlm.bench import LAYERS, MODELS, short
from pkmlm.cli.options import COUNT, RECIPE, quiet_option, set_option, several
from pkmlm.cli.show import NO_CSV, Output, report_options
from pkmlm.console import status_line

# 1k, 4k, 16k, 65k, 262k, 1M ...: the powers of four, by the names that papers give them.
NAMED_SLOTS = {short(4**power): 4**power for power in range(5, 16)}


class Slots(click.ParamType):
    """A number of slots, such as 16k or 147456; its value is the number of sub-keys of a half."""

    name = "slots"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        slots = NAMED_SLOTS.get(value) or (int(value) if value.isdecimal() and len(value) < 12 else 0)
        keys = math.isqrt(slots)
        if not slots or keys**2 != slots:
            self.fail(f"found {value!r} (expected a square, or one of {', '.join(NAMED_SLOTS)})", param, ctx)
        return keys


def rounds_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--rounds", default=default, **COUNT, help="How often each is timed.")


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that `generate` and `train` share."""
    slots = "Slots of the memories that have sub-keys, a model for each: 16k,1M. Default: the recipe's."
    some = f"Some of {', '.join(MODELS)}. Default: all possible ones."
    for option in (
        quiet_option,
        report_options(NO_CSV),
        rounds_option(5),
        click.option("--only", "kinds", metavar="A,B", callback=several(click.Choice(MODELS)), help=some),
        click.option("--slots", "num_keys", metavar="N,N", callback=several(Slots()), help=slots),
        set_option,
        click.argument("recipe_file", type=RECIPE, metavar="RECIPE"),
    ):
        command = option(command)
    return command


@click.group("bench")
def command() -> None:
    """Measure speed on this machine, with all variants timed in turn in one run.

    \b
    Examples:
      pkmlm bench memory
      pkmlm bench generate demo -s model.vocab_size=4096
      pkmlm bench train demo -s model.vocab_size=4096 --rounds 9
    """


@command.command("memory", short_help="The memory layer against the same in plain torch.")
@click.option(
    "--slots",
    "num_keys",
    metavar="N,N",
    default="16k,65k,262k,1M",
    callback=several(Slots()),
    help="Sizes of the memory: squares; 16k is 2^14, 1M is 2^20.",
)
@click.option("--dim", default=512, **COUNT, help="Width of the layer.")
@click.option("--heads", default=4, **COUNT, help="Memory heads.")
@click.option("--topk", default=32, **COUNT, help="Slots that a head reads.")
@click.option("--key-dim", default=512, **COUNT, help="Width of a query.")
@click.option("--tokens", default=1024, metavar="N", type=click.IntRange(min=2), help="Tokens per step.")
@rounds_option(7)
@click.option("--only", metavar="A,B", callback=several(click.Choice(LAYERS)), help=f"Some of {', '.join(LAYERS)}.")
@report_options(NO_CSV)
@quiet_option
def memory(
    num_keys: tuple[int, ...], only: tuple[str, ...], rounds: int, out: Output, quiet: bool, **shape: int
) -> None:
    """Time a product-key memory, the same layer in plain torch, and the FFN it replaces.

    Timed in turn, in fp32: the weighted sum of values alone; forward; forward and backward; and a whole step with the
    optimizer's update. This package's layer sums the gradient of its values in the update. Plain torch sorts all k^2
    candidates and sums values by EmbeddingBag: with dense gradients and default or fused Adam; the latter also compiled
    (on a CPU only if named, as compiling takes a minute or two); or with sparse gradients and SparseAdam. All memories
    of a round share one value table and its moments. GB/s counts the rows that must be read and written, each once; the
    share is relative to the bandwidth of a copy, measured in the same rounds.

    \b
    Examples:
      pkmlm bench memory
      pkmlm bench memory --slots 262k,1M --only pkmlm,plain-fused
      pkmlm bench memory --slots 65k --dim 1024 --tokens 8192 --json
    """
    from pkmlm.bench import memory as bench

    shapes = [bench.Shape(keys, **shape) for keys in num_keys]
    with status_line(quiet) as say:
        results = bench.time_sizes(shapes, only, rounds, say)
    out.show(bench.as_json(results), [*(result.table() for result in results), bench.growth(results)])


@command.command("generate", short_help="Whole models decoding and scoring.")
@model_options
@click.option(
    "--batch",
    "batches",
    metavar="N,N",
    default="1,8",
    callback=several(click.IntRange(1, 4096)),
    help="Sequences decoded or scored at once.",
)
@click.option("--tokens", default=16, **COUNT, help="Tokens decoded per sequence; at most half of the context.")
def generate(
    recipe_file: str,
    overrides: tuple[str, ...],
    num_keys: tuple[int, ...],
    kinds: tuple[str, ...],
    batches: tuple[int, ...],
    tokens: int,
    rounds: int,
    out: Output,
    quiet: bool,
) -> None:
    """Time whole models of RECIPE's shape in decoding and scoring.

    dense: its layers without memories; memory: with them; double: twice the layers; hash: a MemoryFormer. Random
    weights, random tokens, fp32. Decoding continues half a context, with a cache; scoring reads a whole context.
    M ops are millions of multiply-adds of a token's forward, MB the weights that it reads.

    \b
    Examples:
      pkmlm bench generate demo -s model.vocab_size=4096
      pkmlm bench generate pkm/12-layers -s model.vocab_size=32768 \\
        --only dense,memory,double
      pkmlm bench generate pkm/ablation -s model.dim=1024 \\
        -s model.vocab_size=32768 --only memory --slots 16k,1M
    """
    from pkmlm.bench.generate import time_inference
    from pkmlm.bench.models import chosen_models
    from pkmlm.recipe.constraints import require_softmax
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    require_softmax(recipe.model, recipe.name, "decode: it has no cache")
    chosen = chosen_models(recipe, num_keys, kinds)
    with status_line(quiet) as say:
        times = time_inference(chosen, batches, tokens, rounds, say)
    out.show(times.as_json(), times.tables())


@command.command("train", short_help="Whole models taking training steps.")
@model_options
def train(
    recipe_file: str,
    overrides: tuple[str, ...],
    num_keys: tuple[int, ...],
    kinds: tuple[str, ...],
    rounds: int,
    out: Output,
    quiet: bool,
) -> None:
    """Time whole models of RECIPE's shape: a forward pass, a training step, and decoding one token at batch size 1.

    dense: its layers without memories; memory: with them; double: twice the layers; hash: a MemoryFormer. Random
    weights and tokens; a step is `pkmlm train`'s own, in the recipe's precision, a forward that of one micro-batch.
    Decoding is timed with softmax attention only. M ops are millions of multiply-adds of a token's forward, MB the
    weights that it reads in fp32. MFU is the share of the device's peak that a step makes use of, six operations for
    each multiply-add; on a CPU, and on a GPU whose peak is not known, there is none.

    \b
    Examples:
      pkmlm bench train demo -s model.vocab_size=4096
      pkmlm bench train memoryformer/tiny --only dense,memory \\
        -s train.batch_tokens=2048 -s train.micro_batch=1
    """
    from pkmlm.bench.models import chosen_models
    from pkmlm.bench.train import time_training
    from pkmlm.device import select_device
    from pkmlm.recipe.load import load_recipe

    recipe = load_recipe(recipe_file, overrides)
    precision = select_device(recipe.train.precision).precision
    chosen = chosen_models(recipe, num_keys, kinds)
    with status_line(quiet) as say:
        times = time_training(chosen, precision, rounds, say)
    out.show(times.as_json(), times.tables())
