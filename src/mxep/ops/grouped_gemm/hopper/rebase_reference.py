"""MX operands for FP8 tensor cores without block scales: exponents are rebased, exactly where e4m3 has the range.

An MX scale is a power of two, so a block's e4m3 values times 2^(own exponent - a common exponent) are the same numbers unless they fall
into e4m3's subnormals.  Forward and dgrad rebase along a row (`rebase_rows`), wgrad along the tokens of a group (`rebase_tokens`).
docs/numerics.md has the errors.

Two blocks of a row, one scaled by 2^0 (byte 127), one by 2^-2: the row's exponent is the larger one, the other block's 8 becomes 2.

>>> import torch
>>> data = torch.full((1, 64), 8.0).to(torch.float8_e4m3fn)
>>> scale = torch.tensor([[127, 125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
>>> rows = rebase_rows(data, scale, max_spread=8)
>>> rows.data[0, ::32].float().tolist(), rows.scale.tolist(), rows.spread.tolist()
([8.0, 2.0], [1.0], [2])
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from mxep.ops.quantize.reference import (
    E4M3_NAN,
    E8M0_NAN,
    QUANTISABLE,
    check_input,
    dequantize,
    quantize,
    quantize_columnwise,
    scale_to_float32,
)
from mxep.ops.rows.reference import in_order
from mxep.shapes import MX_BLOCK, round_up

BLOCK_128 = 128  # columns that share a block scale in a wide row, and tokens that a wgrad's groups are padded to
_MX_BLOCKS = BLOCK_128 // MX_BLOCK
_SAMPLES, _MARGIN = 32, 2  # tokens of a group that are sampled, and by how much their mean spread must differ
_LARGEST_SHIFT = 60  # every e4m3 value is zero long before
_NEAR, _FAR = 8, 60  # how far below a wide row's base a block may lie; a row of more spread has base 2^0

# Scale granularity -> the largest spread of exponents of a row with one scale; above it, the row is wide and has one scale per 128
# columns.  At a distance s a value
# becomes subnormal below 2^(s - 14.8) of its block's largest: 8 touches what is below 0.9% of it.
MAX_SPREAD: dict[str, int] = {"auto": 8, "row": 255, "span": -1}


class RebasedRows(NamedTuple):
    """MX rows with one exponent each, or one per 128 columns.

    Attributes:
        data: (P, D) float8_e4m3fn.
        scale: (P,) float32, the row's power of two; negative for a wide row.
        block_scale: (ceil(D/128), P) float32, a wide row's factors of that power of two per 128 columns, most of them 1; undefined in
            other rows.  None where no row may be wide.
        spread: (P,) uint8, largest minus smallest exponent of the blocks that hold anything but zeros; None: not asked for.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block_scale: torch.Tensor | None = None
    spread: torch.Tensor | None = None


class RebasedWeight(NamedTuple):
    """(G, N, K) float8_e4m3fn with one scale per group and output column, (G, N) float32."""

    data: torch.Tensor
    scale: torch.Tensor


def empty_rebased(like: torch.Tensor, num_rows: int, width: int, block_scales: bool) -> RebasedRows:
    """Memory for rebased rows on like's device, without their spread; kernels write block scales in whole sectors of 8 rows."""
    data = like.new_empty((num_rows, width), dtype=torch.float8_e4m3fn)
    scale = like.new_empty(num_rows, dtype=torch.float32)
    if not block_scales:
        return RebasedRows(data, scale)
    whole = like.new_empty((-(-width // BLOCK_128), round_up(num_rows, 8)), dtype=torch.float32)
    is_whole = isinstance(num_rows, int) and num_rows % 8 == 0  # a graph's symbolic number must not be asked
    return RebasedRows(data, scale, whole if is_whole else whole[:, :num_rows])


class RebasedTokens(NamedTuple):
    """Both operands of a wgrad, tokens contiguous, one exponent per group and 32 columns.

    Every group starts at a multiple of 128 tokens and is padded with zeros; an empty one has none.  T is an upper bound.

    Attributes:
        grad: (N, T) float8_e4m3fn, undefined from ends[-1] on.  grad_scale: (G, N) float32, undefined for empty groups.
        a: (K, T).  a_scale: (G, K).
        ends: (G,) int32, END token of every group.  order: (G,) int32, the groups by size, largest first.
    """

    grad: torch.Tensor
    grad_scale: torch.Tensor
    a: torch.Tensor
    a_scale: torch.Tensor
    ends: torch.Tensor
    order: torch.Tensor


def shift_down(qdata: torch.Tensor, shift: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """e4m3 blocks (..., 32) times 2^-shift (...), rounded to e4m3; shift below 0 counts as 0; 0x7F for every NaN and where `nan`."""
    value = qdata.float() * torch.exp2(-shift.clamp(0, _LARGEST_SHIFT).float())[..., None]
    code = value.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(nan[..., None] | value.isnan(), E4M3_NAN, code)


def _exponents(qdata: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks (P, D/32, 32) e4m3, exponents (P, D/32) int32, which of them count)."""
    blocks = qdata.unflatten(-1, (-1, MX_BLOCK))
    own = scale.view(torch.uint8).int()
    return blocks, own, ((blocks.view(torch.uint8) & 0x7F) != 0).any(-1) & (own != E8M0_NAN)


def _base(block_top: torch.Tensor, block_low: torch.Tensor, top: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """(P,) the exponent that a wide row's 128-column blocks share where they can.

    Args: the largest and smallest exponents of its 128-column blocks (P, blocks), then of the row (P,).
    """
    something = block_low < E8M0_NAN
    lower = something & (block_top <= low[:, None] + _NEAR)
    upper = something & (block_low >= top[:, None] - _NEAR)
    base = torch.where(lower.sum(-1) > upper.sum(-1), torch.where(lower, block_top, 0).amax(-1), top)
    return torch.where(top - low > _FAR, 127, base)


def rebase_rows(
    qdata: torch.Tensor,
    scale: torch.Tensor,
    max_spread: int,
    row_map: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
) -> RebasedRows:
    """One exponent per row, or one per 128 columns for rows whose exponents spread by more than `max_spread`.

    The exponent is the largest of the blocks that count: blocks of zeros and NaN blocks (scale 0xFF) do not.  A NaN block becomes NaN
    (0x7F); a row where nothing counts has scale 2^-127.

    A wide row has a base.  A 128-column block whose MX blocks all lie at most 8 below the base shares it; the others keep their own
    largest exponent.  So an MX block moves by more than 8 only inside its 128 columns.  The base is the row's largest exponent or, where
    more 128-column blocks can share that, the largest exponent of the blocks within 8 of the row's smallest; 2^0 in rows that spread by
    more than 60.

    Args:
        qdata: (R, D) float8_e4m3fn, row-strided or contiguous, D a multiple of 32.  scale: (R, D/32) float8_e8m0fnu.
        max_spread: a spread, or one of `MAX_SPREAD`'s values: 255 no row is wide, -1 all are.
        row_map: (P,) int32, the source row of each output row, -1 for a row of zeros; None keeps the order.
        num_valid_rows: (1,) int32, how many rows of the output are wanted; without effect here.

    Returns:
        RebasedRows of P rows, not defined from num_valid_rows on.
    """
    qdata, scale = in_order(qdata, scale, row_map)
    blocks, own, counts = _exponents(qdata, scale)
    top = torch.where(counts, own, 0).amax(-1)
    low = torch.where(counts, own, E8M0_NAN).amin(-1)
    spread = (top - low).clamp(min=0)
    wide = spread > max_spread

    num_rows, num_blocks = own.shape
    num_blocks_128 = -(-num_blocks // _MX_BLOCKS)
    by_block = [
        torch.nn.functional.pad(torch.where(counts, own, empty), (0, num_blocks_128 * _MX_BLOCKS - num_blocks), value=empty)
        for empty in (0, E8M0_NAN)
    ]
    block_top = by_block[0].view(num_rows, num_blocks_128, _MX_BLOCKS).amax(-1)
    block_low = by_block[1].view(num_rows, num_blocks_128, _MX_BLOCKS).amin(-1)
    base = torch.where(wide, _base(block_top, block_low, top, low), top)[:, None]
    nothing = block_low == E8M0_NAN  # no block counts
    shares = nothing | (block_top <= base) & (block_low >= base - _NEAR)
    block_target = torch.where(shares | ~wide[:, None], base, block_top)
    target = block_target.repeat_interleave(_MX_BLOCKS, 1)[:, :num_blocks]

    data = shift_down(blocks, target - own, own == E8M0_NAN).flatten(-2).view(torch.float8_e4m3fn)
    row_scale = scale_to_float32(base[:, 0].to(torch.uint8)) * torch.where(wide, -1.0, 1.0)
    rows = empty_rebased(qdata, num_rows, qdata.shape[1], max_spread < MAX_SPREAD["row"])
    rows.data.copy_(data)
    rows.scale.copy_(row_scale)
    if rows.block_scale is not None:
        rows.block_scale.copy_(torch.where(wide, scale_to_float32((block_target - base + 127).to(torch.uint8)).t(), 0.0))
    return rows._replace(spread=spread.to(torch.uint8))


def check_rows(where: str, x: torch.Tensor, scaling_mode: str, granularity: str) -> None:
    """Raise ValueError for arguments that `quantize_rows` does not take."""
    check_input(where, x, -1, scaling_mode)
    if x.dim() != 2:
        raise ValueError(f"{where}: x is {tuple(x.shape)}, want (T, D); flatten the dimensions in front")
    if granularity not in MAX_SPREAD:
        raise ValueError(f"{where}: granularity={granularity!r}, want one of {', '.join(MAX_SPREAD)}")


def quantize_rows(x: torch.Tensor, scaling_mode: str, granularity: str, mx: bool) -> list[torch.Tensor]:
    """Rows (T, D) as the FP8 GEMMs read them, quantised 1x32 and rebased; with `mx` the quantised rows come first.

    >>> made = quantize_rows(torch.ones(4, 64), "rceil", "row", mx=True)
    >>> [tuple(part.shape) for part in made]
    [(4, 64), (4, 2), (4, 64), (4,)]
    """
    check_rows("quantize_rows", x, scaling_mode, granularity)
    quantised = quantize(x, scaling_mode)
    rows = rebase_rows(*quantised, MAX_SPREAD[granularity])
    return [part for part in (*(quantised if mx else ()), *rows[:3]) if part is not None]


def rebase_weight(qdata: torch.Tensor, scale: torch.Tensor) -> RebasedWeight:
    """A grouped weight with one exponent per output column (whole rows of (G, N, K): exponents of a weight spread little).

    Args:
        qdata: (G, N, K) float8_e4m3fn.  scale: (G, N, K/32) float8_e8m0fnu.
    """
    rows = rebase_rows(qdata.flatten(0, 1), scale.flatten(0, 1), MAX_SPREAD["row"])
    return RebasedWeight(rows.data.view(qdata.shape), rows.scale.view(qdata.shape[:2]))


def check_weight(
    where: str,
    first: torch.Tensor,
    second: torch.Tensor | None,
    scaling_mode: str,
    rowwise: bool,
    columnwise: bool,
    scale: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> None:
    """Raise ValueError for arguments that `quantize_weight` does not take."""
    if not (rowwise or columnwise):
        raise ValueError(f"{where}: rowwise=False and columnwise=False, want at least one form; pass True for one")
    if second is None:
        if second_scale is not None:
            raise ValueError(f"{where}: second=None with second_scale {tuple(second_scale.shape)}, want both or neither; pass second too")
        second, second_scale = first, scale
    if first.dim() != 3 or second.shape[::2] != first.shape[::2] or second.dtype != first.dtype:
        parts = (first,) if second is first else (first, second)
        got = " and ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
        raise ValueError(f"{where}: {got}, want (G, R, C), and (G, S, C) of the same dtype if there are two weights")
    if scale is not None or second_scale is not None or first.dtype == torch.float8_e4m3fn:
        _check_scale(where, "scale", first, scale)
        _check_scale(where, "second_scale", second, second_scale)
    dtypes = QUANTISABLE if scale is None else (first.dtype,)
    check_input(where, first, -1, scaling_mode, dtypes)
    check_input(where, first, -2, scaling_mode, dtypes)
    if second is not first:
        check_input(where, second, -2, scaling_mode, dtypes)


def _check_scale(where: str, name: str, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raise ValueError unless an MX weight (G, R, C) has its scale, and another one none."""
    is_mx = weight.dtype == torch.float8_e4m3fn
    if scale is None and not is_mx:
        return
    shape = (*weight.shape[:-1], weight.shape[-1] // MX_BLOCK)
    fits = scale is not None and scale.shape == shape and scale.dtype == torch.float8_e8m0fnu and scale.device == weight.device
    if not (is_mx and fits):
        got = "None" if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}"
        want = f"{shape} float8_e8m0fnu on {weight.device}" if is_mx else "None"
        do = "pass the scale of the same MX weight" if is_mx else "leave it out, or pass the MX weight's qdata"
        raise ValueError(f"{where}: {name}={got} of a weight {tuple(weight.shape)} {weight.dtype}, want {want}; {do}")


def quantize_weight(
    first: torch.Tensor,
    second: torch.Tensor | None,
    scaling_mode: str,
    rowwise: bool,
    columnwise: bool,
    round_to_bf16: bool = False,
    scale: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`rebase_weight` of a weight (G, R, C), or of two concatenated along R, quantised along C (rowwise) and along R (columnwise).

    The columnwise form is transposed.  Weights with scales are MX, and represent their values in bf16.
    """
    check_weight("quantize_weight", first, second, scaling_mode, rowwise, columnwise, scale, second_scale)
    first = first if scale is None else dequantize(first, scale, torch.bfloat16)
    second = second if second is None or second_scale is None else dequantize(second, second_scale, torch.bfloat16)
    weight = first if second is None else torch.cat((first, second), 1)
    weight = weight.bfloat16() if round_to_bf16 else weight
    forms = (quantize(weight, scaling_mode),) * rowwise + (quantize_columnwise(weight, scaling_mode),) * columnwise
    return [tensor for form in forms for tensor in rebase_weight(*form)]


def dequantize_rows(rows: RebasedRows) -> torch.Tensor:
    """The values of rebased rows: (P, D) float32."""
    values = rows.data.float()
    if rows.block_scale is None:
        return values * rows.scale[:, None]
    block_scale = rows.block_scale.t().repeat_interleave(BLOCK_128, 1)[:, : values.shape[1]]
    return values * torch.where((rows.scale < 0)[:, None], block_scale, 1.0) * rows.scale.abs()[:, None]


def changed_values(qdata: torch.Tensor, scale: torch.Tensor, rows: RebasedRows) -> torch.Tensor:
    """The number of values that a rebase of (qdata, scale) changed: 0-dim int64 on their device.

    For debugging: it makes float32 copies of everything.
    """
    return _changed(qdata, scale, rows).sum()


def changed_rows(qdata: torch.Tensor, scale: torch.Tensor, rows: RebasedRows) -> torch.Tensor:
    """The number of rows in which a rebase of (qdata, scale) changed a value: 0-dim int64, as `changed_values`."""
    return _changed(qdata, scale, rows).any(-1).sum()


def _changed(qdata: torch.Tensor, scale: torch.Tensor, rows: RebasedRows) -> torch.Tensor:
    """(P, D) bool."""
    before, after = dequantize(qdata, scale, torch.float32), dequantize_rows(rows)
    return (before != after) & ~before.isnan()


def _takes_part(own: torch.Tensor) -> torch.Tensor:
    """Which blocks count, by their scale: neither blocks of zeros (0) nor NaN blocks (0xFF)."""
    return (own > 0) & (own < E8M0_NAN)


def _spread(own: torch.Tensor) -> torch.Tensor:
    """(tokens,): largest minus smallest exponent of the blocks that take part, of own (tokens, D/32)."""
    part = _takes_part(own)
    return (torch.where(part, own, 0).amax(-1) - torch.where(part, own, E8M0_NAN).amin(-1)).clamp(min=0)


def _moved(exponent_g: torch.Tensor, exponent_a: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(every token's exponent that moves (M, 1) int32, whether it moves from `grad` to `a` (M, 1) bool) by the groups' samples."""
    g_gives = torch.zeros(exponent_a.shape[0], 1, dtype=torch.bool, device=exponent_a.device)
    if not exponent_a.shape[0]:
        return exponent_a[:, :1], g_gives
    for start, end in itertools.pairwise([0, *offs.tolist()]):
        tokens = start + torch.arange(_SAMPLES, device=exponent_a.device) * (end - start) // _SAMPLES
        if end > start:
            farther = _spread(exponent_g[tokens]) - _spread(exponent_a[tokens])
            g_gives[start:end] = farther.sum() > _SAMPLES * _MARGIN
    of_g, of_a = (torch.where(_takes_part(own), own, 0).amax(1, keepdim=True) for own in (exponent_g, exponent_a))
    return torch.where(g_gives, of_g, of_a), g_gives


def _group_tokens(qdata: torch.Tensor, moved: torch.Tensor, nan: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One group's (codes (D, tokens), scales (D,)) from its blocks' moved exponents (tokens, D/32), biased by 254."""
    top = torch.where(part, moved, 0).amax(0).clamp(min=128)  # 128: the scale stays a normal float32
    codes = shift_down(qdata.unflatten(-1, (-1, MX_BLOCK)), top - moved, nan).flatten(1).t()
    return codes, ((top - 127).clamp(max=255) << 23).view(torch.float32).repeat_interleave(MX_BLOCK)


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
    """The operands of a wgrad sum_t g_t a_t from MX rows, transposed, with one exponent per group and 32 columns.

    Only the sum of a token's two exponents matters, so each token's largest exponent of `a` moves from `a` to `grad`; then a group's
    tokens are rebased to the largest that remains.  Blocks with scale byte 0 or 0xFF take no part in a maximum, nor do the gradient's
    blocks of tokens whose `a` has no block that does.  In groups where exponents inside a token of `grad` lie farther apart than inside
    one of `a`, by more than 2 in the mean of 32 tokens, they move the other way: an outlying channel of what gives keeps its neighbours.

    Args:
        qg, sg: (M, N) float8_e4m3fn and (M, N/32) float8_e8m0fnu, row-strided or contiguous.  qa, sa: (M, K) and (M, K/32).
        offs: (G,) int32 END offsets; groups of any size.
        g_map, a_map: (M,) int32, the row of qg or qa that is token t, -1 for zeros; rows are then any number.
        mostly_padding: most tokens, or all of them, may be in no group; without effect here.

    Returns:
        RebasedTokens; T = 128 * (M // 128 + G).
    """
    (qg, sg), (qa, sa) = in_order(qg, sg, g_map), in_order(qa, sa, a_map)
    exponent_a, exponent_g = sa.view(torch.uint8).int(), sg.view(torch.uint8).int()
    token, g_gives = _moved(exponent_g, exponent_a, offs)
    operands = [
        (q, own, torch.where(gives, own - token + 254, own + token), _takes_part(own) & (gives | (token > 0)))
        for q, own, gives in ((qg, exponent_g, g_gives), (qa, exponent_a, ~g_gives))
    ]
    starts = [0, *offs.tolist()]
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    tokens = BLOCK_128 * (qg.shape[0] // BLOCK_128 + len(sizes))
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    for qdata, own, moved, part in operands:
        codes = torch.zeros(qdata.shape[1], tokens, dtype=torch.uint8, device=qdata.device)
        scales = torch.zeros(len(sizes), qdata.shape[1], device=qdata.device)
        at = 0
        for group, size in enumerate(sizes):
            rows = slice(starts[group], starts[group] + size)
            if size:
                codes[:, at : at + size], scales[group] = _group_tokens(qdata[rows], moved[rows], own[rows] == E8M0_NAN, part[rows])
            at += round_up(size, BLOCK_128)
        made.append((codes.view(torch.float8_e4m3fn), scales))
    ends = torch.tensor([round_up(size, BLOCK_128) for size in sizes], device=offs.device).cumsum(0).int()
    order = torch.tensor(sorted(range(len(sizes)), key=lambda group: -sizes[group]), device=offs.device, dtype=torch.int32)
    return RebasedTokens(*made[0], *made[1], ends, order)


def changed_token_values(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, tokens: RebasedTokens
) -> torch.Tensor:
    """The number of values of a wgrad's operands that `rebase_tokens` changed: 0-dim int64 on their device.

    For debugging: float64 copies of a group, and a host sync.  Arguments as in `rebase_tokens`, without maps; `tokens` is its result.
    """
    token, g_gives = _moved(sg.view(torch.uint8).int(), sa.view(torch.uint8).int(), offs)
    moved = torch.exp2(torch.where(g_gives, -1.0, 1.0).double() * (token - 127))
    operands = ((qg, sg, tokens.grad, tokens.grad_scale, 1 / moved), (qa, sa, tokens.a, tokens.a_scale, moved))
    changed = torch.zeros((), dtype=torch.int64, device=qg.device)
    starts, ends = [0, *offs.tolist()], tokens.ends.tolist()
    for group, (start, end) in enumerate(itertools.pairwise(starts)):
        at = ends[group] - round_up(end - start, BLOCK_128)
        for qdata, scale, codes, group_scale, back in operands:
            before = dequantize(qdata[start:end], scale[start:end], torch.float32).double()
            after = codes[:, at : at + end - start].t().double() * group_scale[group].double() * back[start:end]
            changed += ((before != after) & ~before.isnan()).sum()
    return changed
