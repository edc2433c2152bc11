"""The lock of a run's folder: one run at a time writes there, on one machine or on several with a shared file system. Imports no torch.

    <out>/lock/<run id>.json     owner of the folder and a heartbeat; there is one such file

The file is named after the run's id, so that every change is one atomic rename or removal:

- A run locks a free folder by renaming a prepared folder to `lock`, which fails if `lock` holds a file.
- A run takes over a dead run's folder by renaming the dead run's file to its own name. If several runs try, one succeeds.
- A run holds the folder as long as its own file exists. The heartbeat rewrites that file and never creates it.

An owner on this host is alive if its process is: boot, PID namespace, pid and start time are compared. An owner anywhere else is alive if
this process sees its file change; clocks of two hosts are never compared. A copy of a folder has another inode: if its owner's process is
alive, it holds the original, and whether it holds the copy too is seen by its file as well.
"""

from __future__ import annotations

import errno
import getpass
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mxep.processes import pid_scope, start_of

LOCK_FOLDER = "lock"
HEARTBEAT_S = 10.0
SILENT_S = 120.0  # without a heartbeat, an owner elsewhere is dead after this time
_TRUSTED_S = 3 * HEARTBEAT_S  # within this time after a check no run can have taken the lock over
_ENDING_S = 300.0  # time for a run without its starter to end: the current step and a checkpoint
_POLL_S = 0.2


class RunLockLostError(Exception):
    """Another run has taken the folder over; this one must not write to it again."""


@dataclass(frozen=True)
class Owner:
    """The run that holds a folder.

    Attributes:
        run: id of the run, also the name of its file.
        user, host, since: for messages; `since` is UTC by the clock of that host.
        place: boot and PID namespace of `pid`; empty if unknown (no /proc).
        pid, start: of rank 0: its pid, and its start time in clock ticks since the boot.
        starter, starter_start: the same for the process whose end ends the run; 0 and empty if there is none.
    """

    run: str
    user: str
    host: str
    since: str
    place: str
    pid: int
    start: str
    starter: int
    starter_start: str

    @classmethod
    def here(cls, starter: int | None) -> Owner:
        """This process, with a new run id."""
        pid = os.getpid()
        return cls(
            run=uuid.uuid4().hex[:12],
            user=_user(),
            host=socket.gethostname(),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            place=pid_scope(),
            pid=pid,
            start=str(start_of(pid) or ""),
            starter=starter or 0,
            starter_start=str(start_of(starter) or "") if starter else "",
        )

    @classmethod
    def parsed(cls, path: Path, content: bytes) -> Owner | None:
        """The owner in a lock's file; None if the file is half written, or still has the content of the run that was taken over."""
        try:
            values: dict[str, Any] = json.loads(content)
            owner = cls(**{name: values[name] for name in cls.__dataclass_fields__})
            here = _inode(path.parent.parent)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if values.get("inode", here) != here and owner.state() != "ended":  # a copy: its owner holds another folder
            owner = replace(owner, place="")
        typed = all(type(value) is (int if name in ("pid", "starter") else str) for name, value in asdict(owner).items())
        return owner if typed and owner.pid > 0 and owner.run == path.stem else None

    def state(self) -> Literal["running", "ending", "ended", "elsewhere"]:
        """State of its process; "elsewhere" if it is unknown here."""
        if not self.place or (self.host, self.place) != (socket.gethostname(), pid_scope()):
            return "elsewhere"
        if not _is_running(self.pid, self.start):
            return "ended"
        return "ending" if self.starter > 0 and not _is_running(self.starter, self.starter_start) else "running"

    def __str__(self) -> str:
        where = "this host" if self.state() != "elsewhere" else "another host, container or folder"
        return f"run {self.run} of {self.user}, pid {self.pid} on {self.host} ({where}), since {self.since}"


class RunLock:
    """A run's lock on its folder, held by rank 0; `lock_run_folder` creates it. All methods may be called from any thread.

    Attributes:
        out: the folder.
        run: the run's id.
    """

    def __init__(self, out: Path, starter: int | None) -> None:
        self.out, self._inode, self._owner = out, _inode(out), Owner.here(starter)
        self.run = self._owner.run
        self._path = out / LOCK_FOLDER / f"{self.run}.json"
        self._beats = 0
        self._seen_at = 0.0  # when the lock was last seen to be ours
        self._lost = False
        self._ended = threading.Event()

    def check(self) -> None:
        """Check the lock on the disk.

        Raises:
            RunLockLostError: another run has it, or it was removed.
            OSError: the file system does not answer.
        """
        before = _now()
        try:
            with self._path.open("rb"):  # open() asks the server of a shared file system; stat() may use a cache
                self._seen_at = before
        except FileNotFoundError as error:
            self._lost = True
            found = _find(self.out)
            other = None if found is None else Owner.parsed(*found)
            by = "was removed" if found is None else f"was taken over by {other or 'another run'}, which heard nothing of this one"
            raise RunLockLostError(f"train: the lock of {self.out} {by}; this run ({self.run}) ends and writes nothing more") from error

    def confirm(self) -> None:
        """`check`, if the last check is too long ago; cheap enough for every step. Raises what `check` raises."""
        if self._lost or _now() - self._seen_at > _TRUSTED_S:
            self.check()

    def release(self) -> None:
        """Unlock the folder."""
        self._ended.set()
        with suppress(OSError):  # if the file stays, it is the lock of an ended process
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _hold(self) -> None:
        """Start the heartbeat; remove prepared locks of runs that were killed."""
        self._seen_at = _now()
        for prepared in self.out.glob(f".{LOCK_FOLDER}.*"):
            shutil.rmtree(prepared, ignore_errors=True)
        threading.Thread(target=self._keep_beating, daemon=True, name="mxep-run-lock").start()

    def _keep_beating(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                self._write()
            except FileNotFoundError:
                self._lost = True
                return
            except OSError:  # a full disk, an unreachable server: `confirm` notices if it lasts
                continue

    def _write(self) -> None:
        """Rewrite our file. Raises FileNotFoundError if it is gone; it is never created again."""
        before = _now()
        with self._path.open("r+b") as file:
            file.write(self._content())
            file.truncate()
        self._seen_at = before

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps({**asdict(self._owner), "inode": self._inode, "heartbeat": self._beats}, indent=1).encode() + b"\n"

    def _take_free(self) -> bool:
        """Lock a free folder; False if another run holds it."""
        prepared = self.out / f".{LOCK_FOLDER}.{self.run}"
        try:
            prepared.mkdir(exist_ok=True)
            (prepared / self._path.name).write_bytes(self._content())
            os.rename(prepared, self._path.parent)
        except OSError as error:
            shutil.rmtree(prepared, ignore_errors=True)
            if error.errno == errno.ENOTDIR:
                raise ValueError(f"train: {self._path.parent} is no folder, want the lock of a run there; remove it") from error
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):  # ENOENT: another run removed the prepared folder
                raise
            return self._path.exists()  # true if a server renamed it, lost its answer, and refused the second request
        return True

    def _take_over(self, path: Path) -> bool:
        """Take over the folder of a dead run, whose file is `path`; False if another run was faster."""
        try:
            os.rename(path, self._path)
            self._write()
        except FileNotFoundError:
            return False
        return True


def lock_run_folder(out: Path, say: Callable[[str], None], starter: int | None = None) -> RunLock:
    """Lock `out`, an existing folder, until `RunLock.release` or the end of this process.

    If the owner's process on this host has ended, its lock is taken over at once. If the owner's starter was killed, this waits, since the
    owner ends after its step. The lock of an owner on another host is taken over if its heartbeat does not change for `SILENT_S` seconds.

    Args:
        out: folder of the run.
        say: takes a line for the user about waiting or taking over.
        starter: pid of the process whose end ends this run; None if there is none.

    Raises:
        ValueError: another run holds the folder.
        OSError: the lock cannot be written.
    """
    lock = RunLock(out, starter)
    holder: Path | None = None
    first, since, said = b"", time.monotonic(), False
    while (found := _find(out)) is not None or not lock._take_free():
        path, content = found or (None, b"")
        owner = None if path is None else Owner.parsed(path, content)
        state = owner.state() if owner else "elsewhere"
        if path != holder or (content != first and owner is None):  # a new owner, or a file that was half written
            holder, first, since, said = path, content, time.monotonic(), False
        waited_s = time.monotonic() - since
        if state == "running" or (state == "elsewhere" and content != first) or (state == "ending" and waited_s > _ENDING_S):
            raise ValueError(_busy(out, owner, state))
        if path is None:
            if waited_s > HEARTBEAT_S:
                raise ValueError(f"train: {out / LOCK_FOLDER} holds files, but no run's lock; remove it")
        elif state == "ended" or (state == "elsewhere" and waited_s >= SILENT_S):
            if lock._take_over(path):
                why = "whose process has ended" if state == "ended" else f"which gave no heartbeat for {SILENT_S:.0f} s"
                say(f"train: {out} is taken over from {owner or 'another run'}, {why}")
                break
        elif not said:
            what = "to end, since its starter is gone" if state == "ending" else f"for a heartbeat, {SILENT_S:.0f} s at most"
            say(f"train: {out} is in use by {owner or 'another run'}; waiting {what}")
            said = True
        time.sleep(_POLL_S)
    lock._hold()
    return lock


def check_unlocked(out: Path) -> None:
    """Raise ValueError if a process of this host holds `out`. All other owners are left to `lock_run_folder`, which may wait."""
    found = _find(out)
    owner = None if found is None else Owner.parsed(*found)
    if owner and owner.state() == "running":
        raise ValueError(_busy(out, owner, "running"))


def _busy(out: Path, owner: Owner | None, state: str) -> str:
    late = f"; it did not end in {_ENDING_S:.0f} s although its starter is gone"
    seen = {"elsewhere": "; its heartbeat goes on", "ending": late}.get(state, "")
    return f"train: {out} is in use by {owner or 'another run'}{seen}; wait for its end, end it, or choose another --out"


def _find(out: Path) -> tuple[Path, bytes] | None:
    """File and content of the lock on `out`."""
    for path in sorted((out / LOCK_FOLDER).glob("*.json")):
        with suppress(OSError):  # released or taken over in between
            return path, path.read_bytes()
    return None


def _inode(folder: Path) -> int:
    """Equal for the same folder by any path. It may change on some file systems, so another one does not show that the owner is dead."""
    return folder.stat().st_ino


def _is_running(pid: int, start: str) -> bool:
    """True if the process with this pid and start time still runs, or if its start time is unknown."""
    now = start_of(pid)
    return now is not None and str(now) in (start, "0")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def _now() -> float:
    """A monotonic clock that includes suspended time, if the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
