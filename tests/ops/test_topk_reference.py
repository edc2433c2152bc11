"""A token's sorted choices, their scores and gradients, against plain Python and against autograd."""

from __future__ import annotations

import struct

import pytest
import torch
from tests import topk_cases
from tests.truth import assert_same
from torch import Tensor

from mxep import reference
from mxep.ops.routing.index_reference import topk_valid


@pytest.mark.parametrize(("tokens", "experts", "choices"), topk_cases.SHAPES)
def test_sorted_choices_one_by_one(tokens: int, experts: int, choices: int) -> None:
    for chosen, scores, *how in topk_cases.calls(tokens, experts, choices):
        found = torch.ops.mxep.sort_topk(chosen, scores, *how)
        assert [part.dtype for part in found] == [torch.int64, torch.float32, torch.int16]
        assert all(part.shape == (tokens, choices) and part.is_contiguous() for part in found)
        for row, weights, *got in zip(chosen.tolist(), scores.tolist(), *(part.tolist() for part in found), strict=True):
            columns = sorted(range(choices), key=lambda column, row=row: (row[column], column))
            rounded = [struct.unpack("f", struct.pack("f", weights[column]))[0] for column in columns]
            assert got == [[row[column] for column in columns], rounded, columns]


@pytest.mark.parametrize(("given", "allowed"), topk_cases.INVALID)
def test_wrong_choices(given: list[list[int]], allowed: tuple[bool, bool]) -> None:
    experts = torch.tensor([[i % 4 for i in range(len(given[0]))], *given])
    assert bool(topk_valid(experts[:1], 4, *allowed))
    assert not topk_valid(experts, 4, *allowed)
    with pytest.raises(RuntimeError, match="fused_experts: a token has an expert"):
        torch.ops.mxep.sort_topk(experts, torch.zeros(experts.shape), 4, *allowed)


@pytest.mark.parametrize(
    ("given", "fits"), [([[0, 0]], (0, 0, 1)), ([[-1, 2]], (0, 1, 1)), ([[-1, -1]], (0, 1, 1)), ([[1], [1]], (1, 1, 1))]
)
def test_choices_that_are_allowed(given: list[list[int]], fits: tuple[int, int, int]) -> None:
    takes = (False, False), (True, False), (True, True)  # of several ranks, of one rank in chunks, and of one rank
    assert tuple(int(topk_valid(torch.tensor(given), 4, *how)) for how in takes) == fits


def test_operands_that_do_not_fit() -> None:
    experts, scores = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    wide = torch.zeros(1, 2**15, dtype=torch.int64)
    for wrong in (
        (experts.int(), scores),
        (experts[0], scores[0]),
        (experts, scores[:2]),
        (experts, scores.long()),
        (experts, scores.to(torch.float8_e4m3fn)),
        (wide, wide.float()),
    ):
        with pytest.raises(ValueError, match=r"sort_topk: experts .* want \(T, C\) int64 and float of at least 16 bits, C below 2\^15"):
            reference.sort_topk(*wrong, 4, False, False)
    for bits in (scores[:2], scores.double()):
        with pytest.raises(ValueError, match=r"index_topk: scores .* want the same shape and float32"):
            reference.index_topk(experts, bits, 0, 4, 0, 6)
    with pytest.raises(ValueError, match="index_expert_rows: experts are"):
        reference.index_topk(experts.float(), scores, 0, 4, 0, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_their_columns_are_autograds(dtype: torch.dtype) -> None:
    """Of a sort, a cast and a gather, with its zeros: a gradient of -0.0 becomes 0.0."""
    experts = torch.rand(40, 9).argsort(1)[:, :5]
    scores = torch.randn(40, 5).to(dtype).requires_grad_()
    rows = torch.randperm(250)[:200].view(40, 5)  # of the sorted choices
    rows[3, 2:4] = -1
    values = torch.randn(250)
    values[rows[7]] = -0.0
    ordered, order = experts.sort(1)
    d_sorted = reference.gather_or_zero(rows.int(), values)
    assert_same(d_sorted, torch.where(rows < 0, 0.0, values[rows]))
    (want,) = torch.autograd.grad(scores.float().gather(1, order), scores, d_sorted)
    for index in (rows, rows.int()):
        assert_same(torch.ops.mxep.gather_or_zero(index, values, order.short(), dtype), want)
    found, _, columns = torch.ops.mxep.sort_topk(experts, scores.detach(), 9, False, False)
    assert_same(found, ordered)
    assert_same(columns, order.short())


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("R", "C", "rank", "alignment"), [(0, 3, 1, 4), (17, 1, 0, 0), (30, 5, 2, 32)])
def test_ids_with_their_scores(R: int, C: int, rank: int, alignment: int, long: bool) -> None:
    """For the rank's four experts among twelve; ids and scores are views into a table."""
    experts, scores = torch.randint(-1, 12, (R, C)), torch.randn(R, C)
    table: Tensor = torch.cat((experts.int(), scores.view(torch.int32)), 1)
    size = R * C + 4 * max(alignment, 1)
    given = experts if long else table[:, :C], table[:, C:].view(torch.float32)
    *found, rows, row_scores = torch.ops.mxep.index_topk(*given, rank, 4, alignment, size)
    for got, want in zip(found, reference.index_expert_rows(experts - 4 * rank, 4, alignment, size), strict=True):
        assert_same(got, want)
    for id_, row, score in zip(found[2].tolist(), rows.tolist(), row_scores.tolist(), strict=True):
        assert (row, score) == ((-1, 0.0) if id_ < 0 else (id_ // C, scores.flatten()[id_].item()))
