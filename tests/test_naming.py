"""Names in `src`: no two classes share one, files share a stem only if the folder gives it its meaning, no words of the first versions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import mxep

PACKAGE = Path(mxep.__file__).parent
# Stems that mean one thing, each time of its folder's own concept.
STEMS_OF_FOLDERS = {
    "__init__": "the package of the folder",
    "reference": "the PyTorch references of an operator family, and all of them under one name",
    "triton": "the Triton kernels of an operator family",
    "config": "the options of what the folder builds or runs",
    "layer": "the layer that the folder builds or measures",
    "experts": "the experts' GEMMs that the folder builds or measures",
    "router": "the router: the module, and its operator",
    "permute": "permutation of rows into the experts' order: the block, and its operator",
    "bias": "biases of the grouped GEMM: with autograd, and their operators",
}


PRIVATE_WORDS = re.compile(r"\b(roads?|journey|mail|slabs?|board)\b", re.IGNORECASE)  # of the first versions; the field has other ones
ALIAS = PACKAGE / "ep" / "journey.py"  # keeps that name importable


def classes() -> dict[str, list[str]]:
    """Name of every class of a module, without those inside of classes -> the files that define it."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def stems() -> dict[str, list[str]]:
    """Name of every Python file without its suffix -> where it is."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        found[path.stem].append(str(path.relative_to(PACKAGE)))
    return found


def shared(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: files for name, files in found.items() if len(files) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert shared(classes()) == {}


def test_files_of_one_stem_mean_the_same() -> None:
    assert {stem: files for stem, files in shared(stems()).items() if stem not in STEMS_OF_FOLDERS} == {}


def test_every_exception_is_needed() -> None:
    """An exception without a reason has to be removed."""
    assert set(STEMS_OF_FOLDERS) <= set(shared(stems()))


def test_no_private_words() -> None:
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cu", ".cuh") and path != ALIAS]
    assert len(sources) > 200
    assert [f"{path}: {word[0]}" for path in sources for word in PRIVATE_WORDS.finditer(path.read_text())] == []
