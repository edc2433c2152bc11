"""Expert rows of top-k ids, against a loop over the ids."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mxep import reference
from mxep.shapes import round_up


def walked(experts: torch.Tensor, L: int, alignment: int, num_expert_rows: int) -> tuple[list, list, list]:
    """`index_expert_rows` by its definition."""
    flat = experts.flatten().tolist()
    sizes = [sum(e == expert for expert in flat) for e in range(L)]
    padded = [round_up(max(size, alignment), alignment) if alignment else size for size in sizes]
    ends = [sum(padded[: e + 1]) for e in range(L)]
    following = [end - rows for end, rows in zip(ends, padded, strict=True)]
    expert_rows, topk_ids = [], [-1] * num_expert_rows
    for i, expert in enumerate(flat):
        if not 0 <= expert < L:
            expert_rows.append(-1)
            continue
        expert_rows.append(following[expert])
        topk_ids[following[expert]] = i
        following[expert] += 1
    return expert_rows, ends, topk_ids


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 12), st.integers(1, 4), st.sampled_from([0, 1, 4, 32]), st.booleans())
def test_against_a_loop_over_the_ids(data: st.DataObject, L: int, R: int, C: int, alignment: int, long: bool) -> None:
    flat = data.draw(st.lists(st.integers(-2, L), min_size=R * C, max_size=R * C))
    experts = torch.tensor(flat, dtype=torch.int64 if long else torch.int32).view(R, C)
    num_expert_rows = R * C + L * alignment + data.draw(st.integers(0, 3))
    expert_rows, ends, topk_ids = torch.ops.mxep.index_expert_rows(experts, L, alignment, num_expert_rows)
    assert expert_rows.shape == experts.shape
    assert (expert_rows.flatten().tolist(), ends.tolist(), topk_ids.tolist()) == walked(experts, L, alignment, num_expert_rows)


def test_errors() -> None:
    experts = torch.zeros(4, 2, dtype=torch.int64)
    for wrong in (experts[0], experts.float()):
        with pytest.raises(ValueError, match=r"index_expert_rows: experts are .*, want \(R, C\) int32 or int64"):
            reference.index_expert_rows(wrong, 2, 4, 16)
    for sizes in ((0, 4, 16), (2, -1, 16), (2, 4, 7), (2, 4, 2**31)):
        with pytest.raises(ValueError, match=r"index_expert_rows: 8 ids of .*; want at least one expert"):
            reference.index_expert_rows(experts, *sizes)
