"""Quantisers, dequantise, movers and row indices on a GPU: the bytes of the CPU references, on poisoned outputs, without a sync."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mx_cases import MODES, assert_same_bytes, every_code, packed_views, quantizer_inputs, row_map

import mxep.operators  # noqa: F401
from mxep import reference
from mxep.shapes import record_bytes

kernels = pytest.importorskip("mxep.ops.kernels")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
launching = pytest.importorskip("mxep.ops.runtime.launch")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BF16, FLOAT32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROWS = (1, 31, 33, 127, 129)
WIDTHS = (32, 64, 96, 128, 416, 1024, 1056, 1408, 2048, 7168, 8192)


def assert_same(got: torch.Tensor | tuple, want: torch.Tensor | tuple, what: str = "") -> None:
    if isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    for part, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.is_cuda
        assert_same_bytes(a, b, f"{what}[{part}]")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_quantizers(dtype: torch.dtype, mode: str):
    for name, x in quantizer_inputs(dtype).items():
        want, on_gpu = reference.quantize(x, mode), x.cuda()
        assert_same(kernels.quantize(on_gpu, mode), want, name)
        assert_same(kernels.quantize_packed(on_gpu, mode), reference.quantize_packed(x, mode), f"{name}, packed")
        assert_same(kernels.quantize_columnwise(on_gpu.t(), mode), want, f"{name}, transposed view")
        assert_same(kernels.quantize_columnwise(on_gpu.t().contiguous(), mode), want, f"{name}, transposed")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_size(width: int):
    for rows in ROWS:
        x = torch.randn(rows, width).bfloat16()
        want = reference.quantize(x, "rceil")
        assert_same(kernels.quantize(x.cuda(), "rceil"), want, f"{rows} rows")
        records = kernels.quantize_packed(x.cuda(), "rceil")
        assert_same(records, reference.quantize_packed(x, "rceil"), f"{rows} packed rows")
        assert records.shape[1] == record_bytes(width)
        views = records[:, :width].view(E4M3), records[:, width : width + width // 32].view(torch.float8_e8m0fnu)
        for dtype in (BF16, FLOAT32):
            assert_same(kernels.dequantize(*views, dtype), reference.dequantize(*want, dtype), f"{rows} packed rows to {dtype}")
        index = row_map(rows + 40, rows)
        assert_same(kernels.gather_mx_rows(*views, index.cuda()), reference.gather_mx_rows(*want, index), f"gather {rows}")
        back = row_map(rows, rows + 9)
        got = kernels.scatter_mx_rows(*views, back.cuda(), rows + 9)
        assert_same(got, reference.scatter_mx_rows(*want, back, rows + 9), f"scatter {rows}")


def test_strided_inputs():
    wide = torch.randn(65, 513).bfloat16()
    for what, view in {
        "row-strided, unaligned": lambda t: t[:, 1:97],
        "every second row": lambda t: t[::2, :96],
        "column-strided": lambda t: t[:, ::4][:, :96],
        "expanded row": lambda t: t[:1, :96].expand(33, 96),
        "expanded scalar": lambda t: t[:1, :1].expand(64, 64),
        "lead dimensions": lambda t: t[:64, :512].view(4, 16, 512).transpose(0, 1)[:, :, :256],
        "lead, transposed": lambda t: t[:64, :512].reshape(2, 32, 512).transpose(-2, -1),
    }.items():
        x, on_gpu = view(wide), view(wide.cuda())
        assert_same(kernels.quantize(on_gpu, "rceil"), reference.quantize(x, "rceil"), what)
        if x.shape[-2] % 32 == 0:
            assert_same(kernels.quantize_columnwise(on_gpu, "floor"), reference.quantize_columnwise(x, "floor"), what)


@pytest.mark.parametrize("shape", [(32, 1), (64, 33), (160, 130), (128, 7168), (2, 3, 64, 96), (8, 1408, 256)])
def test_quantize_columnwise(shape: tuple[int, ...]):
    x = torch.randn(shape).bfloat16()
    for mode in MODES:
        assert_same(kernels.quantize_columnwise(x.cuda(), mode), reference.quantize_columnwise(x, mode))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32, torch.float16])
def test_dequantize_every_code_under_every_scale(dtype: torch.dtype):
    data, scale = every_code()
    want = reference.dequantize(data, scale, dtype)
    assert_same(kernels.dequantize(data.cuda(), scale.cuda(), dtype), want)
    assert_same(kernels.dequantize(*packed_views(data.cuda(), scale.cuda()), dtype), want)
    lead = data.view(4, 64, 256), scale.view(4, 64, 8)
    assert_same(kernels.dequantize(lead[0].cuda(), lead[1].cuda(), dtype), want.view(4, 64, 256))


@pytest.mark.parametrize("dtype", [BF16, FLOAT32, torch.uint8, E4M3, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(31, 32), (33, 160), (1, 7), (5,), (4, 3, 2), (129, 7168), (127, 1056)])
def test_movers(shape: tuple[int, ...], dtype: torch.dtype):
    rows = torch.randint(0, 2 if dtype == torch.bool else 120, shape, dtype=torch.uint8).to(dtype)
    index, back = row_map(shape[0] + 37, shape[0]), row_map(shape[0], shape[0] + 9)
    assert_same(kernels.gather_rows(rows.cuda(), index.cuda()), reference.gather_rows(rows, index))
    assert_same(kernels.gather_rows(rows.cuda(), index.cuda().long()), reference.gather_rows(rows, index))
    assert_same(kernels.scatter_rows(rows.cuda(), back.cuda(), shape[0] + 9), reference.scatter_rows(rows, back, shape[0] + 9))
    if len(shape) == 2 and shape[1] > 8:
        assert_same(kernels.gather_rows(rows.cuda()[:, 3:], index.cuda()), reference.gather_rows(rows[:, 3:].contiguous(), index))


def test_nothing_to_do():
    none, five = torch.zeros(0, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    x = torch.randn(0, 64).bfloat16()
    for mode in MODES:
        assert_same(kernels.quantize(x.cuda(), mode), reference.quantize(x, mode))
        assert_same(kernels.quantize_packed(x.cuda(), mode), reference.quantize_packed(x, mode))
        assert_same(kernels.quantize_columnwise(x.cuda(), mode), reference.quantize_columnwise(x, mode))
    mx = reference.quantize(torch.randn(4, 64), "rceil")
    empty = tuple(part[:0] for part in mx)
    assert_same(kernels.dequantize(empty[0].cuda(), empty[1].cuda(), BF16), reference.dequantize(*empty, BF16))
    for data, index in ((mx, none), (mx, five), (empty, five), (empty, none)):
        got = kernels.gather_mx_rows(data[0].cuda(), data[1].cuda(), index.cuda())
        assert_same(got, reference.gather_mx_rows(*data, index))
    got = kernels.scatter_mx_rows(empty[0].cuda(), empty[1].cuda(), none.cuda(), 3)
    assert_same(got, reference.scatter_mx_rows(*empty, none, 3))


def test_permute_indices_worked_example():
    index, padded, ends = kernels.permute_indices(torch.tensor([2, 0, 1, 3]).cuda(), 2, 2, 4, 12)
    assert (padded.tolist(), ends.tolist()) == ([4, 4], [4, 8])
    assert index.tolist() == [0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1]


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_permute_indices_and_their_inverse(data: st.DataObject):
    ranks, experts = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.sampled_from([1, 2, 5, 8]))
    alignment = data.draw(st.sampled_from([1, 32, 128]))
    sizes = st.sampled_from([0, 0, 1, 2, 31, 32, 33, 700])
    counts = torch.tensor(data.draw(st.lists(sizes, min_size=ranks * experts, max_size=ranks * experts)))
    counts = counts.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    received = int(counts.sum())
    num_padded = (received + experts * alignment + alignment - 1) // alignment * alignment
    got = kernels.permute_indices(counts.cuda(), ranks, experts, alignment, num_padded)
    assert_same(got, reference.permute_indices(counts, ranks, experts, alignment, num_padded))
    mx = reference.quantize(torch.randn(received, 96), "rceil")
    padded = kernels.gather_mx_rows(mx[0].cuda(), mx[1].cuda(), got[0])
    assert_same(padded, reference.gather_mx_rows(*mx, got[0].cpu()))
    assert_same(kernels.scatter_mx_rows(*padded, got[0], received), mx)


@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (64, 128), (3, 300), (257, 5), (8, 1024)])
def test_permute_indices_of_many_experts(ranks: int, experts: int):
    for most in (1, 50):
        counts = torch.randint(0, most, (ranks * experts,))
        counts[::3] = 0
        counts[len(counts) // 2] = 5000 * most
        num_padded = int(counts.sum()) + experts * 32 + 77
        got = kernels.permute_indices(counts.cuda(), ranks, experts, 32, num_padded)
        assert_same(got, reference.permute_indices(counts, ranks, experts, 32, num_padded))


def test_operators_reach_the_kernels_without_a_sync(no_sync):
    x = torch.randn(192, 1408).bfloat16()
    mx, ops = reference.quantize(x, "rceil"), torch.ops.mxep
    counts = torch.tensor([50, 0, 92, 50])
    on_gpu, data, scale, counts_on_gpu = x.cuda(), mx[0].cuda(), mx[1].cuda(), counts.cuda()
    for _ in range(2):  # the first time Triton compiles
        with no_sync():
            quantized = ops.quantize(on_gpu, "rceil")
            transposed = ops.quantize_columnwise(on_gpu, "rceil")
            packed = ops.quantize_packed(on_gpu, "rceil")
            plain = ops.dequantize(data, scale, BF16)
            index = ops.permute_indices(counts_on_gpu, 2, 2, 32, 256)
            gathered, gathered_mx = ops.gather_rows(on_gpu, index[0]), ops.gather_mx_rows(data, scale, index[0])
            scattered, scattered_mx = ops.scatter_rows(gathered, index[0], 192), ops.scatter_mx_rows(*gathered_mx, index[0], 192)
    assert_same(quantized, mx)
    assert_same(transposed, reference.quantize_columnwise(x, "rceil"))
    assert_same(packed, reference.quantize_packed(x, "rceil"))
    assert_same(plain, reference.dequantize(*mx, BF16))
    assert_same(index, reference.permute_indices(counts, 2, 2, 32, 256))
    assert_same(scattered, x)
    assert_same(scattered_mx, mx)


@pytest.mark.slow
def test_past_two_to_the_31():
    """262272 x 8192: offsets past 2^31 in elements of every output, and in the 4-byte words of the movers."""
    rows, width = 262272, 8192
    x = torch.empty(rows, width, dtype=BF16, device="cuda").normal_()
    ends = {"first": slice(0, 96), "last": slice(rows - 96, rows)}
    want = {where: reference.quantize(x[part].cpu(), "rceil") for where, part in ends.items()}
    data, scale = kernels.quantize(x, "rceil")
    records = kernels.quantize_packed(x, "rceil")
    plain = kernels.dequantize(records[:, :width].view(E4M3), records[:, width : width + width // 32].view(scale.dtype), BF16)
    backwards = torch.arange(rows - 1, -1, -1, device="cuda", dtype=torch.int32)
    moved = kernels.gather_mx_rows(data, scale, backwards)
    for where, part in ends.items():
        assert_same((data[part], scale[part]), want[where], where)
        assert_same(plain[part], reference.dequantize(*want[where], BF16), where)
        mirrored = slice(rows - part.stop, rows - part.start)
        assert_same(
            tuple(t[mirrored].view(torch.uint8).flip(0).contiguous() for t in moved), tuple(t.view(torch.uint8) for t in want[where])
        )
    del records, plain, moved
    transposed = kernels.quantize_columnwise(x, "rceil")
    column = slice(width - 40, width)
    got = tuple(t[column, -(96 // block) :].contiguous() for t, block in zip(transposed, (1, 32), strict=True))
    assert_same(got, reference.quantize_columnwise(x[ends["last"], column].cpu(), "rceil"), "transposed")
    del data, scale, transposed
    words = torch.empty(rows, width, dtype=torch.int32, device="cuda").random_()
    gathered = kernels.gather_rows(words, backwards)
    assert torch.equal(gathered[:1000], words[-1000:].flip(0))
    assert torch.equal(gathered[-1000:], words[:1000].flip(0))
    returned = kernels.scatter_rows(gathered, backwards, rows)
    del gathered
    assert torch.equal(returned, words)


def test_triton_kernels_are_launched_by_their_own_c_function():
    x, names = torch.randn(64, 96).bfloat16(), []

    def record(metadata) -> None:
        names.append(metadata.get()["name"])

    for hooked in (False, False, True):
        if hooked:
            triton.knobs.runtime.launch_enter_hook.add(record)
        assert_same(kernels.quantize(x.cuda(), "rceil"), reference.quantize(x, "rceil"))
        triton.knobs.runtime.launch_enter_hook.remove(record)
    assert names == ["_quantize_kernel"]
    variants = [variant for variant in launching._variants.values() if variant.compiled.name == "_quantize_kernel"]
    assert variants
    assert all(variant.function is not None for variant in variants)


@triton.jit
def _fill(out, value, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), value)


def test_a_kernel_that_runs_in_a_graph_first():
    out, graph = torch.zeros(64, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launching.launch(_fill, 1, {"out": out, "value": 7, "WIDTH": 64}, num_warps=1)
    assert not out.any()
    graph.replay()
    assert (out == 7).all()


def test_a_tensor_of_the_host_is_refused():
    rows, indices = torch.randn(8, 64, device="cuda"), torch.arange(8, dtype=torch.int32)
    kernels.gather_rows(rows, indices.cuda())
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            kernels.gather_rows(rows, indices)


@pytest.mark.multi_gpu
def test_launches_where_the_tensor_is():
    x = torch.randn(64, 256).bfloat16()
    with torch.cuda.device(0):
        assert_same(kernels.quantize(x.to("cuda:1"), "rceil"), reference.quantize(x, "rceil"))
