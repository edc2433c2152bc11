"""torchtitan in an environment of its own, which uv makes and keeps; the tests of its adapters run programs there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.pages import ROOT, blocks

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python_with(*requirements: str, timeout_s: float = 300) -> list[str]:
    """The command of a Python that has these packages; skips the test if they cannot be installed."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip(f"{requirements[0]} runs in an environment of its own, which takes uv to make: pip install uv")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [
        uv,
        "run",
        "--quiet",
        "--no-project",
        "--isolated",
        "--python",
        version,
        *(f"--with={name}" for name in requirements),
        "python",
    ]
    made = subprocess.run([*command, "-c", ""], capture_output=True, text=True, timeout=timeout_s, env=environment())
    if made.returncode:
        pytest.skip(f"an environment with {' '.join(requirements)} cannot be made here: {made.stderr.strip()[-600:]}")
    return command


def commands(pages: list[Path], adapter: str) -> list[list[str]]:
    """Options of every command in the pages' shell blocks that switches this adapter on: the arguments after `-m torchtitan.train`."""
    found = []
    for page in pages:
        for _, _, text in blocks(page, "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "torchtitan.train" in words and f"mxep.integrations.{adapter}" in line:
                    found.append(words[words.index("torchtitan.train") + 1 :])
    return found


def environment() -> dict[str, str]:
    """This process's variables, with mxep from the checkout and without the environment that pytest runs in."""
    ours = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")}
    return {**ours, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MXEP_CHECK": "1"}


def run_program(command: list[str], *arguments: str, timeout_s: float) -> str:
    """What a program of that Python prints.  Raises AssertionError with the end of its stderr when it fails."""
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout_s, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
