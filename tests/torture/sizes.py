"""Inputs of a size that hurts: a line of 1 GB, and little files that stand for much text."""

import gzip
import shutil
from pathlib import Path

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


def bomb(ground: Ground, name: str, size: int = GIB, memory: int = GIB // 2) -> tuple[bool, str]:
    """A little file that stands for `size` bytes: tokenized, or refused in one line, within `memory` bytes."""
    path, out = write_bomb(ground.folder, name, size), ground.folder / "bomb-tokens"
    try:
        words = ["tokenize", str(path), "-o", str(out), "--tokenizer", str(ground.tokens / "tokenizer.model")]
        (ended,) = ground.forks.run("command", words=words, memory=memory, limit=1500)
        refused = ended.code in (1, 2) and ended.stderr.startswith("error: ") and "Traceback" not in ended.stderr
        right = refused or (ended.code == 0 and (out / "index.json").exists())
        what = "refused" if refused else "bounded"
        return right, f"{name}: {what}" if right else f"{name}: exit {ended.code}: {ended.stderr[-300:]}"
    finally:
        path.unlink()
        shutil.rmtree(out, ignore_errors=True)


def write_bomb(folder: Path, name: str, size: int) -> Path:
    """A file of text that decompresses to `size` bytes: "zst", "gz", "jsonl.zst" (one line), "window.zst" (a frame
    that asks its reader for 2 GiB at once) or "parquet" (rows that repeat one of 1 MiB).
    """
    import zstandard

    if name == "parquet":
        return write_table(folder / "bomb.parquet", size)
    path = folder / f"bomb.{name if 'jsonl' in name else 'txt.' + name.rpartition('.')[2]}"
    if name == "gz":
        with gzip.open(path, "wb", compresslevel=9) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
        return path
    if name == "window.zst":  # magic, a frame header that asks for 2^31 bytes, a last block of 2^17 times "a"
        path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([31 - 10 << 3]) + (1 << 20 | 3).to_bytes(3, "little") + b"a")
        return path
    with open(path, "wb") as stored, zstandard.ZstdCompressor().stream_writer(stored) as file:
        file.write(b'{"text": "' if "jsonl" in name else b"")
        for _ in range(size >> 20):
            file.write(b"a" * (1 << 20))
    return path


def write_table(path: Path, size: int) -> Path:
    """A table of one cell of 1 MiB, as often as `size` has room for it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = pa.DictionaryArray.from_arrays(pa.array([0] * (size >> 20), pa.int32()), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"text": cells}), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return path
