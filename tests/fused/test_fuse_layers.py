"""`fuse_layers`: layers that it replaces, and layers that it refuses because it would lose a part of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.truth import raises_naming
from torch import Tensor, nn

from mxep.moe import FusedMoE, MoE, MoEConfig, SwiGLU, fuse_layers
from mxep.moe.router import Router, Routing
from mxep.parallel import recompute_blocks

CONFIG = MoEConfig(64, 96, 4, 2)


def test_one_layer_in_several_places_is_fused_in_all_of_them() -> None:
    moe = MoE(CONFIG, "hp")
    model = nn.Sequential(moe, nn.Sequential(nn.Linear(64, 64), moe), moe)
    assert fuse_layers(model) == ["0", "2", "1.1"]
    assert isinstance(model[0], FusedMoE)
    assert model[2] is model[0]
    assert model[1][1] is model[0]


class OwnMoE(MoE):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnSum(MoE):
    def _sum_choices(self, rows: Tensor, scores: Tensor, order: Tensor) -> Tensor:
        return super()._sum_choices(rows, scores.square(), order)


class OwnRouter(Router):
    def forward(self, tokens: Tensor, expert_bias: Tensor | None = None) -> Routing:
        return super().forward(tokens.tanh(), expert_bias)


def own_router(moe: MoE) -> None:
    moe.router = OwnRouter(CONFIG)


def foreign_router(moe: MoE) -> None:
    moe.router = nn.Identity()


def hooked(of: Callable[[MoE], nn.Module]) -> Callable[[MoE], object]:
    return lambda moe: of(moe).register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (OwnMoE, lambda _: None, ("OwnMoE with Router and Experts",)),
        (OwnSum, lambda _: None, ("OwnSum with Router and Experts",)),
        (MoE, own_router, ("MoE with OwnRouter and Experts",)),
        (MoE, foreign_router, ("MoE with Identity and Experts",)),
        (MoE, lambda moe: recompute_blocks([moe], "full"), ("MoE", "recomputes")),
        (MoE, hooked(lambda moe: moe), ("MoE", "hooks")),
        (MoE, hooked(lambda moe: moe.experts), ("Experts", "hooks")),
        (MoE, hooked(lambda moe: moe.router.gate), ("Linear", "hooks")),
        (MoE, lambda moe: moe.experts.register_full_backward_hook(lambda *_: None), ("Experts", "hooks")),
    ],
    ids=[
        "a forward",
        "a step",
        "a router",
        "no router",
        "recomputation",
        "a hook",
        "a hook of the experts",
        "a hook of the gate",
        "a backward hook",
    ],
)
def test_layers_whose_parts_would_be_lost_are_refused(kind: type[MoE], change: Callable[[MoE], object], named: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(CONFIG, "hp"), kind(CONFIG, "hp"))
    change(model[1])
    with raises_naming("FusedMoE.of", *named, "fuse before"):
        fuse_layers(model)
    assert type(model[0]) is MoE, "all or none"


def test_an_adapter_in_place_of_the_gate_is_refused() -> None:
    """It was added after the layer was fused, which would read only its weight."""

    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    layer = FusedMoE(MoEConfig(32, 32, 4, 2))
    layer.router.gate = Adapter(32, 4, bias=False)
    with raises_naming("FusedMoE: router.gate is a Adapter", "want a torch.nn.Linear", "or use MoE"):
        layer(torch.randn(3, 32))
    layer.router.gate = nn.Linear(32, 4, bias=False)
    layer.router.gate.forward = torch.tanh
    with raises_naming("FusedMoE: router.gate is a Linear with a forward of its own", "or use MoE"):
        layer(torch.randn(3, 32))


def test_the_form_of_swiglu_is_the_experts_own() -> None:
    """Set on the experts or by the configuration, before or after a layer is fused: both layers compute by it."""
    torch.manual_seed(0)
    config, x = MoEConfig(64, 32, 4, 2, swiglu_limit=0.25), torch.randn(20, 64)
    moe = MoE(config, "hp")
    for form in (config.swiglu, SwiGLU(0.5, 1.702, 1.0)):
        moe.experts.swiglu = form
        fused = FusedMoE.of(moe)
        torch.testing.assert_close(fused(x), moe(x))
        fused.experts.swiglu = SwiGLU()
        assert not torch.allclose(fused(x), moe(x), rtol=1e-3)
    moe.experts.activation = "geglu"
    with raises_naming("FusedMoE.of: experts.activation='geglu'", "change both"):
        FusedMoE.of(moe)
