"""GPU kernels (Triton, CUDA C++) and their launchers: same names and signatures as the twins in `mxep.reference`.

Knows no autograd and no ranks.  Importing this package imports no Triton: a launcher's file is loaded when it is first asked for.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

# launcher -> the file it lives in
HOMES: dict[str, str] = {
    "activate": "activation",
    "activate_backward": "activation_backward",
    "activate_quantize": "activation",
    "activate_quantize_both": "activation",
    "add_group_bias": "group_bias",
    "copy_groups": "copy_groups",
    "cross_entropy": "cross_entropy",
    "cross_entropy_to_gradient": "cross_entropy",
    "cut_windows": "plan",
    "dequantize": "dequantize",
    "dequantize_packed_into": "dequantize",
    "dot_group_bias": "group_bias",
    "gather_mx_rows": "rows",
    "gather_quantize": "gather_quantize",
    "gather_rows": "rows",
    "group_index": "group_index",
    "grouped_mm_hp": "grouped_mm",
    "grouped_mm_mx": "grouped_mm",
    "grouped_wgrad_hp": "grouped_wgrad",
    "grouped_wgrad_hp_add": "grouped_wgrad",
    "grouped_wgrad_hp_into": "grouped_wgrad",
    "grouped_wgrad_mx": "grouped_wgrad",
    "grouped_wgrad_mx_halves": "wgrad_halves",
    "grouped_wgrad_mx_halves_into": "wgrad_halves",
    "grouped_wgrad_mx_rows": "grouped_wgrad",
    "grouped_wgrad_mx_rows_add": "grouped_wgrad",
    "grouped_wgrad_mx_rows_into": "grouped_wgrad",
    "pack_choices": "plan",
    "pick_values": "plan",
    "place_choices": "places",
    "place_table": "places",
    "push_rows": "push",
    "push_sums": "push",
    "quantize": "quantize",
    "quantize_both": "quantize_both",
    "quantize_joined": "joined",
    "quantize_joined_transposed": "joined",
    "quantize_packed": "quantize",
    "quantize_packed_into": "quantize",
    "quantize_transposed": "quantize_both",
    "rebase_weight": "rebase",
    "route_tokens": "router",
    "router_backward": "router",
    "scatter_mx_rows": "rows",
    "scatter_rows": "rows",
    "sent_regions": "plan",
    "sum_rows": "sum_rows",
    "sum_rows_backward": "sum_rows",
    "sum_rows_within": "sum_rows",
    "window_places": "plan",
}

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


@functools.cache
def launcher(name: str) -> Callable:
    """The launcher of that name; loads its file, and with it Triton, on first use.

    It runs under the device of its first tensor: Triton launches on the current device, wherever the pointers point to.
    """
    launch = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)

    @functools.wraps(launch)
    def on_its_gpu(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return launch(first, *rest, **options)
        with torch.cuda.device(first.device):
            return launch(first, *rest, **options)

    return on_its_gpu


def __getattr__(name: str) -> Callable:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return launcher(name)


class _Launchers(ModuleType):
    """Some files are named like the launcher inside: loading one does not take the launcher's name away."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Launchers
