"""Dtype of the trained parameters, and how AdamW's two moments are stored: bytes of both, and the blocks of quantised moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mxep.ops.optimizer.codes import BLOCKS

OptimizerName = Literal["adamw", "adamw8bit", "adamw4bit"]
ParameterDtype = Literal["float32", "bfloat16"]
_FLOAT32 = 4
_LEAST_QUANTIZED = 4096  # torchao's: parameters with fewer values keep moments in the parameter's dtype


class MomentBlocks(NamedTuple):
    """Quantised moments: bits of a value, and how many consecutive values share a float32 scale."""

    bits: int
    size: int


_BITS: dict[str, Literal[8, 4] | None] = {"adamw": None, "adamw8bit": 8, "adamw4bit": 4}


def moment_blocks(bits: int | None, shape: Sequence[int]) -> MomentBlocks | None:
    """How moments of so many bits of a parameter of this (global) shape are quantised; None: they are not. No sharding changes it.

    >>> moment_blocks(8, (64, 64)), moment_blocks(8, (2048,)), moment_blocks(8, (4097, 3))
    (MomentBlocks(bits=8, size=256), None, None)
    """
    values = math.prod(shape)
    return None if bits is None or values < _LEAST_QUANTIZED or values % BLOCKS[bits] else MomentBlocks(bits, BLOCKS[bits])


@dataclass(frozen=True)
class StatePrecision:
    """What one parameter takes from step to step.

    Attributes:
        optimizer: adamw keeps moments in the parameter's dtype, adamw8bit and adamw4bit quantise them.
        dtype: of parameters and gradients.
    """

    optimizer: OptimizerName = "adamw"
    dtype: ParameterDtype = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def state_bits(self) -> Literal[8, 4] | None:
        return _BITS[self.optimizer]

    def moment_bytes(self, shape: Sequence[int], values: int) -> int:
        """Bytes of both moments for `values` values of a parameter of this (global) shape.

        >>> StatePrecision().moment_bytes((64, 64), 4096), StatePrecision("adamw8bit", "bfloat16").moment_bytes((64, 64), 4096)
        (32768, 8320)
        """
        blocks = moment_blocks(self.state_bits, shape)
        if blocks is None:
            return 2 * values * self.torch_dtype.itemsize
        return 2 * (values * blocks.bits // 8 + -(-values // blocks.size) * _FLOAT32)


def block_grid(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Shape of an array with one element for each block of `size` consecutive values; leading dimensions stay where blocks allow it.

    >>> block_grid((64, 1408, 2048), 256), block_grid((4096, 64), 256), block_grid((4096, 64), 1)
    ((64, 1408, 8), (1024,), (4096, 64))
    """
    kept, tail = len(shape) - 1, shape[-1]
    while tail % size:
        kept -= 1
        tail *= shape[kept]
    return (*shape[:kept], tail // size)


def zeros_by_block(parameter: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Zeros of shape `block_grid(parameter.shape, size)`, sharded like the parameter.

    Raises:
        ValueError: a shard of the parameter ends within a block.
    """
    grid = block_grid(parameter.shape, size)
    if not isinstance(parameter, DTensor):
        return torch.zeros(grid, dtype=dtype, device=parameter.device)
    mesh, placements, last = parameter.device_mesh, parameter.placements, len(grid) - 1
    sharded = [placement.dim for placement in placements if not placement.is_replicate()]  # type: ignore[attr-defined]
    values = math.prod(parameter.shape[last:]) // parameter.shape[last]  # of one index of the last kept dimension
    lengths, starts = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if max(sharded, default=0) <= last:
        found = compute_local_shape_and_global_offset(torch.Size(grid), mesh, placements)
        wanted = [(*part[:last], part[last] * values) for part in (lengths, starts)]
        if [(*part[:last], part[last] * size) for part in found] == wanted:
            local = torch.zeros(found[0], dtype=dtype, device=parameter.to_local().device)
            strides = torch.empty(grid, device="meta").stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(grid), stride=strides)
    raise ValueError(
        f"its moments have blocks of {size} values, which the shard {tuple(lengths)} of {tuple(parameter.shape)} from {tuple(starts)} "
        "cuts; change --ep, --tp or --dp-shard so that shards are whole blocks, or use --optimizer adamw (state_bits=None)"
    )
