"""`mxep doctor` and `mxep explain`: what they print is computed, and what cannot be is said."""

from __future__ import annotations

import pytest
import torch

from mxep import doctor, explain
from mxep.recipe import resolve_recipe


def test_doctor_reports_and_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.command([]) == 0
    text = capsys.readouterr().out
    for word in (torch.__version__, "GEMM paths by name", "Self-test", "blackwell", "all-to-all over"):
        assert word in text


def test_doctor_fails_when_a_path_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = doctor.to_mxfp8_then_scaled_grouped_mm
    monkeypatch.setattr(doctor, "to_mxfp8_then_scaled_grouped_mm", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    assert doctor.command([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    doctor.command([])
    assert "mxep[parquet]" in capsys.readouterr().out


def test_layer_stops_by_hand() -> None:
    """2 ranks, 4 tokens, top-2 of 4 experts, D 64, H 32: 8 rows, half of them go away."""
    stops = {stop.name: stop for stop in explain.layer_stops(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe(None))}
    assert stops["dispatch"].out == (8, 64)
    assert stops["dispatch"].wire_bytes == (4 * 80, 4 * 128)  # 64 + 2 bytes padded to 80; bf16 back
    assert stops["combine"].wire_bytes == (4 * 128, 4 * 80)
    assert stops["permute"].out == (96, 64)  # 8 + 2 * 32 rows, rounded up to 32
    assert stops["w2"].flops == (2 * 8 * 64 * 32, 4 * 8 * 64 * 32)
    plain = {stop.name: stop for stop in explain.layer_stops(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe("bf16"))}
    assert plain["dispatch"].wire_bytes == (4 * 128, 4 * 128)


def test_explain_prints_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.command(["--model", "dsv3_671b", "--ep", "32"]) == 0
    text = capsys.readouterr().out
    assert "671.03 billion parameters" in text
    assert "dispatch" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "gpt5"], "unknown"),
        (["--ep", "7"], "want a multiple"),
        (["--recipe", "fp4"], "is unknown"),
        (["--tokens", "0"], "more than 0"),
    ],
)
def test_explain_refuses(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.command(argv) == 2
    assert says in capsys.readouterr().out.replace("\n", " ")
