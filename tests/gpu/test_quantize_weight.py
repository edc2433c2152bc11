"""Weights quantised directly to the operands of the FP8 GEMMs: every byte like the reference's."""

from __future__ import annotations

import pytest
import torch
from tests.fp8_cases import E4M3, E8M0, mx_bytes
from tests.gpu.test_fp8_rebase import same

from mxep.ops.grouped_gemm.hopper import quantize_weight as kernel
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference
from mxep.ops.quantize.dequantize import dequantize

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]
FORMS = [(True, True), (True, False), (False, True)]


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
        got, want = (impl.quantize_weight(first, second, mode, *forms, rounds) for impl in (kernel, reference))
        assert len(got) == len(want) == 2 * sum(forms)
        for a, b in zip(got, want, strict=True):
            same(a, b, f"{forms}")


def mx_weight(G: int, R: int, C: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MX bytes of every kind, with NaN codes in blocks of numbers and numbers in blocks whose scale is NaN."""
    qdata, scale = mx_bytes(G * R, C, "cuda", seed=R + C)
    if qdata.numel():
        generator = torch.Generator("cuda").manual_seed(R)
        for values, byte in ((qdata, 0x7F), (qdata, 0xFF), (scale, 0xFF)):
            places = torch.randint(0, values.numel(), (1 + values.numel() // 5000,), device="cuda", generator=generator)
            values.view(torch.uint8).view(-1)[places] = byte
    return qdata.view(G, R, C), scale.view(G, R, C // 32)


def same_as_two_kernels(
    first: torch.Tensor, second: torch.Tensor | None, mode: str, forms: tuple[bool, bool], scales: tuple[torch.Tensor | None, ...]
) -> None:
    """The bytes of the reference, and of the kernels that dequantise to bf16 and quantise that."""
    got = kernel.quantize_weight(first, second, mode, *forms, False, *scales)
    values = [part if part is None else dequantize(part, own, torch.bfloat16) for part, own in zip((first, second), scales, strict=True)]
    wanted = {
        "reference": reference.quantize_weight(first, second, mode, *forms, False, *scales),
        "two kernels": kernel.quantize_weight(values[0], values[1], mode, *forms),
    }
    for name, want in wanted.items():
        assert len(got) == len(want) == 2 * sum(forms)
        for a, b in zip(got, want, strict=True):
            same(a, b, f"{name} {forms}")


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize(
    ("G", "R", "S", "C"),
    [(1, 32, 0, 32), (3, 64, 0, 160), (2, 96, 32, 32), (7, 288, 96, 416), (5, 768, 768, 2048), (3, 2048, 0, 768), (0, 32, 32, 32)],
)
@pytest.mark.usefixtures("poison")
def test_bytes_of_mx(G: int, R: int, S: int, C: int, mode: str):
    (first, scale), (second, second_scale) = mx_weight(G, R, C), mx_weight(G, S, C) if S else (None, None)
    for forms in FORMS:
        same_as_two_kernels(first, second, mode, forms, (scale, second_scale))


@pytest.mark.parametrize(
    ("G", "R", "S", "C"),
    [(4, 5760, 0, 2880), (4, 2880, 0, 2880), (1, 14336, 14336, 4096), (2, 4096, 0, 14336)],
    ids=["gpt_oss_w1", "gpt_oss_w2", "mixtral_w1", "mixtral_w2"],
)
@pytest.mark.usefixtures("poison")
def test_bytes_of_mx_at_widths_of_models(G: int, R: int, S: int, C: int):
    (first, scale), (second, second_scale) = mx_weight(G, R, C), mx_weight(G, S, C) if S else (None, None)
    same_as_two_kernels(first, second, "rceil", (False, True), (scale, second_scale))


@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_every_e4m3_code_with_every_scale(mode: str):
    """Each alone in a column, so that no larger value hides its bits: bf16's subnormals, what rounds to zero, Inf and NaN among them."""
    qdata = torch.zeros(8, 32, 256, 32, dtype=torch.uint8, device="cuda")
    scale = torch.full((8, 32, 256), 127, dtype=torch.uint8, device="cuda")
    qdata[:, 5] = torch.arange(256, device="cuda").view(8, 1, 32)
    scale[:, 5] = torch.arange(256, device="cuda")
    for forms in FORMS:
        same_as_two_kernels(qdata.view(8, 32, 8192).view(E4M3), None, mode, forms, (scale.view(E8M0), None))


@pytest.mark.usefixtures("poison")
def test_mx_rows_that_need_a_copy():
    qdata, scale = mx_weight(3, 64, 128)
    far, far_scale = (torch.full((3, 64, width), 0xA5, dtype=torch.uint8, device="cuda") for width in (132, 7))
    far[..., 4:], far_scale[..., 3:] = qdata.view(torch.uint8), scale.view(torch.uint8)  # rows start at multiples of 4 bytes
    views = far[..., 4:].view(E4M3), far_scale[..., 3:].view(E8M0)
    for forms in FORMS:
        same_as_two_kernels(views[0], None, "rceil", forms, (views[1], None))
        same_as_two_kernels(qdata[:2], views[0][1:], "rceil", forms, (scale[:2], views[1][1:]))


def test_rows_that_need_a_copy_and_more_than_fits_into_l2():
    x = wild(2, 4096, 14340, torch.bfloat16)[..., 2:14338]  # rows start at multiples of 4 bytes
    for a, b in zip(*(impl.quantize_weight(x, None, "rceil", True, True) for impl in (kernel, reference)), strict=True):
        same(a, b, "far")


def test_every_launch_gives_the_same():
    x = wild(64, 256, 512, torch.bfloat16)
    qdata, scale = mx_weight(64, 256, 512)
    for arguments in ((x, None, "rceil", True, True), (qdata, None, "rceil", False, True, False, scale)):
        want = kernel.quantize_weight(*arguments)
        for _ in range(20):
            for a, b in zip(kernel.quantize_weight(*arguments), want, strict=True):
                same(a, b, "again")
