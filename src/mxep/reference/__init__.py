"""Plain PyTorch twins of every kernel: the definition of the numbers, and the CPU path.

Slow and obvious on purpose.  `kernels/` has a function of the same name and signature for each public function here; movers and
quantisers agree byte for byte, GEMMs up to summation order.
"""

from mxep.reference.activation import activate, activate_backward, activate_quantize, activate_quantize_both
from mxep.reference.cross_entropy import cross_entropy, cross_entropy_to_gradient
from mxep.reference.group_bias import add_group_bias, dot_group_bias
from mxep.reference.group_index import group_index
from mxep.reference.grouped_mm import (
    copy_groups,
    grouped_mm_hp,
    grouped_mm_mx,
    grouped_wgrad_hp,
    grouped_wgrad_hp_add,
    grouped_wgrad_hp_into,
    grouped_wgrad_mx,
    grouped_wgrad_mx_rows,
    grouped_wgrad_mx_rows_add,
    grouped_wgrad_mx_rows_into,
)
from mxep.reference.joined import quantize_joined, quantize_joined_transposed
from mxep.reference.places import place_choices, place_table
from mxep.reference.plan import cut_windows, pack_choices, pick_values, sent_regions, window_places
from mxep.reference.push import push_rows, push_sums
from mxep.reference.quantize import (
    dequantize,
    dequantize_packed_into,
    quantize,
    quantize_both,
    quantize_packed,
    quantize_packed_into,
    quantize_transposed,
)
from mxep.reference.rebase import rebase_weight
from mxep.reference.router import route_tokens, router_backward
from mxep.reference.rows import gather_mx_rows, gather_quantize, gather_rows, scatter_mx_rows, scatter_rows
from mxep.reference.sum_rows import sum_rows, sum_rows_backward, sum_rows_within
from mxep.reference.wgrad_halves import grouped_wgrad_mx_halves, grouped_wgrad_mx_halves_into

__all__ = [
    "activate",
    "activate_backward",
    "activate_quantize",
    "activate_quantize_both",
    "add_group_bias",
    "copy_groups",
    "cross_entropy",
    "cross_entropy_to_gradient",
    "cut_windows",
    "dequantize",
    "dequantize_packed_into",
    "dot_group_bias",
    "gather_mx_rows",
    "gather_quantize",
    "gather_rows",
    "group_index",
    "grouped_mm_hp",
    "grouped_mm_mx",
    "grouped_wgrad_hp",
    "grouped_wgrad_hp_add",
    "grouped_wgrad_hp_into",
    "grouped_wgrad_mx",
    "grouped_wgrad_mx_halves",
    "grouped_wgrad_mx_halves_into",
    "grouped_wgrad_mx_rows",
    "grouped_wgrad_mx_rows_add",
    "grouped_wgrad_mx_rows_into",
    "pack_choices",
    "pick_values",
    "place_choices",
    "place_table",
    "push_rows",
    "push_sums",
    "quantize",
    "quantize_both",
    "quantize_joined",
    "quantize_joined_transposed",
    "quantize_packed",
    "quantize_packed_into",
    "quantize_transposed",
    "rebase_weight",
    "route_tokens",
    "router_backward",
    "scatter_mx_rows",
    "scatter_rows",
    "sent_regions",
    "sum_rows",
    "sum_rows_backward",
    "sum_rows_within",
    "window_places",
]
