"""N-gram memories in a model of `transformers`: finds the tokens that it is called with, and those before each.

What is found belongs to a call: it is kept in a context variable, not on a module, so that threads and nested calls do
not meet each other's tokens.

B: sequences; T: new positions; S: all positions so far; X: entries of a position.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pkmlm.errors import UserError
from pkmlm.memory.ngram.layer import NGramIds, Past
from pkmlm.recipe.schema import NGram

CACHES = ("cache", "past_key_values")  # what a network calls its cache; the first since transformers 5.24
# What the calls that are running in this thread have found, by the ids that found it.
CALLS: ContextVar[Mapping["HostIds", Past]] = ContextVar("CALLS", default=MappingProxyType({}))


class HostHistory:
    """Keeps what depends on earlier positions in extra layers of a cache of transformers, so that whatever is done to
    the cache (reordering, cropping, copying) is done to them, too.

    Args:
        cache: holds what earlier forwards have left; None: there is no cache, or not yet.
        owner: distinguishes what several attachments keep in one cache.
    """

    def __init__(self, cache: Any, owner: str):
        self.cache, self.owner = cache, owner
        self._new: dict[str, Tensor] = {}

    def append(self, name: str, x_BT: Tensor) -> Tensor:
        """Take new positions (B, T, ...), for `keep`; return all so far (B, S, ...)."""
        self._new[name] = x_BT
        before_BSX = self.before(name)
        if before_BSX is None:
            return x_BT
        return torch.cat([before_BSX.reshape(*before_BSX.shape[:2], *x_BT.shape[2:]), x_BT], 1)

    def before(self, name: str) -> Tensor | None:
        """The positions that the cache has, (B, S, X); None: it has none."""
        layer = self._layer(name)
        return None if layer is None else layer.keys[:, 0]

    def keep(self, output: Any) -> None:
        """Add the new positions to the cache: to that which the network has made, if it was called without one."""
        from transformers.cache_utils import DynamicLayer

        if self.cache is None:
            parts = output.values() if isinstance(output, dict) else output
            self.cache = next((each for each in parts if hasattr(each, "get_seq_length")), None)
        for name, x_BT in self._new.items() if self.cache is not None else ():
            layer = self._layer(name)
            if layer is None:
                layer = DynamicLayer()
                layer.pkmlm = f"{self.owner}.{name}"
                self.cache.layers.append(layer)
            x_B1TX = x_BT.reshape(len(x_BT), 1, x_BT.shape[1], -1)
            layer.update(x_B1TX, x_B1TX[..., :1])

    def _layer(self, name: str) -> Any:
        layers = () if self.cache is None else self.cache.layers
        return next((each for each in layers if getattr(each, "pkmlm", None) == f"{self.owner}.{name}"), None)


class HostIds(NGramIds):
    """Finds what the n-gram memories of an attachment need to know about the tokens of a call.

    Args:
        vocab_size, spec: as for `NGramIds`.
        owner: the attachment's name among those of its network.
    """

    def __init__(self, vocab_size: int, spec: NGram, owner: str):
        super().__init__(vocab_size, spec)
        self.owner = owner

    def read(self, named: Mapping[str, Any]) -> Past:
        """What the memories need, from the arguments of a call.

        Raises:
            UserError: there are no ids, the mask is not (B, S), or the cache is static or has unseen positions.
        """
        ids_BT, mask = named.get("input_ids"), named.get("attention_mask")
        if ids_BT is None:
            raise UserError("input_ids is None (n-gram memories need tokens)", "give input_ids, not inputs_embeds")
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        if getattr(cache, "is_compileable", False):  # layers that grow would change its masks
            message = f"the cache is a static {type(cache).__name__} (expected one that grows)"
            raise UserError(message, "call generate without cache_implementation, or with use_cache=False")
        history = HostHistory(cache, self.owner)
        before_BSX = history.before("ids")
        known = 0 if before_BSX is None else before_BSX.shape[1]
        seen = 0 if cache is None else int(cache.get_seq_length())
        if seen != known:
            message = f"the cache holds {seen} positions, of which the n-gram memory has seen {known}"
            raise UserError(message, "start with an empty cache")
        expected = (len(ids_BT), known + ids_BT.shape[1])
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != expected):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            message = f"attention_mask is {shape} (expected {expected}: n-gram memories take one that marks padding)"
            raise UserError(message)
        # A token sees nothing of the one before if that is padding, or if its position does not follow on it: there,
        # another packed document begins.
        follows_BS = pad(positions(named.get("position_ids"), ids_BT, history).diff() == 1, (0, 1), value=True)
        return self(ids_BT, history, None, follows_BS if mask is None else follows_BS & mask.bool())


def positions(given: object, ids_BT: Tensor, history: HostHistory) -> Tensor:
    """The positions of all tokens so far (B, S): new ones as they are given or, if they are not, following on those
    before. (Positions with several axes, (3, B, T), are those of pictures, and say nothing about documents.)
    """
    if isinstance(given, Tensor) and given.ndim == 2:
        return history.append("positions", given.to(ids_BT.device).expand_as(ids_BT))
    before_BSX = history.before("positions")
    first = 0 if before_BSX is None else before_BSX[:, -1] + 1
    return history.append("positions", (torch.arange(ids_BT.shape[1], device=ids_BT.device) + first).expand_as(ids_BT))


class ForwardWithIds:
    """The forward of a network that maps ids to hidden states; while it runs, n-gram memories know the ids.

    Args:
        network: has such a forward.
        ids: those of the n-gram memories.
    """

    def __init__(self, network: nn.Module, ids: Sequence[HostIds]):
        self.forward, self.ids = network.forward, ids

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the network's own forward, at which transformers looks."""
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the network."""
        named = {**dict(zip(self.__signature__.parameters, args, strict=False)), **options}
        found = {ids: ids.read(named) for ids in self.ids}
        token = CALLS.set({**CALLS.get(), **found})
        try:
            output = self.forward(*args, **options)
        finally:  # also if the call is interrupted
            CALLS.reset(token)
        for past in found.values():
            assert isinstance(past.cache, HostHistory)
            past.cache.keep(output)
        return output
