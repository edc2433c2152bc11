"""Tile sizes of every kernel, one table: elements per program, its widest row piece, warps, pipeline stages.

Values for NVIDIA H200 (132 SMs), measured 2026-11 with torch 2.11 and Triton 3.6; bytes do not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowTile:
    """A program's part of a (rows, columns) matrix: `elements` in pieces of at most `columns`, powers of two."""

    elements: int
    columns: int
    warps: int

    def fit(self, width: int) -> tuple[int, int]:
        """(rows, columns) of a tile for a matrix of that width.

        Columns divide the width where a power of two of at least an eighth of `columns` does, so that nothing is masked; else the
        tile's edge is.

        >>> RowTile(4096, 1024, 4).fit(7168), RowTile(4096, 1024, 4).fit(1408), RowTile(4096, 1024, 4).fit(96)
        ((4, 1024), (32, 128), (32, 128))
        """
        divisor = width & -width
        columns = min(divisor, self.columns)
        if columns * 8 < self.columns:
            columns = min(1 << (width - 1).bit_length(), self.columns)
        return max(self.elements // columns, 1), columns


@dataclass(frozen=True)
class GemmTile:
    """Tile of a grouped GEMM: rows and columns of the output, depth of one step along the contraction."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


QUANTIZE = RowTile(elements=4096, columns=1024, warps=4)
DEQUANTIZE = RowTile(elements=4096, columns=1024, warps=8)
SWIGLU = RowTile(elements=2048, columns=256, warps=4)  # what it writes is MX; columns divide every multiple of 32
SWIGLU_HP = RowTile(elements=2048, columns=256, warps=8)  # backward that writes high precision too
JOIN_ROWS, JOIN_COLUMNS, JOIN_WARPS = 128, 64, 4  # of a weight that is transposed on its way into a joined one
MOVE_WORDS = RowTile(elements=2048, columns=512, warps=4)  # words of at most 4 bytes
ZERO = RowTile(elements=4096, columns=1024, warps=4)
ZERO_PROGRAMS = 64  # the tail is a few rows as a rule, whatever M is
TRANSPOSE_ROWS, TRANSPOSE_COLUMNS, TRANSPOSE_WARPS = 64, 128, 4
INDEX_ROWS, INDEX_WARPS = 1024, 4  # padded rows per program of the row map
GEMM_BF16 = GemmTile(rows=128, columns=128, depth=64, warps=8, stages=3)
GEMM_FLOAT32 = GemmTile(rows=64, columns=64, depth=32, warps=4, stages=2)
