"""Where rows go when only the device knows how many: index arithmetic on a table of counts, without ranks or exchanges.

A table is (W, W) int64: line s is what rank s sends to each rank.  A rank receives its rows by sender, inside it in the sender's order, in
at most `most` places; what does not fit is cut off the last senders.

Rank 0 has three rows and says it sends 2 and 1, rank 1 sends 1 and 3; nobody receives more than 3:

>>> import torch
>>> cut_splits(torch.tensor([2, 1]), 3).tolist(), cut_splits(torch.tensor([2, 5]), 3).tolist()
([2, 1, 0], [2, 1, 1])
>>> counts = torch.tensor([[2, 1], [1, 3]])
>>> kept = cut_table(counts, 3)
>>> kept.tolist()
[[2, 1], [1, 2]]
>>> outgoing(counts, kept, 1, 4)[1].flatten().tolist()  # rank 1's rows: behind those of rank 0; its last one has no place
[2, 1, 2, -1]
>>> way = homeward(counts, kept, 1, 3)  # what rank 1 received: from whom, and which of its rows
>>> way.ranks.flatten().tolist(), way.slots.flatten().tolist()
([0, 1, 1], [2, 1, 2])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Way(NamedTuple):
    """Where rows go: (N, 1) int32 each, as of `torch.ops.mxep.push_rows`.

    Attributes:
        ranks: whose memory.  slots: which place there, -1 for nowhere.
    """

    ranks: Tensor
    slots: Tensor


def _less_than(ends: Tensor) -> Tensor:
    """END offsets along dimension 0 -> how many lie between neighbours."""
    return ends.diff(dim=0, prepend=ends.new_zeros(1, *ends.shape[1:]))


def cut_splits(splits: Tensor, rows: int) -> Tensor:
    """What a rank with so many rows tells the others: (W,) int64 -> (W + 1,), cut to what there is, behind it 1 where that changed it."""
    cut = _less_than(splits.clamp(0, rows).cumsum(0).clamp(max=rows))
    return torch.cat((cut, (cut != splits).any().long()[None]))


def cut_table(counts: Tensor, most: int) -> Tensor:
    """Of counts (W, W) those that find a place."""
    return _less_than(counts.cumsum(0).clamp(max=most))


def _number(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """For rows in parts with these END offsets (W,): the part of each, W - 1 behind the last; its number inside; whether it is in one."""
    row = torch.arange(rows, device=ends.device)
    part = torch.searchsorted(ends, row, right=True)
    inside = part < ends.shape[0]
    part = part.clamp(max=ends.shape[0] - 1)
    return part, row - (ends - _less_than(ends))[part], inside


def outgoing(counts: Tensor, kept: Tensor, rank: int, rows: int) -> Way:
    """Where this rank's rows, sorted by destination, go."""
    part, number, inside = _number(counts[rank].cumsum(0), rows)
    first = (kept.cumsum(0) - kept)[rank]
    slots = torch.where(inside & (number < kept[rank][part]), first[part] + number, -1)
    return Way(part.int()[:, None], slots.int()[:, None])


def homeward(counts: Tensor, kept: Tensor, rank: int, rows: int) -> Way:
    """Where the places of this rank, `rows` of them, came from."""
    part, number, inside = _number(kept[:, rank].cumsum(0), rows)
    first = (counts.cumsum(1) - counts)[:, rank]
    return Way(part.int()[:, None], torch.where(inside, first[part] + number, -1).int()[:, None])
