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

from mxep.moe.config import MoEConfig, ScoreFunction
from mxep.reference.router import FLOOR


@dataclass(frozen=True)
class Routing:
    """What the router decided.

    Attributes:
        scores: (T, C) float32, weight of each choice, differentiable.
        experts: (T, C) int64, distinct in each row.
        counts: (E,) int64, choices per expert on this rank.
        loss: () float32, balance loss + z-loss times their factors; 0 when both are off.
    """

    scores: Tensor
    experts: Tensor
    counts: Tensor
    loss: Tensor


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Choices per expert: experts (T, C) int64 -> (E,) int64.

    The numbers of `torch.bincount`, which synchronises the host on a GPU and has no fixed output shape under torch.compile.

    >>> count_choices(torch.tensor([[0, 2], [2, 3]]), 5).tolist()
    [1, 0, 2, 1, 0]
    """
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=experts.device).scatter_add(0, flat, torch.ones_like(flat))


def round_robin(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """Forced balance: choice c of token t is expert (t*C + c) mod E. Returns (T, C) int64.

    >>> round_robin(3, 2, 4, torch.device("cpu")).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    return torch.arange(num_tokens * top_k, device=device).remainder(num_experts).view(num_tokens, top_k)


def score_experts(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Logits (T, E) float32 -> scores (T, E) float32."""
    return logits.softmax(dim=-1) if score_function == "softmax" else logits.sigmoid()


def choose_experts(scores: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Tensor:
    """The C experts of each token, best first: scores (T, E) -> (T, C) int64.

    The bias (E,) moves the choice only; the weights come from the scores without it (DeepSeek-V3, arXiv 2412.19437, 2.1.2).
    """
    if config.force_balance:
        return round_robin(scores.shape[0], config.top_k, config.num_experts, scores.device)
    ranking = scores.detach()
    if expert_bias is not None:
        ranking = ranking + expert_bias
    if config.num_groups > 1:
        ranking = _keep_best_groups(ranking, config.num_groups, config.top_groups)
    return ranking.topk(config.top_k, dim=-1).indices


def _keep_best_groups(ranking: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """-inf for every expert outside its token's best groups: (T, E) -> (T, E)."""
    grouped = ranking.unflatten(-1, (num_groups, -1))  # (T, num_groups, E / num_groups)
    two_best = min(2, grouped.shape[-1])
    group_scores = grouped.topk(two_best, dim=-1).values.sum(dim=-1)  # (T, num_groups)
    best = group_scores.topk(top_groups, dim=-1).indices  # (T, top_groups)
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


def weigh_choices(scores: Tensor, experts: Tensor, config: MoEConfig) -> Tensor:
    """Weights of the choices: scores (T, E), experts (T, C) -> (T, C) float32, renormalised and scaled as configured."""
    chosen = scores.gather(-1, experts)
    if config.renormalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + FLOOR)
    return chosen * config.route_scale


def balance_loss(scores: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """E * sum_e f_e P_e over this rank's tokens: 1 when balanced, up to E / C when C experts take everything. Returns ().

    f_e is the share of choices that fell on expert e (counts / (T*C), no gradient), P_e the mean over tokens of e's score as a
    share of the token's scores (Switch Transformer, arXiv 2101.03961; for sigmoid scores DeepSeek-V3 eq. 17-20).
    """
    num_tokens, num_experts = scores.shape
    shares = scores / (scores.sum(dim=-1, keepdim=True) + FLOOR)
    mean_share = shares.sum(dim=0) / max(num_tokens, 1)  # (E,)
    load = counts.to(torch.float32) / max(num_tokens * top_k, 1)  # (E,)
    return num_experts * (load * mean_share).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, arXiv 2202.08906). (T, E) -> ()."""
    return logits.logsumexp(dim=-1).square().sum() / max(logits.shape[0], 1)


def weigh(logits: Tensor, scores: Tensor, experts: Tensor, counts: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Weights of the choices (T, C) and the loss () of a choice that was made: all of `route` that has a gradient.

    logits, scores (T, E) float32; experts (T, C); counts (E,).
    """
    loss = logits.new_zeros(())
    if config.balance_loss:
        loss = loss + config.balance_loss * balance_loss(scores, counts, config.top_k)
    if config.z_loss:
        loss = loss + config.z_loss * z_loss(logits)
    return weigh_choices(scores, experts, config), loss


def route(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) of any float dtype, bias (E,) float32 or None -> `Routing`."""
    logits = logits.float()
    scores = score_experts(logits, config.score_function)  # (T, E)
    experts = choose_experts(scores, expert_bias, config)  # (T, C)
    counts = count_choices(experts, config.num_experts)  # (E,)
    weights, loss = weigh(logits, scores, experts, counts, config)
    return Routing(weights, experts, counts, loss)


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
