"""The fused MoE layer: router, exchange, experts and reduction in one autograd function."""

from mxep.fused.layer import FusedMoE, fuse_layers, fused_experts, fused_moe, saved_bytes
from mxep.fused.network_profiler import NetworkProfiler
from mxep.fused.runtime_config import RuntimeEPConfig

__all__ = ["FusedMoE", "NetworkProfiler", "RuntimeEPConfig", "fuse_layers", "fused_experts", "fused_moe", "saved_bytes"]
