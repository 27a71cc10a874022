"""A crash or a failed write before the n-th operation on files, for every n."""

import re
import shutil
from pathlib import Path

from tests.torture.kills import older_tokens, same, whole
from tests.torture.oracle import INIT_SCALE, Ground

FAILURES = ("crash", "EIO", "ENOSPC")


def operations(ground: Ground, what: str) -> list[str]:
    """The operations of an undisturbed "train", "tokenize", "replace" or "export", in order."""
    trace = ground.folder / f"{what}-operations"
    if not trace.exists():
        words, out = prepared(ground, what)
        ground.forks.pkmlm(*words, disk={"trace": trace}, **scale(what))
        shutil.rmtree(out)
    return trace.read_text().splitlines()


def prepared(ground: Ground, what: str) -> tuple[list[object], Path]:
    """The command, and the folder that it writes, as it is before."""
    out = ground.folder / f"crashed-{what}"
    shutil.rmtree(out, ignore_errors=True)
    for leftover in out.parent.glob(f".tmp-*{out.name}"):
        shutil.rmtree(leftover)
    if what == "train":
        return ["train", ground.recipe("product-key"), "-o", out], out
    if what == "export":
        return ["export", ground.reference("product-key"), "-o", out], out
    command = ["tokenize", ground.text, "--valid", ground.folder / "valid.txt", "-o", out, "--vocab-size", 350]
    if what == "tokenize":
        return command, out
    shutil.copytree(older_tokens(ground), out)
    return [*command, "--force"], out


def exported(ground: Ground) -> Path:
    """The folder of an undisturbed export."""
    folder = ground.folder / "exported"
    if not folder.exists():
        ground.forks.pkmlm("export", ground.reference("product-key"), "-o", folder)
    return folder


def scale(what: str) -> dict[str, float]:
    return {"init_scale": INIT_SCALE} if what == "train" else {}


def fail_at(ground: Ground, what: str, how: str, at: int) -> tuple[bool, str]:
    """Let operation `at` crash or fail, look at what is left, run the command again and compare.

    Returns whether nothing was lost, and what was the matter.
    """
    words, out = prepared(ground, what)
    ended = ground.forks.pkmlm(*words, code=None, disk={"at": at, "how": how}, **scale(what))
    place = f"{what}, {how} before {operations(ground, what)[at - 1]}"
    lost = [] if how == "crash" else untold(ended.code, ended.stderr)
    if how == "crash" and ended.code != 137:
        lost.append(f"no crash: exit {ended.code}")
    if what == "train":
        lost += damaged_checkpoints(out)
    elif what == "export":
        lost += ["half a folder"] if out.exists() and not same(out, exported(ground)) else []
    elif not whole(ground, out, what == "replace"):
        lost.append("half a folder")
    if what != "train" and how != "crash" and ended.code and list(out.parent.glob(f".tmp-*-{out.name}")):
        lost.append("leftovers")
    if what == "train" or not out.exists() or what == "replace":
        again = ground.forks.pkmlm(*words, code=None, **scale(what))
        lost += [f"again: exit {again.code} {again.stderr[-200:]}"] if again.code else []
    if not lost and what == "train":
        lost = ground.differences("product-key", out)
    elif not lost and not same(out, exported(ground) if what == "export" else ground.tokens):
        lost = ["other bytes"]
    return not lost, f"{place}: {', '.join(lost)}" if lost else what


def damaged_checkpoints(run: Path) -> list[str]:
    """Checkpoints of a run that have their name and are not whole."""
    from pkmlm.errors import UserError
    from pkmlm.runs.checkpoint import verify
    from pkmlm.runs.directory import RunDirectory

    found = []
    for step in RunDirectory(run).steps():
        try:
            verify(RunDirectory(run).checkpoint(step))
        except UserError as error:
            found.append(error.message)
    return found


def untold(code: int, said: str) -> list[str]:
    """What is wrong with how a failed write was told: one line, exit code 1. (A failed deletion may go unsaid.)"""
    if code == 0:
        return []
    errors = [
        line for line in said.splitlines() if not re.match(r"hint: |step |sample|training|resuming|warning", line)
    ]
    right = code == 1 and len(errors) == 1 and re.fullmatch(r"error: cannot write .*: \S.*", errors[0])
    return [] if right else [f"exit {code}, said {said[-400:]!r}"]
