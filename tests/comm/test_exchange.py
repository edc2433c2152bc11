"""What a opened asks of the streams, and of the rendezvous, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.comm.test_symmetric import symmetric
from tests.virtual import HostCopyStreams, run_virtual

from mxep.comm.copy_streams import REMOTE, WAIT, WRITE, Operation
from mxep.comm.symmetric_memory import buffer_bytes


class Told(HostCopyStreams):
    """What was asked of the streams: (stream, kinds) of each batch, and kinds alone of single ones."""

    def __init__(self, streams: HostCopyStreams) -> None:
        super().__init__(streams.device, streams.timeout_s, streams._failure)
        self.asked: list[Any] = []

    def write(self, stream: int | None, flag: int, value: int) -> None:
        self.asked.append((stream, WRITE))
        super().write(stream, flag, value)

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        self.asked.append((stream, WAIT))
        super().wait(stream, flag, value)

    def batch(self, stream: int | None, operations: Sequence[Operation]) -> None:
        before = len(self.asked)
        super().batch(stream, operations)
        self.asked[before:] = [(stream, [kind for kind, _, _ in operations])]


def push_once(transport: Any, me: int) -> None:
    """Every rank tells every rank its number, and holds what it gets against the truth."""
    mine = torch.full((16,), me, dtype=torch.uint8)
    with transport.open((9,), (16 * transport.world,), [], in_graphs=True) as opened:
        opened.scatter_copy(0, 16 * me, [mine] * transport.world)
        opened.wait(1)
    assert opened.buffers[0][: 16 * transport.world : 16].tolist() == list(range(transport.world))


def asks(me: int, world: int, name: str) -> None:
    transport: Any = symmetric(name)
    streams = transport.copy_streams = Told(transport.copy_streams)
    all_of = {kind: [kind] * world for kind in (WAIT, WRITE)}
    for _ in range(2):
        streams.asked.clear()
        push_once(transport, me)
        assert streams.asked == [(None, all_of[WRITE]), (REMOTE, all_of[WAIT]), (REMOTE, all_of[WRITE]), (None, all_of[WAIT])]
    transport._capture = lambda: 7
    streams.asked.clear()
    push_once(transport, me)
    put_back = [WAIT, WRITE] * world
    singles = [*[(None, WRITE)] * world, *[(REMOTE, kind) for kind in put_back], *[(REMOTE, WRITE)] * world]
    assert streams.asked == [*singles, *[(None, kind) for kind in put_back]]


def test_an_eager_session_asks_in_batches_and_a_captured_one_one_by_one() -> None:
    run_virtual(asks, 3)


def copies(me: int, world: int, name: str) -> None:
    """Every other rank's piece where this rank receives: the measurement's copies are those of an exchange."""
    transport: Any = symmetric(name)
    pieces = [torch.full((4 + me, 8), 10 * me + rank, dtype=torch.uint8) for rank in range(world)]
    region = 8 * (3 + world)
    landed = list[Any]()
    opens, transport.open = transport.open, lambda *args: landed.append(opens(*args)) or landed[-1]
    copy = transport.plain_copies(pieces, region)
    landed[0].buffers[0].fill_(99)
    with transport.open((9,), (16,), []):  # all have filled theirs
        pass
    copy()
    with transport.open((9,), (16,), []) as opened:  # all have copied
        opened.put(0, 0, lambda addresses: None)
        opened.wait(1)
    found = landed[0].buffers[0][: world * region].view(world, region)
    for rank in range(world):
        size = 0 if rank == me else 8 * (4 + rank)
        assert (found[rank, :size] == 10 * rank + me).all()
        assert (found[rank, size:] == 99).all()


def test_plain_copies() -> None:
    run_virtual(copies, 3)


def rows_alike(seen: list[Any]) -> Callable[[list[list[int]]], list[int] | None]:
    """As many bytes from each rank as the most rows of any, where the guess was that all have this rank's."""

    def revise(shown: list[list[int]]) -> list[int] | None:
        seen.append(shown)
        most = max(rows for (rows,) in shown)
        return None if all(rows == most for (rows,) in shown) else [16 * most * len(shown)]

    return revise


def sizes_of_all(me: int, world: int, name: str, rows: list[int], capture: int) -> tuple[int, int]:
    """A opened whose buffer is as large as the most rows of any rank; rounds on the rendezvous, and bytes of memory."""
    transport: Any = symmetric(name)
    most = max(rows)
    transport._capture = lambda: 0
    with transport.open((9,), (16 * most * world,), [], in_graphs=True):
        pass
    transport._capture = lambda: capture
    before, seen = transport.rendezvous.round, list[Any]()
    mine = torch.full((16 * most,), me, dtype=torch.uint8)
    guess = 16 * rows[me] * world
    with transport.open((9,), (guess,), [rows[me]], in_graphs=True, revise=rows_alike(seen)) as opened:
        assert opened.peer_metadata == seen[0] == [[count] for count in rows]
        opened.scatter_copy(0, 16 * most * me, [mine] * world)
        opened.wait(1)
    assert opened.buffers[0][: 16 * most * world : 16 * most].tolist() == list(range(world))
    assert len(seen) == 1
    return transport.rendezvous.round - before, transport.nbytes()


@pytest.mark.parametrize("capture", [0, 7])
def test_hosts_meet_once_where_the_guess_is_right_and_twice_where_it_is_not(capture: int) -> None:
    """The guess is a thousand times too small or large for a buffer; none is made for it."""
    assert run_virtual(sizes_of_all, 3, [4096, 4096, 4096], capture) == [(1, 3 * 65536)] * 3
    small, large = 1, 400_000
    assert run_virtual(sizes_of_all, 3, [small, large, small], capture) == [(2, buffer_bytes(16 * 3 * large, shape_static=True))] * 3
    assert run_virtual(sizes_of_all, 1, [large], capture)[0][0] == 1


def grows_late(me: int, world: int, name: str) -> None:
    """No memory is there in the first round: what is taken is for the true sizes alone, and what was held for the guess is free."""
    transport: Any = symmetric(name)
    for _ in range(2):
        with transport.open((9,), (4096 * (1 + 4 * me),), [], in_graphs=True, revise=lambda shown: [50_000, 70_000]) as opened:
            assert [buffer.numel() for buffer in opened.buffers] == [53_248, 73_728]
        del opened
        assert set(transport._pool.free()) == {0, 1} == set(transport._pool.buffers)


def test_memory_grows_for_the_true_sizes() -> None:
    run_virtual(grows_late, 2)


def several_at_once(me: int, world: int, name: str, capture: int) -> None:
    """A table and rows in one meeting, beside an exchange that began before and ends behind them."""
    transport: Any = symmetric(name)
    transport._capture = lambda: 0
    for _ in range(3):  # memory for all that are open at once, and flags that are not where they began
        with (
            transport.open((9,), (64 * world,), [], in_graphs=True) as one,
            transport.open((9,), (64 * world,), [], in_graphs=True) as other,
        ):
            push_to(one, me, world, 5)
            push_to(other, me, world, 6)
            with transport.open((9,), (128 * world,), [], in_graphs=True) as third:
                push_to(third, me, world, 7)
        del one, other, third
    transport._capture = lambda: capture
    for step in range(3):
        with transport.open((8,), (64 * world,), [], in_graphs=True) as around:
            push_to(around, me, world, 50 + step)
            before = transport.rendezvous.round
            first, second = transport.open_each((9,), (64 * world, 128 * world), [me], in_graphs=True)
            assert transport.rendezvous.round == before + 1
            assert first.peer_metadata == second.peer_metadata == [[rank] for rank in range(world)]
            with first:
                push_to(first, me, world, 10 + step)
                with second:
                    push_to(second, me, world, 90 + step)
                    for opened, value in ((first, 10 + step), (second, 90 + step)):
                        opened.wait(1)
                        assert opened.buffers[0][: 64 * world : 64].tolist() == [value + rank for rank in range(world)]
            around.wait(1)
            assert around.buffers[0][: 64 * world : 64].tolist() == [50 + step + rank for rank in range(world)]
        del around, first, second, opened


def push_to(opened: Any, me: int, world: int, value: int) -> None:
    opened.scatter_copy(0, 64 * me, [torch.full((64,), value + me, dtype=torch.uint8)] * world)


@pytest.mark.parametrize("capture", [0, 7])
def test_several_exchanges_begin_in_one_meeting(capture: int) -> None:
    run_virtual(several_at_once, 3, capture)


def goes_wrong(me: int, world: int, name: str) -> None:
    """Other facts, in each round, and what the function raises: on every rank, buffers are free again, and the next exchange works."""
    transport: Any = symmetric(name)

    def refuse(shown: list[list[int]]) -> None:
        raise ValueError(f"not {shown}")

    def opened(facts: tuple[int, ...], revise: Any) -> None:
        transport.open(facts, (4096,), [me], in_graphs=True, revise=revise)

    push_once(transport, me)
    for capture in (0, 7):
        transport._capture = lambda capture=capture: capture
        with pytest.raises(ValueError, match="different calls"):
            opened((9, me), refuse)
        with pytest.raises(ValueError, match=r"not \[\[0\], \[1\]\]"):
            opened((9,), refuse)
        with pytest.raises(ValueError, match="different calls"):  # as many sizes on every rank
            opened((9,), lambda shown: [4096] * (1 + me))
        assert list(transport._pool.free()) == [0]
    with pytest.raises(ValueError, match="no free symmetric memory"):
        opened((9,), lambda shown: [1 << 24])
    transport._capture = lambda: 0
    push_once(transport, me)


def test_errors_are_on_every_rank() -> None:
    run_virtual(goes_wrong, 2)


def out_of_step(me: int, world: int, name: str) -> None:
    """One rank goes on where the other one revises: its next round meets the other's second one, and is not taken for it."""
    transport: Any = symmetric(name)

    def open_twice() -> None:
        for _ in range(2):
            transport.open((9,), (4096,), [], in_graphs=True, revise=lambda shown: [4096] if me else None)

    for _ in range(2):
        push_once(transport, me)
    with pytest.raises(ValueError, match="different calls"):
        open_twice()


def test_a_rank_that_alone_revises() -> None:
    run_virtual(out_of_step, 2)
