"""The lock of a run's folder: one run at a time writes there, from one machine or from several that share a file system (no torch here).

    <out>/lock/<run id>.json     who holds the folder, and a heartbeat; there is one such file

The file's name is the run's id, so that every change is one atomic rename or removal:

- A run takes a free folder by renaming a prepared folder to `lock`, which fails where `lock` holds a file.
- A run takes a dead run's folder over by renaming the dead run's file to its own name. Of several runs that try, one succeeds.
- A run holds the folder as long as its own file exists. The heartbeat rewrites that file and never creates it.

A holder on this host is judged by its process: boot, PID namespace, pid and start time. A holder anywhere else is judged by its heartbeat,
that is by changes of its file which this process has watched; clocks of two hosts are never compared.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mxep.processes import pid_scope, start_of

LOCK_FOLDER = "lock"
HEARTBEAT_S = 10.0
SILENT_S = 120.0  # without a heartbeat, after which a holder elsewhere counts as dead
_TRUSTED_S = 3 * HEARTBEAT_S  # for so long after a look at the lock nobody can have taken it over
_ENDING_S = 300.0  # for a run to end whose starter is gone: the step on its way and a checkpoint
_POLL_S = 0.2


class RunLockLostError(Exception):
    """Another run has taken the folder over; this one must not write there any more."""


@dataclass(frozen=True)
class Owner:
    """Who holds a folder.

    Attributes:
        run: id of the run, also the name of its file.
        user, host, since: for messages; `since` is a time in UTC by the clock of that host.
        place: boot and PID namespace in which `pid` means something; empty where the system does not say (no /proc).
        pid, start: of rank 0, and when that process was started (in clock ticks since the boot).
        starter, starter_start: the same of the process whose end makes the run end; 0 and empty where there is none.
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
        """This process, under a new id."""
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
        """The owner that a lock's file names; None where it is half written, or still that of a run which has just been taken over."""
        try:
            values: dict[str, Any] = json.loads(content)
            owner = cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        typed = all(type(value) is (int if name in ("pid", "starter") else str) for name, value in asdict(owner).items())
        return owner if typed and owner.pid > 0 and owner.run == path.stem else None

    def state(self) -> Literal["running", "ending", "ended", "elsewhere"]:
        """What its process does; "elsewhere" where this process cannot tell."""
        if not self.place or (self.host, self.place) != (socket.gethostname(), pid_scope()):
            return "elsewhere"
        if not _is_running(self.pid, self.start):
            return "ended"
        return "ending" if self.starter > 0 and not _is_running(self.starter, self.starter_start) else "running"

    def __str__(self) -> str:
        where = "this host" if self.state() != "elsewhere" else "another host or container"
        return f"run {self.run} of {self.user}, pid {self.pid} on {self.host} ({where}), since {self.since}"


class RunLock:
    """A run's hold on its folder; `lock_run_folder` makes one, on rank 0 alone. All methods may be called from any thread.

    Attributes:
        out: the folder.
        run: the run's id.
    """

    def __init__(self, out: Path, starter: int | None) -> None:
        self.out, self._owner = out, Owner.here(starter)
        self.run = self._owner.run
        self._path = out / LOCK_FOLDER / f"{self.run}.json"
        self._beats = 0
        self._seen_at = 0.0  # when the lock was last seen to be ours
        self._lost = False
        self._ended = threading.Event()

    def check(self) -> None:
        """Look at the lock on the disk.

        Raises:
            RunLockLostError: it is another run's, or was removed.
            OSError: the file system does not answer.
        """
        before = _now()
        try:
            with self._path.open("rb"):  # opening asks the server of a shared file system, where looking may not
                self._seen_at = before
        except FileNotFoundError as error:
            self._lost = True
            found = _find(self.out)
            other = None if found is None else Owner.parsed(*found)
            by = "was removed" if found is None else f"was taken over by {other or 'another run'}, which heard nothing of this one"
            raise RunLockLostError(f"train: the lock of {self.out} {by}; this run ({self.run}) ends and writes nothing more") from error

    def confirm(self) -> None:
        """`check` where the last look is too long ago to be relied on; cheap enough for every step. Raises what `check` raises."""
        if self._lost or _now() - self._seen_at > _TRUSTED_S:
            self.check()

    def release(self) -> None:
        """Give the folder back."""
        self._ended.set()
        with suppress(OSError):  # a lock that cannot be removed is that of an ended process
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _hold(self) -> None:
        """Begin the heartbeat; remove what runs left that were killed while they prepared a lock."""
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
            except OSError:  # a full disk, a server that is away: the next beat may succeed, and `confirm` does not rely on this one
                continue

    def _write(self) -> None:
        """Rewrite our file. Raises FileNotFoundError where it is gone: it is never made anew."""
        before = _now()
        with self._path.open("r+b") as file:
            file.write(self._content())
            file.truncate()
        self._seen_at = before

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps({**asdict(self._owner), "heartbeat": self._beats}, indent=1).encode() + b"\n"

    def _take_free(self) -> bool:
        """Take a folder that nobody holds; False where somebody does."""
        prepared = self.out / f".{LOCK_FOLDER}.{self.run}"
        try:
            prepared.mkdir(exist_ok=True)
            (prepared / self._path.name).write_bytes(self._content())
            os.rename(prepared, self._path.parent)
        except OSError as error:
            shutil.rmtree(prepared, ignore_errors=True)
            if error.errno == errno.ENOTDIR:
                raise ValueError(f"train: {self._path.parent} is no folder, want the lock of a run there; remove it") from error
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):  # the last: another run removed what was prepared
                raise
            return self._path.exists()  # a server may have renamed while its answer was lost and the second request failed
        return True

    def _take_over(self, path: Path) -> bool:
        """Take the folder from a dead run, whose file is `path`; False where another run was faster."""
        try:
            os.rename(path, self._path)
            self._write()
        except FileNotFoundError:
            return False
        return True


def lock_run_folder(out: Path, say: Callable[[str], None], starter: int | None = None) -> RunLock:
    """Hold `out`, a folder that exists, until `RunLock.release` or the end of this process.

    A run on this host whose process has ended is taken over at once; one whose starter was killed is waited for, since it ends after its
    step. A run on another host is watched for at most `SILENT_S` seconds and taken over when its heartbeat does not move.

    Args:
        out: folder of the run.
        say: takes a line for the user about waiting and taking over.
        starter: pid of the process whose end makes this run end; None where there is none.

    Raises:
        ValueError: another run holds the folder.
        OSError: the lock cannot be written.
    """
    lock = RunLock(out, starter)
    holder: Path | None = None
    first, since, told = b"", time.monotonic(), False
    while (found := _find(out)) is not None or not lock._take_free():
        path, content = found or (None, b"")
        owner = None if path is None else Owner.parsed(path, content)
        state = owner.state() if owner else "elsewhere"
        if path != holder or (content != first and owner is None):  # another holder, or one whose file was just being written
            holder, first, since, told = path, content, time.monotonic(), False
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
        elif not told:
            what = "to end, since its starter is gone" if state == "ending" else f"for a heartbeat, {SILENT_S:.0f} s at most"
            say(f"train: {out} is in use by {owner or 'another run'}; waiting {what}")
            told = True
        time.sleep(_POLL_S)
    lock._hold()
    return lock


def check_unlocked(out: Path) -> None:
    """Raise ValueError where a process of this host holds `out`; what cannot be told at once is left to `lock_run_folder`."""
    found = _find(out)
    owner = None if found is None else Owner.parsed(*found)
    if owner and owner.state() == "running":
        raise ValueError(_busy(out, owner, "running"))


def _busy(out: Path, owner: Owner | None, state: str) -> str:
    late = f"; it did not end in {_ENDING_S:.0f} s although its starter is gone"
    seen = {"elsewhere": "; its heartbeat goes on", "ending": late}.get(state, "")
    return f"train: {out} is in use by {owner or 'another run'}{seen}; wait for its end, end it, or choose another --out"


def _find(out: Path) -> tuple[Path, bytes] | None:
    """The file of the run that holds `out`, and what it says."""
    for path in sorted((out / LOCK_FOLDER).glob("*.json")):
        with suppress(OSError):  # released or taken over between the two
            return path, path.read_bytes()
    return None


def _is_running(pid: int, start: str) -> bool:
    """Whether the process that was started then still runs. True if the system does not say which process has the pid now."""
    now = start_of(pid)
    return now is not None and str(now) in (start, "0")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return str(os.getuid())


def _now() -> float:
    """Seconds that go on while the machine is suspended, where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
