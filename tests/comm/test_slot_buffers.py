"""Exchanges through slots on virtual ranks: bits over many rounds, alternating kinds of calls, ranks that disagree, a rank that dies."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.truth import KINDS, assert_same, exchange, make_case
from tests.virtual import HostCopyStreams, run_virtual, symmetric

from mxep import reference, to_mxfp8_a2a_dequant
from mxep.comm import ExchangeError
from mxep.comm import slot_buffers as slotted
from mxep.comm.copy_streams import SLOTTED, WAIT, WRITE, Operation

CPU = torch.device("cpu")
SMALL = 640  # bytes of a slot: few rows


def values_of(records: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty(records.shape[0], width, dtype=dtype)
    reference.dequantize_packed_into(records, values)
    return values


def every_routing(me: int, world: int, name: str) -> None:
    """Messages of one round and of many, with changing widths and dtypes, between exchanges that do not use slots."""
    for seed, kind in enumerate([*KINDS, *KINDS]):
        case = make_case(kind, world, 2, rows=5 + 30 * (seed % 3), seed=seed)
        for width, dtype, mode in ((96, torch.bfloat16, "rceil"), (32, torch.float32, "floor"), (352, torch.bfloat16, "floor")):
            inputs = case.inputs(width, dtype)
            want = exchange([reference.quantize_packed(rows, mode) for rows in inputs], case.table)[me]
            splits = case.received(me), case.sent(me), name, mode
            values = torch.ops.mxep.exchange_dequantized(inputs[me], *splits)
            assert_same(values, values_of(want, width, dtype), f"{kind} {dtype} {width}")
            if seed % 2:
                assert_same(torch.ops.mxep.exchange_quantized(inputs[me], *splits), want, kind)
            else:
                assert_same(torch.ops.mxep.exchange_rows(inputs[me], *splits[:3]), exchange(inputs, case.table)[me], kind)


@pytest.mark.parametrize(("world", "slot"), [(1, SMALL), (2, SMALL), (3, SMALL), (4, SMALL), (3, 4096)])
def test_received_rows_are_the_dequantised_rows(world: int, slot: int) -> None:
    run_virtual(every_routing, world, slot_memory_bytes=2 * world * slot)


def delayed_ranks(me: int, world: int, name: str) -> None:
    """Every rank sleeps at random before kernels, in calls of one round and of many: no slot is written before it has been read."""
    call, transport, generator = torch.ops.mxep.exchange_dequantized, symmetric(name), random.Random(me)
    call(torch.ones(world, 32), [1] * world, [1] * world, name, "rceil")
    slots = transport._slot_buffers

    def late(function: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            time.sleep(generator.choice((0, 0, 1e-3, 4e-3)))
            function(*arguments)

        return run

    slots._send_slots, slots._recv_slots = late(slots._send_slots), late(slots._recv_slots)
    counts = random.Random(0)
    for step in range(60):
        table = [[counts.choice((0, 1, 9, 10) if step % 4 else (1, 25)) for _ in range(world)] for _ in range(world)]
        rows = torch.full((sum(table[me]), 32), 1.0 + step % 7) + me
        out = call(rows, [line[me] for line in table], table[me], name, "rceil")
        want = torch.cat([torch.full((line[me], 32), 1.0 + step % 7) + rank for rank, line in enumerate(table)])
        assert torch.equal(out, want), f"call {step}"
    assert slots.progress() == (61, 61)


def test_no_slot_is_overwritten_when_ranks_are_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric.checking", lambda device: False)
    run_virtual(delayed_ranks, 3, slot_memory_bytes=6 * SMALL)


class RecordingStreams(HostCopyStreams):
    """Records the operations that are issued, and lets a test name the current stream."""

    current: int | None = None

    def __init__(self, streams: HostCopyStreams) -> None:
        super().__init__(streams.device, streams.timeout_s, streams._failure)
        self.issued: list[Any] = []

    def handle(self, stream: int | None) -> int | None:
        return self.current

    def fork(self, *streams: int) -> None:
        self.issued += streams

    def batch(self, stream: int | None, operations: Sequence[Operation]) -> None:
        self.issued.append((stream, [kind for kind, _, _ in operations]))
        super().batch(stream, operations)


def test_stream_operations_of_a_call() -> None:
    """A call of one round after a call of one round: two batches on the current stream. A call of more rounds, and the call after it, use
    the stream SLOTTED. A call on another current stream first waits."""

    def record(me: int, world: int, name: str) -> None:
        transport = symmetric(name)
        streams = transport.copy_streams = RecordingStreams(transport.copy_streams)

        def issued(rows: int) -> list[Any]:
            streams.issued.clear()
            torch.ops.mxep.exchange_dequantized(torch.ones(rows, 32), [rows], [rows], name, "rceil")
            return list(streams.issued)

        one = [(None, [WRITE, WRITE, WAIT]), (None, [WRITE, WRITE])]
        assert issued(10) == one
        assert issued(10) == one
        wait, write = (SLOTTED, [WAIT]), (SLOTTED, [WRITE])
        after = [SLOTTED, wait, write, (None, [WRITE, WAIT]), (None, [WRITE, WRITE])]
        assert issued(11) == [*after[:4], wait, write, (None, [WRITE, WAIT]), after[4]]
        assert issued(10) == after
        streams.current = 7
        assert issued(10) == [(None, [WAIT]), *one]
        assert issued(10) == one

    run_virtual(record, 1, slot_memory_bytes=2 * SMALL)


def strided(me: int, world: int, name: str) -> None:
    """Rows that are column slices of wider rows, at any alignment."""
    wide = torch.randn(6, 131, generator=torch.Generator().manual_seed(me)).bfloat16()
    for rows in (wide[:, 3:67], wide[:, :64], wide[:1, :64].expand(6, 64), wide.flatten()[1 : 1 + 6 * 64].view(6, 64)):
        want = values_of(reference.quantize_packed(rows, "rceil"), 64, rows.dtype)
        assert_same(torch.ops.mxep.exchange_dequantized(rows, [6], [6], name, "rceil"), want)


def test_strided_rows() -> None:
    run_virtual(strided, 1)


def forward_and_backward(me: int, world: int, name: str) -> None:
    case = make_case("uneven", world, 2, rows=50)
    x = case.inputs(64, torch.bfloat16)[me].requires_grad_()
    out = to_mxfp8_a2a_dequant(x, case.received(me), case.sent(me), name)
    (out * 1).sum().backward()
    assert_same(x.grad, torch.ones_like(x))


def test_forward_and_backward() -> None:
    run_virtual(forward_and_backward, 3, slot_memory_bytes=6 * SMALL)


def memory(me: int, world: int, name: str) -> tuple[int, int, int]:
    """Bytes of symmetric memory before any exchange, after one and after six; none are left after close()."""
    transport, rows = symmetric(name), torch.ones(4, 64)
    sizes = [transport.nbytes()]
    for count in (1, 5):
        for _ in range(count):
            torch.ops.mxep.exchange_dequantized(rows, [2, 2], [2, 2], name, "rceil")
        sizes.append(transport.nbytes())
    transport.close()
    assert transport.nbytes() == 0
    return tuple(sizes)


def test_slots_are_allocated_once_and_released_at_the_end() -> None:
    assert run_virtual(memory, 2, slot_memory_bytes=4 * 4096) == [(0, 4 * 4096, 4 * 4096)] * 2


def test_rounds_of_a_message() -> None:
    """Every round fits its slot. The number of rounds is the least possible, and their sizes are even."""
    for rows in (0, 1, 2, 7, 100, 1000, 65536):
        for record in (0, 48, 5280):
            for slot in (5408, 16 << 10, 64 << 20):
                per = slotted.rows_of_round(rows, record, slot)
                assert 1 <= per <= max(rows, 1)
                assert per * record <= slot - 128
                most = (slot - 128) // max(record, 1)
                assert -(-rows // per) == -(-rows // most)
    assert slotted.rows_of_round(13_000, 5280, 64 << 20) == 6_500


def different_splits(me: int, world: int, name: str) -> None:
    rows = torch.ones(4, 32)
    with pytest.raises(ValueError, match=r"all-to-all: rank 1 sends 1 rows to rank 0, whose output_splits await 2"):
        torch.ops.mxep.exchange_dequantized(rows, [2, 2], [[2, 2], [1, 3]][me], name, "rceil")
    with pytest.raises(ValueError, match="different calls"):
        torch.ops.mxep.exchange_dequantized(torch.ones(4, 32 + 64 * me), [2, 2], [2, 2], name, "rceil")
    assert torch.equal(torch.ops.mxep.exchange_dequantized(rows, [2, 2], [2, 2], name, "rceil"), rows)


def test_splits_that_do_not_fit() -> None:
    """In checking mode the same error on every rank, and the next exchange works."""
    run_virtual(different_splits, 2)


def unchecked(me: int, world: int, name: str, sent: int) -> None:
    """Rank 0 sends rank 1 `sent` rows, but rank 1 expects two: they are NaN, the other rows are right, and the next exchange raises."""
    call = torch.ops.mxep.exchange_dequantized
    rows = torch.ones(6, 32)
    assert torch.equal(call(rows[:4], [2, 2], [2, 2], name, "rceil"), rows[:4])
    first = [[2, sent], [2, 2]][me]
    match = rf"rank 0 sends {sent} rows to rank 1, whose output_splits await 2"
    if me == 0 and sent == 40:  # more rounds than rank 1 expects: its error arrives while this rank still sends
        with pytest.raises(ExchangeError, match="rank 1: .*" + match):
            call(torch.ones(42, 32), [2, 2], first, name, "rceil")
        return
    out = call(torch.ones(sum(first), 32), [2, 2], first, name, "rceil")
    if sent != 40:
        symmetric(name).rendezvous.all_gather([])  # this rank has received everything before the other one raises
    assert torch.equal(out[2:], rows[:2])
    assert bool(out[:2].isnan().all()) == (me == 1)
    with pytest.raises(ExchangeError, match=match):
        call(rows[:4], [2, 2], [2, 2], name, "rceil")
    with pytest.raises(ExchangeError, match=match):
        torch.ops.mxep.exchange_rows(rows[:4], [2, 2], [2, 2], name)


@pytest.mark.parametrize("sent", [0, 3, 40])
def test_splits_that_disagree_without_checking(sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric.checking", lambda device: False)
    run_virtual(unchecked, 2, sent, slot_memory_bytes=4 * SMALL, timeout_s=10)


def wrong_alone(me: int, world: int, name: str) -> None:
    """Splits that do not fit this rank's rows, and records larger than a slot, raise on this rank before anything is sent."""
    call, rows = torch.ops.mxep.exchange_dequantized, torch.ones(4, 32)
    for out_splits, in_splits, match in (([4], [3], "add up to 3"), ([4], [2, 2], "want 1 row counts"), ([-4], [4], "at least 0")):
        with pytest.raises(ValueError, match=match):
            call(rows, out_splits, in_splits, name, "rceil")
    with pytest.raises(ValueError, match="records of 1056 bytes, want at most 64 and 512"):
        call(torch.ones(4, 1024), [4], [4], name, "rceil")
    with pytest.raises(ValueError, match="float16"):
        call(rows.half(), [4], [4], name, "rceil")
    assert torch.equal(call(rows, [4], [4], name, "rceil"), rows)


def test_local_errors_are_raised_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric.checking", lambda device: False)
    run_virtual(wrong_alone, 1, slot_memory_bytes=2 * SMALL)


def one_dies(me: int, world: int, name: str) -> None:
    call, rows, transport = torch.ops.mxep.exchange_dequantized, torch.ones(6, 32), symmetric(name)
    call(rows, [2, 2, 2], [2, 2, 2], name, "rceil")
    if me == 1:
        transport.copy_streams.batch = lambda *arguments: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            call(rows, [2, 2, 2], [2, 2, 2], name, "rceil")
    start = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 1 failed: ZeroDivisionError"):
        call(rows, [2, 2, 2], [2, 2, 2], name, "rceil")
    assert time.monotonic() - start < 10, "the failure was reported, not timed out"


def test_a_rank_that_dies_inside_an_exchange_tells_the_others() -> None:
    run_virtual(one_dies, 3)


def one_does_not_call(me: int, world: int, name: str) -> None:
    call, rows = torch.ops.mxep.exchange_dequantized, torch.ones(2, 32)
    call(rows, [1, 1], [1, 1], name, "rceil")
    if me == 1:
        time.sleep(2)
        return
    transport, seen = symmetric(name), []
    wait = transport.copy_streams.wait
    transport.copy_streams.wait = lambda *word: (seen.append(transport._slot_buffers.progress()), wait(*word))  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"a peer's part did not come for 0\.5 s"):
        call(rows, [1, 1], [1, 1], name, "rceil")
    assert time.monotonic() - start < 1.9
    assert set(seen) == {(2, 1)}


def test_a_rank_that_does_not_call_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric.checking", lambda device: False)
    run_virtual(one_does_not_call, 2, timeout_s=0.5)
