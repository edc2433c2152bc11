"""The weight gradients of grouped GEMMs on the GPU, sums over the tokens of each group, without a host sync.

Which code runs:
- bf16 operands, bf16 out, on SM90 or SM100: torch's CUTLASS grouped GEMM in the one pair of layouts that takes groups of any size;
- MX rows on the FP8 roads: transposed, rebased along tokens and multiplied on FP8 tensor cores (fp8_grouped_mm.py);
- everything else (float32 out, float32 operands, adding to a gradient, other GPUs, odd widths): the Triton kernel here, which sums in
  float32; MX operands are dequantised to bf16 before, or go to torch's scaled grouped GEMM (path "blackwell").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mxep.device import FP8_ROADS
from mxep.kernels import tiles
from mxep.kernels.dequantize import dequantize
from mxep.kernels.fp8_grouped_mm import fp8_wgrad
from mxep.kernels.grouped_mm import blackwell, check_operands, for_torch, gemm_path, gemm_tile, promoted_every, torch_takes
from mxep.kernels.launch import launch
from mxep.kernels.rebase import rebase_tokens
from mxep.kernels.rows import gather_mx_rows
from mxep.mx.layout import to_blocked_groups_along_columns
from mxep.reference.grouped_mm import check_into, check_sum
from mxep.shapes import cdiv


@triton.jit(do_not_specialize=["M"])
def _grouped_wgrad_kernel(
    grad,  # (M, N)
    grad_row,
    grad_column,
    a,  # (M, K)
    a_row,
    a_column,
    out,  # (G, N, K) contiguous
    offs,  # (G,) int32
    M,
    N,
    K,
    ROWS: tl.constexpr,  # tile along N
    COLUMNS: tl.constexpr,  # tile along K
    DEPTH: tl.constexpr,  # rows of a group per step
    FLOAT32: tl.constexpr,
    ADD: tl.constexpr,  # to what out holds
    SKIP: tl.constexpr,  # leave groups without rows as they are
):
    column_tiles = tl.cdiv(K, COLUMNS)
    n = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)
    k = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    start = tl.load(offs + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(offs + group), M)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for m in range(start, end, DEPTH):
        row = m + tl.arange(0, DEPTH)
        inside = row < end  # a neighbouring group's row may hold NaN: neither operand reads it
        at = row.to(tl.int64)
        left = tl.load(
            grad + n.to(tl.int64)[:, None] * grad_column + at[None, :] * grad_row, mask=(n < N)[:, None] & inside[None, :], other=0
        )  # (ROWS, DEPTH)
        right = tl.load(
            a + at[:, None] * a_row + k.to(tl.int64)[None, :] * a_column, mask=inside[:, None] & (k < K)[None, :], other=0
        )  # (DEPTH, COLUMNS)
        if FLOAT32:
            acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(left, right, acc)
    target = out + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    rows = tl.where(start < end, N, 0) if SKIP else N
    mask = (n < rows)[:, None] & (k < K)[None, :]
    if ADD:
        acc += tl.load(target, mask=mask, other=0)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


def _launch(out: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, *, add: bool = False, skip: bool = False) -> None:
    """out (G, N, K) = or += grad (M, N).T @ a (M, K) of every group, or of every one with rows; offs int32."""
    (G, N, K), M = out.shape, a.shape[0]
    tile, float32 = gemm_tile(grad, a)
    if K <= tiles.NARROW_COLUMNS:
        tile = tiles.WGRAD_NARROW["float32" if float32 else "bf16"]
    if not out.numel():
        return
    launch(
        _grouped_wgrad_kernel,
        (cdiv(N, tile.rows) * cdiv(K, tile.columns), G),
        {
            "grad": grad,
            "grad_row": grad.stride(0),
            "grad_column": grad.stride(1),
            "a": a,
            "a_row": a.stride(0),
            "a_column": a.stride(1),
            "out": out,
            "offs": offs,
            "M": M,
            "N": N,
            "K": K,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "DEPTH": tile.depth,
            "FLOAT32": float32,
            "ADD": add,
            "SKIP": skip,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def grouped_wgrad_hp(grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """out[g] = grad[rows of g].T @ a[rows of g], summed in float32. Twin: `reference.grouped_wgrad_hp`.

    Args:
        grad: (M, N) bf16 or float32.  a: (M, K), the same or the other of the two.  offs: (G,) int32 or int64 END offsets on the device.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    offs = check_operands("grouped_wgrad_hp", grad, a, offs, offs.shape[0])
    (M, N), K, G = grad.shape, a.shape[1], offs.shape[0]
    if a.shape[0] != M:
        raise ValueError(f"grouped_wgrad_hp: grad {tuple(grad.shape)} with a {tuple(a.shape)}, want (M, N) with (M, K)")

    if M == 0:
        return torch.zeros((G, N, K), dtype=out_dtype, device=a.device)
    if N and K and torch_takes(grad, a, offs, out_dtype):
        # This pair of layouts alone takes empty groups and groups of any size: torch's other layouts stop the device at them.
        return F.grouped_mm(for_torch(grad).t(), for_torch(a), offs=offs)

    out = torch.empty((G, N, K), dtype=out_dtype, device=a.device)
    _launch(out, grad, a, offs)
    return out


def grouped_wgrad_hp_add(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    """into[g] += grad[rows of g].T @ a[rows of g], summed in float32, not rounded before. Twin: `reference.grouped_wgrad_hp_add`.

    Args:
        into: (G, N, K) float32, contiguous; an empty group's part is left as it is.
        grad, a, offs: as in `grouped_wgrad_hp`.
    """
    offs = check_operands("grouped_wgrad_hp_add", grad, a, offs, offs.shape[0])
    check_sum("grouped_wgrad_hp_add", into, (offs.shape[0], grad.shape[1], a.shape[1]))
    if a.shape[0] != grad.shape[0]:
        raise ValueError(f"grouped_wgrad_hp_add: grad {tuple(grad.shape)} with a {tuple(a.shape)}, want (M, N) with (M, K)")
    _launch(into, grad, a, offs, add=True)


def grouped_wgrad_mx(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of MX operands, both 32x1 along M, given as the MX form of their transposes. Twin: `reference.grouped_wgrad_mx`.

    Args:
        qg, sg: (N, M) and (N, M/32).  qa, sa: (K, M) and (K, M/32).  offs: (G,) int32 or int64, multiples of 32.
        path: "exact" or "blackwell", as in `grouped_mm_mx`; "fp8" takes "exact" here.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    path = gemm_path(path, qg.device)

    if path == "blackwell" and out_dtype == torch.bfloat16 and qg.shape[1]:
        offs = offs.to(torch.int32).contiguous()
        blocks = offs // 32  # ends of the groups in scale columns
        out = blackwell(
            qg.contiguous(),
            to_blocked_groups_along_columns(sg, blocks)[0],
            qa.contiguous().t(),
            to_blocked_groups_along_columns(sa, blocks)[0],
            offs,
        )
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        return out.masked_fill_((sizes == 0)[:, None, None], 0)
    grad, a = dequantize(qg, sg, torch.bfloat16).t(), dequantize(qa, sa, torch.bfloat16).t()
    return grouped_wgrad_hp(grad, a, offs, out_dtype)


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
    """`grouped_wgrad_hp` of the dequantised values of MX rows ("wgrad_with_hp"). Twin: `reference.grouped_wgrad_mx_rows`.

    Args:
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32), all row-strided or contiguous.  offs: (G,) int32 or int64.
        path: "fp8" and its roads transpose and rebase the bytes and multiply on FP8 tensor cores; every other path dequantises to bf16.
        g_map, a_map: (M,) int32 on the device, the row of qg or qa that is token m, -1 for zeros; its rows are then any number.  The FP8
            roads gather in the transposing pass, the others before.

    Returns:
        (G, N, K) `out_dtype`; exactly zero for an empty group.
    """
    path = gemm_path(path, qg.device)

    if path in FP8_ROADS:
        return fp8_wgrad(rebase_tokens(qg, sg, qa, sa, offs, g_map, a_map), out_dtype, promote=promoted_every(path))
    qg, sg = (qg, sg) if g_map is None else gather_mx_rows(qg, sg, g_map)
    qa, sa = (qa, sa) if a_map is None else gather_mx_rows(qa, sa, a_map)
    return grouped_wgrad_hp(dequantize(qg, sg, torch.bfloat16), dequantize(qa, sa, torch.bfloat16), offs, out_dtype)


def grouped_wgrad_mx_rows_add(
    into: torch.Tensor, qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, path: str
) -> None:
    """`grouped_wgrad_mx_rows` added to a float32 gradient. Twin: `reference.grouped_wgrad_mx_rows_add`.

    Args:
        into: (G, N, K) float32, contiguous, from a multiple of 16 bytes on; an empty group's part is left as it is.
        qg, sg, qa, sa, offs, path: as in `grouped_wgrad_mx_rows`.
    """
    path = gemm_path(path, qg.device)
    check_sum("grouped_wgrad_mx_rows_add", into, (offs.shape[0], qg.shape[1], qa.shape[1]))

    if path in FP8_ROADS:
        tokens = rebase_tokens(qg, sg, qa, sa, offs)
        fp8_wgrad(tokens, torch.float32, out=into, accumulate=True, promote=promoted_every(path))
    else:
        grouped_wgrad_hp_add(into, dequantize(qg, sg, torch.bfloat16), dequantize(qa, sa, torch.bfloat16), offs)


def grouped_wgrad_hp_into(into: torch.Tensor, grad: torch.Tensor, a: torch.Tensor, offs: torch.Tensor) -> None:
    """`grouped_wgrad_hp` of the groups that have rows, written into a gradient. Twin: `reference.grouped_wgrad_hp_into`.

    Always the Triton kernel, which leaves at once where a group is empty; torch's would write its zeros.

    Args:
        into: (G, N, K) bf16 or float32, contiguous; an empty group's part is left as it is.
        grad, a, offs: as in `grouped_wgrad_hp`.
    """
    offs = check_operands("grouped_wgrad_hp_into", grad, a, offs, offs.shape[0])
    check_into("grouped_wgrad_hp_into", into, (offs.shape[0], grad.shape[1], a.shape[1]))
    if a.shape[0] != grad.shape[0]:
        raise ValueError(f"grouped_wgrad_hp_into: grad {tuple(grad.shape)} with a {tuple(a.shape)}, want (M, N) with (M, K)")
    _launch(into, grad, a, offs, skip=True)


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
    """`grouped_wgrad_mx_rows` of the groups that have rows, written into a gradient. Twin: `reference.grouped_wgrad_mx_rows_into`.

    Args:
        into: (G, N, K) bf16 or float32, contiguous, from a multiple of 16 bytes on; an empty group's part is left as it is.
        qg, sg, qa, sa, offs, path, g_map, a_map: as in `grouped_wgrad_mx_rows`.
        few: as in `rebase_tokens`.
    """
    path = gemm_path(path, qg.device)
    check_into("grouped_wgrad_mx_rows_into", into, (offs.shape[0], qg.shape[1], qa.shape[1]))

    if path in FP8_ROADS:
        tokens = rebase_tokens(qg, sg, qa, sa, offs, g_map, a_map, few=few)
        fp8_wgrad(tokens, into.dtype, out=into, promote=promoted_every(path), empty="skip")
        return
    qg, sg = (qg, sg) if g_map is None else gather_mx_rows(qg, sg, g_map)
    qa, sa = (qa, sa) if a_map is None else gather_mx_rows(qa, sa, a_map)
    grouped_wgrad_hp_into(into, dequantize(qg, sg, torch.bfloat16), dequantize(qa, sa, torch.bfloat16), offs)
