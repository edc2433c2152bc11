"""Grouped GEMMs, one expert after the other in float32: the truth that every faster path is measured against.

Group g owns the rows from offs[g-1] (0 for the first) to offs[g].  MX operands enter as their exact values, since e4m3 times a
power of two fits in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxep.reference.quantize import dequantize
from mxep.reference.rows import in_order

TAILS = ("zero", "skip")


def _groups(offs: torch.Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offs.tolist()):
        yield group, slice(start, end)
        start = end


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Float32 product, also inside of a torch.autocast region, which would cast it to bf16."""
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float()


def check_tail(where: str, tail: str) -> bool:
    """Whether rows past the last end are left as they are. Raises ValueError for what is not in `TAILS`."""
    if tail not in TAILS:
        raise ValueError(f"{where}: tail={tail!r}, want one of {', '.join(TAILS)}")
    return tail == "skip"


def grouped_mm_hp(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, tail: str = "zero") -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T, summed in float32, rounded once to `out_dtype`.

    Args:
        a: (M, K) bf16 or float32.  b: (G, N, K).  offs: (G,) int32 END offsets, not decreasing, the last at most M.
        tail: of the rows past offs[-1]: "zero", or "skip" to neither read nor write them.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    empty = torch.empty if check_tail("grouped_mm_hp", tail) else torch.zeros
    out = empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    for group, rows in _groups(offs):
        if rows.stop > rows.start:
            out[rows] = _matmul(a[rows], b[group].t()).to(out_dtype)
    return out


def grouped_mm_mx(
    qa: torch.Tensor,
    sa: torch.Tensor,
    qb: torch.Tensor,
    sb: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    row_map: torch.Tensor | None = None,
    tail: str = "zero",
) -> torch.Tensor:
    """`grouped_mm_hp` of MX operands, both 1x32 along K.

    Args:
        qa, sa: (M, K) and (M, K/32).  qb, sb: (G, N, K) and (G, N, K/32) e8m0, or what `rebase_weight` made of them, sb (G, N) float32.
        offs: (G,) int32.  path: GEMM path, "reference" here.
        row_map: (M,) int32, the row of qa that is row m, -1 for zeros; qa's rows are then any number.
        tail: as in `grouped_mm_hp`.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    qa, sa = in_order(qa, sa, row_map)
    b = qb.float() * sb[..., None] if sb.dtype == torch.float32 else dequantize(qb, sb, torch.float32)
    return grouped_mm_hp(dequantize(qa, sa, torch.float32), b, offs, out_dtype, tail)


def grouped_wgrad_hp(grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """out[g] = grad[rows of g].T @ a[rows of g], summed in float32.

    Args:
        grad: (M, N) bf16 or float32.  a: (M, K) bf16 or float32.  offs: (G,) int32 END offsets.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    out = torch.zeros(offs.shape[0], grad.shape[1], a.shape[1], dtype=out_dtype, device=a.device)
    for group, rows in _groups(offs):
        if rows.stop > rows.start:
            out[group] = _matmul(grad[rows].t(), a[rows]).to(out_dtype)
    return out


def grouped_wgrad_mx(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of MX operands, both 32x1 along M, given as the MX form of their transposes.

    Args:
        qg, sg: (N, M) and (N, M/32).  qa, sa: (K, M) and (K, M/32).  offs: (G,) int32, multiples of 32.  path: "reference" here.

    Returns:
        (G, N, K) `out_dtype`.
    """
    return grouped_wgrad_hp(dequantize(qg, sg, torch.float32).t(), dequantize(qa, sa, torch.float32).t(), offs, out_dtype)


def grouped_wgrad_mx_rows(
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    path: str,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`grouped_wgrad_hp` of the dequantised values of MX rows, both 1x32 along their columns ("wgrad_with_hp").

    Args:
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32).  offs: (G,) int32.  path: GEMM path, "reference" here.
        g_map, a_map: (M,) int32, the row of qg or qa that is token m, -1 for zeros; its rows are then any number.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    (qg, sg), (qa, sa) = in_order(qg, sg, g_map), in_order(qa, sa, a_map)
    return grouped_wgrad_hp(dequantize(qg, sg, torch.float32), dequantize(qa, sa, torch.float32), offs, out_dtype)


def check_sum(where: str, into: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Raise ValueError unless `into` is a gradient of that shape that can be added to."""
    if into.shape != shape or into.dtype != torch.float32 or not into.is_contiguous():
        raise ValueError(f"{where}: into is {tuple(into.shape)} {into.dtype}, strides {into.stride()}, want {shape} float32, contiguous")


def grouped_wgrad_hp_add(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    """into[g] += grad[rows of g].T @ a[rows of g], summed in float32, not rounded before.

    Args:
        into: (G, N, K) float32, contiguous; an empty group's part is left as it is.
        grad: (M, N) bf16 or float32.  a: (M, K) bf16 or float32.  offs: (G,) int32 END offsets.
    """
    check_sum("grouped_wgrad_hp_add", into, (offs.shape[0], grad.shape[1], a.shape[1]))
    into.add_(grouped_wgrad_hp(grad, a, offs, torch.float32))


def grouped_wgrad_mx_rows_add(
    into: torch.Tensor, qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, path: str
) -> None:
    """`grouped_wgrad_mx_rows` added to a float32 gradient.

    Args:
        into: (G, N, K) float32, contiguous; an empty group's part is left as it is.
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32).  offs: (G,) int32.  path: GEMM path, "reference" here.
    """
    check_sum("grouped_wgrad_mx_rows_add", into, (offs.shape[0], qg.shape[1], qa.shape[1]))
    into.add_(grouped_wgrad_mx_rows(qg, sg, qa, sa, offs, torch.float32, path))


def check_into(where: str, into: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """Raise ValueError unless a gradient (G, N, K) can be written into it."""
    if into.shape != shape or into.dtype not in (torch.bfloat16, torch.float32) or not into.is_contiguous():
        raise ValueError(f"{where}: into is {tuple(into.shape)} {into.dtype}, want {shape} bfloat16 or float32, contiguous")


def check_copy_groups(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor) -> None:
    """Raise ValueError for what `copy_groups` cannot take."""
    fits = into.dim() == 3 and into.shape == made.shape and offs.shape == into.shape[:1] and offs.dtype == torch.int32
    if not fits or into.dtype != made.dtype or not (into[:1].is_contiguous() and made[:1].is_contiguous()):
        got = f"into {tuple(into.shape)} {into.dtype}, made {tuple(made.shape)} {made.dtype}, offs {tuple(offs.shape)} {offs.dtype}"
        raise ValueError(f"copy_groups: {got}, want (G, N, K) twice, of one dtype and each group contiguous, and (G,) int32")


def copy_groups(into: torch.Tensor, made: torch.Tensor, offs: torch.Tensor, empty: bool = False) -> None:
    """into[g] = made[g] for every group that has rows, or with `empty` for every one that has none; without a host sync.

    Args:
        into, made: (G, N, K) of one dtype, every group contiguous.  offs: (G,) int32 END offsets.

    >>> into, made = torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    >>> copy_groups(into, made, torch.tensor([0, 4], dtype=torch.int32))
    >>> into.flatten().tolist()
    [0.0, 1.0]
    """
    check_copy_groups(into, made, offs)
    wanted = (torch.diff(offs, prepend=offs.new_zeros(1)) > 0) != empty
    into.copy_(torch.where(wanted[:, None, None], made, into))


def grouped_wgrad_hp_into(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    """`grouped_wgrad_hp` of the groups that have rows, written into a gradient.

    Args:
        into: (G, N, K) bf16 or float32, contiguous; an empty group's part is left as it is.
        grad: (M, N) bf16 or float32.  a: (M, K) bf16 or float32.  offs: (G,) int32 END offsets.
    """
    check_into("grouped_wgrad_hp_into", into, (offs.shape[0], grad.shape[1], a.shape[1]))
    copy_groups(into, grouped_wgrad_hp(grad, a, offs, into.dtype), offs)


def grouped_wgrad_mx_rows_into(
    into: torch.Tensor,
    qg: torch.Tensor,
    sg: torch.Tensor,
    qa: torch.Tensor,
    sa: torch.Tensor,
    offs: torch.Tensor,
    path: str,
    g_map: torch.Tensor | None = None,
    a_map: torch.Tensor | None = None,
    few: bool = True,
) -> None:
    """`grouped_wgrad_mx_rows` of the groups that have rows, written into a gradient.

    Args:
        into: (G, N, K) bf16 or float32, contiguous; an empty group's part is left as it is.
        qg, sg, qa, sa, offs, path, g_map, a_map: as in `grouped_wgrad_mx_rows`.
        few: as in `rebase_tokens`.
    """
    check_into("grouped_wgrad_mx_rows_into", into, (offs.shape[0], qg.shape[1], qa.shape[1]))
    copy_groups(into, grouped_wgrad_mx_rows(qg, sg, qa, sa, offs, into.dtype, path, g_map, a_map), offs)
