"""Exchanges as a CUDA graph replays them, on virtual ranks of a CPU: one host all-gather at the capture, reset flags, the same memory."""

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

CAPTURE = 7  # a capture number that no graph has


class RecordedAllGather:
    """A host all-gather that communicates at the capture alone: a replay gets the recorded values."""

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
        assert tables[self.rank] == values, "a replay repeats the capture"
        return [list(table) for table in tables]


def replays(me: int, world: int, name: str) -> None:
    """Different tokens, routing and gradients in every replay; ranks run ahead of each other as flags allow."""
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
        rendezvous = transport.rendezvous = RecordedAllGather(transport.rendezvous)
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
    """Memory that is not allocated yet, a rank that captures alone, an exchange that cannot be captured: the same error on every rank."""
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


def test_exchanges_that_cannot_be_captured() -> None:
    run_virtual(refused, 2)


_all_to_all = symmetric_dispatcher._all_to_all


def _all_to_all_of_nan(*arguments: Any) -> symmetric_dispatcher.Steps:
    """Tables full of NaN bytes, as the watchdog leaves a table that did not arrive."""
    received = yield from _all_to_all(*arguments)
    return received.fill_(-1) if received.dtype == torch.int32 else received  # float32: gradients of scores


def runs_to_the_end(me: int, world: int, name: str) -> None:
    """Forward and backward end without an illegal access: no index depends on values that have not arrived."""
    generator = torch.Generator().manual_seed(me)
    x, dy = (draw(generator, 20 + 9 * me, D) for _ in range(2))
    for dispatch, combine in itertools.product(("rank_dedup", "all_to_all", "all_gather"), ("rank_dedup", "all_to_all", "reduce_scatter")):
        moe = spread(layer("hp", torch.float32, "random"), me, world, name)
        moe.runtime = RuntimeEPConfig(dispatch, combine)  # type: ignore[arg-type]
        walk(moe, x, dy)


@pytest.mark.parametrize("world", [1, 4])
def test_tables_that_did_not_arrive(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """In a replay no host can raise an error, and in eager steps hosts may be far ahead."""
    monkeypatch.setattr(symmetric_dispatcher, "_all_to_all", _all_to_all_of_nan)
    run_virtual(runs_to_the_end, world)
