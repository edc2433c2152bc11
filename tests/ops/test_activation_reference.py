"""The references of activations with quantisation: their order of operations against float64 and autograd, layouts, special values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.activation_cases import (
    FUNCTIONS,
    LAYOUTS,
    SWIGLUS,
    assert_right_everywhere,
    cut,
    far_apart,
    gate_up,
    hidden,
    strided_views,
    whole_range,
)
from tests.mx_cases import MODES, assert_same_bytes
from tests.truth import raises_naming

from mxep.ops.activation.functions import SwiGLU
from mxep.ops.activation.reference import FORMS
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, rebase_rows
from mxep.reference import activate, activate_backward, dequantize, quantize

FLOAT32 = torch.float32


def truth(dh: torch.Tensor, x: torch.Tensor, name: str = "plain") -> tuple[torch.Tensor, torch.Tensor]:
    """h and dx in float64, by torch's own operations and autograd; x concatenated."""
    x = x.double().requires_grad_()
    h = hidden(*((x, None) if name == "relu2" else x.chunk(2, -1)), **FUNCTIONS[name])
    h.backward(dh.double())
    return h.detach(), x.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["normal", "wide", "small", "zero", "at limits"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_those_of_float64_quantised(function: str, name: str, mode: str) -> None:
    """The only error is the quantiser's: values equal the quantised truth, except where a rounding goes the other way.

    GELU's factor of a gate far below zero is a difference of numbers near 1, 6e-8 from the truth, which a block's larger values hide.
    """
    how = FUNCTIONS[function]
    dh, x = cut(*gate_up(torch.bfloat16, 129, 416)[name], how)
    h, dx = truth(dh, x, function)
    dx_data, dx_scale, again, again_scale = activate_backward(dh, x, "concatenated", mode, **how)
    data, scale = activate(x, "concatenated", mode, **how)
    assert_same_bytes(again, data)
    assert_same_bytes(again_scale, scale)
    for got, want in (((data, scale), h), ((dx_data, dx_scale), dx)):
        ideal = dequantize(*quantize(want.float(), mode), FLOAT32).double()
        error, least = ((value - want).norm() for value in (dequantize(*got, FLOAT32).double(), ideal))
        assert error <= 1.001 * least
        assert (dequantize(*got, FLOAT32).double() != ideal).double().mean() < 1e-3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_finite_gate_and_up_has_its_gradient(function: str) -> None:
    dh, gate, up = whole_range()
    x = gate if function == "relu2" else torch.cat((gate, up), 1)
    dx, h = activate_backward(dh, x, "concatenated", "rceil", True, "hp", "hp", **FUNCTIONS[function])
    assert_right_everywhere((h, *dx.split(32, 1)), function)
    assert torch.equal(activate(x, "concatenated", "rceil", True, **FUNCTIONS[function], h="hp")[0], h)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_high_precision_values_are_those_that_are_quantised(function: str, layout: str) -> None:
    how = FUNCTIONS[function]
    for name, case in gate_up(FLOAT32, 33, 96).items():
        dh, x = cut(*case, how)
        for scores in (None, torch.rand(33)):
            h = activate(x, layout, "rceil", False, scores, **how, h="hp")[0]
            d_x, again = activate_backward(dh, x, layout, "rceil", False, "hp", "hp", scores, **how)[:2]
            torch.testing.assert_close(again, h, rtol=0, atol=0, equal_nan=True, msg=name)
            d_x_mx = activate_backward(dh, x, layout, "rceil", False, "mx", "none", scores, **how)[:2]
            quantised = (*quantize(h, "rceil"), *quantize(d_x, "rceil"))
            for got, want in zip((*activate(x, layout, "rceil", False, scores, **how), *d_x_mx), quantised, strict=True):
                assert_same_bytes(got, want, name)
            assert activate(x.bfloat16(), layout, "rceil", **how, h="hp")[0].dtype == torch.bfloat16


def test_widths_that_no_operator_takes() -> None:
    """In high precision H may be any number."""
    for function, how in FUNCTIONS.items():
        dh, x = cut(torch.randn(5, 7), torch.randn(5, 14), how)
        h, dx = truth(dh, x, function)
        got_dx, got_h = activate_backward(dh, x, "concatenated", "rceil", False, "hp", "hp", **how)
        torch.testing.assert_close(got_h.double(), h, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_dx.double(), dx, rtol=1e-5, atol=1e-6)


def test_no_gradient_below_zero() -> None:
    """Squared ReLU: zeros of either sign and negative values have neither h nor gradient; NaN has both."""
    x = torch.tensor([[-torch.inf, -1.0, -0.0, 0.0, 3.0, torch.inf, torch.nan]])
    d_x, h = activate_backward(torch.full((1, 7), -2.0), x, "concatenated", "rceil", False, "hp", "hp", activation="relu2")
    assert h[0, :6].tolist() == [0.0, 0.0, 0.0, 0.0, 9.0, torch.inf]
    assert d_x[0, :6].tolist() == [0.0, 0.0, 0.0, 0.0, -12.0, -torch.inf]
    assert h[0, 6].isnan()
    assert d_x[0, 6].isnan()


def test_a_form_belongs_to_swiglu() -> None:
    x = torch.ones(1, 64)
    with pytest.raises(ValueError, match=r"'geglu' with SwiGLU\(limit=7.0, .* want 'swiglu' with a form of it"):
        activate(x, "concatenated", "rceil", activation="geglu", form=(7.0,))
    with pytest.raises(ValueError, match="activation: 'gelu' is unknown, want one of swiglu, geglu, geglu_tanh, relu2"):
        activate(x, "concatenated", "rceil", activation="gelu")
    assert activate(x, "concatenated", "rceil", activation="relu2", form=SwiGLU(), h="hp")[0].shape == (1, 64)


def test_clamped_values_have_no_gradient() -> None:
    """Values at the limit have a gradient, values beyond it (also infinite ones) have none; NaN is kept."""
    gate = torch.tensor([7.0, 7.5, -30.0, torch.inf, torch.nan, 1.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0, -7.5, -torch.inf])
    x, dh = torch.cat((gate, up)).repeat_interleave(4)[None], torch.ones(1, 32)
    d_x, h = activate_backward(dh, x, "concatenated", "rceil", False, "hp", "hp", form=SWIGLUS["gpt_oss"])
    d_gate, d_up = d_x.view(2, 8, 4)[..., 0]
    assert d_gate[4].isnan()
    assert (d_gate[[1, 3]] == 0).all()
    assert (d_gate[[0, 2, 5, 6, 7]] != 0).all()
    assert d_up[4].isnan()
    assert (d_up[[6, 7]] == 0).all()
    assert (d_up[[0, 1, 3, 5]] != 0).all()
    assert h.view(8, 4)[[0, 1, 3], 0].unique().numel() == 1
    assert h.view(8, 4)[[6, 7], 0].unique().numel() == 1


@pytest.mark.parametrize(
    "form", [(0.0,), (-1.0,), (torch.nan,), (7.0, torch.inf), (7.0, 1.0, torch.nan), (1e39,), (1e-50,), (7.0, 1e39), (7.0, 1.0, -1e39)]
)
def test_invalid_forms_of_swiglu(form: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"SwiGLU: limit=.*, want a limit above 0 .* within float32"):
        SwiGLU(*form)
    assert SwiGLU() == SwiGLU(None) == SwiGLU(torch.inf) == (torch.inf, 1.0, 0.0)
    assert repr(SwiGLU(7)) == "SwiGLU(limit=7.0, alpha=1.0, offset=0.0)"
    assert pickle.loads(pickle.dumps(SwiGLU(7))) == copy.deepcopy(SwiGLU(7)) == SwiGLU(7)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_are_the_same_numbers(mode: str) -> None:
    for name, (dh, x) in gate_up(FLOAT32, 33, 96).items():
        woven = torch.stack(x.chunk(2, -1), -1).flatten(-2)
        for a, b in zip(activate(x, "concatenated", mode), activate(woven, "interleaved", mode), strict=True):
            assert_same_bytes(a, b, name)
        halves, columns = (activate_backward(dh, value, layout, mode) for value, layout in zip((x, woven), LAYOUTS, strict=True))
        assert_same_bytes(halves[2], columns[2], name)
        assert_same_bytes(halves[3], columns[3], name)
        # Blocks of 32 hold 16 gates and 16 ups when interleaved, so dx is equal up to the quantiser's error.
        plain, other = (dequantize(*parts[:2], FLOAT32) for parts in (halves, columns))
        other = torch.cat((other[:, 0::2], other[:, 1::2]), -1)
        known = ~(plain.isnan() | other.isnan())
        assert (plain - other)[known].norm() <= 0.06 * plain[known].norm(), name


def test_special_values() -> None:
    """A NaN changes its own block only; gates past exp's range give zero or up itself; -Inf times zero is NaN."""
    x = torch.ones(4, 192)
    x[0, 5], x[1, 40], x[2, 70], x[3, 33] = torch.nan, -torch.inf, -200.0, 200.0
    data, scale = activate(x, "concatenated", "rceil")
    assert (scale.view(torch.uint8) == 255).nonzero().tolist() == [[0, 0], [1, 1]]
    h = dequantize(data, scale, FLOAT32)
    assert (h[2, 70], h[3, 33]) == (0.0, 192.0)  # 200 lies halfway between two codes, 192 is the even one
    dx = dequantize(*activate_backward(torch.ones(4, 96), x, "concatenated", "rceil")[:2], FLOAT32)
    assert dx.isnan().any(0).unflatten(0, (-1, 32)).all(1).tolist() == [True, True, False, True, True, False]


def test_views_and_no_rows() -> None:
    for what, (dh, x) in strided_views(torch.randn(67, 1025)).items():
        got, want = (
            activate_backward(dh, x, "concatenated", "rceil"),
            activate_backward(dh.clone(), x.clone(), *("concatenated", "rceil")),
        )
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a, b, what)
    assert [tuple(part.shape) for part in activate(torch.empty(0, 64), "interleaved", "floor")] == [(0, 32), (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_forms_have_the_same_values(layout: str) -> None:
    """The MX form is the quantised float32 value, the hp form the same value rounded once; only requested forms are returned."""
    dh, x = gate_up(torch.bfloat16, 33, 96)["normal"]
    every = activate_backward(dh, x, layout, "rceil", False, "mx+hp", "mx+hp")
    assert [part.dtype for part in every] == [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16] * 2
    for dx in FORMS:
        for h in FORMS:
            want = [*every[:3][slice(0 if "mx" in dx else 2, 3 if "hp" in dx else 2)]]
            want += [*every[3:][slice(0 if "mx" in h else 2, 3 if "hp" in h else 2)]]
            for got, part in zip(activate_backward(dh, x, layout, "rceil", False, dx, h), want, strict=True):
                assert torch.equal(got.view(torch.uint8), part.view(torch.uint8))
    whole = activate_backward(dh.float(), x.float(), layout, "rceil", False, "mx+hp", "mx+hp")
    for index in (2, 5):
        assert torch.equal(every[index], whole[index].bfloat16())
        assert_same_bytes(every[index - 2], quantize(whole[index], "rceil")[0])
    with pytest.raises(ValueError, match="dx='hp\\+mx'"):
        activate_backward(dh, x, layout, "rceil", False, "hp+mx")


@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rebased_rows_are_a_rebase_of_the_mx_rows(layout: str, granularity: str) -> None:
    """They are returned in their position among the other forms; rows with distant exponents are wide if the granularity allows it."""
    dh, x = far_apart(torch.bfloat16, 33, 160)
    rows = [part for part in rebase_rows(*activate(x, layout, "rceil"), MAX_SPREAD[granularity])[:3] if part is not None]
    got = activate(x, layout, "rceil", h="rebased", granularity=granularity)
    assert_bits(got, rows)
    hp = activate(x, layout, "rceil", h="hp")
    assert_bits(activate(x, layout, "rceil", h="rebased+hp", granularity=granularity), [*rows, *hp])
    assert bool((rows[1] < 0).any()) == (granularity != "row")
    every = activate_backward(dh, x, layout, "rceil", False, "mx+hp", "mx+hp")
    rows = [part for part in rebase_rows(*every[:2], MAX_SPREAD[granularity])[:3] if part is not None]
    for dx, want in (
        ("mx+rebased+hp", [*every[:2], *rows, *every[2:]]),
        ("mx+rebased", [*every[:2], *rows, *every[3:]]),
        ("rebased+hp", [*rows, *every[2:]]),
        ("rebased", [*rows, *every[3:]]),
    ):
        assert_bits(activate_backward(dh, x, layout, "rceil", False, dx, "mx+hp", granularity=granularity), want)


def assert_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_rebased_forms_that_do_not_exist() -> None:
    x = torch.ones(1, 128)
    with raises_naming("h='rebased'", "quantize_x=True", "one of the two"):
        activate(x, "concatenated", "rceil", h="rebased", quantize_x=True)
    with raises_naming("h='rebased'", "granularity='column'", "auto, row, span"):
        activate(x, "concatenated", "rceil", h="rebased", granularity="column")
    with raises_naming("activate: h='mx+rebased'", "want one of none, mx, hp, mx+hp, rebased, rebased+hp"):
        activate(x, "concatenated", "rceil", h="mx+rebased")
    with raises_naming("activate_backward: h='rebased'", "want one of none, mx, hp, mx+hp"):
        activate_backward(x[:, :64], x, "concatenated", "rceil", False, "rebased", "rebased")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_factors_of_the_rows(layout: str) -> None:
    """A power of two as score moves exponents only; the score's gradient is the row's product of dh and h, in float64."""
    dh, x = gate_up(torch.bfloat16, 33, 96)["normal"]
    powers = torch.exp2(torch.randint(-3, 4, (33,)).float())
    plain, scored = (activate(x, layout, "rceil", scores=scores) for scores in (None, powers))
    assert_same_bytes(plain[0], scored[0])
    assert torch.equal(dequantize(*plain, FLOAT32) * powers[:, None], dequantize(*scored, FLOAT32))
    plain_parts = activate_backward(dh, x, layout, "rceil", False, "hp", "hp")
    *parts, d_scores = activate_backward(dh, x, layout, "rceil", False, "hp", "hp", scores=powers)
    for got, want in zip(parts, plain_parts, strict=True):
        assert torch.equal(got, want * powers[:, None].to(want.dtype))
    joined = x if layout == "concatenated" else torch.cat((x[:, 0::2], x[:, 1::2]), 1)
    h, _ = truth(dh, joined)
    torch.testing.assert_close(d_scores.double(), (dh.double() * h).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["plain", "gpt_oss", "relu2"])
def test_sums_of_the_rows_of_groups(function: str, layout: str) -> None:
    """They are sums of unrounded values and come last, whatever else is asked for; rows past the last end are in none."""
    how, ends = FUNCTIONS[function], torch.tensor([0, 5, 5, 29])
    dh, x = cut(*gate_up(torch.bfloat16, 33, 96)["normal"], how)
    dh[29:], x[30:] = torch.nan, torch.inf
    for scores in (None, torch.rand(33)):
        values = activate_backward(dh.float(), x.float(), layout, "rceil", False, "hp", "none", scores, **how)[0]
        want = torch.stack([values[a:b].double().sum(0) for a, b in ((0, 0), (0, 5), (5, 5), (5, 29))])
        for dx, h in (("none", "none"), ("mx", "mx"), ("hp", "none"), ("mx+rebased+hp", "hp"), ("rebased", "mx+hp")):
            plain = activate_backward(dh, x, layout, "rceil", False, dx, h, scores, **how)
            *made, sums = activate_backward(dh, x, layout, "rceil", False, dx, h, scores, **how, offs=ends)
            assert_bits(made, plain)
            assert (sums.dtype, sums.shape) == (FLOAT32, (4, x.shape[1]))
            torch.testing.assert_close(sums.double(), want, rtol=1e-5, atol=1e-5)
            assert_bits([sums], activate_backward(dh, x, layout, "rceil", False, dx, h, scores, **how, offs=ends.int())[-1:])
    for wrong in (ends.float(), ends[None]):
        with raises_naming("activate_backward: offs are", "want (G,) int32 or int64"):
            activate_backward(dh, x, layout, "rceil", **how, offs=wrong)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_unknown_layout_is_named(activation: str) -> None:
    with pytest.raises(ValueError, match="layout='halves'"):
        activate(torch.ones(1, 64), "halves", "rceil", activation=activation)
