"""dense_mm: tensors that it keeps between calls. `MXLinear`'s tests check its numbers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mxep.grouped_mm import dense


def test_the_end_offset_is_filled_once_per_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(7, 32)
    with torch.inference_mode():
        first = dense._group_end(rows)
    assert first.tolist() == [7]
    assert first.dtype == torch.int32
    assert not first.is_inference(), "a later call saves it for backward"
    assert dense._group_end(torch.ones(7, 64)) is first
    assert dense._group_end(rows[:6]).tolist() == [6]
    assert dense._kept_group_end(7, rows.device, 1) is not first, "another stream may read it before it is filled"
    with FakeTensorMode() as mode:
        assert dense._group_end(mode.from_tensor(rows)) is not first
    monkeypatch.setattr(dense, "is_capturing", lambda: True)
    captured = dense._group_end(rows)
    assert captured.tolist() == [7]
    assert captured is not first, "the memory of a CUDA graph is its own"
