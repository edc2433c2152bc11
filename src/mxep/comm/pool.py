"""Memory that peers write into, as owned pieces: who holds a tensor on a piece keeps it, and nobody is given it before.

Every rank has the same slabs under the same numbers, since allocating one is a step that all ranks take together; which of its own free
slabs a rank uses for an exchange is its own affair, and it tells the others.  So ranks may let go of tensors in different order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mxep.shapes import round_up

_SMALL = 4 << 20  # bytes; below it a slab may be any number of times too large
_MOST_TIMES_TOO_LARGE = 1.5  # what a layer saves of its tokens in MX should not keep a slab that bf16 rows need


@dataclass
class Slab:
    """One piece of memory on every rank.

    Attributes:
        memory: (size,) uint8, this rank's.  addresses: where each rank's is, as this rank sees it.
        owner: what must be let go of before `memory` is, and keeps the addresses valid.
    """

    memory: torch.Tensor
    addresses: list[int]
    owner: Any = None


class Memory(Protocol):
    """Where slabs come from; every method is a step that all ranks take together."""

    def allocate(self, size: int) -> Slab:
        """A new slab of `size` bytes."""

    def flags(self, count: int) -> Slab:
        """`count` words of 32 bits for flags, all zero on every rank before any rank returns."""


def slab_bytes(size: int) -> int:
    """Bytes of the slab for a need of `size` bytes: steps of a sixteenth, so that uneven routing finds old slabs large enough.

    >>> slab_bytes(1000), slab_bytes(140_000)
    (4096, 147456)
    """
    return round_up(max(size, 1), max(4096, 1 << max(size.bit_length() - 5, 0)))


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
    """

    def __init__(self) -> None:
        self.slabs: list[Slab] = []
        self._free: dict[int, set[int]] = defaultdict(set)
        self._lock = threading.Lock()  # tensors die on autograd's threads too

    def add(self, slab: Slab) -> int:
        """A new slab, free; its number, the same on every rank."""
        with self._lock:
            self.slabs.append(slab)
            self._free[0].add(len(self.slabs) - 1)
            return len(self.slabs) - 1

    def take(self, size: int, owner: int = 0) -> int:
        """The smallest free slab of at least `size` bytes that is not far too large, or -1; a capture's own ones first."""
        with self._lock:
            for free in (self._free[owner], self._free[0]):
                sizes = {index: self.slabs[index].memory.numel() for index in free}
                fits = [index for index, there in sizes.items() if size <= there <= max(_MOST_TIMES_TOO_LARGE * slab_bytes(size), _SMALL)]
                if fits:
                    best = min(fits, key=lambda index: (sizes[index], index))
                    free.remove(best)
                    return best
            return -1

    def claim(self, index: int) -> None:
        """Take that slab."""
        with self._lock:
            self._free[0].remove(index)

    def give_back(self, index: int, owner: int = 0) -> None:
        """It is free again: what follows on the stream may overwrite it."""
        with self._lock:
            self._free[owner].add(index)

    def nbytes(self) -> int:
        """Bytes of memory in all slabs of this rank."""
        return sum(slab.memory.numel() for slab in self.slabs)
