"""`transformers_5.accelerate` on a GPU: a step without a host sync, its loss and gradients, liger-kernel's norms, and routers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.truth import sqnr

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build

from mxep.integrations import transformers_5
from mxep.integrations.transformers_liger import _epsilon, _forward_with_liger, convert_norm, convert_rotary, rms_norm_form, rotary_form
from mxep.integrations.transformers_loss import _Targets
from mxep.integrations.transformers_router import convert_router, router_form

pytestmark = pytest.mark.gpu
MX = "mxfp8_wgrad_with_mx"


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_loss_and_gradients(family: str) -> None:
    model = build(family).to(torch.bfloat16).cuda().train()
    tokens = torch.randint(3, 256, (4, 128), device="cuda")
    found = []
    for converts in (False, True):
        if converts:
            done = transformers_5.accelerate(model, MX, linears="o_proj", head_recipe=MX)
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append((float(loss.detach()), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}))
    (want, of_bf16), (got, ours) = found
    assert got == pytest.approx(want, rel=2e-3)
    assert sqnr(of_bf16["lm_head.weight"], ours["lm_head.weight"]) > 15
    assert all(gradient.isfinite().all() for gradient in ours.values())
    assert ("norms" in done.left) == (importlib.util.find_spec("liger_kernel") is None)


@pytest.mark.filterwarnings("error:.*may not alias any inputs to this custom operator")
@pytest.mark.parametrize("recipe", [MX, "mxfp8_wgrad_with_hp"])
def test_compiled_layers(recipe: str) -> None:
    """One graph each, also of frozen weights, and near the eager step; no operator returns two views of one memory."""
    model = build("Qwen3Moe", hidden_size=256, moe_intermediate_size=128).to(torch.bfloat16).cuda().train()
    tokens = torch.randint(3, 256, (4, 128), device="cuda")
    transformers_5.accelerate(model, recipe, linears="o_proj")
    torch._dynamo.reset()
    for frozen in (False, True):
        model.model.layers[0].mlp.requires_grad_(not frozen)
        found = []
        for compiled in (False, True):
            for layer in model.model.layers if compiled else ():
                layer.compile(fullgraph=True)
            model.zero_grad()
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            found.append((float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
            for layer in model.model.layers:
                layer._compiled_call_impl = None
        (want, eager), (got, graph) = found
        assert got == pytest.approx(want, rel=1e-3)
        assert eager.keys() == graph.keys()
        assert any(".0.mlp.experts" in name for name in eager) != frozen
        least = min((sqnr(eager[name], graph[name]), name) for name in eager if ".gate." not in name)
        assert least[0] > 12, least


def test_the_loss_needs_no_host_sync(no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    """The projection alone: attention and masks of transformers are not ours."""
    model = build("Qwen3Moe").to(torch.bfloat16).cuda().train()
    transformers_5.accelerate(model, MX, experts=False, norms=False, rotary=False, routers=False, linears=None, head_recipe=MX)
    hidden = torch.randn(4, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels, count = torch.randint(256, (512,), device="cuda"), torch.tensor(500, device="cuda")
    model.forward.args[1].targets = _Targets(labels, count, None)
    model.lm_head(hidden).backward()  # kernels are compiled
    with no_sync():
        model.lm_head(hidden).backward()


@pytest.mark.parametrize("width", [64, 2048])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "Qwen3Next"])
def test_norms_by_fused_kernels(family: str, width: int) -> None:
    pytest.importorskip("liger_kernel", reason="an optional extra")
    norm = type(build(family).model.norm)(width).to(torch.bfloat16).cuda()
    torch.nn.init.normal_(norm.weight)
    form = rms_norm_form(norm)
    assert form is not None
    x = torch.randn(300, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, norm.weight))
    y64 = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + _epsilon(norm)) * (weight64 + form.offset)
    truth = (y64.detach(), *torch.autograd.grad(y64, (x64, weight64), grad.double()))
    distances = []
    for converts in (False, True):
        if converts:
            convert_norm(norm, form)
        y = norm(x)
        results = y.detach(), *torch.autograd.grad(y, (x, norm.weight), grad)
        distances.append([sqnr(want, got.double()) for want, got in zip(truth, results, strict=True)])
    assert min(distances[0]) > 40
    for plain, fused in zip(*distances, strict=True):
        assert fused > plain - 1.0, distances


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_rotary_embedding_of_liger_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel", reason="an optional extra")
    model = build(family).to(torch.bfloat16).cuda().train()
    tokens = torch.randint(3, 256, (2, 96), device="cuda")
    results, launches = [], []
    rope = importlib.import_module("liger_kernel.transformers.rope")
    real = rope.liger_rotary_pos_emb
    monkeypatch.setattr(rope, "liger_rotary_pos_emb", lambda *args, **kwargs: launches.append(1) or real(*args, **kwargs))
    _forward_with_liger.cache_clear()
    for converts in (False, True):
        if converts:
            attention = [module for module in model.modules() if rotary_form(module) is not None]
            for module in attention:
                convert_rotary(module)
        model.zero_grad()
        logits = model(input_ids=tokens).logits
        logits.float().square().mean().backward()
        grads = [layer.self_attn.q_proj.weight.grad.clone() for layer in model.model.layers]
        results.append((logits.detach(), *grads))
    assert len(launches) == len(attention) == 2
    for one, other in zip(*results, strict=True):
        assert sqnr(one, other) > 25


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3"])
def test_routers(family: str, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    """Logits, weights of the experts, and gradients, as by the class's own forward, and without a host sync."""
    router = next(module for module in build(family).modules() if type(module).__name__.endswith("Router")).cuda()
    torch.manual_seed(3)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_()
    x, grad = torch.randn(200, router.weight.shape[1], device="cuda"), torch.randn(200, router.weight.shape[0], device="cuda")

    def run() -> list[torch.Tensor]:
        tokens = x.clone().requires_grad_()
        logits, weights, experts = router(tokens)
        dense = torch.zeros_like(logits).scatter(1, experts, weights)
        return [logits, dense, *torch.autograd.grad(dense, (tokens, router.weight), grad)]

    want = run()
    form = router_form(router)
    assert form is not None
    convert_router(router, form)
    run()  # kernels are compiled
    with no_sync():
        got = run()
    for one, other in zip(want, got, strict=True):
        assert sqnr(one, other) > 60
