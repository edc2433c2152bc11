"""The router: which C experts each token goes to, and with which weight.

    before  tokens (T, D), bf16 or float32
    after   scores (T, C) float32, experts (T, C) int64, counts (E,) int64; ep/token_sort.py sorts rows by expert next
    backward  through the scores of the chosen experts and through the two losses, never through the choice
    host syncs  none

Scores are float32 from the logits on, whatever the tokens' dtype.  The logits are float32 as well unless `MoEConfig.router_dtype` says
otherwise: in bf16 several experts of a token tie often, and the choice among them is arbitrary.

On GPUs the float32 product of bf16 tokens runs on bf16 tensor cores.  A float32 value is exactly the sum of three bf16 values, and the
product of two bf16 values is exact in float32, so three products in bf16 that are summed in float32 lose nothing but what the sums round.
Tensor cores cut their sums after each 16 products, so the error relative to the exact logits grows with the width D: below
1e-6 + D / 16 * 2^-25 (tests/gpu/test_router.py), 1.4e-5 for D = 7168, where a product rounded to bf16 has 2e-3.  They need no float32 copy
of the tokens, and TF32, which a process may have switched on for its float32 GEMMs, does not touch them.  Everywhere else this
is torch's float32 GEMM.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from mxep.checks import check_tensors, check_type
from mxep.moe.config import MoEConfig, RouterDtype
from mxep.mx.compile import in_graph
from mxep.ops.routing.router_reference import bf16_parts

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_patched(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward in the place of its class's. Code that only reads the parameters would run neither."""
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


# ---------------------------------------------------------------- tokens times gate


def logits_of(tokens: Tensor, weight: Tensor, router_dtype: RouterDtype) -> Tensor:
    """tokens (T, D), weight (E, D) -> logits (T, E), in float32, or with "bf16" in the tokens' dtype or autocast's.

    Differentiable by autograd with "bf16" alone; `RouterProduct` is the float32 product with its gradients.
    """
    if router_dtype == "bf16":
        return F.linear(tokens, weight.to(tokens.dtype))
    with without_autocast(tokens):
        if runs_in_parts(tokens, tokens.dtype):
            if weight.dtype == torch.bfloat16:
                return _mm_float32(tokens, weight.t())
            parts = bf16_parts(weight)
            return _mm_float32(tokens, torch.cat(parts).t()).unflatten(1, (len(parts), -1)).sum(1)
        return F.linear(tokens.float(), weight.float())


def logits_backward(
    d_logits: Tensor, tokens: Tensor | None, weight: Tensor, router_dtype: RouterDtype, dtype: torch.dtype, needs_tokens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `logits_of`: of the tokens (T, D), which are of `dtype`, if they need one; of the weight (E, D) if tokens are given.

    d_logits (T, E) is float32, or with "bf16" of `dtype`; so are both products, each rounded once, to the dtype of its result.  (T, 3, E)
    are the `bf16_parts` of float32 ones, as `router_gradients` may return them.
    """
    with without_autocast(d_logits):
        if d_logits.dim() == 3 or (router_dtype == "fp32" and runs_in_parts(d_logits, dtype)):
            in_parts = d_logits if d_logits.dim() == 3 else torch.stack(bf16_parts(d_logits), 1)
            return _backward_in_parts(in_parts, tokens, weight, needs_tokens)
        made_in = dtype if router_dtype == "bf16" else torch.float32
        d_tokens = (d_logits @ weight.to(made_in)).to(dtype) if needs_tokens else None
        d_weight = None if tokens is None else (d_logits.t() @ tokens.to(made_in)).to(weight.dtype)
    return d_tokens, d_weight


def _backward_in_parts(d_logits: Tensor, tokens: Tensor | None, weight: Tensor, needs_tokens: bool) -> tuple[Tensor | None, Tensor | None]:
    """`logits_backward` of bf16 tokens on a GPU, from d_logits (T, 3, E)."""
    d_tokens = d_weight = None
    if needs_tokens:  # rounded to bf16: products of later parts are below 2^-15 of it
        if weight.dtype == torch.bfloat16:
            d_tokens = d_logits[:, :2].flatten(1) @ torch.cat([weight, weight])
        else:
            (d_first, d_second, _), (first, second, _) = d_logits.unbind(1), bf16_parts(weight)
            d_tokens = torch.cat([d_first, d_first, d_second], 1) @ torch.cat([first, second, first])
    if tokens is not None:
        d_weight = _mm_float32(d_logits.flatten(1).t(), tokens).unflatten(0, (3, -1)).sum(0).to(weight.dtype)
    return d_tokens, d_weight


def runs_in_parts(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the float32 product of tokens of `dtype` is made of bf16 parts where `tensor` is, if there are any."""
    return tensor.is_cuda and dtype == torch.bfloat16 and tensor.numel() > 0


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """bf16 (M, K) and (K, N) -> (M, N) float32, not rounded in between."""
    return torch.mm(a, b, out_dtype=torch.float32)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """A context without autocast, which would round the operands of a product to bf16."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@in_graph
class RouterProduct(torch.autograd.Function):
    """`logits_of` in float32; backward keeps the tokens in their own dtype."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        """(T, D), (E, D) -> (T, E) float32."""
        ctx.save_for_backward(tokens, weight)
        return logits_of(tokens, weight, "fp32")

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        """The gradient (T, E) float32 -> gradients of tokens and weight in their dtypes."""
        (tokens, weight), (needs_tokens, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        return logits_backward(d_logits, tokens if needs_weight else None, weight, "fp32", tokens.dtype, needs_tokens)


# ---------------------------------------------------------------- choice


def _rules(config: MoEConfig) -> tuple[int, str, int, int, bool, bool, float, bool, bool]:
    """How the operator `route_tokens` chooses, weighs and which losses it prepares."""
    choice = config.top_k, config.score_function, config.num_groups, config.top_groups, config.force_balance
    return *choice, config.renormalize, config.route_scale, config.balance_loss > 0, config.z_loss > 0


def route_without_gradient(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) float32 or of 16 bits, bias (E,) or None -> `Routing`, without a gradient."""
    return Routing(*torch.ops.mxep.route_tokens(logits.detach(), expert_bias, *_rules(config)))


def route_tokens(tokens: Tensor, weight: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Routing]:
    """Tokens (T, D), weight (E, D), bias (E,) or None -> logits (T, E) and `Routing`, without a gradient."""
    logits = logits_of(tokens, weight, config.router_dtype)
    return logits, route_without_gradient(logits, expert_bias, config)


def router_gradients(
    logits: Tensor, experts: Tensor, d_scores: Tensor, d_shares: Tensor | None, d_z: Tensor | None, config: MoEConfig, dtype: torch.dtype
) -> Tensor:
    """Gradient of the logits, (T, E) or (T, 3, E) as `logits_backward` reads it for tokens of `dtype`, for the experts (T, C) that were
    chosen; None for what has no gradient.
    """
    losses, fp32 = (d_shares if config.balance_loss else None, d_z if config.z_loss else None), config.router_dtype == "fp32"
    how = config.score_function, config.renormalize, config.route_scale, torch.float32 if fp32 else dtype
    return torch.ops.mxep.router_backward(logits, experts, d_scores, *losses, *how, fp32 and runs_in_parts(logits, dtype))


@in_graph
class RouteTokens(torch.autograd.Function):
    """The operator `route_tokens`, with the gradients of weights, shares and z; `dtype` is that of the weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expert_bias: Tensor | None, dtype: torch.dtype, *rules: Any) -> tuple[Tensor, ...]:
        """Logits (T, E) float32 or of 16 bits -> the fields of `Routing`.  `rules`: the other arguments of the operator."""
        weights, experts, counts, shares, z = torch.ops.mxep.route_tokens(logits.detach(), expert_bias, *rules)
        _, score_function, _, _, _, renormalize, route_scale, with_shares, with_z = rules
        ctx.save_for_backward(logits, experts)
        ctx.weights = score_function, renormalize, route_scale
        ctx.mark_non_differentiable(experts, counts, *(() if with_shares else (shares,)), *(() if with_z else (z,)))
        ctx.set_materialize_grads(False)
        return weights.to(dtype), experts, counts, shares, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        d_scores, _, _, d_shares, d_z = grads
        d_scores = torch.zeros(experts.shape, dtype=torch.float32, device=experts.device) if d_scores is None else d_scores.float()
        d_logits = torch.ops.mxep.router_backward(logits, experts, d_scores, d_shares, d_z, *ctx.weights, logits.dtype)
        return d_logits, *(None,) * 11


def route(logits: Tensor, expert_bias: Tensor | None, config: MoEConfig) -> Routing:
    """Logits (T, E) of any float dtype, bias (E,) or None -> `Routing`, differentiable once in the logits."""
    return Routing(*RouteTokens.apply(logits.float(), expert_bias, torch.float32, *_rules(config)))


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
        check_type("Router", MoEConfig, "config", config, "make one")
        self.config = config
        self.gate = nn.Linear(config.dim, config.num_experts, bias=False)

    def forward(self, tokens: Tensor, expert_bias: Tensor | None = None) -> Routing:
        """tokens (T, D), expert_bias (E,) float32 or None -> `Routing`. Raises ValueError for several devices."""
        if expert_bias is not None:
            check_tensors("Router", tokens.device, expert_bias=expert_bias)
        return route(self._logits(tokens), expert_bias, self.config)

    def hold_gate(self, tokens: Tensor) -> Tensor:
        """Returns the tokens (T, D). Under FSDP this is a forward, after which a layer may read `gate.weight` and multiply itself.

        Raises:
            ValueError: as `check_router`.
        """
        check_router("FusedMoE", self)
        return tokens

    def _logits(self, tokens: Tensor) -> Tensor:
        gate, router_dtype = self.gate, self.config.router_dtype
        if type(gate) is nn.Linear and gate.bias is None and not is_patched(gate):
            check_tensors("Router", tokens.device, **{"gate.weight": gate.weight})
            if router_dtype == "bf16":
                return logits_of(tokens, gate.weight, router_dtype)
            return RouterProduct.apply(tokens, gate.weight)  # type: ignore[no-any-return]
        # An adapter, or a gate with hooks or a forward of its own, is called as a module, in the same dtype.
        dtype = torch.float32 if router_dtype == "fp32" else tokens.dtype
        cast = {name: p.to(dtype) for name, p in gate.named_parameters() if p.is_floating_point() and p.dtype != dtype}
        with without_autocast(tokens) if router_dtype == "fp32" else nullcontext():
            return functional_call(gate, cast, (tokens.to(dtype),)) if cast else gate(tokens.to(dtype))


def check_router(where: str, router: nn.Module) -> None:
    """Raise ValueError unless a router is a product with a weight and no more: a fused layer reads that weight and runs neither module."""
    gate: Any = getattr(router, "gate", None)
    parts: Any = (("router", router, Router.forward), ("router.gate", gate, nn.Linear.forward))
    for name, part, forward in parts:
        if getattr(type(part), "forward", None) is not forward or "forward" in vars(part):
            raise ValueError(
                f"{where}: {name} is a {type(part).__name__} with a forward of its own, which this layer would not run, want a "
                "torch.nn.Linear as the gate of a mxep.moe.Router; leave both out of what wraps or adapts layers, or use MoE"
            )
        if is_patched(part) and not (part is router and isinstance(router, FSDPModule)):  # whose hooks run in `hold_gate`
            raise ValueError(f"{where}: {name} has hooks, which this layer would not run, want none; remove them, or use MoE")
    if gate.bias is not None:
        raise ValueError(f"{where}: router.gate has a bias, which this layer would not add, want none; use MoE, or fused_experts")
