"""Two stacked weights quantised straight into one buffer, each read once and written once.

Each weight has a launch of its own.  The other weight's part is between its groups (rowwise) or between its rows (columnwise).
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


@triton.jit(do_not_specialize=["G", "column_tiles"])
def _quantize_concat_kernel(
    x,  # (G, R, C) bf16 or float32
    x_group,
    x_row,
    qdata,  # (G, R.., C) uint8, this weight's first row
    q_group,
    scale,  # (G, R.., C/32) uint8
    s_group,
    G,
    R,
    num_blocks,  # C / 32
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides C
    SCALING: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // 32
    C = num_blocks * 32
    piece = tl.program_id(0) % column_tiles
    at = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # row of G * R
    group, row = at // R, at % R
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    mine = (group < G)[:, None]
    inside, block_inside = mine, mine
    if not EVEN:
        inside = mine & (column < C)[None, :]
        block_inside = mine & (block < num_blocks)[None, :]

    value = tl.load(x + (group * x_group + row * x_row)[:, None] + column[None, :], mask=inside, other=0).to(tl.float32)
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, SCALING)
    tl.store(qdata + (group * q_group + row * C)[:, None] + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + (group * s_group + row * num_blocks)[:, None] + block[None, :], exponent, mask=block_inside)


@triton.jit(do_not_specialize=["row_tiles", "column_tiles"])
def _quantize_concat_columnwise_kernel(
    x,  # (G, R, C) bf16 or float32
    x_group,
    x_row,
    qdata,  # (G, C, R..) uint8, this weight's first column
    q_group,
    q_row,
    scale,  # (G, C, R../32) uint8
    s_group,
    s_row,
    R,
    C,
    row_tiles,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALING: tl.constexpr,
):
    BLOCKS: tl.constexpr = ROWS // 32
    column = (tl.program_id(0) % column_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    rest = tl.program_id(0) // column_tiles
    group = (rest // row_tiles).to(tl.int64)
    row = (rest % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = (rest % row_tiles).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column_inside = (column < C)[:, None]

    inside = (row < R)[:, None] & (column < C)[None, :]
    value = tl.load(x + group * x_group + row[:, None] * x_row + column[None, :], mask=inside, other=0).to(tl.float32)
    code, exponent = _quantize_block(tl.reshape(value, (BLOCKS, 32, COLUMNS)), 1, SCALING)
    code = tl.trans(tl.reshape(code, (ROWS, COLUMNS)))  # (COLUMNS, ROWS)
    tl.store(qdata + group * q_group + column[:, None] * q_row + row[None, :], code, mask=column_inside & (row < R)[None, :])
    exponent = tl.trans(tl.reshape(exponent, (BLOCKS, COLUMNS))).to(tl.uint8)  # (COLUMNS, BLOCKS)
    at = scale + group * s_group + column[:, None] * s_row + block[None, :]
    tl.store(at, exponent, mask=column_inside & (block * 32 < R)[None, :])


def _check(where: str, a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> None:
    fits = a.dim() == b.dim() == 3 and a.shape[::2] == b.shape[::2] and a.dtype == b.dtype and a.dtype in _INPUTS
    if not fits or any(size % MX_BLOCK for size in (*a.shape[1:], b.shape[1])):
        raise ValueError(
            f"{where}: a {tuple(a.shape)} {a.dtype} and b {tuple(b.shape)} {b.dtype}, want (G, R, C) and (G, S, C), bfloat16 or float32, "
            f"R, S and C multiples of {MX_BLOCK}"
        )
    if a.device != b.device:
        raise ValueError(f"{where}: a is on {a.device}, b on {b.device}, want one device")
    check_scaling_mode(where, scaling_mode)


def _empty_mx(shape: tuple[int, int, int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of stacked MX matrices: data and scales, uint8."""
    groups, rows, columns = shape
    qdata = torch.empty(shape, dtype=torch.uint8, device=like.device)
    return qdata, torch.empty((groups, rows, columns // MX_BLOCK), dtype=torch.uint8, device=like.device)


def quantize_concat(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[a | b] along the rows of each group, 1x32 along the columns.

    Args:
        a: (G, R, C) bf16 or float32, R and C multiples of 32, any strides (copied first unless the last one is 1).
        b: (G, S, C), the same dtype.  scaling_mode: "rceil" or "floor".

    Returns:
        qdata (G, R + S, C) float8_e4m3fn and scale (G, R + S, C/32) float8_e8m0fnu, both contiguous.
    """
    _check("quantize_concat", a, b, scaling_mode)

    groups, columns = a.shape[0], a.shape[2]
    qdata, scale = _empty_mx((groups, a.shape[1] + b.shape[1], columns), a)

    first = 0
    for part in (a, b):
        if part.numel():
            x = part if part.stride(2) == 1 else part.contiguous()
            tile_rows, tile_columns = tiles.QUANTIZE.fit(columns)
            column_tiles = cdiv(columns, tile_columns)
            launch(
                _quantize_concat_kernel,
                cdiv(groups * part.shape[1], tile_rows) * column_tiles,
                {
                    "x": x,
                    "x_group": x.stride(0),
                    "x_row": x.stride(1),
                    "qdata": qdata[:, first:],
                    "q_group": qdata.stride(0),
                    "scale": scale[:, first:],
                    "s_group": scale.stride(0),
                    "G": groups,
                    "R": part.shape[1],
                    "num_blocks": columns // MX_BLOCK,
                    "column_tiles": column_tiles,
                    "ROWS": tile_rows,
                    "COLUMNS": tile_columns,
                    "EVEN": columns % tile_columns == 0,
                    "SCALING": scaling_mode,
                },
                num_warps=tiles.QUANTIZE.warps,
            )
        first += part.shape[1]
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def quantize_concat_columnwise(a: torch.Tensor, b: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[a | b] along the rows of each group, 32x1 along those rows.

    Args:
        a, b, scaling_mode: as in `quantize_concat`.

    Returns:
        qdata (G, C, R + S) float8_e4m3fn and scale (G, C, (R + S)/32) float8_e8m0fnu, both contiguous.
    """
    _check("quantize_concat_columnwise", a, b, scaling_mode)

    groups, columns = a.shape[0], a.shape[2]
    qdata, scale = _empty_mx((groups, columns, a.shape[1] + b.shape[1]), a)

    first = 0
    for part in (a, b):
        if part.numel():
            x = part if part.stride(2) == 1 else part.contiguous()
            row_tiles = cdiv(part.shape[1], tiles.CONCAT_ROWS)
            column_tiles = cdiv(columns, tiles.CONCAT_COLUMNS)
            launch(
                _quantize_concat_columnwise_kernel,
                groups * row_tiles * column_tiles,
                {
                    "x": x,
                    "x_group": x.stride(0),
                    "x_row": x.stride(1),
                    "qdata": qdata[:, :, first:],
                    "q_group": qdata.stride(0),
                    "q_row": qdata.stride(1),
                    "scale": scale[:, :, first // MX_BLOCK :],
                    "s_group": scale.stride(0),
                    "s_row": scale.stride(1),
                    "R": part.shape[1],
                    "C": columns,
                    "row_tiles": row_tiles,
                    "column_tiles": column_tiles,
                    "ROWS": tiles.CONCAT_ROWS,
                    "COLUMNS": tiles.CONCAT_COLUMNS,
                    "SCALING": scaling_mode,
                },
                num_warps=tiles.CONCAT_WARPS,
            )
        first += part.shape[1]
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
