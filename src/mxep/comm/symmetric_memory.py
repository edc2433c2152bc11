"""Memory that peers write into: buffers that all ranks allocate together, and tensors that own them.

Every rank has the same buffers under the same numbers, because allocating and releasing one are steps that all ranks take together.  For
an exchange each rank uses any of its free buffers, unless it is far too large, and names it to the others.  A buffer is used again only
when the last tensor on it is gone, so ranks may release tensors in different order.

Memory grows in an exchange that finds no free buffer.  Every rank allocates the size that the neediest rank requires, and a buffer is too
large for an exchange if it is too large for that rank: under uneven routing the others need far less.  Old buffers are released only then,
before new memory is allocated, so a program with constant sizes keeps its buffers.  Of the buffers that are free on all ranks
    unused       those that no rank has used for some number of exchanges are released: `LEAST_PATIENCE` exchanges, doubled whenever a
                 buffer was needed again soon after, up to `MOST_PATIENCE`.  So buffers of alternating sizes are kept
    replaced     for each new buffer the largest one that is smaller, but not far smaller, is released: sizes that drift keep no more
                 buffers than are in use at a time
    all          all of them are released if some rank has no room for the new one; if that does not help, every rank raises an error
Host syncs: releasing buffers waits for everything that is queued on the device, and for the other ranks' hosts.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mxep.comm.collective import resolve_group
from mxep.comm.host_allgather import MOST_VALUES, HostAllGather
from mxep.shapes import round_up

FLAG_BYTES = 4
SMALL = 4 << 20  # bytes; a smaller buffer is never too large
MOST_TIMES_TOO_LARGE = 1.5  # for the neediest rank: tokens that a layer saves in MX should not occupy a buffer for bf16 rows
LEAST_PATIENCE = 64  # exchanges; a layer makes up to ten in a step
MOST_PATIENCE = 4096  # several steps of 60 layers; a buffer that is needed less often is allocated anew each time
_PAGE = 2 << 20  # bytes; the least that a GPU's driver maps
# Ranks find each other's handles under a number that torch counts per process, not per group (source: StoreExchange in torch's
# CUDASymmetricMemoryUtils.hpp).  Processes that have set up memory in other groups a different number of times wait for each other in vain.
_set_up = SimpleNamespace(count=0)


@dataclass
class SymmBuffer:
    """One buffer on every rank.

    Attributes:
        memory: (size,) uint8, this rank's.  addresses: where each rank's is, as this rank sees it.
        owner: keeps the addresses valid; released before `memory`.
        last_use: the capture that used it last, 0 for an eager exchange, and the driver's handle of the stream on which that exchange
            began; work that is queued there may still read the memory.  None before the first use.
    """

    memory: torch.Tensor
    addresses: list[int]
    owner: Any = None
    last_use: tuple[int, int] | None = None

    def release(self) -> None:
        """Release the peers' views, then the handle, then this rank's memory; nothing reads or writes there any more."""
        self.addresses.clear()
        self.owner = None
        self.memory = self.memory.new_empty(0)


class TorchMemory:
    """torch's symmetric memory of one process group on one GPU, without NVLink multicast; all ranks call each method together."""

    def __init__(self, group_name: str, device: torch.device, rendezvous: HostAllGather) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._group_name, self._device, self._rendezvous = group_name, device, rendezvous

    def allocate(self, size: int) -> SymmBuffer:
        """A new buffer of `size` bytes on every rank.

        Raises:
            torch.OutOfMemoryError: a rank has not that much left, on every rank.
            RuntimeError: the ranks have set up memory in other groups, and not as often, on every rank.
        """
        import torch.distributed._symmetric_memory as symmetric

        if torch.cuda.mem_get_info(self._device)[0] < size:
            torch.cuda.empty_cache()  # this allocator cannot use what torch's own has cached
        memory = None
        try:
            # Not symmetric.empty: it may take a part of a pool's segment, and the pointers are those of the segments.
            memory = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        free = torch.cuda.mem_get_info(self._device)[0]
        gathered = self._rendezvous.all_gather([memory is not None, free, _set_up.count])
        short = {rank: left for rank, (there, left, _) in enumerate(gathered) if not there}
        if memory is None or short:
            memory = None  # before the error is raised: its traceback keeps this frame, while others may try again
            left = ", ".join(f"rank {rank} has {free} left" for rank, free in short.items())
            raise torch.OutOfMemoryError(
                f"exchange: no room for {size} bytes of symmetric memory: {left}; want smaller batches, or the transport 'collective'"
            )
        counts = [count for _, _, count in gathered]
        if len(set(counts)) > 1:
            memory = None  # as above
            raise RuntimeError(
                f"exchange: the ranks' processes have set up symmetric memory {counts} times, want as often on all, or torch waits "
                "in vain; where groups of different ranks share processes, take the transport 'collective' for all but one of them"
            )
        _set_up.count += 1
        handle = symmetric.rendezvous(memory, resolve_group("symmetric memory", self._group_name))
        addresses = list(handle.buffer_ptrs)
        assert addresses[handle.rank] == memory.data_ptr(), "a buffer starts at its allocation"
        return SymmBuffer(memory, addresses, handle)

    def release(self, buffers: Sequence[SymmBuffer]) -> None:
        """Release buffers that no rank uses any more, when every rank's device is done; returns when all ranks have released them."""
        torch.cuda.synchronize(self._device)  # host sync: what was queued before may read there, or write there on another rank
        self._rendezvous.all_gather([])
        for buffer in buffers:
            buffer.release()
        self._rendezvous.all_gather([])  # a GPU gets its memory back only when its peers have released it too

    def flags(self, count: int) -> SymmBuffer:
        """`count` words of 32 bits for flags, zero on every rank before any rank returns."""
        buffer = self.allocate(buffer_bytes(count * FLAG_BYTES))
        buffer.memory.zero_()
        torch.cuda.synchronize(self._device)  # host sync, once: the words are zero before a peer may write one
        self._rendezvous.all_gather([])
        return buffer


def buffer_bytes(size: int, *, shape_static: bool = False) -> int:
    """Bytes of a new buffer for `size` bytes, so that under uneven routing old buffers are large enough.

    In steps of 1/16 of the largest power of two in `size`.

    Args:
        shape_static: the size depends on shapes only, so that a margin would be unused in every step: steps of at most 2 MiB.

    >>> buffer_bytes(1000), buffer_bytes(140_000)
    (4096, 147456)
    >>> rows = 131072 * 4224
    >>> buffer_bytes(rows) - rows, buffer_bytes(rows, shape_static=True) - rows
    (16777216, 0)
    """
    step = max(4096, 1 << max(size.bit_length() - 5, 0))
    return round_up(max(size, 1), min(step, _PAGE) if shape_static else step)


def most_bytes(size: int) -> int:
    """Bytes of the largest buffer for an exchange whose neediest rank requires `size` bytes."""
    return max(round(MOST_TIMES_TOO_LARGE * buffer_bytes(size)), SMALL)


class BufferRef:
    """Keeps one buffer in use until the last tensor on it is gone."""

    def __init__(self, pool: BufferPool, index: int, owner: int = 0) -> None:
        self._pool, self.index, self._owner = pool, index, owner
        self.buffer = pool.buffers[index]

    def __del__(self) -> None:
        self._pool.give_back(self.index, self._owner)


class _ArrayInterface:
    """A buffer's memory by the array protocols; torch keeps this object, and with it the reference, as long as the storage."""

    def __init__(self, ref: BufferRef) -> None:
        memory = ref.buffer.memory
        self.ref = ref
        view = {"shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3, "strides": None}
        setattr(self, "__cuda_array_interface__" if memory.is_cuda else "__array_interface__", view)


def tensor_on(ref: BufferRef) -> torch.Tensor:
    """(size,) uint8 on a buffer. The tensor, its views and what autograd saves of them keep the buffer in use."""
    memory = _ArrayInterface(ref)
    if ref.buffer.memory.is_cuda:
        return torch.as_tensor(memory, device=ref.buffer.memory.device)
    return torch.from_numpy(np.asarray(memory))


class BufferPool:
    """The buffers of one group, and which of them are free on this rank.

    A buffer belongs to eager exchanges, owner 0, until the capture of a CUDA graph takes it.  That capture, whose number is the owner from
    then on, keeps it for good: every replay writes there.

    Attributes:
        buffers: by number; no number is used twice.  now: the number of the latest exchange, set by the user of the pool.
    """

    def __init__(self) -> None:
        self.buffers: dict[int, SymmBuffer] = {}
        self.now = 0
        self._added = 0
        self._free: dict[int, dict[int, int]] = defaultdict(dict)  # owner -> number -> the latest exchange when it became free
        self._sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)  # owner -> (bytes, number) of each of them, sorted
        self._were: dict[int, tuple[int, int]] = {}  # number of a buffer in use -> its owner before, and when it had become free
        # Owner, number, when: buffers that became free and are not in `_free` yet.  Tensors are deleted on autograd's threads and wherever
        # the garbage collector runs, also inside this class, so their end changes nothing else.
        self._returned: deque[tuple[int, int, int]] = deque()
        self._lock = threading.RLock()

    def add(self, buffer: SymmBuffer) -> int:
        """Add a new, free buffer; returns its number, the same on every rank."""
        with self._lock:
            index, self._added = self._added, self._added + 1
            self.buffers[index] = buffer
            self._put(0, index, self.now)
            return index

    def take(self, size: int, owner: int = 0) -> int:
        """The smallest free buffer of at least `size` bytes, or -1; a capture takes its own first, unless that is far too large.

        Whether it is far too large for the exchange depends on the other ranks' sizes (`BufferGrowth`).
        """
        with self._lock:
            self._collect()
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
        """`take` for each of these sizes, the largest first, so that a small size does not take the only large buffer."""
        taken = [-1] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            taken[i] = self.take(sizes[i], owner)
        return taken

    def claim(self, index: int) -> None:
        """Take that buffer."""
        with self._lock:
            self._collect()
            self._get(0, index)

    def give_back(self, index: int, owner: int = 0) -> None:
        """The buffer is free again: what follows on the stream may overwrite it."""
        self._returned.append((owner, index, self.now))

    def put_back(self, indices: Sequence[int]) -> None:
        """Undo `take` of these buffers, which were not used; -1 is skipped."""
        with self._lock:
            for index in indices:
                if index >= 0:
                    owner, since = self._were.pop(index)
                    self._put(owner, index, since)

    def free(self) -> dict[int, int]:
        """The free buffers of eager exchanges -> the latest exchange when they became free."""
        with self._lock:
            self._collect()
            return dict(self._free[0])

    def remove(self, indices: Collection[int]) -> list[SymmBuffer]:
        """Remove free buffers of eager exchanges from the pool and return them."""
        with self._lock:
            self._collect()
            for index in indices:
                del self._were[self._get(0, index)]
            return [self.buffers.pop(index) for index in indices]

    def each(self, act: Callable[[SymmBuffer], None]) -> None:
        """Call `act` with every buffer; none is removed meanwhile."""
        with self._lock:
            for buffer in list(self.buffers.values()):
                act(buffer)

    def nbytes(self) -> int:
        """Bytes of this rank's memory in all buffers."""
        return sum(buffer.memory.numel() for buffer in list(self.buffers.values()))

    def _collect(self) -> None:
        """Put the returned buffers into `_free`."""
        while self._returned:
            self._put(*self._returned.popleft())

    def _put(self, owner: int, index: int, since: int) -> None:
        self._free[owner][index] = since
        insort(self._sizes[owner], (self.buffers[index].memory.numel(), index))

    def _get(self, owner: int, index: int) -> int:
        self._were[index] = owner, self._free[owner].pop(index)
        sizes = self._sizes[owner]
        del sizes[bisect_left(sizes, (self.buffers[index].memory.numel(), index))]
        return index


class BufferGrowth:
    """Allocates new buffers for one rank's pool and releases old ones; arguments as of `SymmetricTransport`."""

    def __init__(self, pool: BufferPool, memory: TorchMemory, rendezvous: HostAllGather) -> None:
        self._pool, self._memory, self._rendezvous = pool, memory, rendezvous
        self._patience = LEAST_PATIENCE
        self._unused: dict[int, int] = {}  # bytes of a buffer that went unused -> the last exchange in which a rank used it

    def refuse(self, taken: list[int], indices: list[list[int]]) -> None:
        """Put back buffers that are far too large, on every rank; arguments as of `grow`, which become -1."""
        count, rank = len(taken), self._rendezvous.rank
        for i in range(count):
            most = most_bytes(max(index[count + i] for index in indices))
            for index in indices:
                if index[i] >= 0 and self._pool.buffers[index[i]].memory.numel() > most:
                    index[i] = -1
            if indices[rank][i] < 0:
                self._pool.put_back([taken[i]])
                taken[i] = -1

    def grow(self, taken: list[int], indices: list[list[int]], *, shape_static: bool) -> None:
        """Allocate a buffer for every size for which some rank has none free; the other ranks keep theirs free for later.

        Args:
            taken: this rank's buffer for each size, -1 for none; filled in.
            indices: of every rank, its `taken`, filled in, then its sizes in bytes.
            shape_static: of `buffer_bytes`.
        """
        count = len(taken)
        short = [i for i in range(count) if any(index[i] < 0 for index in indices)]
        if not short:
            return
        sizes = {i: max(buffer_bytes(index[count + i], shape_static=shape_static) for index in indices) for i in short}
        self._learn(list(sizes.values()))
        self._release(self._replaced(list(sizes.values())))
        for i, size in sizes.items():
            new = self._pool.add(self.allocate(size))
            if taken[i] < 0:
                self._pool.claim(new)
                taken[i] = new
            for index in indices:
                index[i] = new if index[i] < 0 else index[i]

    def allocate(self, size: int) -> SymmBuffer:
        """A new buffer of `size` bytes on every rank; releases all free buffers if that needs it.

        Raises:
            torch.OutOfMemoryError: a rank has not that much left, on every rank.
        """
        try:
            return self._memory.allocate(size)
        except torch.OutOfMemoryError:
            if not self._release(self._free_everywhere()):
                raise
        return self._memory.allocate(size)

    def _free_everywhere(self) -> dict[int, int]:
        """The buffers that are free on all ranks -> the last exchange in which a rank used them; the same on every rank.

        They stay free until the exchange that is being opened has its buffers.
        """
        mine = [number for pair in sorted(self._pool.free().items()) for number in pair][:MOST_VALUES]
        tables = [dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in self._rendezvous.all_gather(mine)]
        return {index: max(table[index] for table in tables) for index in tables[0] if all(index in table for table in tables)}

    def _learn(self, sizes: list[int]) -> None:
        """Increase the patience if new buffers have the size of some that went unused not long ago."""
        self._unused = {there: last for there, last in self._unused.items() if self._pool.now - last <= MOST_PATIENCE}
        for size in sizes:
            for there in [there for there in self._unused if max(there, size) <= MOST_TIMES_TOO_LARGE * min(there, size)]:
                missed_after = self._pool.now - self._unused.pop(there)
                self._patience = min(max(self._patience, 2 * missed_after), MOST_PATIENCE)

    def _replaced(self, sizes: list[int]) -> list[int]:
        """The buffers that are released before new ones of these sizes are allocated."""
        free = self._free_everywhere()
        bytes_of = {index: self._pool.buffers[index].memory.numel() for index in free}
        gone = [index for index, last in free.items() if self._pool.now - last > self._patience]
        self._unused |= {bytes_of[index]: free[index] for index in gone}
        rest = {index: there for index, there in bytes_of.items() if index not in gone}
        for size in sizes:
            smaller = [index for index, there in rest.items() if SMALL < there < size <= MOST_TIMES_TOO_LARGE * there]
            if smaller:
                gone.append(max(smaller, key=lambda index: (rest[index], -index)))
                del rest[gone[-1]]
        return gone

    def _release(self, indices: Collection[int]) -> bool:
        """Release these buffers, which are free on all ranks; returns whether there are any."""
        if indices:
            self._memory.release(self._pool.remove(indices))
        return bool(indices)
