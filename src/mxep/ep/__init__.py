"""The five blocks of expert parallelism, one file each, and the plan of an exchange."""

from __future__ import annotations

from mxep.ep.combine import a2a_combine_hp_fwd_mxfp8_bwd
from mxep.ep.dispatch import a2a_dispatch_mxfp8_fwd_hp_bwd
from mxep.ep.ep_grouped_mm_collective import ep_grouped_mm
from mxep.ep.exchange_plan import ExchangePlan
from mxep.ep.permute import generate_permute_indices, permute_and_pad, permute_mxfp8_fwd_hp_bwd
from mxep.ep.quantized_all_to_all import (
    ToMXFP8AllToAllVDequant,
    mxfp8_on_device_all_to_all_v,
    mxfp8_on_device_all_to_all_v_overflowed,
    to_mxfp8_a2a_dequant,
)
from mxep.ep.unpermute import unpermute_hp_fwd_mxfp8_bwd

__all__ = [
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
]
