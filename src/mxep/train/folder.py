"""The folder of a run and the checkpoints in it, by name (no torch here).

A run leaves config.json, metrics.jsonl, loss.png and checkpoints/step_00000200/ in runs/<name>/.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mxep.train.config import CONFIG_FILE, TrainConfig

CHECKPOINTS = "checkpoints"
STEP_PREFIX = "step_"
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
    """Checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if path.name[len(STEP_PREFIX) :].isdigit() and path.is_dir()]
    return sorted(found, key=step_of)


def find_checkpoint(folder: Path) -> Path:
    """The newest checkpoint in `folder`. Raises ValueError when there is none."""
    found = list_checkpoints(folder)
    if not found:
        raise ValueError(f"resume: no checkpoint found in {folder}; start without --resume, or name the run's folder with --out")
    return found[-1]


def newest_run(root: Path = RUNS) -> Path:
    """The run below `root` whose checkpoints were written to last. Raises ValueError when there is none."""
    found = [path.parent for path in root.glob(f"*/{CONFIG_FILE}") if list_checkpoints(path.parent / CHECKPOINTS)]
    if not found:
        raise ValueError(f"resume: no checkpoint found under {root}/; start without --resume, or name the run's folder with --out")
    return max(found, key=lambda path: (path / CHECKPOINTS).stat().st_mtime)


def choose_out(config: TrainConfig, model: str) -> Path:
    """The folder of a run: what was asked for, else runs/<model>-<recipe>, numbered when that is taken.

    Raises:
        ValueError: the folder asked for holds a run already, and this one does not go on with it; it cannot be one, or not be written.
    """
    if config.out is not None:
        _check_place(config.out)
        if not config.resume and list_checkpoints(config.out / CHECKPOINTS):
            raise ValueError(f"train: {config.out} holds a run already; go on with --resume, or choose another --out")
        return config.out
    base = RUNS / f"{model}-{config.recipe}"
    number, out = 1, base
    while out.exists():
        number += 1
        out = base.with_name(f"{base.name}-{number}")
    _check_place(out)
    return out


def claim_out(config: TrainConfig, model: str) -> Path:
    """`choose_out`; a folder that was not asked for is made here, so that runs which start together take one each.

    Raises:
        ValueError: as `choose_out`.
    """
    while True:
        out = choose_out(config, model)
        if config.out is not None:
            return out
        try:
            out.mkdir(parents=True)
        except FileExistsError:  # another run was faster
            continue
        return out


def release_out(config: TrainConfig, out: Path) -> None:
    """Remove what `claim_out` made where nothing is in it: the run could not begin."""
    if config.out is None:
        with suppress(OSError):
            out.rmdir()


def _check_place(out: Path) -> None:
    """Raise ValueError where there can be no such folder, or nothing in it."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"train: --out={out}, but {there} is a file; choose another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"train: nothing can be written in {there.absolute()}, where {out} would be; name another folder with --out")
