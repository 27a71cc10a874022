"""One optimizer step: micro-batches forward and backward, one verdict on the gradient, one update of every group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pkmlm.data.batches import Batches
from pkmlm.device import autocast, to_device
from pkmlm.distributed import Ranks
from pkmlm.errors import UserError
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe
from pkmlm.seeds import derived_seed
from pkmlm.train.activation_checkpointing import checkpoint_activations
from pkmlm.train.compile import compile_dense_parts
from pkmlm.train.exchange import exchange_gradients
from pkmlm.train.optim import parameter_groups
from pkmlm.train.shard import shard_dense_parts

SCALE_FLOOR = 1.0
MOST_SKIPS = 20


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: mean over the global batch's scored tokens, nats.
        norms: gradient norm of each group before clipping.
        skipped: fp16 gradients overflowed, and nothing was updated.
    """

    loss: float
    norms: dict[str, float]
    skipped: bool


class Stepper:
    """Takes the optimizer steps of a run on one model, whose dense parameters it divides among the ranks, and whose
    blocks it compiles and recomputes, where the recipe asks for it.

    Args:
        precision: "fp32", "bf16" or "fp16"; weights, gradients and moments are fp32 in each.
        ranks: those that take each step together; None: this process alone.
    """

    def __init__(
        self, recipe: Recipe, model: Transformer, batches: Batches, precision: str, ranks: Ranks | None = None
    ):
        self.recipe, self.model, self.batches, self.precision = recipe, model, batches, precision
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.skips = 0  # in a row
        if recipe.parallel.shard and self.ranks.world.size > 1:
            shard_dense_parts(model, self.ranks.world.size)
        self.groups = parameter_groups(model, recipe)  # of the parameters as they are divided
        if recipe.train.compile:
            compile_dense_parts(model)
        if recipe.train.recompute:
            checkpoint_activations(model)

    def take(self, step: int) -> StepResult:
        """Take step `step` (from 1): everything random in it follows from the recipe's seed, this number and the rank.

        Returns:
            loss and gradient norms of the global batch: the same numbers on all ranks.

        Raises:
            UserError: (exit code 3) the loss or a gradient is not finite and no smaller loss scale can mend it; the
                parameters are those of the step before.
        """
        world = self.ranks.world
        world.tally.step = step
        of_this_rank = (step, world.rank) if world.rank else (step,)
        torch.manual_seed(derived_seed(self.recipe.train.seed, "dropout", *of_this_rank))
        self.model.train()
        scaled = self.scaler.is_enabled()  # in fp16
        before = [buffer.clone() for buffer in self.model.buffers()] if scaled else []
        loss = self._gradients(step)
        exchange_gradients(self.groups, self.ranks)
        if scaled:
            for group in self.groups:
                group.unscale(self.scaler)
        loss_value, *norm_values = self._loss_and_norms(loss).tolist()
        named = dict(zip((group.name for group in self.groups), norm_values, strict=True))
        finite = all(abs(value) < float("inf") for value in (loss_value, *norm_values))
        if finite:
            self._update(step, named)
        elif not scaled:
            raise world.same(diverged(step, found(loss_value, named)))
        else:  # a skipped step leaves no trace
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
        if scaled:
            self._adapt_scale(step, finite, loss_value, named)
        for group in self.groups:
            group.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_value, named, skipped=not finite)

    def _gradients(self, step: int) -> Tensor:
        """Accumulate the gradient of the mean over the global batch; return that mean, 0-d, detached. Both are this
        rank's share: a sum over its tokens.
        """
        world = self.ranks.world
        count, scored = self.recipe.micro_batches(world.size), self.batches.scored(step)
        # By `scale`, and not `get_scale`: the former also makes the scaler's tensors, which unscaling needs.
        enabled = self.scaler.is_enabled()
        loss_scale = float(self.scaler.scale(torch.ones((), device=self.device))) if enabled else 1.0
        total = torch.zeros((), device=self.device)
        for index in range(count):
            batch = self.batches.micro_batch(step, index, self.recipe.train.micro_batch, world.rank, world.size)
            tokens_BT, targets_BT = (to_device(part, self.device) for part in batch)
            with autocast(self.device, self.precision):
                loss = self.model.loss(tokens_BT, targets_BT, loss_scale / scored)
            loss.backward()
            total = total + loss.detach() / loss_scale
        return total

    def _loss_and_norms(self, loss: Tensor) -> Tensor:
        """Loss and gradient norms of the global batch: the same numbers on all ranks, and so the same verdict."""
        shares = [loss.double(), *(group.own_square(self.ranks) for group in self.groups)]
        total = self.ranks.world.all_sum(torch.stack(shares))
        return torch.cat([total[:1], total[1:].sqrt()])

    def _update(self, step: int, norms: dict[str, float]) -> None:
        for group in self.groups:
            if group.clip and norms[group.name] > group.clip:
                group.scale_gradient(group.clip / norms[group.name])
            group.step(step)

    def _adapt_scale(self, step: int, finite: bool, loss: float, norms: dict[str, float]) -> None:
        """Let the loss scale grow or back off: one verdict for all groups (torch's scaler keeps one for each)."""
        self.skips = 0 if finite else self.skips + 1
        if finite:
            self.scaler.update()
            return
        scale = self.scaler.get_scale()
        if scale <= SCALE_FLOOR or self.skips >= MOST_SKIPS:
            after = f" after {self.skips} skipped steps in a row, at a loss scale of {scale:g}"
            raise self.ranks.world.same(diverged(step, found(loss, norms, after)))
        lower = max(SCALE_FLOOR, scale * self.scaler.get_backoff_factor())
        self.scaler.update(new_scale=lower)
        self.scaler.load_state_dict({**self.scaler.state_dict(), "_growth_tracker": 0})


def found(loss: float, norms: dict[str, float], after: str = "") -> str:
    """What shows that a step has diverged."""
    bad = [name for name, norm in norms.items() if not abs(norm) < float("inf")]
    where = f", gradient norm of {' and '.join(bad)} not finite" if bad else ""
    return f"loss {loss:g}{where}{after}; nothing was updated"


def diverged(step: int, what: str) -> UserError:
    """The error that ends training (exit code 3)."""
    return UserError(
        f"training diverged at step {step}: {what}",
        "train under another -o with a lower optim.lr, a longer warm-up or tighter clipping; "
        "-s train.init_from=RUN starts from this run's best checkpoint, if it has one",
        exit_code=3,
    )
