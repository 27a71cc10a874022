"""What stands at a path. (From Python 3.14 on, `Path.exists` and `is_file` say no where that cannot be seen.)"""

import errno
import stat
from pathlib import Path


def is_there(path: Path) -> bool:
    """Whether a name leads to something.

    Raises:
        OSError: that cannot be seen, or no name is so long.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def size_of(path: Path) -> int | None:
    """The bytes of a regular file; None where there is none.

    Raises:
        OSError: it cannot be seen whether there is one.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
