"""Stop 1, route: which C experts each token goes to, and with which weight.

    before  tokens (T, D), bf16 or float32
    after   scores (T, C) float32, experts (T, C) int64, counts (E,) int64; ep/token_sort.py sorts rows by expert next
    backward  through the scores of the chosen experts and through the two losses, never through the choice
    host syncs  none

Scores are float32 from the logits on, whatever the tokens' dtype.  The logits are float32 as well unless `MoEConfig.router_dtype` says
otherwise: in bf16 several experts of a token tie often, and the choice among them is arbitrary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mxep.moe.config import MoEConfig
from mxep.moe.router_product import RouterProduct, logits_of, without_autocast
from mxep.ops.routing.router_reference import mean_shares, score_experts, weigh_topk, z_loss

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward of its own, which code that only reads its parameters would not run."""
    own = vars(module)
    return "forward" in own or any(own[hooks] for hooks in _HOOKS)


class Routing(NamedTuple):
    """What the router decided.

    Attributes:
        scores: (T, C) float32, weight of each choice, differentiable.
        experts: (T, C) int64, distinct in each row, in rising order: chunks of experts add up a token's choices in the same order.
        counts: (E,) int64, choices per expert on this rank.
        shares: (E,) float32, mean over tokens of each expert's share of its token's scores, for the balance loss; 0 when that is off.
        z: () float32, mean over tokens of logsumexp(logits)^2; 0 when the z-loss is off.

    Examples:
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> routing = layer.router(torch.randn(16, 64), layer.expert_bias)
        >>> load = routing.counts / routing.counts.float().mean()  # 1 for each expert where the load is even
    """

    scores: Tensor
    experts: Tensor
    counts: Tensor
    shares: Tensor
    z: Tensor


def route_without_gradient(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig, with_losses: bool = True) -> Routing:
    """Logits (T, E) float32 or of 16 bits, bias (E,) or None -> `Routing`, without a gradient; without losses their parts are 0."""
    choice = config.top_k, config.score_function, config.num_groups, config.top_groups, config.force_balance
    wanted = with_losses and config.balance_loss > 0, with_losses and config.z_loss > 0
    weights = config.renormalize, config.route_scale
    return Routing(*torch.ops.mxep.route_tokens(logits.detach(), expert_bias, *choice, *weights, *wanted))


def router_gradients(
    logits: Tensor, experts: Tensor, d_scores: Tensor, d_shares: Tensor | None, d_z: Tensor | None, config: MoEConfig, dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits (T, E) in `dtype`, for the experts (T, C) that were chosen; None for what has no gradient."""
    losses = d_shares if config.balance_loss else None, d_z if config.z_loss else None
    return torch.ops.mxep.router_backward(
        logits, experts, d_scores, *losses, config.score_function, config.renormalize, config.route_scale, dtype
    )


def weigh(logits: Tensor, scores: Tensor, experts: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (T, C), shares (E,) and z () for the chosen experts: everything of `route` that has a gradient.

    logits, scores (T, E) float32; experts (T, C).
    """
    shares = mean_shares(scores) if config.balance_loss else scores.new_zeros(scores.shape[1])
    z = z_loss(logits) if config.z_loss else logits.new_zeros(())
    return weigh_topk(scores, experts, config.renormalize, config.route_scale), shares, z


def route(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) of any float dtype, bias (E,) or None -> `Routing`.

    `route_without_gradient` chooses; weights and losses are computed again by operators that autograd knows, which may round differently.
    """
    logits = logits.float()
    chosen = route_without_gradient(logits, expert_bias, config, with_losses=False)
    weights, shares, z = weigh(logits, score_experts(logits, config.score_function), chosen.experts, config)
    return Routing(weights, chosen.experts, chosen.counts, shares, z)


class Router(nn.Module):
    """The gate, an (E, D) matrix without bias, and the choice made from its logits.

    Args:
        config: shape and routing rules of the layer.

    Examples:
        >>> router = mxep.moe.Router(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> routing = router(torch.randn(16, 64), torch.zeros(4))
        >>> routing.scores.shape, routing.experts.shape, int(routing.counts.sum())
        (torch.Size([16, 2]), torch.Size([16, 2]), 32)
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.num_experts, bias=False)

    def forward(self, tokens: Tensor, expert_bias: Tensor | None = None) -> Routing:
        """tokens (T, D), expert_bias (E,) float32 or None -> `Routing`."""
        return route(self._logits(tokens), expert_bias, self.config)

    def hold_gate(self, tokens: Tensor) -> Tensor:
        """Returns the tokens (T, D). Under FSDP this is a forward, after which a layer may read `gate.weight` and multiply itself."""
        return tokens

    def _logits(self, tokens: Tensor) -> Tensor:
        gate, router_dtype = self.gate, self.config.router_dtype
        if type(gate) is nn.Linear and gate.bias is None and not is_watched(gate):
            if router_dtype == "bf16":
                return logits_of(tokens, gate.weight, router_dtype)
            return RouterProduct.apply(tokens, gate.weight)  # type: ignore[no-any-return]
        # An adapter, or a gate with hooks or a forward of its own, is called as a module, in the same dtype.
        dtype = torch.float32 if router_dtype == "fp32" else tokens.dtype
        cast = {name: p.to(dtype) for name, p in gate.named_parameters() if p.is_floating_point() and p.dtype != dtype}
        with without_autocast(tokens) if router_dtype == "fp32" else nullcontext():
            return functional_call(gate, cast, (tokens.to(dtype),)) if cast else gate(tokens.to(dtype))
