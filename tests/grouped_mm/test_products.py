"""The forms of rows that the products make, and in how many passes."""

from __future__ import annotations

import pytest
import torch

from mxep.grouped_mm import products
from mxep.grouped_mm.function import _GroupedMM
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows


@pytest.mark.parametrize(("wgrad", "forms"), [("mx", [True, True]), ("hp", [False, False]), ("none", [False, False])])
def test_plain_rows_of_an_fp8_path_are_quantised_in_one_pass(wgrad: str, forms: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands, in MX as well where wgrad reads it; the product is that of their rebased rows."""
    made, quantize_rows = [], products.direct.quantize_rows

    def recorded(x: torch.Tensor, mode: str, granularity: str, mx: bool) -> list[torch.Tensor]:
        made.append(mx)
        return quantize_rows(x, mode, granularity, mx)

    def refused(*_: object) -> None:
        raise AssertionError("rows that are quantised apart from their rebase")

    torch.manual_seed(0)
    x, w = torch.randn(64, 96, requires_grad=True), torch.randn(1, 32, 96, requires_grad=wgrad != "none")
    w_mx = products._quantize_weight(w.detach(), "rceil"), products._quantize_weight(w.detach().mT, "rceil")
    offs = torch.tensor([64], dtype=torch.int32)
    monkeypatch.setattr(products.GemmOptions, "rebased", "row")
    monkeypatch.setattr(products.direct, "quantize_rows", recorded)
    monkeypatch.setattr(products.direct, "quantize", refused)
    monkeypatch.setattr(products.Weights, "quantized", lambda _, which: w_mx[which == "dgrad"])
    gemm = products.gemm_options(x.device, x.dtype, "reference", wgrad, "rceil", False)
    y = _GroupedMM.apply(x, w, offs, None, gemm, None)
    y.backward(torch.randn_like(y))
    assert made == forms
    rows = RebasedRows(*quantize_rows(x.detach(), "rceil", "row", False))
    assert torch.equal(y, torch.ops.mxep.grouped_mm_mx(*rows[:2], *w_mx[0], offs, x.dtype, "reference"))
    assert x.grad is not None
    assert (w.grad is None) == (wgrad == "none")
