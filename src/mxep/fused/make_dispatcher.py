"""Makes the token dispatcher of a fused layer, by the transport that its group has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxep.comm import transport_of
from mxep.fused import collective_dispatcher, symmetric_dispatcher
from mxep.fused.dispatcher import WHERE, DispatchSpec, TokenDispatcher

# The arguments of `make_dispatcher`, except for the last one: the dtype in which backward's top-k ids are saved, None without a backward.
Planner = Callable[[DispatchSpec, Tensor, Tensor, Tensor, str, str, torch.dtype | None], tuple[TokenDispatcher, Tensor]]
# By the transport's name.  The planner of "collective" needs nothing but `Transport.exchange`, so it serves every transport without a row.
PLANNERS: dict[str, Planner] = {"collective": collective_dispatcher.plan, "symmetric": symmetric_dispatcher.plan}


def ep_degree(group_name: str, num_experts: int, device: torch.device) -> int:
    """W, 1 without a group. Raises ValueError unless it divides the experts."""
    world = transport_of(group_name, device).world if group_name else 1
    if num_experts % world:
        raise ValueError(f"{WHERE}: {num_experts} experts on an EP group of {world}, want a multiple of it; change either")
    return world


def saved_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype for expert numbers and -1.

    >>> saved_dtype(128), saved_dtype(256)
    (torch.int8, torch.int16)
    """
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32) if num_experts - 1 <= torch.iinfo(dtype).max)


def make_dispatcher(
    spec: DispatchSpec, experts: Tensor, scores: Tensor, tokens: Tensor, scaling_mode: str, group_name: str, saves: bool = True
) -> tuple[TokenDispatcher, Tensor]:
    """Agree with the other ranks who sends which rows where, and dispatch the tokens meanwhile.

    Args:
        experts, scores: (T, C) int64 and float32, the router's top-k.
        tokens, scaling_mode: arguments of `RowExchange.to_experts` of the dispatcher's dispatch.
        group_name: process group of W ranks with E / W experts each; "", or a single rank's, is this rank alone.
        saves: whether `TokenDispatcher.for_backward` will be called.

    Returns:
        the dispatcher, and what `RowExchange.to_experts` returns.

    Raises:
        ValueError: E is not a multiple of W; on every rank: ranks whose `DispatchSpec.numbers` differ.
    """
    ep_degree(group_name, spec.experts, tokens.device)  # raises ValueError unless W divides E
    name = transport_of(group_name, tokens.device).name if group_name else "collective"
    plan = PLANNERS.get(name, collective_dispatcher.plan)
    return plan(spec, experts, scores, tokens, scaling_mode, group_name, saved_dtype(spec.experts) if saves else None)
