"""Activations with their quantiser on a GPU: the exact form has the reference's bytes, the fast form differs by at most a known step."""

from __future__ import annotations

import pytest
import torch
from tests.activation_cases import FUNCTIONS, LAYOUTS, assert_right_everywhere, cut, gate_up, strided_views, whole_range
from tests.mx_cases import MODES, assert_same_bytes

import mxep.operators  # noqa: F401
from mxep import reference
from mxep.ops.activation.functions import ACTIVATIONS

kernels = pytest.importorskip("mxep.ops.kernels")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

BF16, FLOAT32 = torch.bfloat16, torch.float32
WIDTHS = (32, 64, 96, 128, 416, 1408, 2048, 4096, 7168, 8192)


OTHERS = ("plain", *(name for name in ACTIVATIONS if name != "swiglu"))


def both_directions(impl: object, dh: torch.Tensor, x: torch.Tensor, *options: object, function: str = "plain") -> tuple[torch.Tensor, ...]:
    """(h's data and scales, then the results of backward) of the kernels or of their references."""
    how = FUNCTIONS[function]
    return (*impl.activate(x, *options, **how), *impl.activate_backward(dh, x, *options, **how))


def assert_reference_codes(got: torch.Tensor, want: torch.Tensor, function: str, what: str) -> None:
    """The same bytes. For GELU's forward a few codes may differ by one: Triton's erf differs from torch's in the last bit."""
    if function != "geglu":
        assert_same_bytes(got, want.cpu(), what)
        return
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    off = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
    assert (off <= 1).all(), what
    assert int((off > 0).sum()) <= 1 + 2e-4 * off.numel(), what


def assert_exact(dh: torch.Tensor, x: torch.Tensor, layout: str, mode: str, what: str, function: str = "plain") -> None:
    dh, x = cut(dh, x, FUNCTIONS[function])
    got, want = (both_directions(impl, dh, x, layout, mode, True, function=function) for impl in (kernels, reference))
    for part, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.is_cuda
        assert_reference_codes(a, b, function if part < 2 else "", f"{what}[{part}]")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_exact_form_has_the_references_bytes(dtype: torch.dtype, layout: str, mode: str):
    for name, (dh, x) in gate_up(dtype, 129, 416).items():
        assert_exact(dh.cuda(), x.cuda(), layout, mode, name)


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sizes", [(1, 7, 31, 33), pytest.param((127, 129), marks=pytest.mark.large)])
def test_every_size(sizes: tuple[int, ...], width: int, function: str):
    for rows in sizes:
        for layout in LAYOUTS:
            dh, x = torch.randn(rows, width, device="cuda", dtype=BF16), torch.randn(rows, 2 * width, device="cuda", dtype=BF16)
            assert_exact(dh, x, layout, "rceil", f"{rows} rows, {layout}", function)


@pytest.mark.parametrize("function", ["plain", "relu2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout: str, function: str):
    for what, (dh, x) in strided_views(torch.randn(67, 1025, device="cuda", dtype=BF16)).items():
        assert_exact(dh, x, layout, "floor", what, function)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_finite_gate_and_up_has_its_gradient(function: str, exact: bool):
    """In the fast form a factor below 2^-126 is zero, GELU's factor is a polynomial, and a subnormal may be zero."""
    dh, gate, up = (part.cuda() for part in whole_range())
    x = gate if function == "relu2" else torch.cat((gate, up), 1)
    dx, h = kernels.activate_backward(dh, x, "concatenated", "rceil", exact, "hp", "hp", **FUNCTIONS[function])
    near = 1e-6 if exact else 4e-6
    assert_right_everywhere(tuple(part.cpu() for part in (h, *dx.split(32, 1))), function, near)
    forward = kernels.activate(x, "concatenated", "rceil", exact, **FUNCTIONS[function], h="hp")[0]
    assert_right_everywhere((forward.cpu(),), function, near)


def test_no_rows():
    x = torch.empty(0, 192, device="cuda", dtype=BF16)
    shapes = [tuple(part.shape) for part in both_directions(kernels, x[:, :96], x, "concatenated", "rceil")]
    assert shapes == [(0, 96), (0, 3), (0, 192), (0, 6), (0, 96), (0, 3)]


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", OTHERS)
def test_fast_form_is_one_step_away_at_most(function: str, layout: str, mode: str, dtype: torch.dtype):
    """A value near a rounding boundary is rarely rounded the other way, by one step of e4m3 in its block's scale."""
    differing = total = 0
    for name, case in gate_up(dtype, 257, 2048).items():
        if name == "wild" and function == "geglu":  # 1 + erf is 0: NaN with an infinite up; in the fast form it is a small number
            continue
        dh, x = (part.cuda() for part in cut(*case, FUNCTIONS[function]))
        fast, exact = (both_directions(kernels, dh, x, layout, mode, form, function=function) for form in (False, True))
        for data, scale, want_data, want_scale in zip(fast[0::2], fast[1::2], exact[0::2], exact[1::2], strict=True):
            got = reference.dequantize(data, scale, FLOAT32).double()
            want = reference.dequantize(want_data, want_scale, FLOAT32).double()
            assert torch.equal(got.isnan(), want.isnan()), name
            got, want = got.nan_to_num(), want.nan_to_num()
            largest = want.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
            smallest_step = (largest * 2**-15).expand(*largest.shape[:-1], 32).flatten(-2)
            step = torch.maximum(want.abs() * 0.15, smallest_step) + 2.0**-90  # sigmoids below 2^-126 are zero in the fast form
            assert ((got - want).abs() <= step).all(), name
            if name != "wild":  # a density that is flushed to zero leaves zeros of another sign
                other = got != want if function == "geglu" else data.view(torch.uint8) != want_data.view(torch.uint8)
                differing += int(other.sum())
                total += data.numel()
    assert differing <= 1e-4 * total, f"{differing} of {total} codes differ"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_forms_have_the_references_bytes(dtype: torch.dtype, layout: str):
    for name, (dh, x) in gate_up(dtype, 257, 416).items():
        dh, x = dh.cuda(), x.cuda()
        for impl in (kernels.activate, torch.ops.mxep.activate):
            for a, b in zip(impl(x, layout, "rceil", True), reference.activate(x, layout, "rceil", True), strict=True):
                assert_same_bytes(a, b.cpu(), name)
        for forms in (("mx+hp", "hp"), ("hp", "mx"), ("none", "mx+hp"), ("mx", "none"), ("mx+hp", "mx+hp")):
            got, want = (impl.activate_backward(dh, x, layout, "rceil", True, *forms) for impl in (kernels, reference))
            for a, b in zip(got, want, strict=True):
                if a.element_size() == 1:
                    assert_same_bytes(a, b.cpu(), f"{name} {forms}")
                else:  # NaN of any sign
                    assert torch.equal(a.isnan(), b.isnan()), name
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name} {forms}"


@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_group_bias_has_the_references_bytes(dtype: torch.dtype):
    ends = torch.tensor([30, 30, 31, 64, 250, 256], device="cuda", dtype=torch.int32)
    for width in (1, 96, 1408, 7168):
        rows, bias = torch.randn(257, width, device="cuda").to(dtype), torch.randn(6, width, device="cuda")
        for scores in (None, torch.rand(257, device="cuda")):
            got, want = rows.clone(), rows.clone()
            kernels.add_group_bias(got, bias, ends, scores)
            reference.add_group_bias(want, bias, ends, scores)
            assert_same_bytes(got, want.cpu(), f"{width} columns")
        for index in (None, torch.randint(-1, 257, (300,), device="cuda", dtype=torch.int32)):
            given = rows, ends, bias, torch.rand(257 if index is None else 300, device="cuda"), index
            for got, want in zip(kernels.group_bias_grads(*given), reference.group_bias_grads(*given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * width)
            assert_same_bytes(kernels.group_bias_grads(*given)[0], kernels.group_bias_grads(*given)[0].cpu())
        for scores in (None, torch.rand(257, device="cuda")):
            got, want = (impl.group_bias_factors(bias, scores, 257) for impl in (kernels, reference))
            for a, b in zip(got, want, strict=True):
                assert_same_bytes(a, b.cpu())


@pytest.mark.large
def test_same_input_same_bytes():
    dh, x = torch.randn(4096, 1408, device="cuda", dtype=BF16), torch.randn(4096, 2816, device="cuda", dtype=BF16)
    first, second = (both_directions(kernels, dh, x, "concatenated", "rceil") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bytes(a, b.cpu())


def test_past_two_billion_elements():
    """x has 2^31 + 2^20 elements: the last rows are where they belong."""
    rows, width = (1 << 17) + 64, 8192
    x = torch.zeros(rows, 2 * width, device="cuda", dtype=BF16)
    x[-65:] = torch.randn(65, 2 * width, device="cuda", dtype=BF16)
    dh = torch.zeros(rows, width, device="cuda", dtype=BF16)
    dh[-65:] = torch.randn(65, width, device="cuda", dtype=BF16)
    want = both_directions(reference, dh[-65:], x[-65:], "concatenated", "rceil", True)
    for part, (got, tail) in enumerate(zip(both_directions(kernels, dh, x, "concatenated", "rceil", True), want, strict=True)):
        assert_same_bytes(got[-65:], tail.cpu(), f"[{part}]")
        assert not got[:4].view(torch.uint8).any()


def test_no_host_sync(no_sync):
    dh, x = torch.randn(64, 96, device="cuda", dtype=BF16), torch.randn(64, 192, device="cuda", dtype=BF16)
    with no_sync():
        for _ in range(2):
            both_directions(torch.ops.mxep, dh, x, "interleaved", "rceil")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [96, 1408])
@pytest.mark.usefixtures("poison")
def test_scores_have_the_references_numbers(width: int, layout: str):
    dh, x = (part.cuda() for part in gate_up(torch.bfloat16, 513, width)["normal"])
    scores = torch.rand(513, device="cuda")
    for impl in (kernels, reference):
        h = impl.activate(x, layout, "rceil", True, scores)
        parts = impl.activate_backward(dh, x, layout, "rceil", True, "mx+hp", "mx+hp", scores)
        if impl is kernels:
            ours = (*h, *parts)
    for got, want in zip(ours[:-1], (*h, *parts)[:-1], strict=True):
        assert_same_bytes(got, want.cpu(), f"{width} {layout}")
    torch.testing.assert_close(ours[-1], parts[-1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_high_precision_has_the_references_numbers(dtype: torch.dtype, layout: str):
    for width in (32, 416, 1536):
        for name, (_, x) in gate_up(dtype, 257, width).items():
            x = x.cuda()
            for scores in (None, torch.rand(257, device="cuda")):
                want = reference.activate(x, layout, "rceil", True, scores, h="hp")[0]
                exact, fast = (kernels.activate(x, layout, "rceil", exact, scores, h="hp")[0] for exact in (True, False))
                assert_same_bytes(exact.nan_to_num(nan=7.0).view(torch.uint8), want.nan_to_num(nan=7.0).view(torch.uint8).cpu(), name)
                step = 2**-7 if dtype == BF16 else 1e-4
                torch.testing.assert_close(fast, want, rtol=step, atol=2.0**-90, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("function", OTHERS)
def test_x_in_mx_has_the_references_bytes(function: str, dtype: torch.dtype, layout: str):
    """x is quantised in the kernel that makes h, and read by backward: every scale byte, also that of NaN."""
    how = FUNCTIONS[function]
    for width in (32, 416, 1536):
        for name, case in gate_up(dtype, 257, width).items():
            dh, x = (part.cuda() for part in cut(*case, how))
            for scores in (None, torch.rand(257, device="cuda")):
                parts = kernels.activate(x, layout, "rceil", True, scores, **how, quantize_x=True)
                references = reference.activate(x, layout, "rceil", True, scores, **how, quantize_x=True)
                for part, (a, b) in enumerate(zip(parts, references, strict=True)):
                    assert_reference_codes(a, b, function if part < 2 else "", name)
                x_data, x_scale = parts[2:]
                x_scale = x_scale.clone()
                x_scale.view(torch.uint8).view(-1)[:257] = torch.arange(257, device="cuda").clamp(max=255).to(torch.uint8)
                for forms in (("mx+hp", "mx+hp"), ("mx", "mx"), ("hp", "none")):
                    got, want = (
                        impl.activate_backward(dh, x_data, layout, "rceil", True, *forms, scores, x_scale, **how)
                        for impl in (kernels, reference)
                    )
                    for at, (a, b) in enumerate(zip(got, want, strict=True)):
                        if a.element_size() == 1:
                            assert_same_bytes(a, b.cpu(), f"{name} {forms}")
                        elif scores is not None and at == len(got) - 1:
                            values = reference.dequantize(x_data, x_scale, FLOAT32)
                            h = reference.activate(values, layout, "rceil", True, **how, h="hp")[0]
                            bound = 2e-6 * (dh.float() * h).abs().sum(1)  # of float32 sums of H terms in two orders
                            assert torch.equal(a.isnan(), b.isnan()), name
                            apart = torch.where(a == b, 0, (a - b).abs())  # equal infinities among them
                            assert ((apart <= bound) | a.isnan()).all(), f"{name} {forms}: {apart.nan_to_num().max()}"
                        else:
                            assert torch.equal(a.isnan(), b.isnan()), name
                            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name} {forms}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_have_the_references_bytes(function: str, dtype: torch.dtype, layout: str):
    """The exact form does; the fast form is close to it, and clamped values have no gradient in either."""
    how = FUNCTIONS[function]
    for name, case in gate_up(dtype, 257, 416).items():
        dh, x = (part.cuda() for part in cut(*case, how))
        for scores in (None, torch.rand(257, device="cuda")):
            for quantize_x in (False, True):
                got, want = (impl.activate(x, layout, "rceil", True, scores, **how, quantize_x=quantize_x) for impl in (kernels, reference))
                for part, (a, b) in enumerate(zip(got, want, strict=True)):
                    assert_reference_codes(a, b, function if part < 2 else "", name)
            exact, fast, want = (
                impl.activate_backward(dh, x, layout, "rceil", exactly, "mx+hp", "mx+hp", scores, **how)
                for impl, exactly in ((kernels, True), (kernels, False), (reference, True))
            )
            compared = 6  # all but the gradient of the scores, which is summed in another order
            for a, b in zip(exact[:compared], want[:compared], strict=True):
                if a.element_size() == 1:
                    assert_same_bytes(a, b.cpu(), name)
                else:
                    assert torch.equal(a.isnan(), b.isnan()), name
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
            if scores is not None and name != "wild":
                torch.testing.assert_close(exact[-1], want[-1], rtol=1e-4, atol=1e-4 * float(want[-1].abs().max()))
            made, reached = fast[2].float(), want[2].float()
            size = reached.abs().nan_to_num().amax()
            # Infinity times a factor that one form alone rounds to zero is NaN in that form, and infinite in the other.
            assert torch.equal(made.isfinite(), reached.isfinite()), name
            assert ((made - reached).nan_to_num().abs() <= 2**-7 * reached.abs().nan_to_num() + 1e-5 * size).all(), name
            if name == "wild" and function == "geglu":  # as in the test of the fast form
                continue
            h, want_h = (
                kernels.activate(x, layout, "rceil", False, scores, **how, h="hp")[0],
                reference.activate(x, layout, "rceil", True, scores, **how, h="hp")[0],
            )
            least = 1e-5 + 1e-7 * float(x.float().nan_to_num(0, 0, 0).abs().max()) ** 2  # GELU's factor is within 1e-7
            finite = want_h.isfinite()
            assert torch.equal(h.isfinite(), finite), name
            torch.testing.assert_close(h[finite], want_h[finite], rtol=2**-7, atol=least)
