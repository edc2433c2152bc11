"""The order in which tests start: slow ones first, on every worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.conftest import slow_first


def named(name: str) -> pytest.Item:
    """A test, slow if it is in capitals; those of X, Y and Z are in one file."""
    file = "xyz" if name in "XYZ" else name
    return SimpleNamespace(name=name, path=file, get_closest_marker=lambda marker: name.isupper() or None)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("tests", "workers", "shares"),
    [
        ("abCdEfGh", 1, ["CEGabdfh"]),
        ("abCdEfGh", 2, ["CGab", "Edfh"]),
        ("abCdEfg", 3, ["Ca", "Eb", "dfg"]),
        ("aB", 4, ["", "", "B", "a"]),
        ("ABCDefghi", 3, ["ADe", "Bfg", "Chi"]),
        ("AXYZBcde", 2, ["ABcd", "XYZe"]),
        ("XYZa", 2, ["XY", "Za"]),
        ("", 2, ["", ""]),
    ],
)
def test_every_worker_begins_with_slow_tests(tests: str, workers: int, shares: list[str]) -> None:
    order, rest, found = "".join(item.name for item in slow_first([*map(named, tests)], workers)), workers, []
    assert sorted(order) == sorted(tests)
    while rest:  # as pytest-xdist cuts them
        found.append(order[: len(order) // rest])
        order, rest = order[len(order) // rest :], rest - 1
    assert found == shares
