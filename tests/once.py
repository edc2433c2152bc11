"""`once`: what several tests read is made by the first of them, whichever worker it runs in."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What make() returned in the first worker of this test run that asked, kept as JSON: tests of a file may run in several workers."""
    base = factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(make()))
        return json.loads(kept.read_text())
