"""A short text to train on, and an environment that is no rank's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file with the source of two modules."""
    path = tmp_path / "text.py"
    path.write_text(Path(json.__file__).read_text() + Path(subprocess.__file__).read_text())
    return str(path)


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun's variables: what a test starts would take itself for a rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
