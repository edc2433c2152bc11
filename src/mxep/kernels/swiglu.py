"""SwiGLU with the MX quantiser in the same pass, forward and backward: one read of the inputs, one write of the bytes.

float32 inside, straight to e4m3.  The exact form divides as IEEE says, takes the exp of CUDA's library and contracts no product with a
sum: the bytes of `reference.swiglu` on the same GPU.  The fast form, the default, takes ex2.approx and an approximate division (by
arithmetic a factor of 1 + 1e-5 beside the exact values at most, and 0 where the sigmoid is below 2^-126).  In the prototype of these
kernels the fast passes ran at the speed of a copy on an H200, the exact ones at 82 to 87% of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from mxep.kernels import tiles
from mxep.kernels.quantize import _quantize_block
from mxep.shapes import MX_BLOCK

_INPUTS = (torch.bfloat16, torch.float32)
_LAYOUTS = ("concatenated", "interleaved")


@triton.jit
def _sigmoid(gate, SIGMOID: tl.constexpr):
    if SIGMOID == "exact":
        return tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-gate))
    elif SIGMOID == "fast":
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp(-gate))
    else:  # Triton's interpreter has no device library
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def _load_gate_up(x, x_row, row, mine, column, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of x (T, 2H), zero past the last row."""
    x += row[:, None] * x_row
    if INTERLEAVED:
        pairs = tl.load(x + 2 * column + tl.arange(0, 2 * COLUMNS)[None, :], mask=mine, other=0)  # (ROWS, 2 COLUMNS)
        gate, up = tl.split(tl.reshape(pairs, (ROWS, COLUMNS, 2)))
    else:
        gate = tl.load(x + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0)  # (ROWS, COLUMNS)
        up = tl.load(x + H + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_mx(value, qdata, scale, row, mine, column, num_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RCEIL: tl.constexpr):
    """Quantise value (ROWS, COLUMNS) and store it from `column` on in an MX matrix of num_blocks blocks a row, contiguous."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, RCEIL)
    code_at = row[:, None] * (num_blocks * 32) + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(qdata + code_at, tl.reshape(code, (ROWS, COLUMNS)), mask=mine)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * num_blocks + column // 32 + tl.arange(0, BLOCKS)[None, :], exponent, mask=mine)


@triton.jit(do_not_specialize=["T"])
def _swiglu_quantize_kernel(
    x,  # (T, 2H) bf16 or float32
    x_row,
    qdata,  # (T, H) uint8
    scale,  # (T, H/32) uint8
    T,
    num_blocks,  # H / 32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    column_tiles = num_blocks * 32 // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, row, mine, column, num_blocks * 32, ROWS, COLUMNS, INTERLEAVED)
    _store_mx(gate * _sigmoid(gate, SIGMOID) * up, qdata, scale, row, mine, column, num_blocks, ROWS, COLUMNS, RCEIL)


@triton.jit(do_not_specialize=["T"])
def _swiglu_backward_quantize_kernel(
    dh,  # (T, H) bf16 or float32
    dh_row,
    x,  # (T, 2H) bf16 or float32
    x_row,
    dx,  # (T, 2H) uint8
    dx_scale,  # (T, 2H/32) uint8
    h,  # (T, H) uint8
    h_scale,  # (T, H/32) uint8
    T,
    num_blocks,  # H / 32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    column_tiles = num_blocks * 32 // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, row, mine, column, num_blocks * 32, ROWS, COLUMNS, INTERLEAVED)
    grad = tl.load(dh + row[:, None] * dh_row + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0).to(tl.float32)
    sigmoid = _sigmoid(gate, SIGMOID)
    silu = gate * sigmoid
    d_gate, d_up = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), grad * silu
    if INTERLEAVED:
        pairs = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * COLUMNS))
        _store_mx(pairs, dx, dx_scale, row, mine, 2 * column, 2 * num_blocks, ROWS, 2 * COLUMNS, RCEIL)
    else:
        _store_mx(d_gate, dx, dx_scale, row, mine, column, 2 * num_blocks, ROWS, COLUMNS, RCEIL)
        _store_mx(d_up, dx, dx_scale, row, mine, num_blocks * 32 + column, 2 * num_blocks, ROWS, COLUMNS, RCEIL)
    _store_mx(silu * up, h, h_scale, row, mine, column, num_blocks, ROWS, COLUMNS, RCEIL)


def _check(where: str, x: torch.Tensor, layout: str, scaling_mode: str) -> None:
    if x.dim() != 2 or x.shape[1] % (2 * MX_BLOCK) or x.dtype not in _INPUTS:
        raise ValueError(f"{where}: x is {tuple(x.shape)} {x.dtype}, want (T, 2H) bfloat16 or float32, H a multiple of {MX_BLOCK}")
    if layout not in _LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(_LAYOUTS)}")
    if scaling_mode not in ("rceil", "floor"):
        raise ValueError(f"{where}: scaling_mode={scaling_mode!r}, want 'rceil' or 'floor'")


def _empty_mx(rows: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of an MX matrix (rows, width): data and scales, uint8."""
    qdata = torch.empty((rows, width), dtype=torch.uint8, device=like.device)
    return qdata, torch.empty((rows, width // MX_BLOCK), dtype=torch.uint8, device=like.device)


def _sigmoid_form(exact: bool) -> str:
    return "plain" if triton.knobs.runtime.interpret else "exact" if exact else "fast"


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(T, D) with unit stride along D; a copy only where the strides do not have it."""
    return x if x.stride(1) == 1 else x.contiguous()


def swiglu_quantize(x: torch.Tensor, layout: str, scaling_mode: str, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(gate) * up, quantised 1x32 along H. Twin: `reference.swiglu_quantize`.

    Args:
        x: (T, 2H) bf16 or float32, H a multiple of 32, any strides (copied first unless the last one is 1).
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: IEEE's division and the exact exp.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    _check("swiglu_quantize", x, layout, scaling_mode)

    num_rows, width = x.shape[0], x.shape[1] // 2
    qdata, scale = _empty_mx(num_rows, width, x)

    if qdata.numel():
        tile_rows, tile_columns = tiles.SWIGLU.fit(width)
        rows = _as_rows(x)
        _swiglu_quantize_kernel[(triton.cdiv(num_rows, tile_rows) * (width // tile_columns),)](
            x=rows,
            x_row=rows.stride(0),
            qdata=qdata,
            scale=scale,
            T=num_rows,
            num_blocks=width // MX_BLOCK,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            INTERLEAVED=layout == "interleaved",
            RCEIL=scaling_mode == "rceil",
            SIGMOID=_sigmoid_form(exact),
            num_warps=tiles.SWIGLU.warps,
            enable_fp_fusion=not exact,
        )
    return qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def swiglu_backward_quantize(
    dh: torch.Tensor, x: torch.Tensor, layout: str, scaling_mode: str, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of x, quantised 1x32 along 2H, and h once more. Twin: `reference.swiglu_backward_quantize`.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides (copied first unless the last one is 1).
        x, layout, scaling_mode, exact: as in `swiglu_quantize`.

    Returns:
        dx's qdata (T, 2H) and scale (T, 2H/32) in x's layout, h's qdata (T, H) and scale (T, H/32): float8_e4m3fn and float8_e8m0fnu,
        contiguous.
    """
    _check("swiglu_backward_quantize", x, layout, scaling_mode)
    num_rows, width = x.shape[0], x.shape[1] // 2
    if dh.shape != (num_rows, width) or dh.dtype not in _INPUTS:
        raise ValueError(
            f"swiglu_backward_quantize: dh is {tuple(dh.shape)} {dh.dtype}, want {(num_rows, width)} bfloat16 or float32 "
            f"for x {tuple(x.shape)}"
        )

    dx, dx_scale = _empty_mx(num_rows, 2 * width, x)
    h, h_scale = _empty_mx(num_rows, width, x)

    if h.numel():
        tile_rows, tile_columns = tiles.SWIGLU.fit(width)
        rows, grads = _as_rows(x), _as_rows(dh)
        _swiglu_backward_quantize_kernel[(triton.cdiv(num_rows, tile_rows) * (width // tile_columns),)](
            dh=grads,
            dh_row=grads.stride(0),
            x=rows,
            x_row=rows.stride(0),
            dx=dx,
            dx_scale=dx_scale,
            h=h,
            h_scale=h_scale,
            T=num_rows,
            num_blocks=width // MX_BLOCK,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            INTERLEAVED=layout == "interleaved",
            RCEIL=scaling_mode == "rceil",
            SIGMOID=_sigmoid_form(exact),
            num_warps=tiles.SWIGLU.warps,
            enable_fp_fusion=not exact,
        )
    data, scales = torch.float8_e4m3fn, torch.float8_e8m0fnu
    return dx.view(data), dx_scale.view(scales), h.view(data), h_scale.view(scales)
