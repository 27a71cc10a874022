"""What a tokenizer's file is called in a run, a folder of tokens, an export and the folder of a pretrained model."""

from pathlib import Path

TOKENIZERS = (SENTENCEPIECE_FILE, BYTE_LEVEL_FILE) = ("tokenizer.model", "tokenizer.json")


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer's file in a folder; if there is none, the path that it usually has."""
    return next((folder / name for name in TOKENIZERS if (folder / name).exists()), folder / SENTENCEPIECE_FILE)
