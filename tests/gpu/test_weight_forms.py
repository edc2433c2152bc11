"""Weights kept in the form that the FP8 paths read: the same bits as weights that every call quantises and rebases again."""

from __future__ import annotations

import pytest
import torch

from mxep import MoE, MoEConfig
from mxep.device import FP8_PATHS
from mxep.grouped_mm.function import expert_mm
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.recipe import RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
RECIPE = RECIPES["mxfp8_wgrad_with_hp"]


class Owner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 160, 224, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("path", [*FP8_PATHS, "exact"])
def test_one_gemm(path: str) -> None:
    owner, cache = Owner(), WeightCache()
    kept = CachedWeight(cache, owner, "w")
    recipe = RECIPE.__class__("mine", gemm_path=path)
    offs = torch.tensor([70, 70, 250], device="cuda", dtype=torch.int32)
    x = torch.randn(256, 224, device="cuda", dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(256, 160, device="cuda", dtype=torch.bfloat16)
    results = []
    for cached in (None, kept, kept):
        out = expert_mm(x, owner.w, offs, recipe, cached)
        results.append((out.detach(), *torch.autograd.grad(out, (x, owner.w), grad)))
    assert cache.fills == (2 if path == "exact" else 1), "once for forward, once for dgrad; on the FP8 paths both at once"
    scales = [scale.dtype for kept_form in cache._kept.values() for scale in kept_form.form[1::2]]
    assert scales == [torch.float8_e8m0fnu if path == "exact" else torch.float32] * 2
    for other in results[1:]:
        for name, got, want in zip(("out", "dx", "dw"), other, results[0], strict=True):
            assert torch.equal(got, want), name


@pytest.mark.parametrize("fused", [False, True])
def test_layer(fused: bool) -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(dim=256, hidden=192, num_experts=4, top_k=2)).cuda().bfloat16()
    moe.init_weights(0.05)
    moe.experts.fused = fused
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for cache in (None, WeightCache()):
        moe.experts.keep_quantized(cache)
        leaf = x.clone().requires_grad_()
        out = moe(leaf)
        out.sum().backward()
        results.append((out.detach(), leaf.grad, *(w.grad for w in moe.experts.parameters())))
        moe.zero_grad()
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
