"""The router's product and its gradients against float64, by every implementation, and the tensors saved for them."""

from __future__ import annotations

import pytest
import torch
from tests.truth import saved_tensors

import mxep
from mxep.moe import router
from mxep.moe.router import RouterProduct, logits_backward, logits_of
from mxep.ops.routing.router_reference import bf16_parts


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_float32_product(dtype: torch.dtype, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as the dtype of each result allows, and no copy of the tokens in float32 is kept for them."""
    if in_parts:  # as on a GPU, whose product of bf16 operands with a float32 result a CPU has not
        monkeypatch.setattr(router, "runs_in_parts", lambda tensor, dtype: dtype == torch.bfloat16)
        monkeypatch.setattr(router, "_mm_float32", lambda a, b: a.float() @ b.float())
    generator = torch.Generator().manual_seed(1)
    tokens, weight = torch.randn(300, 32, generator=generator).bfloat16(), torch.randn(8, 32, generator=generator)
    d_logits = torch.randn(300, 8, generator=generator)
    leaves = [tokens.clone().requires_grad_(), weight.to(dtype).requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(exact[0] @ exact[1].T, exact, d_logits.double())
    with saved_tensors() as kept:
        logits = RouterProduct.apply(*leaves)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact[0] @ exact[1].T, rtol=1e-5, atol=1e-5)
    assert [t.dtype for t in kept] == [torch.bfloat16, dtype]
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(logits, leaves, d_logits)
    for leaf, value, exactly in zip(leaves, got, want, strict=True):
        assert value.dtype == leaf.dtype
        assert (value.double() - exactly).norm() / exactly.norm() < (1e-6 if value.dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_layer_has_the_same_gradients_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = mxep.FusedMoE(mxep.MoEConfig(32, 32, 4, 2, balance_loss=0.01, z_loss=0.01), "hp").bfloat16()
    layer.init_weights(0.2)
    layer.router.to(dtype)
    x, found = torch.randn(70, 32).bfloat16(), []
    for in_parts in (False, True):
        if in_parts:
            monkeypatch.setattr(router, "runs_in_parts", lambda tensor, dtype: dtype == torch.bfloat16)
            monkeypatch.setattr(router, "_mm_float32", lambda a, b: a.float() @ b.float())
        leaf = x.clone().requires_grad_()
        loss = layer(leaf).float().square().sum() + layer.router_loss
        found.append(torch.autograd.grad(loss, [leaf, layer.router.gate.weight]))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        near = 1e-6 if got.dtype == torch.float32 else 4e-3
        assert (got - want).float().norm() <= near * want.float().norm()


def test_the_bf16_product_and_its_gradients_are_in_the_tokens_dtype() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens, weight = torch.randn(30, 32, generator=generator).bfloat16(), torch.randn(8, 32, generator=generator)
    logits = logits_of(tokens, weight, "bf16")
    assert torch.equal(logits, tokens @ weight.bfloat16().T)
    d_tokens, d_weight = logits_backward(logits, tokens, weight, "bf16", torch.bfloat16, True)
    assert torch.equal(d_tokens, logits @ weight.bfloat16())
    assert torch.equal(d_weight, (logits.T @ tokens).float())
    assert logits_backward(logits, None, weight, "bf16", torch.bfloat16, False) == (None, None)


def test_three_bf16_values_are_a_float32_value() -> None:
    value = torch.randn(1000) * torch.exp2(torch.randint(-60, 60, (1000,)))
    assert torch.equal(sum(part.double() for part in bf16_parts(value)), value.double())
    assert bf16_parts(value.bfloat16())[0].equal(value.bfloat16())
