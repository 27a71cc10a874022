"""What memories that look rows up by the tokens need to know of them: ids, and which token each one sees before it.

B: sequences; T: new positions; S: all positions so far; N: tokens (B * T); G: largest order; j: positions that are read
back; V: vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pkmlm.memory.base import Tap
from pkmlm.memory.init import Counting, InitSpec
from pkmlm.memory.spec import Lookback


class History(Protocol):
    """Keeps what depends on earlier positions."""

    def append(self, name: str, x_BT: Tensor) -> Tensor:
        """Keep new positions, (B, T, ...), under a name; return all of its positions so far, (B, S, ...)."""


class Past(NamedTuple):
    """The tokens that each new token sees before it.

    A document sees nothing before the end-of-document token with which it begins; a choice of a question, nothing of
    other choices.

    Attributes:
        ids_BTG: ids of the token itself, the one before it, and so on; 0: there is none.
        places_BTj: the place of the token itself, counted from 1 among all positions so far, then of the one before it,
            and so on; 0: there is none.
        cache: holds what the layers have computed for earlier positions; None: all positions are new.
        begins_BS: which positions so far begin a document.
    """

    ids_BTG: Tensor
    places_BTj: Tensor
    cache: History | None
    begins_BS: Tensor

    def earlier(self, name: str, x_BTD: Tensor, places_BTi: Tensor) -> list[Tensor]:
        """What new positions x (B, T, D), and those before them, hold at i places, each (B, T, D); zero at place 0.

        Args:
            name: under which the cache keeps the positions.
        """
        if self.cache is None:
            return at_places(x_BTD, places_BTi)
        return at_few_places(self.cache.append(name, x_BTD), places_BTi)


class TokenIds(nn.Module):
    """Finds, once per forward, what memories need to know about the tokens.

    Args:
        vocab_size: V.
        lookback: what each of these memories needs; all of the same ids.
        name: under which a cache keeps the ids.

    Attributes:
        ids_V: the id of each token, see `pkmlm.data.canonical`; 0: the token begins a document. It is the token's own
            number until training sets the tokenizer's, which a checkpoint holds.
        order: the most tokens that choose a row (G).
        back: the most positions that are read before the token's own.
        tap: tells of the new tokens' n-grams: ids (N, G), as in `Past`.
    """

    ids_V: Tensor

    def __init__(self, vocab_size: int, lookback: Iterable[Lookback], name: str = "ids"):
        super().__init__()
        every = tuple(lookback)
        self.order, self.back = max(each.order for each in every), max(each.back for each in every)
        self.name = name
        self.register_buffer("ids_V", torch.arange(vocab_size))
        self.tap = Tap()

    def init_spec(self) -> dict[str, InitSpec]:
        return {"ids_V": Counting()}

    def forward(
        self,
        tokens_BT: Tensor,
        cache: History | None,
        layout: tuple[Tensor, Tensor] | None,
        mask_BS: Tensor | None = None,
    ) -> Past:
        """The tokens before each token.

        Args:
            tokens_BT, cache, layout: those of `Transformer.hidden`.
            mask_BS: which positions so far are tokens, not padding; None: all.
        """
        ids_BS = self.ids_V[tokens_BT]
        if cache is not None:
            ids_BS = cache.append(self.name, ids_BS)
        total = ids_BS.shape[1]
        places_S = torch.arange(1, total + 1, device=ids_BS.device)
        if layout is None:
            before_BS = (places_S - 1).expand_as(ids_BS)
        else:  # the token that is attended to at the position before
            at_BS, mask_BSS = layout
            parent_BSS = mask_BSS & (at_BS[:, None, :] == at_BS[:, :, None] - 1)
            before_BS = (parent_BSS * places_S).sum(-1)
        before_BS = before_BS.masked_fill(ids_BS == 0, 0)
        if mask_BS is not None:  # no token sees padding
            before_BS = before_BS * pad(mask_BS[:, :-1].bool(), (1, 0))
        before_BZ, ids_BZ = (pad(x_BS, (1, 0)) for x_BS in (before_BS, ids_BS))  # from place 0 on
        place_BT = places_S[total - tokens_BT.shape[1] :].expand_as(tokens_BT)
        places = [place_BT]
        for _ in range(self.back):
            places.append(before_BZ.gather(1, places[-1]))
        ids_BTG = torch.stack([ids_BZ.gather(1, place) for place in places[: self.order]], -1)
        self.tap.tell(ids_BTG.flatten(0, 1))
        return Past(ids_BTG, torch.stack(places, -1), cache, ids_BS == 0)


def at_places(x_BSD: Tensor, places_BTi: Tensor) -> list[Tensor]:
    """x at i places, counted from 1, each (B, T, D); zero at place 0."""
    x_BZD = pad(x_BSD, (0, 0, 1, 0))  # from place 0 on
    places_BTi = places_BTi + (torch.arange(len(x_BZD), device=x_BSD.device) * x_BZD.shape[1])[:, None, None]
    x_ZD, shape = x_BZD.flatten(0, 1), (*places_BTi.shape[:2], x_BSD.shape[-1])
    return [x_ZD.index_select(0, place_BT.flatten()).view(shape) for place_BT in places_BTi.unbind(-1)]


def at_few_places(x_BSD: Tensor, places_BTi: Tensor) -> list[Tensor]:
    """As `at_places`, but without copying x, which may be a cache of thousands of positions."""
    batch_B1 = torch.arange(len(x_BSD), device=x_BSD.device)[:, None]
    return [
        x_BSD[batch_B1, (place_BT - 1).clamp(min=0)].masked_fill((place_BT == 0)[..., None], 0)
        for place_BT in places_BTi.unbind(-1)
    ]
