"""An exchange that fails is the last one of its group: later ones raise the first failure, and none of its buffers is used again."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.streams import OverStreams, done, stub_the_driver
from tests.virtual import run_virtual, symmetric
from torch.testing._internal.distributed.fake_pg import FakeStore

from mxep.comm import ExchangeError, close_transports, collective

FIRST = "rank 0 failed: RuntimeError: broken"


def broken(*arguments: Any, **options: Any) -> None:
    raise RuntimeError("broken")


def exchange(name: str) -> torch.Tensor:
    return torch.ops.mxep.exchange_rows(torch.ones(2, 4), [1, 1], [1, 1], name)


def fails_at(me: int, world: int, name: str, failure: Callable[[Any], tuple[Any, str]]) -> None:
    """Rank 0 alone fails at some point of an exchange; its program catches the error and continues."""
    transport: Any = symmetric(name)
    exchange(name)
    if me == 0:
        where, what = failure(transport)
        whole = getattr(where, what)
        setattr(where, what, broken)
        with pytest.raises(RuntimeError, match="broken"):
            exchange(name)
        setattr(where, what, whole)
        transport._pool.take_each = lambda *arguments: pytest.fail("a buffer of a failed group")
    elif me == 1:
        with contextlib.suppress(ExchangeError):
            exchange(name)  # it may have received everything before
    for _ in range(2):
        with pytest.raises(ExchangeError, match=FIRST):
            exchange(name)
        with pytest.raises(ExchangeError, match=FIRST):
            torch.ops.mxep.exchange_dequantized(torch.ones(2, 32), [1, 1], [1, 1], name, "rceil")


@pytest.mark.parametrize(
    "failure",
    [
        lambda transport: (transport._growth, "refuse"),  # in the host all-gather, on this rank alone
        lambda transport: (transport, "_signal_ready"),  # after the host all-gather
        lambda transport: (transport.copy_streams, "copy"),  # while it sends
        lambda transport: (transport.copy_streams, "join"),  # at the end, when everything has been sent
        lambda transport: (transport, "ended"),
    ],
    ids=["all-gather", "ready", "copy", "join", "end"],
)
def test_later_exchanges_raise_the_first_failure(failure: Callable[[Any], tuple[Any, str]]) -> None:
    run_virtual(fails_at, 2, failure, timeout_s=5)


def no_slots(me: int, world: int, name: str) -> None:
    """Rank 0 alone fails where all ranks allocate their slots; rank 1 waits for it there."""
    call, rows, transport = torch.ops.mxep.exchange_dequantized, torch.ones(2, 32), symmetric(name)
    allocate: Any = broken if me == 0 else lambda size: transport.rendezvous.all_gather([])
    transport._growth.allocate = allocate  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, ExchangeError), match="broken"):
        call(rows, [1, 1], [1, 1], name, "rceil")
    with pytest.raises(ExchangeError, match=FIRST):
        call(rows, [1, 1], [1, 1], name, "rceil")


def test_slots_that_one_rank_cannot_allocate() -> None:
    run_virtual(no_slots, 2, timeout_s=5)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_the_driver(monkeypatch)


def sends_and_fails(me: int, world: int, name: str) -> None:
    """A copy of rank 0 waits on a stream for rank 1, which never gets ready. Its source is read when the watchdog ends the wait."""
    transport: Any = symmetric(name)
    if me == 1:
        transport.copy_streams.enqueue = lambda stream, act: None
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
    assert done(5), "the wait for a dead rank ends in time"
    close_transports(name)
    gc.collect()
    assert held[0]() is None


@pytest.mark.usefixtures("driver")
def test_sources_of_pending_copies_are_kept_until_close() -> None:
    run_virtual(sends_and_fails, 2, timeout_s=0.6, transport=OverStreams)


def closes_a_broken_device(me: int, world: int, name: str) -> None:
    """The device itself is broken: close() releases the memory and raises the error."""
    transport: Any = symmetric(name)
    exchange(name)
    transport._watchdog.watch_streams = broken
    with pytest.raises(RuntimeError, match="broken"):
        close_transports(name)
    assert transport.nbytes() == 0
    close_transports(name)


@pytest.mark.usefixtures("driver")
def test_close_on_a_broken_device() -> None:
    run_virtual(closes_a_broken_device, 2, timeout_s=5, transport=OverStreams)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A group of two whose collectives do nothing, without the comparison of splits."""
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
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", broken)
        with pytest.raises(RuntimeError, match="broken"):
            exchange(two_ranks)
    for _ in range(2):
        with pytest.raises(ExchangeError, match=f"{FIRST}; this group makes no more exchanges"):
            exchange(two_ranks)
    exchange(other.group_name)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    exchange(dist.group.WORLD.group_name)
