"""Quantise to MX on the GPU in Triton, byte for byte like `reference.quantize`: plain, into packed records, transposed.

The scale comes from the bits of the block's largest magnitude, without a division and without a float that could be flushed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.quantize.reference import check_input, check_records
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import MX_BLOCK, cdiv, record_bytes


@triton.jit
def _block_scale(largest, SCALING: tl.constexpr):
    """Bits of the blocks' largest magnitudes -> (float32 factors that bring them to e4m3's range, biased e8m0 exponents as int32)."""
    if SCALING == "rceil":
        # ceil(log2(amax / 448)): 448 = 1.75 * 2^8, so the exponent less 8, and one more above mantissa 1.75.  In one case the float32
        # quotient of the definition rounds down to a power of two: 1.75 * 2^-119 and one bit.
        exponent = ((largest + 0x1FFFFF) >> 23) - 8
        exponent = tl.where(largest == 0x04600001, 0, exponent)
        smallest = 0x3F800000  # factor 1 for exponent 0, see reference._multiplier
    else:
        tl.static_assert(SCALING == "floor")
        exponent = (largest >> 23) - 8
        smallest = 0x7E800000  # 2^126
    exponent = tl.maximum(exponent, 0)
    bad = largest >= 0x7F800000
    factor = tl.where(exponent == 0, smallest, (254 - exponent) << 23)
    factor = tl.where(bad, 0x7FC00000, factor).to(tl.float32, bitcast=True)  # NaN turns the whole block into 0x7F
    return factor, tl.where(bad, 255, exponent)


@triton.jit
def _to_code(scaled, SCALING: tl.constexpr):
    """float32 in e4m3's range -> its code as uint8; FLOOR's scales let the largest values saturate."""
    if SCALING == "floor":
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _quantize_block(blocks, AXIS: tl.constexpr, SCALING: tl.constexpr):
    """float32 blocks along AXIS -> (e4m3 codes as uint8, same shape; biased e8m0 exponents as int32, AXIS kept with size 1).

    As integers NaN > Inf > every number, so one maximum finds both the largest magnitude and the bad blocks.
    """
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS, keep_dims=True)
    factor, exponent = _block_scale(largest, SCALING)
    return _to_code(blocks * factor, SCALING), exponent


@triton.jit(do_not_specialize=["T", "num_blocks", "column_tiles"])
def _quantize_kernel(
    x,  # (T, D) bf16, float16 or float32
    x_row,
    qdata,  # (T, D) uint8
    q_row,
    scale,  # (T, D/32) uint8
    s_row,
    T,
    num_blocks,  # D / 32
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides D
    PADDING: tl.constexpr,  # zero bytes after the scales of a packed record, 0 for plain outputs
    SCALING: tl.constexpr,
):
    BLOCKS: tl.constexpr = COLUMNS // 32
    piece = tl.program_id(0) % column_tiles
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    mine = (row < T)[:, None]
    inside, block_inside = mine, mine
    if not EVEN:
        inside = mine & (column < num_blocks * 32)[None, :]
        block_inside = mine & (block < num_blocks)[None, :]

    value = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0).to(tl.float32)  # (ROWS, COLUMNS)
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, SCALING)
    tl.store(qdata + row[:, None] * q_row + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * s_row + block[None, :], exponent, mask=block_inside)
    if PADDING > 0:
        pad = tl.arange(0, 16)
        behind = pad < tl.where(piece == column_tiles - 1, PADDING, 0)  # of the last tile alone
        tl.store(scale + row[:, None] * s_row + num_blocks + pad[None, :], tl.zeros((ROWS, 16), tl.uint8), mask=mine & behind[None, :])


@triton.jit(do_not_specialize=["row_tiles", "column_tiles"])
def _quantize_columnwise_kernel(
    x,  # (B, R, C)
    x_batch,
    x_row,
    x_column,
    qdata,  # (B, C, R) uint8, contiguous
    scale,  # (B, C, R/32) uint8, contiguous
    R,
    C,
    row_tiles,
    column_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALING: tl.constexpr,
):
    BLOCKS: tl.constexpr = ROWS // 32
    column_tile = tl.program_id(0) % column_tiles
    rest = tl.program_id(0) // column_tiles
    batch = (rest // row_tiles).to(tl.int64)
    row = (rest % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = (rest % row_tiles).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = column_tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x += batch * x_batch
    qdata += batch * R * C
    scale += batch * (R // 32) * C

    inside = (row < R)[:, None] & (column < C)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0).to(tl.float32)  # (ROWS, COLUMNS)
    code, exponent = _quantize_block(tl.reshape(value, (BLOCKS, 32, COLUMNS)), 1, SCALING)
    code = tl.trans(tl.reshape(code, (ROWS, COLUMNS)))  # (COLUMNS, ROWS)
    tl.store(qdata + column[:, None] * R + row[None, :], code, mask=(column < C)[:, None] & (row < R)[None, :])
    exponent = tl.trans(tl.reshape(exponent, (BLOCKS, COLUMNS))).to(tl.uint8)
    tl.store(scale + column[:, None] * (R // 32) + block[None, :], exponent, mask=(column < C)[:, None] & (block * 32 < R)[None, :])


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., D) as (rows, D) with unit stride along D; a view where the strides allow it."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_rows(
    rows: torch.Tensor, qdata: torch.Tensor, q_row: int, scale: torch.Tensor, s_row: int, padding: int, scaling_mode: str
) -> None:
    num_rows, width = rows.shape
    tile_rows, tile_columns = tiles.QUANTIZE.fit(width)
    column_tiles = -(-width // tile_columns)
    launch(
        _quantize_kernel,
        -(-num_rows // tile_rows) * column_tiles,
        {
            "x": rows,
            "x_row": rows.stride(0),
            "qdata": qdata,
            "q_row": q_row,
            "scale": scale,
            "s_row": s_row,
            "T": num_rows,
            "num_blocks": width // MX_BLOCK,
            "column_tiles": column_tiles,
            "ROWS": tile_rows,
            "COLUMNS": tile_columns,
            "EVEN": width % tile_columns == 0,
            "PADDING": padding,
            "SCALING": scaling_mode,
        },
        num_warps=tiles.QUANTIZE.warps,
    )


def quantize(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension.

    Args:
        x: (..., D) bf16 or float32, D a multiple of 32, any strides (copied first unless the last one is 1).
        scaling_mode: "rceil" or "floor".

    Returns:
        qdata (..., D) float8_e4m3fn and scale (..., D/32) float8_e8m0fnu, both contiguous.
    """
    check_input("quantize", x, -1, scaling_mode)

    qdata = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], x.shape[-1] // MX_BLOCK), dtype=torch.uint8, device=x.device)

    if x.numel():
        _launch_rows(_as_rows(x), qdata, x.shape[-1], scale, x.shape[-1] // MX_BLOCK, 0, scaling_mode)
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def quantize_packed(x: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    """Quantise 1x32 into packed records, in one pass.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.

    Returns:
        (T, record_bytes(D)) uint8: D bytes of e4m3, D/32 bytes of e8m0, zeros up to a multiple of 16.
    """
    check_input("quantize_packed", x, -1, scaling_mode)

    records = torch.empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8, device=x.device)

    _pack(x, records, scaling_mode)
    return records


def quantize_packed_into(x: torch.Tensor, records: torch.Tensor, scaling_mode: str) -> None:
    """`quantize_packed` into memory that is there.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.  records: (T, record_bytes(D)) uint8, contiguous.
    """
    check_input("quantize_packed_into", x, -1, scaling_mode)
    check_records("quantize_packed_into", x, records)

    _pack(x, records, scaling_mode)


def _pack(x: torch.Tensor, records: torch.Tensor, scaling_mode: str) -> None:
    width, record = x.shape[1], records.shape[1]
    if records.numel():
        padding = record - width - width // MX_BLOCK
        _launch_rows(_as_rows(x), records, record, records[:, width:], record, padding, scaling_mode)


def triton_quantize_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_columnwise` on GPUs that the CUDA kernel does not support, and under Triton's interpreter. The caller checks the input."""
    *lead, height, width = x.shape
    qdata = torch.empty((*lead, width, height), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*lead, width, height // MX_BLOCK), dtype=torch.uint8, device=x.device)

    if x.numel():
        batches = x.reshape(-1, height, width)
        row_tiles = cdiv(height, tiles.TRANSPOSE_ROWS)
        column_tiles = cdiv(width, tiles.TRANSPOSE_COLUMNS)
        launch(
            _quantize_columnwise_kernel,
            batches.shape[0] * row_tiles * column_tiles,
            {
                "x": batches,
                "x_batch": batches.stride(0),
                "x_row": batches.stride(1),
                "x_column": batches.stride(2),
                "qdata": qdata,
                "scale": scale,
                "R": height,
                "C": width,
                "row_tiles": row_tiles,
                "column_tiles": column_tiles,
                "ROWS": tiles.TRANSPOSE_ROWS,
                "COLUMNS": tiles.TRANSPOSE_COLUMNS,
                "SCALING": scaling_mode,
            },
            num_warps=tiles.TRANSPOSE_WARPS,
        )
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
