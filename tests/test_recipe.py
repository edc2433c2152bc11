"""Recipes by name, and invalid combinations."""

from __future__ import annotations

import dataclasses
from enum import Enum

import pytest

from mxep.recipe import ALIASES, DEFAULT_RECIPE, RECIPES, Recipe, ScaleCalculationMode, resolve_recipe


def test_presets() -> None:
    assert resolve_recipe(None) is RECIPES[DEFAULT_RECIPE]
    assert resolve_recipe("bf16") is RECIPES["hp"]
    assert Recipe.named("mxfp8_wgrad_with_hp").wgrad == "hp"
    assert RECIPES["mxfp8_wgrad_with_hp_floor"].scaling_mode is ScaleCalculationMode.FLOOR
    assert all(RECIPES[target].name == target for target in ALIASES.values())
    own = dataclasses.replace(RECIPES["hp"], name="mine", group_size_multiple_of=128)
    assert resolve_recipe(own) is own


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'fp4' is unknown, want one of mxfp8_wgrad_with_hp"):
        resolve_recipe("fp4")


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("mxfp8_wgrad_hp", "mxfp8_wgrad_with_hp"), ("MXFP8", "mxfp8"), ("mxfp8-wgrad-with-mx", "mxfp8_wgrad_with_mx"), ("bf61", "bf16")],
)
def test_misspelt_name_has_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"{given!r} is unknown.*; the nearest is {nearest}$"):
        resolve_recipe(given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dispatch": "fp4"}, "want 'mxfp8' or 'hp'"),
        ({"wgrad": "mxfp8"}, "along the tokens"),
        ({"wgrad": "bf16"}, "want 'hp', 'mx' or 'mxfp8'"),
        ({"gemm": "hp", "dispatch": "hp", "combine_backward": "hp", "wgrad": "mx"}, "MXFP8 dispatch, combine or wgrad"),
        ({"gemm": "hp"}, "MXFP8 dispatch"),
        ({"group_size_multiple_of": 48}, "multiple of 32"),
        ({"group_size_multiple_of": 0}, "multiple of 32"),
        ({"scaling_mode": "rceil"}, "ScaleCalculationMode"),
    ],
)
def test_combinations_that_contradict_themselves(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Recipe("mine", **change)


class TheirMode(Enum):
    """A part of torchao's `ScaleCalculationMode`, which is no string."""

    RCEIL = "rceil"
    EVEN = "even"


def test_scaling_modes_of_torchao() -> None:
    assert Recipe("mine", scaling_mode=TheirMode.RCEIL).scaling_mode is ScaleCalculationMode.RCEIL  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Recipe 'mine': scaling_mode=<TheirMode.EVEN.*want ScaleCalculationMode.FLOOR or RCEIL"):
        Recipe("mine", scaling_mode=TheirMode.EVEN)  # type: ignore[arg-type]
