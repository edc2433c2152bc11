"""Rebased MX operands on the GPU, byte for byte like their twins in `mxep.reference.rebase`.

Rows: one warp a row, one launch.  Tokens: a plan of where tokens go, one pass over the scales, one transposing pass per operand; every
byte of data is read once and written once.  No host sync; offsets stay on the device.
"""

from __future__ import annotations

import functools

import torch

from mxep.kernels.nvrtc import Kernel
from mxep.reference.rebase import SPAN, WIDE_ABOVE, RebasedRows, RebasedTokens, RebasedWeight
from mxep.shapes import MX_BLOCK, round_up

_HEADERS = ("hopper.cuh", "mx_bytes.cuh")
_ROW_WARPS = 4  # rows a block of rebase_rows.cu takes
_LOAD_BYTES = 16  # what a thread loads at a time: rows start at multiples of it
_CHUNK_WORDS = 64  # words of 4 scales that token_maxima.cu stages at a time
_TEAMS = 2  # token tiles a block of rebase_tokens.cu takes
_PLAN_THREADS = 1024


def check_device(where: str, data: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise ValueError unless all of them are on one device: kernels take addresses, and one of another device is a fault."""
    for name, tensor in others.items():
        if tensor.device != data.device:
            raise ValueError(f"{where}: {name} is on {tensor.device}, want {data.device} like the data; move it there")


def check_mx(where: str, qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MX rows as the kernels read them: the same, or copies where strides or addresses do not allow 16-byte loads.

    Raises:
        ValueError: not (R, D) e4m3 with (R, D/32) e8m0 scales, D a positive multiple of 32.
    """
    fits = qdata.dtype == torch.float8_e4m3fn and scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    width = qdata.shape[-1] if qdata.dim() == 2 else 0
    if not (fits and width) or width % MX_BLOCK or scale.shape != (qdata.shape[0], width // MX_BLOCK):
        raise ValueError(
            f"{where}: qdata {tuple(qdata.shape)} {qdata.dtype} with scale {tuple(scale.shape)} {scale.dtype}, "
            "want (R, D) float8_e4m3fn with (R, D/32) float8_e8m0fnu, D a multiple of 32"
        )
    check_device(where, qdata, scale=scale)
    if qdata.stride(-1) != 1 or qdata.stride(0) % _LOAD_BYTES or qdata.data_ptr() % _LOAD_BYTES:
        qdata = qdata.contiguous() if qdata.stride(-1) != 1 or qdata.stride(0) % _LOAD_BYTES else qdata.clone()
    return qdata, scale if scale.stride(-1) == 1 else scale.contiguous()


@functools.cache
def _rows_kernel(width: int, spans: bool, mapped: bool) -> Kernel:
    options: dict[str, bool | int] = {"WIDTH": width, "SPANS": spans, "MAP": mapped}
    return Kernel("rebase_rows", (*_HEADERS, "rebase_rows.cu"), options, threads=32 * _ROW_WARPS)


def rebase_rows(qdata: torch.Tensor, scale: torch.Tensor, wide_above: int, row_map: torch.Tensor | None = None) -> RebasedRows:
    """One exponent per row, or one per 128 columns where a row's exponents spread by more. Twin: `reference.rebase.rebase_rows`.

    Args:
        qdata: (R, D) float8_e4m3fn, row-strided or contiguous, D a multiple of 32.  scale: (R, D/32) float8_e8m0fnu.
        wide_above: a spread, or one of `WIDE_ABOVE`'s values: 255 no row is wide, -1 all are.
        row_map: (P,) int32 on the device, the source row of each output row, -1 for a row of zeros; None keeps the order.

    Returns:
        RebasedRows of P rows; `spans` is written in wide rows alone, and None where no row can be wide.
    """
    qdata, scale = check_mx("rebase_rows", qdata, scale)
    if row_map is not None:
        check_device("rebase_rows", qdata, row_map=row_map)
        row_map = row_map.to(torch.int32).contiguous()

    num_rows, width, device = qdata.shape[0] if row_map is None else row_map.shape[0], qdata.shape[1], qdata.device
    has_spans = wide_above < WIDE_ABOVE["row"]
    data = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device)
    row_scale = torch.empty(num_rows, dtype=torch.float32, device=device)
    spread = torch.empty(num_rows, dtype=torch.uint8, device=device)
    spans = None
    if has_spans:  # the copy engine wants rows that start at multiples of 16 bytes
        spans = torch.empty((-(-width // SPAN), round_up(num_rows, 4)), dtype=torch.float32, device=device)[:, :num_rows]

    if num_rows:
        _rows_kernel(width, has_spans, row_map is not None).launch(
            device.index,
            -(-num_rows // _ROW_WARPS),
            qdata,
            qdata.stride(0),
            scale,
            scale.stride(0),
            row_map,
            num_rows,
            wide_above,
            data,
            row_scale,
            spans,
            spans.stride(0) if spans is not None else 0,
            spread,
        )
    return RebasedRows(data, row_scale, spans, spread)


def rebase_weight(qdata: torch.Tensor, scale: torch.Tensor) -> RebasedWeight:
    """A grouped weight with one exponent per output column. Twin: `reference.rebase.rebase_weight`.

    Args:
        qdata: (G, N, K) float8_e4m3fn.  scale: (G, N, K/32) float8_e8m0fnu.
    """
    rows = rebase_rows(qdata.flatten(0, 1), scale.flatten(0, 1), WIDE_ABOVE["row"])
    return RebasedWeight(rows.data.view(qdata.shape), rows.scale.view(qdata.shape[:2]))


def _in_words(scale: torch.Tensor) -> bool:
    """Whether every row of scales can be read four at a time."""
    return scale.shape[1] % 4 == 0 and scale.stride(0) % 4 == 0 and scale.data_ptr() % 4 == 0


@functools.cache
def _maxima_kernels(a_width: int, g_width: int, a_words: bool, g_words: bool) -> tuple[Kernel, Kernel]:
    options: dict[str, bool | int] = {"D_X": a_width, "D_G": g_width, "WORDS_X": a_words, "WORDS_G": g_words}
    files = (*_HEADERS, "token_maxima.cu")
    staged = max(min(-(-width // SPAN), _CHUNK_WORDS) for width in (a_width, g_width))
    return Kernel("token_plan", files, options, _PLAN_THREADS), Kernel("token_maxima", files, options, 512, 1024 * staged)


@functools.cache
def _tokens_kernel(width: int, gets: bool) -> Kernel:
    return Kernel("rebase_tokens", (*_HEADERS, "rebase_tokens.cu"), {"WIDTH": width, "GETS": gets}, threads=256 * _TEAMS)


def rebase_tokens(qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor) -> RebasedTokens:
    """The operands of a wgrad sum_t g_t a_t, transposed, token exponents moved to `grad`. Twin: `reference.rebase.rebase_tokens`.

    Args:
        qg, sg: (M, N) float8_e4m3fn and (M, N/32) float8_e8m0fnu, row-strided or contiguous.  qa, sa: (M, K) and (M, K/32).
        offs: (G,) int32 or int64 END offsets on the device, not decreasing, the last at most M; groups of any size.

    Returns:
        RebasedTokens; T = 128 * (M // 128 + G), of which what lies past ends[-1] is not written.
    """
    qg, sg = check_mx("rebase_tokens", qg, sg)
    qa, sa = check_mx("rebase_tokens", qa, sa)
    if qg.shape[0] != qa.shape[0] or offs.dim() != 1 or not offs.shape[0]:
        raise ValueError(f"rebase_tokens: grad {tuple(qg.shape)}, a {tuple(qa.shape)}, offs {tuple(offs.shape)}, want (M, N), (M, K), (G,)")
    check_device("rebase_tokens", qg, a=qa, offs=offs)
    offs = offs.to(torch.int32).contiguous()

    (M, N), K, G, device = qg.shape, qa.shape[1], offs.shape[0], qg.device
    num_tiles = M // SPAN + G  # a group adds at most one tile that is not full
    num_tokens = SPAN * num_tiles
    grad = torch.empty((N, num_tokens), dtype=torch.float8_e4m3fn, device=device)
    a = torch.empty((K, num_tokens), dtype=torch.float8_e4m3fn, device=device)
    grad_scale = torch.empty((G, N), dtype=torch.float32, device=device)
    a_scale = torch.empty((G, K), dtype=torch.float32, device=device)
    ends, order = torch.empty((2, G), dtype=torch.int32, device=device).unbind()
    tiles = torch.empty((num_tiles, 4), dtype=torch.int32, device=device)
    token_exponent = torch.empty(num_tokens, dtype=torch.uint8, device=device)
    tables = torch.empty(G * (K + N) // MX_BLOCK, dtype=torch.int32, device=device)
    max_a, max_g = tables[: G * K // MX_BLOCK], tables[G * K // MX_BLOCK :]

    plan, maxima = _maxima_kernels(K, N, _in_words(sa), _in_words(sg))
    blocks = min(-(-max(tables.numel(), G) // _PLAN_THREADS), 64)
    plan.launch(device.index, blocks, offs, G, M, num_tiles, tiles, ends, order, tables, tables.numel())
    maxima.launch(device.index, num_tiles, sa, sa.stride(0), sg, sg.stride(0), tiles, token_exponent, max_a, max_g)
    for qdata, scale, table, out, out_scale, gets in ((qa, sa, max_a, a, a_scale, False), (qg, sg, max_g, grad, grad_scale, True)):
        _tokens_kernel(qdata.shape[1], gets).launch(
            device.index,
            -(-num_tiles // _TEAMS) * -(-qdata.shape[1] // SPAN),
            qdata,
            qdata.stride(0),
            scale,
            scale.stride(0),
            token_exponent,
            table,
            tiles,
            num_tiles,
            out,
            num_tokens,
            out_scale,
        )
    return RebasedTokens(grad, grad_scale, a, a_scale, ends, order)
