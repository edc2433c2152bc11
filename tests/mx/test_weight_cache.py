"""Weights quantised once per optimizer step: the numbers of quantising them in every call, by whatever the weights change."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.parallel.test_data_parallel import Net, batches, objective
from tests.ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from mxep.moe import MoE, MoEConfig
from mxep.mx import weight_cache
from mxep.mx.weight_cache import WeightCache
from mxep.parallel import Meshes, apply_fsdp, apply_mxfp8_expert_parallel, build_meshes, cache_quantized_weights
from mxep.train.optimizer import build_optimizer

MXFP8 = "mxfp8_wgrad_with_hp"
STEPS = 3
FORMS = {True: 2 * 2, False: 3 * 2}  # of one layer: w1 with w3 as one operand when fused, and w2; forward and dgrad


class Run:
    """A net under FSDP2 and EP with its optimizer, with or without a cache."""

    def __init__(self, meshes: Meshes, cached: bool, reshard: bool, recompute: bool, fused: bool) -> None:
        self.net = Net(MXFP8)
        self.net.recompute = recompute
        for layer in self.net.layers:
            layer.experts.fused = fused
            apply_mxfp8_expert_parallel(layer, meshes.ep)
        apply_fsdp(self.net, meshes, reshard_after_forward=reshard)
        self.optimizer = build_optimizer(self.net, 1e-2, 0.1)
        self.cache = cache_quantized_weights(self.net, self.optimizer) if cached else None

    def step(self, microbatches: list[list[Tensor]], rank: int) -> Tensor:
        total = sum(len(x) for ranks in microbatches for x in ranks)
        losses = []
        for ranks in microbatches:
            losses.append(objective(self.net, ranks[rank], total))
            losses[-1].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).detach()

    def weights(self) -> list[Tensor]:
        return [p.detach().to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in self.net.parameters()]


def assert_equal(a: Run, b: Run, what: object) -> None:
    for (name, _), p, q in zip(a.net.named_parameters(), a.weights(), b.weights(), strict=True):
        assert torch.equal(p, q), (what, name)


@torch.no_grad()
def scale(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.mul_(1.25)


def cached_ranks(rank: int, world: int) -> None:
    meshes = build_meshes(world, 2, "cpu")
    microbatches = batches(world)
    for reshard, recompute, accumulate, fused in (
        *((True, False, 1, True), (False, False, 2, True), (True, True, 2, True), (False, True, 1, True)),
        *((True, True, 2, False), (False, False, 1, False)),
    ):
        kind = (reshard, recompute, accumulate, fused)
        cached, plain = (Run(meshes, is_cached, reshard, recompute, fused) for is_cached in (True, False))
        assert cached.cache is not None
        for step in range(STEPS):
            batch = [microbatches[(step + i) % 2] for i in range(accumulate)]
            assert torch.equal(cached.step(batch, rank), plain.step(batch, rank)), (kind, step)
            assert cached.cache.fills == 2 * FORMS[fused] * (step + 1), (kind, "each form once a step")
        assert_equal(cached, plain, kind)
        check_other_changes(cached, plain, microbatches, rank)


def check_other_changes(cached: Run, plain: Run, microbatches: list[list[Tensor]], rank: int) -> None:
    """Between a forward that fills the cache and the next step: load_state_dict, edits in place, edits of the local tensors."""
    halves = {name: 0.5 * value for name, value in plain.net.state_dict().items()}
    for change in (
        lambda run: run.net.load_state_dict(halves),
        lambda run: scale(list(run.net.parameters())),
        lambda run: scale([p.to_local() if isinstance(p, DTensor) else p for p in run.net.parameters()]),
    ):
        outs = []
        for run in (cached, plain):
            with torch.no_grad():
                before = run.net(microbatches[0][rank])
            change(run)
            with torch.no_grad():
                outs.append(run.net(microbatches[0][rank]))
            assert not len(before) or not torch.equal(before, outs[-1])
        assert torch.equal(*outs)
        assert torch.equal(cached.step([microbatches[1]], rank), plain.step([microbatches[1]], rank))
    assert_equal(cached, plain, "after other changes")


@pytest.mark.slow
def test_cached_equals_uncached_under_fsdp_and_ep() -> None:
    run_ranks(cached_ranks, 4, timeout=280)


def layer(recipe: str = MXFP8, fused: bool = True) -> tuple[MoE, torch.optim.Optimizer, WeightCache]:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(64, 96, 4, 2), recipe)
    moe.experts.fused = fused
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    return moe, optimizer, cache_quantized_weights(moe, optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_kept_for_one_step(fused: bool) -> None:
    moe, optimizer, cache = layer(fused=fused)
    x = torch.randn(40, 64, requires_grad=True)
    for step in range(3):
        for _ in range(2):
            moe(x).sum().backward()
        with torch.no_grad():
            moe.eval()(x)
        moe.train()
        assert (cache.step, cache.fills) == (step, FORMS[fused] * (step + 1))
        assert cache.nbytes() == 2 * sum(w.numel() * 33 // 32 for w in moe.experts.parameters())
        optimizer.step()
        assert cache.nbytes() == 0


@pytest.mark.parametrize("fused", [True, False])
def test_filling_records_and_saves_nothing(fused: bool) -> None:
    """Forward fills the cache, the recomputation reads it: checkpointing compares the tensors that both save."""
    moe, _, cache = layer(fused=fused)
    x = torch.randn(40, 64, requires_grad=True)
    out = checkpoint(moe, x, use_reentrant=False)
    torch.autograd.grad(out.sum(), (x, *moe.experts.parameters()))
    assert cache.fills == FORMS[fused]
    assert not any(part.requires_grad for kept in cache._kept.values() for part in kept.form)


@pytest.mark.parametrize("fused", [True, False])
def test_an_unseen_change_is_an_error_in_checking_mode(fused: bool) -> None:
    moe, _, cache = layer(fused=fused)
    x = torch.randn(40, 64)
    moe(x)
    moe.experts.w3.data.mul_(2)
    with pytest.raises(ValueError, match=r"Experts\.(w1 or )?w3 has other values .* step 0; call WeightCache\.advance"):
        moe(x)
    cache.advance()
    out = moe(x)
    moe.experts.keep_quantized(None)
    assert torch.equal(out, moe(x))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_replace_the_parameters_do_not_get_their_cached_bytes(monkeypatch, fused: bool, checked: bool) -> None:
    """torch.func.functional_call, as averaged weights are tried out: of the same shapes and versions, forward and backward."""
    monkeypatch.setattr(weight_cache, "checking", lambda _: checked)  # off, as it is on GPUs
    (moe, _, cache), (plain, *_) = layer(fused=fused), layer(fused=fused)
    plain.experts.keep_quantized(None)
    x = torch.randn(40, 64)

    def gradients(module: MoE, weights: dict[str, Tensor] | None) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = module(leaf) if weights is None else torch.func.functional_call(module, weights, (leaf,))
        y.square().sum().backward()
        return [y.detach(), leaf.grad]

    others = [{name: torch.randn_like(p) * 0.1 for name, p in moe.named_parameters()} for _ in range(2)]
    for other in others:
        for name, p in moe.named_parameters():
            while other[name]._version < p._version:
                other[name].mul_(1)
    for weights in (None, *others, None):
        for got, want in zip(gradients(moe, weights), gradients(plain, weights), strict=True):
            assert torch.equal(got, want)
    fills = cache.fills
    gradients(moe, None)
    assert cache.fills == fills


def test_an_edit_of_either_weight_of_a_joined_form_is_noticed() -> None:
    moe, _, cache = layer()
    x = torch.randn(40, 64)
    for weight in (moe.experts.w1, moe.experts.w3):
        before, fills = moe(x), cache.fills
        with torch.no_grad():
            weight.mul_(1.5)
        out = moe(x)
        assert cache.fills == fills + 1
        assert not torch.equal(out, before)
        moe.experts.keep_quantized(None)
        assert torch.equal(out, moe(x))
        moe.experts.keep_quantized(cache)


def test_inference_fills_for_training() -> None:
    moe, _, _ = layer()
    x = torch.randn(40, 64)
    with torch.inference_mode():
        out = moe(x)
    assert torch.equal(out, moe(x))
    moe(x).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda moe: pickle.loads(pickle.dumps(moe))])
def test_copies_have_no_cache(copied) -> None:
    moe, _, cache = layer()
    x = torch.randn(40, 64)
    moe(x)
    other, fills = copied(moe), cache.fills
    assert torch.equal(other(x), moe(x))
    other.experts.w1.data.mul_(2)
    other(x).sum().backward()
    assert cache.fills == fills


def test_other_dtypes_and_modes_have_entries_of_their_own() -> None:
    moe, _, cache = layer()
    x = torch.randn(40, 64)
    moe(x)
    moe.experts.recipe = "mxfp8_wgrad_with_hp_floor"
    floor = moe(x)
    moe.experts.keep_quantized(None)
    assert torch.equal(floor, moe(x))
    moe.experts.keep_quantized(cache)
    moe.to(torch.bfloat16)(x.bfloat16())


def test_compiled_graphs_keep_nothing() -> None:
    moe, optimizer, cache = layer()
    x, counts = torch.randn(128, 64), torch.tensor([32, 64, 0, 32])
    compiled = torch.compile(moe.experts, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        before = cache.fills
        out = compiled(x, counts)
        out.sum().backward()
        assert cache.fills == before
        assert torch.equal(out, moe.experts(x, counts))
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()


def test_nothing_to_cache_is_an_error() -> None:
    moe, optimizer, _ = layer()
    with pytest.raises(ValueError, match=r"a list as optimizer, want a torch\.optim\.Optimizer"):
        cache_quantized_weights(moe, [optimizer])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 optimizers and 1"):
        cache_quantized_weights(moe)
    with pytest.raises(ValueError, match=r"1 optimizers and 0 mxep\.moe\.Experts or MXLinear in Linear"):
        cache_quantized_weights(torch.nn.Linear(2, 2), optimizer)
