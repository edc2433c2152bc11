"""tests/programs/count_code.py and tests/programs/trace_forward.py: lines that count as code, and changes of file."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_of_count_code() -> None:
    results = doctest.testmod(program("count_code"))
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ('"""docstring\nof two lines"""\n', 0),
        ('text = """two\nlines"""\n', 2),
        ("call(\n    a,  # first\n\n    # second\n    b,\n)\n", 4),
        ('class A:\n    """docstring"""\n\n    async def f(self):\n        """docstring"""\n        "no docstring"\n', 3),
    ],
)
def test_python_lines(source: str, lines: int) -> None:
    assert program("count_code").python_lines(source) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("", 0),
        ("// a\nint a; // b\n", 1),
        ("/* a\n b */\nint /* c */ a;\n", 1),
        ("char c = '\"'; // not a string\n// comment\n", 1),
        ('const char* s = "/* no comment";\nint a;\n', 2),
        ('const char* s = "\\"//";\n', 1),
    ],
)
def test_cuda_lines(source: str, lines: int) -> None:
    assert program("count_code").cuda_lines(source) == lines


def test_count_against_a_commit(tmp_path: Path) -> None:
    counting = program("count_code")
    part = tmp_path / "src" / "package" / "part"
    part.mkdir(parents=True)
    (part / "a.py").write_text("a = 1\nb = 2\n")
    (part / "kernel.cu").write_text("int a;\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (part / "a.py").write_text("a = 1\n")
    (tmp_path / "src" / "package" / "b.py").write_text("c = 3\n")
    now, before = counting.count(counting.files_now(tmp_path / "src")), counting.count(counting.files_at("HEAD", tmp_path / "src"))
    assert now == {"package/part": 2, "package/b": 1}
    assert before == {"package/part": 3}
    assert [line.split() for line in counting.table(now, before)] == [
        ["1", "0", "new", "package/b"],
        ["2", "3", "-33.3%", "package/part"],
        ["3", "3", "+0.0%", "total"],
    ]


def test_trace_sees_calls_and_returns() -> None:
    from mxep.checks import check_mode
    from mxep.recipe import ScaleCalculationMode

    tracing = program("trace_forward")
    found = tracing.trace(lambda: check_mode("here", ScaleCalculationMode.RCEIL, 32))
    assert found.files == ["checks.py", "recipe.py"]
    assert found.changes == [
        ("checks.py:check_mode", "recipe.py:check_block_size"),
        ("recipe.py:check_block_size", "checks.py:check_mode"),
        ("checks.py:check_mode", "recipe.py:scaling_mode_name"),
        ("recipe.py:scaling_mode_name", "checks.py:check_mode"),
    ]


def test_the_fused_forward_is_traced() -> None:
    found = program("trace_forward").trace_forward()
    assert {"fused/layer.py", "fused/autograd.py", "grouped_mm/products.py"} <= set(found.files)
    assert len(found.files) <= 24
    assert len(found.changes) <= 120
