"""MXFP8 expert-parallel training of Mixture-of-Experts models for PyTorch.

Every public name can be imported from here.  A module is loaded when one of its names is first used, so `import mxep` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # what editors and type checkers read; `_NAMES_OF` and `_MODULES` say the same at run time
    from mxep import bench, comm, device, ep, fused, grouped_mm, integrations, models, moe, mx, parallel, recipe, reference, train  # noqa: F401
    from mxep.comm import ExchangeError, close_transports, set_transport
    from mxep.ep import (
        ExchangePlan,
        ToMXFP8AllToAllVDequant,
        a2a_combine_hp_fwd_mxfp8_bwd,
        a2a_dispatch_mxfp8_fwd_hp_bwd,
        ep_grouped_mm,
        generate_permute_indices,
        mxfp8_on_device_all_to_all_v,
        mxfp8_on_device_all_to_all_v_overflowed,
        permute_and_pad,
        permute_mxfp8_fwd_hp_bwd,
        to_mxfp8_a2a_dequant,
        unpermute_hp_fwd_mxfp8_bwd,
    )
    from mxep.fused import FusedMoE, NetworkProfiler, RuntimeEPConfig, fused_experts, fused_moe
    from mxep.grouped_mm import _to_mxfp8_then_scaled_grouped_mm, to_mxfp8_then_scaled_grouped_mm
    from mxep.models import linear_cross_entropy
    from mxep.moe import MoE, MoEConfig, SwiGLU
    from mxep.mx import MXTensor, quantize_mx, to_mx
    from mxep.parallel import (
        MXFP8ExpertParallel,
        apply_mxfp8_expert_parallel,
        convert_experts,
        convert_linears,
        dequantize_base,
        quantize_base,
        unconvert,
    )
    from mxep.recipe import KernelPreference, Recipe, ScaleCalculationMode

__all__ = [
    "ExchangeError",
    "ExchangePlan",
    "FusedMoE",
    "KernelPreference",
    "MXFP8ExpertParallel",
    "MXTensor",
    "MoE",
    "MoEConfig",
    "NetworkProfiler",
    "Recipe",
    "RuntimeEPConfig",
    "ScaleCalculationMode",
    "SwiGLU",
    "ToMXFP8AllToAllVDequant",
    "_to_mxfp8_then_scaled_grouped_mm",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "apply_mxfp8_expert_parallel",
    "close_transports",
    "convert_experts",
    "convert_linears",
    "dequantize_base",
    "ep_grouped_mm",
    "fused_experts",
    "fused_moe",
    "generate_permute_indices",
    "linear_cross_entropy",
    "mxfp8_on_device_all_to_all_v",
    "mxfp8_on_device_all_to_all_v_overflowed",
    "permute_and_pad",
    "permute_mxfp8_fwd_hp_bwd",
    "quantize_base",
    "quantize_mx",
    "set_transport",
    "to_mx",
    "to_mxfp8_a2a_dequant",
    "to_mxfp8_then_scaled_grouped_mm",
    "unconvert",
    "unpermute_hp_fwd_mxfp8_bwd",
]

_NAMES_OF = {
    "recipe": ("KernelPreference", "Recipe", "ScaleCalculationMode"),
    "mx": ("MXTensor", "quantize_mx", "to_mx"),
    "comm": ("ExchangeError", "close_transports", "set_transport"),
    "ep": (
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
    "grouped_mm": ("_to_mxfp8_then_scaled_grouped_mm", "to_mxfp8_then_scaled_grouped_mm"),
    "moe": ("MoE", "MoEConfig", "SwiGLU"),
    "fused": ("FusedMoE", "NetworkProfiler", "RuntimeEPConfig", "fused_experts", "fused_moe"),
    "models": ("linear_cross_entropy",),
    "parallel": (
        "MXFP8ExpertParallel",
        "apply_mxfp8_expert_parallel",
        "convert_experts",
        "convert_linears",
        "dequantize_base",
        "quantize_base",
        "unconvert",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
_MODULES = (*_NAMES_OF, "bench", "device", "integrations", "reference", "train")  # usable as mxep.NAME without an import

if not TYPE_CHECKING:  # a type checker that saw this function would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"mxep.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mxep' has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"mxep.{_MODULE_OF[name]}"), name)  # once: `mxep.NAME(...)` is a call
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
