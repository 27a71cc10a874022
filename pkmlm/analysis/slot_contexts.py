"""The positions of a text that read each slot of a memory most, kept in one pass.

N: tokens; H: heads (hash layers: tables); k: slots a head reads; r: H * k; R: reads of a batch; K: slots; U: slots that
a batch reads; c: contexts kept a slot.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pkmlm.analysis.counters import WatchedReads
from pkmlm.analysis.slots import JUDGED
from pkmlm.model.memory.base import memories
from pkmlm.model.memory.usage_tap import UsageTap

CONTEXTS = JUDGED  # kept a slot


class Strongest(NamedTuple):
    """The positions that give each slot of a memory most weight, strongest first; ties by position.

    Attributes:
        weights_Kc: float32, the weight of the slot's value in the memory's answer there (summed over heads); -1: none.
        positions_Kc: int64, scored positions of the text, counted from 0.
    """

    weights_Kc: NDArray[np.float32]
    positions_Kc: NDArray[np.int64]


class SlotReaders(WatchedReads):
    """Keeps the strongest readers of every slot while the `with` block runs.

    Memory: 12 bytes for each slot and context kept, whatever the length of the text.

    Args:
        contexts: kept of each slot.
        memory: which one is watched, as in `memories`; None: all.
    """

    def __init__(self, model: nn.Module, contexts: int = CONTEXTS, memory: int | None = None):
        watched = memories(model) if memory is None else [memories(model)[memory]]
        self._memories = [_Readers(module.tap, module.values.weight_KD.device, contexts) for module in watched]
        super().__init__([(memory.tap, memory.add) for memory in self._memories])

    def strongest(self) -> list[Strongest]:
        """What has been found, one entry a memory, in the model's order."""
        return [Strongest(m.weights_Kc.cpu().numpy(), m.positions_Kc.cpu().numpy()) for m in self._memories]


class _Readers:
    def __init__(self, tap: UsageTap, device: torch.device, contexts: int):
        self.tap, self.contexts, self.tokens = tap, contexts, 0
        self.weights_Kc = torch.full((tap.slots, contexts), -1.0, device=device)
        self.positions_Kc = torch.full((tap.slots, contexts), -1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, slots_NHk: Tensor, weights_NHk: Tensor) -> None:
        token_R, slot_R, weight_R = summed_reads(slots_NHk, weights_NHk)
        position_R = token_R + self.tokens
        self.tokens += len(slots_NHk)
        better_R = weight_R > self.weights_Kc[slot_R, -1]  # of equal weights the earlier position stays
        position_R, slot_R, weight_R = position_R[better_R], slot_R[better_R], weight_R[better_R]
        order_R = weight_R.sort(descending=True, stable=True).indices
        order_R = order_R[slot_R[order_R].sort(stable=True).indices]  # by slot, then weight, then position
        position_R, slot_R, weight_R = position_R[order_R], slot_R[order_R], weight_R[order_R]
        slots_U, group_R, count_U = slot_R.unique_consecutive(return_inverse=True, return_counts=True)
        rank_R = torch.arange(len(slot_R), device=slot_R.device) - (count_U.cumsum(0) - count_U)[group_R]
        kept_R = rank_R < self.contexts
        at = group_R[kept_R], rank_R[kept_R]
        weights_Uc = self.weights_Kc.new_full((len(slots_U), self.contexts), -1.0)
        positions_Uc = self.positions_Kc.new_full((len(slots_U), self.contexts), -1)
        weights_Uc[at], positions_Uc[at] = weight_R[kept_R], position_R[kept_R]
        both_Uc = torch.cat([self.weights_Kc[slots_U], weights_Uc], dim=1)
        best = both_Uc.sort(dim=1, descending=True, stable=True).indices[:, : self.contexts]
        self.weights_Kc[slots_U] = both_Uc.gather(1, best)
        self.positions_Kc[slots_U] = torch.cat([self.positions_Kc[slots_U], positions_Uc], dim=1).gather(1, best)


def summed_reads(slots_NHk: Tensor, weights_NHk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reads of each token with those of one slot by several heads summed: token, slot, weight (float32), (R,) each,
    in the order of tokens, then slots.
    """
    slots_Nr, order_Nr = slots_NHk.flatten(1).sort(dim=1, stable=True)
    weights_Nr = weights_NHk.flatten(1).float().gather(1, order_Nr)
    first_Nr = torch.ones_like(slots_Nr, dtype=torch.bool)
    first_Nr[:, 1:] = slots_Nr[:, 1:] != slots_Nr[:, :-1]
    first_R = first_Nr.flatten()
    sums_R = weights_Nr.new_zeros(int(first_R.sum())).index_add_(0, first_R.cumsum(0) - 1, weights_Nr.flatten())
    return first_Nr.nonzero()[:, 0], slots_Nr.flatten()[first_R], sums_R
