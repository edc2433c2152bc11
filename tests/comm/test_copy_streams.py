"""The events and copies of a GPU's streams, with a stubbed CUDA."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from mxep.comm import copy_streams as module
from mxep.comm.copy_streams import REMOTE, CudaCopyStreams


class Event:
    cuda_event = 7


class Stream:
    cuda_stream = 5

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.recorded: list[Event] = []

    def record_event(self, event: Event) -> Event:
        self.recorded.append(event)
        return event


def test_recycled_events_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, ...]] = []
    current = Stream()
    monkeypatch.setattr(torch.cuda, "Event", lambda: new.append(Event()) or new[-1])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11, raising=False)
    monkeypatch.setattr(module, "_wait_event", lambda device, *arguments: waited.append(arguments))
    monkeypatch.setattr(Event, "record", lambda self, stream: None, raising=False)
    new: list[Event] = []
    streams: Any = CudaCopyStreams(torch.device("cuda", 0))
    new.clear()
    first, second = streams.record(REMOTE), streams.record(None)
    assert new == [first, second]
    assert first is not second
    streams.wait_event(first)
    assert waited == [(11, 7, 0)]
    streams.recycle(first)
    assert streams.record(None) is first
    assert streams._streams[REMOTE].recorded == [first]
    assert current.recorded == [second, first]
    assert streams.record(REMOTE) not in (first, second)


@pytest.mark.parametrize("exists", [True, False])
def test_copies_take_one_call_if_the_driver_has_a_batched_copy(exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and sizes are passed unchanged. A single copy, and all copies with an older driver, take a call each."""
    batches: list[Any] = []
    one_by_one: list[Any] = []

    class Batch:
        def exists(self) -> bool:
            return exists

        def __call__(self, device: torch.device, to: bytes, sources: bytes, sizes: bytes, count: int, *how: Any) -> None:
            columns = [struct.unpack(f"<{count}Q", words) for words in (to, sources, sizes)]
            batches.append((list(zip(*columns, strict=True)), how[2:]))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Event, "record", lambda self, stream: None, raising=False)
    monkeypatch.setattr(module, "_copy_each", Batch())
    monkeypatch.setattr(module, "_copy_bytes", lambda device, *arguments: one_by_one.append(arguments))
    streams = CudaCopyStreams(torch.device("cuda", 0))
    copies = [(1 << 47, 4096, 11 << 20), (512, 1 << 40, 1)]
    streams.copy_each(REMOTE, [])
    streams.copy_each(REMOTE, copies[:1])
    assert (batches, one_by_one) == ([], [(*copies[0], 5)])
    one_by_one.clear()
    streams.copy_each(REMOTE, copies)
    assert batches == ([(copies, (1, 5))] if exists else [])
    assert one_by_one == ([] if exists else [(*copy, 5) for copy in copies])
