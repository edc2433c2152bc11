"""The expert FFN on a GPU: errors against float64 and those of separate GEMMs, biases, layouts, one graph, gradients in halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.moe_truth import experts_truth
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep.moe.expert_mlp import ExpertWeights
from mxep.moe.experts import Experts
from mxep.moe.ffn import expert_ffn
from mxep.mx import quantize_mx
from mxep.mx.weight_cache import WeightCache
from mxep.ops.activation.functions import ACTIVATIONS, SwiGLU
from mxep.recipe import resolve_recipe

pytestmark = pytest.mark.gpu
P, D, H, L = 1024, 512, 416, 4
COUNTS = [320, 0, 97, 543]  # an empty expert, groups of any size, and 64 rows of no expert
RECIPES = ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8_gemm", "mxfp8_gemm_wgrad_with_mx")
FUNCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"swiglu": SwiGLU(2.0)},
    "gpt_oss": {"swiglu": SwiGLU(2.0, 1.702, 1.0)},
    **{name: {"activation": name} for name in ACTIVATIONS if name != "swiglu"},
}


def experts(recipe: str, fused: bool = True, bias: bool = True, **how: Any) -> Experts:
    torch.manual_seed(0)
    module = Experts(D, H, L, recipe, bias=bias, **how).to("cuda", torch.bfloat16)
    module.fused = fused
    with torch.no_grad():
        for value in (module.b1, module.b2, module.b3):
            if value is not None:
                value.normal_()
    return module


def rows(recipe: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, dy = (torch.randn(P, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return (x, dy) if resolve_recipe(recipe).dispatch == "hp" else (quantize_mx(x), quantize_mx(dy))


def run(module: torch.nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, dx and the gradients of all parameters."""
    leaf = x.detach().requires_grad_()
    y = module(leaf, torch.tensor(COUNTS, device="cuda"))
    return [y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), dy)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_separate_gemms(recipe: str, function: str):
    x, dy = rows(recipe)
    fused, separate = (experts(recipe, fused, **FUNCTIONS[function]) for fused in (True, False))
    want = experts_truth(fused, x, dy, COUNTS)
    for (name, exact), a, b in zip(want.items(), run(fused, x, dy), run(separate, x, dy), strict=True):
        errors = [float((value.double() - exact).norm() / exact.norm()) for value in (a, b)]
        assert errors[0] <= 1.05 * errors[1] + 1e-7, f"{name}: {errors}"
    y, dx = run(fused, x, dy)[:2]
    assert not y[sum(COUNTS) :].any()
    assert not dx[sum(COUNTS) :].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_weights_change_nothing(recipe: str):
    x, dy = rows(recipe)
    module = experts(recipe)
    plain = run(module, x, dy)
    module.keep_quantized(WeightCache())
    for _ in range(2):
        for a, b in zip(plain, run(module, x, dy), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES[1:3])
def test_joined_weights(recipe: str):
    """Concatenated: the same bits. Interleaved: y's bits, and gradients up to blocks that hold 16 gates and 16 ups."""
    (x, dy), module = rows(recipe), experts(recipe, bias=False)
    y, dx, w1, w2, w3 = run(module, x, dy)
    offs = torch.tensor(COUNTS, device="cuda").cumsum(0)
    for layout, join in (
        ("concatenated", lambda a, b: torch.cat((a, b), 1)),
        ("interleaved", lambda a, b: torch.stack((a, b), 2).flatten(1, 2)),
    ):
        w13, leaf = join(module.w1, module.w3).detach().requires_grad_(), x.detach().requires_grad_()
        out = expert_ffn(leaf, ExpertWeights(w13, module.w2, layout=layout), offs, module.recipe)
        assert torch.equal(out, y), layout
        for a, b in zip(torch.autograd.grad(out, (leaf, w13, module.w2), dy), (dx, join(w1, w3), w2), strict=True):
            if layout == "concatenated":
                assert torch.equal(a, b)
            assert (a.float() - b.float()).norm() <= 0.06 * b.float().norm(), layout


@pytest.mark.parametrize("path", ["exact", "fp8", "fp8_span"])
def test_gradients_in_halves_are_those_of_the_whole(path: str):
    x, grad = torch.randn(P, D, device="cuda"), torch.randn(P, 2 * H, device="cuda") * torch.exp(torch.randn(P, 1, device="cuda"))
    operands = (*torch.ops.mxep.quantize(grad, "rceil"), *torch.ops.mxep.quantize(x, "rceil"))
    offs = torch.tensor(COUNTS, device="cuda").cumsum(0).int()
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.ops.mxep.grouped_wgrad_mx(*operands, offs, dtype, path)
        for half, want in zip(torch.ops.mxep.grouped_wgrad_mx_gate_up(*operands, offs, dtype, path), whole.chunk(2, 1), strict=True):
            assert half.is_contiguous()
            assert torch.equal(half, want)
        order = torch.randint(-1, P, (P,), device="cuda", dtype=torch.int32)  # x's rows through a map
        gathered = (*operands[:2], *torch.ops.mxep.gather_mx_rows(*operands[2:], order))
        want = torch.ops.mxep.grouped_wgrad_mx_gate_up(*gathered, offs, dtype, path)
        for half, other in zip(torch.ops.mxep.grouped_wgrad_mx_gate_up(*operands, offs, dtype, path, order), want, strict=True):
            assert torch.equal(half, other)


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_inductor(recipe: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CHECK", "0")  # checking mode reads the offsets on the host
    torch._dynamo.reset()
    (x, dy), module = rows(recipe), experts(recipe)
    compiled = torch.compile(module, fullgraph=True)
    for a, b in zip(run(module, x, dy), run(compiled, x, dy), strict=True):
        assert (a.float() - b.float()).norm() <= 1e-3 * b.float().norm()


def test_no_host_sync(no_sync, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CHECK", "0")
    (x, dy), module = rows(RECIPES[1]), experts(RECIPES[1])
    counts = torch.tensor(COUNTS, device="cuda")
    leaf = x.detach().requires_grad_()
    module(leaf, counts).backward(dy)
    with no_sync():
        module(leaf, counts).backward(dy)
