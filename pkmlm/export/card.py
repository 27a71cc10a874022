"""The README.md of an exported model."""

from pathlib import Path
from typing import Any

from pkmlm.errors import printable
from pkmlm.export.config import Origin
from pkmlm.recipe.schema import Model, Recipe
from pkmlm.runs.directory import RunDirectory
from pkmlm.runs.results import perplexities


def card_of(
    recipe: Recipe,
    origin: Origin,
    parameters: int,
    dtype: str,
    table_bits: int | None,
    scores: dict[str, dict[str, Any]],
    code: bool,
) -> str:
    """A short page: what the model is, what it was trained on, how well it predicts, how to load it.

    Args:
        parameters: of the whole model.
        dtype, table_bits: as for `write_export`.
        scores: "token_ppl" and "bits_per_byte" by what was scored, see `known_scores`.
        code: whether the folder holds the model's code.
    """
    model = recipe.model
    length = min(40, model.context // 2)  # the model sees no further than its context
    source = recipe.train.init_from
    weights = ""
    if source:
        weights = f", from the weights of {printable(Path(source).name)}, whose own training is not counted"
    tables = f", tables in {table_bits} bits with one scale per row (scored before rounding)" if table_bits else ""
    facts = [
        f"- {parameters:,} parameters in {dtype}{tables}; {model.layers} layers of width {model.dim}, "
        f"{model.heads} attention heads, a context of {model.context:,} tokens",
        *described(model),
        f"- trained on {origin.tokens:,} tokens ({origin.step:,} steps){weights}"
        if origin.step
        else "- imported, and not trained further",
        *(
            f"- {scored}: {found['bits_per_byte']:.4f} bits per byte, perplexity {found['token_ppl']:,.2f} per token"
            for scored, found in scores.items()
        ),
    ]
    trusted = ", trust_remote_code=True" if code else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {printable(origin.run)}

A language model, exported with pkmlm.

{chr(10).join(facts)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path"{trusted})
model = AutoModelForCausalLM.from_pretrained("path"{trusted})
inputs = tokenizer("It was", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={length})[0], skip_special_tokens=True))
```

`path` is this folder. The tokenizer is lossless: decoding returns every text unchanged. It puts the
end-of-document token before a text, as in training; `add_special_tokens=False` leaves it out.
"""


def described(model: Model) -> list[str]:
    """A line about each memory."""
    lines = []
    for name, memory in model.memories.items():
        layers = [*memory.layer_places(model.layers)]
        where = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
        if len(layers) == model.layers > 1:
            where = "all layers"
        lines.append(f"- {memory.title.lower()} ({name}) in {where}: {memory.describe()}")
    return lines or ["- no memory"]


def known_scores(run: RunDirectory, step: int) -> dict[str, dict[str, Any]]:
    """The scores of a step, by what was scored: the splits that `pkmlm eval` scored in full; if the valid split is not
    among them, what validation in training scored of it.
    """
    scores: dict[str, dict[str, Any]] = {}
    evaluations, context = run.evaluations(), run.recipe_of(step).model.context
    for split in ("valid", "test"):
        found = [each for each in perplexities(evaluations, split, context) if each["step"] == step]
        if found:
            scores[f"{split} split"] = found[0]["perplexity"]
    if "valid split" not in scores:
        valid = [line for line in run.metrics() if line["event"] == "valid"]
        for line in valid:
            if line["step"] == step:
                tokens, asked = line.get("tokens"), run.recipe().eval.tokens
                part = tokens or asked if asked or tokens != valid[-1].get("tokens") else None  # it may have changed
                scores[f"first {part:,} tokens of the valid split" if part else "valid split"] = line
    return {name: found for name, found in scores.items() if found.get("token_ppl") and found.get("bits_per_byte")}
