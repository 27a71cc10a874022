"""Two writers of one name, links and strange files in the way, and what a killed process leaves."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import pytest

from pkmlm import files
from pkmlm.errors import UserError
from pkmlm.files import (
    Damaged,
    check_files,
    entry_of,
    locked,
    make_folder,
    open_log,
    read_json,
    remove_folder,
    remove_leftovers,
    sha256_of,
    write_text,
    writing,
    writing_folder,
)
from pkmlm.runs.directory import RunDirectory


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


def test_names_may_be_as_long_as_the_system_lets_them(tmp_path):
    for size in (240, 255):
        out = tmp_path / ("o" * size)
        for text in "12":
            with writing_folder(out, replace=True) as folder:
                fill(folder, text, "a")
            assert (out / "a").read_text() == text
        write_text(tmp_path / ("f" * size), "1")
    with pytest.raises(UserError, match="File name too long"):
        write_text(tmp_path / ("f" * 256), "1")
    assert not leftovers(tmp_path)


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
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60)
    assert done.returncode == 137
    assert out.exists() == (at == 1)
    with pytest.raises(UserError), writing_folder(out, replace=True):
        (out / "c").read_text()
    assert [(out / name).read_text() for name in "ab"] == ["old", "old"]
    with writing_folder(out, replace=True) as folder:
        fill(folder, "new", "a")
    assert [path.name for path in out.iterdir()] == ["a"]
    assert not leftovers(tmp_path)


def test_a_killed_process_s_leftovers_are_deleted_and_no_others(tmp_path):
    program = (
        "import os; from pathlib import Path; from pkmlm.files import writing, writing_folder\n"
        "with writing(Path('f')) as file, writing_folder(Path('d')) as folder:\n"
        "    (folder / 'x').touch(); os._exit(137)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60)
    assert len(leftovers(tmp_path)) == 2
    (tmp_path / ".tmp-mine").touch()
    (tmp_path / ".tmp-0a1b2c3e-f").symlink_to(tmp_path / "victim")
    remove_leftovers(tmp_path)
    assert leftovers(tmp_path) == [".tmp-0a1b2c3e-f", ".tmp-mine"]
    with writing(tmp_path / "f") as file, writing_folder(tmp_path / "d") as folder:
        file.write(b"x")
        (folder / "x").touch()
        remove_leftovers(tmp_path)  # as another process would, into whose way this one has come
    assert ((tmp_path / "f").read_bytes(), (tmp_path / "d/x").exists()) == (b"x", True)


def test_a_folder_that_appeared_meanwhile_is_not_replaced_unasked(tmp_path):
    appeared = tmp_path / "out"
    told = pytest.raises(UserError, match=r"\S+/out already exists\Z")
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
    first.communicate("\n", timeout=30)
    assert first.returncode == 0
    assert (out / "a").read_text() == "first"
    assert not leftovers(tmp_path)


def test_of_two_that_begin_at_once_one_writes(tmp_path, monkeypatch):
    """The second finds no folder yet, and the first makes and locks it before the second does."""
    out, real = tmp_path / "out", files.make_folder
    with ExitStack() as first:

        def late(path):
            monkeypatch.setattr(files, "make_folder", real)
            fill(first.enter_context(writing_folder(out)), "first", "a")
            real(path)

        monkeypatch.setattr(files, "make_folder", late)
        with pytest.raises(UserError, match="another process is writing"), writing_folder(out):
            pass
    assert (out / "a").read_text() == "first"
    assert not leftovers(tmp_path)


def test_a_link_to_a_folder_is_no_leftover(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").write_text("theirs")
    (tmp_path / ".tmp-new-out").symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="cannot write"), writing_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "theirs" / "a").read_text() == "theirs"


def test_a_folder_that_is_finished_before_it_is_locked_is_refused(tmp_path, monkeypatch):
    out, real = tmp_path / "out", fcntl.flock

    def late(*how):
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / ".tmp-new-out").rename(out)
        real(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="another process is writing"), writing_folder(out, replace=True):
        pass
    assert out.exists()


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
    assert [one.communicate(timeout=60)[1] for one in running] == [b"", b""]
    assert (tmp_path / "f").read_text() in ("a" * 100_000, "b" * 100_000)
    assert leftovers(tmp_path) == []


def test_links_in_the_way_are_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    names = iter(["0a1b2c3d", "ffffffff"])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(names))
    (run / ".tmp-0a1b2c3d-recipe.yaml").symlink_to(victim)
    with pytest.raises(UserError, match="File exists"):
        write_text(run / "recipe.yaml", "new")
    (run / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match=r"cannot write \S+\.lock: "), RunDirectory(run).locked():
        pass
    (run / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(UserError, match=r"cannot write \S+metrics.jsonl: "):
        open_log(run / "metrics.jsonl")
    assert victim.read_text() == "kept"
    write_text(run / "metrics.jsonl", "new")  # a link is replaced, what it names is not touched
    assert (victim.read_text(), (run / "metrics.jsonl").read_text()) == ("kept", "new")


def test_a_folder_behind_a_link_is_replaced_where_it_is(tmp_path):
    fill(tmp_path, "", "a")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with writing_folder(tmp_path / "link", replace=True) as folder:
        fill(folder, "new", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/x").read_text() == "new"
    assert not leftovers(tmp_path)


def test_pipes_and_devices_are_neither_replaced_nor_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: write_text(pipe, "x"), lambda: open_log(pipe)):
        with pytest.raises(UserError, match=r"cannot write \S+pipe: ") as told:
            write()
        assert told.value.exit_code == 1
    assert pipe.is_fifo()
    assert not leftovers(tmp_path)
    with pytest.raises(UserError, match=r"cannot read the notes \S+pipe: it is not a regular file"):
        read_json(pipe, "the notes")
    with pytest.raises(UserError, match=r"cannot read \S+pipe: it is not a regular file"):
        sha256_of(pipe)
    with pytest.raises(UserError, match=r"cannot write /dev/null"), writing(Path("/dev/null")):
        pass


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_cannot_write_are_damage(tmp_path, number):
    (tmp_path / "notes.json").write_text(f'{{"loss": {number}}}')
    with pytest.raises(Damaged, match=re.escape(number)):
        read_json(tmp_path / "notes.json", "the notes")


def test_a_run_that_was_replaced_while_it_was_held_is_let_go(tmp_path):
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        run.write_facts(status="running")
        os.rename(run.path, tmp_path / "away")
        told = re.escape(f"run {run.path} has been renamed, deleted or replaced")
        with pytest.raises(UserError, match=told):
            run.write_facts(status="finished")
        assert not run.path.exists()
        with RunDirectory(tmp_path / "run").locked(), pytest.raises(UserError, match=told):
            run.write_facts(status="finished")
        assert os.listdir(run.path) == [".lock"]


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


def test_a_lock_says_who_holds_it_whatever_stands_in_it(tmp_path):
    run = RunDirectory(tmp_path / "run")
    held = pytest.raises(UserError, match=rf"run \S+ is in use by process {os.getpid()} on {socket.gethostname()}")
    with run.locked(), held, RunDirectory(run.path).locked():
        pass


def test_a_lock_that_is_only_looked_at_is_waited_for(tmp_path, monkeypatch):
    """As `pkmlm compare` looks at a killed run that is about to be resumed."""
    monkeypatch.setattr(files, "LOCK_PATIENCE", 5)
    with open(tmp_path / "lock", "wb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with locked(tmp_path / "lock", "run") as keeps:
            assert keeps()


def test_a_file_system_without_locks_keeps_nobody_out_and_says_so(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    run = RunDirectory(tmp_path / "run")
    with run.locked(), RunDirectory(run.path).locked():
        run.set_pointer("latest", 3)
    assert (run.path / "latest").read_text() == "step-00000003\n"
    assert f"warning: {run.path}: this file system has no locks" in capsys.readouterr().err
