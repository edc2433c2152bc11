"""What the adapters for torchtitan share: the check of its version, and a layer's experts as one function of tokens and choices.

The adapters call the experts' module and not its parameters, because FSDP gathers the weights around that call.  Nothing of torchtitan is
imported.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from mxep.fused.layer import fused_experts
from mxep.moe.expert_mlp import ExpertWeights
from mxep.ops.activation.functions import SwiGLU
from mxep.placements import to_local
from mxep.recipe import Recipe


def require_torchtitan(adapter: str, want: str, install: str, other: str) -> None:
    """Raises ImportError for the adapter's module unless torchtitan `want`, or a later patch of it, is installed.

    Args:
        adapter: the module's name.
        want: "0.2.2".
        install: what to do without it.
        other: another version, and the adapter for it.
    """
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{adapter}: torchtitan is not installed, want {want}; {install}") from error
    minor, _, patch = want.rpartition(".")
    installed = re.match(rf"{re.escape(minor)}\.(\d+)", version)
    if installed is None or int(installed[1]) < int(patch):
        raise ImportError(f"{adapter}: torchtitan is {version}, want {want}; {install} ({other})")


class TopKRouting:
    """A router's choice among all E experts; one object, since FSDP would round the tensors that it finds among a module's inputs.

    Attributes:
        experts: (T, C) int64.  scores: (T, C) float32.  num_experts: E.  group: the EP group, or its name; "" is this rank alone.
    """

    def __init__(self, experts: Tensor, scores: Tensor, num_experts: int, group: str | ProcessGroup) -> None:
        self.experts, self.scores, self.num_experts, self.group = experts, scores, num_experts, group


def gpt_oss_experts(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, limit: float) -> tuple[ExpertWeights, SwiGLU]:
    """Weights and SwiGLU of torchtitan's experts for gpt-oss, whose code has alpha and offset as constants."""
    return ExpertWeights(w1, w2, None, b1, b2, layout="interleaved"), SwiGLU(limit, 1.702, 1.0)


def experts_output(tokens: Tensor, choices: TopKRouting, weights: ExpertWeights, recipe: Recipe | None, swiglu: SwiGLU) -> Tensor:
    """Tokens (T, D) -> (T, D) in their dtype, weighted and summed; in bf16, as torchtitan multiplies them.

    `weights`: of this rank's experts, DTensors or plain tensors.
    """
    w1, w2, w3, b1, b2 = (None if value is None else to_local(value).bfloat16() for value in weights[:5])
    assert w1 is not None
    assert w2 is not None
    given, total = (tokens.bfloat16(), choices.experts, choices.scores), choices.num_experts
    form: dict[str, Any] = {"w3": w3, "layout": weights.layout, "swiglu": swiglu}
    return fused_experts(*given, w1, b1, w2, b2, total, group=choices.group, recipe=recipe, **form).to(tokens.dtype)
