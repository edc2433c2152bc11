"""The activation with the MX quantiser in the same pass: one read of the inputs, one write of the bytes. `activation_backward.py` is its
backward.

float32 inside, straight to e4m3. The exact form divides as IEEE says, takes exp and erf of CUDA's library and contracts no product with a
sum: the bytes of `reference.activate_quantize` on the same GPU, but for GEGLU, where Triton's erf may be the last bit beside torch's. The
fast form, the default, takes ex2.approx and rcp.approx: by arithmetic a factor of 1 + 1e-5 beside an exact sigmoid at most, and 0 where
that is below 2^-126; and in erf's place the polynomial of Abramowitz and Stegun, 7.1.26, less than 1e-6 from it in float32. What bounds
these kernels beside memory is how many instructions a value takes: 18 for SwiGLU in the fast form and 42 in the exact one; so H is a
constant of the kernel, and interleaved bf16 is taken in words of a gate and its up, which no thread has to hand to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxep.kernels import tiles
from mxep.kernels.activation_functions import hidden
from mxep.kernels.activation_inputs import as_rows, check_activation, empty_mx
from mxep.kernels.launch import launch
from mxep.kernels.quantize import _quantize_block
from mxep.reference.activation_functions import SwiGLU, is_gated
from mxep.shapes import next_power_of_2


@triton.jit
def _load_pair(x, column, H, mine, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
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
def _load_gate_up(
    x,
    x_row,
    bias,  # (G, WIDTH) bf16 or float32, or None
    offs,  # (G,) int32, or None
    G,
    row,
    mine,
    column,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least G; 0 without a bias
):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of x (T, WIDTH), as they are and with their group's bias added; zero
    past the last row."""
    WIDTH: tl.constexpr = H if LAYOUT == "single" else 2 * H
    plain_gate, plain_up = _load_pair(x + row[:, None] * x_row, column, H, mine, COLUMNS, ROWS, LAYOUT)
    gate, up = plain_gate, plain_up
    if GROUPS > 0:
        index = tl.arange(0, GROUPS)
        ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
        group = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]  # (ROWS, 1), G behind the last end
        owned = mine & (group < G)
        gate_bias, up_bias = _load_pair(bias + group.to(tl.int64) * WIDTH, column, H, owned, COLUMNS, ROWS, LAYOUT)
        gate += gate_bias
        up += up_bias
    return plain_gate, plain_up, gate, up


@triton.jit
def _store_mx(value, qdata, scale, row, mine, column, width: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RCEIL: tl.constexpr):
    """Quantise value (ROWS, COLUMNS) and store it from `column` on in a contiguous MX matrix of that width."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, RCEIL)
    code_at = row[:, None] * width + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(qdata + code_at, tl.reshape(code, (ROWS, COLUMNS)), mask=mine)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * (width // 32) + column // 32 + tl.arange(0, BLOCKS)[None, :], exponent, mask=mine)


@triton.jit
def _tile(
    tile,
    x,
    x_row,
    bias,
    offs,
    scores,
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,  # of SwiGLU: limit or None, alpha, offset
):
    """Rows (ROWS,), the first column and which are mine (ROWS, 1) of a tile; gate, up and h (ROWS, COLUMNS) float32."""
    column_tiles: tl.constexpr = H // COLUMNS
    row = tl.arange(0, ROWS).to(tl.int64) + tile // column_tiles * ROWS
    column = tile % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    x_gate, x_up, gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, LAYOUT, GROUPS)
    h = hidden(gate, up, SIGMOID, ACTIVATION, FORM)
    if scores is not None:
        h = tl.load(scores + row, mask=row < T, other=0)[:, None] * h
    return row, column, mine, x_gate, x_up, h


@triton.jit
def _store_h(h, out, row, column, mine, H: tl.constexpr, COLUMNS: tl.constexpr):
    tl.store(out + row[:, None] * H + column + tl.arange(0, COLUMNS)[None, :], h.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["T", "G"])
def _activate_kernel(
    x,  # (T, WIDTH) bf16 or float32: 2H, or H where LAYOUT is "single"
    x_row,
    bias,  # (G, WIDTH) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    out,  # (T, H) of x's dtype
    live,  # (1,) int32, or None
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
):
    if live is None:
        row, column, mine, _, _, h = _tile(
            tl.program_id(0), x, x_row, bias, offs, scores, T, G, H, ROWS, COLUMNS, LAYOUT, GROUPS, SIGMOID, ACTIVATION, FORM
        )
        _store_h(h, out, row, column, mine, H, COLUMNS)
    else:
        rows = tl.minimum(tl.load(live), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (H // COLUMNS), tl.num_programs(0)):
            row, column, mine, _, _, h = _tile(
                tile, x, x_row, bias, offs, scores, rows, G, H, ROWS, COLUMNS, LAYOUT, GROUPS, SIGMOID, ACTIVATION, FORM
            )
            _store_h(h, out, row, column, mine, H, COLUMNS)


@triton.jit
def _store_tile(
    at, qdata, scale, x_qdata, x_scale, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAYOUT: tl.constexpr,
    RCEIL: tl.constexpr,
):  # fmt: skip
    """What `_tile` returned, to MX."""
    row, column, mine, x_gate, x_up, h = at
    _store_mx(h, qdata, scale, row, mine, column, H, ROWS, COLUMNS, RCEIL)
    if x_qdata is not None:
        if LAYOUT == "single":
            _store_mx(x_gate, x_qdata, x_scale, row, mine, column, H, ROWS, COLUMNS, RCEIL)
        elif LAYOUT == "interleaved":
            _store_mx(tl.interleave(x_gate, x_up), x_qdata, x_scale, row, mine, 2 * column, 2 * H, ROWS, 2 * COLUMNS, RCEIL)
        else:
            _store_mx(x_gate, x_qdata, x_scale, row, mine, column, 2 * H, ROWS, COLUMNS, RCEIL)
            _store_mx(x_up, x_qdata, x_scale, row, mine, H + column, 2 * H, ROWS, COLUMNS, RCEIL)


@triton.jit(do_not_specialize=["T", "G"])
def _activate_quantize_kernel(
    x,  # (T, WIDTH) bf16 or float32: 2H, or H where LAYOUT is "single"
    x_row,
    bias,  # (G, WIDTH) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    qdata,  # (T, H) uint8
    scale,  # (T, H/32) uint8
    x_qdata,  # (T, WIDTH) uint8, or None
    x_scale,  # (T, WIDTH/32) uint8, or None
    live,  # (1,) int32, or None
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORM: tl.constexpr,
):
    if live is None:
        at = _tile(tl.program_id(0), x, x_row, bias, offs, scores, T, G, H, ROWS, COLUMNS, LAYOUT, GROUPS, SIGMOID, ACTIVATION, FORM)
        _store_tile(at, qdata, scale, x_qdata, x_scale, H, ROWS, COLUMNS, LAYOUT, RCEIL)
    else:
        rows = tl.minimum(tl.load(live), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (H // COLUMNS), tl.num_programs(0)):
            at = _tile(tile, x, x_row, bias, offs, scores, rows, G, H, ROWS, COLUMNS, LAYOUT, GROUPS, SIGMOID, ACTIVATION, FORM)
            _store_tile(at, qdata, scale, x_qdata, x_scale, H, ROWS, COLUMNS, LAYOUT, RCEIL)


def _sigmoid_form(exact: bool) -> str:
    return "plain" if triton.knobs.runtime.interpret else "exact" if exact else "fast"


def activate_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """h, quantised 1x32 along H. Twin: `reference.activate_quantize`.

    Args:
        x: (T, 2H) bf16 or float32, (T, H) for "relu2", H a multiple of 32, any strides (copied first unless the last one is 1).
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: IEEE's division, the library's exp and erf.
        bias: of x's width, (G, 2H) bf16 or float32 in x's layout, added to the rows of each group; rows behind the last group get none.
        offs: (G,) int32 or int64 END rows of the groups on the device, needed with a bias.
        scores: (T,) float32, factors of h's rows.
        live: (1,) int32 on the device, 0 or a multiple of 32: how many rows are wanted; the others are neither read nor written.
        activation, form: as in `mxep.reference.activation_functions.function_of`; each variant compiles once.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    parts = empty_mx(x.shape[0], x.shape[-1] // (1 + is_gated(activation)), x)
    _run("activate_quantize", x, layout, scaling_mode, exact, bias, offs, scores, live, activation, form, [*parts, None, None])
    return parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float8_e8m0fnu)


def activate_quantize_both(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`activate_quantize`, and x as it came in MX from the same read. Twin: `reference.activate_quantize_both`.

    Args:
        x, layout, scaling_mode, exact, bias, offs, scores, live, activation, form: as in `activate_quantize`; the bias is
            in h and not in x.

    Returns:
        h's qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu; x's qdata and scale, of x's width and in its layout.
    """
    parts = [*empty_mx(x.shape[0], x.shape[-1] // (1 + is_gated(activation)), x), *empty_mx(x.shape[0], x.shape[-1], x)]
    _run("activate_quantize_both", x, layout, scaling_mode, exact, bias, offs, scores, live, activation, form, parts)
    types = (torch.float8_e4m3fn, torch.float8_e8m0fnu) * 2
    return tuple(part.view(dtype) for part, dtype in zip(parts, types, strict=True))  # type: ignore[return-value]


def activate(
    x: torch.Tensor,
    layout: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    activation: str = "swiglu",
    form: Sequence[float] = (),
) -> torch.Tensor:
    """h in x's dtype, rounded once. Twin: `reference.activate`.

    Args:
        x, layout, exact, bias, offs, scores, live, activation, form: as in `activate_quantize`.

    Returns:
        (T, H), contiguous.
    """
    h = torch.empty((x.shape[0], x.shape[-1] // (1 + is_gated(activation))), dtype=x.dtype, device=x.device)
    _run("activate", x, layout, "", exact, bias, offs, scores, live, activation, form, [h])
    return h


def _run(
    where: str,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool,
    bias: torch.Tensor | None,
    offs: torch.Tensor | None,
    scores: torch.Tensor | None,
    live: torch.Tensor | None,
    activation: str,
    form: Sequence[float],
    parts: Sequence[torch.Tensor | None],
) -> None:
    """Into `parts`: with a scale rule data and scales, uint8, of h, then of x or None; without one ("") h in x's dtype."""
    bias, offs = check_activation(where, x, layout, scaling_mode or "rceil", bias, offs, scores, activation, form)
    gated = is_gated(activation)
    num_rows, width, how = x.shape[0], x.shape[1] // (1 + gated), SwiGLU(*form)
    if x.numel():
        tile_rows, tile_columns = tiles.ACTIVATION.fit(width)
        groups = 0 if offs is None else next_power_of_2(max(offs.shape[0], 1))
        rows = as_rows(x, layout if gated else "concatenated")
        programs = -(-num_rows // tile_rows) * (width // tile_columns)
        names = ("qdata", "scale", "x_qdata", "x_scale") if scaling_mode else ("out",)
        launch(
            _activate_quantize_kernel if scaling_mode else _activate_kernel,
            programs if live is None else min(programs, tiles.PASS_PROGRAMS),
            {
                "x": rows,
                "x_row": rows.stride(0),
                "bias": bias,
                "offs": offs,
                "scores": scores,
                **dict(zip(names, parts, strict=True)),
                "live": live,
                "T": num_rows,
                "G": 0 if offs is None else offs.shape[0],
                "H": width,
                "ROWS": tile_rows,
                "COLUMNS": tile_columns,
                "LAYOUT": layout if gated else "single",
                "GROUPS": groups,
                "SIGMOID": _sigmoid_form(exact),
                "ACTIVATION": activation,
                "FORM": (how.limit if how.limit < math.inf else None, how.alpha, how.offset),
                **({"RCEIL": scaling_mode == "rceil"} if scaling_mode else {}),
            },
            num_warps=tiles.ACTIVATION.warps,
            enable_fp_fusion=not exact,
        )
