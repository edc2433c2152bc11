"""Errors of the grouped GEMM, each with where, got, want and do; and the GEMM paths of a CPU."""

from __future__ import annotations

import pytest
import torch
from tests.grouped_mm.test_grouped_mm import ALIGNED, RAGGED, K, N, offsets, operands
from tests.truth import assert_same, raises_naming

from mxep import KernelPreference, quantize_mx, to_mxfp8_then_scaled_grouped_mm
from mxep.grouped_mm.function import expert_mm, recipe_grouped_mm
from mxep.recipe import RECIPES, Recipe


def test_mx_input_requires_wgrad_with_hp() -> None:
    a, w = operands(ALIGNED)
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="wgrad_with_hp"):
            to_mxfp8_then_scaled_grouped_mm(quantize_mx(a.detach()), w.transpose(-2, -1), offsets(ALIGNED))


def test_ragged_groups_and_32x1_wgrad_without_padding() -> None:
    a, w = operands(RAGGED, 192)
    with raises_naming("grouped_mm", str(RAGGED), "multiples of 32", "pad_token_groups_for_grouped_mm=True", "wgrad_with_hp=True"):
        to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(RAGGED))
    a, w = operands([64], 65)
    with raises_naming("grouped_mm", "M = 65", "multiples of 32", "pad_token_groups_for_grouped_mm=True"):
        to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets([64]))


@pytest.mark.parametrize("preference", [*KernelPreference, "auto", "emulated", "reference"])
def test_paths_of_a_cpu(preference: KernelPreference | str) -> None:
    a, w = operands(ALIGNED)
    got = to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED), kernel_preference=preference)
    assert_same(got, to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED)))


def test_paths_that_a_cpu_lacks() -> None:
    a, w = operands(ALIGNED)
    for path in ("exact", "blackwell"):
        with raises_naming(path, "needs a CUDA GPU", "cpu", "reference"):
            to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED), kernel_preference=path)
        with raises_naming(path, "needs a CUDA GPU"):
            expert_mm(a, w, offsets(ALIGNED), Recipe("r", gemm_path=path))
    with raises_naming("'fastest'", "unknown", "reference", "auto"):
        to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED), kernel_preference="fastest")


def test_a_preset_by_name() -> None:
    a, w = operands(ALIGNED)
    assert_same(expert_mm(a, w, offsets(ALIGNED), "mxfp8_gemm"), expert_mm(a, w, offsets(ALIGNED), Recipe.named("mxfp8_gemm")))
    for call in (
        lambda: expert_mm(a, w, offsets(ALIGNED), "mxfp8_gem"),
        lambda: recipe_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED), None, a.dtype, "mxfp8_gem"),
    ):
        with raises_naming("recipe", "'mxfp8_gem' is unknown", "the nearest is mxfp8_gemm"):
            call()


def test_offsets_that_are_no_tensor() -> None:
    a, w = operands(ALIGNED)
    with raises_naming("grouped_mm", "offs is list", "int32", "END row"):
        to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offsets(ALIGNED).tolist(), wgrad_with_hp=True)


def test_bad_operands() -> None:
    a, w = operands(ALIGNED)
    b_t, offs = w.transpose(-2, -1), offsets(ALIGNED)
    mm = to_mxfp8_then_scaled_grouped_mm
    with raises_naming("grouped_mm", "(192, 96)", "(4, 96, 96)" if K == N else "(4, 64, 96)", "(L, K, N)", "w.transpose(-2, -1)"):
        mm(a, w, offs)
    with raises_naming("grouped_mm", "(1, 192, 96)", "(M, K)"):
        mm(a[None], b_t, offs)
    with raises_naming("grouped_mm", "K = 80", "multiples of 32"):
        mm(a[:, :80], b_t[:, :80], offs)
    with raises_naming("grouped_mm", "N = 48", "multiples of 32"):
        mm(a, b_t[:, :, :48], offs)
    with raises_naming("grouped_mm", "A is torch.float16", "cast"):
        mm(a.half(), b_t, offs)
    with raises_naming("grouped_mm", "B_t is torch.float64", "cast"):
        mm(a, b_t.double(), offs)
    with raises_naming("grouped_mm", "B_t is an MXTensor", "weight"):
        mm(a, quantize_mx(torch.randn(4, K, N)), offs)
    with raises_naming("grouped_mm", "out_dtype=torch.float16", "bfloat16 or float32"):
        mm(a, b_t, offs, out_dtype=torch.float16)
    with raises_naming("grouped_mm", "FLOOR or RCEIL"):
        mm(a, b_t, offs, scale_calculation_mode="even")
    for bias in (torch.zeros(N + 32), torch.zeros(3, N), torch.zeros(192, N), torch.zeros(N, dtype=torch.int64)):
        with raises_naming("grouped_mm", f"bias is {tuple(bias.shape)} {bias.dtype}", "(64,) or (4, 64)"):
            mm(a, b_t, offs, bias)


def test_bad_offsets() -> None:
    a, w = operands(ALIGNED)
    b_t = w.transpose(-2, -1)
    for offs in (None, offsets(ALIGNED[:3]), offsets(ALIGNED).float(), offsets(ALIGNED)[None]):
        with raises_naming("grouped_mm", "offs is", "(4,) int32", "END"):
            to_mxfp8_then_scaled_grouped_mm(a, b_t, offs)
    for ends in ([64, 32, 96, 192], [-32, 0, 0, 192], [64, 96, 96, 224]):
        with raises_naming("grouped_mm", str(ends), "do not decrease", "M = 192", "cumsum"):
            to_mxfp8_then_scaled_grouped_mm(a, b_t, offsets(ends))
        with raises_naming("grouped_mm", str(ends), "do not decrease"):
            expert_mm(a, w, offsets(ends), RECIPES["hp"])


def test_expert_mm_hp_checks_its_operands() -> None:
    a, w = operands(ALIGNED)
    with raises_naming("grouped_mm", "(192, 64)", "(M, K)"):
        expert_mm(a[:, :64], w, offsets(ALIGNED), RECIPES["hp"])
    with raises_naming("grouped_mm", "torch.float16"):
        expert_mm(a.half(), w.half(), offsets(ALIGNED), RECIPES["hp"])
