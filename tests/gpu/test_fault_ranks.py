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
        ("between steps", "SIGSTOP"),  # the others' hosts wait in the next meeting
        ("first meeting", "SIGKILL"),  # they wait in the meeting behind it, and their GPUs for rows
        ("first meeting, loading", "SIGKILL"),  # the same while kernels are loaded: an error, or the end of the process
        ("scores' meeting, busy", "SIGKILL"),  # the same, and what has left is nobody's: only the streams wait
        ("last meeting", "SIGSTOP"),  # GPUs alone wait, for rows that no kernel was started for
        ("last meeting, busy", "SIGKILL"),  # GPUs alone wait, for one that was busy and so never became ready
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_the_others_end(world: int, moment: str, name_of_signal: str) -> None:
    check_others_end(world, "cuda", moment, name_of_signal, timeout_s=4)
