"""Tensor parallelism of attention, dense and shared FFN as ParallelStyles, with tokens sharded along the sequence everywhere else.

    before  tokens (B, S/tp, D), other ones on every rank of the TP group
    region  gathers them to (B, S, D), computes this rank's heads or hidden columns with its shards of the weights, and scatters the sum
    after   tokens (B, S/tp, D)

One rule for gradients: inside a region those of whatever all ranks hold (its input, norms, projections that are not sharded) are partial
sums.  They are summed where tokens leave (the gather's backward is a sum), and for weights by FSDP, which shards these over the TP ranks
too.  Weights that are sharded here are DTensors, so that checkpoints know them whole.  All activations are plain tensors.
"""

from __future__ import annotations

import types

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mxep.parallel.linears import MXLinear
from mxep.placements import local_part, moved


class ColumnShards(ParallelStyle):
    """A linear layer that computes this rank's share of the output columns: weight (N, K) sharded along N, x (..., K) -> (..., N/tp).

    Args:
        unit: columns that must stay together (the width of a head).
    """

    dim = 0

    def __init__(self, unit: int = 1) -> None:
        super().__init__()
        self.unit = unit

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear) or module.bias is not None:
            raise ValueError(f"tensor parallelism: {type(module).__name__} is no torch.nn.Linear without bias, want one")
        parts = module.weight.shape[self.dim] // self.unit
        if parts % device_mesh.size():
            of = f"{parts} heads of {self.unit}" if self.unit > 1 else f"{parts} values"
            raise ValueError(
                f"tensor parallelism: a weight {tuple(module.weight.shape)} has {of} to share, not divisible by the TP degree "
                f"{device_mesh.size()}; choose a TP degree that divides the model's heads and hidden widths"
            )
        sharded = distribute_tensor(module.weight.detach(), device_mesh, [Shard(self.dim)], src_data_rank=None)
        module.weight = nn.Parameter(sharded, requires_grad=module.weight.requires_grad)
        if isinstance(module, MXLinear):  # multiplies its shard anyway
            module.check_widths()
        else:
            module.forward = types.MethodType(_linear_of_shard, module)  # type: ignore[method-assign]
        return module


class RowShards(ColumnShards):
    """A linear layer that takes this rank's share of the input columns: weight (N, K) sharded along K, x (..., K/tp) -> part of a sum."""

    dim = 1


def _linear_of_shard(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, local_part(self.weight))


class GatheredRegion(ParallelStyle):
    """A module whose first input is gathered along `dim` and whose output, part of a sum on each rank, is summed and scattered there."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        piece = Shard(self.dim)

        def gather(_: nn.Module, inputs: tuple) -> tuple:
            return (moved(inputs[0], device_mesh, piece, Replicate(), Partial()), *inputs[1:])

        def scatter(_: nn.Module, __: tuple, output: Tensor) -> Tensor:
            return moved(output, device_mesh, Partial(), piece, piece)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class SlicedSequence(ParallelStyle):
    """A module (the embedding) that sees this rank's share of its input along `dim`, for example tokens (B, S) -> (B, S/tp)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (slice_sequence(inputs[0], device_mesh, self.dim), *inputs[1:]))
        return module


def slice_sequence(x: Tensor, tp_mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's share of x along `dim`: the r-th of tp equal pieces. Raises ValueError where the length is not divisible."""
    if x.shape[dim] % tp_mesh.size():
        raise ValueError(
            f"tensor parallelism: a sequence of {x.shape[dim]} tokens is not divisible by the TP degree {tp_mesh.size()}; change either"
        )
    return x.chunk(tp_mesh.size(), dim=dim)[tp_mesh.get_local_rank()]
