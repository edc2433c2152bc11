"""Symmetric memory that does not fit: torch's cache is emptied first; if that does not help, every rank raises the same error.

Memory is released only when every rank's device is done.
"""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from mxep.comm.host_allgather import HostAllGather, rendezvous_bytes
from mxep.comm.symmetric_memory import SymmBuffer, TorchMemory

DEVICE = torch.device("cuda", 0)


def allocations(
    monkeypatch: pytest.MonkeyPatch, free: list[int], world: int, set_up: list[int] | None = None
) -> list[BaseException | None]:
    """The errors of allocating 1000 bytes on ranks (threads) with `free` bytes left, to which emptying the cache adds 500.

    set_up: how often each rank's process has set up symmetric memory before.
    """
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    mine = threading.local()

    def take(shape, strides, dtype, device):
        if mine.free < shape[0]:
            raise RuntimeError("CUDA driver error: out of memory")
        memory = torch.empty(shape, dtype=dtype)
        mine.taken = weakref.ref(memory)
        return memory

    class Handle:
        def __init__(self, memory: torch.Tensor) -> None:
            self.rank, self.buffer_ptrs = mine.rank, [memory.data_ptr()] * world

    monkeypatch.setattr(symmetric, "_SymmetricMemory", type("Fake", (), {"empty_strided_p2p": staticmethod(take)}))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: Handle(memory))
    monkeypatch.setattr("mxep.comm.symmetric_memory.resolve_group", lambda where, name: name)
    monkeypatch.setattr("mxep.comm.symmetric_memory._set_up", mine)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (mine.free, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(mine, "free", mine.free + 500))
    shared, ends = bytearray(rendezvous_bytes(world)), [None] * world

    def rank_of(rank: int) -> None:
        mine.rank, mine.free, mine.taken, mine.count = rank, free[rank], lambda: None, (set_up or [0] * world)[rank]
        try:
            assert TorchMemory("group", DEVICE, HostAllGather(shared, rank, world, 20.0)).allocate(1000).memory.numel() == 1000
        except BaseException as error:
            assert mine.taken() is None, "a failed allocation is freed, so that other ranks have room to try again"
            ends[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def test_the_cache_is_emptied_if_that_makes_room(monkeypatch: pytest.MonkeyPatch):
    assert allocations(monkeypatch, [5000, 600], 2) == [None, None]


def test_a_rank_without_room_is_the_same_error_on_every_rank(monkeypatch: pytest.MonkeyPatch):
    ends = allocations(monkeypatch, [5000, 5000, 100], 3)
    assert [type(end) for end in ends] == [torch.OutOfMemoryError] * 3
    assert {str(end) for end in ends} == {str(ends[0])}
    assert "1000 bytes" in str(ends[0])
    assert "rank 2 has 600 left" in str(ends[0])


def test_different_setup_counts_are_the_same_error_on_every_rank(monkeypatch: pytest.MonkeyPatch):
    """Two groups share some of their processes, which have set up memory more often than the others: torch would wait for ever."""
    assert allocations(monkeypatch, [5000] * 3, 3, set_up=[4, 4, 4]) == [None] * 3
    ends = allocations(monkeypatch, [5000] * 3, 3, set_up=[4, 4, 3])
    assert [type(end) for end in ends] == [RuntimeError] * 3
    assert {str(end) for end in ends} == {str(ends[0])}
    assert "[4, 4, 3] times" in str(ends[0])
    assert "'collective'" in str(ends[0])


def test_memory_is_released_when_every_device_is_done(monkeypatch: pytest.MonkeyPatch):
    world, shared, events = 3, bytearray(rendezvous_bytes(3)), []

    def synchronize(device: torch.device) -> None:
        time.sleep(0.05 * int(threading.current_thread().name))
        events.append("done")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    class Owner:
        def __del__(self) -> None:
            events.append("released")

    def rank_of(rank: int) -> None:
        buffers = [SymmBuffer(torch.zeros(8, dtype=torch.uint8), [1, 2, 3], Owner()) for _ in range(2)]
        memories = [weakref.ref(buffer.memory) for buffer in buffers]
        TorchMemory("group", DEVICE, HostAllGather(shared, rank, world, 20.0)).release(buffers)
        events.append("returned")
        assert not any(buffer.addresses or buffer.memory.numel() for buffer in buffers)
        assert [memory() for memory in memories] == [None, None]
        events.append("checked")

    threads = [threading.Thread(target=rank_of, args=(rank,), name=str(rank)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert events[:9] == ["done"] * 3 + ["released"] * 6
    assert sorted(events[9:]) == ["checked"] * 3 + ["returned"] * 3
