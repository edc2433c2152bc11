"""Symmetric memory on one GPU: virtual ranks have the bits of the collective path; one rank has real streams, flags and a watchdog."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tests.by_hand import ByHand
from tests.truth import KINDS, Case, assert_all_same, assert_same, exchange, make_case, raises_naming
from tests.virtual import alone, run_virtual

from mxep import ep_grouped_mm, reference
from mxep.comm import ExchangeError, close_transports, register
from mxep.comm.copy_streams import LOCAL, REMOTE, CudaCopyStreams
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep import ep_grouped_mm_collective as pipeline
from mxep.ep import ep_grouped_mm_symmetric as overlapped
from mxep.ep.ep_grouped_mm_symmetric import OverlappedEPGroupedMM
from mxep.ep.permute import index_rows
from mxep.grouped_mm.products import gemm_options
from mxep.ops import kernels
from mxep.recipe import RECIPES, Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked")]

D, N, L = 256, 160, 3
RECIPE = RECIPES["mxfp8_wgrad_with_hp"]
BY_HAND = ByHand(OverlappedEPGroupedMM)
_LATE_CYCLES = 300_000_000  # of a kernel that holds a stream, some 150 ms


def weights(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(L, N, D, generator=generator) / D**0.5).to("cuda", dtype).requires_grad_()


def rank_by_rank(case: Case, dtype: torch.dtype, recipe: Recipe) -> list[list[torch.Tensor]]:
    """(out, dx, dw) of every rank: exchanges by indexing, and the function of the collective path on the rows of each rank."""
    xs = [x.cuda().requires_grad_() for x in case.inputs(D, dtype)]
    ws = [weights(rank, dtype) for rank in range(case.world)]
    outs = []
    for rank, (rows, w) in enumerate(zip(exchange(xs, case.table), ws, strict=True)):
        counts, R = case.rank_major(rank).cuda(), rows.shape[0]
        row_map, _, offs = index_rows("test", counts, R, case.world, L, recipe.group_size_multiple_of)
        gemm = gemm_options(rows.device, dtype, recipe.gemm_path, recipe.wgrad, recipe.scaling_mode.value, pad_groups=False)
        options = pipeline._EPOptions("rceil", "rceil", gemm)
        outs.append(pipeline._EPGroupedMM.apply(rows, w, row_map, offs, [R], [R], "", options, None))
    combined = exchange(outs, [case.received(rank) for rank in range(case.world)])
    torch.autograd.backward(combined, [grad.cuda() for grad in case.inputs(N, dtype, seed=5)])
    return [[out.detach(), x.grad, w.grad] for out, x, w in zip(combined, xs, ws, strict=True)]


def by_hand(me: int, world: int, name: str, case: Case, dtype: torch.dtype, recipe: Recipe) -> list[torch.Tensor]:
    x, w = case.inputs(D, dtype)[me].cuda().requires_grad_(), weights(me, dtype)
    out = ep_grouped_mm(x, w, case.sent(me), case.received(me), case.rank_major(me), name, recipe)
    d_x, d_w, *_ = BY_HAND.backward_of_last()(case.inputs(N, dtype, seed=5)[me].cuda())
    torch.cuda.current_stream().synchronize()
    return [out.detach(), d_x, d_w]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.usefixtures("poison")
def test_the_bits_of_the_collective_path_on_virtual_ranks(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "OverlappedEPGroupedMM", BY_HAND)
    monkeypatch.setattr(overlapped, "LEAST_CHUNK_BYTES", 1)
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, L, rows=400, seed=seed)
        for dtype, path in ((torch.bfloat16, "auto"), (torch.float32, "auto"), (torch.bfloat16, "exact")):
            recipe = Recipe("as asked", gemm_path=path)
            want = rank_by_rank(case, dtype, recipe)
            torch.cuda.synchronize()
            for rank, got in enumerate(run_virtual(by_hand, world, case, dtype, recipe, device="cuda")):
                assert_all_same(got, want[rank], f"{kind} {dtype} {path} rank {rank}")


def exchanges(me: int, world: int, name: str) -> None:
    for seed, kind in enumerate(KINDS):
        case = make_case(kind, world, 2, seed=seed)
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e8m0fnu):
            inputs = [(rows * 100).to(torch.uint8).cuda() for rows in case.inputs(48, torch.float32)]
            want = exchange(inputs, case.table)[me].view(dtype)
            got = torch.ops.mxep.exchange_rows(inputs[me].view(dtype), case.received(me), case.sent(me), name)
            assert_same(got, want, f"{kind} {dtype}")
        for dtype, mode in ((torch.bfloat16, "rceil"), (torch.float32, "floor")):
            inputs = [rows.cuda() for rows in case.inputs(96, dtype)]
            want = exchange([kernels.quantize_packed(rows, mode) for rows in inputs], case.table)[me]
            splits = case.received(me), case.sent(me), name, mode
            assert_same(torch.ops.mxep.exchange_quantized(inputs[me], *splits), want, f"{kind} {mode}")
            values = torch.empty(want.shape[0], 96, dtype=dtype, device="cuda")
            reference.dequantize_packed_into(want, values)
            assert_same(torch.ops.mxep.exchange_dequantized(inputs[me], *splits), values, f"{kind} {mode} values")


def test_exchanges_on_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.symmetric._PIECE_BYTES", 1000)
    run_virtual(exchanges, 3, device="cuda")


# ---- one rank with real streams and flags ----


@pytest.fixture
def transport() -> Iterator[SymmetricTransport]:
    transport = alone()
    register("alone", transport)
    yield transport
    close_transports("alone")


def test_flags_order_streams() -> None:
    """A stream waits for a flag that another stream writes after its copy; values may wrap around."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams, flags = CudaCopyStreams(device), torch.zeros(4, dtype=torch.int32, device=device)
    big, there, late = (torch.zeros(1 << 28, dtype=torch.uint8, device=device) for _ in range(3))
    for step, value in enumerate((1, 2, 2**31 - 1, 2**31 + 5, 2**32 - 1, 2**32 + 3)):
        big.fill_(step + 1)
        streams.fork(LOCAL, REMOTE)
        streams.wait(LOCAL, flags.data_ptr(), value)
        streams.copy(LOCAL, late.data_ptr(), there.data_ptr(), late.numel())
        streams.copy(REMOTE, there.data_ptr(), big.data_ptr(), big.numel())
        streams.write(REMOTE, flags.data_ptr(), value)
        streams.join()
        assert late.min() == late.max() == step + 1


def test_alone_over_streams(transport: SymmetricTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, two streams for the GEMMs, autograd: the bits of the collective path, many times over the same memory."""
    monkeypatch.setattr(overlapped, "LEAST_CHUNK_BYTES", 1)
    held = []
    for step, kind in enumerate([*KINDS, *KINDS]):
        case = make_case(kind, 1, L, rows=3000, seed=step)
        for dtype in (torch.bfloat16, torch.float32):
            x, w = case.inputs(D, dtype)[0].cuda().requires_grad_(), weights(0, dtype)
            out = ep_grouped_mm(x, w, case.sent(0), case.received(0), case.rank_major(0).cuda(), "alone", RECIPE)
            grads = torch.autograd.grad(out, (x, w), case.inputs(N, dtype, seed=5)[0].cuda())
            held.append((case, dtype, [out.detach(), *grads]))
    for case, dtype, got in held:
        assert_all_same(got, rank_by_rank(case, dtype, RECIPE)[0], f"{dtype}")


def test_memory_is_used_again(transport: SymmetricTransport) -> None:
    sizes = []
    for _ in range(4):
        rows = torch.ones(1000, 64, device="cuda")
        kept = torch.ops.mxep.exchange_rows(rows, [1000], [1000], "alone").view(10, -1)
        assert torch.equal(torch.ops.mxep.exchange_rows(rows * 2, [1000], [1000], "alone"), rows * 2)
        assert (kept == 1).all()
        del kept
        sizes.append(transport.nbytes())
    assert len(set(sizes)) == 1


def read_late(name: str, me: int, world: int) -> None:
    """A batch on each of two streams. The first batch is read late, after its buffer was taken for the second stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [torch.full((world * 4096, 256), 10.0 * batch + me, device=device) for batch in range(3)]
    splits = [4096] * world, [4096] * world, name
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def exchanged(batch: int, stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.ops.mxep.exchange_rows(batches[batch], *splits)

    for _ in range(3):
        first, second = exchanged(0, streams[0]), exchanged(1, streams[1])
        address = first.data_ptr()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(_LATE_CYCLES)
            read = first.clone()
        del first
        third = exchanged(2, streams[1])
        assert third.data_ptr() == address, "the buffer that stream 0 still reads"
        torch.cuda.synchronize()
        for rank in range(world):
            part = slice(4096 * rank, 4096 * (rank + 1))
            for rows, batch in ((read, 0), (second, 1), (third, 2)):
                assert bool((rows[part] == 10.0 * batch + rank).all()), f"batch {batch} from rank {rank}"
        del second, third


@pytest.mark.usefixtures("transport")
def test_a_buffer_that_another_stream_still_reads() -> None:
    read_late("alone", 0, 1)


def test_a_buffer_that_another_stream_still_reads_on_virtual_ranks() -> None:
    run_virtual(lambda me, world, name: read_late(name, me, world), 2, device="cuda")


def test_a_buffer_that_another_stream_of_a_graph_still_reads(transport: SymmetricTransport) -> None:
    pieces = [torch.full((1 << 20,), value, dtype=torch.uint8, device="cuda") for value in (1, 2, 3)]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()

    def exchanged(piece: torch.Tensor) -> torch.Tensor:
        with transport.open((9,), (piece.numel(),), [], in_graphs=True) as opened:
            opened.scatter_copy(0, 0, [piece])
            opened.wait(1)
        return opened.buffers[0]

    held = [exchanged(piece) for piece in pieces[:2]]  # allocates memory for the capture
    del held
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        first = exchanged(pieces[0])
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = exchanged(pieces[1])
        torch.cuda._sleep(_LATE_CYCLES)
        read, address = first.clone(), first.data_ptr()
        del first
        with torch.cuda.stream(side):
            third = exchanged(pieces[2])
        assert third.data_ptr() == address
        main.wait_stream(side)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for rows, value in ((read, 1), (second, 2), (third, 3)):
            assert bool((rows == value).all()), value


def test_memory_that_a_failed_exchange_still_copies_is_not_used_again(transport: SymmetricTransport) -> None:
    """A copy is running when the host fails; the program continues and allocates."""
    size, received = 64 << 20, []
    with transport.open((9,), (size,), [], in_graphs=True):
        pass  # allocates memory

    def fails() -> None:
        with transport.open((9,), (size,), [], in_graphs=True) as opened:
            received.append(opened.buffers[0])
            piece = torch.ones(size, dtype=torch.uint8, device="cuda")
            with transport.copy_streams.on(REMOTE):
                torch.cuda._sleep(_LATE_CYCLES)
            opened.scatter_copy(0, 0, [piece])
            raise RuntimeError("broken")

    with contextlib.suppress(RuntimeError):
        fails()
    others = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    assert bool((received[0][:size] == 1).all())
    del others
    for _ in range(2):
        with pytest.raises(ExchangeError, match="rank 0 failed: RuntimeError: broken"):
            torch.ops.mxep.exchange_rows(torch.ones(4, 4, device="cuda"), [4], [4], "alone")
    close_transports("alone")
    assert transport.nbytes() == 0


def test_rows_that_are_not_on_the_current_device(transport: SymmetricTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second GPU is stubbed as the current device; torch's own current device stays, so nothing is launched elsewhere."""
    rows, here = torch.ones(8, 32, device="cuda"), torch.cuda.current_device()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: here + 1)
        for call in (torch.ops.mxep.exchange_rows, partial(torch.ops.mxep.exchange_dequantized, scaling_mode="rceil")):
            with raises_naming(f"the current CUDA device is {here + 1}", f"want {here}", f"torch.cuda.set_device({here})"):
                call(rows, [8], [8], "alone")
    assert torch.equal(torch.ops.mxep.exchange_rows(rows, [8], [8], "alone"), rows)


@pytest.mark.multi_gpu
def test_rows_on_the_second_gpu() -> None:
    with torch.cuda.device(1):
        transport = alone()
    register("second", transport)
    rows = torch.full((8, 32), 3.0, device="cuda:1")
    with raises_naming("the current CUDA device is 0", "want 1"):
        torch.ops.mxep.exchange_rows(rows, [8], [8], "second")
    with torch.cuda.device(1):
        assert torch.equal(torch.ops.mxep.exchange_rows(rows, [8], [8], "second"), rows)
    close_transports("second")


def test_not_in_a_graph(transport: SymmetricTransport) -> None:
    rows = torch.ones(8, 4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        rows.add_(0)
        with pytest.raises(ValueError, match="CUDA graph capture"):
            torch.ops.mxep.exchange_rows(rows, [8], [8], "alone")
    assert torch.equal(torch.ops.mxep.exchange_rows(rows, [8], [8], "alone"), rows)


def test_a_peer_that_never_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits for a flag that no peer sets. Within the time limit it continues with NaN, and the next exchange raises."""
    transport = alone(timeout_s=1)
    register("stuck", transport)
    rows = torch.ones(1000, 64, device="cuda")
    torch.ops.mxep.exchange_rows(rows, [1000], [1000], "stuck")
    write = transport.copy_streams.write
    monkeypatch.setattr(transport.copy_streams, "write", lambda stream, flag, value: write(stream, flag, value) if stream is None else None)
    monkeypatch.setattr(transport.copy_streams, "copy", lambda *arguments: None)
    start = time.monotonic()
    out = torch.ops.mxep.exchange_rows(rows, [1000], [1000], "stuck")
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - start < 10
    assert out.isnan().all()
    with pytest.raises(ExchangeError, match="did not come for 1 s"):
        torch.ops.mxep.exchange_rows(rows, [1000], [1000], "stuck")
    close_transports("stuck")
