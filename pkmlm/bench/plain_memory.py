"""The peers of the memory layer: a product-key memory of torch's own operations, and the FFN that it replaces.

B: sequences; T: positions; D: model width; N: tokens (B * T); H: heads; n: sub-keys of a half; f: width of a sub-key;
k: slots a head reads; r: reads of a token (H * k); c: k^2 candidates; F: entries of all heads' queries.
"""

import torch
from torch import Tensor, nn

from pkmlm.kernels.matmul import Linear
from pkmlm.model.memory.key_memory import ProductKeyMemory
from pkmlm.recipe.schema import Memory


class PlainMemory(nn.Module):
    """Product keys as one writes them in torch: top-k of either half, all k^2 sums, top-k of these, `EmbeddingBag`.

    It computes what `ProductKeyMemory` computes (Lample et al. 2019, sec. 3.1), with a linear query and BatchNorm.

    Args:
        sparse: the values' gradient is sparse, with one row for each read.
    """

    def __init__(self, dim: int, memory: Memory, *, sparse: bool):
        super().__init__()
        self.memory = memory
        width = memory.heads * memory.key_dim
        self.query = nn.Linear(dim, width)
        self.norm = nn.BatchNorm1d(width)
        self.subkeys_H2nf = nn.Parameter(torch.empty(memory.heads, 2, memory.num_keys, memory.key_dim // 2))
        self.values = nn.EmbeddingBag(memory.slots, dim, mode="sum", sparse=sparse, device="meta")

    @torch.no_grad()
    def take_weights(self, layer: ProductKeyMemory) -> None:
        """Copy a layer's weights, but share its values."""
        source = dict(layer.named_parameters())
        self.query.weight.copy_(source["query.map.weight"])
        self.query.bias.copy_(source["query.map.bias"])
        self.norm.weight.copy_(source["query.norm.weight"])
        self.norm.bias.copy_(source["query.norm.bias"])
        self.subkeys_H2nf.copy_(source["subkeys_H2nf"])
        self.values.weight = layer.values.weight_KD

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads, n, k = self.memory.heads, self.memory.num_keys, self.memory.topk
        q_NF = self.norm(self.query(x_BTD.flatten(0, 1)))
        q_NH2f = q_NF.view(len(q_NF), heads, 2, -1)
        scores_NH2n = torch.einsum("nhsf,hsmf->nhsm", q_NH2f, self.subkeys_H2nf)
        best_NH2k, index_NH2k = scores_NH2n.topk(k)
        sums_NHc = (best_NH2k[:, :, 0, :, None] + best_NH2k[:, :, 1, None, :]).flatten(2)
        slots_NHc = (index_NH2k[:, :, 0, :, None] * n + index_NH2k[:, :, 1, None, :]).flatten(2)
        top_NHk, chosen_NHk = sums_NHc.topk(k)
        slots_NHk = slots_NHc.gather(-1, chosen_NHk)
        return self.sum_values(slots_NHk.flatten(1), top_NHk.softmax(-1).flatten(1)).view_as(x_BTD)

    def sum_values(self, slots_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sum of values (N, D)."""
        out: Tensor = self.values(slots_Nr, per_sample_weights=weights_Nr)
        return out


def plain_ffn(dim: int) -> nn.Sequential:
    """The FFN that a memory replaces: D to 4 D to D with a GELU between."""
    return nn.Sequential(Linear(dim, 4 * dim), nn.GELU(), Linear(4 * dim, dim))
