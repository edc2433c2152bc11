"""Every launcher has a reference in `mxep.reference` with the same signature, and the other way round; importing them loads no Triton."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from mxep import operators, reference
from mxep.ops import kernels


def test_the_same_names():
    assert sorted(kernels.__all__) == sorted(reference.__all__) == sorted(operators.LAUNCHERS)
    exchanges = {"exchange_rows", "exchange_quantized", "exchange_dequantized"}
    assert set(operators.OPERATORS) == set(kernels.__all__) | exchanges


@pytest.mark.parametrize("name", reference.__all__)
def test_the_same_signature(name: str):
    pytest.importorskip("triton")
    assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name))


def test_importing_loads_no_triton():
    code = "import sys, mxep, mxep.ops.kernels; assert 'triton' not in sys.modules; assert not hasattr(mxep.ops.kernels, 'nothing')"
    subprocess.run([sys.executable, "-c", code], check=True)
