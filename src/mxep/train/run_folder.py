"""The folder of a run and the checkpoints in it. Imports no torch.

A run writes config.json, metrics.jsonl, loss.png and checkpoints/step_00000200/ to runs/<name>/, and holds lock/ while it runs.
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
from mxep.train.durable_files import replace_file
from mxep.train.run_lock import RunLock, check_unlocked, lock_run_folder

CHECKPOINTS = "checkpoints"
STEP_PREFIX = "step_"
SET_ASIDE = "set_aside"
METRICS_FILE = "metrics.jsonl"
RUNS = Path("runs")


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps.

    >>> checkpoint_name(200)
    'step_00000200'
    """
    return f"{STEP_PREFIX}{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name[len(STEP_PREFIX) :])


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first: the folders with names from `checkpoint_name`."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if re.fullmatch(f"{STEP_PREFIX}([0-9]{{8}}|[1-9][0-9]{{8,}})", path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The checkpoint after `step` steps in `folder`; None: the newest. Raises ValueError if there is none."""
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
    """Remove a checkpoint, complete or partial.

    It is renamed first: a kill in between leaves no folder that looks like a checkpoint, and a run that still writes it finds it gone.
    `remove_unpublished` removes the hidden folder later if this fails.
    """
    hidden = path.with_name(f".{STEP_PREFIX}discarded.{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):
        os.rename(path, hidden)
    if hidden.is_symlink() or hidden.is_file():
        hidden.unlink()
    else:
        shutil.rmtree(hidden, ignore_errors=True)


def remove_unpublished(folder: Path) -> None:
    """Remove the hidden files and folders of checkpoints that killed runs were writing or removing in `folder`."""
    for path in folder.glob(f".{STEP_PREFIX}*"):
        discard(path)


def set_aside(path: Path, *, copy: bool = False) -> Path:
    """Move a file or folder to set_aside/ beside it, under a name that is free there, or copy a file; returns where it is now."""
    aside = path.parent / SET_ASIDE
    aside.mkdir(exist_ok=True)
    target = _free(aside / path.name, ".")
    if copy:
        replace_file(target, path.read_bytes())
    else:
        os.replace(path, target)
    return target


def set_aside_newer(out: Path, step: int) -> Iterator[str]:
    """Move checkpoints of the run in `out` that are newer than `step` to checkpoints/set_aside; gives a line for each.

    A run that resumes from `step` writes newer checkpoints of its own, with which the old ones would be confused. The lines of its metrics
    that belong to them are removed later, so metrics.jsonl is copied first. Without such checkpoints the removed steps are repeated.
    """
    newer = [path for path in list_checkpoints(out / CHECKPOINTS) if step_of(path) > step]
    if newer and (metrics := out / METRICS_FILE).exists():
        yield f"metrics: lines of {metrics} after step {step} are removed; a copy with all of them is {set_aside(metrics, copy=True)}"
    for path in newer:
        yield f"{path} is newer than step {step}, from which the run resumes; it was moved to {set_aside(path)}"


def newest_run() -> Path:
    """The run in `RUNS` with the latest checkpoint, also an arm of --compare. Raises ValueError if there is none."""
    files = [*RUNS.glob(f"*/{CONFIG_FILE}"), *RUNS.glob(f"*/*/{CONFIG_FILE}")]
    found = [path.parent for path in files if list_checkpoints(path.parent / CHECKPOINTS)]
    if not found:
        raise ValueError(f"resume: no checkpoint found under {RUNS}/; start without --resume, or name the run's folder with --out")
    return max(found, key=lambda path: (path / CHECKPOINTS).stat().st_mtime)


def choose_run_folder(config: TrainConfig, model: str) -> Path:
    """The folder of a run: --out, else runs/<model>-<recipe>, numbered if that is taken.

    Raises:
        ValueError: another run uses the folder, or the folder holds a run that this one does not resume; it is no folder or not writable.
    """
    out = _out_of(config, model)
    if config.out is not None:
        check_unlocked(out)
        check_no_run(config, out)
    return out


def check_no_run(config: TrainConfig, out: Path) -> None:
    """Raise ValueError if `out` holds a run that this one does not resume."""
    if not config.resume and list_checkpoints(out / CHECKPOINTS):
        raise ValueError(f"train: {out} holds a run already; resume it with --resume, or choose another --out")


@contextmanager
def locked_run_folder(config: TrainConfig, model: str, starter: int | None = None) -> Iterator[RunLock]:
    """Create and lock the folder of a run. Runs that start at the same time without --out get one folder each.

    A new folder that is empty at the end is removed: the run could not begin. `starter`: see `lock_run_folder`.

    Raises:
        ValueError: another run uses the folder, or it cannot be created.
    """
    made, out = False, Path()
    while not made:
        out = _out_of(config, model)
        try:
            out.mkdir(parents=True)
            made = True
        except FileExistsError:  # another run created it first
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


def _free(path: Path, mark: str) -> Path:
    """`path`, or if that is taken the first free one of path<mark>2, path<mark>3 and so on."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}{mark}{number}")
    return free


def _out_of(config: TrainConfig, model: str) -> Path:
    """--out, else a free folder in runs/. Raises ValueError if it cannot be a folder, or is not writable."""
    out = _free(RUNS / f"{model}-{config.recipe}", "-") if config.out is None else config.out
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"train: --out={out}, but {there} is a file; choose another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"train: nothing can be written in {there.absolute()}, where {out} would be; name another folder with --out")
    return out
