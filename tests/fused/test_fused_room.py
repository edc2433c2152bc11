"""The fused layer over symmetric memory where a buffer is too small: the same error on every rank, and the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fused.test_fused_ranks import batch, layer
from tests.fused.test_fused_symmetric import spread, symmetric
from tests.moe_truth import walk
from tests.truth import assert_same, raises_naming
from tests.virtual import run_virtual

from mxep.moe import RuntimeEPConfig
from mxep.shapes import round_up


def too_small(me: int, world: int, name: str) -> None:
    x, dy = batch(world, "random", torch.bfloat16)
    moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, "random"), me, world, name)
    memory: Any = symmetric(name)._growth._memory
    for left in (0, 8000 * world):  # free bytes of rank 1: none for tables and tokens; too few for the sums after them
        if me == 1:
            memory.room = left
        with pytest.raises(torch.OutOfMemoryError, match=r"no room for .* bytes on 1 ranks"):
            moe(x[me])
    memory.room = 1 << 60
    want = walk(moe, x[me], dy[me])
    least = round_up(sum(map(len, x)), 32)
    moe.runtime = RuntimeEPConfig(scratch_rows=least - 1)
    with raises_naming("fused_moe", f"scratch_rows={least - 1}", f"at least {least}"):
        moe(x[me])
    moe.runtime = RuntimeEPConfig(scratch_rows=least)
    for key, got in walk(moe, x[me], dy[me]).items():
        assert_same(got, want[key], key)


@pytest.mark.parametrize("world", [2, 4])
def test_too_little_memory_is_an_error_on_every_rank(world: int) -> None:
    run_virtual(too_small, world)
