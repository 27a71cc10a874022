"""What a configuration of transformers asks for, key by key: each is read, known to mean nothing here, or refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

from pkmlm.errors import UserError, printable

# Keys that say nothing of what the model computes: how it was made, is trained, generated from and stored.
SILENT = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "classifier_dropout"),
    *("pretraining_tp", "gradient_checkpointing", "torchscript", "output_attentions", "output_hidden_states"),
    *("return_dict", "chunk_size_feed_forward", "problem_type", "id2label", "label2id", "finetuning_task"),
    *("task_specific_params", "is_decoder", "prefix", "tokenizer_class", "_attn_implementation_autoset"),
    *("max_length", "num_return_sequences", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
    "trained",  # what pkmlm says of an export
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
}
HINT = "pkmlm has no such part: use a model without it, or attach a memory to this one in Python (pkmlm help attach)"


class Asked:
    """The keys of a config.json, read one by one; what is left at the end is refused.

    Args:
        config: its content.
        file: its path, for errors.
    """

    def __init__(self, config: Mapping[str, Any], file: str):
        self.config, self.file = config, file
        self.left = {key for key, value in config.items() if key not in SILENT and says_something(value)}

    def value(self, key: str, default: Any = None) -> Any:
        """What a key says; the default where it is missing or null."""
        self.left.discard(key)
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

    def refuse_rest(self) -> None:
        """Refuse keys that nobody has read.

        Raises:
            UserError: there is one.
        """
        if self.left:
            key = min(self.left)
            raise UserError(
                f"{self.file}: {printable(key)[:100]}: found {self.shown(key)} (expected no such key)", HINT
            )


def says_something(value: Any) -> bool:
    """Whether a value asks for anything: null, false, 0, 1.0 and what is empty do not."""
    return value is True or (bool(value) and value != 1.0)


def rotary(asked: Asked, base: float, share: float = 1.0) -> dict[str, Any]:
    """The keys of rotary positions: their base, the share of a head that rotates, and how they are scaled. They stand
    in `rope_parameters`, or by themselves with `rope_scaling`, as earlier releases write them.

    Args:
        base, share: the architecture's defaults.

    Raises:
        UserError: the scaling is of a kind that is not known here.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(asked.value(key, {}), dict):
            asked.refuse(key, "an object, or null")
    inner = {**asked.value("rope_parameters", {}), **asked.value("rope_scaling", {})}
    flat = ("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct")
    given = {key: found for key in flat if (found := asked.value(key)) is not None}
    rope = Asked({**given, **inner}, f"{asked.file}: rope")
    kind = rope.value("type") or rope.value("rope_type") or "default"
    rope.value("rope_type")
    keys: dict[str, Any] = {
        "rotary_base": rope.number("rope_theta", rope.number("rotary_emb_base", base)),
        "rotary_fraction": rope.number("partial_rotary_factor", rope.number("rotary_pct", share)),
    }
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"{rope.file}_type: found {kind!r} (expected default, linear or llama3)", HINT)
    if kind != "default":
        keys["rotary_scaling"] = {"kind": kind, "factor": rope.number("factor", 1.0)}
    if kind == "llama3":
        keys["rotary_scaling"] |= {
            "low": rope.number("low_freq_factor", 1.0),
            "high": rope.number("high_freq_factor", 4.0),
            "context": rope.size("original_max_position_embeddings"),
        }
    rope.refuse_rest()
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
