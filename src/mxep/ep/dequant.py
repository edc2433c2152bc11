"""All-to-all with MXFP8 on the wire both ways and high precision at both ends.

For exchanges behind which no MXFP8 GEMM stands.  Forward and backward each quantise 1x32, exchange packed records once and
dequantise, over symmetric memory each round beside the next one (`mxep.comm.mail`).  Saves no tensor.  Host syncs: none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from mxep.comm import group_name_of
from mxep.ep.checks import check_alone, check_rows, check_splits
from mxep.ep.dispatch import exchange_mx
from mxep.mx.in_graph import in_graph
from mxep.mx.tensor import dequantize_data

_MODE = "rceil"


def _exchange(rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group_name: str) -> torch.Tensor:
    if group_name:
        return torch.ops.mxep.exchange_dequantized(rows, output_splits, input_splits, group_name, _MODE)
    return dequantize_data(exchange_mx(rows, output_splits, input_splits, group_name, _MODE))


@in_graph
class ToMXFP8AllToAllVDequant(torch.autograd.Function):
    """Autograd function behind `to_mxfp8_a2a_dequant`; `.apply` has its arguments."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str | ProcessGroup | None = None
    ) -> torch.Tensor:
        where = "to_mxfp8_a2a_dequant"
        check_rows(where, input, quantised=True)
        check_splits(where, output_splits, input_splits)
        name = group_name_of(where, group)
        check_alone(where, input.shape[0], output_splits, input_splits, name)
        ctx.splits = (input_splits, output_splits, name)
        return _exchange(input, output_splits, input_splits, name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return _exchange(dequantize_data(grads[0]), *ctx.splits), None, None, None


def to_mxfp8_a2a_dequant(
    input: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str | ProcessGroup | None = None
) -> torch.Tensor:
    """Differentiable all-to-all of plain rows that travel as MXFP8 (RCEIL), forward and backward.

    Over symmetric memory the group's first call takes 256 MiB of every GPU, and in later ones no host waits for another.  Splits that
    disagree between ranks are an error on every rank in checking mode; without it a rank gets NaN from whoever sent other rows than it
    awaited, and its next exchange raises `ExchangeError`.

    Args:
        input: (T', D) bf16 or float32, D a multiple of 32.  output_splits, input_splits: rows per rank, host lists.
        group: process group, its name, or None for WORLD.

    Returns:
        (sum(output_splits), D) in input's dtype.

    Raises:
        ValueError: dtype, width or splits that do not fit.
    """
    return ToMXFP8AllToAllVDequant.apply(input, output_splits, input_splits, group)
