"""Kernels of chunks of experts under Triton's interpreter, run by test_kernel_interpreter.py like interpreter_cases.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import p2p_cases, route_cases, topk_cases
from tests.mx_cases import assert_same_bytes, packed_views, row_map
from tests.ops import interpreter_repairs
from triton.runtime import interpreter

from mxep import reference
from mxep.ops import kernels
from mxep.ops.activation.forward import row_sums
from mxep.ops.routing import index as plan
from mxep.ops.routing.index_reference import MODES
from mxep.ops.runtime import tiles

BF16, FLOAT32 = torch.bfloat16, torch.float32
interpreter_repairs.apply()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize(("width", "choices"), [(96, 4), (1056, 3), (7, 1), (32, 6)])
def test_reduce_rows_chunk(width: int, choices: int, dtype: torch.dtype):
    """Chunks one after the other, two of them empty: the reference's bytes after each; a sum without rows in a chunk is not written."""
    rows, (index, sum_of) = (
        torch.randn(60, width + 3).to(dtype)[:, 1 : 1 + width],
        p2p_cases.sums_of_expert_rows(33 if choices > 1 else 70, choices, 60),
    )
    sums = [[torch.full((len(index), width), torch.nan).to(dtype), torch.full((len(index), width), -7, dtype=torch.int16)] for _ in "ab"]
    for first, end, spare in ((0, 20, 4), (20, 20, 3), (20, 32, 0), (32, 60, 0), (60, 60, 0)):
        chunk, part = torch.tensor([first, end], dtype=torch.int32), slice(first, end + spare)
        for impl, (out, carry) in zip((kernels, reference), sums, strict=True):
            impl.reduce_rows_chunk(rows[part], index, sum_of[part], chunk, out, carry if dtype == BF16 else None)
        for got, want in zip(*sums, strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (first, end)
    there, want = (index >= 0).any(1), reference.reduce_rows(rows, index)
    assert 0 < there.sum() < len(there) - 3
    torch.testing.assert_close(sums[0][0][there], want[there])
    assert sums[0][0][~there].isnan().all(), "a sum without rows is not written"
    in_one_chunk = there & (((index < 0) | (index >= 32)).all(1) | ((index < 20).all(1)))
    assert in_one_chunk.any()
    assert_same_bytes(sums[0][0][in_one_chunk], want[in_one_chunk])


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_copied_groups(dtype: torch.dtype):
    """Groups with rows are copied bit for bit, the others stay; one operand is half of a larger tensor."""
    offs = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    made = torch.randn(4, 200, 33).to(dtype)[:, :150]
    into = torch.full((4, 150, 33), torch.nan, dtype=dtype)
    want = into.clone()
    kernels.copy_expert_grads(into, made, offs)
    reference.copy_expert_grads(want, made, offs)
    assert torch.equal(into.view(torch.uint8), want.view(torch.uint8))
    assert into.flatten(1).isnan().all(1).tolist() == [True, False, True, False], "the others stay"


@pytest.mark.parametrize("count", [1, 44, 48])
def test_row_sums(count: int):
    parts = torch.randn(300, count)
    torch.testing.assert_close(row_sums(parts, None), parts.sum(1))
    num_valid_rows = row_sums(parts, torch.tensor([70], dtype=torch.int32))
    assert torch.equal(num_valid_rows[:70], row_sums(parts, None)[:70])


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("width", [96, 1056])
def test_rows_past_num_valid_rows_are_not_written(width: int):
    """Row movers and the dequantiser write the first rows alone; the others stay poisoned."""
    mx, to_padded = packed_views(*reference.quantize(torch.randn(65, width), "rceil")), row_map(129, 65)
    wants = [*kernels.gather_mx_rows(*mx, to_padded), kernels.gather_rows(mx[0], to_padded)]
    wants += [kernels.dequantize(*mx, BF16), kernels.dequantize(*mx, BF16, to_padded)]
    for rows in (0, 32, 129, 500):
        num_valid_rows = torch.tensor([rows], dtype=torch.int32)
        gots = [
            *kernels.gather_mx_rows(*mx, to_padded, num_valid_rows),
            kernels.gather_rows(mx[0], to_padded, num_valid_rows),
            kernels.dequantize(*mx, BF16, None, num_valid_rows),
            kernels.dequantize(*mx, BF16, to_padded, num_valid_rows),
        ]
        for got, want in zip(gots, wants, strict=True):
            assert torch.equal(got[:rows].contiguous().view(torch.uint8), want[:rows].contiguous().view(torch.uint8))
            assert (got[rows:].contiguous().view(torch.uint8) == 0xFF).all() or rows >= len(want)


@pytest.mark.usefixtures("poison")
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_choices_and_regions(data: st.DataObject):
    world, local = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    tokens, choices = data.draw(st.sampled_from([0, 1, 5, 130])), data.draw(st.integers(1, min(5, world * local)))
    most = tokens + data.draw(st.sampled_from([0, 1, 200]))
    experts = torch.rand(tokens, world * local).argsort(1)[:, :choices]
    scores = torch.randn(tokens, choices)
    assert_same_bytes(plan.pack_topk(experts, scores, most), reference.pack_topk(experts, scores, most))
    for mode in MODES:
        for got, want in zip(
            plan.send_index(experts, mode, local, world, most), reference.send_index(experts, mode, local, world, most), strict=True
        ):
            assert_same_bytes(got, want, mode)


@pytest.mark.usefixtures("poison")
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_chunk_bounds_and_chunk_rows(data: st.DataObject):
    sizes = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)), dtype=torch.int32) * 4
    ends, capacity = sizes.cumsum(0).int(), int(sizes.max()) + 4 * data.draw(st.integers(0, 20))
    num_rows = int(ends[-1]) + data.draw(st.integers(0, 9))
    bounds = reference.chunk_bounds(ends, capacity, len(sizes))
    assert_same_bytes(plan.chunk_bounds(ends, capacity, len(sizes)), bounds)
    scores, first, second = torch.randn(num_rows), *(torch.randint(-1, 99, (num_rows,), dtype=torch.int32) for _ in range(2))
    for number in range(len(sizes)):
        for other in (None, second):
            for chunk in (bounds[number : number + 2], torch.stack([bounds, bounds * 0], 1)[number : number + 2, 0]):
                given = ends, scores, first, other, chunk, capacity
                for got, want in zip(plan.chunk_rows(*given), reference.chunk_rows(*given), strict=True):
                    assert_same_bytes(got, want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("tokens", "experts", "choices"), topk_cases.SHAPES)
def test_sorted_choices(tokens: int, experts: int, choices: int):
    for call in topk_cases.calls(tokens, experts, choices):
        for got, want in zip(kernels.sort_topk(*call), reference.sort_topk(*call), strict=True):
            assert_same_bytes(got, want)


@pytest.mark.parametrize(("given", "allowed"), topk_cases.INVALID)
def test_wrong_choices_are_asserted(given: list[list[int]], allowed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch):
    """On a GPU the assertion is compiled in; Triton's interpreter has it only on request."""
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
    kernels.sort_topk(torch.tensor([[2, 0]]), torch.zeros(1, 2), 4, *allowed)
    with pytest.raises(interpreter.InterpreterError, match="fused_experts: a token has an expert"):
        kernels.sort_topk(torch.tensor(given), torch.zeros(len(given), len(given[0])), 4, *allowed)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_gather_or_zero_by_columns(dtype: torch.dtype):
    """Gradients in the order before a sort; for an index of -1, and for -0.0, the result is 0.0."""
    values = torch.randn(70)
    values[3] = -0.0
    for rows, choices in ((700, 3), (1, 1), (5, 8), (0, 4)):
        index = torch.randint(-1, 70, (rows, choices))
        index[: rows // 2] = 3
        columns = torch.rand(rows, choices).argsort(1).short()
        got = plan.gather_or_zero(index, values, columns, dtype)
        assert_same_bytes(got, reference.gather_or_zero(index.int(), values, columns, dtype))
        assert_same_bytes(got.gather(1, columns.long()), plan.gather_or_zero(index, values + 0.0, None, dtype))


@pytest.mark.usefixtures("poison")
def test_gather_or_zero():
    values = torch.randn(70)
    for index in (torch.randint(-1, 70, (1500, 3), dtype=torch.int32), torch.full((2, 2), -1, dtype=torch.int32), torch.zeros(0, 4).int()):
        assert_same_bytes(plan.gather_or_zero(index, values), reference.gather_or_zero(index, values))
    assert_same_bytes(plan.gather_or_zero(torch.full((5,), -1, dtype=torch.int32), values[:0]), torch.zeros(5))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(0, 4, 2), (1, 1, 1), (70, 24, 5), (3, 256, 8)])
def test_router_backward(tokens: int, experts: int, choices: int):
    logits, chosen = torch.randn(tokens, experts) * 4, torch.rand(tokens, experts).argsort(1)[:, :choices]
    d_weights, d_shares, d_z = torch.randn(tokens, choices), torch.randn(experts), torch.tensor(0.5)
    for score_function in ("softmax", "sigmoid"):
        for renormalize, losses in ((True, (d_shares, None)), (False, (None, d_z)), (True, (d_shares, d_z))):
            given = logits, chosen if renormalize else chosen.short(), d_weights, *losses  # saved in fewer bits
            how = score_function, renormalize, 2.5, FLOAT32
            want = reference.router_backward(*given, *how)
            route_cases.check_gradient(given, how, kernels.router_backward(*given, *how), want, 2e-6)
            route_cases.check_parts(kernels.router_backward(*given, *how, in_parts=True), given, how, want)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", route_cases.SHAPES)
def test_route_tokens(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "ROUTER_PROGRAMS", 3)
    monkeypatch.setattr(tiles, "ROUTER_PARTS", 2)
    for call in route_cases.calls(shape):
        route_cases.check(call, kernels.route_tokens(*call))


def test_route_tokens_of_nan():
    for call in route_cases.calls((9, 24, 5, 3)):
        call[0][4] = torch.nan
        if not call[6]:
            route_cases.check_nan(call, kernels.route_tokens(*call), 4)
