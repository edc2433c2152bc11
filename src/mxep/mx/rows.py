"""Rows (R, D): gathered and scattered by a row map, plain or MX; and rows as outputs of a layer, (..., D)."""

from __future__ import annotations

import torch

from mxep.mx.tensor import MXTensor
from mxep.operators import direct


def gather(rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """(R, D) -> (P, D) by a row map, MX stays MX."""
    if isinstance(rows, MXTensor):
        qdata, scale = direct.gather_mx_rows(rows.qdata, rows.scale, row_map)
        return MXTensor(qdata, scale, rows.orig_dtype)
    return direct.gather_rows(rows, row_map)


def gather_as_mx(rows: torch.Tensor, row_map: torch.Tensor, mode: str) -> torch.Tensor:
    """(R, D) -> MX (P, D): plain rows are quantised on the way, with the scaling mode `mode`; "" leaves them as they are."""
    if not mode or isinstance(rows, MXTensor):
        return gather(rows, row_map)
    qdata, scale = direct.gather_quantize(rows, row_map, mode)
    return MXTensor(qdata, scale, rows.dtype)


def scatter(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(P, D) -> (R, D), the inverse of `gather`, MX stays MX."""
    if isinstance(rows, MXTensor):
        qdata, scale = direct.scatter_mx_rows(rows.qdata, rows.scale, row_map, num_rows)
        return MXTensor(qdata, scale, rows.orig_dtype)
    return direct.scatter_rows(rows, row_map, num_rows)


def unflatten_rows(rows: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """(T, N) -> (*lead, N), the same memory but no view for autograd, as torch's own matmul returns it; `rows` must not be used afterwards.

    An in-place operation on a view replaces the view's node in the graph, and with it the hook that FSDP2 put there to gather the module's
    parameters before backward and to reduce their gradients.
    """
    return torch.ops.aten._unsafe_view(rows, (*lead, rows.shape[-1]))
