"""Gather and quantise by one kernel on a GPU: the bytes of its reference on the CPU, on poisoned outputs, without a sync, past 2^31."""

from __future__ import annotations

import pytest
import torch
from tests.mx_cases import MODES, assert_same_bytes, quantizer_inputs, row_map

import mxep.operators  # noqa: F401
from mxep import reference

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


def same(rows: torch.Tensor, on_gpu: torch.Tensor, index: torch.Tensor, mode: str, what: str = "") -> None:
    pairs = zip(kernels.gather_quantize(on_gpu, index.cuda(), mode), reference.gather_quantize(rows, index, mode), strict=True)
    for got, want in pairs:
        assert got.is_cuda
        assert_same_bytes(got, want, what)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values(dtype: torch.dtype, mode: str):
    for name, x in quantizer_inputs(dtype).items():
        index = row_map(x.shape[0] + 37, x.shape[0])
        same(x, x.cuda(), index, mode, name)
        same(x, x.cuda(), index.long(), mode, name)


@pytest.mark.parametrize("width", [32, 96, 416, 1024, 1408, 7168])
def test_sizes_and_strides(width: int):
    for rows in (1, 31, 129):
        x = torch.randn(rows, width + 5).bfloat16()
        index = row_map(rows + 40, rows)
        same(x[:, 3 : 3 + width], x.cuda()[:, 3 : 3 + width], index, "rceil", f"{rows} rows")
    none = torch.zeros(0, dtype=torch.int32)
    same(x[:, :width], x.cuda()[:, :width], none, "rceil", "no rows out")
    same(x[:0, :width], x.cuda()[:0, :width], torch.full((5,), -1, dtype=torch.int32), "rceil", "no rows in")


def test_no_sync(no_sync):
    x, index = torch.randn(64, 256).bfloat16(), row_map(96, 64)
    on_gpu, index_on_gpu = x.cuda(), index.cuda()
    torch.ops.mxep.gather_quantize(on_gpu, index_on_gpu, "rceil")  # the first time Triton compiles
    with no_sync():
        got = torch.ops.mxep.gather_quantize(on_gpu, index_on_gpu, "rceil")
    for a, b in zip(got, reference.gather_quantize(x, index, "rceil"), strict=True):
        assert_same_bytes(a, b)


@pytest.mark.slow
def test_past_two_to_the_31():
    rows, width = 262272, 8192
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda").normal_()
    backwards = torch.arange(rows - 1, -1, -1, device="cuda", dtype=torch.int32)
    got = kernels.gather_quantize(x, backwards, "rceil")
    for part in (slice(0, 96), slice(rows - 96, rows)):
        source = slice(rows - part.stop, rows - part.start)
        for a, b in zip(got, reference.quantize(x[source].cpu().flip(0), "rceil"), strict=True):
            assert_same_bytes(a[part], b)
