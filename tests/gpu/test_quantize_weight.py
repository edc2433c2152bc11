"""Weights straight to what the FP8 GEMMs read: every byte like the reference's."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.test_fp8_rebase import same

from mxep.device import available_gemm_paths
from mxep.ops.grouped_gemm.hopper import quantize_weight as kernel
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference

pytestmark = pytest.mark.gpu
FORMS = [(True, True), (True, False), (False, True)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    reason = available_gemm_paths(torch.device("cuda"))["fp8"]
    if reason is not None:
        pytest.skip(reason)


def wild(G: int, R: int, C: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights whose rows and columns differ by many powers of two, with zeros, tiny numbers, NaN and Inf."""
    generator = torch.Generator("cuda").manual_seed(R + C)
    sizes = [torch.randint(-low, low, shape, device="cuda", generator=generator) for low, shape in ((20, (G, R, 1)), (8, (G, 1, C)))]
    x = torch.randn(G, R, C, device="cuda", generator=generator) * torch.exp2((sizes[0] + sizes[1]).float())
    if x.numel():
        places = torch.randint(0, x.numel(), (2, 1 + x.numel() // 3000), device="cuda", generator=generator)
        x.view(-1)[places[0]], x.view(-1)[places[1]] = float("nan"), -float("inf")
        x[0, :32] = 0
        x[-1, -32:] *= 2.0**-126
    return x.to(dtype)


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize(
    ("dtype", "rounds"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)], ids=["bf16", "float32", "rounded"]
)
@pytest.mark.parametrize(
    ("G", "R", "S", "C"), [(1, 32, 0, 32), (3, 64, 0, 160), (2, 96, 32, 32), (7, 288, 96, 416), (5, 768, 768, 2048), (0, 32, 32, 32)]
)
@pytest.mark.usefixtures("poison")
def test_bytes(G: int, R: int, S: int, C: int, dtype: torch.dtype, rounds: bool, mode: str):
    first, second = wild(G, R, C, dtype), wild(G, S, C, dtype) if S else None
    for forms in FORMS:
        got, want = (home.quantize_weight(first, second, mode, *forms, rounds) for home in (kernel, reference))
        assert len(got) == len(want) == 2 * sum(forms)
        for a, b in zip(got, want, strict=True):
            same(a, b, f"{forms}")


def test_rows_that_need_a_copy_and_more_than_fits_into_l2():
    x = wild(2, 4096, 14340, torch.bfloat16)[..., 2:14338]  # rows start at multiples of 4 bytes
    for a, b in zip(*(home.quantize_weight(x, None, "rceil", True, True) for home in (kernel, reference)), strict=True):
        same(a, b, "far")


def test_every_launch_gives_the_same():
    x = wild(64, 256, 512, torch.bfloat16)
    want = kernel.quantize_weight(x, None, "rceil", True, True)
    for _ in range(20):
        for a, b in zip(kernel.quantize_weight(x, None, "rceil", True, True), want, strict=True):
            same(a, b, "again")
