"""JSON records of measurements with their origin: lists in `benchmarks/results/<benchmark>-<device>-<world>.json`."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path("benchmarks") / "results"
Record = dict[str, Any]
_RENAMED = {"MXFP8 passes": "quantise and move rows"}  # names in older records


def device_name(device: torch.device) -> str:
    """Name for a record: the GPU's model, or "cpu".

    >>> device_name(torch.device("cpu"))
    'cpu'
    """
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower().removeprefix("nvidia ")).strip("-")


def origin(command: str | None = None) -> dict[str, str]:
    """Origin of a record: commit (with "+changes" if the tree is not clean), command, versions, date.

    MXEP_COMMIT names the commit of a tree that was copied without its git folder, or with another one.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=here).stdout.strip()

    here = Path(__file__).parent  # of the code that ran, whatever folder it was started in
    ours = git("ls-files", Path(__file__).name)  # "" of an installed copy inside of another repository
    commit = os.environ.get("MXEP_COMMIT") or (git("rev-parse", "--short=12", "HEAD") if ours else "") or "unknown"
    dirty = "MXEP_COMMIT" not in os.environ and ours and git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit + ("+changes" if dirty else ""),
        "command": command or " ".join(sys.argv),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.date.today().isoformat(),
    }


def write_records(
    benchmark: str, device: str, world_size: int, records: list[Record], folder: Path = RESULTS, *, complete: bool = True
) -> Path:
    """Writes the records of one run, which replace those of an earlier one; returns the file.

    Records that are not `complete` go to NAME.json.part, which nothing reads and an interrupted run leaves.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = record_path(benchmark, device, world_size, folder)
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(records, indent=1) + "\n")
    return part.replace(path) if complete else part


def write_beside(record: Record, compared: Callable[[Record], object], folder: Path = RESULTS) -> Path:
    """Writes one record into its file, in place of those for which `compared` returns the same; returns the file."""
    benchmark, device, world_size = record["benchmark"], record["device"], record["world_size"]
    path = record_path(benchmark, device, world_size, folder)
    others = [old for old in records_in(path) if compared(old) != compared(record)] if path.exists() else []
    return write_records(benchmark, device, world_size, [*others, record], folder)


def merged(records: Sequence[Record], old: Sequence[Record]) -> list[Record]:
    """Old records with `records` in place of those of the same shape, model and routing, or at the end."""

    def case(of: Record) -> tuple:
        return of["shape"], of.get("model"), of.get("routing")

    found = [next((new for new in records if case(new) == case(record)), record) for record in old]
    return [*found, *(new for new in records if case(new) not in map(case, old))]


def record_path(benchmark: str, device: str, world_size: int, folder: Path = RESULTS) -> Path:
    """The file of a benchmark's records."""
    return folder / f"{benchmark}-{device}-{world_size}.json"


def read_records(benchmark: str, folder: Path = RESULTS) -> list[Record]:
    """Every record of one benchmark, files in order of their names. Raises ValueError when a file is not a list of records."""
    found: list[Record] = []
    for path in sorted(folder.glob(f"{benchmark}-*.json")):
        found += records_in(path)
    return found


def records_in(path: Path) -> list[Record]:
    """The records of one file. Raises ValueError when it is not a list of records."""
    try:
        records = json.loads(path.read_text(), object_hook=lambda found: {_RENAMED.get(name, name): value for name, value in found.items()})
    except ValueError as problem:
        raise ValueError(f"records: {path} is damaged ({problem}), want a list of records; run the benchmark again") from problem
    if not isinstance(records, list):
        raise ValueError(f"records: {path} holds {type(records).__name__}, want a list of records; run the benchmark again")
    return records


def median_ms(record: Record) -> dict[str, float]:
    """Median milliseconds of every arm."""
    return {arm: timing["median_ms"] for arm, timing in record["arms"].items()}


def of_most_ranks(records: Sequence[Record]) -> list[Record]:
    """The records of the most ranks; without a CPU's if there are GPUs'.

    >>> of_most_ranks([{"device": "h200", "world_size": world} for world in (2, 4, 1)] + [{"device": "cpu", "world_size": 8}])
    [{'device': 'h200', 'world_size': 4}]
    """
    found = [record for record in records if record["device"] != "cpu"] or records
    most = max((record["world_size"] for record in found), default=0)
    return [record for record in found if record["world_size"] == most]


def of_newest_device(records: Sequence[Record]) -> list[Record]:
    """The records of the device that was measured last; of several on that day, the last by name.

    >>> of_newest_device([{"device": device, "date": f"2026-11-{day}"} for device, day in (("h100", 28), ("h200", 22), ("h200", 28))])
    [{'device': 'h200', 'date': '2026-11-22'}, {'device': 'h200', 'date': '2026-11-28'}]
    """
    _, last = max(((record["date"], record["device"]) for record in records), default=("", ""))
    return [record for record in records if record["device"] == last]


def of_one_device(records: Sequence[Record]) -> list[Record]:
    """The records of the most frequent device, of several the last by name: a plot shows one.

    >>> of_one_device([{"device": device, "T": T} for device, T in (("h200", 1), ("h100-80gb-hbm3", 1), ("cpu", 1), ("h200", 2))])
    [{'device': 'h200', 'T': 1}, {'device': 'h200', 'T': 2}]
    """
    counts = Counter(record["device"] for record in records)
    chosen = max(counts, key=lambda device: (counts[device], device), default=None)
    return [record for record in records if record["device"] == chosen]


def device_title(device: str) -> str:
    """The display name of a record's device.

    >>> device_title("h100-80gb-hbm3")
    'H100 80GB HBM3'
    """
    return device.upper().replace("-", " ")


def record_place(record: Record) -> str:
    """Device, and the number of ranks if there are several."""
    ranks = "" if record["world_size"] == 1 else f"{record['world_size']} x "
    return ranks + device_title(record["device"])


def range_verdict(record: Record, recipe: str) -> str:
    """Whether a recipe's mean loss lies within the range of the baseline's seeds, if the record has enough seeds and steps to tell.

    >>> range_verdict({"within_range": {"mxfp8": True}, "no_verdict": ["1 seed has no spread, want --seeds 3 or more"]}, "mxfp8")
    'no verdict'
    """
    return "no verdict" if record.get("no_verdict") else "yes" if record["within_range"][recipe] else "no"


def routing_of(record: Record) -> str:
    """The routing of a training run in words."""
    return "unforced balance" if record["routing"] == "the router's" else record["routing"]
