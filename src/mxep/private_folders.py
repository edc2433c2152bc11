"""Private folders: the cache of compiled kernels, and scratch folders that the next start removes after a kill. Imports no torch.

Code that other users can write is never run.  A file is trusted if it and its folder belong to this user or to root, and neither group nor
others may write to them.  The sticky bit of a folder such as /tmp is not enough: others may still create files there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mxep.processes import pid_scope, start_of

_PRIVATE = 0o700
_RECORDS = "process_*.json"  # one for each process that uses a scratch folder


# ---------------------------------------------------------------- cache


def cache_folder() -> Path:
    """`$MXEP_CACHE`, else `$XDG_CACHE_HOME/mxep`, else `~/.cache/mxep`; ~ is expanded. Not created here."""
    if named := os.environ.get("MXEP_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mxep"


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700; existing folders are unchanged."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(_PRIVATE, exist_ok=True)


def read_private(path: Path) -> bytes:
    """The content of a file that only this user or root can have written.

    Raises:
        PermissionError: another user can have written it.  OSError: it cannot be read.
    """
    with _private(path.parent) as folder, os.fdopen(os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
        _check_private(path, os.fstat(file.fileno()))
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically: a temporary file next to it is renamed. A missing folder is created.

    Raises:
        PermissionError: others can write into the folder.  OSError: it cannot be written.
    """
    make_private(path.parent)
    with _private(path.parent):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[int]:
    """A descriptor of a private folder. Files opened through it are in the folder that was checked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(folder, os.fstat(handle))
        yield handle
    finally:
        os.close(handle)


def _check_private(path: Path, found: os.stat_result) -> None:
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        raise PermissionError(f"{path} belongs to user {found.st_uid}, want user {user}, who runs this")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.filemode(found.st_mode)
        raise PermissionError(
            f"{path} has mode {mode}, want it writable by its owner alone; `chmod go-w {path}` if you trust what is there"
        )


# ---------------------------------------------------------------- scratch


@contextlib.contextmanager
def scratch_folder(purpose: str, where: Path | None = None) -> Iterator[Path]:
    """A new folder `mxep-<purpose>-...` in `where` (None: the system's temporary folder), removed at the end.

    Removes scratch folders of this user's killed processes first.  Further processes that use the folder register with `record_process`.
    """
    where = Path(tempfile.gettempdir()) if where is None else where
    _remove_leftovers(where)
    folder, process = Path(tempfile.mkdtemp(prefix=f"mxep-{purpose}-", dir=where)), os.getpid()
    try:
        record_process(folder, process)
        yield folder
    finally:
        if os.getpid() == process:  # a forked child must not remove it
            shutil.rmtree(folder, ignore_errors=True)


def record_process(folder: Path, pid: int) -> None:
    """Register a process that uses a scratch folder: the folder is removed only after it has ended."""
    (folder / _RECORDS.replace("*", str(pid))).write_text(json.dumps({"host": _host(), "pid": pid, "start": start_of(pid)}))


def _remove_leftovers(where: Path) -> None:
    for folder in where.glob("mxep-*"):
        try:
            found = folder.lstat()
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue
            records = [json.loads(path.read_text()) for path in folder.glob(_RECORDS)]
            if records and all(_has_ended(record) for record in records):
                shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # an unreadable record, or another process is removing the folder


def _has_ended(record: dict) -> bool:
    """True if the process of a record has certainly ended; False for another host or container."""
    return record["host"] == _host() and start_of(int(record["pid"])) != record["start"]


def _host() -> str:
    return pid_scope() or platform.node()
