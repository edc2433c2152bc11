"""The host all-gather: rounds among threads and processes, a rank that fails, a rank that does not arrive."""

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


def endpoints(world: int, timeout_s: float = 20) -> list[HostAllGather]:
    memory = bytearray(rendezvous_bytes(world))
    return [HostAllGather(memory, rank, world, timeout_s) for rank in range(world)]


def test_rounds_of_every_length() -> None:
    world, rounds = 4, 200
    lengths = [random.Random(i).randrange(60) for i in range(rounds)]

    def main(rendezvous: HostAllGather) -> None:
        for i, length in enumerate(lengths):
            gathered = rendezvous.all_gather([i * 1000 + rendezvous.rank - 5] * (length + rendezvous.rank))
            assert gathered == [[i * 1000 + rank - 5] * (length + rank) for rank in range(world)]

    with ThreadPoolExecutor(world) as pool:
        list(pool.map(main, endpoints(world)))


def test_values_that_have_not_arrived_yet_are_waited_for() -> None:
    """On a machine with a weaker memory order the number of the round may be visible before the values."""
    a, b = endpoints(2)
    slot = a._slots[1][1]
    slot[:4] = array("q", (1, 1, 0, 77))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(a.all_gather, [5])
        time.sleep(0.1)
        assert not got.done()
        assert b.all_gather([78]) == [[5], [78]] == got.result()


def test_a_rank_that_does_not_arrive_times_out() -> None:
    a, _ = endpoints(2, timeout_s=0.2)
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank 0 of 2.*nothing from rank 1 for 0.2 s.*timeout_s"):
        a.all_gather([1])
    assert time.monotonic() - start < 5


def test_a_failed_rank_raises_on_the_others() -> None:
    a, b, c = endpoints(3)
    b.fail("out of memory \udce9 \u00e9" * 200)  # a lone surrogate, as in names of files
    for rendezvous in (a, c):
        with pytest.raises(ExchangeError, match=r"rank 1: out of memory"):
            rendezvous.all_gather([])


def test_too_many_values() -> None:
    (a,) = endpoints(1)
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


def test_a_closed_rank_is_not_waited_for() -> None:
    a, b = endpoints(2)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(a.all_gather, [1])
        assert b.all_gather([2]) == [[1], [2]] == got.result()
    b.close()
    assert a.failure() is None, "the round that it took part in is complete"
    with pytest.raises(ExchangeError, match="rank 1 has closed its transport"):
        a.all_gather([])
