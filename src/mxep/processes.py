"""Identifies processes of this machine uniquely, since the system reuses pids. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def pid_scope() -> str:
    """Boot and PID namespace of this process; empty without Linux' /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since the boot. None if it has ended, 0 if unknown."""
    try:
        os.kill(pid, 0)
        foreign = False
    except ProcessLookupError:
        return None
    except PermissionError:
        foreign = True
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # after the name, which may contain spaces
    except OSError:
        return 0 if foreign or not pid_scope() else None
    return None if state in "ZX" else int(fields[18])
