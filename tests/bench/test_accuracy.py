"""The accuracy figures: measured here on two gloo ranks, recorded, and shown in the README as recorded."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from tests.bench_cases import CPU
from tests.ranks import run_ranks

from mxep.bench import accuracy, command, markdown_tables, registry, report, tables
from mxep.bench.records import read_records, write_records
from mxep.cli import main

ROOT = Path(__file__).parent.parent.parent


def _rank(rank: int, world: int) -> list[dict]:
    setting = registry.Setting(CPU, quick=True, group=dist.group.WORLD)
    records = registry.run("accuracy", setting, "some command", lambda text: None)
    few = partial(accuracy.measure, rows=64, D=64, N=32, L=2, device=CPU)
    with (
        mock.patch.object(accuracy, "measure", lambda routing, *sizes: few(routing)),
        mock.patch.dict(accuracy.LEAST_DB, dw=99.0),
        pytest.raises(registry.CheckFailedError, match=r"accuracy, balanced, out .*: mxfp8: dw at .* dB from bf16, want at least 99 dB"),
    ):
        registry.run("accuracy", setting, "", lambda text: None)
    return records


def test_figures_reach_what_is_asked() -> None:
    for records in run_ranks(_rank, 2):
        assert [record["routing"] for record in records] == list(accuracy.ROUTINGS)
        for record in records:
            assert record["limit"] == {"out_at_least_db": 28.0, "dx_at_least_db": 26.0, "dw_at_least_db": 25.0}
            assert all(record["sqnr_db"][name] >= least for name, least in accuracy.LEAST_DB.items()), record
            assert (record["benchmark"], record["world_size"], record["command"]) == ("accuracy", 2, "some command")
        assert tables.tables(records) == [], "nothing is timed"
        assert "| CPU, gloo, 2 ranks, (1024, 512) x (8, 256) | 28." in markdown_tables.accuracy_table(records)


def test_a_record_of_a_cpu_next_to_those_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are errors and not times, so the quick run may record them."""
    asked = ["bench", "accuracy", "--device", "cpu", "--quick", "--record"]
    monkeypatch.setattr(command, "start_ranks", lambda words, device, ranks: words != asked or device != "cpu")
    assert main(asked) == 0


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
    with pytest.raises(ValueError, match="no block 'speed', want one of summary, steps_overview, layers_overview, tests_on_gpus, accuracy"):
        report.render(f"{start}\n{end}", "README.md")


def test_report_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "report"]) == 2
    assert re.search(r"error: report: no README.md, docs/performance.md.* in .*, want a checkout of mxep", capsys.readouterr().err)
