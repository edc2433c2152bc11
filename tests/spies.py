"""Functions whose calls are recorded and let through."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest


def spy_on(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> mock.Mock:
    """Replace a function of a module or class by a mock that calls it."""
    spy = mock.Mock(wraps=getattr(owner, name))
    monkeypatch.setattr(owner, name, spy)
    return spy
