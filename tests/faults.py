"""A rank is killed or stopped in a fused layer's step, each rank in a process of its own: checks that the others end in time."""

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
# The exchange of a step after whose host all-gather rank 1 stops: forward's tables and tokens, its sums; backward's dy, scores, sums.
MOMENTS = {
    "between steps": 0,
    "first exchange": 1,
    "first exchange, loading": 1,  # the others load kernels while their GPUs wait, and the driver may not come back from that
    "scores' exchange, busy": 4,
    "last exchange": 5,
    "last exchange, busy": 5,
}
_NOTHING_CAME, _NO_PART = r"nothing from rank 1 for {:g} s", r"a peer's part did not come for {:g} s"
_START_S = 120  # until rank 1 stops: imports, kernels
_MARGIN_S = 4
_END_S = 10  # for the end of a process, in addition to its waits
_LATER_S = 40  # distinguishes a late process from one that hangs


def check_others_end(world: int, device: str, moment: str, name_of_signal: str, timeout_s: float) -> None:
    """Every other rank raises within the time limit and a margin, with the cause that it can know, and its process ends.

    A rank that was only stopped is continued afterwards, and ends in the same way.
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
            wanted = _error_text(device, moment, world).format(timeout_s, timeout_s)
            _check(ranks, outputs, folder, wanted, moment, name_of_signal, timeout_s)
        finally:
            for process in ranks:
                process.kill()  # also one that is stopped
                process.wait()


def _error_text(device: str, moment: str, world: int) -> str:
    """The error of the other ranks: of the next host all-gather, or of a wait for rows (on a CPU the host waits for rows, too)."""
    if world > 2:
        return f"{_NOTHING_CAME}|{_NO_PART}"  # another rank's error may come first
    return _NOTHING_CAME if moment == "between steps" or (device == "cuda" and not moment.startswith("last")) else _NO_PART


def _check(
    ranks: list[subprocess.Popen], outputs: list[Path], folder: Path, wanted: str, moment: str, name_of_signal: str, timeout_s: float
) -> None:
    def printed() -> str:
        return "\n".join(f"rank {rank}:\n{output.read_text()}" for rank, output in enumerate(outputs))

    victim, others = ranks[1], [rank for rank in range(len(ranks)) if rank != 1]
    struck = folder / "struck"
    assert _within(_START_S, lambda: struck.exists() or any(process.poll() is not None for process in ranks)), printed()
    assert struck.exists(), printed()
    at = float(struck.read_text())
    # Twice the limit: a stream with a pending wait is watched from the error on.
    ended = _within(2 * timeout_s + _END_S, lambda: all(ranks[rank].poll() is not None for rank in others))
    assert ended, f"a rank hangs: {_where([ranks[rank] for rank in others])}\n{printed()}"
    for rank in others:
        text = outputs[rank].read_text()
        assert ranks[rank].returncode != 0
        if ranks[rank].returncode == -signal.SIGABRT and moment.endswith("loading"):
            assert re.search(r"exchange .*a peer's part did not come, and the CUDA driver .* holds its lock", text), printed()
            continue
        raised = folder / f"raised{rank}"
        assert raised.exists(), printed()
        assert timeout_s - 1 < float(raised.read_text()) - at < timeout_s + _MARGIN_S, printed()
        assert re.search(f"ExchangeError: .*({wanted})", text), printed()
    if name_of_signal == "SIGKILL":
        assert victim.wait(_END_S) == -signal.SIGKILL
        return
    assert victim.poll() is None
    victim.send_signal(signal.SIGCONT)
    assert _within(2 * timeout_s + _END_S, lambda: victim.poll() is not None), "the rank that was stopped hangs\n" + printed()
    assert victim.returncode != 0
    assert "ExchangeError: " in outputs[1].read_text(), printed()


def _where(hanging: list[subprocess.Popen]) -> str:
    """Where the threads of these processes wait in the kernel, and whether they end later; their outputs get Python's stacks."""
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
    """Whether `done()` becomes true within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(0.05)
    return done()
