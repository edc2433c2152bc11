"""unpermute alone: the inverse of permute, with plain and MX gradients."""

from __future__ import annotations

import pytest
import torch
from tests.truth import KINDS, assert_same, assert_same_mx, make_case, permutation, pick, raises_naming, saved_tensors

from mxep import permute_mxfp8_fwd_hp_bwd, quantize_mx, reference, unpermute_hp_fwd_mxfp8_bwd
from mxep.mx import MXTensor
from mxep.shapes import round_up

pytestmark = pytest.mark.usefixtures("every_device")
unpermute = unpermute_hp_fwd_mxfp8_bwd


def counts_2x2() -> torch.Tensor:
    return torch.tensor([3, 0, 5, 33])  # W = 2, L = 2, R = 41


def of(counts: torch.Tensor, world: int, local: int, alignment: int = 32) -> tuple[torch.Tensor, int]:
    """(row map (P,) int32, R) in plain torch."""
    num_rows = int(counts.sum())
    row_map, _, _ = permutation(counts, world, local, alignment, round_up(num_rows + local * alignment, alignment))
    return torch.tensor(row_map, dtype=torch.int32), num_rows


def inverse(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(P, N) -> (R, N) by indexing with the inverse map; differentiable."""
    where = torch.full((num_rows,), -1, dtype=torch.int64)
    live = row_map >= 0
    where[row_map[live].long()] = live.nonzero().flatten()
    return rows[where]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_gradients(kind: str, dtype: torch.dtype) -> None:
    for world, local, alignment, width in ((1, 3, 32, 32), (2, 2, 128, 96), (4, 2, 32, 64)):
        row_map, num_rows = of(make_case(kind, world, local).rank_major(0), world, local, alignment)
        rows = torch.randn(len(row_map), width).to(dtype)
        grad = torch.randn(num_rows, width).to(dtype)
        leaf, mine = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        with saved_tensors() as saved:
            out = unpermute(mine, row_map, torch.Size([num_rows + 1, 7]))  # only R is read of the shape
        assert [t.dtype for t in saved] == [torch.int32], "saves the row map alone"
        truth = inverse(leaf, row_map, num_rows)
        assert_same(out.detach(), truth.detach())
        assert_same(torch.autograd.grad(out, mine, grad, retain_graph=True)[0], torch.autograd.grad(truth, leaf, grad)[0], "plain gradient")
        mx = quantize_mx(grad)
        (got,) = torch.autograd.grad(out, mine, mx)
        assert_same_mx(got, (pick(mx.qdata, row_map), pick(mx.scale, row_map)), dtype, "MX gradient")


def test_round_trip_of_any_bytes() -> None:
    mx = quantize_mx(torch.randn(41, 64).bfloat16())
    shape, out, row_map, _, _ = permute_mxfp8_fwd_hp_bwd(mx, counts_2x2(), 2, 2)
    assert_same(unpermute(out.dequantize(), row_map, shape), mx.dequantize())


def test_an_mx_input_is_dequantised() -> None:
    row_map, num_rows = of(counts_2x2(), 2, 2)
    mx = quantize_mx(torch.randn(len(row_map), 32))
    assert_same(unpermute(mx, row_map, torch.Size([num_rows + 1, 32])), inverse(mx.dequantize(), row_map, num_rows))


def test_mx_gradient_from_strided_records() -> None:
    """combine's backward returns views into the received records."""
    row_map, num_rows = of(counts_2x2(), 2, 2)
    grad = torch.randn(num_rows, 64)
    records = reference.quantize_packed(grad, "rceil")
    mx = MXTensor.from_qdata_and_scales(records[:, :64].view(torch.float8_e4m3fn), records[:, 64:66], torch.float32)
    rows = torch.randn(len(row_map), 64, requires_grad=True)
    (got,) = torch.autograd.grad(unpermute(rows, row_map, torch.Size([num_rows + 1, 64])), rows, mx)
    qdata, scale = reference.quantize(grad, "rceil")
    assert_same_mx(got, (pick(qdata, row_map), pick(scale, row_map)), torch.float32)


def test_expanded_gradient_and_nan_in_padding() -> None:
    row_map, num_rows = of(counts_2x2(), 2, 2)
    rows = torch.where(row_map[:, None] < 0, torch.nan, torch.randn(len(row_map), 32)).requires_grad_()
    out = unpermute(rows, row_map, torch.Size([num_rows + 1, 32]))
    assert out.isfinite().all(), "padding rows are dropped, whatever their values"
    out.sum().backward()
    assert_same(rows.grad, (row_map >= 0).float()[:, None].expand(rows.shape))


def test_bad_input() -> None:
    row_map, num_rows = of(counts_2x2(), 2, 2)
    shape = torch.Size([num_rows + 1, 32])
    with raises_naming("unpermute", "(64, 32)", f"({len(row_map)},)", "row map"):
        unpermute(torch.randn(64, 32), row_map, shape)
    with raises_naming("unpermute", f"({len(row_map)},)", "(P, N)"):
        unpermute(torch.randn(len(row_map)), row_map, shape)
    with raises_naming("unpermute", "torch.float32", "int32"):
        unpermute(torch.randn(len(row_map), 32), row_map.float(), shape)
    with raises_naming("unpermute", "row 40", "padded_shape (31, 32)", "30 rows"):
        unpermute(torch.randn(len(row_map), 32), row_map, torch.Size([31, 32]))
