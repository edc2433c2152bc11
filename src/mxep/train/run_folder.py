"""The folder of a run and the checkpoints in it, by name (no torch here).

A run leaves config.json, metrics.jsonl, loss.png and checkpoints/step_00000200/ in runs/<name>/; while it runs, lock/ is there too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxep.train.config import CONFIG_FILE, TrainConfig
from mxep.train.run_lock import RunLock, check_unlocked, lock_run_folder

CHECKPOINTS = "checkpoints"
STEP_PREFIX = "step_"
SET_ASIDE = "set_aside"
RUNS = Path("runs")


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps.

    >>> checkpoint_name(200)
    'step_00000200'
    """
    return f"{STEP_PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Steps taken when a checkpoint of that name was written."""
    return int(checkpoint.name[len(STEP_PREFIX) :])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first; folders with any other name than `checkpoint_name` gives are none."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if re.fullmatch(f"{STEP_PREFIX}([0-9]{{8}}|[1-9][0-9]{{8,}})", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The checkpoint after `step` steps in `folder`, the newest without a step. Raises ValueError when there is none."""
    found = list_checkpoints(folder)
    if not found:
        raise ValueError(f"resume: no checkpoint found in {folder}; start without --resume, or name the run's folder with --out")
    if step is None:
        return found[-1]
    if (chosen := folder / checkpoint_name(step)) not in found:
        there = ", ".join(str(step_of(path)) for path in found)
        raise ValueError(f"resume: --resume-step={step}, but {folder} has no checkpoint of that step, want one of {there}")
    return chosen


def discard(path: Path) -> None:
    """Remove a checkpoint, or what was written of one. A kill in the middle leaves nothing that could be taken for one.

    It is renamed first, so that a run which still writes or publishes it finds it gone. What cannot be removed stays under its hidden
    name, for `remove_unpublished`.
    """
    hidden = path.with_name(f".{STEP_PREFIX}discarded.{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):
        os.rename(path, hidden)
    if hidden.is_symlink() or hidden.is_file():
        hidden.unlink()
    else:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_unpublished(folder: Path) -> None:
    """Remove what killed runs left in `folder` of checkpoints that they were writing or removing, whatever it is by now."""
    for path in folder.glob(f".{STEP_PREFIX}*"):
        discard(path)


def set_aside_newer(folder: Path, step: int) -> list[str]:
    """Move checkpoints of `folder` that are newer than `step` to <folder>/set_aside, where nothing resumes from them.

    A run that goes on from `step` writes newer ones of its own, and those of before would be taken for a part of it.
    Returns a line for each.
    """
    told = []
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            (folder / SET_ASIDE).mkdir(exist_ok=True)
            number, target = 1, folder / SET_ASIDE / path.name
            while target.exists():
                number += 1
                target = target.with_name(f"{path.name}.{number}")
            os.replace(path, target)
            told.append(f"{path} is newer than step {step}, from which the run goes on; it was moved to {target}")
    return told


def newest_run(root: Path = RUNS) -> Path:
    """The run below `root` whose checkpoints were written to last. Raises ValueError when there is none."""
    found = [path.parent for path in root.glob(f"*/{CONFIG_FILE}") if list_checkpoints(path.parent / CHECKPOINTS)]
    if not found:
        raise ValueError(f"resume: no checkpoint found under {root}/; start without --resume, or name the run's folder with --out")
    return max(found, key=lambda path: (path / CHECKPOINTS).stat().st_mtime)


def choose_run_folder(config: TrainConfig, model: str) -> Path:
    """The folder of a run: what was asked for, else runs/<model>-<recipe>, numbered when that is taken.

    Raises:
        ValueError: the folder asked for is used by another run, or holds one already with which this one does not go on; it cannot be
            one, or not be written.
    """
    out = _free_out(config, model) if config.out is None else config.out
    _check_place(out)
    if config.out is not None:
        check_unlocked(out)
        check_no_run(config, out)
    return out


def check_no_run(config: TrainConfig, out: Path) -> None:
    """Raise ValueError where `out` holds a run with which this one does not go on."""
    if not config.resume and list_checkpoints(out / CHECKPOINTS):
        raise ValueError(f"train: {out} holds a run already; go on with --resume, or choose another --out")


@contextmanager
def locked_run_folder(config: TrainConfig, model: str, starter: int | None = None) -> Iterator[RunLock]:
    """Hold the folder of a run, which is made where it is missing; runs that start together without --out take one each.

    What was made is removed at the end where nothing is in it: the run could not begin. `starter` is that of `lock_run_folder`.

    Raises:
        ValueError: another run uses the folder asked for; there can be no such folder.
    """
    made, out = False, Path()
    while not made:
        out = _free_out(config, model) if config.out is None else config.out
        _check_place(out)
        try:
            out.mkdir(parents=True)
            made = True
        except FileExistsError:  # another run was faster
            if config.out is not None:
                break
        except OSError as error:
            raise ValueError(f"train: the folder {out} cannot be made: {error.strerror}; name another folder with --out") from error
    try:
        lock = lock_run_folder(out, lambda line: print(line, file=sys.stderr, flush=True), starter)
        try:
            yield lock
        finally:
            lock.release()
    finally:
        if made:
            with suppress(OSError):
                out.rmdir()


def _free_out(config: TrainConfig, model: str) -> Path:
    base = RUNS / f"{model}-{config.recipe}"
    number, out = 1, base
    while out.exists():
        number += 1
        out = base.with_name(f"{base.name}-{number}")
    return out


def _check_place(out: Path) -> None:
    """Raise ValueError where there can be no such folder, or nothing in it."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"train: --out={out}, but {there} is a file; choose another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"train: nothing can be written in {there.absolute()}, where {out} would be; name another folder with --out")
