"""The plan of an exchange: how many rows every rank sends where, known to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mxep.checks import check_type, row_counts
from mxep.comm import exchange_counts


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One dispatch and the combine that undoes it; equal to itself alone.

    Attributes:
        group_name: process group, "" for W = 1, where all rows stay on the rank.
        ep_degree: W.
        num_local_experts: L.
        input_splits: rows that this rank sends to each rank, T' in all.
        output_splits: rows that it receives from each, R in all.
        num_tokens_per_expert_received: (W*L,) int64 on the device, rank-major.

    Examples:
        >>> plan = mxep.ExchangePlan.from_counts(torch.tensor([2, 4]), None)  # one rank, two experts
        >>> plan.input_splits, plan.num_tokens_per_expert_received.tolist()
        ([6], [2, 4])
    """

    group_name: str
    ep_degree: int
    num_local_experts: int
    input_splits: list[int]
    output_splits: list[int]
    num_tokens_per_expert_received: torch.Tensor

    @staticmethod
    def from_counts(counts: torch.Tensor, group: ProcessGroup | None) -> ExchangePlan:
        """Exchange the counts and read the splits on the host: one small all-to-all and one host sync.

        Args:
            counts: (E,) int32 or int64, rows of this rank for every expert.
            group: EP group.  None is this rank alone, not torch's default group; it keeps everything here, as a group of one rank does.

        Raises:
            ValueError: counts of another shape or dtype, in checking mode also below 0; E is not divisible by the group's size.
        """
        if not isinstance(counts, torch.Tensor) or counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(counts.shape)} {counts.dtype}" if isinstance(counts, torch.Tensor) else type(counts).__name__
            raise ValueError(f"ExchangePlan: counts is {got}, want (E,) int32 or int64, rows per expert")
        row_counts("ExchangePlan", counts)
        if group is not None:
            check_type("ExchangePlan", ProcessGroup, "group", group, "mesh.get_group() or dist.group.WORLD is one, None this rank alone")
        counts = counts.long()
        if group is None or dist.get_world_size(group) == 1:
            rows = [int(counts.sum())]  # host sync: the splits are host lists
            return ExchangePlan("", 1, counts.shape[0], rows, rows.copy(), counts.clone())
        world = dist.get_world_size(group)
        if counts.shape[0] % world:
            raise ValueError(f"ExchangePlan: {counts.shape[0]} experts on an EP group of {world}, want a multiple of it; change either")
        received = exchange_counts(counts, group)
        splits = torch.stack([counts.view(world, -1).sum(1), received.view(world, -1).sum(1)]).tolist()  # host sync: host lists
        return ExchangePlan(group.group_name, world, counts.shape[0] // world, splits[0], splits[1], received)
