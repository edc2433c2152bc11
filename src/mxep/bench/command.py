"""`mxep bench NAME`: check one benchmark's results, time it, show the table, write the record; `mxep bench report`: README and plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mxep.bench import report, training
from mxep.bench.layer import parse_size
from mxep.bench.ranks import is_rank, joined, start_ranks
from mxep.bench.records import RESULTS, device_name, write_records
from mxep.bench.registry import BENCHMARKS, CheckFailedError, Setting, run
from mxep.bench.tables import tables
from mxep.device import default_device_type
from mxep.recipe import DEFAULT_RECIPE

PROGRAM = "mxep bench"
_WRONG_USE, _FAILED = 2, 1


def command(argv: Sequence[str]) -> int:
    """Run `mxep bench <argv>`; returns 0, 1 when a check failed (no time is printed then), or 2 when it cannot run here."""
    ours, given = _split(argv)
    options = _parser().parse_args(ours)
    try:
        if options.name == "report":
            return report.main()
        _check_options(options)
        if options.name == "train":
            train = {name: getattr(options, name) for name in ("quick", "device", "record", "out")}
            train["recipes"] = (options.recipes or DEFAULT_RECIPE).split(",")
            given += [] if options.nproc is None else ["--nproc", str(options.nproc)]
            training.measure(given, **train, text=" ".join(["mxep", "bench", *argv]))
            return 0
        if given:
            raise ValueError(f"{options.name}: {' '.join(given)} behind --, want nothing there; only `mxep bench train` hands options on")
        if BENCHMARKS[options.name].several and not is_rank():
            return _FAILED if start_ranks(["bench", *argv], options.device, options.nproc) else 0
        return _measure(options)
    except (CheckFailedError, training.RunFailedError) as error:
        print(f"{PROGRAM}: FAILED: {error}", file=sys.stderr)
        return _FAILED
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return _WRONG_USE


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first "--", and behind it.

    >>> _split(["train", "--record", "--", "--steps", "30"])
    (['train', '--record'], ['--steps', '30'])
    """
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:16}{benchmark.what}" for name, benchmark in BENCHMARKS.items())
    names += (
        f"\n  {'train':16}`mxep train` in MXFP8 and in bf16: tokens per second, memory, a step's time by its parts; its options behind --"
    )
    text = f"benchmarks:\n{names}\n  {'report':16}put the records into the README and draw docs/plots"
    parser = argparse.ArgumentParser(PROGRAM, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*BENCHMARKS, "train", "report"], metavar="NAME", help="one of the above")
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--record", action="store_true", help="write OUT/NAME-DEVICE-RANKS.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the record and of train's plot (default {RESULTS})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu wants --quick: tiny shapes, for CI")
    parser.add_argument("--thiek", type=parse_size, default=None, metavar="T,H,I,E,K", help="layer: the only size to run, T of all ranks")
    parser.add_argument("--recipes", default=None, metavar="A,B", help=f"train: recipes of MXFP8, an arm each (default {DEFAULT_RECIPE})")
    parser.add_argument("--nproc", type=int, default=None, help="ranks to start where torchrun did not (default: every GPU)")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Raise ValueError unless this machine can run what is asked for."""
    if options.device == "auto":
        options.device = default_device_type()
        if options.device == "cpu":
            raise ValueError(f"{options.name}: this machine has no CUDA GPU that torch can use; --device cpu --quick only tries the code")
    if options.device == "cuda" and default_device_type() != "cuda":
        raise ValueError(f"{options.name}: --device cuda, but torch sees no CUDA GPU here; --device cpu --quick only tries the code")
    if options.device == "cpu" and not options.quick:
        raise ValueError(f"{options.name}: --device cpu wants --quick; times of a CPU say nothing about the kernels")
    if options.thiek is not None and options.name != "layer":
        raise ValueError(f"{options.name}: --thiek is the size of a layer; want `mxep bench layer`")
    if options.recipes is not None and options.name != "train":
        raise ValueError(f"{options.name}: --recipes are those of a training; want `mxep bench train`")
    if options.record and options.quick and options.out == RESULTS:
        raise ValueError(f"{options.name}: --quick shapes make no record in {RESULTS}; leave --quick off, or name a folder with --out")


def _command_text(options: argparse.Namespace, world: int) -> str:
    flags = [flag for flag, given in (("--quick", options.quick), ("--record", options.record)) if given]
    flags += ["--thiek " + ",".join(map(str, options.thiek))] if options.thiek is not None else []
    start = f"torchrun --nproc-per-node={world} -m mxep.cli" if world > 1 else "mxep"
    return " ".join([start, "bench", options.name, *flags])


def _measure(options: argparse.Namespace) -> int:
    """Be one rank, or all there is."""
    with joined(BENCHMARKS[options.name].several, options.device) as (device, group):
        setting = Setting(device, options.quick, group, size=options.thiek)
        console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
        first = setting.rank == 0

        def say(text: str) -> None:
            if first:
                console.print(text, markup=False)

        def write(records: list[dict[str, Any]], complete: bool) -> Path:
            name = records[0]["benchmark"]
            return write_records(name, device_name(device), setting.world, records, options.out, complete=complete)

        keep = partial(write, complete=False) if first and options.record else None
        records = run(options.name, setting, _command_text(options, setting.world), say, keep)
        if first:
            for table in tables(records):
                console.print(table)
            if options.record:
                print("wrote", write(records, complete=True))
    sys.stdout.flush()
    return 0
