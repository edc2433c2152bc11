"""Every differentiable public function as a function of leaves in float32, on one rank: without a group, or in one over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import mxep
from mxep.ep.token_sort import combine_topk, sort_tokens_by_expert
from mxep.grouped_mm.dense import DenseLora, dense_mm
from mxep.grouped_mm.function import expert_mm
from mxep.models.loss import linear_cross_entropy
from mxep.moe.experts import Experts
from mxep.parallel.linears import MXLinear
from mxep.recipe import resolve_recipe

ROWS, D, N, L = 64, 64, 96, 2
COUNTS = torch.tensor([32, 32])
OFFS = torch.tensor([32, 64], dtype=torch.int32)
CONFIG = mxep.MoEConfig(dim=D, hidden=32, num_experts=4, top_k=2, num_shared_experts=1, balance_loss=0.1)


class Case(NamedTuple):
    """Leaves, all of which the output depends on, and the function of them; rows come first.

    Second derivatives between the first `ours` leaves (None: all) pass through our functions; the others belong to plain torch.
    """

    leaves: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    ours: int | None = None


def leaf(*shape: int) -> Tensor:
    return (torch.randn(shape) / 4).requires_grad_()


def _of_module(module: nn.Module, *x: int) -> Case:
    leaves = dict(module.named_parameters())
    return Case((leaf(*x), *leaves.values()), lambda x, *_: module(x))


def _adapted(recipe: str) -> Case:
    w, leaves = torch.randn(N, D), (leaf(ROWS, D), leaf(8, D), leaf(N, 8))
    return Case(leaves, lambda x, a, b: dense_mm(x, w, None, resolve_recipe(recipe), lora=DenseLora(a, b, 2.0)))


def _permuted(x: Tensor, use_mxfp8: bool) -> Tensor:
    rows = mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, [ROWS], [ROWS], "")
    return mxep.permute_mxfp8_fwd_hp_bwd(rows, COUNTS, 1, L, use_mxfp8=use_mxfp8)[1]


def _unpermuted(x: Tensor) -> Tensor:
    shape, rows, row_map, _, _ = mxep.permute_and_pad(x, COUNTS, 1, L, 32)
    return mxep.unpermute_hp_fwd_mxfp8_bwd(rows, row_map, shape)


def _blocks(x: Tensor, w: Tensor) -> Tensor:
    rows = mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, [ROWS], [ROWS], "")
    shape, rows, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(rows, COUNTS, 1, L)
    rows = mxep.to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=torch.float32, wgrad_with_hp=True)
    return mxep.a2a_combine_hp_fwd_mxfp8_bwd(mxep.unpermute_hp_fwd_mxfp8_bwd(rows, row_map, shape), [ROWS], [ROWS], "")


def _grouped_mm(**options: object) -> Case:
    def run(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return mxep.to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), OFFS, bias, out_dtype=torch.float32, **options)

    return Case((leaf(ROWS, D), leaf(L, N, D), leaf(L, N)), run)


def _fused_moe(group: str = "") -> Case:
    def run(x: Tensor, router: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return mxep.fused_moe(x, router, w1, b1, w2, b2, 2, 4, group=group)

    return Case((leaf(ROWS, D), leaf(4, D), leaf(4, 64, D), leaf(4, 64), leaf(4, D, 32), leaf(4, D)), run)


def _fused_experts() -> Case:
    experts = torch.rand(ROWS, 4).topk(2).indices

    def run(x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return mxep.fused_experts(x, experts, scores, w1, None, w2, None, num_experts=4, group="")

    return Case((leaf(ROWS, D), leaf(ROWS, 2), leaf(4, 64, D), leaf(4, D, 32)), run)


def _experts(recipe: str, fused: bool, bias: bool) -> Case:
    module = Experts(D, 32, L, recipe, bias)
    module.fused = fused
    case = _of_module(module, ROWS, D)
    return Case(case.leaves, lambda x, *_: module(x, COUNTS))


def _sums(weighted: bool) -> Case:
    chosen = torch.rand(32, 4).topk(2).indices.sort(1).values
    order = sort_tokens_by_expert(torch.zeros(32, D), chosen, 4).order
    weights = (leaf(32, 2),) if weighted else ()
    return Case((leaf(ROWS, D), *weights), lambda rows, *w: combine_topk(rows, order, 2, *w))


def _layer(kind: type[mxep.MoE], recipe: str) -> Case:
    moe = kind(CONFIG, recipe)
    shared = [parameter for name, parameter in moe.named_parameters() if name.startswith("shared")]
    routed = [parameter for name, parameter in moe.named_parameters() if not name.startswith("shared")]
    return Case((leaf(32, D), *routed, *shared), lambda x, *_: moe(x) + moe.router_loss, 1 + len(routed))


def _ep_grouped_mm(group: str = "") -> Case:
    return Case((leaf(ROWS, D), leaf(L, N, D)), lambda x, w: mxep.ep_grouped_mm(x, w, [ROWS], [ROWS], COUNTS, group))


def _on_device(group: str) -> Case:
    splits = torch.tensor([ROWS])
    return Case((leaf(ROWS, D),), lambda x: mxep.mxfp8_on_device_all_to_all_v(x, splits, ROWS, group)[0])


def _converted() -> Case:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(L, N, D) / 4)

        def forward(self, rows: Tensor) -> Tensor:
            return nn.functional.grouped_mm(rows.bfloat16(), self.w.bfloat16().transpose(-2, -1), offs=OFFS).float()

    model = nn.Sequential(Own())
    mxep.convert_experts(model, "0", "mxfp8_wgrad_with_hp")
    return _of_module(model, ROWS, D)


CASES: dict[str, Callable[[], Case]] = {
    "dispatch": lambda: Case((leaf(ROWS, D),), lambda x: mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(x, [ROWS], [ROWS], "")),
    "permute": lambda: Case((leaf(ROWS, D),), lambda x: _permuted(x, True)),
    "permute, plain rows": lambda: Case((leaf(ROWS, D),), lambda x: _permuted(x, False)),
    "permute_and_pad": lambda: Case((leaf(ROWS, D),), lambda x: mxep.permute_and_pad(x, COUNTS, 1, L, 32)[1]),
    "unpermute": lambda: Case((leaf(ROWS, D),), _unpermuted),
    "combine": lambda: Case((leaf(ROWS, D),), lambda x: mxep.a2a_combine_hp_fwd_mxfp8_bwd(x, [ROWS], [ROWS], "")),
    "combine, hp": lambda: Case((leaf(ROWS, D),), lambda x: mxep.a2a_combine_hp_fwd_mxfp8_bwd(x, [ROWS], [ROWS], "", mxfp8_bwd=False)),
    "five blocks": lambda: Case((leaf(ROWS, D), leaf(L, N, D)), _blocks),
    "a2a dequant": lambda: Case((leaf(ROWS, D),), lambda x: mxep.to_mxfp8_a2a_dequant(x, [ROWS], [ROWS], "")),
    "grouped_mm": lambda: _grouped_mm(),
    "grouped_mm, wgrad hp": lambda: _grouped_mm(wgrad_with_hp=True),
    "expert_mm, hp": lambda: Case((leaf(ROWS, D), leaf(L, N, D)), lambda a, w: expert_mm(a, w, OFFS, resolve_recipe("hp"))),
    "ep_grouped_mm": _ep_grouped_mm,
    "expert_mm, hp, with a bias": lambda: Case(
        (leaf(ROWS, D), leaf(L, N, D), leaf(L, N)), lambda a, w, bias: expert_mm(a, w, OFFS, resolve_recipe("hp"), bias=bias)
    ),
    "sort_tokens_by_expert": lambda: Case((leaf(32, D),), lambda x: sort_tokens_by_expert(x, torch.tensor([[0, 2]] * 32), 4).rows),
    "sums": lambda: _sums(False),
    "weighted sums": lambda: _sums(True),
    "experts, fused": lambda: _experts("mxfp8_wgrad_with_hp", True, True),
    "experts, fused, mx": lambda: _experts("mxfp8_wgrad_with_mx", True, False),
    "experts, one by one": lambda: _experts("mxfp8", False, True),
    "fused_moe": _fused_moe,
    "fused_experts": _fused_experts,
    "MoE": lambda: _layer(mxep.MoE, "mxfp8_wgrad_with_hp"),
    "MoE, hp": lambda: _layer(mxep.MoE, "hp"),
    "FusedMoE": lambda: _layer(mxep.FusedMoE, "mxfp8_wgrad_with_mx"),
    "MXLinear": lambda: _of_module(MXLinear(nn.Linear(D, N), resolve_recipe(None)), ROWS, D),
    "MXLinear with an adapter": lambda: _adapted("mxfp8_gemm"),
    "Linear with an adapter": lambda: _adapted("hp"),
    "converted experts": _converted,
    "loss": lambda: Case((leaf(ROWS, D), leaf(50, D)), lambda x, w: linear_cross_entropy(x, w, torch.arange(ROWS) % 50)),
}

# Functions of a group's name that take another path over symmetric memory.
SYMMETRIC: dict[str, Callable[[str], Case]] = {
    "ep_grouped_mm": _ep_grouped_mm,
    "mxfp8_on_device_all_to_all_v": _on_device,
    "fused_moe": _fused_moe,
}


def values(out: Tensor) -> Tensor:
    """A plain tensor; differentiable."""
    return out.dequantize() if isinstance(out, mxep.MXTensor) else out
