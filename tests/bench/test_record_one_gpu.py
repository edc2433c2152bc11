"""benchmarks/record_one_gpu.py: parts share GPUs out, those of one record never run at once, and limits end a part with its processes."""

from __future__ import annotations

import os
import runpy
import shlex
import time
from pathlib import Path

import pytest

import mxep.bench.registry

program = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "record_one_gpu.py"))
main, PARTS = program["main"], program["PARTS"]


def python(*lines: str) -> str:
    return shlex.join(["-c", "; ".join(("import os, pathlib, subprocess, sys, time", *lines))])


def test_every_benchmark_of_one_gpu_is_a_part() -> None:
    of_one = {name for name, benchmark in mxep.bench.registry.BENCHMARKS.items() if not benchmark.distributed}
    assert of_one <= set(PARTS)


def test_parts_run_on_their_gpu_and_fail_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"good": python("print(os.environ['CUDA_VISIBLE_DEVICES'])"), "bad": python("print('a reason')", "sys.exit(3)")}
    assert main(["good", "--gpus", "5", "--logs", str(tmp_path)], commands) == 0
    assert (tmp_path / "good.log").read_text() == "5\n"
    assert main(["--gpus", "5,6", "--logs", str(tmp_path)], commands) == 1
    summary = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[-2:]}
    assert " ok " in summary["good"]
    assert "status 3" in summary["bad"]
    assert summary["bad"].endswith("a reason")
    with pytest.raises(SystemExit):
        main(["absent"], commands)
    assert "no part absent, want some of good, bad" in capsys.readouterr().err


def test_a_part_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    """It would otherwise be missing in the summary, with status 0; a part of the same record does not wait for it."""
    body = python("pass")
    with pytest.raises(FileNotFoundError, match="log"):
        main(["--gpus", "0,1", "--logs", str(tmp_path)], {"no/folder": body, "good": body})
    assert (tmp_path / "good.log").exists()


def test_a_limit_ends_a_part_with_its_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    commands = {
        "long": python(f"child = {child}", "print(child.pid, flush=True)", "time.sleep(600)"),
        "late": python("print('not reached')"),
    }
    assert main(["long=1.5", "late", "--seconds", "1", "--logs", str(tmp_path)], commands) == 1
    long, late = capsys.readouterr().out.splitlines()[-2:]
    assert long.split()[:3] == ["long", "cut", "off"]
    assert late.endswith("no time left")
    assert not (tmp_path / "late.log").exists()
    pid = int((tmp_path / "long.log").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("the part's own process runs on")


def test_parts_of_one_record_do_not_run_at_once(tmp_path: Path) -> None:
    assert program["record_of"](PARTS["train-16b"]) == program["record_of"](PARTS["train-qwen3"]) != program["record_of"](PARTS["peers"])
    running = "first = pathlib.Path('running')"
    body = python(f"os.chdir({str(tmp_path)!r})", running, "first.touch(exist_ok=False)", "time.sleep(0.3)", "first.unlink()")
    assert main(["--gpus", "0,1", "--logs", str(tmp_path)], {"a": body, "b": body}) == 0
    apart = {name: body + f" {name}" for name in "ab"}  # other words, so another record: the second finds the first one's file
    assert main(["--gpus", "0,1", "--logs", str(tmp_path)], apart) == 1
