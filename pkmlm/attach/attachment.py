"""Attach a memory to a pretrained model: `pkmlm.attach`, and its control of equal operations, `pkmlm.attach_dense`."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pkmlm.attach.dense import DenseSpec
from pkmlm.attach.hosted import Hosted
from pkmlm.attach.hosts import choose_blocks, find_tokenizer, vocabulary_of
from pkmlm.attach.optimizer import AdamWAndRowAdam
from pkmlm.attach.places import NAME, attachments_of, insert
from pkmlm.attach.saved import check_base, read_facts, read_weights, saved_spec, write_attached
from pkmlm.attach.specs import Mode, spec_of
from pkmlm.attach.tokens import host_ids
from pkmlm.errors import UserError
from pkmlm.measure.counters import UsageCounters
from pkmlm.measure.slot_contexts import AFTER, BEFORE, Context, TopContexts
from pkmlm.measure.slots import LogitLens, SlotDetails, find_memory, most_read
from pkmlm.measure.usage import MemoryUsage
from pkmlm.memory.base import SparseMemory
from pkmlm.memory.row_adam import RowAdam, check_settings
from pkmlm.memory.spec import Spec
from pkmlm.memory.table import tables_of


def attach(
    model: nn.Module,
    memory: Mapping[str, Any] | SparseMemory | str | Path,
    layers: Sequence[int] | None = None,
    mode: Mode = "add",
    *,
    tokenizer: str | Path | None = None,
    freeze: bool = True,
    seed: int = 1,
) -> "Attachment":
    """Attach a memory to some blocks of a causal model of transformers, beside others that are attached to it already.

    In mode "add", the memory reads the FFN's input, and its output is added to the FFN's. Its values start at 0 (unless
    you made the layer): the logits stay the same bit for bit until training moves them (a memory beside an FFN: Kim and
    Jung 2020, arXiv 2010.03881). In mode "replace", the memory takes the place of the FFN, and the model needs training
    to recover. The memory computes in fp32 inside a model of any dtype, with or without autocast; each token is looked
    up by itself, so that neither padding nor a cache changes what it reads.

    A memory that looks rows up by the tokens, such as an n-gram memory, is added to the stream before the block. It
    reads the ids that the model is called with, and keeps earlier ones in the model's cache.

    Args:
        model: has a config and one list of blocks (GPT-2, GPT-NeoX, Llama, Qwen and others); it is changed in place.
        memory: a recipe's keys of one memory, without `layers`, `optim` and `start`, such as {"kind": "product-key",
            "num_keys": 128, "heads": 4, "topk": 8, "key_dim": 64}; `query_norm` is "rms" unless given. Or a layer for
            one block, such as `pkmlm.ProductKeyMemory(dim, query_norm="rms", start="zero")`, with its weights. Or a
            folder that `Attachment.save` wrote, which sets everything but `freeze`; its weights are loaded.
        layers: the blocks, counted from 1.
        mode: "add" or "replace".
        tokenizer: the file or folder of the model's tokenizer, from which a memory with `canonical: True` takes its
            ids; None: the folder that the model was loaded from.
        freeze: train only what is attached, for as long as it is.
        seed: of the initial weights.

    Raises:
        UserError: the blocks or their FFNs are not found; a key, size or layer is not possible; a tokenizer is needed
            and not found; the folder is damaged or belongs to another model.
    """
    if isinstance(memory, str | Path):
        given: dict[str, Any] = {"layers": layers, "tokenizer": tokenizer}
        given |= {"mode": None if mode == "add" else mode, "seed": None if seed == 1 else seed}
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} is {value}, but {memory} sets it", f"leave {name} out")
        facts = read_facts(folder := Path(memory))
        check_base(folder, facts, model)
        attachment = Attachment(
            model, saved_spec(folder, facts), facts["layers"], facts["mode"], freeze=freeze, seed=None
        )
        try:
            read_weights(folder, facts, attachment.module)
        except BaseException:
            attachment.detach()
            raise
        attachment.step = facts["step"]
        return attachment
    if layers is None:
        raise UserError("layers is missing (expected a list of blocks, counted from 1)")
    spec, made = spec_of(memory), None if isinstance(memory, Mapping) else memory
    ids = None if spec.lookback is None else spec.lookback.ids
    if tokenizer is not None and ids != "canonical":
        raise UserError(f"tokenizer is {tokenizer}, but the memory needs no canonical ids", "leave tokenizer out")
    own = find_tokenizer(model, tokenizer) if ids == "canonical" else None
    ids_V = None if ids is None else host_ids(model, ids, own)
    attachment = Attachment(model, spec, layers, mode, freeze=freeze, seed=seed, made=made)
    if ids_V is not None and attachment.module.token_ids is not None:
        attachment.module.token_ids.ids_V.copy_(ids_V)
    return attachment


def attach_dense(
    model: nn.Module,
    layers: Sequence[int] | None = None,
    *,
    like: "Attachment",
    freeze: bool = True,
    seed: int = 1,
) -> "Attachment":
    """Attach the control of a memory: in each of its layers, beside the FFN or in its place, a SwiGLU (Shazeer 2020,
    arXiv 2002.05202, eq. 6) of the width that comes closest to the memory's operations. A gain of the memory says
    something about memories only if it is larger than that of the control.

    Args:
        model: another copy of the same model, or the same after `detach`.
        layers: counted from 1; None: those of `like`.
        like: the attached memory; the control has its multiply-adds per token and its mode.
        freeze, seed: as for `attach`.

    Raises:
        UserError: as `attach`.
    """
    if not isinstance(like, Attachment):
        raise UserError(f"like is a {type(like).__name__} (expected an Attachment: what `attach` returned)")
    layers = like.module.layers if layers is None else choose_blocks(model, layers)
    inner = round(like.flops_per_token() / len(layers) / (3 * like.module.dim))
    return Attachment(model, DenseSpec(inner=max(1, inner)), layers, like.module.mode, freeze=freeze, seed=seed)


class Attachment:
    """What is attached to a model. It can be trained, saved and detached by itself; after `detach`, methods that need
    the model raise a UserError.

    Attributes:
        model: the model.
        module: what is attached, a submodule of the model.
        step: optimizer steps that its weights have taken in all; `load` sets it to the saved number.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        layers: Sequence[int],
        mode: Mode,
        *,
        freeze: bool,
        seed: int | None,
        made: SparseMemory | None = None,
    ):
        """Use `attach` or `attach_dense`."""
        if not isinstance(freeze, bool):
            raise UserError(f"freeze is {freeze!r} (expected True or False)")
        self.model, self.step = model, 0
        self.module = insert(model, spec, layers, mode, freeze=freeze, seed=seed, made=made)
        self._prefix = f"{NAME}.{self.module.name}."
        self._rows: RowAdam | None = None

    def __repr__(self) -> str:
        module, weights = self.module, sum(weight.numel() for weight in self.module.parameters())
        blocks = f"block{'s' * (len(module.layers) > 1)} {', '.join(map(str, module.layers))}"
        where = f"mode {module.mode} at {blocks} of {type(self.model).__name__}"
        sizes = f"{module.spec.describe()}, {weights:,} parameters"
        return f"Attachment({module.name}, {module.spec.kind}: {sizes}; {where}; step {self.step})"

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that train: those of what is attached and, unless it is frozen, of the model; not those of
        other attachments."""
        return (parameter for _, parameter in self._trained())

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            of_another = name.startswith(f"{NAME}.") and not name.startswith(self._prefix)
            if parameter.requires_grad and not of_another:
                yield name, parameter

    def flops_per_token(self) -> int:
        """Multiply-adds per token that the attached layers add: of linear maps, and with keys and rows of tables."""
        return self.module.flops_per_token()

    def optimizer(
        self,
        lr: float,
        values_lr: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        values_betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> AdamWAndRowAdam:
        """Make one optimizer for everything that trains: once, and before the model is wrapped for several processes.

        Args:
            lr: of everything but tables of rows.
            values_lr: of tables of rows; None: 4 times `lr` (UltraMem's factor, arXiv 2411.12364).
            betas, values_betas: Adam's.
            weight_decay: decoupled, of matrices and the taps of convolutions (never of tables, keys, norms or biases).

        Raises:
            UserError: there is one already.
            ValueError: a setting is not possible.
        """
        self.check_attached()
        check_settings(lr, betas, weight_decay=weight_decay)
        tables = tables_of(self.module)
        if any(table.gradient is not None for table in tables.values()):
            raise UserError(
                "what is attached has an optimizer already", "use that one; its param_groups hold the rates"
            )
        if any(not table.weight_KD.requires_grad for table in tables.values()):
            raise UserError(
                "the tables of what is attached are frozen (requires_grad is False)",
                "attach after peft has wrapped the model, or set requires_grad of `attached.module` to True",
            )
        names = {self._prefix + name for name in tables}
        rest = [parameter for name, parameter in self._trained() if name not in names]
        groups: list[dict[str, Any]] = [
            {"params": [each for each in rest if each.ndim == 2], "weight_decay": weight_decay},
            {"params": [each for each in rest if each.ndim != 2]},
        ]
        dense = torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0)
        if tables:
            self._rows = RowAdam(tables.values(), 4 * lr if values_lr is None else values_lr, values_betas)
        self._hide_from_ddp(names)
        return AdamWAndRowAdam(dense, self._rows, self)

    def _hide_from_ddp(self, names: Iterable[str]) -> None:
        """Make DistributedDataParallel ignore these parameters of what is attached, and no others of it: row Adam
        averages their gradients, and DDP would sum zeros. Torch has no public way to say so.
        """
        ignored = getattr(self.model, "_ddp_params_and_buffers_to_ignore", ())
        ignored = [*(name for name in ignored if not name.startswith(self._prefix)), *names]
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
        elif hasattr(self.model, "_ddp_params_and_buffers_to_ignore"):
            del self.model._ddp_params_and_buffers_to_ignore

    def check_attached(self) -> None:
        """Refuse to go on after `detach`: the model runs without this, and may have another attachment by now."""
        if attachments_of(self.model).get(self.module.name) is not self.module:
            raise UserError("this was detached from its model", "attach it again: pkmlm.attach(model, FOLDER)")

    def save(self, folder: str | Path, *, replace: bool = False) -> None:
        """Write what is attached, with the name and digest of the model, but not the model itself. (If the model was
        trained, too, save it yourself, after `detach`.)

        Args:
            folder: a new or empty one or, with `replace`, one that `save` wrote.

        Raises:
            UserError: the folder holds something else, or (exit code 1) it cannot be written.
        """
        self.check_attached()
        write_attached(Path(folder), self.module, self.model, self.step, replace=replace)

    def load(self, folder: str | Path) -> None:
        """Load weights that `save` wrote for the same kind of layer at the same blocks of the same model.

        Raises:
            UserError: the kind, its settings, the blocks or the model differ; (exit code 1) the folder is damaged.
        """
        self.check_attached()
        facts = read_facts(Path(folder))
        check_base(Path(folder), facts, self.model)
        read_weights(Path(folder), facts, self.module)
        self.step = facts["step"]

    def detach(self) -> None:
        """Remove what is attached: the model computes as before, and the same parameters train as before."""
        self.check_attached()
        getattr(self.model, NAME).remove(self.module.name)
        self._hide_from_ddp(())  # what is attached next may have the same names, and another optimizer
        for table in () if self._rows is None else self._rows.tables:
            table.gradient = None  # a layer that the user made may get another optimizer

    def usage(self, batches: Iterable[Tensor | Mapping[str, Any]]) -> list[MemoryUsage]:
        """What the memories read: one entry per layer, and one for a shared table. `.as_json()` has usage, KL and more.

        Args:
            batches: what the model is called with: ids (int64, (B, T)), or its arguments by name. If these have an
                "attention_mask" (B, T), padding is not counted. A model with learnt positions also needs
                "position_ids" if rows are padded on the left.

        Raises:
            UserError: a batch is not valid; a memory reads with weights that are not finite.
        """
        self.check_attached()
        with evaluating(self.model), UsageCounters(self.module) as counters:
            self._read(batches, counters)
        return counters.memories()

    def slots(
        self,
        batches: Iterable[Tensor | Mapping[str, Any]],
        decode: Callable[[list[int]], str],
        *,
        layer: int | None = None,
        top: int = 20,
    ) -> list[dict[str, Any]]:
        """The slots of a memory with the most mass on a text, strongest first: what their values say, and the contexts
        of the tokens that give them the most weight, as under `slots` in `pkmlm slots --json`. Each row of a batch is a
        document.

        Args:
            batches: as for `usage`.
            decode: turns ids into text, as the `decode` of a tokenizer of transformers does.
            layer: of the memory; None: the last layer with one.
            top: how many slots.

        Raises:
            UserError: a batch is not valid; there is no such memory; the model makes logits by more than its output
                embedding of the last hidden state.
        """
        self.check_attached()
        memory = find_memory(self.module, None if layer is None else str(layer))
        kept = TopContexts(memory.tap, next(self.module.parameters()).device)
        others = [(kept.tap, kept.add)]
        with evaluating(self.model):
            with UsageCounters(self.module, [memory.tap], overlap=False, others=others) as counters:
                rows = self._read(batches, counters)
            host = Hosted(self.model)
        usage, positions = counters.memories()[0], kept.positions()
        ends = list(accumulate(map(len, rows)))

        def context(position: int, weight: float) -> Context:
            number = bisect_right(ends, position)
            ids = rows[number]
            at = position - ends[number] + len(ids)
            before = ids[max(0, at - BEFORE) : at]
            texts = [decode(each) for each in (before, ids[at : at + 1], ids[at + 1 : at + 1 + AFTER])]
            beside = [decode(each) for each in (before[-1:], ids[at + 1 : at + 2])]
            return Context(position, number, at, weight, *texts, *beside)

        chosen = most_read(usage, top)
        lens = LogitLens(host, memory, vocabulary_of(self.model), lambda token: decode([token]))
        details = []
        for slot, words in zip(chosen, lens.words(chosen), strict=True):
            at = positions.positions_Kc[slot].tolist(), positions.weights_Kc[slot].tolist()
            contexts = [context(*each) for each in zip(*at, strict=True) if each[0] >= 0]
            details.append(SlotDetails.of(memory.tap, usage, slot, *words, contexts).as_json())
        return details

    def _read(self, batches: Iterable[Tensor | Mapping[str, Any]], counters: UsageCounters) -> list[list[int]]:
        """Run the model; return the ids of each row without padding, which is not counted."""
        rows, size = [], vocabulary_of(self.model)
        for number, batch in enumerate(batches):
            inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            ids_BT, mask_BT = checked(inputs, f"batch {number}", size)
            counters.only(mask_BT.flatten())
            self.model(**inputs)
            rows += [ids[seen].tolist() for ids, seen in zip(ids_BT, mask_BT, strict=True)]
        return rows


def checked(inputs: Mapping[str, Any], name: str, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The ids (B, T) that a model is called with, and which of them are not padding (bool), if they are valid."""
    ids_BT, mask_BT = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2 or ids_BT.dtype not in (torch.int32, torch.int64):
        found = f"{ids_BT.dtype} {(*ids_BT.shape,)}" if isinstance(ids_BT, Tensor) else type(ids_BT).__name__
        raise UserError(f"{name}: input_ids is {found} (expected int64, (B, T))", "give a list of batches: [tokens]")
    if ids_BT.numel() and not 0 <= ids_BT.min() <= ids_BT.max() < vocab_size:
        most = vocab_size - 1
        raise UserError(f"{name} has ids from {ids_BT.min()} to {ids_BT.max()} (expected 0 to {most}, the model's)")
    mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
    if mask_BT.shape != ids_BT.shape:
        raise UserError(f"{name}: attention_mask is {tuple(mask_BT.shape)} (expected {tuple(ids_BT.shape)})")
    return ids_BT, mask_BT.bool()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, for a `with` block; then restore the mode of each part."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
