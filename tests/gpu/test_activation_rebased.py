"""Activations that return rebased rows: the bytes of MX rows and a rebase of these, for any size, form and values."""

from __future__ import annotations

import pytest
import torch
from tests.activation_cases import FUNCTIONS, LAYOUTS, cut, far_apart, gate_up, strided_views
from tests.mx_cases import MODES, assert_same_bytes

import mxep.operators  # noqa: F401
from mxep import reference
from mxep.device import compute_capability
from mxep.grouped_mm.products import GemmOptions
from mxep.moe.experts import Experts
from mxep.mx import quantize_mx
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, rebase_rows
from mxep.recipe import resolve_recipe

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poison"),
    pytest.mark.skipif(not torch.cuda.is_available() or compute_capability(0)[0] != 9, reason="needs a Hopper GPU"),
]
BF16, FLOAT32 = torch.bfloat16, torch.float32
SIZES = pytest.mark.parametrize("sizes", [(1, 31, 33), pytest.param((127, 129), marks=pytest.mark.large)])  # rows
WIDTHS = (32, 96, 768, 1408, 2880, 14336)


def same_rebased(got: list[torch.Tensor], want: list[torch.Tensor] | tuple, what: str, num_rows: int | None = None) -> None:
    """Every byte that is defined: data, scales, and block scales of wide rows."""
    (data, scale, *block), (want_data, want_scale, *want_block) = ([part for part in parts if part is not None] for parts in (got, want))
    assert len(block) == len(want_block)
    rows = slice(num_rows)
    assert_same_bytes(data[rows], want_data[rows].cpu(), f"{what} data")
    assert torch.equal(scale[rows], want_scale[rows]), f"{what} scale"
    for part, of_want in zip(block, want_block, strict=True):
        assert (part.shape, part.stride()) == (of_want.shape, of_want.stride())
        wide = want_scale[rows] < 0
        assert torch.equal(part[:, rows][:, wide], of_want[:, rows][:, wide]), f"{what} block scales"


def same_forms(got: list[torch.Tensor], want: list[torch.Tensor], at: int, what: str, d_scores: bool = False) -> None:
    """Of `activate_backward` with the three tensors of dx's rebased form from `at` on."""
    same_rebased(got[at : at + 3], want[at : at + 3], what)
    pairs = [*zip(got[:at] + got[at + 3 :], want[:at] + want[at + 3 :], strict=True)]
    for a, b in pairs[: len(pairs) - d_scores]:
        if a.element_size() == 1:
            assert_same_bytes(a, b.cpu(), what)
        else:
            assert torch.equal(a.isnan(), b.isnan()), what
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), what


def cases(dtype: torch.dtype, rows: int, width: int, function: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Named (dh, x) on the GPU."""
    named = {**gate_up(dtype, rows, width), "far apart": far_apart(dtype, rows, width)}
    return {name: tuple(part.cuda() for part in cut(*case, FUNCTIONS[function])) for name, case in named.items()}  # type: ignore[misc]


def test_some_rows_are_wide_and_some_not() -> None:
    """The other tests rely on this."""
    scale = reference.activate(far_apart(BF16, 129, 768)[1], "concatenated", "rceil", h="rebased")[1]
    assert 20 < int((scale < 0).sum()) < 120


@SIZES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_of_every_size(layout: str, width: int, sizes: tuple[int, ...]) -> None:
    for rows in sizes:
        for name, (_, x) in cases(BF16, rows, width, "plain").items():
            got, want = (impl.activate(x, layout, "rceil", True, h="rebased") for impl in (kernels, reference))
            same_rebased(got, want, f"{rows} x {width} {name}")


@SIZES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_every_size(layout: str, width: int, sizes: tuple[int, ...]) -> None:
    for rows in sizes:
        for name, (dh, x) in cases(BF16, rows, width, "plain").items():
            got, want = (impl.activate_backward(dh, x, layout, "rceil", True, "mx+rebased", "mx") for impl in (kernels, reference))
            same_forms(got, want, 2, f"{rows} x {width} {name}")


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_forms_and_scores(function: str, layout: str, dtype: torch.dtype) -> None:
    how = FUNCTIONS[function]
    for name, (dh, x) in cases(dtype, 257, 416, function).items():
        for scores in (None, torch.rand(257, device="cuda")):
            got, want = (impl.activate(x, layout, "rceil", True, scores, **how, h="rebased+hp") for impl in (kernels, reference))
            same_forms(got, want, 0, f"{name} forward")
            for dx, h, at in (("mx+rebased", "mx", 2), ("rebased+hp", "hp", 0), ("mx+rebased+hp", "mx+hp", 2), ("rebased", "none", 0)):
                got, want = (impl.activate_backward(dh, x, layout, "rceil", True, dx, h, scores, **how) for impl in (kernels, reference))
                same_forms(got, want, at, f"{name} {dx} {h}", d_scores=scores is not None)


@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("mode", MODES)
def test_granularities_and_scale_rules(mode: str, granularity: str) -> None:
    how, at = {"granularity": granularity}, slice(2, 4 if granularity == "row" else 5)
    for name, (dh, x) in cases(BF16, 129, 1056, "plain").items():
        got, want = (impl.activate(x, "concatenated", mode, True, h="rebased", **how) for impl in (kernels, reference))
        same_rebased(got, want, name)
        got, want = (impl.activate_backward(dh, x, "concatenated", mode, True, "mx+rebased", "mx", **how) for impl in (kernels, reference))
        same_rebased(got[at], want[at], name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["plain", "deepseek_v4", "gpt_oss", "relu2", "reglu"])
def test_fast_form_has_the_bytes_of_the_mx_rows(function: str, layout: str) -> None:
    """It has the bytes of the MX rows that the other kernels write: a layer's bits do not depend on the kernel that rebases."""
    how = FUNCTIONS[function]
    for name, (dh, x) in cases(BF16, 257, 768, function).items():
        scores = torch.rand(257, device="cuda")
        mx = kernels.activate(x, layout, "rceil", scores=scores, **how)
        rebased = kernels.activate(x, layout, "rceil", scores=scores, **how, h="rebased")
        same_rebased(rebased, rebase_rows(*mx, MAX_SPREAD["auto"])[:3], f"{name} forward")
        given = (dh, x, layout, "rceil", False)
        forms = kernels.activate_backward(*given, "mx+hp", "mx", scores=scores, **how)
        got = kernels.activate_backward(*given, "mx+rebased+hp", "mx", scores=scores, **how)
        same_forms(got, [*forms[:2], *rebase_rows(*forms[:2], MAX_SPREAD["auto"])[:3], *forms[2:]], 2, name)


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["plain", "relu2"])
def test_gradient_of_x_in_mx(function: str, layout: str, dtype: torch.dtype) -> None:
    for width in (32, 416, 1536):
        for name, (dh, x) in cases(dtype, 257, width, function).items():
            data, scale = reference.quantize(x, "rceil")
            scale.view(torch.uint8).view(-1)[:257] = torch.arange(257, device="cuda").clamp(max=255).to(torch.uint8)
            given = (dh, data, layout, "rceil", True, "mx+rebased+hp", "mx+hp", None, scale)
            got, want = (impl.activate_backward(*given, **FUNCTIONS[function]) for impl in (kernels, reference))
            same_forms(got, want, 2, f"{width} {name}")


@pytest.mark.parametrize("num_valid_rows", [0, 32, 288, 320])
@pytest.mark.parametrize("width", [96, 768, 4096])
def test_some_rows(width: int, num_valid_rows: int) -> None:
    dh, x = (part.cuda() for part in far_apart(BF16, 320, width))
    count = torch.tensor([num_valid_rows], device="cuda", dtype=torch.int32)
    want = kernels.activate(x, "concatenated", "rceil", h="rebased")
    got = kernels.activate(x, "concatenated", "rceil", num_valid_rows=count, h="rebased")
    same_rebased(got, want, "forward", num_valid_rows)
    assert (got[0][num_valid_rows:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"
    assert got[1][num_valid_rows:].isnan().all()
    want = kernels.activate_backward(dh, x, "concatenated", "rceil", False, "mx+rebased+hp", "mx+hp")
    got = kernels.activate_backward(dh, x, "concatenated", "rceil", False, "mx+rebased+hp", "mx+hp", num_valid_rows=count)
    same_rebased(got[2:5], want[2:5], "gradient", num_valid_rows)
    for a, b in zip(got[:2] + got[5:], want[:2] + want[5:], strict=True):
        assert torch.equal(a[:num_valid_rows].view(torch.uint8), b[:num_valid_rows].view(torch.uint8))
        assert (a[num_valid_rows:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"


def test_strided_inputs() -> None:
    for what, (dh, x) in strided_views(torch.randn(67, 1025, device="cuda", dtype=BF16)).items():
        got, want = (impl.activate(x, "concatenated", "floor", True, h="rebased") for impl in (kernels, reference))
        same_rebased(got, want, what)
        got, want = (impl.activate_backward(dh, x, "interleaved", "floor", True, "mx+rebased", "hp") for impl in (kernels, reference))
        same_forms(got, want, 2, what)


def test_no_rows() -> None:
    x = torch.empty(0, 192, device="cuda", dtype=BF16)
    got = kernels.activate(x, "concatenated", "rceil", h="rebased")
    got += kernels.activate_backward(x[:, :96], x, "concatenated", "rceil", False, "rebased", "none")
    assert [tuple(part.shape) for part in got] == [(0, 96), (0,), (1, 0), (0, 192), (0,), (2, 0)]


@pytest.mark.large
def test_repeats_are_bit_equal() -> None:
    dh, x = (part.cuda() for part in far_apart(BF16, 4096, 1408))
    runs = [kernels.activate_backward(dh, x, "concatenated", "rceil", False, "mx+rebased", "mx") for _ in range(3)]
    for again in runs[1:]:
        same_forms(again, runs[0], 2, "again")


def test_past_two_billion_elements() -> None:
    """x has 2^31 + 2^20 elements: the last rows are where they belong."""
    rows, width = (1 << 17) + 64, 8192
    x = torch.zeros(rows, 2 * width, device="cuda", dtype=BF16)
    x[-65:] = torch.randn(65, 2 * width, device="cuda", dtype=BF16)
    dh = torch.ones(1, width, device="cuda", dtype=BF16).expand(rows, width)
    want = reference.activate(x[-65:], "concatenated", "rceil", True, h="rebased")
    got = kernels.activate(x, "concatenated", "rceil", True, h="rebased")
    assert_same_bytes(got[0][-65:], want[0].cpu())
    assert torch.equal(got[1][-65:], want[1])
    want = reference.activate_backward(dh[-65:], x[-65:], "concatenated", "rceil", True, "rebased", "none")
    got = kernels.activate_backward(dh, x, "concatenated", "rceil", True, "rebased", "none")
    assert_same_bytes(got[0][-65:], want[0].cpu())
    assert torch.equal(got[1][-65:], want[1])


def test_a_row_that_does_not_fit_is_named() -> None:
    x = torch.zeros(1, 2 * 120000, device="cuda", dtype=BF16)
    with pytest.raises(ValueError, match=r"rebased rows of 240000 values, want at most"):
        kernels.activate_backward(x[:, :120000], x, "concatenated", "rceil", False, "rebased", "none")


def test_no_host_sync(no_sync) -> None:
    dh, x = (part.cuda() for part in far_apart(BF16, 64, 96))
    count = torch.tensor([32], device="cuda", dtype=torch.int32)
    with no_sync():
        for _ in range(2):
            torch.ops.mxep.activate(x, "interleaved", "rceil", num_valid_rows=count, h="rebased")
            torch.ops.mxep.activate_backward(dh, x, "interleaved", "rceil", False, "mx+rebased", "mx", num_valid_rows=count)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_experts_have_the_same_bits(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients do not depend on whether the activation rebases or the GEMM's own kernel does."""
    torch.manual_seed(0)
    module = Experts(512, 416, 4, recipe).to("cuda", BF16)
    x, dy = (torch.randn(1024, 512, device="cuda", dtype=BF16) for _ in range(2))
    x[::9] *= 2.0**12
    if resolve_recipe(recipe).dispatch != "hp":
        x, dy = quantize_mx(x), quantize_mx(dy)

    def run() -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = module(leaf, torch.tensor([320, 0, 97, 543], device="cuda"))
        return [y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), dy)]

    rebased = run()
    monkeypatch.setattr(GemmOptions, "rebased", None)
    for got, want in zip(rebased, run(), strict=True):
        assert torch.equal(got, want)
