"""Stop 1, route: which C experts each token goes to, and with which weight.

    before  tokens (T, D), bf16 or float32
    after   scores (T, C) float32, experts (T, C) int64, counts (E,) int64      next: ep/order.py sorts rows by expert
    backward  through the scores of the chosen experts and through the two losses, never through the choice
    host syncs  none

Scores are float32 from the logits on, whatever the tokens' dtype: two bf16 scores that tie would make the choice arbitrary.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def route_without_gradient(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig, with_loss: bool = True) -> Routing:
    """Logits (T, E) float32 or of 16 bits, bias (E,) or None -> `Routing`, without a gradient; without its loss it is 0."""
    choice = config.top_k, config.score_function, config.num_groups, config.top_groups, config.force_balance
    factors = (config.balance_loss, config.z_loss) if with_loss else (0.0, 0.0)
    weights = config.renormalize, config.route_scale
    return Routing(*torch.ops.mxep.route_tokens(logits.detach(), expert_bias, *choice, *weights, *factors))


def router_gradients(
    logits: Tensor, experts: Tensor, counts: Tensor | None, d_scores: Tensor, d_loss: Tensor, config: MoEConfig, dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits (T, E) in that dtype, when the choice (T, C) int64 has been made."""
    counts = experts.new_empty(config.num_experts) if counts is None else counts
    how = config.score_function, config.renormalize, config.route_scale, config.balance_loss, config.z_loss
    return torch.ops.mxep.router_backward(logits, experts, counts, d_scores, d_loss, *how, dtype)


def weigh(logits: Tensor, scores: Tensor, experts: Tensor, counts: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Weights of the choices (T, C) and the loss () of a choice that was made: all of `route` that has a gradient.

    logits, scores (T, E) float32; experts (T, C); counts (E,).
    """
    loss = losses(logits, scores, counts, config.top_k, config.balance_loss, config.z_loss)
    return weigh_choices(scores, experts, config.renormalize, config.route_scale), loss


def route(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) of any float dtype, bias (E,) or None -> `Routing`.

    The choice is that of `route_without_gradient`; weights and loss are made again by operators that autograd knows, which may round
    otherwise.
    """
    logits = logits.float()
    chosen = route_without_gradient(logits, expert_bias, config, with_loss=False)
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
        gate = self.gate
        if type(gate) is nn.Linear and gate.weight.dtype != tokens.dtype:
            logits = F.linear(tokens, gate.weight.to(tokens.dtype))  # (T, E)
        else:
            logits = gate(tokens)  # an adapter in its place, and hooks, have their say
        return route(logits, expert_bias, self.config)
