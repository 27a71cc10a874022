"""What must be true of JSON that a run's files hold, before anything is computed from it."""

import math
from pathlib import Path
from typing import Any

from pkmlm.errors import UserError
from pkmlm.runs.files import read_json

# A shape is a tuple of types (none of its numbers may be infinite); [shape], a list of such; {str: shape}, an object of
# such; or {"key": shape, ...}, an object in which these keys have such values: it may have others, and a key that ends
# with "?" may be missing or null.
Shape = Any
NUMBER = (int, float)
MAYBE = (int, float, type(None))
SCORES: Shape = {f"{key}?": NUMBER for key in ("token_ppl", "word_ppl", "bits_per_byte")}
MEASURE: Shape = {"usage": MAYBE, "kl": MAYBE}

# Events of metrics.jsonl.
EVENT: Shape = {
    "event": (str,),
    "step": (int,),
    **{f"{key}?": NUMBER for key in ("loss", "lr", "grad_norm", "tokens", "tokens_per_second", "since", "began")},
    **SCORES,
    "usage?": [{"layer": (int,), "name": (str,), "usage": NUMBER, "kl?": NUMBER, "uniform": {"usage": NUMBER}}],
}
DRIFT: Shape = {
    **EVENT,
    "since": (int,),
    "began": (int,),
    "memories": [
        {
            "layer": (int,),
            "name": (str,),
            "moved?": NUMBER,
            **dict.fromkeys(("slots", "read", "died", "woke", "never"), (int,)),
        }
    ],
}
# run.json.
FACTS: Shape = {
    "status?": (str,),
    "exit_code?": (int,),
    "parameters?": {str: NUMBER},
    "tokenizer_sha256?": (str,),
    "data_sha256?": (str,),
    "versions?": {str: (str,)},
    "device?": (str,),
    "precision?": (str,),
    "seconds?": NUMBER,
    "earlier?": [{}],
}
# RUN/eval/*.json.
RESULTS: Shape = {
    "perplexity?": SCORES,
    "source?": {"sha256?": (str,)},
    "tasks?": {str: {"acc?": NUMBER, "num_fewshot?": NUMBER, "data?": {"sha256?": (str,)}}},
}
# RUN/usage/*.json.
USAGE: Shape = {
    "memories": [
        {
            "layer": (int,),
            "name": (str,),
            "slots": NUMBER,
            "mass": {**MEASURE, "gini": MAYBE},
            "uniform": MEASURE,
            "uniform_mass?": MEASURE,
        }
    ]
}
# state.json of a checkpoint: what `pkmlm compare` needs of it.
STATE: Shape = {"seconds": NUMBER, "data?": {str: (str,)}}


def misfit(value: Any, shape: Shape, where: str = "") -> str:
    """What of a JSON value is not of a shape, with the path to it; nothing where all is."""
    if isinstance(shape, tuple):
        fits = type(value) in shape and not (isinstance(value, float) and not math.isfinite(value))
        return "" if fits else f"{where or 'it'} is {str(value)[:40]!r}"
    if not isinstance(value, type(shape)):
        return f"{where or 'it'} is {str(value)[:40]!r}"
    if isinstance(shape, list):
        inner = [(part, shape[0], f"{where}[{place}]") for place, part in enumerate(value)]
    elif str in shape:
        inner = [(part, shape[str], f"{where}.{key[:40]}") for key, part in value.items()]
    else:
        keys = {key.removesuffix("?"): (key, kind) for key, kind in shape.items()}
        if lacking := [name for name, (key, _) in keys.items() if name == key and name not in value]:
            return f"{where or 'it'} has no {lacking[0]}"
        given = [(name, kind) for name, (key, kind) in keys.items() if name == key or value.get(name) is not None]
        inner = [(value[name], kind, f"{where}.{name}") for name, kind in given]
    return next(filter(None, (misfit(*each) for each in inner)), "").removeprefix(".")


def read_shaped(path: Path, shape: Shape, what: str, hint: str = "it is damaged: make it again") -> Any:
    """`read_json` of a file whose content has a shape.

    Raises:
        UserError: (exit code 1) it is missing, unreadable, no JSON, or of another shape.
    """
    value = read_json(path, what, hint, exit_code=1)
    if problem := misfit(value, shape):
        raise UserError(f"{what} {path} is not as it was written: {problem}", hint, exit_code=1)
    return value
