"""Ranks that die, hang or are late, on virtual ranks whose streams run asynchronously to their hosts, as on a GPU (tests/streams.py)."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import torch
from tests.streams import OverStreams, done, stub_the_driver
from tests.virtual import run_virtual, symmetric

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
    """From now on no stream of this rank does anything; its host still takes part in all-gathers until it returns."""
    transport.copy_streams.enqueue = lambda stream, act: None
    transport.close = lambda: None


def steps(me: int, world: int, name: str) -> None:
    """No rank dies: hosts run far ahead, and every row arrives where it belongs."""
    rows = [torch.full((4, 8), 10.0 * step + me) for step in range(50)]
    got = [exchange(name, each) for each in rows]
    assert done(20)
    for step, out in enumerate(got):
        assert out[:, 0].tolist() == [10.0 * step, 10.0 * step, 10.0 * step + 1, 10.0 * step + 1]


def test_exchanges_over_streams_that_are_threads() -> None:
    run_virtual(steps, 2, timeout_s=20, transport=OverStreams)


def dies_after_the_all_gather(me: int, world: int, name: str) -> None:
    """The all-gather with the dead rank's host succeeds; the device waits for rows that never arrive."""
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


def test_the_wait_of_a_device_for_a_dead_rank_ends() -> None:
    run_virtual(dies_after_the_all_gather, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


def two_open_exchanges(me: int, world: int, name: str) -> None:
    """As in backward, where scores are returned and the next exchange opens before they are waited for: rank 1 dies between the two."""
    transport: Any = symmetric(name)
    rows = torch.ones(4, 8)
    exchange(name, rows)
    assert done(5)
    if me == 1:
        dies(transport)  # before it signals that it is ready to receive
    mine = torch.ones(16, dtype=torch.uint8)
    with transport.open((9,), (32,), [], in_graphs=True) as opened:
        opened.scatter_copy(0, 16 * me, [mine, mine])
        if me == 1:
            return
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
            transport.open((9,), (32,), [], in_graphs=True)
        assert time.monotonic() - start < TIMEOUT_S + 1
        assert done(TIMEOUT_S + 3), "copies to rank 1 wait for ever, and so does a sync of the device"


def test_pending_copies_end_when_the_next_all_gather_fails() -> None:
    """The traceback of the error keeps the first exchange open, and the process must still end."""
    run_virtual(two_open_exchanges, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


_given_up = threading.Event()


def too_late(me: int, world: int, name: str) -> None:
    """Rank 0 has timed out when rank 1 arrives, and tries again: its second exchange is not taken for rank 1's first."""
    rows = [torch.full((4, 8), 10.0 * step + me) for step in range(3)]
    exchange(name, rows[0])
    assert done(5)
    if me == 1:
        assert _given_up.wait(20)
        out = exchange(name, rows[1])  # the values that rank 0 gathered for it are there
        with pytest.raises(ExchangeError, match=r"rank 0: exchange .*: nothing from rank 1 for 0.6 s"):
            exchange(name, rows[2])
        assert done(5)
        assert out.isnan().all(), "not the rows that rank 0 sends in another exchange"
        return
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
        exchange(name, rows[1])
    _given_up.set()
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.6 s"):
        exchange(name, rows[1])
    assert time.monotonic() - start < TIMEOUT_S / 2, "no wait once the ranks are out of step"


def test_a_rank_that_arrives_after_another_one_has_timed_out() -> None:
    run_virtual(too_late, 2, timeout_s=TIMEOUT_S, transport=OverStreams)


def interrupted(me: int, world: int, name: str) -> None:
    """As in a notebook: the user interrupts this host while it waits for another rank, which arrives later."""
    transport: Any = symmetric(name)
    all_gather = transport.rendezvous.all_gather

    def interrupt(values: Any) -> Any:
        raise KeyboardInterrupt

    rows = torch.ones(4, 8)
    if me == 0:
        transport.rendezvous.all_gather = interrupt
        with pytest.raises(KeyboardInterrupt):
            exchange(name, rows)
        transport.rendezvous.all_gather = all_gather
    with pytest.raises(ExchangeError, match="rank 0 failed: KeyboardInterrupt"):
        exchange(name, rows)


def test_a_rank_that_is_interrupted_in_an_all_gather() -> None:
    run_virtual(interrupted, 2, timeout_s=20, transport=OverStreams)
