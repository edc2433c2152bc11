"""Routers of transformers models: their forms, and converted ones against their own forward."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.truth import sqnr
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
    double = model_of().double()
    assert router_form(routers_of(double)[0]) is None
    with pytest.raises(ValueError, match=r"can be converted[\s\S]*TopKRouter, which routes in another way or dtype"):
        transformers_5.accelerate(double, MX)


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
        assert sqnr(want, got) > least
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
    assert min(sqnr(of_model[name], ours[name]) for name in ours if "mlp.gate" in name) > 10  # some tokens change their experts
    assert sum(what.startswith("router") for what in done.converted.values()) == 2


def configured(kind: str, name: str, **sizes: Any) -> nn.Module:
    """A router of transformers' own, of E experts in G groups."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    E, common = sizes.pop("E"), {"routed_scaling_factor": 1.0, "norm_topk_prob": True, "topk_method": "group_limited_greedy"}
    experts = {"num_experts": E, "num_local_experts": E, "n_routed_experts": E}
    router: nn.Module = getattr(module, kind)(SimpleNamespace(**common, **experts, **sizes))
    return router


@pytest.mark.parametrize(("E", "G"), [(8, 2), (16, 4), (64, 8)])
def test_groups_by_another_rule_are_another_form(E: int, G: int) -> None:
    """DeepSeek-V2 ranks groups by their largest score, V3 by the sum of two, and A.X-K2 fills those that are left out with 0."""
    for g, k in itertools.product(range(1, G), (1, 2, 4)):
        sizes = {"E": E, "n_group": G, "topk_group": g, "num_experts_per_tok": k, "hidden_size": 256}
        if k > g * E // G:
            continue
        assert router_form(configured("DeepseekV3TopkRouter", "deepseek_v3", **sizes)) is not None, sizes
        assert router_form(configured("DeepseekV2TopkRouter", "deepseek_v2", **sizes)) is None, sizes
        assert router_form(configured("AXK2TopkRouter", "axk2", **sizes)) is None, sizes


def test_a_converted_router_follows_its_attributes() -> None:
    router = routers_of(build("Qwen3Moe").float())[0]
    x = torch.randn(5, router.weight.shape[1])
    form = router_form(router)
    assert form is not None
    undo = convert_router(router, form)
    for top_k in (1, 2, 3):
        router.top_k = top_k
        got, want = router(x), type(router).forward(router, x)
        assert got[1].shape == (5, top_k)
        for mine, theirs in zip(got[1:], want[1:], strict=True):
            assert torch.allclose(mine.sort(1).values.float(), theirs.sort(1).values.float(), atol=1e-6)
    undo()


class NoisyRouter(nn.Module):
    """Another form in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(8, 64).bfloat16()), 2

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(tokens, self.weight)
        if self.training:
            logits = logits + torch.rand_like(logits)
        weights, experts = logits.float().softmax(1).topk(self.top_k)
        return logits, weights, experts


def test_a_router_of_another_form_in_training_is_of_none() -> None:
    for mode in (True, False):
        assert router_form(NoisyRouter().train(mode)) is None


def test_forms_do_not_depend_on_the_default_device() -> None:
    with torch.device("meta"):
        assert {family: router_form(routers_of(model_of(family))[0]) for family in ("Mixtral",)} == {"Mixtral": ROUTERS["Mixtral"]}
