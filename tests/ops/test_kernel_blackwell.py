"""The Blackwell path without a Blackwell: torch's scaled grouped GEMM gets the shapes it checks and, read as it reads, the numbers.

The hardware call is replaced by a CPU one that unpacks the blocked scales group by group, as the GEMM is documented to.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxep import reference
from mxep.mx.layout import from_blocked
from mxep.shapes import round_up

pytest.importorskip("triton")
paths = importlib.import_module("mxep.ops.grouped_gemm.paths")
scaled = importlib.import_module("mxep.ops.grouped_gemm.blackwell")
BF16, FLOAT32, E4M3, E8M0 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu


def _groups(offs: torch.Tensor) -> list[tuple[int, int]]:
    ends = offs.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _forward(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """a (M, K), sa: groups padded to 128 rows, one after the other; b (G, K, N), sb (G, tiles)."""
    (M, K), (_, _, N) = a.shape, b.shape
    columns, place = round_up(K // 32, 4), 0
    out = torch.full((M, N), torch.nan, dtype=BF16)
    for g, (start, end) in enumerate(_groups(offs)):
        padded = round_up(end - start, 128)
        scale = from_blocked(sa.view(-1)[place * columns : (place + padded) * columns], end - start, K // 32)
        left = reference.dequantize(a[start:end], scale, FLOAT32)
        right = reference.dequantize(b[g].t(), from_blocked(sb[g], N, K // 32), FLOAT32)
        out[start:end] = (left @ right.t()).bfloat16()
        place += padded
    return out


def _wgrad(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """a (N, M) and b (M, K) contracted along M; scales of each group padded to 4 columns, one group behind the other."""
    out = torch.full((len(offs), a.shape[0], b.shape[1]), torch.nan, dtype=BF16)
    operands = (a, sa), (b.t(), sb)
    place = 0
    for g, (start, end) in enumerate(_groups(offs)):
        columns = (end - start) // 32
        padded = round_up(columns, 4)
        if columns:  # what the GEMM leaves in an empty group is not specified
            left, right = (
                reference.dequantize(
                    data[:, start:end],
                    from_blocked(scale.view(-1)[place * scale.shape[0] :][: padded * scale.shape[0]], data.shape[0], columns),
                    FLOAT32,
                )
                for data, scale in operands
            )
            out[g] = (left @ right.t()).bfloat16()
        place += padded
    return out


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero_padding_rows(out: torch.Tensor, offs: torch.Tensor) -> None:
        out[int(offs[-1]) :] = 0

    def gemm(a, b, sa, recipe_a, sb, recipe_b, *, swizzle_a, swizzle_b, offs, output_dtype):
        assert (recipe_a, recipe_b) == (torch.nn.functional.ScalingType.BlockWise1x32,) * 2
        assert (swizzle_a, swizzle_b) == (torch.nn.functional.SwizzleType.SWIZZLE_32_4_4,) * 2
        assert (sa.dtype, sb.dtype, offs.dtype, output_dtype) == (E8M0, E8M0, torch.int32, BF16)
        with FakeTensorMode() as mode:  # torch's own checks of shapes and strides
            like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in (a, b, sa, sb, offs)]
            shape = torch._scaled_grouped_mm(*like[:4], offs=like[4], out_dtype=BF16).shape
        assert mode
        out = (_forward if b.dim() == 3 else _wgrad)(a, b, sa, sb, offs)
        assert out.shape == shape
        return out

    monkeypatch.setattr(scaled, "compute_capability", lambda index: (10, 0))
    monkeypatch.setattr(paths, "path_of", lambda path, device: paths.PATHS[path])
    monkeypatch.setattr(scaled, "zero_padding_rows", zero_padding_rows)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", gemm)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("ends", [[32, 64, 64, 256], [0, 160, 320, 320], [129, 130, 300, 310]])
@pytest.mark.parametrize(("K", "N"), [(128, 96), (416, 160)])
def test_forward(ends: list[int], K: int, N: int):
    qa = reference.quantize(torch.randn(320, K) * torch.exp(2 * torch.randn(320, 1)), "rceil")
    qb = reference.quantize(torch.randn(4, N, K), "rceil")
    offs = torch.tensor(ends)
    got = paths.grouped_mm_mx(*qa, *qb, offs, BF16, "blackwell")
    assert torch.equal(got, reference.grouped_mm_mx(*qa, *qb, offs, BF16, "reference"))


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("ends", [[32, 64, 64, 256], [0, 160, 320, 320]])
@pytest.mark.parametrize(("K", "N"), [(128, 96), (416, 160)])
def test_wgrad(ends: list[int], K: int, N: int):
    qg = reference.quantize_columnwise(torch.randn(320, N), "rceil")
    qa = reference.quantize_columnwise(torch.randn(320, K), "rceil")
    offs = torch.tensor(ends)
    got = paths.grouped_wgrad_mx_columnwise(*qg, *qa, offs, BF16, "blackwell")
    want = reference.grouped_wgrad_mx_columnwise(*qg, *qa, offs, BF16, "reference")
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)  # the order of a float32 sum differs
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    assert (got[sizes == 0] == 0).all()


def test_the_launcher_refuses_any_other_gpu(monkeypatch: pytest.MonkeyPatch):
    q = reference.quantize(torch.randn(32, 64), "rceil")
    monkeypatch.setattr(scaled, "compute_capability", lambda index: (9, 0))
    monkeypatch.setattr(paths, "path_of", lambda path, device: paths.PATHS[path])
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", lambda *args, **options: pytest.fail("reached the hardware call"))
    with pytest.raises(AssertionError, match="SM90"):
        paths.grouped_mm_mx(*q, q[0][None], q[1][None], torch.tensor([32]), BF16, "blackwell")
