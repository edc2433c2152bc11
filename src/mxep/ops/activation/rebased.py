"""Activations and their gradients, rebased for the FP8 GEMM that reads them next: CUDA C++, one read of the inputs, one write.

The bytes are those of the MX rows and of a rebase of these, which would write and read them once more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mxep.device import chip_of
from mxep.ops.activation.columns import Variant, inputs_of
from mxep.ops.activation.functions import is_gated, swiglu_of
from mxep.ops.grouped_gemm.bias import sum_parts
from mxep.ops.grouped_gemm.hopper.quantize_rows import HEADERS, check_width, shared_bytes
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, RebasedRows, empty_rebased
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel
from mxep.shapes import cdiv

FILES = (*HEADERS, "activation/functions.cuh", "activation/columns.cuh", "activation/rebased.cu")
_WARP, _MOST_PASSES = 32, 2


def _sum_shape(width: int) -> tuple[int, int]:
    """Passes over a row of h of that width, in each of which a thread takes 8 columns, and threads of a block, with few idle ones.

    >>> [_sum_shape(width) for width in (32, 768, 2880, 3136, 6144, 6176)]
    [(1, 32), (1, 96), (1, 384), (2, 224), (2, 384), (3, 288)]
    """
    lanes = width // tiles.LANE_COLUMNS
    passes = cdiv(lanes, tiles.REBASED_SUM_THREADS)
    return passes, cdiv(cdiv(lanes, passes), _WARP) * _WARP


def adds_rows(width: int) -> bool:
    """Whether the kernel can add rows of dx for an h of that width: their sums are in registers."""
    return _sum_shape(width)[0] <= _MOST_PASSES


def options_of(variant: Variant, forward: bool, block_scales: bool) -> dict[str, bool | int]:
    """The constants in front of rebased.cu."""
    float32 = torch.float32 in (variant.x, variant.dh)
    width = variant.width * (1 if forward else 1 + is_gated(variant.activation))
    tile = tiles.ACTIVATE_REBASED if forward else tiles.ACTIVATE_BACKWARD_REBASED
    rows, threads, blocks = tile.rows(variant.width), tile.threads, tile.min_blocks
    if variant.sums:
        passes, threads = _sum_shape(variant.width)
        rows, blocks = tiles.REBASED_SUM_STEP, max(tiles.REBASED_SUM_RESIDENT[passes > 1 or float32] // threads, 1)
    shape = {"ROWS": rows, "REBASED_WIDTH": width, "BATCH": 1 if float32 else tile.batch, "THREADS": threads, "MIN_BLOCKS": blocks}
    kind = {"FORWARD": forward, "BLOCK_SCALES": block_scales, "SUMS": variant.sums, "SUM_ROWS": tiles.REBASED_SUM_ROWS}
    return {**shape, **kind, **variant.options()}


@functools.cache
def _kernel(device: int, variant: Variant, forward: bool, block_scales: bool) -> Kernel:
    options = options_of(variant, forward, block_scales)
    check_width("activate", options["REBASED_WIDTH"], "ask for 'mx'")
    needed = shared_bytes(options["ROWS"], options["REBASED_WIDTH"])
    return Kernel("activation_rebased", FILES, options, options["THREADS"], needed, chip=chip_of(device))


def launch_rebased(
    variant: Variant,
    forward: bool,
    inputs: tuple[Any, ...],
    results: tuple[torch.Tensor | None, ...],
    out: RebasedRows,
    granularity: str,
    num_valid_rows: torch.Tensor | None,
    num_rows: int,
    ends: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write `out` and what else there is of `results`: the scores' gradient in parts, then MX data, scales and values of dx and of h.

    Returns the sums (G, N) float32 of dx's rows in the groups that end at `ends` (G,) int32, with a variant that has them.
    """
    assert variant.sums == (ends is not None)
    device = out.data.device.index
    kernel = _kernel(device, variant, forward, out.block_scale is not None)
    parts = None
    if ends is not None:
        blocks = num_rows // tiles.REBASED_SUM_ROWS + ends.shape[0] + 1  # groups end in the middle of a tile
        parts = torch.empty((blocks, out.data.shape[1]), dtype=torch.float32, device=out.data.device)
    else:
        blocks = cdiv(num_rows, kernel.options["ROWS"])
        blocks = blocks if num_valid_rows is None else min(blocks, tiles.LOOP_PROGRAMS)
    scales = out.scale, out.block_scale, 0 if out.block_scale is None else out.block_scale.stride(0), MAX_SPREAD[granularity]
    groups = ends, 0 if ends is None else ends.shape[0], parts
    kernel.launch(device, blocks, *inputs, *results, out.data, *scales, num_valid_rows, num_rows, *groups)
    return None if parts is None or ends is None else sum_parts(parts, ends, num_rows, tiles.REBASED_SUM_ROWS)


def activate_rebased(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool,
    scores: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    activation: str,
    form: Sequence[float],
    h: str,
    granularity: str,
) -> list[torch.Tensor]:
    """`activate` with h rebased, of arguments that are checked."""
    num_rows, width = x.shape[0], x.shape[1] // (1 + is_gated(activation))
    out, values = empty_rebased(x, num_rows, width, granularity != "row"), x.new_empty((num_rows, width)) if "hp" in h else None
    if x.numel():
        wide, inputs = inputs_of(None, x, None, scores)
        given = scores is not None, ("none", h), wide, False, num_valid_rows is not None, activation, swiglu_of(tuple(form))
        variant = Variant(width, layout, scaling_mode, exact, x.dtype, torch.bfloat16, *given)
        launch_rebased(variant, True, inputs, (*[None] * 6, values), out, granularity, num_valid_rows, num_rows)
    return [part for part in (*out, values) if part is not None]
