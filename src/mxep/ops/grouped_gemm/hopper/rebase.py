"""Rebased MX operands on the GPU, byte for byte like their references in `mxep.ops.grouped_gemm.hopper.rebase_reference`.

Rows: one warp a row, one launch.  Tokens: a plan of where tokens go, one pass over the scales, one transposing pass over both operands;
every byte of data is read once and written once.  No host sync; offsets stay on the device.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import NamedTuple

import torch

from mxep.ops.grouped_gemm.hopper.rebase_reference import (
    BLOCK_128,
    MAX_SPREAD,
    RebasedRows,
    RebasedTokens,
    RebasedWeight,
    empty_rebased,
)
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Arguments, Kernel
from mxep.shapes import MX_BLOCK, round_up

_HEADERS = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh")
ROWS_FILES = (*_HEADERS, "grouped_gemm/hopper/wide_rows.cuh", "grouped_gemm/hopper/rebase_rows.cu")
# Blocks of 8 warps write whole sectors of block scales.  With so many parts of 512 columns the registers let more warps onto a
# multiprocessor in blocks of 4.
_PARTS_OF_FOUR_WARPS = (9, 10, 13, 14)
LOAD_BYTES = 16  # what a thread loads at a time: rows start at multiples of it
_PLAN_THREADS, _MAXIMA_THREADS = 1024, 128
_MOST_PLANNERS = 256  # blocks of token_plan
_PANEL_BYTES = 2**23  # of rows that several tokens read, so that L2 holds them; H200, 2026-11: docs/log.md
_KEPT = 1024  # packed arguments, by address
_TEAMS = 2  # token tiles a block of rebase_tokens.cu takes
_PART_BYTES = 256  # parts of an allocation start at multiples of it


def check_device(where: str, data: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless all of them are on one device: kernels take addresses, and one of another device is a fault."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != data.device:
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
    if scale.device != qdata.device:
        check_device(where, qdata, scale=scale)
    if qdata.stride(-1) != 1 or qdata.stride(0) % LOAD_BYTES or qdata.data_ptr() % LOAD_BYTES:
        qdata = qdata.contiguous() if qdata.stride(-1) != 1 or qdata.stride(0) % LOAD_BYTES else qdata.clone()
    return qdata, scale if scale.stride(-1) == 1 else scale.contiguous()


def rows_options(width: int, block_scales: bool, mapped: bool, num_valid_rows: bool = False) -> dict[str, bool | int]:
    """The constants in front of rebase_rows.cu for one variant."""
    return {
        "WIDTH": width,
        "WARPS": 4 if -(-width // 512) in _PARTS_OF_FOUR_WARPS else 8,
        "BLOCK_SCALES": block_scales,
        "MAP": mapped,
        "NUM_VALID": num_valid_rows,
    }


@functools.cache
def rows_kernel(width: int, block_scales: bool, mapped: bool, num_valid_rows: bool) -> Kernel:
    options = rows_options(width, block_scales, mapped, num_valid_rows)
    return Kernel("rebase_rows", ROWS_FILES, options, threads=32 * options["WARPS"])


def rows_blocks(num_rows: int, kernel: Kernel, num_valid_rows: bool) -> int:
    """A warp a row; blocks that walk over the rows where only some of these are wanted."""
    blocks = -(-num_rows * 32 // kernel.threads)
    return min(blocks, tiles.LOOP_PROGRAMS) if num_valid_rows else blocks


def rebase_rows(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    max_spread: int,
    row_map: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
) -> RebasedRows:
    """One exponent per row, or one per 128 columns where a row's exponents spread by more.

    Args:
        qdata: (R, D) float8_e4m3fn, row-strided or contiguous, D a multiple of 32.  scale: (R, D/32) float8_e8m0fnu.
        max_spread: a spread, or one of `MAX_SPREAD`'s values: 255 no row is wide, -1 all are.
        row_map: (P,) int32 on the device, the source row of each output row, -1 for a row of zeros; None keeps the order.
        num_valid_rows: (1,) int32 on the device, how many rows of the output are wanted; None: all.

    Returns:
        RebasedRows of P rows, not defined from num_valid_rows on.  `block_scale` is defined in wide rows only, None if no row can be wide.
    """
    qdata, scale = check_mx("rebase_rows", qdata, scale)
    if row_map is not None:
        check_device("rebase_rows", qdata, row_map=row_map)
        row_map = row_map.to(torch.int32).contiguous()

    num_rows, width, device = qdata.shape[0] if row_map is None else row_map.shape[0], qdata.shape[1], qdata.device
    has_block_scales = max_spread < MAX_SPREAD["row"]
    data, row_scale, block_scale, _ = empty_rebased(qdata, num_rows, width, has_block_scales)
    spread = qdata.new_empty(num_rows, dtype=torch.uint8)

    if num_rows:
        kernel = rows_kernel(width, has_block_scales, row_map is not None, num_valid_rows is not None)
        rows = qdata, qdata.stride(0), scale, scale.stride(0), row_map, num_rows, max_spread
        outs = data, row_scale, block_scale, 0 if block_scale is None else block_scale.stride(0), spread
        kernel.launch(device.index, rows_blocks(num_rows, kernel, num_valid_rows is not None), *rows, *outs, num_valid_rows)
    return RebasedRows(data, row_scale, block_scale, spread)


def rebase_weight(qdata: torch.Tensor, scale: torch.Tensor) -> RebasedWeight:
    """A grouped weight with one exponent per output column.

    Args:
        qdata: (G, N, K) float8_e4m3fn.  scale: (G, N, K/32) float8_e8m0fnu.
    """
    rows = rebase_rows(qdata.flatten(0, 1), scale.flatten(0, 1), MAX_SPREAD["row"])
    return RebasedWeight(rows.data.view(qdata.shape), rows.scale.view(qdata.shape[:2]))


def in_words(scale: torch.Tensor) -> bool:
    """Whether every row of scales can be read four at a time."""
    return scale.shape[1] % 4 == 0 and scale.stride(0) % 4 == 0 and scale.data_ptr() % 4 == 0


class _Operand(ctypes.Structure):  # struct Operand of rebase_tokens.cu
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "s", "row_map", "table", "moved", "out", "scale")),
        *((name, ctypes.c_longlong) for name in ("q_row", "s_row")),
        ("panel", ctypes.c_int),
    ]


class _Plan(ctypes.Structure):  # struct Plan of rebase_tokens.cu
    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("out_row", ctypes.c_longlong),
        ("tile_count", ctypes.c_int),
    ]


class _Scales(ctypes.Structure):  # struct Scales of token_plan.cu
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("s", "row_map")),
        ("s_row", ctypes.c_longlong),
        ("blocks", ctypes.c_int),
    ]


class TokenRows(NamedTuple):
    """The properties of one operand that the token kernels are compiled for."""

    width: int
    words: bool  # scales can be read four at a time
    mapped: bool


class _Source(NamedTuple):
    """One operand's rows by address; row_map 0: none; panel as in rebase_tokens.cu."""

    q: int
    q_row: int
    s: int
    s_row: int
    row_map: int
    panel: int


def tokens_options(file: str, a: TokenRows, g: TokenRows, walk: bool = False) -> dict[str, bool | int]:
    """The constants in front of token_maxima.cu or rebase_tokens.cu for one variant."""
    more = {"WALK": walk} if file == "grouped_gemm/hopper/rebase_tokens.cu" else {}
    fields = {"WIDTH": "width", "MAP": "mapped", **({"WORDS": "words"} if file == "grouped_gemm/hopper/token_maxima.cu" else {})}
    return {f"{name}_{letter}": getattr(rows, field) for name, field in fields.items() for letter, rows in (("A", a), ("G", g))} | more


_PLAN = Kernel("token_plan", ("runtime/hopper.cuh", "grouped_gemm/hopper/token_plan.cu"), {}, _PLAN_THREADS)


@functools.cache
def _token_kernels(a: TokenRows, g: TokenRows, walk: bool) -> tuple[Kernel, Kernel]:
    """token_maxima, rebase_tokens."""
    maxima, moves = "grouped_gemm/hopper/token_maxima.cu", "grouped_gemm/hopper/rebase_tokens.cu"
    return (
        Kernel("token_maxima", (*_HEADERS, maxima), tokens_options(maxima, a, g), _MAXIMA_THREADS),
        Kernel("rebase_tokens", (*_HEADERS, moves), tokens_options(moves, a, g, walk), 256 * _TEAMS),
    )


@functools.lru_cache(maxsize=_KEPT)
def _token_arguments(
    K: int, N: int, M: int, G: int, offs: int, from_a: _Source, from_g: _Source, a: int, a_scale: int, grad: int,
    grad_scale: int, scratch: int,
) -> tuple[Arguments, Arguments, Arguments]:  # fmt: skip
    """Packed arguments of token_plan, token_maxima and rebase_tokens, from addresses."""
    parts = _scratch_parts(K, N, M, G)
    tiles, max_a, max_g, moved_a, moved_g, g_gives, ends, order = (scratch + 4 * start for start in parts[:-1])
    num_tiles = M // BLOCK_128 + G
    to_a = _Operand(from_a.q, from_a.s, from_a.row_map, max_a, moved_a, a, a_scale, from_a.q_row, from_a.s_row, from_a.panel)
    to_g = _Operand(from_g.q, from_g.s, from_g.row_map, max_g, moved_g, grad, grad_scale, from_g.q_row, from_g.s_row, from_g.panel)
    scales = from_a.s, from_a.s_row, from_a.row_map, from_g.s, from_g.s_row, from_g.row_map
    looked_at = (_Scales(x.s, x.row_map, x.s_row, width // MX_BLOCK) for x, width in ((from_a, K), (from_g, N)))
    return (
        Arguments(offs, G, M, num_tiles, tiles, ends, order, max_a, parts[3] - parts[1], *looked_at, g_gives),
        Arguments(*scales, tiles, moved_a, moved_g, max_a, max_g, g_gives),
        Arguments(to_a, to_g, _Plan(tiles, BLOCK_128 * num_tiles, num_tiles)),
    )


class TokenPlan(NamedTuple):
    """A call of `launch_tokens` without its addresses: kernels, blocks, and where in one allocation everything lies, in bytes.

    Attributes:
        num_tokens: T of `RebasedTokens`.
        grad, a, grad_scale, a_scale, scratch, ends, order: where each begins; ends and order are parts of the scratch words.
        end: where all ends.
    """

    shape: tuple[int, int, int, int]  # K, N, M, G
    walk: bool
    find_maxima: Kernel
    move: Kernel
    planners: int
    num_tiles: int
    movers: int
    num_tokens: int
    grad: int
    a: int
    grad_scale: int
    a_scale: int
    scratch: int
    ends: int
    order: int
    end: int


@functools.lru_cache(maxsize=_KEPT)
def token_plan(M: int, K: int, N: int, G: int, words_a: bool, words_g: bool, mapped_a: bool, mapped_g: bool, walk: bool) -> TokenPlan:
    """The plan for M tokens; words, mapped: as in `TokenRows`; walk: most tokens may be in no group."""
    num_tiles = M // BLOCK_128 + G  # a group adds at most one tile that is not full
    num_tokens = BLOCK_128 * num_tiles
    sizes = N * num_tokens, K * num_tokens, 4 * G * N, 4 * G * K
    grad, a, grad_scale, a_scale, scratch = itertools.accumulate((round_up(size, _PART_BYTES) for size in sizes), initial=0)
    *_, ends, order, words = (scratch + 4 * start for start in _scratch_parts(K, N, M, G))
    find_maxima, move = _token_kernels(TokenRows(K, words_a, mapped_a), TokenRows(N, words_g, mapped_g), walk)
    planners = min(max(-(-G * (K + N) // (MX_BLOCK * _PLAN_THREADS)), G + 1), _MOST_PLANNERS)
    movers = -(-num_tiles // _TEAMS) * (-(-K // BLOCK_128) + -(-N // BLOCK_128))
    movers = min(movers, tiles.LOOP_PROGRAMS) if walk else movers
    parts = grad, a, grad_scale, a_scale, scratch, ends, order, words
    return TokenPlan((K, N, M, G), walk, find_maxima, move, planners, num_tiles, movers, num_tokens, *parts)


_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # qdata, scale, row map


def _source(rows: _Rows, walk: bool) -> _Source:
    """Panels of all columns unless several tokens read a row."""
    (qdata, scale, row_map), map_address = rows, 0
    num_rows, width = qdata.shape
    panel = all_columns = -(-width // BLOCK_128)
    if row_map is not None:
        map_address = row_map.data_ptr()
        if not walk and row_map.shape[0] >= 2 * num_rows:
            panel = min(max(_PANEL_BYTES // (BLOCK_128 * max(num_rows, 1)), 1), all_columns)
    return _Source(qdata.data_ptr(), qdata.stride(0), scale.data_ptr(), scale.stride(0), map_address, panel)


def launch_tokens(plan: TokenPlan, memory: int, grad: _Rows, a: _Rows, offs: torch.Tensor) -> None:
    """`rebase_tokens` of operands that the kernels take as they are, into `plan.end` bytes of memory at that address."""
    device, from_a, from_g = offs.device.index, _source(a, plan.walk), _source(grad, plan.walk)
    outs = memory + plan.a, memory + plan.a_scale, memory + plan.grad, memory + plan.grad_scale, memory + plan.scratch
    tables, scales, moves = _token_arguments(*plan.shape, offs.data_ptr(), from_a, from_g, *outs)
    _PLAN.run(device, plan.planners, tables)
    plan.find_maxima.run(device, plan.num_tiles, scales)
    plan.move.run(device, plan.movers, moves)


@functools.lru_cache(maxsize=_KEPT)
def _scratch_parts(K: int, N: int, M: int, G: int) -> tuple[int, ...]:
    """Starts of the parts of the scratch memory, in words and at multiples of 16 bytes; at last its end.

    The parts: tiles (num_tiles, 4), the tables of maxima of a and of g, the moved exponents of a's and g's tokens (bytes), which operand's
    exponents move (G,), ends (G,), order (G,).
    """
    num_tiles = M // BLOCK_128 + G
    sizes = (4 * num_tiles, G * K // MX_BLOCK, G * N // MX_BLOCK, *[BLOCK_128 // 4 * num_tiles] * 2, G, G, G)
    return tuple(itertools.accumulate((round_up(size, 4) for size in sizes), initial=0))


def _check_tokens(qg: torch.Tensor, qa: torch.Tensor, offs: torch.Tensor, g_map: torch.Tensor | None, a_map: torch.Tensor | None) -> int:
    """The number of tokens M."""
    tokens_g, tokens_a = qg.shape[0] if g_map is None else g_map.shape[0], qa.shape[0] if a_map is None else a_map.shape[0]
    if tokens_g != tokens_a or offs.dim() != 1 or not offs.shape[0]:
        got = f"{tokens_g} tokens of grad {tuple(qg.shape)}, {tokens_a} of a {tuple(qa.shape)}, offs {tuple(offs.shape)}"
        raise ValueError(f"rebase_tokens: {got}, want M tokens of (M, N) and of (M, K), or of more rows with a map (M,), and offs (G,)")
    check_device("rebase_tokens", qg, a=qa, offs=offs, g_map=g_map, a_map=a_map)
    return tokens_g


def rebase_tokens(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
    *,
    mostly_padding: bool = False,
) -> RebasedTokens:
    """The operands of a wgrad sum_t g_t a_t, transposed, token exponents moved.

    Args:
        qg, sg: (M, N) float8_e4m3fn and (M, N/32) float8_e8m0fnu, row-strided or contiguous.  qa, sa: (M, K) and (M, K/32).
        offs: (G,) int32 or int64 END offsets on the device, not decreasing, the last at most M; groups of any size.
        g_map, a_map: (M,) int32 on the device, the row of qg or qa that is token t, -1 for zeros; rows are then any number.
        mostly_padding: most tokens, or all of them, may be in no group, as in a chunk; this costs next to nothing if there are none.

    Returns:
        RebasedTokens; T = 128 * (M // 128 + G), undefined from ends[-1] on.
    """
    qg, sg = check_mx("rebase_tokens", qg, sg)
    qa, sa = check_mx("rebase_tokens", qa, sa)
    M = _check_tokens(qg, qa, offs, g_map, a_map)
    offs = offs.to(torch.int32).contiguous()
    g_map = None if g_map is None else g_map.to(torch.int32).contiguous()
    a_map = None if a_map is None else a_map.to(torch.int32).contiguous()

    N, K, G = qg.shape[1], qa.shape[1], offs.shape[0]
    plan = token_plan(M, K, N, G, in_words(sa), in_words(sg), a_map is not None, g_map is not None, mostly_padding)
    memory = qg.new_empty(plan.end, dtype=torch.uint8)
    launch_tokens(plan, memory.data_ptr(), (qg, sg, g_map), (qa, sa, a_map), offs)

    def part(start: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    grad, a = (part(start, torch.float8_e4m3fn, width, plan.num_tokens) for start, width in ((plan.grad, N), (plan.a, K)))
    grad_scale, a_scale = (part(start, torch.float32, G, width) for start, width in ((plan.grad_scale, N), (plan.a_scale, K)))
    return RebasedTokens(grad, grad_scale, a, a_scale, part(plan.ends, torch.int32, G), part(plan.order, torch.int32, G))
