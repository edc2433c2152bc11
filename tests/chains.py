"""Dispatch, permute, grouped GEMM, unpermute and combine as one function of rows and weight: as blocks, its leaves, and what it must keep.

A chain is called as `chain(x, w, case, me, *args)` on rank `me`; x (T', D), w (L, N, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.truth import Case, assert_all_same, assert_same, make_case, saved_tensors, sent_bytes
from torch.utils.checkpoint import checkpoint

from mxep import Recipe
from mxep.ep import ExchangePlan, blocks
from mxep.grouped_mm.function import expert_mm
from mxep.shapes import record_bytes

D, N, L = 128, 96, 2
Chain = Callable[..., torch.Tensor]
Group = dist.ProcessGroup | None


def unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows


def by_plan(
    x: torch.Tensor, w: torch.Tensor, plan: ExchangePlan, recipe: Recipe, on_rows: Callable = unchanged, on_outputs: Callable = unchanged
) -> torch.Tensor:
    """The five blocks by a plan and a recipe, with operations on what dispatch and unpermute return."""
    permuted = blocks.permute(on_rows(blocks.dispatch(x, plan, recipe)), plan, recipe)
    y = blocks.unpermute(expert_mm(permuted.rows, w, permuted.offsets, recipe), permuted)
    return blocks.combine(on_outputs(y), plan, recipe)


def layered(x: torch.Tensor, w: torch.Tensor, case: Case, me: int, group: Group, recipe: Recipe, **changes: Callable) -> torch.Tensor:
    """`by_plan` as a chain."""
    return by_plan(x, w, ExchangePlan.from_counts(case.counts[me], group or dist.group.WORLD), recipe, **changes)


def weights(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(L, N, D) of one rank, a leaf."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(L, N, D, generator=generator) / D**0.5).to(dtype).requires_grad_()


def leaves(case: Case, me: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return case.inputs(D, dtype)[me].requires_grad_(), weights(me, dtype)


def run(chain: Chain, case: Case, me: int, dtype: torch.dtype, *args: Any, **options: Any) -> list[torch.Tensor]:
    """(out, dx, dw) for a random gradient."""
    x, w = leaves(case, me, dtype)
    out = chain(x, w, case, me, *args, **options)
    out.backward(case.inputs(N, dtype, seed=5)[me])
    return [out.detach(), x.grad, w.grad]


def check_wire(chain: Chain, me: int, world: int, *args: Any) -> None:
    """One packed exchange per direction: records of D there and rows of N back, in backward records of N there and rows of D back."""
    case = make_case("uneven", world, L)
    sent, received = sum(case.sent(me)), sum(case.received(me))
    with sent_bytes() as calls:
        out = chain(*leaves(case, me, torch.bfloat16), case, me, *args)
    assert calls == [sent * record_bytes(D), received * N * 2]
    with sent_bytes() as calls:
        out.sum().backward()  # an expanded gradient
    assert calls == [sent * record_bytes(N), received * D * 2]


def check_two_layers(chain: Chain, me: int, world: int, *args: Any) -> None:
    """Two layers and two backwards: no call changes what another one saved."""
    case, other = make_case("random", world, L, rows=40), make_case("uneven", world, L, rows=60)
    alone, (x, w) = run(chain, case, me, torch.float32, *args), leaves(case, me, torch.float32)
    out = chain(x, w, case, me, *args)
    second = chain(other.inputs(D, torch.float32)[me], w, other, me, *args)
    for _ in range(2):
        grads = torch.autograd.grad(out, (x, w), case.inputs(N, torch.float32, seed=5)[me], retain_graph=True)
        assert_all_same([out.detach(), *grads], alone, f"again {args}")
        torch.autograd.grad(second.sum(), w, retain_graph=True)


def check_checkpointing(chain: Chain, me: int, world: int, *args: Any) -> None:
    case = make_case("random", world, L, rows=40)

    def whole(x: torch.Tensor, w: torch.Tensor, *args: Any) -> torch.Tensor:
        return checkpoint(lambda x, w: chain(x, w, *args), x, w, use_reentrant=False)

    for dtype in (torch.bfloat16, torch.float32):
        assert_all_same(run(whole, case, me, dtype, *args), run(chain, case, me, dtype, *args), f"checkpoint {args}")


def check_inference(chain: Chain, me: int, world: int, *args: Any) -> None:
    case = make_case("uneven", world, L)
    x, w = leaves(case, me, torch.bfloat16)
    with torch.no_grad(), saved_tensors() as saved:
        out = chain(x, w, case, me, *args)
    assert saved == []
    assert_same(out, chain(x, w, case, me, *args).detach())


CHECKS = (check_two_layers, check_checkpointing, check_inference)
