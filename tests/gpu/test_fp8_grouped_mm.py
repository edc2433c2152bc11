"""The FP8 tensor-core GEMMs against float64 of the exact MX operands: errors, granularities, ragged groups, poison, NaN, syncs, graphs.

And the bf16 wgrad where a block has several tiles, as in the test of the FP8 GEMMs before it.
"""

from __future__ import annotations

import random

import pytest
import torch
from tests.fp8_cases import float64, quantized, ragged
from tests.truth import relative_error

from mxep.ops.grouped_gemm.hopper import bf16_wgrad, gemm
from mxep.ops.grouped_gemm.hopper.gemm import fp8_grouped_mm, fp8_wgrad
from mxep.ops.grouped_gemm.hopper.rebase import rebase_rows, rebase_tokens, rebase_weight
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD

pytestmark = pytest.mark.gpu

BF16, FLOAT32 = torch.bfloat16, torch.float32
LIMIT = 2.0e-3  # of a bf16 result against the exact MX product; rounding to bf16 alone is 1.66e-3
LIMIT_FUZZ = 2.4e-3
LIMIT_FLOAT32 = 8e-4

MX = tuple[torch.Tensor, torch.Tensor]
SIZES = pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.large)])


def even(groups: int, rows: int) -> torch.Tensor:
    return (torch.arange(1, groups + 1, device="cuda") * (rows // groups)).int()


def normal(*shape: int, positive: bool = False) -> MX:
    x = torch.randn(*shape, device="cuda")
    return quantized(x.abs() if positive else x)


def forward(a: MX, b: MX, offs: torch.Tensor, out_dtype: torch.dtype = BF16, granularity: str = "auto") -> torch.Tensor:
    return fp8_grouped_mm(rebase_rows(*a, MAX_SPREAD[granularity]), rebase_weight(*b), offs, out_dtype)


def wgrad(g: MX, a: MX, offs: torch.Tensor, out_dtype: torch.dtype = BF16, **options: object) -> torch.Tensor:
    return fp8_wgrad(rebase_tokens(*g, *a, offs), out_dtype, **options)  # type: ignore[arg-type]


def worst_forward(out: torch.Tensor, a: MX, b: MX, ends: list[int]) -> float:
    """Largest error of a group; asserts the zero tail."""
    worst, start = 0.0, 0
    for group, end in enumerate(ends):
        if end > start:
            rows = float64(a[0][start:end], a[1][start:end])
            worst = max(worst, relative_error(out[start:end], rows @ float64(b[0][group], b[1][group]).t()))
        start = end
    assert not out[start:].view(torch.uint8).any(), "rows past the last end are zero"
    return worst


def worst_wgrad(out: torch.Tensor, g: MX, a: MX, ends: list[int]) -> float:
    worst, start = 0.0, 0
    for group, end in enumerate(ends):
        if end > start:
            truth = float64(g[0][start:end], g[1][start:end]).t() @ float64(a[0][start:end], a[1][start:end])
            worst = max(worst, relative_error(out[group], truth))
        else:
            assert not out[group].view(torch.uint8).any(), "an empty group is exactly zero"
        start = end
    return worst


@pytest.mark.large
@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("K", "N"), [(8192, 2048), (2048, 1408)])
@pytest.mark.usefixtures("poison")
def test_forward_error(K: int, N: int, positive: bool, granularity: str):
    a, b, offs = normal(4096, K, positive=positive), normal(8, N, K, positive=positive), even(8, 4096)
    assert worst_forward(forward(a, b, offs, granularity=granularity), a, b, offs.tolist()) <= LIMIT
    assert worst_forward(forward(a, b, offs, FLOAT32, granularity), a, b, offs.tolist()) <= LIMIT_FLOAT32


@SIZES
@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.usefixtures("poison")
def test_forward_fuzz(out_dtype: torch.dtype, large: bool):
    rng = random.Random(0)
    for case in range(24 if large else 8):
        M, N, G = (rng.randint(1, most) for most in ((3000, 30, 70) if large else (300, 9, 7)))
        N, K = 32 * N, rng.choice((32, 64, 160, 352, 1376, 2560) if large else (32, 160, 640))
        a, b, ends = normal(M, K), normal(G, N, K), ragged(G, M, seed=case)
        granularity = rng.choice(("auto", "row", "span"))
        out = forward(a, b, torch.tensor(ends, device="cuda"), out_dtype, granularity)
        error = worst_forward(out, a, b, ends)
        assert error <= LIMIT_FUZZ, f"M={M} K={K} N={N} G={G} {granularity}: {error:.2e}"


@SIZES
@pytest.mark.usefixtures("poison")
def test_adapters_are_added_before_the_result_is_rounded(large: bool):
    """Tall tiles, half tiles, few stages, wide rows, empty groups and rows past the last end, which have no adapter."""
    rng = random.Random(2)
    for case in range(40 if large else 8):
        M, G = (rng.choice(these) for these in (((1, 40, 700, 3000), (1, 3, 12, 70)) if large else ((1, 40, 300), (1, 3, 12))))
        N, K = 32 * rng.randint(1, 30 if large else 9), rng.choice((32, 64, 352, 640, 2560) if large else (32, 64, 640))
        a, b, ends = normal(M, K), normal(G, N, K), ragged(G, M, seed=case)
        if case % 4 == 0:
            a[1].view(torch.uint8)[::7, ::2] -= 20  # far exponents
        inner, lora_b = torch.randn(M, 16, device="cuda").bfloat16(), torch.randn(G, N, 16, device="cuda").bfloat16() * K**0.5
        offs, padding_rows = torch.tensor(ends, device="cuda"), rng.choice(("zero", "skip"))
        rows, weight = rebase_rows(*a, MAX_SPREAD[rng.choice(("auto", "row", "span"))]), rebase_weight(*b)
        out = fp8_grouped_mm(rows, weight, offs, BF16, padding_rows, inner, lora_b)
        without, start = fp8_grouped_mm(rows, weight, offs, FLOAT32, padding_rows), 0
        for group, end in enumerate(ends):
            want = without[start:end].double() + inner[start:end].double() @ lora_b[group].double().t()
            torch.testing.assert_close(out[start:end].double(), want, rtol=2**-8, atol=1e-4 * K**0.5)
            start = end
        if padding_rows == "zero":
            assert not out[start:].view(torch.uint8).any()


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.usefixtures("poison")
def test_a_block_multiplies_several_tiles(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Two blocks have all tiles: buffers in shared memory are filled again within a tile, for the next tile, and for the next group."""
    monkeypatch.setattr(gemm, "multiprocessors", lambda _: 2)
    ends = ragged(5, 900, seed=3)
    a, b, g, offs = normal(900, 640), normal(5, 288, 640), normal(900, 288), torch.tensor(ends, device="cuda")
    assert worst_forward(forward(a, b, offs, out_dtype), a, b, ends) <= LIMIT_FUZZ
    assert worst_wgrad(wgrad(g, a, offs, out_dtype), g, a, ends) <= LIMIT_FUZZ


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.usefixtures("poison")
def test_a_block_multiplies_several_tiles_in_bf16(out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """The result has the bits of the one by all blocks, each of which has one tile."""
    ends = ragged(5, 900, seed=3)
    grad, a = torch.randn(900, 272, device="cuda").to(BF16), torch.randn(900, 520, device="cuda").to(BF16)
    offs, out = torch.tensor(ends, device="cuda", dtype=torch.int32), torch.empty(2, 5, 272, 520, device="cuda", dtype=out_dtype)
    bf16_wgrad.bf16_wgrad(grad, a, offs, out[0])
    monkeypatch.setattr(bf16_wgrad, "multiprocessors", lambda _: 2)
    bf16_wgrad.bf16_wgrad(grad, a, offs, out[1])
    assert torch.equal(*out)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        truth = grad[start:end].double().t() @ a[start:end].double()
        assert relative_error(out[1, group], truth) <= LIMIT if end > start else not out[1, group].any()


def test_adapters_that_do_not_fit():
    a, b, offs = normal(64, 64), normal(2, 96, 64), even(2, 64)
    rows, weight = rebase_rows(*a, MAX_SPREAD["auto"]), rebase_weight(*b)
    inner, lora_b = torch.zeros(64, 16, device="cuda", dtype=BF16), torch.zeros(2, 96, 16, device="cuda", dtype=BF16)
    for wrong in ((inner[:, :8], lora_b[..., :8]), (inner, None), (inner.float(), lora_b), (inner[:32], lora_b), (inner, lora_b[:, :64])):
        with pytest.raises(ValueError, match=r"inner and lora_b are .* add it by add_group_lora"):
            fp8_grouped_mm(rows, weight, offs, BF16, "zero", *wrong)
    with pytest.raises(ValueError, match=r"results in torch\.float32"):
        fp8_grouped_mm(rows, weight, offs, FLOAT32, "zero", inner, lora_b)


@SIZES
@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
@pytest.mark.usefixtures("poison")
def test_wgrad_fuzz(out_dtype: torch.dtype, large: bool):
    rng = random.Random(1)
    for case in range(16 if large else 6):
        M, G = rng.randint(1, 3000 if large else 300), rng.choice((1, 3, 12, 70) if large else (1, 3, 12))
        N, K = rng.choice((32, 160, 416)), rng.choice((64, 352, 544))
        g, a, ends = normal(M, N), normal(M, K), ragged(G, M, seed=case)
        error = worst_wgrad(wgrad(g, a, torch.tensor(ends, device="cuda"), out_dtype), g, a, ends)
        assert error <= LIMIT_FUZZ, f"M={M} N={N} K={K} G={G}: {error:.2e}"


@pytest.mark.large
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.usefixtures("poison")
def test_wgrad_error(positive: bool):
    ends = [1000, 1000, 3001, 8192]
    g, a, offs = normal(8192, 1408, positive=positive), normal(8192, 2048, positive=positive), torch.tensor(ends, device="cuda")
    assert worst_wgrad(wgrad(g, a, offs), g, a, ends) <= LIMIT
    out = wgrad(g, a, offs, FLOAT32)
    assert worst_wgrad(out, g, a, ends) <= LIMIT_FLOAT32
    before = torch.randn_like(out)
    total = wgrad(g, a, offs, FLOAT32, out=before.clone(), accumulate=True)
    assert torch.equal(total, before + out)


@pytest.mark.large
def test_token_scales_that_oppose_each_other():
    scales = torch.exp(3 * torch.randn(4096, 1, device="cuda"))
    g, a = quantized(torch.randn(4096, 256, device="cuda") / scales * 1e-6), quantized(torch.randn(4096, 512, device="cuda") * scales)
    assert worst_wgrad(wgrad(g, a, even(4, 4096)), g, a, even(4, 4096).tolist()) <= LIMIT


@pytest.mark.large
def test_only_tiles_with_wide_rows_take_block_scales():
    """A few rows of far channels: one scale per row loses their small values, "auto" keeps them and leaves the other tiles' bytes alone."""
    x = torch.randn(1024, 2048, device="cuda")
    x[300:310, :128] *= 2.0**20
    x[300:310, 128:] *= 2.0**-4
    a, b, offs = quantized(x), quantized(torch.randn(2, 512, 2048, device="cuda")), torch.tensor([200, 1000], device="cuda")
    b[0].view(torch.uint8)[:, :, :128] = 0  # the far channels meet weights of zero
    outs = {granularity: forward(a, b, offs, granularity=granularity) for granularity in MAX_SPREAD}
    truth = float64(a[0][300:310], a[1][300:310]) @ float64(b[0][1], b[1][1]).t()
    errors = {granularity: relative_error(out[300:310], truth) for granularity, out in outs.items()}
    assert errors["auto"] <= LIMIT
    assert errors["span"] <= LIMIT
    assert errors["row"] > 0.5
    elsewhere = torch.ones(1024, dtype=torch.bool, device="cuda")
    elsewhere[200:328] = False  # the tile of rows 300 to 309, first of group 1
    assert torch.equal(outs["auto"][elsewhere], outs["row"][elsewhere])
    assert worst_forward(outs["auto"], a, b, offs.tolist()) <= LIMIT


@pytest.mark.large
def test_many_groups():
    ends = ragged(1200, 6000, seed=5)
    g, a, b, offs = normal(6000, 64), normal(6000, 160), normal(1200, 64, 160), torch.tensor(ends, device="cuda")
    assert worst_forward(forward(a, b, offs), a, b, ends) <= LIMIT_FUZZ
    assert worst_wgrad(wgrad(g, a, offs), g, a, ends) <= LIMIT_FUZZ


def test_nothing_to_do():
    a, b = normal(0, 64), normal(2, 32, 64)
    offs = torch.zeros(2, dtype=torch.int32, device="cuda")
    assert forward(a, b, offs).shape == (0, 32)
    assert not wgrad(normal(0, 32), a, offs).any()
    rows = normal(40, 64)
    assert not forward(rows, b, offs, FLOAT32).any()
    assert not wgrad(normal(40, 32), rows, offs, FLOAT32).any()


@pytest.mark.parametrize("granularity", MAX_SPREAD)
def test_nan_stays_in_its_row_and_in_its_columns(granularity: str):
    x = torch.randn(600, 256, device="cuda")
    x[7, 40], x[450] = torch.nan, torch.inf
    a, b, g = quantized(x), quantized(torch.randn(3, 96, 256, device="cuda")), normal(600, 96)
    b[1].view(torch.uint8)[0, 5, 2] = 0xFF
    b[0].view(torch.uint8)[0, 5, 64:96] = 0x7F
    offs = torch.tensor([100, 100, 500], device="cuda")
    out = forward(a, b, offs, granularity=granularity)
    nan = torch.zeros(600, 96, dtype=torch.bool, device="cuda")
    nan[7], nan[450], nan[:100, 5] = True, True, True
    assert torch.equal(out.isnan(), nan)
    dw = wgrad(g, a, offs)
    nan = torch.zeros(3, 96, 256, dtype=torch.bool, device="cuda")
    nan[0, :, 32:64], nan[2] = True, True
    assert torch.equal(dw.isnan(), nan)


def test_poison_past_the_last_end_is_not_read():
    a, b, g = normal(500, 160), normal(2, 64, 160), normal(500, 64)
    offs = torch.tensor([100, 300], device="cuda")
    want = forward(a, b, offs), wgrad(g, a, offs)
    for qdata, scale in (a, g):
        qdata.view(torch.uint8)[300:], scale.view(torch.uint8)[300:] = 0x7F, 0xFF
    got = forward(a, b, offs), wgrad(g, a, offs)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.large
def test_repeats_are_bit_equal():
    a, b, g = normal(5000, 1376), normal(9, 416, 1376), normal(5000, 416)
    offs = torch.tensor(ragged(9, 5000, seed=2), device="cuda")
    first = forward(a, b, offs), wgrad(g, a, offs)
    for _ in range(5):
        assert torch.equal(forward(a, b, offs), first[0])
        assert torch.equal(wgrad(g, a, offs), first[1])


def test_no_host_sync():
    a, b, g, offs = normal(256, 64), normal(2, 32, 64), normal(256, 32), even(2, 256)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(a, b, offs)
        wgrad(g, a, offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph_and_replayed_with_other_ends():
    a, b, g = normal(1000, 352), normal(4, 96, 352), normal(1000, 96)
    offs = torch.tensor([200, 300, 700, 1000], dtype=torch.int32, device="cuda")
    forward(a, b, offs), wgrad(g, a, offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dw = forward(a, b, offs), wgrad(g, a, offs)
    for ends in ([200, 300, 700, 1000], [0, 513, 514, 900]):
        offs.copy_(torch.tensor(ends))
        graph.replay()
        assert worst_forward(out, a, b, ends) <= LIMIT_FUZZ
        assert worst_wgrad(dw, g, a, ends) <= LIMIT_FUZZ


@pytest.mark.large
def test_past_two_to_the_31_elements():
    M, K, N = 280_000, 8192, 8192
    piece = normal(1000, K)
    a = piece[0].repeat(280, 1), piece[1].repeat(280, 1)
    b, offs = normal(1, N, K), torch.tensor([M], device="cuda")
    out = forward(a, b, offs)
    truth = float64(piece[0][-500:], piece[1][-500:]) @ float64(b[0][0], b[1][0]).t()
    assert relative_error(out[-500:], truth) <= LIMIT
    tokens = rebase_tokens(*a, *a, offs)
    assert torch.equal(tokens.a[:, 279_000:280_000].view(torch.uint8), tokens.a[:, :1000].view(torch.uint8))
