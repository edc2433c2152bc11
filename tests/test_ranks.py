"""Ranks of tests: they have the environment of the call, though they are forked from a server that is older."""

from __future__ import annotations

import os

import pytest
from tests.ranks import run_ranks


def read_variable(rank: int, world_size: int) -> str | None:
    return os.environ.get("MXEP_CHECK")


def test_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "0"):
        monkeypatch.setenv("MXEP_CHECK", value)
        assert run_ranks(read_variable, 1, backend=None) == [value]
    monkeypatch.delenv("MXEP_CHECK")
    assert run_ranks(read_variable, 1, backend=None) == [None]
