"""What has no second derivative says so, and what is not needed is neither made nor kept."""

from __future__ import annotations

import pytest
import torch
from tests.truth import Saved
from torch.utils._python_dispatch import TorchDispatchMode

import mxep.operators  # noqa: F401
from mxep import FusedMoE, MoE, MoEConfig, ep_grouped_mm, to_mxfp8_then_scaled_grouped_mm
from mxep.grouped_mm import expert_mm
from mxep.moe.experts import Experts
from mxep.recipe import RECIPES

OFFS = torch.tensor([32, 64], dtype=torch.int32)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and w (G, N, K), leaves in float32."""
    return torch.randn(64, 96).requires_grad_(), torch.randn(2, 32, 96).requires_grad_()


def second(out: torch.Tensor, x: torch.Tensor, constant: bool) -> None:
    """Backward through a backward that a constant gradient came into, or one that hangs on x."""
    (first,) = torch.autograd.grad(out.sum() if constant else (out**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (first**2).sum().backward()


@pytest.mark.parametrize("constant", [False, True])
def test_a_second_backward_is_an_error(constant: bool) -> None:
    a, w = operands()
    second(to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), OFFS, out_dtype=torch.float32, wgrad_with_hp=True), a, constant)
    second(ep_grouped_mm(a, w, [64], [64], torch.tensor([32, 32]), ""), a, constant)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_a_second_backward_through_a_layer_is_an_error(kind: type[MoE], constant: bool) -> None:
    moe = kind(MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, num_shared_experts=1))
    x = torch.randn(8, 64).requires_grad_()
    second(moe(x), x, constant)


class Operators(TorchDispatchMode):
    """Names of our operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mxep":
            self.names.append(func._schema.name.removeprefix("mxep::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_evaluation_quantises_rows_alone(name: str) -> None:
    a, w = operands()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, Operators() as ran, Saved() as saved:
            expert_mm(a, w, OFFS, RECIPES[name])
        assert ran.names == ["quantize", "quantize", "grouped_mm_mx"]
        assert saved == []


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_evaluation_of_the_one_call_makes_nothing_for_wgrad(name: str) -> None:
    a, w = operands()
    with torch.no_grad(), Operators() as ran, Saved() as saved:
        out = ep_grouped_mm(a, w, [64], [64], torch.tensor([32, 32]), "", name)
    assert {"quantize_both", "quantize_transposed"}.isdisjoint(ran.names)
    assert ran.names.count("grouped_mm_mx") == 1
    assert saved == []
    trained = ep_grouped_mm(a, w, [64], [64], torch.tensor([32, 32]), "", name)
    assert torch.equal(out, trained)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_frozen_weights_keep_no_input(name: str, fused: bool) -> None:
    experts = Experts(64, 32, 2, name)
    experts.fused = fused
    experts.requires_grad_(False)
    x = torch.randn(64, 64).requires_grad_()
    with Saved() as saved:
        y = experts(x, torch.tensor([32, 32]))
    weights = {w.untyped_storage().data_ptr() for w in experts.parameters()}
    kept = [t for t in saved if t.untyped_storage().data_ptr() not in weights]
    assert not [t for t in kept if t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()]
    assert not [t for t in kept if t.shape == x.shape and t.dtype == torch.float8_e4m3fn]
    y.sum().backward()
    assert x.grad is not None
