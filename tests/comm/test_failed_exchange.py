"""An exchange that fails is the last one of its group: later ones say what the first failure was, and nothing of it is used again."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.test_symmetric import symmetric
from tests.streams import OverStreams, done, stub_the_driver
from tests.virtual import run_virtual
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.comm import ExchangeError, close_transports, collective

FIRST = "rank 0 failed: RuntimeError: broken"


def broken(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("broken")


def exchange(name: str) -> torch.Tensor:
    return torch.ops.mxep.exchange_rows(torch.ones(2, 4), [1, 1], [1, 1], name)


def breaks(me: int, world: int, name: str, breaks_at: Callable[[Any], tuple[Any, str]]) -> None:
    """Rank 0 alone fails at some point of an exchange, and its program catches that and goes on."""
    transport: Any = symmetric(name)
    exchange(name)
    if me == 0:
        where, what = breaks_at(transport)
        whole = getattr(where, what)
        setattr(where, what, broken)
        with pytest.raises(RuntimeError, match="broken"):
            exchange(name)
        setattr(where, what, whole)
        transport._pool.take_each = lambda *arguments: pytest.fail("a buffer of a failed group")
    elif me == 1:
        with contextlib.suppress(ExchangeError):
            exchange(name)  # it may have had all of this one
    for _ in range(2):
        with pytest.raises(ExchangeError, match=FIRST):
            exchange(name)
        with pytest.raises(ExchangeError, match=FIRST):
            torch.ops.mxep.exchange_dequantized(torch.ones(2, 32), [1, 1], [1, 1], name, "rceil")


@pytest.mark.parametrize(
    "breaks_at",
    [
        lambda transport: (transport._growth, "refuse"),  # in the meeting, of this rank alone
        lambda transport: (transport, "_signal_ready"),  # behind the meeting
        lambda transport: (transport.copy_streams, "copy"),  # under way
        lambda transport: (transport.copy_streams, "join"),  # at the end, when all has been sent
        lambda transport: (transport, "ended"),
    ],
    ids=["meeting", "ready", "copy", "join", "end"],
)
def test_wherever_it_fails(breaks_at: Callable[[Any], tuple[Any, str]]) -> None:
    run_virtual(breaks, 2, breaks_at, timeout_s=5)


def no_mailbox(me: int, world: int, name: str) -> None:
    """Rank 0 alone fails where all ranks make their mailboxes; rank 1 waits for it there."""
    call, rows, transport = torch.ops.mxep.exchange_dequantized, torch.ones(2, 32), symmetric(name)
    allocate: Any = broken if me == 0 else lambda size: transport.rendezvous.all_gather([])
    transport._growth.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, ExchangeError), match="broken"):
        call(rows, [1, 1], [1, 1], name, "rceil")
    with pytest.raises(ExchangeError, match=FIRST):
        call(rows, [1, 1], [1, 1], name, "rceil")


def test_mailboxes_that_one_rank_cannot_have() -> None:
    run_virtual(no_mailbox, 2, timeout_s=5)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_the_driver(monkeypatch)


def sends_and_fails(me: int, world: int, name: str) -> None:
    """What rank 0 has sent still waits on a stream for rank 1, who never comes: it is read once the stream is let go."""
    transport: Any = symmetric(name)
    if me == 1:
        transport.copy_streams.ask = lambda stream, act: None
        transport.close = lambda: None
    held: list[weakref.ref[torch.Tensor]] = []

    def open_and_fail() -> None:
        with transport.open((9,), (32,), [], in_graphs=True) as opened:
            piece = torch.ones(16, dtype=torch.uint8)
            held.append(weakref.ref(piece))
            opened.scatter_copy(0, 16 * me, [piece, piece])
            broken()

    with pytest.raises(RuntimeError, match="broken"):
        open_and_fail()
    if me == 1:
        return
    gc.collect()
    assert held[0]() is not None, "the stream has not read it"
    assert done(5), "a stream that waits for a dead rank is let go of in time"
    close_transports(name)
    gc.collect()
    assert held[0]() is None


@pytest.mark.usefixtures("driver")
def test_what_copies_may_still_read_is_kept_until_the_end() -> None:
    run_virtual(sends_and_fails, 2, timeout_s=0.6, transport=OverStreams)


def closes_in_spite(me: int, world: int, name: str) -> None:
    """The device itself is broken: its memory is let go of all the same, and the error is told."""
    transport: Any = symmetric(name)
    exchange(name)
    transport._watchdog.watch_streams = broken
    with pytest.raises(RuntimeError, match="broken"):
        close_transports(name)
    assert transport.nbytes() == 0
    close_transports(name)


@pytest.mark.usefixtures("driver")
def test_the_end_of_a_broken_device() -> None:
    run_virtual(closes_in_spite, 2, timeout_s=5, transport=OverStreams)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A group of two whose collectives do nothing; nobody compares the ranks' splits."""
    monkeypatch.setattr(collective, "checking", lambda device: False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    close_transports()
    dist.destroy_process_group()


def test_over_torch_distributed(two_ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange(two_ranks)
    with pytest.raises(ValueError, match="input_splits"):
        torch.ops.mxep.exchange_rows(torch.ones(2, 4), [1, 1], [1, 2], two_ranks)
    other = dist.new_group()
    with monkeypatch.context() as now:
        now.setattr(dist, "all_to_all_single", broken)
        with pytest.raises(RuntimeError, match="broken"):
            exchange(two_ranks)
    for _ in range(2):
        with pytest.raises(ExchangeError, match=f"{FIRST}; this group makes no more exchanges"):
            exchange(two_ranks)
    exchange(other.group_name)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    exchange(dist.group.WORLD.group_name)
