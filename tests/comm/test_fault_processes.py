"""A rank killed or stopped in a fused layer over symmetric memory, with real processes and no GPU: buffers are files, streams are hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests import faults
from tests.faults import check_others_end


@pytest.mark.parametrize(
    ("moment", "name_of_signal"), [("between steps", "SIGSTOP"), ("first exchange", "SIGKILL"), ("last exchange", "SIGSTOP")]
)
def test_the_other_ranks_end(moment: str, name_of_signal: str) -> None:
    check_others_end(2, "cpu", moment, name_of_signal, timeout_s=2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_of_a_hanging_rank_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); print('ready', flush=True); time.sleep(60)"
    monkeypatch.setattr(faults, "_LATER_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "ready\n"
        report = faults._where([rank])
        rank.kill()
        assert "most recent call first" in rank.stderr.read()
    assert report.startswith("not ended ")
    assert f"{rank.pid}/{rank.pid} python" in report
