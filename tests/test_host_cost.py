"""The host cost of a call, counted and not timed: torch operators and Python function calls stay within budgets.

`tests/programs/host_cost.py` runs the launchers of a Hopper GPU with a driver that does nothing.  The budgets are a few per cent above the
counts of 29 November 2026 (torch 2.11), of calls that are replayed where they can be; a change that needs more says so here, a change
that needs less lowers them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "programs" / "host_cost.py"
BUDGETS = {  # call -> most torch operators, most Python function calls
    "MXLinear mxfp8_wgrad_with_hp f+b": (34, 83),
    "MXLinear mxfp8_wgrad_with_mx f+b": (44, 83),
    "MXLinear mxfp8 f+b": (75, 119),
    "MXLinear mxfp8_wgrad_with_mx, kept f+b": (35, 108),  # operators of calls that are not replayed, which look at the weight twice
    "fused_experts hp f+b": (90, 167),
    "fused_experts mxfp8_wgrad_with_hp f+b": (134, 167),
    "fused_experts mxfp8_wgrad_with_mx f+b": (134, 167),
    "FusedMoE mxfp8_wgrad_with_mx, kept f+b": (250, 350),
    "FusedMoE mxfp8_wgrad_with_mx, kept, exchanges over symmetric memory f+b": (360, 1720),  # not replayed
    "AdamW of a parameter in backward": (11, 79),
    "dispatch": (15, 58),
    "permute": (12, 58),
    "grouped mm with a main gradient f+b": (36, 115),
    "grouped mm": (17, 55),
    "unpermute": (9, 39),
    "combine": (6, 45),
}


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, float]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, PROGRAM, "--json", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def test_every_call_has_a_budget(counts: dict[str, dict[str, float]]) -> None:
    assert set(counts) == {*BUDGETS, "nn.Linear f+b"}
    assert all(row["host_us"] > 0 for row in counts.values())


@pytest.mark.parametrize("call", BUDGETS)
def test_within_its_budget(counts: dict[str, dict[str, float]], call: str) -> None:
    operators, functions = BUDGETS[call]
    assert 0 < counts[call]["torch_operators"] <= operators
    assert 0 < counts[call]["python_calls"] <= functions
