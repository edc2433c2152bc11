"""Weights that are frozen in MX, and their adapters, on the GEMM paths of a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.truth import sqnr
from torch import Tensor, nn

import mxep
from mxep.device import FP8_PATHS, available_gemm_paths
from mxep.grouped_mm.function import expert_mm
from mxep.grouped_mm.products import Weights, gemm_options
from mxep.moe import ExpertLora, FusedMoE, MoEConfig, fused_experts
from mxep.mx import MXWeight
from mxep.operators import direct
from mxep.recipe import Recipe

pytestmark = pytest.mark.gpu
L, N, K, R = 4, 192, 256, 16


def skip_unless(path: str) -> None:
    reason = available_gemm_paths(torch.device("cuda"))[path]
    if reason is not None:
        pytest.skip(reason)


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().cuda()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("path", [*FP8_PATHS, "exact"])
def test_one_gemm(path: str, transposed: bool) -> None:
    """Forward multiplies the bytes, dgrad what the dequantised weight gives; against that weight."""
    skip_unless(path)
    stored = draw(L, *((K, N) if transposed else (N, K)), seed=0, scale=K**-0.5)
    frozen = MXWeight.of(stored, transposed=transposed)
    weight = frozen.transpose(-2, -1) if transposed else frozen
    recipe, offs = Recipe("mine", gemm_path=path), torch.tensor([70, 70, 250, 256], device="cuda", dtype=torch.int32)
    x, grad = draw(256, K, seed=1).requires_grad_(), draw(256, N, seed=2)
    results = []
    for read in (weight, weight.dequantize()):
        out = expert_mm(x, read, offs, recipe)
        results.append((out.detach(), *torch.autograd.grad(out, (x,), grad)))
    (out, dx), (want, want_dx) = results
    assert sqnr(want, out) > 45
    assert torch.equal(dx, want_dx)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("path", FP8_PATHS)
@pytest.mark.parametrize(("which", "transposed"), [("dgrad", False), ("forward", True)])
def test_the_other_form_from_the_bytes_is_that_of_the_values(
    which: str, transposed: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight, and two that are concatenated; the values in bf16 are never made."""
    skip_unless(path)
    gemm = gemm_options(torch.device("cuda"), torch.bfloat16, path, "hp", "rceil", False)
    gate, up = (MXWeight.of(draw(L, *((K, N) if transposed else (N, K)), seed=seed, scale=K**-0.5)) for seed in (0, 1))
    pairs = [(gate.transpose(-2, -1), None)] if transposed else [(gate, None), (gate, up)]
    plain = [[part if part is None else part.dequantize() for part in pair] for pair in pairs]
    wanted = [Weights(*pair, gemm).quantized(which) for pair in plain]
    monkeypatch.setattr(direct, "dequantize", lambda *_: pytest.fail("dequantised"))
    for pair, want in zip(pairs, wanted, strict=True):
        for a, b in zip(Weights(*pair, gemm).quantized(which), want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("recipe", "least"), [("hp", 42), ("mxfp8_wgrad_with_hp", 20), ("mxfp8_wgrad_with_mx", 19)])
def test_adapters_against_float64(recipe: str, least: float) -> None:
    H, D, T, C = 96, K, 512, 2
    w1, w2 = MXWeight.of(draw(L, 2 * H, D, seed=0, scale=D**-0.5)), MXWeight.of(draw(L, D, H, seed=1, scale=H**-0.5))
    shapes = {"a1": (L, R, D), "b1": (L, 2 * H, R), "a2": (L, R, H), "b2": (L, D, R)}
    leaf = {name: draw(*shape, seed=3 + n, scale=0.05).requires_grad_() for n, (name, shape) in enumerate(shapes.items())}
    x, dy = draw(T, D, seed=8).requires_grad_(), draw(T, D, seed=9)
    scores, experts = torch.rand(T, L, generator=torch.Generator().manual_seed(10)).cuda().topk(C)
    y = fused_experts(x, experts, scores, w1, None, w2, None, L, group="", recipe=recipe, lora=ExpertLora(**leaf))
    y.backward(dy)
    exact = {name: value.detach().double().requires_grad_() for name, value in (leaf | {"x": x}).items()}
    want = torch.zeros(T, D, dtype=torch.float64, device="cuda")
    for expert in range(L):
        first, second = (
            w.dequantize()[expert].double() + exact[f"b{side}"][expert] @ exact[f"a{side}"][expert] for side, w in (("1", w1), ("2", w2))
        )
        gate, up = (exact["x"] @ first.T).chunk(2, -1)
        weight = ((experts == expert) * scores).sum(-1, keepdim=True)
        want = want + ((nn.functional.silu(gate) * up) @ second.T) * weight
    want.backward(dy.double())
    assert sqnr(want, y) > least
    for name, value in (leaf | {"x": x}).items():
        assert sqnr(exact[name].grad, value.grad) > least, name


def test_no_host_sync_and_memory() -> None:
    """Two layers: the form that dgrad reads is dropped after each, and nothing waits for the host."""
    torch.manual_seed(0)
    config = MoEConfig(dim=512, hidden=512, num_experts=16, top_k=2)
    model = nn.Sequential(FusedMoE(config), FusedMoE(config)).cuda().bfloat16()
    mxep.quantize_base(model)
    stored = sum(p.qdata.nbytes + p.scale.nbytes for p in model.parameters() if isinstance(p, MXWeight))
    x = draw(64, 512, seed=1)

    def step() -> None:
        leaf = x.clone().requires_grad_()
        model(leaf).float().square().sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one_layer = stored // 2
    assert torch.cuda.max_memory_allocated() - before < 5 * one_layer, "one layer's bytes and forms, at a time"
    assert torch.cuda.memory_allocated() - before < one_layer // 4
