"""What an uneven load of the experts costs a layer on several ranks, and how much of that other placements of the experts would save.

All ranks wait for the one whose experts have the most rows.  The cost is measured: the time that each rank's GPU works, and the time of the
layer.  What placements save is arithmetic: a rank's working time is taken to be linear in its rows, through the measured ranks, and the
layer to be as much faster as its slowest rank.  Hot ranks also receive more bytes; that is not counted, so the savings are low estimates.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean, linear_regression

COPIES = (1, 2, 4)  # experts that every rank holds, in the table


def rows_of_ranks(choices: Sequence[int], world: int) -> list[int]:
    """Rows of each rank, with its equal share of neighbouring experts.

    >>> rows_of_ranks([8, 2, 1, 1], 2)
    [10, 2]
    """
    held = len(choices) // world
    return [sum(choices[rank * held : (rank + 1) * held]) for rank in range(world)]


def rows_of_slowest(choices: Sequence[int], world: int, copies: int = 0) -> float:
    """Rows of the busiest rank after its experts were placed by their load.

    Experts go to the rank with the fewest rows, the hottest first, as many to each rank.  The `copies` hottest ones are on every rank
    instead, and each rank does those of its own tokens: an equal share.

    >>> rows_of_slowest([8, 2, 1, 1], 2), rows_of_slowest([8, 2, 1, 1], 2, copies=1)
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

    >>> found = saved_ms([8, 2, 1, 1], [12.0, 4.0])
    >>> [(name, round(ms, 6)) for name, ms in found.items() if "2" not in name and "4" not in name]
    [('sorted', 1.0), ('1 on every rank', 4.0), ('even', 4.0)]
    """
    world = len(busy_ms)
    rows = rows_of_ranks(choices, world)
    a_row = linear_regression(rows, busy_ms).slope if max(rows) > min(rows) else 0.0
    others = {"sorted": rows_of_slowest(choices, world)}
    others |= {f"{copies} on every rank": rows_of_slowest(choices, world, copies) for copies in COPIES}
    others["even"] = fmean(rows)
    return {name: a_row * (max(rows) - other) for name, other in others.items()}
