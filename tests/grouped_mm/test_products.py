"""The forms of rows that the products make, and by how many kernels."""

from __future__ import annotations

import pytest
import torch
from tests.spies import spy_on

from mxep.device import GEMM_PATHS
from mxep.grouped_mm import products
from mxep.grouped_mm.function import _GroupedMM
from mxep.mx import MXWeight
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows, quantize_rows


@pytest.mark.parametrize(("wgrad", "forms"), [("mx", [True, True]), ("hp", [False, False]), ("none", [False, False])])
def test_plain_rows_of_an_fp8_path_are_quantised_by_one_kernel(wgrad: str, forms: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both operands, in MX as well where wgrad reads it; the product is that of their rebased rows."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 96, requires_grad=True), torch.randn(1, 32, 96, requires_grad=wgrad != "none")
    w_mx = products._quantize_weight(w.detach(), "rceil"), products._quantize_weight(w.detach().mT, "rceil")
    offs = torch.tensor([64], dtype=torch.int32)
    monkeypatch.setattr(products.GemmOptions, "rebased", "row")
    made = spy_on(monkeypatch, products.direct, "quantize_grouped_mm")
    monkeypatch.setattr(products.direct, "quantize", lambda *_: pytest.fail("rows that are quantised apart from their rebase"))
    monkeypatch.setattr(products.Weights, "make_both", lambda _: (None, None))
    monkeypatch.setattr(products.Weights, "quantized", lambda _, which: w_mx[which == "dgrad"])
    gemm = products.gemm_options(x.device, x.dtype, "reference", wgrad, "rceil", False)
    y = _GroupedMM.apply(x, w, offs, None, gemm, None)
    y.backward(torch.randn_like(y))
    assert [call.args[7] for call in made.call_args_list] == forms
    rows = RebasedRows(*quantize_rows(x.detach(), "rceil", "row", False))
    assert torch.equal(y, torch.ops.mxep.grouped_mm_mx(*rows[:2], *w_mx[0], offs, x.dtype, "reference"))
    assert x.grad is not None
    assert (w.grad is None) == (wgrad == "none")


def test_options_for_another_dtype_are_those_of_that_dtype() -> None:
    """A float32 dgrad of an "auto" path multiplies MX rows, while its bf16 forward multiplies rebased rows."""
    granularity = GEMM_PATHS["fp8"].granularity
    bf16 = products.GemmOptions(torch.bfloat16, "hp", "rceil", "fp8", "exact", granularity, False)
    float32 = products.GemmOptions(torch.float32, "hp", "rceil", "fp8", "exact", None, False)
    assert granularity is not None
    assert bf16.with_out_dtype(torch.float32) == float32
    assert float32.with_out_dtype(torch.bfloat16) == bf16


def frozen(*transposed: bool) -> list[MXWeight]:
    """Weights (2, 64, 96) and (2, 32, 96), or the first alone; of a transposed one the blocks run along N."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(2, *((96, N) if swap else (N, 96)), generator=generator) for N, swap in zip((64, 32), transposed, strict=False)]
    made = [MXWeight.of(weight.bfloat16()) for weight in weights]
    return [weight.transpose(-2, -1) if swap else weight for weight, swap in zip(made, transposed, strict=True)]


@pytest.mark.parametrize("path", ["fp8", "reference"])
@pytest.mark.parametrize(
    ("which", "transposed"),
    [
        *(("dgrad", (False,)), ("dgrad", (False, False)), ("dgrad", (False, True))),
        *(("forward", (True,)), ("forward", (True, True)), ("forward", (True, False))),
    ],
)
def test_the_other_form_of_frozen_weights(which: str, transposed: tuple[bool, ...], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are those of the dequantised values, which FP8 paths do not materialise unless one of two weights is transposed."""
    parts = frozen(*transposed)
    values = torch.cat([part.dequantize() for part in parts], 1)
    want = products._quantize_weight(values if which == "forward" else values.transpose(-2, -1), "rceil")
    want = products.direct.rebase_weight(*want) if path == "fp8" else want
    made = spy_on(monkeypatch, products.direct, "dequantize")
    gemm = products.GemmOptions(torch.bfloat16, "hp", "rceil", path, path, GEMM_PATHS[path].granularity, False)
    got = products.Weights(parts[0], parts[1] if len(parts) > 1 else None, gemm).quantized(which)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    through_values = path == "reference" or (len(parts) > 1 and any(transposed))
    assert [call.args[2] for call in made.call_args_list] == [torch.bfloat16] * len(parts) * through_values


def test_forms_that_are_made_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = products.GemmOptions(torch.bfloat16, "mx", "rceil", "fp8", "fp8", GEMM_PATHS["fp8"].granularity, False)
    weight = torch.nn.Parameter(torch.randn(2, 64, 96, dtype=torch.bfloat16))
    plain = products.Weights(weight, None, gemm)
    dgrad = plain.make_both()
    forward = plain.made("forward")
    assert dgrad[0] is not None
    assert forward[0] is not None
    assert plain.cached("forward")[0] is forward[0]
    assert plain.quantized("forward")[0] is forward[0]
    assert plain.made("forward") == plain.cached("dgrad") == (None, None)  # it was returned, the other one was not kept
    monkeypatch.setattr(products.direct, "quantize_weight", lambda *_: pytest.fail("a weight is quantised again"))
    given = products.Weights(weight, None, gemm, forward=forward)
    assert given.make_both() == (None, None)
    assert given.quantized("forward")[0] is forward[0]
    cache = WeightCache()
    cache.captured = True  # it is not used any more
    kept = products.Weights(weight, None, gemm, CachedWeight(cache, torch.nn.ParameterDict({"w": weight}), "w"), dgrad=dgrad)
    assert kept.cached("dgrad")[0] is dgrad[0]
    assert kept.cached("forward") == (None, None)
