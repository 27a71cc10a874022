"""Every key of a recipe: its type, range or choices, default and help.

A recipe is a tree of frozen dataclasses that pydantic validates whenever one is made: a value of the wrong type, out of
range or not among the choices raises `pydantic.ValidationError`. `load.py` fills the tree from YAML and turns such an
error into one line with its place; `constraints.py` checks what must hold between keys. `pkmlm recipe keys` and `pkmlm
recipe schema` print what is defined here, and `dump_recipe` writes a recipe out. A key's unit is in its help.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

Section = TypeVar("Section")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

# What a value should be, by the type of pydantic's error.
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number within 64-bit floating point",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}

MAX_INT = 2**31 - 1
PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*|[0-9]+\+|auto:[0-9]+\+?", re.ASCII)
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # to other YAML readers
Size = Annotated[int, Field(ge=1, le=MAX_INT)]
Steps = Annotated[int, Field(ge=0, le=MAX_INT)]
Order = Annotated[int, Field(ge=1, le=8)]
Schedule = Literal["inverse-sqrt", "cosine", "linear", "constant"]
ValuesSchedule = Literal[Schedule, "relative"]
Times = Annotated[float, Field(ge=0, le=1000)]
QueryMap = Literal["linear", "mlp"]
QueryNorm = Literal["batch", "layer", "rms", "none"]
KeyNorm = Literal["none", "rms"]
Scores = Literal["softmax", "relu", "none"]
Gate = Literal["none", "silu"]
Expert = Literal["gelu", "relu"]
SlotScore = Literal["all", "count", "tfidf", "kl"]
HashScore = Literal["paper", "scaled"]
LearningRate = Annotated[float, Field(gt=0, le=1000)]  # a larger one is a typo, and would soon overflow
ValuesRate = Annotated[float, Field(gt=0, le=1e6)]  # plain gradients of values are small
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
WeightDecay = Annotated[float, Field(ge=0, le=1e30)]  # finite in fp32 when multiplied by a learning rate
Clip = Annotated[float, Field(ge=0)]
Epsilon = Annotated[float, Field(ge=1e-30)]  # less is 0 in fp32: unread rows would give 0 / 0


def one_or_list(item: dict[str, Any]) -> WithJsonSchema:
    """The JSON Schema of a list that may be given as a single item."""
    return WithJsonSchema({"anyOf": [item, {"type": "array", "items": item}]})


LAYER = {"type": ["integer", "string"], "minimum": 1, "pattern": "^(auto:)?[0-9]{1,9}[+]?$"}
MemoryLayers = Annotated[tuple[str, ...], one_or_list(LAYER)]
NGramLayers = Annotated[tuple[Size, ...], one_or_list({"type": "integer", "minimum": 1, "maximum": MAX_INT})]
Folders = Annotated[tuple[str, ...], Field(min_length=1)]
Orders = Annotated[tuple[Order, ...], one_or_list({"type": "integer", "minimum": 1, "maximum": 8})]


def key(default: Any, text: str, **limits: Any) -> Any:
    """A field with its default and help, and limits (`ge=`, `gt=`, `le=`, `lt=`) that its type does not set.

    Args:
        default: a value, or the class of a section.
    """
    if isinstance(default, type):
        return Field(default_factory=default, description=text)
    return Field(default, description=text, **limits)


def expectation(error: ErrorDetails) -> str:
    """The text after "expected" in an error message, from pydantic's error."""
    text = EXPECTED.get(error["type"])
    return error["msg"] if text is None else text.format(**error.get("ctx", {})).replace("'", "")


def section(kind: type[Section], /, **values: Any) -> Section:
    """A section made from Python values rather than from a file.

    Raises:
        ValueError: a value has the wrong type, is out of range or not among the choices.
    """
    try:
        return kind(**values)
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        name = ".".join(map(str, error["loc"]))
        raise ValueError(f"{name}: found {error['input']!r} (expected {expectation(error)})") from None


@dataclass(frozen=True, config=STRICT)
class Data:
    dir: str | Folders | None = key(
        None,
        "folder written by `pkmlm tokenize -o`, in the working directory or next to the recipe; or a list of folders "
        "with one tokenizer",
    )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of tokens: none, one or several."""
        return () if self.dir is None else (self.dir,) if isinstance(self.dir, str) else self.dir


@dataclass(frozen=True, config=STRICT)
class Memory:
    kind: Literal["none", "product-key", "flat-key", "peer"] = key(
        "none", "the memory that replaces or accompanies an FFN"
    )
    layers: MemoryLayers = key(
        (),
        "layers with a memory, counted from 1: 5 replaces the FFN, 5+ adds beside it; auto:2 spreads two evenly",
    )
    num_keys: Size = key(512, "sub-keys per half: num_keys^2 slots (flat-key: as many slots, one key each)")
    heads: Size = key(4, "memory heads; all share the values, each has its own keys and queries")
    topk: Size = key(32, "slots read per head and token")
    key_dim: Size = key(512, "width of a query and of a flat key; a sub-key has half of it")
    query: QueryMap = key(
        "linear", "the query network: one linear map; or two with a ReLU between them, the first shared by all heads"
    )
    query_norm: QueryNorm = key("batch", "normalisation of the queries; batch is that of Lample et al. 2019, table 2")
    key_norm: KeyNorm = key(
        "none",
        "rms: normalise each sub-key and each half of a query, with one learnt gain for sub-keys and one for queries",
    )
    scores: Scores = key(
        "softmax", "how the scores of the best slots become weights; relu and none treat each slot by itself"
    )
    share_values: bool = key(False, "one table for the memories of all layers")
    value_dim: Size | None = key(None, "width of a value; null: dim; another width adds a map back to dim")
    gate: Gate = key("none", "silu: the output is W2 (m * silu(W1 x)), where m is the weighted sum of values (Memory+)")
    expert: Expert = key("gelu", "peer: activation of an expert's neuron")

    @property
    def slots(self) -> int:
        return self.num_keys**2

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the layer of this kind takes, by the same names."""
        others = {"kind", "layers", "share_values"} | ({"expert"} if self.kind != "peer" else set())
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in others}

    @property
    def key_rows(self) -> int:
        """Keys of a head, in rows of `key_dim`: two sub-keys, one of each half, fill a row."""
        return self.num_keys if self.halved else self.slots

    @property
    def halved(self) -> bool:
        """Whether slots are pairs of sub-keys, each compared with one half of the query."""
        return self.kind != "flat-key"

    @property
    def key_width(self) -> int:
        """Entries of a key."""
        return self.key_dim // 2 if self.halved else self.key_dim


@dataclass(frozen=True, config=STRICT)
class NGram:
    layers: NGramLayers = key((), "layers, counted from 1, before whose attention an n-gram memory is added")
    orders: Orders = key((2, 3), "n-gram lengths: how many tokens, including the current one, choose a row")
    heads: Size = key(8, "tables per order, each with its own hash")
    rows: Size = key(65537, "rows of a table, a prime; 1: the control without a memory")
    row_dim: Size = key(24, "width of a row; fusion add: dim")
    fusion: Literal["gate", "add"] = key(
        "gate",
        "gate: rows give a value, and the stream decides how much of it is added (Engram); add: rows are added",
    )
    conv: bool = key(
        True, "gate: a causal convolution after the gate, over 4 positions that are the largest order apart"
    )
    canonical: bool = key(True, "tokens that differ only in case, accents or surrounding spaces choose the same rows")

    @property
    def tables(self) -> int:
        return len(self.orders) * self.heads

    @property
    def convolves(self) -> bool:
        return self.fusion == "gate" and self.conv

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the layer takes, by the same names."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("layers", "canonical")
        }


@dataclass(frozen=True, config=STRICT)
class Hash:
    bits: int = key(8, "bits of a bucket code (tau): dim / bits tables of 2^bits rows", ge=1, le=16)
    extra_bits: int = key(2, "additional bits in the second layer of the Memory Block", ge=0, le=15)
    temperature: float = key(1.0, "temperature t of the score p(z)", ge=1e-30)  # 2 / t must be finite in fp32
    score: HashScore = key("paper", "p(z) as in the paper, or sum|z| * p(z) as in its released code")
    activation: Literal["none", "gelu"] = key("none", "activation between the two layers of the Memory Block")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that every hash layer takes, by the same names."""
        return {"temperature": self.temperature, "score": self.score}


@dataclass(frozen=True, config=STRICT)
class AttentionOptions:
    features: Size = key(256, "performer: random features per head")
    block: Size = key(64, "linformer: tokens of a block, within which attention is exact")
    rank: Size = key(16, "linformer: rows that stand for the keys and values of an earlier block")


@dataclass(frozen=True, config=STRICT)
class Model:
    vocab_size: Size | None = key(None, "vocabulary size, the rows of the embedding; null: the tokenizer's size")
    dim: Size = key(512, "width of the residual stream")
    layers: int = key(6, "transformer blocks", ge=1, le=10_000)
    heads: Size = key(8, "attention heads")
    context: Size = key(512, "tokens per sequence")
    positions: Literal["learned", "rotary"] = key("learned", "position information")
    rotary_fraction: float = key(1.0, "share of each attention head's width that is rotated (Pythia: 0.25)", gt=0, le=1)
    attention: Literal["softmax", "linformer", "cosformer", "performer"] = key(
        "softmax", "kind of attention; only softmax can generate and be exported"
    )
    attention_options: AttentionOptions = key(AttentionOptions, "sizes of the other kinds of attention")
    projections: Literal["dense", "hash"] = key("dense", "hash: q, k, v and the FFN become MemoryFormer's hash tables")
    residual: Literal["sequential", "parallel"] = key("sequential", "parallel: attention and FFN read the same input")
    ffn_dim: Size | None = key(None, "inner width of the FFN; null: 4 * dim")
    activation: Literal["gelu", "relu"] = key("gelu", "activation of the FFN")
    bias: bool = key(True, "biases in the maps of attention and FFN; those of memories always have them")
    tie_embeddings: bool = key(True, "the output head shares the token embedding")
    dropout: Fraction = key(
        0.0, "dropout probability, of embeddings, attention (softmax, linformer) and blocks' outputs"
    )
    memory: Memory = key(Memory, "a sparsely read memory")
    hash: Hash = key(Hash, "MemoryFormer's tables (projections: hash)")
    ngram: NGram = key(NGram, "n-gram memories: rows found by a hash of the last tokens")

    @property
    def rotary_width(self) -> int:
        """How many of a head's dim / heads entries rotate; even in a checked recipe."""
        return round(self.rotary_fraction * (self.dim // self.heads))

    @property
    def table_kinds(self) -> list[str]:
        """What reads rows of tables: "hash" maps, the kind of memory, "ngram" memories; empty in a dense model."""
        parts = (self.projections, self.memory.kind, "ngram" if self.ngram.layers else "none")
        return [part for part in parts if part not in ("dense", "none")]

    @property
    def maps_values(self) -> bool:
        """Whether there is a map between the values of a memory and the residual stream."""
        return self.memory.gate != "none" or self.memory.value_dim not in (None, self.dim)

    @property
    def table_widths(self) -> tuple[int, ...]:
        """The width of each table of a memory; empty where there is none."""
        if self.memory.kind == "none":
            return ()
        values = self.memory.value_dim or self.dim
        return (self.dim, values) if self.memory.kind == "peer" else (values,)


@dataclass(frozen=True, config=STRICT)
class ValuesOptim:
    optimizer: Literal["row-adam", "adam", "row-sgd"] = key(
        "row-adam",
        "row-adam updates only the rows that were read; adam all rows; row-sgd those read, without moments",
    )
    lr: ValuesRate = key(1e-3, "peak learning rate of the memory values")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.999), "Adam's decay rates")
    eps: Epsilon | None = key(None, "Adam's epsilon; null: that of optim")
    schedule: ValuesSchedule = key(
        "constant", "learning-rate schedule; relative: that of optim, times a factor (`times`)"
    )
    times: tuple[Times, Times] = key((4.0, 1.0), "relative: the factor at the start and at the end")
    warmup_steps: Steps = key(0, "steps of linear warm-up")
    final_lr: Share | None = key(None, "final_lr of the values; null: that of optim")
    weight_decay: WeightDecay = key(0.0, "decoupled weight decay; row-adam and row-sgd decay the rows that they update")
    clip: Clip = key(1.0, "largest gradient norm of the values; 0: no clipping")


@dataclass(frozen=True, config=STRICT)
class TablesOptim:
    optimizer: Literal["row-adam", "adam"] = key("adam", "row-adam updates only the rows that were read")
    lr_scale: LearningRate = key(
        3.0,
        "peak learning rate of the tables, as a multiple of optim.lr (MemoryFormer's recipes set 1)",
    )
    betas: tuple[Fraction, Fraction] | None = key(None, "Adam's decay rates; null: those of optim")
    schedule: Schedule | None = key(None, "learning-rate schedule; null: that of optim")
    warmup_steps: Steps | None = key(None, "steps of linear warm-up; null: those of optim")
    weight_decay: WeightDecay = key(0.0, "decoupled weight decay")
    clip: Clip = key(1.0, "largest gradient norm of the tables; 0: no clipping")


@dataclass(frozen=True, config=STRICT)
class NGramOptim(TablesOptim):
    lr_scale: LearningRate = key(5.0, "peak learning rate of the tables, as a multiple of optim.lr")


@dataclass(frozen=True, config=STRICT)
class KeysOptim:
    lr_scale: float = key(
        1.0, "peak learning rate of the keys, as a multiple of optim.lr; 0: they stay as initialised", ge=0, le=1000
    )


@dataclass(frozen=True, config=STRICT)
class Optim:
    lr: LearningRate = key(2.5e-4, "peak learning rate")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.98), "Adam's decay rates")
    eps: Epsilon = key(1e-8, "Adam's epsilon; optim.values may have its own")
    schedule: Schedule = key("inverse-sqrt", "learning-rate schedule")
    warmup_steps: Steps = key(4000, "steps of linear warm-up; inverse-sqrt needs at least 1")
    final_lr: Share = key(
        0.1, "cosine and linear end at this share of the peak, decay_steps at this share of the schedule"
    )
    decay_steps: Steps = key(
        0,
        "last steps, in which all learning rates fall linearly to final_lr times what their schedules give",
    )
    weight_decay: WeightDecay = key(
        0.0,
        "decoupled weight decay of matrices, embeddings and n-gram convolutions (never keys, biases, norms, values or "
        "tables)",
    )
    clip: Clip = key(1.0, "largest gradient norm of the dense parameters; 0: no clipping")
    keys: KeysOptim = key(KeysOptim, "memory keys: sub-keys, or flat keys")
    values: ValuesOptim = key(ValuesOptim, "memory values")
    tables: TablesOptim = key(TablesOptim, "MemoryFormer's hash tables")
    ngram: NGramOptim = key(NGramOptim, "tables of n-gram memories")

    def filled(self, group: Any) -> Any:
        """A copy of one group's section, in which keys that are null have the values of this section."""
        return replace(group, **{name: getattr(self, name) for name, value in vars(group).items() if value is None})


@dataclass(frozen=True, config=STRICT)
class Train:
    steps: Size = key(20000, "optimizer steps")
    batch_tokens: Size = key(65536, "tokens per optimizer step, over all ranks and micro-batches")
    micro_batch: Size = key(16, "sequences per forward pass of a rank")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "precision of the forward pass; weights stay fp32")
    compile: bool = key(False, "compile attention and FFNs with torch.compile; needs a C++ compiler on a CPU")
    recompute: bool = key(False, "keep no activations within blocks: less memory, about a third more time")
    seed: int = key(1, "seed of initial weights, data order and dropout", ge=0, le=2**63 - 1)
    init_from: str | None = key(
        None,
        "start from the weights of another run (its best checkpoint, else its latest); modules that it lacks start "
        "from initial weights (an untied head from the embedding)",
    )
    only: Literal["all", "values"] = key(
        "all", "values: train only the memory's values; all else stays the same, bit for bit"
    )


@dataclass(frozen=True, config=STRICT)
class Finetune:
    slots: SlotScore = key(
        "all",
        "which of the slots that a step reads it changes: all, or the best by reads, tf-idf or KL (Lin et al. 2025)",
    )
    top: Size = key(500, "slots of each table that a step may change")
    background: str | None = key(
        None, "file of `pkmlm usage-report --background`, which tfidf and kl need; in the working directory"
    )


@dataclass(frozen=True, config=STRICT)
class Eval:
    every: Steps = key(500, "steps between validations; 0: only at the end")
    tokens: Size | None = key(None, "validate on this many tokens from the beginning of the split; null: on all")
    patience: Size | None = key(None, "stop after this many validations without improvement; null: never")
    recalibrate: Steps = key(
        0,
        "forward passes on training tokens that renew the query norm's statistics before a validation; 0: none",
    )
    sample: str | None = key(None, "a text that is continued and logged after each validation")


@dataclass(frozen=True, config=STRICT)
class Checkpoint:
    every: Size = key(
        1000,
        "steps between checkpoints; one is also saved after each best validation, on request and at the end",
    )
    keep: int = key(2, "how many of the newest checkpoints to keep, besides the best one; at least 2", ge=2, le=MAX_INT)


@dataclass(frozen=True, config=STRICT)
class Log:
    every: Size = key(20, "steps between progress lines in train.log, and on standard error unless it is a terminal")
    tensorboard: bool = key(False, "also write TensorBoard events (needs the package tensorboard)")
    wandb: str | None = key(None, "also log to this Weights & Biases project (needs the package wandb)")


@dataclass(frozen=True, config=STRICT)
class Parallel:
    memory: Size = key(1, "ranks that divide each table of values or buckets by columns; it divides the ranks")
    shard: bool = key(False, "divide dense parameters, their gradients and moments among all ranks (FSDP2)")


@dataclass(frozen=True, config=STRICT)
class Recipe:
    name: str = key("unnamed", "a name for logs and tables")
    data: Data = key(Data, "the tokens")
    model: Model = key(Model, "the network")
    optim: Optim = key(Optim, "how parameters move")
    train: Train = key(Train, "how long, in what portions")
    finetune: Finetune = key(Finetune, "which slots of a memory learn")
    eval: Eval = key(Eval, "validation during training")
    checkpoint: Checkpoint = key(Checkpoint, "what is kept")
    log: Log = key(Log, "what is shown")
    parallel: Parallel = key(Parallel, "many processes")

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.train.batch_tokens // self.model.context

    @property
    def optim_groups(self) -> dict[str, Any]:
        """The sections that say how the parameters of this model learn, by the key of each; null keys have the values
        of `optim`.
        """
        optim, everything = self.optim, self.train.only == "all"
        groups: dict[str, Any] = {}
        if everything or optim.values.schedule == "relative":  # relative to the schedule of `optim`
            groups["optim"] = optim
        if self.model.memory.kind != "none":
            groups["optim.values"] = optim.filled(optim.values)
        if self.model.projections == "hash" and everything:
            groups["optim.tables"] = optim.filled(optim.tables)
        if self.model.ngram.layers and everything:
            groups["optim.ngram"] = optim.filled(optim.ngram)
        return groups

    @property
    def schedules(self) -> set[ValuesSchedule]:
        """The learning-rate schedules of `optim_groups`."""
        return {group.schedule for group in self.optim_groups.values()}

    def micro_batches(self, ranks: int = 1) -> int:
        """Micro-batches of an optimizer step on each of `ranks` ranks."""
        return self.sequences // (self.train.micro_batch * ranks)


def leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every key of a section and of the sections in it, in their order: dotted name, field and type."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind.__pydantic_fields__[field.name], hints[field.name]


class UntitledJsonSchema(GenerateJsonSchema):
    """JSON Schema without titles, which would repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, for editors: that of a recipe, with `base`; sections may be partial."""
    schema = TypeAdapter(Recipe).json_schema(schema_generator=UntitledJsonSchema)
    base = {"type": "string", "description": "recipe to inherit from, relative to this file's folder"}
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "pkmlm recipe"}


class Key(NamedTuple):
    """One key of a recipe, as `pkmlm recipe keys` lists it."""

    name: str
    type: str
    default: str
    help: str


def list_keys() -> list[Key]:
    """Every key of a recipe with its type, default and help, in the order of the schema."""
    return [
        Key(name, type_text(kind), scalar_text(field.default), field.description or "")
        for name, field, kind in leaves(Recipe)
    ]


def type_text(kind: Any) -> str:
    """A type as a short text: `int`, `float or null`, `none | product-key`, `list of str`."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if option is NoneType else type_text(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return f"list of {type_text(first)}" if rest == [...] else f"list of {1 + len(rest)} {type_text(first)}s"
    if get_origin(kind) is Literal:
        return " | ".join(scalar_text(choice) for choice in get_args(kind))
    return {int: "int", float: "float", bool: "bool", str: "text"}[kind]


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every dotted key and its value."""
    return {name: attrgetter(name)(recipe) for name, _, _ in leaves(Recipe)}


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML; reading it back gives an equal recipe."""

    def walk(section: Any, indent: str) -> Iterable[str]:
        for field in fields(section):
            value = getattr(section, field.name)
            if is_dataclass(value):
                yield f"{indent}{field.name}:"
                yield from walk(value, indent + "  ")
            else:
                yield f"{indent}{field.name}: {scalar_text(value)}"

    return "\n".join(walk(recipe, "")) + "\n"


def recipe_sha256(recipe: Recipe) -> str:
    """The sha256 of the complete recipe, by which a measurement is tied to the recipe that it was made with."""
    return hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()


def scalar_text(value: Any) -> str:
    """A value as YAML: numbers in their shortest exact form, texts quoted where YAML could misread them."""
    if isinstance(value, tuple):
        items = [str(item) if str(item).isdecimal() else scalar_text(item) for item in value]  # layers: [5]
        return f"[{', '.join(items)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))  # other YAML readers take 1e-08 for a text
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in NOT_TEXT:
        return str(value)
    return quoted_text(value)


def quoted_text(text: str) -> str:
    """A text as a double-quoted scalar of YAML."""

    def escaped(c: str) -> str:
        if c in '"\\':
            return f"\\{c}"
        if c.isprintable():
            return c
        return f"\\x{ord(c):02x}" if c < "\x80" else f"\\U{ord(c):08x}"

    return '"' + "".join(map(escaped, text)) + '"'
