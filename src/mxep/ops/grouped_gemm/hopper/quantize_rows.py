"""Rows straight to what the FP8 GEMMs read, and to MX from the same read: CUDA C++, one read of the values, one write of each form.

Also what the other kernel that rebases rows in shared memory shares with this one (`mxep.ops.activation.rebased`).
"""

from __future__ import annotations

import functools

import torch

from mxep.ops.grouped_gemm.hopper.rebase import rebase_rows
from mxep.ops.grouped_gemm.hopper.rebase_reference import BLOCK_128, MAX_SPREAD, check_rows, empty_rebased
from mxep.ops.quantize.reference import empty_mx
from mxep.ops.quantize.triton import quantize
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel, packed
from mxep.recipe import SCALING_MODES
from mxep.shapes import cdiv

HEADERS = (
    *("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/eight_columns.cuh"),
    *("grouped_gemm/hopper/wide_rows.cuh", "grouped_gemm/hopper/rows_in_memory.cuh"),
)
FILES = (*HEADERS, "grouped_gemm/hopper/quantize_rows.cu")
LOAD_BYTES = 16  # what a lane loads at a time where every row starts at a multiple of it
_SHARED_BYTES = 227 * 1024  # of a block, on Hopper


def shared_bytes(rows: int, width: int) -> int:
    """Bytes of shared memory for so many rebased rows: codes, an exponent for each 32 of them, a target exponent for each 128."""
    return rows * (width + 5 * cdiv(width, BLOCK_128))


def check_width(where: str, width: int, do: str) -> None:
    """Raise ValueError unless one rebased row fits into a block's shared memory."""
    if shared_bytes(1, width) > _SHARED_BYTES:
        most = _SHARED_BYTES * BLOCK_128 // (BLOCK_128 + 5)
        raise ValueError(f"{where}: rebased rows of {width} values, want at most {most}, which fit into shared memory; {do}")


def options_of(width: int, item_bytes: int, wide: bool, block_scales: bool, mx: bool, scaling_mode: str) -> dict[str, bool | int]:
    """The constants in front of quantize_rows.cu for one variant; wide: 16-byte loads."""
    tile = tiles.QUANTIZE_ROWS
    return {
        "REBASED_WIDTH": width,
        "ROWS": tile.rows(width),
        "BATCH": 1 if item_bytes == 4 else tile.batch,
        "THREADS": tile.threads,
        "MIN_BLOCKS": tile.min_blocks,
        "BLOCK_SCALES": block_scales,
        "X_FLOAT": item_bytes == 4,
        "WIDE": wide,
        "MX": mx,
        "SCALING": SCALING_MODES.index(scaling_mode),
    }


@functools.cache
def kernel_of(width: int, item_bytes: int, wide: bool, block_scales: bool, mx: bool, scaling_mode: str) -> Kernel:
    options = options_of(width, item_bytes, wide, block_scales, mx, scaling_mode)
    return Kernel("quantize_rows", FILES, options, options["THREADS"], shared_bytes(options["ROWS"], width))


def quantize_rows(x: torch.Tensor, scaling_mode: str, granularity: str, mx: bool) -> list[torch.Tensor]:
    """Rows as the FP8 GEMMs read them: the bytes of `rebase_rows(*quantize(x))`.

    Rows of more than `tiles.QUANTIZE_ROWS_WIDEST` values are quantised and rebased in two passes.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32, any strides (copied first unless the last one is 1).
        scaling_mode: a scaling mode's name.
        granularity: of the rebased rows' scales, a key of `MAX_SPREAD`.
        mx: whether the rows are wanted in MX too.

    Returns:
        with mx first qdata (T, D) float8_e4m3fn and scale (T, D/32) float8_e8m0fnu; then data, scale and, unless the granularity is "row",
        block_scale of `RebasedRows`.
    """
    check_rows("quantize_rows", x, scaling_mode, granularity)
    num_rows, width = x.shape
    if width > tiles.QUANTIZE_ROWS_WIDEST:
        qdata, scale = quantize(x, scaling_mode)
        rows = rebase_rows(qdata, scale, MAX_SPREAD[granularity])
        return [part for part in (*((qdata, scale) if mx else ()), *rows[:3]) if part is not None]
    x = x.float() if x.dtype == torch.float16 else x
    x = x if x.stride(1) == 1 else x.contiguous()
    of_mx = empty_mx(x, num_rows, width) if mx else ()
    data, row_scale, block_scale, _ = empty_rebased(x, num_rows, width, granularity != "row")
    if x.numel():
        item_bytes, address = x.element_size(), x.data_ptr()
        row_bytes = x.stride(0) * item_bytes
        wide = not (address | row_bytes) % LOAD_BYTES
        kernel = kernel_of(width, item_bytes, wide, block_scale is not None, mx, scaling_mode)
        outs = *((part.data_ptr() for part in of_mx) if mx else (0, 0)), data.data_ptr(), row_scale.data_ptr()
        block_scales = (0, 0) if block_scale is None else (block_scale.data_ptr(), block_scale.stride(0))
        arguments = packed(address, row_bytes, *outs, *block_scales, MAX_SPREAD[granularity], num_rows)
        kernel.run(x.device.index, cdiv(num_rows, kernel.options["ROWS"]), arguments)
    made = (*of_mx, data, row_scale)
    return [*made] if block_scale is None else [*made, block_scale]
