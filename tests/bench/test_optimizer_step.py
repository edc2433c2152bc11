"""`mxep bench optimizer` on a CPU: every arm's first update is that of AdamW, and the bytes that a step moves."""

from __future__ import annotations

import pytest
from tests.bench_cases import check_schema, measured
from torch import Tensor

from mxep.bench import optimizer_step, registry


def test_optimizer() -> None:
    records = measured("optimizer")
    check_schema("optimizer", records)
    (record,) = records
    assert set(record["bytes"]) == {"copy", *optimizer_step._ARMS}
    per_value = {arm: moved / 256**2 for arm, moved in record["bytes"].items()}
    assert (per_value["adamw"], per_value["torch_fused"]) == (28, 32)
    assert per_value["adamw8bit_bfloat16"] == 3 * 2 + 4 * (1 + 4 / 256)


def test_a_wrong_step_prints_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(values: Tensor, grad: Tensor) -> Tensor:
        return values.double() + 0.1

    monkeypatch.setattr(optimizer_step, "_first_update", wrong)
    with pytest.raises(registry.CheckFailedError, match="torch_fused differs"):
        measured("optimizer")
