"""Stage 5, combine: expert outputs back to the ranks of the tokens.

Before: unpermute.  After: the weighted sum over a token's experts (not here).
Forward: exchange of (R, N) in high precision: no GEMM reads the result, so quantising would only cost accuracy.
Backward: quantise the gradient 1x32, one packed exchange, MX (R, N): the bytes into which dgrad would quantise it anyway.
Saves no tensor.  Host syncs: none.
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from mxep.checks import check_mode
from mxep.ep.dispatch import AllToAll, check_exchange, one_group
from mxep.mx.tensor import reject_graph_output
from mxep.recipe import ScaleCalculationMode
from mxep.shapes import MX_BLOCK


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
        output_splits: rows received from each rank of the group, a host list; the input_splits of dispatch.
        input_splits: rows sent to each rank, a host list; the output_splits of dispatch.
        group_name: process group, its name, or None for WORLD.
        group: an alias of it.
        scaling_mode: scaling mode.
        block_size: 32.
        mxfp8_bwd: False exchanges the gradient in its own dtype.

    Returns:
        (T', N) in input's dtype.  Its backward returns an MXTensor (R, N), or a plain tensor with mxfp8_bwd=False.

    Raises:
        ValueError: dtype, width or splits that do not fit; splits that differ between ranks (checking mode, on every rank).

    Examples:
        >>> expert_output = torch.randn(64, 128, dtype=torch.bfloat16)
        >>> combined = mxep.a2a_combine_hp_fwd_mxfp8_bwd(expert_output, output_splits=[64], input_splits=[64])  # a group of one rank
        >>> torch.equal(combined, expert_output)
        True
    """
    where = "combine"
    reject_graph_output(input, where)
    mode = check_mode(where, scaling_mode, block_size)
    name = check_exchange(where, input, output_splits, input_splits, one_group(where, group_name, group), quantised=mxfp8_bwd)
    return AllToAll.apply(input, output_splits, input_splits, name, "", mode if mxfp8_bwd else "")
