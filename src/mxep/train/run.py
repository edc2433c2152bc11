"""A run on all ranks: its folder is locked, its options are read again, and it trains."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mxep.train.checkpoint import DamagedCheckpointError, find_good
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.option_parser import read_options
from mxep.train.rank_control import starter_pid
from mxep.train.resolved_config import resolve
from mxep.train.run_folder import CHECKPOINTS, check_no_run, find_checkpoint, locked_run_folder, remove_unpublished, step_of
from mxep.train.run_lock import RunLock
from mxep.train.trainer import Trainer


def run(config: TrainConfig, argv: Sequence[str], ranks: Ranks) -> bool:
    """Train on this rank, with the run's folder locked; True if all steps are done, False if the run was stopped earlier.

    Args:
        config: the options; rank 0 reads them again once it holds the lock.
        argv: the command line that they were read from.
        ranks: rank and device of this process.

    Raises:
        ValueError: folder, options, data or checkpoint are wrong, on all ranks. For a damaged checkpoint it names the last good one.
        RunLockLostError: another run has taken the folder over.
    """
    with ExitStack() as held:
        lock: RunLock | None = None
        found: list[Any] = [None]
        if ranks.rank == 0:
            try:
                lock, *found = _hold_folder(config, argv, ranks, held)
            except Exception as error:
                found = [error]
        everywhere = [found]
        dist.broadcast_object_list(everywhere)
        if isinstance(everywhere[0][0], Exception):
            raise everywhere[0][0]
        config, out, finished = everywhere[0]
        if finished:
            return True
        try:
            return Trainer(config, ranks, out, lock).train()
        except DamagedCheckpointError as error:
            good = find_good(out / CHECKPOINTS, config.resume_step)
            command = f"resume from the last good one with: mxep train --resume --resume-step {good} --out {shlex.quote(str(out))}"
            raise ValueError(f"{error}; {'there is no other good one in that folder' if good is None else command}") from error


def _hold_folder(config: TrainConfig, argv: Sequence[str], ranks: Ranks, held: ExitStack) -> tuple[RunLock, TrainConfig, Path, bool]:
    """(lock, options, folder, True if the run has all its steps). Runs on rank 0, which sends the result to all ranks.

    The options are read again: another run may have written a checkpoint while rank 0 waited for the lock.
    """
    lock = held.enter_context(locked_run_folder(config, resolve(config, ranks.device.type, ranks.world).model, starter_pid()))
    if config.out is not None:
        config = read_options([*argv, "--out", str(lock.out)])
    check_no_run(config, lock.out)
    remove_unpublished(lock.out / CHECKPOINTS)
    steps = resolve(config, ranks.device.type, ranks.world).steps
    finished = config.resume == "auto" and step_of(find_checkpoint(lock.out / CHECKPOINTS)) >= steps
    if finished:
        print(f"train: {lock.out} has all {steps} steps, nothing is left to do", flush=True)
    return lock, config, lock.out, finished
