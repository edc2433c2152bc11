"""Routers of transformers models: their forms, and converted ones against their own forward."""

from __future__ import annotations

import pytest
import torch
from tests.user_experts import sqnr_db
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build  # noqa: E402
from tests.integrations.test_transformers_accelerate import MX, gradients, labelled, model_of  # noqa: E402

from mxep.integrations import transformers_5  # noqa: E402
from mxep.integrations.transformers_router import RouterForm, convert_router, router_form  # noqa: E402

SOFTMAX = RouterForm(2, "softmax", 1, 1, renormalize=False, route_scale=1.0, in_float32=False, as_logits=True)
ROUTERS = {
    "Qwen3Moe": SOFTMAX,
    "Mixtral": SOFTMAX._replace(renormalize=True, as_logits=False),
    "GptOss": SOFTMAX._replace(renormalize=True),
    "DeepseekV3": RouterForm(2, "sigmoid", 2, 1, renormalize=True, route_scale=2.5, in_float32=True, as_logits=True),
}


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def test_forms_of_routers() -> None:
    assert {family: router_form(routers_of(model_of(family))[0]) for family in ROUTERS} == ROUTERS
    assert router_form(routers_of(model_of("GraniteMoe"))[0]) is None  # other outputs
    assert router_form(nn.Linear(4, 4)) is None
    done = transformers_5.accelerate(model_of("GraniteMoe"), MX, linears=None)
    assert "GraniteMoeTopKRouter, which routes in another way" in str(done)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ROUTERS)
def test_a_converted_router(family: str, dtype: torch.dtype) -> None:
    """Logits, weights of the experts, and gradients of both, as by the class's own forward."""
    (router, *_), generator = routers_of(build(family).to(dtype)), torch.Generator().manual_seed(3)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(generator=generator)
    x = torch.randn(3, 40, router.weight.shape[1], generator=generator).to(dtype)
    form, found = router_form(router), []
    for converts in (False, True):
        undo = convert_router(router, form) if converts else None
        tokens = x.clone().requires_grad_()
        logits, weights, experts = router(tokens.flatten(0, 1))
        dense = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, experts, weights)
        grad = torch.randn(dense.shape, generator=torch.Generator().manual_seed(4))
        ((dense.float() * grad).sum() + logits.float().square().mean()).backward()
        found.append([logits, dense, tokens.grad, router.weight.grad])
        router.zero_grad()
    undo()
    assert "forward" not in vars(router)
    least = 90 if dtype == torch.float32 else 40
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert sqnr_db(want, got) > least
    assert router(x[:, :0].flatten(0, 1))[1].shape == (0, 2)
    convert_router(router, form)
    assert router(x[:, :0].flatten(0, 1))[1].shape == (0, 2)


def test_the_balance_loss_of_a_model_with_converted_routers() -> None:
    """transformers' own: it reads the logits that routers return."""
    model, inputs = model_of(output_router_logits=True, router_aux_loss_coef=0.1), labelled()
    want, of_model = gradients(model, **inputs)
    done = transformers_5.accelerate(model, "hp", linears=None, head=False)
    got, ours = gradients(model, **inputs)
    assert got.item() == pytest.approx(want.item(), rel=2e-3)
    assert min(sqnr_db(of_model[name], ours[name]) for name in ours if "mlp.gate" in name) > 10  # some tokens change their experts
    assert sum(what.startswith("router") for what in done.converted.values()) == 2
