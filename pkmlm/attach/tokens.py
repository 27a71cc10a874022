"""The tokens that a model of `transformers` is called with, and those before each, for memories that need them.

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

from pkmlm.attach.hosts import text_config, vocabulary_of
from pkmlm.data.canonical import host_canonical_ids
from pkmlm.data.tokenizer import Tokenizer
from pkmlm.errors import UserError
from pkmlm.memory.spec import Lookback
from pkmlm.memory.tokens import Past, TokenIds

# What a network calls its cache: the first since transformers 5.24, the others before, or if it is recurrent.
CACHES = ("cache", "past_key_values", "cache_params", "state")
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


def host_ids(network: nn.Module, ids: str, tokenizer: Tokenizer | None) -> Tensor:
    """The ids of the tokens of a network, int64, (V,): "plain", or "canonical", which its tokenizer gives.

    Raises:
        UserError: the tokenizer is larger than the embedding, or no token begins or ends a document.
    """
    merging = tokenizer if ids == "canonical" else None
    return torch.from_numpy(host_canonical_ids(text_config(network), vocabulary_of(network), merging))


class HostIds(TokenIds):
    """Finds what an attached memory needs to know about the tokens of a call.

    Args:
        vocab_size: rows of the network's embedding (V).
        lookback: what the memory needs.
        owner: the attachment's name among those of its network.
    """

    def __init__(self, vocab_size: int, lookback: Lookback, owner: str):
        super().__init__(vocab_size, [lookback])
        self.ids, self.owner = lookback.ids, owner

    def found(self, device: torch.device) -> Past:
        """What was found for the call that is running, on a device.

        Raises:
            UserError: none is running.
        """
        past = CALLS.get().get(self)
        if past is None:
            message = "a block whose memory needs the tokens runs apart from its model (expected within its forward)"
            raise UserError(message, "turn gradient checkpointing off: model.gradient_checkpointing_disable()")
        return past._replace(ids_BTG=past.ids_BTG.to(device), places_BTj=past.places_BTj.to(device))

    def read(self, named: Mapping[str, Any]) -> Past:
        """What the memory needs, from the arguments of a call.

        Raises:
            UserError: there are no ids, the mask is not (B, S), or the cache is static or has unseen positions.
        """
        ids_BT, mask = named.get("input_ids"), named.get("attention_mask")
        if ids_BT is None:
            raise UserError("input_ids is None (the attached memory needs tokens)", "give input_ids, not inputs_embeds")
        cache = next((named[name] for name in CACHES if named.get(name) is not None), None)
        seen, history = positions_in(cache), HostHistory(cache, self.owner)
        before_BSX = history.before("ids")
        known = 0 if before_BSX is None else before_BSX.shape[1]
        if seen != known:
            message = f"the cache holds {seen} positions, of which the memory has seen {known}"
            raise UserError(message, "start with an empty cache")
        expected = (len(ids_BT), known + ids_BT.shape[1])
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != expected):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            message = f"attention_mask is {shape} (expected {expected}: the memory takes one that marks padding)"
            raise UserError(message)
        ids_BT = ids_BT.to(self.ids_V.device)
        # A token sees nothing of the one before if that is padding, or if its position does not follow on it: there,
        # another packed document begins.
        follows_BS = pad(positions(named.get("position_ids"), ids_BT, history).diff() == 1, (0, 1), value=True)
        try:
            return self(ids_BT, history, None, follows_BS if mask is None else follows_BS & mask.to(follows_BS))
        except IndexError:  # on a GPU, torch ends the process
            found = f"input_ids has ids from {ids_BT.min()} to {ids_BT.max()}"
            raise UserError(f"{found} (expected 0 to {len(self.ids_V) - 1}, the model's)") from None


def positions_in(cache: Any) -> object:
    """How many positions a cache holds; "earlier" ones, if it is a recurrent state, which does not say.

    Raises:
        UserError: it is static, or no cache of this kind.
    """
    if cache is None:
        return 0
    layers = getattr(cache, "layers", None)
    growing = [each for each in layers or () if hasattr(each, "get_seq_length")]  # others hold a recurrent state
    if layers is None or any(each.is_compileable for each in growing):  # our layers would change a static cache's masks
        message = f"the cache is a {type(cache).__name__} (expected a cache of transformers that grows)"
        raise UserError(message, "call generate without cache_implementation, or with use_cache=False")
    if growing:
        return cache.get_seq_length()
    return "earlier" if layers and cache.has_previous_state() else 0


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
    """The forward of a network that maps ids to hidden states; while it runs, memories know the tokens.

    Args:
        network: has such a forward.
        ids: those of the memories.
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
