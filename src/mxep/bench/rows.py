"""`mxep bench rows`: gather and scatter rows, plain and MX, and rebase them on the way, at the speed of memory.

The row map is what permute makes of rows from 8 ranks for 8 experts: runs of rows, rank-major to expert-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from mxep import reference
from mxep.bench.memory_bound import Mover, few_rows, memory_cases, random_rows
from mxep.bench.registry import Case, Setting
from mxep.bench.roads import fp8_functions
from mxep.device import available_gemm_paths
from mxep.reference.rebase import SPAN, WIDE_ABOVE, RebasedRows
from mxep.reference.rebase import rebase_rows as rebase_rows_twin
from mxep.shapes import MX_BLOCK

_RANKS, _EXPERTS = 8, 8
_INT32, _FLOAT32 = 4, 4  # bytes


def permuting_map(num_rows: int, device: torch.device) -> torch.Tensor:
    """(T,) int32: rank-major rows, sorted by expert within a rank, into expert-major order; T a multiple of 64."""
    runs = torch.arange(num_rows, dtype=torch.int32, device=device).view(_RANKS, _EXPERTS, -1)
    return runs.transpose(0, 1).reshape(-1).contiguous()


def _rebased(rebase: Callable[..., RebasedRows], *operands: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
    """What a rebase defines: spans of rows that are not wide are left out."""
    rows = rebase(*operands)
    spans = () if rows.spans is None else (torch.where(rows.scale < 0, rows.spans, 0.0),)
    return (rows.data, rows.scale, rows.spread, *spans)


def cases(setting: Setting) -> Iterator[Case]:
    """(T, D) rows, moved once."""
    ops = torch.ops.mxep
    functions = fp8_functions(setting.device) if setting.tiny or not available_gemm_paths(setting.device)["fp8"] else None

    def movers_of(T: int, D: int) -> tuple[str, dict[str, Mover]]:
        x = random_rows(setting, T, D)
        qdata, scale = ops.quantize(x, "rceil")
        row_map, n = permuting_map(T, setting.device), few_rows(T)
        few_map = permuting_map(n, setting.device)
        mx_bytes, plain_bytes, map_bytes = T * (D + D // MX_BLOCK), 2 * T * D, _INT32 * T
        movers = {
            "gather_mx_rows": Mover(
                lambda: ops.gather_mx_rows(qdata, scale, row_map),
                lambda: ops.gather_mx_rows(qdata[:n], scale[:n], few_map),
                lambda: reference.gather_mx_rows(qdata[:n], scale[:n], few_map),
                2 * mx_bytes + map_bytes,
                0.90,
            ),
            "scatter_mx_rows": Mover(
                lambda: ops.scatter_mx_rows(qdata, scale, row_map, T),
                lambda: ops.scatter_mx_rows(qdata[:n], scale[:n], few_map, n),
                lambda: reference.scatter_mx_rows(qdata[:n], scale[:n], few_map, n),
                2 * mx_bytes + map_bytes,
                0.90,
            ),
            "gather_rows": Mover(
                lambda: ops.gather_rows(x, row_map),
                lambda: (ops.gather_rows(x[:n], few_map),),
                lambda: (reference.gather_rows(x[:n], few_map),),
                2 * plain_bytes + map_bytes,
                0.90,
            ),
            "scatter_rows": Mover(
                lambda: ops.scatter_rows(x, row_map, T),
                lambda: (ops.scatter_rows(x[:n], few_map, n),),
                lambda: (reference.scatter_rows(x[:n], few_map, n),),
                2 * plain_bytes + map_bytes,
                0.90,
            ),
        }
        if functions is None:
            return "gather_mx_rows", movers
        for road in ("auto", "row", "span"):
            scales = _FLOAT32 * T * (1 + (-(-D // SPAN) if road == "span" else 0)) + T
            wide = WIDE_ABOVE[road]
            movers[f"gather_rebase_{road}"] = Mover(
                partial(functions.rebase_rows, qdata, scale, wide, row_map),
                partial(_rebased, functions.rebase_rows, qdata[:n], scale[:n], wide, few_map),
                partial(_rebased, rebase_rows_twin, qdata[:n], scale[:n], wide, few_map),
                mx_bytes + T * D + scales + map_bytes,
                0.82 if road == "span" and D <= 2048 else 0.90,
            )
        return "gather_mx_rows", movers

    return memory_cases(setting, movers_of)
