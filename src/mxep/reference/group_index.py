"""Where every received row goes: counts -> padded groups, their ends, and the row map.

Rows arrive rank-major (all rows of source rank 0, inside it expert by expert); experts want them expert-major, each group padded.
"""

from __future__ import annotations

import torch


def group_index(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map, padded group sizes and group ends from the counts of the exchange.

    Args:
        counts: (W*L,) int32 or int64, rank-major: rows from rank r for local expert e at r*L + e.
        ep_degree: W.  num_local_experts: L.
        alignment: rows; every group is padded to ceil(max(n, alignment) / alignment) * alignment, so an empty expert owns `alignment` rows.
        num_padded_rows: P, at least the last end.

    Returns:
        row_map (P,) int32, the source row of each padded row or -1; padded counts (L,) int32; END offsets (L,) int32.

    Two ranks, two experts; rank 0 sends 2 and 0 rows, rank 1 sends 1 and 3; padded to 4:

    >>> import torch
    >>> row_map, padded, ends = group_index(torch.tensor([2, 0, 1, 3]), 2, 2, 4, 12)
    >>> padded.tolist(), ends.tolist()
    ([4, 4], [4, 8])
    >>> row_map.tolist()
    [0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1]
    """
    table = counts.view(ep_degree, num_local_experts).long()  # (W, L)
    sizes = table.sum(0)
    padded = (sizes.clamp(min=alignment) + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    source_start = (table.flatten().cumsum(0) - table.flatten()).view_as(table)  # first received row of each (rank, expert)
    target_start = (ends - padded) + table.cumsum(0) - table  # its first padded row
    row_map = torch.full((num_padded_rows,), -1, dtype=torch.int32, device=counts.device)
    for rank in range(ep_degree):
        for expert in range(num_local_experts):
            n, source, target = int(table[rank, expert]), int(source_start[rank, expert]), int(target_start[rank, expert])
            row_map[target : target + n] = torch.arange(source, source + n, dtype=torch.int32, device=counts.device)
    return row_map, padded.int(), ends.int()
