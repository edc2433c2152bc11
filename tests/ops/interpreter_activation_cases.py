"""The activations' forward kernels under Triton's interpreter, run by test_kernel_interpreter.py like interpreter_cases.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.activation_cases import FUNCTIONS, LAYOUTS, cut, gate_up, strided_views
from tests.mx_cases import MODES, assert_same_bytes
from tests.ops import interpreter_repairs

from mxep import reference
from mxep.ops import kernels

BF16, FLOAT32 = torch.bfloat16, torch.float32
interpreter_repairs.apply()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (33, 96), (9, 416), (0, 64)])
def test_bytes(rows: int, width: int, mode: str, layout: str):
    """NumPy's exp is not torch's: a value near a rounding boundary may be rounded the other way, all others are equal."""
    cases = gate_up(BF16, rows, width) | (strided_views(torch.randn(67, 1025)) if width == 96 else {})
    for name, (_, x) in cases.items():
        ours, expected = (impl.activate(x, layout, mode) for impl in (kernels, reference))
        assert_off_by_one_at_most(ours, expected, name)


def assert_off_by_one_at_most(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], name: str) -> None:
    for part, (got, want) in enumerate(zip(ours, expected, strict=True)):
        assert (got.shape, got.dtype) == (want.shape, want.dtype), name
        off = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
        assert int((off > 0).sum()) <= 1 + off.numel() // 2000, f"{name}[{part}]"
        assert (off <= 1).all(), f"{name}[{part}]"


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_scores(dtype: torch.dtype, layout: str):
    scores = torch.rand(33)
    scores[5] = 0
    for name, (_, x) in gate_up(dtype, 33, 416).items():
        for given in (None, scores):
            ours, expected = (impl.activate(x, layout, "rceil", False, given) for impl in (kernels, reference))
            assert_off_by_one_at_most(ours, expected, name)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_quantised_x(dtype: torch.dtype, layout: str):
    """x in MX has the quantiser's bytes."""
    for name, (_, x) in gate_up(dtype, 33, 416).items():
        given = x, layout, "rceil", False, torch.rand(33)
        ours, expected = (impl.activate(*given, quantize_x=True) for impl in (kernels, reference))
        for got, want in zip(ours[2:], expected[2:], strict=True):
            assert_same_bytes(got, want, name)
        for got, want in zip(ours[:2], expected[:2], strict=True):
            assert got.shape == want.shape
    for rows in (0, 32):
        num_valid_rows = torch.tensor([rows], dtype=torch.int32)
        some = kernels.activate(x, layout, "rceil", num_valid_rows=num_valid_rows, quantize_x=True)
        for got, want in zip(some, kernels.activate(x, layout, "rceil", quantize_x=True), strict=True):
            assert_same_bytes(got[:rows], want[:rows])
            assert (got[rows:].view(torch.uint8) == 0xFF).all(), "rows past num_valid_rows are not written"
    assert [tuple(part.shape) for part in kernels.activate(x[:0], layout, "rceil", quantize_x=True)] == [
        (0, 416),
        (0, 13),
        (0, 832),
        (0, 26),
    ]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_high_precision(dtype: torch.dtype, layout: str):
    """The interpreter's exp differs from torch's by a rounding step of float32, before h is rounded to x's dtype."""
    for name, (_, x) in gate_up(dtype, 33, 416).items():
        for scores in (None, torch.rand(33)):
            got, want = (impl.activate(x, layout, "rceil", False, scores, h="hp")[0] for impl in (kernels, reference))
            assert (got.shape, got.dtype) == ((33, 416), dtype)
            torch.testing.assert_close(got, want, rtol=2**-7 if dtype == BF16 else 1e-6, atol=1e-30, equal_nan=True, msg=name)
    assert kernels.activate(x[:0], layout, "rceil", h="hp")[0].shape == (0, 416)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function(function: str, layout: str):
    """The interpreter's erf differs, too: where 1 + erf cancels, one of the two may have a factor of 1e-7 and the other 0."""
    how = FUNCTIONS[function]
    for name, case in gate_up(BF16, 33, 96).items():
        if name == "wild" and function == "geglu":  # there it is times an infinite up
            continue
        _, x = cut(*case, how)
        least = 1e-7 * float(x.float().nan_to_num(0, 0, 0).abs().max()) ** 2 if function == "geglu" else 1e-30
        for scores in (None, torch.rand(33)):
            ours, expected = (impl.activate(x, layout, "rceil", False, scores, **how) for impl in (kernels, reference))
            assert_off_by_one_at_most(ours, expected, name)
            ours, expected = (impl.activate(x, layout, "rceil", False, scores, **how, h="hp")[0] for impl in (kernels, reference))
            torch.testing.assert_close(ours, expected, rtol=2**-7, atol=least, equal_nan=True, msg=name)
            ours, expected = (impl.activate(x, layout, "rceil", False, scores, **how, quantize_x=True)[2:] for impl in (kernels, reference))
            for got, want in zip(ours, expected, strict=True):
                assert_same_bytes(got, want, name)
