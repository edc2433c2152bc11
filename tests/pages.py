"""Reads README and the pages of docs/ for the tests: fenced blocks, tables, names; and runs the scripts of docs/."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(DOCS.rglob("*.md"))]
PAGE_IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@functools.cache
def script(name: str) -> ModuleType:
    """A Python file of docs/ as a module."""
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


def blocks(page: Path, language: str) -> list[tuple[int, str, str]]:
    """(line, rest of the info string, text) of every fenced block of a language."""
    found, lines, start = [], page.read_text().splitlines(), None
    info = ""
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if start is None:
            start, info = number, line.removeprefix("```").strip()
            continue
        if re.fullmatch(rf"{language}\b.*", info):
            found.append((start, info.removeprefix(language).strip(), "\n".join(lines[start : number - 1]) + "\n"))
        start = None
    assert start is None, f"{page.name}:{start}: this block is not closed"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def table(page: Path, *columns: str) -> list[list[str]]:
    """Rows of the first table whose header starts with these columns."""
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("|") and cells(line)[: len(columns)] == list(columns):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            assert rows, f"{page.name}: the table {columns} is empty"
            return rows
    raise AssertionError(f"{page.name}: no table starts with {columns}")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def plain(cell: str) -> str:
    """The code of a cell that opens with code."""
    match = re.match(r"`([^`]*)`", cell)
    return match[1] if match else cell


def resolves(name: str) -> bool:
    """Whether a dotted name imports: the longest module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[cut:])
    return False
