"""benchmarks/compare_records.py: an arm is slower only beyond its noise, and folders that share nothing are no success."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "compare_records.py"))["main"]


def record(folder: Path, **medians: float) -> str:
    folder.mkdir()
    arms = {name: {"median_ms": median, "round_spread": 1.05} for name, median in medians.items()}
    case = {"benchmark": "rows", "shape": {"T": 8, "D": 32}, "routing": "balanced", "arms": arms}
    (folder / "rows-cpu-1.json").write_text(json.dumps([case]))
    return str(folder)


def test_only_what_is_beyond_the_noise_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = record(tmp_path / "old", gather=1.0, scatter=1.0, gone=1.0)
    assert main([old, record(tmp_path / "same", gather=1.04, scatter=0.5, added=9.0)]) == 0
    assert "0 of 2 arms slower" in capsys.readouterr().out
    assert main([old, record(tmp_path / "slow", gather=1.06, scatter=1.0)]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "SLOWER" in first
    assert "rows T=8,D=32 balanced gather" in first
    assert last.startswith("1 of 2 arms slower")


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    assert main([record(tmp_path / "old", gather=1.0), record(tmp_path / "new", scatter=1.0)]) == 2
    with pytest.raises(SystemExit, match="want two"):
        main(["old"])
