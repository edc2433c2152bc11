"""Kernel tests under Triton's interpreter, run by test_kernel_interpreter.py in a process of its own with TRITON_INTERPRET=1.

By bytes, with the repairs of interpreter_repairs.py.  What the GPU's conversions do is tested in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mx_cases import MODES, assert_same_bytes, every_code, packed_views, quantizer_inputs, row_map
from tests.ops import interpreter_repairs

from mxep import reference
from mxep.ops import kernels
from mxep.ops.grouped_gemm.bias import sum_parts

BF16, FLOAT32 = torch.bfloat16, torch.float32
interpreter_repairs.apply()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_quantize(dtype: torch.dtype, mode: str):
    for name, x in quantizer_inputs(dtype).items():
        if x.numel() > 60000:
            x = x[:, :96]
        want_data, want_scale = reference.quantize(x, mode)
        data, scale = kernels.quantize(x, mode)
        assert_same_bytes(scale, want_scale, name)
        assert_same_bytes(data, want_data, name)
        assert_same_bytes(kernels.quantize_packed(x, mode), reference.quantize_packed(x, mode), name)
        into = torch.full_like(reference.quantize_packed(x, mode), 0xA5)
        kernels.quantize_packed_into(x, into, mode)
        assert_same_bytes(into, reference.quantize_packed(x, mode), f"{name}, into")
        values, want_values = torch.empty_like(x), torch.empty_like(x)
        kernels.dequantize_packed_into(into, values)
        reference.dequantize_packed_into(into, want_values)
        assert_same_bytes(values, want_values, f"{name}, back")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", [(32, 1), (64, 33), (160, 130), (2, 32, 40), (2, 64, 96), (0, 8), (32, 0)])
def test_quantize_columnwise(shape: tuple[int, ...]):
    x = torch.randn(shape)
    for mode in MODES:
        data, scale = kernels.quantize_columnwise(x, mode)
        want_data, want_scale = reference.quantize_columnwise(x, mode)
        assert_same_bytes(scale, want_scale)
        assert_same_bytes(data, want_data)
        if shape[-1] % 32 == 0:
            for got, want in zip(kernels.quantize_rowwise_columnwise(x, mode), reference.quantize_rowwise_columnwise(x, mode), strict=True):
                assert_same_bytes(got, want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_dequantize(dtype: torch.dtype):
    data, scale = every_code()
    want = reference.dequantize(data, scale, dtype)
    assert_same_bytes(kernels.dequantize(data, scale, dtype), want)
    assert_same_bytes(kernels.dequantize(*packed_views(data, scale), dtype), want)
    for index in (row_map(len(want) + 40, len(want)), torch.full((5,), -1, dtype=torch.int32)):
        gathered = reference.dequantize(*reference.gather_mx_rows(data, scale, index), dtype)
        assert_same_bytes(reference.dequantize(data, scale, dtype, index), gathered)
        assert_same_bytes(kernels.dequantize(*packed_views(data, scale), dtype, index), gathered)
        assert_same_bytes(kernels.dequantize(data[:0], scale[:0], dtype, index * 0 - 1), torch.zeros_like(gathered))
    for shape in ((5, 0), (0, 64), (2, 0, 32), (0,)):
        nothing = torch.empty(shape, dtype=data.dtype), torch.empty((*shape[:-1], shape[-1] // 32), dtype=scale.dtype)
        assert kernels.dequantize(*nothing, dtype).shape == shape


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_add_group_bias(dtype: torch.dtype):
    for width in (7, 96, 1056):
        bias, ends = torch.randn(5, width), torch.tensor([3, 3, 17, 24, 29])
        for num_rows, columns in ((33, width), (29, width + 5), (0, width)):
            for scores in (None, torch.rand(num_rows)):
                got = torch.randn(num_rows, columns).to(dtype)
                want = got.clone()
                for rows, add in ((got, kernels.add_group_bias), (want, reference.add_group_bias)):
                    add(rows[:, :width], bias, ends if num_rows else ends * 0, scores)
                assert_same_bytes(got, want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_group_bias_grads(dtype: torch.dtype):
    for width in (7, 96, 1056):
        bias, ends = torch.randn(5, width), torch.tensor([3, 3, 170, 240, 290])
        for rows in (torch.randn(330, width).to(dtype), torch.randn(width, 290).to(dtype).t(), torch.randn(0, width).to(dtype)):
            mapped = row_map(310, len(rows)) if len(rows) else torch.full((310,), -1, dtype=torch.int32)
            for index in (None, mapped):
                count = len(rows) if index is None else len(index)
                offs, scores = (ends if count else ends * 0), torch.rand(count)
                for options in ((None, None), (bias, scores), (bias, None), (None, scores)):
                    got, want = (impl.group_bias_grads(rows, offs, *options, index) for impl in (kernels, reference))
                    for a, b in zip(got, want, strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
                    assert len(want) == 1 + (options[0] is not None)
                (dots,) = kernels.group_bias_grads(rows, offs, bias, scores, index, sums=False)
                torch.testing.assert_close(dots, reference.group_bias_grads(rows, offs, bias, None, index)[1], rtol=1e-5, atol=1e-4)
                assert (dots[290:] == 0).all(), "after the last group"


@pytest.mark.usefixtures("poison")
def test_a_nan_stays_in_the_sums_of_its_group():
    rows, ends = torch.randn(330, 40), torch.tensor([3, 3, 170, 240, 290])
    rows[169, 5] = torch.nan
    rows[300] = torch.inf
    (sums,) = kernels.group_bias_grads(rows, ends)
    assert sums.isfinite().all(1).tolist() == [True, True, False, True, True]
    assert sums.isnan().sum() == 1


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("tile_rows", [8, 64])
def test_sums_of_tiles_are_added_by_group(tile_rows: int):
    """Tiles start with their group, the last one of a group has fewer rows, and sums of tiles that are in no group are not read."""
    rows, ends = torch.randn(330, 200), torch.tensor([3, 3, 170, 234, 290], dtype=torch.int32)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    tiles = [tile.sum(0) for group in rows[:290].split(sizes) if len(group) for tile in group.split(tile_rows)]
    parts = torch.cat((torch.stack(tiles), torch.full((5, 200), torch.nan)))
    want = torch.stack([group.sum(0) for group in rows[:290].split(sizes)])
    torch.testing.assert_close(sum_parts(parts, ends, 330, tile_rows), want, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("poison")
def test_group_bias_factors():
    for rows, width in ((33, 7), (300, 96), (0, 32)):
        bias, scores = torch.randn(5, width), torch.rand(rows)
        for options in ((bias, None), (bias.to(BF16), scores), (torch.randn(width, 5).t(), scores * 1e30)):
            made = (impl.group_bias_factors(*options, rows) for impl in (kernels, reference))
            for got, want in zip(*made, strict=True):
                assert_same_bytes(got, want)
        bias[:, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        scores[:3] = torch.tensor([torch.inf, torch.nan, 1.0])[: len(scores)]
        for options in ((bias, None), (bias, scores)):
            made = [impl.group_bias_factors(*options, rows) for impl in (kernels, reference)]
            for got, want in zip(*made, strict=True):
                assert_same_bytes(got.nan_to_num(7.0), want.nan_to_num(7.0))
            products = made[0][0].double() @ made[0][1][3].double().T
            wanted = (torch.ones(rows) if options[1] is None else scores)[:, None].double() * bias[3].double()
            assert torch.equal(products[:, :3].nan_to_num(7.0), wanted[:, :3].nan_to_num(7.0)), "infinity stays infinity"
        bias, scores = torch.randn(5, width), torch.rand(rows)
        inner, lora_b = kernels.group_bias_factors(bias, scores, rows)
        products = inner.double() @ lora_b[3].double().T
        assert torch.equal(products, scores[:, None].double() * bias[3].bfloat16().double()), "the terms add up to the score"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(31, 32), (33, 160), (1, 7), (5,), (4, 3, 2), (127, 1056)])
def test_movers(shape: tuple[int, ...], dtype: torch.dtype):
    rows = torch.randint(0, 2 if dtype == torch.bool else 120, shape, dtype=torch.uint8).to(dtype)
    to_padded = row_map(shape[0] + 37, shape[0])
    out = kernels.gather_rows(rows, to_padded)
    assert_same_bytes(out, reference.gather_rows(rows, to_padded))
    back = row_map(shape[0], shape[0] + 9)
    assert_same_bytes(kernels.scatter_rows(rows, back, shape[0] + 9), reference.scatter_rows(rows, back, shape[0] + 9))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("width", [32, 96, 512, 1056])
@pytest.mark.parametrize("packed", [False, True])
def test_mx_movers(width: int, packed: bool):
    mx = reference.quantize(torch.randn(65, width), "rceil")
    mx = packed_views(*mx) if packed else mx
    to_padded = row_map(129, 65)
    for got, want in zip(kernels.gather_mx_rows(*mx, to_padded), reference.gather_mx_rows(*mx, to_padded), strict=True):
        assert_same_bytes(got, want)
    back = row_map(65, 80)
    for got, want in zip(kernels.scatter_mx_rows(*mx, back, 80), reference.scatter_mx_rows(*mx, back, 80), strict=True):
        assert_same_bytes(got, want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_gather_quantize(dtype: torch.dtype, mode: str):
    for name, x in quantizer_inputs(dtype).items():
        x = x[:, :96] if x.numel() > 60000 else x
        index = row_map(x.shape[0] + 37, x.shape[0])
        for got, want in zip(kernels.gather_quantize(x, index, mode), reference.gather_quantize(x, index, mode), strict=True):
            assert_same_bytes(got, want, name)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernels.gather_quantize(torch.zeros(3, 40), torch.zeros(2, dtype=torch.int32), mode)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize(
    ("rows", "width", "sums", "slots"), [(65, 96, 33, 3), (1, 1056, 5, 1), (0, 32, 4, 2), (40, 7, 0, 4), (9, 32, 6, 0)]
)
def test_reduce_rows(rows: int, width: int, sums: int, slots: int, dtype: torch.dtype):
    values, index = torch.randn(rows, width + 3).to(dtype)[:, 1 : 1 + width], torch.randint(-1, max(rows, 1), (sums, slots)).int()
    index = index if rows else index * 0 - 1
    for added in (None, torch.randn(sums, width), torch.randn(width, sums).t().bfloat16()):
        for weights in (None, torch.randn(slots, sums).t()):
            got, want = (impl.reduce_rows(values, index, added, weights) for impl in (kernels, reference))
            assert_same_bytes(got, want, f"weights {weights is not None}")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize(
    ("sums", "slots", "width"), [(9, 3, 96), (1, 1, 2056), (5, 8, 7), (70, 2, 1056), (6, 5, 64), (0, 2, 32), (3, 2, 0), (4, 0, 32)]
)
def test_reduce_rows_backward(sums: int, slots: int, width: int, dtype: torch.dtype):
    """Gradients of rows by bytes; those of weights are sums in another order."""
    rows, weights = torch.randn(sums * slots, width + 3).to(dtype)[:, 1 : 1 + width], torch.randn(slots, sums).t()
    index = torch.randperm(sums * slots).int().view(sums, slots)
    for grad in (torch.randn(sums, width).to(dtype), torch.randn(width, sums).t(), torch.randn(()).expand(sums, width).bfloat16()):
        got, want = (impl.reduce_rows_backward(grad, rows, index, weights) for impl in (kernels, reference))
        assert_same_bytes(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("poison")
def test_nothing_to_move():
    none, five = torch.zeros(0, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    mx = reference.quantize(torch.randn(4, 64), "rceil")
    empty = tuple(part[:0] for part in mx)
    for data, index in ((mx, none), (mx, five), (empty, five), (empty, none)):
        for got, want in zip(kernels.gather_mx_rows(*data, index), reference.gather_mx_rows(*data, index), strict=True):
            assert_same_bytes(got, want)
    for got, want in zip(kernels.scatter_mx_rows(*empty, none, 3), reference.scatter_mx_rows(*empty, none, 3), strict=True):
        assert_same_bytes(got, want)


@pytest.mark.usefixtures("poison")
def test_permute_indices_worked_example():
    index, padded, ends = kernels.permute_indices(torch.tensor([2, 0, 1, 3]), 2, 2, 4, 12)
    assert (padded.tolist(), ends.tolist()) == ([4, 4], [4, 8])
    assert index.tolist() == [0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_permute_indices_and_their_inverse(data: st.DataObject):
    ranks, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    alignment = data.draw(st.sampled_from([1, 4, 32]))
    counts = torch.tensor(data.draw(st.lists(st.sampled_from([0, 0, 1, 2, 31, 33]), min_size=ranks * experts, max_size=ranks * experts)))
    counts = counts.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    received = int(counts.sum())
    num_padded = (received + experts * alignment + alignment - 1) // alignment * alignment
    want = reference.permute_indices(counts, ranks, experts, alignment, num_padded)
    got = kernels.permute_indices(counts, ranks, experts, alignment, num_padded)
    for a, b in zip(got, want, strict=True):
        assert_same_bytes(a, b)
    rows = torch.randn(received, 3)
    padded_rows = kernels.gather_rows(rows, got[0])
    assert_same_bytes(padded_rows, reference.gather_rows(rows, got[0]))
    assert_same_bytes(kernels.scatter_rows(padded_rows, got[0], received), rows)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (64, 128), (3, 300), (257, 5)])
def test_permute_indices_of_many_experts(ranks: int, experts: int):
    counts = torch.randint(0, 5, (ranks * experts,))
    counts[::3] = 0
    num_padded = int(counts.sum()) + experts * 32
    want = reference.permute_indices(counts, ranks, experts, 32, num_padded)
    for got, expected in zip(kernels.permute_indices(counts, ranks, experts, 32, num_padded), want, strict=True):
        assert_same_bytes(got, expected)


_ENDS = ([0, 5, 5, 70, 133, 133], [40], [0, 0, 0])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("ends", _ENDS)
@pytest.mark.parametrize(("a_dtype", "b_dtype", "out_dtype"), [(FLOAT32, FLOAT32, FLOAT32), (FLOAT32, BF16, BF16)])
def test_grouped_gemms_in_float32(ends: list[int], a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype):
    rows = ends[-1] + 9
    a, b = torch.randn(rows, 96).to(a_dtype), torch.randn(len(ends), 40, 96).to(b_dtype)
    a[ends[-1] :] = torch.nan  # rows that no group owns
    offs = torch.tensor(ends)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if out_dtype == BF16 else {"rtol": 1e-5, "atol": 1e-4}
    out = kernels.grouped_mm_hp(a, b, offs, out_dtype)
    torch.testing.assert_close(out, reference.grouped_mm_hp(a, b, offs, out_dtype), **tolerance)
    assert (out[ends[-1] :] == 0).all()
    grad = torch.randn(rows, 40).to(b_dtype)
    wgrad = kernels.grouped_wgrad_hp(grad, a, offs, out_dtype)
    torch.testing.assert_close(wgrad, reference.grouped_wgrad_hp(grad, a, offs, out_dtype), **tolerance)
    sizes = torch.diff(offs, prepend=torch.zeros(1, dtype=torch.int64))
    assert (wgrad[sizes == 0] == 0).all()
    for columns in (1, 8, 16):  # of narrow tiles
        few = kernels.grouped_wgrad_hp(grad, a[:, :columns], offs, out_dtype)
        torch.testing.assert_close(few, wgrad[..., :columns], **tolerance)
    index = row_map(rows, 50)
    for columns in (8, 96):  # read through the map, and gathered first
        few, given = torch.randn(50, 40).to(b_dtype), (a[:, :columns], offs, out_dtype)
        for row_index in (index, every_second(index)):
            through = kernels.grouped_wgrad_hp(few, *given, grad_map=row_index)
            torch.testing.assert_close(through, reference.grouped_wgrad_hp(few, *given, grad_map=index), **tolerance)
    into = torch.randn(wgrad.shape)
    want = into + reference.grouped_wgrad_hp(grad, a, offs, FLOAT32)
    kernels.grouped_wgrad_hp(grad, a, offs, torch.float32, into, accumulate=True)
    torch.testing.assert_close(into, want, rtol=1e-5, atol=1e-4)
    skipped = kernels.grouped_mm_hp(a, b, offs, out_dtype, "skip")
    assert torch.equal(skipped[: ends[-1]], out[: ends[-1]])
    assert skipped[ends[-1] :].isnan().all(), "rows past the last end are not written"
    filled = torch.full(wgrad.shape, torch.nan, dtype=out_dtype)
    kernels.grouped_wgrad_hp(grad, a, offs, out_dtype, filled)
    assert filled[sizes == 0].isnan().all()
    torch.testing.assert_close(filled[sizes > 0], wgrad[sizes > 0], **tolerance)


def every_second(index: torch.Tensor) -> torch.Tensor:
    """The same index as one of two columns, whose elements are not neighbours."""
    return torch.stack([index, torch.zeros_like(index)], 1)[:, 0]


@pytest.mark.usefixtures("poison")
def test_add_group_lora():
    """In float32: the interpreter has no dot product in bf16."""
    ends, index, few = torch.tensor([0, 5, 5, 137, 140]), row_map(150, 60), torch.randn(60, 96)
    for rank, K, N in ((8, 96, 40), (24, 40, 130)):
        x, a, b = (torch.randn(shape) for shape in ((150, K), (5, rank, K), (5, N, rank)))
        x[140:] = torch.nan  # past the last end
        apart = [factor.mT.contiguous().mT for factor in (a, b)]
        wide = torch.randn(K, 150).t()
        for operands in (
            (x, a, b, ends),
            (few[:, :K], a, b, ends.int(), index),
            (few[:, :K], a, b, ends, every_second(index)),
            (x, *apart, ends),
            (wide, a, b, ends),
            (x, a, b, ends * 0),
        ):
            before = torch.randn(150, N + 3)
            got, want = before.clone(), before.clone()
            inner = kernels.add_group_lora(got[:, :N], *operands)
            torch.testing.assert_close(inner, reference.add_group_lora(want[:, :N], *operands), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
            assert torch.equal(got[:, N:], before[:, N:])
            assert torch.equal(got[operands[3][-1] :], before[operands[3][-1] :])
            assert torch.equal(kernels.group_lora_inner(operands[0], *operands[1:2], *operands[3:]), inner)
    assert kernels.add_group_lora(before[:0, :N], x[:0], a, b, ends * 0).shape == (0, rank)
    with pytest.raises(ValueError, match=r"add_group_lora: out \(150, 133\) .* all bfloat16 or all float32"):
        kernels.add_group_lora(before, x, a, b, ends)


def test_bad_input_is_named():
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"quantize: x is torch\.int32"):
        kernels.quantize(x.int(), "rceil")
    with pytest.raises(ValueError, match="multiple of 32"):
        kernels.quantize(torch.randn(4, 40), "rceil")
    with pytest.raises(ValueError, match="scaling_mode='up'"):
        kernels.quantize(x, "up")
    for make, message in (
        (lambda: kernels.activate(x[:, :32], "concatenated", "rceil"), r"activate: x is \(4, 32\)"),
        (lambda: kernels.activate(x, "halves", "rceil"), "layout='halves'"),
        (lambda: kernels.activate(x, "interleaved", "up"), "scaling_mode='up'"),
        (lambda: kernels.activate_backward(x, x, "interleaved", "rceil"), r"dh is \(4, 64\)"),
        (lambda: kernels.activate_backward(x[:, :32], x, "interleaved", "rceil", x_scale=x), r"with x_scale \(4, 64\)"),
        (lambda: kernels.activate_backward(x[:, :32], x, "interleaved", "rceil", False, "hp+mx"), r"dx='hp\+mx'"),
        (lambda: kernels.activate(x, "interleaved", "rceil", False, x), r"scores are \(4, 64\)"),
        (lambda: kernels.activate_backward(x[:, :32], x, "interleaved", "rceil", offs=x), r"offs are \(4, 64\) torch.float32"),
        (lambda: kernels.add_group_bias(x, x, torch.zeros(2)), r"offs \(2,\)"),
        (lambda: kernels.add_group_bias(x.t(), x.t(), torch.zeros(64)), r"rows of strides \(1, 64\)"),
        (lambda: kernels.add_group_bias(x, x, torch.zeros(4), x), r"add_group_bias: scores are \(4, 64\)"),
        (lambda: kernels.group_bias_grads(x, torch.zeros(2), x), r"group_bias_grads: rows .* offs \(2,\)"),
        (lambda: kernels.group_bias_grads(x, torch.zeros(4), None, x), r"group_bias_grads: scores are \(4, 64\)"),
        (lambda: kernels.group_bias_grads(x.half(), torch.zeros(4)), r"rows \(4, 64\) torch.float16, no bias"),
        (lambda: kernels.group_bias_grads(x, torch.zeros(4), x, None, torch.zeros(3)), r"row_map is \(3,\) torch.float32, want"),
        (lambda: kernels.group_bias_factors(x[0], None, 4), r"group_bias_factors: bias is \(64,\)"),
        (lambda: kernels.group_bias_factors(x, torch.zeros(3), 4), r"group_bias_factors: scores are \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(ValueError, match="dequantize: qdata"):
        kernels.dequantize(x.to(torch.float8_e4m3fn), torch.zeros(4, 3, dtype=torch.uint8), BF16)
    with pytest.raises(ValueError, match=r"dequantize: qdata \(4, 64\) with row_map \(4,\) torch.float32"):
        kernels.dequantize(x.to(torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.uint8), BF16, torch.zeros(4))
    with pytest.raises(ValueError, match="gather_rows: rows"):
        kernels.gather_rows(x, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="reduce_rows: rows"):
        kernels.reduce_rows(x, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="reduce_rows: added"):
        kernels.reduce_rows(x, torch.zeros(2, 2, dtype=torch.int32), x)
    slots, weights = torch.arange(4, dtype=torch.int32).view(2, 2), torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"reduce_rows: weights are \(4,\) torch.float32, want \(2, 2\) float32"):
        kernels.reduce_rows(x, slots, None, weights.flatten())
    for arguments, message in (
        ((x[:2], x, slots.long(), weights), "rows .* want .R, D. bfloat16"),
        ((x[:2], x, slots, weights.double()), "weights are .* torch.float64"),
        ((x[:2], x[:3], slots, weights), "3 rows .* want 4 rows, each in one slot"),
        ((x[:2].double(), x, slots, weights), r"grad is .* want \(2, 64\)"),
        ((x, x, slots, weights), r"grad is \(4, 64\)"),
    ):
        with pytest.raises(ValueError, match="reduce_rows_backward: " + message):
            kernels.reduce_rows_backward(*arguments)
    chunk, out = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 64)
    slots, row_map = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for arguments, message in (
        ((x, slots, row_map, chunk, out[:2]), r"out is \(2, 64\)"),
        ((x, slots, row_map[:3], chunk, out), r"row_map is \(3,\)"),
        ((x, slots, row_map.long(), chunk, out), "row_map is .* torch.int64"),
        ((x, slots, row_map, chunk.long(), out), "chunk is"),
        ((x, slots, row_map, chunk, out, out), "carry is"),
        ((x.bfloat16(), slots, row_map, chunk, out.bfloat16()), "carry is None"),
        ((x, slots.long(), row_map, chunk, out), "want .P, D. bfloat16"),
    ):
        with pytest.raises(ValueError, match="reduce_rows_chunk: .*" + message):
            kernels.reduce_rows_chunk(*arguments)
    with pytest.raises(ValueError, match="padding_rows='none', want one of zero, skip"):
        kernels.grouped_mm_hp(x, torch.randn(1, 8, 64), torch.tensor([4]), FLOAT32, "none")
    with pytest.raises(ValueError, match="grouped_wgrad_hp: out is"):
        kernels.grouped_wgrad_hp(x, x, torch.tensor([4]), FLOAT32, torch.zeros(1, 64, 63))
    with pytest.raises(ValueError, match="permute_indices: counts"):
        kernels.permute_indices(torch.zeros(5, dtype=torch.int32), 2, 2, 32, 64)
    with pytest.raises(ValueError, match="offs is"):
        kernels.grouped_mm_hp(x, torch.randn(3, 8, 64), torch.tensor([4]), FLOAT32)
    with pytest.raises(ValueError, match="operand is"):
        kernels.grouped_wgrad_hp(x.double(), x, torch.tensor([4]), FLOAT32)
    for into in (torch.zeros(1, 64, 64).bfloat16(), torch.zeros(2, 64, 64), torch.zeros(1, 64, 64).mT):
        with pytest.raises(ValueError, match=r"grouped_wgrad_hp: out is .*want \(1, 64, 64\) float32, contiguous"):
            kernels.grouped_wgrad_hp(x, x, torch.tensor([4]), FLOAT32, into, accumulate=True)
