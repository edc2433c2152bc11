"""The events of a GPU's lanes, with a made-up CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxep.comm import lanes as module
from mxep.comm.lanes import AWAY, CudaLanes


class Event:
    cuda_event = 7


class Stream:
    cuda_stream = 5

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.recorded: list[Event] = []

    def record_event(self, event: Event) -> Event:
        self.recorded.append(event)
        return event


def test_a_mark_that_nobody_asks_for_becomes_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, ...]] = []
    current = Stream()
    monkeypatch.setattr(torch.cuda, "Event", lambda: new.append(Event()) or new[-1])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    monkeypatch.setattr(module, "_wait_event", lambda device, *arguments: waited.append(arguments))
    monkeypatch.setattr(Event, "record", lambda self, stream: None, raising=False)
    new: list[Event] = []
    lanes: Any = CudaLanes(torch.device("cuda", 0))
    new.clear()
    first, second = lanes.mark(AWAY), lanes.mark(None)
    assert new == [first, second]
    assert first is not second
    lanes.follow(first)
    assert waited == [(11, 7, 0)]
    lanes.forget(first)
    assert lanes.mark(None) is first
    assert lanes._streams[AWAY].recorded == [first]
    assert current.recorded == [second, first]
    assert lanes.mark(AWAY) not in (first, second)
