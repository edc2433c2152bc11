"""The shape and the routing rules of one MoE layer: `MoEConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from mxep.field_types import check_field_types
from mxep.ops.activation.functions import ACTIVATIONS, ActivationName, SwiGLU

ScoreFunction = Literal["softmax", "sigmoid"]
RouterDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class MoEConfig:
    """Everything about a MoE layer that is not precision (that is `mxep.recipe.Recipe`) and not parallelism.

    Attributes:
        dim: D, model width.
        hidden: H, hidden width of one expert.
        num_experts: E, routed experts in the whole layer.
        top_k: C, choices per token.
        num_shared_experts: experts that see every token; run as one SwiGLU of width H * this.
        score_function: "softmax" over the experts or an independent "sigmoid" for each.
        renormalize: make each token's C scores sum to 1 before `route_scale`.
        route_scale: factor on every score.
        router_dtype: of the router's product, forward and backward (Megatron's `moe_router_dtype`): "fp32", whatever the dtypes of tokens
            and weight and whatever autocast says; or "bf16", the tokens' dtype or autocast's, to which the weight is rounded (float32
            tokens outside of autocast stay float32).
        num_groups: groups of equal size that the experts are divided into (DeepSeek-V3).  A group's score is the sum of its two best.
        top_groups: only experts of this many best groups may be chosen.
        scores_before_experts: multiply the token by its score on the way in, not the expert's output on the way back.
        bias_update_rate: step of the auxiliary-loss-free expert bias, 0 = off.
        balance_loss: factor of this layer's load-balancing loss, E * sum f_e P_e, which is 1 when balanced (Megatron's
            `moe_aux_loss_coeff`); 0 = off.  transformers' `router_aux_loss_coef` is this times the model's MoE layers / `top_k`.
        z_loss: factor of the router z-loss (Megatron's `moe_z_loss_coeff`), 0 = off.
        force_balance: give every expert as many tokens, whatever the scores (benchmarks, debugging).
        activation: of the routed experts: "swiglu", "geglu" (the exact GELU), "geglu_tanh" (its tanh form, as in Gemma 4), "reglu"
            (a gate by ReLU) or "relu2" (squared ReLU of one projection, no w3, as in Nemotron 3).
        swiglu_limit: the largest gate, and the largest absolute value of up, in gate sigmoid(alpha gate) (up + offset); None is no limit.
            Routed and shared experts use it.  DeepSeek-V4: 10; gpt-oss: 7.
        swiglu_alpha: alpha of that formula; gpt-oss: 1.702.
        swiglu_offset: offset of that formula; gpt-oss: 1.
        expert_biases: add a bias to each of a routed expert's three products; zero at first, without weight decay in `mxep.train`.

    Examples:
        >>> config = mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, score_function="sigmoid", renormalize=True)
        >>> config.activation, config.num_shared_experts
        ('swiglu', 0)
    """

    dim: int
    hidden: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    score_function: ScoreFunction = "softmax"
    renormalize: bool = False
    route_scale: float = 1.0
    router_dtype: RouterDtype = field(default="fp32", kw_only=True)  # by position the parameters are those of mxep 0.1
    num_groups: int = 1
    top_groups: int = 1
    scores_before_experts: bool = False
    bias_update_rate: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    force_balance: bool = False
    activation: ActivationName = "swiglu"
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    swiglu_offset: float = 0.0
    expert_biases: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "hidden", "num_experts", "top_k", "num_groups", "top_groups"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"MoEConfig: {name}={value!r}, want a whole number, at least 1")
        check_field_types(self)
        check_activation("MoEConfig", self.activation, self.swiglu)
        if self.num_experts % self.num_groups:
            raise ValueError(f"MoEConfig: num_experts={self.num_experts} is not divisible by num_groups={self.num_groups}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"MoEConfig: top_groups={self.top_groups}, want at most num_groups={self.num_groups}")
        reachable = self.top_groups * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            raise ValueError(
                f"MoEConfig: top_k={self.top_k}, want at most {reachable}, the experts that a token can choose from ({self.top_groups} of "
                f"{self.num_groups} groups); lower top_k, or raise top_groups or num_experts"
            )
        for name in ("num_shared_experts", "bias_update_rate", "balance_loss", "z_loss"):
            if getattr(self, name) < 0:
                raise ValueError(f"MoEConfig: {name}={getattr(self, name)}, want 0 (off) or more")

    @property
    def swiglu(self) -> SwiGLU:
        """The form of SwiGLU."""
        return SwiGLU(self.swiglu_limit, self.swiglu_alpha, self.swiglu_offset)


def check_activation(where: str, activation: ActivationName, swiglu: SwiGLU) -> None:
    """Raise ValueError for an unknown activation, a form that is none, or a form other than the plain one with another activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{where}: activation={activation!r}, want one of {', '.join(ACTIVATIONS)}")
    if not isinstance(swiglu, SwiGLU) or (activation != "swiglu" and swiglu != SwiGLU()):
        raise ValueError(f"{where}: swiglu={swiglu!r} with activation={activation!r}, want a mxep.SwiGLU, and activation='swiglu' with it")
