"""`mxep bench swiglu` and `mxep bench experts` on a CPU: tiny shapes, the records' fields, what is compared, and what is saved."""

from __future__ import annotations

import pytest
import torch
from tests.bench_cases import CPU, check_schema, check_tables, measured

from mxep.bench import experts, markdown_tables, memory_bound, registry
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD, rebase_rows


def test_swiglu() -> None:
    many, few = measured("swiglu")
    assert set(few["host_us"]) == set(few["arms"])
    assert not few["target"]
    check_schema("swiglu", [many, few])
    for record in (many, few):
        kernels = set(record["arms"]) - {"copy"}
        assert {"swiglu_quantize", "swiglu_backward_hp_wgrad_interleaved", "swiglu_backward_quantize_exact"} <= kernels
        assert {"swiglu_rebase", "swiglu_backward_rebase_hp_wgrad_gpt_oss"} <= kernels
        assert "geglu_rebase" not in kernels
        assert {f"{name}_fraction_of_copy" for name in kernels} | {"fraction_of_copy"} == set(record["ratios"])
        values = record["shape"]["T"] * record["shape"]["H"]
        assert record["bytes"]["swiglu_quantize"] == values * (4 + 33 / 32)
        assert record["bytes"]["swiglu_backward_rebase"] == values * (6 + 2 + 3 * 33 / 32)


def test_one_pass_and_two_have_the_same_bytes() -> None:
    x, dh = torch.randn(32, 128).bfloat16(), torch.randn(32, 64).bfloat16()
    movers = memory_bound._two_pass_movers(rebase_rows, dh, x)
    assert list(movers) == ["swiglu_quantize_then_rebase", "swiglu_backward_quantize_then_rebase"]
    assert all(mover.agrees() for mover in movers.values())
    wrong = memory_bound._two_pass_movers(lambda *rows: rebase_rows(rows[0], rows[1], MAX_SPREAD["span"]), dh, x)
    assert not any(mover.agrees() for mover in wrong.values())


def test_experts() -> None:
    found = measured("experts")
    assert [record["routing"] for record in found] == ["balanced", "zipf"]
    check_schema("experts", found)
    for record in found:
        assert {"forward_vs_torch_bf16", "backward_vs_torch_bf16", "fused_mx_total_vs_torch_bf16"} <= set(record["ratios"])
        assert set(record["host_us"]) == {"bf16", "bf16_compiled", *experts._OURS}
        assert all(us > 0 for us in record["host_us"].values())
        assert "22 dB from the bf16 arm's" in record["check"]
        assert set(record["worst_db"]) == set(experts._OURS)
        assert min(record["worst_db"].values()) >= experts.LEAST_DB
        saved, shape = record["saved_bytes"], record["shape"]
        rows, mx = shape["T"] * shape["H"], shape["T"] * shape["D"] * 33 // 32
        assert saved["fused"] == saved["fused_mx_uncached"] == rows * 4 + mx + shape["L"] * 4
        assert saved["separate"] == rows * 8 + mx + shape["L"] * 4
        assert saved["bf16"] >= rows * 8 + shape["T"] * shape["D"] * 2
    tables = markdown_tables.experts_table(found)
    check_tables(tables)
    assert all(len(table.splitlines()) == 2 + len(found) for table in tables.split("\n\n"))


def test_weights_of_the_uncached_arms_are_quantised_in_every_call() -> None:
    problem = experts.ExpertsProblem(registry.Setting(CPU), 128, 64, 32, 4, "balanced")
    for _ in range(2):
        problem.results("fused")
        problem.results("fused_uncached")
    weights = problem.modules["fused"]._kept
    assert weights["w13"].cache.fills == 4
    assert not problem.modules["fused_uncached"]._kept


@pytest.mark.parametrize("which", ["data", "rebased data", "high precision"])
def test_a_wrong_fast_form_fails_the_check(which: str) -> None:
    x, dh = torch.randn(32, 128), torch.randn(32, 64)
    forms = "rebased+hp" if which == "rebased data" else "mx+hp"
    exact = torch.ops.mxep.activate_backward(dh, x, "concatenated", "rceil", True, forms, "hp")
    assert memory_bound._within_rounding(exact, exact)
    wrong = [part.clone() for part in exact]
    if which == "high precision":
        wrong[3][3, 5] *= 1.1
    else:
        wrong[0].view(torch.uint8)[3, 5] ^= 0x30
    assert not memory_bound._within_rounding(wrong, exact)
