"""Quantise to MX on the GPU in Triton, byte for byte like `reference.quantize`: rows, packed records, gathered rows, two weights, columns.

The scale comes from the bits of the block's largest magnitude, without a division and without a float that could be flushed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.quantize.reference import check_input, check_records, empty_mx
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


@triton.jit(do_not_specialize=["T", "R", "num_blocks", "column_tiles"])
def _quantize_kernel(
    x,  # (R, D) bf16, float16 or float32; (T / R, R, D) with x_group
    x_group,  # None without groups, like q_group and s_group
    x_row,
    row_map,  # (T,) int32 or int64: output row t is x[row_map[t]], zeros where that is no row of x; None: row t
    qdata,  # (T, D) uint8
    q_group,
    q_row,
    scale,  # (T, D/32) uint8
    s_group,
    s_row,
    T,
    R,
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
    source, there = row, inside
    if row_map is not None:
        source = tl.load(row_map + row, mask=row < T, other=-1).to(tl.int64)
        there = ((source >= 0) & (source < R))[:, None] & inside
    if x_group is not None:
        group, row = row // R, row % R
        x_at, q_at, s_at = group * x_group + row * x_row, group * q_group + row * q_row, group * s_group + row * s_row
    else:
        x_at, q_at, s_at = source * x_row, row * q_row, row * s_row

    value = tl.load(x + x_at[:, None] + column[None, :], mask=there, other=0).to(tl.float32)  # (ROWS, COLUMNS)
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, SCALING)
    tl.store(qdata + q_at[:, None] + column[None, :], tl.reshape(code, (ROWS, COLUMNS)), mask=inside)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + s_at[:, None] + block[None, :], exponent, mask=block_inside)
    if PADDING > 0:
        pad = tl.arange(0, 16)
        last = pad < tl.where(piece == column_tiles - 1, PADDING, 0)  # of the last tile alone
        tl.store(scale + s_at[:, None] + num_blocks + pad[None, :], tl.zeros((ROWS, 16), tl.uint8), mask=mine & last[None, :])


@triton.jit(do_not_specialize=["row_tiles", "column_tiles"])
def _quantize_columnwise_kernel(
    x,  # (G, R, C) bf16, float16 or float32
    x_group,
    x_row,
    x_column,
    qdata,  # (G, C, R) uint8
    q_group,
    q_row,
    scale,  # (G, C, R/32) uint8
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
    value = tl.load(x + group * x_group + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0).to(tl.float32)
    code, exponent = _quantize_block(tl.reshape(value, (BLOCKS, 32, COLUMNS)), 1, SCALING)
    code = tl.trans(tl.reshape(code, (ROWS, COLUMNS)))  # (COLUMNS, ROWS)
    tl.store(qdata + group * q_group + column[:, None] * q_row + row[None, :], code, mask=column_inside & (row < R)[None, :])
    exponent = tl.trans(tl.reshape(exponent, (BLOCKS, COLUMNS))).to(tl.uint8)  # (COLUMNS, BLOCKS)
    at = scale + group * s_group + column[:, None] * s_row + block[None, :]
    tl.store(at, exponent, mask=column_inside & (block * 32 < R)[None, :])


# ---------------------------------------------------------------- launchers


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(..., D) as (rows, D) with unit stride along D; a view where the strides allow it."""
    x = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])  # not -1: there may be no elements
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_rows(
    x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, scaling_mode: str, row_map: torch.Tensor | None = None, padding: int = 0
) -> None:
    """x (R, D) or (G, R, D) with unit stride along D -> qdata and scale, of the same leading dimensions (or row_map's), row-strided."""
    grouped, width = x.dim() == 3, x.shape[-1]
    num_rows = qdata.shape[:-1].numel()
    if not num_rows * width:
        return
    programs, tile = tiles.QUANTIZE.grid(num_rows, width)
    launch(
        _quantize_kernel,
        programs,
        {
            "x": x,
            "x_group": x.stride(0) if grouped else None,
            "x_row": x.stride(-2),
            "row_map": row_map,
            "qdata": qdata,
            "q_group": qdata.stride(0) if grouped else None,
            "q_row": qdata.stride(-2),
            "scale": scale,
            "s_group": scale.stride(0) if grouped else None,
            "s_row": scale.stride(-2),
            "T": num_rows,
            "R": x.shape[-2],
            "num_blocks": width // MX_BLOCK,
            **tile,
            "EVEN": width % tile["COLUMNS"] == 0,
            "PADDING": padding,
            "SCALING": scaling_mode,
        },
        num_warps=tiles.QUANTIZE.warps,
    )


def _launch_columns(x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor, scaling_mode: str, tile: tuple[int, int]) -> None:
    """x (G, R, C), any strides -> qdata (G, C, R) and scale (G, C, R/32) with unit stride along R."""
    groups, height, width = x.shape
    if not x.numel():
        return
    row_tiles, column_tiles = cdiv(height, tile[0]), cdiv(width, tile[1])
    launch(
        _quantize_columnwise_kernel,
        groups * row_tiles * column_tiles,
        {
            "x": x,
            "x_group": x.stride(0),
            "x_row": x.stride(1),
            "x_column": x.stride(2),
            "qdata": qdata,
            "q_group": qdata.stride(0),
            "q_row": qdata.stride(1),
            "scale": scale,
            "s_group": scale.stride(0),
            "s_row": scale.stride(1),
            "R": height,
            "C": width,
            "row_tiles": row_tiles,
            "column_tiles": column_tiles,
            "ROWS": tile[0],
            "COLUMNS": tile[1],
            "SCALING": scaling_mode,
        },
        num_warps=4,
    )


def quantize(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension.

    Args:
        x: (..., D) bf16 or float32, D a multiple of 32, any strides (copied first unless the last one is 1).
        scaling_mode: a scaling mode's name.

    Returns:
        qdata (..., D) float8_e4m3fn and scale (..., D/32) float8_e8m0fnu, both contiguous.
    """
    check_input("quantize", x, -1, scaling_mode)
    qdata, scale = empty_mx(x, *x.shape)
    if x.dim() == 2:
        _launch_rows(as_rows(x), qdata, scale, scaling_mode)
    elif x.numel():
        _launch_rows(as_rows(x), qdata.view(-1, qdata.shape[-1]), scale.view(-1, scale.shape[-1]), scaling_mode)
    return qdata, scale


def quantize_packed(x: torch.Tensor, scaling_mode: str) -> torch.Tensor:
    """Quantise 1x32 into packed records, in one pass.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.

    Returns:
        (T, record_bytes(D)) uint8: D bytes of e4m3, D/32 bytes of e8m0, zeros up to a multiple of 16.
    """
    records = torch.empty((x.shape[0], record_bytes(x.shape[1])), dtype=torch.uint8, device=x.device)
    quantize_packed_into(x, records, scaling_mode)
    return records


def quantize_packed_into(x: torch.Tensor, records: torch.Tensor, scaling_mode: str) -> None:
    """`quantize_packed` into memory that exists.

    Args:
        x: (T, D) bf16 or float32, D a multiple of 32.  records: (T, record_bytes(D)) uint8, contiguous.
    """
    check_input("quantize_packed", x, -1, scaling_mode)
    check_records("quantize_packed", x, records)
    width = x.shape[1]
    end = width + width // MX_BLOCK
    _launch_rows(as_rows(x), records[:, :width], records[:, width:end], scaling_mode, padding=records.shape[1] - end)


def gather_quantize(rows: torch.Tensor, row_map: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize(gather_rows(rows, row_map))` in one pass, for recipes that exchange in high precision and multiply in MXFP8.

    Args:
        rows: (R, D) bf16 or float32, D a multiple of 32, any strides (copied first unless the last one is 1).
        row_map: (P,) int32 or int64 on the same device, values in [-1, R); one past that reads as padding here, the reference raises.
        scaling_mode: a scaling mode's name.

    Returns:
        qdata (P, D) float8_e4m3fn and scale (P, D/32) float8_e8m0fnu, both contiguous; padding rows are zero data with scale byte 0.
    """
    check_input("gather_quantize", rows, -1, scaling_mode)
    if rows.dim() != 2 or row_map.dim() != 1 or row_map.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"gather_quantize: rows {tuple(rows.shape)} with row_map {tuple(row_map.shape)} {row_map.dtype}, want (R, D) with (P,) int32"
        )
    qdata, scale = empty_mx(rows, row_map.shape[0], rows.shape[1])
    _launch_rows(as_rows(rows), qdata, scale, scaling_mode, row_map.contiguous())
    return qdata, scale


def triton_quantize_columnwise(x: torch.Tensor, scaling_mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_columnwise` on GPUs that the CUDA kernel does not support, and under Triton's interpreter. The caller checks the input."""
    *lead, height, width = x.shape
    qdata, scale = empty_mx(x, *lead, width, height)
    if x.numel():
        stacked = x.reshape(-1, height, width), qdata.view(-1, width, height), scale.view(-1, width, height // MX_BLOCK)
        _launch_columns(*stacked, scaling_mode, tiles.TRANSPOSE_COLUMNWISE)
    return qdata, scale
