"""Which rows travel where over symmetric memory, in every mode of the fused layer: index arithmetic on tensors, without ranks or exchanges.

Where a rank receives, every other rank has a region of its own, as large as the most that may come: so nobody counts before sending,
nothing overflows, and a row's place hangs on its token alone.  S is the largest T of any rank, K = min(C, L) how many choices of a token
one rank can hold:

    rank_dedup, all_ranks   S rows a region, row t is token t's
    all_to_all              S*K rows a region, row t*K + j is that of the j-th choice of token t on that rank

The same regions take the sums home.  Experts and scores of every token go to every rank; what of them is for it, it sees itself.  Rows
that did not come are pointed to by nothing.  The rows of a mode are read in the order of ep/routes.py, so that they stand in the same
places and every sum has the same order.

Two ranks of two experts; on rank 0 token 0 chose experts 0 and 3, token 1 experts 2 and 3, rank 1 has three tokens, so S = 3:

>>> experts, scores = torch.tensor([[0, 3], [2, 3]]), torch.full((2, 2), 0.5)
>>> sent_regions("rank_dedup", experts, 2, 2, 3).slots.tolist()
[[0, 0], [-1, 1]]
>>> sent = sent_regions("all_to_all", experts, 2, 2, 3)
>>> sent.slots.tolist(), sent.ranks.tolist(), sent.home.tolist()
([[0, 0], [2, 3]], [[0, 1], [1, 1]], [[0, 6], [8, 9]])

On rank 1, whose experts are 2 and 3, and if its own tokens chose nothing of its own, the choices would stand in places 4, 0 and 5, each
group padded to 4:

>>> from mxep.ep.routes import Placed
>>> table = torch.ops.mxep.pack_choices(experts, scores, 3)
>>> *placed, row_map, of_places = torch.ops.mxep.place_table(torch.cat((table, torch.full_like(table, -1))), 1, 2, 4, 8)
>>> placed = Placed(*placed)
>>> held_regions("rank_dedup", placed, row_map, 2).row_map.tolist()
[1, -1, -1, -1, 0, 1, -1, -1]
>>> held = held_regions("all_to_all", placed, row_map, 2)
>>> held.row_map.tolist(), held.slots.flatten().tolist()
([2, -1, -1, -1, 0, 3, -1, -1], [4, -1, 0, 5, -1, -1, -1, -1, -1, -1, -1, -1])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import mxep.operators  # noqa: F401
from mxep.ep.routes import Held, Placed, pick


class Sent(NamedTuple):
    """The rows of a wire at home.

    Attributes:
        slots: (T, W) or, in all_to_all, (T, C) int32, the row of this rank's region that a token goes to, -1 for none.
        ranks: (T, C) int32, on which rank, in all_to_all; None: column r is rank r's.
        home: like slots, the row of all regions in which the sum for it comes home, -1 where none comes.
    """

    slots: Tensor
    ranks: Tensor | None
    home: Tensor


def rows_of_region(mode: str, most: int, kept: int) -> int:
    """How many rows a region has; most: S, kept: K."""
    return most * kept if mode == "all_to_all" else most


def sent_regions(mode: str, experts: Tensor, num_local_experts: int, world: int, most: int) -> Sent:
    """The rows of a wire at home, of choices (T, C); most: S."""
    slots, home, ranks = torch.ops.mxep.sent_regions(experts, mode, num_local_experts, world, most)
    return Sent(slots, ranks if mode == "all_to_all" else None, home)


def home_lines(experts: Tensor, num_local_experts: int, most: int) -> Tensor:
    """Of all ranks' lines (R, ...), that in which something comes home for each choice (T, C); most: S.

    >>> home_lines(torch.tensor([[0, 3], [2, 3]]), 2, 3).tolist()
    [[0, 3], [4, 4]]
    """
    tokens = torch.arange(experts.shape[0], device=experts.device)[:, None]
    return torch.div(experts, num_local_experts, rounding_mode="floor") * most + tokens


def held_regions(mode: str, placed: Placed, row_map: Tensor, kept: int) -> Held:
    """The rows of a wire on the rank of the experts.

    Args:
        placed: the choices of all ranks' tokens (R, C), R = W*S.  row_map: (P,) int32, the line of R in each place, -1 in padding.
        kept: K.

    Returns:
        row_map (P,) int32; slots (R, C) or, in all_to_all, (R*K, 1) int32.
    """
    places, _, choices = placed
    if mode != "all_to_all":
        return Held(row_map, places)
    R, here = places.shape[0], places >= 0
    number = here.cumsum(1, dtype=torch.int32) - 1
    slots = torch.full((R, kept + 1), -1, dtype=torch.int32, device=places.device)  # the last one takes what stands nowhere
    slots = slots.scatter_(1, torch.where(here, number, kept).long(), places)[:, :kept]
    rows = torch.arange(R, device=places.device, dtype=torch.int32)[:, None] * kept + number
    return Held(pick(choices, rows.flatten()), slots.reshape(R * kept, 1))
