"""The five blocks of expert parallelism, one file per stop, and the plan that says who sends how many rows where."""

from mxep.ep.combine import a2a_combine_hp_fwd_mxfp8_bwd
from mxep.ep.dequant import ToMXFP8AllToAllVDequant, to_mxfp8_a2a_dequant
from mxep.ep.dispatch import a2a_dispatch_mxfp8_fwd_hp_bwd
from mxep.ep.permute import generate_permute_indices, permute_and_pad, permute_mxfp8_fwd_hp_bwd
from mxep.ep.plan import ExchangePlan
from mxep.ep.unpermute import unpermute_hp_fwd_mxfp8_bwd

__all__ = [
    "ExchangePlan",
    "ToMXFP8AllToAllVDequant",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "generate_permute_indices",
    "permute_and_pad",
    "permute_mxfp8_fwd_hp_bwd",
    "to_mxfp8_a2a_dequant",
    "unpermute_hp_fwd_mxfp8_bwd",
]
