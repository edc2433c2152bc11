"""Activations that return rebased rows: the bytes of MX rows and a rebase of these, for any size, form and values."""

from __future__ import annotations

from collections.abc import Sequence

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


GROUPS = (0, 1, 63, 64, 65, 0, 120, 7, 0)  # 320 rows


def ends_of(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def some(dtype: torch.dtype, rows: int, width: int, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(dh, x) on the GPU of finite values; gradients of rows are of different sizes."""
    torch.manual_seed(0)
    dh, x = torch.randn(rows, width, device="cuda"), 2.0 * torch.randn(rows, 2 * width, device="cuda")
    dh *= torch.exp2(torch.randint(-6, 7, (rows, 1), device="cuda").float())
    return cut(dh.to(dtype), x.to(dtype), FUNCTIONS[function])


def assert_sums(sums: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, what: str) -> None:
    """Of float32 values (T, N), against float64: within 1e-5 of what the magnitudes add up to."""
    rows = torch.arange(len(values), device="cuda")
    groups = torch.searchsorted(ends.long(), rows, right=True)  # one more than there are for rows past the last end
    want, size = (torch.zeros(len(ends) + 1, values.shape[1], device="cuda", dtype=torch.float64) for _ in range(2))
    want.index_add_(0, groups, values.double())
    size.index_add_(0, groups, values.double().abs())
    assert (sums.dtype, sums.shape) == (FLOAT32, (len(ends), values.shape[1]))
    wrong = ~((sums - want[:-1]).abs() <= 1e-5 * size[:-1])
    assert not wrong.any(), f"{what}: {int(wrong.sum())} sums, of groups {wrong.any(1).nonzero()[:9].flatten().tolist()}"


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_sums_of_groups(function: str, layout: str, dtype: torch.dtype) -> None:
    """All else has the bytes of a call without them; rows past the last end are made too, and are in no sum."""
    how, ends = FUNCTIONS[function], ends_of(GROUPS)
    for width, exact in ((416, False), (416, True), (3136, False)):
        dh, x = some(dtype, 371, width, function)
        dh[320:] = torch.inf
        for scores in (None, torch.rand(371, device="cuda")):
            given = layout, "rceil", exact
            values = kernels.activate_backward(dh.float(), x.float(), *given, "hp", "none", scores, **how)[0]
            for dx, h, at in (("mx+rebased", "mx", 2), ("rebased+hp", "hp", 0), ("mx+rebased+hp", "mx+hp", 2), ("rebased", "none", 0)):
                what = f"{width} {dx} {h}"
                plain = kernels.activate_backward(dh, x, *given, dx, h, scores, **how)
                *made, sums = kernels.activate_backward(dh, x, *given, dx, h, scores, **how, offs=ends)
                same_forms(made, plain, at, what)
                assert_sums(sums, values, ends, what)
                again = kernels.activate_backward(dh, x, *given, dx, h, scores, **how, offs=ends.long())
                assert torch.equal(again[-1].view(torch.int32), sums.view(torch.int32)), what


@pytest.mark.parametrize("width", [32, 96, 768, 1408, 2880, 3104, 6144])
@pytest.mark.parametrize("function", ["gpt_oss", "relu2"])
def test_sums_of_every_width_and_of_any_groups(function: str, width: int) -> None:
    """Widths of one and of two passes; many groups, most of them empty; one; none that has rows."""
    how, rows = FUNCTIONS[function], 300
    dh, x = some(BF16, rows, width, function)
    values = kernels.activate_backward(dh.float(), x.float(), "interleaved", "rceil", False, "hp", "none", **how)[0]
    plain = kernels.activate_backward(dh, x, "interleaved", "rceil", False, "mx+rebased", "mx", **how)
    many = [0] * 3001
    for group, count in zip((0, 31, 32, 33, 63, 64, 1000, 2999, 3000), (3, 64, 1, 65, 8, 70, 1, 60, 20), strict=True):
        many[group] = count
    for sizes in (GROUPS[:8], many, many[:1001], [rows], [0], [0] * 40, [300, 0, 0], [0] * 31 + [256], [1] * 300):
        ends = ends_of(sizes).clamp(max=rows)
        *made, sums = kernels.activate_backward(dh, x, "interleaved", "rceil", False, "mx+rebased", "mx", **how, offs=ends)
        same_forms(made, plain, 2, f"{len(sizes)} groups")
        assert_sums(sums, values, ends, f"{len(sizes)} groups")
    beyond = torch.tensor([40, 400, 500], device="cuda")  # ends past the last row count as it
    sums = kernels.activate_backward(dh, x, "interleaved", "rceil", False, "rebased", "none", **how, offs=beyond)[-1]
    assert_sums(sums, values, beyond.clamp(max=rows), "beyond")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [416, 2880, 4096])
def test_sums_of_some_rows(width: int, layout: str) -> None:
    """Rows past num_valid_rows are neither read nor written."""
    dh, x = some(BF16, 500, width, "plain")
    scores = torch.rand(500, device="cuda")
    for sizes in (GROUPS, (32,), (0, 0)):
        ends = ends_of(sizes)
        valid = int(ends[-1])
        how = {"scores": scores, "num_valid_rows": ends[-1:]}
        given = (layout, "rceil", False)
        values = kernels.activate_backward(dh.float(), x.float(), *given, "hp", "none", scores)[0]
        want = kernels.activate_backward(dh, x, *given, "mx+rebased+hp", "mx+hp", scores)
        dirty = [part.clone() for part in (dh, x)]
        for part in dirty:
            part[valid:] = torch.nan
        *got, d_scores, sums = kernels.activate_backward(*dirty, *given, "mx+rebased+hp", "mx+hp", **how, offs=ends)
        assert_sums(sums, values, ends, f"{valid} rows")
        same_rebased(got[2:5], want[2:5], "gradient", valid)
        for a, b in zip(got[:2] + got[5:], want[:2] + want[5:-1], strict=True):
            assert torch.equal(a[:valid].view(torch.uint8), b[:valid].view(torch.uint8))
            assert (a[valid:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"
        assert torch.equal(d_scores[:valid], want[-1][:valid])
        assert (got[2][valid:].view(torch.uint8) == 0xFF).all()
        assert got[3][valid:].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_x_in_mx(layout: str) -> None:
    ends = ends_of(GROUPS)
    for width in (96, 2880, 4096):
        dh, x = some(BF16, 371, width, "plain")
        data, scale = reference.quantize(x, "rceil")
        values = kernels.activate_backward(dh.float(), data, layout, "rceil", False, "hp", "none", None, scale)[0]
        given = (dh, data, layout, "rceil", False, "mx+rebased", "mx", None, scale)
        *made, sums = kernels.activate_backward(*given, offs=ends)
        same_forms(made, kernels.activate_backward(*given), 2, f"{width}")
        assert_sums(sums, values, ends, f"{width}")


def test_sums_of_special_values_and_views() -> None:
    """Rows may be wide or not, a NaN stays in the sums of its group, and inputs may be views."""
    dh, x = (part.cuda() for part in far_apart(BF16, 371, 768))
    for granularity in MAX_SPREAD:
        given = (dh, x, "concatenated", "rceil", False, "mx+rebased", "mx")
        made = kernels.activate_backward(*given, granularity=granularity, offs=ends_of(GROUPS))
        plain = kernels.activate_backward(*given, granularity=granularity)
        at = slice(2, 4 if granularity == "row" else 5)
        same_rebased(made[at], plain[at], granularity)
    dh, x = some(BF16, 371, 768, "plain")
    dh[150, 5] = torch.nan  # of group 4
    sums = kernels.activate_backward(dh, x, "concatenated", "rceil", False, "rebased", "none", offs=ends_of(GROUPS))[-1]
    assert sums.isfinite().all(1).tolist() == [group != 4 for group in range(len(GROUPS))]
    assert sums.isnan().nonzero().tolist() == [[4, 5], [4, 768 + 5]]
    for what, (dh, x) in strided_views(torch.randn(67, 1025, device="cuda", dtype=BF16)).items():
        ends = ends_of((3, 0, len(x) - 5))
        values = kernels.activate_backward(dh.float(), x.float(), "interleaved", "floor", False, "hp", "none")[0]
        *made, sums = kernels.activate_backward(dh, x, "interleaved", "floor", False, "mx+rebased", "hp", offs=ends)
        same_forms(made, kernels.activate_backward(dh, x, "interleaved", "floor", False, "mx+rebased", "hp"), 2, what)
        assert_sums(sums, values, ends, what)


@pytest.mark.parametrize("dx", ["none", "mx", "hp", "mx+hp", "mx+rebased", "rebased", "rebased+hp"])
def test_sums_that_another_kernel_makes(dx: str) -> None:
    """They are those of dx in high precision, which is returned only if it is asked for."""
    dh, x = some(BF16, 371, 6176 if "rebased" in dx else 416, "gpt_oss")
    scores, ends, how = torch.rand(371, device="cuda"), ends_of(GROUPS), FUNCTIONS["gpt_oss"]
    given = (dh, x, "interleaved", "rceil", False)
    with_hp = dx if "hp" in dx else "hp" if dx == "none" else f"{dx}+hp"
    want = kernels.activate_backward(*given, with_hp, "mx", scores, **how)
    at = 2 * ("mx" in dx)
    values = want[at + 3 * ("rebased" in dx)]
    assert (values.shape, values.dtype) == (x.shape, BF16)
    *made, sums = kernels.activate_backward(*given, dx, "mx", scores, **how, offs=ends)
    assert torch.equal(sums, kernels.group_bias_grads(values, ends)[0])
    want = [part for part in want if part is not values or dx == with_hp]
    if "rebased" in dx:
        same_forms(made, want, at, dx)
    else:
        for a, b in zip(made, want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_sums_without_rows() -> None:
    x = torch.empty(0, 192, device="cuda", dtype=BF16)
    for dx in ("rebased", "mx", "none"):
        sums = kernels.activate_backward(x[:, :96], x, "concatenated", "rceil", False, dx, "none", offs=ends_of((0, 0, 0)))[-1]
        assert torch.equal(sums, torch.zeros(3, 192, device="cuda"))


@pytest.mark.large
def test_sums_are_bit_equal_and_those_of_the_group_alone() -> None:
    """Two calls give the same bytes, and a group's sums do not depend on where it lies or on other groups."""
    sizes = (500, 0, 1333, 64, 2000, 199)
    dh, x = some(BF16, 4200, 2880, "gpt_oss")
    given, how = ("interleaved", "rceil", False, "mx+rebased", "mx"), FUNCTIONS["gpt_oss"]
    runs = [kernels.activate_backward(dh, x, *given, **how, offs=ends_of(sizes))[-1] for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    for group, end in enumerate(ends_of(sizes).tolist()):
        own = slice(end - sizes[group], end)
        alone = kernels.activate_backward(dh[own], x[own], *given, **how, offs=ends_of(sizes[group : group + 1]))[-1]
        assert torch.equal(alone[0], runs[0][group]), f"group {group}"


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


def test_sums_past_two_billion_elements() -> None:
    """Nothing but the last rows has a gradient."""
    rows, width = (1 << 18) + 64, 4096
    x = torch.zeros(rows, 2 * width, device="cuda", dtype=BF16)
    x[-65:] = torch.randn(65, 2 * width, device="cuda", dtype=BF16)
    dh = torch.ones(1, width, device="cuda", dtype=BF16).expand(rows, width)
    ends = torch.tensor([rows - 65, rows - 1, rows], device="cuda")
    data, scale, _, sums = kernels.activate_backward(dh, x, "concatenated", "rceil", True, "rebased", "none", offs=ends)
    want = reference.activate_backward(dh[-65:], x[-65:], "concatenated", "rceil", True, "rebased", "none")
    assert_same_bytes(data[-65:], want[0].cpu())
    assert torch.equal(scale[-65:], want[1])
    values = reference.activate_backward(dh[-65:].float(), x[-65:].float(), "concatenated", "rceil", True, "hp", "none")[0]
    assert not sums[0].any()
    assert_sums(sums[1:], values, torch.tensor([64, 65], device="cuda"), "the last rows")


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
            for dx in ("rebased", "mx"):
                torch.ops.mxep.activate_backward(dh, x, "interleaved", "rceil", False, dx, "mx", num_valid_rows=count, offs=count)


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


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_gradients_of_biases_are_sums_before_rounding(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the activation rebases; elsewhere they are sums of rounded values, and all else has the same bits."""
    torch.manual_seed(0)
    module = Experts(512, 416, 4, recipe, bias=True).to("cuda", BF16)
    for name, parameter in module.named_parameters():
        if name.startswith("b"):
            torch.nn.init.normal_(parameter, std=0.1)
    x, dy = (torch.randn(1024, 512, device="cuda", dtype=BF16) for _ in range(2))
    if resolve_recipe(recipe).dispatch != "hp":
        x, dy = quantize_mx(x), quantize_mx(dy)
    names = ["y", "x", *(name for name, _ in module.named_parameters())]

    def run() -> dict[str, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = module(leaf, torch.tensor([320, 0, 97, 543], device="cuda"))
        return dict(zip(names, [y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), dy)], strict=True))

    rebased = run()
    again = run()
    monkeypatch.setattr(GemmOptions, "rebased", None)
    other = run()
    for name in names:
        assert torch.equal(rebased[name], again[name]), name
        if name in ("b1", "b3"):
            error = (rebased[name].double() - other[name].double()).norm() / other[name].double().norm()
            assert error < 0.01, name
            assert not rebased[name][1].any(), "an expert without rows"
        else:
            assert torch.equal(rebased[name], other[name]), name
