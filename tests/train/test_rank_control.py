"""The pipe by which a process notices the end of its starter, and the signal that it then sends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from mxep.train import rank_control
from mxep.train.rank_control import GUARD_VARIABLE, describe_guard, is_second_request, starter_pid, stop_signals, watch_starter


def test_the_guards_signal_is_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler asks to end, and kills the starter while the run writes its checkpoint."""
    monkeypatch.setattr(rank_control, "ECHO_S", 0.0)
    read, write = os.pipe()
    monkeypatch.setenv(GUARD_VARIABLE, describe_guard(read))
    answers: list[bool] = []
    with stop_signals(lambda number, frame: answers.append(is_second_request(number, 1.0))):
        signal.raise_signal(signal.SIGTERM)
        watch_starter()
        os.close(write)
        deadline = time.monotonic() + 60
        while len(answers) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
    os.close(read)
    assert answers == [True, False, True]


def test_only_an_inherited_pipe_is_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable alone reaches processes that have another file under the descriptor's number, or none."""
    monkeypatch.delenv(GUARD_VARIABLE, raising=False)
    assert starter_pid() is None
    read, write = os.pipe()
    monkeypatch.setenv(GUARD_VARIABLE, describe_guard(read))
    assert starter_pid() == os.getppid()
    with open(os.devnull) as no_pipe:
        for value in (str(read), f"{read}:1", describe_guard(no_pipe.fileno()), "words"):
            monkeypatch.setenv(GUARD_VARIABLE, value)
            assert starter_pid() is None, value
    for descriptor in (read, write):
        os.close(descriptor)
    monkeypatch.setenv(GUARD_VARIABLE, f"{read}:1")
    assert starter_pid() is None


_FAILS = """
import os, types
import mxep.train.distributed, mxep.train.rank_launcher as launcher
os.environ |= {"RANK": "1", launcher.FAILURES_VARIABLE: "/nowhere"}
def fails(device):
    raise RuntimeError("the cause")
mxep.train.distributed.init_distributed = fails
launcher.run_rank(types.SimpleNamespace(device="cpu"), [])
"""


def test_a_report_that_cannot_be_written_is_shown() -> None:
    """On a full disk, which may be the cause."""
    ended = subprocess.run([sys.executable, "-c", _FAILS], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "RuntimeError: the cause\n/nowhere/rank_1.json: [Errno 2] No such file or directory" in ended.stderr
