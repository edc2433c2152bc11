"""`Recipe.hp_below_rows`: below the limit a call has the values of high precision, at the limit the bits of MXFP8, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.virtual import run_virtual
from torch import Tensor, nn

import mxep
from mxep.moe.experts import Experts
from mxep.parallel import MXLinear
from mxep.recipe import RECIPES, Recipe

T, D, H, E, C = 48, 64, 32, 4, 2
MXFP8, HP = "mxfp8_gemm", "hp"  # neither exchanges in MXFP8, so below the limit nothing is rounded
ROWS = T * C // E  # per expert

Layer = Callable[[Recipe], tuple[Callable[[Tensor], Tensor], nn.Module]]


def limited(name: str, rows: int) -> Recipe:
    return dataclasses.replace(RECIPES[name], hp_below_rows=rows)


def bits(layer: Layer, recipe: Recipe, x: Tensor) -> list[Tensor]:
    """Output, gradient of x and those of the parameters."""
    torch.manual_seed(0)
    call, module = layer(recipe)
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    grads = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Within float32's rounding: experts in blocks multiply gate and up in one GEMM, the recipe "hp" in two."""
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in zip(a, b, strict=True))


def fused_experts(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    module = nn.Module()
    module.w1, module.w2 = (nn.Parameter(torch.randn(E, *shape) / 8) for shape in ((2 * H, D), (D, H)))
    choices, scores = torch.rand(T, E).topk(C).indices, torch.rand(T, C)
    return lambda x: mxep.fused_experts(x, choices, scores, module.w1, None, module.w2, None, E, group="", recipe=recipe), module


def experts(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    module = Experts(D, H, E, recipe)
    return lambda x: module(x, torch.tensor([32, 0, 8, 8])), module


def experts_one_by_one(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    call, module = experts(recipe)
    module.fused = False  # type: ignore[assignment]
    return call, module


def moe(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    layer = mxep.MoE(mxep.MoEConfig(D, H, E, C), recipe)
    return layer, layer


def fused_moe(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    layer = mxep.FusedMoE(mxep.MoEConfig(D, H, E, C), recipe)
    return layer, layer


class Plain(nn.Module):
    """A user's experts, for `convert_experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H, D) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight.transpose(1, 2), offs=torch.tensor([32, 32, 40, 48], dtype=torch.int32))


def converted(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    model = nn.ModuleDict({"experts": Plain()})
    if recipe.gemm == "mxfp8":
        mxep.convert_experts(model, ["experts"], recipe)
    return model["experts"], model


# layer, rows per weight in its call: padded rows of experts in blocks
CASES: dict[str, tuple[Layer, int]] = {
    "fused_experts": (fused_experts, ROWS),
    "FusedMoE": (fused_moe, ROWS),
    "MoE": (moe, ROWS + 32),
    "Experts": (experts, T // E),
    "Experts, one by one": (experts_one_by_one, T // E),
    "convert_experts": (converted, T // E),
}


@pytest.mark.parametrize("name", CASES)
def test_below_and_at_the_limit(name: str) -> None:
    layer, rows = CASES[name]
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16 if name == "convert_experts" else torch.float32)
    if name == "convert_experts":
        found = layer
        layer = lambda recipe: (lambda made: (made[0], made[1].bfloat16()))(found(recipe))  # noqa: E731
    plain, quantised = bits(layer, RECIPES[HP], x), bits(layer, RECIPES[MXFP8], x)
    alike = close if name in ("MoE", "Experts") else same
    assert not alike(plain, quantised)
    assert same(bits(layer, limited(MXFP8, rows), x), quantised), "at the limit"
    assert alike(bits(layer, limited(MXFP8, rows + 1), x), plain), "below"


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_dense_layers(recipe: str) -> None:
    def layer(recipe: Recipe) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
        linear = nn.Linear(D, H)
        module = linear if recipe.gemm == "hp" else MXLinear(linear, recipe)
        return module, module

    x = torch.randn(2, T // 2, D)
    assert same(bits(layer, limited(recipe, T), x), bits(layer, RECIPES[recipe], x))
    assert same(bits(layer, limited(recipe, T + 1), x), bits(layer, RECIPES[HP], x))


@pytest.mark.parametrize("name", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_rows_dispatched_in_mx_are_multiplied_as_their_values(name: str) -> None:
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    came = mxep.quantize_mx(x).dequantize()
    found, want = bits(fused_experts, limited(name, ROWS + 1), x), bits(fused_experts, RECIPES[HP], came)
    assert torch.equal(found[0], want[0]), "the error of tokens that were dispatched in MXFP8"
    assert not torch.equal(found[1], want[1]), "the gradient's exchange stays in MXFP8"


def test_ranks_with_other_numbers_of_tokens_agree() -> None:
    """The limit counts the tokens of all ranks; the last rank has none."""

    def layer(rank: int, world: int, group: str, recipe: Recipe) -> list[Tensor]:
        seeded = torch.Generator().manual_seed(0)  # a generator of this rank: ranks are threads and share the global one
        w1, w2 = torch.randn(E, 2 * H, D, generator=seeded) / 8, torch.randn(E, D, H, generator=seeded) / 8
        router, x = torch.randn(E, D, generator=seeded), torch.randn(T, D, generator=seeded)
        mine = slice(rank * E // world, (rank + 1) * E // world)
        x = x[: T if rank == 0 else 0].requires_grad_()
        leaves = w1[mine].clone().requires_grad_(), w2[mine].clone().requires_grad_()
        y = mxep.fused_moe(x, router, leaves[0], None, leaves[1], None, C, E, group=group, recipe=recipe)
        y.sum().backward()
        return [y.detach(), *(leaf.grad for leaf in (x, *leaves) if leaf.grad is not None)]

    def both(rank: int, world: int, group: str) -> None:
        plain, quantised = (layer(rank, world, group, RECIPES[name]) for name in (HP, MXFP8))
        assert same(layer(rank, world, group, limited(MXFP8, ROWS)), quantised)
        assert same(layer(rank, world, group, limited(MXFP8, ROWS + 1)), plain)

    run_virtual(both, 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"hp_below_rows=-1, want rows per weight from 0 on"):
        limited(MXFP8, -1)
    x, weight = torch.randn(6, 64), torch.randn(2, 32, 64)
    with pytest.raises(ValueError, match=r"ep_grouped_mm: recipe 'mxfp8_gemm' has hp_below_rows=8, want 0.*five blocks"):
        mxep.ep_grouped_mm(x, weight, [6], [6], torch.tensor([2, 4]), group="", recipe=limited(MXFP8, 8))
