"""`parallel.shard`: the dense parameters, their gradients and moments divided among all ranks (torch's FSDP2).

Where nothing is divided, its modules are not imported: that takes half as long as torch itself.
"""

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from pkmlm.model.memory.key_memory import KeyMemory
from pkmlm.model.memory.values import Values
from pkmlm.model.transformer import Transformer


def shard_dense_parts(model: Transformer, ranks: int) -> None:
    """Divide a model's dense parameters among all ranks, which then fetch each block's when they need it.

    Tables have columns of their own on each rank. Sub-keys stay whole, too: they are small, and the CPU's kernels hold
    on to their storage. Gradients are sums over ranks.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks,))
    memories = [module for module in model.modules() if isinstance(module, Values | KeyMemory)]
    whole = {parameter for memory in memories for parameter in memory.parameters(recurse=False)}
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in ("hidden", "head", "loss"):  # training and evaluation call these, not forward
        register_fsdp_forward_method(model, name)


def is_shard(tensor: Any) -> bool:
    """Whether this rank holds a part of the tensor (a DTensor)."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Tensor:
    """The part that this rank holds, or all of it."""
    part: Tensor = tensor.to_local() if is_shard(tensor) else tensor
    return part
