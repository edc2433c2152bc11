"""The rendezvous on the host: rounds among threads and processes, a rank that fails, a rank that does not come."""

from __future__ import annotations

import contextlib
import random
import time
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks

from mxep.comm.host_allgather import MOST_VALUES, ExchangeError, HostAllGather, open_file, rendezvous_bytes, shared_file


def boards(world: int, timeout_s: float = 20) -> list[HostAllGather]:
    memory = bytearray(rendezvous_bytes(world))
    return [HostAllGather(memory, rank, world, timeout_s) for rank in range(world)]


def test_rounds_of_every_length() -> None:
    world, rounds = 4, 200
    lengths = [random.Random(i).randrange(60) for i in range(rounds)]

    def main(rendezvous: HostAllGather) -> None:
        for i, length in enumerate(lengths):
            shown = rendezvous.all_gather([i * 1000 + rendezvous.rank - 5] * (length + rendezvous.rank))
            assert shown == [[i * 1000 + rank - 5] * (length + rank) for rank in range(world)]

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(main, boards(world)))


def test_a_word_that_has_not_arrived_yet_is_waited_for() -> None:
    """What a machine with weaker memory order may show: the round before the values."""
    a, b = boards(2)
    place = a._slots[1][1]
    place[:4] = array("q", (1, 1, 0, 77))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(a.all_gather, [5])
        time.sleep(0.1)
        assert not got.done()
        assert b.all_gather([78]) == [[5], [78]] == got.result()


def test_who_does_not_come() -> None:
    a, _ = boards(2, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank 0 of 2.*nothing from rank 1 for 0.2 s.*timeout_s"):
        a.all_gather([1])
    assert time.monotonic() - start < 5


def test_who_fails_says_so() -> None:
    a, b, c = boards(3)
    b.fail("out of memory \udce9 \u00e9" * 200)  # a lone surrogate, as in names of files
    for rendezvous in (a, c):
        with pytest.raises(ExchangeError, match=r"rank 1: out of memory"):
            rendezvous.all_gather([])


def test_too_much_to_show() -> None:
    (a,) = boards(1)
    assert a.all_gather([1] * MOST_VALUES) == [[1] * MOST_VALUES]
    with pytest.raises(ValueError, match=r"8193 integers.*8192"):
        a.all_gather([1] * (MOST_VALUES + 1))


def _processes(rank: int, world: int) -> None:
    with contextlib.ExitStack() as files:
        objects = [files.enter_context(shared_file(world)) if rank == 0 else None]
        dist.broadcast_object_list(objects)
        path, token = objects[0]
        memory = open_file(path, token, world)
        assert memory is not None
        assert open_file(path, b"x" * 16, world) is None, "another file at that path"
        dist.barrier()
    assert rank != 0 or not path.exists()
    rendezvous = HostAllGather(memory, rank, world, 20)
    for i in range(100):
        assert rendezvous.all_gather([i, rank]) == [[i, r] for r in range(world)]


def test_processes() -> None:
    run_ranks(_processes, 2)


def test_no_such_file(tmp_path) -> None:
    assert open_file(tmp_path / "nothing", b"", 2) is None


def test_who_leaves_is_not_waited_for() -> None:
    a, b = boards(2)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(a.all_gather, [1])
        assert b.all_gather([2]) == [[1], [2]] == got.result()
    b.close()
    assert a.failure() is None, "what it sent is complete"
    with pytest.raises(ExchangeError, match="rank 1 has closed its transport"):
        a.all_gather([])
