"""The watchdog on events that are made up: it counts from where an exchange begins, and tells of one that does not end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

from mxep.comm.copy_streams import LOCAL, REMOTE, SLOTTED
from mxep.comm.watchdog import Watchdog


class Event:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def test_what_does_not_end_is_told_and_what_has_not_begun_is_not() -> None:
    told, stuck = [], threading.Event()

    def tell(what: str) -> None:
        told.append(what)
        stuck.set()

    watchdog = Watchdog(0.2, tell)
    first, second = (Event(), Event()), (Event(), Event(True))
    watchdog.watch(*first, "first")
    watchdog.watch(*second, "second")
    time.sleep(0.6)
    assert told == [], "work of the same stream is still before it"
    first[0].done = True
    start = time.monotonic()
    assert stuck.wait(5)
    assert time.monotonic() - start > 0.15
    assert set(told) == {"first"}
    first[1].done = True
    time.sleep(0.1)
    told.clear()
    stuck.clear()
    third = Event(True), Event()
    watchdog.watch(*third, "third")
    assert stuck.wait(5)
    assert set(told) == {"third"}
    third[1].done = True
    watchdog.close()


def test_lanes_of_which_nobody_tells_the_end() -> None:
    """One that waits behind an exchange without an end is told; those that are through are not."""
    told, stuck, marks = [], threading.Event(), {stream: Event(stream != REMOTE) for stream in (None, REMOTE, LOCAL, SLOTTED)}

    def tell(what: str) -> None:
        told.append(what)
        stuck.set()

    watchdog = Watchdog(0.2, tell)
    watchdog.watch_streams(SimpleNamespace(record=marks.get))  # type: ignore[arg-type]
    assert stuck.wait(5)
    assert set(told) == {"an exchange that was left"}
    marks[REMOTE].done = True
    time.sleep(0.1)
    told.clear()
    time.sleep(0.4)
    assert told == []
    watchdog.close()


def test_events_of_what_has_ended_are_handed_on() -> None:
    """Both of them, and none of what is still under way."""
    handed: list[Event] = []
    watchdog = Watchdog(0.2, print, recycle=handed.append)
    ended, running = (Event(True), Event(True)), (Event(True), Event())
    watchdog.watch(*ended, "ended")
    watchdog.watch(*running, "running")
    time.sleep(0.1)
    assert handed == list(ended)
    running[1].done = True
    watchdog.close()


def test_what_counts_itself() -> None:
    """One that has begun and does not end; one after the other that end is nothing to tell, nor is one while others end."""
    told, stuck = [], threading.Event()

    def tell(what: str) -> None:
        told.append(what)
        stuck.set()

    count = [0, 0]
    watchdog = Watchdog(0.3, tell)
    watchdog.watch_count("number {}", lambda: (count[0], count[1]))
    for _ in range(10):  # always inside of one, never long inside of the same
        count[0] += 1
        time.sleep(0.05)
        count[1] = count[0] - 1
    count[1] = count[0]
    time.sleep(0.5)
    assert told == []
    count[0] += 1
    assert stuck.wait(5)
    assert set(told) == {"number 11"}
    count[1] += 1
    watchdog.close()


def test_what_was_looked_at_is_let_go_at_the_end() -> None:
    """Without the garbage collector: memory of slots would outlive its group."""

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


_STUCK_FOR_EVER = """
import threading
from types import SimpleNamespace
from mxep.comm import watchdog
watchdog._RESCUE_S = 0.3
def driver_holds_its_lock(what):
    threading.Event().wait()
def main_thread_loads_a_module():
    threading.Event().wait()
over, never = SimpleNamespace(query=lambda: True), SimpleNamespace(query=lambda: False)
watchdog.Watchdog(0.1, driver_holds_its_lock).watch(over, never, "exchange 19")
main_thread_loads_a_module()
"""


def test_the_process_ends_if_the_wait_cannot_be_ended() -> None:
    """No thread of it would come back: neither the one in the driver nor the watchdog's."""
    ended = subprocess.run([sys.executable, "-c", _STUCK_FOR_EVER], capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert "exchange 19: a peer's part did not come, and the CUDA driver has not let the wait end for 0.3 s" in ended.stderr
    assert "main_thread_loads_a_module" in ended.stderr
    assert "driver_holds_its_lock" in ended.stderr


def test_a_wait_that_is_ended_in_time_ends_no_process() -> None:
    told = threading.Event()
    begin, end = Event(True), Event()
    watchdog = Watchdog(0.1, lambda _: told.set())
    watchdog.watch(begin, end, "exchange 19")
    assert told.wait(5)
    end.done = True
    watchdog.close()
    deadline = time.monotonic() + 5
    while any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a timer that would end this process is left"
        time.sleep(0.01)
