"""Where every choice stands among the experts' rows."""

from __future__ import annotations

import torch

from mxep.reference.plan import pick_values


def place_choices(
    experts: torch.Tensor, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places in the order of the experts: expert by expert, inside it by row, inside it by choice, every group padded.

    Args:
        experts: (R, C) int32 or int64, from 0 to L - 1; anything else is a choice that is not here.
        num_local_experts: L.
        alignment: rows; every group is padded as `group_index` does, so an empty expert owns `alignment` places.  0: no padding.
        num_places: P, at least the last end.

    Returns:
        places (R, C) int32, -1 for a choice that is not here; END offsets (L,) int32; and the way back, (P,) int32: the choice in each
        place as row * C + column, -1 in padding.

    Raises:
        ValueError: experts that are no matrix of integers, or sizes that are none.

    Two rows, the first one's second choice and both of the second one's are here:

    >>> places, ends, choices = place_choices(torch.tensor([[-1, 1], [0, 1]]), 2, 4, 9)
    >>> places.tolist(), ends.tolist(), choices.tolist()
    ([[-1, 4], [0, 5]], [4, 8], [2, -1, -1, -1, 1, 3, -1, -1, -1])
    """
    check_place_choices(experts, num_local_experts, alignment, num_places)
    flat, device = experts.flatten().long(), experts.device
    here = (flat >= 0) & (flat < num_local_experts)
    key = torch.where(here, flat, num_local_experts)
    sizes = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    padded = (sizes[:-1].clamp(min=alignment) + alignment - 1) // alignment * alignment if alignment else sizes[:-1]
    ends = padded.cumsum(0)
    order = key.argsort(stable=True)
    # A choice's place: where its expert's group starts, plus its number among the choices of that expert.
    shift = torch.cat((ends - padded, ends.new_zeros(1))) - (sizes.cumsum(0) - sizes)
    place = torch.empty_like(flat).scatter_(0, order, torch.arange(flat.shape[0], device=device) + shift[key[order]])
    places = torch.where(here, place, -1).int()
    choices = torch.full((num_places + 1,), -1, dtype=torch.int32, device=device)  # the last one takes what is not here
    choices.scatter_(0, torch.where(here, place, num_places), torch.arange(flat.shape[0], dtype=torch.int32, device=device))
    choices[num_places] = -1
    return places.view(experts.shape), ends.int(), choices[:num_places].clone()


def check_place_choices(experts: torch.Tensor, num_local_experts: int, alignment: int, num_places: int) -> None:
    """Raise ValueError unless these are `place_choices`' arguments."""
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"place_choices: experts are {tuple(experts.shape)} {experts.dtype}, want (R, C) int32 or int64")
    if num_local_experts < 1 or alignment < 0 or num_places < num_local_experts * alignment or max(experts.numel(), num_places) >= 2**31:
        raise ValueError(
            f"place_choices: {experts.numel()} choices of {num_local_experts} experts in {num_places} places, alignment {alignment}; want"
            " at least one expert, `alignment` places for each, and numbers below 2^31"
        )


def place_table(
    table: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`place_choices` of the choices in all ranks' tables (`pack_choices`) on the rank of the experts, and what stands in each place.

    Args:
        table: (R, 2C) int32, experts and the bits of their scores.  rank: whose experts, from rank * L on, are here.
        num_local_experts, alignment, num_places: as in `place_choices`.

    Returns:
        places (R, C), END offsets (L,), choices (P,) as of `place_choices`; the row of each place (P,) int32, -1 in padding; its score (P,)
        float32, 0 in padding.

    Raises:
        ValueError: a table that is none, or what `place_choices` raises.
    """
    check_place_table(table, num_local_experts, alignment, num_places)
    columns = table.shape[1] // 2
    local = table[:, :columns] - rank * num_local_experts
    places, ends, choices = place_choices(local, num_local_experts, alignment, num_places)
    scores = pick_values(choices, table[:, columns:].contiguous().view(torch.float32).flatten())
    return places, ends, choices, torch.div(choices, max(columns, 1), rounding_mode="floor"), scores


def check_place_table(table: torch.Tensor, num_local_experts: int, alignment: int, num_places: int) -> None:
    """Raise ValueError unless these are `place_table`'s arguments."""
    if table.dim() != 2 or table.dtype != torch.int32 or table.shape[1] % 2:
        raise ValueError(f"place_table: the table is {tuple(table.shape)} {table.dtype}, want (R, 2C) int32")
    check_place_choices(table[:, : table.shape[1] // 2], num_local_experts, alignment, num_places)
