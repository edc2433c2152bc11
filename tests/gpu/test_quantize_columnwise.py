"""Quantise along the rows, and in both directions from one read, on a GPU: every byte like the reference's, on poisoned outputs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from tests.mx_cases import MODES, assert_same_bytes, quantizer_inputs

from mxep import reference
from mxep.shapes import round_up

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BF16, FLOAT32 = torch.bfloat16, torch.float32
PARTS = ("qdata", "scale", "qdata_t", "scale_t")


def check(x: torch.Tensor, mode: str = "rceil", what: str = "") -> None:
    """Both operators against their references, x on the CPU or on the GPU."""
    want = reference.quantize_rowwise_columnwise(x.cpu(), mode)
    for name, got, wanted in zip(PARTS, kernels.quantize_rowwise_columnwise(x.cuda(), mode), want, strict=True):
        assert_same_bytes(got, wanted, f"{what} {mode} {name}")
    for name, got, wanted in zip(PARTS[2:], kernels.quantize_columnwise(x.cuda(), mode), want[2:], strict=True):
        assert_same_bytes(got, wanted, f"{what} {mode} {name} alone")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_values(dtype: torch.dtype, mode: str):
    for name, x in quantizer_inputs(dtype).items():
        x = x[torch.arange(round_up(len(x), 32)) % len(x)]  # whole blocks of rows
        check(x, mode, name)
        check(x.t().contiguous(), mode, f"{name}, transposed")


@pytest.fixture
def large_regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cuts small matrices like large ones."""
    launchers = importlib.import_module("mxep.ops.quantize.columnwise")
    monkeypatch.setattr(launchers, "_WAVES", 0)
    monkeypatch.setattr(launchers, "_WASTE", 100)
    launchers._cut.cache_clear()
    yield
    launchers._cut.cache_clear()


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("rows", [32, 96, 128, 160, 288, 544, 4128])
@pytest.mark.parametrize("columns", [32, 96, 160, 1056, 1408])
def test_sizes(rows: int, columns: int, dtype: torch.dtype):
    check(torch.randn(rows, columns).to(dtype), what=f"{rows} x {columns}")


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("shape", [(32, 32), (288, 160), (1056, 544), (4128, 1408), (3, 1312, 1056)])
@pytest.mark.usefixtures("large_regions")
def test_sizes_in_large_regions(shape: tuple[int, ...], dtype: torch.dtype):
    check(torch.randn(shape).to(dtype), what=str(shape))


@pytest.mark.parametrize("shape", [(3, 64, 96), (2, 2, 32, 160), (5, 288, 1056), (8, 1408, 256), (40, 256, 2048)])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_batches(shape: tuple[int, ...], dtype: torch.dtype):
    check(torch.randn(shape).to(dtype), what=str(shape))


@pytest.mark.parametrize(("rows", "columns"), [(8192, 7168), (8192, 1408), (16384, 2048)])
def test_regions_of_several_tiles(rows: int, columns: int):
    check(torch.randn(rows, columns, device="cuda", dtype=BF16), what=f"{rows} x {columns}")


def test_strides():
    wide = torch.randn(160, 1056).bfloat16()
    for what, view in {
        "row-strided": lambda t: t[:, 64:256],
        "unaligned": lambda t: t[:, 1:97],
        "every second row": lambda t: t[::2][:64, :96],
        "every second column": lambda t: t[:, ::2][:, :96],
        "transposed": lambda t: t[:, :96].t(),
        "one row": lambda t: t[:1, :96].expand(64, 96),
        "one value": lambda t: t[:1, :1].expand(64, 64),
        "a batch of them": lambda t: t[:, :1024].reshape(160, 4, 256).transpose(0, 1),
    }.items():
        on_gpu = view(wide.cuda())
        want = reference.quantize_rowwise_columnwise(view(wide), "floor")
        for name, got, wanted in zip(PARTS, kernels.quantize_rowwise_columnwise(on_gpu, "floor"), want, strict=True):
            assert_same_bytes(got, wanted, f"{what} {name}")
        for got, wanted in zip(kernels.quantize_columnwise(on_gpu, "floor"), want[2:], strict=True):
            assert_same_bytes(got, wanted, f"{what} alone")


@pytest.mark.parametrize("columns", [1, 2, 7, 33, 130, 1001])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32, torch.float16])
def test_any_number_of_columns_transposed(columns: int, dtype: torch.dtype):
    x = torch.randn(160, columns).to(dtype)
    for got, want in zip(kernels.quantize_columnwise(x.cuda(), "rceil"), reference.quantize_columnwise(x, "rceil"), strict=True):
        assert_same_bytes(got, want, f"{columns}")


def test_nothing_to_do():
    for shape in ((0, 64), (64, 0), (0, 64, 64), (2, 0, 64)):
        check(torch.randn(shape).bfloat16(), what=str(shape))


def test_other_kernel_gives_the_same_bytes():
    """Triton's, which other GPUs run."""
    from mxep.ops.quantize.triton import triton_quantize_columnwise

    x = torch.randn(3, 160, 1408).bfloat16()
    for got, want in zip(triton_quantize_columnwise(x.cuda(), "rceil"), reference.quantize_columnwise(x, "rceil"), strict=True):
        assert_same_bytes(got, want)


def test_no_host_sync(no_sync):
    x = torch.randn(256, 1408, device="cuda", dtype=BF16)
    torch.ops.mxep.quantize_rowwise_columnwise(x, "rceil")
    with no_sync():
        torch.ops.mxep.quantize_rowwise_columnwise(x, "rceil")
        torch.ops.mxep.quantize_columnwise(x, "rceil")


@pytest.mark.slow
def test_past_two_to_the_31():
    rows, width = 262272, 8192
    x = torch.empty(rows, width, dtype=BF16, device="cuda").normal_()
    qdata, scale, qdata_t, scale_t = kernels.quantize_rowwise_columnwise(x, "rceil")
    for part in (slice(0, 96), slice(rows - 96, rows)):
        blocks = slice(part.start // 32, part.stop // 32)
        want = reference.quantize_rowwise_columnwise(x[part].cpu(), "rceil")
        assert_same_bytes(qdata[part], want[0], "qdata")
        assert_same_bytes(scale[part], want[1], "scale")
        assert_same_bytes(qdata_t[:, part].contiguous(), want[2], "qdata_t")
        assert_same_bytes(scale_t[:, blocks].contiguous(), want[3], "scale_t")
