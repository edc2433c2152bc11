"""`ep_grouped_mm`: arguments that do not fit raise a ValueError that names them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.truth import raises_naming

from mxep import ep_grouped_mm, quantize_mx
from mxep.recipe import RECIPES

D, N, L = 64, 96, 2
COUNTS = torch.tensor([5, 40])
ROWS = 45


def test_errors(one_rank: None) -> None:
    x, w = torch.randn(ROWS, D), torch.randn(L, N, D)
    good: dict[str, Any] = {
        "input": x, "weight": w, "input_splits": [ROWS], "output_splits": [ROWS], "num_tokens_per_expert": COUNTS,
    }  # fmt: skip
    bad: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"input": x[None]}, ("input", "(rows, width)", "flatten")),
        ({"input": x.half()}, ("float16", "bfloat16 or float32", "cast")),
        ({"input": x[:, :48], "weight": w[:, :, :48]}, ("(45, 48)", "multiples of 32", "pad")),
        ({"weight": w[0]}, ("weight", "(96, 64)", "(L, N, D)")),
        ({"weight": w.transpose(-2, -1)}, ("weight", "(2, 64, 96)", "(45, 64)", "(L, N, D)")),
        ({"weight": w.double()}, ("weight", "float64", "bfloat16 or float32")),
        ({"weight": quantize_mx(w)}, ("weight is MXTensor", "plain")),
        ({"weight": w[:, :40]}, ("(2, 40, 64)", "multiples of 32", "pad")),
        ({"weight": w.to("meta")}, ("weight is on meta", "want cpu", "move")),
        ({"input_splits": torch.tensor([ROWS])}, ("input_splits is Tensor", "list[int]", ".tolist()")),
        ({"output_splits": [torch.tensor(ROWS)]}, ("output_splits holds a Tensor", "list[int]")),
        ({"input_splits": [ROWS, 0]}, ("1 output_splits and 2 input_splits", "per rank")),
        ({"input_splits": [], "output_splits": []}, ("0 output_splits", "per rank")),
        ({"input_splits": [40]}, ("input_splits [40]", "45 rows", "add up to 40", "want as many", "summed by destination rank")),
        (
            {"input_splits": [40, 5], "output_splits": [40, 5]},
            ("2 input_splits", "a group of 1 ranks", "one of each per rank", "pass the group"),
        ),
        ({"num_tokens_per_expert": COUNTS.tolist()}, ("num_tokens_per_expert is list", "want a torch.Tensor")),
        ({"input_splits": [40, 5], "output_splits": [40, 5], "num_tokens_per_expert": torch.tensor([5, 35, 5, 0])}, ("not 1 row counts",)),
        ({"num_tokens_per_expert": COUNTS.float()}, ("num_tokens_per_expert", "float32", "rank-major")),
        ({"num_tokens_per_expert": COUNTS[:1]}, ("num_tokens_per_expert is (1,)", "num_local_experts 2")),
        ({"num_tokens_per_expert": torch.tensor([-5, 50])}, ("-5", "at least 0")),
        ({"num_tokens_per_expert": torch.tensor([5, 39])}, ("num_tokens_per_expert has [44]", "output_splits [45]", "rank-major")),
        ({"group": 3}, ("group is int", "ProcessGroup, its name or None")),
        ({"group": "no such group"}, ("no such group", "pass")),
        ({"group": "", "input_splits": [40], "output_splits": [45]}, ("without a group", "want [45] twice", "pass the group")),
        ({"recipe": "mxfp9"}, ("mxfp9", "want one of")),
        ({"recipe": replace(RECIPES["mxfp8"], gemm_path="fp8")}, ("gemm_path='fp8'", "needs a CUDA GPU", "auto")),
    ]
    assert ep_grouped_mm(**good).shape == (ROWS, N)
    for change, words in bad:
        with raises_naming(*words):
            ep_grouped_mm(**{**good, **change})
            pytest.fail(str(change))


def test_hp_takes_any_width(one_rank: None) -> None:
    x, w = torch.randn(ROWS, 50), torch.randn(L, 7, 50)
    out = ep_grouped_mm(x, w, [ROWS], [ROWS], COUNTS, recipe="bf16")
    torch.testing.assert_close(out, torch.cat([x[:5] @ w[0].t(), x[5:] @ w[1].t()]))


def test_without_torch_distributed() -> None:
    x, w = torch.randn(ROWS, D), torch.randn(L, N, D)
    with raises_naming("ep_grouped_mm", "not initialised", "init_process_group"):
        ep_grouped_mm(x, w, [ROWS], [ROWS], COUNTS)
