"""Segments of rows to the experts and back: thousands of routings, compared with an exchange and a permutation row by row."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.truth import permutation

from mxep.ep import ep_grouped_mm_symmetric as overlapped
from mxep.ep.ep_grouped_mm_symmetric import LEAST_GEMM_BYTES, MOST_CHUNKS, MOST_GEMMS, Segments, chunk_experts, chunk_gemms

Counts = list[list[int]]


def cut(L: int, number: int) -> list[tuple[int, int]]:
    cuts = [i * L // number for i in range(number + 1)]
    return list(itertools.pairwise(cuts))


def check(counts: Counts, alignment: int, number: int) -> None:
    """Every row arrives once, chunk by chunk, and returns to its position."""
    W, L = len(counts), len(counts[0]) // len(counts)
    ranks = [Segments(counts, r, alignment) for r in range(W)]
    arrived: list[list] = [[None] * rank.num_received for rank in ranks]
    labels = [[(s, e, i) for e in range(W * L) for i in range(counts[s][e])] for s in range(W)]  # in source order
    chunks = cut(L, number)
    for s, mine in enumerate(ranks):
        for chunk, peer in itertools.product(chunks, range(W)):
            segment, there = mine.to_experts(peer, chunk), arrived[peer]
            if segment is not None:
                assert segment.peer == peer
                assert segment.rows > 0
                for i in range(segment.rows):
                    assert there[segment.there + i] is None, "two rows at one position"
                    there[segment.there + i] = labels[s][segment.here + i]
    returned: list[list] = [[None] * len(labels[s]) for s in range(W)]
    for r, mine in enumerate(ranks):
        want = [label for s in range(W) for label in labels[s] if label[1] // L == r]
        assert arrived[r] == want, "the order in which an all-to-all delivers rows"
        rank_major = [counts[s][r * L + e] for s in range(W) for e in range(L)]
        padded_rows = -(-(len(want) + L * alignment) // alignment) * alignment
        row_map, _, ends = permutation(rank_major, W, L, alignment, padded_rows)
        assert mine.group_starts == [0, *ends]
        for chunk in chunks:
            first, last = mine.group_starts[chunk[0]], mine.group_starts[chunk[1]]
            here = [None if row < 0 else want[row] for row in row_map[first:last]]
            for peer in range(W):
                for segment in mine.to_tokens(peer, chunk):
                    assert segment.rows > 0
                    assert segment.here + segment.rows <= last - first
                    for i in range(segment.rows):
                        assert returned[peer][segment.there + i] is None, "two rows at one position"
                        returned[peer][segment.there + i] = here[segment.here + i]
    assert returned == labels


@pytest.mark.parametrize(("world", "local"), [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (4, 4), (8, 1)])
def test_many_routings(world: int, local: int) -> None:
    draw = random.Random(world * 100 + local)
    for _ in range(1500 // world):
        most = draw.choice((1, 2, 5, 9))
        counts = [[draw.choice((0, 1, draw.randint(0, most))) for _ in range(world * local)] for _ in range(world)]
        if draw.random() < 0.2:
            counts[draw.randrange(world)] = [0] * (world * local)
        check(counts, draw.choice((1, 4, 32)), draw.randint(1, local))


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_routing(data: st.DataObject) -> None:
    world, local = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    row = st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=world * local, max_size=world * local)
    counts = data.draw(st.lists(row, min_size=world, max_size=world))
    check(counts, data.draw(st.sampled_from([1, 2, 8, 32])), data.draw(st.integers(1, local)))


def test_the_worked_example() -> None:
    rank = Segments([[3, 1], [2, 2]], 0, 4)
    assert [source[:2] for source in rank.sources] == [[0, 3], [0, 2]]
    assert [row[0] for row in rank.arrivals] == [0, 3, 5]
    assert rank.group_starts == [0, 8]


def test_chunks() -> None:
    for counts, row_bytes in (([[0] * 6] * 2, 100), ([[10**6] * 3], 1000), ([[2000, 0, 0, 9]] * 4, 7392), ([[50_000] * 64] * 8, 7392)):
        L = len(counts[0]) // len(counts)
        chunks = chunk_experts(counts, row_bytes)
        assert 1 <= len(chunks) <= min(L, MOST_CHUNKS)
        assert [e for chunk in chunks for e in range(*chunk)] == list(range(L))
        assert all(l0 < l1 for l0, l1 in chunks)
        gemms = chunk_gemms(counts, row_bytes, chunks)
        assert [e for _, experts in gemms for e in range(*experts)] == list(range(L))
        assert all(experts[1] <= chunks[messages - 1][1] for messages, experts in gemms), "a GEMM reads rows that have arrived"


def test_few_chunks_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each part has enough work and the chunk has more than one expert."""
    least = LEAST_GEMM_BYTES
    assert chunk_gemms([[1, 1, 1]], 2 * least // 3 + 1, [(0, 3)]) == [(1, (0, 1)), (1, (1, 3))]
    assert chunk_gemms([[1, 1, 1]], 2 * least // 3, [(0, 3)]) == [(1, (0, 3))]
    assert chunk_gemms([[9]], least, [(0, 1)]) == [(1, (0, 1))]
    assert chunk_gemms([[9, 9]], least, [(0, 1), (1, 2)]) == [(1, (0, 1)), (2, (1, 2))]
    assert chunk_gemms([[1] * 9], 9 * least, [(0, 5), (5, 9)]) == [(1, (0, 5)), (2, (5, 9))]
    assert len(chunk_gemms([[1] * 9], 9 * least, [(0, 9)])) == MOST_GEMMS
    monkeypatch.setattr(overlapped, "MOST_GEMMS", 4)
    assert chunk_gemms([[1] * 9], 9 * least, [(0, 5), (5, 9)]) == [(1, (0, 2)), (1, (2, 5)), (2, (5, 7)), (2, (7, 9))]
