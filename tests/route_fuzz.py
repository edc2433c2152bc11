"""Random routings through permute and unpermute, `fused_experts` and `MoE`, against plain float64: `python -m tests.route_fuzz 5000`.

Few to no tokens, starved and crowded experts, all tokens to one set of experts; where the layer is one rank alone also choices that are
none (-1) and experts that a token names twice, which a group refuses.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from tests.moe_truth import error, make, truth, walk
from torch import Tensor

import mxep

D, H = 64, 32
KINDS = ("even", "skewed", "starved", "one set", "balanced")
NEAR = {"hp": 2e-5, "mxfp8_wgrad_with_hp": 0.15, "mxfp8_wgrad_with_mx": 0.2}  # relative to float64, in the Frobenius norm


def near(recipe: str, tokens: int) -> float:
    """With few tokens the sum over choices, or another product, may nearly cancel, but not MXFP8's rounding error."""
    return NEAR[recipe] * (1.0 if recipe == "hp" else 1.0 + 4.0 / max(tokens, 1) ** 0.5)


class Routing(NamedTuple):
    """Tokens (T, D), their choices (T, C) of E experts, distinct and in rising order, and scores (T, C)."""

    tokens: Tensor
    experts: Tensor
    scores: Tensor
    num_experts: int


def draw(seed: int) -> tuple[torch.Generator, str, Routing]:
    """The generator behind it, the kind of routing, and the routing."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    kind = KINDS[seed % len(KINDS)]
    num_experts, num_tokens = number(1, 9), (0, 1, 2, 31, 33)[number(0, 4)] if number(0, 2) == 0 else number(0, 48)
    choices = number(1, min(num_experts, 4))
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    if kind == "skewed":
        logits -= 2.0 * torch.arange(num_experts)
    elif kind == "starved":
        logits[:, : num_experts - choices] -= 100.0 * (torch.rand(num_experts - choices, generator=generator) < 0.7)
    elif kind == "one set":
        logits += 100.0 * torch.randn(num_experts, generator=generator)
    elif kind == "balanced":
        logits = -((torch.arange(num_experts) - choices * torch.arange(num_tokens)[:, None]) % num_experts).float()
    experts = logits.topk(choices).indices.sort(1).values
    scores = torch.rand(num_tokens, choices, generator=generator)
    return generator, kind, Routing(torch.randn(num_tokens, D, generator=generator), experts, scores, num_experts)


def check_permute(routing: Routing, generator: torch.Generator) -> None:
    """Every row is in its expert's group once, in the order in which it came, and comes back; so do gradients."""
    divisors = [world for world in (1, 2, 3, 4) if routing.num_experts % world == 0]
    world = divisors[int(torch.randint(len(divisors), (), generator=generator))]
    local = routing.num_experts // world
    counts = torch.randint(0, 12, (world * local,), generator=generator) * (torch.rand(world * local, generator=generator) < 0.6)
    total, alignment = int(counts.sum()), (1, 32, 128)[int(torch.randint(3, (), generator=generator))]
    rows = torch.randn(total, D, generator=generator).requires_grad_()
    shape, padded, row_map, sizes, ends = mxep.permute_and_pad(rows, counts, world, local, alignment)
    owners = torch.arange(local).repeat(world).repeat_interleave(counts)  # the expert of each row as it came
    for expert in range(local):
        start, end = int(ends[expert] - sizes[expert]), int(ends[expert])
        here = row_map[start:end]
        assert here[here >= 0].tolist() == (owners == expert).nonzero().flatten().tolist()
    assert not padded[row_map < 0].any()
    back = mxep.unpermute_hp_fwd_mxfp8_bwd(padded, row_map, shape)
    assert torch.equal(back, rows)
    grad = torch.randn(rows.shape, generator=generator)
    assert torch.equal(torch.autograd.grad(back, rows, grad)[0], grad)
    if alignment >= 32:
        mx = mxep.quantize_mx(rows.detach())
        assert torch.equal(mxep.permute_mxfp8_fwd_hp_bwd(mx, counts, world, local, alignment)[1].dequantize()[row_map >= 0],
                           mx.dequantize()[row_map[row_map >= 0].long()])  # fmt: skip


def _plain(x: Tensor, experts: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[expert].T).chunk(2, 1)
        y = y.index_add(0, token, scores[token, choice][:, None] * ((torch.nn.functional.silu(gate) * up) @ w2[expert].T))
    return y


def check_fused(routing: Routing, generator: torch.Generator, recipe: str) -> None:
    """One rank alone: choices as they are, then with some that are none and some that are named twice."""
    for experts in (routing.experts, _with_repeats(routing.experts, generator)):
        shapes = (2 * H, D), (D, H)
        w1, w2 = (torch.randn(routing.num_experts, *shape, generator=generator) / shape[1] ** 0.5 for shape in shapes)
        leaves = [leaf.clone().requires_grad_() for leaf in (routing.tokens, routing.scores, w1, w2)]
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        x, scores, *weights = leaves
        y = mxep.fused_experts(
            x, experts, scores, weights[0], None, weights[1], None, num_experts=routing.num_experts, group="", recipe=recipe
        )
        want = _plain(exact[0], experts, *exact[1:])
        unweighted = _plain(exact[0], experts, torch.ones_like(exact[1]), *exact[2:]).detach().norm()
        dy = torch.randn(y.shape, generator=generator)
        got_grads, want_grads = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, exact, dy.double())
        for name, a, b in zip(("y", "dx", "dscores", "dw1", "dw2"), (y, *got_grads), (want, *want_grads), strict=True):
            # A score's gradient is a product of two rows, which may nearly cancel: of the size that such products have.
            size = dy.norm() * unweighted / D**0.5 if name == "dscores" and recipe != "hp" else 0.0
            assert (a - b).norm() <= near(recipe, len(y)) * (b.norm() + size), f"fused_experts {recipe}: {name} is {error(a, b)} off"
        unused = [expert for expert in range(routing.num_experts) if not (experts == expert).any()]
        assert not got_grads[2][unused].any()


def _with_repeats(experts: Tensor, generator: torch.Generator) -> Tensor:
    changed = experts.masked_fill(torch.rand(experts.shape, generator=generator) < 0.2, -1)
    twice = torch.rand(len(experts), generator=generator) < 0.2
    changed[twice] = changed[twice][:, :1]
    return changed


def check_layer(routing: Routing, seed: int, recipe: str) -> None:
    """`MoE` whose expert bias makes it choose so, as far as a bias can."""
    changes = {
        "num_experts": routing.num_experts,
        "top_k": routing.experts.shape[1],
        "renormalize": seed % 2 == 0,
    }
    moe = make((mxep.MoE, mxep.FusedMoE)[seed % 2], recipe, torch.float32, seed, dim=D, hidden=H, **changes)
    load = torch.bincount(routing.experts.flatten(), minlength=routing.num_experts).float()
    moe.expert_bias.copy_(load / max(float(load.max()), 1.0) * (seed % 3))
    x, dy = routing.tokens, torch.randn(routing.tokens.shape, generator=torch.Generator().manual_seed(seed))
    experts = moe.router(x, moe.expert_bias).experts
    want = truth(moe, x, dy, experts)
    for name, value in walk(moe, x, dy).items():
        if recipe != "hp" and ("router" in name or name == "dx"):
            continue  # products of rows again, and their sums
        size = 1e-5 * dy.norm() if "router" in name or name == "dx" else 0.0  # of a single score, renormalised, everything cancels
        off = (value - want[name]).norm()
        assert off <= near(recipe, len(x)) * want[name].norm() + size, f"{type(moe).__name__} {recipe}: {name} is {off} off"


def check(seed: int) -> str:
    """One routing through everything; returns its kind. Raises AssertionError, or what a function raised, with the seed."""
    try:
        generator, kind, routing = draw(seed)
        recipe = tuple(NEAR)[seed % 7 % len(NEAR)]
        check_permute(routing, generator)
        check_fused(routing, generator, recipe)
        check_layer(routing, seed, recipe)
    except Exception as error:
        error.add_note(f"route_fuzz: seed {seed}")
        raise
    return kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routings", type=int, nargs="?", default=5000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    given = parser.parse_args()
    for seed in range(given.first, given.first + given.routings):
        check(seed)
    print(f"{given.routings} routings from seed {given.first} on: all as in float64")


if __name__ == "__main__":
    main()
