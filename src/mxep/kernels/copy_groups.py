"""Groups of a gradient from one tensor into another, those with rows or those without: a group that stays costs a look at its size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.reference.grouped_mm import check_copy_groups
from mxep.shapes import cdiv


@triton.jit(do_not_specialize=["size"])
def _copy_groups_kernel(
    into,  # (G, N, K), each group contiguous
    into_group,
    made,  # the same
    made_group,
    offs,  # (G,) int32
    size,  # N * K
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(1)
    end = tl.load(offs + group)
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    if (end == start) == EMPTY:
        for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(made + group.to(tl.int64) * made_group + at, mask=at < size)
            tl.store(into + group.to(tl.int64) * into_group + at, values, mask=at < size)


def copy_groups(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor, empty: bool = False) -> None:
    """into[g] = made[g] for every group that has rows, or with `empty` for every one that has none. Twin: `reference.copy_groups`.

    Args:
        into, made: (G, N, K) of one dtype, every group contiguous.  offs: (G,) int32 END offsets on the device.
    """
    check_copy_groups(into, made, offs)
    size = into.shape[1] * into.shape[2]

    if into.numel():
        launch(
            _copy_groups_kernel,
            (min(cdiv(size, tiles.GROUP_BLOCK), tiles.GROUP_PROGRAMS), into.shape[0]),
            {
                "into": into,
                "into_group": into.stride(0),
                "made": made,
                "made_group": made.stride(0),
                "offs": offs.contiguous(),
                "size": size,
                "EMPTY": empty,
                "BLOCK": tiles.GROUP_BLOCK,
            },
            num_warps=4,
        )
