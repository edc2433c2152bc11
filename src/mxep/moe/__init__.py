"""The MoE layer: router, experts, and `MoE`, which connects them through the five blocks.

The fused layer lives in `mxep.fused`; its public names can be imported from here as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mxep.moe.config import MoEConfig
from mxep.moe.expert_mlp import ExpertLora
from mxep.moe.experts import Experts, SharedExperts
from mxep.moe.layer import MoE, global_router_loss
from mxep.moe.router import Router, Routing
from mxep.ops.activation.functions import SwiGLU

if TYPE_CHECKING:
    from mxep.fused import FusedMoE, NetworkProfiler, RuntimeEPConfig, fuse_layers, fused_experts, fused_moe, saved_bytes

__all__ = [
    "ExpertLora",
    "Experts",
    "FusedMoE",
    "MoE",
    "MoEConfig",
    "NetworkProfiler",
    "Router",
    "Routing",
    "RuntimeEPConfig",
    "SharedExperts",
    "SwiGLU",
    "fuse_layers",
    "fused_experts",
    "fused_moe",
    "global_router_loss",
    "saved_bytes",
]


if not TYPE_CHECKING:  # a type checker that saw this function would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("mxep.fused"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
