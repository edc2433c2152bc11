"""The activation's backward with the MX quantiser in the same pass: CUDA C++, one read of dh and x, one write of each form asked for.

Float32 inside, straight to e4m3 or to x's dtype.  forward.py describes the exact and the fast form; the exact form has the bytes of
`reference.activate_backward`.  rebased.py has the kernel of gradients that an FP8 GEMM reads next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mxep.device import chip_of
from mxep.ops.activation.arguments import INPUTS, check_activation, empty_forms
from mxep.ops.activation.columns import Variant, inputs_of
from mxep.ops.activation.forward import row_sums
from mxep.ops.activation.functions import is_gated, swiglu_of
from mxep.ops.activation.rebased import adds_rows, launch_rebased
from mxep.ops.activation.reference import check_activate_backward
from mxep.ops.grouped_gemm.bias import group_bias_grads
from mxep.ops.grouped_gemm.hopper.rebase_reference import empty_rebased
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel
from mxep.shapes import MX_BLOCK

FILES = (
    *("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "quantize/eight_columns.cuh"),
    *("activation/functions.cuh", "activation/columns.cuh", "activation/backward.cu"),
)


def options_of(variant: Variant, single_row: bool = False) -> dict[str, bool | int]:
    """The constants in front of backward.cu; `single_row`: a lane takes one row."""
    more = variant.scores or "hp" in "".join(variant.forms)
    rows = 1 if single_row or more or torch.float32 in (variant.x, variant.dh) else tiles.ACTIVATION_LANE_ROWS
    shape = {"ROWS": rows, "THREADS": tiles.ACTIVATION_THREADS, "MIN_BLOCKS": tiles.ACTIVATION_MIN_BLOCKS}
    return {**shape, **variant.options()}


@functools.cache
def _kernel(device: int, variant: Variant, single_row: bool) -> Kernel:
    options = options_of(variant, single_row)
    return Kernel("activation_backward", FILES, options, options["THREADS"], chip=chip_of(device))


def activate_backward(
    dh: torch.Tensor,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    scores: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
    granularity: str = "auto",
    offs: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, in one pass, each as its readers want it.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides (copied first unless the last one is 1).
        x, layout, scaling_mode, exact, scores: as in `activate`.
        dx, h: forms of the two results: "none", or some of "mx" (1x32 along the columns), "rebased" (of dx: `rebase_rows` of "mx") and
            "hp" (x's dtype) in this order, joined by "+".
        x_scale: float8_e8m0fnu, a scale for 32 columns, if x is the qdata of MX rows: x has their values, and dh's dtype
            is "hp".
        num_valid_rows, activation, form, granularity: as in `activate`.
        offs: (G,) int32 or int64 END rows of groups, the last one num_valid_rows where that is given: the sums of dx's rows in each group
            are wanted too.

    Returns:
        what was asked for, in this order, contiguous: dx's qdata float8_e4m3fn and scale float8_e8m0fnu, of x's width and in its layout;
        its `RebasedRows` as in `activate`; dx in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype; with scores at
        last their gradient (T,) float32, summed in another order than the reference's; with offs then the sums (G, x's width) float32 in
        a fixed order.  With "rebased", and an H that `adds_rows` takes, they sum float32 values; otherwise the values of "hp", for which
        memory is allocated if they are not asked for.
    """
    check_activation("activate_backward", x, layout, scaling_mode, scores, activation, form, x_scale)
    num_rows, width = x.shape[0], x.shape[1] // (1 + is_gated(activation))
    if dh.shape != (num_rows, width) or dh.dtype not in INPUTS:
        raise ValueError(
            f"activate_backward: dh is {tuple(dh.shape)} {dh.dtype}, want {(num_rows, width)} bfloat16 or float32 for x {tuple(x.shape)}"
        )

    check_activate_backward(dx, h, granularity, offs)
    ends = None if offs is None else offs.to(torch.int32).contiguous()
    adds = ends is not None and "rebased" in dx and adds_rows(width) and x.numel() > 0
    made = dx if ends is None or adds or "hp" in dx else "hp" if dx == "none" else f"{dx}+hp"

    out_like = x if x_scale is None else dh
    dx_parts = empty_forms(made, out_like, num_rows, x.shape[1])
    rebased = empty_rebased(x, num_rows, x.shape[1], granularity != "row") if "rebased" in dx else None
    h_parts = empty_forms(h, out_like, num_rows, width)
    d_scores = None if scores is None else torch.empty((num_rows, width // MX_BLOCK), dtype=torch.float32, device=x.device)
    sums = None

    if x.numel() and (made != "none" or h != "none" or d_scores is not None):
        wide, inputs = inputs_of(dh, x, x_scale, scores)
        given = scores is not None, (made, h), wide, x_scale is not None, num_valid_rows is not None, activation, swiglu_of(tuple(form))
        variant = Variant(width, layout, scaling_mode, exact, out_like.dtype, dh.dtype, *given, adds)
        if rebased is not None:
            results = d_scores, *dx_parts, *h_parts
            sums = launch_rebased(variant, False, inputs, results, rebased, granularity, num_valid_rows, num_rows, ends if adds else None)
        else:
            kernel = _kernel(x.device.index, variant, num_rows < tiles.ACTIVATION_LANE_ROWS)
            lanes = -(-num_rows // kernel.options["ROWS"]) * (width // tiles.LANE_COLUMNS)
            blocks = -(-lanes // kernel.threads) if num_valid_rows is None else min(-(-lanes // kernel.threads), tiles.LOOP_PROGRAMS)
            kernel.launch(x.device.index, blocks, *inputs, d_scores, *dx_parts, *h_parts, num_valid_rows, num_rows)
    values = dx_parts[2]
    if ends is not None and not adds:
        assert values is not None
        (sums,) = group_bias_grads(values, ends)
    scored = None if d_scores is None else row_sums(d_scores, num_valid_rows)
    in_order = *dx_parts[:2], *(rebased or ()), values if "hp" in dx else None, *h_parts, scored, sums
    return [part for part in in_order if part is not None]
