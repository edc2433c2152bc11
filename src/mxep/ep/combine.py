"""Stop 5, combine: expert outputs back to the ranks that own the tokens.

Before: unpermute.  After: the weighted sum over a token's experts (not here).
Forward: exchange of (R, N) as it is; it stays in high precision because nothing multiplies it afterwards, so quantising would cost
accuracy and buy no GEMM.  Backward: quantise the gradient 1x32, one packed exchange, MX (R, N): the bytes that dgrad would have made
of it anyway.  Saves no tensor.  Host syncs: none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from mxep.comm import group_name_of
from mxep.ep.checks import check_alone, check_mode, check_rows, check_splits
from mxep.ep.dispatch import ExchangeHP, exchange_forward, exchange_mx
from mxep.mx.in_graph import enters_graph, in_graph, leave_graph
from mxep.mx.tensor import dequantize_data, reject_border
from mxep.recipe import ScaleCalculationMode
from mxep.shapes import MX_BLOCK


@in_graph
class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group_name: str, mode: str
    ) -> torch.Tensor:
        ctx.splits, ctx.mode = (input_splits, output_splits, group_name), mode
        ctx.entered = enters_graph(rows)
        return exchange_forward(rows, output_splits, input_splits, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        output_splits, input_splits, name = ctx.splits
        grad = exchange_mx(dequantize_data(grads[0]), output_splits, input_splits, name, ctx.mode)
        return leave_graph(grad, ctx.entered), None, None, None, None


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group_name: str | ProcessGroup | None = None,
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    block_size: int = MX_BLOCK,
    mxfp8_bwd: bool = True,
    group: str | ProcessGroup | None = None,
) -> torch.Tensor:
    """All-to-all combine: high precision forward, MXFP8 on the wire backward. No score weighting inside.

    Args:
        input: (R, N) bf16 or float32, rows as dispatch delivered them; with mxfp8_bwd N is a multiple of 32.
        output_splits, input_splits: the splits of dispatch, swapped.
        group_name: process group, its name, or None for WORLD.  group: an alias of it.
        mxfp8_bwd: False exchanges the gradient in its own dtype.

    Returns:
        (T', N) in input's dtype.  Its backward hands an MXTensor (R, N) upstream, or a plain tensor with mxfp8_bwd=False.

    Raises:
        ValueError: dtype, width or splits that do not fit; splits that differ between ranks (checking mode, on every rank).
    """
    where = "combine"
    reject_border(input, where)
    mode = check_mode(where, scaling_mode, block_size)
    check_rows(where, input, quantised=mxfp8_bwd)
    check_splits(where, output_splits, input_splits)
    name = group_name_of(where, group if group_name is None else group_name)
    check_alone(where, input.shape[0], output_splits, input_splits, name)
    if mxfp8_bwd:
        return _Combine.apply(input, output_splits, input_splits, name, mode)
    return ExchangeHP.apply(input, output_splits, input_splits, name)
