"""What is known of a memory before it is built: its keys with their ranges and help, what must hold between them, its
place in a block, its sizes, how its slots are addressed, and the words of its reports. Nothing here imports torch.

A kind of memory is a folder with a `spec.py`, whose class inherits from `Spec`, and a `layer.py`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from torch import nn

    from pkmlm.memory.table import Pool

MAX_INT = 2**31 - 1
MAX_SLOTS = 2**31  # ranks exchange slot numbers as int32

Optimizer = Literal["row-adam", "adam", "row-sgd"]
Schedule = Literal["inverse-sqrt", "cosine", "linear", "constant"]
TableSchedule = Literal[Schedule, "relative"]
Place = Literal["before", "qkv", "values", "ffn", "beside"]
Start = Literal["drawn", "zero"]
TokenGate = Literal["none", "token"]


class SpecError(ValueError):
    """A memory that cannot be built.

    Attributes:
        key: the dotted key, within the memory's own.
        found: what is wrong with it.
        expected: what it should be.
        others: keys that it was compared with.
    """

    def __init__(self, key: str, found: str, expected: str, *others: str):
        super().__init__(f"{key}: {found} (expected {expected})")
        self.key, self.found, self.expected, self.others = key, found, expected, others


def key(default: Any, text: str, **limits: Any) -> Any:
    """A field with its default and help, and limits (`ge=`, `gt=`, `le=`, `lt=`) of the number, or of each in a tuple.

    Args:
        default: a value, or the class of a section.
    """
    metadata = {"description": text, **limits}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def size(default: Any, text: str, le: int = MAX_INT) -> Any:
    """A field whose whole number is 1 or more."""
    return key(default, text, ge=1, le=le)


LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": ("{} or more", lambda value, limit: value >= limit),
    "gt": ("more than {}", lambda value, limit: value > limit),
    "lt": ("less than {}", lambda value, limit: value < limit),
    "le": ("at most {}", lambda value, limit: value <= limit),
}
TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Section:
    """Keys that are checked whenever they are given values.

    Raises:
        SpecError: a value has the wrong type, is out of its range or not among the choices.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            if wrong := unfit(getattr(self, each.name), hints[each.name], each.metadata):
                value, expected = wrong
                raise SpecError(each.name, f"found {value!r}", expected)


def unfit(value: Any, kind: Any, limits: Mapping[str, Any]) -> tuple[Any, str] | None:
    """What is not of a type with limits, a value or an item of a tuple, and what it should be; None: it fits."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in options:
        return None
    (kind,) = (option for option in options if option is not NoneType)
    args = get_args(kind)
    if get_origin(kind) is Literal:
        return None if isinstance(value, str) and value in args else (value, " or ".join(map(str, args)))
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not (args[-1] is Ellipsis or len(value) == len(args)):
            return value, "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
        return next(filter(None, (unfit(item, args[0], limits) for item in value)), None)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        return value, TYPES.get(kind, "a mapping")
    if kind is float and not math.isfinite(value):
        return value, "a number within 64-bit floating point"
    broken = [
        text.format(f"{limits[name]:g}" if isinstance(limits[name], float) else limits[name])
        for name, (text, holds) in LIMITS.items()
        if name in limits and not holds(value, limits[name])
    ]
    return (value, broken[0]) if broken else None


@dataclass(frozen=True)
class TableOptim(Section):
    """How the tables of a memory learn."""

    optimizer: Optimizer = key(
        "row-adam",
        "row-adam updates only the rows that were read; adam all rows; row-sgd those read, without moments",
    )
    lr: float | None = key(None, "peak learning rate of the tables, unless lr_scale gives it", gt=0, le=1e6)
    lr_scale: float | None = key(
        None,
        "the same, as a multiple of optim.lr; without both: lr 1e-3 with keys, else lr_scale 5, of hash 3",
        gt=0,
        le=1000,
    )
    betas: tuple[float, float] | None = key(None, "Adam's decay rates; null: those of optim", ge=0, lt=1)
    eps: float | None = key(None, "Adam's epsilon; null: that of optim", ge=1e-30)
    schedule: TableSchedule | None = key(
        None, "learning-rate schedule; null: that of optim; relative: that of optim, times a factor (`times`)"
    )
    times: tuple[float, float] = key((4.0, 1.0), "relative: the factor at the start and at the end", ge=0, le=1000)
    warmup_steps: int | None = key(None, "steps of linear warm-up; null: those of optim", ge=0, le=MAX_INT)
    final_lr: float | None = key(None, "final_lr of the tables; null: that of optim", ge=0, le=1)
    weight_decay: float = key(
        0.0, "decoupled weight decay; row-adam and row-sgd decay the rows that they update", ge=0, le=1e30
    )
    clip: float = key(1.0, "largest gradient norm of the tables; 0: no clipping", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is not None and self.lr_scale is not None:
            raise SpecError("lr_scale", f"found {self.lr_scale:g} beside lr {self.lr:g}", "one of the two", "lr")
        if self.schedule == "relative" and not any(self.times):
            raise SpecError("times", "found [0, 0], with which tables never learn", "one above 0", "schedule")


@dataclass(frozen=True)
class EveryRowOptim(TableOptim):
    """How tables learn that Adam updates as a whole unless the recipe says otherwise."""

    optimizer: Optimizer = key("adam", "row-adam and row-sgd update only the rows that were read; adam all rows")


class TableShape(NamedTuple):
    """A table of a memory in one layer, or that its layers share.

    Attributes:
        key: which key makes it as large as it is.
        rows, width: its shape.
    """

    key: str
    rows: int
    width: int


class Lookback(NamedTuple):
    """What a memory needs to know of the tokens before each.

    Attributes:
        ids: "canonical", where tokens that are the same word to a reader share an id, or "plain".
        order: how many tokens, the current one included, choose a row.
        back: how many positions before the current one it reads from.
    """

    ids: Literal["canonical", "plain"]
    order: int
    back: int


class Site(NamedTuple):
    """Where a memory is built.

    Attributes:
        dim: width of the stream.
        layer: the block, counted from 1.
        name: of the memory, in the recipe.
        vocab_size: rows of the embedding.
        share: the initial size of a residual branch over that of a linear map.
        momentum: weight of one forward in running statistics.
        pool: tables that the memory shares with those of other layers; None: it has its own.
        heads: of attention.
    """

    dim: int
    layer: int
    name: str
    vocab_size: int
    share: float
    momentum: float
    pool: "Pool | None" = None
    heads: int = 1


@dataclass(frozen=True)
class Spec(Section):
    """One memory of a recipe: the keys of its kind. Its class says what all memories of the kind have in common.

    Attributes:
        default_lr: the peak learning rate of its tables, where the recipe gives none; None: `default_lr_scale`.
        default_lr_scale: the same, as a multiple of `optim.lr`.
        title: of the kind, as a heading: "Product keys".
        unit: what one row of its tables is called: "slot", "bucket", "row" or "expert".
        of_the_model: keys that are no arguments of a layer.
        shapeless: keys that change what a layer makes of its weights, but not the shape of a tensor.
        key_lr_scale: the learning rate of its keys, as a multiple of that of the rest.
        keeps_statistics: whether it keeps running statistics of its queries.
        shares: whether its layers read one table.
    """

    default_lr: ClassVar[float | None] = None
    default_lr_scale: ClassVar[float] = 1.0
    title: ClassVar[str]
    unit: ClassVar[str] = "slot"
    of_the_model: ClassVar[tuple[str, ...]] = ()
    shapeless: ClassVar[tuple[str, ...]] = ()

    kind: str = key("", "the kind of memory")
    layers: tuple[str, ...] = key(
        (), "layers with this memory, counted from 1: 5, [3, 5], all, or auto:2, which spreads two evenly"
    )
    start: Start = key(
        "drawn", "zero: its values start at 0, so that the model is what it was without the memory until it learns"
    )
    gate: TokenGate = key("none", "token: each token decides how much of its output is added, by a sigmoid")

    @property
    def table_optim(self) -> TableOptim:
        """How its tables learn: its section `optim`."""
        optim: TableOptim = getattr(self, "optim")  # noqa: B009 - each kind declares its own
        return optim

    def peak_lr(self, lr: float) -> float:
        """The peak learning rate of its tables, where that of `optim` is `lr`."""
        optim = self.table_optim
        if optim.lr is not None:
            return optim.lr
        if optim.lr_scale is None and self.default_lr is not None:
            return self.default_lr
        return lr * (optim.lr_scale or self.default_lr_scale)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the layer, by the names of the keys."""
        others = {"kind", "layers", "optim", "gate", *self.of_the_model}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}

    @property
    def key_lr_scale(self) -> float:
        return 1.0

    @property
    def shares(self) -> bool:
        return False

    @property
    def keeps_statistics(self) -> bool:
        return False

    @property
    def lookback(self) -> Lookback | None:
        """What it needs to know of the tokens; None: it reads the stream alone."""
        return None

    def places(self, beside: bool) -> tuple[Place, ...]:
        """What it is in a block: "before" attention, added to the stream; in place of "qkv" and of attention's output
        map; added to attention's "values"; in place of the "ffn"; or "beside" the FFN. At most one memory has a layer's
        "qkv", or its "ffn".

        Args:
            beside: whether the layer is given as `5+`.

        Raises:
            SpecError: it cannot stand beside an FFN.
        """
        raise NotImplementedError

    def layer_places(self, layers: int) -> dict[int, tuple[Place, ...]]:
        """The layers with this memory, in order, and its places in each.

        `5` is layer 5, `5+` beside its FFN, `all` every layer. `auto:N` spreads N memories at equal distances, over
        layers i * ceil(L / (N + 1)), i = 1 ... N, which for L = 16 and N = 2 gives 6 and 12 (Lample et al. 2019, sec.
        4.3); if these go beyond the last, over i * (L + 1) / (N + 1), rounded.

        Args:
            layers: of the model (L).

        Raises:
            SpecError: there is no layer, an entry is not a layer, is beyond the model, or is given twice.
        """
        if not self.layers:
            raise SpecError("layers", "found no layer", f"layers from 1 to {layers}, such as [{max(1, layers - 1)}]")
        found: dict[int, tuple[Place, ...]] = {}
        for text in self.layers:
            for layer in layers_of(text, layers):
                if layer in found:
                    raise SpecError("layers", f"layer {layer} is named twice", "each layer once")
                found[layer] = self.places(text.endswith("+"))
        taken = {place for places in found.values() for place in places} & {"qkv", "ffn"}
        if self.start == "zero" and taken:
            raise SpecError(
                "start",
                "found zero in a layer where it replaces a part",
                "drawn, or layers beside the FFN, such as 5+",
                "layers",
            )
        if self.gate == "token" and "qkv" in taken:
            raise SpecError("gate", "found token in place of qkv", "none", "layers")
        return dict(sorted(found.items()))

    def check(self, dim: int) -> None:
        """Check what must hold between its keys, and for a stream of width `dim`.

        Raises:
            SpecError: something cannot be built.
        """

    def tables(self, dim: int, vocab_size: int) -> list[TableShape]:
        """The tables of one layer, or those that its layers share."""
        raise NotImplementedError

    def sizes(self, dim: int, vocab_size: int, layers: int) -> dict[str, int]:
        """Parameters, or more of them, by the key that makes them so many; in `layers` layers."""
        counts: dict[str, int] = {}
        for name, rows, width in self.tables(dim, vocab_size):
            counts[name] = counts.get(name, 0) + (1 if self.shares else layers) * rows * width
        return counts

    def with_keys(self, num_keys: int) -> "Spec | None":
        """The same memory with so many sub-keys in a half; None: it has no such keys."""
        return None

    def new_pool(self, dim: int, layers: tuple[int, ...]) -> "Pool | None":
        """The tables that its layers share, without initial weights; None: each has its own."""
        return None

    def build(self, site: Site, places: tuple[Place, ...]) -> "dict[Place, nn.Module]":
        """Its layers in one block, by their places, without initial weights (on the meta device)."""
        raise NotImplementedError

    def paper_flops(self, dim: int, context: int) -> int | None:
        """Multiply-adds of a block with this memory alone, without attention's own, over one sequence, by the formula
        of the kind's paper; None: there is none.
        """
        return None

    def describe(self) -> str:
        """One line about its sizes, for model cards: "16,384 slots, 4 heads that read 32 each"."""
        raise NotImplementedError


def layers_of(text: str, layers: int) -> list[int]:
    """The layers of one entry of `layers`, in a model of so many.

    Raises:
        SpecError: it is not an entry, or beyond the model.
    """
    if text == "all":
        return list(range(1, layers + 1))
    match = re.fullmatch(r"(auto:)?([0-9]{1,9})(\+?)", text)
    if not match:
        raise SpecError("layers", f"found {text!r}", "a layer such as 5, 5+, all or auto:2, or a list: [4, 6+]")
    number = int(match[2])
    if not match[1]:
        if not 1 <= number <= layers:
            raise SpecError("layers", f"found layer {number}", f"layers from 1 to {layers}")
        return [number]
    if not 1 <= number <= layers:
        raise SpecError("layers", f"found {text}", f"auto:1 to auto:{layers}")
    step = math.ceil(layers / (number + 1))
    spread = [i * step for i in range(1, number + 1)]
    if spread[-1] > layers:
        spread = [math.floor(i * (layers + 1) / (number + 1) + 0.5) for i in range(1, number + 1)]
    return spread
