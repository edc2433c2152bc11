"""MX tensors through pickle, torch.save and deepcopy: the same bytes, strides and sharing; files with other contents are refused."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mxep import MXTensor, a2a_dispatch_mxfp8_fwd_hp_bwd, quantize_mx
from mxep.mx.tensor import _rebuild


def saved(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


WAYS: dict[str, Callable] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


def tensors() -> dict[str, MXTensor]:
    rows = torch.randn(40, 96)
    rows[3, 5], rows[7] = torch.nan, 0.0
    records = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, [40], [40], "")
    assert records.qdata.stride() == records.scale.stride() == (112, 1)
    return {
        "plain": quantize_mx(rows),
        "bfloat16": quantize_mx(rows.bfloat16()),
        "three dimensions": quantize_mx(rows.view(5, 8, 96)),
        "no rows": quantize_mx(rows[:0]),
        "records": records,
        "rows of records": MXTensor(records.qdata[3:30:2], records.scale[3:30:2], torch.float32),
        "wants a gradient": quantize_mx(rows).requires_grad_(),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", tensors())
def test_round_trips(way: str, name: str) -> None:
    mx = tensors()[name]
    back = WAYS[way]({"mx": mx, "again": mx, "other": [1, torch.ones(2)]})
    assert back["mx"] is back["again"]
    got = back["mx"]
    assert type(got) is MXTensor
    assert (got.shape, got.dtype, got.requires_grad) == (mx.shape, mx.dtype, mx.requires_grad)
    for a, b in ((got.qdata, mx.qdata), (got.scale, mx.scale)):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert a.stride() == b.stride()
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not b.numel()
    if "records" in name and way != "pickle":  # plain pickle splits storages of plain tensors too
        assert got.qdata.untyped_storage().data_ptr() == got.scale.untyped_storage().data_ptr()
    assert torch.equal(got.dequantize().nan_to_num(), mx.dequantize().nan_to_num())


def test_a_shallow_copy_shares_its_bytes() -> None:
    mx = quantize_mx(torch.randn(4, 64))
    assert copy.copy(mx).qdata.data_ptr() == mx.qdata.data_ptr()


def test_gradients_are_copied_and_graphs_are_not() -> None:
    mx = quantize_mx(torch.randn(4, 64)).requires_grad_()
    (mx * 2).sum().backward()
    assert torch.equal(copy.deepcopy(mx).grad, mx.grad)
    with pytest.raises(RuntimeError, match=r"copy mx\.detach"):
        copy.deepcopy(mx.clone())


def test_a_model_with_one(tmp_path: Path) -> None:
    """As a buffer, in a state_dict, read by a process of its own."""
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mx", quantize_mx(torch.ones(2, 64)))
    torch.save(copy.deepcopy(module).state_dict(), tmp_path / "model.pt")
    read = f"import torch, mxep.mx; print(float(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=True)['mx'].sum()))"
    assert subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True, timeout=120).stdout == "128.0\n"


@pytest.mark.parametrize(
    "parts",
    [
        (torch.zeros(4, 64), torch.zeros(4, 2), torch.float32),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8), torch.float32),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2), torch.float32),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8), torch.int32),
        (torch.zeros((), dtype=torch.uint8), torch.zeros((), dtype=torch.uint8), torch.float32),
        ("bytes", None, torch.float32),
    ],
)
def test_a_file_with_other_parts(parts: tuple) -> None:
    class Forged:
        def __reduce__(self) -> tuple:
            return _rebuild, (*parts, False)

    with pytest.raises((ValueError, pickle.UnpicklingError), match="MXTensor"):
        saved(Forged())
