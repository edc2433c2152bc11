"""Programs written for mxep 0.1 work: every public name of c13768f still exists and takes the same parameters.

public_names_0_1.json has the parameters of what users call; null for what they only receive, for constants, and for enums, whose parameters
are Python's.
"""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from pathlib import Path

import pytest

NAMES: dict[str, dict[str, list[str] | None]] = json.loads((Path(__file__).parent / "public_names_0_1.json").read_text())


def problems_of(old: list[str], new: inspect.Signature) -> list[str]:
    """Why a call that was right with the parameters `old` may fail now, or mean something else."""
    found = [f"{name} is gone" for name in old if name not in new.parameters]
    kept = [name for name in new.parameters if name in old]
    if not found and kept != old:
        found.append(f"the order was {old}, now it is {kept}")
    for name, parameter in new.parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in old and parameter.default is parameter.empty and not variadic:
            found.append(f"{name} is new and has no default")
    by_position = [
        name for name, parameter in new.parameters.items() if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    known = [name for name in old if name in by_position]
    if by_position[: len(known)] != known:
        found.append(f"by position the parameters were {known}, now they are {by_position}")
    return found


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name_exists(module: str, name: str) -> None:
    if module.endswith("transformers_5"):
        pytest.importorskip("transformers", minversion="5.23")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        now = getattr(importlib.import_module(module), name)
    old = NAMES[module][name]
    assert old is None or not problems_of(old, inspect.signature(now))


def test_the_check_finds_changes_that_break_a_caller() -> None:
    def gone(a): ...
    def swapped(b, a): ...
    def required(a, b, c): ...
    def between(a, c=1, b=2): ...
    def fine(a, b, c=1, *rest, **more): ...

    for broken in (gone, swapped, required, between):
        assert problems_of(["a", "b"], inspect.signature(broken)), broken
    assert problems_of(["a", "b"], inspect.signature(fine)) == []
