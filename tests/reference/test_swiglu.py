"""The twins of SwiGLU with quantisation: their order of operations against float64 and autograd, layouts, special values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.mx_cases import MODES, assert_same_bytes
from tests.swiglu_cases import LAYOUTS, SWIGLUS, gate_up, hidden, strided_views

from mxep.reference import dequantize, quantize, swiglu, swiglu_backward_quantize, swiglu_quantize
from mxep.reference.activation import activate, activate_backward
from mxep.reference.swiglu import FORMS, SwiGLU

FLOAT32 = torch.float32


def truth(dh: torch.Tensor, x: torch.Tensor, how: SwiGLU = SWIGLUS["plain"]) -> tuple[torch.Tensor, torch.Tensor]:
    """h and dx in float64, by torch's own operations and autograd; x concatenated."""
    x = x.double().requires_grad_()
    gate, up = x.chunk(2, -1)
    h = hidden(gate, up, how)
    h.backward(dh.double())
    return h.detach(), x.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["normal", "wide", "small", "zero", "at limits"])
@pytest.mark.parametrize("form", SWIGLUS)
def test_numbers_are_those_of_float64_quantised(form: str, name: str, mode: str) -> None:
    """Beside the quantiser's own error nothing is left: values equal the quantised truth but where a rounding falls the other way."""
    dh, x = gate_up(torch.bfloat16, 129, 416)[name]
    how = SWIGLUS[form]
    h, dx = truth(dh, x, how)
    dx_data, dx_scale, again, again_scale = swiglu_backward_quantize(dh, x, "concatenated", mode, form=how)
    data, scale = swiglu_quantize(x, "concatenated", mode, form=how)
    assert_same_bytes(again, data)
    assert_same_bytes(again_scale, scale)
    for got, want in (((data, scale), h), ((dx_data, dx_scale), dx)):
        ideal = dequantize(*quantize(want.float(), mode), FLOAT32).double()
        error, least = ((value - want).norm() for value in (dequantize(*got, FLOAT32).double(), ideal))
        assert error <= 1.001 * least
        assert (dequantize(*got, FLOAT32).double() != ideal).double().mean() < 1e-3


@pytest.mark.parametrize("form", SWIGLUS)
def test_plain_operations_are_the_same_numbers(form: str) -> None:
    """`activate`, for widths that the operators do not take, and the operators."""
    how = SWIGLUS[form]
    for name, (dh, x) in gate_up(FLOAT32, 33, 96).items():
        d_x, h = swiglu_backward_quantize(dh, x, "interleaved", "rceil", False, "hp", "hp", form=how)
        plain = *activate_backward(dh, x, "swiglu", "interleaved", swiglu=how), activate(x, "swiglu", "interleaved", swiglu=how)
        for got, want in zip((*plain, swiglu(x, "interleaved", form=how)), (d_x, h, h, h), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=name)
        assert_same_bytes(swiglu_quantize(x, "interleaved", "rceil", form=how)[0], quantize(h, "rceil")[0])


def test_clamped_values_have_no_gradient() -> None:
    """At the limit they have: what is beyond it has none, an infinite value among it; NaN goes through."""
    gate = torch.tensor([7.0, 7.5, -30.0, torch.inf, torch.nan, 1.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 7.0, -7.5, -torch.inf])
    x, dh = torch.cat((gate, up)).repeat_interleave(4)[None], torch.ones(1, 32)
    d_x, h = swiglu_backward_quantize(dh, x, "concatenated", "rceil", False, "hp", "hp", form=SWIGLUS["gpt_oss"])
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
def test_forms_that_are_none(form: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"SwiGLU: limit=.*, want a limit above 0 .* within float32"):
        SwiGLU(*form)
    assert SwiGLU() == SwiGLU(None) == SwiGLU(torch.inf) == (torch.inf, 1.0, 0.0)
    assert repr(SwiGLU(7)) == "SwiGLU(limit=7.0, alpha=1.0, offset=0.0)"
    assert pickle.loads(pickle.dumps(SwiGLU(7))) == copy.deepcopy(SwiGLU(7)) == SwiGLU(7)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_are_the_same_numbers(mode: str) -> None:
    for name, (dh, x) in gate_up(FLOAT32, 33, 96).items():
        woven = torch.stack(x.chunk(2, -1), -1).flatten(-2)
        for a, b in zip(swiglu_quantize(x, "concatenated", mode), swiglu_quantize(woven, "interleaved", mode), strict=True):
            assert_same_bytes(a, b, name)
        halves, columns = (swiglu_backward_quantize(dh, value, layout, mode) for value, layout in zip((x, woven), LAYOUTS, strict=True))
        assert_same_bytes(halves[2], columns[2], name)
        assert_same_bytes(halves[3], columns[3], name)
        # Blocks of 32 hold 16 gates and 16 ups when interleaved, so dx is equal up to the quantiser's error.
        plain, other = (dequantize(*parts[:2], FLOAT32) for parts in (halves, columns))
        other = torch.cat((other[:, 0::2], other[:, 1::2]), -1)
        known = ~(plain.isnan() | other.isnan())
        assert (plain - other)[known].norm() <= 0.06 * plain[known].norm(), name


def test_special_values() -> None:
    """A NaN spoils its block and no other; gates past exp's range give zero or up itself; -Inf times zero is NaN."""
    x = torch.ones(4, 192)
    x[0, 5], x[1, 40], x[2, 70], x[3, 33] = torch.nan, -torch.inf, -200.0, 200.0
    data, scale = swiglu_quantize(x, "concatenated", "rceil")
    assert (scale.view(torch.uint8) == 255).nonzero().tolist() == [[0, 0], [1, 1]]
    h = dequantize(data, scale, FLOAT32)
    assert (h[2, 70], h[3, 33]) == (0.0, 192.0)  # 200 lies halfway between two codes, 192 is the even one
    dx = dequantize(*swiglu_backward_quantize(torch.ones(4, 96), x, "concatenated", "rceil")[:2], FLOAT32)
    assert dx.isnan().any(0).unflatten(0, (-1, 32)).all(1).tolist() == [True, True, False, True, True, False]


def test_views_and_no_rows() -> None:
    for what, (dh, x) in strided_views(torch.randn(67, 1025)).items():
        got, want = (
            swiglu_backward_quantize(dh, x, "concatenated", "rceil"),
            swiglu_backward_quantize(dh.clone(), x.clone(), *("concatenated", "rceil")),
        )
        for a, b in zip(got, want, strict=True):
            assert_same_bytes(a, b, what)
    assert [tuple(part.shape) for part in swiglu_quantize(torch.empty(0, 64), "interleaved", "floor")] == [(0, 32), (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forms_are_the_same_numbers(layout: str) -> None:
    """MX of a form is the quantised float32 value, hp the same value rounded once; nothing comes that was not asked for."""
    dh, x = gate_up(torch.bfloat16, 33, 96)["normal"]
    every = swiglu_backward_quantize(dh, x, layout, "rceil", False, "mx+hp", "mx+hp")
    assert [part.dtype for part in every] == [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16] * 2
    for dx in FORMS:
        for h in FORMS:
            want = [*every[:3][slice(0 if "mx" in dx else 2, 3 if "hp" in dx else 2)]]
            want += [*every[3:][slice(0 if "mx" in h else 2, 3 if "hp" in h else 2)]]
            for got, part in zip(swiglu_backward_quantize(dh, x, layout, "rceil", False, dx, h), want, strict=True):
                assert torch.equal(got.view(torch.uint8), part.view(torch.uint8))
    whole = swiglu_backward_quantize(dh.float(), x.float(), layout, "rceil", False, "mx+hp", "mx+hp")
    for index in (2, 5):
        assert torch.equal(every[index], whole[index].bfloat16())
        assert_same_bytes(every[index - 2], quantize(whole[index], "rceil")[0])
    with pytest.raises(ValueError, match="forms 'hp\\+mx'"):
        swiglu_backward_quantize(dh, x, layout, "rceil", False, "hp+mx")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias_goes_to_the_rows_of_its_group(layout: str) -> None:
    dh, x = gate_up(torch.bfloat16, 33, 96)["normal"]
    ends, bias = torch.tensor([3, 3, 17, 29], dtype=torch.int32), torch.randn(4, 192)
    added = x.float()
    for group, (start, end) in enumerate(((0, 3), (3, 3), (3, 17), (17, 29))):
        added[start:end] += bias[group]
    for got, want in zip(
        (*swiglu_quantize(x, layout, "rceil", False, bias, ends), *swiglu_backward_quantize(dh, x, layout, "rceil", bias=bias, offs=ends)),
        (*swiglu_quantize(added, layout, "rceil"), *swiglu_backward_quantize(dh, added, layout, "rceil")),
        strict=True,
    ):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_factors_of_the_rows(layout: str) -> None:
    """A power of two as score moves exponents only; the score's gradient is the row's product of dh and h, in float64."""
    dh, x = gate_up(torch.bfloat16, 33, 96)["normal"]
    powers = torch.exp2(torch.randint(-3, 4, (33,)).float())
    plain, scored = (swiglu_quantize(x, layout, "rceil", scores=scores) for scores in (None, powers))
    assert_same_bytes(plain[0], scored[0])
    assert torch.equal(dequantize(*plain, FLOAT32) * powers[:, None], dequantize(*scored, FLOAT32))
    plain_parts = swiglu_backward_quantize(dh, x, layout, "rceil", False, "hp", "hp")
    *parts, d_scores = swiglu_backward_quantize(dh, x, layout, "rceil", False, "hp", "hp", scores=powers)
    for got, want in zip(parts, plain_parts, strict=True):
        assert torch.equal(got, want * powers[:, None].to(want.dtype))
    joined = x if layout == "concatenated" else torch.cat((x[:, 0::2], x[:, 1::2]), 1)
    h, _ = truth(dh, joined)
    torch.testing.assert_close(d_scores.double(), (dh.double() * h).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_high_precision_is_what_is_quantised(layout: str) -> None:
    _, x = gate_up(FLOAT32, 33, 96)["normal"]
    scores, bias, ends = torch.rand(33), torch.randn(2, 192), torch.tensor([10, 20])
    for options in ((None, None, None), (bias, ends, scores)):
        h = swiglu(x, layout, False, *options)
        for got, want in zip(quantize(h, "rceil"), swiglu_quantize(x, layout, "rceil", False, *options), strict=True):
            assert_same_bytes(got, want)
    assert swiglu(x.bfloat16(), layout).dtype == torch.bfloat16


def test_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match="layout='halves'"):
        swiglu_quantize(torch.ones(1, 64), "halves", "rceil")
