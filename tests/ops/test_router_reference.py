"""The router's choice, and the closed form of its gradient against autograd through the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import route_cases
from tests.truth import raises_naming

from mxep.moe.config import MoEConfig
from mxep.ops.routing.router_reference import mean_shares, score_experts, weigh_topk, z_loss

T, E, C = 33, 12, 3


def drawn(favourite: int | None = None) -> tuple[torch.Tensor, ...]:
    """Logits, experts, and gradients of weights, shares and z."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(T, E, generator=generator) * 3
    if favourite is not None:
        logits[:, favourite] += 50
    experts = torch.rand(T, E, generator=generator).argsort(1)[:, :C]
    return logits, experts, torch.randn(T, C, generator=generator), torch.randn(E, generator=generator), torch.tensor(0.7)


def of_autograd(
    logits: torch.Tensor, experts: torch.Tensor, d_weights: torch.Tensor, d_shares: torch.Tensor, d_z: torch.Tensor, config: MoEConfig
) -> torch.Tensor:
    """In float64."""
    leaf = logits.double().requires_grad_()
    scores = score_experts(leaf, config.score_function)
    weights = weigh_topk(scores, experts, config.renormalize, config.route_scale)
    total = (weights * d_weights).sum()
    if config.balance_loss:
        total = total + (mean_shares(scores) * d_shares).sum()
    if config.z_loss:
        total = total + z_loss(leaf) * d_z
    return torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("losses", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_autograd(score_function: Any, renormalize: bool, losses: tuple[float, float]) -> None:
    changes = {"score_function": score_function, "renormalize": renormalize, "route_scale": 2.5}
    config = MoEConfig(64, 32, E, C, balance_loss=losses[0], z_loss=losses[1], **changes)
    for favourite in (None, 5):
        logits, experts, d_weights, d_shares, d_z = drawn(favourite)
        want = of_autograd(logits, experts, d_weights, d_shares, d_z, config)
        wanted = d_shares if losses[0] else None, d_z if losses[1] else None
        for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
            got = torch.ops.mxep.router_backward(logits, experts, d_weights, *wanted, score_function, renormalize, 2.5, dtype)
            assert got.dtype == dtype
            assert float((got.double() - want).norm() / want.norm()) < near


def test_scores_that_underflowed_are_finite() -> None:
    _, *given = drawn()
    logits = torch.full((T, E), -300.0)
    assert torch.ops.mxep.router_backward(logits, *given, "sigmoid", True, 1.0, torch.float32).isfinite().all()


def test_no_tokens() -> None:
    empty = torch.zeros(0, E), torch.zeros(0, C, dtype=torch.int64), torch.zeros(0, C), torch.zeros(E), torch.ones(())
    assert torch.ops.mxep.router_backward(*empty, "softmax", True, 1.0, torch.bfloat16).shape == (0, E)


def test_errors() -> None:
    logits, experts, d_weights, d_shares, d_z = drawn()
    how = "softmax", True, 1.0, torch.float32
    with raises_naming("router_backward", "want logits (T, E) float32"):
        torch.ops.mxep.router_backward(logits.double(), experts, d_weights, d_shares, d_z, *how)
    with raises_naming("router_backward", f"({E - 1},)"):
        torch.ops.mxep.router_backward(logits, experts, d_weights, d_shares[1:], d_z, *how)
    with raises_naming("router_backward", "score_function='tanh'"):
        torch.ops.mxep.router_backward(logits, experts, d_weights, None, None, "tanh", *how[1:])


@pytest.mark.parametrize("shape", route_cases.SHAPES)
def test_choice(shape: tuple[int, int, int, int]) -> None:
    for call in route_cases.calls(shape):
        route_cases.check(call, torch.ops.mxep.route_tokens(*call))


def test_choice_of_nan() -> None:
    for call in route_cases.calls((9, 24, 5, 3)):
        call[0][4] = torch.nan
        if not call[6]:
            route_cases.check_nan(call, torch.ops.mxep.route_tokens(*call), 4)


def test_errors_of_the_choice() -> None:
    logits, how = torch.randn(4, 6), (False, True, 1.0, False, False)
    for given, told in (
        ((logits.double(), None, 2, "softmax", 1, 1), "want (T, E) float32"),
        ((logits, torch.zeros(5), 2, "softmax", 1, 1), "want (6,) float32 or 16 bits"),
        ((logits, None, 2, "tanh", 1, 1), "score_function='tanh'"),
        ((logits, None, 2, "softmax", 4, 1), "in the best 1 of 4 groups"),
        ((logits, None, 3, "softmax", 3, 1), "3 of 6 experts in the best 1 of 3 groups"),
    ):
        with raises_naming("route_tokens", told):
            torch.ops.mxep.route_tokens(*given, *how)
