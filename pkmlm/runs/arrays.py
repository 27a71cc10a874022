"""Reading back the arrays that a run keeps beside its checkpoints."""

from pathlib import Path

import numpy as np

from pkmlm.errors import UserError
from pkmlm.runs.files import regular


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, all of them read now.

    Raises:
        UserError: (exit code 1) it is missing or damaged.
    """
    try:
        with open(path, "rb", opener=regular) as stored, np.load(stored, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # zip, zlib, the headers' parser and the allocator: each says it in its own way
        raise UserError(f"{path} is missing or damaged: {type(error).__name__}: {error}", exit_code=1) from None
