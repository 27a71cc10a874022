"""The memories of a pkmlm model for `transformers`. Part of an exported model: it stands alone.

B: sequences; T: positions; N: tokens (B * T); R: rows of scores; D: model width; V: width of a value; H: memory heads;
q: width of a query; n: sub-keys of a half; f: width of a key (of a sub-key: q / 2); K: slots or rows (hash layers:
tables); k: slots a head reads; r: reads of a token; b: bits of a bucket code; c: candidates; C: bytes of a row
in 8 or 4 bits.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding_bag, gelu, relu, rms_norm, silu, softplus

from .configuration_pkmlm import PkmlmConfig

SCORES = 1 << 24  # most scores of flat keys, or entries of rows, that exist at a time
WEIGHTS = {"softmax": lambda scores: scores.softmax(-1), "relu": relu, "none": lambda scores: scores}


def top_k(scores_Rn: Tensor, k: int) -> Tensor:
    """Columns of the k highest fp32 scores of each row, highest first; equal scores by column, lowest first."""
    n = scores_Rn.shape[-1]
    bits_Rn = (scores_Rn + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are equal scores
    ordered_Rn = bits_Rn ^ ((bits_Rn >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last_first_n = torch.arange(n - 1, -1, -1, device=scores_Rn.device)
    return n - 1 - (torch.topk((ordered_Rn.long() << 32) | last_first_n, k, dim=-1).values & 0xFFFFFFFF)


class Values(nn.Module):
    """A table of rows, read as weighted sums or as products.

    In few bits, it holds codes and each row's largest absolute entry, its scale. An entry is scale * (code / 127), in 4
    bits scale * (code / 7), where one byte holds the codes of columns c (low half) and C + c. Such a table is not
    trained.
    """

    def __init__(self, config: PkmlmConfig, rows: int, width: int):
        super().__init__()
        self.width, self.bits = width, config.table_bits
        if self.bits is None:
            self.weight_KD = nn.Parameter(torch.empty(rows, width))
        elif self.bits in (8, 4):
            shape, dtype = ((rows, width), torch.int8) if self.bits == 8 else ((rows, (width + 1) // 2), torch.uint8)
            self.codes_KC: Tensor
            self.scale_K: Tensor
            self.register_buffer("codes_KC", torch.zeros(shape, dtype=dtype))
            self.register_buffer("scale_K", torch.zeros(rows))
        else:
            raise ValueError(f"table_bits {self.bits!r} is not known here (expected None, 8 or 4)")

    def rows(self, rows_Nr: Tensor) -> Tensor:
        """Rows (N, r, D) in fp32."""
        if self.bits is None:
            return self.weight_KD[rows_Nr].float()
        codes_NrD = self.codes_KC[rows_Nr]
        if self.bits == 4:
            signed_NrC = codes_NrD.view(torch.int8)
            codes_NrD = torch.cat([signed_NrC << 4 >> 4, signed_NrC >> 4], -1)[..., : self.width]
        return self.scale_K[rows_Nr].float()[..., None] * (codes_NrD.float() / (127 if self.bits == 8 else 7))

    def chunks(self, rows_Nr: Tensor, other: Tensor) -> Any:
        """The rows of a few tokens at a time, with the same tokens' part of `other`."""
        size = max(1, SCORES // (rows_Nr.shape[1] * self.width))
        return zip(map(self.rows, rows_Nr.split(size)), other.split(size), strict=True)

    @property
    def device(self) -> torch.device:
        """The table's device; layers on other devices may share the table."""
        return (self.weight_KD if self.bits is None else self.codes_KC).device

    def forward(self, rows_Nr: Tensor, weights_Nr: Tensor) -> Tensor:
        """The weighted sum of rows, on the table's device."""
        rows_Nr, weights_Nr = rows_Nr.to(self.device), weights_Nr.to(self.device)
        if self.bits is not None:
            chunks = self.chunks(rows_Nr, weights_Nr.float())
            sums = [torch.einsum("nr,nrd->nd", weights_nr, rows_nrD) for rows_nrD, weights_nr in chunks]
            return torch.cat(sums)
        weights_Nr = weights_Nr.to(self.weight_KD.dtype)
        return embedding_bag(rows_Nr, self.weight_KD, mode="sum", per_sample_weights=weights_Nr)

    def products(self, x_ND: Tensor, rows_Nr: Tensor) -> Tensor:
        """<x, row> of each read, in fp32, of a few tokens at a time; on the table's device."""
        chunks = self.chunks(rows_Nr.to(self.device), x_ND.to(self.device))
        return torch.cat([torch.einsum("nd,nrd->nr", x_nD, rows_nrD) for rows_nrD, x_nD in chunks])


class HashLayer(nn.Module):
    """y = sum over tables of p(z) * T[h(z)]: z a chunk of the input, h its signs, p(z) the score of its bucket.

    MemoryFormer (Ding et al. 2024), sec. 2.2. Signs and scores are taken in fp32.
    """

    def __init__(self, config: PkmlmConfig, dim: int, width: int, bits: int):
        super().__init__()
        self.tables, self.bits = dim // bits, bits
        self.temperature, self.scaled = config.hash["temperature"], config.hash["score"] == "scaled"
        self.values = Values(config, self.tables << bits, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            z_NKb = x_BTD.float().reshape(-1, self.tables, self.bits)
            codes_NK = ((z_NKb >= 0).long() << torch.arange(self.bits, device=x_BTD.device)).sum(-1)
            rows_NK = codes_NK + (torch.arange(self.tables, device=x_BTD.device) << self.bits)
            scores_NK = torch.exp(-softplus(-2 / self.temperature * z_NKb.abs()).sum(-1))
            if self.scaled:
                scores_NK = scores_NK * z_NKb.abs().sum(-1)
            return self.values(rows_NK, scores_NK).view(*x_BTD.shape[:-1], -1).to(x_BTD.dtype)


class MemoryBlock(nn.Module):
    """Two hash layers in place of an FFN, with a LayerNorm between."""

    def __init__(self, config: PkmlmConfig):
        super().__init__()
        bits = config.hash["bits"] + config.hash["extra_bits"]
        wide = bits * (config.dim // config.hash["bits"])
        self.first = HashLayer(config, config.dim, wide, config.hash["bits"])
        self.norm = nn.LayerNorm(wide)
        self.second = HashLayer(config, wide, config.dim, bits)
        self.gelu = config.hash["activation"] == "gelu"

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTW = self.first(x_BTD)
        return self.second(self.norm(gelu(h_BTW) if self.gelu else h_BTW))


class QueryBatchNorm(nn.Module):
    """Batch normalisation with the running statistics, in fp32; training does not change them either."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(features)), nn.Parameter(torch.empty(features))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))

    def forward(self, x_NF: Tensor) -> Tensor:
        mean_F, var_F = self.running_mean.float(), self.running_var.float()
        return (x_NF - mean_F) * torch.rsqrt(var_F + 1e-5) * self.weight.float() + self.bias.float()


class Query(nn.Module):
    """Queries (N, H, q) of a memory, in fp32: a linear map, or two with a ReLU between, then a normalisation."""

    def __init__(self, dim: int, memory: dict[str, Any]):
        super().__init__()
        self.heads, self.key_dim, self.kind = memory["heads"], memory["key_dim"], memory["query_norm"]
        last = nn.Linear(dim, self.heads * self.key_dim)
        self.map = last if memory["query"] == "linear" else nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), last)
        self.norm: nn.Module = {
            "batch": lambda: QueryBatchNorm(self.heads * self.key_dim),
            "layer": lambda: nn.LayerNorm(self.key_dim),
            "rms": lambda: nn.RMSNorm(self.key_dim, eps=1e-6),
            "none": nn.Identity,
        }[self.kind]()

    def forward(self, x_ND: Tensor) -> Tensor:
        q_NF = self.map(x_ND.to(next(self.map.parameters()).dtype)).float()
        shape = (-1, self.heads * self.key_dim) if self.kind == "batch" else (-1, self.heads, self.key_dim)
        weights = {name: parameter.float() for name, parameter in self.norm.named_parameters()}
        return functional_call(self.norm, weights, q_NF.view(shape)).view(-1, self.heads, self.key_dim)


class KeyNorm(nn.Module):
    """Root-mean-square normalisation of keys and of the query parts compared with them, with a gain each, in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.query_gain_f, self.key_gain_f = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, q_NHq: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        width = self.key_gain_f.shape
        q_NHjf = rms_norm(q_NHq.unflatten(-1, (-1, *width)), width, self.query_gain_f.float(), 1e-6)
        return q_NHjf.flatten(2), rms_norm(keys, width, self.key_gain_f.float(), 1e-6)


class Pool(nn.Module):
    """The tables of one memory or, if the model owns the pool, of all memories, which share them."""

    def __init__(self, config: PkmlmConfig):
        super().__init__()
        memory, slots = config.memory, config.memory["num_keys"] ** 2
        if memory["kind"] == "peer":
            self.inputs = Values(config, slots, config.dim)
        self.values = Values(config, slots, memory["value_dim"] or config.dim)


class KeyMemory(nn.Module):
    """The weighted sum of the values of each head's k best slots, found among product keys or flat keys.

    Product-key memory (Lample et al. 2019), sec. 3, with what Memory+ adds to it (Berges et al. 2024): y = W2 (m *
    silu(W1 x)); or PEER (He 2024), where <u, x> of a slot, after an activation, multiplies its weight. Search and
    weights are in fp32.

    Args:
        pool: the tables that all memories share; None: it has its own.
    """

    inputs: Values
    values: Values

    def __init__(self, config: PkmlmConfig, pool: Pool | None = None):
        super().__init__()
        memory = config.memory
        heads, n, width = memory["heads"], memory["num_keys"], memory["key_dim"]
        self.topk, self.scores = memory["topk"], memory["scores"]
        self.query = Query(config.dim, memory)
        if memory["kind"] == "flat-key":
            self.keys_HKq = nn.Parameter(torch.empty(heads, n * n, width))
        else:
            self.subkeys_H2nf = nn.Parameter(torch.empty(heads, 2, n, width // 2))
        self.select = self.flat_keys if memory["kind"] == "flat-key" else self.product_keys
        if pool is None:
            for name, table in Pool(config).named_children():
                self.add_module(name, table)
        else:  # plain attributes: the model owns the modules
            self.__dict__.update(pool.named_children())
        self.activation = None
        if memory["kind"] == "peer":
            self.activation = gelu if memory["expert"] == "gelu" else relu
        key_width = width if memory["kind"] == "flat-key" else width // 2
        self.key_norm = KeyNorm(key_width) if memory["key_norm"] == "rms" else None
        values = memory["value_dim"] or config.dim
        gated = memory["gate"] == "silu"
        self.gate = nn.Linear(config.dim, values) if gated else None
        self.output = nn.Linear(values, config.dim) if gated or values != config.dim else None

    def normed(self, q_NHq: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        return (q_NHq, keys.float()) if self.key_norm is None else self.key_norm(q_NHq, keys.float())

    def product_keys(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and slots (N, H, k) of the best of all n^2 pairs of sub-keys.

        Only pairs of ranks with (a + 1)(b + 1) <= k can be among the k best sums of two sorted lists.
        """
        heads, _, n, f = self.subkeys_H2nf.shape
        q_NHq, subkeys_H2nf = self.normed(q_NHq, self.subkeys_H2nf)
        q_2HNf = q_NHq.view(-1, heads, 2, f).permute(2, 1, 0, 3).contiguous()
        scores_2Rn = (q_2HNf @ subkeys_H2nf.transpose(0, 1).transpose(-1, -2)).flatten(1, 2)
        best_2Rk = [top_k(scores_Rn, min(n, self.topk)) for scores_Rn in scores_2Rn]
        ranks = [(a, b) for a in range(min(n, self.topk)) for b in range(min(n, self.topk // (a + 1)))]
        a, b = torch.tensor(ranks, device=q_NHq.device).unbind(1)
        i_Rc, j_Rc = best_2Rk[0][:, a], best_2Rk[1][:, b]
        sums_Rc = scores_2Rn[0].gather(1, i_Rc) + scores_2Rn[1].gather(1, j_Rc)
        chosen_Rk = top_k(sums_Rc.detach(), self.topk)
        slots_Rk = (i_Rc * n + j_Rc).gather(1, chosen_Rk)
        scores_HNk, slots_HNk = (x.view(heads, -1, self.topk) for x in (sums_Rc.gather(1, chosen_Rk), slots_Rk))
        return scores_HNk.transpose(0, 1), slots_HNk.transpose(0, 1)

    def flat_keys(self, q_NHq: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and slots (N, H, k) of the best of all keys, a few tokens at a time."""
        q_NHq, keys_HKq = self.normed(q_NHq, self.keys_HKq)
        found = []
        for head, keys_Kq in enumerate(keys_HKq):
            for q_Cq in q_NHq[:, head].contiguous().split(max(1, SCORES // len(keys_Kq))):
                scores_CK = q_Cq @ keys_Kq.T
                slots_Ck = top_k(scores_CK.detach(), self.topk)
                found.append((scores_CK.gather(1, slots_Ck), slots_Ck))
        scores_HNk, slots_HNk = (
            torch.cat(part).view(len(self.keys_HKq), -1, self.topk) for part in zip(*found, strict=True)
        )
        return scores_HNk.transpose(0, 1), slots_HNk.transpose(0, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        with torch.autocast(x_BTD.device.type, enabled=False):
            scores_NHk, slots_NHk = self.select(self.query(x_ND))
            slots_Nr, weights_Nr = slots_NHk.flatten(1), WEIGHTS[self.scores](scores_NHk).flatten(1)
            if self.activation is not None:
                products_Nr = self.inputs.products(x_ND.float(), slots_Nr).to(x_ND.device)
                weights_Nr = weights_Nr * self.activation(products_Nr)
            out_NV = self.values(slots_Nr, weights_Nr).to(x_ND.device)
            if self.gate is not None:
                out_NV = out_NV * silu(self.gate(x_ND.to(self.gate.weight.dtype)))
            if self.output is not None:
                out_NV = self.output(out_NV.to(self.output.weight.dtype))
            return out_NV.view_as(x_BTD).to(x_BTD.dtype)
