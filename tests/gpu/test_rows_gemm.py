"""Plain rows through an FP8 GEMM, and MX rows through an FP8 wgrad, by one call: the bits of two calls, whatever the layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.activation_cases import far_apart

from mxep.ops.grouped_gemm.hopper import gemm, rows_gemm, rows_wgrad
from mxep.ops.grouped_gemm.hopper.quantize_rows import quantize_rows
from mxep.ops.grouped_gemm.hopper.quantize_weight import quantize_weight
from mxep.ops.grouped_gemm.hopper.rebase import rebase_rows, rebase_tokens
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, RebasedRows, RebasedWeight
from mxep.ops.quantize.triton import quantize
from mxep.ops.runtime import tiles

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper", "poison")]
BF16, FLOAT32 = torch.bfloat16, torch.float32
WIDEST = tiles.QUANTIZE_ROWS_WIDEST


def groups(rows: int, count: int) -> torch.Tensor:
    """END offsets of groups, one of them empty, that leave some rows to none of them."""
    ends = [rows * (g + 1) // (count + 1) for g in range(count)]
    return torch.tensor([ends[0], *ends[:-1]] if count > 1 else [rows], dtype=torch.int32, device="cuda")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is like NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_gemm(
    x: torch.Tensor, N: int, G: int = 1, out_dtype: torch.dtype = BF16, granularity: str = "auto", mx: bool = True, factors: bool = False
) -> None:
    weight = RebasedWeight(*quantize_weight(torch.randn(G, N, x.shape[1], device="cuda", dtype=BF16), None, "rceil", True, False))
    offs, made = groups(x.shape[0], G), quantize_rows(x, "rceil", granularity, mx)
    lora = tuple(torch.randn(*shape, 16, device="cuda", dtype=BF16) for shape in ((x.shape[0],), (G, N))) if factors else ()
    want = gemm.fp8_grouped_mm(RebasedRows(*made[2 * mx :]), weight, offs, out_dtype, "zero", *lora)
    got = rows_gemm.quantize_grouped_mm(x, *weight, offs, out_dtype, "rceil", granularity, mx, "zero", *lora)
    assert len(got) == 1 + 2 * mx
    for one, other in zip(got, (want, *made[: 2 * mx]), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert same_bits(one, other)


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_a_gemm_of_every_size_and_granularity(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for (rows, width, N), granularity in itertools.product(((1, 32, 32), (129, 576, 96), (257, 2048, 160), (31, WIDEST, 64)), MAX_SPREAD):
        x = far_apart(dtype, rows, width)[1][:, width:].cuda().contiguous()
        for mx in (True, False):
            check_gemm(x, N, 1, out_dtype, granularity, mx)


def check_mx_gemm(rows: int, K: int, N: int, G: int, padding_rows: str = "zero", mapped: bool = False, factors: bool = False) -> None:
    """MX rows, in order or through a map, and their rebased form."""
    weight = RebasedWeight(*quantize_weight(torch.randn(G, N, K, device="cuda", dtype=BF16), None, "rceil", True, False))
    mx, row_map = quantize(far_apart(BF16, rows, K)[1][:, K:].cuda(), "rceil"), None
    if mapped:
        row_map = torch.randint(-1, rows, (rows + 40,), device="cuda", dtype=torch.int32)
    count = rows if row_map is None else len(row_map)
    offs, lora = groups(count, G), ()
    if factors:
        lora = tuple(torch.randn(*shape, 16, device="cuda", dtype=BF16) for shape in ((count,), (G, N)))
    valid = count if padding_rows == "zero" else int(offs[-1])
    for granularity, out_dtype in itertools.product(MAX_SPREAD, (BF16,) if factors else (BF16, FLOAT32)):
        rebased = rebase_rows(*mx, MAX_SPREAD[granularity], row_map)
        want = gemm.fp8_grouped_mm(rebased, weight, offs, out_dtype, "zero", *lora)
        how = *weight, offs, out_dtype, padding_rows, *lora
        got = rows_gemm.rebase_grouped_mm(*mx, row_map, MAX_SPREAD[granularity], *how)
        assert same_bits(got[:valid], want[:valid])
        assert same_bits(rows_gemm.rebased_grouped_mm(*rebased[:3], *how)[:valid], want[:valid])
        far = tuple(part.t().contiguous().t() for part in mx)  # these have no plan
        assert same_bits(rows_gemm.rebase_grouped_mm(*far, row_map, MAX_SPREAD[granularity], *how)[:valid], want[:valid])


@pytest.mark.parametrize("padding_rows", ["zero", "skip"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_gemm_of_mx_rows(mapped: bool, padding_rows: str) -> None:
    for rows, K, N, G in ((1, 32, 32, 1), (129, 576, 96, 1), (257, 2048, 160, 4), (31, WIDEST + 32, 64, 2)):
        check_mx_gemm(rows, K, N, G, padding_rows, mapped)
    check_mx_gemm(300, 256, 128, 4, padding_rows, mapped, factors=True)


def test_a_gemm_of_groups_and_of_an_adapter() -> None:
    x = torch.randn(300, 256, device="cuda", dtype=BF16)
    check_gemm(x, 128, 4)
    check_gemm(x, 128, 1, factors=True)
    check_gemm(x, 128, 4, factors=True)


def test_a_gemm_of_other_layouts() -> None:
    x = torch.randn(67, 1032, device="cuda", dtype=BF16)
    check_gemm(x[:, :512], 64)  # rows far apart
    check_gemm(x[:, 1:513], 64)  # rows at any alignment
    check_gemm(x[:64, :64].t(), 64)  # transposed: copied
    check_gemm(x[:1, :96].expand(50, 96), 64)
    check_gemm(torch.randn(40, WIDEST + 32, device="cuda", dtype=BF16), 64)  # too wide for one kernel
    check_gemm(x[:0, :64], 64)


def test_a_gemm_refuses_what_does_not_fit() -> None:
    x, offs = torch.randn(8, 64, device="cuda", dtype=BF16), torch.tensor([8], dtype=torch.int32, device="cuda")
    weight = quantize_weight(torch.randn(1, 32, 64, device="cuda", dtype=BF16), None, "rceil", True, False)
    bad = (x[:, :32], offs), (x, torch.cat((offs, offs))), (x[None], offs), (x, offs.cpu())
    for arguments in ((rows, *weight, ends) for rows, ends in bad):
        with pytest.raises(ValueError, match="want"):
            rows_gemm.quantize_grouped_mm(*arguments, BF16, "rceil", "auto", False)
    for scale in (weight[1].double(), weight[1][:, :16], torch.ones(1, 32, 2, device="cuda"), weight[1].cpu()):
        with pytest.raises(ValueError, match=r"fp8_grouped_mm: .*want"):
            rows_gemm.quantize_grouped_mm(x, weight[0], scale, offs, BF16, "rceil", "auto", False)
        with pytest.raises(ValueError, match=r"fp8_grouped_mm: .*want"):
            rows_gemm.rebase_grouped_mm(*quantize(x, "rceil"), None, MAX_SPREAD["auto"], weight[0], scale, offs, BF16)
    with pytest.raises(ValueError, match="want"):
        rows_gemm.quantize_grouped_mm(x, *weight, offs, BF16, "rceil", "auto", False, "keep")


def check_wgrad(M: int, N: int, K: int, G: int, dtype: torch.dtype = BF16, maps: bool = False, **how: bool) -> None:
    g, a = (quantize(torch.randn(M, width, device="cuda", dtype=BF16), "rceil") for width in (N, K))
    offs, through = groups(M, G), (None, None)
    if maps:
        through = tuple(torch.randperm(M, device="cuda").int() - (torch.arange(M, device="cuda") % 5 == 0).int() * M for _ in range(2))
        through = tuple(row.clamp(min=-1) for row in through)
    want = gemm.fp8_wgrad(rebase_tokens(*g, *a, offs, *through), dtype)
    assert torch.equal(rows_wgrad.rows_wgrad(*g, *a, offs, dtype, *through, **how), want)
    into = torch.full_like(want, 3)
    expected = gemm.fp8_wgrad(rebase_tokens(*g, *a, offs, *through), dtype, into.clone(), empty="skip")
    assert rows_wgrad.rows_wgrad(*g, *a, offs, dtype, *through, into, **how) is into
    assert torch.equal(into, expected)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("maps", [False, True])
def test_a_wgrad_of_every_size(maps: bool, dtype: torch.dtype) -> None:
    for M, N, K, G in ((1, 32, 32, 1), (129, 96, 160, 1), (1000, 256, 576, 4), (257, 2048, 64, 3)):
        check_wgrad(M, N, K, G, dtype, maps)
        check_wgrad(M, N, K, G, dtype, maps, mostly_padding=True)


def test_a_wgrad_adds_to_a_main_gradient() -> None:
    g, a = (quantize(torch.randn(300, width, device="cuda", dtype=BF16), "rceil") for width in (96, 64))
    offs, into = groups(300, 3), torch.ones(3, 96, 64, device="cuda")
    want = 1 + gemm.fp8_wgrad(rebase_tokens(*g, *a, offs), FLOAT32)
    made = rows_wgrad.rows_wgrad(*g, *a, offs, FLOAT32, out=into, accumulate=True)
    torch.testing.assert_close(made, want, rtol=1e-6, atol=1e-5)


def test_a_wgrad_of_other_layouts() -> None:
    """Rows of any alignment are copied, scales may be strided."""
    qg, sg = quantize(torch.randn(130, 64, device="cuda", dtype=BF16), "rceil")
    qa, sa = quantize(torch.randn(130, 96, device="cuda", dtype=BF16), "rceil")
    offs, want = groups(130, 2), gemm.fp8_wgrad(rebase_tokens(qg, sg, qa, sa, groups(130, 2)), BF16)
    wide = torch.empty(130, 72, device="cuda", dtype=torch.uint8)
    wide[:, 1:65] = qg.view(torch.uint8)
    scales = torch.empty(130, 7, device="cuda", dtype=torch.uint8)
    scales[:, 1:4] = sa.view(torch.uint8)
    odd = wide[:, 1:65].view(torch.float8_e4m3fn), sg, qa, scales[:, 1:4].view(torch.float8_e8m0fnu)
    assert torch.equal(rows_wgrad.rows_wgrad(*odd, offs, BF16), want)
    assert torch.equal(rows_wgrad.rows_wgrad(qg, sg, qa, sa, offs.long(), BF16), want)
    none = rows_wgrad.rows_wgrad(qg[:0], sg[:0], qa[:0], sa[:0], offs * 0, BF16)
    assert torch.equal(none, torch.zeros_like(want))
