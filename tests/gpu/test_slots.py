"""Slot buffers on one GPU: exactly the references' bytes are written, on virtual ranks and on one rank with real streams and flags."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from tests.slot_cases import NUMBER, TABLES, Case, run, run_disagreeing
from tests.truth import KINDS, assert_same, exchange, make_case, raises_naming
from tests.virtual import alone, run_virtual

from mxep import to_mxfp8_a2a_dequant
from mxep.comm import ExchangeError, close_transports, register
from mxep.comm.copy_streams import WAIT, WRITE
from mxep.comm.symmetric import SymmetricTransport
from mxep.ops.peer_write import slots

pytestmark = pytest.mark.gpu
BF16, FLOAT32 = torch.bfloat16, torch.float32
SMALL = 24 << 10  # bytes of a slot: a few rows


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("width", [0, 32, 64, 96, 160, 480, 512, 544, 1408, 5120, 8224])
def test_rounds(width: int, dtype: torch.dtype) -> None:
    for table in TABLES.values():
        for per, mode in ((4, "rceil"), (30, "floor")):
            case = Case(table, width, dtype, per, "cuda")
            for rank, out in enumerate(run(case, mode, slots)):
                assert_same(out, case.expected_output(mode, rank), f"{table} {per} rows a round, rank {rank}")


def test_more_than_all_blocks_at_once() -> None:
    case = Case([[900, 1100], [1000, 0]], 4160, BF16, 777, "cuda")
    for rank, out in enumerate(run(case, "rceil", slots)):
        assert_same(out, case.expected_output("rceil", rank))


def test_the_most_ranks() -> None:
    """One sender's messages to 64 ranks, and one receiver's from 64 ranks."""
    case = Case([[(i + j) % 3 for j in range(64)] for i in range(64)], 64, BF16, 2, "cuda")
    for rank, out in enumerate(run(case, "rceil", slots)):
        assert_same(out, case.expected_output("rceil", rank))


def test_rows_with_an_unexpected_header_are_nan() -> None:
    run_disagreeing(slots, "cuda")


def test_rows_that_kernels_cannot_read() -> None:
    case = Case([[4]], 64, BF16, 4, "cuda")
    wide = torch.zeros(4, 75, dtype=BF16, device="cuda")
    for rows in (wide[:, :64], wide.flatten()[1:257].view(4, 64), wide.new_zeros(64, 4).t()):
        with raises_naming("send_slots", "contiguous", "16 bytes"):
            slots.send_slots(rows, case.sent[0], 0, case.slot_bytes, NUMBER, "rceil")


def test_beyond_two_gib() -> None:
    """Rows and outputs whose bytes lie past 2^31, and past 2^32."""
    count, width = 300_000, 8192
    case = Case([[9]], width, BF16, 5, "cuda")
    rows, out = (torch.zeros(count, width, dtype=BF16, device="cuda") for _ in range(2))
    for first in (131_070, 262_140, count - 9):
        rows[first : first + 9] = case.rows[0]
        pairs = [case.sent[0][0]._replace(first=first)]
        error = case.error()
        for step in range(2):
            slots.send_slots(rows, pairs, step, case.slot_bytes, NUMBER, "rceil")
            slots.recv_slots(out, pairs, step, case.slot_bytes, NUMBER, error)
        assert_same(out[first : first + 9], case.expected_output("rceil", 0))
        assert not error.any()
        assert not out[:first].any()
        assert not out[first + 9 :].any()
        out[first : first + 9] = rows[first : first + 9] = 0


# ---- transports ----


def values_of(rows: torch.Tensor, mode: str) -> torch.Tensor:
    values = torch.empty_like(rows)
    torch.ops.mxep.dequantize_packed_into(torch.ops.mxep.quantize_packed(rows, mode), values)
    return values


def exchanges(me: int, world: int, name: str) -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 2, rows=300, seed=seed)
        for width, dtype, mode in ((96, BF16, "rceil"), (1408, FLOAT32, "floor"), (5120, BF16, "rceil")):
            inputs = [rows.cuda() for rows in case.inputs(width, dtype)]
            want = values_of(exchange(inputs, case.table)[me], mode)
            got = torch.ops.mxep.exchange_dequantized(inputs[me], case.received(me), case.sent(me), name, mode)
            assert_same(got, want, f"{kind} {dtype} {width}")
            plain = torch.ops.mxep.exchange_rows(inputs[me], case.received(me), case.sent(me), name)
            assert_same(plain, exchange(inputs, case.table)[me], kind)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_virtual_ranks(world: int) -> None:
    run_virtual(exchanges, world, device="cuda", slot_memory_bytes=2 * world * SMALL)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[SymmetricTransport]:
    """A single rank without checks, whose slots hold few rows."""
    monkeypatch.setenv("MXEP_CHECK", "0")
    transport = alone(slot_memory_bytes=2 * SMALL)
    register("alone", transport)
    yield transport
    close_transports("alone")


@pytest.mark.usefixtures("transport", "poison")
def test_alone_over_streams() -> None:
    """Many exchanges, forward and backward. The host runs far ahead and overwrites rows as soon as they have been sent."""
    generator = torch.Generator("cuda").manual_seed(0)
    found = []
    for step in range(40):
        width, count = (160, 5120, 1408)[step % 3], (17, 400, 3)[step % 3] + step
        rows = torch.randn(count, width, device="cuda", generator=generator).to((BF16, FLOAT32)[step % 2])
        x, kept = rows.clone().requires_grad_(), rows.clone()
        out = to_mxfp8_a2a_dequant(x, [count], [count], "alone")
        (grad,) = torch.autograd.grad(out, x, rows)
        with torch.no_grad():
            x.fill_(-1)
        found.append((kept, out.detach(), grad))
        rows.fill_(torch.nan)
    for kept, out, grad in found:
        want = values_of(kept, "rceil")
        assert_same(out, want)
        assert_same(grad, want)


@pytest.mark.usefixtures("transport", "poison")
def test_streams_in_turn() -> None:
    """Calls of one round and of many on two unordered streams, one of which is delayed."""
    streams, found = (torch.cuda.Stream(), torch.cuda.Stream()), []
    kept = [torch.randn(count, 5120, device="cuda").bfloat16() for count in (3, 4, 400, 3, 3, 50) * 3]
    torch.cuda.synchronize()
    for i, rows in enumerate(kept):
        with torch.cuda.stream(streams[i % 2]):
            if i % 4 == 2:
                torch.cuda._sleep(3_000_000)
            found.append(torch.ops.mxep.exchange_dequantized(rows, [len(rows)], [len(rows)], "alone", "rceil"))
    torch.cuda.synchronize()
    for rows, out in zip(kept, found, strict=True):
        assert_same(out, values_of(rows, "rceil"))


@pytest.mark.usefixtures("transport")
def test_no_host_sync(no_sync) -> None:
    rows = torch.ones(100, 1408, device="cuda", dtype=BF16)
    torch.ops.mxep.exchange_dequantized(rows, [100], [100], "alone", "rceil")  # allocates the slots
    with no_sync():
        out = torch.ops.mxep.exchange_dequantized(rows, [100], [100], "alone", "rceil")
    assert torch.equal(out, rows)


@pytest.mark.usefixtures("transport")
def test_not_in_a_graph() -> None:
    rows = torch.ones(8, 32, device="cuda")
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            rows.add_(0)
            with pytest.raises(ValueError, match="CUDA graph capture"):
                torch.ops.mxep.exchange_dequantized(rows, [8], [8], "alone", "rceil")
        assert torch.equal(torch.ops.mxep.exchange_dequantized(rows, [8], [8], "alone", "rceil"), rows)


def test_batches_of_stream_operations(transport: SymmetricTransport) -> None:
    """One batch sets 64 words and another one waits for them, also where the values wrap around."""
    streams, flags = transport.copy_streams, torch.zeros(64, dtype=torch.int32, device="cuda")
    addresses = [flags.data_ptr() + 4 * i for i in range(64)]
    for value in (1, 2**31 - 1, 2**31 + 5, 2**32 + 3):
        streams.fork(0, 1)
        streams.batch(0, [(WAIT, address, value + i) for i, address in enumerate(addresses)])
        streams.batch(1, [(WRITE, address, value + i) for i, address in enumerate(addresses)])
        streams.join()
        assert [(word - value) % 2**32 for word in flags.tolist()] == list(range(64))


def test_a_peer_that_never_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits for a flag that no peer sets. Within the time limit it continues with NaN, and the next exchange raises."""
    transport = alone(timeout_s=1)
    register("stuck", transport)
    rows = torch.ones(1000, 64, device="cuda")
    call = torch.ops.mxep.exchange_dequantized
    assert torch.equal(call(rows, [1000], [1000], "stuck", "rceil"), rows)
    torch.cuda.synchronize()
    batch, sent = transport.copy_streams.batch, transport._slot_buffers._sent_there

    def nothing_sent(stream: int | None, operations: list[tuple[int, int, int]]) -> None:
        batch(stream, [operation for operation in operations if operation[:2] != (WRITE, sent[0])])

    monkeypatch.setattr(transport.copy_streams, "batch", nothing_sent)
    monkeypatch.setattr(transport._slot_buffers, "_send_slots", lambda *arguments: None)
    start = time.monotonic()
    out = call(rows, [1000], [1000], "stuck", "rceil")
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - start < 10
    assert out.isnan().all()
    with pytest.raises(ExchangeError, match=r"exchange 2 through slots .*did not come for 1 s"):
        call(rows, [1000], [1000], "stuck", "rceil")
    close_transports("stuck")
