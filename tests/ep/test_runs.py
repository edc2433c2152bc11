"""Where every row of a dispatch and of the way home lies: thousands of routings against exchange and permutation by walking."""

from __future__ import annotations

import doctest
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.truth import permutation

from mxep.ep import runs
from mxep.ep.runs import LEAST_PRODUCT_BYTES, MOST_CHUNKS, MOST_PRODUCTS, Runs, chunks_of, products_of

Counts = list[list[int]]


def cut(L: int, number: int) -> list[tuple[int, int]]:
    cuts = [i * L // number for i in range(number + 1)]
    return list(itertools.pairwise(cuts))


def check(counts: Counts, alignment: int, number: int) -> None:
    """Every row lands once, in its place, chunk by chunk, and comes home."""
    W, L = len(counts), len(counts[0]) // len(counts)
    ranks = [Runs(counts, r, alignment) for r in range(W)]
    arrived: list[list] = [[None] * rank.num_received for rank in ranks]
    placed: list[list] = [[None] * rank.ends[-1] for rank in ranks]
    labels = [[(s, e, i) for e in range(W * L) for i in range(counts[s][e])] for s in range(W)]  # in source order
    chunks = cut(L, number)
    for s, mine in enumerate(ranks):
        for chunk, peer in itertools.product(chunks, range(W)):
            for sent, there in ((mine.send(peer, chunk), arrived[peer]), (mine.place(peer, chunk), placed[peer])):
                for run in sent:
                    assert run.peer == peer
                    assert run.rows > 0
                    for i in range(run.rows):
                        assert there[run.there + i] is None, "two rows in one place"
                        there[run.there + i] = labels[s][run.here + i]
                assert all(a.here + a.rows == b.here for a, b in itertools.pairwise(sent)), "one piece of memory here"
    home: list[list] = [[None] * len(labels[s]) for s in range(W)]
    for r, mine in enumerate(ranks):
        want = [label for s in range(W) for label in labels[s] if label[1] // L == r]
        assert arrived[r] == want, "an all-to-all delivers this order"
        rank_major = [counts[s][r * L + e] for s in range(W) for e in range(L)]
        padded_rows = -(-(len(want) + L * alignment) // alignment) * alignment
        row_map, _, ends = permutation(rank_major, W, L, alignment, padded_rows)
        assert mine.ends == [0, *ends]
        assert placed[r] == [None if row < 0 else want[row] for row in row_map[: ends[-1]]]
        empty = [place for start, end in mine.padding(padded_rows) for place in range(start, end)]
        assert empty == [place for place, row in enumerate(row_map) if row < 0]
        for chunk in chunks:
            first, last = mine.ends[chunk[0]], mine.ends[chunk[1]]
            here = [None if row < 0 else want[row] for row in row_map[first:last]]
            for peer in mine.peers():
                for run in mine.home(peer, chunk):
                    assert run.rows > 0
                    assert run.here + run.rows <= last - first
                    for i in range(run.rows):
                        assert home[peer][run.there + i] is None, "two rows in one place"
                        home[peer][run.there + i] = here[run.here + i]
    assert home == labels


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
    rank = Runs([[3, 1], [2, 2]], 0, 4)
    assert [source[:2] for source in rank.sources] == [[0, 3], [0, 2]]
    assert [row[0] for row in rank.arrivals] == [0, 3, 5]
    assert rank.ends == [0, 8]


def test_chunks() -> None:
    assert doctest.testmod(runs).failed == 0
    for counts, row_bytes in (([[0] * 6] * 2, 100), ([[10**6] * 3], 1000), ([[2000, 0, 0, 9]] * 4, 7392), ([[50_000] * 64] * 8, 7392)):
        L = len(counts[0]) // len(counts)
        chunks = chunks_of(counts, row_bytes)
        assert 1 <= len(chunks) <= min(L, MOST_CHUNKS)
        assert [e for chunk in chunks for e in range(*chunk)] == list(range(L))
        assert all(l0 < l1 for l0, l1 in chunks)
        products = products_of(counts, row_bytes, chunks)
        assert [e for product in products for e in range(*product.experts)] == list(range(L))
        assert all(product.experts[1] <= chunks[product.messages - 1][1] for product in products), "its rows have come"


def test_few_chunks_are_multiplied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is enough to do in each, and more than one expert."""
    least = LEAST_PRODUCT_BYTES
    assert products_of([[1, 1, 1]], 2 * least // 3 + 1, [(0, 3)]) == [(1, (0, 1)), (1, (1, 3))]
    assert products_of([[1, 1, 1]], 2 * least // 3, [(0, 3)]) == [(1, (0, 3))]
    assert products_of([[9]], least, [(0, 1)]) == [(1, (0, 1))]
    assert products_of([[9, 9]], least, [(0, 1), (1, 2)]) == [(1, (0, 1)), (2, (1, 2))]
    assert products_of([[1] * 9], 9 * least, [(0, 5), (5, 9)]) == [(1, (0, 5)), (2, (5, 9))]
    assert len(products_of([[1] * 9], 9 * least, [(0, 9)])) == MOST_PRODUCTS
    monkeypatch.setattr(runs, "MOST_PRODUCTS", 4)
    assert products_of([[1] * 9], 9 * least, [(0, 5), (5, 9)]) == [(1, (0, 2)), (1, (2, 5)), (2, (5, 7)), (2, (7, 9))]
