"""`pytest --gpu-record` writes what a whole run found: no worker's share of it, and nothing of a run that was ended early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests import conftest


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Counts of every record that is written, on a machine with a GPU."""
    counts: list[dict[str, int]] = []
    monkeypatch.setattr(conftest, "write_records", lambda *arguments: counts.append(arguments[-1][0]["counts"]))
    monkeypatch.setattr(conftest, "device_name", lambda device: "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return counts


def summarise(status: pytest.ExitCode) -> str:
    lines: list[str] = []
    reporter = SimpleNamespace(stats={"passed": [1, 2], "failed": [3]}, write_line=lines.append)
    config = SimpleNamespace(getoption=lambda name: True, invocation_params=SimpleNamespace(args=("-m", "gpu")))
    conftest.pytest_terminal_summary(reporter, int(status), config)  # type: ignore[arg-type]
    return "\n".join(lines)


@pytest.mark.parametrize("status", [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED])
def test_a_whole_run_is_written(written: list[dict[str, int]], status: pytest.ExitCode):
    summarise(status)
    assert [(counts["passed"], counts["failed"], counts["skipped"]) for counts in written] == [(2, 1, 0)]


def test_a_worker_writes_nothing(written: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    """Workers summarise as well, when they are told to end: a run that timed out left the record of one worker's 23 tests."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    summarise(pytest.ExitCode.OK)
    assert not written


def test_a_run_that_ended_early_writes_nothing(written: list[dict[str, int]]):
    assert "INTERRUPTED" in summarise(pytest.ExitCode.INTERRUPTED)
    assert not written
