"""A corpus in a folder: two files of token ids, mapped into memory and not read into it; written once, by one process at a time.

    <folder>/corpus.json     dtype, counts, fingerprint
    <folder>/train.bin, held_out.bin   token ids, little-endian

Processes that need the same folder (the ranks of a machine, other runs) take turns at a lock beside it: the first writes, under a hidden
name that becomes the folder's when all of it is on the disk, and the others wait for as long as it gets on.  The lock is the kernel's and
ends with its owner, so a writer that is killed leaves nothing in the way.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mxep.train.corpus import HELD_OUT, TRAIN, Corpus, StreamWriter
from mxep.train.tokenizer import Tokenizer

FORMAT = 2
MANIFEST = "corpus.json"
FILES = ("train.bin", "held_out.bin")
_POLL_S = 0.2
_TELL_S = 0.5  # between two notes of the writer to those who wait
_PATIENCE_S = 600.0  # without such a note


def prepared(folder: Path, tokenizer: Tokenizer, fill: Callable[[StreamWriter], None], tell: Callable[[str], None]) -> Corpus:
    """The corpus in `folder`; where there is none yet, it is made of what `fill` writes, here or by whoever came first.

    Args:
        folder: its name says what is in it, so that what is there can be taken as it is.
        tokenizer: of the ids.
        fill: writes all documents.
        tell: takes texts for people while this takes long.

    Raises:
        ValueError: what `fill` raises; the folder cannot be written or locked, or is damaged; whoever writes it does not get on.
    """
    if (folder / MANIFEST).exists():
        return _open(folder, tokenizer.dtype)
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+b", buffering=0) as handle:
            if _take_turn(handle, folder, tell):
                _write(folder, tokenizer, fill, _notes(handle, tell))
    except OSError as error:
        raise ValueError(f"data: {folder} cannot be written: {error.strerror or error}; choose another folder with --data-cache") from error
    return _open(folder, tokenizer.dtype)


def _take_turn(handle: BinaryIO, folder: Path, tell: Callable[[str], None]) -> bool:
    """Wait until the folder is there (False) or this process is the one to write it (True)."""
    note, since = b"", time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return not (folder / MANIFEST).exists()
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


def _write(folder: Path, tokenizer: Tokenizer, fill: Callable[[StreamWriter], None], tell: Callable[[str], None]) -> None:
    """Write the folder beside its place; it is there when it is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a kill
    partial.mkdir()
    try:
        with (partial / FILES[TRAIN]).open("wb") as train, (partial / FILES[HELD_OUT]).open("wb") as held_out:
            streams = (train, held_out)
            little = tokenizer.dtype.newbyteorder("<")
            writer = StreamWriter(tokenizer, lambda side, ids: streams[side].write(ids.astype(little, copy=False).data), tell)
            fill(writer)
            for stream in streams:
                stream.flush()
                os.fsync(stream.fileno())
        corpus = writer.corpus(*(_mapped(partial / name, tokenizer.dtype) for name in FILES))
        content = {
            "format": FORMAT,
            "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
            "dtype": tokenizer.dtype.name,
            "tokens": writer.tokens,
            "documents": writer.documents,
            "bytes": writer.nbytes,
            "fingerprint": corpus.fingerprint,
        }
        with (partial / MANIFEST).open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # what is left of one without a manifest, which nothing can open
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise


def _open(folder: Path, dtype: np.dtype) -> Corpus:
    """Map what is there. Raises ValueError when it is damaged or of another version."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        train, held_out = (_mapped(folder / name, dtype) for name in FILES)
        if (content["format"], content["dtype"], content["tokens"]) != (FORMAT, dtype.name, [len(train), len(held_out)]):
            raise ValueError("its files are not what its manifest says")
        documents = content["documents"]
        return Corpus(train, held_out, documents[TRAIN], documents[HELD_OUT], content["bytes"][HELD_OUT], content["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data: {folder} is damaged: {error}; remove it, and it is written again") from error


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The ids in a file, (tokens,), read when they are needed."""
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r"))
