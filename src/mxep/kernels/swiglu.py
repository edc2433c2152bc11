"""SwiGLU with the MX quantiser in the same pass: one read of the inputs, one write of the bytes. Backward: `swiglu_backward.py`.

float32 inside, straight to e4m3.  The exact form divides as IEEE says, takes the exp of CUDA's library and contracts no product with a
sum: the bytes of `reference.swiglu` on the same GPU.  The fast form, the default, takes ex2.approx and rcp.approx (by arithmetic a
factor of 1 + 1e-5 beside the exact values at most, and 0 where the sigmoid is below 2^-126).  What bounds these kernels beside memory
is how many instructions a value takes: 18 in the fast form and 42 in the exact one; so H is a constant of the kernel, and interleaved
bf16 is taken in words of a gate and its up, which no thread has to hand to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mxep.kernels import tiles
from mxep.kernels.launch import launch
from mxep.kernels.quantize import _quantize_block
from mxep.kernels.swiglu_inputs import as_rows, check_swiglu, empty_mx
from mxep.reference.swiglu import SwiGLU
from mxep.shapes import next_power_of_2


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
def _load_pair(x, column, H, mine, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of rows (ROWS, 1) of pointers, zero where a row is not mine."""
    if INTERLEAVED and x.dtype.element_ty == tl.bfloat16:  # a word holds a gate and its up
        words = x.to(tl.pointer_type(tl.int32), bitcast=True) + column + tl.arange(0, COLUMNS)[None, :]
        word = tl.load(words, mask=mine, other=0)  # (ROWS, COLUMNS)
        gate, up = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    elif INTERLEAVED:
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
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    G,
    row,
    mine,
    column,
    H,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least G; 0 without a bias
):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of x (T, 2H), as they are and with their group's bias added; zero past
    the last row."""
    plain_gate, plain_up = _load_pair(x + row[:, None] * x_row, column, H, mine, COLUMNS, ROWS, INTERLEAVED)
    gate, up = plain_gate, plain_up
    if GROUPS > 0:
        index = tl.arange(0, GROUPS)
        ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
        group = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]  # (ROWS, 1), G behind the last end
        owned = mine & (group < G)
        gate_bias, up_bias = _load_pair(bias + group.to(tl.int64) * (2 * H), column, H, owned, COLUMNS, ROWS, INTERLEAVED)
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
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORM: tl.constexpr,  # limit or None, alpha, offset
):
    """Rows (ROWS,), the first column and which are mine (ROWS, 1) of a tile; gate, up and h (ROWS, COLUMNS) float32."""
    column_tiles: tl.constexpr = H // COLUMNS
    row = tl.arange(0, ROWS).to(tl.int64) + tile // column_tiles * ROWS
    column = tile % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    x_gate, x_up, gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, INTERLEAVED, GROUPS)
    if FORM[0] is not None:
        gate = tl.minimum(gate, FORM[0], tl.PropagateNan.ALL)
        up = tl.clamp(up, -FORM[0], FORM[0], tl.PropagateNan.ALL)
    inside = gate
    if FORM[1] != 1:
        inside = FORM[1] * gate
    if FORM[2] != 0:
        up += FORM[2]
    h = gate * _sigmoid(inside, SIGMOID) * up
    if scores is not None:
        h = tl.load(scores + row, mask=row < T, other=0)[:, None] * h
    return row, column, mine, x_gate, x_up, h


@triton.jit
def _store_h(h, out, row, column, mine, H: tl.constexpr, COLUMNS: tl.constexpr):
    tl.store(out + row[:, None] * H + column + tl.arange(0, COLUMNS)[None, :], h.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["T", "G"])
def _swiglu_kernel(
    x,  # (T, 2H) bf16 or float32
    x_row,
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    out,  # (T, H) of x's dtype
    live,  # (1,) int32, or None
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORM: tl.constexpr,
):
    if live is None:
        row, column, mine, _, _, h = _tile(
            tl.program_id(0), x, x_row, bias, offs, scores, T, G, H, ROWS, COLUMNS, INTERLEAVED, GROUPS, SIGMOID, FORM
        )
        _store_h(h, out, row, column, mine, H, COLUMNS)
    else:
        rows = tl.minimum(tl.load(live), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (H // COLUMNS), tl.num_programs(0)):
            row, column, mine, _, _, h = _tile(
                tile, x, x_row, bias, offs, scores, rows, G, H, ROWS, COLUMNS, INTERLEAVED, GROUPS, SIGMOID, FORM
            )
            _store_h(h, out, row, column, mine, H, COLUMNS)


@triton.jit
def _store_tile(
    at, qdata, scale, x_qdata, x_scale, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr,
    RCEIL: tl.constexpr,
):  # fmt: skip
    """What `_tile` returned, to MX."""
    row, column, mine, x_gate, x_up, h = at
    _store_mx(h, qdata, scale, row, mine, column, H, ROWS, COLUMNS, RCEIL)
    if x_qdata is not None:
        if INTERLEAVED:
            _store_mx(tl.interleave(x_gate, x_up), x_qdata, x_scale, row, mine, 2 * column, 2 * H, ROWS, 2 * COLUMNS, RCEIL)
        else:
            _store_mx(x_gate, x_qdata, x_scale, row, mine, column, 2 * H, ROWS, COLUMNS, RCEIL)
            _store_mx(x_up, x_qdata, x_scale, row, mine, H + column, 2 * H, ROWS, COLUMNS, RCEIL)


@triton.jit(do_not_specialize=["T", "G"])
def _swiglu_quantize_kernel(
    x,  # (T, 2H) bf16 or float32
    x_row,
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    qdata,  # (T, H) uint8
    scale,  # (T, H/32) uint8
    x_qdata,  # (T, 2H) uint8, or None
    x_scale,  # (T, 2H/32) uint8, or None
    live,  # (1,) int32, or None
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
    FORM: tl.constexpr,
):
    if live is None:
        at = _tile(tl.program_id(0), x, x_row, bias, offs, scores, T, G, H, ROWS, COLUMNS, INTERLEAVED, GROUPS, SIGMOID, FORM)
        _store_tile(at, qdata, scale, x_qdata, x_scale, H, ROWS, COLUMNS, INTERLEAVED, RCEIL)
    else:
        rows = tl.minimum(tl.load(live), T)
        for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (H // COLUMNS), tl.num_programs(0)):
            at = _tile(tile, x, x_row, bias, offs, scores, rows, G, H, ROWS, COLUMNS, INTERLEAVED, GROUPS, SIGMOID, FORM)
            _store_tile(at, qdata, scale, x_qdata, x_scale, H, ROWS, COLUMNS, INTERLEAVED, RCEIL)


def _sigmoid_form(exact: bool) -> str:
    return "plain" if triton.knobs.runtime.interpret else "exact" if exact else "fast"


def swiglu_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(gate) * up, quantised 1x32 along H. Twin: `reference.swiglu_quantize`.

    Args:
        x: (T, 2H) bf16 or float32, H a multiple of 32, any strides (copied first unless the last one is 1).
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: IEEE's division and the exact exp.
        bias: (G, 2H) bf16 or float32 in x's layout, added to the rows of each group; rows behind the last group get none.
        offs: (G,) int32 or int64 END rows of the groups on the device, needed with a bias.
        scores: (T,) float32, factors of h's rows.
        live: (1,) int32 on the device, 0 or a multiple of 32: how many rows are wanted; the others are neither read nor written.
        form: limit, alpha and offset as in `mxep.reference.swiglu.SwiGLU`; each variant compiles once.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    parts = empty_mx(x.shape[0], x.shape[-1] // 2, x)
    _run("swiglu_quantize", x, layout, scaling_mode, exact, bias, offs, scores, live, form, [*parts, None, None])
    return parts[0].view(torch.float8_e4m3fn), parts[1].view(torch.float8_e8m0fnu)


def swiglu_quantize_both(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`swiglu_quantize`, and x as it came in MX from the same read. Twin: `reference.swiglu_quantize_both`.

    Args:
        x, layout, scaling_mode, exact, bias, offs, scores, live, form: as in `swiglu_quantize`; the bias is in h and not in x.

    Returns:
        h's qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu; x's qdata (T, 2H) and scale (T, 2H/32) in x's layout.
    """
    parts = [*empty_mx(x.shape[0], x.shape[-1] // 2, x), *empty_mx(x.shape[0], x.shape[-1], x)]
    _run("swiglu_quantize_both", x, layout, scaling_mode, exact, bias, offs, scores, live, form, parts)
    types = (torch.float8_e4m3fn, torch.float8_e8m0fnu) * 2
    return tuple(part.view(dtype) for part, dtype in zip(parts, types, strict=True))  # type: ignore[return-value]


def swiglu(
    x: torch.Tensor,
    layout: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    live: torch.Tensor | None = None,
    form: Sequence[float] = (),
) -> torch.Tensor:
    """h = silu(gate) * up in x's dtype, rounded once. Twin: `reference.swiglu`.

    Args:
        x, layout, exact, bias, offs, scores, live, form: as in `swiglu_quantize`.

    Returns:
        (T, H), contiguous.
    """
    h = torch.empty((x.shape[0], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    _run("swiglu", x, layout, "", exact, bias, offs, scores, live, form, [h])
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
    form: Sequence[float],
    parts: Sequence[torch.Tensor | None],
) -> None:
    """Into `parts`: with a scale rule data and scales, uint8, of h, then of x or None; without one ("") h in x's dtype."""
    bias, offs = check_swiglu(where, x, layout, scaling_mode or "rceil", bias, offs, scores)
    num_rows, width, how = x.shape[0], x.shape[1] // 2, SwiGLU(*form)
    if x.numel():
        tile_rows, tile_columns = tiles.SWIGLU.fit(width)
        groups = 0 if offs is None else next_power_of_2(max(offs.shape[0], 1))
        rows = as_rows(x, layout)
        programs = -(-num_rows // tile_rows) * (width // tile_columns)
        names = ("qdata", "scale", "x_qdata", "x_scale") if scaling_mode else ("out",)
        launch(
            _swiglu_quantize_kernel if scaling_mode else _swiglu_kernel,
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
                "INTERLEAVED": layout == "interleaved",
                "GROUPS": groups,
                "SIGMOID": _sigmoid_form(exact),
                "FORM": (how.limit if how.limit < math.inf else None, how.alpha, how.offset),
                **({"RCEIL": scaling_mode == "rceil"} if scaling_mode else {}),
            },
            num_warps=tiles.SWIGLU.warps,
            enable_fp_fusion=not exact,
        )
