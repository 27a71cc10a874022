"""An input of a size that hurts: a line of 1 GB."""

import shutil

from tests.torture.oracle import Ground

GIB = 1 << 30


def one_long_line(ground: Ground, size: int = 10**9, memory: int = 2 * GIB) -> tuple[bool, str]:
    """A text of `size` bytes without a newline, learnt from and tokenized within `memory` bytes of address space."""
    path, out = ground.folder / "long.txt", ground.folder / "long-tokens"
    piece = ground.text.read_bytes().replace(b"\n", b" ").decode(errors="ignore").encode()
    with open(path, "wb") as file:
        for _ in range(size // len(piece) + 1):
            file.write(piece)
    try:
        words = ["tokenize", str(path), "-o", str(out), "--vocab-size", "350"]
        (ended,) = ground.forks.run("command", words=words, memory=memory, limit=1500)
        right = ended.code == 0 and (out / "index.json").exists()
        return right, f"{ended.seconds:.0f} s" if right else f"exit {ended.code}: {ended.stderr[-300:]}"
    finally:
        path.unlink()
        shutil.rmtree(out, ignore_errors=True)
