"""Movers on the GPU: rows from one order into another, bytes unchanged, padding rows written in the same pass.

Whatever the dtype, a row is moved as words of 4, 2 or 1 bytes, the widest that widths, strides and addresses allow; Triton makes 16-byte
accesses of them.  Scatter turns its map around first and then gathers, so every byte of the output is written exactly once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _gather_tile(
    tile,
    rows,
    row_units,
    out,
    scale,
    scale_row,
    scale_out,
    row_map,
    R,
    P,
    width_units,
    scale_bytes,
    column_tiles,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    piece = tile % column_tiles
    row = (tile // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = piece * COLUMNS + tl.arange(0, COLUMNS)
    width = width_units * UNIT
    source = tl.load(row_map + row, mask=row < P, other=-1).to(tl.int64)
    there = ((source >= 0) & (source < R))[:, None]
    mine = (row < P)[:, None]
    inside = mine
    if not EVEN:
        inside = mine & (word < width)[None, :]

    value = tl.load(rows + source[:, None] * (row_units * UNIT) + word[None, :], mask=there & inside, other=0)  # (ROWS, COLUMNS)
    tl.store(out + row[:, None] * width + word[None, :], value, mask=inside)
    if SCALE_COLUMNS > 0:  # noqa: SIM102 (decided by the compiler, the inner one at run time)
        if piece == 0:
            byte = tl.arange(0, SCALE_COLUMNS)
            held = (byte < scale_bytes)[None, :]
            exponent = tl.load(scale + source[:, None] * scale_row + byte[None, :], mask=there & mine & held, other=0)
            tl.store(scale_out + row[:, None] * scale_bytes + byte[None, :], exponent, mask=mine & held)


@triton.jit(do_not_specialize=["row_units", "scale_row", "R", "P", "width_units", "scale_bytes", "column_tiles"])
def _gather_rows_kernel(
    rows,  # (R, words)
    row_units,  # its row stride in units
    out,  # (P, words) contiguous
    scale,  # (R, scale_bytes) uint8 or None
    scale_row,
    scale_out,  # (P, scale_bytes) contiguous or None
    row_map,  # (P,) int32 or int64
    num_valid_rows,  # (1,) int32, or None
    R,
    P,
    width_units,  # words in units
    scale_bytes,
    column_tiles,
    UNIT: tl.constexpr,  # words that stride and width are multiples of: tells the compiler how wide an access may be
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # COLUMNS divides the width
    SCALE_COLUMNS: tl.constexpr,  # 0 without scales, else a power of two of at least scale_bytes
):
    if num_valid_rows is None:
        _gather_tile(
            tl.program_id(0), rows, row_units, out, scale, scale_row, scale_out, row_map, R, P, width_units, scale_bytes, column_tiles,
            UNIT, ROWS, COLUMNS, EVEN, SCALE_COLUMNS,
        )  # fmt: skip
    else:
        wanted = tl.minimum(tl.load(num_valid_rows), P)
        for tile in range(tl.program_id(0), tl.cdiv(wanted, ROWS) * column_tiles, tl.num_programs(0)):
            _gather_tile(
                tile, rows, row_units, out, scale, scale_row, scale_out, row_map, R, wanted, width_units, scale_bytes, column_tiles,
                UNIT, ROWS, COLUMNS, EVEN, SCALE_COLUMNS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["P", "num_rows"])
def _invert_map_kernel(
    row_map,  # (P,) target of each row, or -1
    inverse,  # (num_rows,) int32, filled with -1
    P,
    num_rows,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(row_map + row, mask=row < P, other=-1).to(tl.int64)
    tl.store(inverse + target, row.to(tl.int32), mask=(target >= 0) & (target < num_rows))


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """(R, ...) of any dtype as (R, words) of the widest integer that its address, row stride and width are multiples of."""
    flat = rows if rows.dim() == 2 else rows.reshape(rows.shape[0], -1)
    if flat.shape[0] == 1:
        flat = flat[0].contiguous()[None]  # the stride of a single row means nothing
    elif flat.stride(1) != 1:
        flat = flat.contiguous()
    size = flat.element_size()
    return flat.view(_WORDS[math.gcd(flat.data_ptr(), flat.stride(0) * size, flat.shape[1] * size, max(_WORDS))])


def _check(where: str, rows: torch.Tensor, row_map: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    if rows.dim() == 0 or row_map.dim() != 1 or row_map.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{where}: rows {tuple(rows.shape)} with row_map {tuple(row_map.shape)} {row_map.dtype}, want (R, ...) and an int32 map (P,)"
        )
    if scale is not None and (rows.dim() != 2 or scale.dim() != 2 or rows.shape[0] != scale.shape[0] or scale.element_size() != 1):
        raise ValueError(
            f"{where}: qdata {tuple(rows.shape)} with scale {tuple(scale.shape)} {scale.dtype}, want (R, D) with one-byte scales (R, D/32)"
        )


def _gather(
    rows: torch.Tensor, scale: torch.Tensor | None, row_map: torch.Tensor, num_valid_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    row_map = row_map.contiguous()
    num_padded = row_map.shape[0]
    out = torch.empty((num_padded, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    scale_out = None if scale is None else torch.empty((num_padded, scale.shape[1]), dtype=scale.dtype, device=scale.device)
    if out.numel() == 0:
        return out, scale_out
    if rows.shape[0] == 0:
        for unsourced in (out, scale_out):
            if unsourced is not None:
                unsourced.view(torch.uint8).zero_()
        return out, scale_out

    words = _as_words(rows)
    exponents = scale if scale is None or scale.stride(1) == 1 else scale.contiguous()
    width = words.shape[1]
    unit = math.gcd(words.stride(0), width, 16)
    programs, tile = tiles.MOVE_WORDS.grid(num_padded, width)
    launch(
        _gather_rows_kernel,
        programs if num_valid_rows is None else min(programs, tiles.LOOP_PROGRAMS),
        {
            "rows": words,
            "row_units": words.stride(0) // unit,
            "out": (out if out.dim() == 2 else out.view(num_padded, -1)).view(words.dtype),
            "scale": exponents,
            "scale_row": 0 if exponents is None else exponents.stride(0),
            "scale_out": scale_out,
            "row_map": row_map,
            "num_valid_rows": num_valid_rows,
            "R": words.shape[0],
            "P": num_padded,
            "width_units": width // unit,
            "scale_bytes": 0 if exponents is None else exponents.shape[1],
            "UNIT": unit,
            **tile,
            "EVEN": width % tile["COLUMNS"] == 0,
            "SCALE_COLUMNS": 0 if exponents is None else next_power_of_2(exponents.shape[1]),
        },
        num_warps=tiles.MOVE_WORDS.warps,
    )
    return out, scale_out


def _inverse(row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows,) int32: the p with row_map[p] == i, -1 where there is none."""
    row_map = row_map.contiguous()
    inverse = torch.full((num_rows,), -1, dtype=torch.int32, device=row_map.device)

    num_padded = row_map.shape[0]
    if num_padded and num_rows:
        launch(
            _invert_map_kernel,
            cdiv(num_padded, tiles.INVERT_ROWS),
            {
                "row_map": row_map,
                "inverse": inverse,
                "P": num_padded,
                "num_rows": num_rows,
                "ROWS": tiles.INVERT_ROWS,
            },
            num_warps=tiles.INDEX_WARPS,
        )
    return inverse


def gather_rows(rows: torch.Tensor, row_map: torch.Tensor, num_valid_rows: torch.Tensor | None = None) -> torch.Tensor:
    """out[p] = rows[row_map[p]], zeros where row_map[p] is -1.

    Args:
        rows: (R, ...) any dtype, row-strided or contiguous.  row_map: (P,) int32, every value in [-1, R); one past that reads as
            padding here, the reference raises.
        num_valid_rows: (1,) int32 on the device, how many rows of the output are wanted; the others are not written.

    Returns:
        (P, ...) of the same dtype, contiguous.
    """
    _check("gather_rows", rows, row_map)
    return _gather(rows, None, row_map, num_valid_rows)[0]


def gather_mx_rows(
    qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_valid_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` of e4m3 data (R, D) and its scales (R, D/32) in one launch.

    Both may be row-strided, so also views into packed records.  Padding rows are zero data with scale byte 0.
    """
    _check("gather_mx_rows", qdata, row_map, scale)
    return _gather(qdata, scale, row_map, num_valid_rows)  # type: ignore[return-value]  # scales in, scales out


def scatter_rows(rows: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> torch.Tensor:
    """out[row_map[p]] = rows[p], the inverse of `gather_rows`.

    Args:
        rows: (P, ...) any dtype, row-strided or contiguous.  row_map: (P,) int32, values in [-1, num_rows), no value but -1 twice.

    Returns:
        (num_rows, ...) of the same dtype, contiguous; rows that no p points to are zero.
    """
    _check("scatter_rows", rows, row_map)
    return _gather(rows, None, _inverse(row_map, num_rows))[0]


def scatter_mx_rows(qdata: torch.Tensor, scale: torch.Tensor, row_map: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`scatter_rows` of e4m3 data (P, D) and its scales (P, D/32) in one launch."""
    _check("scatter_mx_rows", qdata, row_map, scale)
    return _gather(qdata, scale, _inverse(row_map, num_rows))  # type: ignore[return-value]  # scales in, scales out
