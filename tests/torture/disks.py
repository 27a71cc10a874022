"""Full disks for real: a small tmpfs, with a run or tokens on it, at every size up to the one that is enough."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.torture.crashes import untold
from tests.torture.kills import same
from tests.torture.oracle import Ground


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """A file system of `size` bytes, or None where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "pkmlm-torture", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True, timeout=20)


def fill_training(ground: Ground, size: int) -> tuple[bool, str]:
    """Train on a disk of `size` bytes; then make it larger and go on. Returns as a trial, "skipped" without rights."""
    with small_disk(ground.folder / "disk", size) as disk:
        if disk is None:
            return True, "skipped: no right to mount"
        run = disk / "run"
        ended = ground.train("product-key", run, code=None)
        lost = untold(ended.code, ended.stderr)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, capture_output=True, timeout=20)
        again = ground.train("product-key", run, code=None)
        lost += [f"again: exit {again.code}: {again.stderr[-200:]}"] if again.code else []
        lost += ground.differences("product-key", run) if not lost else []
    told = "enough" if ended.code == 0 else ended.stderr.splitlines()[-1].rpartition("/")[2][:60]
    return not lost, f"{size} bytes: {', '.join(lost)[:300]}" if lost else told


def fill_tokenizing(ground: Ground, size: int) -> tuple[bool, str]:
    """Tokenize on a disk of `size` bytes; then make it larger and do it again."""
    with small_disk(ground.folder / "disk", size) as disk:
        if disk is None:
            return True, "skipped: no right to mount"
        out = disk / "out"
        command = ["tokenize", ground.text, "--valid", ground.folder / "valid.txt", "-o", out, "--vocab-size", 350]
        ended = ground.forks.pkmlm(*command, code=None)
        lost = untold(ended.code, ended.stderr)
        lost += ["leftovers"] if ended.code and list(disk.iterdir()) else []
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, capture_output=True, timeout=20)
        if ended.code:
            ground.forks.pkmlm(*command)
        lost += [] if same(out, ground.tokens) else ["other bytes"]
    return not lost, f"{size} bytes: {', '.join(lost)}" if lost else ("full" if ended.code else "enough")
