"""A corpus in a folder: files of token ids and of where documents begin, mapped into memory and not read into it.

    <folder>/corpus.json     dtype, counts, fingerprint, and a checksum of every 16 MiB of the other files
    <folder>/train.bin, held_out.bin   token ids, little-endian
    <folder>/train_starts.bin, held_out_starts.bin   index of each document's first token, int64, little-endian

Every process that opens the folder reads all of it once and compares the checksums, several blocks at a time.  A damaged folder is
replaced: it is renamed and removed, and written again.

Processes that find none (the ranks of a machine, other runs) take turns at a lock beside it: the first writes, under a hidden name that
becomes the folder's when all of it is on the disk, and the others wait for as long as it gets on.  The lock is the kernel's and ends with
its owner, so a writer that is killed leaves nothing in the way.  Machines that share the folder without sharing locks write under names of
their own; the first that is done gives the folder, the others take it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mxep.train.corpus import HELD_OUT, TRAIN, Corpus, StreamWriter
from mxep.train.tokenizer import Tokenizer

FORMAT = 3
MANIFEST = "corpus.json"
FILES = ("train.bin", "held_out.bin")
STARTS = ("train_starts.bin", "held_out_starts.bin")
_BLOCK_BYTES = 1 << 24  # of a file, with one checksum
_READERS = 4  # threads that read and compare blocks
_POLL_S = 0.2
_TELL_S = 0.5  # between two notes of the writer to those who wait
_PATIENCE_S = 600.0  # without such a note


class _DamagedError(ValueError):
    """The folder is there, and not what was written."""


def prepared(folder: Path, tokenizer: Tokenizer, fill: Callable[[StreamWriter], None], tell: Callable[[str], None]) -> Corpus:
    """The corpus in `folder`; where there is none or a damaged one, it is made of what `fill` writes, here or by whoever came first.

    Args:
        folder: its name says what is in it, so that what is there can be taken once its checksums agree.
        tokenizer: of the ids.
        fill: writes all documents.
        tell: takes texts for people while this takes long.

    Raises:
        ValueError: what `fill` raises; the folder cannot be written or locked, or is damaged again at once; whoever writes it does not get
            on.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        with suppress(_DamagedError):  # it is read once more by the one who may replace it
            if (corpus := _open(folder, tokenizer.dtype, tell)) is not None:
                return corpus
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+b", buffering=0) as handle:
            _take_turn(handle, folder, tell)
            tell = _notes(handle, tell)
            try:
                corpus = _open(folder, tokenizer.dtype, tell)
            except _DamagedError as error:
                warnings.warn(f"{error}; it is written again", stacklevel=2)
                _remove(folder)
                corpus = None
            if corpus is None:
                _write(folder, tokenizer, fill, tell)
                corpus = _open(folder, tokenizer.dtype, tell)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"data: {folder} cannot be read or written: {why}; choose another folder with --data-cache") from error
    assert corpus is not None
    return corpus


def _take_turn(handle: BinaryIO, folder: Path, tell: Callable[[str], None]) -> None:
    """Wait until this process has the lock."""
    note, since = b"", time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        handle.seek(0)
        if (now := handle.read()) != note:
            note, since = now, time.monotonic()
        if time.monotonic() - since > _PATIENCE_S:
            raise ValueError(
                f"data: waited for another process to write {folder}, which has not got on for {_PATIENCE_S:.0f} s "
                f"({note.decode(errors='replace') or 'it said nothing'}); end it, or choose another folder with --data-cache"
            )
        tell(f"another process writes them: {note.decode(errors='replace')}")
        time.sleep(_POLL_S)


def _notes(handle: BinaryIO, tell: Callable[[str], None]) -> Callable[[str], None]:
    """`tell`, and a note in the lock's file from time to time for those who wait."""
    last = 0.0

    def note(text: str) -> None:
        nonlocal last
        tell(text)
        if time.monotonic() - last >= _TELL_S:
            last = time.monotonic()
            handle.truncate(0)  # it was opened to append: what is written stands at the end, which is the start now
            handle.write(f"process {os.getpid()}: {text}".encode())

    return note


def _hidden(folder: Path) -> Path:
    """A new name beside `folder`; what a kill left under such names of this machine, of which this process has the lock, is removed."""
    stem = f".{folder.name}.{socket.gethostname()}."
    for left in folder.parent.glob(f"{stem}*"):
        shutil.rmtree(left, ignore_errors=True)
    return folder.with_name(stem + uuid.uuid4().hex)


def _remove(folder: Path) -> None:
    """Take a folder away as a whole, so that nobody finds parts of it; processes that have mapped its files keep these."""
    away = _hidden(folder)
    os.replace(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def _write(folder: Path, tokenizer: Tokenizer, fill: Callable[[StreamWriter], None], tell: Callable[[str], None]) -> None:
    """Write the folder beside its place; it is there when it is complete, this one or that of another machine."""
    partial = _hidden(folder)
    partial.mkdir()
    try:
        with ExitStack() as stack:
            streams, starts_of = ([stack.enter_context((partial / name).open("wb")) for name in names] for names in (FILES, STARTS))
            little = tokenizer.dtype.newbyteorder("<")

            def store(side: int, ids: np.ndarray, starts: np.ndarray) -> None:
                streams[side].write(ids.astype(little, copy=False).data)
                starts_of[side].write(starts.astype("<i8", copy=False).data)

            writer = StreamWriter(tokenizer, store, tell)
            fill(writer)
            for stream in (*streams, *starts_of):
                stream.flush()
                os.fsync(stream.fileno())
        corpus = writer.corpus(*_mapped(partial, tokenizer.dtype))
        content = {
            "format": FORMAT,
            "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
            "dtype": tokenizer.dtype.name,
            "tokens": writer.tokens,
            "documents": writer.documents,
            "bytes": writer.nbytes,
            "fingerprint": corpus.fingerprint,
            "block_bytes": _BLOCK_BYTES,
            "crc32": {name: _checksums(partial / name, _BLOCK_BYTES, tell) for name in (*FILES, *STARTS)},
        }
        with (partial / MANIFEST).open("w") as file:
            json.dump({**content, "checksum": _digest(content)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(partial, folder)
        except OSError:
            if not (folder / MANIFEST).exists():
                raise
            shutil.rmtree(partial)  # another machine was first
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise


def _open(folder: Path, dtype: np.dtype, tell: Callable[[str], None]) -> Corpus | None:
    """Map what is there when its checksums agree; None where there is nothing.

    Raises:
        _DamagedError: the checksums differ, or the disk cannot read a file or has none of them.
        OSError: a file cannot be read for another reason, as one of another user.
    """
    if not folder.exists():
        return None
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        checksum = content.pop("checksum")
        if checksum != _digest(content):
            raise ValueError(f"the checksum of {MANIFEST} differs")
        for name, sums in content["crc32"].items():
            found, size = _checksums(folder / name, content["block_bytes"], tell), content["block_bytes"]
            if len(found) != len(sums):
                raise ValueError(f"{name} is not as long as it was written")
            block = next((index for index, pair in enumerate(zip(found, sums, strict=True)) if pair[0] != pair[1]), None)
            if block is not None:
                raise ValueError(f"{name} has another checksum than when it was written, from byte {block * size} on")
        documents = content["documents"]
        train, held_out, train_starts, held_out_starts = _mapped(folder, dtype)
        counts = (documents[TRAIN], documents[HELD_OUT], content["bytes"][HELD_OUT])
        return Corpus(train, held_out, train_starts, held_out_starts, *counts, content["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
            raise  # nothing is known to be wrong with the files
        raise _DamagedError(f"data: {folder} is damaged: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    """Hash of a manifest without its checksum."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _checksums(path: Path, block_bytes: int, tell: Callable[[str], None]) -> list[int]:
    """CRC-32 of each block of a file, read and not mapped: a disk's error is an OSError and no signal."""

    def checksum(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(block_bytes))

    size, sums = path.stat().st_size, []
    with ThreadPoolExecutor(_READERS) as pool:
        for index, found in enumerate(pool.map(checksum, range(0, size, block_bytes)), 1):
            sums.append(found)
            tell(f"checksum, {min(index * block_bytes, size) / 2**20:,.0f} MiB of {path.name}")
    return sums


def _mapped(folder: Path, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """The arrays of FILES and STARTS, (tokens,) and (documents,), read when they are needed."""
    kinds = [(name, dtype.newbyteorder("<")) for name in FILES] + [(name, np.dtype("<i8")) for name in STARTS]
    return tuple(
        np.asarray(np.memmap(folder / name, dtype=kind, mode="r")) if (folder / name).stat().st_size else np.empty(0, dtype=kind)
        for name, kind in kinds
    )
