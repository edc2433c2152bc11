"""Ranks that die, hang or come too late, on virtual ranks whose streams run behind their hosts as a GPU's do (tests/streams.py)."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import torch
from tests.comm.test_symmetric import symmetric
from tests.streams import OverStreams, done, stub_the_driver
from tests.virtual import run_virtual

from mxep.comm import ExchangeError

TIMEOUT_S = 0.6


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stub_the_driver(monkeypatch)
    caplog.set_level(logging.CRITICAL, "mxep")


def exchange(name: str, rows: torch.Tensor) -> torch.Tensor:
    half = len(rows) // 2
    return torch.ops.mxep.exchange_rows(rows, [half, half], [half, half], name)


def dies(transport: Any) -> None:
    """Nothing that is on its way from this rank or asked for from now on is done; it meets the others until it returns."""
    transport.copy_streams.ask = lambda stream, act: None
    transport.close = lambda: None


def steps(me: int, world: int, name: str) -> None:
    """Nobody dies: hosts far ahead, and every row where it belongs."""
    rows = [torch.full((4, 8), 10.0 * step + me) for step in range(50)]
    got = [exchange(name, each) for each in rows]
    assert done(20)
    for step, out in enumerate(got):
        assert out[:, 0].tolist() == [10.0 * step, 10.0 * step, 10.0 * step + 1, 10.0 * step + 1]


def test_lanes_that_are_threads() -> None:
    run_virtual(steps, 2, timeout_s=20, transport=OverStreams)


def behind_the_meeting(me: int, world: int, name: str) -> None:
    """The host meets the dead rank's host and goes on; its device waits for rows that never come."""
    transport: Any = symmetric(name)
    rows = torch.ones(4, 8)
    exchange(name, rows)
    assert done(5)
    if me == 1:
        dies(transport)
        exchange(name, rows)
        return
    start = time.monotonic()
    out = exchange(name, rows)
    assert time.monotonic() - start < TIMEOUT_S / 2, "the host does not wait"
    assert done(5)
    assert TIMEOUT_S < time.monotonic() - start < TIMEOUT_S + 1
    assert out.isnan().all()
    with pytest.raises(ExchangeError, match=r"exchange 2 \(rank 0 of 2\): a peer's part did not come for 0.6 s; it died or hangs"):
        exchange(name, rows)


def test_a_device_that_waits_for_a_dead_rank_is_let_go() -> None:
    run_virtual(behind_the_meeting, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


def two_under_way(me: int, world: int, name: str) -> None:
    """As in backward, where scores go home and the next exchange opens before anybody waits for them: rank 1 dies between the two."""
    transport: Any = symmetric(name)
    rows = torch.ones(4, 8)
    exchange(name, rows)
    assert done(5)
    if me == 1:
        dies(transport)  # before it says that it is ready to receive
    mine = torch.ones(16, dtype=torch.uint8)
    with transport.open((9,), (32,), [], in_graphs=True) as opened:
        opened.scatter_copy(0, 16 * me, [mine, mine])
        if me == 1:
            return
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
            transport.open((9,), (32,), [], in_graphs=True)
        assert time.monotonic() - start < TIMEOUT_S + 1
        assert done(TIMEOUT_S + 3), "what has left for rank 1 waits for ever, and so does whoever waits for the device"


def test_what_is_under_way_when_a_meeting_fails_is_let_go() -> None:
    """The traceback of the error keeps the exchange under way from its end, and the process must end all the same."""
    run_virtual(two_under_way, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


_given_up = threading.Event()


def too_late(me: int, world: int, name: str) -> None:
    """Rank 0 has given up when rank 1 comes, and tries again: its second exchange is not rank 1's first."""
    rows = [torch.full((4, 8), 10.0 * step + me) for step in range(3)]
    exchange(name, rows[0])
    assert done(5)
    if me == 1:
        assert _given_up.wait(20)
        out = exchange(name, rows[1])  # what rank 0 has shown for it is there
        with pytest.raises(ExchangeError, match=r"rank 0: exchange .*: nothing from rank 1 for 0.6 s"):
            exchange(name, rows[2])
        assert done(5)
        assert out.isnan().all(), "never what rank 0 sends in another exchange"
        return
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
        exchange(name, rows[1])
    _given_up.set()
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
        exchange(name, rows[1])
    assert time.monotonic() - start < TIMEOUT_S / 2, "nothing is waited for once the ranks are out of step"


def test_a_rank_that_comes_when_another_one_has_given_up() -> None:
    run_virtual(too_late, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


def interrupted(me: int, world: int, name: str) -> None:
    """As in a notebook: the user's own interrupt while this host waits for another one, who came after all."""
    transport: Any = symmetric(name)
    show = transport.rendezvous.all_gather

    def interrupt(values: Any) -> Any:
        raise KeyboardInterrupt

    rows = torch.ones(4, 8)
    if me == 0:
        transport.rendezvous.all_gather = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange(name, rows)
        transport.rendezvous.all_gather = show
    with pytest.raises(ExchangeError, match="rank 0 failed: KeyboardInterrupt"):
        exchange(name, rows)


def test_a_rank_that_is_interrupted_in_a_meeting() -> None:
    run_virtual(interrupted, 2, timeout_s=20, transport=OverStreams)
