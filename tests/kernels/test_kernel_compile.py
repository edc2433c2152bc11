"""Every kernel compiles for Hopper and for Blackwell on a machine without a GPU, and its PTX keeps the promises that bytes depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "compile_for.py"


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability: int):
    run = subprocess.run([sys.executable, str(SCRIPT), str(capability)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {line["kernel"] for line in compiled} == {
        "_dequantize_kernel",
        "_gather_rows_kernel",
        "_grouped_mm_kernel",
        "_grouped_wgrad_kernel",
        "_invert_map_kernel",
        "_quantize_kernel",
        "_quantize_transposed_kernel",
        "_row_map_kernel",
        "_segments_kernel",
        "_zero_tail_kernel",
    }
    for line in compiled:
        used = " ".join(line["instructions"])
        assert ".ftz" not in used, f"{line['kernel']} flushes subnormals: {used}"
        if line["kernel"] in ("_quantize_kernel", "_quantize_transposed_kernel"):
            assert "cvt.rn.satfinite.e4m3x2.f32" in used, used
        if line["kernel"] in ("_quantize_kernel", "_dequantize_kernel", "_gather_rows_kernel", "_zero_tail_kernel"):
            assert "st.global.v4.b32" in used, f"{line['kernel']} does not write 16 bytes at a time: {used}"
