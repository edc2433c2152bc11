"""Stop 1, route: which C experts each token goes to, and with which weight.

    before  tokens (T, D), bf16 or float32
    after   scores (T, C) float32, experts (T, C) int64, counts (E,) int64      next: ep/order.py sorts rows by expert
    backward  through the scores of the chosen experts and through the two losses, never through the choice
    host syncs  none

Scores are float32 from the logits on, whatever the tokens' dtype: two bf16 scores that tie would make the choice arbitrary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxep.moe.config import MoEConfig
from mxep.reference.router import losses, score_experts, weigh_choices


@dataclass(frozen=True)
class Routing:
    """What the router decided.

    Attributes:
        scores: (T, C) float32, weight of each choice, differentiable.
        experts: (T, C) int64, distinct in each row, in rising order: so passes over experts meet a token's choices in their order.
        counts: (E,) int64, choices per expert on this rank.
        loss: () float32, balance loss + z-loss times their factors; 0 when both are off.
    """

    scores: Tensor
    experts: Tensor
    counts: Tensor
    loss: Tensor


def routed(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E), bias (E,) float32 or None -> `Routing` without a gradient."""
    choice = config.top_k, config.score_function, config.num_groups, config.top_groups, config.force_balance
    weights = config.renormalize, config.route_scale, config.balance_loss, config.z_loss
    return Routing(*torch.ops.mxep.route_tokens(logits.detach(), expert_bias, *choice, *weights))


def weigh(logits: Tensor, scores: Tensor, experts: Tensor, counts: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Weights of the choices (T, C) and the loss () of a choice that was made: all of `route` that has a gradient.

    logits, scores (T, E) float32; experts (T, C); counts (E,).
    """
    loss = losses(logits, scores, counts, config.top_k, config.balance_loss, config.z_loss)
    return weigh_choices(scores, experts, config.renormalize, config.route_scale), loss


def route(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) of any float dtype, bias (E,) float32 or None -> `Routing`."""
    chosen = routed(logits, expert_bias, replace(config, balance_loss=0.0, z_loss=0.0))
    logits = logits.float()
    weights, loss = weigh(logits, score_experts(logits, config.score_function), chosen.experts, chosen.counts, config)
    return Routing(weights, chosen.experts, chosen.counts, loss)


class Router(nn.Module):
    """The gate, a (E, D) matrix without bias, and the choice made from its logits."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.num_experts, bias=False)

    def forward(self, tokens: Tensor, expert_bias: Tensor | None = None) -> Routing:
        """tokens (T, D), expert_bias (E,) float32 or None -> `Routing`."""
        logits = F.linear(tokens, self.gate.weight.to(tokens.dtype))  # (T, E)
        return route(logits, expert_bias, self.config)
