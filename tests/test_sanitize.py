"""tests/programs/sanitize.py with a compute-sanitizer that only says what it is asked to: it must not call anything clean that is not."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import json
import sys
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
    monkeypatch.setattr(module, "MOST", 40)
    return module


@pytest.mark.parametrize(
    ("says", "clean"),
    [
        ("7 passed, 2 deselected in 3.21s\n========= ERROR SUMMARY: 0 errors", True),
        ("7 passed in 3.21s\n========= ERROR SUMMARY: 2 errors", False),
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
    monkeypatch.setattr(sanitize, "collect", lambda names: {name: [["a test"], ["another one"]] for name in names})
    assert sanitize.main(["p2p", "expert_rows", "--jobs", "2"]) == (0 if clean else 1)


def test_runs_of_some_files_add_up_to_a_record(sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing reads it before every file ran to its end."""
    monkeypatch.setattr(sanitize, "RESULTS", tmp_path)
    monkeypatch.setattr(sanitize, "write_records", functools.partial(write_records, folder=tmp_path))
    monkeypatch.setattr(sanitize, "FILES", ("push", "mail"))
    monkeypatch.setattr(sanitize, "origin", lambda command: {"commit": command})
    silent, ended = sanitize.Found(3, 0, None), sanitize.Found(4, 0, 0)
    whole = tmp_path / "sanitizer_memcheck-h200-1.json"
    assert sanitize.keep("memcheck", "h200", {"push": ended}, "a") == whole.with_suffix(".json.part")
    assert sanitize.keep("memcheck", "h200", {"mail": silent}, "b") == whole.with_suffix(".json.part")
    assert not whole.exists()
    assert sanitize.keep("memcheck", "h200", {"mail": ended}, "c") == whole
    (record,) = json.loads(whole.read_text())
    assert record["files"] == {name: {**ended._asdict(), "commit": commit} for name, commit in (("push", "a"), ("mail", "c"))}
    monkeypatch.setattr(sanitize, "FILES", ("mail", "places"))
    assert sanitize.keep("memcheck", "h200", {"places": ended}, "d") == whole
    assert set(json.loads(whole.read_text())[0]["files"]) == {"mail", "places"}, "the other file's tests are gone"


def test_a_record_is_of_whole_files(sanitize: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(["p2p", "--record", "-k", "one_test"])
    assert "a record is of whole files" in capsys.readouterr().err


def test_every_test_is_in_one_part(sanitize: ModuleType) -> None:
    parts = sanitize.collect(["expert_rows", "expert_chunks"])
    tests = [test for of_file in parts.values() for part in of_file for test in part]
    assert len(set(tests)) == len(tests) > 100
    assert all(0 < len(part) <= 40 for of_file in parts.values() for part in of_file)
    assert not [test for test in tests if "graph" in test or "host_sync" in test]
    with pytest.raises(RuntimeError, match="tests could not be collected"):
        sanitize.collect(["nothing_of_that_name"])


def test_the_files_are_there(sanitize: ModuleType) -> None:
    assert all((FILE.parents[1] / "gpu" / f"test_{name}.py").is_file() for name in sanitize.FILES)
    assert doctest.testmod(sanitize).failed == 0
