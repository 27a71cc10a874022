"""The command line in this process: what it says, and its exit code."""

import contextlib
import io
import sys
import traceback

from pkmlm.cli import main


def said_by(*words: object) -> tuple[int, str]:
    """Run a command; its exit code (-1 for a traceback), and what it wrote to standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["pkmlm", *map(str, words)]
    code = -1
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        err.write(traceback.format_exc())
    finally:
        sys.argv = before
    return code, err.getvalue()
