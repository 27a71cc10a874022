"""The names of the files in which a run keeps what was measured: RUN/eval/*.json and RUN/usage/*."""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pkmlm.errors import UserError
from pkmlm.runs.shapes import read_shaped

NAME_BYTES = 100  # of the name of a text or of tasks


def text_name(name: str, sha256: str, separator: str | None, field: str) -> str:
    """How the results of a text are called: other texts may have its name, so a digest of its bytes and of how they
    were read is part of it.
    """
    return f"text-{file_part(name)}-{digest(json.dumps([sha256, separator, field]))}"


def split_name(folder: Path, split: str, key: str, sha256: str) -> str:
    """How the results of a split of other tokens than the recipe names (`--data`) are called.

    They have the split's name, which `pkmlm compare` looks for, unless `folder` already holds results of other tokens
    under it: then a digest is added.

    Args:
        folder: where the results are kept.
        key: of the sha256 of the tokens in the "source" of results.
        sha256: of the tokens that are measured.
    """
    kept = set()
    for file in folder.glob("*.json"):
        if file.name.startswith(f"{split}-step-"):
            with suppress(UserError):  # damaged, or written before results had a source
                kept.add(read_shaped(file, {"source": {key: (str,)}}, "the results")["source"][key])
    return split if not kept or sha256 in kept else f"{split}-{sha256[:8]}"


def perplexity_file(name: str, step: int, stride: int | None) -> str:
    """The file of a perplexity.

    Args:
        name: of the split, or what `text_name` or `split_name` made of it.
        stride: None: the model's context.
    """
    return f"{name}-step-{step}" + (f"-stride-{stride}" if stride else "") + ".json"


def tasks_file(record: dict[str, Any]) -> str:
    """The file of a record of zero-shot tasks; `pkmlm compare` reads those without a limit."""
    names = "-".join(record["tasks"])
    part = file_part(names)
    if part != names:
        part += f"-{digest(names)}"
    shots = max(facts["num_fewshot"] for facts in record["tasks"].values())
    few = f"-shots-{shots}" if shots else ""
    limit = record["harness"]["limit"]
    return f"tasks-{part}{few}-step-{record['step']}" + (f"-limit-{limit}" if limit else "") + ".json"


def file_part(name: str) -> str:
    """A name without blanks and signs that mean something to a shell, cut to what a file's name can hold."""
    return re.sub(r"[^\w.-]+", "_", name).encode(errors="ignore")[:NAME_BYTES].decode(errors="ignore")


def digest(text: str) -> str:
    """Eight characters that tell names apart of which not all could be kept."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]
