"""Measure again what the repository says of one GPU: `python benchmarks/record_one_gpu.py [PART[=SECONDS] ...]`.

    python benchmarks/record_one_gpu.py --gpus 0,1 --seconds 540 tests=300 peers linears train-16b=250

Each part is one command of `PARTS` that writes a record to `benchmarks/results`.  Without names all parts run, which takes hours.  Each GPU
takes the next part as soon as it is free, so several GPUs measure several parts at once.  Parts that write the same file wait for each
other.  A part is ended with its processes after SECONDS, or when the time of all parts is over.  A benchmark that is ended leaves the cases
that it has measured as `.json.part`.  Ends with status 1 unless every part has ended with status 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BENCHMARKS = "quantize rows swiglu optimizer grouped-mm experts peers linears attention transformers transformers-step finetune"
_TRAIN = (
    "-m mxep bench train --record --nproc 1 --recipes mxfp8_wgrad_with_hp,mxfp8_wgrad_with_mx -- --force-balance --fused-layer --compile"
)
_OF_8_LAYERS = "--layers 8 --batch 8 --seq-len 4096 --activation-checkpoint auto --output-recipe mxfp8_wgrad_with_mx"
_SEEDS = "--seeds 3 --record benchmarks/results"
PARTS: Mapping[str, str] = {  # arguments of Python
    "tests": "-m pytest -q -m gpu --gpu-record --timeout 120 tests",
    **{tool: f"tests/programs/sanitize.py --record --tool {tool}" for tool in ("memcheck", "racecheck")},
    **{name: f"-m mxep bench {name} --record" for name in _BENCHMARKS.split()},
    "train-debug": f"{_TRAIN} --model dsv3_debug --cuda-graph",
    "train-16b": f"{_TRAIN} --model dsv3_16b {_OF_8_LAYERS}",
    "train-qwen3": f"{_TRAIN} --model qwen3_30b_a3b {_OF_8_LAYERS}",
    "convergence": f"-m mxep convergence --out runs/convergence --recipes mxfp8_wgrad_with_hp,mxfp8_wgrad_with_mx {_SEEDS}",
}
_TO_END_S = 10.0  # between SIGTERM and SIGKILL


class Ended(NamedTuple):
    """What became of a part: its status (None: ended by its limit), the seconds that it took, and the last line that it wrote."""

    part: str
    status: int | None
    seconds: float
    last_line: str

    def __str__(self) -> str:
        how = "cut off" if self.status is None else "ok" if self.status == 0 else f"status {self.status}"
        return f"{self.part:20} {how:10} {self.seconds:6.0f} s  {self.last_line[:100]}"


def record_of(command: str) -> str:
    """What a command's record is named after, so that two commands of one record do not run at once.

    >>> record_of("-m mxep bench train --record") == record_of("-m mxep bench train --record -- --layers 8")
    True
    """
    words = command.split()
    return " ".join(words[2:4] if words[0] == "-m" else words)


def run_part(part: str, command: str, gpu: str, limit_s: float, folder: Path) -> Ended:
    """Run one part on a GPU; its output goes to FOLDER/PART.log."""
    log, start = folder / f"{part}.log", time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)], cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_TO_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").split("\n")
    return Ended(part, status, time.monotonic() - start, next((line for line in reversed(lines) if line.strip()), ""))


def run_parts(parts: Mapping[str, float], gpus: Sequence[str], seconds: float, folder: Path, commands: Mapping[str, str]) -> list[Ended]:
    """Run parts, by name with their seconds, on whichever GPU is free; those that begin after `seconds` are cut off at once."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting, busy, ended, changed, end = list(parts), set(), [], threading.Condition(), time.monotonic() + seconds  # type: ignore[var-annotated]

    def take() -> str | None:
        """The next part whose record no other GPU writes; None once no part is left."""
        with changed:
            while waiting:
                for part in waiting:
                    if record_of(commands[part]) not in busy:
                        waiting.remove(part)
                        busy.add(record_of(commands[part]))
                        return part
                changed.wait()
            return None

    def work(gpu: str) -> None:
        while (part := take()) is not None:
            left = min(parts[part], end - time.monotonic())
            print(f"{part:20} on GPU {gpu}, at most {max(left, 0):.0f} s", flush=True)
            try:
                found = Ended(part, None, 0.0, "no time left") if left <= 0 else run_part(part, commands[part], gpu, left, folder)
                ended.append(found)
            finally:
                with changed:
                    busy.remove(record_of(commands[part]))
                    changed.notify_all()
            print(found, flush=True)

    with ThreadPoolExecutor(len(gpus)) as pool:  # `pool.map` would cancel GPUs that have not begun when one fails
        workers = [pool.submit(work, gpu) for gpu in gpus]
    for worker in workers:
        worker.result()  # raises what it has raised
    return ended


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, str] = PARTS) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], epilog="parts: " + ", ".join(commands))
    parser.add_argument("parts", nargs="*", metavar="PART[=SECONDS]", help="what to measure (default: all parts)")
    parser.add_argument("--gpus", default="0", help="one or several, each for one part at a time (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all parts together (default: no limit)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "records", help="folder of the parts' output (default build/records)")
    options = parser.parse_args(arguments)
    parts = {name: float(limit or "inf") for name, _, limit in (part.partition("=") for part in options.parts or commands)}
    unknown = [name for name in parts if name not in commands]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}, want some of {', '.join(commands)}")
    ended = run_parts(parts, options.gpus.split(","), options.seconds, options.logs, commands)
    print("\n".join(["", *map(str, ended)]))
    return int(any(one.status != 0 for one in ended))


if __name__ == "__main__":
    sys.exit(main())
