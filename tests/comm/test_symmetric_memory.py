"""Buffers that peers write into: a tensor on a buffer keeps it, and it is free again when the last tensor is gone."""

from __future__ import annotations

import gc
import random

import torch

from mxep.comm.symmetric_memory import BufferPool, BufferRef, SymmBuffer, buffer_bytes, most_bytes, tensor_on


def pool_of(*sizes: int) -> BufferPool:
    pool = BufferPool()
    for size in sizes:
        memory = torch.zeros(size, dtype=torch.uint8)
        pool.add(SymmBuffer(memory, [memory.data_ptr()]))
    return pool


def test_a_lease_ends_with_the_last_view() -> None:
    pool = pool_of(4096)
    assert pool.take(100) == 0
    assert pool.take(100) == -1
    tensor = tensor_on(BufferRef(pool, 0))
    assert tensor.data_ptr() == pool.buffers[0].memory.data_ptr()
    view = tensor[16:80].view(torch.bfloat16).view(4, 8)
    view.fill_(1)
    assert pool.buffers[0].memory[16:80].any(), "the same memory"
    del tensor
    gc.collect()
    assert pool.take(100) == -1
    empty = view[:0]
    del view
    assert pool.take(100) == -1
    del empty
    assert pool.take(100) == 0


def test_tensors_that_autograd_saved_keep_the_buffer() -> None:
    pool = pool_of(4096)
    pool.take(1)
    w = torch.ones(4, 8, requires_grad=True)
    out = w * tensor_on(BufferRef(pool, 0))[:128].view(torch.float32).view(4, 8)
    assert pool.take(1) == -1
    out.sum().backward()
    assert pool.take(1) == 0


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = pool_of(64 << 20, 7 << 20, 6 << 20)
    assert pool.take(5 << 20) == 2
    assert pool.take(5 << 20) == 1
    assert pool.take(65 << 20) == -1
    assert pool.take(5 << 20) == 0
    assert pool.take(1) == -1
    assert pool.nbytes() == 77 << 20


def test_take_each_serves_the_largest_size_first() -> None:
    pool = pool_of(64 << 20, 7 << 20)
    assert pool.take_each([5 << 20, 40 << 20, 6 << 20]) == [-1, 0, 1]


def test_largest_buffer_for_a_size() -> None:
    """64 MiB are too large for 33 MiB: tokens that are saved in MX should not occupy a buffer for bf16 rows."""
    assert most_bytes(33 << 20) < 64 << 20 <= most_bytes(45 << 20)
    assert most_bytes(1) == 4 << 20


def test_a_captures_own_buffer_comes_first_unless_it_is_far_too_large() -> None:
    pool = pool_of(64 << 20, 7 << 20, 6 << 20)
    for index in (0, 1):
        pool.give_back(pool.take(pool.buffers[index].memory.numel()), owner=7)
    assert pool.take(6 << 20, owner=7) == 1
    assert pool.take(6 << 20, owner=7) == 2
    assert pool.take(6 << 20, owner=7) == 0, "a far too large buffer is better than none"


def test_sizes_are_rounded_up_by_at_most_a_sixteenth() -> None:
    for size in (0, 1, 4096, 4097, 10**6, 10**9, 123_456_789):
        assert size <= buffer_bytes(size) <= size + max(4096, size // 16)
        assert buffer_bytes(buffer_bytes(size)) == buffer_bytes(size)


def test_sizes_that_depend_on_shapes_alone_are_rounded_up_to_pages() -> None:
    for size in (0, 1, 4096, 4097, 10**6, 10**9, 123_456_789):
        assert size <= buffer_bytes(size, shape_static=True) <= min(size + max(4096, 2 << 20), buffer_bytes(size))
    assert buffer_bytes(131072 * 4224, shape_static=True) == 553_648_128


def test_removed_buffers_are_not_used_again() -> None:
    """They are neither taken nor written to; the other buffers keep their numbers, and no number is used again."""
    pool = pool_of(4096, 8192, 4096)
    pool.now = 5
    assert pool.take(5000) == 1
    pool.give_back(1)
    assert pool.free() == {0: 0, 1: 5, 2: 0}
    removed = pool.remove([0])
    assert [buffer.memory.numel() for buffer in removed] == [4096]
    seen: list[SymmBuffer] = []
    pool.each(seen.append)
    assert seen == [pool.buffers[1], pool.buffers[2]]
    assert pool.nbytes() == 4096 + 8192
    assert [pool.take(1), pool.take(1), pool.take(1)] == [2, 1, -1]
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert pool.add(SymmBuffer(memory, [memory.data_ptr()])) == 3


def test_a_tensor_may_be_freed_while_the_pool_is_locked() -> None:
    """The garbage collector may run at any time, also on the thread that holds the lock."""
    pool = pool_of(4096, 8192)
    held = [tensor_on(BufferRef(pool, pool.take(1)))]
    pool.each(lambda buffer: held.clear())
    assert pool.take(1) == 0


def test_buffers_of_a_capture_are_reserved_for_it() -> None:
    """A CUDA graph writes to its buffer in every replay: even when it is free, only that capture may take it again."""
    pool = pool_of(8192, 4096)
    assert pool.take(100, owner=7) == 1
    tensor = tensor_on(BufferRef(pool, 1, owner=7))
    del tensor
    assert pool.take(5000) == 0
    assert pool.take(100) == -1
    assert pool.take(100, owner=8) == -1
    assert pool.take(100, owner=7) == 1


def test_put_back_restores_the_state_before_take() -> None:
    """Eager buffers that a capture took stay eager, with their time of last use; so do buffers that growth claimed."""
    pool = pool_of(8192, 4096)
    pool.now = 3
    assert pool.take(100, owner=7) == 1
    pool.give_back(1, owner=7)
    pool.now = 5
    taken = [pool.take(5000, owner=7), pool.take(100, owner=7), pool.take(1 << 20, owner=7)]
    assert taken == [0, 1, -1]
    pool.put_back(taken)
    assert pool.free() == {0: 0}
    assert pool.take(100, owner=8) == 0
    assert pool.take(100, owner=7) == 1
    memory = torch.zeros(4096, dtype=torch.uint8)
    pool.claim(pool.add(SymmBuffer(memory, [memory.data_ptr()])))
    assert pool.take(1) == -1
    pool.put_back([2])
    assert pool.free() == {2: 5}


def test_random_takes_and_returns() -> None:
    """Against a linear search: the smallest buffer that fits, the first of equal ones."""
    draw = random.Random(0)
    sizes = [draw.choice((1, 2, 3, 5, 8, 13)) << 20 for _ in range(40)]
    pool, free = pool_of(*sizes), set(range(40))
    for _ in range(500):
        if draw.random() < 0.55:
            size = draw.randrange(14 << 20)
            fits = [index for index in free if size <= sizes[index]]
            want = min(fits, key=lambda index: (sizes[index], index), default=-1)
            assert pool.take(size) == want
            free.discard(want)
        elif len(free) < 40:
            index = draw.choice(sorted(set(range(40)) - free))
            pool.give_back(index)
            free.add(index)
    assert set(pool.free()) == free
