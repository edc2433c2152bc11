"""Which rows travel for which token, in every mode of the fused layer: index arithmetic on tensors, without ranks or exchanges.

An exchange joins the home of a token with the ranks of its experts.  What a row of it is depends on the mode:

    rank_dedup       one row for each (token, rank) that a choice of the token leads to
    all_to_all       one row for each choice
    all_ranks        one row for each token and every rank, chosen there or not (all-gather one way, reduce-scatter the other)

Rows are ordered by rank, inside it by token, inside it by choice.  Dispatch and combine may take different modes: the experts' side
knows from one small table, the metadata, which choices arrived, and derives the rows of either exchange from it.  The experts read rows in
places: expert by expert, every expert's group padded.

Two ranks of two experts; token 0 chose experts 0 and 3, token 1 experts 2 and 3:

>>> experts = torch.tensor([[0, 3], [2, 3]])
>>> count_rows(experts, 2, 2).tolist()
[[1, 1, 2], [2, 3, 2]]
>>> sent = send_index("rank_dedup", experts, 2, 2, 3)
>>> sent.tokens.tolist(), sent.slots.tolist()
([0, 0, 1], [[0, 1], [-1, 2]])
>>> send_index("all_to_all", experts, 2, 2, 4).slots.tolist()
[[0, 1], [2, 3]]

On rank 1, whose experts are 2 and 3, the first row goes to expert 3, the second to both; groups padded to 4:

>>> placed = index_expert_rows(torch.tensor([[-1, 1], [0, 1]]), 2, 4, 8)
>>> placed.places.tolist(), placed.offs.tolist()
([[-1, 4], [0, 5]], [4, 8])
>>> recv_index("rank_dedup", placed, torch.tensor([0, 1]), [[0, 0, 0], [2, 3, 2]]).row_map.tolist()
[1, -1, -1, -1, 0, 1, -1, -1]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxep.ops.routing.index_reference import MODES as MODES


class CollectiveSendIndex(NamedTuple):
    """The rows of an exchange at home.

    Attributes:
        tokens: (S,) int32, the token of each row.
        slots: (T, W) or, in all_to_all, (T, C) int32, the rows of each token, -1 where there is none.
    """

    tokens: Tensor
    slots: Tensor


class RecvIndex(NamedTuple):
    """The rows of an exchange on the rank of the experts.

    Attributes:
        row_map: (P,) int32, the row that stands in each place, -1 in padding.
        slots: (R, C) or, in all_to_all, (R, 1) int32, the places of each row, -1 where there is none.
    """

    row_map: Tensor
    slots: Tensor


class ExpertRowIndex(NamedTuple):
    """Where the choices (R, C) of some rows stand among the experts' rows.

    Attributes:
        places: (R, C) int32, -1 for a choice that is not here.
        offs: (L,) int32, END places of the experts.
        choices: (P,) int32, the choice in each place as row * C + column, -1 in padding.
    """

    places: Tensor
    offs: Tensor
    choices: Tensor


def put(index: Tensor, values: Tensor, size: int) -> Tensor:
    """(size,) int32 with values[i] at index[i]; -1 where nothing was put, index -1 puts nothing. No index but -1 twice."""
    out = torch.full((size + 1,), -1, dtype=torch.int32, device=index.device)
    return out.scatter_(0, torch.where(index < 0, size, index).long(), values.int())[:size]


def _numbered(flags: Tensor) -> Tensor:
    """Numbers the flags that are set, 0, 1, ... in their order; -1 for the others. (N,) bool -> (N,) int32."""
    return torch.where(flags, flags.cumsum(0) - 1, -1).int()


def pick(index: Tensor, values: Tensor) -> Tensor:
    """values[index], -1 where index is -1; index of any shape, values (N,) integers, which may be empty."""
    return torch.cat((values, values.new_full((1,), -1)))[index.long()]


def goes_to(experts: Tensor, num_local_experts: int, world: int) -> Tensor:
    """(T, W) bool: whether a token has a choice on a rank."""
    none = torch.zeros(experts.shape[0], world, dtype=torch.bool, device=experts.device)
    return none.scatter_(1, experts // num_local_experts, True)


def count_rows(experts: Tensor, num_local_experts: int, world: int) -> Tensor:
    """How many rows go to each rank, in each mode.

    Args:
        experts: (T, C) int64, the choices of each token.  num_local_experts: L.  world: W.

    Returns:
        (W, 3) int64: rows for rank_dedup, all_to_all and all_ranks.
    """
    ranks = torch.div(experts, num_local_experts, rounding_mode="floor").flatten()
    choices = torch.zeros(world, dtype=torch.int64, device=experts.device).scatter_add_(0, ranks, torch.ones_like(ranks))
    return torch.stack((goes_to(experts, num_local_experts, world).sum(0), choices, torch.full_like(choices, experts.shape[0])), 1)


def send_index(mode: str, experts: Tensor, num_local_experts: int, world: int, num_rows: int) -> CollectiveSendIndex:
    """The rows of an exchange at home; num_rows is S, the sum of the mode's column of `count_rows`."""
    T, device = experts.shape[0], experts.device
    if mode == "all_ranks":
        tokens = torch.arange(T, device=device, dtype=torch.int32)
        return CollectiveSendIndex(
            tokens.repeat(world), torch.arange(world * T, device=device, dtype=torch.int32).view(world, T).t().contiguous()
        )
    ranks = torch.div(experts, num_local_experts, rounding_mode="floor")
    if mode == "rank_dedup":
        ranks = torch.where(goes_to(experts, num_local_experts, world), torch.arange(world, device=device), -1)  # (T, W)
    rows = index_expert_rows(ranks, world, 0, ranks.numel())  # ranks in the place of experts, without padding
    return CollectiveSendIndex(torch.div(rows.choices, ranks.shape[1], rounding_mode="floor")[:num_rows], rows.places)


def pack_metadata(experts: Tensor, scores: Tensor, sent: CollectiveSendIndex, counts: Tensor, num_local_experts: int) -> Tensor:
    """What goes beside the rows of rank_dedup, whatever the modes of the wires.

    Args:
        experts, scores: (T, C) int64 and float32.  sent: of mode rank_dedup.  counts: (W,) its rows to each rank, on the device.

    Returns:
        (S, 2C + 1) int32: experts on the receiving rank or -1, the bits of the scores, the token.
    """
    tokens = sent.tokens.long()
    rank = torch.searchsorted(counts.cumsum(0), torch.arange(tokens.shape[0], device=tokens.device), right=True)  # (S,)
    local = experts[tokens] - (rank * num_local_experts)[:, None]
    local = torch.where((local >= 0) & (local < num_local_experts), local, -1)
    return torch.cat((local.int(), scores[tokens].contiguous().view(torch.int32), sent.tokens[:, None]), 1)


def unpack_metadata(metadata: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R, 2C + 1) int32 -> experts (R, C) int32, scores (R, C) float32, tokens (R,) int32."""
    choices = metadata.shape[1] // 2
    return metadata[:, :choices], metadata[:, choices:-1].contiguous().view(torch.float32), metadata[:, -1]


def index_expert_rows(experts: Tensor, num_local_experts: int, alignment: int, num_places: int) -> ExpertRowIndex:
    """Where every choice (R, C) stands among the experts' rows: `mxep.reference.index_expert_rows`."""
    return ExpertRowIndex(*torch.ops.mxep.index_expert_rows(experts, num_local_experts, alignment, num_places))


def scores_of_places(choices: Tensor, scores: Tensor) -> Tensor:
    """(P,) float32, the score of each place, 0 in padding; choices (P,) of `ExpertRowIndex`, scores (R, C)."""
    return torch.ops.mxep.gather_or_zero(choices, scores.flatten())


def scores_of_choices(places: Tensor, of_places: Tensor) -> Tensor:
    """Values of places (P,) -> of the choices that stand there (R, C), 0 for one that stands nowhere."""
    return torch.ops.mxep.gather_or_zero(places, of_places)


def recv_index(mode: str, placed: ExpertRowIndex, tokens: Tensor, received: list[list[int]]) -> RecvIndex:
    """The rows of an exchange on the rank of the experts.

    Args:
        placed: of the choices (R, C) in rows of rank_dedup.  tokens: (R,) int32, what their tokens are called at home.
        received: `count_rows` of every rank for this one, rows of this rank's experts: [rank][mode], host ints.
    """
    places, _, choices = placed
    if mode == "all_to_all":
        number = _numbered(places.flatten() >= 0)
        return RecvIndex(pick(choices, number), put(number, places.flatten(), sum(row[1] for row in received))[:, None])
    row_map = torch.div(choices, places.shape[1], rounding_mode="floor")  # (P,), -1 stays -1
    if mode == "rank_dedup":
        return RecvIndex(row_map, places)
    here, whole = (torch.tensor([row[column] for row in received], device="cpu") for column in (0, 2))  # whatever the default is
    starts = (whole.cumsum(0) - whole).repeat_interleave(here).to(places.device, torch.int32, non_blocking=True)
    rows = starts + tokens
    slots = torch.full((int(whole.sum()), places.shape[1]), -1, dtype=torch.int32, device=places.device)
    return RecvIndex(pick(row_map, rows), slots.index_copy_(0, rows.long(), places))
