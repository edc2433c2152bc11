"""The weighted sum over choices on a GPU: against float64, the same bits every time, past 2^31 values, without a host sync."""

from __future__ import annotations

import pytest
import torch
from tests.user_experts import sqnr_db
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep import kernels

pytestmark = pytest.mark.gpu
BF16, FLOAT32 = torch.bfloat16, torch.float32


def truth(grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad, rows, weights = grad.double(), rows.double(), weights.double()
    return (rows * weights[..., None]).sum(1), weights[..., None] * grad[:, None], (rows * grad[:, None]).sum(2)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("dtype", "least"), [(BF16, 50), (FLOAT32, 120)])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(1000, 8, 2048), (333, 6, 7168), (65, 1, 96), (7, 3, 2057)])
def test_against_float64(tokens: int, choices: int, width: int, dtype: torch.dtype, least: float) -> None:
    rows, weights = torch.randn(tokens, choices, width, device="cuda").to(dtype), torch.rand(tokens, choices, device="cuda")
    grad = torch.randn(tokens, width, device="cuda").to(dtype)
    found = kernels.weigh(rows, weights), *kernels.weigh_backward(grad, rows, weights)
    again = kernels.weigh(rows, weights), *kernels.weigh_backward(grad, rows, weights)
    for want, value, same, bound in zip(truth(grad, rows, weights), found, again, (least, least, 120), strict=True):
        assert sqnr_db(want, value) > bound
        assert torch.equal(value, same)


def test_past_two_billion_values(no_sync) -> None:
    tokens, choices, width = 131072 + 64, 8, 2048
    rows = torch.zeros(tokens, choices, width, device="cuda", dtype=BF16)
    rows[-9:] = torch.randn(9, choices, width, device="cuda")
    weights, grad = torch.rand(tokens, choices, device="cuda"), torch.randn(tokens, width, device="cuda").to(BF16)
    with no_sync():
        found = kernels.weigh(rows, weights), *kernels.weigh_backward(grad, rows, weights)
    for want, value in zip(truth(grad[-9:], rows[-9:], weights[-9:]), found, strict=True):
        assert sqnr_db(want, value[-9:]) > 50
    assert not found[0][:-9].any()
