"""Runs the files of interpreter cases under Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = {  # of about the same duration
    "activation": ["interpreter_activation_cases.py"],
    "others": ["interpreter_cases.py", "interpreter_chunk_cases.py", "interpreter_loss_cases.py"],
}


@pytest.mark.slow
@pytest.mark.parametrize("files", FILES)
def test_kernels_under_the_interpreter(files: str):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-p", "no:cacheprovider", *(str(HERE / name) for name in FILES[files])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
