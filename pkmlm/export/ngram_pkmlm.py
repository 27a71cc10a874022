"""The n-gram memories of a pkmlm model for `transformers`. Part of an exported model: it stands alone.

B: sequences; T: new positions; S: all positions so far; Z: S + 1; D: model width; G: largest order; H: tables (orders *
heads); V: vocabulary; i: taps of the convolution; j: tokens back.
"""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers.cache_utils import DynamicLayer

from .configuration_pkmlm import PkmlmConfig
from .memory_pkmlm import Values

TAPS = 4


class History(NamedTuple):
    """Keeps what depends on earlier positions, in layers of the cache beyond those of attention, so that whatever is
    done to a cache (reordering, cropping, copying) is done to it too.

    Attributes:
        cache: a `Cache`; None: there are no earlier positions.
        layers: the number of attention layers.
    """

    cache: Any
    layers: int

    def append(self, place: int, x_BTX: Tensor) -> Tensor:
        """Add the new positions; return all positions so far (B, S, X)."""
        if self.cache is None:
            return x_BTX
        while len(self.cache.layers) <= self.layers + place:
            self.cache.layers.append(DynamicLayer())
        x_B1TX = x_BTX[:, None]
        return self.cache.layers[self.layers + place].update(x_B1TX, x_B1TX[..., :1])[0][:, 0]


class Past(NamedTuple):
    """The canonical ids and places of each new token and of those before it in its document; 0: no such token."""

    ids_BTG: Tensor
    places_BTj: Tensor
    history: History


class NGramIds(nn.Module):
    """Finds the tokens before each token. A token with canonical id 0 begins a document and sees nothing before it."""

    def __init__(self, config: PkmlmConfig):
        super().__init__()
        self.layers, self.order = config.layers, max(config.ngram["orders"])
        convolves = config.ngram["fusion"] == "gate" and config.ngram["conv"]
        self.back = (TAPS - 1) * self.order if convolves else self.order - 1
        self.canonical_V: Tensor
        self.register_buffer("canonical_V", torch.arange(config.vocab_size))

    def resize(self, size: int) -> str:
        """Resize the map to `size` tokens, a new token being its own canonical id; return the sha256 of the map."""
        kept_V = self.canonical_V[:size]
        self.canonical_V = torch.cat([kept_V, torch.arange(len(kept_V), size, device=kept_V.device)])
        return hashlib.sha256(self.canonical_V.cpu().numpy().astype("<i8").tobytes()).hexdigest()

    def forward(self, ids_BT: Tensor | None, mask: Tensor | None, cache: Any) -> Past:
        """What each token sees before it.

        Args:
            mask: the attention mask: (B, S), false for padding; or (B, 1, T, S), which keys each token sees.

        Raises:
            ValueError: no tokens.
        """
        if ids_BT is None:
            raise ValueError("n-gram memories read tokens: give input_ids, not inputs_embeds")
        history = History(cache, self.layers)
        ids_BS = history.append(0, self.canonical_V[ids_BT][..., None])[..., 0]
        total, new = ids_BS.shape[1], ids_BT.shape[1]
        places_S = torch.arange(1, total + 1, device=ids_BS.device)
        before_BS = (places_S - 1) * (ids_BS != 0)
        if mask is not None:
            before_BS = before_BS * sees_the_one_before(mask, total - new, total)
        ids_BZ, before_BZ = (nn.functional.pad(x_BS, (1, 0)) for x_BS in (ids_BS, before_BS))  # from place 0 on
        places = [places_S[total - new :].expand_as(ids_BT)]
        for _ in range(self.back):
            places.append(before_BZ.gather(1, places[-1]))
        ids = [ids_BZ.gather(1, place) for place in places[: self.order]]
        return Past(torch.stack(ids, -1), torch.stack(places, -1), history)


def sees_the_one_before(mask: Tensor, past: int, total: int) -> Tensor:
    """Whether the token at each position sees the one before it (B, S), by the attention mask."""
    if mask.ndim == 2:
        return nn.functional.pad(mask[:, : total - 1].bool(), (1, 0))
    seen_BTS = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, :, :total]
    before_T1 = torch.arange(past - 1, total - 1, device=mask.device).clamp(min=0)[:, None]
    of_new_BT = seen_BTS.gather(2, before_T1.expand(len(mask), -1, -1))[..., 0]
    of_old_BS = nn.functional.pad(seen_BTS[:, 0, :past], (1, 0))[:, :past]  # what the first new token sees is real
    return torch.cat([of_old_BS, of_new_BT], 1)


class NGramMemory(nn.Module):
    """What tables hold for the last 1 to G tokens, behind a gate (Engram, arXiv 2601.07372) or scaled by one factor."""

    def __init__(self, config: PkmlmConfig, place: int):
        super().__init__()
        ngram = config.ngram
        self.rows, self.tables = ngram["rows"], ngram["heads"] * len(ngram["orders"])
        self.multipliers_HG: Tensor
        self.register_buffer("multipliers_HG", torch.zeros(self.tables, max(ngram["orders"]), dtype=torch.int64))
        self.values = Values(config, self.tables * self.rows, ngram["row_dim"])
        gated = ngram["fusion"] == "gate"
        self.scale = None if gated else Scale()
        self.gate = NGramGate(self.tables * ngram["row_dim"], config.dim) if gated else None
        self.conv = CausalConv(config.dim, max(ngram["orders"]), place) if gated and ngram["conv"] else None

    def forward(self, x_BTD: Tensor, past: Past) -> Tensor:
        hash_BTH = past.ids_BTG[..., :1] * self.multipliers_HG[:, 0]
        for back in range(1, self.multipliers_HG.shape[1]):
            hash_BTH = hash_BTH ^ (past.ids_BTG[..., back : back + 1] * self.multipliers_HG[:, back])
        rows_BTH = hash_BTH % self.rows + torch.arange(self.tables, device=x_BTD.device) * self.rows
        with torch.autocast(x_BTD.device.type, enabled=False):
            if self.scale is not None:
                rows_NH = rows_BTH.flatten(0, 1)
                sum_ND = self.values(rows_NH, torch.ones(rows_NH.shape, device=x_BTD.device))
                return (sum_ND.float() * self.scale.factor_1.float()).view_as(x_BTD).to(x_BTD.dtype)
            assert self.gate is not None
            rows_BTW = self.values.rows(rows_BTH).flatten(-2)
            u_BTD = self.gate(x_BTD, rows_BTW)
            return (u_BTD if self.conv is None else self.conv(u_BTD, past)).to(x_BTD.dtype)


class Scale(nn.Module):
    """One factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor_1 = nn.Parameter(torch.empty(1))


class NGramGate(nn.Module):
    """u = sigmoid(sign(a) sqrt(|a|)) v, a the scaled product of the normed stream and the normed key; in fp32."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.maps = nn.Linear(width, 2 * dim)
        self.stream_norm, self.key_norm = nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)

    def forward(self, x_BTD: Tensor, rows_BTW: Tensor) -> Tensor:
        k_BTD, v_BTD = self.maps(rows_BTW.to(self.maps.weight.dtype)).float().chunk(2, -1)
        score_BT1 = (normed(x_BTD, self.stream_norm) * normed(k_BTD, self.key_norm)).sum(-1, keepdim=True)
        score_BT1 = score_BT1 * x_BTD.shape[-1] ** -0.5
        return torch.sigmoid(torch.copysign(score_BT1.abs().clamp(min=1e-6).sqrt(), score_BT1.detach())) * v_BTD


class CausalConv(nn.Module):
    """y = u + SiLU(sum over taps i of w[i] * RMS(u) at i * G tokens before), of the document's own tokens; in fp32."""

    def __init__(self, dim: int, dilation: int, place: int):
        super().__init__()
        self.dilation, self.place = dilation, place
        self.norm = nn.RMSNorm(dim, 1e-6)
        self.weight_iD = nn.Parameter(torch.empty(TAPS, dim))

    def forward(self, u_BTD: Tensor, past: Past) -> Tensor:
        n_BTD, weight_iD = normed(u_BTD, self.norm), self.weight_iD.float()
        n_BZD = nn.functional.pad(past.history.append(self.place, n_BTD), (0, 0, 1, 0))
        total_BTD = n_BTD * weight_iD[0]
        for tap in range(1, TAPS):
            seen_BT1 = past.places_BTj[..., tap * self.dilation, None]
            total_BTD = total_BTD + n_BZD.gather(1, seen_BT1.expand_as(u_BTD)) * weight_iD[tap]
        return u_BTD + silu(total_BTD)


def normed(x_BTD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Root-mean-square normalisation in fp32, whatever the dtype of the gains."""
    return rms_norm(x_BTD.float(), x_BTD.shape[-1:], norm.weight.float(), 1e-6)
