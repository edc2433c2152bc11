"""The definition of rebased operands: exact within the range of e4m3, special blocks, block scales, wide rows, moved token exponents."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch
from tests.fp8_cases import E4M3, E8M0, float64, mx_bytes, quantized, ragged
from tests.mx_cases import packed_views
from tests.truth import raises_naming, relative_error

from mxep.ops.grouped_gemm import reference as fp8_reference
from mxep.ops.grouped_gemm.hopper import gemm as fp8_kernels
from mxep.ops.grouped_gemm.hopper import quantize_rows as rows_kernel
from mxep.ops.grouped_gemm.hopper import quantize_weight as weight_kernel
from mxep.ops.grouped_gemm.hopper import rebase as rebase_kernels
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD
from mxep.ops.quantize.reference import dequantize, quantize, quantize_columnwise
from mxep.recipe import SCALING_MODES
from mxep.reference import grouped_mm_mx


def mx_weight(G: int, R: int, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    qdata, scale = mx_bytes(G * R, C, seed=R)
    return qdata.view(G, R, C), scale.view(G, R, C // 32)


def bytes_of(qdata: torch.Tensor) -> torch.Tensor:
    return qdata.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", ["rebase_rows", "rebase_weight", "rebase_tokens"])
def test_the_rebase_kernels_have_the_references_signatures(name: str):
    assert inspect.signature(getattr(rebase_kernels, name)) == inspect.signature(getattr(reference, name))


@pytest.mark.parametrize("module", [weight_kernel, rows_kernel])
def test_the_quantising_kernels_have_the_references_signatures(module: ModuleType):
    name = module.__name__.rpartition(".")[2]
    assert inspect.signature(getattr(module, name)) == inspect.signature(getattr(reference, name))


@pytest.mark.parametrize("granularity", MAX_SPREAD)
def test_rows_by_one_kernel_have_the_bytes_of_two(granularity: str):
    x = torch.randn(40, 416) * torch.exp2(torch.randint(-12, 12, (40, 13)).float()).repeat_interleave(32, 1)
    mx = quantize(x, "rceil")
    want = [*mx, *(part for part in reference.rebase_rows(*mx, MAX_SPREAD[granularity])[:3] if part is not None)]
    both, alone = (reference.quantize_rows(x, "rceil", granularity, with_mx) for with_mx in (True, False))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(both, want, strict=True))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(alone, want[2:], strict=True))


def test_rows_that_do_not_fit_are_refused():
    x = torch.randn(4, 64)
    for arguments, message in (
        ((x[:, :48], "rceil", "auto", True), "not a multiple of 32"),
        ((x[None], "rceil", "auto", True), r"\(1, 4, 64\), want \(T, D\)"),
        ((x, "rceil", "column", True), "granularity='column', want one of auto, row, span"),
        ((x, "up", "auto", True), "scaling_mode='up'"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.quantize_rows(*arguments)


def test_a_weights_forms_are_those_of_its_mx_bytes():
    first, second = torch.randn(3, 64, 96), torch.randn(3, 32, 96)
    joined = torch.cat((first, second), 1).bfloat16().float()
    rows, columns = reference.rebase_weight(*quantize(joined, "rceil")), reference.rebase_weight(*quantize_columnwise(joined, "rceil"))
    for forms, want in (((True, True), (*rows, *columns)), ((True, False), rows), ((False, True), columns)):
        got = reference.quantize_weight(first, second, "rceil", *forms, True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("mode", SCALING_MODES)
def test_an_mx_weight_has_the_forms_of_its_values(mode: str):
    (first, scale), (second, second_scale) = mx_weight(3, 64, 96), mx_weight(3, 32, 96)
    values = [dequantize(*part, torch.bfloat16) for part in ((first, scale), (second, second_scale))]
    for forms in ((True, True), (True, False), (False, True)):
        got = reference.quantize_weight(first, second, mode, *forms, False, scale, second_scale)
        want = reference.quantize_weight(*values, mode, *forms)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    alone = reference.quantize_weight(first, None, mode, False, True, scale=scale)
    assert torch.equal(alone[1], reference.quantize_weight(values[0], None, mode, False, True)[1])


def test_a_weight_that_does_not_fit_is_refused():
    x = torch.randn(2, 64, 96)
    for arguments, message in (
        ((x, None, "rceil", False, False), "at least one form"),
        ((x, x[:, :, :32], "rceil", True, True), r"\(2, 64, 96\) torch.float32 and \(2, 64, 32\)"),
        ((x, x.bfloat16(), "rceil", True, True), "of the same dtype"),
        ((x[:, :48], None, "rceil", True, True), "not a multiple of 32"),
        ((x, None, "up", True, True), "scaling_mode='up'"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.quantize_weight(*arguments)


@pytest.mark.parametrize("implementation", [reference, weight_kernel], ids=["reference", "launcher"])
def test_an_mx_weight_without_its_scale_is_refused(implementation: ModuleType):
    x, (qdata, scale), (other, other_scale) = torch.randn(2, 64, 96), mx_weight(2, 64, 96), mx_weight(2, 32, 96)
    for arguments, got, want, do in (
        ((qdata, None), "scale=None of a weight (2, 64, 96) torch.float8_e4m3fn", "(2, 64, 3) float8_e8m0fnu on cpu", "same MX weight"),
        ((qdata, None, scale[:, :, :2]), "scale=(2, 64, 2) torch.float8_e8m0fnu", "(2, 64, 3) float8_e8m0fnu", "same MX weight"),
        ((qdata, None, scale.view(torch.uint8)), "scale=(2, 64, 3) torch.uint8", "(2, 64, 3) float8_e8m0fnu", "same MX weight"),
        ((qdata, None, scale.to("meta")), "torch.float8_e8m0fnu on meta", "(2, 64, 3) float8_e8m0fnu on cpu", "same MX weight"),
        ((x, None, scale), "scale=(2, 64, 3)", "None", "leave it out"),
        ((qdata, other, scale), "second_scale=None of a weight (2, 32, 96)", "(2, 32, 3)", "same MX weight"),
        ((qdata, other, scale, scale), "second_scale=(2, 64, 3)", "(2, 32, 3)", "same MX weight"),
        ((qdata, None, scale, other_scale), "second=None with second_scale (2, 32, 3)", "both or neither", "pass second too"),
    ):
        first, second, *scales = arguments
        with raises_naming("quantize_weight: ", got, f"want {want}", do):
            implementation.quantize_weight(first, second, "rceil", False, True, False, *scales)
    for first, own, message in ((qdata[:, :48], scale[:, :48], "dimension -2"), (qdata[..., :80], scale[..., :2], "dimension -1")):
        with pytest.raises(ValueError, match=f"{message}.*not a multiple of 32"):
            implementation.quantize_weight(first, None, "rceil", False, True, False, own)


@pytest.mark.parametrize("name", ["fp8_grouped_mm", "fp8_wgrad"])
def test_the_gemms_have_the_references_signatures(name: str):
    assert inspect.signature(getattr(fp8_kernels, name)) == inspect.signature(getattr(fp8_reference, name))


@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("width", [32, 96, 128, 1408])
def test_plain_rows_keep_their_numbers(granularity: str, width: int):
    qdata, scale = quantized(torch.randn(64, width, generator=torch.Generator().manual_seed(width)))
    rows = reference.rebase_rows(qdata, scale, MAX_SPREAD[granularity])
    assert rows.data.dtype == E4M3
    assert (rows.block_scale is None) == (granularity == "row")
    changed = reference.changed_values(qdata, scale, rows)
    assert changed <= 64 * width * 1e-3
    error = (reference.dequantize_rows(rows).double() - float64(qdata, scale)).abs().max()
    assert error <= 2.0**-9 * float64(qdata, scale).abs().max() / 2  # half of e4m3's last subnormal bit, at the row's exponent


def test_a_rows_exponent_is_the_largest_without_special_blocks():
    data = torch.full((4, 128), 1.0).to(E4M3).view(torch.uint8)
    scale = torch.tensor([[120, 124, 0, 122], [255, 121, 250, 120], [0, 0, 0, 0], [255, 255, 255, 255]], dtype=torch.uint8)
    data[0, 64:96] = 0  # all zero, scale byte 0
    data[1, :32] = 0x7F  # NaN block
    data[1, 64:96] = 0x80  # all -0, yet a large scale: does not count
    data[3] = 0x7F
    rows = reference.rebase_rows(data.view(E4M3), scale.view(E8M0), MAX_SPREAD["row"])
    assert rows.scale.tolist() == [2.0**-3, 2.0**-6, 2.0**-127, 2.0**-127]
    assert rows.spread.tolist() == [4, 1, 0, 0]
    values = rows.data.float()
    assert values[0, ::32].tolist() == [2.0**-4, 1.0, 0.0, 2.0**-2]
    assert values[1, :32].isnan().all()
    assert values[1, 32::32].tolist() == [1.0, 0.0, 0.5]
    assert values[2].tolist() == [1.0] * 128  # nothing above 2^-127: the data stands as it is
    assert bytes_of(rows.data)[3].tolist() == [0x7F] * 128


def test_wide_rows_get_spans():
    scale = torch.tensor([[127, 120] + [127] * 4, [127, 118] + [100] * 4], dtype=torch.uint8).view(E8M0)
    data = torch.full((2, 192), 2.0).to(E4M3)
    rows = reference.rebase_rows(data, scale, MAX_SPREAD["auto"])
    assert rows.spread.tolist() == [7, 27]
    assert rows.scale.tolist() == [1.0, -(2.0**-27)]
    assert rows.block_scale is not None
    assert rows.block_scale[:, 1].tolist() == [2.0**27, 1.0]
    assert reference.changed_values(data, scale, rows) == 64  # two blocks next to the 1 of their own 128 columns; the second 128 is exact
    assert reference.changed_values(data, scale, reference.rebase_rows(data, scale, MAX_SPREAD["row"])) == 128  # 2^-27 is lost next to 1


@pytest.mark.parametrize(
    ("tops", "base", "beside"),
    [
        ([120, 118, 119, 145], 120, [0, 0, 0, 25]),  # an outlier: the others share the largest of theirs
        ([120, 128, 119, 129], 129, [-9, 0, -10, 0]),  # 8 is near, 9 and more is not
        ([100, 121, 120, 122], 122, [-22, 0, 0, 0]),  # one that is next to nothing
        ([100, 101, 140, 141], 141, [-41, -40, 0, 0]),  # as many here as there: the larger ones
        ([100, 130, 170, 150], 127, [-27, 3, 43, 23]),  # too far apart for a base of their own
    ],
)
def test_spans_of_near_exponents_share_the_rows_scale(tops: list[int], base: int, beside: list[int]):
    scale = torch.tensor(tops, dtype=torch.uint8).repeat_interleave(4)[None].view(E8M0)
    data = torch.full((1, 512), 448.0).to(E4M3)
    rows = reference.rebase_rows(data, scale, MAX_SPREAD["auto"])
    assert rows.block_scale is not None
    assert rows.scale.tolist() == [-(2.0 ** (base - 127))]
    assert rows.block_scale[:, 0].log2().tolist() == beside
    assert reference.changed_values(data, scale, rows) == 0


@pytest.mark.parametrize("spread", [3, 12, 30, 70])
def test_no_block_of_a_wide_row_moves_further_than_its_span_or_eight(spread: int):
    generator = torch.Generator().manual_seed(spread)
    scale = torch.randint(100, 101 + spread, (200, 40), dtype=torch.uint8, generator=generator)
    scale[:, 4:] = scale[:, 4::4].repeat_interleave(4, 1)  # block scales of one exponent each, but the first
    data = torch.full((200, 1280), 448.0).to(E4M3)
    rows = reference.rebase_rows(data, scale.view(E8M0), MAX_SPREAD["span"])
    moved = 448 / rows.data.float()[:, ::32]
    assert moved[:, 4:].max() <= 2**8
    assert (moved[:, :4].amin(1) <= 2**8).all()
    exact = moved <= 2**8
    assert torch.equal(reference.dequantize_rows(rows)[:, ::32][exact], float64(data, scale.view(E8M0)).float()[:, ::32][exact])


def test_far_channels_that_meet_weights_of_zero():
    """The hardest rows known: no large product hides the loss of the small channels."""
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(256, 2048, generator=generator), torch.randn(1, 128, 2048, generator=generator)
    x[:, 100::400] *= 30000
    w[:, :, 100::400] = 0
    a, b = quantized(x), quantized(w)
    truth = x.double() @ w[0].double().t()
    exact = float64(*a) @ float64(b[0][0], b[1][0]).t()
    error = {}
    for granularity in ("auto", "row"):
        rows = reference.rebase_rows(*a, MAX_SPREAD[granularity])
        product = reference.dequantize_rows(rows).double() @ float64(b[0][0], b[1][0]).t()
        error[granularity] = (product - truth).norm() / (exact - truth).norm()
    assert error["auto"] <= 1.4
    assert error["row"] >= 2


def test_row_map_and_strided_records():
    qdata, scale = mx_bytes(50, 160)
    row_map = torch.tensor([3, -1, 0, 49, 3], dtype=torch.int32)
    plain = reference.rebase_rows(qdata, scale, 8)
    for operands in ((qdata, scale), packed_views(qdata, scale)):
        mapped = reference.rebase_rows(*operands, 8, row_map)
        for p, source in enumerate(row_map.tolist()):
            if source < 0:
                assert not bytes_of(mapped.data)[p].any()
                assert mapped.scale[p] == 2.0**-127
            else:
                assert torch.equal(bytes_of(mapped.data)[p], bytes_of(plain.data)[source])
                assert mapped.scale[p] == plain.scale[source]


@pytest.mark.parametrize("granularity", MAX_SPREAD)
def test_the_grouped_gemm_takes_rebased_rows(granularity: str):
    (qa, sa), (qb, sb), offs = mx_bytes(70, 160, seed=3, wild=False), quantized(torch.randn(2, 32, 160)), torch.tensor([33, 64])
    rows = reference.rebase_rows(qa, sa, MAX_SPREAD[granularity])
    got = grouped_mm_mx(*rows[:2], qb, sb, offs, torch.float32, "reference", block_scale=rows.block_scale)
    exact = grouped_mm_mx(qa, sa, qb, sb, offs, torch.float32, "reference")
    assert relative_error(got, exact.double()) < 1e-4
    with raises_naming("row_map (70,)", "rebased rows", "want None"):
        grouped_mm_mx(*rows[:2], qb, sb, offs, torch.float32, "reference", torch.arange(70).int())
    with raises_naming("block_scale (2, 70)", "MX rows", "want None"):
        grouped_mm_mx(qa, sa, qb, sb, offs, torch.float32, "reference", block_scale=torch.ones(2, 70))
    with raises_naming("block scales (1, 70)", "want (70,) and (2, 70)"):
        grouped_mm_mx(*rows[:2], qb, sb, offs, torch.float32, "reference", block_scale=torch.ones(1, 70))


@pytest.mark.parametrize("granularity", MAX_SPREAD)
def test_the_product_is_the_mx_product(granularity: str):
    generator = torch.Generator().manual_seed(1)
    offs = torch.tensor(ragged(5, 150, 3), dtype=torch.int32)
    qa, sa = quantized(torch.randn(150, 96, generator=generator))
    qb, sb = quantized(torch.randn(5, 64, 96, generator=generator))
    out = fp8_reference.fp8_grouped_mm(
        reference.rebase_rows(qa, sa, MAX_SPREAD[granularity]), reference.rebase_weight(qb, sb), offs, torch.float32
    )
    truth = grouped_mm_mx(qa, sa, qb, sb, offs, torch.float32, "reference")
    assert relative_error(out, truth.double()) < 1e-5
    assert not out[offs[-1] :].any()


@pytest.mark.parametrize(("N", "K"), [(32, 96), (160, 64)])
def test_tokens_are_transposed_and_padded(N: int, K: int):
    generator = torch.Generator().manual_seed(2)
    ends = [0, 1, 1, 130, 258, 300]
    offs = torch.tensor(ends, dtype=torch.int32)
    token_scale = torch.exp(3 * torch.randn(310, 1, generator=generator))
    qg, sg = quantized(torch.randn(310, N, generator=generator) / token_scale)  # anticorrelated
    qa, sa = quantized(torch.randn(310, K, generator=generator) * token_scale)
    tokens = reference.rebase_tokens(qg, sg, qa, sa, offs)
    assert tokens.ends.tolist() == [0, 128, 128, 384, 512, 640]
    assert tokens.order.tolist() == [3, 4, 5, 1, 0, 2]
    assert tokens.grad.shape == (N, 128 * (310 // 128 + 6))
    out = fp8_reference.fp8_wgrad(tokens, torch.float32)
    start = 0
    for group, end in enumerate(ends):
        truth = float64(qg, sg)[start:end].t() @ float64(qa, sa)[start:end]
        if end == start:
            assert not out[group].any()
        else:
            assert relative_error(out[group], truth) < 2e-3, group
        start = end


@pytest.mark.parametrize("far", ["grad", "a"])
def test_the_operand_with_the_larger_spread_gives_its_exponents(far: str):
    generator = torch.Generator().manual_seed(7)
    grad, x = torch.randn(2048, 128, generator=generator), torch.randn(2048, 96, generator=generator)
    for name, rows in (("grad", grad), ("a", x)):
        if far == name:
            rows[:, ::40] *= 3000
    (qg, sg), (qa, sa), offs = quantized(grad), quantized(x), torch.tensor([2048], dtype=torch.int32)
    out = fp8_reference.fp8_wgrad(reference.rebase_tokens(qg, sg, qa, sa, offs), torch.float32)[0]
    truth = grad.double().t() @ x.double()
    wrong, least = out.double() - truth, float64(qg, sg).t() @ float64(qa, sa) - truth
    assert wrong.norm() <= 1.02 * least.norm()
    for dim in (0, 1):
        assert (wrong.norm(dim=dim) / truth.norm(dim=dim)).max() <= 1.1 * (least.norm(dim=dim) / truth.norm(dim=dim)).max()


def test_changed_token_values():
    data = torch.full((3, 32), 1.0).to(E4M3)
    a = data, torch.tensor([[127], [120], [127]], dtype=torch.uint8).view(E8M0)
    g = data, torch.tensor([[127], [127], [100]], dtype=torch.uint8).view(E8M0)
    for ends, changed in (([3], 32), ([2, 3], 0), ([2], 0)):  # token 2 is 2^-27 of token 0, but alone in a group it is exact
        offs = torch.tensor(ends, dtype=torch.int32)
        assert reference.changed_token_values(*g, *a, offs, reference.rebase_tokens(*g, *a, offs)) == changed
    generator = torch.Generator().manual_seed(4)
    (qg, sg), (qa, sa) = (quantized(torch.randn(300, width, generator=generator)) for width in (64, 96))
    offs = torch.tensor([100, 100, 280], dtype=torch.int32)
    assert reference.changed_token_values(qg, sg, qa, sa, offs, reference.rebase_tokens(qg, sg, qa, sa, offs)) <= 280 * 160 * 1e-3


def test_tokens_can_be_gathered_by_the_same_kernel():
    (qg, sg), (qa, sa), offs = mx_bytes(60, 64, seed=1), mx_bytes(40, 96, seed=2), torch.tensor([20, 60], dtype=torch.int32)
    row_map = torch.randint(0, 40, (60,), generator=torch.Generator().manual_seed(0)).int()
    row_map[7] = -1
    gathered = reference.rebase_tokens(qg, sg, qa, sa, offs, a_map=row_map)
    source = row_map.clamp(min=0).long()
    qa, sa = qa.view(torch.uint8)[source], sa.view(torch.uint8)[source]
    qa[7], sa[7] = 0, 0
    for got, want in zip(gathered, reference.rebase_tokens(qg, sg, qa.view(E4M3), sa.view(E8M0), offs), strict=True):
        assert torch.equal(bytes_of(got), bytes_of(want))


def test_moving_token_exponents_keeps_anticorrelated_tokens():
    generator = torch.Generator().manual_seed(3)
    token_scale = torch.exp(3 * torch.randn(256, 1, generator=generator))
    qg, sg = quantized(torch.randn(256, 64, generator=generator) / token_scale)
    qa, sa = quantized(torch.randn(256, 64, generator=generator) * token_scale)
    truth = float64(qg, sg).t() @ float64(qa, sa)
    moved = fp8_reference.fp8_wgrad(reference.rebase_tokens(qg, sg, qa, sa, torch.tensor([256], dtype=torch.int32)), torch.float32)[0]

    def stays(qdata: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # every token's exponents rebased where they are
        own = scale.view(torch.uint8).int()
        top = own.amax(0)
        codes = reference.shift_down(qdata.unflatten(-1, (-1, 32)), top - own, own == 255).flatten(1).view(E4M3)
        return codes.double() * torch.exp2(top.double() - 127).repeat_interleave(32)

    assert relative_error(moved, truth) < 1e-3
    assert relative_error(stays(qg, sg).t() @ stays(qa, sa), truth) > 5 * relative_error(moved, truth)


def test_a_nan_block_stays_in_its_row_and_in_its_columns():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, 64, generator=generator)
    x[7, 40] = torch.nan
    qa, sa = quantized(x)
    qb, sb = quantized(torch.randn(2, 32, 64, generator=generator))
    qg, sg = quantized(torch.randn(40, 32, generator=generator))
    offs = torch.tensor([20, 40], dtype=torch.int32)
    out = fp8_reference.fp8_grouped_mm(reference.rebase_rows(qa, sa, 8), reference.rebase_weight(qb, sb), offs, torch.float32)
    assert out.isnan().any(1).tolist() == [row == 7 for row in range(40)]
    dw = fp8_reference.fp8_wgrad(reference.rebase_tokens(qg, sg, qa, sa, offs), torch.float32)
    assert dw[0].isnan().all(0).tolist() == [column >= 32 for column in range(64)]
    assert not dw[0][:, :32].isnan().any()
    assert not dw[1].isnan().any()


def test_accumulate_adds():
    qdata, scale = quantized(torch.randn(8, 32, generator=torch.Generator().manual_seed(5)))
    tokens = reference.rebase_tokens(qdata, scale, qdata, scale, torch.tensor([8, 8], dtype=torch.int32))
    before = torch.ones(2, 32, 32)
    out = fp8_reference.fp8_wgrad(tokens, torch.float32, before.clone(), accumulate=True)
    assert torch.equal(out, before + fp8_reference.fp8_wgrad(tokens, torch.float32))
    assert torch.equal(out[1], before[1])


def test_wrong_operands_raise():
    qdata, scale = quantized(torch.randn(4, 64))
    with pytest.raises(ValueError, match=r"rebase_rows.*multiple of 32"):
        rebase_kernels.rebase_rows(qdata[:, :48], scale, 8)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        rebase_kernels.rebase_rows(qdata.float(), scale, 8)
    with pytest.raises(ValueError, match=r"row_map is on meta.*want cpu"):
        rebase_kernels.rebase_rows(qdata, scale, 8, torch.zeros(4, dtype=torch.int32, device="meta"))
    rows, weight = reference.rebase_rows(qdata, scale, 8), reference.rebase_weight(*quantized(torch.randn(2, 32, 64)))
    offs = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="out_dtype"):
        fp8_kernels.fp8_grouped_mm(rows, weight, offs, torch.float16)
    with pytest.raises(ValueError, match=r"offs is on meta"):
        fp8_kernels.fp8_grouped_mm(rows, weight, offs.to("meta"), torch.bfloat16)
    tokens, shifted = reference.rebase_tokens(qdata, scale, qdata, scale, offs), torch.zeros(2 * 64 * 64 + 1)[1:].view(2, 64, 64)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        fp8_kernels.fp8_wgrad(tokens, torch.float32, shifted)
    with pytest.raises(ValueError, match="accumulate"):
        fp8_kernels.fp8_wgrad(tokens, torch.bfloat16, accumulate=True)
