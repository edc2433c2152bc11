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
from mxep.reference.swiglu import FORMS, LAYOUTS
from mxep.shapes import MX_BLOCK

_INPUTS = (torch.bfloat16, torch.float32)


@triton.jit
def _sigmoid(gate, SIGMOID: tl.constexpr):
    if SIGMOID == "exact":
        return tl.div_rn(tl.full(gate.shape, 1.0, tl.float32), 1.0 + libdevice.exp(-gate))
    elif SIGMOID == "fast":
        return libdevice.fast_dividef(1.0, 1.0 + tl.exp(-gate))
    else:  # Triton's interpreter has no device library
        return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def _load_pair(x, column, H, mine, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up (ROWS, COLUMNS) float32 from columns `column` .. of rows (ROWS, 1) of pointers, zero where a row is not mine."""
    if INTERLEAVED:
        pairs = tl.load(x + 2 * column + tl.arange(0, 2 * COLUMNS)[None, :], mask=mine, other=0)  # (ROWS, 2 COLUMNS)
        gate, up = tl.split(tl.reshape(pairs, (ROWS, COLUMNS, 2)))
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
def _store_mx(value, qdata, scale, row, mine, column, num_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RCEIL: tl.constexpr):
    """Quantise value (ROWS, COLUMNS) and store it from `column` on in an MX matrix of num_blocks blocks a row, contiguous."""
    BLOCKS: tl.constexpr = COLUMNS // 32
    code, exponent = _quantize_block(tl.reshape(value, (ROWS, BLOCKS, 32)), 2, RCEIL)
    code_at = row[:, None] * (num_blocks * 32) + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(qdata + code_at, tl.reshape(code, (ROWS, COLUMNS)), mask=mine)
    exponent = tl.reshape(exponent, (ROWS, BLOCKS)).to(tl.uint8)
    tl.store(scale + row[:, None] * num_blocks + column // 32 + tl.arange(0, BLOCKS)[None, :], exponent, mask=mine)


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
    qdata,  # (T, H) uint8
    scale,  # (T, H/32) uint8
    T,
    G,
    num_blocks,  # H / 32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    H = num_blocks * 32
    column_tiles = H // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, INTERLEAVED, GROUPS)
    _store_mx(gate * _sigmoid(gate, SIGMOID) * up, qdata, scale, row, mine, column, num_blocks, ROWS, COLUMNS, RCEIL)


@triton.jit(do_not_specialize=["T", "G"])
def _swiglu_backward_quantize_kernel(
    dh,  # (T, H) bf16 or float32
    dh_row,
    x,  # (T, 2H) bf16 or float32
    x_row,
    bias,  # (G, 2H) bf16 or float32, or None
    offs,  # (G,) int32, or None
    dx_qdata,  # (T, 2H) uint8; every output is None where it is not wanted
    dx_scale,  # (T, 2H/32) uint8
    dx,  # (T, 2H) x's dtype
    h_qdata,  # (T, H) uint8
    h_scale,  # (T, H/32) uint8
    h,  # (T, H) x's dtype
    T,
    G,
    num_blocks,  # H / 32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # divides H
    INTERLEAVED: tl.constexpr,
    GROUPS: tl.constexpr,
    RCEIL: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    H = num_blocks * 32
    column_tiles = H // COLUMNS
    row = (tl.program_id(0) // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS
    mine = (row < T)[:, None]
    gate, up = _load_gate_up(x, x_row, bias, offs, G, row, mine, column, H, ROWS, COLUMNS, INTERLEAVED, GROUPS)
    grad = tl.load(dh + row[:, None] * dh_row + column + tl.arange(0, COLUMNS)[None, :], mask=mine, other=0).to(tl.float32)
    sigmoid = _sigmoid(gate, SIGMOID)
    silu = gate * sigmoid
    d_gate, d_up = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), grad * silu
    if INTERLEAVED:
        pairs = tl.reshape(tl.join(d_gate, d_up), (ROWS, 2 * COLUMNS))
        if dx_qdata is not None:
            _store_mx(pairs, dx_qdata, dx_scale, row, mine, 2 * column, 2 * num_blocks, ROWS, 2 * COLUMNS, RCEIL)
        if dx is not None:
            _store(pairs, dx, row, mine, 2 * column, 2 * H, 2 * COLUMNS)
    else:
        if dx_qdata is not None:
            _store_mx(d_gate, dx_qdata, dx_scale, row, mine, column, 2 * num_blocks, ROWS, COLUMNS, RCEIL)
            _store_mx(d_up, dx_qdata, dx_scale, row, mine, H + column, 2 * num_blocks, ROWS, COLUMNS, RCEIL)
        if dx is not None:
            _store(d_gate, dx, row, mine, column, 2 * H, COLUMNS)
            _store(d_up, dx, row, mine, H + column, 2 * H, COLUMNS)
    if h_qdata is not None:
        _store_mx(silu * up, h_qdata, h_scale, row, mine, column, num_blocks, ROWS, COLUMNS, RCEIL)
    if h is not None:
        _store(silu * up, h, row, mine, column, H, COLUMNS)


def _check(
    where: str, x: torch.Tensor, layout: str, scaling_mode: str, bias: torch.Tensor | None, offs: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Bias, ends and how many groups a program looks at, as the kernels take them."""
    if x.dim() != 2 or x.shape[1] % (2 * MX_BLOCK) or x.dtype not in _INPUTS:
        raise ValueError(f"{where}: x is {tuple(x.shape)} {x.dtype}, want (T, 2H) bfloat16 or float32, H a multiple of {MX_BLOCK}")
    if layout not in LAYOUTS:
        raise ValueError(f"{where}: layout={layout!r}, want one of {', '.join(LAYOUTS)}")
    if scaling_mode not in ("rceil", "floor"):
        raise ValueError(f"{where}: scaling_mode={scaling_mode!r}, want 'rceil' or 'floor'")
    if bias is None:
        return None, None, 0
    if offs is None or offs.dim() != 1 or bias.shape != (offs.shape[0], x.shape[1]) or bias.dtype not in _INPUTS:
        ends = "no offs" if offs is None else f"offs {tuple(offs.shape)}"
        raise ValueError(f"{where}: bias {tuple(bias.shape)} {bias.dtype} with {ends}, want (G, {x.shape[1]}) with (G,)")
    return bias.contiguous(), offs.to(torch.int32).contiguous(), triton.next_power_of_2(max(offs.shape[0], 1))


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


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(T, D) with unit stride along D; a copy only where the strides do not have it."""
    return x if x.stride(1) == 1 else x.contiguous()


def swiglu_quantize(
    x: torch.Tensor,
    layout: str,
    scaling_mode: str,
    exact: bool = False,
    bias: torch.Tensor | None = None,
    offs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = silu(gate) * up, quantised 1x32 along H. Twin: `reference.swiglu_quantize`.

    Args:
        x: (T, 2H) bf16 or float32, H a multiple of 32, any strides (copied first unless the last one is 1).
        layout: "concatenated" (gate in columns 0..H-1, up behind) or "interleaved" (gate in even columns, up in odd ones).
        scaling_mode: "rceil" or "floor".
        exact: IEEE's division and the exact exp.
        bias: (G, 2H) bf16 or float32 in x's layout, added to the rows of each group; rows behind the last group get none.
        offs: (G,) int32 or int64 END rows of the groups on the device, needed with a bias.

    Returns:
        qdata (T, H) float8_e4m3fn and scale (T, H/32) float8_e8m0fnu, both contiguous.
    """
    bias, offs, groups = _check("swiglu_quantize", x, layout, scaling_mode, bias, offs)

    num_rows, width = x.shape[0], x.shape[1] // 2
    qdata, scale = _empty_mx(num_rows, width, x)

    if qdata.numel():
        tile_rows, tile_columns = tiles.SWIGLU.fit(width)
        rows = _as_rows(x)
        _swiglu_quantize_kernel[(triton.cdiv(num_rows, tile_rows) * (width // tile_columns),)](
            x=rows,
            x_row=rows.stride(0),
            bias=bias,
            offs=offs,
            qdata=qdata,
            scale=scale,
            T=num_rows,
            G=0 if offs is None else offs.shape[0],
            num_blocks=width // MX_BLOCK,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            INTERLEAVED=layout == "interleaved",
            GROUPS=groups,
            RCEIL=scaling_mode == "rceil",
            SIGMOID=_sigmoid_form(exact),
            num_warps=tiles.SWIGLU.warps,
            enable_fp_fusion=not exact,
        )
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
) -> list[torch.Tensor]:
    """Gradient of x, and h once more, in one pass, each as its readers want it. Twin: `reference.swiglu_backward_quantize`.

    Args:
        dh: (T, H) bf16 or float32, the gradient of h, any strides (copied first unless the last one is 1).
        x, layout, scaling_mode, exact, bias, offs: as in `swiglu_quantize`.
        dx, h: forms of the two results: "none", "mx" (1x32 along the columns), "hp" (x's dtype) or "mx+hp".

    Returns:
        what was asked for, in this order, contiguous: dx's qdata (T, 2H) float8_e4m3fn and scale (T, 2H/32) float8_e8m0fnu in x's
        layout; dx (T, 2H) in x's dtype; h's qdata (T, H) and scale (T, H/32); h (T, H) in x's dtype.
    """
    bias, offs, groups = _check("swiglu_backward_quantize", x, layout, scaling_mode, bias, offs)
    num_rows, width = x.shape[0], x.shape[1] // 2
    if dh.shape != (num_rows, width) or dh.dtype not in _INPUTS:
        raise ValueError(
            f"swiglu_backward_quantize: dh is {tuple(dh.shape)} {dh.dtype}, want {(num_rows, width)} bfloat16 or float32 "
            f"for x {tuple(x.shape)}"
        )

    dx_parts, h_parts = _empty_forms(dx, "dx", num_rows, 2 * width, x), _empty_forms(h, "h", num_rows, width, x)
    wanted = any(part is not None for part in (*dx_parts, *h_parts))

    if x.numel() and wanted:
        tile = tiles.SWIGLU if dx_parts[2] is None and h_parts[2] is None else tiles.SWIGLU_HP
        tile_rows, tile_columns = tile.fit(width)
        rows, grads = _as_rows(x), _as_rows(dh)
        _swiglu_backward_quantize_kernel[(triton.cdiv(num_rows, tile_rows) * (width // tile_columns),)](
            dh=grads,
            dh_row=grads.stride(0),
            x=rows,
            x_row=rows.stride(0),
            bias=bias,
            offs=offs,
            dx_qdata=dx_parts[0],
            dx_scale=dx_parts[1],
            dx=dx_parts[2],
            h_qdata=h_parts[0],
            h_scale=h_parts[1],
            h=h_parts[2],
            T=num_rows,
            G=0 if offs is None else offs.shape[0],
            num_blocks=width // MX_BLOCK,
            ROWS=tile_rows,
            COLUMNS=tile_columns,
            INTERLEAVED=layout == "interleaved",
            GROUPS=groups,
            RCEIL=scaling_mode == "rceil",
            SIGMOID=_sigmoid_form(exact),
            num_warps=tile.warps,
            enable_fp_fusion=not exact,
        )
    types = (torch.float8_e4m3fn, torch.float8_e8m0fnu, x.dtype) * 2
    return [part.view(dtype) for part, dtype in zip((*dx_parts, *h_parts), types, strict=True) if part is not None]
