"""Fixtures of the tests on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checking mode, whose checks read values on the host and compare them between ranks."""
    monkeypatch.setenv("MXEP_CHECK", "0")


@pytest.fixture
def on_the_gpu() -> Iterator[None]:
    """Tensors are made on the GPU."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
