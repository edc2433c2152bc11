"""The arithmetic of SwiGLU's backward kernel, compiled for the host: every form of SwiGLU, exact and fast, against the twin."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tests.swiglu_cases import SWIGLUS, gate_up

from mxep.kernels import nvrtc, swiglu_backward
from mxep.reference import swiglu_backward_quantize


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("form", SWIGLUS)
def test_values_are_the_twins(form: str, exact: bool, scored: bool, tmp_path: Path) -> None:
    """The host's exp is not torch's, so values are close; what is 0 because it was clamped, and what is NaN, is the same."""
    how, value = SWIGLUS[form], tmp_path / "value.cuh"
    options = swiglu_backward.options_of(32, "concatenated", True, exact, scores=scored, how=how)
    value.write_text(nvrtc.source("swiglu_value.cuh", options=options))
    program, source = tmp_path / "swiglu", Path(__file__).parent / "swiglu_on_host.cpp"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", f'-DVALUE="{value}"']
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True, timeout=120)
    for name, (dh, x) in gate_up(torch.float32, 33, 96).items():
        gate, up = x.chunk(2, 1)
        scores = torch.rand(33) if scored else None
        weights = torch.ones(33) if scores is None else scores
        torch.stack((gate, up, dh, weights[:, None].expand(gate.shape)), -1).numpy().tofile(tmp_path / "in")
        subprocess.run([str(program), str(tmp_path / "in"), str(tmp_path / "out")], check=True, timeout=60)
        h, d_gate, d_up, d_score = torch.from_file(str(tmp_path / "out"), size=4 * gate.numel()).view(33, 96, 4).unbind(-1)
        want = swiglu_backward_quantize(dh, x, "concatenated", "rceil", True, "hp", "hp", scores=scores, form=how)
        gate, up = how.clamp(gate, up)
        grad, weight = (weights[:, None] * dh).abs(), weights[:, None]
        sizes = torch.cat((grad * up.abs() * (1.0 + (how.alpha * gate).abs()), grad * gate.abs()), 1), (weight * gate * up).abs()
        for part, (got, twin, size) in enumerate(zip((torch.cat((d_gate, d_up), 1), h), want[:2], sizes, strict=True)):
            assert torch.equal(got.isnan(), twin.isnan()), f"{name}[{part}]"
            off = torch.where((got == twin) | got.isnan(), 0.0, (got - twin).abs())
            assert (off <= 1e-6 * size.nan_to_num(0.0)).all(), f"{name}[{part}]: {(off / size).nan_to_num(0.0).max()}"
            assert torch.equal(got == 0, twin == 0), f"{name}[{part}]"
        if scored and name != "wild":
            torch.testing.assert_close(d_score.sum(1), want[2], rtol=1e-4, atol=1e-4 * float(d_score.abs().sum(1).max()))
