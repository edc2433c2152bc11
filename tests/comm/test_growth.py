"""Symmetric memory grows and shrinks on all ranks at once. Released memory is poisoned, and `run_virtual` checks that it stays so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.virtual import run_virtual, symmetric

from mxep.comm import symmetric_memory as growth

MIB = 1 << 20
IDLE, MOST = 6, 20  # exchanges, for these tests


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LEAST_PATIENCE", IDLE)
    monkeypatch.setattr(growth, "MOST_PATIENCE", MOST)


def move(name: str, me: int, world: int, mib: float, tag: int = 0) -> torch.Tensor:
    """Every rank receives `mib` MiB, the same from each rank, and checks it."""
    count = round(mib * MIB) // (4096 * world)
    rows = torch.full((count * world, 4096), 10 * tag + me, dtype=torch.uint8)
    out = torch.ops.mxep.exchange_rows(rows, [count] * world, [count] * world, name)
    assert out[::count, 0].tolist() == [10 * tag + rank for rank in range(world)]
    return out


def state(name: str) -> tuple[list[tuple[int, int]], int]:
    """(number, MiB) of all buffers, and bytes; the same on all ranks."""
    transport = symmetric(name)
    return [(index, buffer.memory.numel() // MIB) for index, buffer in transport._pool.buffers.items()], transport.nbytes()


def agreed(states: list[Any]) -> Any:
    assert all(mine == states[0] for mine in states), states
    return states[0]


def other_sizes(me: int, world: int, name: str) -> list[Any]:
    found = []
    for phase, mib in enumerate((6, 12, 24, 12, 6)):
        for _ in range(IDLE + 2):
            move(name, me, world, mib, phase)
        found.append(state(name))
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_sizes_that_change_permanently_leave_bounded_memory(world: int) -> None:
    """Buffers of the current and the previous size stay. Buffers that were unused for long are released when a new one is allocated."""
    found = agreed(run_virtual(other_sizes, world))
    buffers = [sizes for sizes, _ in found]
    assert buffers[:4] == [[(0, 6)], [(0, 6), (1, 12)], [(1, 12), (2, 24)], [(1, 12), (2, 24)]]
    assert buffers[4] == [(1, 12), (3, 6)]
    assert [total // MIB for _, total in found] == [6, 18, 36, 36, 18]


def alternating_sizes(me: int, world: int, name: str) -> list[Any]:
    found = []
    for turn in range(5):
        for mib in (6, 12, 24):
            for _ in range(IDLE + 2):
                move(name, me, world, mib, turn)
        found.append(state(name))
    return found


def test_buffers_of_alternating_sizes_are_reallocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MOST_PATIENCE", 100)
    found = agreed(run_virtual(alternating_sizes, 2))
    assert found[0][0] == [(1, 12), (2, 24)]
    assert found[1] == found[2] == found[3] == found[4]
    assert sorted(mib for _, mib in found[4][0]) == [6, 12, 24]


def drifting_sizes(me: int, world: int, name: str, held: int) -> tuple[list[int], list[int]]:
    """A new maximum in every step while `held` results are held: the number of buffers after each step, and the last sizes in MiB."""
    kept, counts = [], []
    for step in range(10):
        kept = [(move(name, me, world, 8 + 0.6 * step, i), i) for i in range(held)]
        for out, i in kept:
            assert out[0, 0] == 10 * i
        del out
        kept.clear()
        counts.append(len(symmetric(name)._pool.buffers))
    return counts, [mib for _, mib in state(name)[0]]


@pytest.mark.parametrize("held", [1, 3])
def test_drifting_sizes_leave_as_many_buffers_as_are_held(held: int) -> None:
    """A new maximum replaces one buffer, however recently it was used; the other buffers stay for the step that needs them."""
    counts, sizes = agreed(run_virtual(drifting_sizes, 2, held))
    assert counts == [held] * 10
    assert sizes == [13] * held


def skewed(me: int, world: int, name: str) -> list[Any]:
    """Steps in which ranks receive as unevenly as under Zipf's law, rows of two widths; some results are held from step to step."""
    shares = [153, 71, 107, 193][:world]
    held: list[torch.Tensor] = []
    found = []
    for step in range(12):
        results = []
        for width, factor in ((4096, 4), (2048, 2), (4096, 2)):
            counts = [share * factor for share in shares]
            rows = torch.full((sum(counts), width), 10 * step + me, dtype=torch.uint8)
            out = torch.ops.mxep.exchange_rows(rows, [counts[me]] * world, counts, name)
            assert out[:: counts[me], 0].tolist() == [10 * step + rank for rank in range(world)]
            results.append(out)
        held = results[:2]
        found.append(state(name)[0])
    assert [out[-1, -1].item() for out in held] == [110 + world - 1] * 2
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_receive_unevenly_keep_their_buffers(world: int) -> None:
    """A buffer has the size that the fullest rank needs, and is not too large for the ranks that receive less."""
    found = agreed(run_virtual(skewed, world))
    assert all(buffers == found[3] for buffers in found[3:]), found
    assert len(found[3]) <= 6


def held_by_one(me: int, world: int, name: str) -> list[Any]:
    out = move(name, me, world, 6, tag=1)
    want = out.clone()
    if me:
        del out
    for _ in range(IDLE + 2):
        move(name, me, world, 0.1)
    move(name, me, world, 12)
    move(name, me, world, 7)
    found = [state(name)]
    if not me:
        assert torch.equal(out, want)
        del out
    for _ in range(IDLE + 2):
        move(name, me, world, 0.1)
    move(name, me, world, 24)
    return [*found, state(name)]


def test_a_tensor_on_one_rank_keeps_its_buffer_on_all_ranks() -> None:
    before, after = agreed(run_virtual(held_by_one, 3))
    assert [mib for _, mib in before[0]] == [6, 0, 12, 7]
    assert [mib for _, mib in after[0]] == [0, 24]


def constant_sizes(me: int, world: int, name: str) -> Any:
    """Steps of few sizes, one of them rare, held over several exchanges: no buffer is allocated or released after the first step."""
    transport: Any = symmetric(name)
    for step in range(4):
        held = [move(name, me, world, 6, tag=step)]
        for _ in range(3 * IDLE):
            move(name, me, world, 0.1)
            held.append(move(name, me, world, 0.3, tag=step))
        held.append(move(name, me, world, 12, tag=step))
        assert [int(out[0, 0]) for out in held] == [10 * step] * len(held)
        del held
        if step == 0:
            transport._growth._memory.release = transport._growth._memory.allocate = None
    return state(name)


def test_programs_of_constant_sizes_keep_their_buffers() -> None:
    agreed(run_virtual(constant_sizes, 2))


def captured(me: int, world: int, name: str) -> Any:
    transport: Any = symmetric(name)

    def push() -> None:
        with transport.open((9,), (6 * MIB,), [], in_graphs=True) as opened:
            opened.buffers[0].fill_(me)

    push()
    transport._capture = lambda: 7
    push()
    del transport._capture
    for _ in range(IDLE + 2):
        move(name, me, world, 0.1)
    move(name, me, world, 12)
    move(name, me, world, 7)
    transport._growth._memory.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        move(name, me, world, 24 * (1 + world))
    assert transport._pool.buffers[0].memory[0] == me, "replays write into this buffer"
    return state(name)


def test_buffers_of_a_graph_are_never_released() -> None:
    """Not when it is unused, not when a larger one replaces others, and not when there is no memory left."""
    buffers, total = agreed(run_virtual(captured, 2))
    assert buffers == [(0, 6)]
    assert total == 6 * MIB


def no_room(me: int, world: int, name: str, holds: bool) -> Any:
    """Rank 1 has room for 40 MiB: 6 and 12 and then 24 together are too many."""
    transport: Any = symmetric(name)
    if me == 1:
        transport._growth._memory.room = 40 * MIB
    move(name, me, world, 6)
    out = move(name, me, world, 12, tag=1)
    if me or not holds:
        del out
    if holds:
        with pytest.raises(torch.OutOfMemoryError, match=r"no room for .* on 1 ranks"):
            move(name, me, world, 30)
        assert [mib for _, mib in state(name)[0]] == [12]
        if not me:
            assert (out[0] == 10).all()
    else:
        move(name, me, world, 30)
    move(name, me, world, 8)
    return state(name)


def test_all_free_buffers_are_released_if_there_is_no_room_otherwise() -> None:
    buffers, _ = agreed(run_virtual(no_room, 3, False))
    assert buffers == [(2, 30), (3, 8)]


def test_no_room_is_an_error_on_every_rank_and_the_next_exchange_works() -> None:
    buffers, _ = agreed(run_virtual(no_room, 3, True))
    assert [mib for _, mib in buffers] == [12, 8]


def slots(me: int, world: int, name: str) -> Any:
    transport: Any = symmetric(name)
    move(name, me, world, 6)
    transport._growth._memory.room = 0
    rows = torch.ones(world, 32)
    assert torch.equal(torch.ops.mxep.exchange_dequantized(rows, [1] * world, [1] * world, name, "rceil"), rows)
    return state(name)


def test_slots_take_the_room_of_free_buffers() -> None:
    assert agreed(run_virtual(slots, 2))[0] == []


def shapes_alone(me: int, world: int, name: str) -> int:
    transport = symmetric(name)
    with transport.open((9,), (66 * MIB - 7,), [], in_graphs=True):
        pass
    return transport.nbytes()


def test_sizes_that_depend_on_shapes_alone_are_not_rounded_up_by_a_sixteenth() -> None:
    assert run_virtual(shapes_alone, 2) == [66 * MIB] * 2
