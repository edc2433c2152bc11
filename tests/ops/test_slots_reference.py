"""Rounds through slots on the CPU: every byte of every slot, the received rows, unexpected headers, errors."""

from __future__ import annotations

import pytest
import torch
from tests.slot_cases import TABLES, Case, run, run_disagreeing
from tests.truth import assert_same, raises_naming

from mxep.ops.peer_write import slots_reference


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("width", "dtype", "mode"), [(32, torch.float32, "floor"), (96, torch.bfloat16, "rceil"), (544, torch.bfloat16, "floor")]
)
def test_rounds(table: str, width: int, dtype: torch.dtype, mode: str) -> None:
    for per in (1, 4, 30):
        case = Case(TABLES[table], width, dtype, per)
        for rank, out in enumerate(run(case, mode, slots_reference)):
            assert_same(out, case.expected_output(mode, rank), f"{per} rows a round, rank {rank}")


def test_no_columns() -> None:
    case = Case(TABLES["two"], 0, torch.float32, 4)
    assert [out.shape for out in run(case, "rceil", slots_reference)] == [(4, 0), (13, 0)]


def test_rows_with_an_unexpected_header_are_nan() -> None:
    run_disagreeing(slots_reference, "cpu")


def test_errors() -> None:
    case = Case(TABLES["two"], 64, torch.bfloat16, 4)
    arguments = (0, case.slot_bytes, 0, "rceil")
    with raises_naming("send_slots", "float16", "bfloat16 or float32"):
        slots_reference.send_slots(case.rows[0].half(), case.sent[0], *arguments)
    with raises_naming("send_slots", "[3, 8] rows, 80 bytes each", "cut smaller"):
        slots_reference.send_slots(case.rows[0], [pair._replace(per=9) for pair in case.sent[0]], *arguments)
    with raises_naming("send_slots", "0 ranks", "1 to 64"):
        slots_reference.send_slots(case.rows[0], [], *arguments)
    with raises_naming("send_slots", "meta", "the CPU"):
        slots_reference.send_slots(case.rows[0].to("meta"), case.sent[0], *arguments)
