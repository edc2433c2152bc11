"""The lock of a run's folder: one holder at a time, free again when it has ended, never taken from a live one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mxep.processes import start_of
from mxep.train import run_lock
from mxep.train.run_lock import HEARTBEAT_S, LOCK_FOLDER, SILENT_S, Owner, RunLockLostError, check_unlocked, lock_run_folder

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="judges processes through /proc")

HOLDER = """
import sys
from pathlib import Path
from mxep.train.run_lock import lock_run_folder
lock_run_folder(Path(sys.argv[1]), print)
print("held", flush=True)
sys.stdin.read()
"""


class Clock:
    """Time that passes in `sleep` alone; `on_sleep` is called with the seconds so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_sleep: Callable[[float], None] = lambda now: None) -> None:
        self.now, self.on_sleep = 0.0, on_sleep
        fake = SimpleNamespace(
            **{name: getattr(time, name) for name in ("strftime", "gmtime")}, monotonic=lambda: self.now, sleep=self.sleep
        )
        monkeypatch.setattr(run_lock, "time", fake)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(self.now)


def holds(out: Path) -> list[str]:
    return sorted(path.name for path in (out / LOCK_FOLDER).glob("*"))


def write_lock(out: Path, owner: Owner, heartbeat: int = 1) -> Path:
    path = out / LOCK_FOLDER / f"{owner.run}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**asdict(owner), "heartbeat": heartbeat}))
    return path


def elsewhere(**changes: object) -> Owner:
    return replace(Owner.here(None), **{"host": "node7", "since": "2099-01-01 00:00:00 UTC", **changes})  # type: ignore[arg-type]


def start_holder(out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = lock_run_folder(tmp_path, print)
    assert holds(tmp_path) == [f"{first.run}.json"]
    for attempt in (lambda: lock_run_folder(tmp_path, print), lambda: check_unlocked(tmp_path)):
        with pytest.raises(ValueError, match=rf"in use by run {first.run} of .*, pid {os.getpid()} on .* \(this host\).*another --out"):
            attempt()
    first.check()
    first.release()
    assert not list(tmp_path.iterdir())
    check_unlocked(tmp_path)
    lock_run_folder(tmp_path, print).release()


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    """Not even where nobody has fetched its exit status yet."""
    process = start_holder(tmp_path)
    with pytest.raises(ValueError, match=f"pid {process.pid} on"):
        lock_run_folder(tmp_path, print)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    for folder in (tmp_path, copy):
        said: list[str] = []
        lock = lock_run_folder(folder, said.append)
        assert len(said) == 1
        assert "whose process has ended" in said[0]
        assert holds(folder) == [f"{lock.run}.json"]
        lock.check()
        lock.release()
    process.communicate()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    write_lock(tmp_path, replace(Owner.here(None), start="1"))
    check_unlocked(tmp_path)
    lock_run_folder(tmp_path, print).release()


@pytest.mark.parametrize("changes", [{}, {"host": "", "place": "boot pid:[1]"}, {"place": ""}], ids=["host", "container", "unknown"])
def test_a_silent_holder_elsewhere_is_taken_over_after_two_minutes(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its clock nor a local process with its pid matters."""
    owner = elsewhere(**changes)
    write_lock(tmp_path, owner)
    check_unlocked(tmp_path)
    clock, said = Clock(monkeypatch), list[str]()
    lock = lock_run_folder(tmp_path, said.append)
    assert SILENT_S <= clock.now < SILENT_S + 1
    assert f"waiting for a heartbeat, {SILENT_S:.0f} s at most" in said[0]
    assert f"taken over from run {owner.run}" in said[1]
    assert f"no heartbeat for {SILENT_S:.0f} s" in said[1]
    assert len(said) == 2
    assert holds(tmp_path) == [f"{lock.run}.json"]
    lock.release()


def test_a_copied_folder_is_judged_by_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is named there holds the folder that was copied."""
    (tmp_path / "run").mkdir()
    lock = lock_run_folder(tmp_path / "run", print)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    check_unlocked(copy)
    clock, said = Clock(monkeypatch), list[str]()
    lock_run_folder(copy, said.append).release()
    assert SILENT_S <= clock.now < SILENT_S + 1
    assert "(another host, container or folder)" in said[0]
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=f"in use by run {lock.run}"):
        check_unlocked(tmp_path / "moved")


def test_a_heartbeat_elsewhere_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = elsewhere()
    write_lock(tmp_path, owner)
    clock = Clock(monkeypatch, lambda now: now > HEARTBEAT_S and write_lock(tmp_path, owner, 2))
    with pytest.raises(ValueError, match=r"on node7 \(another host, container or folder\).*its heartbeat goes on"):
        lock_run_folder(tmp_path, print)
    assert clock.now < HEARTBEAT_S + 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 3}', b"[" * 100_000, None], ids=str)
def test_a_lock_without_a_holder_is_judged_by_its_changes(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer was killed in the middle, on whatever host; None: it took over, and was killed before it wrote its own name."""
    path = write_lock(tmp_path, Owner.here(None))
    if content is None:
        path.rename(path.with_name("123.json"))
    else:
        path.write_bytes(content)
    clock = Clock(monkeypatch)
    lock_run_folder(tmp_path, print).release()
    assert SILENT_S <= clock.now < SILENT_S + 1


def test_a_run_whose_starter_was_killed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, starter = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    starts = [str(start_of(process.pid)) for process in (rank, starter)]
    owner = replace(Owner.here(starter.pid), pid=rank.pid, start=starts[0])
    assert owner.state() == "running"
    starter.kill()
    starter.wait()
    write_lock(tmp_path, owner)
    check_unlocked(tmp_path)

    def end(now: float) -> None:
        write_lock(tmp_path, owner, int(now) + 1)  # its heartbeat does not matter
        if now > 30:
            rank.kill()
            rank.wait()

    clock, said = Clock(monkeypatch, end), list[str]()
    lock = lock_run_folder(tmp_path, said.append)
    lock.release()
    assert 30 < clock.now < 32
    assert ["waiting to end, since its starter is gone" in line for line in said] == [True, False]


@pytest.mark.parametrize("dead", [False, True])
def test_one_of_many_attempts_succeeds(dead: bool, tmp_path: Path) -> None:
    for attempt in range(20):
        out = tmp_path / str(attempt)
        out.mkdir()
        if dead:
            write_lock(out, replace(Owner.here(None), start="1"))
        together, held, refused = threading.Barrier(8), list[run_lock.RunLock](), list[str]()

        def act(out: Path = out, together: threading.Barrier = together, held: list = held, refused: list = refused) -> None:
            together.wait()
            try:
                held.append(lock_run_folder(out, lambda line: None))
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=act) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (lock,) = held
        assert len(refused) == 7
        assert all("in use by" in text for text in refused)
        lock.check()
        assert holds(out) == [f"{lock.run}.json"]
        lock.release()
        assert not list(out.iterdir())


def test_a_run_that_lost_its_folder_notices_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = lock_run_folder(tmp_path, print)
    monkeypatch.setattr(Owner, "state", lambda self: "elsewhere")  # for the other run
    Clock(monkeypatch)
    other = lock_run_folder(tmp_path, print)
    before = (tmp_path / LOCK_FOLDER / holds(tmp_path)[0]).read_bytes()
    with pytest.raises(FileNotFoundError):
        suspended._write()
    with pytest.raises(RunLockLostError, match=rf"taken over by run {other.run} .*this run \({suspended.run}\) ends"):
        suspended.check()
    with pytest.raises(RunLockLostError):
        suspended.confirm()
    suspended.release()
    assert (tmp_path / LOCK_FOLDER / holds(tmp_path)[0]).read_bytes() == before
    other.check()
    other.release()
    with pytest.raises(RunLockLostError, match="was removed"):
        other.check()


def test_the_heartbeat_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.01)
    lock = lock_run_folder(tmp_path, print)
    path = tmp_path / LOCK_FOLDER / f"{lock.run}.json"
    first, deadline = path.read_bytes(), time.monotonic() + 60
    while path.read_bytes() in (first, b""):
        assert time.monotonic() < deadline
    lock.confirm()
    path.unlink()
    while not lock._lost:
        assert time.monotonic() < deadline
    with pytest.raises(RunLockLostError, match="was removed"):
        lock.confirm()
    assert not path.exists()


def test_files_of_killed_runs_block_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f".{LOCK_FOLDER}.abc").mkdir()
    (tmp_path / f".{LOCK_FOLDER}.abc" / "abc.json").touch()
    (tmp_path / LOCK_FOLDER).mkdir()  # killed while it gave the folder back
    lock_run_folder(tmp_path, print).release()
    assert not list(tmp_path.iterdir())
    (tmp_path / LOCK_FOLDER).mkdir()
    (tmp_path / LOCK_FOLDER / "something").touch()
    Clock(monkeypatch)
    with pytest.raises(ValueError, match=r"lock holds files, but no run's lock; remove it"):
        lock_run_folder(tmp_path, print)
    (tmp_path / LOCK_FOLDER / "something").unlink()
    (tmp_path / LOCK_FOLDER).rmdir()
    (tmp_path / LOCK_FOLDER).touch()
    with pytest.raises(ValueError, match=r"lock is no folder, want the lock of a run there; remove it"):
        lock_run_folder(tmp_path, print)
