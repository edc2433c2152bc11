"""`pytest --gpu-record` records whole runs: not the part of a worker, and not a run that was ended early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests import conftest

# Of other runs: on this GPU with another torch, with this one, and on two GPUs.
EARLIER = [
    {"device": "gpu", "world_size": 1, "torch": "2.0", "counts": {"passed": 7}},
    {"device": "gpu", "world_size": 1, "torch": torch.__version__, "counts": {"passed": 8}},
    {"device": "gpu", "world_size": 2, "torch": "2.0", "counts": {"passed": 9}},
]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Counts of every record that is written, on a machine with a GPU."""
    counts: list[dict[str, int]] = []
    monkeypatch.setattr(conftest, "write_records", lambda *arguments: counts.extend(record["counts"] for record in arguments[-1]))
    monkeypatch.setattr(conftest, "read_records", lambda benchmark: [dict(record) for record in EARLIER])
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
    assert written[0] == {"passed": 7}, "what another torch gave on this GPU stays"
    assert [(counts["passed"], counts["failed"], counts["skipped"]) for counts in written[1:]] == [(2, 1, 0)]


def test_a_worker_writes_nothing(written: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch):
    """Workers summarise as well, when they are told to end: a run that timed out left the record of one worker's 23 tests."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    summarise(pytest.ExitCode.OK)
    assert not written


def test_a_run_that_ended_early_writes_nothing(written: list[dict[str, int]]):
    assert "INTERRUPTED" in summarise(pytest.ExitCode.INTERRUPTED)
    assert not written
