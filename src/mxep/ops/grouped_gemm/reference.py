"""Grouped GEMMs, one expert after the other in float32: the reference for every faster path.

Group g owns the rows from offs[g-1] (0 for the first) to offs[g].  MX operands enter as their exact values, since e4m3 times a
power of two fits in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxep.ops.grouped_gemm.hopper.rebase_reference import (
    BLOCK_128,
    RebasedRows,
    RebasedTokens,
    RebasedWeight,
    dequantize_rows,
    quantize_rows,
)
from mxep.ops.quantize.reference import dequantize
from mxep.ops.rows.reference import gather_rows

PADDING_ROWS = ("zero", "skip")


def _groups(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offs.tolist()):
        yield group, slice(start, end)
        start = end


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Float32 product, also inside of a torch.autocast region, which would cast it to bf16."""
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float()


def check_padding_rows(where: str, padding_rows: str) -> bool:
    """True if rows past the last end stay undefined. Raises ValueError for a value that is not in `PADDING_ROWS`."""
    if padding_rows not in PADDING_ROWS:
        raise ValueError(f"{where}: padding_rows={padding_rows!r}, want one of {', '.join(PADDING_ROWS)}")
    return padding_rows == "skip"


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, padding_rows: str = "zero") -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T, summed in float32, rounded once to `out_dtype`.

    Args:
        a: (M, K) bf16 or float32.  b: (G, N, K).  offs: (G,) int32 END offsets, not decreasing, the last at most M.
        padding_rows: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    empty = torch.empty if check_padding_rows("grouped_mm_hp", padding_rows) else torch.zeros
    out = empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    for group, rows in _groups(offs):
        if rows.stop > rows.start:
            out[rows] = _matmul(a[rows], b[group].t()).to(out_dtype)
    return out


def check_group_lora(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None
) -> None:
    """Raise ValueError for what `add_group_lora` cannot take."""
    count = x.shape[0] if row_map is None else row_map.shape[0]
    G, R, K = a.shape
    shapes = out.shape == (count, b.shape[1]) and x.shape[1:] == (K,) and b.shape[::2] == (G, R) and offs.shape == (G,) and G > 0
    dtypes = {tensor.dtype for tensor in (out, x, a, b)}
    if not shapes or dtypes not in ({torch.bfloat16}, {torch.float32}) or out.stride(1) != 1:
        got = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in (("out", out), ("x", x), ("a", a), ("b", b), ("offs", offs)))
        raise ValueError(
            f"add_group_lora: {got}, want (M, N) with rows of stride 1, (M, K) or a row_map (M,), (G, r, K), (G, N, r) and (G,), "
            "all bfloat16 or all float32; cast them"
        )


def add_group_lora(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None = None
) -> torch.Tensor:
    """out[rows of g] += (x[rows of g] @ a[g].T) @ b[g].T, the low-rank adapter of each group: float32 sums, the first product rounded to
    x's dtype, and out rounded once.

    Args:
        out: (M, N) bf16 or float32, changed in place; rows past offs[-1] stay as they are.
        x: (M, K) of out's dtype; with a row_map (M,) int32, row m is x[row_map[m]], zeros where it is -1.
        a: (G, r, K), b: (G, N, r), of out's dtype.  offs: (G,) int32 or int64 END offsets, not decreasing, the last at most M.

    Returns:
        (M, r), the first product in x's dtype; rows past offs[-1] are zero.

    Raises:
        ValueError: operands that do not fit.

    Examples:
        >>> out, x, ends = torch.ones(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([2])
        >>> inner = add_group_lora(out, x, torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[10.0]]]), ends)
        >>> inner.tolist(), out.tolist()
        ([[3.0], [7.0]], [[31.0], [71.0]])
    """
    check_group_lora(out, x, a, b, offs, row_map)
    inner = grouped_mm_hp(x if row_map is None else gather_rows(x, row_map), a, offs, x.dtype)
    out += grouped_mm_hp(inner, b, offs, torch.float32)
    return inner


def group_lora_inner(x: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, row_map: torch.Tensor | None = None) -> torch.Tensor:
    """x[rows of g] @ a[g].T, the first product of `add_group_lora`, whose arguments these are: (M, r) in x's dtype."""
    check_group_lora(x.new_empty(x.shape[0] if row_map is None else row_map.shape[0], 0), x, a, a[:, :, :0].transpose(1, 2), offs, row_map)
    return grouped_mm_hp(x if row_map is None else gather_rows(x, row_map), a, offs, x.dtype)


FUSED_RANK = 16  # of adapters that a GEMM of MX rows can add


def fuses_lora(rank: int, out_dtype: torch.dtype) -> bool:
    """Whether a GEMM path that adds adapters takes one of this rank, to results of that dtype."""
    return rank == FUSED_RANK and out_dtype == torch.bfloat16


def check_lora(
    where: str, inner: torch.Tensor | None, lora_b: torch.Tensor | None, shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    """Raise ValueError for an adapter that a GEMM (M, K) x (G, N, K) of that `shape`, (M, G, N), cannot add."""
    M, G, N = shape
    wanted = ((M, FUSED_RANK), torch.bfloat16), ((G, N, FUSED_RANK), torch.bfloat16)
    got = [None if factor is None else (tuple(factor.shape), factor.dtype) for factor in (inner, lora_b)]
    if got != list(wanted) or out_dtype != torch.bfloat16:
        raise ValueError(
            f"{where}: inner and lora_b are {got} for results in {out_dtype}, want {wanted}, bfloat16; add it by add_group_lora"
        )


def is_rebased(scale: torch.Tensor) -> bool:
    """Whether a scale is that of `RebasedRows` or of a `RebasedWeight`, float32, and not e8m0 of 32 values each."""
    return scale.dtype == torch.float32


def check_rows(
    qa: torch.Tensor, sa: torch.Tensor, row_map: torch.Tensor | None, block_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | RebasedRows:
    """The rows of `grouped_mm_mx`, MX or rebased. Raises ValueError for a map or block scales that do not fit them."""
    if not is_rebased(sa):
        if block_scale is not None:
            raise ValueError(f"grouped_mm_mx: block_scale {tuple(block_scale.shape)} with MX rows, want None; it belongs to rebased rows")
        return qa, sa
    if row_map is not None:
        raise ValueError(f"grouped_mm_mx: row_map {tuple(row_map.shape)} with rebased rows, want None; gather their MX rows instead")
    M, blocks = qa.shape[0], -(-qa.shape[1] // BLOCK_128)
    if sa.shape != (M,) or (block_scale is not None and (block_scale.shape != (blocks, M) or block_scale.dtype != torch.float32)):
        got = "none" if block_scale is None else f"{tuple(block_scale.shape)} {block_scale.dtype}"
        raise ValueError(f"grouped_mm_mx: rebased rows {tuple(qa.shape)} with scales {tuple(sa.shape)} and block scales {got}, "
                         f"want {(M,)} and {(blocks, M)} float32, or None")  # fmt: skip
    return RebasedRows(qa, sa, block_scale)


def grouped_mm_mx(
    qa: torch.Tensor,
    sa: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    row_map: torch.Tensor | None = None,
    padding_rows: str = "zero",
    block_scale: torch.Tensor | None = None,
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """`grouped_mm_hp` of MX operands, both 1x32 along K.

    Args:
        qa, sa: (M, K) and (M, K/32) e8m0, or `RebasedRows`, sa (M,) float32.
        qb, sb: (G, N, K) and (G, N, K/32) e8m0, or what `quantize_weight` makes, sb (G, N) float32.
        offs: (G,) int32.  path: GEMM path, "reference" here.
        row_map: (M,) int32, the row of qa that is row m, -1 for zeros; qa's rows are then any number.
        padding_rows: as in `grouped_mm_hp`.
        block_scale: of `RebasedRows`, None where it has none.
        inner, lora_b: of adapters, (M, 16) and (G, N, 16) bf16: inner[rows of g] @ lora_b[g].T is added before a bf16 result is rounded.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    rows = check_rows(qa, sa, row_map, block_scale)
    num_rows = qa.shape[0] if row_map is None else row_map.shape[0]
    if inner is not None or lora_b is not None:
        check_lora("grouped_mm_mx", inner, lora_b, (num_rows, *qb.shape[:2]), out_dtype)
    a = dequantize_rows(rows) if isinstance(rows, RebasedRows) else dequantize(qa, sa, torch.float32, row_map)
    b = qb.float() * sb[..., None] if is_rebased(sb) else dequantize(qb, sb, torch.float32)
    if inner is None or lora_b is None:
        return grouped_mm_hp(a, b, offs, out_dtype, padding_rows)
    return grouped_mm_hp(torch.cat((a, inner.float()), 1), torch.cat((b, lora_b.float()), 2), offs, out_dtype, padding_rows)


def quantize_grouped_mm(
    x: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    scaling_mode: str,
    granularity: str,
    mx: bool,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`grouped_mm_mx` of plain rows, which `quantize_rows` quantises and rebases.

    Args:
        x: (M, K) bf16 or float32.  qb, sb: (G, N, K) and (G, N) float32, what `quantize_weight` makes.
        scaling_mode, granularity, mx: as in `quantize_rows`.  The rest as in `grouped_mm_mx`.

    Returns:
        out (M, N) `out_dtype`; with `mx` then qdata (M, K) and scale (M, K/32) of x.

    Examples:
        >>> b, ends = torch.ones(1, 32, 64).to(torch.float8_e4m3fn), torch.tensor([4])
        >>> made = quantize_grouped_mm(torch.ones(4, 64), b, torch.ones(1, 32), ends, torch.float32, "rceil", "row", mx=True)
        >>> [tuple(part.shape) for part in made], made[0][0, 0].item()
        ([(4, 32), (4, 64), (4, 2)], 64.0)
    """
    made = quantize_rows(x, scaling_mode, granularity, mx)
    rows = RebasedRows(*made[2 * mx :])
    how = None, padding_rows, rows.block_scale, inner, lora_b
    return [grouped_mm_mx(rows.data, rows.scale, qb, sb, offs, out_dtype, "reference", *how), *made[: 2 * mx]]


def check_out(where: str, out: torch.Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype, accumulate: bool = False) -> None:
    """Raise ValueError unless a gradient of that shape and dtype can be written into `out`, or added to it."""
    if out is None and not accumulate:
        return
    got = "None" if out is None else f"{tuple(out.shape)} {out.dtype}, strides {out.stride()}"
    allowed = (torch.float32,) if accumulate else (torch.bfloat16, torch.float32)
    if out is None or out.shape != shape or out.dtype != dtype or dtype not in allowed or not out.is_contiguous():
        wanted = "float32" if accumulate else f"{dtype}, bfloat16 or float32"
        raise ValueError(f"{where}: out is {got}, want {shape} {wanted}, contiguous")


def _write(made: torch.Tensor, offs: torch.Tensor, out: torch.Tensor | None, accumulate: bool = False) -> torch.Tensor:
    """The new gradient, or `out` with it written or added."""
    if out is None:
        return made
    if accumulate:
        out.add_(made)
    else:
        copy_expert_grads(out, made, offs)
    return out


def grouped_wgrad_hp(
    grad: torch.Tensor,
    a: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    grad_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """grad[rows of g].T @ a[rows of g] for every group g, summed in float32.

    Args:
        grad: (M, N) bf16 or float32.  a: (M, K) bf16 or float32.  offs: (G,) int32 END offsets.
        out: (G, N, K) `out_dtype`, contiguous, bf16 or float32: the gradients of the groups that have rows are written into it, the others
            stay as they are.  None: the result is a new gradient.
        accumulate: add to `out`, float32, instead; nothing is rounded before.
        grad_map: (M,) int32, without `out`: row m of the gradient is grad[grad_map[m]], zeros where it is -1.

    Returns:
        (G, N, K) `out_dtype`, zero for an empty group.  `out` if given.
    """
    check_out("grouped_wgrad_hp", out, (offs.shape[0], grad.shape[1], a.shape[1]), out_dtype, accumulate)
    grad = grad if grad_map is None else gather_rows(grad, grad_map)
    made = torch.zeros(offs.shape[0], grad.shape[1], a.shape[1], dtype=out_dtype, device=a.device)
    for group, rows in _groups(offs):
        if rows.stop > rows.start:
            made[group] = _matmul(grad[rows].t(), a[rows]).to(out_dtype)
    return _write(made, offs.int(), out, accumulate)


def grouped_wgrad_mx(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    mostly_padding: bool = False,
) -> torch.Tensor:
    """`grouped_wgrad_hp` of the dequantised values of MX rows, both 1x32 along their columns ("wgrad_with_hp").

    Args:
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32).  offs: (G,) int32.  path: GEMM path, "reference" here.
        g_map, a_map: (M,) int32, the row of qg or qa that is token m, -1 for zeros; these may then have any number of rows.
        out, accumulate: as in `grouped_wgrad_hp`.  mostly_padding: as in `rebase_tokens`.

    Returns:
        as `grouped_wgrad_hp`.
    """
    check_out("grouped_wgrad_mx", out, (offs.shape[0], qg.shape[1], qa.shape[1]), out_dtype, accumulate)
    grad, a = dequantize(qg, sg, torch.float32, g_map), dequantize(qa, sa, torch.float32, a_map)
    return grouped_wgrad_hp(grad, a, offs, out_dtype, out, accumulate)


def grouped_wgrad_mx_gate_up(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    a_map: torch.Tensor | None = None,
    out_gate: torch.Tensor | None = None,
    out_up: torch.Tensor | None = None,
    mostly_padding: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`grouped_wgrad_mx` of the left and of the right half of grad's columns.

    Args:
        qg, sg: (M, 2N) and (M, 2N/32), N a multiple of 32.  qa, sa, offs, path, a_map, mostly_padding: as in `grouped_wgrad_mx`.
        out_gate, out_up: an `out` each.

    Returns:
        two (G, N, K) `out_dtype`, each contiguous and zero for an empty group; the outs if given.
    """
    for out in (out_gate, out_up):
        check_out("grouped_wgrad_mx_gate_up", out, (offs.shape[0], qg.shape[1] // 2, qa.shape[1]), out_dtype)
    gate, up = grouped_wgrad_mx(qg, sg, qa, sa, offs, out_dtype, path, None, a_map).chunk(2, 1)
    return _write(gate.contiguous(), offs, out_gate), _write(up.contiguous(), offs, out_up)


def grouped_wgrad_mx_columnwise(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of MX operands, both 32x1 along M, given as the MX form of their transposes.

    Args:
        qg, sg: (N, M) and (N, M/32).  qa, sa: (K, M) and (K, M/32).  offs: (G,) int32, multiples of 32.  path: "reference" here.

    Returns:
        (G, N, K) `out_dtype`.
    """
    return grouped_wgrad_hp(dequantize(qg, sg, torch.float32).t(), dequantize(qa, sa, torch.float32).t(), offs, out_dtype)


def check_copy_expert_grads(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor) -> None:
    """Raise ValueError for what `copy_expert_grads` cannot take."""
    fits = into.dim() == 3 and into.shape == made.shape and offs.shape == into.shape[:1] and offs.dtype == torch.int32
    if not fits or into.dtype != made.dtype or not (into[:1].is_contiguous() and made[:1].is_contiguous()):
        got = f"into {tuple(into.shape)} {into.dtype}, made {tuple(made.shape)} {made.dtype}, offs {tuple(offs.shape)} {offs.dtype}"
        raise ValueError(f"copy_expert_grads: {got}, want (G, N, K) twice, of one dtype and each group contiguous, and (G,) int32")


def copy_expert_grads(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor) -> None:
    """into[g] = made[g] for every group that has rows; without a host sync.

    Args:
        into, made: (G, N, K) of one dtype, every group contiguous.  offs: (G,) int32 END offsets.

    >>> into, made = torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    >>> copy_expert_grads(into, made, torch.tensor([0, 4], dtype=torch.int32))
    >>> into.flatten().tolist()
    [0.0, 1.0]
    """
    check_copy_expert_grads(into, made, offs)
    wanted = torch.diff(offs, prepend=offs.new_zeros(1)) > 0
    into.copy_(torch.where(wanted[:, None, None], made, into))


# ---------------------------------------------------------------- bias of each group

_BIAS_DTYPES = (torch.bfloat16, torch.float32)


def check_bias_scores(where: str, scores: torch.Tensor | None, num_rows: int) -> None:
    """Raise ValueError unless scores are (num_rows,) float32, contiguous, or None."""
    if scores is not None and (scores.shape != (num_rows,) or scores.dtype != torch.float32 or not scores.is_contiguous()):
        raise ValueError(f"{where}: scores are {tuple(scores.shape)} {scores.dtype}, want ({num_rows},) float32, contiguous")


def check_add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None) -> None:
    """Raise ValueError for what `add_group_bias` cannot take."""
    fits = rows.dim() == 2 and offs.dim() == 1 and bias.shape == (offs.shape[0], rows.shape[1])
    if not fits or rows.dtype not in _BIAS_DTYPES or bias.dtype not in _BIAS_DTYPES:
        raise ValueError(
            f"add_group_bias: rows {tuple(rows.shape)} {rows.dtype}, bias {tuple(bias.shape)} {bias.dtype}, offs {tuple(offs.shape)}, "
            "want (M, N), (G, N), (G,), bfloat16 or float32"
        )
    if rows.numel() and (rows.stride(1) != 1 or (rows.shape[0] > 1 and rows.stride(0) < rows.shape[1])):
        raise ValueError(f"add_group_bias: rows of strides {rows.stride()}, want contiguous rows that do not overlap; copy them first")
    check_bias_scores("add_group_bias", scores, rows.shape[0])


def _of_rows(bias: torch.Tensor, offs: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, N) float32, each row's bias rounded to rows' dtype, and which rows are in a group (M, 1)."""
    groups = torch.searchsorted(offs.long(), torch.arange(rows.shape[0], device=rows.device), right=True)  # (M,), G after the last end
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1]))).to(rows.dtype).float()[groups], (groups < offs.shape[0])[:, None]


def add_group_bias(rows: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor, scores: torch.Tensor | None = None) -> None:
    """Add to rows, in place, their group's bias, which is rounded to rows' dtype first; in float32, rounded once.

    Args:
        rows: (M, N) bf16 or float32, each row contiguous; those after the last group stay as they are.  bias: (G, N) bf16 or float32.
        offs: (G,) int32 or int64 END rows of the groups.
        scores: (M,) float32, factors of the bias in each row; the product is rounded to float32 before it is added.
    """
    check_add_group_bias(rows, bias, offs, scores)
    added, grouped = _of_rows(bias, offs, rows)
    added = added if scores is None else scores[:, None] * added
    rows.copy_(torch.where(grouped, (rows.float() + added).to(rows.dtype), rows))


def check_row_map(where: str, row_map: torch.Tensor | None) -> None:
    """Raise ValueError unless row_map is (M,) int32 or None."""
    if row_map is not None and (row_map.dim() != 1 or row_map.dtype != torch.int32):
        raise ValueError(f"{where}: row_map is {tuple(row_map.shape)} {row_map.dtype}, want (M,) int32")


def check_group_bias_grads(
    rows: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None, scores: torch.Tensor | None, row_map: torch.Tensor | None
) -> None:
    """Raise ValueError for what `group_bias_grads` cannot take."""
    check_row_map("group_bias_grads", row_map)
    dtypes = {rows.dtype} if bias is None else {rows.dtype, bias.dtype}
    shapes = rows.dim() == 2 and offs.dim() == 1 and (bias is None or bias.shape == (offs.shape[0], rows.shape[1]))
    if not shapes or not dtypes <= set(_BIAS_DTYPES):
        of_bias = "no bias" if bias is None else f"bias {tuple(bias.shape)} {bias.dtype}"
        raise ValueError(
            f"group_bias_grads: rows {tuple(rows.shape)} {rows.dtype}, {of_bias}, offs {tuple(offs.shape)}, want (M, N), (G, N), (G,), "
            "bfloat16 or float32"
        )
    check_bias_scores("group_bias_grads", scores, rows.shape[0] if row_map is None else row_map.shape[0])


def group_bias_grads(
    rows: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    row_map: torch.Tensor | None = None,
    sums: bool = True,
) -> list[torch.Tensor]:
    """Both gradients of `add_group_bias`: that of the bias, and that of the scores.

    Args:
        rows: (M, N) bf16 or float32, the gradient of the result, any strides.
        offs, scores: as in `add_group_bias`.  bias: the same, or None: no gradient of scores is wanted.
        row_map: (M,) int32, the row of `rows` that is row m, -1 for one of zeros; None: row m.  sums: whether that of the bias is wanted.

    Returns:
        sums (G, N) float32 of each group's rows, times their scores, in any order; with a bias then the product of each row with its bias,
        which is rounded to rows' dtype first, (M,) float32, 0 after the last group.

    Examples:
        >>> rows, ends = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 2])
        >>> sums, dots = group_bias_grads(rows, ends, torch.ones(2, 2), torch.tensor([1.0, 0.5]))
        >>> sums.tolist(), dots.tolist()
        ([[1.0, 2.0], [1.5, 2.0]], [3.0, 7.0])
    """
    check_group_bias_grads(rows, offs, bias, scores, row_map)
    rows = rows if row_map is None else gather_rows(rows, row_map)
    results = []
    if sums:
        weighted = rows.float() if scores is None else scores[:, None] * rows.float()
        ends = offs.clamp(max=len(rows)).tolist()
        total = weighted.new_zeros(len(ends), weighted.shape[1])
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            total[group] = weighted[start:end].sum(0)
        results.append(total)
    if bias is not None:
        factors, grouped = _of_rows(bias, offs, rows)
        results.append(torch.where(grouped, rows.float() * factors, 0.0).sum(1))
    return results


_SCORE_TERMS = 3  # numbers of bf16, 8 bits each, that add up to a float32


def check_group_bias_factors(bias: torch.Tensor, scores: torch.Tensor | None, num_rows: int) -> None:
    """Raise ValueError for what `group_bias_factors` cannot take."""
    if bias.dim() != 2 or bias.dtype not in _BIAS_DTYPES:
        raise ValueError(f"group_bias_factors: bias is {tuple(bias.shape)} {bias.dtype}, want (G, N) bfloat16 or float32")
    check_bias_scores("group_bias_factors", scores, num_rows)


def group_bias_factors(bias: torch.Tensor, scores: torch.Tensor | None, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bias of groups, times scores, as the adapter that a GEMM adds to its sums: see `check_lora`.

    Args:
        bias: (G, N) bf16 or float32.  scores: (num_rows,) float32, contiguous, or None for ones.

    Returns:
        inner (num_rows, 16) and lora_b (G, N, 16), both bf16: the score as the sum of three numbers, and the bias, rounded, for each of
        them; without scores one and the bias.  An infinite bias is there once, since a second number may be zero.

    Examples:
        >>> inner, lora_b = group_bias_factors(torch.tensor([[3.0]]), torch.tensor([1.001]), 1)
        >>> round((inner.float() @ lora_b[0].float().T).item(), 4)
        3.003
    """
    check_group_bias_factors(bias, scores, num_rows)
    inner = torch.zeros((num_rows, FUSED_RANK), dtype=torch.bfloat16, device=bias.device)
    lora_b = torch.zeros((*bias.shape, FUSED_RANK), dtype=torch.bfloat16, device=bias.device)
    lora_b[..., 0] = bias
    if scores is None:
        inner[:, 0] = 1
        return inner, lora_b
    rest = scores
    for column in range(_SCORE_TERMS):
        inner[:, column] = rest
        rest = torch.where(inner[:, column].isfinite(), rest - inner[:, column].float(), 0.0)
    rounded = lora_b[..., :1]
    lora_b[..., 1:_SCORE_TERMS] = torch.where(rounded.isfinite(), rounded, 0.0)
    return inner, lora_b


# ---------------------------------------------------------------- products of rebased operands


def fp8_grouped_mm(
    rows: RebasedRows,
    weight: RebasedWeight,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    padding_rows: str = "zero",
    inner: torch.Tensor | None = None,
    lora_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[rows of g] = rows[rows of g] @ weight[g].T, rounded once.

    Args:
        rows: M rows of K.  weight: (G, N, K).  offs: (G,) int32 END offsets.
        padding_rows: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.
        inner, lora_b: of adapters, as in `grouped_mm_mx`.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    a, block_scale = (rows.data, rows.scale), rows.block_scale
    return grouped_mm_mx(*a, *weight, offs, out_dtype, "reference", None, padding_rows, block_scale, inner, lora_b)


def fp8_wgrad(
    tokens: RebasedTokens,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    empty: str = "zero",
) -> torch.Tensor:
    """out[g] (+)= grad[:, tokens of g] @ a[:, tokens of g].T.

    Args:
        tokens: both operands.  out: (G, N, K) `out_dtype` to write into, None for a new one.
        accumulate: add to what `out` holds (float32 only).
        empty: of the groups without tokens: "zero", or "skip" to leave what `out` holds.

    Returns:
        (G, N, K) `out_dtype`; exactly zero (unchanged when accumulating or skipping) for an empty group.
    """
    skip = check_padding_rows("fp8_wgrad", empty)
    shape = (tokens.ends.shape[0], tokens.grad.shape[0], tokens.a.shape[0])
    product = torch.zeros(shape, device=tokens.grad.device)
    start = 0
    for group, end in enumerate(tokens.ends.tolist()):
        if end > start:
            grad = tokens.grad[:, start:end].float() * tokens.grad_scale[group, :, None]
            product[group] = grad @ (tokens.a[:, start:end].float() * tokens.a_scale[group, :, None]).t()
        start = end
    if out is None:
        return product.to(out_dtype)
    if skip and not accumulate:
        copy_expert_grads(out, product, tokens.ends)
        return out
    return out.add_(product) if accumulate else out.copy_(product)
