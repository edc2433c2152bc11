"""The kernels' tests under NVIDIA's compute-sanitizer, a few at a time: `python tests/programs/sanitize.py --record`.

    python tests/programs/sanitize.py --record --tool racecheck quantize_rows adamw_step

Wants a CUDA GPU, each test one, and compute-sanitizer (of CUDA 12.3 or newer) on the PATH; several GPUs share the tests out.
Every tensor gets an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memory right after it belongs to no tensor; tests that
capture graphs want torch's allocator and are left out, those of tensors beyond 2 GiB for their time.  The tool leaves torch's own kernels
alone, of which references are made and which take most of the time.  racecheck leaves out tests marked `large`, since a CPU looks at every
access of shared memory.  Ends with status 1 unless every test passed without an error of the tool.

Each tool has its record.  A file adds to it when its tests have ended or the time is over, with the tests that are left then.  `--left`
runs those, and files whole that have no result or had other tests when they were recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mxep.bench.records import RESULTS, device_name, origin, write_records

ROOT = Path(__file__).parents[2]
FILES = (  # those with the longest tests first
    *(
        "fp8_grouped_mm",
        "activation",
        "fp8_rebase",
        "quantize_columnwise",
        "quantize_rows",
        "quantize_weight",
        "p2p",
        "kernels",
        "expert_chunks",
        "slots",
        "grouped_mm",
        "fp8_errors",
    ),
    *("activation_rebased", "weight_forms", "gather_quantize", "expert_rows", "loss", "router", "adamw_step"),
)
# Host syncs cannot be tested under the tool, which syncs itself. Of the longest tests, activations in float32, one function is run. The
# float32 product runs cuBLAS's kernels alone, in which racecheck reports races and which it cannot leave out: it crashes.
LEFT_OUT = " and ".join(
    f"not {tests}"
    for tests in ("graph", "gib", "billion", "host_sync", "the_float32_product", "(functions_forms and dtype1 and not plain)")
)
MOST = 6  # tests of one run under the tool, which makes them many times as slow
_MOST_PRINTED = 6000  # characters of what a run printed
_ERROR_STATUS = 86  # of compute-sanitizer, which pytest does not have
_OF_LIBRARIES = "kns=at6native,kns=at_cuda_detail"  # in the mangled names of torch's kernels and of CUB's in it


class Found(NamedTuple):
    """Results of one file's tests: how many passed and failed, and the tool's errors, None if it did not print them."""

    passed: int
    failed: int
    errors: int | None

    @property
    def clean(self) -> bool:
        return self.errors == 0 and self.failed == 0 and self.passed > 0


def read_output(text: str) -> Found:
    """Of pytest's last line and the tool's summaries.

    >>> read_output("12 passed, 3 deselected in 4.0s\\n========= ERROR SUMMARY: 0 errors")
    Found(passed=12, failed=0, errors=0)
    >>> read_output("12 passed in 4.0s\\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)")
    Found(passed=12, failed=0, errors=2)
    >>> read_output("1 failed, 2 passed in 4.0s\\n========= ERROR SUMMARY: 7 errors").clean
    False
    """

    def counted(word: str) -> int:
        return sum(map(int, re.findall(rf"(\d+) {word}s?\b(?=.* in [\d.]+s)", text)))

    summaries = [int(count) for count in re.findall(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: )(\d+) (?:error|hazard)", text)]
    return Found(counted("passed"), counted("failed") + counted("error"), sum(summaries) if summaries else None)


def together(found: Sequence[Found]) -> Found:
    """All parts of a file; silent where one of them was.

    >>> together([Found(3, 0, 0), Found(4, 1, None)])
    Found(passed=7, failed=1, errors=None)
    """
    errors = [part.errors for part in found]
    known = [count for count in errors if count is not None]
    return Found(sum(part.passed for part in found), sum(part.failed for part in found), sum(known) if len(known) == len(errors) else None)


def selection(tool: str) -> list[str]:
    """pytest's options for the tests that a tool runs."""
    marks = "gpu and not multi_gpu" + " and not large" * (tool == "racecheck")
    return ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks, "-k", LEFT_OUT]


def collect(names: Sequence[str], tool: str) -> dict[str, list[str]]:
    """The tests of these files by name of the file; without files that have none for the tool."""
    files = [f"tests/gpu/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "--collect-only", *selection(tool), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not tests:
        raise RuntimeError(f"sanitize: tests could not be collected:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    of_files = {name: [test for test in tests if test.startswith(f"{file}::")] for name, file in zip(names, files, strict=True)}
    return {name: of_file for name, of_file in of_files.items() if of_file}


def gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES can be, for one GPU each."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())] or [""]


def run_tests(tests: Sequence[str], tool: str, more: Sequence[str], end: float, gpu: str) -> Found:
    """Results of some tests under the tool on one GPU, until `end` (time.monotonic); prints them and the end of what the tool printed."""
    start, which = time.monotonic(), f"{tests[0]} and {len(tests) - 1} more"
    left_s = end - start
    sanitizer = ["compute-sanitizer", f"--tool={tool}", "--target-processes=all", f"--error-exitcode={_ERROR_STATUS}", "--print-limit=10"]
    sanitizer.append("--launch-timeout=120")  # of Python, which takes longer than the usual 10 s where all cores are busy
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    command = [*sanitizer, "--kernel-name-exclude", _OF_LIBRARIES, sys.executable, "-m", "pytest", *selection(tool), *more, *tests]
    if left_s <= 0:
        print(f"not begun in time: {which}", flush=True)
        return Found(0, 0, None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            printed, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pytest under the tool too, which holds the GPU and the pipe
            printed, _ = process.communicate()
            print(f"not done in time, within {left_s:.0f} s: {which}\n{printed[-_MOST_PRINTED:]}", flush=True)
            return Found(0, 0, None)
    found = read_output(printed)
    if process.returncode not in (0, 1, _ERROR_STATUS):  # pytest did not come to its tests, or not to their end
        found = found._replace(errors=None)
    print(f"{time.monotonic() - start:4.0f} s  {found}  {which}" + ("" if found.clean else f"\n{printed[-_MOST_PRINTED:]}"), flush=True)
    return found


def files_of(tool: str, device: str) -> dict[str, Any]:
    """Results of earlier runs, by file."""
    path = RESULTS / f"sanitizer_{tool}-{device}-1.json"
    return json.loads(path.read_text())[0]["files"] if path.is_file() else {}


def is_of(result: Mapping[str, Any] | None, tests: Sequence[str]) -> bool:
    """Whether an earlier result is of these tests of a file, as far as it says."""
    return result is not None and result.get("tests", len(tests)) == len(tests) and set(result.get("left", ())) <= set(tests)


def keep(
    tool: str,
    device: str,
    runs: Mapping[str, Sequence[tuple[Sequence[str], Found]]],
    command: str,
    collected: Mapping[str, Sequence[str]],
    adds: bool = False,
) -> Path:
    """The record with the runs of these files, of some tests each, under the commits of the runs.

    What runs found adds to an earlier result of the same tests, with `adds`, or takes its place.  A run that did not end has no result: its
    tests are left.  `collected`: the tests of every file.
    """
    here, earlier = origin(command), files_of(tool, device)
    files = {name: result for name, result in earlier.items() if name in collected and name not in runs}
    for name, parts in runs.items():
        ended = [found for _, found in parts if found.errors is not None]
        left = [test for tests, found in parts if found.errors is None for test in tests]
        commits = [here["commit"]] * bool(ended)
        if adds and is_of(earlier.get(name), collected[name]):
            ended.append(Found(*(earlier[name][field] for field in Found._fields)))
            commits = list(dict.fromkeys(earlier[name]["commit"].split(", ") + commits))
        result = together(ended)
        if result.passed + result.failed:
            files[name] = {**result._asdict(), "tests": len(collected[name]), "commit": ", ".join(commits)}
            files[name] |= {"left": left} if left else {}
    missing = [name for name, tests in collected.items() if not is_of(files.get(name), tests) or "left" in files[name]]
    record = {"benchmark": f"sanitizer_{tool}", "device": device, "world_size": 1, "files": files, "missing": missing, **here}
    return write_records(record["benchmark"], device, 1, [record])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of tests/gpu, without test_ and .py (default: those of kernels)")
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--jobs", type=int, default=8, help="runs at a time, on all GPUs together")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for all tests together")
    parser.add_argument("--left", action="store_true", help="only tests without a result in the record, to which --record adds")
    parser.add_argument("--record", action="store_true", help=f"add what was found to {RESULTS}/sanitizer_TOOL-DEVICE-1.json")
    given, more = parser.parse_known_args(arguments)
    if given.record and more:
        parser.error(f"--record with {shlex.join(more)}: a record is of whole files; leave one of the two out")
    device = device_name(torch.device("cuda", 0)) if given.record or given.left else ""
    end = time.monotonic() + given.limit
    command = shlex.join(["python", "tests/programs/sanitize.py", *(sys.argv[1:] if arguments is None else arguments)])
    found: dict[str, Found] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        collected, turns = collect(FILES, given.tool), itertools.cycle(gpus())
        if without := [name for name in given.files if name not in collected]:
            parser.error(f"{', '.join(without)}: no test for {given.tool}, want some of {', '.join(collected)}")
        tests_of = {name: collected[name] for name in given.files or collected}
        if given.left:
            earlier = files_of(given.tool, device)
            tests_of |= {name: earlier[name].get("left", []) for name, tests in tests_of.items() if is_of(earlier.get(name), tests)}
        runs: dict[Future[Found], tuple[str, list[str]]] = {}
        ended: dict[str, list[tuple[list[str], Found]]] = {}
        for name, tests in tests_of.items():
            for part in (tests[first : first + MOST] for first in range(0, len(tests), MOST)):
                runs[pool.submit(run_tests, part, given.tool, more, end, next(turns))] = name, part
        for run in as_completed(runs):
            name, part = runs[run]
            ended.setdefault(name, []).append((part, run.result()))
            if sum(len(part) for part, _ in ended[name]) < len(tests_of[name]):
                continue
            found[name] = result = together([result for _, result in ended[name]])
            print(f"{name}: {result.passed} passed, {result.failed} failed, {result.errors} errors of {given.tool}", flush=True)
            if given.record:
                print("wrote", keep(given.tool, device, {name: ended[name]}, command, collected, given.left), flush=True)
    return 0 if all(result.clean for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
