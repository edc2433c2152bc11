"""Runs in one folder: started twice, killed and restarted at once, restarted by torchrun, resumed from an older step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.steps import steps_of
from tests.train_command import LIMIT_S, TINY, finish, start

from mxep.train.checkpoint import read_manifest, verify
from mxep.train.distributed import agree_on_prefix
from mxep.train.run_folder import list_checkpoints

ALONE = ["--nproc", "1"]  # where a second rank would only import torch once more

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")

# Run by torchrun as a rank: once, rank 1 kills itself before its third step, and later rank 0 before its fifth.
DYING_RANK = """
import os, signal, sys
from pathlib import Path
from mxep.cli import main
from mxep.train.trainer import Trainer

step = Trainer.step

def step_or_die(self):
    marker = Path(sys.argv[1]) / str(self.step_count)
    if (self.step_count, self.ranks.rank) in ((2, 1), (4, 0)) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

Trainer.step = step_or_die
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.fixture
def words(tmp_path: Path, text: str) -> list[str]:
    """Options of a run in tmp_path/run."""
    return ["--data", text, "--out", str(tmp_path / "run")]


def wait_for_checkpoint(out: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(path.name >= f"step_{step:08d}" for path in list_checkpoints(out / "checkpoints")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_whole(out: Path) -> None:
    """Every checkpoint is complete, and no other file is left."""
    checkpoints = list_checkpoints(out / "checkpoints")
    assert checkpoints
    assert sorted((out / "checkpoints").iterdir()) == checkpoints
    for path in checkpoints:
        verify(read_manifest(path))
    assert not (out / "lock").exists()
    taken = steps_of(out)
    assert taken == list(range(1, taken[-1] + 1)), "every step is recorded once"


def test_one_of_two_simultaneous_runs_starts(tmp_path: Path, words: list[str]) -> None:
    runs = [start(*words, *ALONE, "--steps", "100000", "--checkpoint-every", "1") for _ in range(2)]
    deadline = time.monotonic() + LIMIT_S
    while all(run.poll() is None for run in runs):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    refused, running = sorted(runs, key=lambda run: run.poll() is None)
    _, stderr = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 2
    assert "mxep train: error: train: " in stderr
    assert "is in use by run" in stderr
    assert len(stderr.splitlines()) == 1
    wait_for_checkpoint(tmp_path / "run", 2)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0
    assert_whole(tmp_path / "run")


@pytest.mark.parametrize("killed", ["starter", "all"])
def test_a_run_that_restarts_right_after_a_kill_resumes(tmp_path: Path, words: list[str], killed: str) -> None:
    """Where the starter alone was killed, its ranks still end their step and leave a checkpoint: the new run waits for that."""
    out = tmp_path / "run"
    first = start(*words, "--steps", "100000", "--checkpoint-every", "1", "--resume", "auto")
    wait_for_checkpoint(out, 2)
    ranks = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    assert len(ranks) == 2
    for pid in (first.pid, *(ranks if killed == "all" else ())):
        os.kill(pid, signal.SIGKILL)
    second = start(*words, "--stop-after", "100000", "--resume", "auto")
    reached = int(list_checkpoints(out / "checkpoints")[-1].name[-8:])
    wait_for_checkpoint(out, reached + 8)
    second.send_signal(signal.SIGINT)
    stdout, stderr = second.communicate(timeout=LIMIT_S)
    first.communicate()
    assert second.returncode == 0, stderr
    assert "resumed at step" in stdout
    assert_whole(out)


def test_ranks_of_one_start_agree_on_a_name_in_a_store_that_others_used() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names: list[set[str]] = []
    for attempt in range(3):
        for rank in (1, 2):
            store.set(f"mxep/asks/{rank}", f"of a rank that died in start {attempt}")
        clients = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(3)]
        found: list[str] = []

        def act(rank: int, client: dist.Store, found: list[str] = found) -> None:
            found.append(agree_on_prefix(client, rank, 3))

        ranks = [threading.Thread(target=act, args=pair) for pair in enumerate(clients)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(60)
        assert len(found) == 3
        names.append(set(found))
    assert [len(of_one) for of_one in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.slow
def test_torchrun_restarts_resume(tmp_path: Path, words: list[str]) -> None:
    program, markers = tmp_path / "rank.py", tmp_path / "markers"
    program.write_text(DYING_RANK)
    markers.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2", str(program)]
    options = [str(markers), *TINY, *words, "--steps", "6", "--checkpoint-every", "1", "--async-checkpoint", "disabled", "--resume", "auto"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *options], capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in markers.iterdir()) == ["2", "4"]
    assert [f"resumed at step {step}" in done.stdout for step in (2, 4)] == [True, True]
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert_whole(tmp_path / "run")


@pytest.mark.slow
def test_a_damaged_checkpoint_names_the_last_good_one(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "run"
    words = [*words, *ALONE]
    assert finish(*words, "--steps", "9", "--stop-after", "4", "--checkpoint-every", "1", "--keep", "4").returncode == 0
    losses = (out / "metrics.jsonl").read_text()
    for step in (3, 4):
        shard = next((out / "checkpoints" / f"step_{step:08d}" / "tensors").iterdir())
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(content)
    refused = finish(*words, "--resume")
    assert refused.returncode == 2
    assert "step_00000004 is damaged: tensors/" in refused.stderr
    command = f"mxep train --resume --resume-step 2 --out {out}"
    assert f"resume from the last good one with: {command}\n" in refused.stderr
    assert len(list_checkpoints(out / "checkpoints")) == 4
    assert (out / "metrics.jsonl").read_text() == losses
    done = finish(*command.split()[2:])
    assert done.returncode == 0, done.stderr
    assert "resumed at step 2" in done.stdout
    for step in (3, 4):
        assert f"step_{step:08d} is newer than step 2" in done.stdout
        assert (out / "checkpoints" / "set_aside" / f"step_{step:08d}" / "manifest.json").exists()
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == [f"step_{step:08d}" for step in (6, 7, 8, 9)]
    assert steps_of(out) == list(range(1, 10))
    finished = finish(*words, "--resume", "auto")
    assert finished.returncode == 0, finished.stderr
    assert "has all 9 steps, nothing is left to do" in finished.stdout
