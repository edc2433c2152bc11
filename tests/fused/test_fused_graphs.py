"""Exchanges as a CUDA graph replays them, on virtual ranks of a CPU: hosts meet once, flags go back by themselves, memory is the same."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from tests.fused.test_fused_ranks import layer
from tests.fused.test_fused_symmetric import spread, symmetric
from tests.moe_truth import D, draw, walk
from tests.truth import assert_same, raises_naming
from tests.virtual import run_virtual

from mxep.comm.host_allgather import HostAllGather
from mxep.fused import symmetric_dispatcher
from mxep.moe import RuntimeEPConfig

CAPTURE = 7  # a number that no graph has here


class Once:
    """A rendezvous on which hosts meet at the capture alone: a replay finds what was shown then."""

    def __init__(self, rendezvous: HostAllGather) -> None:
        self._rendezvous, self.tables, self.next = rendezvous, [], None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rendezvous, name)

    def all_gather(self, values: list[int]) -> list[list[int]]:
        if self.next is None:
            self.tables.append(self._rendezvous.all_gather(values))
            return [list(table) for table in self.tables[-1]]
        tables = self.tables[self.next]
        self.next += 1
        assert tables[self.rank] == values, "a replay does what was captured"
        return [list(table) for table in tables]


def replays(me: int, world: int, name: str) -> None:
    """Other tokens, routing and gradients in every replay; ranks run ahead of each other as flags allow."""
    transport: Any = symmetric(name)
    pace = random.Random(me)
    wait = transport.copy_streams.wait

    def waits(*arguments: Any) -> None:
        time.sleep(pace.choice((0, 0, 0, 1e-3)))
        wait(*arguments)

    for runtime in (RuntimeEPConfig(), RuntimeEPConfig("all_to_all", "reduce_scatter", redispatch_x_in_backward=True)):
        moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name)
        moe.runtime = runtime
        generator = torch.Generator().manual_seed(me)
        data = [[draw(generator, 20 + 9 * me, D).bfloat16() for _ in range(2)] for _ in range(12)]
        want = [walk(moe, x, dy) for x, dy in data]
        rendezvous = transport.rendezvous = Once(transport.rendezvous)
        transport._capture, transport.copy_streams.wait = lambda: CAPTURE, waits
        first, got = transport._captured, []
        try:
            for x, dy in [data[0], *data]:
                transport._captured = first
                got.append(walk(moe, x, dy))
                rendezvous.next = 0
        finally:
            transport.rendezvous, transport.copy_streams.wait = rendezvous._rendezvous, wait
            del transport._capture
        for mine, truth in zip(got[1:], want, strict=True):
            for key, value in truth.items():
                assert_same(mine[key], value, key)
        for key, value in walk(moe, *data[0]).items():
            assert_same(value, want[0][key], f"eager again {key}")


@pytest.mark.parametrize("world", [1, 4])
def test_replays(world: int) -> None:
    run_virtual(replays, world)


def refused(me: int, world: int, name: str) -> None:
    """Memory that there is not yet, a rank that captures alone, an exchange that cannot be captured: the same error on every rank."""
    transport: Any = symmetric(name)
    moe = spread(layer("hp", torch.float32, "random"), me, world, name)
    generator = torch.Generator().manual_seed(me)
    x, dy = (draw(generator, 30, D) for _ in range(2))
    transport._capture = lambda: CAPTURE
    with raises_naming("no free symmetric memory on ranks [0, 1]", "CUDA graph capture", "once before"):
        moe(x)
    with raises_naming("inside a CUDA graph capture", "collective"):
        torch.ops.mxep.exchange_rows(x, [15, 15], [15, 15], name)
    moe.runtime = RuntimeEPConfig(cpu_sync_on_runtime=True)
    with raises_naming("cpu_sync_on_runtime", "CUDA graph capture"):
        moe(x)
    moe.runtime = RuntimeEPConfig()
    transport._capture = lambda: CAPTURE * me
    with raises_naming("different calls"):
        moe(x)
    del transport._capture
    walk(moe, x, dy)


def test_what_cannot_be_captured() -> None:
    run_virtual(refused, 2)


_all_to_all = symmetric_dispatcher._all_to_all


def _in_vain(*arguments: Any) -> symmetric_dispatcher.Steps:
    """What the watchdog leaves of a table that did not arrive: NaN bytes."""
    received = yield from _all_to_all(*arguments)
    return received.fill_(-1) if received.dtype == torch.int32 else received  # float32: gradients of scores


def goes_on(me: int, world: int, name: str) -> None:
    """Forward and backward come to their end: no index hangs on what has not come."""
    generator = torch.Generator().manual_seed(me)
    x, dy = (draw(generator, 20 + 9 * me, D) for _ in range(2))
    for dispatch, combine in itertools.product(("rank_dedup", "all_to_all", "all_gather"), ("rank_dedup", "all_to_all", "reduce_scatter")):
        moe = spread(layer("hp", torch.float32, "random"), me, world, name)
        moe.runtime = RuntimeEPConfig(dispatch, combine)  # type: ignore[arg-type]
        walk(moe, x, dy)


@pytest.mark.parametrize("world", [1, 4])
def test_tables_that_did_not_come(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """Nobody is on the host to say so in a replay, and in eager steps hosts may be far ahead."""
    monkeypatch.setattr(symmetric_dispatcher, "_all_to_all", _in_vain)
    run_virtual(goes_on, world)
