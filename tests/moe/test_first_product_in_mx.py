"""The first product kept in MX: the same outputs, gradients of its quantised values block by block, their errors, saved bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.moe_truth import H, draw, error, make, tokens, truth, walk
from tests.spies import spy_on
from tests.truth import assert_same, raises_naming
from torch import Tensor

from mxep.grouped_mm.products import gemm_options, quantized
from mxep.moe import FusedMoE, RuntimeEPConfig, expert_mlp, fused_moe, saved_bytes
from mxep.moe.expert_mlp import Activation, ExpertOptions, ExpertRows, ExpertWeights
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.ops.activation.functions import SwiGLU
from mxep.recipe import RECIPES

IN_MX = RuntimeEPConfig(keep_first_product="mxfp8")


@pytest.mark.parametrize("name", ["swiglu", "clamped", "geglu", "relu2"])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("mode", ["rceil", ""])
def test_each_gradient_is_that_of_the_quantised_values(name: str, layout: str, mode: str) -> None:
    """Nothing but the first product's own rounding: with its values in place of the bytes the activation gives the same bits.

    Against float64 of the unquantised product that rounding, 2.6% of a value, shows in every gradient, and no other operation adds to it.
    The limit lies between two codes of e4m3: if it were one, all values that round to it would cross it.
    """
    generator = torch.Generator().manual_seed(3)
    form = SwiGLU(0.97, 1.702, 1.0) if name == "clamped" else SwiGLU()
    activation = Activation("swiglu" if name == "clamped" else name, layout, tuple(form))
    gemm = gemm_options(torch.device("cpu"), torch.bfloat16, "auto", "mx", mode, pad_groups=False) if mode else None
    options = ExpertOptions(gemm, activation, padding_rows="skip")
    first, dh = (draw(generator, 70, width).bfloat16() for width in (H if name == "relu2" else 2 * H, H))
    offs, scores = torch.tensor([32, 64], dtype=torch.int32), torch.rand(70)
    given = ExpertWeights(dh, dh), ExpertRows(offs, scores), options
    h, kept = expert_mlp.activate(first, *given, "rceil")
    again, _ = expert_mlp.activate(first, *given, "")
    assert_same(*(dequantize_data(forms.hp if forms.mx is None else forms.mx) for forms in (h, again)))
    assert isinstance(kept, MXTensor)
    assert_same(kept.dequantize(), MXTensor(*quantized(first, "rceil"), first.dtype).dequantize())

    def gradients(gate_up: Tensor) -> dict[str, Tensor]:
        forms = ("mx+hp", "mx+hp") if mode else ("hp", "hp")
        made = expert_mlp.activate_backward(dh, gate_up, *given[1:], forms, bias=False)
        parts = {f"{part} {form}": value for part in ("gate_up", "h") for form, value in getattr(made, part)._asdict().items()}
        return {part: dequantize_data(value) for part, value in (*parts.items(), ("scores", made.scores)) if value is not None}

    found, of_values, unquantised = gradients(kept), gradients(kept.dequantize()), gradients(first)
    assert found.keys() == of_values.keys()
    for part, got in found.items():
        assert_same(got, of_values[part], part)
        most = 0.2 if name == "clamped" else 0.08  # if rounding moves a value across the limit, its gradient appears or vanishes
        assert 0.005 < error(got, unquantised[part].double()) < most, part


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_outputs_are_equal_and_gradients_are_close(recipe: str) -> None:
    """Error against float64 over that with the product kept as it is: what docs/numerics.md says; in high precision all there is."""
    moe = make(FusedMoE, recipe, dim=128, expert_biases=True)
    x, dy = tokens(600, width=128)
    want = truth(moe, x, dy, moe.router(x).experts)
    whole = walk(moe, x, dy)
    moe.runtime = IN_MX
    found = walk(moe, x, dy)
    assert_same(found["y"], whole["y"])
    assert_same(found["experts.b2"], whole["experts.b2"])
    for name in want.keys() - {"y", "experts.b2"}:
        error_now = error(found[name], want[name])
        assert error_now < (1.35 * error(whole[name], want[name]) if recipe != "hp" else 0.05), name
    moe.runtime = replace(IN_MX, redispatch_x_in_backward=True)
    for name, got in walk(moe, x, dy).items():
        assert_same(got, found[name], name)


def test_saved_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make(FusedMoE, "mxfp8_wgrad_with_mx")
    x, _ = tokens(160)
    kept = saved_bytes(moe(x))
    moe.runtime = IN_MX
    rows, rest = divmod(kept["first product"], 2 * H * 2)
    assert rest == 0
    assert saved_bytes(moe(x)) == kept | {"first product": rows * 2 * H * 33 // 32}
    activate = spy_on(monkeypatch, expert_mlp, "activate")
    moe(x)
    with torch.no_grad():
        moe(x)
    assert [call.args[-1] for call in activate.call_args_list] == ["rceil", ""], "nothing is saved in inference"


@pytest.mark.usefixtures("poison")
def test_few_tokens_and_frozen_parts() -> None:
    for count in (0, 1, 33):
        moe = make(FusedMoE, "mxfp8_wgrad_with_mx")
        moe.expert_bias[-2:] = -10  # two experts without tokens
        moe.runtime = IN_MX
        x, dy = tokens(count)
        found = walk(moe, x, dy)
        assert all(value.isfinite().all() for value in found.values())
        assert not found["experts.w1"][-2:].any()
        for name, parameter in moe.named_parameters():
            parameter.requires_grad_(name == "experts.w3")
        (alone,) = torch.autograd.grad(moe(x), [moe.experts.w3], dy)
        assert_same(alone, found["experts.w3"])


def test_wrong_input_is_an_error() -> None:
    x, w1, w2 = torch.randn(5, 32), torch.randn(2, 96, 32), torch.randn(2, 32, 48)
    with raises_naming("H = 48", "multiple of 32"):
        fused_moe(x, torch.randn(2, 32), w1, None, w2, None, 1, 2, IN_MX, group="", recipe="hp")
    with raises_naming("keep_first_product='bf16'", "'mxfp8'"):
        RuntimeEPConfig(keep_first_product="bf16")  # type: ignore[arg-type]
    assert RuntimeEPConfig.from_json(IN_MX.to_json()) == IN_MX
