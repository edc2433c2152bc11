"""A board on the host that the ranks of one machine share: in every round each rank shows all others a few integers.

A piece of memory that every rank's process maps.  A rank writes what it shows, then the number of the round; the others copy it once
they see that number.  Two places per rank, taken in turn: who writes round n + 2 has read every rank's round n + 1, so all have read its
own round n.  No device and no collective takes part, so a rank that waits here can say that it waited too long.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import struct
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mxep.private_folders import scratch_folder

MOST_VALUES = 8192  # integers that a rank can show in a round
_HEAD = 3  # round, length, checksum
_PLACE = _HEAD + MOST_VALUES
_NOTE_BYTES = 1024  # the text with which a rank says that it failed; the first word is its length
_RANK_BYTES = 8 * 2 * _PLACE + _NOTE_BYTES
_TOKEN_BYTES = 16
# A rank that waits looks again at once; then it lets others have the core, and the interpreter, between looks; then it sleeps, for longer
# than it asks for: on Linux some 75 us.
_SPINS = 2000  # looks without a pause, about 100 us
_YIELDS_S = 2e-3  # hosts of ranks in step come within it
_PAUSE_S = 20e-6
_PATIENCE = 200  # looks between two questions whether there is anything left to wait for


class ExchangeError(RuntimeError):
    """Another rank failed, or nothing was heard of it within the time limit."""


@functools.cache
def _words(size: int) -> struct.Struct:
    """So many bytes of integers."""
    return struct.Struct(f"{size // 8}q")


def board_bytes(world: int) -> int:
    """Bytes of memory that a board of `world` ranks takes."""
    return _TOKEN_BYTES + world * _RANK_BYTES


class Board:
    """One rank's view of the board.

    Args:
        memory: `board_bytes(world)` writable bytes that all ranks share, zeros before the first round.
        rank, world: this rank and how many there are.
        timeout_s: how long a round waits for the slowest rank.
    """

    def __init__(self, memory: bytearray | mmap.mmap, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s, self.round = rank, world, timeout_s, 0
        self._process = os.getpid()  # a forked one has the same memory, and is no rank
        parts = [np.frombuffer(memory, np.int64, _RANK_BYTES // 8, _TOKEN_BYTES + r * _RANK_BYTES) for r in range(world)]
        # Few words at a time: through these views Python has them several times faster than through an array.
        words = memoryview(memory)[_TOKEN_BYTES : board_bytes(world)].cast("q")
        starts = range(0, len(words), _RANK_BYTES // 8)
        self._places = [(words[at : at + _PLACE], words[at + _PLACE : at + 2 * _PLACE]) for at in starts]
        self._notes = [part[2 * _PLACE :] for part in parts]

    def show(self, values: Sequence[int]) -> list[list[int]]:
        """What every rank shows in this round, by rank.

        Raises:
            ValueError: more than `MOST_VALUES`; a process that was forked from the rank's.
            ExchangeError: a rank has failed, or showed nothing for `timeout_s`.
        """
        if os.getpid() != self._process:
            raise ValueError(
                f"exchange: process {os.getpid()} was forked from rank {self.rank}, process {self._process}, want the exchange there; "
                "start processes by 'spawn', and give those that exchange a process group of their own"
            )
        if len(values) > MOST_VALUES:
            raise ValueError(f"exchange: {len(values)} integers on the board, want at most {MOST_VALUES}; use fewer experts per rank")
        self.round += 1
        mine, shown = self._places[self.rank][self.round % 2], array("q", values)
        mine[_HEAD : _HEAD + len(shown)] = shown
        mine[1] = len(shown)
        mine[2] = zlib.crc32(shown, self.round)
        mine[0] = self.round
        deadline = time.monotonic() + self.timeout_s
        return [shown.tolist() if rank == self.rank else self._read(rank, deadline) for rank in range(self.world)]

    def fail(self, text: str) -> None:
        """Tell every rank that waits, now or later, that this one failed."""
        if os.getpid() != self._process:
            return
        note, line = self._notes[self.rank], text.encode()[: _NOTE_BYTES - 8]
        note[1:].view(np.uint8)[: len(line)] = np.frombuffer(line, np.uint8)
        note[0] = len(line)

    def leave(self) -> None:
        """Tell every rank that waits for a further round of this one that none will come; what it has sent is complete."""
        if os.getpid() == self._process and not self._notes[self.rank][0]:
            self._notes[self.rank][0] = -1

    def failure(self) -> str | None:
        """What another rank said when it failed, None while none has."""
        for rank, note in enumerate(self._notes):
            if rank != self.rank and note[0] > 0:
                return f"rank {rank}: {note[1:].view(np.uint8)[: note[0]].tobytes().decode(errors='replace')}"
        return None

    def _read(self, rank: int, deadline: float) -> list[int]:
        """What that rank shows in this round, when it does."""
        place, looks, yields_until = self._places[rank][self.round % 2], 0, deadline - self.timeout_s + _YIELDS_S
        while (values := self._shown(place)) is None:
            looks += 1
            if looks <= _SPINS:
                continue
            if time.monotonic() < yields_until:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_S)
            if looks % _PATIENCE == 0:
                self._give_up(rank, deadline)
        return values

    def _shown(self, place: memoryview) -> list[int] | None:
        """What is in a place, None while it is not of this round, or its words still arrive: then they do not fit their checksum."""
        if place[0] != self.round:
            return None
        content = place[_HEAD : _HEAD + min(place[1], MOST_VALUES)].tobytes()
        return list(_words(len(content)).unpack(content)) if zlib.crc32(content, self.round) == place[2] else None

    def _give_up(self, rank: int, deadline: float) -> None:
        """Raise ExchangeError when there is nothing left to wait for."""
        me = f"exchange {self.round} (this is rank {self.rank} of {self.world})"
        failure = self.failure()
        if failure is not None:
            raise ExchangeError(f"{me}: {failure}")
        if self._notes[rank][0] < 0:
            raise ExchangeError(f"{me}: rank {rank} has closed its transport; every rank makes the same calls")
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"{me}: nothing from rank {rank} for {self.timeout_s:g} s; it died, hangs or makes other calls. "
                "Look at its log, or give set_transport (timeout_s) or the group more time"
            )


@contextlib.contextmanager
def shared_file(world: int) -> Iterator[tuple[Path, bytes]]:
    """A new file for a board, and the token by which others know that theirs is the same file. Who has opened it keeps its memory."""
    shared_memory = Path("/dev/shm")
    with scratch_folder("board", shared_memory if os.access(shared_memory, os.W_OK) else None) as folder:
        path, token = folder / "board", secrets.token_bytes(_TOKEN_BYTES)
        with path.open("wb") as file:
            file.write(token)
            file.truncate(board_bytes(world))
        yield path, token


def open_file(path: Path, token: bytes, world: int) -> mmap.mmap | None:
    """The memory of a board's file, None where this process does not see that file."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), board_bytes(world))
    except (OSError, ValueError):
        return None
    return memory if memory[:_TOKEN_BYTES] == token else None
