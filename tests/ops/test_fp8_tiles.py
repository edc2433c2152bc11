"""The walk over tiles of the FP8 grouped GEMM, compiled for the host: random groups, widths and numbers of blocks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mxep.ops.grouped_gemm.hopper import gemm
from mxep.ops.runtime import nvrtc

ROUNDS = 150


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("wgrad", [False, True])
def test_every_output_has_one_writer(wgrad: bool, skip: bool, tmp_path: Path) -> None:
    """Also with groups without rows, rows past the last end, the last column of tall tiles, and tiles that are split at the end."""
    options = gemm.options_of(wgrad=wgrad, block_scales=False, out_dtype=torch.bfloat16, accumulate=False, skip=skip)
    tiles = nvrtc.source("grouped_gemm/hopper/tiles.cuh", options=options)
    assert tiles.count("g += 32") == 2, "lanes share groups out; here the only one sees all of them"
    (tmp_path / "tiles.cuh").write_text(tiles.replace("g += 32", "g += 1"))
    program = tmp_path / "walk"
    named = f'-DTILES="{tmp_path / "tiles.cuh"}"'
    source = Path(__file__).parent / "tile_walk.cpp"
    subprocess.run(["g++", "-std=c++17", "-O2", named, str(source), "-o", str(program)], check=True, timeout=120)
    ran = subprocess.run([str(program), "7", str(ROUNDS)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout
    verdict, tiles_seen = ran.stdout.split()
    assert verdict == "ok"
    assert int(tiles_seen) > 10 * ROUNDS
