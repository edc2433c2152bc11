"""MXFP8 expert-parallel training of Mixture-of-Experts models for PyTorch.

Every public name can be imported from here; modules are loaded when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "mxep.recipe": ("KernelPreference", "Recipe", "ScaleCalculationMode"),
    "mxep.mx": ("MXTensor", "quantize_mx", "to_mx"),
    "mxep.comm": ("ExchangeError", "close_transports", "set_transport"),
    "mxep.ep": (
        "ExchangePlan",
        "ToMXFP8AllToAllVDequant",
        "a2a_combine_hp_fwd_mxfp8_bwd",
        "a2a_dispatch_mxfp8_fwd_hp_bwd",
        "ep_grouped_mm",
        "generate_permute_indices",
        "mxfp8_on_device_all_to_all_v",
        "mxfp8_on_device_all_to_all_v_overflowed",
        "permute_and_pad",
        "permute_mxfp8_fwd_hp_bwd",
        "to_mxfp8_a2a_dequant",
        "unpermute_hp_fwd_mxfp8_bwd",
    ),
    "mxep.grouped_mm": ("_to_mxfp8_then_scaled_grouped_mm", "to_mxfp8_then_scaled_grouped_mm"),
    "mxep.moe": ("FusedMoE", "MoE", "MoEConfig", "NetworkProfiler", "RuntimeEPConfig", "SwiGLU", "fused_experts", "fused_moe"),
    "mxep.parallel": ("MXFP8ExpertParallel", "apply_mxfp8_expert_parallel", "convert_experts", "convert_linears"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


# Modules that pages and messages name as mxep.NAME; loaded when they are first used, like everything else.
_MODULES = ("bench", "comm", "device", "ep", "grouped_mm", "integrations", "moe", "mx", "parallel", "recipe", "reference", "train")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mxep.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mxep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
