"""All-gather of a few integers on the hosts of one machine's ranks, through memory that every rank's process maps.

A rank writes its values, then the number of the round; the others copy them once they see that number.  Every rank has two slots and uses
them in turn: a rank that writes round n + 2 has read every rank's round n + 1, so all ranks have read its round n.  No device and no
collective takes part, so a rank that waits can raise an error when its time limit has passed.
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

MOST_VALUES = 8192  # integers per rank and round
_HEAD = 3  # round, length, checksum
_SLOT = _HEAD + MOST_VALUES
_STATUS_BYTES = 1024  # length and text of a rank's failure; -1 as length: the rank has closed
_RANK_BYTES = 8 * 2 * _SLOT + _STATUS_BYTES
_TOKEN_BYTES = 16
# A rank that waits first polls, then yields the core (and Python's lock) between polls, then sleeps: on Linux for some 75 us.
_SPINS = 2000  # polls without a pause, about 100 us
_YIELDS_S = 2e-3  # ranks in step arrive within it
_PAUSE_S = 20e-6
_POLLS_PER_CHECK = 200  # polls between two checks of whether the rank can still arrive


class ExchangeError(RuntimeError):
    """Another rank failed, or nothing was heard of it within the time limit.

    Examples:
        >>> rows = torch.ones(64, 128)
        >>> try:
        ...     received = mxep.to_mxfp8_a2a_dequant(rows, [64], [64])
        ... except mxep.ExchangeError as error:
        ...     print(f"another rank failed: {error}")  # save what this rank has, and end the job
    """


@functools.cache
def _integers(size: int) -> struct.Struct:
    """The format of so many bytes of integers."""
    return struct.Struct(f"{size // 8}q")


def rendezvous_bytes(world: int) -> int:
    """Bytes of memory that `world` ranks share."""
    return _TOKEN_BYTES + world * _RANK_BYTES


class HostAllGather:
    """One rank's end of the all-gather.

    Args:
        memory: `rendezvous_bytes(world)` writable bytes that all ranks share, zeros before the first round.
        rank, world: this rank and the number of ranks.
        timeout_s: how long a round waits for the slowest rank.
    """

    def __init__(self, memory: bytearray | mmap.mmap, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self.timeout_s, self.round = rank, world, timeout_s, 0
        self._process = os.getpid()  # a forked process has the same memory, but is not a rank
        parts = [np.frombuffer(memory, np.int64, _RANK_BYTES // 8, _TOKEN_BYTES + r * _RANK_BYTES) for r in range(world)]
        # Memoryviews: for few words Python reads them several times faster than an array.
        words = memoryview(memory)[_TOKEN_BYTES : rendezvous_bytes(world)].cast("q")
        starts = range(0, len(words), _RANK_BYTES // 8)
        self._slots = [(words[at : at + _SLOT], words[at + _SLOT : at + 2 * _SLOT]) for at in starts]
        self._status = [part[2 * _SLOT :] for part in parts]

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values of this round, by rank; their number may differ.

        Raises:
            ValueError: more than `MOST_VALUES`; a process that was forked from the rank's.
            ExchangeError: a rank has failed, or did not arrive within `timeout_s`.
        """
        if os.getpid() != self._process:
            raise ValueError(
                f"exchange: process {os.getpid()} was forked from rank {self.rank}, process {self._process}, want the exchange there; "
                "start processes by 'spawn', and give those that exchange a process group of their own"
            )
        if len(values) > MOST_VALUES:
            raise ValueError(f"exchange: {len(values)} integers to gather, want at most {MOST_VALUES}; use fewer experts per rank")
        self.round += 1
        mine, own = self._slots[self.rank][self.round % 2], array("q", values)
        mine[_HEAD : _HEAD + len(own)] = own
        mine[1] = len(own)
        mine[2] = zlib.crc32(own, self.round)
        mine[0] = self.round
        deadline = time.monotonic() + self.timeout_s
        return [own.tolist() if rank == self.rank else self._wait_for(rank, deadline) for rank in range(self.world)]

    def fail(self, text: str) -> None:
        """Every rank that waits, now or later, raises an error with this text."""
        if os.getpid() != self._process:
            return
        status, line = self._status[self.rank], text.encode(errors="backslashreplace")[: _STATUS_BYTES - 8]
        status[1:].view(np.uint8)[: len(line)] = np.frombuffer(line, np.uint8)
        status[0] = len(line)

    def close(self) -> None:
        """Every rank that waits for a later round of this one raises an error; what this rank has sent is complete."""
        if os.getpid() == self._process and not self._status[self.rank][0]:
            self._status[self.rank][0] = -1

    def failure(self) -> str | None:
        """The text of another rank's failure, None if no rank has failed."""
        for rank, status in enumerate(self._status):
            if rank != self.rank and status[0] > 0:
                return f"rank {rank}: {status[1:].view(np.uint8)[: status[0]].tobytes().decode(errors='replace')}"
        return None

    def _wait_for(self, rank: int, deadline: float) -> list[int]:
        """That rank's values of this round."""
        slot, polls, yields_until = self._slots[rank][self.round % 2], 0, deadline - self.timeout_s + _YIELDS_S
        while (values := self._read(slot)) is None:
            polls += 1
            if polls <= _SPINS:
                continue
            if time.monotonic() < yields_until:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_S)
            if polls % _POLLS_PER_CHECK == 0:
                self._check_rank(rank, deadline)
        return values

    def _read(self, slot: memoryview) -> list[int] | None:
        """The values in a slot; None if they are of another round, or incomplete: then the checksum does not match."""
        if slot[0] != self.round:
            return None
        content = slot[_HEAD : _HEAD + min(slot[1], MOST_VALUES)].tobytes()
        return list(_integers(len(content)).unpack(content)) if zlib.crc32(content, self.round) == slot[2] else None

    def _check_rank(self, rank: int, deadline: float) -> None:
        """Raise ExchangeError if that rank will not arrive."""
        me = f"exchange {self.round} (this is rank {self.rank} of {self.world})"
        failure = self.failure()
        if failure is not None:
            raise ExchangeError(f"{me}: {failure}")
        if self._status[rank][0] < 0:
            raise ExchangeError(f"{me}: rank {rank} has closed its transport; every rank makes the same calls")
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"{me}: nothing from rank {rank} for {self.timeout_s:g} s; it died, hangs or makes other calls. "
                "Look at its log, or give set_transport (timeout_s) or the group more time"
            )


@contextlib.contextmanager
def shared_file(world: int) -> Iterator[tuple[Path, bytes]]:
    """A new file of shared memory, and a token by which other ranks recognise it; a process that has opened the file keeps its memory."""
    shared_memory = Path("/dev/shm")
    with scratch_folder("rendezvous", shared_memory if os.access(shared_memory, os.W_OK) else None) as folder:
        path, token = folder / "rendezvous", secrets.token_bytes(_TOKEN_BYTES)
        with path.open("wb") as file:
            file.write(token)
            file.truncate(rendezvous_bytes(world))
        yield path, token


def open_file(path: Path, token: bytes, world: int) -> mmap.mmap | None:
    """The memory of the file, None if this process does not see that file."""
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), rendezvous_bytes(world))
    except (OSError, ValueError):
        return None
    return memory if memory[:_TOKEN_BYTES] == token else None
