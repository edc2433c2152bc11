"""Fused layers of different widths, dtypes and top-k that share the symmetric memory of one group or several: the bits of each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tests.by_hand import ByHand
from tests.fused.test_fused_ranks import layer
from tests.fused.test_fused_symmetric import spread
from tests.moe_truth import D, draw
from tests.truth import assert_same
from torch import Tensor

from mxep.comm import transport_of
from mxep.fused import autograd
from mxep.moe import FusedMoE

LAYERS: tuple[tuple[str, torch.dtype, dict[str, int]], ...] = (
    ("mxfp8_wgrad_with_hp", torch.bfloat16, {}),
    ("hp", torch.float32, {"dim": 96, "hidden": 32, "num_experts": 4, "top_k": 1}),
    ("mxfp8_wgrad_with_mx", torch.bfloat16, {"dim": 128, "hidden": 64, "top_k": 4}),
    ("hp", torch.bfloat16, {"top_k": 2}),
)
Gradients = Callable[[Tensor], dict[str, Tensor]]  # of the output's gradient
Forward = Callable[[FusedMoE, Tensor], tuple[Tensor, Gradients]]


class Member(NamedTuple):
    """A group, and this rank's number in it."""

    name: str
    me: int
    world: int


class Use(NamedTuple):
    """A layer, its tokens and the gradient of its output."""

    moe: FusedMoE
    x: Tensor
    dy: Tensor
    what: str


def by_autograd(moe: FusedMoE, x: Tensor) -> tuple[Tensor, Gradients]:
    leaf = x.clone().requires_grad_()
    y = moe(leaf)

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        names = ["dx", *(name for name, _ in moe.named_parameters())]
        return dict(zip(names, torch.autograd.grad(y, [leaf, *moe.parameters()], dy), strict=True))

    return y.detach(), gradients


FUNCTION_BY_HAND = ByHand(autograd._FusedMoE)


def by_hand(moe: FusedMoE, x: Tensor) -> tuple[Tensor, Gradients]:
    """Without autograd's engine, where `FUNCTION_BY_HAND` is in `mxep.fused.autograd` instead of the layer's function."""
    y = moe(x.detach().requires_grad_())
    backward = FUNCTION_BY_HAND.backward_of_last()

    def gradients(dy: Tensor) -> dict[str, Tensor]:
        names = ("dx", "router", "w1", "w2", "w3", "b1", "b2", "b3")
        return {name: grad for name, grad in zip(names, backward(dy, None, None, None), strict=False) if grad is not None}

    assert isinstance(y, Tensor)
    return y, gradients


def uses(groups: Sequence[Member]) -> list[Use]:
    """Every layer over every group, the groups in turn; every rank has tokens of its own."""
    made = []
    for at, (recipe, dtype, changes) in enumerate(LAYERS):
        for number, (name, me, world) in enumerate(groups):
            generator = torch.Generator().manual_seed(100 * at + 10 * number + me)
            moe = spread(layer(recipe, dtype, "random", **changes), me, world, name)
            x, dy = (draw(generator, 20 + 9 * me + 5 * at, changes.get("dim", D)).to(dtype) for _ in range(2))
            made.append(Use(moe, x, dy, f"{recipe} {dtype} {changes} over {name}"))
    return made


def check(groups: Sequence[Member], forward: Forward = by_autograd) -> None:
    """All forwards, then all backwards in the same order, twice; then in reverse. Saved tensors in symmetric memory are not overwritten."""
    all_uses, device = uses(groups), torch.get_default_device()
    alone = []
    for use in all_uses:
        y, gradients = forward(use.moe, use.x)
        alone.append({"y": y, **gradients(use.dy)})
    sizes = []
    for turn in (1, 1, -1):
        pending, got = [forward(use.moe, use.x) for use in all_uses], dict[int, dict[str, Tensor]]()
        for at in range(len(all_uses))[::turn]:
            y, gradients = pending[at]
            got[at] = {"y": y, **gradients(all_uses[at].dy)}
        for at, found in got.items():
            assert found.keys() == alone[at].keys()
            for key, value in found.items():
                assert_same(value, alone[at][key], f"{all_uses[at].what}, turn {turn}: {key}")
        sizes.append([transport_of(group.name, device).nbytes() for group in groups])
        pending.clear()
    assert sizes[0] == sizes[1], "the second turn needs no more memory than the first one"
