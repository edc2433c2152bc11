"""Checks of a router's choice, however ties are broken, for the reference and the kernel; and of its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mxep import reference
from mxep.ops.routing.router_reference import keep_best_groups, mean_shares, score_experts, weigh_topk, z_loss

Call = tuple[Any, ...]  # of `route_tokens`
SHAPES = ((0, 8, 2, 2), (1, 1, 1, 1), (70, 24, 5, 3), (3, 256, 8, 8), (33, 100, 7, 4))  # T, E, C, groups


def calls(shape: tuple[int, int, int, int], device: str = "cpu") -> Iterator[Call]:
    """Every score function with and without a bias, groups, renormalising, losses, 16 bits, forced balance."""
    T, E, C, G = shape
    logits, bias = torch.randn(T, E, device=device) * 3, torch.randn(E, device=device) / 4
    for score_function in ("softmax", "sigmoid"):
        yield logits, None, C, score_function, 1, 1, False, True, 1.0, False, False
        yield logits, bias, C, score_function, 1, 1, False, False, 2.5, True, False
        yield logits.bfloat16(), bias, C, score_function, G, max(1, G - 1), False, True, 2.5, False, True
        yield logits, bias, C, score_function, 1, 1, True, True, 1.0, True, True


def check(call: Call, got: tuple[torch.Tensor, ...]) -> None:
    """The best by value, in rising order, with the weights and parts of losses that belong to them; forced balance as in the reference."""
    logits, bias, C, score_function, G, top_groups, forced, renormalize, scale, with_shares, with_z = call
    (T, E), logits = logits.shape, logits.float()
    weights, experts, counts, shares, z = got
    assert [value.shape for value in got] == [(T, C), (T, C), (E,), (E,), ()]
    assert [value.dtype for value in got] == [torch.float32, torch.int64, torch.int64, torch.float32, torch.float32]
    assert bool(((experts >= 0) & (experts < E)).all())
    assert bool((experts.diff(dim=1) > 0).all()), "distinct, in rising order"
    scores = score_experts(logits, score_function)
    if forced:
        assert torch.equal(experts, reference.route_tokens(*call)[1])
    else:
        ranking = scores if bias is None else scores + bias
        ranking = keep_best_groups(ranking, G, top_groups) if G > 1 else ranking
        best = ranking.topk(C, dim=1).values
        torch.testing.assert_close(ranking.gather(1, experts).sort(dim=1, descending=True).values, best, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts, torch.bincount(experts.flatten(), minlength=E))
    torch.testing.assert_close(weights, weigh_topk(scores, experts, renormalize, scale), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(shares, mean_shares(scores) if with_shares else torch.zeros_like(shares), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(z, z_loss(logits) if with_z else torch.zeros_like(z), rtol=1e-5, atol=1e-6)


def check_gradient(given: Call, how: tuple[Any, ...], got: torch.Tensor, want: torch.Tensor, near: float) -> None:
    """Gradients of logits (T, E) by `router_backward(*given, *how)` as near as float32 allows, where equal terms cancel too.

    A single score, renormalised, is always 1, so its gradient is the difference of two terms of the size of d_weights; and what the
    balance loss asks of the shares counts only as far as it differs from its mean over a token's.
    """
    T, C, (_, _, d_weights, d_shares, _), (_, renormalize, scale, _) = given[0].shape[0], given[1].shape[1], given, how
    cancelled = 0.0 if d_shares is None else d_shares.double().norm() / max(T, 1) ** 0.5
    if renormalize and C == 1:
        cancelled += scale * d_weights.double().norm()
    assert got.dtype == want.dtype == how[-1]
    assert (got.double() - want.double()).norm() <= near * (want.double().norm() + cancelled)


def check_parts(parts: torch.Tensor, given: Call, how: tuple[Any, ...], want: torch.Tensor) -> None:
    """Parts (T, 3, E) in bf16 whose sum is the gradient (T, E) in float32: each is what the ones before it leave, rounded."""
    assert parts.dtype == torch.bfloat16
    check_gradient(given, how, parts.double().sum(1).float(), want, 2e-6)
    for first, second in zip(parts.double().unbind(1), parts[:, 1:].double().unbind(1), strict=False):
        assert bool((second.abs() <= first.abs() * 2**-8).all())
    assert parts.numel() < 300 or bool(parts[:, 2].any()), "more than 16 bits"


def check_nan(call: Call, got: tuple[torch.Tensor, ...], token: int) -> None:
    """A token of NaN has C experts and no weight, and changes no other token."""
    weights, experts, counts, *_ = got
    assert bool((experts.diff(dim=1) > 0).all())
    assert bool(((experts >= 0) & (experts < call[0].shape[1])).all())
    assert int(counts.sum()) == experts.numel()
    assert bool(weights[token].isnan().all())
    assert bool(weights[torch.arange(len(weights), device=weights.device) != token].isfinite().all())
