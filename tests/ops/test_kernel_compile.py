"""Every kernel compiles for Hopper and for Blackwell on a machine without a GPU, and its PTX has the properties that bytes depend on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "compile_for.py"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability: int):
    run = subprocess.run([sys.executable, str(SCRIPT), str(capability)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert {line["kernel"] for line in compiled} == {
        "_add_group_bias_kernel",
        "_add_group_lora_kernel",
        "_group_bias_factors_kernel",
        "_group_bias_grads_kernel",
        "_sum_parts_kernel",
        "_cross_entropy_kernel",
        "_copy_expert_grads_kernel",
        "_chunk_bounds_kernel",
        "_dequantize_kernel",
        "_gather_rows_kernel",
        "_grouped_mm_kernel",
        "_grouped_wgrad_kernel",
        "_invert_map_kernel",
        "_pack_topk_kernel",
        "_gather_or_zero_kernel",
        "_quantize_kernel",
        "_quantize_columnwise_kernel",
        "_route_tokens_kernel",
        "_router_backward_kernel",
        "_row_map_kernel",
        "_segments_kernel",
        "_send_index_kernel",
        "_sort_topk_kernel",
        "_row_sums_kernel",
        "_sum_routes_kernel",
        "_reduce_rows_backward_kernel",
        "_reduce_rows_kernel",
        "_reduce_rows_chunk_kernel",
        "_activate_kernel",
        "_chunk_rows_kernel",
        "_zero_padding_rows_kernel",
    }
    for line in compiled:
        assert not line["stack_pointer_as_data"], f"{line['kernel']} is miscompiled: {line['stack_pointer_as_data']}"
        used = " ".join(line["instructions"])
        assert ("__assertfail" in used) == (line["kernel"] == "_sort_topk_kernel"), (
            f"{line['kernel']}: assertions are compiled in on request"
        )
        flushing = {name for name in line["instructions"] if ".ftz" in name}
        if "activate" in line["kernel"]:  # 1 + exp(-g) and 1 + erf(g) do not see what is flushed there
            flushing -= {"rcp.approx.ftz.f32", "ex2.approx.ftz.f32", "fma.rn.ftz.f32", "fma.rm.ftz.f32", "cvt.ftz.sat.f32.f32"}
            flushing -= {"abs.ftz.f32"}
        if line["kernel"] in ("_cross_entropy_kernel", "_route_tokens_kernel", "_router_backward_kernel"):
            flushing -= {"fma.rn.ftz.f32"}  # the logarithm, of a sum that is 1 or more
        assert not flushing, f"{line['kernel']} flushes subnormals: {used}"
        if "quantize_" in line["kernel"].replace("_dequantize_kernel", ""):
            assert "cvt.rn.satfinite.e4m3x2.f32" in used, used
        if line["kernel"] == "_reduce_rows_kernel":
            assert "fma.rn.f32" not in line["instructions"], "a product is rounded before it is added"
        if line["kernel"] in ("_quantize_kernel", "_dequantize_kernel", "_gather_rows_kernel", "_zero_padding_rows_kernel"):
            streamed = used.replace("st.global.cs.", "st.global.")
            assert "st.global.v4.b32" in streamed, f"{line['kernel']} does not write 16 bytes at a time: {used}"
