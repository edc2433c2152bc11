"""Shapes of dense linear layers that are converted: those that were measured to be faster, and wider ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mxep.parallel import linear_gains
from mxep.parallel.linear_gains import LinearTimes, _gaining_shapes, measured_times
from mxep.recipe import Recipe

MX, HP = Recipe.named("mxfp8_wgrad_with_mx"), Recipe.named("mxfp8_wgrad_with_hp")
TABLE = (
    LinearTimes("h200", "1", 32768, 2048, 2048, bf16=1.0, hp=1.2, mx=1.0),
    LinearTimes("h200", "1", 32768, 2048, 4096, bf16=2.0, hp=1.7, mx=1.5),
    LinearTimes("h200", "1", 32768, 4096, 2048, bf16=2.0, hp=1.7, mx=1.5),
    LinearTimes("h200", "1", 32768, 512, 4096, bf16=1.0, hp=0.8, mx=0.5),
    LinearTimes("h100", "2", 32768, 512, 4096, bf16=1.0, hp=0.8, mx=0.99),
)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys.modules[LinearTimes.__module__], "measured_times", lambda: TABLE)
    _gaining_shapes.cache_clear()
    yield
    _gaining_shapes.cache_clear()


@pytest.mark.parametrize("recipe", [MX, HP])
def test_shapes_that_were_measured_slower_stay(recipe: Recipe) -> None:
    for row in measured_times():
        if getattr(row, recipe.wgrad) >= row.bf16:
            assert not linear_gains(row.K, row.N, recipe, row.T), row
    assert linear_gains(2048, 10944, recipe)


@pytest.mark.parametrize(
    ("shape", "gains"),
    [((2048, 4096), True), ((4096, 2048), True), ((4096, 4096), True), ((2048, 4064), False), ((2016, 4096), False), ((4096, 1024), False)],
)
@pytest.mark.usefixtures("table")
def test_at_least_as_wide_both_ways(shape: tuple[int, int], gains: bool) -> None:
    assert linear_gains(*shape, MX) == gains


@pytest.mark.usefixtures("table")
def test_with_fewer_tokens_than_were_measured_nothing_gains() -> None:
    assert linear_gains(2048, 4096, MX, 32768)
    assert not linear_gains(2048, 4096, MX, 32767)


@pytest.mark.usefixtures("table")
def test_a_shape_gains_on_every_gpu_or_not_at_all() -> None:
    assert not linear_gains(512, 4096, MX)
    assert linear_gains(512, 4096, HP)


def test_recipes_that_were_not_measured_and_high_precision() -> None:
    assert not linear_gains(8192, 8192, Recipe.named("mxfp8"))
    assert not linear_gains(8192, 8192, Recipe.named("bf16"))
