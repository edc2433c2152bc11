"""The router: scores, groups, bias, losses and balance, each against a computation by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from mxep.moe.config import MoEConfig
from mxep.moe.router import Router, Routing, route
from mxep.ops.routing.router_reference import FORCED_SEED, balance_loss, count_topk, force_balance, mean_shares, shuffled_experts, z_loss


def config(**changes) -> MoEConfig:
    return MoEConfig(**{"dim": 32, "hidden": 32, "num_experts": 8, "top_k": 2, **changes})


def losses(routing: Routing, settings: MoEConfig) -> Tensor:
    """As a layer makes them of a routing."""
    return settings.balance_loss * balance_loss(routing.shares, routing.counts) + settings.z_loss * routing.z


def test_softmax_scores_are_probabilities_of_the_best() -> None:
    logits = torch.tensor([[0.0, math.log(3), math.log(2), math.log(2.5)]])
    routing = route(logits, None, config(num_experts=4))
    total = 1 + 3 + 2 + 2.5
    assert routing.experts.tolist() == [[1, 3]]
    torch.testing.assert_close(routing.scores, torch.tensor([[3 / total, 2.5 / total]]))
    assert routing.counts.tolist() == [0, 1, 0, 1]
    assert not routing.shares.any()
    assert routing.z.item() == 0


def test_sigmoid_renormalised_and_scaled() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    routing = route(logits, None, config(num_experts=4, score_function="sigmoid", renormalize=True, route_scale=2.5))
    a, b = 1 / (1 + math.exp(-3.0)), 1 / (1 + math.exp(-2.0))
    assert routing.experts.tolist() == [[0, 3]]
    torch.testing.assert_close(routing.scores, torch.tensor([[2.5 * b / (a + b), 2.5 * a / (a + b)]]))


def test_scores_are_float32_for_bf16_tokens() -> None:
    router = Router(config()).to(torch.bfloat16)
    routing = router(torch.randn(5, 32, dtype=torch.bfloat16))
    assert routing.scores.dtype == torch.float32
    assert routing.experts.dtype == routing.counts.dtype == torch.int64
    routing.scores.sum().backward()
    assert router.gate.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_logits_and_bias_of_any_float_dtype(dtype: torch.dtype) -> None:
    logits, bias = torch.randn(20, 8).to(dtype), torch.randn(8).bfloat16()
    got, want = route(logits, bias, config()), route(logits.float(), bias.float(), config())
    assert torch.equal(got.experts, want.experts)
    assert torch.equal(got.scores, want.scores)


def test_only_the_best_groups_are_open() -> None:
    # 4 groups of 2; sums of the two best: 0.9, 1.0, 0.7, 0.95. The single best expert (0.9, in group 0) is outside the best two groups.
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.1, 0.35, 0.6]])
    routing = route(torch.logit(scores, eps=1e-7), None, config(num_groups=4, top_groups=2, top_k=3, score_function="sigmoid"))
    assert sorted(routing.experts[0].tolist()) == [2, 3, 7]


def test_negative_bias_does_not_open_a_closed_group() -> None:
    scores = torch.tensor([[0.2, 0.1, 0.9, 0.8]])
    bias = torch.tensor([-1.0, -1.0, -1.3, -1.95])  # biased -0.8, -0.9 | -0.4, -1.15: group sums -1.7 and -1.55
    routing = route(torch.logit(scores), bias, config(num_experts=4, num_groups=2, top_groups=1, top_k=2, score_function="sigmoid"))
    assert routing.experts.tolist() == [[2, 3]]  # a mask of 0 instead of -inf would let experts 0 and 1 win


def test_bias_moves_the_choice_but_not_the_weight() -> None:
    logits = torch.randn(20, 8)
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 10.0])
    plain, biased = route(logits, None, config()), route(logits, bias, config())
    assert (biased.experts == 7).any(dim=-1).all()
    assert not (plain.experts == 7).any(dim=-1).all()
    torch.testing.assert_close(biased.scores, logits.softmax(-1).gather(-1, biased.experts))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_losses_match_a_hand_computation(score_function: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, dtype=torch.float64)
    settings = config(num_experts=4, score_function=score_function, balance_loss=0.3, z_loss=0.07)
    routing = route(logits.float(), None, settings)
    expected_z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 6
    expected_balance = 0.0
    for expert in range(4):
        load = sum(row.count(expert) for row in routing.experts.tolist()) / (6 * 2)
        share = 0.0
        for row in logits.tolist():
            scores = [math.exp(v) if score_function == "softmax" else 1 / (1 + math.exp(-v)) for v in row]
            share += scores[expert] / sum(scores) / 6
        expected_balance += 4 * load * share
    assert losses(routing, settings).item() == pytest.approx(0.3 * expected_balance + 0.07 * expected_z, rel=1e-5)


def test_balance_loss_is_one_when_balanced_and_pushes_load_away() -> None:
    scores = torch.full((8, 4), 0.25)
    assert balance_loss(mean_shares(scores), torch.tensor([4, 4, 4, 4])).item() == pytest.approx(1.0)
    logits = torch.zeros(8, 4, requires_grad=True)
    balance_loss(mean_shares(logits.softmax(-1)), torch.tensor([8, 8, 0, 0])).backward()
    assert (logits.grad[:, :2] > 0).all()
    assert (logits.grad[:, 2:] < 0).all()
    assert balance_loss(torch.tensor([0.5, 0.5, 0, 0]), torch.tensor([8, 8, 0, 0])).item() == pytest.approx(2.0)


def test_gradients_of_scores_and_losses() -> None:
    torch.manual_seed(1)
    settings = config(num_experts=4, score_function="sigmoid", renormalize=True, balance_loss=0.1, z_loss=0.1)
    logits = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(5, 2)
    routing = route(logits, None, settings)
    ((routing.scores * weight).sum() + losses(routing, settings)).backward()
    exact = logits.detach().double()

    def objective(values: torch.Tensor) -> float:
        scores = values.sigmoid()
        chosen = scores.gather(-1, routing.experts)
        shares = scores / scores.sum(-1, keepdim=True)
        balance = 4 * (routing.counts / 10 * shares.mean(0)).sum()
        return ((chosen / chosen.sum(-1, keepdim=True) * weight).sum() + 0.1 * balance + 0.1 * values.logsumexp(-1).square().mean()).item()

    for index in [(0, 0), (2, 3), (4, 1)]:
        step = torch.zeros_like(exact)
        step[index] = 1e-5
        numeric = (objective(exact + step) - objective(exact - step)) / 2e-5
        assert logits.grad[index].item() == pytest.approx(numeric, abs=2e-5)


def test_forced_balance_is_even_and_deterministic() -> None:
    routing = route(torch.randn(16, 8), None, config(force_balance=True, top_k=3))
    assert routing.counts.tolist() == [6] * 8
    assert torch.equal(routing.experts, force_balance(16, 3, 8, torch.device("cpu")))
    assert bool((routing.experts.diff(dim=1) > 0).all()), "distinct, in rising order"
    assert routing.scores.shape == (16, 3)


def test_hash_of_forced_balance() -> None:
    """Against MurmurHash3's 32-bit finalizer in exact integers."""

    def hashed(number: int) -> int:
        number ^= number >> 16
        number = number * 0x85EBCA6B % 2**32
        number ^= number >> 13
        number = number * 0xC2B2AE35 % 2**32
        return number ^ number >> 16

    assert hashed(1) == 0x514E28B7  # a published value
    assert shuffled_experts(100, torch.device("cpu")).tolist() == sorted(range(100), key=lambda expert: hashed(expert + FORCED_SEED))


@pytest.mark.parametrize(("E", "C"), [(64, 6), (128, 8), (256, 8), (60, 4), (160, 6), (32, 4), (64, 8)])
def test_forced_balance_sends_a_token_to_as_many_ranks_as_random_experts(E: int, C: int) -> None:
    experts = force_balance(E, C, E, torch.device("cpu"))
    for world in (world for world in (2, 4, 8) if E % world == 0):
        ranks = torch.zeros(E, world, dtype=torch.bool).scatter_(1, experts // (E // world), True).sum().item() / E
        at_random = world * (1 - math.comb(E - E // world, C) / math.comb(E, C))
        assert ranks == pytest.approx(at_random, rel=0.04)


def test_counts_equal_bincount() -> None:
    experts = torch.randint(0, 7, (50, 3))
    assert torch.equal(count_topk(experts, 7), torch.bincount(experts.flatten(), minlength=7))
    assert count_topk(experts[:0], 7).tolist() == [0] * 7


def test_no_tokens_give_zero_losses_not_nan() -> None:
    settings = config(balance_loss=1.0, z_loss=1.0)
    routing = route(torch.randn(0, 8, requires_grad=True), None, settings)
    loss = losses(routing, settings)
    assert loss.item() == 0
    assert routing.scores.shape == (0, 2)
    loss.backward()


def test_nan_token_stays_alone() -> None:
    logits = torch.randn(6, 8)
    logits[2] = float("nan")
    logits.requires_grad_()
    settings = config(num_groups=4, top_groups=2, score_function="sigmoid", renormalize=True, balance_loss=0.1, z_loss=0.1)
    routing = route(logits, torch.zeros(8), settings)
    assert len(set(routing.experts[2].tolist())) == 2
    (routing.scores.sum() + losses(routing, settings)).backward()
    others = [0, 1, 3, 4, 5]
    assert routing.scores[others].isfinite().all()
    assert logits.grad[others].isfinite().all()
    assert logits.grad[2].isnan().all()


def test_z_loss_value() -> None:
    assert z_loss(torch.zeros(3, 4)).item() == pytest.approx(math.log(4) ** 2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"top_k": 9}, "want at most 8, the experts that a token can choose from"),
        ({"num_groups": 3}, "not divisible by num_groups=3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "want at most 2, the experts that a token can choose from"),
        ({"score_function": "relu"}, "'softmax' or 'sigmoid'"),
        ({"top_k": 0}, "top_k=0"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"router_dtype": "float32"}, "router_dtype='float32', want 'fp32' or 'bf16'"),
    ],
)
def test_bad_config(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config(**changes)


@pytest.mark.parametrize("changes", [{"top_k": 2.0}, {"num_experts": "8"}, {"dim": 0}, {"hidden": -32}, {"top_groups": None}])
def test_sizes_that_are_no_whole_numbers(changes: dict) -> None:
    ((field, value),) = changes.items()
    with pytest.raises(ValueError, match=re.escape(f"MoEConfig: {field}={value!r}, want a whole number, at least 1")):
        MoEConfig(**{"dim": 64, "hidden": 32, "num_experts": 8, "top_k": 2, **changes})


class LowRank(nn.Module):
    """An adapter in place of a linear layer: it has the layer's weight, but not its output."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_hooks_and_replacements_of_the_gate_run() -> None:
    router, tokens, seen = Router(config()), torch.randn(5, 32), []
    plain = router(tokens).scores
    router.gate.register_forward_hook(lambda module, inputs, logits: seen.append(logits.shape))
    assert torch.equal(router(tokens).scores, plain)
    assert seen == [(5, 8)]
    router = Router(config())
    router.gate.forward = lambda x: seen.append(x.shape) or torch.zeros(5, 8)  # type: ignore[method-assign, func-returns-value]
    assert router(tokens).scores.unique().numel() == 1
    assert seen[1:] == [(5, 32)]
    router.gate = LowRank(router.gate)
    scores = router(tokens).scores
    assert not torch.equal(scores, plain)
    scores.square().sum().backward()
    assert router.gate.up.weight.grad.abs().sum() > 0


def nearly_tied() -> tuple[Tensor, Tensor]:
    """Tokens (64, 32) bf16, and a gate (8, 32) float32 whose rows are one vector but for 2^-12 of it and less, which bf16 rounds away."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(32, generator=generator).bfloat16().float()
    return torch.randn(64, 32, generator=generator).bfloat16(), row * (1 + torch.arange(8).roll(3)[:, None] * 2.0**-14)


def best_two(tokens: Tensor, weight: Tensor) -> Tensor:
    return (tokens.double() @ weight.double().T).topk(2).indices.sort(1).values


def test_the_product_is_in_float32_whatever_the_dtypes_around_it() -> None:
    """Tokens in bf16, autocast, a hook on the gate or an adapter in its place: experts that tie in bf16 are distinguished."""
    tokens, weight = nearly_tied()
    want = best_two(tokens, weight)
    for hooked in (False, True):
        for router_dtype in ("fp32", "bf16"):
            router = Router(config(router_dtype=router_dtype))
            router.gate.weight.data.copy_(weight)
            if hooked:
                router.gate.register_forward_hook(lambda *_: None)
            equal = torch.equal(router(tokens).experts, want)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(router(tokens).experts, want) == equal == (router_dtype == "fp32")
    adapter = LowRank(router.gate)
    torch.nn.init.zeros_(adapter.up.weight)
    router = Router(config())
    router.gate = adapter
    assert torch.equal(router(tokens).experts, want)
    assert torch.equal(router.bfloat16()(tokens).experts, best_two(tokens, weight.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_loss_alone_under_another_default_dtype(dtype: torch.dtype) -> None:
    routing = route(logits := torch.randn(16, 8, requires_grad=True), None, config(balance_loss=0.1))
    torch.set_default_dtype(dtype)
    try:
        losses(routing, config(balance_loss=0.1)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.float32
