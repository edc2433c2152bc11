"""Several machines, played by processes of this one: two torchrun agents over loopback, then the Slurm script on the same run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ranks import free_port
from tests.steps import steps_of
from tests.train_command import TINY

from mxep.train.checkpoint import read_manifest
from mxep.train.run_folder import find_checkpoint

SLURM = Path(__file__).parents[2] / "examples" / "slurm.sh"

# Slurm's commands, as far as the script uses them: two nodes with a task each.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || exit $?; done
"""
SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[0-1]" ]] || exit 1
printf '127.0.0.1\\n'
sleep 0.3  # a reader that stops after the first line would break the second one's pipe
printf '127.0.0.2\\n'
"""


def clean_environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names the loopback device")
def test_two_nodes(tmp_path: Path, text: str) -> None:
    out = tmp_path / "run"
    options = [*TINY, "--data", text, "--steps", "3"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test", "--local-addr=127.0.0.1", "-m", "mxep", "train"]
    agents = [
        subprocess.Popen([*launcher, *options, "--stop-after", "2", "--out", str(out)], env=clean_environment(), stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for agent in agents:
        _, stderr = agent.communicate(timeout=200)
        assert agent.returncode == 0, stderr.decode()[-2000:]
    manifest = read_manifest(find_checkpoint(out / "checkpoints"))
    assert (manifest.step, manifest.facts["world"]) == (2, 2)

    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    environment = clean_environment()
    environment |= {"PATH": f"{commands}:{environment['PATH']}", "OUT": str(out), "MASTER_PORT": str(free_port())}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    done = subprocess.run([str(SLURM), *options], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed at step 2" in done.stdout
    assert steps_of(out) == [1, 2, 3]
