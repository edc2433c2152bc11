"""Grouped GEMMs of MX operands on the GPU, by the GEMM path's name.  No host sync; the group ends stay on the device."""

from __future__ import annotations

import functools

import torch

from mxep.device import FP8_PATHS, resolve_gemm_path
from mxep.ops.grouped_gemm.blackwell import BlackwellPath
from mxep.ops.grouped_gemm.exact import ExactPath
from mxep.ops.grouped_gemm.hopper.fp8 import Fp8Path
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD
from mxep.ops.grouped_gemm.reference import check_out

PATHS: dict[str, ExactPath] = {
    "exact": ExactPath(),
    **{name: Fp8Path(MAX_SPREAD[granularity]) for name, granularity in FP8_PATHS.items()},
    "blackwell": BlackwellPath(),
}


@functools.cache
def path_of(name: str, device: torch.device) -> ExactPath:
    """The path that `name` resolves to, cached: the answer does not change, and asking costs more than a launch."""
    return PATHS[resolve_gemm_path(name, device)]


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
        qa, sa: (M, K) and (M, K/32) e8m0; on the FP8 paths also `RebasedRows`, sa (M,) float32.  offs: (G,) int32 or int64.
        qb, sb: (G, N, K) and (G, N, K/32) e8m0; on the FP8 paths also what `quantize_weight` makes, sb (G, N) float32.
        path: a name in `PATHS`, as `mxep.device` describes them.
        row_map: (M,) int32 on the device, the row of qa that is row m, -1 for zeros; qa may then have any number of rows.  The FP8 paths
            gather and rebase in one pass, the others gather first.
        padding_rows: as in `grouped_mm_hp`.
        block_scale: of `RebasedRows`, None where it has none.
        inner, lora_b: of adapters, as in the reference; on the FP8 paths, of which `fuses_lora` says when.

    Returns:
        (M, N) `out_dtype`; rows past offs[-1] are zero, or not defined.
    """
    if offs.dtype != torch.int32 or not offs.is_contiguous():
        offs = offs.to(torch.int32).contiguous()
    how = path_of(path, qa.device)
    return how.grouped_mm(qa, sa, qb, sb, offs, out_dtype, row_map, padding_rows, block_scale, inner, lora_b)


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
    """`grouped_wgrad_hp` of the dequantised values of MX rows ("wgrad_with_hp").

    Args:
        qg, sg: (M, N) and (M, N/32).  qa, sa: (M, K) and (M, K/32), all row-strided or contiguous.  offs: (G,) int32 or int64.
        path: the FP8 paths transpose and rebase the bytes and multiply on FP8 tensor cores; every other path dequantises to bf16.
        g_map, a_map: (M,) int32 on the device, the row of qg or qa that is token m, -1 for zeros; these may then have any number of rows.
        out, accumulate: as in `grouped_wgrad_hp`; `out` starts at a multiple of 16 bytes.  mostly_padding: as in `rebase_tokens`.

    Returns:
        (G, N, K) `out_dtype`, zero for an empty group; `out` if given.
    """
    check_out("grouped_wgrad_mx", out, (offs.shape[0], qg.shape[1], qa.shape[1]), out_dtype, accumulate)
    return path_of(path, qg.device).wgrad((qg, sg), (qa, sa), offs, out_dtype, g_map, a_map, out, accumulate, mostly_padding)


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
    """`grouped_wgrad_mx` of the left and of the right half of grad's columns, which the FP8 paths rebase together.

    Args:
        qg, sg: (M, 2N) and (M, 2N/32), N a multiple of 32.  The rest as in `grouped_wgrad_mx`.

    Returns:
        two (G, N, K) `out_dtype`, each contiguous and zero for an empty group; an out if it is given, which keeps what it holds for one.
    """
    for out in (out_gate, out_up):
        check_out("grouped_wgrad_mx_gate_up", out, (offs.shape[0], qg.shape[1] // 2, qa.shape[1]), out_dtype)
    outs = out_gate, out_up
    return path_of(path, qg.device).wgrad_gate_up((qg, sg), (qa, sa), offs, out_dtype, a_map, outs, mostly_padding)


def grouped_wgrad_mx_columnwise(
    qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype, path: str
) -> torch.Tensor:
    """`grouped_wgrad_hp` of MX operands, both 32x1 along M, given as the MX form of their transposes.

    Args:
        qg, sg: (N, M) and (N, M/32).  qa, sa: (K, M) and (K, M/32).  offs: (G,) int32 or int64, multiples of 32.
        path: "blackwell" multiplies the bytes; every other path dequantises to bf16.

    Returns:
        (G, N, K) `out_dtype`; zero for an empty group.
    """
    return path_of(path, qg.device).wgrad_columnwise((qg, sg), (qa, sa), offs, out_dtype)
