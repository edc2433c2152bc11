"""Outputs of layers are no views: FSDP2 hooks them, and an in-place operation on a view would drop the hook and with it the reduction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mxep
from mxep.mx.rows import unflatten_rows
from mxep.parallel import convert_linears

pytestmark = pytest.mark.usefixtures("one_rank")
D, H, E, C = 64, 32, 4, 2


def weights() -> tuple[Tensor, Tensor]:
    """Gate and up joined, and down."""
    return nn.Parameter(torch.randn(E, 2 * H, D) / 8), nn.Parameter(torch.randn(E, D, H) / 6)


def routing(*lead: int) -> tuple[Tensor, Tensor]:
    """Choices and scores."""
    return torch.rand(*lead, E).topk(C)[1], torch.rand(*lead, C)


def fused_moe(x: Tensor, recipe: str) -> Tensor:
    w1, w2 = weights()
    return mxep.fused_moe(x, nn.Parameter(torch.randn(E, D)), w1, None, w2, None, C, E, recipe=recipe)


def fused_experts(x: Tensor, recipe: str) -> Tensor:
    w1, w2 = weights()
    return mxep.fused_experts(x, *routing(*x.shape[:-1]), w1, None, w2, None, E, recipe=recipe)


def linear(x: Tensor, recipe: str) -> Tensor:
    model = nn.Sequential(nn.Linear(D, H))
    convert_linears(model, "0", recipe)
    return model(x)


def grouped_mm(x: Tensor, recipe: str) -> Tensor:
    rows, ends = x.reshape(-1, D), torch.tensor([5, x.numel() // D], dtype=torch.int32)
    weight = nn.Parameter(torch.randn(2, H, D)).transpose(-2, -1)
    return mxep.to_mxfp8_then_scaled_grouped_mm(rows, weight, ends, wgrad_with_hp=recipe != "mxfp8", pad_token_groups_for_grouped_mm=True)


LAYERS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "MoE": lambda x, recipe: mxep.MoE(mxep.MoEConfig(D, H, E, C, num_shared_experts=1), recipe)(x),
    "FusedMoE": lambda x, recipe: mxep.FusedMoE(mxep.MoEConfig(D, H, E, C, num_shared_experts=1), recipe)(x),
    "FusedMoE without shared experts": lambda x, recipe: mxep.FusedMoE(mxep.MoEConfig(D, H, E, C), recipe)(x),
    "fused_moe": fused_moe,
    "fused_experts": fused_experts,
    "a linear layer": linear,
    "grouped_mm": grouped_mm,
}


CASES = [
    (layer, recipe)
    for layer in LAYERS
    for recipe in ("hp", "mxfp8_wgrad_with_hp", "mxfp8")
    if not (recipe == "hp" and layer == "a linear layer") and not (recipe == "mxfp8" and layer.lower().startswith("fused"))
]


@pytest.mark.parametrize("lead", [(13,), (3, 7)], ids=["rows", "sequences"])
@pytest.mark.parametrize(("layer", "recipe"), CASES)
def test_outputs_are_no_views(layer: str, recipe: str, lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, D, requires_grad=True)
    y = LAYERS[layer](x, recipe)
    assert y.requires_grad
    assert y._base is None
    y += 1  # and may be written to
    y.sum().backward()
    assert x.grad is not None


def test_leading_dimensions_are_restored() -> None:
    rows = torch.randn(6, 4, requires_grad=True)
    made = rows * 2
    y = unflatten_rows(made, torch.Size((2, 3)))
    assert y.shape == (2, 3, 4)
    assert y.data_ptr() == made.data_ptr()  # nothing is copied
    assert y._base is None
    grad = torch.randn(2, 3, 4)
    y.backward(grad)
    assert torch.equal(rows.grad, 2 * grad.view(6, 4))
    assert unflatten_rows(torch.randn(1, 4), torch.Size(())).shape == (4,)


class OwnLayer(nn.Module):
    """A user's experts around `fused_experts`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w1, self.w2 = weights()

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        return mxep.fused_experts(x, chosen, scores, self.w1, None, self.w2, None, E, group="", recipe="mxfp8_wgrad_with_hp")


def write_to_output(rank: int, world: int) -> None:
    """The gradients of two ranks' tokens, sharded, whether the output of the sharded layer is written to or added to."""
    torch.manual_seed(2)  # the same tokens for both, so that the average over ranks is the gradient on one
    x, (chosen, scores) = torch.randn(3, 5, D), routing(3, 5)
    alone = OwnLayer()
    (alone(x, chosen, scores) + x).square().mean().backward()
    layer = fully_shard(OwnLayer())
    y = layer(x, chosen, scores)
    y += x
    y.square().mean().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)


def test_a_sharded_layers_output_may_be_written_to() -> None:
    run_ranks(write_to_output, 2)
