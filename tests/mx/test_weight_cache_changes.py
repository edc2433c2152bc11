"""Changes of weights that the cache is not told of, without checking, as on a GPU: of plain parameters, EP shards and FSDP's shards."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _sync_module_states

from mxep import device
from mxep.moe import FusedMoE, MoE, MoEConfig, RuntimeEPConfig
from mxep.mx import quantize_mx, weight_cache
from mxep.mx.weight import MXWeight
from mxep.mx.weight_cache import WeightCache
from mxep.parallel import MXLinear, apply_mxfp8_expert_parallel, cache_quantized_weights
from mxep.recipe import RECIPES

pytestmark = pytest.mark.usefixtures("one_rank")
MXFP8 = "mxfp8_wgrad_with_hp"
CONFIG = MoEConfig(64, 96, 4, 2)
KINDS = ("plain", "ep", "fsdp")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setattr(weight_cache, "checking", lambda _: False)


def make(kind: str, layer_class: type[MoE] = MoE) -> tuple[MoE, WeightCache]:
    """A layer whose cache is told of an optimizer that never steps."""
    torch.manual_seed(0)
    moe, mesh = layer_class(CONFIG, MXFP8), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    if kind == "ep":
        apply_mxfp8_expert_parallel(moe, mesh)
    if kind == "fsdp":
        fully_shard(moe.experts, mesh=mesh)
        fully_shard(moe, mesh=mesh)
    return moe, cache_quantized_weights(moe, torch.optim.SGD(moe.parameters(), lr=0.0))


def tokens() -> Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(7))


def outputs(moe: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """y and dx: the forms of forward and of dgrad."""
    leaf = x.clone().requires_grad_()
    y = moe(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


def assert_serves_the_weights_of_now(moe: MoE, cache: WeightCache, change: Callable[[MoE], object]) -> None:
    x = tokens()
    before, fills = outputs(moe, x), cache.fills
    outputs(moe, x)
    assert cache.fills == fills, "unchanged weights stay cached"
    change(moe)
    found = outputs(moe, x)
    assert cache.fills > fills
    moe.experts.keep_quantized(None)
    for got, want, old in zip(found, outputs(moe, x), before, strict=True):
        assert torch.equal(got, want)
        assert not torch.equal(got, old)


def step(optimizer_class: Callable[..., torch.optim.Optimizer], moe: MoE) -> None:
    """Of an optimizer that the cache was not told about, with gradients of its own."""
    for parameter in moe.experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_class(moe.experts.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def doubled(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * value for name, value in state_dict.items()}


def load_in_place(folder: Path, moe: MoE) -> None:
    """dcp.load writes into the tensors of a state dict, and no hook of the module runs."""
    dcp.save(doubled(moe.state_dict()), checkpoint_id=folder)
    dcp.load(moe.state_dict(), checkpoint_id=folder)


def edit_locals(moe: MoE) -> None:
    for value in get_model_state_dict(moe).values():
        (value.to_local() if isinstance(value, DTensor) else value).mul_(2)


@torch.no_grad()
def exchange(moe: MoE) -> None:
    for parameter in list(moe.experts.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(2 * parameter))


@torch.no_grad()
def replace(moe: MoE) -> None:
    for name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, nn.Parameter(2 * parameter))


@torch.no_grad()
def edit(moe: MoE) -> None:
    for parameter in moe.experts.parameters():
        parameter.mul_(2)


@torch.no_grad()
def edit_together(moe: MoE) -> None:
    torch._foreach_mul_(list(moe.experts.parameters()), 2.0)


CHANGES: dict[str, Callable[[MoE], object]] = {
    "fused": partial(step, partial(torch.optim.AdamW, fused=True)),
    "foreach": partial(step, partial(torch.optim.AdamW, foreach=True)),
    "foreach_sgd": partial(step, partial(torch.optim.SGD, foreach=True)),
    "one_by_one": partial(step, partial(torch.optim.AdamW, foreach=False)),
    "load_state_dict": lambda moe: moe.load_state_dict(doubled(moe.state_dict())),
    "assign": lambda moe: moe.load_state_dict(doubled(moe.state_dict()), assign=True),
    "set_model_state_dict": lambda moe: set_model_state_dict(moe, doubled(get_model_state_dict(moe))),
    "edit": edit,
    "edit_locals": edit_locals,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change(kind: str, change: str) -> None:
    assert_serves_the_weights_of_now(*make(kind), CHANGES[change])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", KINDS)
def test_dcp_load_into_a_state_dict(kind: str, tmp_path: Path) -> None:
    assert_serves_the_weights_of_now(*make(kind), partial(load_in_place, tmp_path))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", [exchange, replace])
@pytest.mark.parametrize("kind", ["plain", "ep"])
def test_tensors_that_replace_the_parameters(kind: str, change: Callable[[MoE], object]) -> None:
    """Without FSDP, which keeps using its own memory."""
    moe, cache = make(kind)
    assert_serves_the_weights_of_now(moe, cache, change)
    moe.experts.keep_quantized(cache)
    assert_serves_the_weights_of_now(moe, cache, edit)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", KINDS)
def test_edits_after_a_load_that_assigns(kind: str) -> None:
    moe, cache = make(kind)
    CHANGES["assign"](moe)
    assert_serves_the_weights_of_now(moe, cache, edit)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["plain", "ep"])
def test_functional_call(kind: str) -> None:
    (moe, cache), (plain, _) = make(kind), make(kind)
    plain.experts.keep_quantized(None)
    x = tokens()
    others = [{name: factor * p.detach() for name, p in moe.named_parameters()} for factor in (2.0, 3.0)]

    def assert_same(weights: dict[str, Tensor] | None) -> None:
        def called(module: MoE) -> list[Tensor]:
            return outputs(module if weights is None else partial(torch.func.functional_call, module, weights), x)

        for got, want in zip(called(moe), called(plain), strict=True):
            assert torch.equal(got, want)

    for weights in (None, *others, others[0], None):
        assert_same(weights)
    with torch.no_grad():
        others[0]["experts.w2"].mul_(2)
    assert_same(others[0])
    moe(x)
    fills = cache.fills
    moe(x)
    assert cache.fills == fills


@pytest.mark.usefixtures("unchecked")
def test_a_foreach_edit_of_plain_parameters() -> None:
    assert_serves_the_weights_of_now(*make("plain"), edit_together)


@pytest.mark.parametrize("kind", ["ep", "fsdp"])
def test_a_foreach_edit_of_dtensors_is_an_error_in_checking_mode(kind: str) -> None:
    """On a CPU torch changes no version of a DTensor for it; tests/gpu has it on a GPU."""
    moe, cache = make(kind)
    outputs(moe, tokens())
    edit_together(moe)
    with pytest.raises(ValueError, match=r"other values than the bytes kept in step .* call WeightCache\.advance"):
        moe(tokens())
    cache.advance()
    moe(tokens())


@pytest.mark.usefixtures("unchecked")
def test_optimizers_of_which_one_was_passed() -> None:
    moe, _ = make("plain")
    router, experts = (torch.optim.AdamW(part.parameters(), fused=True) for part in (moe.router, moe.experts))
    with pytest.raises(ValueError, match=r"experts\.w1 and 2 more weights belong to none of the 1 optimizers, .*; pass all optimizers"):
        cache_quantized_weights(moe, router)
    assert not moe.experts._kept, "and nothing is cached"
    assert isinstance(cache_quantized_weights(moe, router, experts), WeightCache)
    moe.experts.requires_grad_(False)
    assert isinstance(cache_quantized_weights(moe, router), WeightCache), "frozen weights belong to no optimizer"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", ["ep", "fsdp"])
def test_an_optimizer_of_local_shards(kind: str) -> None:
    moe, _ = make(kind)
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in moe.parameters()]
    optimizer = torch.optim.AdamW([shard.detach() for shard in shards], fused=True)
    cache = cache_quantized_weights(moe, optimizer)

    def step(_: MoE) -> None:
        for group in optimizer.param_groups:
            for shard in group["params"]:
                shard.grad = torch.ones_like(shard)
        optimizer.step()

    assert_serves_the_weights_of_now(moe, cache, step)


def test_an_optimizer_from_before_the_sharding() -> None:
    torch.manual_seed(0)
    moe = MoE(CONFIG, MXFP8)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    fully_shard(moe, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"experts\.w1 and 2 more .* created after the model was sharded"):
        cache_quantized_weights(moe, optimizer)


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_optimizer_step() -> None:
    moe, cache = make("plain")
    optimizer = torch.optim.SGD(moe.experts.parameters(), lr=0.1, foreach=True)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        outputs(moe, tokens())
        assert cache.nbytes()
        compiled()
        assert not cache.nbytes()
    torch._dynamo.reset()


def test_a_deleted_model_leaves_no_memory() -> None:
    moe, cache = make("plain")
    outputs(moe, tokens())
    gone = weakref.ref(cache)
    del moe, cache
    gc.collect()
    assert gone() is None


def test_steps_of_others_do_not_stumble_over_a_module_without_its_weights() -> None:
    moe, cache = make("plain")
    outputs(moe, tokens())
    del moe.experts.w1
    other, steps = nn.Linear(2, 2), cache.step
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert (cache.step, cache.nbytes()) == (steps + 1, 0)


def gathered(rank: int, world: int) -> None:
    weight_cache.checking = lambda _: False
    for change in ("fused", "foreach", "assign", "edit", "edit_locals"):
        for kind in ("ep", "fsdp"):
            assert_serves_the_weights_of_now(*make(kind), CHANGES[change])


def test_two_ranks() -> None:
    run_ranks(gathered, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "separate": lambda: MoE(CONFIG, MXFP8),
    "experts": lambda: MoE(CONFIG, MXFP8),
    "fused_layer": lambda: FusedMoE(CONFIG, MXFP8),
    "fused_layer_in_chunks": lambda: FusedMoE(CONFIG, MXFP8, RuntimeEPConfig(scratch_rows=64)),
    "linear": lambda: MXLinear(nn.Linear(64, 96), RECIPES[MXFP8]),
}


def cached_layer(kind: str) -> tuple[nn.Module, WeightCache, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = LAYERS[kind]()
    if kind == "separate":
        module.experts.fused = False  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, cache_quantized_weights(module, optimizer), optimizer


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", LAYERS)
def test_a_capture_has_forms_of_its_own(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Made once in each capture, from the weights of then, and read by nothing else."""
    (module, cache, _), (plain, *_) = cached_layer(kind), cached_layer(kind)
    x = tokens()
    for part in plain.modules():
        if isinstance(part, weight_cache.KeepsQuantized):
            part.keep_quantized(None)

    def made(capture: int) -> tuple[int, int]:
        """Forms that two passes in a capture (0: eager) quantise, by pass."""
        found = []
        with monkeypatch.context() as capturing:
            capturing.setattr(weight_cache, "is_capturing", lambda: capture > 0)
            capturing.setattr(weight_cache, "capture_number", lambda _: capture)
            for _ in range(2):
                fills = cache.fills
                got = outputs(module, x)
                found.append(cache.fills - fills)
                for value, want in zip(got, outputs(plain, x), strict=True):
                    assert torch.equal(value, want)
        return found[0], found[1]

    forms, again = made(1)
    assert forms > 0 == again
    assert made(0) == (forms, 0)
    nbytes = cache.nbytes()
    assert made(0) == (0, 0)
    for part in (module, plain):
        for parameter in part.parameters():
            parameter.data.mul_(2)  # only the weight itself shows it
    assert made(2) == (forms, 0)
    assert cache.nbytes() == 2 * nbytes
    assert made(1) == (forms, 0)  # numbers do not come again, but nothing of another capture is read
    cache.advance()
    assert made(0) == (forms, 0)
    assert cache.nbytes() == nbytes, "an eager call drops what a capture has kept"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", ["step", "advance", "load_state_dict"])
def test_a_captured_change_of_weights_ends_the_use(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    (module, cache, optimizer), (plain, *_) = cached_layer("experts"), cached_layer("experts")
    x = tokens()
    outputs(module, x)
    outputs(plain, x)
    changes = {"step": optimizer.step, "advance": cache.advance, "load_state_dict": lambda: module.load_state_dict(module.state_dict())}
    with monkeypatch.context() as capture:
        capture.setattr(weight_cache, "is_capturing", lambda: True)
        with pytest.warns(UserWarning, match="WeightCache: a CUDA graph records an optimizer step .* in every eager call from now on"):
            changes[change]()
    fills = cache.fills
    for part, other in zip(module.parameters(), plain.parameters(), strict=True):
        part.data.mul_(2)  # as a replay does
        other.data.copy_(part.data)
    plain.experts.keep_quantized(None)  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for got, want in zip(outputs(module, x), outputs(plain, x), strict=True):
            assert torch.equal(got, want)
        optimizer.step()
    assert (cache.fills, cache.nbytes()) == (fills, 0)


def test_asking_whether_a_stream_captures_initialises_no_cuda() -> None:
    if not torch.cuda.is_initialized():
        assert not device.is_capturing()
        assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("frozen", [True, False])
def test_sums_of_ranks_into_mx_tensors_raise(frozen: bool) -> None:
    """They wrote into a dequantised copy: nothing arrived, without an error."""
    values = torch.randn(64, 32)
    mx = MXWeight.of(values) if frozen else quantize_mx(values)
    for collective in (lambda: dist.all_reduce(mx), lambda: dist.all_reduce(mx.data), lambda: dist.reduce(mx, 0)):
        with pytest.raises(ValueError, match=r"want its bytes, or for a sum its dequantize\(\); exchange w.qdata.view"):
            collective()


def broadcast_weights(rank: int, world: int) -> list[float]:
    """Frozen weights of rank 0 by `broadcast`, in one of DDP's buckets with others, and in a bucket of its own."""
    found = []
    for bucket in (None, 1 << 20, 1):
        layer = nn.Linear(32, 64)
        layer.weight = nn.Parameter(MXWeight.of(torch.full((64, 32), rank + 1.0), keep_dgrad_form=True), requires_grad=False)
        writes = layer.weight.kept.writes
        if bucket is None:
            dist.broadcast(layer.weight, 0)
        else:
            _sync_module_states(layer, dist.group.WORLD, bucket, 0, ())
        assert layer.weight.kept.writes > writes, "what was made of the old bytes is not used again"
        found += [layer.weight.dequantize().min().item(), layer.weight.dequantize().max().item()]
    return found


def test_every_rank_gets_the_frozen_weights_of_rank_0() -> None:
    assert run_ranks(broadcast_weights, 2) == [[1.0] * 6] * 2


def test_frozen_weights_are_shared_with_other_processes_and_not_by_dlpack() -> None:
    """Both ended the process with a segmentation fault."""
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(MXWeight.of(torch.randn(32, 64)), requires_grad=False)
    before = layer.weight.dequantize()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert quantize_mx(torch.randn(4, 64)).share_memory_().is_shared()
    assert torch.equal(layer.weight.dequantize(), before)
    with pytest.raises(ValueError, match="two storages, want a plain tensor for DLPack; use their dequantize"):
        torch.from_dlpack(layer.weight)
