"""What the values of a memory say, read off by the model's own output head.

S: some slots; K: slots; D: model width; V: vocabulary.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pkmlm.analysis.slots import Word
from pkmlm.evaluate.load import LoadedRun
from pkmlm.model.memory.base import memories

WORDS = 8  # tokens that a value raises, or lowers, most
ROWS = 256  # values put through the output head at a time


class Lens:
    """What the values of one memory say through the output head.

    A value v adds w * v to the residual stream, which the final LayerNorm and the head then read. The lens gives the
    head's answer to v alone: normalised without the norm's bias (the same for every slot), and relative to the mean
    token. It leaves out the size of the rest of the stream, and what later blocks make of v: the earlier the layer, the
    rougher the approximation ("logit lens").

    Args:
        index: of the memory, as in `memories`.
    """

    def __init__(self, run: LoadedRun, index: int):
        self.model, self.tokenizer = run.model, run.tokenizer
        self.memory = memories(run.model)[index]
        self.table_KD = self.memory.values.weight_KD.detach()

    @property
    def reaches_output(self) -> bool:
        """Whether the values are added to the residual stream; those of a hash layer's qkv and ffn1 are not."""
        return self.memory.tap.name in ("memory", "ffn2")

    @torch.no_grad()
    def logits(self, slots_S: Tensor) -> Tensor:
        """What each slot's value adds to each token's logit, relative to the mean token, float32 (S, V)."""
        v_SD = self.table_KD[slots_S].float()
        v_SD = v_SD - v_SD.mean(dim=1, keepdim=True)
        v_SD = v_SD / v_SD.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
        logits_SV = self.model.head(v_SD * self.model.norm.weight)[:, : self.tokenizer.size]
        return logits_SV - logits_SV.mean(dim=1, keepdim=True)

    def first(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The token that each slot's value raises most."""
        parts = torch.from_numpy(slots).to(self.table_KD.device).split(ROWS)
        return np.concatenate([self.logits(slots_S).argmax(dim=1).cpu().numpy() for slots_S in parts])

    def words(self, slots: Iterable[int], most: int = WORDS) -> list[tuple[list[Word], list[Word]]]:
        """For each slot the tokens that its value raises most and lowers most, strongest first."""
        wanted = torch.tensor(list(slots), dtype=torch.int64, device=self.table_KD.device)
        found = []
        for slots_S in wanted.split(ROWS):
            logits_SV = self.logits(slots_S)
            sides = [self._named(logits_SV, sign, min(most, logits_SV.shape[1])) for sign in (1, -1)]
            found += list(zip(*sides, strict=True))
        return found

    def _named(self, logits_SV: Tensor, sign: int, most: int) -> list[list[Word]]:
        top = (sign * logits_SV).topk(most)
        pairs = zip(top.indices.tolist(), (sign * top.values).tolist(), strict=True)
        return [[Word(self.tokenizer.piece(t), logit) for t, logit in zip(*row, strict=True)] for row in pairs]
