"""An opened exchange on virtual ranks: its stream operations, and its rounds of the host all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.virtual import HostCopyStreams, run_virtual, symmetric

from mxep.comm.copy_streams import REMOTE, WAIT, WRITE, Operation
from mxep.comm.symmetric_memory import buffer_bytes


class RecordingStreams(HostCopyStreams):
    """Records the operations: (stream, kinds) of each batch, (stream, kind) of single operations."""

    def __init__(self, streams: HostCopyStreams) -> None:
        super().__init__(streams.device, streams.timeout_s, streams._failure)
        self.issued: list[Any] = []

    def write(self, stream: int | None, flag: int, value: int) -> None:
        self.issued.append((stream, WRITE))
        super().write(stream, flag, value)

    def wait(self, stream: int | None, flag: int, value: int) -> None:
        self.issued.append((stream, WAIT))
        super().wait(stream, flag, value)

    def batch(self, stream: int | None, operations: Sequence[Operation]) -> None:
        before = len(self.issued)
        super().batch(stream, operations)
        self.issued[before:] = [(stream, [kind for kind, _, _ in operations])]


def push_once(transport: Any, me: int) -> None:
    """Every rank sends its number to every rank and checks what it receives."""
    mine = torch.full((16,), me, dtype=torch.uint8)
    with transport.open((9,), (16 * transport.world,), [], in_graphs=True) as opened:
        opened.scatter_copy(0, 16 * me, [mine] * transport.world)
        opened.wait(1)
    assert opened.buffers[0][: 16 * transport.world : 16].tolist() == list(range(transport.world))


def records_operations(me: int, world: int, name: str) -> None:
    transport: Any = symmetric(name)
    streams = transport.copy_streams = RecordingStreams(transport.copy_streams)
    all_of = {kind: [kind] * world for kind in (WAIT, WRITE)}
    for _ in range(2):
        streams.issued.clear()
        push_once(transport, me)
        assert streams.issued == [(None, all_of[WRITE]), (REMOTE, all_of[WAIT]), (REMOTE, all_of[WRITE]), (None, all_of[WAIT])]
    transport._capture = lambda: 7
    streams.issued.clear()
    push_once(transport, me)
    wait_and_reset = [WAIT, WRITE] * world
    singles = [*[(None, WRITE)] * world, *[(REMOTE, kind) for kind in wait_and_reset], *[(REMOTE, WRITE)] * world]
    assert streams.issued == [*singles, *[(None, kind) for kind in wait_and_reset]]


def test_eager_exchanges_use_batches_and_captured_ones_single_operations() -> None:
    run_virtual(records_operations, 3)


def copies(me: int, world: int, name: str) -> None:
    """The plain copies of a measurement write every other rank's piece into its region, as an exchange does."""
    transport: Any = symmetric(name)
    pieces = [torch.full((4 + me, 8), 10 * me + rank, dtype=torch.uint8) for rank in range(world)]
    region = 8 * (3 + world)
    opened_by_copies = list[Any]()
    opens, transport.open = transport.open, lambda *args: opened_by_copies.append(opens(*args)) or opened_by_copies[-1]
    copy = transport.plain_copies(pieces, region)
    opened_by_copies[0].buffers[0].fill_(99)
    with transport.open((9,), (16,), []):  # all ranks have filled their buffers
        pass
    copy()
    with transport.open((9,), (16,), []) as opened:  # all ranks have copied
        opened.put(0, 0, lambda addresses: None)
        opened.wait(1)
    found = opened_by_copies[0].buffers[0][: world * region].view(world, region)
    for rank in range(world):
        size = 0 if rank == me else 8 * (4 + rank)
        assert (found[rank, :size] == 10 * rank + me).all()
        assert (found[rank, size:] == 99).all()


def test_plain_copies() -> None:
    run_virtual(copies, 3)


def padded_to_the_most_rows(seen: list[Any]) -> Callable[[list[list[int]]], list[int] | None]:
    """Revises the buffer size to the most rows of any rank; the first guess is that all ranks have the rows of this one."""

    def revise(shown: list[list[int]]) -> list[int] | None:
        seen.append(shown)
        most = max(rows for (rows,) in shown)
        return None if all(rows == most for (rows,) in shown) else [16 * most * len(shown)]

    return revise


def sizes_of_all(me: int, world: int, name: str, rows: list[int], capture: int) -> tuple[int, int]:
    """An exchange whose buffer has room for the most rows of any rank: rounds of the host all-gather, and bytes of memory."""
    transport: Any = symmetric(name)
    most = max(rows)
    transport._capture = lambda: 0
    with transport.open((9,), (16 * most * world,), [], in_graphs=True):
        pass
    transport._capture = lambda: capture
    before, seen = transport.rendezvous.round, list[Any]()
    mine = torch.full((16 * most,), me, dtype=torch.uint8)
    guess = 16 * rows[me] * world
    with transport.open((9,), (guess,), [rows[me]], in_graphs=True, revise=padded_to_the_most_rows(seen)) as opened:
        assert opened.peer_metadata == seen[0] == [[count] for count in rows]
        opened.scatter_copy(0, 16 * most * me, [mine] * world)
        opened.wait(1)
    assert opened.buffers[0][: 16 * most * world : 16 * most].tolist() == list(range(world))
    assert len(seen) == 1
    return transport.rendezvous.round - before, transport.nbytes()


@pytest.mark.parametrize("capture", [0, 7])
def test_one_host_round_if_the_guessed_sizes_are_right_and_two_if_not(capture: int) -> None:
    """The guess is far too small or too large; no buffer is allocated for it."""
    assert run_virtual(sizes_of_all, 3, [4096, 4096, 4096], capture) == [(1, 3 * 65536)] * 3
    small, large = 1, 400_000
    assert run_virtual(sizes_of_all, 3, [small, large, small], capture) == [(2, buffer_bytes(16 * 3 * large, shape_static=True))] * 3
    assert run_virtual(sizes_of_all, 1, [large], capture)[0][0] == 1


def grows_after_revision(me: int, world: int, name: str) -> None:
    """No memory exists in the first round: buffers are allocated for the revised sizes alone, and those reserved for the guess are free."""
    transport: Any = symmetric(name)
    for _ in range(2):
        with transport.open((9,), (4096 * (1 + 4 * me),), [], in_graphs=True, revise=lambda shown: [50_000, 70_000]) as opened:
            assert [buffer.numel() for buffer in opened.buffers] == [53_248, 73_728]
        del opened
        assert set(transport._pool.free()) == {0, 1} == set(transport._pool.buffers)


def test_memory_grows_for_the_true_sizes() -> None:
    run_virtual(grows_after_revision, 2)


def several_at_once(me: int, world: int, name: str, capture: int) -> None:
    """Two exchanges open with one host all-gather, inside of an exchange that began before them and ends after them."""
    transport: Any = symmetric(name)
    transport._capture = lambda: 0
    for _ in range(3):  # allocates memory for all that are open at once, and advances the flags
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
            first, second = transport.open_each((9,), (64 * world, 128 * world), [me])
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
def test_several_exchanges_open_with_one_host_round(capture: int) -> None:
    run_virtual(several_at_once, 3, capture)


def raises_errors(me: int, world: int, name: str) -> None:
    """Different calls in either round, and errors of `revise`, raise on every rank. Buffers are free again, and the next exchange works."""
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
        with pytest.raises(ValueError, match="different calls"):  # the number of sizes differs
            opened((9,), lambda shown: [4096] * (1 + me))
        assert list(transport._pool.free()) == [0]
    with pytest.raises(ValueError, match="no free symmetric memory"):
        opened((9,), lambda shown: [1 << 24])
    transport._capture = lambda: 0
    push_once(transport, me)


def test_errors_are_on_every_rank() -> None:
    run_virtual(raises_errors, 2)


def revises_alone(me: int, world: int, name: str) -> None:
    """One rank continues where the other one revises: the rounds that then meet in the all-gather are not mistaken for each other."""
    transport: Any = symmetric(name)

    def open_twice() -> None:
        for _ in range(2):
            transport.open((9,), (4096,), [], in_graphs=True, revise=lambda shown: [4096] if me else None)

    for _ in range(2):
        push_once(transport, me)
    with pytest.raises(ValueError, match="different calls"):
        open_twice()


def test_a_rank_that_alone_revises() -> None:
    run_virtual(revises_alone, 2)
