"""Memory that peers write into, as owned pieces: who holds a tensor on a piece keeps it, and nobody is given it before.

Every rank has the same slabs under the same numbers, since allocating one is a step that all ranks take together, and so is letting go of
one (`mxep.comm.growth`); which of its own free slabs a rank uses for an exchange is its own affair, unless it is far too large, and it
tells the others.  So ranks may let go of tensors in different order.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mxep.shapes import round_up

SMALL = 4 << 20  # bytes; below it a slab may be any number of times too large
MOST_TIMES_TOO_LARGE = 1.5  # for the rank that needs most: what a layer saves of its tokens in MX should not keep a slab for bf16 rows
_PAGE = 2 << 20  # bytes; what a GPU's driver maps at least


@dataclass
class Slab:
    """One piece of memory on every rank.

    Attributes:
        memory: (size,) uint8, this rank's.  addresses: where each rank's is, as this rank sees it.
        owner: what must be let go of before `memory` is, and keeps the addresses valid.
        last_use: the capture that leased it last, 0 for an eager exchange, and the driver's stream which that exchange began on; work that
            is queued there may still read the memory.  None before the first lease.
    """

    memory: torch.Tensor
    addresses: list[int]
    owner: Any = None
    last_use: tuple[int, int | None] | None = None

    def let_go(self) -> None:
        """Of the memory: of the peers' views, then of the handle, then of this rank's; nothing reads or writes there any more."""
        self.addresses.clear()
        self.owner = None
        self.memory = self.memory.new_empty(0)


class Memory(Protocol):
    """Where slabs come from; every method is a step that all ranks take together."""

    def allocate(self, size: int) -> Slab:
        """A new slab of `size` bytes.

        Raises:
            torch.OutOfMemoryError: a rank has not that much left, on every rank.
        """

    def release(self, slabs: Sequence[Slab]) -> None:
        """Let go of slabs that no rank hands out any more, once every rank's device is done; all ranks have before any rank returns."""

    def flags(self, count: int) -> Slab:
        """`count` words of 32 bits for flags, all zero on every rank before any rank returns."""


def slab_bytes(size: int, *, steady: bool = False) -> int:
    """Bytes of the slab for a need of `size` bytes: steps of a sixteenth, so that uneven routing finds old slabs large enough.

    Args:
        steady: the need hangs on shapes alone, so that what is too much would be so in every step: steps of at most 2 MiB.

    >>> slab_bytes(1000), slab_bytes(140_000)
    (4096, 147456)
    >>> rows = 131072 * 4224
    >>> slab_bytes(rows) - rows, slab_bytes(rows, steady=True) - rows
    (16777216, 0)
    """
    step = max(4096, 1 << max(size.bit_length() - 5, 0))
    return round_up(max(size, 1), min(step, _PAGE) if steady else step)


def most_bytes(size: int) -> int:
    """Of a slab for a buffer of which some rank needs `size` bytes, and none more; beyond that it is far too large."""
    return max(round(MOST_TIMES_TOO_LARGE * slab_bytes(size)), SMALL)


class Lease:
    """The right to one slab, until the last tensor on it is gone."""

    def __init__(self, pool: Pool, index: int, owner: int = 0) -> None:
        self._pool, self.index, self._owner = pool, index, owner
        self.slab = pool.slabs[index]

    def __del__(self) -> None:
        self._pool.give_back(self.index, self._owner)


class _Memory:
    """A slab's memory as others than torch see it; torch keeps this object, and with it the lease, as long as its storage."""

    def __init__(self, lease: Lease) -> None:
        memory = lease.slab.memory
        self.lease = lease
        view = {"shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3, "strides": None}
        setattr(self, "__cuda_array_interface__" if memory.is_cuda else "__array_interface__", view)


def tensor_on(lease: Lease) -> torch.Tensor:
    """(size,) uint8 on the slab of a lease. The lease lasts as long as this tensor, its views and what autograd saved of them."""
    memory = _Memory(lease)
    if lease.slab.memory.is_cuda:
        return torch.as_tensor(memory, device=lease.slab.memory.device)
    return torch.from_numpy(np.asarray(memory))


class Pool:
    """The slabs of one group, and which of them are free on this rank.

    A slab belongs to eager exchanges, owner 0, until the capture of a CUDA graph takes it, whose number owns it from then on: every replay
    writes there.  So a captured slab is never given to anybody but that capture.

    Attributes:
        slabs: by number; a number is never used again.  now: the number of the latest exchange, which who uses the pool counts.
    """

    def __init__(self) -> None:
        self.slabs: dict[int, Slab] = {}
        self.now = 0
        self._added = 0
        self._free: dict[int, dict[int, int]] = defaultdict(dict)  # owner -> number -> the latest exchange when it became free
        self._sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)  # owner -> (bytes, number) of each of them, sorted
        self._were: dict[int, tuple[int, int]] = {}  # number of one that was taken -> its owner before, and when it had become free
        # Owner, number, when: what became free since somebody looked.  Tensors die on autograd's threads too, and wherever the garbage
        # collector runs, in here as well, so their end changes nothing else.
        self._returned: deque[tuple[int, int, int]] = deque()
        self._lock = threading.RLock()

    def add(self, slab: Slab) -> int:
        """A new slab, free; its number, the same on every rank."""
        with self._lock:
            index, self._added = self._added, self._added + 1
            self.slabs[index] = slab
            self._put(0, index, self.now)
            return index

    def take(self, size: int, owner: int = 0) -> int:
        """The smallest free slab of at least `size` bytes, or -1; of a capture's own ones first, if that is not far too large.

        Whether it is far too large for an exchange hangs on what the other ranks need (`mxep.comm.growth`).
        """
        with self._lock:
            self._look()
            found: list[tuple[bool, int, int]] = []  # far too large, owner, number
            for free in (owner, 0) if owner else (0,):
                sizes = self._sizes[free]
                first = bisect_left(sizes, (size, -1))
                if first < len(sizes):
                    found.append((sizes[first][0] > most_bytes(size), free, sizes[first][1]))
            if not found:
                return -1
            _, free, index = min(found, key=lambda one: one[0])
            return self._get(free, index)

    def take_each(self, sizes: Sequence[int], owner: int = 0) -> list[int]:
        """`take` for each of these sizes, the largest first: so none gets the slab that only a larger one wants."""
        taken = [-1] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            taken[i] = self.take(sizes[i], owner)
        return taken

    def claim(self, index: int) -> None:
        """Take that slab."""
        with self._lock:
            self._look()
            self._get(0, index)

    def give_back(self, index: int, owner: int = 0) -> None:
        """It is free again: what follows on the stream may overwrite it."""
        self._returned.append((owner, index, self.now))

    def put_back(self, indices: Sequence[int]) -> None:
        """Those that were taken, -1 aside, are as they were before: nothing was done with them."""
        with self._lock:
            for index in indices:
                if index >= 0:
                    owner, since = self._were.pop(index)
                    self._put(owner, index, since)

    def free(self) -> dict[int, int]:
        """The free slabs of eager exchanges -> the latest exchange when they became so."""
        with self._lock:
            self._look()
            return dict(self._free[0])

    def remove(self, indices: Collection[int]) -> list[Slab]:
        """Free slabs of eager exchanges, which are no longer here."""
        with self._lock:
            self._look()
            for index in indices:
                del self._were[self._get(0, index)]
            return [self.slabs.pop(index) for index in indices]

    def each(self, act: Callable[[Slab], None]) -> None:
        """Call `act` with every slab; none is removed meanwhile."""
        with self._lock:
            for slab in list(self.slabs.values()):
                act(slab)

    def nbytes(self) -> int:
        """Bytes of memory in all slabs of this rank."""
        return sum(slab.memory.numel() for slab in list(self.slabs.values()))

    def _look(self) -> None:
        """What became free since the last look is so."""
        while self._returned:
            self._put(*self._returned.popleft())

    def _put(self, owner: int, index: int, since: int) -> None:
        self._free[owner][index] = since
        insort(self._sizes[owner], (self.slabs[index].memory.numel(), index))

    def _get(self, owner: int, index: int) -> int:
        self._were[index] = owner, self._free[owner].pop(index)
        sizes = self._sizes[owner]
        del sizes[bisect_left(sizes, (self.slabs[index].memory.numel(), index))]
        return index
