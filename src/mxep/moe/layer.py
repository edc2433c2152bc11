"""The MoE layer on the five blocks: `MoE.forward`, whose `_routed_experts` shows every step; each block's file describes its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mxep.checks import check_tensors, check_type
from mxep.ep.blocks import combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.ep.token_sort import combine_topk, sort_tokens_by_expert
from mxep.moe.config import MoEConfig
from mxep.moe.experts import Experts, SharedExperts
from mxep.moe.init import init_normal_
from mxep.moe.router import Router
from mxep.moe.side_stream import start_on_side_stream
from mxep.mx.rows import unflatten_rows
from mxep.ops.routing.router_reference import balance_loss
from mxep.recipe import Recipe

_FLOAT32_BUFFERS = ("expert_bias", "tokens_per_expert")
_REENTRANT = "CheckpointFunctionBackward"  # autograd's node of torch.utils.checkpoint(use_reentrant=True), and of others' like it


class MoE(nn.Module):
    """Router, routed experts, shared experts: (..., D) -> (..., D).

    Without a group it holds all E experts and exchanges nothing; `mxep.apply_mxfp8_expert_parallel` shards the experts over an EP group and
    sets `group`.  `experts.recipe` is the precision of the exchanges as well.

    Args:
        config: shape and routing of the layer.
        recipe: precision of GEMMs and exchanges: a `Recipe`, a preset's name, or None for the default preset.

    Attributes:
        router: scores and top-k choice.
        experts: the routed experts.
        shared_experts: None when there are none.
        group: EP process group or None.
        expert_bias: buffer (E,) float32, added to the scores for the choice only; moved by `update_expert_bias`.
        tokens_per_expert: buffer (E,) float32, this rank's choices in training forwards since `reset_load`.

    Examples:
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> x = torch.randn(8, 16, 64, requires_grad=True)
        >>> y = layer(x)
        >>> y.sum().backward()
        >>> y.shape, layer.experts.w1.grad.shape
        (torch.Size([8, 16, 64]), torch.Size([4, 32, 64]))
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    _experts_class: type[Experts] = Experts

    def __init__(self, config: MoEConfig, recipe: str | Recipe | None = "mxfp8_wgrad_with_hp") -> None:
        super().__init__()
        check_type(type(self).__name__, MoEConfig, "config", config, "make one")
        self.config = config
        self.group: ProcessGroup | None = None
        self.router = Router(config)
        options = config.expert_biases, config.activation, config.swiglu
        self.experts = self._experts_class(config.dim, config.hidden, config.num_experts, recipe, *options)
        shared_hidden = config.hidden * config.num_shared_experts
        self.shared_experts = SharedExperts(config.dim, shared_hidden, config.swiglu) if shared_hidden else None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.float32), persistent=False)
        self._routed: tuple[Tensor, Tensor, Tensor] | None = None  # counts (E,), shares (E,) and z () of the last forward

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) bf16 or float32 -> (..., D)."""
        tokens = self._tokens(x)  #                                          (T, D)
        shared = None if self.shared_experts is None else start_on_side_stream(self.shared_experts, tokens)
        y, *routed = self._routed_experts(tokens)  #                         (T, D)
        self._note(*routed)
        if shared is not None:
            y = y + shared()  #                                              (T, D)
        return y if x.dim() == 2 else unflatten_rows(y, x.shape[:-1])

    def _routed_experts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (T, D) -> outputs of the routed experts (T, D), and counts, shares and z of `Routing`. One host sync, in the plan."""
        recipe: Recipe | None = getattr(self.experts, "recipe", None)
        if recipe is None:  # peft's target_parameters wrap the experts
            recipe = next(module.recipe for module in self.experts.modules() if isinstance(module, Experts))
        experts = self.config.num_experts
        routing = self.router(tokens, self.expert_bias)  #                   scores (T, C), experts (T, C)
        rows, order, counts = sort_tokens_by_expert(tokens, routing.experts, experts)  # (T', D), T' = T*C, sorted by expert, hence by rank
        rows = self._weigh_inputs(rows, routing.scores, order)  #            (T', D)
        plan = ExchangePlan.from_counts(counts, self.group)  #               rows that each rank sends to each rank
        received = dispatch(rows, plan, recipe)  #                           (R, D) MX, rank-major
        padded = permute(received, plan, recipe)  #                          (P, D) MX, expert-major
        out = self.experts(padded.rows, padded.padded_counts)  #             (P, D)
        out = unpermute(out, padded)  #                                      (R, D) rank-major
        out = combine(out, plan, recipe)  #                                  (T', D) sorted by expert
        y = self._sum_choices(out, routing.scores, order)  #                 (T, D)
        return y, routing.counts, routing.shares, routing.z

    def _tokens(self, x: Tensor) -> Tensor:
        """x (..., D) -> (T, D). Raises ValueError for another width, and for what is no tensor."""
        if not isinstance(x, Tensor):
            check_tensors(type(self).__name__, x=x)
        if x.dim() == 0 or x.shape[-1] != self.config.dim:
            raise ValueError(f"{type(self).__name__}: x is {tuple(x.shape)}, want (..., {self.config.dim}), MoEConfig.dim; change either")
        return x.reshape(-1, self.config.dim)

    def _weigh_inputs(self, rows: Tensor, scores: Tensor, order: Tensor) -> Tensor:
        """rows (T', D) times their scores when these act before the experts."""
        if not self.config.scores_before_experts:
            return rows
        return (rows.float() * scores.flatten()[order].unsqueeze(-1)).to(rows.dtype)

    def _sum_choices(self, rows: Tensor, scores: Tensor, order: Tensor) -> Tensor:
        """rows (T', D) -> (T, D): the sum over a token's choices, weighted when scores act after the experts; float32, rounded once."""
        return combine_topk(rows, order, self.config.top_k, None if self.config.scores_before_experts else scores)

    @property
    def router_loss(self) -> Tensor:
        """() float32: balance loss + z-loss times their factors, of the last forward; add it to the training loss.

        The balance loss is that of this rank's tokens; `mxep.moe.global_router_loss` has that of the global batch.

        A reentrant checkpoint first runs forward without gradients, so this must be read, and returned, inside of the checkpoint.  Read
        after it, or after any other training forward without gradients, it has no gradient, and a warning says so.
        """
        return self.router_loss_for()

    def router_loss_for(self, load: Tensor | None = None) -> Tensor:
        """`router_loss` for a load (E,), choices per expert of any set of tokens; None: of this rank's tokens in the last forward."""
        if self._routed is None:
            raise ValueError("MoE.router_loss: no forward has run yet")
        counts, shares, z = self._routed
        loss = z.new_zeros(())
        if self.config.balance_loss:
            loss = loss + self.config.balance_loss * balance_loss(shares, counts if load is None else load)
        if self.config.z_loss:
            loss = loss + self.config.z_loss * z
        wanted = self.training and self.router.gate.weight.requires_grad and bool(self.config.balance_loss or self.config.z_loss)
        if wanted and torch.is_grad_enabled() and not loss.requires_grad:
            warnings.warn(
                f"{type(self).__name__}.router_loss: the last forward ran without gradients, so the router does not learn from this loss; "
                "under a checkpoint, use_reentrant=False",
                stacklevel=3,
            )
        return loss

    def _note(self, counts: Tensor, shares: Tensor, z: Tensor) -> None:
        """Keeps the parts of the router loss, and in training adds to the load; neither when a checkpoint recomputes forward in backward.

        A reentrant checkpoint is the exception: its first forward had no gradient, so the loss is that of the recomputation.  The earlier
        loss may be the checkpoint's output, and its backward would recompute this forward again.
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            if type(torch._C._current_autograd_node()).__name__ == _REENTRANT:
                self._routed = counts, shares, z
            return
        self._routed = counts, shares, z
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert += counts

    def reset_load(self) -> None:
        """Start `tokens_per_expert` from zero."""
        self.tokens_per_expert.zero_()

    @torch.no_grad()
    def update_expert_bias(self, counts_all_ranks: Tensor) -> None:
        """Raise the bias of experts below the mean load and lower that of those above, by `bias_update_rate`; the sum stays.

        Args:
            counts_all_ranks: (E,) choices per expert since the last update, summed over every rank that shares the weights.
        """
        where = f"{type(self).__name__}.update_expert_bias"
        check_tensors(where, counts_all_ranks=counts_all_ranks)
        counts = counts_all_ranks.to(self.expert_bias)
        if counts.shape != self.expert_bias.shape:
            shapes = f"counts of shape {tuple(counts.shape)}, want {tuple(self.expert_bias.shape)}"
            raise ValueError(f"{where}: {shapes}; sum tokens_per_expert over the ranks")
        step = self.config.bias_update_rate * torch.sign(counts.mean() - counts)
        self.expert_bias += step - step.mean()

    def init_weights(self, std: float, generator: torch.Generator | None = None) -> None:
        """Every weight from N(0, std^2), bias and load to zero; the same numbers before and after sharding (see `init_normal_`)."""
        init_normal_(self.router.gate.weight, std, generator)
        self.experts.init_weights(std, generator)
        if self.shared_experts is not None:
            self.shared_experts.init_weights(std, generator)
        self.expert_bias.zero_()
        self.reset_load()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Casts of the module leave bias and load in float32: bf16 cannot count past 256. A load that leaves the meta device is zero."""
        before = {name: getattr(self, name) for name in _FLOAT32_BUFFERS}
        super()._apply(fn, recurse)
        if before["tokens_per_expert"].is_meta and not self.tokens_per_expert.is_meta:
            self.reset_load()  # no state_dict has it
        for name, buffer in before.items():
            now = getattr(self, name)
            if now.dtype != torch.float32:
                setattr(self, name, buffer.to(now.device))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Keeps bias and load in float32, and no load on the meta device: with `assign=True` they would have the state dict's dtype."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.tokens_per_expert.is_meta and not self.expert_bias.is_meta:
            self.tokens_per_expert = torch.zeros_like(self.expert_bias)  # no state_dict has it
        for name in _FLOAT32_BUFFERS:
            setattr(self, name, getattr(self, name).float())

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the last router loss, which is part of a graph. Raises ValueError if there is a group."""
        if self.group is not None:
            raise ValueError(
                f"{type(self).__name__}: a layer that exchanges in a process group cannot be pickled, want its state_dict; "
                "save that, by torch.distributed.checkpoint where its experts are sharded"
            )
        return self._copied_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A copy in the same process group: torch cannot copy groups, and averaging of weights copies sharded layers."""
        memo[id(self.group)] = self.group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._copied_state(), memo))
        return copied

    def _copied_state(self) -> dict[str, Any]:
        return {**self.__dict__, "_routed": None}


def global_router_loss(layers: Sequence[MoE], group: ProcessGroup | None = None) -> Tensor:
    """Sum of the layers' `router_loss` with the expert frequencies of the global batch; add it to the training loss.

    The frequencies count all tokens of all ranks of `group` in the training forwards since `reset_load`, which are the microbatches of this
    optimizer step so far.  They are the same on every rank; the scores that they weight are those of this rank's last forward (Megatron's
    `global_aux_loss`; arXiv 2501.11873).  The mean over ranks and microbatches is the loss of the step, if all have equally many tokens.  A
    forward that is recomputed in backward counts once.  There is one all-reduce for all layers: every rank of the group must call
    this after each forward.

    Args:
        layers: at least one, each after a training forward.
        group: None is all ranks, where there are any.

    Returns:
        () float32.

    Raises:
        ValueError: no layers, or one without a forward.

    Examples:
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, balance_loss=0.01))
        >>> loss = layer(torch.randn(16, 64)).square().mean()
        >>> loss = loss + mxep.moe.global_router_loss([layer])
    """
    if not layers:
        raise ValueError("global_router_loss: no layers, want at least one mxep.MoE")
    load = torch.stack([layer.tokens_per_expert for layer in layers])
    if dist.is_initialized():
        dist.all_reduce(load, group=group)
    return torch.stack([layer.router_loss_for(counts) for layer, counts in zip(layers, load, strict=True)]).sum()
