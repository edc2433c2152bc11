"""The five blocks of expert parallelism, one file per stop, and the plan that says who sends how many rows where."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mxep.ep.combine import a2a_combine_hp_fwd_mxfp8_bwd
from mxep.ep.dequant import ToMXFP8AllToAllVDequant, to_mxfp8_a2a_dequant
from mxep.ep.dispatch import a2a_dispatch_mxfp8_fwd_hp_bwd
from mxep.ep.on_device import mxfp8_on_device_all_to_all_v, mxfp8_on_device_all_to_all_v_overflowed
from mxep.ep.permute import generate_permute_indices, permute_and_pad, permute_mxfp8_fwd_hp_bwd
from mxep.ep.plan import ExchangePlan
from mxep.ep.unpermute import unpermute_hp_fwd_mxfp8_bwd

if TYPE_CHECKING:
    from mxep.ep.pipeline import ep_grouped_mm

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


def __getattr__(name: str) -> Any:
    if name != "ep_grouped_mm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("mxep.ep.pipeline").ep_grouped_mm  # not loaded above: it stands on grouped_mm, which stands on blocks
