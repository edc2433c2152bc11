"""Symmetric memory that does not fit: what torch's allocator keeps is let go of first, and then it is the same error on every rank."""

from __future__ import annotations

import threading

import pytest
import torch

from mxep.comm.board import Board, board_bytes
from mxep.comm.torch_memory import TorchMemory

DEVICE = torch.device("cuda", 0)


def allocations(monkeypatch: pytest.MonkeyPatch, free: list[int], world: int) -> list[BaseException | None]:
    """How 1000 bytes fare on ranks with so many left, each rank a thread; what a rank's cache holds is free after it was emptied."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    mine = threading.local()

    def take(shape, strides, dtype, device):
        if mine.free < shape[0]:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(shape, dtype=dtype)

    class Handle:
        def __init__(self, memory: torch.Tensor) -> None:
            self.rank, self.buffer_ptrs = mine.rank, [memory.data_ptr()] * world

    monkeypatch.setattr(symmetric, "_SymmetricMemory", type("Fake", (), {"empty_strided_p2p": staticmethod(take)}))
    monkeypatch.setattr(symmetric, "rendezvous", lambda memory, group: Handle(memory))
    monkeypatch.setattr("mxep.comm.torch_memory.resolve_group", lambda where, name: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (mine.free, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(mine, "free", mine.free + 500))
    shared, ends = bytearray(board_bytes(world)), [None] * world

    def rank_of(rank: int) -> None:
        mine.rank, mine.free = rank, free[rank]
        try:
            assert TorchMemory("group", DEVICE, Board(shared, rank, world, 20.0)).allocate(1000).memory.numel() == 1000
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends


def test_the_cache_is_emptied_where_that_makes_room(monkeypatch: pytest.MonkeyPatch):
    assert allocations(monkeypatch, [5000, 600], 2) == [None, None]


def test_a_rank_without_room_is_the_same_error_everywhere(monkeypatch: pytest.MonkeyPatch):
    ends = allocations(monkeypatch, [5000, 5000, 100], 3)
    assert [type(end) for end in ends] == [torch.OutOfMemoryError] * 3
    assert {str(end) for end in ends} == {str(ends[0])}
    assert "1000 bytes" in str(ends[0])
    assert "rank 2 has 600 left" in str(ends[0])
