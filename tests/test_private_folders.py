"""Files that only this user can have written, and scratch folders that are removed after the end of their process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mxep import private_folders
from mxep.private_folders import cache_folder, make_private, read_private, record_process, scratch_folder, write_private


@pytest.fixture(params=[0o002, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(path: Path, root: Path) -> list[int]:
    return [part.stat().st_mode & 0o777 for part in (path, *path.parents) if part.is_relative_to(root) and part != root]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value, want in (
        ("MXEP_CACHE", "/a/b", Path("/a/b")),
        ("MXEP_CACHE", "~/x", tmp_path / "x"),
        ("XDG_CACHE_HOME", "/xdg", Path("/xdg/mxep")),
        ("XDG_CACHE_HOME", "~/xdg", tmp_path / "xdg" / "mxep"),
        ("XDG_CACHE_HOME", "", tmp_path / ".cache" / "mxep"),
    ):
        with monkeypatch.context() as now:
            now.delenv("MXEP_CACHE", raising=False)
            now.setenv(name, value)
            assert cache_folder() == want


@pytest.mark.usefixtures("umask")
def test_written_files_belong_to_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "mxep" / "kernel"
    write_private(path, b"code")
    assert read_private(path) == b"code"
    assert modes(path, tmp_path) == [0o600, 0o700, 0o700]
    write_private(path, b"other code")
    assert read_private(path) == b"other code"
    assert list(path.parent.iterdir()) == [path], "no other file is left"
    make_private(path.parent)


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_private(tmp_path / "kernel", b"code")
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert read_private(tmp_path / "kernel") == b"code"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write(tmp_path: Path, mode: int) -> None:
    write_private(tmp_path / "cache" / "kernel", b"code")
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(PermissionError, match=r"cache has mode d.*, want it writable by its owner alone; `chmod go-w .*cache`"):
        read_private(tmp_path / "cache" / "kernel")
    with pytest.raises(PermissionError, match="writable by its owner alone"):
        write_private(tmp_path / "cache" / "kernel", b"other code")
    (tmp_path / "cache").chmod(0o700)
    assert read_private(tmp_path / "cache" / "kernel") == b"code"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_replaced(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cache" / "kernel"
    write_private(path, b"code")
    path.chmod(mode)
    with pytest.raises(PermissionError, match=r"kernel has mode -rw"):
        read_private(path)
    write_private(path, b"code")
    assert read_private(path) == b"code"


def test_a_link_is_no_file(tmp_path: Path) -> None:
    write_private(tmp_path / "elsewhere" / "kernel", b"code")
    make_private(tmp_path / "cache")
    (tmp_path / "cache" / "kernel").symlink_to(tmp_path / "elsewhere" / "kernel")
    with pytest.raises(OSError, match="symbolic link"):
        read_private(tmp_path / "cache" / "kernel")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert read_private(tmp_path / "link" / "kernel") == b"code", "a folder may be elsewhere"


def test_files_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache" / "kernel"
    write_private(path, b"code")
    mine = os.getuid()
    if mine == 0:
        os.chown(path.parent, 4242, -1)
        mine = 4242
    else:
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match=rf"cache belongs to user {mine}, want user"):
        read_private(path)
    with pytest.raises(PermissionError, match=rf"cache belongs to user {mine}, want user"):
        write_private(path, b"other code")


# ---- scratch folders ----

_HOLDS_ONE = """
import signal, sys
from pathlib import Path
from mxep.private_folders import scratch_folder
with scratch_folder("test", Path(sys.argv[1])) as folder:
    (folder / "store").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(where: Path) -> tuple[subprocess.Popen, Path]:
    """A process with a scratch folder, which lasts until its input ends."""
    command = [sys.executable, "-c", _HOLDS_ONE, str(where)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_start_removes_folders_of_killed_processes(tmp_path: Path) -> None:
    (killed, left), (alive, used) = holder(tmp_path), holder(tmp_path)
    others = [tmp_path / "mxep-without-a-record", tmp_path / "else"]
    for other in others:
        other.mkdir()
    os.kill(killed.pid, signal.SIGKILL)
    with scratch_folder("test", tmp_path) as waiting:  # it is dead, and its parent has not asked for it yet
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert waiting.stat().st_mode & 0o777 == 0o700
    with scratch_folder("other", tmp_path) as mine:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([mine, used, *others])
    killed.communicate()
    alive.communicate()
    assert alive.returncode == 0
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_lasts_as_long_as_whoever_uses_it(tmp_path: Path) -> None:
    """The ranks of a training outlive the process that started them: they write a checkpoint first."""
    killed, left = holder(tmp_path)
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record_process(left, rank.pid)
    killed.kill()
    killed.communicate()
    with scratch_folder("test", tmp_path):
        assert left.exists()
    rank.communicate(b"\n")
    with scratch_folder("test", tmp_path):
        assert not left.exists()


def test_a_pid_that_another_process_has_now(tmp_path: Path) -> None:
    with scratch_folder("test", tmp_path) as folder:
        record = json.loads((folder / f"process_{os.getpid()}.json").read_text())
        assert record["pid"] == os.getpid()
        left = tmp_path / "mxep-test-left"
        left.mkdir()
        (left / "process_1.json").write_text(json.dumps({**record, "start": record["start"] - 1}))
        with scratch_folder("test", tmp_path):
            assert not left.exists()
            assert folder.exists()


@pytest.mark.parametrize("change", [{"host": "another one"}, {"pid": "x"}, {"pid": None}])
def test_folders_whose_process_may_be_alive_stay(tmp_path: Path, change: dict) -> None:
    """Their process is on a host or in a container that this one cannot see, or their record cannot be read."""
    with scratch_folder("test", tmp_path) as folder:
        record = json.loads((folder / f"process_{os.getpid()}.json").read_text())
    left = tmp_path / "mxep-test-left"
    left.mkdir()
    (left / "process_1.json").write_text(json.dumps({**record, "pid": 2**22 + 1, **change}))
    (tmp_path / "mxep-link").symlink_to(left)
    with scratch_folder("test", tmp_path):
        assert left.exists()


def test_folders_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "mxep-test-left"
    left.mkdir()
    (left / "process_1.json").write_text(json.dumps({"host": private_folders._host(), "pid": 2**22 + 1, "start": 1}))
    with monkeypatch.context() as now:
        now.setattr(os, "geteuid", lambda: os.getuid() + 4242)
        with scratch_folder("test", tmp_path):
            assert left.exists()
    with scratch_folder("test", tmp_path):
        assert not left.exists()


def test_a_forked_process_leaves_the_folder_to_its_owner(tmp_path: Path) -> None:
    code = _HOLDS_ONE.replace(
        "sys.stdin.read()", "import os\n    child = os.fork()\n    sys.exit() if child == 0 else os.waitpid(child, 0)"
    )
    code += "    print(folder.exists(), flush=True)\n"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines()[-1] == "True"
    assert not list(tmp_path.iterdir())
