"""The MoE layer in one process: against a dense computation token by token, saved tensors, loads, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.truth import saved_tensors, sqnr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.moe import Experts, FusedMoE, MoE, MoEConfig


def config(**changes) -> MoEConfig:
    return MoEConfig(**{"dim": 64, "hidden": 96, "num_experts": 8, "top_k": 3, **changes})


def make(recipe: str = "hp", seed: int = 0, **changes) -> MoE:
    torch.manual_seed(seed)
    return MoE(config(**changes), recipe)


def dense(moe: MoE, x: Tensor) -> Tensor:
    """Every token through every chosen expert, by plain autograd."""
    w1, w2, w3 = moe.experts.w1, moe.experts.w2, moe.experts.w3
    routing = moe.router(x, moe.expert_bias)
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for c in range(moe.config.top_k):
            e, score = int(routing.experts[t, c]), routing.scores[t, c]
            token = x[t] * score if moe.config.scores_before_experts else x[t]
            y = w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))
            total = total + (y if moe.config.scores_before_experts else score * y)
        rows.append(total)
    y = torch.stack(rows)
    if moe.shared_experts is not None:
        s = moe.shared_experts
        y = y + (F.silu(x @ s.w1.weight.T) * (x @ s.w3.weight.T)) @ s.w2.weight.T
    return y


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_function": "sigmoid", "renormalize": True, "route_scale": 2.5, "num_groups": 4, "top_groups": 2, "num_shared_experts": 2},
        {"scores_before_experts": True, "top_k": 1},
        {"force_balance": True},
    ],
    ids=["softmax", "deepseek_v3", "scores_before", "forced_balance"],
)
def test_layer_equals_the_dense_computation(changes: dict) -> None:
    moe, twin = make(**changes), make(**changes)
    x = torch.randn(21, 64)
    x_moe, x_twin = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = moe(x_moe), dense(twin, x_twin)
    largest = want.abs().max().clamp(min=1).item()  # where terms cancel, the rounding of values of that size is left
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6 * largest)
    grad = torch.randn_like(y)
    y.backward(grad)
    want.backward(grad)
    torch.testing.assert_close(x_moe.grad, x_twin.grad, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(moe.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("recipe", "floor_db"), [("mxfp8_wgrad_with_hp", 22.0), ("mxfp8_gemm", 22.0), ("mxfp8", 22.0), ("mxfp8_wgrad_with_mx", 22.0)]
)
def test_mxfp8_layer_stays_near_bf16(recipe: str, floor_db: float) -> None:
    plain = make("hp").bfloat16()
    quantised = copy.deepcopy(plain)
    quantised.experts.recipe = recipe
    x = torch.randn(100, 64, dtype=torch.bfloat16)
    results = []
    for moe in (plain, quantised):
        leaf = x.clone().requires_grad_()
        y = moe(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16())
        results.append([y, leaf.grad, moe.experts.w1.grad, moe.experts.w2.grad, moe.experts.w3.grad])
    for name, reference, value in zip(("o", "dx", "dw1", "dw2", "dw3"), *results, strict=True):
        assert sqnr(reference, value) > floor_db, name
        assert not torch.equal(reference, value), name


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
def test_no_grad_forward_saves_nothing(recipe: str) -> None:
    moe = make(recipe, balance_loss=0.1, num_shared_experts=1)
    x = torch.randn(40, 64)
    with saved_tensors() as saved:
        trained = moe(x)
        assert saved
        saved.clear()
        moe.eval()
        load = moe.tokens_per_expert.clone()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                y = moe(x)
            assert not saved
            assert not y.requires_grad
            assert not moe.router_loss.requires_grad
            torch.testing.assert_close(y, trained, rtol=0, atol=0)
    assert torch.equal(moe.tokens_per_expert, load)
    kept = [name for name, value in vars(moe).items() if isinstance(value, Tensor)] + [
        n for n, v in vars(moe.experts).items() if isinstance(v, Tensor)
    ]
    assert kept == []


def test_load_is_counted_once_under_checkpointing() -> None:
    moe = make("mxfp8_wgrad_with_hp", balance_loss=0.1)
    twin = copy.deepcopy(moe)
    x = torch.randn(33, 64, requires_grad=True)
    y = twin(x)
    (y.square().sum() + twin.router_loss).backward()
    want, x.grad = x.grad, None
    y = checkpoint(moe, x, use_reentrant=False)
    routed = moe._routed
    (y.square().sum() + moe.router_loss).backward()
    assert moe._routed is routed
    assert moe.tokens_per_expert.sum() == 33 * 3
    assert torch.equal(x.grad, want)
    for p, q in zip(moe.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    moe.reset_load()
    assert moe.tokens_per_expert.sum() == 0


def test_expert_bias_follows_the_load() -> None:
    moe = make(num_experts=4, top_k=1, bias_update_rate=0.5)
    moe.update_expert_bias(torch.tensor([10, 2, 4, 0]))  # mean 4: signs -1, +1, 0, +1, whose mean is 1/4
    torch.testing.assert_close(moe.expert_bias, torch.tensor([-0.625, 0.375, -0.125, 0.375]))
    with pytest.raises(ValueError, match="want \\(4,\\)"):
        moe.update_expert_bias(torch.zeros(5))
    moe = make(bias_update_rate=2e-3, score_function="sigmoid")
    with torch.no_grad():
        moe.router.gate.weight[0] += 0.05
    x = torch.randn(800, 64) + 0.3
    before = moe.router(x).counts.max() * 8 / (800 * 3)
    for _ in range(200):
        moe.update_expert_bias(moe.router(x, moe.expert_bias).counts)
    after = moe.router(x, moe.expert_bias).counts.max() * 8 / (800 * 3)
    assert before > 1.8
    assert after < 1.25
    assert moe.expert_bias.sum().abs() < 1e-5


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
def test_nan_poisons_its_token_and_the_experts_that_received_it(recipe: str) -> None:
    moe = make(recipe, balance_loss=0.1, num_experts=8, top_k=2)
    x = torch.randn(50, 64)
    x[7, 3] = float("nan")
    x.requires_grad_()
    y = moe(x)
    (y.sum() + moe.router_loss).backward()
    others = torch.arange(50) != 7
    assert y[7].isnan().all()
    assert y[others].isfinite().all()
    assert x.grad[7].isnan().any()
    assert x.grad[others].isfinite().all()
    poisoned = torch.zeros(8, dtype=torch.bool)
    poisoned[moe.router(x).experts[7]] = True
    for weight in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        assert torch.equal(weight.grad.isnan().flatten(1).any(1), poisoned)


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
def test_no_tokens_and_leading_dimensions(recipe: str) -> None:
    moe = make(recipe, balance_loss=0.1, z_loss=0.1, num_shared_experts=1)
    empty = torch.randn(2, 0, 64, requires_grad=True)
    y = moe(empty)
    (y.sum() + moe.router_loss).backward()
    assert y.shape == empty.shape == empty.grad.shape
    assert all(p.grad is not None and (p.grad == 0).all() for p in moe.parameters())
    x = torch.randn(2, 9, 64)
    assert torch.equal(moe(x).flatten(0, 1), moe(x.flatten(0, 1)))


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_rows_of_another_width_are_refused(kind: type[MoE]) -> None:
    """Also those of half and of twice the width, which would fit as other numbers of tokens."""
    for width in (32, 65, 128):
        with pytest.raises(ValueError, match=rf"{kind.__name__}: x is \(2, 4, {width}\), want \(..., 64\)"):
            kind(config(), "hp")(torch.randn(2, 4, width))
    with pytest.raises(ValueError, match=rf"{kind.__name__}: x is \(\), want \(..., 64\)"):
        kind(config(), "hp")(torch.randn(()))


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_router_loss_under_a_reentrant_checkpoint(kind: type[MoE]) -> None:
    """Its first forward runs without gradients: a loss kept from there trains nothing, that of the run in backward does."""
    torch.manual_seed(0)
    moe = kind(config(balance_loss=10.0, z_loss=1.0), "hp")
    x = torch.randn(33, 64, requires_grad=True)

    def with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
        return moe(x), moe.router_loss

    y, loss = with_loss(x)
    (y.square().sum() + loss).backward()
    want = [x.grad, *(p.grad for p in moe.parameters())]
    moe.zero_grad()
    x.grad = None
    moe.reset_load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, loss = checkpoint(with_loss, x, use_reentrant=True)
        (y.square().sum() + loss).backward()
    for grad, expected in zip([x.grad, *(p.grad for p in moe.parameters())], want, strict=True):
        assert torch.equal(grad, expected)
    assert moe.tokens_per_expert.sum() == 33 * 3

    checkpoint(moe, x, use_reentrant=True)
    with pytest.warns(UserWarning, match=f"{kind.__name__}.router_loss: the last forward ran without gradients.* use_reentrant=False"):
        assert not moe.router_loss.requires_grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            assert moe.router_loss > 0
        moe.eval()
        assert moe.router_loss > 0


def test_bias_and_load_stay_float32_and_copies_work() -> None:
    moe = make(balance_loss=0.1)
    moe(torch.randn(5, 64))
    moe.expert_bias += 1e-3
    cast = copy.deepcopy(moe).bfloat16()
    assert cast.expert_bias.dtype == cast.tokens_per_expert.dtype == torch.float32
    assert torch.equal(cast.expert_bias, moe.expert_bias)
    assert cast.experts.w1.dtype == torch.bfloat16
    assert "expert_bias" in moe.state_dict()
    with pytest.raises(ValueError, match="no forward"):
        _ = cast.router_loss


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_a_layer_that_was_made_without_memory_starts_with_no_load(kind: type[MoE]) -> None:
    """tokens_per_expert is in no state_dict: to_empty would leave it uninitialised, and the expert bias would follow that."""
    moe = make(num_shared_experts=1)
    moe.expert_bias += 1
    with torch.device("meta"):
        other = kind(config(num_shared_experts=1), "hp")

    def dirty(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan, device="cpu")

    other._apply(dirty)  # as to_empty does it
    other.load_state_dict(moe.state_dict())
    assert torch.equal(other.tokens_per_expert, torch.zeros(8))
    assert torch.equal(other.expert_bias, moe.expert_bias)
    x = torch.randn(40, 64)
    torch.testing.assert_close(other(x), moe(x), rtol=1e-4, atol=1e-5)
    other.to(torch.bfloat16)
    assert other.tokens_per_expert.sum() == 40 * 3


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_a_layer_that_takes_the_tensors_of_a_state_dict_counts_its_load(kind: type[MoE]) -> None:
    with torch.device("meta"):
        layer = kind(config(), "hp")
    layer.load_state_dict(make().state_dict(), assign=True)
    layer(torch.randn(40, 64))
    assert layer.tokens_per_expert.sum() == 40 * 3


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp", "mxfp8"])
@pytest.mark.parametrize("missing", ["experts.w2", "router.gate.weight", "expert_bias"])
def test_what_stayed_on_the_meta_device_is_named(recipe: str, missing: str) -> None:
    """torch.mm of tensors of both devices returns uninitialised memory."""
    with torch.device("meta"):
        layer = MoE(config(), recipe)
    state = make().state_dict()
    del state[missing]
    layer.load_state_dict(state, assign=True, strict=False)
    with pytest.raises(ValueError, match=f"{missing.removeprefix('experts.').removeprefix('router.')} is on meta, want cpu"):
        layer(torch.randn(40, 64))


def test_a_gate_that_a_hook_fills_stays_on_the_meta_device_until_then() -> None:
    """As accelerate offloads weights."""
    moe, x = make(), torch.randn(40, 64)
    want, weight = moe(x), moe.router.gate.weight
    moe.router.gate.weight = nn.Parameter(weight.to("meta"))
    moe.router.gate.register_forward_pre_hook(lambda gate, _: setattr(gate, "weight", weight))
    torch.testing.assert_close(moe(x), want)


@pytest.mark.parametrize("counts", [[31.9, 32.1], [True, True], [64]], ids=str)
def test_counts_that_are_none_are_refused(counts: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"Experts: num_tokens_per_expert is .*want \(2,\) int32 or int64"):
        Experts(64, 32, 2, "hp")(torch.randn(64, 64), torch.tensor(counts))


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
@pytest.mark.usefixtures("one_rank")
def test_a_layer_with_a_group_is_copied_into_it_and_not_pickled(kind: type[MoE]) -> None:
    """torch.optim.swa_utils.AveragedModel copies a model; a group can be neither copied nor pickled."""
    moe = kind(config(balance_loss=0.1), "hp")
    moe.group = dist.group.WORLD
    x = torch.randn(5, 64)
    y = moe(x)
    twin = copy.deepcopy(nn.ModuleDict({"moe": moe}))["moe"]
    assert type(twin) is kind
    assert twin.group is moe.group
    assert twin.experts.w1 is not moe.experts.w1
    assert torch.equal(twin(x), y)
    with pytest.raises(ValueError, match=f"{kind.__name__}: .* want its state_dict"):
        pickle.dumps(moe)


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_shared_experts_of_another_dtype_than_the_tokens_are_refused(kind: type[MoE]) -> None:
    moe = kind(config(num_shared_experts=1), "mxfp8_wgrad_with_hp")
    with pytest.raises(ValueError, match=r"shared experts: tokens are torch\.bfloat16 and weights torch\.float32"):
        moe(torch.randn(5, 64).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert moe(torch.randn(5, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_autocast_changes_nothing_in_bf16(kind: type[MoE]) -> None:
    """The weighted sum stays float32: autocast would round the scores."""
    moe = kind(config(), "mxfp8_wgrad_with_hp").bfloat16()
    tokens = torch.randn(64, 64).bfloat16()
    results = []
    for enabled in (False, True):
        moe.zero_grad()
        x = tokens.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = moe(x)
            y.square().sum().backward()
        results.append((y, x.grad, *(weight.grad for weight in moe.parameters())))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


def test_weights_are_drawn_from_the_generator() -> None:
    a, b = make(seed=0, num_shared_experts=1), make(seed=1, num_shared_experts=1)
    for moe in (a, b):
        moe.init_weights(0.02, torch.Generator().manual_seed(5))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        assert 0.017 < p.std() < 0.023


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_over_choices_keeps_rows_as_they_came(dtype: torch.dtype) -> None:
    """The numbers of the plain computation in float32; saved are the rows in their own dtype, their positions, and the scores."""
    moe, generator = make(seed=0), torch.Generator().manual_seed(1)
    rows, scores = torch.randn(150, 64, generator=generator).to(dtype), torch.rand(50, 3, generator=generator)
    order, slots = torch.randperm(150, generator=generator).int(), torch.empty(150, dtype=torch.int64)
    slots[order.long()] = torch.arange(150)
    grad, results = torch.randn(50, 64, generator=generator).to(dtype), []

    def plain(out: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        terms = out[slots].view(50, 3, 64).float() * weights[..., None]
        return (terms[:, 0] + terms[:, 1] + terms[:, 2]).to(out.dtype)

    for function in (moe._sum_choices, plain):
        out, weights = rows.clone().requires_grad_(), scores.clone().requires_grad_()
        with saved_tensors() as kept:
            y = function(out, weights, order)
        if function != plain:
            assert {tensor.dtype for tensor in kept} == {dtype, torch.float32, torch.int32}
            assert sum(tensor.nbytes for tensor in kept) == rows.nbytes + scores.nbytes + order.nbytes
        y.backward(grad)
        results.append((y.detach(), out.grad, weights.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_wrong_arguments_are_named(kind: type[MoE]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}: config is dict, want MoEConfig"):
        kind({"dim": 64})  # type: ignore[arg-type]
    layer = kind(config())
    with pytest.raises(ValueError, match=f"{kind.__name__}.update_expert_bias: counts_all_ranks is list, want a torch.Tensor"):
        layer.update_expert_bias([1.0] * 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"counts of shape \(4,\), want \(8,\); sum tokens_per_expert"):
        layer.update_expert_bias(torch.ones(4))


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="'mxfp9' is unknown"):
        MoE(config(), "mxfp9")
    with pytest.raises(ValueError, match="is unknown"):
        Experts(64, 96, 8).recipe = "nope"


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
def test_compiled_layer_equals_eager(recipe: str) -> None:
    moe = make(recipe, balance_loss=0.1, num_shared_experts=1)
    twin = copy.deepcopy(moe)
    compiled = torch.compile(twin, backend="aot_eager")  # breaks once, where the plan reads the splits on the host
    results = []
    for layer, owner in ((moe, moe), (compiled, twin)):
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = layer(x)
        (y.square().sum() + owner.router_loss).backward()
        results.append([x.grad, y.detach(), owner.tokens_per_expert, *(p.grad for p in owner.parameters())])
    for index, (eager, graph) in enumerate(zip(*results, strict=True)):
        if index == 0:  # dx: router, experts and shared experts add up in another order
            torch.testing.assert_close(eager, graph, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(eager, graph)


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_a_state_dict_of_bf16_leaves_the_bias_float32(kind: type[MoE]) -> None:
    """bf16 would lose updates of 0.001 to a bias of 0.5."""
    moe = kind(MoEConfig(64, 32, 4, 2), "hp")
    moe.load_state_dict({name: value.bfloat16() for name, value in moe.state_dict().items()}, assign=True)
    assert moe.router.gate.weight.dtype == torch.bfloat16
    assert (moe.expert_bias.dtype, moe.tokens_per_expert.dtype) == (torch.float32, torch.float32)
