"""Every key of a recipe: its type, its default and its help.

A recipe is a tree of frozen dataclasses. `pkmlm recipe keys` prints this file's help texts; `load.py` fills the tree
from YAML; `check.py` says what must hold between keys. A key's unit stands in its help. Sources: PKM is Lample et al.
2019, MF is MemoryFormer (Ding et al. 2024).
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

Schedule = Literal["inverse-sqrt", "cosine", "linear", "constant"]


def key(default: Any, text: str) -> Any:
    """A field with a default and its help."""
    if isinstance(default, type):
        return field(default_factory=default, metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Data:
    dir: str | None = key(None, "folder written by `pkmlm tokenize -o`, relative to the working directory")


@dataclass(frozen=True)
class Memory:
    kind: Literal["none", "product-key", "flat-key"] = key("none", "the memory that replaces or accompanies an FFN")
    layers: tuple[str, ...] = key(
        (),
        "layers with a memory, counted from 1: 5 replaces the FFN, 5+ adds beside it; auto:2 spreads two evenly",
    )
    num_keys: int = key(512, "sub-keys per half: num_keys^2 slots (flat-key: as many slots, one key each)")
    heads: int = key(4, "memory heads; all share the values, each has its own keys and queries")
    topk: int = key(32, "slots read per head and token")
    key_dim: int = key(512, "width of a query; a sub-key has half of it, a flat key all")
    query: Literal["linear", "mlp"] = key("linear", "the query network: one linear map, or two with a ReLU between")
    query_norm: Literal["batch", "layer", "rms", "none"] = key(
        "batch", "normalisation of the queries; batch is the paper's (PKM table 2)"
    )

    @property
    def slots(self) -> int:
        return self.num_keys**2

    @property
    def key_rows(self) -> int:
        """Keys of a head, in rows of `key_dim`: two halves' sub-keys are as many rows as one half has."""
        return self.num_keys if self.kind == "product-key" else self.slots


@dataclass(frozen=True)
class Hash:
    bits: int = key(8, "bits of a bucket code (tau): dim / bits tables of 2^bits rows")
    extra_bits: int = key(2, "more bits for the second layer of the Memory Block (MF table 5)")
    temperature: float = key(1.0, "temperature t of the score p(z)")
    score: Literal["paper", "scaled"] = key("paper", "p(z) as in the paper, or sum|z| * p(z) as in its released code")
    activation: Literal["none", "gelu"] = key(
        "none", "activation between the two layers of the Memory Block (MF table 6)"
    )


@dataclass(frozen=True)
class AttentionOptions:
    features: int = key(256, "performer: random features a head")
    block: int = key(64, "linformer: tokens of a block, within which attention is exact")
    rank: int = key(16, "linformer: rows that stand for the keys and values of an earlier block")


@dataclass(frozen=True)
class Model:
    vocab_size: int | None = key(None, "rows of the embedding; null: the tokenizer's size")
    dim: int = key(512, "width of the residual stream")
    layers: int = key(6, "transformer blocks")
    heads: int = key(8, "attention heads")
    context: int = key(512, "tokens a sequence")
    positions: Literal["learned", "rotary"] = key("learned", "position information")
    rotary_fraction: float = key(1.0, "share of each attention head that rotates (Pythia: 0.25)")
    attention: Literal["softmax", "linformer", "cosformer", "performer"] = key(
        "softmax", "kind of attention; only softmax can generate and be exported"
    )
    attention_options: AttentionOptions = key(AttentionOptions, "sizes of the other kinds of attention")
    projections: Literal["dense", "hash"] = key("dense", "hash: q, k, v and the FFN become MemoryFormer's hash tables")
    residual: Literal["sequential", "parallel"] = key("sequential", "parallel: attention and FFN read the same input")
    ffn_dim: int | None = key(None, "inner width of the FFN; null: 4 * dim")
    activation: Literal["gelu", "relu"] = key("gelu", "activation of the FFN")
    bias: bool = key(True, "biases in linear maps; a memory's queries always have them")
    tie_embeddings: bool = key(True, "the output head shares the token embedding")
    dropout: float = key(0.0, "dropout probability, on embeddings, attention (softmax, linformer) and what blocks add")
    memory: Memory = key(Memory, "a sparsely read memory")
    hash: Hash = key(Hash, "MemoryFormer's tables (projections: hash)")


@dataclass(frozen=True)
class ValuesOptim:
    optimizer: Literal["row-adam", "adam"] = key("row-adam", "row-adam updates only the rows read; adam all of them")
    lr: float = key(1e-3, "peak learning rate of the memory values")
    betas: tuple[float, float] = key((0.9, 0.999), "Adam's decay rates")
    schedule: Schedule = key("constant", "learning-rate schedule")
    warmup_steps: int = key(0, "steps of linear warm-up")
    weight_decay: float = key(0.0, "decoupled weight decay; row-adam decays the rows that it updates")
    clip: float = key(1.0, "largest gradient norm of the values; 0: no clipping")


@dataclass(frozen=True)
class TablesOptim:
    optimizer: Literal["row-adam", "adam"] = key("adam", "row-adam updates only the rows read")
    lr_scale: float = key(
        3.0, "the tables' peak rate is optim.lr times this; 1 where that is the rate of all, as in MF"
    )
    betas: tuple[float, float] | None = key(None, "Adam's decay rates; null: those of optim")
    schedule: Schedule | None = key(None, "learning-rate schedule; null: that of optim")
    warmup_steps: int | None = key(None, "steps of linear warm-up; null: those of optim")
    weight_decay: float = key(0.0, "decoupled weight decay")
    clip: float = key(1.0, "largest gradient norm of the tables; 0: no clipping")


@dataclass(frozen=True)
class KeysOptim:
    lr_scale: float = key(1.0, "the keys' peak rate is optim.lr times this; 0: they stay as they start")


@dataclass(frozen=True)
class Optim:
    lr: float = key(2.5e-4, "peak learning rate")
    betas: tuple[float, float] = key((0.9, 0.98), "Adam's decay rates")
    eps: float = key(1e-8, "Adam's epsilon, for every group")
    schedule: Schedule = key("inverse-sqrt", "learning-rate schedule")
    warmup_steps: int = key(4000, "steps of linear warm-up; inverse-sqrt needs at least 1")
    final_lr: float = key(0.1, "cosine and linear end at this share of the peak")
    weight_decay: float = key(
        0.0, "decoupled weight decay of dense matrices (never keys, biases, norms, values or tables)"
    )
    clip: float = key(1.0, "largest gradient norm of the dense parameters; 0: no clipping")
    keys: KeysOptim = key(KeysOptim, "memory keys: sub-keys, or flat keys")
    values: ValuesOptim = key(ValuesOptim, "memory values")
    tables: TablesOptim = key(TablesOptim, "MemoryFormer's hash tables")


@dataclass(frozen=True)
class Train:
    steps: int = key(20000, "optimizer steps")
    batch_tokens: int = key(65536, "tokens an optimizer step, over all ranks and micro-batches")
    micro_batch: int = key(16, "sequences a rank takes in one forward")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "arithmetic of the forward; weights stay fp32")
    compile: bool = key(False, "compile attention and FFNs with torch.compile; needs a C++ compiler on a CPU")
    recompute: bool = key(False, "keep no activations within blocks: less memory, about a third more time")
    seed: int = key(1, "seed of initial weights, data order and dropout")
    init_from: str | None = key(
        None, "start from the weights of another run (its best checkpoint); modules that it lacks start anew"
    )


@dataclass(frozen=True)
class Eval:
    every: int = key(500, "steps between validations; 0: only at the end")
    tokens: int | None = key(None, "validate on the first so many tokens of the split; null: on all")
    patience: int | None = key(None, "stop after so many validations without a better one; null: never")
    recalibrate: int = key(
        0, "forwards over training tokens that renew the query norm's running statistics before a validation; 0: none"
    )
    sample: str | None = key(None, "continue this text after each validation and log it")


@dataclass(frozen=True)
class Checkpoint:
    every: int = key(1000, "steps between checkpoints; one is also saved at the end and on request")
    keep: int = key(2, "newest checkpoints to keep, and the best one; at least 2")


@dataclass(frozen=True)
class Log:
    every: int = key(20, "steps between lines when the output is not a terminal")
    tensorboard: bool = key(False, "also write TensorBoard events (pip install pkmlm[sinks])")
    wandb: str | None = key(None, "also log to this Weights & Biases project (pip install pkmlm[sinks])")


@dataclass(frozen=True)
class Parallel:
    memory: int = key(1, "ranks that divide each table of values or buckets by columns; it divides the ranks")
    shard: bool = key(False, "divide dense parameters, their gradients and moments among all ranks (FSDP2)")


@dataclass(frozen=True)
class Recipe:
    name: str = key("unnamed", "a name for logs and tables")
    data: Data = key(Data, "the tokens")
    model: Model = key(Model, "the network")
    optim: Optim = key(Optim, "how parameters move")
    train: Train = key(Train, "how long, in what portions")
    eval: Eval = key(Eval, "validation during training")
    checkpoint: Checkpoint = key(Checkpoint, "what is kept")
    log: Log = key(Log, "what is shown")
    parallel: Parallel = key(Parallel, "many processes")

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.train.batch_tokens // self.model.context

    @property
    def schedules(self) -> set[Schedule]:
        """The learning-rate schedules of the groups of parameters that the model has."""
        found = {self.optim.schedule}
        if self.model.memory.kind != "none":
            found.add(self.optim.values.schedule)
        if self.model.projections == "hash":
            found.add(self.optim.tables.schedule or self.optim.schedule)
        return found

    def micro_batches(self, ranks: int = 1) -> int:
        """Forwards of an optimizer step, on each of so many ranks."""
        return self.sequences // (self.train.micro_batch * ranks)


def leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Every key of a dataclass and of the dataclasses in it, in their order: dotted name, field and type."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            yield from leaves(hints[one.name], f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}", one, hints[one.name]
