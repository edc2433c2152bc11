"""Ranks killed at the worst moments, a full disk: the last good checkpoint stays, and a resumed run has the losses of a straight one."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import RankError, run_ranks
from tests.steps import TrainerWithoutPlot, losses_of, records_of

import mxep.train.adamw
import mxep.train.checkpoint
import mxep.train.checkpoint_writer
import mxep.train.distributed
from mxep.train import rank_control
from mxep.train.checkpoint import ShardWriter, read_manifest, save_checkpoint, verify
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks, StopRequest
from mxep.train.rank_control import ECHO_S, stop_signals
from mxep.train.run_folder import list_checkpoints

STEPS = 4

# Where a rank dies: (module or class, name of what is called there, which call, steps whose checkpoints are complete). Calls are those of
# the checkpoints, not those that replace other files.
MOMENTS: dict[str, tuple[Any, str, int, list[int]]] = {
    "in a step": (mxep.train.adamw.AdamW, "step", 3, [2]),
    "while tensors are written": (mxep.train.checkpoint.dcp, "save", 2, [1]),
    "before the manifest": (Path, "write_bytes", 2, [1]),
    "before the name": (os, "replace", 2, [1]),
    "before the oldest is hidden": (os, "rename", 1, [1, 2]),
    "while the oldest is removed": (shutil, "rmtree", 1, [2]),
}
MODES = ("disabled", "async")


def config(data: str, **options: Any) -> TrainConfig:
    small = {"device": "cpu", "batch": 1, "seq_len": 16, "eval_tokens": 32, "warmup": 1, "steps": STEPS, "eval_every": STEPS, "keep": 1}
    return TrainConfig(**{**small, "data": (data,), "checkpoint_every": 1, **options})


def run(rank: int, world: int, out: str, options: TrainConfig) -> list[float]:
    torch.manual_seed(rank)
    assert TrainerWithoutPlot(options, Ranks(rank, world, torch.device("cpu")), Path(out)).train()
    return losses_of(out)


def on_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Do something before the numbered call of `owner.name`; other files than a checkpoint's do not count."""
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += not (isinstance(args[0], Path) and "checkpoints" not in args[0].parts)
        if calls[0] == number:
            act()
        return original(*args, **options)

    setattr(owner, name, counted)


def killed(rank: int, world: int, out: str, data: str, moment: str, mode: str) -> None:
    owner, name, number, _ = MOMENTS[moment]
    victim = 1 if moment in ("in a step", "while tensors are written") else 0
    if rank == victim:
        on_call(owner, name, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(rank, world, out, config(data, async_checkpoint=mode))


def resumed(rank: int, world: int, folder: str, data: str, mode: str) -> None:
    for moment in MOMENTS:
        run(rank, world, f"{folder}/{moment}", config(data, resume=True, async_checkpoint=mode))


def full_disk(rank: int, world: int, out: str, data: str, part: str, mode: str) -> tuple[str, list[list[str]]]:
    """The output of rank 0, and the existing checkpoints whenever one was begun. The second finds no room on rank 1."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def seen(*arguments: Any) -> Any:
        there.append(sorted(path.name for path in arguments[0].glob("*")))
        return save_checkpoint(*arguments)

    there: list[list[str]] = []
    mxep.train.checkpoint_writer.save_checkpoint = seen  # type: ignore[assignment]
    if rank == 1 and part == "random numbers":
        on_call(mxep.train.checkpoint, "save_file", 4, full)  # of each checkpoint the tensors, then these
    elif rank == 1 and part == "tensors":
        on_call(ShardWriter, "write_data", 2, full)
    elif rank == 1:
        cut_tensors(2)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run(rank, world, out, config(data, async_checkpoint=mode))
    return shown.getvalue(), there


def cut_tensors(number: int) -> None:
    """The numbered file of tensors ends after 1000 bytes: the system refuses the rest, in the middle of the writing."""
    original, limits = ShardWriter.write_data, resource.getrlimit(resource.RLIMIT_FSIZE)
    left = [number]

    def write_data(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            return original(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    ShardWriter.write_data = write_data  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text(Path(json.__file__).read_text())
    return str(path)


@pytest.fixture(scope="module")
def straight(text: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run_ranks(run, 2, str(tmp_path_factory.mktemp("straight")), config(text))[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_killed_and_resumed(tmp_path: Path, text: str, straight: list[float], mode: str) -> None:
    for moment, (*_, complete) in MOMENTS.items():
        out = tmp_path / moment
        with pytest.raises(RankError):  # of the rank that died, or of the one that lost it
            run_ranks(killed, 2, str(out), text, moment, mode)
        there = [read_manifest(path) for path in list_checkpoints(out / "checkpoints")]
        previous_save_is_pending = mode == "async" and moment == "in a step"  # the checkpoint of the step before
        allowed = [complete] + previous_save_is_pending * [[1], [1, 2]]
        assert [manifest.step for manifest in there] in allowed, moment
        for manifest in there:
            verify(manifest)
    run_ranks(resumed, 2, str(tmp_path), text, mode)
    for moment in MOMENTS:
        assert losses_of(tmp_path / moment) == straight, moment
        assert [path.name for path in (tmp_path / moment / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"], moment


def test_one_request_may_arrive_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(mxep.train.distributed.signal, "SIG_DFL", lambda number, _: ended.append(number))
    request = StopRequest()
    with stop_signals(request):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # from the scheduler and from the starter
        assert request.signal == signal.SIGTERM
        assert not ended
        request._since -= ECHO_S
        os.kill(os.getpid(), signal.SIGHUP)  # the terminal is closed meanwhile
        assert not ended
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_the_request_after_the_guards_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter is gone, its ranks end after their step; whoever finds them too slow ends them by one more signal."""
    ended = []
    monkeypatch.setattr(mxep.train.distributed.signal, "SIG_DFL", lambda number, _: ended.append(number))
    monkeypatch.setattr(rank_control, "_signalled_by_guard", True)
    request = StopRequest()
    with stop_signals(request):
        os.kill(os.getpid(), signal.SIGTERM)
        request._since -= ECHO_S
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("part", "mode"), [("random numbers", "async"), ("tensors", "async"), ("tensors", "disabled"), ("half of the tensors", "async")]
)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, text: str, straight: list[float], part: str, mode: str) -> None:
    shown, there = run_ranks(full_disk, 2, str(tmp_path), text, part, mode)[0]
    assert losses_of(tmp_path) == straight
    (lost,) = records_of(tmp_path, "lost_checkpoint")
    assert "step_00000002 cannot be written" in lost["reason"]
    assert ("File too large" if part.startswith("half") else "No space left") in lost["reason"]
    assert shown.count(f"{lost['reason']}; the next checkpoint is tried in its turn") == 1
    assert there == [[], ["step_00000001"], ["step_00000001"], ["step_00000003"]], "the last good one stays, nothing else"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{STEPS:08d}"]
    verify(read_manifest(tmp_path / "checkpoints" / f"step_{STEPS:08d}"))
