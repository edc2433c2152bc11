"""What a session asks of the lanes, and of the board, on virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tests.comm.test_symmetric import symmetric
from tests.virtual import run_virtual

from mxep.comm.lanes import AWAY, WAIT, WRITE, HostLanes, Operation


class Told(HostLanes):
    """What was asked of the lanes: (lane, kinds) of each batch, and kinds alone of single ones."""

    def __init__(self, lanes: HostLanes) -> None:
        super().__init__(lanes.device, lanes.timeout_s, lanes._failure)
        self.asked: list[Any] = []

    def write(self, lane: int | None, flag: int, value: int) -> None:
        self.asked.append((lane, WRITE))
        super().write(lane, flag, value)

    def wait(self, lane: int | None, flag: int, value: int) -> None:
        self.asked.append((lane, WAIT))
        super().wait(lane, flag, value)

    def batch(self, lane: int | None, operations: Sequence[Operation]) -> None:
        before = len(self.asked)
        super().batch(lane, operations)
        self.asked[before:] = [(lane, [kind for kind, _, _ in operations])]


def push_once(transport: Any, me: int) -> None:
    """Every rank tells every rank its number, and holds what it gets against the truth."""
    mine = torch.full((16,), me, dtype=torch.uint8)
    with transport.open((9,), (16 * transport.world,), [], in_graphs=True) as session:
        session.spread(0, 16 * me, [mine] * transport.world)
        session.arrive(1)
    assert session.buffers[0][: 16 * transport.world : 16].tolist() == list(range(transport.world))


def asks(me: int, world: int, name: str) -> None:
    transport: Any = symmetric(name)
    lanes = transport.lanes = Told(transport.lanes)
    all_of = {kind: [kind] * world for kind in (WAIT, WRITE)}
    for _ in range(2):
        lanes.asked.clear()
        push_once(transport, me)
        assert lanes.asked == [(None, all_of[WRITE]), (AWAY, all_of[WAIT]), (AWAY, all_of[WRITE]), (None, all_of[WAIT])]
    transport._capture = lambda: 7
    lanes.asked.clear()
    push_once(transport, me)
    put_back = [WAIT, WRITE] * world
    singles = [*[(None, WRITE)] * world, *[(AWAY, kind) for kind in put_back], *[(AWAY, WRITE)] * world]
    assert lanes.asked == [*singles, *[(None, kind) for kind in put_back]]


def test_an_eager_session_asks_in_batches_and_a_captured_one_one_by_one() -> None:
    run_virtual(asks, 3)
