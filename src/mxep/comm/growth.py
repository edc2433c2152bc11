"""How symmetric memory grows and shrinks: in an exchange that finds no slab free, by steps that all ranks take together.

A slab is as large on every rank as the rank that needs most wants it, and is too large for an exchange if it is so for that rank: under
uneven routing the others need far less.  It is let go of here alone, before new memory is taken, so whoever keeps to his sizes keeps his
slabs.  The ranks show each other which slabs of eager exchanges are free on them, and since when.  Of those that are free on all ranks go
    the unused   that no rank has held for so many exchanges: `LEAST_PATIENCE`, or twice as many as once were too few, because such a
                 slab was missed soon after; at most `MOST_PATIENCE`.  So sizes that changed for good go, those that take turns stay
    the replaced the largest one that is smaller than a new one, but not far: one goes for one that comes, so sizes that wander leave no
                 more slabs than are held at a time
    all          when there is no room for the new one on some rank, before that is an error on every rank
Host syncs: when slabs are let go of the host waits for all that was queued on the device, and for the other ranks' hosts.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from mxep.comm.board import MOST_VALUES, Board
from mxep.comm.pool import MOST_TIMES_TOO_LARGE, SMALL, Memory, Pool, Slab, most_bytes, slab_bytes

LEAST_PATIENCE = 64  # exchanges; a layer makes up to ten in a step
MOST_PATIENCE = 4096  # several steps of 60 layers; what is wanted less often may as well come anew each time


class Growth:
    """New slabs for one rank's pool, and the end of old ones; `memory` and `board` as in `mxep.comm.symmetric`."""

    def __init__(self, pool: Pool, memory: Memory, board: Board) -> None:
        self._pool, self._memory, self._board = pool, memory, board
        self._patience = LEAST_PATIENCE
        self._unused: dict[int, int] = {}  # bytes of a slab that went unused -> the last exchange in which a rank held it

    def refuse(self, taken: list[int], places: list[list[int]]) -> None:
        """Slabs that are far too large are not taken, on any rank; arguments as of `grow`, with -1 in their stead afterwards."""
        count, rank = len(taken), self._board.rank
        for i in range(count):
            most = most_bytes(max(place[count + i] for place in places))
            for place in places:
                if place[i] >= 0 and self._pool.slabs[place[i]].memory.numel() > most:
                    place[i] = -1
            if places[rank][i] < 0:
                self._pool.put_back([taken[i]])
                taken[i] = -1

    def grow(self, taken: list[int], places: list[list[int]], *, steady: bool) -> None:
        """A new slab for every buffer for which some rank has none free; the other ranks keep theirs free for later.

        Args:
            taken: this rank's slab for each buffer, -1 for none; filled in.
            places: of every rank, its `taken`, filled in, then the bytes that it needs of each buffer.
            steady: of `slab_bytes`.
        """
        count = len(taken)
        short = [i for i in range(count) if any(place[i] < 0 for place in places)]
        if not short:
            return
        sizes = {i: max(slab_bytes(place[count + i], steady=steady) for place in places) for i in short}
        self._learn(list(sizes.values()))
        self._release(self._outlived(list(sizes.values())))
        for i, size in sizes.items():
            index = self._pool.add(self.allocate(size))
            if taken[i] < 0:
                self._pool.claim(index)
                taken[i] = index
            for place in places:
                place[i] = index if place[i] < 0 else place[i]

    def allocate(self, size: int) -> Slab:
        """A new slab of `size` bytes on every rank, in the place of all free ones if it must be.

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
        """The slabs that are free on all ranks -> the last exchange in which a rank held them; the same on every rank.

        They stay free until the exchange that is being opened has its slabs: nobody else takes any.
        """
        mine = [number for pair in sorted(self._pool.free().items()) for number in pair][:MOST_VALUES]
        tables = [dict(zip(shown[::2], shown[1::2], strict=True)) for shown in self._board.show(mine)]
        return {index: max(table[index] for table in tables) for index in tables[0] if all(index in table for table in tables)}

    def _learn(self, sizes: list[int]) -> None:
        """More patience, if new slabs are such as went unused not long ago."""
        self._unused = {there: last for there, last in self._unused.items() if self._pool.now - last <= MOST_PATIENCE}
        for size in sizes:
            for there in [there for there in self._unused if max(there, size) <= MOST_TIMES_TOO_LARGE * min(there, size)]:
                missed_after = self._pool.now - self._unused.pop(there)
                self._patience = min(max(self._patience, 2 * missed_after), MOST_PATIENCE)

    def _outlived(self, sizes: list[int]) -> list[int]:
        """What goes before new slabs of these sizes come."""
        free = self._free_everywhere()
        bytes_of = {index: self._pool.slabs[index].memory.numel() for index in free}
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
        """Let go of these, which are free on all ranks; whether there are any."""
        if indices:
            self._memory.release(self._pool.remove(indices))
        return bool(indices)
