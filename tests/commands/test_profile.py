"""`mxep profile`: options that no ranks can measure are named before these start; tests/fused/test_network_profiler.py measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxep.cli import main
from mxep.commands import profile


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "0"], "--tokens=0, want 1 or more"),
        (["--experts", "0"], "--experts=0, want 1 or more"),
        (["--nproc", "0"], "--nproc=0, want 1 or more"),
        (["--dim", "48"], "--dim=48, want a multiple of 32"),
        (["--top-k", "5", "--experts", "4"], "--top-k=5 of 4 experts"),
        (["--top-k", "5", "--histogram", "COUNTS"], "--top-k=5 of 4 experts"),
        (["--experts", "8", "--histogram", "COUNTS"], "--experts=8, but --histogram has 4 counts"),
        (["--recipe", "mxfp9"], "recipe: 'mxfp9' is unknown"),
        (["--out", "FOLDER"], "want the name of a file in a folder that exists"),
        (["--out", "FOLDER/none/config.json"], "want the name of a file in a folder that exists"),
    ],
)
def test_wrong_options(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "counts.json").write_text(json.dumps([3, 1, 0, 4]))
    words = [word.replace("COUNTS", str(tmp_path / "counts.json")).replace("FOLDER", str(tmp_path)) for word in words]
    assert main(["profile", "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["[1, NaN]", "[1, -1]", "[0, 0]", "[]", "[true, 1]", "[1, Infinity]", '["1"]', "3"])
def test_wrong_histograms(counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profile, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "counts.json").write_text(counts)
    assert main(["profile", "--device", "cpu", "--histogram", str(tmp_path / "counts.json")]) == 2
    assert "want a JSON list of E counts of at least 0, not all 0" in capsys.readouterr().err
