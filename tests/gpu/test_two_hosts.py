"""A run on two hosts, played by halves of one machine's GPUs: NCCL and mxep take `NCCL_HOSTID` for the host, so NCCL crosses by sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.ranks import free_port
from tests.steps import losses_of, records_of
from tests.train.test_nodes import clean_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA GPUs"),
]
STEPS = 20


def losses(out: Path, hosts: int, options: list[str]) -> tuple[list[float], str]:
    """Losses of a run of four ranks on that many hosts, and the output of all hosts."""
    each = 4 // hosts
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={each}", "--rdzv-backend=c10d"]
    launcher += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=hosts", "--local-addr=127.0.0.1", "-m", "mxep", "train"]
    launcher += ["--model", "dsv3_debug", "--steps", str(STEPS), "--seq-len", "256", "--batch", "4", "--log-every", "1", "--out", str(out)]
    launcher += ["--no-evaluate", "--no-checkpoint", *options]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    environment = clean_environment() | {"NCCL_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            launcher,
            env={**environment, "NCCL_HOSTID": f"host-{host}", "CUDA_VISIBLE_DEVICES": ",".join(gpus[host * each :][:each])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(hosts)
    ]
    said = [agent.communicate(timeout=180)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * hosts, "\n".join(said)[-4000:]
    return losses_of(out), "\n".join(said)


@pytest.mark.parametrize(
    ("options", "transport"),
    [(["--ep", "4", "--fused-layer"], "collective"), (["--ep", "2", "--dp-replicate", "2", "--fused-layer"], "symmetric")],
    ids=["experts over both hosts", "a replica on each host"],
)
def test_two_hosts_train_as_one_does(tmp_path: Path, options: list[str], transport: str) -> None:
    """Only the order in which NCCL adds up differs: losses of 20 steps are those of one host within 1e-3."""
    data = tmp_path / "text.py"
    data.write_text(Path(json.decoder.__file__).read_text() * 20)
    one, _ = losses(tmp_path / "one", 1, [*options, "--data", str(data)])
    two, said = losses(tmp_path / "two", 2, [*options, "--data", str(data)])
    assert len(one) == len(two) == STEPS
    assert two[-1] < two[0] - 1
    worst = max(abs(a / b - 1) for a, b in zip(one, two, strict=True))
    assert worst < 1e-3, (worst, one, two)
    (run,) = records_of(tmp_path / "two", "run")
    assert run["transport"] == transport
    if transport == "collective":
        assert "its ranks are on 2 hosts" in said
