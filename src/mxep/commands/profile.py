"""`mxep profile`: times every exchange of the fused MoE layer on this machine's ranks and names the fastest modes; can save the result."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import mxep.operators  # noqa: F401, binds torch.ops.mxep
from mxep.bench.ranks import is_rank, rank_group, start_ranks
from mxep.bench.tables import table_of
from mxep.device import device_type_of
from mxep.fused.network_profiler import WAYS, ExchangeTime, NetworkProfile, NetworkProfiler
from mxep.recipe import resolve_recipe
from mxep.shapes import MX_BLOCK

_NAMES = {"rank_dedup": "rank_dedup", "all_to_all": "all_to_all", "all_ranks": "all_gather / reduce_scatter"}
_PRECISIONS = ("mxfp8", "hp")


def _parser() -> argparse.ArgumentParser:
    modes = (
        "Modes: rank_dedup sends a token once to each rank that needs it, all_to_all once for each of its experts, all_gather to all ranks "
        "(and reduce_scatter sums them back). mxep.FusedMoE(config, runtime=mxep.RuntimeEPConfig.load(OUT)) uses what was found."
    )
    parser = argparse.ArgumentParser("mxep profile", description=__doc__, epilog=modes)
    parser.add_argument("--tokens", type=int, default=16384, help="T, tokens of a rank (default 16384)")
    parser.add_argument("--dim", type=int, default=4096, help="D, their width (default 4096)")
    parser.add_argument("--top-k", type=int, default=8, help="C, experts of a token (default 8)")
    parser.add_argument("--experts", type=int, default=None, help="E (default 16 for each rank, or the histogram's)")
    parser.add_argument("--histogram", type=Path, default=None, help="JSON list of E counts: rows per expert from a router")
    parser.add_argument("--recipe", default=None, help="recipe, which decides what is sent in MXFP8")
    parser.add_argument("--out", type=Path, default=None, help="file for the fastest RuntimeEPConfig, which RuntimeEPConfig.load reads")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu uses gloo, to try the command")
    parser.add_argument("--nproc", type=int, default=None, help="ranks to start unless torchrun did (default: every GPU, 2 on a CPU)")
    return parser


def _histogram(path: Path | None) -> torch.Tensor | None:
    if path is None:
        return None
    try:
        counts = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"--histogram {path}: {error}; want a JSON list of E counts") from error
    numbers = isinstance(counts, list) and all(type(count) in (int, float) and 0 <= count < math.inf for count in counts)
    if not numbers or not any(counts):
        raise ValueError(f"--histogram {path}: want a JSON list of E counts of at least 0, not all 0")
    return torch.tensor(counts, dtype=torch.float64)


def _check(options: argparse.Namespace, histogram: torch.Tensor | None) -> None:
    """Raise ValueError for options that no ranks can measure, before these start."""
    for name in ("tokens", "dim", "top_k", "experts", "nproc"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value}, want 1 or more")
    if options.dim % MX_BLOCK:
        raise ValueError(f"--dim={options.dim}, want a multiple of {MX_BLOCK} (one MX block)")
    if histogram is not None and options.experts not in (None, histogram.numel()):
        raise ValueError(f"--experts={options.experts}, but --histogram has {histogram.numel()} counts; leave --experts out")
    if (experts := options.experts if histogram is None else histogram.numel()) is not None and options.top_k > experts:
        raise ValueError(f"--top-k={options.top_k} of {experts} experts, want as many experts or more")
    resolve_recipe(options.recipe)
    if (out := options.out) is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ValueError(f"--out={out}, want the name of a file in a folder that exists")


def _table(found: NetworkProfile) -> Table:
    """Milliseconds, GB/s and share of the limit of every mode, for dispatch and combine, forward and backward."""
    times = {(time.mode, time.way, time.precision): time for time in found.times}
    rows = []
    for mode, name in _NAMES.items():
        for way in WAYS:
            cells = [cell for precision in _PRECISIONS for cell in _cells(times[mode, way, precision], found.limit_gb_per_s)]
            rows.append([name if way == WAYS[0] else "", way.replace("_", " "), *cells])
    title = "exchanges of the fused layer; GB/s of the rows sent to other ranks, quantising and summing included"
    numbers = [name for precision in _PRECISIONS for name in (f"{precision}: ms", "GB/s", "of the limit")]
    return table_of(title, ("mode", "way"), numbers, rows)


def _cells(time: ExchangeTime, limit: float) -> tuple[str, str, str]:
    return f"{time.ms:.3f}", f"{time.gb_per_s:.3g}", f"{time.gb_per_s / limit:.0%}" if limit else ""


def command(argv: Sequence[str]) -> int:
    """Run `mxep profile <argv>`; returns 0, or 1 when a rank failed. Raises ValueError for invalid options."""
    options = _parser().parse_args(list(argv))
    device_type = device_type_of(options.device)
    histogram = _histogram(options.histogram)
    _check(options, histogram)
    if not is_rank():
        return 1 if start_ranks(["profile", *argv], device_type, options.nproc) else 0
    with rank_group(True, device_type) as (device, group):
        experts = options.experts if histogram is None else histogram.numel()
        profiler = NetworkProfiler(
            options.tokens, options.dim, options.top_k, num_experts=experts, group=group, recipe=options.recipe, device=device
        )
        config = profiler.profile(histogram)
        if group is None or torch.distributed.get_rank(group) == 0:
            _show(profiler, options.out)
            if options.out is not None:
                config.save(options.out)
    sys.stdout.flush()
    return 0


def _show(profiler: NetworkProfiler, out: Path | None) -> None:
    assert profiler.found is not None
    found, config = profiler.found, profiler.found.config
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    sizes = f"{profiler.T} tokens a rank, D {profiler.D}, top {profiler.C} of {profiler.num_experts} experts, {profiler.world} ranks"
    console.print(sizes + f", {profiler.device.type}")
    console.print(_table(found))
    if found.limit_gb_per_s:
        console.print(f"limit, {found.limit_of}: {found.limit_gb_per_s:.3g} GB/s a rank")
    for what, ms, winner in (("dispatch", found.dispatch_ms, config.dispatch), ("combine", found.combine_ms, config.combine)):
        sums = ", ".join(f"{name} {value:.3f} ms" for name, value in ms.items())
        console.print(f"{what}, forward + backward: {sums}; fastest: {winner}")
    if out is not None:
        console.print(f"wrote {out}")
