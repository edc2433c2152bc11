"""The accuracy figures: measured here on two gloo ranks, recorded, and shown in the README as recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from mxep.bench import accuracy, report
from mxep.bench.records import read_records, write_records
from mxep.cli import main

ROOT = Path(__file__).parent.parent.parent


def _rank(rank: int, world: int) -> dict[str, dict[str, float]]:
    return {routing: accuracy.measure(routing, 256, 256, 128, 4, torch.device("cpu")) for routing in accuracy.ROUTINGS}


def test_figures_reach_what_is_asked() -> None:
    for figures in run_ranks(_rank, 2):
        for routing, values in figures.items():
            for name, least in accuracy.LEAST_DB.items():
                assert values[name] >= least, (routing, name, values)


def test_pages_show_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page in report.PAGES:
        text = (ROOT / page).read_text()
        assert report.render(text, page) == text, "run mxep bench report"
    assert read_records("accuracy")


def test_records_from_a_clean_tree() -> None:
    for record in [record for path in (ROOT / "benchmarks" / "results").glob("*.json") for record in json.loads(path.read_text())]:
        assert "+changes" not in record["commit"], record


def test_records_go_through_files(tmp_path: Path) -> None:
    write_records("some", "cpu", 2, [{"benchmark": "some"}], tmp_path)
    assert read_records("some", tmp_path) == [{"benchmark": "some"}]
    (tmp_path / "some-bad-2.json").write_text("{}")
    with pytest.raises(ValueError, match="want a list"):
        read_records("some", tmp_path)


def test_unknown_routing() -> None:
    with pytest.raises(ValueError, match="want one of balanced"):
        accuracy.routing_counts("odd", 0, 4, 8)


def test_pages_with_wrong_markers() -> None:
    start, end = report.markers("accuracy")
    for text in ("nothing", start, f"{start}\n{end}\n{end}", f"{start}\n<!-- end of rows -->"):
        with pytest.raises(ValueError, match=r"README\.md has [01] whole blocks"):
            report.render(text, "README.md")
    start, end = report.markers("speed")
    with pytest.raises(ValueError, match="no block 'speed', want one of summary, overview, accuracy"):
        report.render(f"{start}\n{end}", "README.md")


def test_report_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "report"]) == 2
    assert re.search(r"error: report: no README.md, docs/performance.md.* in .*, want a checkout of mxep", capsys.readouterr().err)
