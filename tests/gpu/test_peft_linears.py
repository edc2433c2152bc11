"""LoRA on dense layers by `peft_0_21` on a GPU: against float64, and the kernels that it takes."""

from __future__ import annotations

import pytest
import torch
from tests.truth import sqnr
from torch import nn

import mxep

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from mxep.integrations import peft_0_21  # noqa: E402

pytestmark = pytest.mark.gpu
K, N, R = 512, 768, 16


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen_in_mx", [False, True], ids=["bf16", "MX"])
def test_gradients_against_float64(frozen_in_mx: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(K, N, bias=False)).to("cuda", torch.bfloat16)
    weight = model[0].weight.detach()
    if frozen_in_mx:
        mxep.quantize_base(model)
        weight = model[0].weight.dequantize()
    config = peft_0_21.register(peft.LoraConfig(r=R, lora_alpha=2 * R, target_modules=["0"]))
    layer = peft.get_peft_model(model, config).base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert type(layer) is peft_0_21.LoraLinear
    assert a.dtype == b.dtype == torch.float32
    nn.init.normal_(b, std=0.05)
    x, dy = (torch.randn(4, 1024, width, device="cuda").bfloat16() for width in (K, N))
    x.requires_grad_()
    y = (torch.compile(layer) if compiled else layer)(x)
    y.backward(dy)
    for factor in (a, b):
        assert factor.grad is not None
        assert (factor.grad != factor.grad.bfloat16()).any(), "written in float32 by the GEMM"

    exact_x, exact_a, exact_b = (leaf.detach().double().requires_grad_() for leaf in (x, a, b))
    exact_y = exact_x @ weight.double().T + 2 * (exact_x @ exact_a.T) @ exact_b.T
    exact_y.backward(dy.double())
    for got, want in ((y, exact_y), (x.grad, exact_x.grad), (a.grad, exact_a.grad), (b.grad, exact_b.grad)):
        assert want is not None
        assert got is not None
        assert sqnr(want, got) > 45


def test_an_adapter_adds_the_same_to_a_layer_in_mxfp8_as_to_zeros() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False)).to("cuda", torch.bfloat16)
    mxep.convert_linears(model, "0", "mxfp8_gemm")
    mxep.quantize_base(model)
    base = model[0]
    layer = peft.get_peft_model(model, peft_0_21.register(peft.LoraConfig(r=R, lora_alpha=2 * R, target_modules=["0"]))).base_model.model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b, std=0.05)
    x, dy = (torch.randn(4, 1024, width, device="cuda").bfloat16() for width in (K, N))
    x.requires_grad_()
    own_y = base(x)
    (own_dx,) = torch.autograd.grad(own_y, x, dy)
    y = layer(x)
    dx, da, db = torch.autograd.grad(y, (x, a, b), dy)
    exact_a, exact_b = (leaf.detach().double().requires_grad_() for leaf in (a, b))
    exact_x = x.detach().double().requires_grad_()
    part = 2 * (exact_x @ exact_a.T) @ exact_b.T
    part.backward(dy.double())
    assert exact_x.grad is not None
    for got, want in ((y, own_y.double() + part), (dx, own_dx.double() + exact_x.grad), (da, exact_a.grad), (db, exact_b.grad)):
        assert want is not None
        assert sqnr(want, got) > 40
