"""A fused layer and `MXLinear` with a cache of quantised weights, on the code path of one GPU with FP8 GEMMs: on a CPU, by references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.spies import spy_on
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.fused import autograd, options
from mxep.grouped_mm import products
from mxep.moe import FusedMoE, MoEConfig, RuntimeEPConfig
from mxep.moe.experts import Experts
from mxep.mx import weight_cache
from mxep.mx.weight_cache import WeightCache
from mxep.parallel import MXLinear
from mxep.recipe import RECIPES

D, H, E, C, ROWS = 64, 32, 4, 2, 48


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Lets CPU tensors take that path. Yields what is called for each pass that quantises a weight."""
    passes = spy_on(monkeypatch, products.direct, "quantize_weight")
    monkeypatch.setattr(products, "resolve_gemm_path", lambda name, device: "fp8")
    monkeypatch.setattr(autograd, "_replays", lambda *_: True)
    for module in (weight_cache, products):
        monkeypatch.setattr(module, "checking", lambda device: False)
    kept = products._kept_options, options._resolve  # which have a CPU's own path
    for function in kept:
        function.cache_clear()
    yield passes
    for function in kept:
        function.cache_clear()


def layer(recipe: str, runtime: RuntimeEPConfig | None = None) -> FusedMoE:
    torch.manual_seed(0)
    moe = FusedMoE(MoEConfig(D, H, E, C), recipe, runtime)
    moe.init_weights(0.1)
    return moe.bfloat16()


def linear(recipe: str) -> MXLinear:
    torch.manual_seed(0)
    return MXLinear(nn.Linear(D, H, bias=False, dtype=torch.bfloat16), RECIPES[recipe])


def walk(module: nn.Module, x: Tensor, x_learns: bool = True) -> list[Tensor | None]:
    """Output and gradients."""
    for parameter in module.parameters():
        parameter.grad = None
    leaf = x.clone().requires_grad_(x_learns)
    y = module(leaf)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(None if p.grad is None else p.grad.clone() for p in module.parameters())]


def assert_same(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), number
        assert a is None or b is None or torch.equal(a, b), number


RUNTIMES = {
    "all kept": RuntimeEPConfig(),
    "no gate and up": RuntimeEPConfig(keep_first_product=False),
    "no dgrad form": RuntimeEPConfig(keep_dgrad_weights=False),
}


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("frozen", ["", "w1", "w2", "w1 w2", "x"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_fused_layer(runtime: str, frozen: str, recipe: str, one_gpu: mock.Mock) -> None:
    """The numbers of no cache, by one pass for each weight that is trained; after a change of weights again."""
    x, moe, plain = torch.randn(ROWS, D, dtype=torch.bfloat16), layer(recipe, RUNTIMES[runtime]), layer(recipe, RUNTIMES[runtime])
    for experts in (moe.experts, plain.experts):
        for name in {"w1", "w2"} & {*frozen.split()}:
            getattr(experts, name).requires_grad_(False)
    cache = WeightCache()
    moe.experts.keep_quantized(cache)
    learns = frozen != "x"
    most = 2 + len({"w1", "w2"} & {*frozen.split()})  # a frozen weight's forms are made apart
    for step in range(3):
        want = walk(plain, x, learns)
        one_gpu.reset_mock()
        assert_same(walk(moe, x, learns), want)
        assert 0 < one_gpu.call_count <= most, step
        one_gpu.reset_mock()
        assert_same(walk(moe, x, learns), want)
        assert not one_gpu.called, "a kept weight is quantised again"
        with torch.no_grad():
            for parameter, other in zip(moe.parameters(), plain.parameters(), strict=True):
                other.copy_(parameter.mul_(0.5 + step))


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_a_linear_layer(recipe: str, one_gpu: mock.Mock) -> None:
    x, kept, plain = torch.randn(ROWS, D, dtype=torch.bfloat16), linear(recipe), linear(recipe)
    kept.keep_quantized(WeightCache())
    for step in range(3):
        want = walk(plain, x)
        one_gpu.reset_mock()
        assert_same(walk(kept, x), want)
        assert_same(walk(kept, x), want)
        assert one_gpu.call_count == 1, step
        with torch.no_grad():
            plain.weight.copy_(kept.weight.mul_(0.5 + step))


MAKE: dict[str, Callable[[str], nn.Module]] = {"layer": layer, "linear": linear}


def keep(module: nn.Module) -> WeightCache:
    cache, part = WeightCache(), module.experts if isinstance(module, FusedMoE) else module
    part.keep_quantized(cache)  # type: ignore[operator, union-attr]
    return cache


@pytest.mark.parametrize("kind", MAKE)
def test_a_recomputed_layer_reads_the_weights_of_then(kind: str) -> None:
    """Backward of a layer that was recomputed after a step: dgrad reads the new weights, as everything else does."""
    found = []
    for kept in (False, True):
        module, x = MAKE[kind]("mxfp8_wgrad_with_mx"), torch.randn(ROWS, D, dtype=torch.bfloat16).requires_grad_()
        if kept:
            keep(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        first, second = (checkpoint(module, x, use_reentrant=False) for _ in range(2))
        first.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        second.float().square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    assert_same(*found)


@pytest.mark.parametrize("then", ["other", "none"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_a_recomputed_layer_whose_cache_serves_once(kind: str, captured: bool, then: str) -> None:
    """A checkpoint goes by the order of what both forwards save, whoever makes the weights' forms."""
    found = []
    for kept in (False, True):
        module, x = MAKE[kind]("mxfp8_wgrad_with_mx"), torch.arange(ROWS * D).view(ROWS, D).sin().bfloat16().requires_grad_()
        if kept:
            cache = keep(module)
            cache.captured = captured
        out = checkpoint(module, x, use_reentrant=False)
        if kept and then == "none":
            (module.experts if isinstance(module, FusedMoE) else module).keep_quantized(None)  # type: ignore[operator, union-attr]
        elif kept:
            cache.captured = not captured
        out.float().square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    assert_same(*found)


@pytest.mark.parametrize("kind", MAKE)
def test_an_output_keeps_no_forms_alive(kind: str) -> None:
    """After backward and a step, whatever is still in use of the graph."""
    module = MAKE[kind]("mxfp8_wgrad_with_mx")
    cache, x = keep(module), torch.randn(ROWS, D, dtype=torch.bfloat16).requires_grad_()
    loss = module(x).float().square().sum()
    forms = [weakref.ref(tensor.untyped_storage()) for kept in cache._kept.values() for tensor in kept.form]
    assert len(forms) == 4 * len(cache._kept) > 0
    loss.backward()
    cache.advance()
    gc.collect()
    assert [form() for form in forms] == [None] * len(forms)


@pytest.mark.parametrize("kind", MAKE)
def test_checking_mode_compares_in_backward_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module_ in (weight_cache, products):
        monkeypatch.setattr(module_, "checking", lambda device: True)
    module = MAKE[kind]("mxfp8_wgrad_with_mx")
    keep(module)
    y = module(torch.randn(ROWS, D, dtype=torch.bfloat16).requires_grad_())
    for parameter in module.parameters():
        parameter.data.mul_(2)
    with pytest.raises(ValueError, match=r"WeightCache: .* has other values than the bytes kept in step 0"):
        y.float().square().sum().backward()


class _Capture:
    """Numbers of captures that a test is in, as the cache asks for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        monkeypatch.setattr(weight_cache, "is_capturing", lambda: self.number > 0)
        monkeypatch.setattr(weight_cache, "capture_number", lambda device: self.number)


def experts(recipe: str) -> Experts:
    """As a module of rows alone, all of one expert."""
    torch.manual_seed(0)
    made = Experts(D, H, 1, recipe).bfloat16()
    forward = made.forward
    made.forward = lambda rows: forward(rows, torch.tensor([rows.shape[0]]))  # type: ignore[method-assign, assignment]
    return made


@pytest.mark.parametrize("make", [layer, linear, experts])
def test_forward_and_backward_are_graphs_of_their_own(
    make: Callable[[str], nn.Module], monkeypatch: pytest.MonkeyPatch, one_gpu: mock.Mock
) -> None:
    """Backward's graph reads what forward's has made, and quantises nothing of the weights whose dgrad forward saves."""
    module, plain = make("mxfp8_wgrad_with_mx"), make("mxfp8_wgrad_with_mx")
    x, capture = torch.randn(64, D, dtype=torch.bfloat16), _Capture(monkeypatch)
    want = walk(plain, x)
    part: Any = module.experts if isinstance(module, FusedMoE) else module
    part.keep_quantized(WeightCache())
    leaf = x.clone().requires_grad_()
    one_gpu.reset_mock()
    capture.number = 1
    y = module(leaf)
    forward = one_gpu.call_count
    capture.number = 2
    y.float().square().sum().backward()
    assert forward > 0
    assert one_gpu.call_count - forward == (make is experts), "of the down projection alone, which its function does not save"
    assert_same([y.detach(), leaf.grad, *(p.grad for p in module.parameters())], want)


@pytest.mark.parametrize("kind", MAKE)
def test_a_change_of_weights_inside_a_capture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses after it, in the same graph, read the new weights, though no version shows the change."""
    module, plain, capture = MAKE[kind]("mxfp8_wgrad_with_mx"), MAKE[kind]("mxfp8_wgrad_with_mx"), _Capture(monkeypatch)
    cache, x = keep(module), torch.randn(ROWS, D, dtype=torch.bfloat16)
    cache.captured, capture.number = True, 1
    walk(module, x)
    for made in (module, plain):
        for parameter in made.parameters():
            parameter.data.mul_(2)
    cache.advance()
    assert_same(walk(module, x), walk(plain, x))
