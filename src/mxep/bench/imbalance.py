"""What an uneven load of the experts costs a layer on several ranks, and how much of that other placements of the experts would save.

All ranks wait for the one whose experts have the most rows.  The cost is measured: the time that each rank's GPU works, and the time of the
layer.  What placements save is arithmetic: a rank's working time is taken to be linear in its rows, through the measured ranks, and the
layer to be as much faster as its slowest rank.  Hot ranks also receive more bytes; that is not counted, so the savings are low estimates.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from statistics import fmean, linear_regression

from mxep.bench.records import Record, median_ms, record_place

PLACEMENTS = {"sorted by load": 0, "1 on every rank": 1, "2 on every rank": 2, "4 on every rank": 4}  # name -> experts that every rank has
COSTS = (
    "Zipf, T of all ranks / D / H / E / C",
    "a layer",
    "rows, busiest rank / mean",
    "working, busiest rank / mean",
    "the busiest rank costs",
    *(f"saved: {name}" for name in (*PLACEMENTS, "even")),
)
LOADS = ("the same loads, busiest rank / mean", "ranks", "neighbours", *PLACEMENTS)
_MORE_RANKS = (4, 8, 16, 32)


def rows_of_ranks(choices: Sequence[int], world: int) -> list[int]:
    """Rows of each rank, with its equal share of neighbouring experts.

    >>> rows_of_ranks([8, 2, 1, 1], 2)
    [10, 2]
    """
    held = len(choices) // world
    return [sum(choices[rank * held : (rank + 1) * held]) for rank in range(world)]


def rows_of_busiest(choices: Sequence[int], world: int, copies: int = 0) -> float:
    """Rows of the busiest rank after its experts were placed by their load.

    Experts go to the rank with the fewest rows, the hottest first, as many to each rank.  The `copies` hottest ones are on every rank
    instead, and each rank does those of its own tokens: an equal share.

    >>> rows_of_busiest([8, 2, 1, 1], 2), rows_of_busiest([8, 2, 1, 1], 2, copies=1)
    (9, 6.0)
    """
    hottest = sorted(choices, reverse=True)
    shared, rest = sum(hottest[:copies]) / world if copies else 0, hottest[copies:]
    held = -(-len(rest) // world)
    ranks = [(0, 0) for _ in range(world)]  # (rows, experts)
    full = 0
    for rows in rest:
        had, experts = heapq.heappop(ranks)
        if experts + 1 < held:
            heapq.heappush(ranks, (had + rows, experts + 1))
        else:
            full = max(full, had + rows)
    return shared + max([full, *(rows for rows, _ in ranks)])


def saved_ms(choices: Sequence[int], busy_ms: Sequence[float]) -> dict[str, float]:
    """Milliseconds that a layer would be faster by, for each placement.

    Args:
        choices: rows of every expert, from the tokens of all ranks.  busy_ms: working time of every rank.

    >>> {name: round(ms, 6) for name, ms in saved_ms([8, 2, 1, 1], [12.0, 4.0]).items() if name[0] in "s1e"}
    {'sorted by load': 1.0, '1 on every rank': 4.0, 'even': 4.0}
    """
    world = len(busy_ms)
    rows = rows_of_ranks(choices, world)
    a_row = linear_regression(rows, busy_ms).slope if max(rows) > min(rows) else 0.0
    others = {name: rows_of_busiest(choices, world, copies) for name, copies in PLACEMENTS.items()} | {"even": fmean(rows)}
    return {name: a_row * (max(rows) - other) for name, other in others.items()}


def cost_rows(records: Sequence[Record]) -> list[list[str]]:
    """Cells of `COSTS`: what the busiest rank of a layer in MXFP8 costs, and what other placements would save."""
    cells = []
    for record in records:
        busy, whole = record["busy_ms"]["mxfp8"], median_ms(record)["mxfp8_total"]
        rows = rows_of_ranks(record["choices"], record["world_size"])
        size = " / ".join(str(record["shape"][key]) for key in ("T_global", "D", "H", "E", "C"))
        costs = [max(busy) - fmean(busy), *saved_ms(record["choices"], busy).values()]
        of_busiest = f"{max(rows) / fmean(rows):.2f}", f"{max(busy):.2f} / {fmean(busy):.2f} ms"
        cells.append(
            [f"{record_place(record)}, {size}", f"{whole:.2f} ms", *of_busiest, *(f"{ms:.2f} ms, {ms / whole:.0%}" for ms in costs)]
        )
    return cells


def load_rows(records: Sequence[Record]) -> list[list[str]]:
    """Cells of `LOADS`: the recorded loads on as many ranks, and on more."""
    cells = []
    for record, ranks in itertools.product(records, _MORE_RANKS):
        choices, shape = record["choices"], record["shape"]
        if ranks <= shape["E"]:
            busiest = [max(rows_of_ranks(choices, ranks)), *(rows_of_busiest(choices, ranks, copies) for copies in PLACEMENTS.values())]
            shares = (f"{rows * ranks / sum(choices):.2f}" for rows in busiest)
            cells.append([f"{shape['E']} experts, top {shape['C']}", str(ranks), *shares])
    return cells
