"""`tests/programs/host_cost.py` with the kernels of a GPU: every call runs and takes the host some time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
PROGRAM = Path(__file__).parents[1] / "programs" / "host_cost.py"


def test_calls_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, PROGRAM, "--json", "--device", "cuda"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    table = json.loads(done.stdout)
    print(done.stdout)
    assert {"MXLinear mxfp8_wgrad_with_mx f+b", "fused_experts mxfp8_wgrad_with_mx f+b", "dispatch", "combine"} <= set(table)
    assert all(0 < row["host_us"] < 20_000 and row["torch_operators"] > 0 for row in table.values())
