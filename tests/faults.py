"""A rank that is killed or stopped in the middle of a fused layer's step, each rank in a process of its own: do the others end in time?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mxep.comm.host_allgather import shared_file

ROOT = Path(__file__).parents[1]
_PROGRAM = ROOT / "tests" / "programs" / "rank_in_a_fault.py"
# The meeting of a step behind which rank 1 stops: forward's tables and tokens, its sums; backward's dy, scores, sums.
MOMENTS = {
    "between steps": 0,
    "first meeting": 1,
    "first meeting, loading": 1,  # the others load kernels while their GPUs wait, and the driver may not come back from that
    "scores' meeting, busy": 4,
    "last meeting": 5,
    "last meeting, busy": 5,
}
_NOTHING_CAME, _NO_PART = r"nothing from rank 1 for {:g} s", r"a peer's part did not come for {:g} s"
_START_S = 120  # until rank 1 stops: imports, kernels
_MARGIN_S = 4
_END_S = 10  # of a process, beside what it waits for
_LATER_S = 40  # to tell a process that is late from one that hangs


def check_others_end(world: int, device: str, moment: str, name_of_signal: str, timeout_s: float) -> None:
    """Every other rank raises within the time limit and a margin, naming what it knows, and its process ends.

    One that was only stopped goes on then, and ends in the same way.
    """
    with tempfile.TemporaryDirectory(prefix="mxep-faults-") as name, shared_file(world) as (path, token):
        folder = Path(name)
        (folder / "rendezvous").write_text(f"{path} {token.hex()}")
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"MXEP_CHECK": "0"}
        outputs = [folder / f"output{rank}" for rank in range(world)]
        ranks = []
        try:
            for rank in range(world):
                arguments = [str(rank), str(world), str(folder), device, moment, name_of_signal, str(timeout_s)]
                command = [sys.executable, str(_PROGRAM), *arguments]
                with outputs[rank].open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            _check(ranks, outputs, folder, _told(device, moment, world).format(timeout_s, timeout_s), moment, name_of_signal, timeout_s)
        finally:
            for process in ranks:
                process.kill()  # a stopped one too
                process.wait()


def _told(device: str, moment: str, world: int) -> str:
    """What the others hear: of the hosts' next meeting, or of rows that were waited for, on a CPU by the host as well."""
    if world > 2:
        return f"{_NOTHING_CAME}|{_NO_PART}"  # perhaps of another one's error first
    return _NOTHING_CAME if moment == "between steps" or (device == "cuda" and not moment.startswith("last")) else _NO_PART


def _check(
    ranks: list[subprocess.Popen], outputs: list[Path], folder: Path, wanted: str, moment: str, name_of_signal: str, timeout_s: float
) -> None:
    def told() -> str:
        return "\n".join(f"rank {rank}:\n{output.read_text()}" for rank, output in enumerate(outputs))

    victim, others = ranks[1], [rank for rank in range(len(ranks)) if rank != 1]
    struck = folder / "struck"
    assert _within(_START_S, lambda: struck.exists() or any(process.poll() is not None for process in ranks)), told()
    assert struck.exists(), told()
    at = float(struck.read_text())
    # Twice the limit: a stream that is left behind is watched from the error on.
    ended = _within(2 * timeout_s + _END_S, lambda: all(ranks[rank].poll() is not None for rank in others))
    assert ended, f"a rank hangs: {_where([ranks[rank] for rank in others])}\n{told()}"
    for rank in others:
        text = outputs[rank].read_text()
        assert ranks[rank].returncode != 0
        if ranks[rank].returncode == -signal.SIGABRT and moment.endswith("loading"):
            assert re.search(r"exchange .*a peer's part did not come, and the CUDA driver .* holds its lock", text), told()
            continue
        raised = folder / f"raised{rank}"
        assert raised.exists(), told()
        assert timeout_s - 1 < float(raised.read_text()) - at < timeout_s + _MARGIN_S, told()
        assert re.search(f"ExchangeError: .*({wanted})", text), told()
    if name_of_signal == "SIGKILL":
        assert victim.wait(_END_S) == -signal.SIGKILL
        return
    assert victim.poll() is None
    victim.send_signal(signal.SIGCONT)
    assert _within(2 * timeout_s + _END_S, lambda: victim.poll() is not None), "the rank that was stopped hangs\n" + told()
    assert victim.returncode != 0
    assert "ExchangeError: " in outputs[1].read_text(), told()


def _where(hanging: list[subprocess.Popen]) -> str:
    """Where the threads of these processes are for the kernel, and whether they end after all; their outputs get Python's stacks."""
    threads = []
    for process in hanging:
        for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                threads.append(f"{process.pid}/{task.name} {(task / 'comm').read_text().strip()} {state} {(task / 'wchan').read_text()}")
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    started = time.monotonic()
    ended = _within(_LATER_S, lambda: all(process.poll() is not None for process in hanging))
    after = time.monotonic() - started
    return f"{f'ended {after:.0f} s later' if ended else f'not ended {after:.0f} s later either'}; {'; '.join(threads)}"


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """Whether it is so in that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(0.05)
    return done()
