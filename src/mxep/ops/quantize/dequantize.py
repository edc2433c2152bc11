"""MX to high precision on the GPU, bit for bit like `reference.dequantize`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mxep.ops.quantize.reference import check_records
from mxep.ops.quantize.triton import as_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import MX_BLOCK

_LANE_COLUMNS = 8  # 16 bytes of bf16


@triton.jit
def _dequantize_tile(
    tile,
    qdata,
    q_row_units,
    scale,
    s_row,
    out,
    row_map,
    R,
    P,
    num_blocks,
    column_tiles,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // 32
    piece = tile % column_tiles
    row = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    mine = (row < P)[:, None]
    source, there = row, mine
    if row_map is not None:
        source = tl.load(row_map + row, mask=row < P, other=-1).to(tl.int64)
        there = ((source >= 0) & (source < R))[:, None]
    inside, held, block_held = mine, there, there
    if not EVEN:
        within = (column < num_blocks * 32)[None, :]
        inside, held, block_held = mine & within, there & within, there & (block < num_blocks)[None, :]

    code = tl.load(qdata + source[:, None] * (q_row_units * UNIT) + column[None, :], mask=held, other=0)  # (ROWS, COLUMNS)
    exponent = tl.load(scale + source[:, None] * s_row + block[None, :], mask=block_held, other=0).to(tl.int32)  # (ROWS, BLOCKS)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a subnormal
    factor = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    value = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), (ROWS, BLOCKS, 32)) * factor[:, :, None]
    target = out + row[:, None] * (num_blocks * 32) + column[None, :]
    # Streamed, so that L2 keeps the rows that several experts read.
    tl.store(target, tl.reshape(value, (ROWS, COLUMNS)).to(out.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit(do_not_specialize=["q_row_units", "R", "P", "num_blocks", "column_tiles"])
def _dequantize_kernel(
    qdata,  # (R, D) uint8
    q_row_units,  # its row stride in units
    scale,  # (R, D/32) uint8
    s_row,
    out,  # (P, D) contiguous
    row_map,  # (P,) int32 or int64, or None: P is R
    num_valid_rows,  # (1,) int32, or None
    R,
    P,
    num_blocks,  # D / 32
    column_tiles,
    UNIT: tl.constexpr,  # divides it, at most _LANE_COLUMNS: a lane then loads the codes of the 16 bytes that it stores, and exchanges none
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides D
):
    if num_valid_rows is None:
        _dequantize_tile(
            tl.program_id(0), qdata, q_row_units, scale, s_row, out, row_map, R, P, num_blocks, column_tiles, UNIT, ROWS, COLUMNS, EVEN
        )
    else:
        rows = tl.minimum(tl.load(num_valid_rows), P)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * column_tiles, tl.num_programs(0)):
            _dequantize_tile(
                tile, qdata, q_row_units, scale, s_row, out, row_map, R, rows, num_blocks, column_tiles, UNIT, ROWS, COLUMNS, EVEN
            )


def dequantize(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    row_map: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """e4m3 times its block's scale in float32, rounded once to `dtype`; with a row map gathered in the same pass.

    Args:
        qdata: (..., D) float8_e4m3fn, row-strided or contiguous.  scale: (..., D/32) float8_e8m0fnu, the same.  dtype: bf16, float16
            or float32.
        row_map: (P,) int32, the row of qdata (R, D) that is row p of the result, -1 for zeros; one past R reads as -1 here, the reference
            raises.
        num_valid_rows: (1,) int32 on the device, how many rows of the result are wanted; the others are neither read nor written.

    Returns:
        (..., D) `dtype`, or (P, D) with a row map, contiguous.
    """
    width = qdata.shape[-1]
    if width % MX_BLOCK or scale.shape != (*qdata.shape[:-1], width // MX_BLOCK):
        raise ValueError(
            f"dequantize: qdata {tuple(qdata.shape)} with scale {tuple(scale.shape)}, want scale (..., D/{MX_BLOCK}) for qdata (..., D)"
        )
    if row_map is not None and (qdata.dim() != 2 or row_map.dim() != 1 or row_map.dtype not in (torch.int32, torch.int64)):
        raise ValueError(
            f"dequantize: qdata {tuple(qdata.shape)} with row_map {tuple(row_map.shape)} {row_map.dtype}, want (R, D) with (P,) int32"
        )
    shape = qdata.shape if row_map is None else (row_map.shape[0], width)
    out = torch.empty(shape, dtype=dtype, device=qdata.device)
    _launch(as_rows(qdata), as_rows(scale), out, row_map, num_valid_rows)
    return out


def dequantize_packed_into(records: torch.Tensor, values: torch.Tensor) -> None:
    """`dequantize` of packed records into memory that is there.

    Args:
        records: (T, record_bytes(D)) uint8, contiguous.  values: (T, D) bf16, float16 or float32, contiguous.
    """
    check_records("dequantize_packed_into", values, records)
    width = values.shape[1]
    _launch(records[:, :width], records[:, width : width + width // MX_BLOCK], values)


def _launch(
    codes: torch.Tensor,
    exponents: torch.Tensor,
    out: torch.Tensor,
    row_map: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
) -> None:
    """Rows of codes (R, D) and exponents (R, D/32) into out (..., D), contiguous."""
    if not out.numel():
        return
    width = out.shape[-1]
    num_rows = out.numel() // width
    programs, tile = tiles.DEQUANTIZE.grid(num_rows, width)
    unit = math.gcd(codes.stride(0), _LANE_COLUMNS)
    arguments = {
        "qdata": codes,
        "q_row_units": codes.stride(0) // unit,
        "scale": exponents,
        "s_row": exponents.stride(0),
        "out": out,
        "row_map": None if row_map is None else row_map.contiguous(),
        "num_valid_rows": num_valid_rows,
        "R": codes.shape[0],
        "P": num_rows,
        "num_blocks": width // MX_BLOCK,
        "UNIT": unit,
        **tile,
        "EVEN": width % tile["COLUMNS"] == 0,
    }
    programs = programs if num_valid_rows is None else min(programs, tiles.LOOP_PROGRAMS)
    launch(_dequantize_kernel, programs, arguments, num_warps=tiles.DEQUANTIZE.warps)
