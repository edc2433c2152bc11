"""Which road a fused layer takes, and its planning: over the transport that the group has."""

from __future__ import annotations

import torch
from torch import Tensor

from mxep.comm import transport_of
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep import collective_road, symmetric_road
from mxep.ep.road import WHERE, Facts, Road


def ep_degree(group_name: str, num_experts: int, device: torch.device) -> int:
    """W, 1 without a group. Raises ValueError unless it divides the experts."""
    world = transport_of(group_name, device).world if group_name else 1
    if num_experts % world:
        raise ValueError(f"{WHERE}: {num_experts} experts on an EP group of {world}, want a multiple of it; change either")
    return world


def plan_road(
    facts: Facts, experts: Tensor, scores: Tensor, tokens: Tensor, scaling_mode: str, group_name: str, saves: bool = True
) -> tuple[Road, Tensor]:
    """Who sends which rows where, agreed with the other ranks; and the tokens at their experts, as they travel while that is planned.

    Args:
        experts, scores: (T, C) int64 and float32, what the router chose.
        tokens, scaling_mode: what `Wire.out` of the road's dispatch is to carry.
        group_name: process group of W ranks with E / W experts each; "", or a single rank's, is this rank alone.
        saves: whether `Road.for_backward` will be asked for.

    Returns:
        the road, and what `Wire.out` returns.

    Raises:
        ValueError: E is not a multiple of W; on every rank: ranks whose `Facts.numbers` differ.
    """
    world = ep_degree(group_name, facts.experts, tokens.device)
    transport = transport_of(group_name, tokens.device) if group_name else None
    if isinstance(transport, SymmetricTransport):
        transport.check_device(tokens)
        return symmetric_road.plan(facts, experts, scores, tokens, scaling_mode, transport, saves)
    road = collective_road.plan(facts, experts, scores, world, group_name if world > 1 else "")
    return road, road.dispatch.out(tokens, scaling_mode)
