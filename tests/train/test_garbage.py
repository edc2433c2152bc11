"""When garbage is collected during training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mxep.train.garbage import GarbageCollection


class Node:
    """An object that only a collection frees."""

    alive = 0

    def __init__(self) -> None:
        self.itself = self
        Node.alive += 1

    def __del__(self) -> None:
        Node.alive -= 1


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.collect()
    Node.alive = 0
    yield
    assert gc.isenabled(), "left as it was"


def test_cycles_are_freed_at_the_asked_steps_only() -> None:
    with GarbageCollection(every=3) as garbage:
        garbage.after(1)
        left = []
        for step in range(2, 8):
            [Node() for _ in range(5000)]  # Python's own thresholds are lower
            garbage.after(step)
            left.append(Node.alive)
    assert left == [5000, 0, 5000, 10000, 0, 5000]


def test_all_objects_after_the_first_step_and_at_evaluations() -> None:
    old = Node()
    gc.collect()  # it is old now
    with GarbageCollection(every=2) as garbage:
        del old
        garbage.after(5)
        assert not Node.alive, "the first step of a resumed run too"
        old = Node()
        garbage.collect()
        del old
        garbage.after(6)
        assert Node.alive == 1, "only young objects in between"
        garbage.collect()
        assert not Node.alive


def test_zero_leaves_it_to_python() -> None:
    with GarbageCollection(every=0) as garbage:
        assert gc.isenabled()
        Node()
        for step in range(1, 10):
            garbage.after(step)
        garbage.collect()
        assert Node.alive == 1
        for _ in range(100_000):
            Node()
        assert Node.alive < 100_000


def test_after_an_error_python_collects_again() -> None:
    with suppress(KeyError), GarbageCollection(every=1):
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with GarbageCollection(every=1):
        pass
    assert not gc.isenabled(), "collection stays disabled if it was disabled before"
    gc.enable()
