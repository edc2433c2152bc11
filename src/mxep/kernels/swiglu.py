"""SwiGLU with the MX quantiser in the same pass, forward and backward: one read of the inputs, one write of the bytes.

float32 inside, straight to e4m3.  The exact form divides as IEEE says, takes the exp of CUDA's library and contracts no product with a
sum: the bytes of `reference.swiglu` on the same GPU.  The fast form, the default, takes ex2.approx and rcp.approx (by arithmetic a
factor of 1 + 1e-5 beside the exact values at most, and 0 where the sigmoid is below 2^-126).  What bounds these kernels beside memory
is how many instructions a value takes: 18 forward in the fast form and 42 in the exact one, 37 backward; so H is a constant of the
kernel, and interleaved bf16 is taken in words of a gate and its up, which no thread has to hand to another.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mxep.kernels import tiles
from mxep.kernels.quantize import _block_scale, _quantize_block, _to_code
from mxep.reference.quantize import check_scaling_mode
from mxep.reference.swiglu import FORMS, LAYOUTS
from mxep.shapes import MX_BLOCK

_INPUTS = (torch.bfloat16, torch.float32)
_WORD_BYTES = 4


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
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of x (T, 2H), their group's bias added; zero past the last row."""
    gate, up = _load_pair(x + row[:, None] * x_row, column, H, mine, COLUMNS, ROWS, INTERLEAVED)
    if GROUPS > 0:
        index = tl.arange(0, GROUPS)
        ends = tl.load(offs + index, mask=index < G, other=0x7FFFFFFF)
        group = tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1)[:, None]  # (ROWS, 1), G behind the last end
        owned = mine & (group < G)
        gate_bias, up_bias = _load_pair(bias + group.to(tl.int64) * (2 * H), column, H, owned, COLUMNS, ROWS, INTERLEAVED)
        gate += gate_bias
        up += up_bias
    return gate, up


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
def _store_mx_pairs(
    gate,
    up,
    qdata,
    scale,
    row,
    mine,
    column,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RCEIL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`_store_mx` of gates and ups (ROWS, COLUMNS) that take turns in the columns of the MX matrix: a block has 16 of each."""
    BLOCKS: tl.constexpr = COLUMNS // 16
    bits = tl.maximum(gate.to(tl.int32, bitcast=True) & 0x7FFFFFFF, up.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    factor, exponent = _block_scale(tl.max(tl.reshape(bits, (ROWS, BLOCKS, 16)), axis=2, keep_dims=True), RCEIL)
    factor = tl.reshape(tl.broadcast_to(factor, (ROWS, BLOCKS, 16)), (ROWS, COLUMNS))
    if INTERPRETED:
        pair = _to_code(gate * factor, RCEIL).to(tl.uint16) | (_to_code(up * factor, RCEIL).to(tl.uint16) << 8)
    else:
        # One conversion makes the pair.  Codes that are packed by a conversion of others and taken apart again at once come out as garbage:
        # ptxas 12.8 reads them from the stack pointer (tests/kernels/test_kernel_compile.py looks for that).
        pair = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [gate * factor, up * factor], dtype=tl.uint16, is_pure=True, pack=1
        )
    pairs = (qdata + row[:, None] * width).to(tl.pointer_type(tl.uint16), bitcast=True)
    tl.store(pairs + column + tl.arange(0, COLUMNS)[None, :], pair, mask=mine)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * (width // 32) + column // 16 + tl.arange(0, BLOCKS)[None, :], exponent, mask=mine)


@triton.jit
def _store_pairs(gate, up, out, row, mine, column, width: tl.constexpr, COLUMNS: tl.constexpr):
    """`_store` of gates and ups (ROWS, COLUMNS) that take turns in the columns of the matrix."""
    at = out + row[:, None] * width
    if out.dtype.element_ty == tl.bfloat16:
        word = gate.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        word |= up.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        tl.store(at.to(tl.pointer_type(tl.uint32), bitcast=True) + column + tl.arange(0, COLUMNS)[None, :], word, mask=mine)
    else:
        tl.store(at + 2 * (column + tl.arange(0, COLUMNS)[None, :]), gate, mask=mine)
        tl.store(at + 2 * (column + tl.arange(0, COLUMNS)[None, :]) + 1, up, mask=mine)


@triton.jit
def _store(value, out, row, mine, column, width, COLUMNS: tl.constexpr):
    """Store value (ROWS, COLUMNS) from `column` on in a contiguous matrix of that width, rounded to its dtype."""
    at = row[:, None] * width + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["T", "G"])
def _swiglu_quantize_kernel(
    x,  # (T, 2H) bf16 or float32
    x_row,
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    qdata,  # (T, H) uint8
    scale,  # (T, H/32) uint8
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    column_tiles: tl.constexpr = H // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, INTERLEAVED, GROUPS)
    h = gate * _sigmoid(gate, SIGMOID) * up
    if scores is not None:
        h = tl.load(scores + row, mask=row < T, other=0)[:, None] * h
    _store_mx(h, qdata, scale, row, mine, column, H, ROWS, COLUMNS, RCEIL)


@triton.jit(do_not_specialize=["T", "G"])
def _swiglu_backward_quantize_kernel(
    dh,  # (T, H) bf16 or float32
    dh_row,
    x,  # (T, 2H) bf16 or float32
    x_row,
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    scores,  # (T,) float32, or None
    d_scores,  # (H / COLUMNS, T) float32, sums over a tile's columns; None without scores
    dx_qdata,  # (T, 2H) uint8; every output is None where it is not wanted
    dx_scale,  # (T, 2H/32) uint8
    dx,  # (T, 2H) x's dtype
    h_qdata,  # (T, H) uint8
    h_scale,  # (T, H/32) uint8
    h,  # (T, H) x's dtype
    T,
    G,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    column_tiles: tl.constexpr = H // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, INTERLEAVED, GROUPS)
    grad = tl.load(dh + row[:, None] * dh_row + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0).to(tl.float32)
    sigmoid = _sigmoid(gate, SIGMOID)
    silu = gate * sigmoid
    value = silu * up
    if scores is not None:
        tl.store(d_scores + (tl.program_id(0) % column_tiles).to(tl.int64) * T + row, tl.sum(grad * value, axis=1), mask=row < T)
        score = tl.load(scores + row, mask=row < T, other=0)[:, None]
        grad *= score
        value *= score
    d_gate, d_up = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), grad * silu
    if INTERLEAVED:
        if dx_qdata is not None:
            _store_mx_pairs(d_gate, d_up, dx_qdata, dx_scale, row, mine, column, 2 * H, ROWS, COLUMNS, RCEIL, SIGMOID == "plain")
        if dx is not None:
            _store_pairs(d_gate, d_up, dx, row, mine, column, 2 * H, COLUMNS)
    else:
        if dx_qdata is not None:
            _store_mx(d_gate, dx_qdata, dx_scale, row, mine, column, 2 * H, ROWS, COLUMNS, RCEIL)
            _store_mx(d_up, dx_qdata, dx_scale, row, mine, H + column, 2 * H, ROWS, COLUMNS, RCEIL)
        if dx is not None:
            _store(d_gate, dx, row, mine, column, 2 * H, COLUMNS)
            _store(d_up, dx, row, mine, H + column, 2 * H, COLUMNS)
    if h_qdata is not None:
        _store_mx(value, h_qdata, h_scale, row, mine, column, H, ROWS, COLUMNS, RCEIL)
    if h is not None:
        _store(value, h, row, mine, column, H, COLUMNS)


def _check(
    where: str,
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    bias: torch.Tensor | None,
    offs: torch.Tensor | None,
    scores: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Bias, ends and how many groups a program looks at, as the kernels take them."""
    if x.dim() != 2 or x.shape[1] % (2 * MX_BLOCK) or x.dtype not in _INPUTS:
        raise ValueError(f"{where}: x is {tuple(x.shape)} {x.dtype}, want (T, 2H) bfloat16 or float32, H a multiple of {MX_BLOCK}")
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    check_scaling_mode(where, scaling_mode)
    if scores is not None and (scores.shape != x.shape[:1] or scores.dtype != torch.float32 or not scores.is_contiguous()):
        raise ValueError(f"{where}: scores are {tuple(scores.shape)} {scores.dtype}, want ({x.shape[0]},) float32, contiguous")
    if bias is None:
        return None, None, 0
    if offs is None or offs.dim() != 1 or bias.shape != (offs.shape[0], x.shape[1]) or bias.dtype not in _INPUTS:
        ends = "no offs" if offs is None else f"offs {tuple(offs.shape)}"
        raise ValueError(f"{where}: bias {tuple(bias.shape)} {bias.dtype} with {ends}, want (G, {x.shape[1]}) with (G,)")
    return _as_rows(bias, layout).contiguous(), offs.to(torch.int32).contiguous(), triton.next_power_of_2(max(offs.shape[0], 1))


def _empty_mx(rows: int, width: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Bytes of an MX matrix (rows, width): data and scales, uint8."""
    qdata = torch.empty((rows, width), dtype=torch.uint8, device=like.device)
    return [qdata, torch.empty((rows, width // MX_BLOCK), dtype=torch.uint8, device=like.device)]


def _empty_forms(forms: str, what: str, rows: int, width: int, like: torch.Tensor) -> list[torch.Tensor | None]:
    """Data, scales and high-precision values of a result, None for what is not wanted."""
    if forms not in FORMS:
        raise ValueError(f"swiglu_backward_quantize: {what}={forms!r}, want one of {', '.join(FORMS)}")
    mx = _empty_mx(rows, width, like) if "mx" in forms else [None, None]
    return [*mx, torch.empty((rows, width), dtype=like.dtype, device=like.device) if "hp" in forms else None]


def _sigmoid_form(exact: bool) -> str:
    return "plain" if triton.knobs.runtime.interpret else "exact" if exact else "fast"


def _as_rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(T, D) with unit stride along D, and in pairs of bf16 that start at whole words; a copy only where it is not so already."""
    words = layout == "concatenated" or x.dtype != torch.bfloat16 or not (x.stride(0) % 2 or x.data_ptr() % _WORD_BYTES)
    return x if x.stride(1) == 1 and words else x.clone(memory_format=torch.contiguous_format)


# Variants of the kernels by everything that they depend on: finding one costs Triton more than launching it.
_variants: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, grid: tuple[int, int, int], places: tuple[Any, ...], constants: tuple[Any, ...], warps: int, exact: bool) -> None:
    """Run a kernel; `places` are its pointers (None: not there) and strides, then T and G, on whose values nothing depends."""
    facts = tuple((p.dtype, p.data_ptr() % 16 == 0) if isinstance(p, torch.Tensor) else (p,) for p in places[:-2])
    key = (kernel.__name__, places[0].device.index, warps, exact, facts, constants)
    variant = _variants.get(key)
    if variant is not None:
        variant[grid](*places, *constants)
    else:
        variant = kernel[grid](*places, *constants, num_warps=warps, enable_fp_fusion=not exact)
        if variant is not None:  # Triton's interpreter has none
            _variants[key] = variant


def swiglu_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
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

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    bias, offs, groups = _check("swiglu_quantize", x, layout, scaling_mode, bias, offs, scores)

    num_rows, width = x.shape[0], x.shape[1] // 2
    qdata, scale = _empty_mx(num_rows, width, x)

    if qdata.numel():
        tile_rows, tile_columns = tiles.SWIGLU.fit(width)
        rows = _as_rows(x, layout)
        places = (rows, rows.stride(0), bias, offs, scores, qdata, scale, num_rows, 0 if offs is None else offs.shape[0])
        constants = (width, tile_rows, tile_columns, layout == "interleaved", groups, scaling_mode == "rceil", _sigmoid_form(exact))
        grid = (-(-num_rows // tile_rows) * (width // tile_columns), 1, 1)
        _launch(_swiglu_quantize_kernel, grid, places, constants, tiles.SWIGLU.warps, exact)
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def swiglu_backward_quantize(
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
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, in one pass, each as its readers want it. Twin: `reference.swiglu_backward_quantize`.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides (copied first unless the last one is 1).
        x, layout, scaling_mode, exact, bias, offs, scores: as in `swiglu_quantize`.
        dx, h: forms of the two results: "none", "mx" (1x32 along the columns), "hp" (x's dtype) or "mx+hp".

    Returns:
        what was asked for, in this order, contiguous: dx's qdata (T, 2H) float8_e4m3fn and scale (T, 2H/32) float8_e8m0fnu in x's
        layout; dx (T, 2H) in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype; with scores at last their gradient
        (T,) float32, summed in another order than the twin's.
    """
    bias, offs, groups = _check("swiglu_backward_quantize", x, layout, scaling_mode, bias, offs, scores)
    num_rows, width = x.shape[0], x.shape[1] // 2
    if dh.shape != (num_rows, width) or dh.dtype not in _INPUTS:
        raise ValueError(
            f"swiglu_backward_quantize: dh is {tuple(dh.shape)} {dh.dtype}, want {(num_rows, width)} bfloat16 or float32 "
            f"for x {tuple(x.shape)}"
        )

    dx_parts, h_parts = _empty_forms(dx, "dx", num_rows, 2 * width, x), _empty_forms(h, "h", num_rows, width, x)
    wanted = scores is not None or any(part is not None for part in (*dx_parts, *h_parts))
    tile = tiles.SWIGLU_BACKWARD if dx_parts[2] is None and h_parts[2] is None else tiles.SWIGLU_HP
    tile_rows, tile_columns = tile.fit(width)
    d_scores = None if scores is None else torch.empty((width // tile_columns, num_rows), dtype=torch.float32, device=x.device)

    if x.numel() and wanted:
        rows, grads = _as_rows(x, layout), _as_rows(dh, "concatenated")
        groups_here = 0 if offs is None else offs.shape[0]
        places = (grads, grads.stride(0), rows, rows.stride(0), bias, offs, scores, d_scores, *dx_parts, *h_parts, num_rows, groups_here)
        constants = (width, tile_rows, tile_columns, layout == "interleaved", groups, scaling_mode == "rceil", _sigmoid_form(exact))
        grid = (-(-num_rows // tile_rows) * (width // tile_columns), 1, 1)
        _launch(_swiglu_backward_quantize_kernel, grid, places, constants, tile.warps, exact)
    types = (torch.float8_e4m3fn, torch.float8_e8m0fnu, x.dtype) * 2
    out = [part.view(dtype) for part, dtype in zip((*dx_parts, *h_parts), types, strict=True) if part is not None]
    return out if d_scores is None else [*out, d_scores.sum(0)]
