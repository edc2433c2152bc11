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
>>> table = pack_table(experts, scores, 3)
>>> unpack_table(table, 1, 2)[0].tolist()  # on rank 1, whose experts are 2 and 3
[[-1, 1], [0, 1], [-1, -1]]

If rank 1's own tokens chose nothing of its own, the choices above would stand in places 4, 0 and 5, each group padded to 4:

>>> from mxep.ep.routes import place_choices
>>> local = torch.tensor([[-1, 1], [0, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]])
>>> placed = place_choices(local, 2, 4, 8)
>>> held_regions("rank_dedup", placed, 2).row_map.tolist()
[1, -1, -1, -1, 0, 1, -1, -1]
>>> held = held_regions("all_to_all", placed, 2)
>>> held.row_map.tolist(), held.slots.flatten().tolist()
([2, -1, -1, -1, 0, 3, -1, -1], [4, -1, 0, 5, -1, -1, -1, -1, -1, -1, -1, -1])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.ep.routes import Held, Placed, goes_to, pick


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


def pack_table(experts: Tensor, scores: Tensor, most: int) -> Tensor:
    """Choices (T, C) int64 and their scores float32 -> (S, 2C) int32: experts, bits of the scores; -1 behind the last token."""
    table = torch.cat((experts.int(), scores.contiguous().view(torch.int32)), 1)
    return F.pad(table, (0, 0, 0, most - table.shape[0]), value=-1)


def unpack_table(table: Tensor, rank: int, num_local_experts: int) -> tuple[Tensor, Tensor]:
    """All ranks' tables (W*S, 2C) on the rank of the experts -> its experts (R, C), 0 to L - 1 or -1, and scores (R, C) float32."""
    choices = table.shape[1] // 2
    local = table[:, :choices] - rank * num_local_experts
    local = torch.where((local >= 0) & (local < num_local_experts), local, -1)
    return local, table[:, choices:].contiguous().view(torch.float32)


def sent_regions(mode: str, experts: Tensor, num_local_experts: int, world: int, most: int) -> Sent:
    """The rows of a wire at home, of choices (T, C); most: S."""
    (T, C), device = experts.shape, experts.device
    tokens = torch.arange(T, device=device, dtype=torch.int32)[:, None]
    if mode == "all_to_all":
        kept = min(C, num_local_experts)
        ranks = torch.div(experts, num_local_experts, rounding_mode="floor").int()
        before = torch.ones(C, C, dtype=torch.bool, device=device).tril(-1)
        number = ((ranks[:, :, None] == ranks[:, None, :]) & before).sum(-1)  # of a choice among those of its token on its rank
        slots = (tokens * kept + number).int()
        return Sent(slots, ranks, ranks * (most * kept) + slots)
    chosen = goes_to(experts, num_local_experts, world)
    regions = torch.arange(world, device=device, dtype=torch.int32) * most
    slots = tokens.expand(T, world).contiguous() if mode == "all_ranks" else torch.where(chosen, tokens, -1)
    return Sent(slots, None, torch.where(chosen, regions + tokens, -1))


def held_regions(mode: str, placed: Placed, kept: int) -> Held:
    """The rows of a wire on the rank of the experts.

    Args:
        placed: the choices of all ranks' tokens (R, C), R = W*S.  kept: K.

    Returns:
        row_map (P,) int32; slots (R, C) or, in all_to_all, (R*K, 1) int32.
    """
    places, _, choices = placed
    R, C = places.shape
    row_map = torch.div(choices, C, rounding_mode="floor")  # (P,), -1 stays -1
    if mode != "all_to_all":
        return Held(row_map, places)
    here = places >= 0
    number = here.cumsum(1, dtype=torch.int32) - 1
    slots = torch.full((R, kept + 1), -1, dtype=torch.int32, device=places.device)  # the last one takes what stands nowhere
    slots = slots.scatter_(1, torch.where(here, number, kept).long(), places)[:, :kept]
    rows = torch.arange(R, device=places.device, dtype=torch.int32)[:, None] * kept + number
    return Held(pick(choices, rows.flatten()), slots.reshape(R * kept, 1))
