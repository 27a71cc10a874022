"""Two writers of one name, damaged files, locks, and what a killed process leaves."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import pytest

from pkmlm import files
from pkmlm.errors import UserError
from pkmlm.files import (
    Damaged,
    abandoned,
    check_files,
    entry_of,
    locked,
    make_folder,
    read_json,
    remove_folder,
    remove_leftovers,
    sha256_of,
    write_text,
    writing_folder,
)
from tests import PATIENCE


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".tmp-*"))


def fill(folder: Path, text: str, names: str = "abcdefgh") -> None:
    for name in names:
        write_text(folder / name, text)


@contextmanager
def not_as_root():
    """As a user whom permissions hold: root may look into all."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("at", [1, 2])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path, at):
    out = tmp_path / "out"
    with writing_folder(out) as folder:
        fill(folder, "old", "ab")
    program = (
        "import os; from pathlib import Path; from pkmlm.files import writing_folder, write_text\n"
        f"left, rename = [{at}], os.rename\n"
        "def killed(*names):\n"
        "    left[0] -= 1\n"
        "    rename(*names) if left[0] else os._exit(137)\n"
        "with writing_folder(Path('out'), replace=True) as folder:\n"
        "    write_text(folder / 'a', 'new')\n"
        "    os.rename = killed\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 137
    assert out.exists() == (at == 1)
    with pytest.raises(UserError), writing_folder(out, replace=True):
        (out / "c").read_text()
    assert [(out / name).read_text() for name in "ab"] == ["old", "old"]
    with writing_folder(out, replace=True) as folder:
        fill(folder, "new", "a")
    assert [path.name for path in out.iterdir()] == ["a"]
    assert not leftovers(tmp_path)


def test_a_killed_process_s_leftovers_are_deleted(tmp_path):
    program = (
        "import os; from pathlib import Path; from pkmlm.files import writing, writing_folder\n"
        "with writing(Path('f')) as file, writing_folder(Path('d')) as folder:\n"
        "    (folder / 'x').touch(); os._exit(137)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=PATIENCE)
    assert len(leftovers(tmp_path)) == 2
    with writing_folder(tmp_path / "d") as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path / "d") == []
    assert len(leftovers(tmp_path)) == 1
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["d"]


def test_a_folder_that_appeared_meanwhile_is_not_replaced_unasked(tmp_path):
    appeared = tmp_path / "out"
    told = pytest.raises(UserError, match="exists")
    with told as error, writing_folder(tmp_path / "out"):
        make_folder(appeared)
        write_text(appeared / "theirs", "")
    assert error.value.exit_code == 2
    assert leftovers(tmp_path) == []
    assert (tmp_path / "out/theirs").exists()


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    out, writer = (
        tmp_path / "out",
        (
            "import sys; from pathlib import Path; from pkmlm.files import writing_folder\n"
            "with writing_folder(Path(sys.argv[1])) as folder:\n"
            "    (folder / 'a').write_text('first')\n"
            "    print('writing', flush=True)\n"
            "    input()\n"
        ),
    )
    first = subprocess.Popen(
        [sys.executable, "-c", writer, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(UserError, match="another process is writing"), writing_folder(out):
        pass
    first.communicate("\n", timeout=PATIENCE)
    assert first.returncode == 0
    assert (out / "a").read_text() == "first"
    assert not leftovers(tmp_path)


def test_of_processes_that_replace_one_folder_each_is_refused_or_wins_whole(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from pkmlm.errors import UserError; from pkmlm.files import write_text, writing_folder\n"
        "done = 0\n"
        "while done < 30:\n"
        "    try:\n"
        "        with writing_folder(Path('out'), replace=True) as folder:\n"
        "            for name in 'abcd': write_text(folder / name, sys.argv[1])\n"
        "    except UserError: continue\n"
        "    done += 1\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, letter], cwd=tmp_path, stderr=subprocess.PIPE)
        for letter in "12"
    ]
    assert [one.communicate(timeout=PATIENCE)[1] for one in running] == [b"", b""]
    assert [(tmp_path / "out" / name).read_text() for name in "abcd"] in (["1"] * 4, ["2"] * 4)
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_is_finished_before_it_is_locked_is_refused(tmp_path, monkeypatch):
    """A third process has begun to write by then."""
    real = fcntl.flock

    def late(*how):
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / ".tmp-new-out").rename(tmp_path / "out")
        (tmp_path / ".tmp-new-out").mkdir()
        fill(tmp_path / ".tmp-new-out", "third", "a")
        real(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="process"), writing_folder(tmp_path / "out", replace=True):
        pass
    assert (tmp_path / ".tmp-new-out" / "a").read_text() == "third"


def test_a_folder_of_which_something_cannot_be_deleted_is_gone_under_its_name():
    """As where a file of it is open on a cluster's file system."""
    with TemporaryDirectory() as name:  # which others than root can reach
        folder, kept = Path(name), Path(name) / "old" / "kept"
        kept.mkdir(parents=True)
        fill(kept, "1")
        folder.chmod(0o777)
        kept.parent.chmod(0o777)
        kept.chmod(0o555)
        with not_as_root():
            remove_folder(kept.parent)
        assert not kept.parent.exists()
        (left,) = leftovers(folder)
        (folder / left / "kept").chmod(0o755)
        remove_leftovers(folder)
        assert not leftovers(folder)


def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path):
    program = (
        "import sys; from pathlib import Path; from pkmlm.files import write_text\n"
        "for _ in range(50): write_text(Path('f'), sys.argv[1] * 100_000)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, letter], cwd=tmp_path, stderr=subprocess.PIPE)
        for letter in "ab"
    ]
    assert [one.communicate(timeout=PATIENCE)[1] for one in running] == [b"", b""]
    assert (tmp_path / "f").read_text() in ("a" * 100_000, "b" * 100_000)
    assert leftovers(tmp_path) == []


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path):
    fill(tmp_path, "", "a")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with writing_folder(tmp_path / "link", replace=True) as folder:
        fill(folder, "new", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/x").read_text() == "new"
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "notes")
    for read in (lambda path: read_json(path, "the notes"), sha256_of):
        with pytest.raises(UserError, match="file"):
            read(tmp_path / "notes")


def test_a_lock_whose_folder_was_renamed_or_replaced_keeps_nobody_out(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with locked(run / "lock", "run") as keeps:
        assert keeps()
        run.rename(tmp_path / "away")
        assert not keeps()
        run.mkdir()
        with locked(run / "lock", "run") as theirs:
            assert theirs()
            assert not keeps()


def test_what_may_not_be_looked_at_is_not_taken_for_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    fill(folder, "whole", "ab")
    files = {name: entry_of(folder / name) for name in "ab"}
    check_files(folder, files, files, "")
    (folder / "b").unlink()
    with pytest.raises(Damaged, match=r"/b is missing\Z"):
        check_files(folder, files, files, "")
    tmp_path.chmod(0o755)
    folder.chmod(0)
    with not_as_root(), pytest.raises(UserError, match="cannot read folder/a: Permission denied") as told:
        check_files(Path("folder"), files, files, "")
    assert (type(told.value), told.value.exit_code) == (UserError, 1)


def test_a_lock_says_who_holds_it_and_whether_it_was_abandoned(tmp_path):
    lock = tmp_path / "lock"
    assert not abandoned(lock)
    with locked(lock, "run"):
        assert not abandoned(lock)
        with pytest.raises(UserError, match=f"{os.getpid()} on {socket.gethostname()}") as told, locked(lock, "run"):
            pass
        assert told.value.exit_code == 1
    assert abandoned(lock)


def test_a_lock_that_is_only_looked_at_is_waited_for(tmp_path):
    """As `pkmlm compare` looks at a killed run that is about to be resumed."""
    with open(tmp_path / "lock", "wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        Timer(files.LOCK_PATIENCE / 4, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with locked(tmp_path / "lock", "run") as keeps:
            assert keeps()


def test_a_file_system_without_locks_keeps_nobody_out_and_says_so(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked(tmp_path / "lock", "run"), locked(tmp_path / "lock", "run"):
        assert "no locks" in capsys.readouterr().err
    with writing_folder(tmp_path / "out") as folder:
        fill(folder, "new", "a")
    assert (tmp_path / "out/a").read_text() == "new"
