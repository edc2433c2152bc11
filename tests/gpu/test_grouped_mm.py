"""Grouped GEMMs on a GPU against float64 truth: every dtype pair, ragged and empty groups, NaN in its row and group only, no host sync."""

from __future__ import annotations

import pytest
import torch
from tests.truth import relative_error

from mxep import reference
from mxep.ops.grouped_gemm.hopper.bf16_wgrad import bf16_wgrad_takes

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BF16, FLOAT32 = torch.bfloat16, torch.float32
TAIL = 40  # rows past the last end, full of NaN
ENDS = {
    "ragged": [0, 5, 5, 133, 260, 260],
    "aligned": [32, 64, 96, 256],
    "one": [129],
    "empty": [0, 0, 0],
    "skewed": [0, 1, 1000, 1000, 1001],
    "many": torch.randint(0, 40, (70,), generator=torch.Generator().manual_seed(0)).cumsum(0).tolist(),
}
DTYPES = [(BF16, BF16, BF16), (BF16, BF16, FLOAT32), (FLOAT32, FLOAT32, FLOAT32), (FLOAT32, BF16, FLOAT32), (BF16, FLOAT32, BF16)]
# relative error of a float32 sum; bf16 out is compared with truth rounded once to bf16
FLOAT32_ERROR = 5e-6


def groups(ends: list[int]) -> list[tuple[int, slice]]:
    return [(g, slice(start, end)) for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def assert_close_to(got: torch.Tensor, truth: torch.Tensor) -> None:
    assert not got.isnan().any()
    allowed = 1.02 * relative_error(truth.to(BF16), truth) if got.dtype == BF16 else FLOAT32_ERROR
    assert relative_error(got, truth) <= allowed


def forward_truth(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for g, rows in groups(ends):
        out[rows] = a[rows].double() @ b[g].double().t()
    return out


def wgrad_truth(grad: torch.Tensor, a: torch.Tensor, ends: list[int]) -> torch.Tensor:
    return torch.stack([grad[rows].double().t() @ a[rows].double() for _, rows in groups(ends)])


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d))
# torch's GEMM does not take the last sizes
@pytest.mark.parametrize(("K", "N"), [(64, 96), pytest.param(1408, 256, marks=pytest.mark.large), (36, 20)])
def test_hp(ends: list[int], dtypes: tuple, K: int, N: int, no_sync):
    a_dtype, b_dtype, out_dtype = dtypes
    M = ends[-1] + TAIL
    a, b = torch.randn(M, K, device="cuda").to(a_dtype), torch.randn(len(ends), N, K, device="cuda").to(b_dtype)
    grad = torch.randn(M, N, device="cuda").to(b_dtype)
    a[ends[-1] :], grad[ends[-1] :] = torch.nan, torch.nan
    offs = torch.tensor(ends, device="cuda")
    with no_sync():
        out = kernels.grouped_mm_hp(a, b, offs.int(), out_dtype)
        strided = kernels.grouped_mm_hp(a, b.transpose(-2, -1).contiguous().transpose(-2, -1), offs, out_dtype)
        dw = kernels.grouped_wgrad_hp(grad, a, offs, out_dtype)
        dw_strided = kernels.grouped_wgrad_hp(grad.t().contiguous().t(), a, offs.int(), out_dtype)
    truth, dw_truth = forward_truth(a, b, ends), wgrad_truth(grad, a, ends)
    for got in (out, strided):
        assert got.dtype == out_dtype
        assert (got[ends[-1] :] == 0).all()
        assert_close_to(got, truth)
    for got in (dw, dw_strided):
        assert got.dtype == out_dtype
        assert_close_to(got, dw_truth)
        for g, rows in groups(ends):
            assert rows.stop > rows.start or (got[g] == 0).all(), f"group {g} is empty"


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(t).removeprefix("torch.") for t in d))
def test_nan_stays_in_its_row_and_group(dtypes: tuple):
    a_dtype, b_dtype, out_dtype = dtypes
    ends = [37, 37, 101, 160, 200]
    a, b = torch.randn(230, 128, device="cuda").to(a_dtype), torch.randn(5, 256, 128, device="cuda").to(b_dtype)
    grad = torch.randn(230, 256, device="cuda").to(b_dtype)
    clean = a.clone()
    a[37, 3], a[100, 7], grad[160, 11] = torch.nan, torch.inf, torch.nan  # first and last row of group 2, first of group 4
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    out = kernels.grouped_mm_hp(a, b, offs, out_dtype)
    bad = ~out.isfinite().all(1)
    assert bad.nonzero().flatten().tolist() == [37, 100]
    want = kernels.grouped_mm_hp(clean, b, offs, out_dtype)
    assert torch.equal(out[~bad], want[~bad])
    dw = kernels.grouped_wgrad_hp(grad, a, offs, out_dtype)
    assert [g for g in range(5) if not dw[g].isfinite().all()] == [2, 4]


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("N", "K"), [(96, 64), (128, 256), (144, 384), (400, 200), (384, 520)])  # wide and tall tiles, parts of tiles
def test_wgrad_of_bf16(N: int, K: int, ends: list[int], no_sync):
    """hopper/bf16_wgrad.cu: rounded from float32, written into a gradient or added to one, with the tokens of no other group."""
    M, offs = ends[-1] + TAIL, torch.tensor(ends, device="cuda", dtype=torch.int32)
    grad, a = torch.randn(M, 2 * N, device="cuda").bfloat16()[:, N:], torch.randn(M, K, device="cuda").bfloat16()
    grad[ends[-1] :], a[ends[-1] :] = torch.nan, torch.nan
    if not bf16_wgrad_takes(grad, a, len(ends), BF16, None):
        pytest.skip("this GPU takes another kernel, whose bf16 and float32 results may be sums in different order")
    with no_sync():
        full = kernels.grouped_wgrad_hp(grad, a, offs, FLOAT32)
        rounded = kernels.grouped_wgrad_hp(grad, a, offs, BF16)
    assert_close_to(full, wgrad_truth(grad, a, ends))
    assert torch.equal(rounded, full.to(BF16))
    filled = torch.diff(offs, prepend=offs.new_zeros(1)) > 0
    for dtype in (BF16, FLOAT32):
        into = torch.full_like(full, 7, dtype=dtype)
        assert kernels.grouped_wgrad_hp(grad, a, offs, dtype, into) is into
        assert torch.equal(into, torch.where(filled[:, None, None], full.to(dtype), 7))
    into = torch.randn_like(full)
    want = into + full
    kernels.grouped_wgrad_hp(grad, a, offs, FLOAT32, into, True)
    assert torch.equal(into, want)


def test_nothing_to_multiply():
    b, offs = torch.randn(3, 64, 96, device="cuda").bfloat16(), torch.zeros(3, dtype=torch.int32, device="cuda")
    for dtype in (BF16, FLOAT32):
        none = torch.zeros(0, 96, device="cuda", dtype=dtype)
        assert kernels.grouped_mm_hp(none, b, offs, dtype).shape == (0, 64)
        dw = kernels.grouped_wgrad_hp(torch.zeros(0, 64, device="cuda", dtype=dtype), none, offs, dtype)
        assert dw.shape == (3, 64, 96)
        assert (dw == 0).all()


def test_expanded_gradient():
    ends = [33, 100]
    a = torch.randn(100, 64, device="cuda").bfloat16()
    grad = torch.ones((), device="cuda", dtype=BF16).expand(100, 96)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    for out_dtype in (BF16, FLOAT32):
        assert_close_to(kernels.grouped_wgrad_hp(grad, a, offs, out_dtype), wgrad_truth(grad, a, ends))
        b = torch.randn(2, 32, 96, device="cuda").bfloat16()
        assert_close_to(kernels.grouped_mm_hp(grad, b, offs, out_dtype), forward_truth(grad, b, ends))


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("ends", [ENDS["ragged"], ENDS["aligned"], ENDS["many"]], ids=["ragged", "aligned", "many"])
def test_mx_exact(ends: list[int], out_dtype: torch.dtype, no_sync):
    M, K, N = ends[-1] + TAIL, 416, 160
    qa = reference.quantize(torch.randn(M, K) * torch.exp(2 * torch.randn(M, 1)), "rceil")
    qb = reference.quantize(torch.randn(len(ends), N, K), "rceil")
    operands = [t.cuda() for t in (*qa, *qb)]
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    with no_sync():
        out = kernels.grouped_mm_mx(*operands, offs, out_dtype, "exact")
    a, b = (reference.dequantize(*q, FLOAT32).cuda() for q in (qa, qb))
    assert_close_to(out, forward_truth(a, b, ends))
    assert (out[ends[-1] :] == 0).all()


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
def test_wgrad_mx_exact(out_dtype: torch.dtype, no_sync):
    ends, M, N, K = [0, 64, 64, 224, 256], 288, 96, 160
    qg, qa = reference.quantize_columnwise(torch.randn(M, N), "rceil"), reference.quantize_columnwise(torch.randn(M, K), "rceil")
    operands = [t.cuda() for t in (*qg, *qa)]
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    with no_sync():
        dw = kernels.grouped_wgrad_mx_columnwise(*operands, offs, out_dtype, "exact")
    grad, a = (reference.dequantize(*q, FLOAT32).t().cuda() for q in (qg, qa))
    assert_close_to(dw, wgrad_truth(grad, a, ends))
    assert (dw[0] == 0).all()
    assert (dw[2] == 0).all()


def test_a_path_that_this_gpu_lacks_is_refused():
    if torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("this GPU has every path")
    q = reference.quantize(torch.randn(32, 64), "rceil")
    operands = [t.cuda() for t in (*q, q[0][None], q[1][None])]
    offs = torch.tensor([32], device="cuda", dtype=torch.int32)
    for path in ("blackwell", "reference", "fastest"):
        with pytest.raises(ValueError, match="gemm_path"):
            kernels.grouped_mm_mx(*operands, offs, BF16, path)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize(("R", "K", "N"), [pytest.param(16, 2048, 1536, marks=pytest.mark.large), (8, 96, 40), (24, 136, 72)])
def test_add_group_lora(ends: list[int], dtype: torch.dtype, R: int, K: int, N: int, no_sync):
    M, G = ends[-1] + TAIL, len(ends)
    few = torch.randn(50, K, device="cuda").to(dtype)
    row_map = torch.randint(-1, 50, (M,), device="cuda", dtype=torch.int32)
    rows = torch.where((row_map >= 0)[:, None], few[row_map.clamp(min=0)], 0)
    a, b = (torch.randn(G, *shape, device="cuda").div(shape[-1] ** 0.5).to(dtype) for shape in ((R, K), (N, R)))
    offs, before = torch.tensor(ends, device="cuda", dtype=torch.int32), torch.randn(M, N, device="cuda").to(dtype)
    truth = forward_truth(rows, a, ends)
    for x, index in ((few, row_map), (rows, None)):
        for factors in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
            out = before.clone()
            with no_sync():
                inner = kernels.add_group_lora(out, x, *factors, offs, index)
            assert_close_to(inner, truth)
            assert_close_to(out[: ends[-1]], before[: ends[-1]].double() + forward_truth(inner, b, ends)[: ends[-1]])
            assert torch.equal(out[ends[-1] :], before[ends[-1] :])


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
# rows of 64 are gathered first
@pytest.mark.parametrize(("K", "N"), [(8, 2048), (16, 2048), (64, 160), pytest.param(64, 2048, marks=pytest.mark.large)])
def test_wgrad_through_a_map(ends: list[int], dtype: torch.dtype, K: int, N: int, no_sync):
    M = ends[-1] + TAIL
    few, a = torch.randn(50, N, device="cuda").to(dtype), torch.randn(M, K, device="cuda").to(dtype)
    a[ends[-1] :] = torch.nan
    row_map = torch.randint(-1, 50, (M,), device="cuda", dtype=torch.int32)
    rows = torch.where((row_map >= 0)[:, None], few[row_map.clamp(min=0)], 0)
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    with no_sync():
        got = kernels.grouped_wgrad_hp(few, a, offs, dtype, grad_map=row_map)
    assert_close_to(got, wgrad_truth(rows, a, ends))
