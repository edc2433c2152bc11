"""`mxep doctor`: its output is computed, and missing parts are named."""

from __future__ import annotations

import pytest
import torch

from mxep.commands import doctor
from mxep.device import GEMM_PATHS
from mxep.extras import EXTRAS


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
    monkeypatch.setenv("COLUMNS", "200")
    doctor.command([])
    text = capsys.readouterr().out
    assert "comes with torch's Linux wheels" in text
    for name, extra in EXTRAS.items():
        assert f'pip install ".[{name}]"' in text
        assert all(word in text for word in (*extra.modules, extra.gives))


def test_doctor_fails_where_no_path_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a GPU whose machine lacks NVRTC: every table is there, and no self-test."""
    monkeypatch.setattr(doctor, "available_gemm_paths", lambda device: dict.fromkeys(GEMM_PATHS, "nvrtc: not found (test)"))
    assert doctor.command([]) == 1
    text = " ".join(capsys.readouterr().out.split())
    for word in ("GEMM paths by name", "nvrtc: not found (test)", "MXFP8 does not run on this device"):
        assert word in text
    assert "Self-test" not in text
