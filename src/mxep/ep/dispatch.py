"""Stage 1, dispatch: tokens to the ranks of their experts; and the exchange that dispatch and combine share.

Before: rows sorted by destination rank (T', D) bf16 or float32.  After: permute.
Forward: quantise 1x32, one packed exchange, MX (R, D).  Backward: exchange in the gradient's dtype, nothing quantised.
Saves no tensor.  Host syncs: none (splits are host lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mxep.checks import check_alone, check_mode, check_rows, check_splits
from mxep.comm import group_name_of
from mxep.mx.compile import enters_graph, in_graph, leave_graph
from mxep.mx.tensor import MXTensor, dequantize_data, from_records
from mxep.operators import direct
from mxep.recipe import ScaleCalculationMode
from mxep.shapes import MX_BLOCK


def exchange_mx(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, mode: str) -> MXTensor:
    """Quantise rows (T', D) and exchange them as packed records; `group_name` "" stays on this rank.

    Returns:
        MX (R, D); its data and scales are views into the received records.
    """
    if group_name:
        records = direct.exchange_quantized(rows, output_splits, input_splits, group_name, mode)
    else:
        records = direct.quantize_packed(rows, mode)
    return from_records(records, rows.shape[1], rows.dtype)


def exchange_hp(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str) -> torch.Tensor:
    """Exchange plain rows as they are; of an MX tensor its values are sent. `group_name` "" stays on this rank."""
    rows = dequantize_data(rows)
    return direct.exchange_rows(rows, output_splits, input_splits, group_name) if group_name else rows


def exchange(rows: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group_name: str, mode: str) -> torch.Tensor:
    """`exchange_mx` of the rows' values with a scaling mode as `mode`, `exchange_hp` with ""."""
    if mode:
        return exchange_mx(dequantize_data(rows), output_splits, input_splits, group_name, mode)
    return exchange_hp(rows, output_splits, input_splits, group_name)


@in_graph
class AllToAll(torch.autograd.Function):
    """All-to-all of rows.  `mode` and `backward_mode` are the scaling modes of MXFP8 forward and backward, "" for high precision."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        group_name: str,
        mode: str = "",
        backward_mode: str = "",
    ) -> torch.Tensor:
        ctx.exchange = (list(input_splits), list(output_splits), group_name, backward_mode)  # the caller may change its lists
        ctx.entered = enters_graph(rows)
        out = exchange(rows, output_splits, input_splits, group_name, mode)
        return out.clone() if out is rows else out  # an autograd function must not return its input

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return leave_graph(exchange(grads[0], *ctx.exchange), ctx.entered), None, None, None, None, None


def one_group(where: str, group_name: str | ProcessGroup | None, group: str | ProcessGroup | None) -> str | ProcessGroup | None:
    """The group of an argument and its alias. Raises ValueError if both are given."""
    if group_name is not None and group is not None:
        raise ValueError(f"{where}: both group_name and group are given, want one of them; group is an alias of group_name")
    return group if group_name is None else group_name


def check_exchange(
    where: str,
    rows: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    group: str | ProcessGroup | None,
    quantised: bool,
) -> str:
    """The group's name. Raises ValueError unless rows (T', D) and splits are arguments of an exchange, with `quantised` in MXFP8."""
    check_rows(where, rows, quantised)
    check_splits(where, output_splits, input_splits)
    name = group_name_of(where, group)
    check_alone(where, rows.shape[0], output_splits, input_splits, name)
    return name


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group_name: str | ProcessGroup | None = None,
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    block_size: int = MX_BLOCK,
    group: str | ProcessGroup | None = None,
) -> MXTensor:
    """All-to-all dispatch: MXFP8 on the wire forward, the gradient's dtype backward.

    Args:
        input: (T', D) bf16 or float32, rows sorted by destination rank, D a multiple of 32.
        output_splits: rows received from each rank of the group, a host list.
        input_splits: rows sent to each rank of the group, a host list.
        group_name: process group, its name, or None for WORLD.
        group: an alias of it.
        scaling_mode: scaling mode.
        block_size: 32.

    Returns:
        MXTensor (R, D) with R = sum(output_splits), with values of input's dtype.

    Raises:
        ValueError: dtype, width or splits that do not fit; splits that differ between ranks (checking mode, on every rank).

    Examples:
        >>> rows = torch.randn(64, 128, dtype=torch.bfloat16)
        >>> received = mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(rows, output_splits=[64], input_splits=[64])  # a group of one rank
        >>> type(received).__name__, received.shape, received.scale.shape
        ('MXTensor', torch.Size([64, 128]), torch.Size([64, 4]))
    """
    where = "dispatch"
    mode = check_mode(where, scaling_mode, block_size)
    name = check_exchange(where, input, output_splits, input_splits, one_group(where, group_name, group), quantised=True)
    return AllToAll.apply(input, output_splits, input_splits, name, mode, "")
