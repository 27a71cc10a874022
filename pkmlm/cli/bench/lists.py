"""Lists that options of benchmarks take: `--slots 16k,1M`, `--only pkmlm,ffn`, `--batch 1,8`."""

import math
from collections.abc import Callable

import click

from pkmlm.bench import short

# 1k, 4k, 16k, 65k, 262k, 1M ...: the powers of four, by the names that papers give them.
NAMED_SLOTS = {short(4**power): 4**power for power in range(5, 16)}
Choose = Callable[[click.Context, click.Parameter, str | None], tuple[str, ...] | None]


def some_of(names: tuple[str, ...]) -> Choose:
    """What chooses some of `names`, in their own order; None where the option is not given."""

    def choose(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        given = [text.strip() for text in value.split(",")]
        for name in given:
            if name not in names:
                raise click.BadParameter(f"found {name!r} (expected some of {', '.join(names)})")
        return tuple(name for name in names if name in given)

    return choose


def numbers_of_keys(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Sub-keys of a half for each number of slots, such as 16k or 147456; none where the option is not given."""
    return () if value is None else tuple(dict.fromkeys(keys_of(text.strip()) for text in value.split(",")))


def keys_of(text: str) -> int:
    """Sub-keys of a half for a number of slots."""
    slots = NAMED_SLOTS.get(text) or number(text)
    keys = math.isqrt(slots)
    if not slots or keys**2 != slots:
        near = f"{keys**2} or {(keys + 1) ** 2}, or " if slots else ""
        raise click.BadParameter(f"found {text!r} (expected a square: {near}one of {', '.join(NAMED_SLOTS)})")
    return keys


def batch_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Distinct sizes, in order."""
    sizes = sorted({number(text.strip()) for text in value.split(",")})
    if not 1 <= sizes[0] <= sizes[-1] <= 4096:
        raise click.BadParameter(f"found {value!r} (expected numbers from 1 to 4096, such as 1,8)")
    return tuple(sizes)


def number(text: str) -> int:
    """A whole number of at most 11 digits; 0 for what is none."""
    return int(text) if text.isdecimal() and len(text) < 12 else 0
