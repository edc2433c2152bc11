"""A rank killed or stopped in a fused layer over symmetric memory, on GPUs: every other process raises in time, and ends."""

from __future__ import annotations

import pytest
import torch
from tests.faults import check_others_end

pytestmark = pytest.mark.multi_gpu
WORLDS = [
    pytest.param(world, marks=pytest.mark.skipif(torch.cuda.device_count() < world, reason=f"needs {world} CUDA GPUs")) for world in (2, 4)
]


@pytest.mark.parametrize(
    ("moment", "name_of_signal"),
    [
        ("between steps", "SIGSTOP"),  # the other hosts wait in the next all-gather
        ("first exchange", "SIGKILL"),  # the hosts wait in the all-gather after it, and the GPUs for rows
        ("first exchange, loading", "SIGKILL"),  # the same while kernels are loaded: an error, or the end of the process
        ("scores' exchange, busy", "SIGKILL"),  # the same, after their exchange was freed: only the streams wait
        ("last exchange", "SIGSTOP"),  # only the GPUs wait, for rows whose kernel was never started
        ("last exchange, busy", "SIGKILL"),  # only the GPUs wait, for a busy GPU that never became ready
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_the_other_ranks_end(world: int, moment: str, name_of_signal: str) -> None:
    check_others_end(world, "cuda", moment, name_of_signal, timeout_s=4)
