"""The activation's backward with the MX quantiser in the same pass: CUDA C++, one read of dh and x, one write of each form asked for.

Float32 inside, straight to e4m3 or to x's dtype.  forward.py describes the exact and the fast form; the exact form has the bytes of
`reference.activate_backward`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from mxep.device import compute_capability
from mxep.ops.activation.forward import INPUTS, as_rows, check_activation, empty_forms, row_sums
from mxep.ops.activation.functions import ACTIVATIONS, SwiGLU, is_gated, swiglu_of
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Kernel
from mxep.recipe import SCALING_MODES
from mxep.shapes import MX_BLOCK

FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "activation/functions.cuh", "activation/backward.cu")
_LOAD_BYTES = 16  # what a lane loads at a time where every row starts at a multiple of it
_LANE_COLUMNS = 8


def _bits(value: float) -> int:
    """Of a float32, as C++ takes a constant that is a float. May be negative.

    >>> _bits(1.0) == 0x3F800000, _bits(0.0), _bits(float("inf")) == 0x7F800000
    (True, 0, True)
    """
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def options_of(
    width: int,
    layout: str,
    scaling_mode: str,
    exact: bool,
    x: torch.dtype = torch.bfloat16,
    dh: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    scores: bool = False,
    forms: tuple[str, str] = ("mx", "mx"),
    wide: bool = True,
    single_row: bool = False,
    x_mx: bool = False,
    num_valid_rows: bool = False,
    activation: str = "swiglu",
    how: SwiGLU = SwiGLU(),  # noqa: B008  immutable
) -> dict[str, bool | int]:
    """The constants in front of backward.cu for one variant; `single_row`: a lane takes one row, `wide`: 16-byte loads,
    `x_mx`: x is MX, and `x` the dtype of what comes out in high precision."""
    more = bias is not None or scores or "hp" in "".join(forms)
    rows = 1 if single_row or more or torch.float32 in (x, dh) else tiles.ACTIVATION_LANE_ROWS
    bias_kind = 0 if bias is None else 1 + INPUTS.index(bias)
    shape = {"H": width, "ROWS": rows, "THREADS": tiles.ACTIVATION_THREADS, "MIN_BLOCKS": tiles.ACTIVATION_MIN_BLOCKS, "BIAS": bias_kind}
    kind = {"ACTIVATION": ACTIVATIONS.index(activation), "INTERLEAVED": layout == "interleaved" and is_gated(activation)}
    numbers = {"SCALING": SCALING_MODES.index(scaling_mode), "EXACT": exact, "SCORES": scores}
    inputs = {"X_FLOAT": x == torch.float32, "DH_FLOAT": dh == torch.float32, "X_MX": x_mx, "WIDE": wide, "NUM_VALID": num_valid_rows}
    form = {name.upper(): _bits(value) for name, value in how._asdict().items()}
    outputs = {f"{name}_{what.upper()}": what in form for name, form in zip(("DX", "H"), forms, strict=True) for what in ("mx", "hp")}
    return {**shape, **kind, **numbers, **inputs, **form, **outputs}


@functools.cache
def _kernel(device: int, *variant: object) -> Kernel:
    major, minor = compute_capability(device)
    options = options_of(*variant)  # type: ignore[arg-type]
    return Kernel("activation_backward", FILES, options, options["THREADS"], chip=f"sm_{major}{minor}")


def _row_bytes(x: torch.Tensor) -> int:
    return x.stride(0) * x.element_size()


def activate_backward(
    dh: torch.Tensor,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    dx: str = "mx",
    h: str = "mx",
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, in one pass, each as its readers want it.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides (copied first unless the last one is 1).
        x, layout, scaling_mode, exact, bias, offs, scores: as in `activate`.
        dx, h: forms of the two results: "none", "mx" (1x32 along the columns), "hp" (x's dtype) or "mx+hp".
        x_scale: float8_e8m0fnu, a scale for 32 columns, if x is the qdata of MX rows: x has their values, and dh's dtype
            is "hp".
        num_valid_rows, activation, form: as in `activate`.

    Returns:
        what was asked for, in this order, contiguous: dx's qdata float8_e4m3fn and scale float8_e8m0fnu, of x's width and in its layout;
        dx in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype; with scores at last their gradient (T,) float32,
        summed in another order than the reference's.
    """
    bias, offs = check_activation("activate_backward", x, layout, scaling_mode, bias, offs, scores, activation, form, x_scale)
    num_rows, width = x.shape[0], x.shape[1] // (1 + is_gated(activation))
    if dh.shape != (num_rows, width) or dh.dtype not in INPUTS:
        raise ValueError(
            f"activate_backward: dh is {tuple(dh.shape)} {dh.dtype}, want {(num_rows, width)} bfloat16 or float32 for x {tuple(x.shape)}"
        )

    out_like = x if x_scale is None else dh
    dx_parts = empty_forms("activate_backward: dx", dx, out_like, num_rows, x.shape[1])
    h_parts = empty_forms("activate_backward: h", h, out_like, num_rows, width)
    d_scores = None if scores is None else torch.empty((num_rows, width // MX_BLOCK), dtype=torch.float32, device=x.device)

    if x.numel() and any(part is not None for part in (*dx_parts, *h_parts, d_scores)):
        rows, grads, device = as_rows(x, "concatenated"), as_rows(dh, "concatenated"), x.device.index
        starts = rows.data_ptr() | _row_bytes(rows) | grads.data_ptr() | _row_bytes(grads) | (0 if bias is None else bias.data_ptr())
        single_row = num_rows < tiles.ACTIVATION_LANE_ROWS
        if x_scale is not None:  # codes are read 8 at a time at least
            rows, x_scale = (rows if starts % _LOAD_BYTES == 0 else rows.clone(memory_format=torch.contiguous_format)), x_scale.contiguous()
        kinds = (out_like.dtype, dh.dtype, None if bias is None else bias.dtype, scores is not None, (dx, h))
        given = starts % _LOAD_BYTES == 0, single_row, x_scale is not None, num_valid_rows is not None, activation, swiglu_of(tuple(form))
        kernel = _kernel(device, width, layout, scaling_mode, exact, *kinds, *given)
        lanes = -(-num_rows // kernel.options["ROWS"]) * (width // _LANE_COLUMNS)
        inputs = (grads, _row_bytes(grads), rows, _row_bytes(rows), x_scale, bias, offs, scores)
        groups = 0 if offs is None else offs.shape[0]
        blocks = -(-lanes // kernel.threads) if num_valid_rows is None else min(-(-lanes // kernel.threads), tiles.LOOP_PROGRAMS)
        kernel.launch(device, blocks, *inputs, d_scores, *dx_parts, *h_parts, num_valid_rows, num_rows, groups)
    out = [part for part in (*dx_parts, *h_parts) if part is not None]
    return out if d_scores is None else [*out, row_sums(d_scores, num_valid_rows)]
