"""The arithmetic of the activations' backward kernel, compiled for the host: every function, exact and fast, against the reference."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.activation_cases import FUNCTIONS, SWIGLUS, assert_right_everywhere, cut, gate_up, whole_range

from mxep.ops.activation.columns import Variant
from mxep.ops.runtime import nvrtc
from mxep.reference import activate_backward

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
Values = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def compiled(function: str, exact: bool, scored: bool, folder: Path) -> Values:
    """(dh, gate, up, scores), (T, H) each, -> h, gradients of gate and of up, and what each adds to its row's score's."""
    given, value = FUNCTIONS[function], folder / "value.cuh"
    how, activation = given.get("form", SWIGLUS["plain"]), given.get("activation", "swiglu")
    variant = Variant(32, "concatenated", "rceil", exact, scores=scored, activation=activation, swiglu=how)
    value.write_text(nvrtc.source("activation/functions.cuh", options=variant.options()))
    program, source = folder / "activation", Path(__file__).parent / "activation_on_host.cpp"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", f'-DVALUE="{value}"']
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True, timeout=120)

    def run(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.stack((gate, up, dh, scores), -1).numpy().tofile(folder / "in")
        subprocess.run([str(program), str(folder / "in"), str(folder / "out")], check=True, timeout=60)
        return torch.from_file(str(folder / "out"), size=4 * gate.numel()).view(*gate.shape, 4).unbind(-1)

    return run


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_finite_gate_and_up_has_its_gradient(function: str, exact: bool, tmp_path: Path) -> None:
    dh, gate, up = whole_range()
    got = compiled(function, exact, False, tmp_path)(dh, gate, up, torch.ones_like(gate))
    assert_right_everywhere(got[:3], function)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_those_of_the_reference(function: str, exact: bool, scored: bool, tmp_path: Path) -> None:
    """The host's exp is not torch's, so values are close; zeros of clamped values and NaN are the same."""
    given, values = FUNCTIONS[function], compiled(function, exact, scored, tmp_path)
    how, activation = given.get("form", SWIGLUS["plain"]), given.get("activation", "swiglu")
    for name, (dh, both) in gate_up(torch.float32, 33, 96).items():
        (_, x), (gate, up) = cut(dh, both, given), both.chunk(2, 1)
        scores = torch.rand(33) if scored else None
        weights = torch.ones(33) if scores is None else scores
        h, d_gate, d_up, d_score = values(dh, gate, up, weights[:, None].expand(gate.shape))
        want = activate_backward(dh, x, "concatenated", "rceil", True, "hp", "hp", scores=scores, **given)
        grad, weight = (weights[:, None] * dh).abs(), weights[:, None]
        if activation == "relu2":
            dx, sizes = d_gate, (grad * gate.abs(), weight * gate.square())
        else:
            dx, (gate, up) = torch.cat((d_gate, d_up), 1), how.clamp(gate, up)
            steep = (how.alpha * gate).abs() if activation != "geglu_tanh" else gate.abs() * (1.6 + 0.215 * gate.square())
            sizes = torch.cat((grad * up.abs() * (1.0 + steep), grad * gate.abs()), 1), (weight * gate * up).abs()
        for part, (got, reference, size) in enumerate(zip((dx, h), want[:2], sizes, strict=True)):
            if activation == "geglu":  # far below zero the reference's factor, 1 + erf, is exactly 0, and NaN with an infinite up
                unlike = reference.isnan() & got.isinf()
                assert not unlike.any() or (part == 1 and (gate[unlike] < -5).all() and up[unlike].isinf().all())
                got = got.masked_fill(unlike, torch.nan)
            assert torch.equal(got.isnan(), reference.isnan()), f"{name}[{part}]"
            off = torch.where((got == reference) | got.isnan(), 0.0, (got - reference).abs())
            assert (off <= 1e-6 * size.nan_to_num(0.0)).all(), f"{name}[{part}]: {(off / size).nan_to_num(0.0).max()}"
            if activation != "geglu":
                assert torch.equal(got == 0, reference == 0), f"{name}[{part}]"
        if scored and name != "wild":
            torch.testing.assert_close(d_score.sum(1), want[2], rtol=1e-4, atol=1e-4 * float(d_score.abs().sum(1).max()))
