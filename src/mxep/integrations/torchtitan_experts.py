"""What the adapters for torchtitan share: a layer's tokens and choices on their way through its experts' module, as one function.

The module is called, and not what stands in it: FSDP gathers its weights around the call.  Nothing of torchtitan is imported.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.moe.experts import local_weight
from mxep.moe.fused import fused_experts
from mxep.recipe import Recipe


class Choices:
    """A router's choice among all E experts; one object, since FSDP would round the tensors that it finds among a module's inputs.

    Attributes:
        experts: (T, C) int64.  scores: (T, C) float32.  num_experts: E.  group: the EP group, or its name; "" is this rank alone.
    """

    def __init__(self, experts: Tensor, scores: Tensor, num_experts: int, group: str | ProcessGroup) -> None:
        self.experts, self.scores, self.num_experts, self.group = experts, scores, num_experts, group


def experts_output(tokens: Tensor, choices: Choices, weights: Iterable[Tensor], recipe: Recipe | None) -> Tensor:
    """Tokens (T, D) -> (T, D) in their dtype, weighted and summed; in bf16, as torchtitan multiplies them.

    weights: gate (L, H, D), down (L, D, H), up (L, H, D) of this rank's experts, DTensors or plain.
    """
    w1, w2, w3 = (local_weight(weight).bfloat16() for weight in weights)
    given, total = (tokens.bfloat16(), choices.experts, choices.scores), choices.num_experts
    return fused_experts(*given, w1, None, w2, None, total, group=choices.group, recipe=recipe, w3=w3).to(tokens.dtype)
