"""The MoE layer: router, experts, `MoE`, the map that joins them through the five blocks; `fused_moe`, the layer in one
function, and `fused_experts`, the same behind a router of one's own.
"""

from mxep.moe.config import MoEConfig
from mxep.moe.experts import Experts, SharedExperts
from mxep.moe.fused import FusedMoE, fuse_layers, fused_experts, fused_moe, saved_bytes
from mxep.moe.layer import MoE, global_router_loss
from mxep.moe.network_profile import NetworkProfiler
from mxep.moe.router import Router, Routing
from mxep.moe.runtime import RuntimeEPConfig
from mxep.reference.activation_functions import SwiGLU

__all__ = [
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
