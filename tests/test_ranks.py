"""Ranks of tests: they have the environment of the call, though they are forked from a server that is older."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ranks import run_ranks

from mxep.processes import start_of

ROOT = Path(__file__).parents[1]


def read_variable(rank: int, world_size: int) -> str | None:
    return os.environ.get("MXEP_CHECK")


def test_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv("MXEP_CHECK", value)
        assert run_ranks(read_variable, 1, backend=None) == [value]
    monkeypatch.delenv("MXEP_CHECK")
    assert run_ranks(read_variable, 1, backend=None) == [None]


def stop(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / f"pid{rank}.part").write_text(str(os.getpid()))
    (Path(folder) / f"pid{rank}.part").rename(Path(folder) / f"pid{rank}")
    os.kill(os.getpid(), signal.SIGSTOP)


def test_end_with_a_killed_test(tmp_path: Path) -> None:
    """Even ranks that are stopped: one that is left behind keeps its GPU, which slows down whatever runs on it later."""
    program = f"from tests.ranks import run_ranks; from tests.test_ranks import stop; run_ranks(stop, 2, {str(tmp_path)!r}, backend=None)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as test:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        try:
            assert within(60, lambda: all(file.exists() for file in files))
        finally:
            test.kill()
    pids = [int(file.read_text()) for file in files]
    assert within(10, lambda: all(start_of(pid) is None for pid in pids))


def within(seconds: float, done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not done():
        time.sleep(0.05)
    return done()
