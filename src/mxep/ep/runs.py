"""Where every row of a dispatch and of the way home lies, on both sides, known to the host: pure arithmetic on the counts of all ranks.

counts[s][e] rows go from rank s to expert e, the local expert e % L of rank e // L.  Rows lie in three orders:

    source   at their sender, sorted by expert
    arrival  at their receiver, by sender and there by expert: what an all-to-all delivers
    padded   at their receiver, by expert and there by sender, every expert's group padded: the order of the grouped GEMM

So from one sender to one receiver the rows of neighbouring experts are one piece in both source and arrival order, and in padded order
those of one expert are.

    W = 2, L = 1, alignment 4, counts = [[3, 1], [2, 2]]; rank 0 receives 3 + 2 rows for its expert
    source starts  [[0, 3], [0, 2]]     arrival starts at rank 0  [0, 3]     padded: group 0..8, rows 5..7 padding
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from mxep.shapes import round_up

Chunk = tuple[int, int]  # local experts from .. to, the same on every rank
MOST_CHUNKS = 4
LEAST_CHUNK_BYTES = 200 << 20  # of one rank's records: below it the host, which launches each chunk's work, falls behind the GPU
# GEMMs of all chunks, where these are fewer; on four H200s 3 and 4 were no faster, and cost the host 0.3 to 1 ms more a call (2026-11-22).
MOST_PRODUCTS = 2
LEAST_PRODUCT_BYTES = 64 << 20  # of one rank's records, behind each of several GEMMs of a chunk; not tuned on GPUs


class Run(NamedTuple):
    """Rows that are one piece of memory on both sides."""

    peer: int
    here: int  # first row on this rank
    there: int  # first row on the peer
    rows: int


class Runs:
    """The runs of one rank: which rows go where.

    Args:
        counts: (W, E), rows from every rank for every expert.  rank: this one.
        alignment: rows that every expert's group is padded to; an expert without rows owns `alignment` rows of padding.
    """

    def __init__(self, counts: Sequence[Sequence[int]], rank: int, alignment: int) -> None:
        self.counts, self.rank, self.alignment = counts, rank, alignment
        self.world = len(counts)
        self.num_local_experts = len(counts[0]) // self.world

    @cached_property
    def sources(self) -> list[list[int]]:
        """[s][e]: first row of a run at its sender; the last column is the number of rows that s sends."""
        return [_starts(row) for row in self.counts]

    @cached_property
    def arrivals(self) -> list[list[int]]:
        """[s][r]: first row of what s sent, among the rows that r receives; the last row is their number."""
        L, W = self.num_local_experts, self.world
        table = [[source[(r + 1) * L] - source[r * L] for r in range(W)] for source in self.sources]
        columns = [_starts([row[r] for row in table]) for r in range(W)]
        return [[columns[r][s] for r in range(W)] for s in range(W + 1)]

    def held(self, rank: int) -> list[int]:
        """(L,): rows that each local expert of a rank has."""
        L = self.num_local_experts
        return [sum(row[e] for row in self.counts) for e in range(rank * L, (rank + 1) * L)]

    def groups(self, rank: int) -> list[int]:
        """(L + 1,): where the groups of a rank's experts end in padded order, after a 0."""
        return _starts([round_up(max(rows, 1), self.alignment) for rows in self.held(rank)])

    @cached_property
    def ends(self) -> list[int]:
        """`groups` of this rank."""
        return self.groups(self.rank)

    @property
    def num_received(self) -> int:
        return self.arrivals[self.world][self.rank]

    def peers(self) -> list[int]:
        """The ranks in the order in which this one sends: the next one first, itself last."""
        return [(self.rank + i) % self.world for i in range(1, self.world + 1)]

    def send(self, peer: int, chunk: Chunk) -> list[Run]:
        """This rank's rows for a chunk of `peer`'s experts, no empty runs: source order here, arrival order there."""
        first = peer * self.num_local_experts
        mine = self.sources[self.rank]
        start, end = mine[first + chunk[0]], mine[first + chunk[1]]
        return [Run(peer, start, self.arrivals[self.rank][peer] + start - mine[first], end - start)] if start < end else []

    def place(self, peer: int, chunk: Chunk) -> list[Run]:
        """`send` straight into the experts' places, a run for each expert: source order here, padded order there."""
        first, groups, runs = peer * self.num_local_experts, self.groups(peer), []
        for e in range(*chunk):
            before = sum(self.counts[s][first + e] for s in range(self.rank))
            rows = self.counts[self.rank][first + e]
            if rows:
                runs.append(Run(peer, self.sources[self.rank][first + e], groups[e] + before, rows))
        return runs

    def padding(self, num_places: int) -> list[tuple[int, int]]:
        """[start, end) of the places among this rank's first so many that no run fills, no empty pieces.

        >>> Runs([[3, 1], [2, 2]], 0, 4).padding(12)
        [(5, 12)]
        """
        starts = [first + rows for first, rows in zip(self.ends, self.held(self.rank), strict=False)]
        ends = [*self.ends[1:-1], num_places]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def home(self, peer: int, chunk: Chunk) -> list[Run]:
        """`peer`'s rows of a chunk of this rank's experts, no empty runs: padded order from the chunk's start here, source order there."""
        first, runs = self.rank * self.num_local_experts, []
        for e in range(*chunk):
            before = sum(self.counts[s][first + e] for s in range(peer))
            rows = self.counts[peer][first + e]
            if rows:
                runs.append(Run(peer, self.ends[e] - self.ends[chunk[0]] + before, self.sources[peer][first + e], rows))
        return runs


def counts_of(received: Sequence[Sequence[int]]) -> list[list[int]]:
    """What `Runs` takes, of what every rank receives: (W*L,) each, by the rank that sends.

    >>> counts_of([[3, 2], [1, 2]])
    [[3, 1], [2, 2]]
    """
    world = len(received)
    L = len(received[0]) // world
    return [[table[s * L + e] for table in received for e in range(L)] for s in range(world)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """[2, 0, 3] -> [0, 2, 2, 5]"""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _bytes_per_rank(counts: Sequence[Sequence[int]], row_bytes: int) -> int:
    return sum(map(sum, counts)) * row_bytes // len(counts)


def chunks_of(counts: Sequence[Sequence[int]], row_bytes: int) -> list[Chunk]:
    """Cut the local experts into chunks, the unit in which exchange and GEMM follow each other; the same on every rank.

    As many as `MOST_CHUNKS` where there is enough to do in each. On two H200s, 131072 rows a rank and 8 experts, 4 were best or within
    noise of it at rows of 7168 and 8192 values, 1 at rows of 2048 (2026-11-21).

    >>> chunks_of([[8192] * 16] * 2, 7392), chunks_of([[8192] * 16] * 2, 2112)
    ([(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 8)])
    """
    world = len(counts)
    num_local_experts = len(counts[0]) // world
    number = max(1, min(MOST_CHUNKS, num_local_experts, _bytes_per_rank(counts, row_bytes) // LEAST_CHUNK_BYTES))
    cuts = [i * num_local_experts // number for i in range(number + 1)]
    return list(itertools.pairwise(cuts))


class Product(NamedTuple):
    """One GEMM: behind how many messages of every rank it may run, and of which experts."""

    messages: int
    experts: Chunk


def products_of(counts: Sequence[Sequence[int]], row_bytes: int, chunks: Sequence[Chunk]) -> list[Product]:
    """The GEMMs of these chunks; the same on every rank.

    Where there are fewer chunks than there may be GEMMs, each is multiplied in parts, so that a part's rows go home beside the next GEMM:
    that costs the host less than more chunks.

    >>> products_of([[8192] * 16] * 2, 2112, [(0, 8)])
    [Product(messages=1, experts=(0, 4)), Product(messages=1, experts=(4, 8))]
    """
    enough = _bytes_per_rank(counts, row_bytes) // (len(chunks) * LEAST_PRODUCT_BYTES)
    products = []
    for i, (first, last) in enumerate(chunks, 1):
        parts = max(1, min(MOST_PRODUCTS // len(chunks), last - first, enough))
        cuts = [first + part * (last - first) // parts for part in range(parts + 1)]
        products += [Product(i, experts) for experts in itertools.pairwise(cuts)]
    return products
