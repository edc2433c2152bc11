"""Cached weights on a GPU, without checking: with CUDA graphs, on several streams, and edits of DTensors in one kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mxep.grouped_mm.products import Weights, gemm_options
from mxep.moe import FusedMoE, MoEConfig
from mxep.moe.experts import Experts
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.ops.grouped_gemm.hopper import quantize_weight
from mxep.parallel import MXLinear, cache_quantized_weights
from mxep.recipe import RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked", "on_the_gpu")]
D, H, E, ROWS = 256, 192, 4, 320
LATE_CYCLES = 50_000_000  # some 25 ms
POISON = 0xFF


def make(kind: str, recipe: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A module and its arguments after the rows."""
    torch.manual_seed(0)
    if kind == "linear":
        return MXLinear(nn.Linear(D, H, bias=False, dtype=torch.bfloat16), RECIPES[recipe]), ()
    if kind == "fused_layer":
        moe = FusedMoE(MoEConfig(D, H, E, 2), recipe)
        moe.init_weights(0.05)
        return moe.bfloat16(), ()
    experts = Experts(D, H, E, recipe).bfloat16()
    experts.fused = kind == "experts"
    return experts, (torch.tensor([64, 0, 160, 96]),)


def walk(module: Callable[..., Tensor], x: Tensor, others: tuple[Tensor, ...], weights: list[nn.Parameter]) -> list[Tensor]:
    """y, dx and the gradients of the weights."""
    leaf = x.detach().requires_grad_()
    y = module(leaf, *others)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (leaf, *weights), allow_unused=True)]


def assert_all_equal(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), (what, number)
        assert a is None or torch.equal(a, b), (what, number)


def keep(module: nn.Module, cache: WeightCache | None) -> None:
    (module.experts if isinstance(module, FusedMoE) else module).keep_quantized(cache)  # type: ignore[operator, union-attr]


KINDS = ("fused_layer", "experts", "separate", "linear")


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("state", ["full", "empty", "advanced"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_between_eager_steps(kind: str, state: str, recipe: str) -> None:
    """A replay has the bits of a fresh eager pass after every eager step, and eager passes those of passes without a cache."""
    module, others = make(kind, recipe)
    weights, x = list(module.parameters()), torch.randn(ROWS, D, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(weights, lr=0.05, fused=True)
    cache = cache_quantized_weights(module, optimizer)
    keep(module, None if state == "empty" else cache)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            walk(module, x, others, weights)
    torch.cuda.current_stream().wait_stream(aside)
    assert bool(cache.fills) == (state != "empty")
    keep(module, cache)
    if state == "full":
        walk(module, x, others, weights)  # the cache is filled again, since `keep` has made new entries
    if state == "advanced":
        cache.advance()
    fills = cache.fills
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk(module, x, others, weights)
        forms, fills = cache.fills - fills, cache.fills
        found = walk(module, x, others, weights)
    assert forms > 0, "a capture reads eager forms"
    assert cache.fills == fills, "a capture quantises a weight again"

    def check(what: str) -> None:
        eager = [walk(module, x, others, weights) for _ in range(2)]  # fills and reads
        graph.replay()
        keep(module, None)
        want = walk(module, x, others, weights)
        keep(module, cache)
        for name, got in (("first eager", eager[0]), ("second eager", eager[1]), ("replay", found)):
            assert_all_equal(got, want, f"{what}, {name}")

    check("behind the capture")
    for step in range(3):
        last = found[0].clone()
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        x.copy_(torch.randn_like(x))
        check(f"step {step}")
        assert not torch.equal(found[0], last)
    assert not cache.captured


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_optimizer_step(kind: str, fused: bool) -> None:
    """It ends the cache's use with a warning: eager passes read the weights that replays have written."""
    module, others = make(kind, "mxfp8_wgrad_with_hp")
    x = torch.randn(ROWS, D, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, capturable=True, fused=fused, foreach=not fused)
    cache = cache_quantized_weights(module, optimizer)

    def whole_step() -> None:
        module(x, *others).float().square().sum().backward()
        optimizer.step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            optimizer.zero_grad()
            whole_step()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="WeightCache: a CUDA graph records an optimizer step"), torch.cuda.graph(graph):
        whole_step()
    fills = cache.fills
    with torch.no_grad():
        for _ in range(3):
            last = module(x, *others)
            graph.replay()
            got = module(x, *others)
            keep(module, None)
            want = module(x, *others)
            keep(module, cache)
            assert torch.equal(got, want)
            assert not torch.equal(got, last)
    assert cache.captured
    assert (cache.fills, cache.nbytes()) == (fills, 0)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_steps_with_microbatches(kind: str, recompute: bool, recipe: str) -> None:
    """Two steps in a graph quantise each weight once each, and train as eager steps without a cache do, to the bit."""
    module, others = make(kind, recipe)
    plain = copy.deepcopy(module)
    x, fills = torch.randn(2, ROWS, D, dtype=torch.bfloat16), list[int]()

    def stepper(trained: nn.Module) -> tuple[Callable[[], None], torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.05, capturable=True, fused=True)

        def step() -> None:
            for microbatch in x:
                y = checkpoint(trained, microbatch, *others, use_reentrant=False) if recompute else trained(microbatch, *others)
                y.float().square().sum().backward()
                fills.append(cache.fills)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return step, optimizer

    (step, optimizer), (plain_step, _) = stepper(module), stepper(plain)
    cache = cache_quantized_weights(module, optimizer)
    cache.captured = True  # known: no warning
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    assert {*fills} == {0}, "eager steps keep nothing"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
    once = fills[-4]
    assert fills[-4:] == [once, once, 2 * once, 2 * once]
    assert once > 0, "a capture does not use the cache"
    for _ in range(3):
        plain_step()
    for number in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        plain_step()
        plain_step()
        assert_all_equal([*module.parameters()], [*plain.parameters()], f"step {number}")


@pytest.mark.parametrize("kind", ["experts", "separate", "linear"])
def test_make_graphed_callables(kind: str) -> None:
    """torch warms up on a side stream, then captures forward and backward apart: trained so, with a cache, the same bits as eager."""
    module, others = make(kind, "mxfp8_wgrad_with_hp")
    plain = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, fused=True) for m in (module, plain)]
    cache = cache_quantized_weights(module, optimizers[0])
    eager_forward = module.forward
    x = torch.randn(ROWS, D, dtype=torch.bfloat16)
    graphed: Any = torch.cuda.make_graphed_callables(module, (x.clone().requires_grad_(), *others))
    for step in range(3):
        results = []
        for m, optimizer in ((graphed, optimizers[0]), (plain, optimizers[1])):
            leaf = x.clone().requires_grad_()
            y = m(leaf, *others)
            y.float().square().sum().backward()
            results.append([y.detach().clone(), leaf.grad, *(w.grad.clone() for w in m.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        assert_all_equal(*results, f"step {step}")
        x.copy_(torch.randn_like(x))
    with torch.no_grad():
        assert torch.equal(eager_forward(x, *others), plain(x, *others)), "eager calls between replays"
    assert not cache.captured


@pytest.mark.parametrize("capture_error_mode", ["global", "thread_local"])
def test_a_variant_that_runs_in_a_graph_first(capture_error_mode: str) -> None:
    """Calls with a cache make both forms of a weight by one kernel; a graph of forward alone, without a cache, makes one of them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("rebased weights are Hopper's")
    module, others = make("experts", "mxfp8_wgrad_with_hp")
    cache, x = WeightCache(), torch.randn(ROWS, D, dtype=torch.bfloat16)
    keep(module, cache)
    quantize_weight._kernel.cache_clear()
    with torch.no_grad():
        eager = module(x, *others)
        variants = quantize_weight._kernel.cache_info().currsize
        torch.cuda.synchronize()
        keep(module, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=capture_error_mode):
            captured = module(x, *others)
    assert quantize_weight._kernel.cache_info().currsize > variants
    graph.replay()
    assert torch.equal(captured, eager)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 256, 512, dtype=torch.bfloat16))


def poison(forms: list[Tensor]) -> None:
    """Memory of these sizes of the current stream's is full of bytes that no quantised weight has, and free."""
    junk = [torch.full((form.nbytes,), POISON, dtype=torch.uint8) for form in forms for _ in range(4)]
    torch.cuda.current_stream().synchronize()
    del junk


@pytest.mark.parametrize("path", ["auto", "exact"])
def test_a_reader_on_another_stream(path: str) -> None:
    """It waits for the stream that fills, however late that is; memory that it still reads when the cache empties is not overwritten."""
    owner, cache = Owner(), WeightCache()
    options = gemm_options(owner.w.device, torch.bfloat16, path, "hp", "rceil", pad_groups=False)
    if path == "auto" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("rebased weights are Hopper's")
    want = [form.clone() for form in Weights(owner.w, None, options, CachedWeight(cache, owner, "w")).quantized("forward")]
    kept = CachedWeight(cache, owner, "w")
    filling, reading = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (filling, reading):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(filling):
        poison(want)
        torch.cuda._sleep(LATE_CYCLES)
        Weights(owner.w, None, options, kept).quantized("forward")
    fills = cache.fills
    with torch.cuda.stream(reading):
        got = [form.clone() for form in Weights(owner.w, None, options, kept).quantized("forward")]
    reading.synchronize()
    assert cache.fills == fills
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))

    with torch.cuda.stream(reading):
        forms = Weights(owner.w, None, options, kept).quantized("forward")
        torch.cuda._sleep(LATE_CYCLES)
        got = [form.clone() for form in forms]
        del forms
    cache.advance()
    with torch.cuda.stream(filling):
        poison(want)
    torch.cuda.synchronize()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


def test_a_layer_that_is_read_on_another_stream_than_it_was_filled_on() -> None:
    layer, _ = make("linear", "mxfp8_wgrad_with_hp")
    x = torch.randn(ROWS, D, dtype=torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        keep(layer, WeightCache())
        layer(x)  # loads what it needs
        cache = WeightCache()
        keep(layer, cache)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        for stream in (first, second):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            junk = [torch.full((size,), POISON, dtype=torch.uint8) for size in (D * H, D * H // 32, H * 4) for _ in range(8)]
            first.synchronize()
            del junk
            torch.cuda._sleep(LATE_CYCLES)
            layer(x)
        with torch.cuda.stream(second):
            got = layer(x)
        torch.cuda.synchronize()
    assert cache.fills == 1
    assert torch.equal(got, want)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.no_grad()
def edit_together(parameters: list[nn.Parameter]) -> None:
    torch._foreach_mul_(parameters, 2.0)


def step_unseen(optimizer_class: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[list[nn.Parameter]], None]:
    """By an optimizer that the cache was not told about."""

    def step(parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer_class(parameters, lr=0.05, **options).step()

    return step


CHANGES = {
    "foreach": edit_together,
    "fused_adamw": step_unseen(torch.optim.AdamW, fused=True),
    "foreach_adamw": step_unseen(torch.optim.AdamW, foreach=True),
    "foreach_sgd": step_unseen(torch.optim.SGD, foreach=True),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["plain", "dtensor", "fsdp"])
def test_changes_by_kernels_of_many_tensors(kind: str, change: str) -> None:
    """torch's fast foreach kernels change the version of a DTensor's local tensor, on GPUs; fused ones none."""
    experts, others = make("experts", "mxfp8_wgrad_with_hp")
    mesh = init_device_mesh("cuda", (1,))
    if kind == "dtensor":
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(0)], run_check=False)))
    if kind == "fsdp":
        fully_shard(experts, mesh=mesh)
        experts.set_reshard_after_forward(True)  # also the root
    cache = cache_quantized_weights(experts, torch.optim.SGD(experts.parameters(), lr=0.0))
    x = torch.randn(ROWS, D, dtype=torch.bfloat16)
    with torch.no_grad():
        before = experts(x, *others)
    parameters, fills = list(experts.parameters()), cache.fills
    if kind != "plain":
        assert all(isinstance(parameter, DTensor) for parameter in parameters), "sharded again"
    CHANGES[change](parameters)
    with torch.no_grad():
        got = experts(x, *others)
        assert cache.fills > fills
        keep(experts, None)
        assert torch.equal(got, experts(x, *others))
    assert not torch.equal(got, before)
