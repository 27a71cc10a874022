"""What a tokenizer's file is called in a run, a folder of tokens, an export and the folder of a pretrained model."""

import base64
from pathlib import Path

from pkmlm.errors import UserError
from pkmlm.files import read_json

TOKENIZERS = (SENTENCEPIECE_FILE, BYTE_LEVEL_FILE) = ("tokenizer.model", "tokenizer.json")
TOKENIZER_CONFIG, KEPT = "tokenizer_config.json", "sentencepiece_model"


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer's file in a folder; if there is none, the path that it usually has."""
    return next((folder / name for name in TOKENIZERS if (folder / name).exists()), folder / SENTENCEPIECE_FILE)


def kept_model(folder: Path) -> bytes | None:
    """The SentencePiece model in the tokenizer_config.json of an export, in base64: `transformers`, which saves the
    export again, keeps it there, but no tokenizer.model. None: there is none.
    """
    try:
        return base64.b64decode(read_json(folder / TOKENIZER_CONFIG, "the tokenizer's configuration")[KEPT])
    except (UserError, LookupError, TypeError, ValueError):
        return None
