"""The MoE layer: router, experts, and `MoE`, the map that joins them through the five blocks."""

from mxep.moe.config import MoEConfig
from mxep.moe.experts import Experts, SharedExperts
from mxep.moe.layer import MoE
from mxep.moe.router import Router, Routing

__all__ = ["Experts", "MoE", "MoEConfig", "Router", "Routing", "SharedExperts"]
