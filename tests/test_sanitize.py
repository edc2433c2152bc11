"""tests/programs/sanitize.py with a stub of compute-sanitizer: it must not call a run clean that is not."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mxep.bench.records import write_records

FILE = Path(__file__).parent / "programs" / "sanitize.py"


@pytest.fixture
def sanitize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program; `compute-sanitizer` prints the file `says` and ends with status 0."""
    spec = importlib.util.spec_from_file_location("sanitize", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\nimport pathlib\nprint(pathlib.Path({str(tmp_path / 'says')!r}).read_text())\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(module, "MOST", 1)
    return module


@pytest.mark.parametrize(
    ("says", "clean"),
    [
        ("7 passed, 2 deselected in 3.21s\n========= ERROR SUMMARY: 0 errors", True),
        ("7 passed in 3.21s\n========= ERROR SUMMARY: 2 errors", False),
        ("7 passed in 3.21s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("7 passed in 3.21s\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", False),
        ("1 failed, 7 passed in 3.21s\n========= ERROR SUMMARY: 0 errors", False),
        ("7 passed, 1 error in 3.21s\n========= ERROR SUMMARY: 0 errors", False),
        ("9 skipped in 3.21s\n========= ERROR SUMMARY: 0 errors", False),
        ("7 passed in 3.21s\n========= Error: Target application terminated before first instrumented API call", False),
    ],
)
def test_only_what_passed_without_errors_is_clean(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, clean: bool
) -> None:
    (tmp_path / "says").write_text(says)
    monkeypatch.setattr(sanitize, "collect", lambda names, tool: {name: ["a test", "another one"] for name in names})
    assert sanitize.main(["p2p", "expert_rows", "--jobs", "2"]) == (0 if clean else 1)


@pytest.fixture
def recorded(sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict]:
    """The record of a tool on a GPU, in a folder of its own; the commit of a run is its command."""
    monkeypatch.setattr(sanitize, "RESULTS", tmp_path)
    monkeypatch.setattr(sanitize, "write_records", functools.partial(write_records, folder=tmp_path))
    monkeypatch.setattr(sanitize, "FILES", ("quantize", "p2p"))
    monkeypatch.setattr(sanitize, "origin", lambda command: {"commit": command})
    return lambda tool="memcheck": json.loads((tmp_path / f"sanitizer_{tool}-h200-1.json").read_text())[0]


def test_runs_of_some_files_add_up_to_a_record(
    sanitize: ModuleType, recorded: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the missing files; each tool has a record of its own."""
    silent, skipped, ended = sanitize.Found(3, 0, None), sanitize.Found(0, 0, 0), sanitize.Found(4, 0, 0)

    def kept(found: dict, commit: str, tool: str = "memcheck") -> tuple[dict[str, str], list[str]]:
        runs, collected = {name: [(["a test"], result)] for name, result in found.items()}, {name: ["a test"] for name in sanitize.FILES}
        sanitize.keep(tool, "h200", runs, commit, collected)
        record = recorded(tool)
        assert all({**result, "commit": ""} == {**ended._asdict(), "tests": 1, "commit": ""} for result in record["files"].values())
        return {name: result["commit"] for name, result in record["files"].items()}, record["missing"]

    assert kept({"quantize": ended}, "a") == ({"quantize": "a"}, ["p2p"])
    assert kept({"quantize": ended}, "a", "racecheck") == ({"quantize": "a"}, ["p2p"])
    assert kept({"p2p": silent}, "b") == ({"quantize": "a"}, ["p2p"])
    assert kept({"p2p": skipped}, "b") == ({"quantize": "a"}, ["p2p"])
    assert kept({"p2p": ended}, "c") == ({"quantize": "a", "p2p": "c"}, [])
    assert kept({"quantize": silent}, "d") == ({"p2p": "c"}, ["quantize"]), "no result of the current file is known"
    monkeypatch.setattr(sanitize, "FILES", ("p2p", "rows"))
    assert kept({"rows": ended}, "e") == ({"p2p": "c", "rows": "e"}, []), "a file that is no longer listed has no result"


def test_runs_of_what_is_left_add_up_to_a_file(
    sanitize: ModuleType, recorded: Callable[..., dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its three tests end in the first run; a second one runs the third, and the file that had no run."""
    ran: list[str] = []

    def run_tests(tests: list[str], *_: object) -> object:
        ran.extend(tests)
        return sanitize.Found(1, 0, None if tests == ["c"] and len(ran) <= 3 else 0)

    monkeypatch.setattr(
        sanitize, "collect", lambda names, tool: {name: {"quantize": ["a", "b", "c"], "p2p": ["d"]}[name] for name in names}
    )
    monkeypatch.setattr(sanitize, "run_tests", run_tests)
    monkeypatch.setattr(sanitize, "device_name", lambda _: "h200")
    assert sanitize.main(["quantize", "--record", "--jobs", "1"]) == 1
    first = "python tests/programs/sanitize.py quantize --record --jobs 1"
    assert recorded()["files"] == {"quantize": {"passed": 2, "failed": 0, "errors": 0, "tests": 3, "commit": first, "left": ["c"]}}
    assert recorded()["missing"] == ["quantize", "p2p"]
    ran[:] = ["", "", ""]
    assert sanitize.main(["quantize", "p2p", "--record", "--left", "--jobs", "1"]) == 0
    second = "python tests/programs/sanitize.py quantize p2p --record --left --jobs 1"
    assert ran[3:] == ["c", "d"], "each in a run of its own, as MOST says"
    assert recorded()["files"]["quantize"] == {"passed": 3, "failed": 0, "errors": 0, "tests": 3, "commit": f"{first}, {second}"}
    assert recorded()["missing"] == []
    assert sanitize.main(["quantize", "p2p", "--record", "--left"]) == 0
    assert len(ran) == 5, "nothing is left"
    monkeypatch.setattr(sanitize, "collect", lambda names, tool: {"quantize": ["a", "b", "c", "new"], "p2p": ["d"]})
    assert sanitize.main(["--record", "--left"]) == 0
    assert sorted(ran[5:]) == ["a", "b", "c", "new"], "the file has other tests now"
    assert recorded()["files"]["quantize"]["passed"] == 4
    with pytest.raises(SystemExit):
        sanitize.main(["fp8_errors"])


def test_tests_that_pytest_did_not_come_to_have_not_run(sanitize: ModuleType, tmp_path: Path) -> None:
    """The tool has an error summary then too."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!{sys.executable}\nprint('9 skipped in 3.21s\\n========= ERROR SUMMARY: 0 errors')\nraise SystemExit(4)\n")
    assert sanitize.run_tests(["a test"], "memcheck", [], time.monotonic() + 60, "").errors is None


def test_tests_beyond_the_limit_are_ended(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Also pytest below the tool, which holds the pipe; tests that have not begun do not begin. What ended before has its result."""
    child = "import time; print('begun', flush=True); time.sleep(600)"
    (tmp_path / "compute-sanitizer").write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        f"if 'quick' in sys.argv:\n    print('7 passed in 3.21s\\n========= ERROR SUMMARY: 0 errors')\n"
        f"else:\n    subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    monkeypatch.setattr(sanitize, "collect", lambda names, tool: {"fast": ["quick"], "slow": ["a test", "another one"]})
    start = time.monotonic()
    assert sanitize.main(["fast", "slow", "--jobs", "1", "--limit", "3"]) == 1
    assert time.monotonic() - start < 60
    printed = capsys.readouterr().out
    assert "fast: 7 passed, 0 failed, 0 errors of memcheck" in printed
    assert "s: a test and 0 more\nbegun" in printed
    assert "not begun in time: another one and 0 more" in printed
    assert "slow: 0 passed, 0 failed, None errors of memcheck" in printed


def test_a_file_does_not_wait_for_another_one(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are taken as soon as its own tests have ended: a run that is stopped has those."""
    one_has_ended, together = threading.Event(), sanitize.together

    def run_tests(tests: list[str], *_: object) -> object:
        return sanitize.Found(7, 0, 0 if tests == ["quick"] or one_has_ended.wait(60) else None)

    def taken(found: list) -> object:
        one_has_ended.set()
        return together(found)

    monkeypatch.setattr(sanitize, "collect", lambda names, tool: {"slow": ["a test", "another one"], "fast": ["quick"]})
    monkeypatch.setattr(sanitize, "run_tests", run_tests)
    monkeypatch.setattr(sanitize, "together", taken)
    assert sanitize.main(["slow", "fast", "--jobs", "3"]) == 0


def test_a_record_is_of_whole_files(sanitize: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["p2p", "--record", "-k", "one_test"])
    assert "a record is of whole files" in capsys.readouterr().err


def test_every_test_is_collected_once(sanitize: ModuleType) -> None:
    tests = list(itertools.chain(*sanitize.collect(["expert_rows", "expert_chunks"], "memcheck").values()))
    assert len(set(tests)) == len(tests) > 100
    assert not [test for test in tests if "graph" in test or "host_sync" in test]
    with pytest.raises(RuntimeError, match="tests could not be collected"):
        sanitize.collect(["nothing_of_that_name"], "memcheck")


def test_racecheck_leaves_out_tests_of_much_data(sanitize: ModuleType) -> None:
    memcheck, racecheck = (sanitize.collect(sanitize.FILES, tool) for tool in ("memcheck", "racecheck"))
    assert tuple(memcheck) == sanitize.FILES
    assert set(memcheck) - set(racecheck) == {"fp8_errors"}
    assert all(set(tests) <= set(memcheck[name]) for name, tests in racecheck.items())
    assert any("8192-2048" in test for test in memcheck["fp8_grouped_mm"])
    assert not any("8192-2048" in test for test in racecheck["fp8_grouped_mm"])


def test_the_files_exist(sanitize: ModuleType) -> None:
    assert all((FILE.parents[1] / "gpu" / f"test_{name}.py").is_file() for name in sanitize.FILES)
    assert doctest.testmod(sanitize).failed == 0
