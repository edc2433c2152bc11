"""Which dense linear layers are faster in MXFP8 than as torch.nn.Linear in bf16, by their shape.

The table of times is the file linear_gains.json, which `mxep bench report` writes from the records of `mxep bench linears`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

from mxep.recipe import Recipe

_TABLE = Path(__file__).with_suffix(".json")
_LEAST_GAIN = 1.1  # below it, times of two runs differ as much


class LinearTimes(NamedTuple):
    """Forward plus backward of one linear layer on one GPU, in milliseconds.

    Attributes:
        device, commit: of the record.  T: tokens.  K, N: of a weight (N, K).
        bf16: torch.nn.Linear, eager or compiled, whichever is faster.  hp, mx: `MXLinear`, by the wgrad of its recipe.
    """

    device: str
    commit: str
    T: int
    K: int
    N: int
    bf16: float
    hp: float
    mx: float


@functools.cache
def measured_times() -> tuple[LinearTimes, ...]:
    """The table; a shape that was measured on several GPUs has a row for each."""
    return tuple(LinearTimes(**row) for row in json.loads(_TABLE.read_text()))


@functools.cache
def _gaining_shapes(wgrad: str) -> tuple[tuple[int, int, int], ...]:
    """(T, K, N) of the shapes that gained on every GPU that measured them."""
    gained: dict[tuple[int, int, int], bool] = {}
    for row in measured_times():
        ms, shape = {"hp": row.hp, "mx": row.mx}[wgrad], (row.T, row.K, row.N)
        gained[shape] = gained.get(shape, True) and row.bf16 >= _LEAST_GAIN * ms
    return tuple(shape for shape, does in gained.items() if does)


def linear_gains(in_features: int, out_features: int, recipe: Recipe, tokens: int | None = None) -> bool:
    """Whether `MXLinear` of this shape is faster than torch.nn.Linear: at least as large as a measured shape that gained.

    Smaller shapes, and wgrads that were not measured ("mxfp8"), are taken not to gain.

    Args:
        in_features: K.
        out_features: N.
        recipe: of which GEMM and wgrad are read.
        tokens: T of one forward; None: as many as in the measurements.

    Returns:
        False for a recipe in high precision, too.

    Examples:
        >>> recipe = mxep.Recipe.named("mxfp8_wgrad_with_mx")
        >>> mxep.parallel.linear_gains(2048, 512, recipe), mxep.parallel.linear_gains(2048, 10944, recipe)
        (False, True)
    """
    if recipe.gemm != "mxfp8" or recipe.wgrad == "mxfp8":
        return False
    shapes = _gaining_shapes(recipe.wgrad)
    return any(in_features >= K and out_features >= N and (tokens is None or tokens >= T) for T, K, N in shapes)
