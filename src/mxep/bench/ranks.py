"""This process as one rank of a measurement; starts the ranks of this machine if no launcher did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from mxep.comm import close_transports, set_transport
from mxep.device import default_backend
from mxep.train.rank_control import GUARD_VARIABLE, describe_guard, stop_signals, watch_starter

CPU_RANKS = 2
_TORCHRUN = "from mxep.bench.ranks import run_torchrun; run_torchrun()"
_KILL_AFTER_S = 60.0  # from the request to end; torchrun kills its ranks after 30


def is_rank() -> bool:
    """True if torchrun or another launcher started this process."""
    return "RANK" in os.environ


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank: torchrun takes `--nproc` for an abbreviation of its own option, even after the program's name.

    >>> without_nproc(["pipeline", "--nproc", "2", "--quick", "--nproc=4"])
    ['pipeline', '--quick']
    """
    follows = [False, *(argument == "--nproc" for argument in arguments)]
    return [argument for argument, value in zip(arguments, follows, strict=False) if not (value or argument.startswith("--nproc"))]


def start_ranks(arguments: Sequence[str], device_type: str, ranks: int | None = None) -> int:
    """Runs `mxep <arguments>` with torchrun on `ranks` ranks (None: one for each GPU, two on a CPU); returns the exit status."""
    world = ranks or (CPU_RANKS if device_type == "cpu" else torch.cuda.device_count())
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torchrun = [sys.executable, "-c", _TORCHRUN, "--standalone", f"--nproc-per-node={world}"]
    return run_child([*torchrun, "-m", "mxep", *without_nproc(arguments)], environment)


def run_torchrun() -> None:
    """torchrun in this process. It ends with the process that started it, and without a traceback if a signal asks it to.

    Its ranks do not inherit the pipe to that process.
    """
    watch_starter()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.run import main

    try:
        main()
    except SignalException as asked:
        sys.exit(128 + asked.sigval)


def run_child(words: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs a command that starts processes itself; returns its exit status. One that calls `watch_starter` ends if this process is killed.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came. The command was asked to end, with what it had started, and has ended.
    """
    with stop_signals(signal.default_int_handler):
        # In a group of its own, so that Ctrl-C reaches it once, through this process.
        guard_read, guard_write = os.pipe()
        environment = {**(os.environ if environment is None else environment), GUARD_VARIABLE: describe_guard(guard_read)}
        child = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, process_group=0, pass_fds=(guard_read,))
        os.close(guard_read)
        try:
            return child.wait()
        except KeyboardInterrupt:
            with stop_signals(lambda number, frame: None):  # a further signal would leave what the command has started behind
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_KILL_AFTER_S)
            raise
        finally:
            child.kill()
            child.wait()
            os.close(guard_write)


@contextmanager
def rank_group(distributed: bool, device_type: str) -> Iterator[tuple[torch.device, dist.ProcessGroup | None]]:
    """This rank's device and the group of all ranks; the group is None unless `distributed`."""
    if not distributed:
        yield torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type), None
        return
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    initializes = not dist.is_initialized()
    if initializes:
        dist.init_process_group(default_backend(device_type), device_id=device if device_type == "cuda" else None)
    yield device, dist.group.WORLD
    close_transports()
    if initializes:
        dist.destroy_process_group()


def symmetric_group(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The name of a second group of the same ranks over symmetric memory; None if they cannot share memory or `group` is None.

    From then on `group` exchanges over torch.distributed whatever MXEP_TRANSPORT is, as the baseline of the second group.
    """
    if group is None:
        return None
    set_transport("collective", group, device=device)
    second = dist.new_group(dist.get_process_group_ranks(group))
    try:
        set_transport("symmetric", second, device=device)
    except ValueError:
        return None  # the record's mxfp8_over says so
    return second.group_name
