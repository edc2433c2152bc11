"""The clock of the benchmarks on a GPU, when the device waits for the host and when it does not."""

from __future__ import annotations

import time

import pytest
import torch

from mxep.bench.timing import Rounds, time_arms

pytestmark = pytest.mark.gpu


def test_a_device_that_waits_for_the_host_is_noticed() -> None:
    def launch_late() -> None:
        time.sleep(1e-3)
        torch.cuda._sleep(1000)  # cycles

    arms = {"device": {"": lambda: torch.cuda._sleep(4_000_000)}, "host": {"": launch_late}}
    found = time_arms(arms, torch.device("cuda", torch.cuda.current_device()), Rounds(count=2, timed=10, warm_ms=20.0))
    assert not found["device"].host_bound
    assert found["host"].host_bound
    assert found["host"].median_ms >= 0.9, "the clock runs while the device waits"


def test_a_host_that_is_ahead_does_not_count() -> None:
    def launch_late() -> None:
        time.sleep(1e-3)
        torch.cuda._sleep(1000)  # cycles

    rounds = Rounds(count=2, timed=10, warm_ms=1.0, hold_ms=60.0)
    found = time_arms({"host": {"": launch_late}}, torch.device("cuda", torch.cuda.current_device()), rounds)
    assert not found["host"].host_bound
    assert found["host"].median_ms < 0.5, "the device had all runs before it began"
