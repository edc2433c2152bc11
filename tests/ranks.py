"""`run_ranks`: run one function on several ranks of this machine, and raise their first error here."""

from __future__ import annotations

import datetime
import gc
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.end_with_parent import end_with_parent

# Imported once, then forked; matplotlib draws the losses of a whole training.
_PRELOAD = ["tests.end_with_parent", "torch", "mxep.train.run", "pytest", "matplotlib.figure", "matplotlib.backends.backend_agg"]


class RankError(AssertionError):
    """A rank failed; the text is that rank's traceback."""


def _rank_main(
    fn: Callable, rank: int, world_size: int, folder: str, timeout: float, backend: str | None, args: tuple, environment: dict[str, str]
) -> None:
    end_with_parent()
    gc.freeze()  # a full collection over what the server has imported takes 0.2 s, and a training does several
    os.environ.clear()  # the server that this process is forked from has the environment of the first call
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        if backend is not None:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            if "nccl" in backend:
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=timeout))
        result = fn(rank, world_size, *args)
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
        if backend is not None:
            dist.barrier()
            dist.destroy_process_group()
        os._exit(0)  # past Python's own end, during which gloo's threads may still hold tensors and abort the process
    except BaseException:
        (Path(folder) / f"error{rank}.part").write_text(traceback.format_exc())
        (Path(folder) / f"error{rank}.part").rename(Path(folder) / f"error{rank}")
        os._exit(1)  # no clean-up: the other ranks may hang in a collective and are ended by the parent


def free_port() -> int:
    """A TCP port of this machine that nothing listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(fn: Callable, world_size: int, *args: object, timeout: float = 120, backend: str | None = "gloo") -> list:
    """Call `fn(rank, world_size, *args)` in `world_size` processes joined by gloo over loopback, or by NCCL, a GPU each.

    Args:
        fn: a function of a module (it is pickled by name); it may return anything picklable.
        timeout: seconds for the whole call and for each collective.
        backend: "gloo", or "cpu:gloo,cuda:nccl"; None leaves joining to `fn`, which finds torchrun's RANK and WORLD_SIZE.

    Returns:
        what the ranks returned, by rank.

    Raises:
        RankError: the traceback of the rank that failed first, or which ranks were still running at the timeout.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="mxep-ranks-") as folder:
        ranks = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, folder, timeout, backend, args, dict(os.environ)), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _join(ranks, timeout, Path(folder))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _join(ranks: list, timeout: float, folder: Path) -> None:
    """Wait until all have ended well; raise at the first that has not."""
    deadline = time.monotonic() + timeout
    running = dict(enumerate(ranks))
    while running:
        wait([process.sentinel for process in running.values()], timeout=max(0.0, deadline - time.monotonic()))
        ended = [rank for rank, process in running.items() if process.exitcode is not None]
        failed = [rank for rank in ended if running[rank].exitcode != 0]
        if failed:
            reports = sorted((path for path in folder.glob("error*") if not path.suffix), key=lambda path: path.stat().st_mtime_ns)
            text = reports[0].read_text() if reports else f"exit code {running[failed[0]].exitcode}, no traceback"
            raise RankError(f"{reports[0].name.replace('error', 'rank ') if reports else f'rank {failed[0]}'} failed:\n{text}")
        for rank in ended:
            del running[rank]
        if running and time.monotonic() >= deadline:
            raise RankError(f"ranks {sorted(running)} still running after {timeout} s")
