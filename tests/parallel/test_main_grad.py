"""dW added to a float32 main gradient in backward, instead of becoming the weight's gradient."""

from __future__ import annotations

import re

import pytest
import torch
from tests.truth import assert_same, seeded, sqnr

from mxep import quantize_mx, to_mxfp8_then_scaled_grouped_mm
from mxep.grouped_mm.function import recipe_grouped_mm
from mxep.recipe import RECIPES

pytestmark = pytest.mark.usefixtures("every_device")
BF16 = torch.bfloat16
K, N, ROWS = 96, 64, 224
ENDS = [64, 96, 96, 192]  # an empty group, and rows past the end


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (M, K), w (G, N, K), leaves in bf16, and the END offsets."""
    generator = seeded(0)
    a, w = torch.randn(ROWS, K, generator=generator), torch.randn(len(ENDS), N, K, generator=generator) / K**0.5
    return a.to(BF16).requires_grad_(), w.to(BF16).requires_grad_(), torch.tensor(ENDS, dtype=torch.int32)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
@pytest.mark.parametrize("mx", [False, True])
def test_wgrad_added_to_a_main_gradient(name: str, mx: bool) -> None:
    if mx and RECIPES[name].wgrad == "mxfp8":
        pytest.skip("an MX input cannot be quantised along the tokens")
    a, w, offs = operands()
    a = quantize_mx(a.detach()).requires_grad_() if mx else a
    grad = torch.randn(ROWS, N).to(BF16)
    out = recipe_grouped_mm(a, w.transpose(-2, -1), offs, None, BF16, RECIPES[name])
    d_a, d_w = torch.autograd.grad(out, (a, w), grad)
    main = torch.randn(w.shape)
    before = main.clone()
    for _ in range(2):
        out = recipe_grouped_mm(a, w.transpose(-2, -1), offs, None, BF16, RECIPES[name], main_grad=main)
        got = torch.autograd.grad(out, (a, w), grad, allow_unused=True)
        assert_same(got[0], d_a, "dX")
        assert got[1] is None
    assert_same(main[2], before[2], "an empty group adds nothing")
    assert sqnr(d_w.float(), (main - before) / 2) > 50, "up to the rounding of the gradient"


def test_main_gradients_that_do_not_fit() -> None:
    a, w, offs = operands()
    right = torch.zeros(w.shape)
    wrong = {
        "bfloat16": right.bfloat16(),
        "(2, 64, 96)": right[:2],
        "contiguous": torch.zeros(w.shape[0], w.shape[2], w.shape[1]).transpose(-2, -1),
        "gradient of its own": right.clone().requires_grad_(),
        "a multiple of 16 bytes": torch.zeros(w.numel() + 1)[1:].view(w.shape),
    }
    for says, main in wrong.items():
        with pytest.raises(ValueError, match=f"(?s)grouped_mm: main_grad.*{re.escape(says)}"):
            to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offs, wgrad_with_hp=True, main_grad=main)


def test_no_main_gradient_in_a_graph() -> None:
    a, w, offs = operands()
    main = torch.zeros(w.shape)

    @torch.compile(backend="eager", fullgraph=True)
    def inside(a: torch.Tensor) -> torch.Tensor:
        return to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offs, wgrad_with_hp=True, main_grad=main)

    with pytest.raises(Exception, match="main_grad in a compiled graph"):
        inside(a)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_ragged_groups_padded_inside(name: str) -> None:
    a, w, _ = operands()
    offs = torch.tensor([1, 32, 32, 190], dtype=torch.int32)
    grad = torch.randn(ROWS, N).to(BF16)
    call = (w.transpose(-2, -1), offs, None, BF16, RECIPES[name], True)
    (d_w,) = torch.autograd.grad(recipe_grouped_mm(a, *call), w, grad)
    main = torch.zeros(w.shape)
    torch.autograd.grad(recipe_grouped_mm(a, *call, main_grad=main), (a, w), grad, allow_unused=True)
    assert not main[2].any()
    assert sqnr(d_w.float(), main) > 50


def test_a_gradient_of_a_alone_adds_nothing() -> None:
    """`torch.autograd.grad` and `backward(inputs=...)` ask for some gradients only."""
    a, w, offs = operands()
    main = torch.zeros(w.shape)
    out = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offs, wgrad_with_hp=True, main_grad=main)
    grad = torch.randn(out.shape).to(out.dtype)
    torch.autograd.grad(out, a, grad, retain_graph=True)
    out.backward(grad, inputs=[a], retain_graph=True)
    assert not main.any()
    out.backward(grad)
    assert main.any()
    with pytest.raises(ValueError, match="main_grad with a B_t that needs no gradient, want requires_grad=True, or no main_grad"):
        to_mxfp8_then_scaled_grouped_mm(a, w.detach().transpose(-2, -1), offs, wgrad_with_hp=True, main_grad=main)
