"""Which dense linear layers are faster in MXFP8 than as torch.nn.Linear in bf16, by their shape."""

from __future__ import annotations

from mxep.recipe import Recipe

# Forward plus backward of 32768 tokens on one H200, torch 2.11, ms, at commit c13768f: (K, N) of a weight (N, K) -> torch.nn.Linear in
# bf16, and MXLinear with wgrad "hp" and "mx".
MEASURED_MS: dict[tuple[int, int], dict[str, float]] = {
    (512, 4096): {"bf16": 0.56, "hp": 1.98, "mx": 2.02},
    (2048, 576): {"bf16": 0.33, "hp": 1.93, "mx": 2.34},
    (2048, 2048): {"bf16": 1.02, "hp": 1.84, "mx": 2.16},
    (2048, 2816): {"bf16": 1.46, "hp": 1.42, "mx": 1.99},
    (2816, 2048): {"bf16": 1.47, "hp": 1.42, "mx": 1.63},
    (2048, 3072): {"bf16": 1.55, "hp": 1.48, "mx": 1.58},
    (2048, 4096): {"bf16": 2.06, "hp": 1.76, "mx": 1.56},
    (4096, 2048): {"bf16": 2.06, "hp": 1.75, "mx": 1.56},
    (2048, 10944): {"bf16": 5.94, "hp": 4.98, "mx": 4.17},
}
_LEAST_GAIN = 1.1  # below it, times of two runs differ as much


def linear_gains(in_features: int, out_features: int, recipe: Recipe) -> bool:
    """Whether `MXLinear` of this shape is faster than torch.nn.Linear: at least as wide both ways as a measured shape that gained.

    Shapes below those, and wgrads that were not measured ("mxfp8"), are taken not to gain.  Few tokens gain less than the 32768 of the
    measurements.

    Args:
        in_features: K.
        out_features: N.
        recipe: of which GEMM and wgrad are read.

    Returns:
        False for a recipe in high precision, too.

    Examples:
        >>> recipe = mxep.Recipe.named("mxfp8_wgrad_with_mx")
        >>> mxep.parallel.linear_gains(2048, 512, recipe), mxep.parallel.linear_gains(2048, 6144, recipe)
        (False, True)
    """
    if recipe.gemm != "mxfp8" or recipe.wgrad == "mxfp8":
        return False
    gained = (shape for shape, ms in MEASURED_MS.items() if ms["bf16"] >= _LEAST_GAIN * ms[recipe.wgrad])
    return any(in_features >= K and out_features >= N for K, N in gained)
