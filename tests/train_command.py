"""`mxep train` in processes of its own: a small run on a CPU."""

from __future__ import annotations

import subprocess
import sys

TRAIN = [sys.executable, "-m", "mxep", "train"]
TINY = ["--device", "cpu", "--batch", "1", "--seq-len", "16", "--eval-tokens", "32", "--log-every", "1", "--warmup", "1"]
LIMIT_S = 120


def start(*options: str, command: list[str] = TRAIN) -> subprocess.Popen[str]:
    return subprocess.Popen([*command, *TINY, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAIN, *TINY, *options], capture_output=True, text=True, timeout=LIMIT_S)
