"""The state of training, which the loop, the step and checkpoints share."""

import torch
from torch import Tensor

from pkmlm.data.batches import Batches
from pkmlm.distributed import ProcessGroups
from pkmlm.model.memory.values import table_ranks
from pkmlm.model.transformer import Transformer
from pkmlm.recipe.schema import Recipe
from pkmlm.runs.checkpoint import Progress, Tables
from pkmlm.train.compile_and_recompute import compile_dense_parts, recompute_activations
from pkmlm.train.optim import optimizer_state, parameter_groups
from pkmlm.train.parallel import data_parallel_loss, shard_dense_parameters


class TrainState:
    """A model, its optimizers, its data, and how far its training is.

    Construction prepares the model as the recipe asks: it divides the dense parameters among the ranks, compiles the
    dense parts, and lets blocks recompute their activations.

    Args:
        recipe: how to train.
        model: the model, on the device to train on; weights, gradients and moments are fp32 in each precision.
        batches: the training data.
        precision: "fp32", "bf16" or "fp16".
        process_groups: the ranks that take each step together; None: this process alone.

    Attributes:
        param_groups: the parameters that move together, with their optimizers.
        data_parallel: what to call for `model.loss` where several ranks train; None: nothing is to be summed.
        scaler: the loss scaler, enabled in fp16 alone.
        progress: steps, tokens, seconds, and fp16 steps skipped in a row.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Transformer,
        batches: Batches,
        precision: str,
        process_groups: ProcessGroups | None = None,
    ):
        self.recipe, self.model, self.batches, self.precision = recipe, model, batches, precision
        self.process_groups = process_groups or ProcessGroups()
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.progress = Progress()
        if recipe.parallel.shard and self.process_groups.world.size > 1:
            shard_dense_parameters(model, self.process_groups.world.size)
        self.param_groups = parameter_groups(model, recipe)  # after sharding, which replaces parameters
        if recipe.train.compile:
            compile_dense_parts(model)
        if recipe.train.recompute:
            for block in model.blocks:
                recompute_activations(block)
        dense = list(self.param_groups[0].parameters.values())
        self.data_parallel = data_parallel_loss(model, dense, self.process_groups.world)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Tables]:
        """What a checkpoint holds: the model's tensors, the optimizers', and which of the model's are tables."""
        return self.model.state_dict(), optimizer_state(self.param_groups), table_ranks(self.model)
