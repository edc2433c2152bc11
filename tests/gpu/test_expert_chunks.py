"""Kernels of the fused layer with bounded scratch rows, on a GPU: rows and groups that stay unwritten, sums over chunks, no host sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests import p2p_cases
from tests.mx_cases import assert_same_bytes

from mxep import reference
from mxep.fused.expert_chunks import ChunkBounds, ExpertChunks
from mxep.moe.expert_mlp import ExpertRows
from mxep.operators import direct
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BF16, FLOAT32 = torch.bfloat16, torch.float32
M, N, K = 512, 256, 384


def ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def mx(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.mxep.quantize(torch.randn(shape, device="cuda"), "rceil")


CASES = ((0, 64, 0, 160, 32), (0, 0, 0, 0, 0), (0, 0, 0, 0, 512))  # sizes of groups


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("path", ["fp8", "fp8_span", "exact"])
@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
def test_rows_past_the_last_end_are_not_written(out_dtype: torch.dtype, path: str, sizes: tuple[int, ...]) -> None:
    """The rows before it have the bits of the product that zeroes the rows after it."""
    offs = ends(sizes)
    a, b, num_valid_rows = mx(M, K), mx(5, N, K), int(offs[-1])
    row_map = torch.randperm(M, device="cuda").int()
    for given in (None, row_map):
        want = torch.ops.mxep.grouped_mm_mx(*a, *b, offs, out_dtype, path, given)
        got = torch.ops.mxep.grouped_mm_mx(*a, *b, offs, out_dtype, path, given, "skip")
        assert torch.equal(got[:num_valid_rows], want[:num_valid_rows])
        assert not want[num_valid_rows:].any()
    plain = [torch.randn(*shape, device="cuda", dtype=BF16) for shape in ((M, K), (5, N, K))]
    want, got = (torch.ops.mxep.grouped_mm_hp(*plain, offs, out_dtype, tail) for tail in ("zero", "skip"))
    assert torch.equal(got[:num_valid_rows], want[:num_valid_rows])


@pytest.mark.parametrize("num_valid_rows", [0, 32, 288, M])
@pytest.mark.parametrize("width", [96, 4096, 7168])
def test_rebased_rows(width: int, num_valid_rows: int) -> None:
    from mxep.ops.grouped_gemm.hopper.rebase import rebase_rows

    rows, row_map = mx(M, width), torch.randint(-1, M, (M,), device="cuda").int()
    rows[1].view(torch.uint8)[::7, :1] += 30  # wide rows
    for given in (None, row_map):
        want = rebase_rows(*rows, MAX_SPREAD["auto"], given)
        got = rebase_rows(*rows, MAX_SPREAD["auto"], given, torch.tensor([num_valid_rows], device="cuda", dtype=torch.int32))
        for a, b in zip(got, want, strict=True):
            if a is not None and a.shape[0] == M:
                assert_same_bytes(a[:num_valid_rows], b[:num_valid_rows].cpu())
        wide = want.scale[:num_valid_rows] < 0
        assert torch.equal(got.block_scale[:, :num_valid_rows][:, wide], want.block_scale[:, :num_valid_rows][:, wide])


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("path", ["fp8", "exact"])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_groups_without_rows_are_not_written(dtype: torch.dtype, path: str, sizes: tuple[int, ...]) -> None:
    offs, grad, a = ends(sizes), mx(M, N), mx(M, K)
    filled = torch.diff(offs, prepend=offs.new_zeros(1)) > 0
    want = torch.ops.mxep.grouped_wgrad_mx(*grad, *a, offs, dtype, path)
    for mostly_padding in (True, False):
        into = torch.full((5, N, K), 7, device="cuda", dtype=dtype)
        torch.ops.mxep.grouped_wgrad_mx(*grad, *a, offs, dtype, path, out=into, mostly_padding=mostly_padding)
        halves = [torch.full((5, N // 2, K), 7, device="cuda", dtype=dtype) for _ in range(2)]
        torch.ops.mxep.grouped_wgrad_mx_gate_up(
            *grad, *a, offs, dtype, path, None, out_gate=halves[0], out_up=halves[1], mostly_padding=mostly_padding
        )
        for got in (into, torch.cat(halves, 1)):
            assert (got[~filled] == 7).all()
            torch.testing.assert_close(got[filled], want[filled], rtol=1e-2, atol=1e-2)
            assert path != "fp8" or torch.equal(into[filled], want[filled])
        up = torch.full((5, N // 2, K), 7, device="cuda", dtype=dtype)
        d_gate, d_up = direct.grouped_wgrad_mx_gate_up(*grad, *a, offs, dtype, path, out_up=up, mostly_padding=mostly_padding)
        assert d_up is up
        assert (up[~filled] == 7).all()
        assert not d_gate[~filled].any(), "the gradient without an `out` is zero"


@pytest.mark.parametrize("num_valid_rows", [0, 32, 288, M])
@pytest.mark.parametrize("width", [96, 1056, 4096])
def test_moved_and_dequantised_rows(width: int, num_valid_rows: int) -> None:
    rows, row_map = mx(M, width), torch.randint(-1, M, (M,), device="cuda").int()
    count, op = torch.tensor([num_valid_rows], device="cuda", dtype=torch.int32), torch.ops.mxep
    for got, want in (
        *zip(op.gather_mx_rows(*rows, row_map, count), op.gather_mx_rows(*rows, row_map), strict=True),
        (op.gather_rows(rows[0], row_map, count), op.gather_rows(rows[0], row_map)),
        (op.dequantize(*rows, BF16, None, count), op.dequantize(*rows, BF16)),
        (op.dequantize(*rows, BF16, row_map, count), op.dequantize(*rows, BF16, row_map)),
    ):
        assert torch.equal(got[:num_valid_rows].view(torch.uint8), want[:num_valid_rows].view(torch.uint8))
        assert (got[num_valid_rows:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"


@pytest.mark.parametrize("sizes", CASES)
def test_rebased_tokens_of_few_groups(sizes: tuple[int, ...]) -> None:
    from mxep.ops.grouped_gemm.hopper.rebase import rebase_tokens

    offs = ends(sizes)
    grad, a, a_map = mx(M, N), mx(M, K), torch.randint(-1, M, (M,), device="cuda").int()
    want, got = (rebase_tokens(*grad, *a, offs, None, a_map, mostly_padding=mostly_padding) for mostly_padding in (False, True))
    end, filled = int(want.ends[-1]), torch.diff(offs, prepend=offs.new_zeros(1)) > 0
    assert torch.equal(got.ends, want.ends)
    assert torch.equal(got.order, want.order)
    for name in ("grad", "a"):
        data, scale = (getattr(got, part).clone() for part in (name, f"{name}_scale"))
        assert_same_bytes(data[:, :end].contiguous(), getattr(want, name)[:, :end].contiguous().cpu())
        assert torch.equal(scale[filled], getattr(want, f"{name}_scale")[filled])


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("num_valid_rows", [0, 32, 288, M])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_activations_of_some_rows(activation: str, num_valid_rows: int, layout: str) -> None:
    x = torch.randn(M, (2 if activation == "swiglu" else 1) * K, device="cuda", dtype=BF16)
    dh, scores = torch.randn(M, K, device="cuda", dtype=BF16), torch.rand(M, device="cuda")
    some, op = {"num_valid_rows": torch.tensor([num_valid_rows], device="cuda", dtype=torch.int32)}, torch.ops.mxep
    how, scored = {"activation": activation}, {"activation": activation, "scores": scores}
    forms = (False, "mx+hp", "mx")
    for want, got in (
        (op.activate(x, layout, "rceil", **scored), op.activate(x, layout, "rceil", **scored, **some)),
        (op.activate(x, layout, "rceil", **scored, h="hp"), op.activate(x, layout, "rceil", **scored, **some, h="hp")),
        (op.activate(x, layout, "rceil", **how, quantize_x=True), op.activate(x, layout, "rceil", **how, **some, quantize_x=True)),
        (
            op.activate_backward(dh, x, layout, "rceil", *forms, **scored),
            op.activate_backward(dh, x, layout, "rceil", *forms, **scored, **some),
        ),
        (op.activate_backward(dh, x, layout, "rceil", **how), op.activate_backward(dh, x, layout, "rceil", **how, **some)),
    ):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[:num_valid_rows].view(torch.uint8), b[:num_valid_rows].view(torch.uint8))
            assert a.element_size() > 1 or (a[num_valid_rows:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize(("width", "choices"), [(96, 3), (1056, 8), (4096, 6), (2048, 1)])
def test_sums_over_chunks_have_the_references_bytes(width: int, choices: int, dtype: torch.dtype) -> None:
    rows = torch.randn(600, width, device="cuda").to(dtype)
    slots, row_map = (index.cuda() for index in p2p_cases.sums_of_expert_rows(333, choices, 600))
    sums = [
        [torch.full((333, width), 3.0, dtype=dtype, device="cuda"), torch.zeros(333, width, dtype=torch.int16, device="cuda")] for _ in "ab"
    ]
    for first, end in ((0, 200), (200, 200), (200, 450), (450, 600), (600, 600)):
        chunk = torch.tensor([first, end], device="cuda", dtype=torch.int32)
        for impl, (out, carry) in zip((kernels, reference), sums, strict=True):
            impl.reduce_rows_chunk(rows[first:end], slots, row_map[first:end], chunk, out, carry if dtype == BF16 else None)
        assert torch.equal(sums[0][0], sums[1][0])
        assert torch.equal(sums[0][1], sums[1][1])
    there = (slots >= 0).any(1)
    torch.testing.assert_close(sums[0][0][there], torch.ops.mxep.reduce_rows(rows, slots)[there])
    assert (sums[0][0][~there] == 3).all(), "a sum without rows is not written"


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_copied_groups(dtype: torch.dtype) -> None:
    offs = torch.tensor([0, 3, 3, 9], dtype=torch.int32, device="cuda")
    made = torch.randn(4, 3072, 2048, device="cuda").to(dtype)[:, :1536]
    into = torch.full((4, 1536, 2048), torch.nan, dtype=dtype, device="cuda")
    want = into.clone()
    torch.ops.mxep.copy_expert_grads(into, made, offs)
    reference.copy_expert_grads(want, made, offs)
    assert torch.equal(into.view(torch.uint8), want.view(torch.uint8))


def test_chunks_are_those_of_the_cpu(no_sync: Callable) -> None:
    sizes = torch.randint(1, 12, (40,), generator=torch.Generator().manual_seed(0)) * 32  # 8096 together
    offs = sizes.cumsum(0).int()
    rows = ExpertRows(offs, torch.rand(9000), *(torch.randint(-1, 500, (9000,)).int() for _ in range(2)))
    on_gpu = ExpertRows(*(part.cuda() for part in rows[:4]))
    want = list(ExpertChunks(rows, 500, 352, 32))
    with no_sync():
        chunks = ExpertChunks(on_gpu, 500, 352, 32)
        early = list(chunks)
    torch.cuda.synchronize()
    got = list(chunks)
    assert len(want) == len(got) <= len(early) <= len(chunks), "chunks without rows are skipped once the host knows their bounds"
    for a, b in zip(got, want, strict=True):
        assert all(torch.equal(torch.as_tensor(x).cpu(), torch.as_tensor(y)) for x, y in zip(a, b, strict=True))


def test_bounds_reach_the_host_without_a_sync(no_sync: Callable) -> None:
    bounds = torch.tensor([0, 0, 0, 64], dtype=torch.int32, device="cuda")
    released, before = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Event()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        wait_for(released, side)  # until this test sets the word, however slow the host is
        with no_sync():
            copied = ChunkBounds.of(bounds.clone())
            early = [copied.empty(chunk) for chunk in range(3)]
        before.record()
    assert not before.query()
    released.fill_(1)
    torch.cuda.synchronize()
    assert early == [False] * 3, "the copy waits for the work on the stream"
    assert [copied.empty(chunk) for chunk in range(3)] == [True, True, False]


def wait_for(word: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Hold the stream until the word is 1."""
    from mxep.comm.copy_streams import CudaCopyStreams

    with torch.cuda.stream(stream):
        CudaCopyStreams(word.device).wait(None, word.data_ptr(), 1)


def test_bounds_of_a_graph_never_reach_the_host() -> None:
    bounds = torch.tensor([0, 0, 0, 64], dtype=torch.int32, device="cuda")
    eager, graph = ChunkBounds.of(bounds.clone()), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = ChunkBounds.of(bounds.clone())
        assert eager.empty(0), "reading the host's memory is no call to the GPU"
    graph.replay()
    torch.cuda.synchronize()
    assert not any(captured.empty(chunk) for chunk in range(3))
