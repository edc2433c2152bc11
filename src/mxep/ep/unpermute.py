"""Stage 4, unpermute: expert outputs from expert-major order back into the received order.

Before: the experts.  After: combine.
Forward: (P, N) -> (R, N) in the input's dtype, padding dropped.  Backward: an MX gradient (R, N) -> (P, N) MX, padding rows zero;
a plain one stays plain, or is quantised in that pass.  Saves only the row map.  Host syncs: none.
"""

from __future__ import annotations

from typing import Any

import torch

from mxep.checks import check_count, check_tensors, values_checked
from mxep.mx.compile import enters_graph, in_graph, leave_graph
from mxep.mx.rows import gather_as_mx, scatter
from mxep.mx.tensor import dequantize_data, reject_graph_output


@in_graph
class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_map: torch.Tensor, num_rows: int, mode: str) -> torch.Tensor:
        ctx.save_for_backward(row_map)
        ctx.mode = mode
        ctx.entered = enters_graph(rows)
        return scatter(dequantize_data(rows), row_map, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (row_map,) = ctx.saved_tensors
        return leave_graph(gather_as_mx(grads[0], row_map, ctx.mode), ctx.entered), None, None, None


def unpermute_hp_fwd_mxfp8_bwd(input: torch.Tensor, permuted_indices: torch.Tensor, padded_shape: torch.Size) -> torch.Tensor:
    """Undo permute: drop the padding and restore the received order; high precision forward, MX backward.

    Args:
        input: (P, N), any N: the experts' output.
        permuted_indices: (P,) int32 or int64, the row map that permute returned.
        padded_shape: Size([R+1, anything]) that permute returned; only R is read.

    Returns:
        (R, N) in input's dtype.  Its backward takes an MXTensor or plain gradient and returns the same form.

    Raises:
        ValueError: a row map of another length or dtype; in checking mode also one that does not have each of the R rows once.

    Examples:
        >>> x = torch.randn(6, 64)
        >>> shape, permuted, row_map, _, _ = mxep.permute_and_pad(x, torch.tensor([2, 4]), 1, 2, alignment=32)
        >>> torch.equal(mxep.unpermute_hp_fwd_mxfp8_bwd(permuted, row_map, shape), x)
        True
    """
    return unpermute_rows(input, permuted_indices, padded_shape)


def unpermute_rows(input: torch.Tensor, permuted_indices: torch.Tensor, padded_shape: torch.Size, mode: str = "") -> torch.Tensor:
    """`unpermute_hp_fwd_mxfp8_bwd`; with a scaling mode as `mode`, its backward returns MX for any gradient."""
    where = "unpermute"
    reject_graph_output(input, where)
    check_tensors(where, input=input)
    check_tensors(where, input.device, permuted_indices=permuted_indices)
    if not isinstance(padded_shape, tuple | list) or not padded_shape:
        raise ValueError(f"{where}: padded_shape is {padded_shape!r}, want Size([R+1, anything]), which permute returned")
    check_count(where, "padded_shape[0]", padded_shape[0])
    if input.dim() != 2 or tuple(permuted_indices.shape) != (input.shape[0],):
        raise ValueError(
            f"unpermute: input is {tuple(input.shape)}, permuted_indices {tuple(permuted_indices.shape)}, want (P, N) and (P,) "
            "with the row map of the permute that made these rows"
        )
    if permuted_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"unpermute: permuted_indices is {permuted_indices.dtype}, want int32 or int64, the row map that permute returned")
    num_rows = padded_shape[0] - 1
    if values_checked(permuted_indices):  # host sync: only in checking mode
        _check_row_map(permuted_indices, num_rows, padded_shape)
    return _Unpermute.apply(input, permuted_indices, num_rows, mode)


def _check_row_map(row_map: torch.Tensor, num_rows: int, padded_shape: torch.Size) -> None:
    """Raise ValueError unless each of `num_rows` rows is in the map once, and -1 everywhere else."""
    there = row_map[row_map != -1]
    least, most = (int(there.min()), int(there.max())) if there.numel() else (0, -1)
    if least < 0 or most >= num_rows:
        raise ValueError(
            f"unpermute: permuted_indices points to row {least if least < 0 else most}, but padded_shape {tuple(padded_shape)} has room "
            f"for {num_rows} rows; pass the shape that came with this row map"
        )
    times = torch.bincount(there, minlength=num_rows)
    if bool((times != 1).any()):
        row = int((times != 1).nonzero()[0])
        raise ValueError(
            f"unpermute: permuted_indices has row {row} of {num_rows} {int(times[row])} times, want each once; pass the row map "
            "that permute returned with padded_shape"
        )
