"""Tile sizes of every kernel, one table: elements per program, its widest row piece, warps, pipeline stages.

Values for NVIDIA H200 (132 SMs), measured 2026-11 with torch 2.11 and Triton 3.6; bytes do not depend on them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mxep.shapes import MX_BLOCK, cdiv


@dataclass(frozen=True, eq=False)  # equal to itself alone: `grid` is looked up by it
class RowTile:
    """A program's part of a (rows, columns) matrix: `elements` in pieces of at most `columns`, at least one; powers of two."""

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

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (the tiles live as long as this module)
    def grid(self, num_rows: int, width: int) -> tuple[int, dict[str, int]]:
        """How many programs cover a (num_rows, width) matrix, and what their kernel has to know of the tiles."""
        rows, columns = self.fit(width)
        column_tiles = cdiv(width, columns)
        return cdiv(num_rows, rows) * column_tiles, {"column_tiles": column_tiles, "ROWS": rows, "COLUMNS": columns}


@dataclass(frozen=True)
class Tile:
    """Rows and columns that a program takes at a time."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class GemmTile:
    """Tile of a grouped GEMM: rows and columns of the output, depth of one step along the contraction."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TransposingTile:
    """How columnwise.cu cuts a matrix.

    Attributes:
        both: whether the form along the rows is written too.  item_bytes: of an element, 2 (bf16) or 4 (float32).
        row_warps, column_warps: of a tile; a warp takes 32 rows x 128 bytes.  min_blocks: on a multiprocessor.
        steps: the most tiles (down, across) that a block of threads walks over.  band: how many such regions above each other go first.
    """

    both: bool
    item_bytes: int
    row_warps: int
    column_warps: int
    min_blocks: int
    steps: tuple[int, int]
    band: int

    @property
    def rows(self) -> int:
        return 32 * self.row_warps

    @property
    def columns(self) -> int:
        return 128 // self.item_bytes * self.column_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.column_warps

    @property
    def shared_bytes(self) -> int:
        """Bytes: one or two tiles of e4m3; scales of the columns of all steps, and of the rows of the steps across, 4 bytes apart."""
        down, across = self.steps
        scales = across * self.columns * (down * self.row_warps + 4)
        if self.both:
            scales += self.rows * (across * self.columns // MX_BLOCK + 4)
        return (1 + self.both) * self.rows * self.columns + scales

    def options(self, scaling: int) -> dict[str, bool | int]:
        """The constants in front of columnwise.cu; scaling: the number of the scaling mode."""
        kind: dict[str, bool | int] = {"ROWS_TOO": self.both, "FLOAT": self.item_bytes == 4, "SCALING": scaling}
        shape = {"ROW_WARPS": self.row_warps, "COLUMN_WARPS": self.column_warps, "MIN_BLOCKS": self.min_blocks}
        return {**kind, **shape, "ROW_STEPS": self.steps[0], "COLUMN_STEPS": self.steps[1], "BAND": self.band}


@dataclass(frozen=True)
class WeightTile:
    """How quantize_weight.cu cuts a weight.

    Attributes:
        row_warps, column_warps, min_blocks: as in `TransposingTile`.
        lag: quantising follows the search for exponents by a group's tiles and this many more, which run at the same time.
    """

    row_warps: int
    column_warps: int
    min_blocks: int
    lag: int
    item_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.column_warps

    def shared_bytes(self, forms: int) -> int:
        """Bytes: a tile of e4m3 for each form, and an exponent for each row and column."""
        rows, columns = 32 * self.row_warps, 128 // self.item_bytes * self.column_warps
        return forms * rows * columns + 4 * (rows + columns)


@dataclass(frozen=True)
class WholeRowsTile:
    """How a kernel that holds whole rows in shared memory (rows_in_memory.cuh) cuts a matrix.

    Attributes:
        threads: of a thread block.
        batch: how many pieces of 8 columns a thread loads before it computes; always 1 where values are float32.
        steps: the most batches that a thread computes, unless one row is longer.
        min_blocks: thread blocks of a multiprocessor for which the compiler leaves registers.
    """

    threads: int
    batch: int
    steps: int
    min_blocks: int

    @functools.lru_cache(maxsize=1024)  # noqa: B019 (the tiles live as long as this module)
    def rows(self, width: int) -> int:
        """Rows of a thread block: of the numbers that leave the fewest threads idle, the smallest.

        >>> [WholeRowsTile(256, 2, 4, 3).rows(width) for width in (32, 768, 1408, 2048, 14336)]
        [128, 16, 11, 2, 1]
        """
        lanes, at_once = width // LANE_COLUMNS, self.threads * self.batch
        most = max(self.steps * at_once // lanes, 1)
        return max(range(1, most + 1), key=lambda rows: (rows * lanes / (at_once * cdiv(rows * lanes, at_once)), -rows))


QUANTIZE = RowTile(elements=4096, columns=1024, warps=4)
DEQUANTIZE = RowTile(elements=8192, columns=256, warps=8)
ACTIVATION = RowTile(elements=2048, columns=256, warps=4)  # what it writes is MX; columns divide every multiple of 32
LANE_COLUMNS = 8  # of a lane of quantize/eight_columns.cuh
# Of backward.cu: threads of a block, blocks of a multiprocessor, and rows of a lane where bf16 becomes MX alone (else 1).
ACTIVATION_THREADS, ACTIVATION_MIN_BLOCKS, ACTIVATION_LANE_ROWS = 256, 4, 2
# Of rebased.cu, forward and gradient.  Times of these tiles, of REBASED_SUM_* and of QUANTIZE_ROWS, H200, 2026-11: docs/log.md.
ACTIVATE_REBASED, ACTIVATE_BACKWARD_REBASED = WholeRowsTile(256, 2, 4, 4), WholeRowsTile(256, 2, 4, 3)
# With sums of a group's rows: rows of a block, and those that it takes at a time; most threads of a block; threads of a multiprocessor,
# fewer of them where values are float32 or a thread has two times 8 columns.
REBASED_SUM_ROWS, REBASED_SUM_STEP, REBASED_SUM_THREADS, REBASED_SUM_RESIDENT = 128, 16, 384, (768, 512)
# Of quantize_rows.cu.  QUANTIZE_ROWS_WIDEST: the most values of a row that one pass takes; shared memory holds a byte for each.
QUANTIZE_ROWS, QUANTIZE_ROWS_WIDEST = WholeRowsTile(256, 4, 2, 5), 32 * 1024
MOVE_WORDS = RowTile(elements=2048, columns=512, warps=4)  # words of at most 4 bytes
SUM = RowTile(elements=1024, columns=1024, warps=4)  # of the sums; 100 to 105% of a device copy, H200, 2026-11: docs/log.md
LOSS_COLUMNS, LOSS_WARPS = 8192, 32  # few rows at a time, so that L2 holds what is read twice; ran on H200s, 2026-11, not tuned
SUM_BACKWARD = RowTile(elements=1024, columns=1024, warps=4)  # of slots; 92 to 95%, as above
CHUNK_SUM, CHUNK_SUM_PROGRAMS = (
    RowTile(elements=1024, columns=2048, warps=4),
    132 * 32,
)  # of partial sums of a chunk; H200, 2026-11: docs/log.md
LOOP_PROGRAMS = 132 * 64  # at most, of a kernel that loops over the valid rows, possibly none; H200, 2026-11: docs/log.md
ROW_SUMS_VALUES = 4096  # of the rows that a program sums at a time; not tuned on a GPU
GROUP_BLOCK, GROUP_PROGRAMS = 4096, 64  # values of a group that is copied, and programs of one; not tuned on a GPU
ZERO = RowTile(elements=4096, columns=1024, warps=4)
ZERO_PROGRAMS = 64  # the padding rows are few as a rule, whatever M is
TRANSPOSE_COLUMNWISE = (64, 128)  # of any other matrix that Triton quantises columnwise
TRANSPOSE = {  # (both, bytes of an element): from wide to narrow
    (True, 2): (
        TransposingTile(both=True, item_bytes=2, row_warps=8, column_warps=4, min_blocks=1, steps=(4, 2), band=2),
        TransposingTile(both=True, item_bytes=2, row_warps=8, column_warps=2, min_blocks=2, steps=(1, 1), band=1),
    ),
    (False, 2): (TransposingTile(both=False, item_bytes=2, row_warps=8, column_warps=2, min_blocks=2, steps=(2, 1), band=1),),
    (True, 4): (TransposingTile(both=True, item_bytes=4, row_warps=4, column_warps=4, min_blocks=1, steps=(1, 1), band=1),),
    (False, 4): (TransposingTile(both=False, item_bytes=4, row_warps=8, column_warps=4, min_blocks=1, steps=(2, 1), band=1),),
}
WEIGHT = {  # by bytes of an element
    2: WeightTile(row_warps=4, column_warps=2, min_blocks=4, lag=264, item_bytes=2),
    4: WeightTile(row_warps=4, column_warps=4, min_blocks=2, lag=132, item_bytes=4),
}
WEIGHT[1] = WEIGHT[2]  # of an MX weight, whose values become bf16 in registers; not tuned on a GPU
PLAN_TOKENS, PLAN_ROWS, PLAN_WARPS = 128, 1024, 4  # of small integers; not tuned on a GPU
PLAN_CHOICES = 1024  # of a program that sorts them; not tuned on a GPU
ROUTER_SCORES, ROUTER_WARPS = 2048, 4  # of a program; not tuned on a GPU
ROUTER_PROGRAMS = 132 * 4  # that route; not tuned on a GPU
ROUTER_PARTS, ROUTER_PART_SUMS = 64, 16384  # programs' sums that are added at a time, and values of them, at most; not tuned on a GPU
INDEX_ROWS, INDEX_WARPS = 1024, 4  # padded rows per program of the row map
INVERT_ROWS = 256  # entries per program of a map that is turned around
GEMM_BF16 = GemmTile(rows=128, columns=128, depth=64, warps=8, stages=3)
GEMM_FLOAT32 = GemmTile(rows=64, columns=64, depth=32, warps=4, stages=2)
# Of a LoRA's rows: depth of the first product and columns of the second one; not tuned on a GPU
LORA = {
    "bf16": GemmTile(rows=64, columns=64, depth=64, warps=4, stages=3),
    "float32": GemmTile(rows=64, columns=64, depth=32, warps=4, stages=2),
}
# Gradients of a group's bias.  BIAS_GRADS: rows of a program, and columns that it takes at a time; H200, 2026-11: docs/log.md.
# BIAS_GRADS_SPAN: columns of a program that makes no scores' gradient.  BIAS_PARTS: programs' sums that are added at a time.
# BIAS_FACTOR_ROWS: rows of an adapter's factors that a program makes.
BIAS_GRADS, BIAS_GRADS_SPAN = Tile(rows=128, columns=64, warps=4), 512
BIAS_PARTS, BIAS_FACTOR_ROWS = Tile(rows=16, columns=128, warps=4), 256
NARROW_COLUMNS = 16  # the most that these tiles of a wgrad take: a factor of an adapter, of rows that are read once
WGRAD_NARROW = {
    "bf16": GemmTile(rows=64, columns=16, depth=128, warps=8, stages=4),
    "float32": GemmTile(rows=64, columns=16, depth=64, warps=4, stages=4),
}
P2P_THREADS = 256
P2P_PARTS = {  # chunks of a long row per lane of p2p.cu by (sums, records, float32); one setting, no sweep
    (False, False, False): 4,
    (False, True, False): 2,
    (False, True, True): 1,
    (True, False, False): 2,
    (True, False, True): 2,
    (True, True, False): 1,
    (True, True, True): 1,
}
ADAMW_THREADS, ADAMW_MIN_BLOCKS = 256, 4  # of a block, of a multiprocessor
SLOT_BLOCKS = 528  # of slots.cu: NVLink limits it, and recv_slots runs at the same time
RECV_PARTS = 4  # stores of a long row per lane; not tuned on a GPU yet
