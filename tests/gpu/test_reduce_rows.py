"""Sums of rows on a GPU, and their gradients: the reference's bytes, against float64, past 2^31 values, without a host sync."""

from __future__ import annotations

import pytest
import torch
from tests.mx_cases import assert_same_bytes
from tests.truth import sqnr
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep import reference
from mxep.ops import kernels

pytestmark = pytest.mark.gpu
BF16, FLOAT32 = torch.bfloat16, torch.float32


def permutation(sums: int, slots: int) -> Tensor:
    return torch.randperm(sums * slots, device="cuda").int().view(sums, slots)


def truth(grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums, and the gradients of rows, in the order of their slots, and of weights; in float64."""
    grad, rows, weights = grad.double(), rows[slots.long()].double(), weights.double()
    return (rows * weights[..., None]).sum(1), weights[..., None] * grad[:, None], (rows * grad[:, None]).sum(2)


def ways(grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.reduce_rows(rows, slots, None, weights), *kernels.reduce_rows_backward(grad, rows, slots, weights)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.usefixtures("poison")
def test_reduce_rows_has_the_references_bytes(dtype: torch.dtype) -> None:
    for rows, width, sums, slots in ((1000, 7168, 513, 4), (65, 1056, 33, 8), (0, 64, 5, 2), (40, 7, 9, 1)):
        values = torch.randn(rows, width + 3, device="cuda").to(dtype)[:, 1 : 1 + width]
        index = torch.randint(-1, max(rows, 1), (sums, slots), device="cuda", dtype=torch.int32)
        index = index if rows else index.fill_(-1)
        for added in (None, torch.randn(sums, width, device="cuda"), torch.randn(width, sums, device="cuda").t().bfloat16()):
            for weights in (None, torch.randn(sums, slots, device="cuda")):
                got, want = (impl.reduce_rows(values, index, added, weights) for impl in (kernels, reference))
                assert_same_bytes(got, want.cpu(), f"{rows} {width}, weights {weights is not None}")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("dtype", "least"), [(BF16, 50), (FLOAT32, 120)])
@pytest.mark.parametrize(("sums", "choices", "width"), [(1000, 8, 2048), (333, 6, 7168), (65, 1, 96), (7, 3, 2057)])
def test_weighted_sums_against_float64(sums: int, choices: int, width: int, dtype: torch.dtype, least: float) -> None:
    rows, weights = torch.randn(sums * choices, width, device="cuda").to(dtype), torch.rand(sums, choices, device="cuda")
    grad, slots = torch.randn(sums, width, device="cuda").to(dtype), permutation(sums, choices)
    found, again = (ways(grad, rows, slots, weights) for _ in range(2))
    want = truth(grad, rows, slots, weights)
    for expected, value, bound in zip(want, (found[0], found[1][slots.long()], found[2]), (least, least, 120), strict=True):
        assert sqnr(expected, value) > bound
    for value, same in zip(found, again, strict=True):
        assert torch.equal(value, same), "the same bits every time"
    assert_same_bytes(found[1], reference.reduce_rows_backward(grad, rows, slots, weights)[0].cpu())


def test_past_two_billion_values(no_sync) -> None:
    sums, choices, width = 131072 + 64, 8, 2048
    slots = torch.arange(sums * choices, device="cuda", dtype=torch.int32).view(choices, sums).t()  # choice c of all tokens, then c + 1
    rows, few = torch.zeros(sums * choices, width, device="cuda", dtype=BF16), slots[-9:].long()
    rows[few] = torch.randn(9, choices, width, device="cuda").to(BF16)
    weights, grad = torch.rand(sums, choices, device="cuda"), torch.randn(sums, width, device="cuda").to(BF16)
    with no_sync():
        out, d_rows, d_weights = ways(grad, rows, slots, weights)
    for want, value in zip(truth(grad[-9:], rows, slots[-9:], weights[-9:]), (out[-9:], d_rows[few], d_weights[-9:]), strict=True):
        assert sqnr(want, value) > 50
    assert not out[:-9].any()
