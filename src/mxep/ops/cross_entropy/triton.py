"""Cross-entropy of rows of logits on the GPU: one program a row, in float32, whatever the vocabulary's size.

Memory bounds it: a row is read twice, the second time backwards, so that what was read last is still in the L2 cache, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxep.ops.cross_entropy import reference
from mxep.ops.cross_entropy.reference import IGNORE, check_labelled_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import next_power_of_2


@triton.jit
def _cross_entropy_kernel(
    logits,  # (T, V) bf16 or float32, contiguous
    labels,  # (T,) int64, contiguous
    losses,  # (T,) float32
    V,
    IGNORE: tl.constexpr,
    GRADIENT: tl.constexpr,  # whether it overwrites the logits
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * V
    label = tl.load(labels + row)
    column = tl.arange(0, COLUMNS)
    if label == IGNORE:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, COLUMNS):
                tl.store(line + start + column, tl.zeros((COLUMNS,), logits.dtype.element_ty), mask=start + column < V)
    else:
        known = (label >= 0) & (label < V)
        # Before any of the sums, whose barriers keep it in front of the writes.
        chosen = tl.load(line + label, mask=known, other=float("nan")).to(tl.float32)

        # Each lane's maximum and sum of exp(value - maximum); the lowest float32 means none, since -inf would produce NaN.
        greatest = tl.full((COLUMNS,), -3.4028234663852886e38, tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, V, COLUMNS):
            value = tl.load(line + start + column, mask=start + column < V, other=float("-inf")).to(tl.float32)  # (COLUMNS,)
            rise = value - greatest
            factor = tl.exp(-tl.abs(rise))
            total = tl.where(rise > 0, total * factor + 1.0, total + factor)
            greatest = tl.maximum(greatest, value)
        maximum = tl.max(greatest, axis=0)
        whole = tl.sum(total * tl.exp(greatest - maximum), axis=0)
        tl.store(losses + row, maximum - chosen + tl.log(whole))

        if GRADIENT:
            share = tl.where(known, 1.0 / whole, float("nan"))
            last = (V - 1) // COLUMNS * COLUMNS
            for back in range(0, V, COLUMNS):
                here = last - back + column
                value = tl.load(line + here, mask=here < V, other=float("-inf")).to(tl.float32)  # (COLUMNS,)
                gradient = tl.exp(value - maximum) * share - tl.where(here == label, 1.0, 0.0)
                tl.store(line + here, gradient.to(logits.dtype.element_ty), mask=here < V)


def _launch(logits: torch.Tensor, labels: torch.Tensor, gradient: bool) -> torch.Tensor:
    losses = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    if losses.numel():
        width = logits.shape[1]
        launch(
            _cross_entropy_kernel,
            losses.shape[0],
            {
                "logits": logits,
                "labels": labels.contiguous(),
                "losses": losses,
                "V": width,
                "IGNORE": IGNORE,
                "GRADIENT": gradient,
                "COLUMNS": min(next_power_of_2(width), tiles.LOSS_COLUMNS),
            },
            num_warps=tiles.LOSS_WARPS,
        )
    return losses


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each row's cross-entropy in nats, 0 where its label is IGNORE. The reference also computes float64.

    Args:
        logits: (T, V) bf16, float32 or float64, contiguous.  labels: (T,) int64, each 0 to V - 1 or IGNORE; a row with any other one has
            the loss NaN, where the reference raises: to see it here would be a host sync.

    Returns:
        (T,) float32, float64 where logits are.
    """
    check_labelled_rows("cross_entropy", logits, labels)
    if logits.dtype == torch.float64:
        return reference.cross_entropy(logits, labels)
    return _launch(logits, labels, gradient=False)


def cross_entropy_to_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`cross_entropy`; its gradient overwrites the logits.

    A row whose label is neither a column nor IGNORE is NaN from end to end, and nothing is written outside of it.
    """
    check_labelled_rows("cross_entropy_to_gradient", logits, labels)
    if logits.dtype == torch.float64:
        return reference.cross_entropy_to_gradient(logits, labels)
    return _launch(logits, labels, gradient=True)
