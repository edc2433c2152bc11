"""`mxep bench attention` on a CPU: the record, its table, its documents, and a check that notices what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from tests.bench_cases import CPU, check_schema, check_tables, measured

from mxep.bench import attention, markdown_tables, registry
from mxep.models.document_mask import DocumentMask, document_mask


def test_record_and_table() -> None:
    records = measured("attention")
    check_schema("attention", records)
    assert [record["documents"] for record in records] == list(attention.DOCUMENTS)
    for record in records:
        assert {name.rsplit("_", 1)[0] for name in record["arms"]} == {"sdpa", "flash_attention_4", "dense"}
        assert all(
            0 < record["errors"][arm][name]["all"] < 0.01 for arm in ("sdpa", "flash_attention_4") for name in ("y", "dq", "dk", "dv")
        )
        assert record["left_out"] == {}
    pairs = 2 * sum(range(1, 65))
    assert records[0]["tflop"] == pytest.approx({"forward": 2 * pairs * 4 * (16 + 8) / 1e12, "backward": 2 * pairs * 4 * 64 / 1e12})
    assert records[1]["tflop"]["forward"] < records[0]["tflop"]["forward"]
    table = markdown_tables.attention_table(records)
    assert len(table.splitlines()) == 5
    check_tables(table)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(where: str, device: torch.device) -> None:
        raise ValueError(f"{where}: not installed (test)")

    monkeypatch.setattr(attention, "check_flash_attention_4", missing)
    monkeypatch.setattr(registry.Setting, "tiny", False)
    problem = attention.AttentionProblem(registry.Setting(CPU), 1, 8, (2, 1, 8, 8), None)
    assert list(problem.masks) == ["sdpa"]
    assert problem.left_out == {"flash_attention_4": "bench attention: not installed (test)"}
    assert attention.compute_figures({"sdpa_total": 1.0}) == {}
    record = {"device": "h200", "world_size": 1, "model": "a", "documents": "none", "tflop": {"forward": 1.0}, "ratios": {}, "limit": {}}
    timing = {"median_ms": 2.0}
    assert "| 2.00 | 500 | - | - |  |" in markdown_tables.attention_table([record | {"arms": {"sdpa_total": timing}}])


def test_documents() -> None:
    found = attention.random_documents(4, 64, (5, 40), CPU)
    starts = document_mask(found, torch.float32, "flash_attention_4")
    assert isinstance(starts, DocumentMask)
    assert starts.starts is not None
    sizes = starts.starts.diff()
    assert math.isclose(int(sizes.sum()), 4 * 64)
    assert int(sizes.max()) <= found.longest <= 40
    assert set(range(0, 256, 64)) <= set(starts.starts.tolist())


def test_a_wrong_arm_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = attention.AttentionProblem(registry.Setting(CPU), 2, 32, (4, 2, 16, 8), (5, 20))
    assert problem.check() is None
    problem.masks["sdpa"] = None
    assert (problem.check() or "").startswith("sdpa: y is off by")
