"""This process as one rank of a measurement, and the ranks of a machine where nobody else started them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mxep.comm import close_transports, set_transport
from mxep.device import default_backend

CPU_RANKS = 2


def is_rank() -> bool:
    """Whether torchrun or another launcher started this process."""
    return "RANK" in os.environ


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank: torchrun takes `--nproc` for an abbreviation of its own, also behind the program.

    >>> without_nproc(["pipeline", "--nproc", "2", "--quick", "--nproc=4"])
    ['pipeline', '--quick']
    """
    follows = [False, *(argument == "--nproc" for argument in arguments)]
    return [argument for argument, value in zip(arguments, follows, strict=False) if not (value or argument.startswith("--nproc"))]


def start_ranks(arguments: Sequence[str], device_type: str, ranks: int | None = None) -> int:
    """Run `mxep <arguments>` on `ranks` ranks of this machine by torchrun, None: one for each GPU, or two on a CPU; the exit status."""
    world = ranks or (CPU_RANKS if device_type == "cpu" else torch.cuda.device_count())
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return subprocess.run([*torchrun, "-m", "mxep.cli", *without_nproc(arguments)], env=environment, check=False).returncode


@contextmanager
def joined(several: bool, device_type: str) -> Iterator[tuple[torch.device, dist.ProcessGroup | None]]:
    """This rank's device and the group of all ranks, None for a measurement of one."""
    if not several:
        yield torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type), None
        return
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group(default_backend(device_type), device_id=device if device_type == "cuda" else None)
    yield device, dist.group.WORLD
    close_transports()
    if ours:
        dist.destroy_process_group()


def share_memory(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """The name of a second group of the same ranks, over symmetric memory; None where they cannot share memory, or `group` is None.

    `group` itself exchanges over torch.distributed from then on, whatever MXEP_TRANSPORT says: it is what the other is compared with.
    """
    if group is None:
        return None
    set_transport("collective", group, device=device)
    second = dist.new_group(dist.get_process_group_ranks(group))
    try:
        set_transport("symmetric", second, device=device)
    except ValueError:
        return None  # records say so: mxfp8_over
    return second.group_name
