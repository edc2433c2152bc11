"""Differentiable `to_local` and `redistribute` of DTensors that raise on a second derivative.

torch's own `to_local`, `from_local` and `redistribute` return gradients without a graph, so a second derivative through them would be
silently wrong.  A compiled graph uses torch's: torch itself refuses second derivatives of compiled graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from mxep.mx.first_order import first_order


def to_local(value: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor is returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if torch.compiler.is_compiling() else _LocalPart.apply(value)


def redistribute(
    x: Tensor, mesh: DeviceMesh, here: Placement, there: Placement, gradient: Placement, shape: torch.Size | None = None
) -> Tensor:
    """Redistribute a local tensor from placement `here` to placement `there`; input and result are plain tensors.

    Args:
        mesh: of one dimension.
        gradient: placement of the result's gradient. The gradient of x is placed `here`, and replicated if x is a partial sum.
        shape: of the whole tensor; None: that of x in equal shards.
    """
    if not torch.compiler.is_compiling():
        return _Moved.apply(x, mesh, here, there, gradient, shape)
    return _placed(x, mesh, here, shape).redistribute(placements=[there]).to_local(grad_placements=[gradient])


def _placed(x: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size | None) -> DTensor:
    x = x.contiguous()
    stride = None if shape is None else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [placement], run_check=False, shape=shape, stride=stride)


@first_order
class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.like = whole.device_mesh, [Replicate() if p.is_partial() else p for p in whole.placements], whole.shape, whole.stride()
        return whole.to_local().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        mesh, placements, shape, stride = ctx.like
        whole = DTensor.from_local(grads[0], mesh, placements, run_check=False)
        if whole.shape != shape:  # uneven shards
            whole = DTensor.from_local(grads[0], mesh, placements, run_check=False, shape=shape, stride=stride)
        return (whole,)


@first_order
class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: DeviceMesh, here: Placement, there: Placement, gradient: Placement, shape: torch.Size | None
    ) -> Tensor:
        whole = _placed(x, mesh, here, shape)
        ctx.mesh, ctx.gradient, ctx.back, ctx.shape = mesh, gradient, Replicate() if here.is_partial() else here, whole.shape
        return whole.redistribute(placements=[there]).to_local().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        whole = _placed(grads[0], ctx.mesh, ctx.gradient, ctx.shape)
        return whole.redistribute(placements=[ctx.back]).to_local(), None, None, None, None, None
