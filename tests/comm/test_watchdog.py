"""The watchdog on stubbed events: its clock starts when an exchange begins, and it reports an exchange that does not end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from mxep.comm import symmetric
from mxep.comm.copy_streams import LOCAL, REMOTE, SLOTTED
from mxep.comm.watchdog import Watchdog


class Event:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def test_exchanges_that_do_not_end_are_reported_and_those_that_have_not_begun_are_not() -> None:
    reported, stuck = [], threading.Event()

    def report(what: str) -> None:
        reported.append(what)
        stuck.set()

    watchdog = Watchdog(0.2, report)
    first, second = (Event(), Event()), (Event(), Event(True))
    watchdog.watch(*first, "first")
    watchdog.watch(*second, "second")
    time.sleep(0.6)
    assert reported == [], "it waits for earlier work on its stream"
    first[0].done = True
    start = time.monotonic()
    assert stuck.wait(5)
    assert time.monotonic() - start > 0.15
    assert set(reported) == {"first"}
    first[1].done = True
    time.sleep(0.1)
    reported.clear()
    stuck.clear()
    third = Event(True), Event()
    watchdog.watch(*third, "third")
    assert stuck.wait(5)
    assert set(reported) == {"third"}
    third[1].done = True
    watchdog.close()


def test_streams_with_a_pending_wait_are_reported() -> None:
    """A stream that waits in an exchange without an end is reported; streams that are done are not."""
    reported, stuck, marks = [], threading.Event(), {stream: Event(stream != REMOTE) for stream in (None, REMOTE, LOCAL, SLOTTED)}

    def report(what: str) -> None:
        reported.append(what)
        stuck.set()

    watchdog = Watchdog(0.2, report)
    watchdog.watch_streams(SimpleNamespace(record=marks.get))  # type: ignore[arg-type]
    assert stuck.wait(5)
    assert set(reported) == {"an exchange that was left"}
    marks[REMOTE].done = True
    time.sleep(0.1)
    reported.clear()
    time.sleep(0.4)
    assert reported == []
    watchdog.close()


def test_events_of_ended_exchanges_are_recycled() -> None:
    """Both events of an ended exchange are recycled, and none of a running one."""
    recycled: list[Event] = []
    watchdog = Watchdog(0.2, print, recycle=recycled.append)
    ended, running = (Event(True), Event(True)), (Event(True), Event())
    watchdog.watch(*ended, "ended")
    watchdog.watch(*running, "running")
    time.sleep(0.1)
    assert recycled == list(ended)
    running[1].done = True
    watchdog.close()


def test_counted_exchanges() -> None:
    """An exchange that has begun and does not end is reported. Exchanges that end one after the other are not."""
    reported, stuck = [], threading.Event()

    def report(what: str) -> None:
        reported.append(what)
        stuck.set()

    count = [0, 0]
    watchdog = Watchdog(0.3, report)
    watchdog.watch_count("number {}", lambda: (count[0], count[1]))
    for _ in range(10):  # always inside of an exchange, never long inside of the same one
        count[0] += 1
        time.sleep(0.05)
        count[1] = count[0] - 1
    count[1] = count[0]
    time.sleep(0.5)
    assert reported == []
    count[0] += 1
    assert stuck.wait(5)
    assert set(reported) == {"number 11"}
    count[1] += 1
    watchdog.close()


def test_close_releases_the_counters() -> None:
    """Without the garbage collector: otherwise the memory of slots would outlive its group."""

    class Counter:
        def read(self) -> tuple[int, int]:
            return 0, 0

    counter = Counter()
    watchdog = Watchdog(5.0, print)
    watchdog.watch_count("number {}", counter.read)
    seen = weakref.ref(counter)
    watchdog.close()
    del counter
    assert seen() is None


_STUCK = """
import logging, threading
from types import SimpleNamespace
from mxep.comm import watchdog
watchdog._RESCUE_S, watchdog._PAUSE_S = 0.3, 0.05
for_ever = threading.Event().wait
class Prints(logging.StreamHandler):
    def emit(self, record):
        for_ever()  # as str() of a tensor of the GPU
logging.getLogger().addHandler(Prints())
def driver_holds_its_lock(*of):
    {stuck}
def main_thread_waits():
    {waits}
over, never = SimpleNamespace(query=lambda: True), SimpleNamespace(query={query})
watchdog.Watchdog(0.1, driver_holds_its_lock).watch(over, never, "exchange 19")
main_thread_waits()
"""


@pytest.mark.parametrize(
    ("seconds", "parts"),
    [
        (0.3, {"stuck": "for_ever()"}),
        (0.3, {"stuck": "raise RuntimeError('cuMemsetD8Async: CUDA error 700')"}),
        (0.3, {"stuck": "for_ever()", "waits": "logging.critical('loss')"}),
        (0.4, {"query": "driver_holds_its_lock", "stuck": "for_ever()"}),
    ],
    ids=["does not return", "raises", "logging waits too", "a check does not return"],
)
def test_the_process_ends_if_the_wait_cannot_be_ended(seconds: float, parts: dict[str, str]) -> None:
    """No thread would return: neither the one in the driver nor the watchdog's."""
    program = _STUCK.format(**{"waits": "for_ever()", "query": "lambda: False"} | parts)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert f": a peer's part did not come, and the CUDA driver has not let the wait end for {seconds} s" in ended.stderr
    assert "main_thread_waits" in ended.stderr


_AT_EXIT = """
import atexit, threading
from types import SimpleNamespace
from mxep.comm.watchdog import Watchdog
ended = threading.Event()
over, end = SimpleNamespace(query=lambda: True), SimpleNamespace(query=ended.is_set)
atexit.register(lambda: print(ended.wait(20)))  # as torch.cuda.synchronize() of close_transports
Watchdog(0.3, lambda what: ended.set()).watch(over, end, "exchange 19")
"""


def test_a_wait_ends_while_python_shuts_down() -> None:
    """That is where an uncaught error ends the program."""
    ended = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_wait_that_ends_in_time_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxep.comm.watchdog._RESCUE_S", 0.2)
    monkeypatch.setattr("mxep.comm.watchdog._PAUSE_S", 0.02)
    aborted: list[tuple[str, float]] = []
    monkeypatch.setattr("mxep.comm.watchdog._abort", lambda *what: aborted.append(what))
    reported: list[str] = []
    begin, end = Event(True), Event()
    watchdog = Watchdog(0.1, reported.append)
    watchdog.watch(begin, end, "exchange 19")
    time.sleep(1)
    end.done = True
    assert set(reported) == {"exchange 19"}
    assert len(reported) > 3
    watchdog.close()
    assert aborted == []


def test_a_broken_device_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may save what it has on the host."""
    monkeypatch.setattr("mxep.comm.watchdog._RESCUE_S", 0.1)
    monkeypatch.setattr("mxep.comm.watchdog._PAUSE_S", 0.02)
    aborted: list[tuple[str, float]] = []
    monkeypatch.setattr("mxep.comm.watchdog._abort", lambda *what: aborted.append(what))

    def query() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    watchdog = Watchdog(0.1, print)
    watchdog.watch(SimpleNamespace(query=query), SimpleNamespace(query=query), "exchange 19")  # type: ignore[arg-type]
    time.sleep(1)
    watchdog.close()
    assert aborted == []


def test_memory_is_poisoned_before_anything_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(symmetric, "fill_bytes", lambda *what: order.append("NaN"))
    monkeypatch.setattr(symmetric, "_fill_words", lambda *what: order.append("flags"))
    monkeypatch.setattr(symmetric._log, "critical", lambda *what: order.append("log"))
    memory = torch.zeros(8, dtype=torch.uint8)
    transport = SimpleNamespace(
        rank=0, world=2, device=torch.device("cpu"), _timeout_s=4, num_exchanges=3, posted=[1, 1], _captured=0, _slot_buffers=None
    )
    transport.fail = lambda text: order.append("fail")
    transport._rescue, transport._flags = SimpleNamespace(cuda_stream=0), SimpleNamespace(memory=memory)
    transport._pool = SimpleNamespace(each=lambda act: act(SimpleNamespace(memory=memory)))
    symmetric.SymmetricTransport._stuck(transport, "exchange 3")  # type: ignore[arg-type]
    assert order == ["fail", "NaN", "flags", "log"]
