"""Gather rows and quantise them on the way: bf16 rows in their experts' order come out as MX, one read, one write.

The permuting pass of recipes that exchange in high precision and multiply in MXFP8; bytes as gather and quantise one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.quantize.reference import check_scaling_mode
from mxep.ops.quantize.triton import _quantize_block
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import MX_BLOCK, cdiv

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit(do_not_specialize=["R", "P", "num_blocks", "column_tiles"])
def _gather_quantize_kernel(
    rows,  # (R, D) bf16 or float32
    rows_row,
    row_map,  # (P,) int32 or int64
    qdata,  # (P, D) uint8, contiguous
    scale,  # (P, D/32) uint8, contiguous
    R,
    P,
    num_blocks,  # D / 32
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides D
    SCALING: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // 32
    piece = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    source = tl.load(row_map + row, mask=row < P, other=-1).to(tl.int64)
    valid = ((source >= 0) & (source < R))[:, None]
    mine = (row < P)[:, None]
    inside, block_inside = mine, mine
    if not EVEN:
        inside = mine & (column < num_blocks * 32)[None, :]
        block_inside = mine & (block < num_blocks)[None, :]

    value = tl.load(rows + source[:, None] * rows_row + column[None, :], mask=valid & inside, other=0).to(tl.float32)  # (ROWS, COLUMNS)
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, SCALING)
    tl.store(qdata + row[:, None] * (num_blocks * 32) + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * num_blocks + block[None, :], exponent, mask=block_inside)


def gather_quantize(rows: torch.Tensor, row_map: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize(gather_rows(rows, row_map))` in one pass.

    Args:
        rows: (R, D) bf16 or float32, D a multiple of 32, any strides (copied first unless the last one is 1).
        row_map: (P,) int32 or int64 on the same device, values in [-1, R); one past that reads as padding here, the reference raises.
        scaling_mode: "rceil" or "floor".

    Returns:
        qdata (P, D) float8_e4m3fn and scale (P, D/32) float8_e8m0fnu, both contiguous; padding rows are zero data with scale byte 0.
    """
    if rows.dim() != 2 or rows.dtype not in _INPUTS or rows.shape[1] % MX_BLOCK:
        raise ValueError(
            f"gather_quantize: rows is {tuple(rows.shape)} {rows.dtype}, want (R, D) bfloat16 or float32, D a multiple of {MX_BLOCK}"
        )
    if row_map.dim() != 1 or row_map.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gather_quantize: row_map is {tuple(row_map.shape)} {row_map.dtype}, want (P,) int32")
    check_scaling_mode("gather_quantize", scaling_mode)

    num_padded, width = row_map.shape[0], rows.shape[1]
    qdata = torch.empty((num_padded, width), dtype=torch.uint8, device=rows.device)
    scale = torch.empty((num_padded, width // MX_BLOCK), dtype=torch.uint8, device=rows.device)

    if qdata.numel():
        rows, row_map = rows if rows.stride(1) == 1 else rows.contiguous(), row_map.contiguous()
        tile_rows, tile_columns = tiles.QUANTIZE.fit(width)
        column_tiles = cdiv(width, tile_columns)
        launch(
            _gather_quantize_kernel,
            cdiv(num_padded, tile_rows) * column_tiles,
            {
                "rows": rows,
                "rows_row": rows.stride(0),
                "row_map": row_map,
                "qdata": qdata,
                "scale": scale,
                "R": rows.shape[0],
                "P": num_padded,
                "num_blocks": width // MX_BLOCK,
                "column_tiles": column_tiles,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
                "EVEN": width % tile_columns == 0,
                "SCALING": scaling_mode,
            },
            num_warps=tiles.QUANTIZE.warps,
        )
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
