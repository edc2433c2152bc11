"""The precision of every exchange and every GEMM of the layer: `Recipe`, its named presets, and the option enums.

"hp" (high precision) means the tensors' own dtype, bf16 or float32.  The same recipe "hp" is therefore the bf16 baseline on a
GPU and the float32 yardstick of the gradient tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum
from typing import Literal, get_args

from mxep.field_types import check_field_types
from mxep.shapes import MX_BLOCK

Precision = Literal["mxfp8", "hp"]
Wgrad = Literal["hp", "mx", "mxfp8"]
DEFAULT_RECIPE = "mxfp8_wgrad_with_hp"


class ScaleCalculationMode(StrEnum):
    """How a block's scale follows from its largest absolute value (source: OCP MX v1.0; RCEIL: cuBLAS block scaling).

    FLOOR: e8m0 = floor(log2(amax)) - 8, values above 448 saturate.  RCEIL: e8m0 = ceil(log2(amax / 448)), nothing saturates.

    Examples:
        >>> block = torch.full((1, 32), 500.0)
        >>> for mode in mxep.ScaleCalculationMode:
        ...     print(mode.value, mxep.quantize_mx(block, mode).dequantize()[0, 0].item())
        floor 448.0
        rceil 512.0
    """

    FLOOR = "floor"
    RCEIL = "rceil"


SCALING_MODES: tuple[str, ...] = tuple(mode.value for mode in ScaleCalculationMode)  # the index is the number in runtime/mx_bytes.cuh


class KernelPreference(StrEnum):
    """AUTO: the fastest path that this device runs.  EMULATED: dequantise, then multiply in high precision.

    Examples:
        >>> a, weight = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(1, 64, 32, dtype=torch.bfloat16)
        >>> emulated = mxep.KernelPreference.EMULATED
        >>> mxep.to_mxfp8_then_scaled_grouped_mm(a, weight, torch.tensor([32]), kernel_preference=emulated, wgrad_with_hp=True).shape
        torch.Size([32, 32])
    """

    AUTO = "auto"
    EMULATED = "emulated"


@dataclass(frozen=True)
class Recipe:
    """Precision of each exchange and GEMM of one MoE layer.

    Attributes:
        name: what logs and errors call it.
        dispatch: forward exchange of the tokens (its backward is always in the gradient's dtype).
        combine_backward: backward exchange of combine (its forward is always in high precision).
        gemm: forward GEMM and dgrad.
        wgrad: "hp" multiplies the operands as they came ("wgrad_with_hp").  "mx" multiplies the MX forms that forward and dgrad
            multiply, 1x32 along the columns: nothing is quantised twice, FP8 tensor cores on Hopper, and backward saves MX inputs.
            "mxfp8" quantises both again, 32x1 along the tokens, and then the input must not be MX already, so dispatch has to be "hp".
        scaling_mode: of every quantisation.
        group_size_multiple_of: rows that every expert's group is padded to, a multiple of 32.
        gemm_path: "auto" or a name from `mxep.device.available_gemm_paths`.
        hp_below_rows: a call with fewer rows than this per weight, on average over the experts, multiplies in high precision, forward and
            backward, since quantising a weight costs more than its few rows gain; 0: never.  The exchanges stay as they are, so ranks may
            differ in it.  `mxep explain` estimates it.

    Examples:
        >>> recipe = mxep.Recipe("bf16_dispatch", dispatch="hp", wgrad="mx")
        >>> layer = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), recipe)
        >>> mxep.Recipe.named("mxfp8_wgrad_with_mx").wgrad
        'mx'
    """

    name: str
    dispatch: Precision = "mxfp8"
    combine_backward: Precision = "mxfp8"
    gemm: Precision = "mxfp8"
    wgrad: Wgrad = "hp"
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    group_size_multiple_of: int = MX_BLOCK
    gemm_path: str = "auto"
    hp_below_rows: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.scaling_mode, Enum):  # torchao's has the same names
            mode = scaling_mode_name(f"Recipe {self.name!r}", self.scaling_mode)
            object.__setattr__(self, "scaling_mode", ScaleCalculationMode(mode))
        check_field_types(self, f"Recipe {self.name!r}")
        check_group_alignment(f"Recipe {self.name!r}", self.group_size_multiple_of)
        if self.hp_below_rows < 0:
            raise ValueError(f"Recipe {self.name!r}: hp_below_rows={self.hp_below_rows}, want rows per weight from 0 on; 0 is never")
        if self.gemm == "hp" and (self.dispatch == "mxfp8" or self.combine_backward == "mxfp8" or self.wgrad != "hp"):
            raise ValueError(f"Recipe {self.name!r}: gemm='hp' with an MXFP8 dispatch, combine or wgrad; set those to 'hp' too")
        if self.wgrad == "mxfp8" and self.dispatch == "mxfp8":
            raise ValueError(
                f"Recipe {self.name!r}: wgrad='mxfp8' quantises the input along the tokens, but dispatch='mxfp8' hands it over as MX; "
                "use wgrad='hp', wgrad='mx' or dispatch='hp'"
            )

    @property
    def number(self) -> int:
        """Below 1024, another one for other precisions; without the GEMM path and `hp_below_rows`, in which ranks may differ."""
        digits = (self.dispatch, self.combine_backward, self.gemm)
        exchanges_and_gemm = sum((digit == "mxfp8") << bit for bit, digit in enumerate(digits))
        return exchanges_and_gemm + 8 * get_args(Wgrad).index(self.wgrad) + 32 * SCALING_MODES.index(self.scaling_mode)

    def multiplies_in_hp(self, rows: int, weights: int) -> bool:
        """Whether the products of that many rows with that many weights run in high precision: by `gemm`, or by `hp_below_rows`.

        >>> recipe = Recipe("mine", hp_below_rows=64)
        >>> recipe.multiplies_in_hp(rows=511, weights=8), recipe.multiplies_in_hp(rows=512, weights=8)
        (True, False)
        """
        return self.gemm == "hp" or (self.hp_below_rows > 0 and rows < self.hp_below_rows * weights)

    @property
    def quantizes_in_permute(self) -> bool:
        """Whether rows that come in high precision leave permute as MX: every GEMM after it, wgrad too, takes their MX form."""
        return self.dispatch == "hp" and self.wgrad == "mx"

    @property
    def quantizes_in_unpermute_backward(self) -> bool:
        """Whether gradients that come in high precision leave unpermute's backward as MX."""
        return self.combine_backward == "hp" and self.wgrad == "mx"

    @staticmethod
    def named(name: str) -> Recipe:
        """The preset of that name. Raises ValueError, listing the presets, when there is none."""
        return resolve_recipe(name)


def check_group_alignment(where: str, alignment: int) -> None:
    """Raise ValueError unless `alignment` (rows) is a positive multiple of one MX block."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment % MX_BLOCK:
        raise ValueError(
            f"{where}: group_size_multiple_of={alignment!r}, want a positive multiple of {MX_BLOCK} (one MX block); use 32 or 128"
        )


def check_block_size(where: str, block_size: int) -> None:
    """Raise ValueError unless `block_size` is the one that MX has here."""
    if block_size != MX_BLOCK:
        raise ValueError(f"{where}: block_size={block_size}, want {MX_BLOCK} (the MX block)")


def scaling_mode_name(where: str, scaling_mode: ScaleCalculationMode | str) -> str:
    """A scaling mode's name, what operators take; an enum of the same names from elsewhere is understood. Raises ValueError for others."""
    name = str(getattr(scaling_mode, "_value_", scaling_mode)).lower()  # `value` of an enum costs two functions of Python
    if name not in SCALING_MODES:
        raise ValueError(f"{where}: scaling_mode={scaling_mode!r}, want ScaleCalculationMode.{' or '.join(map(str.upper, SCALING_MODES))}")
    return name


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("mxfp8_wgrad_with_hp"),
        Recipe("mxfp8_wgrad_with_hp_floor", scaling_mode=ScaleCalculationMode.FLOOR),
        Recipe("mxfp8_wgrad_with_mx", wgrad="mx"),
        Recipe("mxfp8_gemm", dispatch="hp", combine_backward="hp"),
        Recipe("mxfp8_gemm_wgrad_with_mx", dispatch="hp", combine_backward="hp", wgrad="mx"),
        Recipe("mxfp8", dispatch="hp", combine_backward="mxfp8", wgrad="mxfp8"),
        Recipe("hp", dispatch="hp", combine_backward="hp", gemm="hp"),
    )
}
# Names under which trainers know the same things (torchtitan's and torchao's options).
ALIASES: dict[str, str] = {"bf16": "hp", "float32": "hp", "mxfp8_rceil": "mxfp8", "mxfp8_rceil_wgrad_with_hp": "mxfp8_wgrad_with_hp"}


class TakesRecipe:
    """Base class of modules whose recipe can be set by name."""

    _recipe: Recipe

    @property
    def recipe(self) -> Recipe:
        """Precision of the GEMMs; set it to a `Recipe`, a preset's name or None (the default preset)."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: str | Recipe | None) -> None:
        self._recipe = resolve_recipe(recipe)


def resolve_recipe(recipe: str | Recipe | None) -> Recipe:
    """A recipe from a preset's name, an alias, a `Recipe` (returned as it is) or None (the default preset).

    Raises:
        ValueError: no preset of that name; the message has them all, and the nearest.
    """
    if isinstance(recipe, Recipe):
        return recipe
    name = DEFAULT_RECIPE if recipe is None else recipe
    found = RECIPES.get(ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        names = [*RECIPES, *ALIASES]
        near = get_close_matches(str(name).lower().replace("-", "_"), names, n=1)
        do = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(f"recipe: {name!r} is unknown, want one of {', '.join(names)}{do}")
    return found
