"""The 128x4 blocked layout of scales that Blackwell's tensor cores read, and back.

Scale rows are padded to 128 and columns to 4; every 128x4 tile is 512 contiguous bytes, the four 32-row parts of a tile
interleaved: byte (row % 32) * 16 + (row // 32) * 4 + column.  Source: cuBLAS, "1D block scaling factors layout".  Everything here
is index arithmetic on the device of its input, without a host sync; padding bytes are zero.
"""

from __future__ import annotations

import torch

from mxep.shapes import round_up

TILE_ROWS, TILE_COLUMNS = 128, 4
_TILE = TILE_ROWS * TILE_COLUMNS


def blocked_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of a (rows, columns) scale matrix after padding to whole tiles.

    Args:
        rows: of the plain scales.
        columns: of the plain scales.

    Returns:
        rows rounded up to a multiple of 128, and columns to one of 4.

    Examples:
        >>> mxep.mx.blocked_shape(129, 7)
        (256, 8)
    """
    return round_up(rows, TILE_ROWS), round_up(columns, TILE_COLUMNS)


def _check(where: str, scale: torch.Tensor, dims: int) -> None:
    if scale.dim() != dims or scale.element_size() != 1:
        raise ValueError(f"{where}: scale is {tuple(scale.shape)} {scale.dtype}, want {dims} dimensions of one-byte scales (e8m0 or uint8)")


def _scatter(scale: torch.Tensor, address: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    out = torch.zeros(shape[0] * shape[1], dtype=torch.uint8, device=scale.device)
    out[address.flatten()] = scale.contiguous().view(torch.uint8).flatten()
    return out.view(shape).view(scale.dtype)


def _grid(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]


def _tile_address(row: torch.Tensor, column: torch.Tensor, padded_columns: int | torch.Tensor) -> torch.Tensor:
    """The byte of a scale in the blocked matrix: tiles row by row, then the order inside of a tile."""
    tile, row = row // TILE_ROWS * (padded_columns // TILE_COLUMNS) + column // TILE_COLUMNS, row % TILE_ROWS
    return tile * _TILE + (row % 32) * 16 + (row // 32) * 4 + column % TILE_COLUMNS


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """Plain scales to tiles.

    Args:
        scale: (rows, columns) float8_e8m0fnu or uint8.

    Returns:
        `blocked_shape(rows, columns)` of the same dtype; its bytes in memory order are the tiles, row of tiles by row of tiles.

    Examples:
        >>> scale = torch.ones(100, 3, dtype=torch.uint8)
        >>> mxep.mx.to_blocked(scale).shape
        torch.Size([128, 4])
    """
    _check("to_blocked", scale, 2)
    return to_blocked_3d(scale[None]).view(blocked_shape(*scale.shape))


def from_blocked(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Tiles back to plain (rows, columns) scales; the inverse of `to_blocked`.

    Args:
        blocked: one-byte scales as `to_blocked` returns them, of any shape.
        rows: of the plain scales.
        columns: of the plain scales.

    Returns:
        (rows, columns) of the same dtype.

    Raises:
        ValueError: `blocked` does not hold `blocked_shape(rows, columns)` bytes.

    Examples:
        >>> scale = torch.arange(300, dtype=torch.uint8).view(100, 3)
        >>> torch.equal(mxep.mx.from_blocked(mxep.mx.to_blocked(scale), 100, 3), scale)
        True
    """
    shape = blocked_shape(rows, columns)
    if blocked.numel() != shape[0] * shape[1]:
        raise ValueError(f"from_blocked: {blocked.numel()} bytes for ({rows}, {columns}), want {shape[0] * shape[1]} ({shape} padded)")
    address = _tile_address(*_grid(rows, columns, blocked.device), shape[1])
    return blocked.view(torch.uint8).flatten()[address].view(blocked.dtype)


def to_blocked_3d(scale: torch.Tensor) -> torch.Tensor:
    """One blocked matrix per expert.

    Args:
        scale: (G, rows, columns) one-byte scales.

    Returns:
        (G, padded rows * padded columns), tiles of each expert in memory order.

    Examples:
        >>> mxep.mx.to_blocked_3d(torch.ones(2, 100, 3, dtype=torch.uint8)).shape
        torch.Size([2, 512])
    """
    _check("to_blocked_3d", scale, 3)
    groups, rows, columns = scale.shape
    shape = blocked_shape(rows, columns)
    size = shape[0] * shape[1]
    address = _tile_address(*_grid(rows, columns, scale.device), shape[1]) + torch.arange(groups, device=scale.device)[:, None, None] * size
    return _scatter(scale, address, (groups, size))


def _padded_starts(ends: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(start of each group, its size rounded up, its start after rounding every group up), int64."""
    ends = ends.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    padded = (ends - starts + multiple - 1) // multiple * multiple
    return starts, padded, padded.cumsum(0) - padded


def _groups_of(index: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(group of every row or column, the last one for those that no group owns; whether one owns it)."""
    group = torch.searchsorted(ends.long(), index, right=True)
    return group.clamp(max=ends.shape[0] - 1), group < ends.shape[0]


def to_blocked_groups_along_rows(scale: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of row groups (activations grouped by expert, groups along M): every group padded to 128 rows on its own.

    Args:
        scale: (M, columns) one-byte scales.
        ends: (G,) int32 END offsets of the groups, on the scale's device.

    Returns:
        (round_up(M, 128) + G*128, padded columns): an upper bound that needs no host sync, tiles in memory order, zeros after the
        last group; and (G,) int64, the first padded row of each group.  Rows past ends[-1] are dropped.

    Examples:
        >>> scale, ends = torch.ones(160, 4, dtype=torch.uint8), torch.tensor([32, 160], dtype=torch.int32)
        >>> blocked, first_rows = mxep.mx.to_blocked_groups_along_rows(scale, ends)
        >>> blocked.shape, first_rows.tolist()
        (torch.Size([512, 4]), [0, 128])
    """
    _check("to_blocked_groups_along_rows", scale, 2)
    groups = ends.shape[0]
    shape = (round_up(scale.shape[0], TILE_ROWS) + groups * TILE_ROWS, round_up(scale.shape[1], TILE_COLUMNS))
    row, column = _grid(scale.shape[0], scale.shape[1], scale.device)
    starts, _, padded_starts = _padded_starts(ends, TILE_ROWS)
    group, owned = _groups_of(row, ends)
    # Rows that no group owns go to the slack after the last group and are zeroed there.
    target = torch.where(owned, padded_starts[group] + row - starts[group], shape[0] - 1)
    masked = torch.where(owned, scale.view(torch.uint8), 0).view(scale.dtype)
    return _scatter(masked, _tile_address(target, column, shape[1]), shape), padded_starts


def to_blocked_groups_along_columns(scale: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of column groups (operands of wgrad, groups along the contraction): every group padded to 4 columns on its own.

    Args:
        scale: (rows, columns) one-byte scales.
        ends: (G,) int32 END offsets of the groups in scale columns.

    Returns:
        (padded rows, columns + G*4): an upper bound that needs no host sync; group by group, inside a group its tiles row by row;
        and (G,) int64, the first padded column of each group.  Columns past ends[-1] are dropped.

    Examples:
        >>> scale, ends = torch.ones(128, 5, dtype=torch.uint8), torch.tensor([1, 5], dtype=torch.int32)
        >>> blocked, first_columns = mxep.mx.to_blocked_groups_along_columns(scale, ends)
        >>> blocked.shape, first_columns.tolist()
        (torch.Size([128, 16]), [0, 4])
    """
    _check("to_blocked_groups_along_columns", scale, 2)
    groups = ends.shape[0]
    shape = (round_up(scale.shape[0], TILE_ROWS), round_up(scale.shape[1], TILE_COLUMNS) + groups * TILE_COLUMNS)
    row, column = _grid(scale.shape[0], scale.shape[1], scale.device)
    starts, padded, padded_starts = _padded_starts(ends, TILE_COLUMNS)
    group, owned = _groups_of(column, ends)
    local = column - starts[group]
    address = padded_starts[group] * shape[0] + _tile_address(row, local, padded[group])
    address = torch.where(owned, address, shape[0] * shape[1] - 1)
    masked = torch.where(owned, scale.view(torch.uint8), 0).view(scale.dtype)
    return _scatter(masked, address, shape), padded_starts
