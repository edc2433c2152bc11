"""What a router's choice must be, whichever of those that tie it took; for the twin and for the kernel; and how near its gradient is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mxep import reference
from mxep.reference.router import keep_best_groups, losses, score_experts, weigh_choices

Call = tuple[Any, ...]  # of `route_tokens`
SHAPES = ((0, 8, 2, 2), (1, 1, 1, 1), (70, 24, 5, 3), (3, 256, 8, 8), (33, 100, 7, 4))  # T, E, C, groups


def calls(shape: tuple[int, int, int, int], device: str = "cpu") -> Iterator[Call]:
    """Every score function with and without a bias, groups, renormalising, losses, 16 bits, forced balance."""
    T, E, C, G = shape
    logits, bias = torch.randn(T, E, device=device) * 3, torch.randn(E, device=device) / 4
    for score_function in ("softmax", "sigmoid"):
        yield logits, None, C, score_function, 1, 1, False, True, 1.0, 0.0, 0.0
        yield logits, bias, C, score_function, 1, 1, False, False, 2.5, 0.3, 0.0
        yield logits.bfloat16(), bias, C, score_function, G, max(1, G - 1), False, True, 2.5, 0.0, 0.2
        yield logits, bias, C, score_function, 1, 1, True, True, 1.0, 0.3, 0.2


def check(call: Call, got: tuple[torch.Tensor, ...]) -> None:
    """The best by value, in rising order, with the weights and losses that belong to them; forced balance as the twin has it."""
    logits, bias, C, score_function, G, top_groups, forced, renormalize, scale, balance, z = call
    (T, E), logits = logits.shape, logits.float()
    weights, experts, counts, loss = got
    assert (weights.shape, experts.shape, counts.shape, loss.shape) == ((T, C), (T, C), (E,), ())
    assert (weights.dtype, experts.dtype, counts.dtype, loss.dtype) == (torch.float32, torch.int64, torch.int64, torch.float32)
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
    torch.testing.assert_close(weights, weigh_choices(scores, experts, renormalize, scale), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss, losses(logits, scores, counts, C, balance, z), rtol=1e-5, atol=1e-6)


def check_gradient(given: Call, how: tuple[Any, ...], got: torch.Tensor, want: torch.Tensor, near: float) -> None:
    """Gradients of logits (T, E) by `router_backward(*given, *how)` as near as float32 allows, where equal terms cancel too.

    A single score, renormalised, is always 1, so its gradient is the difference of two terms of the size of d_weights; and what the
    balance loss asks of the shares counts only as far as it differs from its mean over a token's.
    """
    (T, E), C, (_, _, counts, d_weights, d_loss) = given[0].shape, given[1].shape[1], given
    _, renormalize, scale, balance, _, _ = how
    d_shares = d_loss * balance * E / max(T, 1) * counts.double() / max(T * C, 1)
    cancelled = T**0.5 * d_shares.norm()
    if renormalize and C == 1:
        cancelled += scale * d_weights.double().norm()
    assert got.dtype == want.dtype == how[-1]
    assert (got.double() - want.double()).norm() <= near * (want.double().norm() + cancelled)


def check_nan(call: Call, got: tuple[torch.Tensor, ...], token: int) -> None:
    """A token of NaN has C experts and no weight, and harms nobody else."""
    weights, experts, counts, _ = got
    assert bool((experts.diff(dim=1) > 0).all())
    assert bool(((experts >= 0) & (experts < call[0].shape[1])).all())
    assert int(counts.sum()) == experts.numel()
    assert bool(weights[token].isnan().all())
    assert bool(weights[torch.arange(len(weights), device=weights.device) != token].isfinite().all())
