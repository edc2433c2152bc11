"""Initial weights of sharded modules: every rank draws one whole tensor after the other and keeps its own shard.

The numbers depend on the generator only, not on the number of ranks.  A rank holds one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """(this rank's shard, its slices of the whole tensor); a plain tensor is its own shard."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, length) for length in tensor.shape)
    lengths, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


@torch.no_grad()
def draw(parameter: Tensor, fill: Callable[[Tensor], object]) -> None:
    """`fill` writes a whole float32 tensor in place; `parameter` keeps this rank's shard of it, in its own dtype.

    The generator must have the same state on every rank.
    """
    local, region = local_shard(parameter)
    if local is parameter and parameter.dtype == torch.float32:
        fill(parameter)
        return
    whole = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
    fill(whole)
    local.copy_(whole[region])


def init_normal_(parameter: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill with N(0, std^2) in place; see `draw`."""
    draw(parameter, lambda whole: whole.normal_(0.0, std, generator=generator))
