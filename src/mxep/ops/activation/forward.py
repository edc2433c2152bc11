"""The activation with the MX quantiser in the same pass: one read of the inputs, one write of the bytes. backward.py has its gradient.

The kernels compute in float32 and round once, to e4m3.

- The exact form uses IEEE division and the exp and erf of CUDA's library, and contracts no product with a sum.  It has the bytes of
  `reference.activate` on the same GPU, except for GEGLU, where Triton's erf may differ from torch's in the last bit.
- The fast form is the default.  It uses ex2.approx and rcp.approx: its sigmoid is within a factor of 1 + 1e-5 of the exact one, and 0
  where that is below 2^-126.  Its erf is the polynomial of Abramowitz and Stegun, 7.1.26, off by less than 1e-6 in float32.

Memory bandwidth and the number of instructions bound these kernels: 18 per value for SwiGLU in the fast form, 42 in the exact one.  H is a
constant of the kernel, and interleaved bf16 is read in words of a gate and its up, which needs no exchange between threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mxep.ops.activation.arguments import as_rows, check_activation, empty_forms
from mxep.ops.activation.functions import TANH_CUBIC, TANH_LINEAR, is_gated, swiglu_of
from mxep.ops.activation.rebased import activate_rebased
from mxep.ops.activation.reference import check_activate
from mxep.ops.quantize.triton import _quantize_block
from mxep.ops.runtime import tiles
from mxep.ops.runtime.launch import launch
from mxep.shapes import cdiv, next_power_of_2

# ---------------------------------------------------------------- functions of gate and up

_LINEAR, _CUBIC, _HALF_ROOT = tl.constexpr(TANH_LINEAR), tl.constexpr(TANH_CUBIC), tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(-0.5 * math.log2(math.e))  # exp(-0.5 g^2) is 2 to this times g^2
# Abramowitz and Stegun, 7.1.26: 1 - erf(z) is nearly the polynomial t (A1 + t (A2 + ...)) exp(-z^2) of t = 1 / (1 + P z), z >= 0; here
# of z = |g| / sqrt(2), and half of it, which is the normal distribution's part beyond |g|.
_P = tl.constexpr(0.3275911 * math.sqrt(0.5))
_A1, _A2, _A3 = tl.constexpr(0.254829592 / 2), tl.constexpr(-0.284496736 / 2), tl.constexpr(1.421413741 / 2)
_A4, _A5 = tl.constexpr(-1.453152027 / 2), tl.constexpr(1.061405429 / 2)


@triton.jit
def _approx(value, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(INSTRUCTION + " $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _normal_share(gate, SIGMOID: tl.constexpr):
    """The normal distribution's cumulative function."""
    if SIGMOID == "exact":
        share = 0.5 * (1.0 + libdevice.erf(gate * _HALF_ROOT))
    elif SIGMOID == "fast":
        near = _approx(1.0 + _P * tl.abs(gate), "rcp.approx.ftz.f32")
        bell = _approx(_DENSITY * gate * gate, "ex2.approx.ftz.f32")
        beyond = near * (_A1 + near * (_A2 + near * (_A3 + near * (_A4 + near * _A5)))) * bell
        share = tl.where(gate < 0, beyond, 1.0 - beyond)
    else:
        share = 0.5 * (1.0 + tl.erf(gate * _HALF_ROOT))
    return share


@triton.jit
def _sigmoid(gate, SIGMOID: tl.constexpr):
    if SIGMOID == "exact":  # the device library's rcp_rn would flush subnormals
        total = 1.0 + libdevice.exp(-gate)
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    elif SIGMOID == "fast":  # 1 / (1 + 2^(-gate log2(e))) in four instructions; Triton's own exp and division take eleven
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [gate],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # Triton's interpreter has no device library
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def hidden(gate, up, SIGMOID: tl.constexpr, ACTIVATION: tl.constexpr, FORM: tl.constexpr):
    """h of gate and up, float32; FORM is SwiGLU's: limit or None, alpha, offset. SIGMOID: "exact", "fast" or "plain"."""
    if ACTIVATION == "swiglu":
        if FORM[0] is not None:
            gate = tl.minimum(gate, FORM[0], tl.PropagateNan.ALL)
            up = tl.clamp(up, -FORM[0], FORM[0], tl.PropagateNan.ALL)
        inside = gate
        if FORM[1] != 1:
            inside = FORM[1] * gate
        if FORM[2] != 0:
            up += FORM[2]
        h = gate * _sigmoid(inside, SIGMOID) * up
    elif ACTIVATION == "geglu":
        h = gate * _normal_share(gate, SIGMOID) * up
    elif ACTIVATION == "geglu_tanh":
        h = gate * _sigmoid(gate * (_LINEAR + _CUBIC * (gate * gate)), SIGMOID) * up
    elif ACTIVATION == "reglu":
        h = tl.where(gate <= 0, 0.0, gate) * up
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(gate <= 0, 0.0, gate)
        h = positive * positive
    return h


# ---------------------------------------------------------------- kernels


@triton.jit
def _load_gate_up(x, column, H, mine, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of rows (ROWS, 1) of pointers, zero where a row is not mine; where there
    is no gate, the same twice."""
    if LAYOUT == "single":
        gate = tl.load(x + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0)  # (ROWS, COLUMNS)
        up = gate
    elif LAYOUT == "interleaved" and x.dtype.element_ty == tl.bfloat16:  # a word holds a gate and its up
        words = x.to(tl.pointer_type(tl.int32), bitcast=True) + column + tl.arange(0, COLUMNS)[None, :]
        word = tl.load(words, mask=mine, other=0)  # (ROWS, COLUMNS)
        gate, up = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    elif LAYOUT == "interleaved":
        at = x + 2 * (column + tl.arange(0, COLUMNS)[None, :])
        gate, up = tl.load(at, mask=mine, other=0), tl.load(at + 1, mask=mine, other=0)
    else:
        gate = tl.load(x + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0)  # (ROWS, COLUMNS)
        up = tl.load(x + H + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_mx(
    value, qdata, scale, row, mine, column, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALING: tl.constexpr
):
    """Quantise value (ROWS, COLUMNS) and store it from `column` on in a contiguous MX matrix of that width."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, SCALING)
    code_at = row[:, None] * width + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(qdata + code_at, tl.reshape(code, (ROWS, COLUMNS)), mask=mine)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * (width // 32) + column // 32 + tl.arange(0, BLOCKS)[None, :], exponent, mask=mine)


@triton.jit
def _activate_tile(
    tile,
    x,
    x_row,
    scores,
    out,
    qdata,
    scale,
    x_qdata,
    x_scale,
    T,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALING: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
):
    column_tiles: tl.constexpr = H // COLUMNS
    row = tl.arange(0, ROWS).to(tl.int64) + tile // column_tiles * ROWS
    column = tile % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x + row[:, None] * x_row, column, H, mine, COLUMNS, LAYOUT)
    h = hidden(gate, up, SIGMOID, ACTIVATION, FORM)  # (ROWS, COLUMNS) float32
    if scores is not None:
        h = tl.load(scores + row, mask=row < T, other=0)[:, None] * h
    if out is not None:
        tl.store(out + row[:, None] * H + column + tl.arange(0, COLUMNS)[None, :], h.to(out.dtype.element_ty), mask=mine)
    if qdata is not None:
        _store_mx(h, qdata, scale, row, mine, column, H, ROWS, COLUMNS, SCALING)
    if x_qdata is not None:
        if LAYOUT == "single":
            _store_mx(gate, x_qdata, x_scale, row, mine, column, H, ROWS, COLUMNS, SCALING)
        elif LAYOUT == "interleaved":
            _store_mx(tl.interleave(gate, up), x_qdata, x_scale, row, mine, 2 * column, 2 * H, ROWS, 2 * COLUMNS, SCALING)
        else:
            _store_mx(gate, x_qdata, x_scale, row, mine, column, 2 * H, ROWS, COLUMNS, SCALING)
            _store_mx(up, x_qdata, x_scale, row, mine, H + column, 2 * H, ROWS, COLUMNS, SCALING)


@triton.jit(do_not_specialize=["T"])
def _activate_kernel(
    x,  # (T, WIDTH) bf16 or float32: 2H, or H where LAYOUT is "single"
    x_row,
    scores,  # (T,) float32, or None
    out,  # (T, H) of x's dtype, or None
    qdata,  # (T, H) uint8, or None
    scale,  # (T, H/32) uint8, or None
    x_qdata,  # (T, WIDTH) uint8, or None
    x_scale,  # (T, WIDTH/32) uint8, or None
    num_valid_rows,  # (1,) int32, or None
    T,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    LAYOUT: tl.constexpr,
    SCALING: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,  # of SwiGLU: limit or None, alpha, offset
):
    if num_valid_rows is None:
        _activate_tile(
            tl.program_id(0), x, x_row, scores, out, qdata, scale, x_qdata, x_scale, T,
            H, ROWS, COLUMNS, LAYOUT, SCALING, SIGMOID, ACTIVATION, FORM,
        )  # fmt: skip
    else:
        rows = tl.minimum(tl.load(num_valid_rows), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (H // COLUMNS), tl.num_programs(0)):
            _activate_tile(
                tile, x, x_row, scores, out, qdata, scale, x_qdata, x_scale, rows,
                H, ROWS, COLUMNS, LAYOUT, SCALING, SIGMOID, ACTIVATION, FORM,
            )  # fmt: skip


# ---------------------------------------------------------------- launchers


def activate(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    scores: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
    h: str = "mx",
    quantize_x: bool = False,
    granularity: str = "auto",
) -> list[torch.Tensor]:
    """h of gate and up, and x in MX from the same read.

    Args:
        x: (T, 2H) bf16 or float32, (T, H) for "relu2", H a multiple of 32, any strides (copied first unless the last one is 1).
        layout: "concatenated" (gate in columns 0..H-1, then up) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: a scaling mode's name.
        exact: IEEE's division, the library's exp and erf.
        scores: (T,) float32, factors of h's rows.
        num_valid_rows: (1,) int32 on the device, 0 or a multiple of 32: how many rows are wanted; the others are neither read nor written.
        activation, form: as in `mxep.ops.activation.functions.function_of`; each variant compiles once.
        h: its forms, "none", "mx" (1x32 along H), "hp" (x's dtype, rounded once), "mx+hp", "rebased", which is `rebase_rows` of "mx", or
            "rebased+hp".
        quantize_x: whether x itself is wanted in MX. Not with "rebased".
        granularity: of rebased rows' scales, a key of `MAX_SPREAD`.

    Returns:
        what was asked for, in this order, contiguous: h's qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu; data, scale and,
        unless the granularity is "row", block_scale of `RebasedRows`; h (T, H) in x's dtype; x's qdata and scale, of x's width and in its
        layout.
    """
    check_activate(h, quantize_x, granularity)
    check_activation("activate", x, layout, scaling_mode, scores, activation, form)
    if "rebased" in h:
        return activate_rebased(x, layout, scaling_mode, exact, scores, num_valid_rows, activation, form, h, granularity)
    gated = is_gated(activation)
    num_rows, width, swiglu = x.shape[0], x.shape[1] // (1 + gated), swiglu_of(tuple(form))
    qdata, scale, out = empty_forms(h, x, num_rows, width)
    x_qdata, x_scale, _ = empty_forms("mx" if quantize_x else "none", x, num_rows, x.shape[1])
    if x.numel():
        tile_rows, tile_columns = tiles.ACTIVATION.fit(width)
        rows = as_rows(x, layout if gated else "concatenated")
        programs = cdiv(num_rows, tile_rows) * (width // tile_columns)
        launch(
            _activate_kernel,
            programs if num_valid_rows is None else min(programs, tiles.LOOP_PROGRAMS),
            {
                "x": rows,
                "x_row": rows.stride(0),
                "scores": scores,
                "out": out,
                "qdata": qdata,
                "scale": scale,
                "x_qdata": x_qdata,
                "x_scale": x_scale,
                "num_valid_rows": num_valid_rows,
                "T": num_rows,
                "H": width,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
                "LAYOUT": layout if gated else "single",
                "SCALING": scaling_mode,
                "SIGMOID": "plain" if triton.knobs.runtime.interpret else "exact" if exact else "fast",
                "ACTIVATION": activation,
                "FORM": (swiglu.limit if swiglu.limit < math.inf else None, swiglu.alpha, swiglu.offset),
            },
            num_warps=tiles.ACTIVATION.warps,
            enable_fp_fusion=not exact,
        )
    return [part for part in (qdata, scale, out, x_qdata, x_scale) if part is not None]


# ---------------------------------------------------------------- sums of the partial gradients of scores


@triton.jit(do_not_specialize=["T"])
def _row_sums_kernel(
    parts,  # (T, COUNT) float32, contiguous
    num_valid_rows,  # (1,) int32, or None
    out,  # (T,) float32
    T,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # power of two, at least COUNT
):
    rows = T if num_valid_rows is None else tl.minimum(tl.load(num_valid_rows), T)
    column = tl.arange(0, PARTS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < COUNT)[None, :]
        values = tl.load(parts + row.to(tl.int64)[:, None] * COUNT + column[None, :], mask=inside, other=0)
        tl.store(out + row, tl.sum(values, axis=1), mask=row < rows)


def row_sums(parts: torch.Tensor, num_valid_rows: torch.Tensor | None) -> torch.Tensor:
    """(T, B) float32, contiguous -> (T,), the sum of each row; rows from num_valid_rows (1,) int32 on, if given, are not defined."""
    num_rows, width = parts.shape
    out = torch.empty(num_rows, dtype=parts.dtype, device=parts.device)
    padded = next_power_of_2(width)
    rows = max(tiles.ROW_SUMS_VALUES // padded, 1)

    if out.numel():
        programs = cdiv(num_rows, rows)
        launch(
            _row_sums_kernel,
            programs if num_valid_rows is None else min(programs, tiles.LOOP_PROGRAMS),
            {"parts": parts, "num_valid_rows": num_valid_rows, "out": out, "T": num_rows, "COUNT": width, "ROWS": rows, "PARTS": padded},
            num_warps=4,
        )
    return out
