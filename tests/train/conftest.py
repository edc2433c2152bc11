"""A short text to train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file with the source of the json package."""
    path = tmp_path / "text.py"
    path.write_text(Path(json.__file__).read_text())
    return str(path)
