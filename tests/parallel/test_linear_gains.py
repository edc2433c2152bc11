"""Which shapes of dense linear layers are converted: those that were measured to gain, and wider ones."""

from __future__ import annotations

import pytest

from mxep.parallel import linear_gains
from mxep.parallel.linear_gains import MEASURED_MS
from mxep.recipe import Recipe

MX, HP = Recipe.named("mxfp8_wgrad_with_mx"), Recipe.named("mxfp8_wgrad_with_hp")


@pytest.mark.parametrize("recipe", [MX, HP])
def test_what_was_measured_to_lose_stays(recipe: Recipe) -> None:
    for (K, N), ms in MEASURED_MS.items():
        if ms[recipe.wgrad] >= ms["bf16"]:
            assert not linear_gains(K, N, recipe), (K, N)
    assert linear_gains(2048, 10944, recipe)


@pytest.mark.parametrize(
    ("shape", "gains"),
    [((2048, 4096), True), ((4096, 2048), True), ((4096, 4096), True), ((2048, 4064), False), ((2016, 4096), False), ((4096, 1024), False)],
)
def test_at_least_as_wide_both_ways(shape: tuple[int, int], gains: bool) -> None:
    assert linear_gains(*shape, MX) == gains


def test_recipes_that_were_not_measured_and_high_precision() -> None:
    assert not linear_gains(8192, 8192, Recipe.named("mxfp8"))
    assert not linear_gains(8192, 8192, Recipe.named("bf16"))
