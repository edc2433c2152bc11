"""Traces the forward pass of `FusedMoE` on a CPU with one rank: which source files of mxep run, and how often control changes file.

    python tests/programs/trace_forward.py
    python tests/programs/trace_forward.py --changes

Prints the number of files, the number of changes of file, and the files in the order in which they run first.  A change of file is a call
into another file or a return from one; code outside of mxep, such as torch, is not seen.  `--changes` prints each change too.
At commit c13768f this program counts 37 files and 186 changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import mxep
from mxep.moe import FusedMoE, MoEConfig

SOURCE = Path(mxep.__file__).parent


class Trace(NamedTuple):
    """Source files in the order in which they run first, and each change of file: from, to, as file:function."""

    files: list[str]
    changes: list[tuple[str, str]]


def trace(work: Callable[[], object]) -> Trace:
    """Run work() and follow it through the files of mxep."""
    frames: list[tuple[str, str]] = []

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if SOURCE not in path.parents:
            return None
        frames.append((path.relative_to(SOURCE).as_posix(), frame.f_code.co_name))
        return follow

    sys.settrace(follow)
    try:
        work()
    finally:
        sys.settrace(None)
    changes = [(":".join(a), ":".join(b)) for a, b in pairwise(frames) if a[0] != b[0]]
    return Trace(list(dict.fromkeys(file for file, _ in frames)), changes)


def trace_forward() -> Trace:
    """The second training forward of a small layer with shared experts; the first one loads operators."""
    torch.manual_seed(0)
    layer = FusedMoE(MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, num_shared_experts=1)).bfloat16()
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x)
    return trace(lambda: layer(x))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Traces the forward pass of FusedMoE through the source files of mxep.")
    parser.add_argument("--changes", action="store_true", help="print each change of file")
    options = parser.parse_args()
    found = trace_forward()
    print(f"{len(found.files)} files, {len(found.changes)} changes of file")
    print("\n".join(f"  {name}" for name in found.files))
    if options.changes:
        print("\n".join(f"  {before} -> {after}" for before, after in found.changes))


if __name__ == "__main__":
    main()
