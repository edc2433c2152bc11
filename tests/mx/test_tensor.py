"""MXTensor: its attributes, operations that keep MX, that dequantise and that raise, and autograd."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from mxep.mx import MXTensor, quantize_mx
from mxep.mx.tensor import dequantize_data, reject_graph_output
from mxep.shapes import record_bytes


def mx(rows: int = 4, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> MXTensor:
    return quantize_mx(torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype))


def test_attributes() -> None:
    t = mx()
    assert (t.shape, t.dtype, t.orig_dtype, t.elem_dtype) == ((4, 64), torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn)
    assert (t.block_size, t.qdata.shape, t.scale.shape) == (32, (4, 64), (4, 2))
    assert t.scales is t.scale
    assert "MXTensor" in repr(t)
    assert t.dequantize().dtype == torch.bfloat16
    assert t.dequantize(torch.float32).dtype == torch.float32
    assert type(t.dequantize()) is torch.Tensor


@pytest.mark.parametrize("op", [torch.Tensor.detach, torch.clone, lambda t: t.to("cpu"), torch.Tensor.contiguous])
def test_kept_in_mx(op) -> None:
    t = mx()
    kept = op(t)
    assert isinstance(kept, MXTensor)
    assert torch.equal(kept.qdata.view(torch.uint8), t.qdata.view(torch.uint8))
    assert torch.equal(kept.scale.view(torch.uint8), t.scale.view(torch.uint8))


@pytest.mark.parametrize(
    "op",
    [
        lambda t: t * 2,
        lambda t: t + torch.ones(4, 64),
        lambda t: torch.ones(4, 64) + t,
        lambda t: t[1:3],
        lambda t: t[torch.tensor([0, 2])],
        lambda t: t.isnan(),
        lambda t: torch.cat([t, t]),
        lambda t: t @ torch.ones(64, 2, dtype=t.dtype),
        lambda t: t.float(),
        lambda t: t.view(2, 2, 64),
        lambda t: t.t(),
        lambda t: torch.nn.functional.silu(t),
        lambda t: t.sum(0),
        lambda t: torch.where(t > 0, t, torch.zeros_like(t)),
        lambda t: t.split(2)[1],
        lambda t: t.new_zeros(3),
    ],
)
def test_other_operations_dequantise(op) -> None:
    t = mx()
    got, want = op(t), op(t.dequantize())
    assert type(got) is torch.Tensor
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("op", [lambda t: t.mul_(2), lambda t: t.zero_(), lambda t: t.copy_(torch.ones(4, 64)), lambda t: t[0].fill_(1)])
def test_writes_are_refused_or_go_to_a_copy(op) -> None:
    t = mx()
    before = t.dequantize().clone()
    try:
        op(t)
    except ValueError as error:
        assert "out-of-place" in str(error)  # noqa: PT017
    assert torch.equal(t.dequantize(), before)


def test_in_place_on_the_whole_tensor_raises() -> None:
    with pytest.raises(ValueError, match="writes into an MXTensor"):
        mx().mul_(2)
    with pytest.raises(ValueError, match="apply_: writes into an MXTensor"):
        mx().apply_(lambda value: value)
    plain = torch.ones(4, 64)
    plain.add_(mx(dtype=torch.float32))
    assert torch.equal(plain, 1 + mx(dtype=torch.float32).dequantize())


def test_a_copy_that_is_asked_for_shares_no_bytes() -> None:
    source = mx()
    copied = source.to("cpu", copy=True)
    assert torch.equal(copied.qdata.view(torch.uint8), source.qdata.view(torch.uint8))
    assert copied.qdata.data_ptr() != source.qdata.data_ptr()
    assert copied.scale.data_ptr() != source.scale.data_ptr()


def test_row_strided_views_of_records() -> None:
    x = torch.randn(5, 96)
    records = torch.ops.mxep.quantize_packed(x, "rceil")
    assert records.stride(0) == record_bytes(96)
    t = MXTensor.from_qdata_and_scales(records[:, :96].view(torch.float8_e4m3fn), records[:, 96:99], torch.float32)
    assert torch.equal(t.dequantize(), quantize_mx(x).dequantize())
    assert t.clone().qdata.is_contiguous()


def test_values_carry_gradients() -> None:
    class Make(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return quantize_mx(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.randn(4, 64, requires_grad=True)
    (Make.apply(x).dequantize() * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 64), 3.0))
    x.grad = None
    t = Make.apply(x)
    (t[:2].sum() + (t * 2).sum()).backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 3.0, 2.0, 2.0])[:, None].expand(4, 64))


def test_as_a_gradient_it_accumulates() -> None:
    class MXGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return quantize_mx(grad)

    x = torch.randn(4, 64, requires_grad=True)
    (MXGrad.apply(x * 1.0).sum() + MXGrad.apply(x * 1.0).sum()).backward()
    assert type(x.grad) is torch.Tensor
    assert torch.equal(x.grad, torch.full((4, 64), 2.0))


def test_pickle_and_deepcopy() -> None:
    t = mx()
    assert torch.equal(copy.deepcopy(t).dequantize(), t.dequantize())
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).dequantize(), t.dequantize())
    parameter = nn.Parameter(t, requires_grad=False)
    for copied in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert isinstance(copied, nn.Parameter)
        assert not copied.requires_grad
        assert torch.equal(copied.dequantize(), t.dequantize())


@pytest.mark.parametrize(
    ("qdata", "scales", "dtype", "says"),
    [
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.uint8), torch.float32, "qdata is"),
        (torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 3, dtype=torch.uint8), torch.float32, "one per 32 values"),
        (torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 2), torch.float32, "scales are"),
        (torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 2, dtype=torch.uint8), torch.int32, "orig_dtype"),
    ],
)
def test_bytes_that_do_not_belong_together(qdata, scales, dtype, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MXTensor.from_qdata_and_scales(qdata, scales, dtype)


def test_plain_values_pass_the_helpers() -> None:
    x = torch.ones(2, 32)
    reject_graph_output(x, "here")
    assert dequantize_data(x) is x
    assert dequantize_data(x, torch.bfloat16).dtype == torch.bfloat16
