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
from mxep.ops.grouped_gemm.hopper.quantize_rows import HEADERS, check_width, rows_of_block, shared_bytes
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, RebasedRows, empty_rebased
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel
from mxep.shapes import cdiv

FILES = (*HEADERS, "activation/functions.cuh", "activation/columns.cuh", "activation/rebased.cu")


def options_of(variant: Variant, forward: bool, block_scales: bool) -> dict[str, bool | int]:
    """The constants in front of rebased.cu."""
    batch = 1 if torch.float32 in (variant.x, variant.dh) else tiles.REBASED_BATCH
    width = variant.width * (1 if forward else 1 + is_gated(variant.activation))
    shape = {"ROWS": rows_of_block(variant.width), "REBASED_WIDTH": width, "BATCH": batch, "THREADS": tiles.REBASED_THREADS}
    kind = {"MIN_BLOCKS": tiles.REBASED_MIN_BLOCKS[not forward], "FORWARD": forward, "BLOCK_SCALES": block_scales}
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
) -> None:
    """Write `out` and what else there is of `results`: the scores' gradient in parts, then MX data, scales and values of dx and of h."""
    device = out.data.device.index
    kernel = _kernel(device, variant, forward, out.block_scale is not None)
    blocks = cdiv(num_rows, kernel.options["ROWS"])
    blocks = blocks if num_valid_rows is None else min(blocks, tiles.LOOP_PROGRAMS)
    scales = out.scale, out.block_scale, 0 if out.block_scale is None else out.block_scale.stride(0), MAX_SPREAD[granularity]
    kernel.launch(device, blocks, *inputs, *results, out.data, *scales, num_valid_rows, num_rows)


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
