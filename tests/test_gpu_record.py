"""`pytest --gpu-record` records whole runs: not the part of a worker, and not a run that was ended early."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests import conftest

from mxep.bench.records import read_records, write_beside

# Of other runs on this GPU: with another torch, and with this one.
EARLIER = [{"torch": "2.0", "counts": {"passed": 7}}, {"torch": torch.__version__, "counts": {"passed": 8}}]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[dict[str, int]]]:
    """Counts of the records in this GPU's file, on a machine with a GPU."""
    (tmp_path / "gpu_tests-gpu-1.json").write_text(json.dumps(EARLIER))
    monkeypatch.setattr(conftest, "write_beside", functools.partial(write_beside, folder=tmp_path))
    monkeypatch.setattr(conftest, "device_name", lambda device: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return lambda: [record["counts"] for record in read_records("gpu_tests", tmp_path)]


def summarise(status: pytest.ExitCode) -> str:
    lines: list[str] = []
    reporter = SimpleNamespace(stats={"passed": [1, 2], "failed": [3]}, write_line=lines.append)
    config = SimpleNamespace(getoption=lambda name: True, invocation_params=SimpleNamespace(args=("-m", "gpu")))
    conftest.pytest_terminal_summary(reporter, int(status), config)  # type: ignore[arg-type]
    return "\n".join(lines)


@pytest.mark.parametrize("status", [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED])
def test_a_whole_run_is_written(written: Callable[[], list[dict[str, int]]], status: pytest.ExitCode):
    summarise(status)
    of_another_torch, counts = written()
    assert of_another_torch == {"passed": 7}, "it stays"
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 1, 0)


def test_a_worker_writes_nothing(written: Callable[[], list[dict[str, int]]], monkeypatch: pytest.MonkeyPatch):
    """Workers summarise as well, when they are told to end: a run that timed out left the record of one worker's 23 tests."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    summarise(pytest.ExitCode.OK)
    assert written() == [record["counts"] for record in EARLIER]


def test_a_run_that_ended_early_writes_nothing(written: Callable[[], list[dict[str, int]]]):
    assert "INTERRUPTED" in summarise(pytest.ExitCode.INTERRUPTED)
    assert written() == [record["counts"] for record in EARLIER]
