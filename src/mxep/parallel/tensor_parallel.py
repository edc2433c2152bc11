"""Tensor parallelism of attention, dense and shared FFN as ParallelStyles, with tokens sharded along the sequence everywhere else.

    before  tokens (B, S/tp, D), other ones on every rank of the TP group
    region  gathers them to (B, S, D), computes this rank's heads or hidden columns with its shards of the weights, and scatters the sum
    after   tokens (B, S/tp, D)

One rule for gradients: inside a region those of whatever all ranks hold (its input, norms, projections that are not sharded) are partial
sums.  They are summed at the end of the region (the gather's backward is a sum), and for weights by FSDP, which shards these over the TP
ranks too.  Weights that are sharded here are DTensors, so that checkpoints have them whole.  All activations are plain tensors.
"""

from __future__ import annotations

import types

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mxep.parallel.linears import MXLinear
from mxep.placements import redistribute, to_local


class ColumnShards(ParallelStyle):
    """A linear layer that computes this rank's share of the output columns: weight (N, K) sharded along N, x (..., K) -> (..., N/tp).

    Args:
        unit: columns that must stay together (the width of a head).

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> query = torch.nn.Linear(64, 4 * 16, bias=False)  # 4 heads of 16 columns
        >>> query = parallelize_module(query, meshes.tp, mxep.parallel.ColumnShards(unit=16))
        >>> query(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    dim = 0

    def __init__(self, unit: int = 1) -> None:
        super().__init__()
        self.unit = unit

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear) or module.bias is not None:
            raise ValueError(f"tensor parallelism: {type(module).__name__} is no torch.nn.Linear without bias, want one")
        # A shard has a forward of its own (`_linear_of_shard`), and a parameter of its own.
        if "forward" in vars(module) or (not isinstance(module, MXLinear) and type(module).forward is not nn.Linear.forward):
            raise ValueError(
                f"tensor parallelism: {type(module).__name__} has a forward of its own, which its shard would not run, want that of "
                "torch.nn.Linear; shard it before something wraps it, or leave it out"
            )
        if "weight" not in module._parameters:
            raise ValueError(
                "tensor parallelism: a parametrization makes the weight, which a sharded parameter cannot replace, want a plain parameter; "
                "remove it (torch.nn.utils.parametrize.remove_parametrizations), or leave the layer out"
            )
        if module.weight._backward_hooks or module.weight._post_accumulate_grad_hooks:
            raise ValueError(
                "tensor parallelism: the weight has hooks, which the sharded parameter in its place would not run, want none yet; register "
                "them afterwards"
            )
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
            module.unconverted_forward = _linear_of_shard
        else:
            module.forward = types.MethodType(_linear_of_shard, module)  # type: ignore[method-assign]
        return module


class RowShards(ColumnShards):
    """A linear layer that takes this rank's share of the input columns: weight (N, K) sharded along K, x (..., K/tp) -> a partial sum.

    Args:
        unit: columns that must stay together (the width of a head).

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> output = parallelize_module(torch.nn.Linear(64, 64, bias=False), meshes.tp, mxep.parallel.RowShards())
        >>> output(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    dim = 1


def _linear_of_shard(self: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, to_local(self.weight))


class GatheredRegion(ParallelStyle):
    """A module whose first input is gathered over the TP group, and whose output is summed and scattered.

    The output is a partial sum on each rank.

    Args:
        dim: dimension of the sequence, along which both are sharded.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> block = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False))
        >>> plan = {"": mxep.parallel.GatheredRegion(dim=1), "0": mxep.parallel.ColumnShards(), "1": mxep.parallel.RowShards()}
        >>> parallelize_module(block, meshes.tp, plan)(torch.randn(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        piece = Shard(self.dim)

        def gather(module: nn.Module, inputs: tuple) -> tuple:
            if not inputs:
                raise ValueError(f"GatheredRegion: {type(module).__name__} was called by keyword alone, want its tokens as first argument")
            return (redistribute(inputs[0], device_mesh, piece, Replicate(), Partial()), *inputs[1:])

        def scatter(module: nn.Module, _: tuple, output: Tensor) -> Tensor:
            if not isinstance(output, Tensor):
                name = type(module).__name__
                raise ValueError(
                    f"GatheredRegion: {name} returned a {type(output).__name__}, want one tensor; shard the part that makes it"
                )
            return redistribute(output, device_mesh, Partial(), piece, piece)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(scatter)
        return module


class SlicedSequence(ParallelStyle):
    """A module (the embedding) that takes this rank's share of its input, for example tokens (B, S) -> (B, S/tp).

    Args:
        dim: dimension of the sequence.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> embedding = parallelize_module(torch.nn.Embedding(100, 64), meshes.tp, mxep.parallel.SlicedSequence(dim=1))
        >>> embedding(torch.zeros(2, 8, dtype=torch.int64)).shape  # (B, S / tp, D)
        torch.Size([2, 8, 64])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (slice_sequence(inputs[0], device_mesh, self.dim), *inputs[1:]))
        return module


def slice_sequence(x: Tensor, tp_mesh: DeviceMesh, dim: int) -> Tensor:
    """This rank's share of x along `dim`: the r-th of tp equal pieces.

    Args:
        x: of any dtype, the same on every rank of the TP group.
        tp_mesh: 1-D mesh of the TP group.
        dim: dimension of the sequence.

    Returns:
        a view of x, 1/tp of its length along `dim`.

    Raises:
        ValueError: a length that is not divisible by the TP degree.

    Examples:
        >>> meshes = mxep.parallel.build_meshes(1, mxep.parallel.ParallelDims(), "cpu")
        >>> mxep.parallel.slice_sequence(torch.randn(2, 8, 64), meshes.tp, dim=1).shape
        torch.Size([2, 8, 64])
    """
    if x.shape[dim] % tp_mesh.size():
        raise ValueError(
            f"tensor parallelism: a sequence of {x.shape[dim]} tokens is not divisible by the TP degree {tp_mesh.size()}; change either"
        )
    return x.chunk(tp_mesh.size(), dim=dim)[tp_mesh.get_local_rank()]
