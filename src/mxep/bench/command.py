"""`mxep bench NAME` checks one benchmark's results, times it, shows tables, writes the record; `mxep bench report` updates the pages."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mxep.bench import markdown_tables, report, training
from mxep.bench.finetune_arms import ARMS, DEFAULT_MODEL, MODELS
from mxep.bench.layer import parse_size
from mxep.bench.peer_arms import PEERS
from mxep.bench.ranks import is_rank, rank_group, start_ranks
from mxep.bench.records import RESULTS, Record, device_name, merged, record_path, records_in, write_records
from mxep.bench.registry import BENCHMARKS, CheckFailedError, Setting, run
from mxep.bench.tables import tables
from mxep.device import default_device_type
from mxep.recipe import DEFAULT_RECIPE
from mxep.train.config import split_names

PROGRAM = "mxep bench"
_FAILED = 1
_SIZES = ("model", "layers", "sequences", "memory_gib")  # options of `finetune`


def command(argv: Sequence[str]) -> int:
    """Runs `mxep bench <argv>`; returns 0, or 1 if a check failed (no time is printed then). Raises ValueError if it cannot run."""
    ours, given = _split(argv)
    options = _parser().parse_args(ours)
    try:
        if options.name == "report":
            return report.main()
        _check_options(options)
        if options.name == "train":
            train = {name: getattr(options, name) for name in ("quick", "device", "record", "out")}
            train["recipes"] = options.recipes or [DEFAULT_RECIPE]
            given += [] if options.nproc is None else ["--nproc", str(options.nproc)]
            training.measure(given, **train, text=" ".join(["mxep", "bench", *argv]))
            return 0
        if given:
            raise ValueError(f"{options.name}: {' '.join(given)} after --, want nothing there; only `mxep bench train` passes options on")
        if BENCHMARKS[options.name].distributed and not is_rank():
            return _FAILED if start_ranks(["bench", *argv], options.device, options.nproc) else 0
        return _measure(options)
    except (CheckFailedError, training.RunFailedError) as error:
        print(f"{PROGRAM}: FAILED: {error}", file=sys.stderr)
        return _FAILED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first "--".

    >>> _split(["train", "--record", "--", "--steps", "30"])
    (['train', '--record'], ['--steps', '30'])
    """
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    names = {name: benchmark.what for name, benchmark in BENCHMARKS.items()} | {
        "train": "`mxep train` in MXFP8 and in bf16: tokens per second, memory, a step's time by its parts; its options after --",
        "report": "write the records' tables into README and docs, draw docs/plots",
    }
    text = "\n".join(["benchmarks:", *(f"  {name:18}{what}" for name, what in names.items())])
    parser = argparse.ArgumentParser(PROGRAM, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(names), metavar="NAME", help="one of the above")
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--record", action="store_true", help="write OUT/NAME-DEVICE-RANKS.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the record and of train's plot (default {RESULTS})")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu needs --quick: tiny shapes, for CI")
    size = "layer: the only size to run, T of all ranks; records of others stay"
    parser.add_argument("--thiek", type=parse_size, default=None, metavar="T,H,I,E,K", help=size)
    parser.add_argument("--peers", action="extend", type=split_names, metavar="A,B", help=f"peers: of {', '.join(PEERS)} (default all)")
    only = "peers: only cases whose title contains this; those of a record that are not run stay"
    parser.add_argument("--only", default="", metavar="TEXT", help=only)
    parser.add_argument("--arms", action="extend", type=split_names, metavar="A,B", help=f"finetune: of {', '.join(ARMS)} (default all)")
    parser.add_argument("--model", default=None, metavar="NAME", help=f"finetune: {' or '.join(MODELS)} (default {DEFAULT_MODEL})")
    parser.add_argument("--layers", type=int, default=None, help="finetune: of its model (default all)")
    sequences = "finetune: of a step, for every arm (default 4, 2 of `full`, 1 of gpt-oss-20b)"
    parser.add_argument("--sequences", type=int, default=None, help=sequences)
    memory = "finetune: keep activations of as many layers as fit into that, recompute the others (default: recompute all)"
    parser.add_argument("--memory-gib", type=float, default=None, help=memory)
    parser.add_argument("--cuda-graph", action="store_true", help="finetune: steps of LoRA on our layers as CUDA graphs")
    parser.add_argument("--recipes", action="extend", type=split_names, metavar="A,B", help=f"train: its arms (default {DEFAULT_RECIPE})")
    parser.add_argument("--nproc", type=int, default=None, help="ranks to start unless torchrun did (default: every GPU)")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Raises ValueError unless this machine can run these options."""
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
    if options.peers is not None and options.name != "peers":
        raise ValueError(f"{options.name}: --peers are other packages' experts; want `mxep bench peers`")
    if options.only and options.name != "peers":
        raise ValueError(f"{options.name}: --only names cases of experts beside other packages'; want `mxep bench peers`")
    if unknown := [name for name in options.peers or () if name not in PEERS]:
        raise ValueError(f"{options.name}: --peers {','.join(unknown)}, want {', '.join(PEERS)}")
    counts = {"--layers": options.layers, "--sequences": options.sequences, "--memory-gib": options.memory_gib}
    of_finetune = (options.arms, options.model, *counts.values(), options.cuda_graph or None)
    if options.name != "finetune" and any(given is not None for given in of_finetune):
        flags = ", ".join(["--arms", "--model", *counts, "--cuda-graph"])
        raise ValueError(f"{options.name}: {flags} are of a fine-tuning; want `mxep bench finetune`")
    if options.cuda_graph and options.device == "cpu":
        raise ValueError(f"{options.name}: --cuda-graph on a CPU, want a GPU, which records graphs")
    if options.model not in (None, *MODELS):
        raise ValueError(f"{options.name}: --model {options.model}, want {' or '.join(MODELS)}")
    if unknown := [name for name in options.arms or () if name not in ARMS]:
        raise ValueError(f"{options.name}: --arms {','.join(unknown)}, want {', '.join(ARMS)}")
    if small := [f"{flag} {count}" for flag, count in counts.items() if count is not None and count < 1]:
        raise ValueError(f"{options.name}: {', '.join(small)}, want 1 or more")
    if options.record and options.quick and options.out == RESULTS and options.name != "accuracy":  # which has the same shape anyway
        raise ValueError(f"{options.name}: --quick shapes make no record in {RESULTS}; leave --quick off, or name a folder with --out")


def _command_text(options: argparse.Namespace, world: int) -> str:
    flags = [f"--{name.replace('_', '-')}" for name in ("quick", "record", "cuda_graph") if getattr(options, name)]
    flags += ["--device cpu"] if options.device == "cpu" else []
    flags += ["--thiek " + ",".join(map(str, options.thiek))] if options.thiek is not None else []
    flags += [f"--only {shlex.quote(options.only)}"] if options.only else []
    flags += [f"--{name} " + ",".join(given) for name in ("peers", "arms") if (given := getattr(options, name))]
    flags += [f"--{name.replace('_', '-')} {given}" for name in _SIZES if (given := getattr(options, name)) is not None]
    start = f"torchrun --nproc-per-node={world} -m mxep" if world > 1 else "mxep"
    return " ".join([start, "bench", options.name, *flags])


def _measure(options: argparse.Namespace) -> int:
    """Runs as one rank, or as the only process."""
    with rank_group(BENCHMARKS[options.name].distributed, options.device) as (device, group):
        peers, arms = tuple(options.peers or ()), tuple(options.arms or ())
        sizes = {name: getattr(options, name) for name in _SIZES}
        named = {"size": options.thiek, "peers": peers, "only": options.only, "arms": arms, "cuda_graph": options.cuda_graph}
        setting = Setting(device, options.quick, group, **named, **sizes)
        path = record_path(options.name, device_name(device), setting.world, options.out)
        old = records_in(path) if (options.only or options.thiek) and path.exists() else []  # first, since a damaged file is an error
        console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
        first = setting.rank == 0

        def say(text: str) -> None:
            if first:
                console.print(text, markup=False)

        def write(records: list[Record], complete: bool) -> Path:
            name = records[0]["benchmark"] + ("" if options.model in (None, DEFAULT_MODEL) else f"-{options.model}")
            name += "" if options.memory_gib is None else f"-{options.memory_gib:g}gib"
            name += "-graph" if options.cuda_graph else ""
            return write_records(name, device_name(device), setting.world, merged(records, old), options.out, complete=complete)

        def keep(records: list[Record]) -> None:
            if first and options.record:
                write(records, complete=False)

        records = run(options.name, setting, _command_text(options, setting.world), say, keep)
        if first:
            if options.record:
                print("wrote", write(records, complete=True))
            for table in tables(records):
                console.print(table)
            console.print(markdown_tables.TABLES[records[0]["benchmark"]](records), markup=False, soft_wrap=True)
    sys.stdout.flush()
    return 0
