"""A closed terminal, a pipe without a reader, a full or closed stdout: the work continues or is saved, and the metrics record it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.steps import records_of, steps_of
from tests.train_command import LIMIT_S, TINY, TRAIN

from mxep.train.checkpoint import read_manifest
from mxep.train.metrics import MetricsLog, progress_notes
from mxep.train.output import Output, surviving_output
from mxep.train.rank_control import ECHO_S, stop_signals
from mxep.train.rank_launcher import _SignalForwarder
from mxep.train.run_folder import find_checkpoint


@pytest.fixture(autouse=True)
def _buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


class Failing(io.StringIO):
    """A stream that fails while it has an error: at once, or when its buffer is flushed."""

    def __init__(self, number: int, buffered: bool) -> None:
        super().__init__()
        self.number: int | None = number
        self.buffered = buffered

    def write(self, text: str) -> int:
        self._fail(not self.buffered)
        return super().write(text)

    def flush(self) -> None:
        self._fail(self.buffered)

    def _fail(self, here: bool) -> None:
        if self.number is not None and here:
            raise OSError(self.number, os.strerror(self.number))


def lost(out: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["reason"]) for record in records_of(out, "lost_output")]


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EBADF])
def test_output_that_stdout_refuses_is_dropped_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, buffered: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout := Failing(number, buffered))
    with MetricsLog(tmp_path, steps=6) as log:
        for step in (1, 2, 3):
            log.say("a line")
            log.write("step", step=step, loss=1.0)
    assert steps_of(tmp_path) == [1, 2, 3]
    told = f"stdout cannot be written: [Errno {number}] {os.strerror(number)}; its text is dropped, the run continues"
    assert lost(tmp_path) == [(1, told)]
    monkeypatch.setattr(sys, "stdout", stdout)
    with MetricsLog(tmp_path, steps=6, start_step=3) as log:
        log.say("dropped")
        stdout.number = None
        log.say("taken")
        stdout.number = errno.ENOSPC
        log.say("dropped")
    full = told.replace(f"{number}] {os.strerror(number)}", f"{errno.ENOSPC}] {os.strerror(errno.ENOSPC)}")
    assert lost(tmp_path)[1:] == [(3, told), (3, full)], "an outage that ended may begin again"
    assert stdout.getvalue().endswith("taken\n" + "dropped\n" * buffered)


def test_closed_streams_and_unencodable_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for name, stream, reason in (("closed", closed, "I/O operation on closed file"), ("none", None, "it is closed")):
        monkeypatch.setattr(sys, "stdout", stream)
        (tmp_path / name).mkdir()
        monkeypatch.setattr("mxep.train.metrics._NOTE_S", 0.0)
        with MetricsLog(tmp_path / name, steps=1) as log:
            progress_notes(True)("far")
            log.say("a line")
        assert [reason in why for _, why in lost(tmp_path / name)] == [True]
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    MetricsLog(tmp_path, steps=1).say("runs/\xfcber")
    assert raw.getvalue() == b"runs/\\xfcber\n"


def test_a_process_prints_through_it_and_ends_without_an_error() -> None:
    """Python flushes stdout once more at its end."""
    program = "import sys; from mxep.train.output import surviving_output\n"
    program += "with surviving_output(): print('x' * 9000); print('y', file=sys.stderr)"
    for full in ({"stdout": "/dev/full"}, {"stderr": "/dev/full"}, {"stdout": "/dev/full", "stderr": "/dev/full"}):
        with contextlib.ExitStack() as stack:
            streams: Any = {name: stack.enter_context(open(path, "w")) for name, path in full.items()}
            others: Any = {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in full}
            done = subprocess.run([sys.executable, "-c", program], text=True, timeout=LIMIT_S, **streams, **others)
        assert done.returncode == 0
        assert done.stdout in (None, "x" * 9000 + "\n")
        assert done.stderr in (None, "y\n")


def test_the_streams_are_restored() -> None:
    before = sys.stdout, sys.stderr
    with surviving_output():
        assert Output.of(sys.stdout) is sys.stdout
    assert (sys.stdout, sys.stderr) == before


def test_sighup_is_a_request_and_nohup_is_obeyed() -> None:
    received = []
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, want in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
            signal.signal(signal.SIGHUP, handler)
            received.clear()
            with stop_signals(lambda number, _: received.append(number)):
                os.kill(os.getpid(), signal.SIGHUP)
            assert received == want
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("numbers", "later", "killed"),
    [
        ("SIGHUP SIGTERM SIGHUP", False, False),  # a session that ends sends both
        ("SIGTERM SIGTERM", False, False),
        ("SIGTERM SIGTERM", True, True),
        ("SIGINT SIGHUP", True, False),  # the terminal is closed while the last checkpoint is written
        ("SIGINT SIGINT", False, True),  # no rank gets the keyboard's signal, so this is a second Ctrl-C
    ],
)
def test_signals_that_stop_a_run(numbers: str, later: bool, killed: bool) -> None:
    sent: list[int] = []
    child: Any = subprocess.Popen.__new__(subprocess.Popen)
    child.poll, child.send_signal, child.kill, child.wait = lambda: None, sent.append, lambda: None, lambda: None
    child.returncode, child._child_created = 0, False
    forwarder = _SignalForwarder([child])
    first, *others = (signal.Signals[name] for name in numbers.split())
    forwarder(first, None)
    forwarder._since -= 2 * ECHO_S * later
    for number in others:
        forwarder(number, None)
    assert sent == [first]
    assert forwarder.killed == killed


def command(text: str, out: Path, steps: int = 1000) -> list[str]:
    return [*TRAIN, *TINY, "--nproc", "1", "--data", text, "--steps", str(steps), "--out", str(out)]


def check_resumes(text: str, out: Path) -> None:
    """The checkpoint is of the last step in the metrics, and a bare --resume takes one more."""
    saved = read_manifest(find_checkpoint(out / "checkpoints")).step
    assert steps_of(out)[-1] == saved
    done = subprocess.run(
        [*TRAIN, "--resume", "--out", str(out), "--stop-after", str(saved + 1)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(out) == list(range(1, saved + 2))


def read_until(descriptor: int, word: bytes) -> bytes:
    found = b""
    while word not in found:
        try:
            part = os.read(descriptor, 4096)
        except OSError as error:  # no process has the terminal any more
            raise AssertionError(f"ended before {word!r}: {found!r}") from error
        found += part
    return found


def start_in_terminal(arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A session of its own on a pseudo-terminal of this test."""
    ours, theirs = pty.openpty()
    program = f"import os, sys; os.login_tty({theirs}); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], pass_fds=(theirs,), env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    return process, ours


def test_a_closed_terminal_leaves_a_checkpoint(tmp_path: Path, text: str) -> None:
    """The system sends SIGHUP, and every write fails from then on: the starter's, the lines' and the progress bar's."""
    process, terminal = start_in_terminal(command(text, tmp_path / "run"))
    read_until(terminal, b"step:    3  loss")
    os.close(terminal)
    assert process.wait(LIMIT_S) == 0
    ((step, reason),) = lost(tmp_path / "run")
    assert step >= 3
    assert "Input/output error" in reason
    check_resumes(text, tmp_path / "run")


@pytest.mark.slow
def test_a_closed_terminal_under_torchrun(tmp_path: Path, text: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["--data", text, "--steps", "1000", "--out", str(tmp_path / "run")]
    process, terminal = start_in_terminal([*launcher, "mxep.cli", "train", *TINY, *options])
    read_until(terminal, b"step:    3  loss")
    os.close(terminal)
    process.wait(LIMIT_S)
    check_resumes(text, tmp_path / "run")


def test_a_pipe_whose_reader_has_gone(tmp_path: Path, text: str) -> None:
    """`mxep train | head -1`: all of the run."""
    process = subprocess.Popen(command(text, tmp_path / "run", steps=6), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(LIMIT_S) == 0, stderr
    assert stderr == b""
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert ["Broken pipe" in reason for _, reason in lost(tmp_path / "run")] == [True]
    assert read_manifest(find_checkpoint(tmp_path / "run" / "checkpoints")).step == 6


@pytest.mark.parametrize(("redirected", "reason"), [(">/dev/full 2>&1", "No space left"), (">&- 2>&-", "Bad file descriptor|it is closed")])
def test_a_full_or_closed_stdout(tmp_path: Path, text: str, redirected: str, reason: str) -> None:
    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", *command(text, tmp_path / "run", steps=3)], timeout=LIMIT_S)
    assert done.returncode == 0
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    ((_, why),) = lost(tmp_path / "run")
    assert re.search(reason, why)
    check_whole(tmp_path / "run")


def check_whole(out: Path) -> None:
    """No file of the run holds what was printed."""
    for path in (out / "config.json", find_checkpoint(out / "checkpoints") / "manifest.json"):
        json.loads(path.read_text())
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_sighup_to_the_starter(tmp_path: Path, text: str, ignored: bool) -> None:
    steps = 6 if ignored else 1000
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        process = subprocess.Popen(command(text, tmp_path / "run", steps=steps), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    read: Callable[[], bytes] = process.stdout.readline
    while b"loss:" not in (line := read()):
        assert line, process.stderr and process.stderr.read()
    process.send_signal(signal.SIGHUP)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    assert (b"SIGHUP: ending after this step" in stderr) != ignored
    saved = read_manifest(find_checkpoint(tmp_path / "run" / "checkpoints")).step
    assert saved == steps if ignored else 1 <= saved < steps
    if not ignored:
        assert b"resume with: mxep train --resume" in stdout
        check_resumes(text, tmp_path / "run")
