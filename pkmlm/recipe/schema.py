"""Every key of a recipe: its type, range or choices, default and help.

A recipe is a tree of frozen dataclasses that pydantic validates whenever one is made: a value of the wrong type, out of
range or not among the choices raises `pydantic.ValidationError`. `load.py` fills the tree from YAML and turns such an
error into one line with its place; `constraints.py` checks what must hold between keys. `pkmlm recipe keys` and `pkmlm
recipe schema` print what is defined here, and `dump_recipe` writes a recipe out. A key's unit is in its help.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from pkmlm.memory.registry import SPECS
from pkmlm.memory.spec import MAX_INT, Schedule, Section, Spec, TableOptim
from pkmlm.recipe.shape import Shape

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

PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./+-]*|[0-9]+\+|auto:[0-9]+\+?", re.ASCII)
NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # to other YAML readers
Size = Annotated[int, Field(ge=1, le=MAX_INT)]
Steps = Annotated[int, Field(ge=0, le=MAX_INT)]
SlotScore = Literal["all", "count", "tfidf", "kl"]
LearningRate = Annotated[float, Field(gt=0, le=1000)]  # a larger one is a typo, and would soon overflow
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
WeightDecay = Annotated[float, Field(ge=0, le=1e30)]  # finite in fp32 when multiplied by a learning rate
Clip = Annotated[float, Field(ge=0)]
Epsilon = Annotated[float, Field(ge=1e-30)]  # less is 0 in fp32: unread rows would give 0 / 0


LAYER_SCHEMA = {"type": ["integer", "string"], "minimum": 1, "pattern": "^(all|(auto:)?[0-9]{1,9}[+]?)$"}
LAYERS_SCHEMA = {"anyOf": [LAYER_SCHEMA, {"type": "array", "items": LAYER_SCHEMA}]}
Memories = dict[str, Spec]
Folders = Annotated[tuple[str, ...], Field(min_length=1)]


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


def memories_schema() -> dict[str, Any]:
    """The JSON Schema of `model.memories`: a union by kind; keys that a base recipe gives may be left out."""
    kinds = [{**section_schema(spec), "required": ["kind"]} for spec in SPECS.values()]
    inherited = {"type": "object", "not": {"required": ["kind"]}}
    return {"type": ["object", "null"], "additionalProperties": {"anyOf": [*kinds, inherited, {"type": "null"}]}}


@dataclass(frozen=True, config=STRICT)
class Data:
    dir: str | Folders | None = key(
        None,
        "folder written by `pkmlm tokenize -o`, in the working directory or next to the recipe; or a list of folders "
        "with one tokenizer",
    )

    pack: bool = key(True, "documents one after another, cut at the context; false: one document in a sequence, padded")

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of tokens: none, one or several."""
        return () if self.dir is None else (self.dir,) if isinstance(self.dir, str) else self.dir


@dataclass(frozen=True, config=STRICT)
class AttentionOptions:
    features: Size = key(256, "performer: random features per head")
    block: Size = key(64, "linformer: tokens of a block, within which attention is exact")
    rank: Size = key(16, "linformer: rows that stand for the keys and values of an earlier block")


@dataclass(frozen=True, config=STRICT)
class RotaryScaling:
    kind: Literal["none", "linear", "llama3"] = key(
        "none",
        "how rotary frequencies are lowered for a longer context: all divided by the factor, or as in Llama 3, where "
        "those that turn often within the earlier context keep what they are",
    )
    factor: float = key(1.0, "what low frequencies are divided by", ge=1, le=1e6)
    low: float = key(1.0, "llama3: turns within the earlier context up to which a frequency is low", gt=0, le=1e6)
    high: float = key(4.0, "llama3: turns from which a frequency is kept; more than low", gt=0, le=1e6)
    context: Size = key(8192, "llama3: the earlier context")


@dataclass(frozen=True, config=STRICT)
class Model(Shape):
    vocab_size: Size | None = key(None, "vocabulary size, the rows of the embedding; null: the tokenizer's size")
    dim: Size = key(512, "width of the residual stream")
    layers: int = key(6, "transformer blocks", ge=1, le=10_000)
    heads: Size = key(8, "attention heads")
    kv_heads: Size | None = key(
        None, "heads of keys and values (grouped-query attention), a divisor of heads; null: heads"
    )
    head_dim: Size | None = key(None, "width of a head; null: dim / heads")
    context: Size = key(512, "tokens per sequence")
    positions: Literal["learned", "rotary"] = key("rotary", "position information")
    rotary_fraction: float = key(1.0, "share of each attention head's width that is rotated (Pythia: 0.25)", gt=0, le=1)
    rotary_base: float = key(10_000.0, "base of the rotation's frequencies", ge=1, le=1e12)
    rotary_scaling: RotaryScaling = key(RotaryScaling, "frequencies for a longer context than that of earlier training")
    qk_norm: bool = key(True, "an RMS norm of each head's queries and keys, with learnt gains, before the rotation")
    attention: Literal["softmax", "linformer", "cosformer", "performer"] = key(
        "softmax", "kind of attention; only softmax can generate and be exported"
    )
    attention_options: AttentionOptions = key(AttentionOptions, "sizes of the other kinds of attention")
    residual: Literal["sequential", "parallel"] = key("sequential", "parallel: attention and FFN read the same input")
    norm: Literal["rms", "layer"] = key("rms", "norms of the residual stream")
    norm_eps: float | None = key(None, "epsilon of the norms; null: 1e-6 (rms), 1e-5 (layer)", gt=0, le=1)
    ffn: Literal["swiglu", "gelu", "gelu-tanh", "relu"] = key(
        "swiglu", "activation of the FFN; swiglu: silu(W1 x) * W2 x; gelu-tanh: GPT-2's approximation of gelu"
    )
    ffn_dim: Size | None = key(
        None, "inner width of the FFN; null: 4 * dim, with swiglu 8/3 * dim, rounded up to a multiple of 64"
    )
    bias: Literal["none", "qkv", "all"] = key(
        "none", "biases in the maps of attention and FFN: none, those of queries, keys and values, or all"
    )
    document_mask: bool = key(
        True, "attention stays within a document, and positions are counted from its beginning; softmax only"
    )
    smear: bool = key(False, "add a gated share of the previous token's embedding to that of each token")
    init: Literal["small", "zero-out"] = key(
        "zero-out", "initial size of the maps that write into the stream: small, or zero"
    )
    tie_embeddings: bool = key(False, "the output head shares the token embedding")
    dropout: Fraction = key(
        0.0, "dropout probability, of embeddings, attention (softmax, linformer) and blocks' outputs"
    )
    memories: dict[str, InstanceOf[Spec]] = Field(
        default_factory=dict, description="sparsely read memories, by name: each has a kind and the keys of that kind"
    )


@dataclass(frozen=True, config=STRICT)
class Muon:
    lr: LearningRate = key(2e-2, "peak learning rate of the matrices")
    momentum: Fraction = key(0.95, "momentum of their gradients (Nesterov's)")
    weight_decay: WeightDecay = key(0.0, "decoupled weight decay of the matrices")


@dataclass(frozen=True, config=STRICT)
class Optim:
    lr: LearningRate = key(3e-3, "peak learning rate of everything except memories' tables and Muon's matrices")
    matrices: Literal["muon", "adamw"] = key(
        "muon",
        "the optimizer of attention's and the FFN's matrices; muon: torch.optim.Muon, on the schedule of optim",
    )
    muon: Muon = key(Muon, "matrices: muon")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.95), "Adam's decay rates")
    eps: Epsilon = key(1e-8, "Adam's epsilon")
    schedule: Schedule = key("cosine", "learning-rate schedule")
    warmup_steps: Steps = key(200, "steps of linear warm-up; inverse-sqrt needs at least 1")
    final_lr: Share = key(
        0.1, "share of the peak at which cosine and linear end; with decay_steps, of what the schedule gives at the end"
    )
    decay_steps: Steps = key(
        0,
        "last steps, in which all learning rates fall linearly to final_lr times what their schedules give",
    )
    weight_decay: WeightDecay = key(
        0.0,
        "decoupled weight decay of matrices, embeddings and n-gram convolutions (never keys, biases, norms or tables)",
    )
    clip: Clip = key(1.0, "largest gradient norm of the dense parameters; 0: no clipping")

    def filled(self, memory: Spec) -> TableOptim:
        """How the tables of a memory learn, with the values of this section where that says nothing."""
        tables, shared = memory.table_optim, ("betas", "eps", "schedule", "warmup_steps", "final_lr")
        given = {name: getattr(self, name) for name in shared if getattr(tables, name) is None}
        return replace(tables, lr=memory.peak_lr(self.lr), lr_scale=None, **given)


@dataclass(frozen=True, config=STRICT)
class Train:
    steps: Size = key(20000, "optimizer steps")
    epochs: Size | None = key(
        None, "in place of steps: how often all tokens are read, documents in another order each time; null: steps"
    )
    batch_tokens: Size = key(65536, "tokens per optimizer step, over all ranks and micro-batches")
    micro_batch: Size = key(16, "sequences per forward pass of a rank")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "precision of the forward pass; weights stay fp32")
    compile: bool = key(False, "compile attention and FFNs with torch.compile; needs a C++ compiler on a CPU")
    recompute: bool = key(False, "keep no activations within blocks: less memory, about a third more time")
    seed: int = key(1, "seed of initial weights, data order and dropout", ge=0, le=2**63 - 1)
    init_from: str | None = key(
        None,
        "start from the weights of another run (its best checkpoint, else its latest), in the working directory or "
        "next to the recipe; modules that it lacks start from initial weights (an untied head from the embedding)",
    )
    only: Literal["all", "memories", "values", "gates"] = key(
        "all",
        "what trains, while all else stays bit for bit as it is: the memories; only their tables (values); or only the "
        "gates of gate: token",
    )


@dataclass(frozen=True, config=STRICT)
class Finetune:
    slots: SlotScore = key(
        "all",
        "which of the slots that a step reads it changes: all, or the best by reads, tf-idf or KL (Lin et al. 2025)",
    )
    top: Size = key(500, "slots of each table that a step may change")
    background: str | None = key(
        None, "file of `pkmlm usage-report --background`, which tfidf and kl need; found like train.init_from"
    )


@dataclass(frozen=True, config=STRICT)
class Eval:
    every: Steps = key(500, "steps between validations; 0: only at the end")
    tokens: Size | None = key(None, "validate on this many tokens from the beginning of the split; null: on all")
    patience: Size | None = key(None, "stop after this many validations without improvement; null: never")
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
    def optim_groups(self) -> dict[str, Optim | TableOptim]:
        """The sections that say how the parameters of this model learn, by the key of each, with what they leave to
        `optim` filled in.
        """
        tables = {
            f"model.memories.{name}.optim": self.optim.filled(memory) for name, memory in self.model.memories.items()
        }
        relative = any(group.schedule == "relative" for group in tables.values())  # to the schedule of `optim`
        match self.train.only:
            case "gates":
                return {"optim": self.optim}
            case "values" if not relative:
                return {**tables}
        return {"optim": self.optim, **tables}

    def epoch_sequences(self, tokens: int, documents: int) -> int:
        """Sequences that hold a split once, of so many tokens in so many documents."""
        return -(-tokens // self.model.context) if self.data.pack else documents

    def with_epochs(self, tokens: int, documents: int) -> "Recipe":
        """With `train.epochs`, the recipe whose `train.steps` are as many as they take; otherwise this one.

        Args:
            tokens, documents: of the train split.
        """
        if self.train.epochs is None:
            return self
        drawn = self.train.epochs * self.epoch_sequences(tokens, documents)
        return replace(self, train=replace(self.train, steps=-(-drawn // self.sequences)))

    def micro_batches(self, ranks: int = 1) -> int:
        """Micro-batches of an optimizer step on each of `ranks` ranks."""
        return self.sequences // (self.train.micro_batch * ranks)


class Key(NamedTuple):
    """One key of a recipe.

    Attributes:
        name: dotted; `<product-key>` stands for the name of any memory of that kind.
        type: as `type_text` writes it.
        default: as YAML.
    """

    name: str
    type: str
    default: str
    help: str


def list_keys(section: Any = Recipe, prefix: str = "") -> list[Key]:
    """Every key of a recipe, or of one of its sections, in the order of the schema."""
    found: list[Key] = []
    hints = get_type_hints(section)
    for field in fields(section):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint):
            found += list_keys(hint, f"{name}.")
        elif hint == Memories:
            found += [each for kind, spec in SPECS.items() for each in list_keys(spec, f"{name}.<{kind}>.")]
        else:
            default, text = described(section, field)
            found.append(Key(name, type_text(hint), scalar_text(default), text))
    return found


def key_names(section: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a section, without those of memories."""
    hints = get_type_hints(section)
    inner = ((f"{prefix}{field.name}", hints[field.name]) for field in fields(section))
    return [key for name, hint in inner for key in (key_names(hint, f"{name}.") if is_dataclass(hint) else [name])]


def described(section: Any, field: Any) -> tuple[Any, str]:
    """The default of a key, and its help."""
    if issubclass(section, Section):
        return field.default, field.metadata["description"]
    info = section.__pydantic_fields__[field.name]
    return info.default, info.description or ""


class UntitledJsonSchema(GenerateJsonSchema):
    """JSON Schema without titles, which would repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, for editors: that of a recipe, with `base`; sections may be partial."""
    schema = TypeAdapter(Recipe).json_schema(schema_generator=UntitledJsonSchema)
    memories = schema["$defs"]["Model"]["properties"]["memories"]
    memories.update(memories_schema() | {"description": memories["description"]})
    del schema["$defs"]["Spec"]
    base = {"type": "string", "description": "recipe to inherit from, relative to this file's folder"}
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "pkmlm recipe"}


def section_schema(section: Any) -> dict[str, Any]:
    """The JSON Schema of a memory's keys, or of a section of them."""
    hints, properties = get_type_hints(section), {}
    for field in fields(section):
        default, text = described(section, field)
        if is_dataclass(hints[field.name]):
            schema = section_schema(hints[field.name])
        else:
            default = [*default] if isinstance(default, tuple) else default
            schema = {**value_schema(hints[field.name], field.metadata), "default": default}
        properties[field.name] = {**schema, "description": text}
    if "kind" in properties:
        properties["layers"] = {**properties["layers"], **LAYERS_SCHEMA}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def value_schema(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema of a value of a type, whose numbers have limits."""
    options, args = get_args(kind), get_args(kind)
    if NoneType in options:
        return {"anyOf": [value_schema(options[0], limits), {"type": "null"}]}
    if get_origin(kind) is Literal:
        return {"enum": list(args)}
    if get_origin(kind) is tuple:
        item = value_schema(args[0], limits)
        array = {"type": "array", "items": item}
        return (
            {"anyOf": [item, array]}
            if args[-1] is Ellipsis
            else {**array, "minItems": len(args), "maxItems": len(args)}
        )
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    found = {names[name]: limit for name, limit in limits.items() if name in names}
    return {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[kind], **found}


def type_text(kind: Any) -> str:
    """A type as a short text: `int`, `float or null`, `none | product-key`, `list of str`."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("null" if option is NoneType else type_text(option) for option in get_args(kind))
    if get_origin(kind) is tuple:
        first, *rest = get_args(kind)
        return f"list of {type_text(first)}" if rest == [...] else f"list of {1 + len(rest)} {type_text(first)}s"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    return {int: "int", float: "float", bool: "bool", str: "text"}[kind]


def flatten(section: Any, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a recipe, or of a section of one, and its value."""
    found: dict[str, Any] = {}
    for name, value in section.items() if isinstance(section, dict) else named_values(section):
        if isinstance(value, dict) or is_dataclass(value):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differences(before: Recipe, now: Recipe) -> dict[str, tuple[str, str]]:
    """The keys in which two recipes differ, each with both values as YAML, "absent" where the memory has no such key; a
    memory that one of them lacks is one key, "present" or "absent".
    """
    of_both = before.model.memories.keys() & now.model.memories.keys()

    def values(recipe: Recipe) -> dict[str, str]:
        found = {key: scalar_text(value) for key, value in flatten(recipe).items()}
        for name in recipe.model.memories.keys() - of_both:
            dotted = f"model.memories.{name}"
            found = {key: value for key, value in found.items() if not key.startswith(f"{dotted}.")}
            found[dotted] = "present"
        return found

    old, new = values(before), values(now)
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in {**old, **new}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def named_values(section: Any) -> list[tuple[str, Any]]:
    """The keys of a section and their values."""
    return [(field.name, getattr(section, field.name)) for field in fields(section)]


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML; reading it back gives an equal recipe."""

    def walk(section: Any, indent: str) -> Iterable[str]:
        for name, value in section.items() if isinstance(section, dict) else named_values(section):
            if is_dataclass(value) or (value and isinstance(value, dict)):
                yield f"{indent}{name}:"
                yield from walk(value, indent + "  ")
            else:
                yield f"{indent}{name}: {scalar_text(value or None if isinstance(value, dict) else value)}"

    return "\n".join(walk(recipe, "")) + "\n"


def recipe_sha256(recipe: Recipe) -> str:
    """The sha256 of all that a recipe does not leave at its default, by which a measurement is tied to the recipe that
    it was made with. A key that pkmlm gets later changes no digest.
    """
    memories = {name: type(memory)() for name, memory in recipe.model.memories.items()}
    default = flatten(Recipe(model=Model(memories=memories)))
    chosen = [
        f"{key}: {scalar_text(value)}\n"
        for key, value in flatten(recipe).items()
        if key.endswith(".kind") or value != default[key]
    ]
    return hashlib.sha256("".join(chosen).encode()).hexdigest()


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
