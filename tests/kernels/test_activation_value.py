"""The arithmetic of the activations' backward kernel, compiled for the host: every function, exact and fast, against the twin."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tests.activation_cases import FUNCTIONS, SWIGLUS, cut, gate_up

from mxep.kernels import activation_backward, nvrtc
from mxep.reference import activate_backward


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_are_the_twins(function: str, exact: bool, scored: bool, tmp_path: Path) -> None:
    """The host's exp is not torch's, so values are close; what is 0 because it was clamped, and what is NaN, is the same."""
    given, value = FUNCTIONS[function], tmp_path / "value.cuh"
    how, activation = given.get("form", SWIGLUS["plain"]), given.get("activation", "swiglu")
    options = activation_backward.options_of(32, "concatenated", True, exact, scores=scored, activation=activation, how=how)
    value.write_text(nvrtc.source("activation_value.cuh", options=options))
    program, source = tmp_path / "activation", Path(__file__).parent / "activation_on_host.cpp"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", f'-DVALUE="{value}"']
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True, timeout=120)
    for name, (dh, both) in gate_up(torch.float32, 33, 96).items():
        (_, x), (gate, up) = cut(dh, both, given), both.chunk(2, 1)
        scores = torch.rand(33) if scored else None
        weights = torch.ones(33) if scores is None else scores
        torch.stack((gate, up, dh, weights[:, None].expand(gate.shape)), -1).numpy().tofile(tmp_path / "in")
        subprocess.run([str(program), str(tmp_path / "in"), str(tmp_path / "out")], check=True, timeout=60)
        h, d_gate, d_up, d_score = torch.from_file(str(tmp_path / "out"), size=4 * gate.numel()).view(33, 96, 4).unbind(-1)
        want = activate_backward(dh, x, "concatenated", "rceil", True, "hp", "hp", scores=scores, **given)
        grad, weight = (weights[:, None] * dh).abs(), weights[:, None]
        if activation == "relu2":
            dx, sizes = d_gate, (grad * gate.abs(), weight * gate.square())
        else:
            dx, (gate, up) = torch.cat((d_gate, d_up), 1), how.clamp(gate, up)
            steep = (how.alpha * gate).abs() if activation != "geglu_tanh" else gate.abs() * (1.6 + 0.215 * gate.square())
            sizes = torch.cat((grad * up.abs() * (1.0 + steep), grad * gate.abs()), 1), (weight * gate * up).abs()
        for part, (got, twin, size) in enumerate(zip((dx, h), want[:2], sizes, strict=True)):
            if activation == "geglu":  # far below zero the twin's share, 1 + erf, is exactly 0, and NaN times an infinite up
                unlike = twin.isnan() & got.isinf()
                assert not unlike.any() or (part == 1 and (gate[unlike] < -5).all() and up[unlike].isinf().all())
                got = got.masked_fill(unlike, torch.nan)
            assert torch.equal(got.isnan(), twin.isnan()), f"{name}[{part}]"
            off = torch.where((got == twin) | got.isnan(), 0.0, (got - twin).abs())
            assert (off <= 1e-6 * size.nan_to_num(0.0)).all(), f"{name}[{part}]: {(off / size).nan_to_num(0.0).max()}"
            if activation != "geglu":
                assert torch.equal(got == 0, twin == 0), f"{name}[{part}]"
        if scored and name != "wild":
            torch.testing.assert_close(d_score.sum(1), want[2], rtol=1e-4, atol=1e-4 * float(d_score.abs().sum(1).max()))
