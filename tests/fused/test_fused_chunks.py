"""The fused layer with bounded scratch rows, on one rank: bits of every dW, sums over chunks, skew, starved experts, saved bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.moe_truth import C, D, E, H, error, make, tokens, truth, walk
from tests.truth import assert_same, raises_naming
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.fused.expert_chunks import ChunkBounds
from mxep.moe import FusedMoE, MoE, RuntimeEPConfig, saved_bytes
from mxep.recipe import RECIPES

T = 160
BOUNDED = RuntimeEPConfig(scratch_rows=192)


class Products(TorchDispatchMode):
    """Rows of every grouped product, and how often one of the weights `of` was read by anything else."""

    def __init__(self, *of: Tensor) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.reads, self._of = 0, {weight.data_ptr() for weight in of}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.mxep.grouped_mm_mx.default, torch.ops.mxep.grouped_mm_hp.default):
            self.rows.append(out.shape[0])
        elif "quantize" in str(func) or func is torch.ops.aten.cat.default:
            read = args[0] if isinstance(args[0], (list, tuple)) else args[:2]
            self.reads += any(isinstance(x, Tensor) and x.data_ptr() in self._of for x in read)
        return out


def compare(moe: MoE, x: Tensor, dy: Tensor, same: Callable[[Tensor, Tensor, str], None]) -> int:
    """Compares the layer in chunks with the layer in one piece by `same`; returns the number of grouped products."""
    assert isinstance(moe, FusedMoE)
    bounded, moe.runtime = moe.runtime, replace(moe.runtime, scratch_rows=None)
    want, moe.runtime = walk(moe, x, dy), bounded
    with Products() as products, bounds_unknown():
        found = walk(moe, x, dy)
    assert max(products.rows) <= (bounded.scratch_rows or 0)
    for name, got in found.items():
        same(got, want[name], name)
    with Products() as fewer, bounds_known():
        skipping = walk(moe, x, dy)
    assert 0 < len(fewer.rows) <= len(products.rows)
    for name, got in skipping.items():
        assert_same(got, found[name], f"{name} without the chunks that are known to be empty")
    return len(products.rows)


def bounds_known() -> AbstractContextManager:
    """The host always knows which chunks are empty, as when it runs far behind the GPU."""
    of = ChunkBounds.of

    def waited(bounds: Tensor) -> ChunkBounds:
        copied = of(bounds)
        if bounds.is_cuda:
            torch.cuda.synchronize()
        return copied

    return mock.patch.object(ChunkBounds, "of", waited)


def bounds_unknown() -> AbstractContextManager:
    """The host never knows which chunks are empty, as when it runs far ahead of the GPU."""
    return mock.patch.object(ChunkBounds, "empty", return_value=False)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_weight_gradients_have_the_same_bits(recipe: str) -> None:
    """An expert is in one chunk as a whole. Sums over choices are in float32 and rounded once; dx once more before the router's part."""
    check_recipe(recipe, assert_same)


def check_recipe(recipe: str, same: Callable[[Tensor, Tensor, str], None]) -> None:
    moe = make(FusedMoE, recipe, expert_biases=True)
    moe.runtime = BOUNDED
    assert compare(moe, *tokens(), same) > 10
    again = {"keep_first_product": False}
    for changes in ({"keep_first_product": "mxfp8"}, again, again | {"redispatch_x_in_backward": True}):
        moe.runtime = replace(BOUNDED, **changes)
        compare(moe, *tokens(), same)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.usefixtures("poison")
def test_against_float64(activation: str) -> None:
    """In float32 only the order of the sums differs."""
    moe = make(FusedMoE, "hp", torch.float32, activation=activation, expert_biases=True)
    x, dy = tokens(dtype=torch.float32)
    want = truth(moe, x, dy, moe.router(x).experts)
    for scratch in (160, 192, 320):
        for modes in (("rank_dedup", "all_to_all"), ("all_to_all", "reduce_scatter"), ("all_gather", "rank_dedup")):
            moe.runtime = RuntimeEPConfig(*modes, scratch_rows=scratch)
            for name, got in walk(moe, x, dy).items():
                assert error(got, want[name]) < 1e-6, f"{scratch} {modes} {name}"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
def test_skew_and_few_tokens(recipe: str) -> None:
    """All tokens at one expert, experts without tokens, few tokens: the same results, and exact zeros for experts without tokens."""
    check_skew(recipe, assert_same)


def check_skew(recipe: str, same: Callable[[Tensor, Tensor, str], None]) -> None:
    for count in (0, 1, 33, 95):
        for favourite in (0, 5, 7):
            moe = make(FusedMoE, recipe, top_k=2)
            moe.expert_bias[favourite] = 10
            moe.expert_bias[2:4] = -10
            moe.runtime = RuntimeEPConfig(scratch_rows=max(32, -(-count // 32) * 32))
            x, dy = tokens(count)
            compare(moe, x, dy, same)
            assert not walk(moe, x, dy)["experts.w1"][2:4].any()


def test_one_chunk_with_all_rows_has_every_bit() -> None:
    """If the last chunk has all rows, the sums have the bits of a layer without a bound, too."""
    moe = make(FusedMoE, "mxfp8_wgrad_with_mx", torch.float32, top_k=1, renormalize=False)
    moe.expert_bias[3] = 10
    x, dy = tokens(dtype=torch.float32)
    want = walk(moe, x, dy)
    moe.runtime = RuntimeEPConfig(scratch_rows=160 + 7 * 32)
    assert sum((moe.router(x, moe.expert_bias).experts == 3).flatten()) == T
    with Products() as products, bounds_unknown():
        found = walk(moe, x, dy)
    assert len(products.rows) > 5, "chunks without rows"
    for name, got in found.items():
        assert_same(got, want[name], name)
    with Products() as products:
        found = walk(moe, x, dy)
    assert len(products.rows) == 4, "one chunk, forward and backward"
    for name, got in found.items():
        assert_same(got, want[name], name)


def test_saved_bytes() -> None:
    """Saved are the last chunk's first product, and the tokens' bytes for the other chunks."""
    moe = make(FusedMoE, "mxfp8_wgrad_with_mx")
    x, _ = tokens()
    kept = saved_bytes(moe(x))
    moe.runtime = BOUNDED
    assert saved_bytes(moe(x)) == kept | {"first product": 192 * 2 * H * 2}
    moe.runtime = replace(BOUNDED, keep_first_product="mxfp8")
    assert saved_bytes(moe(x)) == kept | {"first product": 192 * 2 * H * 33 // 32}


def test_too_few_scratch_rows_are_an_error() -> None:
    moe = make(FusedMoE, "hp")
    moe.runtime = RuntimeEPConfig(scratch_rows=159)
    with raises_naming("scratch_rows=159", "want at least 160", "all 160 tokens of the group"):
        moe(tokens()[0])
    for wrong in (0, -1, 2.5, True):
        with raises_naming("RuntimeEPConfig", f"scratch_rows={wrong!r}"):
            RuntimeEPConfig(scratch_rows=wrong)  # type: ignore[arg-type]
    numbers = {RuntimeEPConfig(scratch_rows=rows, keep_first_product=keep).number for rows in (None, 1, 2, 729) for keep in (True, False)}
    assert len(numbers) == 8
    assert RuntimeEPConfig.from_json(BOUNDED.to_json()) == BOUNDED
    assert C * T > 192


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "bf16"])
def test_weights_are_prepared_once_for_all_chunks(recipe: str) -> None:
    """A chunk without rows would otherwise prepare the weights as well."""
    moe = make(FusedMoE, recipe)
    assert isinstance(moe, FusedMoE)
    weights = [getattr(moe.experts, name) for name in ("w1", "w2", "w3")]
    reads, num_products = [], []
    for scratch in (None, 192):
        moe.runtime = RuntimeEPConfig(scratch_rows=scratch, keep_first_product=False)
        with Products(*weights) as products:
            walk(moe, *tokens())
        reads.append(products.reads)
        num_products.append(len(products.rows))
    assert num_products[1] > num_products[0] > 0
    assert 0 < reads[1] <= reads[0], "a single chunk keeps no weight forms, and makes again what it needs twice"


class Alive(TorchDispatchMode):
    """Counts the most tensors of these shapes, made by operators, that were alive at once."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.most, self._shapes, self._found = 0, shapes, list[weakref.ref]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and tuple(out.shape) in self._shapes:
            self._found = [*(ref for ref in self._found if ref() is not None), weakref.ref(out)]
            self.most = max(self.most, len({id(ref()) for ref in self._found}))
        return out


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
def test_at_most_one_weight_gradient_exists_twice(recipe: str) -> None:
    """The last chunk makes new gradient tensors while those that the earlier chunks have written still exist."""
    moe = make(FusedMoE, recipe)
    moe.runtime = BOUNDED
    x, dy = tokens()
    y = moe(x.requires_grad_())
    with Alive({(E, H, D), (E, D, H)}) as alive:
        y.backward(dy)
    assert 3 <= alive.most <= 4
