"""Dense linear layers in MXFP8 on a GPU: error against float64, and the bits of a kept weight."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.truth import sqnr
from torch import Tensor, nn

from mxep.mx.weight_cache import WeightCache
from mxep.parallel import MXLinear
from mxep.recipe import RECIPES

pytestmark = pytest.mark.gpu


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and the gradients of input and weight."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, layer.weight.grad.clone()]  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(16384, 768, 288), (1000, 256, 1024), (64, 2304, 768)])
def test_error_against_float64(recipe: str, rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(inner, columns, bias=False, device="cuda", dtype=torch.bfloat16)
    x, grad = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (inner, columns))
    truth = results(copy.deepcopy(linear).double(), x.double(), grad.double())
    layer = MXLinear(linear, RECIPES[recipe])
    found = results(layer, x, grad)
    for name, want, got, least in zip(("y", "dx", "dw"), truth, found, (27.5, 27.5, 26.0), strict=True):
        assert sqnr(want, got.double()) > least, name
    layer.keep_quantized(WeightCache())
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found, results(layer, x, grad), strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(16384, 768, 288), (1000, 256, 1024), (64, 2304, 768)])
def test_the_gemm_adds_the_bias(recipe: str, rows: int, inner: int, columns: int) -> None:
    """As exactly as a pass of its own would, which rounds once more; the other results keep their bits."""
    torch.manual_seed(0)
    linear = nn.Linear(inner, columns, device="cuda", dtype=torch.bfloat16)
    nn.init.normal_(linear.bias)
    x, grad = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in (inner, columns))
    plain = MXLinear(copy.deepcopy(linear), RECIPES[recipe])
    plain.bias = None
    layer = MXLinear(linear, RECIPES[recipe])
    (y, *others), (without, *same) = results(layer, x, grad), results(plain, x, grad)
    assert all(torch.equal(a, b) for a, b in zip(others, same, strict=True))
    bias = linear.bias.detach()
    truth = x.double() @ linear.weight.detach().double().T + bias.double()
    errors = [float((value.double() - truth).norm()) for value in (y, without + bias)]
    assert errors[0] <= 1.001 * errors[1]
    assert sqnr(y.double(), (without + bias).double()) > 45
    got, want = linear.bias.grad, grad.double().sum(0)
    assert got is not None
    assert sqnr(want, got.double()) > 45
