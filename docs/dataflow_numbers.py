"""The numbers of docs/dataflow.md: shapes and bytes of one token's data flow, computed from one configuration.

    python docs/dataflow_numbers.py    prints the tables of dataflow.md

tests/test_docs_numbers.py compares them with the page, and runs the real blocks at a small size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxep.reference import permute_indices
from mxep.shapes import MX_BLOCK, record_bytes, round_up

HP_BYTES = 2  # bf16
FLOAT32_BYTES = 4
ROW_MAP_BYTES = 4  # int32


@dataclass(frozen=True)
class Configuration:
    """A layer on W ranks with perfectly balanced routing; letters as in mxep.shapes. T: tokens per rank."""

    D: int = 7168
    H: int = 2048
    W: int = 8
    C: int = 8
    L: int = 32
    T: int = 4096
    alignment: int = MX_BLOCK

    @property
    def rows_per_pair(self) -> int:
        """Rows that one rank sends to one expert."""
        return self.T * self.C // (self.W * self.L)

    @property
    def sizes(self) -> dict[str, int]:
        """Value of every letter that a shape uses."""
        rows = self.T * self.C
        padded = round_up(rows + self.L * self.alignment, self.alignment)
        return {"T": self.T, "T'": rows, "R": rows, "P": padded, "C": self.C, "D": self.D, "H": self.H, "2H": 2 * self.H, "L": self.L}


@dataclass(frozen=True)
class Edge:
    """One tensor between two stages.

    Attributes:
        name: what it is.  letters: its shape in letters.  shape: the same in numbers.  dtype: "bf16" or "mxfp8".
    """

    name: str
    letters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: bf16; MX off the wire is a packed record (R rows), later data and scales on their own (P rows)."""
        width = self.shape[-1]
        if self.dtype == "bf16":
            return HP_BYTES * width
        return record_bytes(width) if self.letters[0] == "R" else width + width // MX_BLOCK

    @property
    def total_bytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.row_bytes


def _edges(config: Configuration, rows: list[tuple[str, str, str]]) -> list[Edge]:
    sizes = config.sizes
    return [Edge(name, tuple(letters.split()), tuple(sizes[letter] for letter in letters.split()), dtype) for name, letters, dtype in rows]


def forward_edges(config: Configuration) -> list[Edge]:
    """Tensors of the forward, in order; the stages of draw_dataflow.py lie between them."""
    return _edges(
        config,
        [
            ("x", "T D", "bf16"),
            ("sorted rows", "T' D", "bf16"),
            ("received rows", "R D", "mxfp8"),
            ("padded rows", "P D", "mxfp8"),
            ("gate and up", "P 2H", "bf16"),
            ("h", "P H", "mxfp8"),
            ("expert output", "P D", "bf16"),
            ("without padding", "R D", "bf16"),
            ("combined rows", "T' D", "bf16"),
            ("y", "T D", "bf16"),
        ],
    )


def backward_edges(config: Configuration) -> list[Edge]:
    """Gradients of the same tensors, in the order of `forward_edges`; backward walks them from the last to the first."""
    same = forward_edges(config)
    dtypes = ["bf16"] * len(same)
    dtypes[6] = dtypes[7] = "mxfp8"  # what combine's backward quantised, and unpermute's backward moved
    dtypes[4] = "mxfp8"  # for dgrad; for wgrad the same pass writes it in bf16 too
    return [Edge("d " + a.name, a.letters, a.shape, dtype) for a, dtype in zip(same, dtypes, strict=True)]


def mebibytes(number: int) -> str:
    """A byte count in the largest binary unit that keeps it at one or more.

    >>> mebibytes(242221056), mebibytes(135168), mebibytes(128)
    ('231 MiB', '132 KiB', '128 B')
    """
    if number < 2**10:
        return f"{number} B"
    return f"{number / 2**20:.0f} MiB" if number >= 2**20 else f"{number / 2**10:.0f} KiB"


# Where one row of the example is: a token of one rank, and one of its choices.
TRACE_RANK, TRACE_EXPERT, TRACE_PLACE = 5, 100, 57  # source rank; expert; the row's place among that rank's rows for that expert


def trace(config: Configuration) -> dict[str, tuple[int, int]]:
    """(rank, row) of the example's row in every row order, computed with the index code of the blocks."""
    n, sizes = config.rows_per_pair, config.sizes
    expert_rank, local = TRACE_EXPERT // config.L, TRACE_EXPERT % config.L
    counts = torch.full((config.W * config.L,), n)
    row_map, _, _ = permute_indices(counts, config.W, config.L, config.alignment, sizes["P"])
    received = TRACE_RANK * config.L * n + local * n + TRACE_PLACE
    padded = int((row_map == received).nonzero())
    return {"sorted": (TRACE_RANK, TRACE_EXPERT * n + TRACE_PLACE), "received": (expert_rank, received), "padded": (expert_rank, padded)}


def wire_bytes(config: Configuration) -> dict[str, int]:
    """Bytes that one rank sends to other ranks, per exchange and direction (balanced routing: (W-1)/W of the rows go to other ranks)."""
    remote_rows = config.sizes["T'"] * (config.W - 1) // config.W
    hp, mx = HP_BYTES * config.D, record_bytes(config.D)
    return {
        "dispatch forward": remote_rows * mx,
        "combine forward": remote_rows * hp,
        "combine backward": remote_rows * mx,
        "dispatch backward": remote_rows * hp,
        "all four in bf16": 4 * remote_rows * hp,
    }


def saved_bytes(config: Configuration) -> dict[str, int]:
    """Activations that one rank keeps for backward, by stage; weights are not counted."""
    sizes = config.sizes
    rows, padded = sizes["T'"], sizes["P"]
    mx = config.D + config.D // MX_BLOCK
    return {
        "sort: order": rows * ROW_MAP_BYTES,
        "dispatch": 0,
        "permute and unpermute: row map": padded * ROW_MAP_BYTES,
        "experts: padded rows in MX": padded * mx,
        "experts: gate and up": padded * HP_BYTES * 2 * config.H,
        "experts: group ends": config.L * ROW_MAP_BYTES,
        "combine": 0,
        "sum: combined rows, where each choice's is, and scores in float32": rows * (config.D * HP_BYTES + ROW_MAP_BYTES + FLOAT32_BYTES),
    }


def tables(config: Configuration) -> dict[str, str]:
    """Every table of dataflow.md in markdown, by name."""
    at = trace(config)
    place = {"T' D": at["sorted"], "R D": at["received"], "P D": at["padded"], "P H": at["padded"], "P 2H": at["padded"]}

    def dataflow_table(edges: list[Edge]) -> str:
        lines = [
            "| tensor | shape | numbers | dtype | bytes a row | bytes a rank | where the example is |",
            "|---|---|---|---|---|---|---|",
        ]
        for edge in edges:
            letters = " ".join(edge.letters)
            rank, row = place.get(letters, (TRACE_RANK, -1))
            spot = f"rank {rank}, row {row}" if row >= 0 else f"rank {rank}"
            shape = ", ".join(str(size) for size in edge.shape)
            name = {"mxfp8": "MXFP8", "bf16": "bf16"}[edge.dtype]
            lines.append(
                f"| {edge.name} | ({', '.join(edge.letters)}) | ({shape}) | {name} | {edge.row_bytes} | {edge.total_bytes} | {spot} |"
            )
        return "\n".join(lines)

    def numbers(title: str, values: dict[str, int]) -> str:
        return "\n".join([f"| {title} | bytes | |", "|---|---|---|", *(f"| {k} | {v} | {mebibytes(v)} |" for k, v in values.items())])

    return {
        "forward": dataflow_table(forward_edges(config)),
        "backward": dataflow_table(backward_edges(config)[::-1]),
        "wire": numbers("sent by one rank to other ranks", wire_bytes(config)),
        "saved": numbers("kept by one rank for backward", saved_bytes(config)),
    }


if __name__ == "__main__":
    for _name, _table in tables(Configuration()).items():
        print(f"{_name}\n\n{_table}\n")
