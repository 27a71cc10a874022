"""What a configuration of transformers asks for, key by key.

An architecture reads the keys that say what it computes, and refuses those of them that our model cannot follow. All
others are ignored: its class in transformers does not know them, or they say how the model is trained or stored.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from pkmlm.errors import UserError, printable

EVERYWHERE = (
    # What every class knows and changes what it computes: code of its own, layers of other sizes, coded weights.
    *("auto_map", "per_layer_config", "quantization_config", "is_encoder_decoder"),
    # Parts that none of these architectures has: whoever asks for them means another model.
    *("attn_logit_softcapping", "final_logit_softcapping", "num_experts", "num_local_experts"),
)
HINT = "pkmlm has no such part: use a model without it, or attach a memory to this one in Python (pkmlm help attach)"


class Asked:
    """The keys of a config.json, read one by one.

    Args:
        config: its content.
        file: its path, for errors.
    """

    def __init__(self, config: Mapping[str, Any], file: str):
        self.config, self.file = config, file

    def value(self, key: str, default: Any = None) -> Any:
        """What a key says; the default where it is missing or null."""
        found = self.config.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more.

        Raises:
            UserError: (exit code 2) it is something else, or missing without a default.
        """
        found = self.value(key, default)
        if type(found) is not int or not 1 <= found < 2**31:
            self.refuse(key, "a whole number of 1 or more", hint="")
        return int(found)

    def number(self, key: str, default: float) -> float:
        """A positive number.

        Raises:
            UserError: it is something else.
        """
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            self.refuse(key, "a number above 0", hint="")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            UserError: it is something else.
        """
        found = self.value(key, default)
        if not isinstance(found, bool):
            self.refuse(key, "true or false", hint="")
        return bool(found)

    def one_of(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """What a word means here.

        Args:
            names: the words that are known, with their meanings.

        Raises:
            UserError: it is another word.
        """
        found = self.value(key, default)
        if not isinstance(found, str) or found not in names:
            self.refuse(key, " or ".join(names))
        return names[found]

    def refuse(self, key: str, expected: str, hint: str = HINT) -> None:
        """Refuse what a key says.

        Raises:
            UserError: always.
        """
        raise UserError(f"{self.file}: {key}: found {self.shown(key)} (expected {expected})", hint)

    def shown(self, key: str) -> str:
        """What a key says, for errors."""
        return printable(json.dumps(self.config.get(key)))[:100]

    def without(self, *keys: str) -> None:
        """Refuse keys that say anything but null, false, 0 or an empty list or object.

        Raises:
            UserError: one does.
        """
        for key in keys:
            if self.value(key):
                self.refuse(key, "no such key")


def rotary(
    asked: Asked, base: str = "rope_theta", share: str = "partial_rotary_factor", part: float = 1
) -> dict[str, Any]:
    """The keys of rotary positions: their base, the share of a head that rotates, and how they are scaled. They stand
    in `rope_parameters` or, as earlier releases write them, in `rope_scaling` beside keys of their own.

    Args:
        base, share: the architecture's names of such keys.
        part: the share where nothing is said; 1: the architecture knows no other.

    Raises:
        UserError: the scaling is of a kind that is not known here.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(asked.value(key, {}), dict):
            asked.refuse(key, "an object, or null")
    first = "original_max_position_embeddings"
    inner = asked.value("rope_scaling") or asked.value("rope_parameters", {})
    flat = {"rope_theta": asked.value(base), "partial_rotary_factor": asked.value(share)}
    length = asked.value(first, inner.get(first, asked.value("max_position_embeddings")))
    rope = Asked({**flat, **inner, first: length}, f"{asked.file}: rope")
    rope.without("full_attention", "sliding_attention")  # other positions in some of the layers
    kind = rope.value("rope_type") or rope.value("type") or "default"
    keys: dict[str, Any] = {
        "rotary_base": rope.number("rope_theta", 10_000.0),
        "rotary_fraction": rope.number("partial_rotary_factor", part),
    }
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"{rope.file}_type: found {kind!r} (expected default, linear or llama3)", HINT)
    if part == 1 != keys["rotary_fraction"]:
        rope.refuse("partial_rotary_factor", "1")
    if kind != "default":
        keys["rotary_scaling"] = {"kind": kind, "factor": rope.number("factor", 1.0)}
    if kind == "llama3":
        keys["rotary_scaling"] |= {
            "low": rope.number("low_freq_factor", 1.0),
            "high": rope.number("high_freq_factor", 4.0),
            "context": rope.size(first),
        }
    return keys


def rope_of(keys: Any) -> dict[str, Any]:
    """`rope_parameters` of a model's section of a recipe."""
    scaling, found = keys.rotary_scaling, {"rope_theta": keys.rotary_base, "rope_type": "default"}
    if scaling.kind != "none":
        found |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        found |= {"original_max_position_embeddings": scaling.context}
    return found
