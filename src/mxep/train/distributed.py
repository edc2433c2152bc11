"""This process as one rank of a run: rank, device, process group, and the signals that end a run after the current step."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from mxep.comm import close_transports
from mxep.comm.collective import gather_objects
from mxep.device import default_device_type
from mxep.train.rank_control import STORE_VARIABLE, is_second_request

TIMEOUT = timedelta(minutes=10)
_LONG_TIMEOUT = timedelta(days=1)  # for work that takes as long as its data is large
_GRACE_S = 30.0  # for the other ranks to say what failed there
_ASK_S = 0.02
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process as a rank of a run.

    Attributes:
        rank: global rank.
        world: ranks of the run.
        device: of this rank.
        local_world: ranks of this machine.
    """

    rank: int
    world: int
    device: torch.device
    local_world: int = 1


@contextmanager
def init_distributed(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Ranks]:
    """Join the process group that the environment describes (torchrun's variables; without them a single rank); leave it at the end.

    A rank uses one CPU thread, unless OMP_NUM_THREADS is set.

    Raises:
        ValueError: this machine has fewer GPUs than ranks.
    """
    device_type = default_device_type() if device == "auto" else device
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"train: rank {rank} is number {local_rank} of this machine, which has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(local_rank)
        here = torch.device("cuda", local_rank)
    else:
        here = torch.device("cpu")
    if "OMP_NUM_THREADS" not in os.environ:
        # As torchrun does. With a team of all cores for each of 4 ranks, the largest of a thousand numbers took 45 ms every step.
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        shared, rank, world = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store: dist.Store = dist.PrefixStore(agree_on_prefix(shared, rank, world), shared)
        bound = here if device_type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT, device_id=bound)
    else:
        store = dist.FileStore(os.environ[STORE_VARIABLE], world) if STORE_VARIABLE in os.environ else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    yield Ranks(rank, world, here, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    close_transports()
    dist.destroy_process_group()  # not after a failure, since it may hang without the other ranks


def agree_on_prefix(store: dist.Store, rank: int, world: int) -> str:
    """A store prefix that all ranks of this start share and that no earlier start used.

    torchrun keeps one store over its restarts, so a restarted rank would find the addresses of dead ranks in it. torchrun's restart count
    differs between machines. Each rank therefore asks under its own key, and rank 0 answers until all ranks have the prefix.

    Raises:
        RuntimeError: a rank did not ask within `TIMEOUT`.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"mxep/asks/{rank}", own)
        name = store.get(f"mxep/answers/{own}").decode()
        store.set(f"mxep/{name}/heard/{rank}", "")
        return name
    missing, deadline = set(range(1, world)), time.monotonic() + TIMEOUT.total_seconds()
    while missing:
        for other in list(missing):
            if store.check([f"mxep/asks/{other}"]):  # a dead rank may have written it; a live one overwrites it
                store.set(f"mxep/answers/{store.get(f'mxep/asks/{other}').decode()}", own)
            if store.check([f"mxep/{own}/heard/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"train: ranks {sorted(missing)} did not come within {TIMEOUT.total_seconds():.0f} s")
        time.sleep(_ASK_S if missing else 0)
    return own


def on_all_ranks(work: Callable[[], T]) -> T:
    """Run `work` on every rank; it may take far longer than `TIMEOUT` on one of them. Returns this rank's result.

    A rank on which it failed waits `_GRACE_S` for the others, which may hang: one may be what it has waited for itself.

    Raises:
        BaseException: what `work` raised on this rank (panics of Rust libraries are no Exceptions).
        ValueError: `work` failed on another rank.
    """
    group = dist.new_group(backend="gloo", timeout=_LONG_TIMEOUT)  # before the work, while all ranks are here
    failure: BaseException | None = None
    try:
        result = work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = error
    if failure is not None:
        telling = threading.Thread(target=gather_objects, args=(f"{type(failure).__name__}: {failure}", group), daemon=True)
        telling.start()
        telling.join(_GRACE_S)
        if not telling.is_alive():
            dist.destroy_process_group(group)
        raise failure
    failures = gather_objects(None, group)
    dist.destroy_process_group(group)
    for rank, text in enumerate(failures):
        if text is not None:
            raise ValueError(f"{text} (rank {rank})")
    return result


class StopRequest:
    """Notes a signal that asks this rank to end after the step: a handler for `stop_signals`. A second request ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0

    def anywhere(self) -> bool:
        """True if any rank was asked to end. A collective."""
        asked = torch.tensor(float(self.signal is not None))
        dist.all_reduce(asked)
        return float(asked) > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        second = is_second_request(number, time.monotonic() - self._since)  # asked of the first one too, which may be the guard's
        if self.signal is not None:
            if not second:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal, self._since = number, time.monotonic()
