"""MX to high precision on the GPU, bit for bit like `reference.dequantize`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.quantize.reference import check_records
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import MX_BLOCK


@triton.jit
def _dequantize_tile(
    tile, qdata, q_row, scale, s_row, out, T, num_blocks, column_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr
):
    BLOCKS: tl.constexpr = COLUMNS // 32
    piece = tile % column_tiles
    row = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    mine = (row < T)[:, None]
    inside, block_inside = mine, mine
    if not EVEN:
        inside = mine & (column < num_blocks * 32)[None, :]
        block_inside = mine & (block < num_blocks)[None, :]

    code = tl.load(qdata + row[:, None] * q_row + column[None, :], mask=inside, other=0)  # (ROWS, COLUMNS)
    exponent = tl.load(scale + row[:, None] * s_row + block[None, :], mask=block_inside, other=0).to(tl.int32)  # (ROWS, BLOCKS)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is a subnormal
    factor = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    value = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), (ROWS, BLOCKS, 32)) * factor[:, :, None]
    target = out + row[:, None] * (num_blocks * 32) + column[None, :]
    tl.store(target, tl.reshape(value, (ROWS, COLUMNS)).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "num_blocks", "column_tiles"])
def _dequantize_kernel(
    qdata,  # (T, D) uint8
    q_row,
    scale,  # (T, D/32) uint8
    s_row,
    out,  # (T, D) contiguous
    num_valid_rows,  # (1,) int32, or None
    T,
    num_blocks,  # D / 32
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides D
):
    if num_valid_rows is None:
        _dequantize_tile(tl.program_id(0), qdata, q_row, scale, s_row, out, T, num_blocks, column_tiles, ROWS, COLUMNS, EVEN)
    else:
        rows = tl.minimum(tl.load(num_valid_rows), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * column_tiles, tl.num_programs(0)):
            _dequantize_tile(tile, qdata, q_row, scale, s_row, out, rows, num_blocks, column_tiles, ROWS, COLUMNS, EVEN)


def _as_byte_rows(values: torch.Tensor) -> torch.Tensor:
    """(..., X) one-byte values as (rows, X) uint8 with unit stride along X; a view where the strides allow it."""
    rows = values.view(torch.uint8).reshape(values.shape[:-1].numel(), values.shape[-1])  # not -1: there may be no elements
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def dequantize(qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, num_valid_rows: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3 times its block's scale in float32, rounded once to `dtype`.

    Args:
        qdata: (..., D) float8_e4m3fn, row-strided or contiguous.  scale: (..., D/32) float8_e8m0fnu, the same.  dtype: bf16, float16
            or float32.
        num_valid_rows: (1,) int32 on the device, how many rows are wanted; the others are neither read nor written.

    Returns:
        (..., D) `dtype`, contiguous.
    """
    width = qdata.shape[-1]
    if width % MX_BLOCK or scale.shape != (*qdata.shape[:-1], width // MX_BLOCK):
        raise ValueError(
            f"dequantize: qdata {tuple(qdata.shape)} with scale {tuple(scale.shape)}, want scale (..., D/{MX_BLOCK}) for qdata (..., D)"
        )

    out = torch.empty(qdata.shape, dtype=dtype, device=qdata.device)
    _launch(_as_byte_rows(qdata), _as_byte_rows(scale), out, num_valid_rows)
    return out


def dequantize_packed_into(records: torch.Tensor, values: torch.Tensor) -> None:
    """`dequantize` of packed records into memory that is there.

    Args:
        records: (T, record_bytes(D)) uint8, contiguous.  values: (T, D) bf16, float16 or float32, contiguous.
    """
    check_records("dequantize_packed_into", values, records)
    width = values.shape[1]
    _launch(records[:, :width], records[:, width : width + width // MX_BLOCK], values)


def _launch(codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor, num_valid_rows: torch.Tensor | None = None) -> None:
    """Rows of bytes (T, D) and (T, D/32) into out (..., D), contiguous."""
    if not out.numel():
        return
    width = out.shape[-1]
    programs, tile = tiles.DEQUANTIZE.grid(codes.shape[0], width)
    arguments = {
        "qdata": codes,
        "q_row": codes.stride(0),
        "scale": exponents,
        "s_row": exponents.stride(0),
        "out": out,
        "num_valid_rows": num_valid_rows,
        "T": codes.shape[0],
        "num_blocks": width // MX_BLOCK,
        **tile,
        "EVEN": width % tile["COLUMNS"] == 0,
    }
    programs = programs if num_valid_rows is None else min(programs, tiles.LOOP_PROGRAMS)
    launch(_dequantize_kernel, programs, arguments, num_warps=tiles.DEQUANTIZE.warps)
