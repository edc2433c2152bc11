"""The symmetric transport on virtual ranks: bits, errors on every rank, ownership of received rows, a rank that dies."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from tests.truth import KINDS, assert_same, exchange, make_case, raises_naming
from tests.virtual import run_virtual, symmetric

from mxep import a2a_combine_hp_fwd_mxfp8_bwd, a2a_dispatch_mxfp8_fwd_hp_bwd, reference
from mxep.comm import ExchangeError

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64)


def every_routing(me: int, world: int, name: str) -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 2, seed=seed)
        for dtype in DTYPES:
            inputs = [(rows * 100).to(torch.uint8).view(dtype) for rows in case.inputs(48, torch.float32)]
            want = exchange([rows.view(torch.uint8) for rows in inputs], case.table)[me].view(dtype)
            got = torch.ops.mxep.exchange_rows(inputs[me], case.received(me), case.sent(me), name)
            assert_same(got, want, f"{kind} {dtype}")
        rows = case.inputs(8, torch.float32)
        strided = rows[me].t().contiguous().t()
        assert_same(torch.ops.mxep.exchange_rows(strided, case.received(me), case.sent(me), name), exchange(rows, case.table)[me], kind)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_bits_of_an_all_to_all(world: int) -> None:
    run_virtual(every_routing, world)


def quantised(me: int, world: int, name: str) -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 2, rows=60, seed=seed)
        for dtype, mode in ((torch.bfloat16, "rceil"), (torch.float32, "floor")):
            inputs = case.inputs(96, dtype)
            want = exchange([reference.quantize_packed(rows, mode) for rows in inputs], case.table)[me]
            splits = case.received(me), case.sent(me), name, mode
            assert_same(torch.ops.mxep.exchange_quantized(inputs[me], *splits), want, f"{kind} {dtype}")
            values = torch.empty(want.shape[0], 96, dtype=dtype)
            reference.dequantize_packed_into(want, values)
            assert_same(torch.ops.mxep.exchange_dequantized(inputs[me], *splits), values, f"{kind} {dtype} values")


@pytest.mark.parametrize("piece_bytes", [1, 700, 48 << 20])
@pytest.mark.parametrize("world", [1, 3])
def test_rows_that_are_quantised_piece_by_piece(world: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric._PIECE_BYTES", piece_bytes)
    run_virtual(quantised, world)


def holds_everything(me: int, world: int, name: str) -> None:
    """Forty exchanges of different sizes; each rank deletes every third result, at different times."""
    held = []
    for step in range(40):
        case = make_case("random", world, 2, rows=20 + 7 * (step % 5), seed=step)
        inputs = case.inputs(16 * (1 + step % 3), torch.float32, seed=step)
        out = torch.ops.mxep.exchange_rows(inputs[me], case.received(me), case.sent(me), name)
        held.append((out, exchange(inputs, case.table)[me]))
        if (step + me) % 3 == 0:
            held.pop(step % len(held))
    for out, want in held:
        assert_same(out, want)
    out[:] = 0  # never an alias of the input
    assert inputs[me].any()


def test_held_results_are_not_overwritten() -> None:
    run_virtual(holds_everything, 3)


def shape_static(me: int, world: int, name: str) -> list[int]:
    """Bytes of symmetric memory after each step of a training that holds two results at a time."""
    held, sizes = [], []
    case = make_case("uneven", world, 2)
    for _ in range(6):
        for width in (16, 64):
            held.append(torch.ops.mxep.exchange_rows(case.inputs(width, torch.float32)[me], case.received(me), case.sent(me), name))
        sizes.append(symmetric(name).nbytes())
        held.clear()
    return sizes


def test_memory_does_not_grow_after_the_first_step() -> None:
    for sizes in run_virtual(shape_static, 2):
        assert len(set(sizes)) == 1


def the_blocks(me: int, world: int, name: str) -> None:
    case = make_case("uneven", world, 2)
    x = case.inputs(64, torch.bfloat16)[me].requires_grad_()
    mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, case.received(me), case.sent(me), name)
    out = a2a_combine_hp_fwd_mxfp8_bwd(mx.dequantize(), case.sent(me), case.received(me), name)
    out.backward(torch.ones_like(out))
    assert_same(x.grad, torch.ones_like(x))
    assert (out - x).norm() < 0.04 * x.norm()


def test_the_blocks() -> None:
    run_virtual(the_blocks, 2)


def disagreeing(me: int, world: int, name: str, sent: list[list[int]], received: list[list[int]], words: tuple[str, ...]) -> None:
    rows = torch.arange(4.0)[:, None]
    with pytest.raises(ValueError, match="all-to-all") as error:
        torch.ops.mxep.exchange_rows(rows, received[me], sent[me], name)
    assert all(word in str(error.value) for word in words), str(error.value)
    good = torch.ops.mxep.exchange_rows(rows, [2, 2], [2, 2], name)
    assert good.flatten().tolist() == [2 * me, 2 * me + 1] * 2


@pytest.mark.parametrize(
    ("sent", "received", "words"),
    [
        ([[2, 2], [1, 3]], [[2, 2], [2, 2]], ("rank 1 sends 1 rows to rank 0", "await 2")),
        ([[2, 2], [2, 1]], [[2, 2], [2, 1]], ("rank 1 has 4 rows", "[2, 1]")),
        ([[2, 2], [4]], [[2, 2], [2, 2]], ("rank 1 passed splits that are not 2",)),
        ([[5, -1], [2, 2]], [[2, 2], [2, 2]], ("rank 0 passed splits that are not 2",)),
        ([[6, -2], [-2, 6]], [[6, -2], [-2, 6]], ("rank 0 passed splits that are not 2",)),  # the ranks agree on them
    ],
)
def test_splits_that_do_not_fit(sent: Any, received: Any, words: tuple[str, ...]) -> None:
    """The same error on every rank, and the next exchange works."""
    run_virtual(disagreeing, 2, sent, received, words)


def negative_splits(me: int, world: int, name: str) -> None:
    """Output splits with a negative sum, which would be the size of the output."""
    rows = torch.ones(4, 32)
    with pytest.raises(ValueError, match=r"all-to-all: rank 0 passed splits that are not 2 row counts of at least 0"):
        torch.ops.mxep.exchange_dequantized(rows, [-3, 1] if me == 0 else [2, 2], [2, 2], name, "rceil")
    assert torch.equal(torch.ops.mxep.exchange_dequantized(rows, [2, 2], [2, 2], name, "rceil"), rows)


def test_negative_splits() -> None:
    run_virtual(negative_splits, 2, timeout_s=5)


def other_widths(me: int, world: int, name: str) -> None:
    with pytest.raises(ValueError, match="different calls"):
        torch.ops.mxep.exchange_rows(torch.ones(2, 4 + me), [1, 1], [1, 1], name)


def test_ranks_that_send_rows_of_different_widths() -> None:
    run_virtual(other_widths, 2)


def one_does_not_call(me: int, world: int, name: str) -> float:
    if me == 1:
        time.sleep(4)
        return 0.0
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"nothing from rank 1 for 0.5 s"):
        torch.ops.mxep.exchange_rows(torch.ones(3, 4), [1, 1, 1], [1, 1, 1], name)
    return time.monotonic() - start


def test_a_rank_that_does_not_call_ends_the_others_in_time() -> None:
    assert all(waited < 3.9 for waited in run_virtual(one_does_not_call, 3, timeout_s=0.5))


def one_dies_inside(me: int, world: int, name: str) -> None:
    rows = torch.ones(2, 4)
    if me == 1:
        transport = symmetric(name)
        transport.copy_streams.copy = lambda *args: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            torch.ops.mxep.exchange_rows(rows, [1, 1], [1, 1], name)
        with pytest.raises(ExchangeError, match="rank 1 failed: ZeroDivisionError"):
            torch.ops.mxep.exchange_rows(rows, [1, 1], [1, 1], name)
        return
    start = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 1 failed: ZeroDivisionError"):
        torch.ops.mxep.exchange_rows(rows, [1, 1], [1, 1], name)
    assert time.monotonic() - start < 10, "the failure was reported, not timed out"


def test_a_rank_that_dies_inside_an_exchange_tells_the_others() -> None:
    run_virtual(one_dies_inside, 2, timeout_s=20)


def another_device(me: int, world: int, name: str) -> None:
    with pytest.raises(ValueError, match="rows on meta, want cpu"):
        symmetric(name).exchange(torch.ones(1, 4, device="meta"), [1], [1])


def test_rows_of_another_device() -> None:
    run_virtual(another_device, 1)


def on_two_streams(me: int, world: int, name: str) -> None:
    """With stubbed streams: an exchange on another stream than the last one waits for that stream."""
    transport = symmetric(name)
    current, followed = [7], []
    transport.copy_streams.handle = lambda stream: current[0] if stream is None else 0  # type: ignore[method-assign]
    transport.copy_streams.wait_stream = followed.append  # type: ignore[method-assign]
    rows = torch.ones(world, 16)
    transport.exchange(rows, [1] * world, [1] * world)
    assert followed == [None], "no stream was known before"
    for stream in (7, 9, 9, 7):
        current[0] = stream
        transport.exchange(rows, [1] * world, [1] * world)
    assert followed == [None, 7, 9]


def test_exchanges_on_two_streams_keep_their_order() -> None:
    run_virtual(on_two_streams, 2)


def reused_on_another_stream(me: int, world: int, name: str) -> None:
    """Two batches on stubbed streams: the buffer of the first batch is used again on the second stream."""
    transport: Any = symmetric(name)
    current, followed = [None], []
    transport.copy_streams.handle = lambda stream: current[0] if stream is None else 0
    transport.copy_streams.wait_stream = followed.append

    def exchanged(stream: int) -> torch.Tensor:
        current[0] = stream
        followed.clear()
        return transport.exchange(torch.ones(world, 16), [1] * world, [1] * world)

    for capture in (0, 7):
        transport._capture = lambda: 0
        held = [exchanged(7), exchanged(7)]  # allocates memory for the capture
        del held
        transport._capture = lambda capture=capture: capture
        transport.open = partial(type(transport).open, transport, in_graphs=True)
        first = exchanged(7)
        if capture:
            assert followed == [], "no wait for work before the capture"
        second = exchanged(9)
        assert followed == ([] if capture else [7])
        address = first.data_ptr()
        del first
        third = exchanged(9)
        assert third.data_ptr() == address
        assert followed == [7], "stream 7 may still read the buffer"
        del second, third
        fourth = exchanged(9)
        assert followed == [], "one stream needs no wait"
        del fourth


def test_a_buffer_waits_for_the_stream_that_used_it_last() -> None:
    run_virtual(reused_on_another_stream, 2)


def on_another_device(me: int, world: int, name: str) -> None:
    transport: Any = symmetric(name)
    rows = torch.ones(1, 32)
    transport.exchange(rows, [1], [1])
    transport.device, transport.check_device = torch.device("cuda", 1), lambda rows: None
    rounds = transport.rendezvous.round
    calls = (
        lambda: transport.exchange(rows, [1], [1]),
        lambda: transport.exchange_quantized(rows, [1], [1], "rceil"),
        lambda: transport.exchange_dequantized(rows, [1], [1], "rceil"),
        lambda: transport.all_gather((9,), []),
    )
    for call in calls:
        with raises_naming("the current CUDA device is 0", "want 1", "torch.cuda.set_device(1)", "with torch.cuda.device(1)"):
            call()
    assert transport.rendezvous.round == rounds, "no round of the host all-gather has begun"
    transport.device = CPU
    transport.exchange(rows, [1], [1])


def test_a_tensor_that_is_not_on_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stubbed machine of two GPUs: the tensor is on the second GPU, the current device is the first."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    run_virtual(on_another_device, 1)
