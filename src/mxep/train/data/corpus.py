"""Tokenises documents into two streams, training and held-out, in memory or in a folder of memory-mapped files.

    <folder>/corpus.json     dtype, counts, fingerprint, and a checksum of every 16 MiB of the other files
    <folder>/train.bin, held_out.bin   token ids, little-endian
    <folder>/train_starts.bin, held_out_starts.bin   index of each document's first token, int64, little-endian

Every process that opens the folder reads all of it once, several blocks at a time, and compares the checksums. A damaged folder is removed
and written again.

Processes that find no folder (the ranks of a machine, other runs) take turns with a lock file next to it. The first one writes under a
hidden name and renames the folder when all of it is on the disk. The others wait as long as the writer makes progress. The kernel releases
the lock when its owner ends, so a killed writer blocks no one. Machines that share the folder but not its locks write under names of their
own; the first to finish provides the folder."""

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mxep.train.data.tokenizer import Encoder, batches, hash_of
from mxep.train.durable_files import replace_file

TRAIN, HELD_OUT = 0, 1
NO_TARGET = 1 << 31  # set in an id of a stream whose token is not trained on; ids without it are below
FORMAT = 4
MANIFEST = "corpus.json"
FILES = ("train.bin", "held_out.bin")
STARTS = ("train_starts.bin", "held_out_starts.bin")
_BATCH_BYTES = 1 << 22  # of text, tokenised at once
_HASH_BYTES = 1 << 26  # of a stream, hashed at once
_BLOCK_BYTES = 1 << 24  # of a file, with one checksum
_READERS = 4  # threads that read and compare blocks
_POLL_S = 0.2
_NOTE_S = 0.5  # between two progress notes of the writer in the lock file
_PATIENCE_S = 600.0  # without a new note
Split = Callable[[Iterable[bytes]], tuple[list[bytes], list[bytes]]]  # documents -> (training, held-out)


@dataclass(frozen=True)
class Corpus:
    """Two token streams, documents in a fixed order with a separator after each.

    Attributes:
        train, held_out: token ids, of conversations with `NO_TARGET`; no document is in both, not even as a duplicate.
        train_starts, held_out_starts: the index in its stream of each document's first token, int64 (documents,), ascending.
        held_out_bytes: UTF-8 bytes of the held-out text, plus one for each document's end.
        fingerprint: hash of the two streams, and of the starts where ids do not tell them; equal fingerprints mean equal batches.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray
    held_out_starts: np.ndarray
    held_out_bytes: int
    fingerprint: str

    @property
    def num_train_documents(self) -> int:
        """Documents of the training stream."""
        return len(self.train_starts)

    @property
    def num_held_out_documents(self) -> int:
        """Documents of the held-out stream."""
        return len(self.held_out_starts)

    @property
    def tokens_per_byte(self) -> float:
        """Of the held-out text; 1 if tokens are bytes."""
        return len(self.held_out) / self.held_out_bytes


def document_share(document: bytes) -> float:
    """A number in [0, 1), uniform, that depends on the document's content only."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64


def split_by_share(documents: Iterable[bytes], held_out_share: float, divisible: bool = True) -> Split:
    """A function that splits the documents by the hash of their content; reads only as many documents as it needs.

    If the hash would leave one side empty, the longest document loses its end, as much as the share of the whole text is, at most half of
    it. It is cut at the end of a line if possible, else between two characters. Where documents are not `divisible`, the one with the
    smallest hash is held out.

    Raises:
        ValueError: there is a single document, and it is not `divisible`.
    """
    smallest, largest, of_longest, longest, total = 1.0, 0.0, 0.0, 0, 0
    for document in documents:
        share = document_share(document)
        smallest, largest = min(smallest, share), max(largest, share)
        if smallest < held_out_share <= largest:
            return lambda batch: _divided(batch, lambda share: share < held_out_share)
        total += len(document)
        if len(document) > longest:
            longest, of_longest = len(document), share
    if not divisible and smallest != largest:
        return lambda batch: _divided(batch, lambda share: share == smallest)
    if not divisible:
        raise ValueError("data: all conversations are the same one, want others to hold out; give more data, or --validation-data")
    alone, was_cut = smallest == largest, False
    held_out = held_out_share if alone else min(held_out_share * total / max(longest, 1), 0.4)

    def cut(batch: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The documents, the longest one in two parts at its first copy, without other copies of it."""
        nonlocal was_cut
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        for text in batch:
            if document_share(text) != of_longest:
                sides[TRAIN].append(text)
            elif not was_cut:
                was_cut = True
                end = min(int(len(text) * (1 - held_out)), len(text) - 1)
                # At the end of a line, if one is near: at most twice as much is held out, and at most half of the longest of several.
                end = text.rfind(b"\n", max(end // 2, 2 * end - len(text), 0 if alone else len(text) // 2), end) + 1 or end
                while text[end] & 0xC0 == 0x80:  # inside of a character
                    end -= 1
                sides[TRAIN].extend([text[:end]] if end or alone else [])
                sides[HELD_OUT].append(text[end:])
        return sides

    return cut


def without(validation: Iterable[bytes]) -> Split:
    """A function that drops documents that are in the validation set."""
    known = {document_share(document) for document in validation}
    return lambda batch: ([document for document in batch if document_share(document) not in known], [])


def watched(documents: Iterable[bytes], report: Callable[[str], None]) -> Iterator[bytes]:
    """These documents, with a progress message after every few MiB."""
    size = reported = 0
    for count, document in enumerate(documents, 1):
        yield document
        size += len(document)
        if size - reported >= _BATCH_BYTES:
            reported = size
            report(f"looked at {count:,} documents, {size / 2**20:,.0f} MiB of text")


def _divided(documents: Iterable[bytes], held_out: Callable[[float], bool]) -> tuple[list[bytes], list[bytes]]:
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for document in documents:
        sides[held_out(document_share(document))].append(document)
    return sides


class StreamWriter:
    """Tokenises documents into the two streams and counts them.

    Args:
        tokenizer: of both.
        store: takes TRAIN or HELD_OUT, the next ids of that stream (tokens,), and the indices in the stream where their documents begin,
            int64 (documents,).
        report: takes a progress message after each batch.
    """

    def __init__(self, tokenizer: Encoder, store: Callable[[int, np.ndarray, np.ndarray], object], report: Callable[[str], None]) -> None:
        self.tokenizer, self.store, self.report = tokenizer, store, report
        self.documents = [0, 0]
        self.nbytes = [0, 0]  # of the text, and one for each document's end
        self.tokens = [0, 0]

    def write(self, documents: Iterable[bytes], split: Split) -> None:
        """Add these documents, in this order, to the streams that `split` assigns them to."""
        for batch in batches(documents, _BATCH_BYTES):
            for side, part in enumerate(split(batch)):
                if not part:
                    continue
                ids = self.tokenizer.encode_all(part)
                tokens = np.concatenate(ids)
                ends = self.tokens[side] + np.cumsum([len(document) for document in ids], dtype=np.int64)
                self.store(side, tokens, np.concatenate([[self.tokens[side]], ends[:-1]]))
                self.documents[side] += len(part)
                self.nbytes[side] += sum(len(document) + 1 for document in part)
                self.tokens[side] += len(tokens)
            mib, count = sum(self.nbytes) / 2**20, sum(self.documents)
            self.report(f"{count:,} documents, {mib:,.0f} MiB of text, {sum(self.tokens):,} tokens")

    def corpus(self, train: np.ndarray, held_out: np.ndarray, train_starts: np.ndarray, held_out_starts: np.ndarray) -> Corpus:
        """The corpus of the stored streams. Raises ValueError if there is nothing to train on."""
        if not len(train):
            raise ValueError("data: every document is in the validation set too, nothing is left to train on")
        hashed = [train, held_out] if self.tokenizer.marks_ends else [train, held_out, train_starts, held_out_starts]
        return Corpus(train, held_out, train_starts, held_out_starts, self.nbytes[HELD_OUT], _fingerprint(hashed, self.report))


def _fingerprint(streams: list[np.ndarray], report: Callable[[str], None]) -> str:
    """Hash of the ids of both streams, perhaps also of their starts."""
    digest = hashlib.blake2b(digest_size=16)
    for stream in streams:
        digest.update(len(stream).to_bytes(8, "big"))
        content = stream.view(np.uint8)
        for start in range(0, len(content), _HASH_BYTES):
            digest.update(content[start : start + _HASH_BYTES].data)
            if start:
                report(f"checksum, {start / 2**20:,.0f} MiB of tokens")
    return digest.hexdigest()


class _DamagedError(ValueError):
    """The folder exists, but its content is not what was written."""


def prepared(folder: Path, tokenizer: Encoder, fill: Callable[[StreamWriter], None], report: Callable[[str], None]) -> Corpus:
    """The corpus in `folder`. If it is missing or damaged, this process or another one writes it with `fill`.

    Args:
        folder: its name identifies its content, so an existing folder is used if its checksums agree.
        tokenizer: of the ids.
        fill: writes all documents.
        report: takes progress messages.

    Raises:
        ValueError: what `fill` raises; the folder cannot be written or locked, or is damaged again at once; another process writes it
            without progress.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        with suppress(_DamagedError):  # it is read again under the lock, where it may be replaced
            if (corpus := _open(folder, tokenizer.dtype, report)) is not None:
                return corpus
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+b", buffering=0) as handle:
            _take_turn(handle, folder, report)
            report = _notes(handle, report)
            try:
                corpus = _open(folder, tokenizer.dtype, report)
            except _DamagedError as error:
                warnings.warn(f"{error}; it is written again", stacklevel=2)
                _remove(folder)
                corpus = None
            if corpus is None:
                _write(folder, tokenizer, fill, report)
                corpus = _open(folder, tokenizer.dtype, report)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"data: {folder} cannot be read or written: {why}; choose another folder with --data-cache") from error
    assert corpus is not None
    return corpus


def _take_turn(handle: BinaryIO, folder: Path, report: Callable[[str], None]) -> None:
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
        report(f"another process writes them: {note.decode(errors='replace')}")
        time.sleep(_POLL_S)


def _notes(handle: BinaryIO, report: Callable[[str], None]) -> Callable[[str], None]:
    """`report` that also writes a note to the lock file from time to time, for the waiting processes."""
    last = 0.0

    def note(text: str) -> None:
        nonlocal last
        report(text)
        if time.monotonic() - last >= _NOTE_S:
            last = time.monotonic()
            handle.truncate(0)  # opened for appending, so the note is written at the start
            handle.write(f"process {os.getpid()}: {text}".encode())

    return note


def _hidden(folder: Path) -> Path:
    """A new hidden name next to `folder`. Removes what killed processes of this machine left under such names; needs the lock."""
    stem = f".{folder.name}.{socket.gethostname()}."
    for left in folder.parent.glob(f"{stem}*"):
        shutil.rmtree(left, ignore_errors=True)
    return folder.with_name(stem + uuid.uuid4().hex)


def _remove(folder: Path) -> None:
    """Rename a folder, then remove it, so that no process finds a part of it. Processes that have mapped its files keep them."""
    away = _hidden(folder)
    os.replace(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def _write(folder: Path, tokenizer: Encoder, fill: Callable[[StreamWriter], None], report: Callable[[str], None]) -> None:
    """Write the folder under a hidden name and rename it. Another machine may be faster; then its folder is used."""
    partial = _hidden(folder)
    partial.mkdir()
    try:
        with ExitStack() as stack:
            streams, starts_of = ([stack.enter_context((partial / name).open("wb")) for name in names] for names in (FILES, STARTS))
            little = tokenizer.dtype.newbyteorder("<")

            def store(side: int, ids: np.ndarray, starts: np.ndarray) -> None:
                streams[side].write(ids.astype(little, copy=False).data)
                starts_of[side].write(starts.astype("<i8", copy=False).data)

            writer = StreamWriter(tokenizer, store, report)
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
            "crc32": {name: _checksums(partial / name, _BLOCK_BYTES, report) for name in (*FILES, *STARTS)},
        }
        replace_file(partial / MANIFEST, json.dumps({**content, "checksum": hash_of(content)}, indent=1).encode())
        try:
            os.replace(partial, folder)
        except OSError:
            if not (folder / MANIFEST).exists():
                raise
            shutil.rmtree(partial)  # another machine was first
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the room
        raise


def _open(folder: Path, dtype: np.dtype, report: Callable[[str], None]) -> Corpus | None:
    """Map the folder's files if their checksums agree; None if there is no folder.

    Raises:
        _DamagedError: a checksum differs, a file is missing, or the disk cannot read it.
        OSError: a file cannot be read for another reason, such as its permissions.
    """
    if not folder.exists():
        return None
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        checksum = content.pop("checksum")
        if checksum != hash_of(content):
            raise ValueError(f"the checksum of {MANIFEST} differs")
        for name, sums in content["crc32"].items():
            found, size = _checksums(folder / name, content["block_bytes"], report), content["block_bytes"]
            if len(found) != len(sums):
                raise ValueError(f"{name} is not as long as it was written")
            block = next((index for index, pair in enumerate(zip(found, sums, strict=True)) if pair[0] != pair[1]), None)
            if block is not None:
                raise ValueError(f"{name} has another checksum than when it was written, from byte {block * size} on")
        train, held_out, train_starts, held_out_starts = _mapped(folder, dtype)
        return Corpus(train, held_out, train_starts, held_out_starts, content["bytes"][HELD_OUT], content["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
            raise  # not a sign of damage
        raise _DamagedError(f"data: {folder} is damaged: {error}") from error


def _checksums(path: Path, block_bytes: int, report: Callable[[str], None]) -> list[int]:
    """CRC-32 of each block of a file. It is read and not mapped, so that a disk error is an OSError and no signal."""

    def checksum(start: int) -> int:
        with path.open("rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(block_bytes))

    size, sums = path.stat().st_size, []
    with ThreadPoolExecutor(_READERS) as pool:
        for index, found in enumerate(pool.map(checksum, range(0, size, block_bytes)), 1):
            sums.append(found)
            report(f"checksum, {min(index * block_bytes, size) / 2**20:,.0f} MiB of {path.name}")
    return sums


def _mapped(folder: Path, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    """The arrays of FILES (tokens,) and STARTS (documents,), memory-mapped."""
    kinds = [(name, dtype.newbyteorder("<")) for name in FILES] + [(name, np.dtype("<i8")) for name in STARTS]
    return tuple(
        np.asarray(np.memmap(folder / name, dtype=kind, mode="r")) if (folder / name).stat().st_size else np.empty(0, dtype=kind)
        for name, kind in kinds
    )
