"""`mxep bench rows`: gather and scatter rows, plain and MX, and rebase them on the way, at the speed of memory.

The row map is what permute makes of rows from 8 ranks for 8 experts: runs of rows, rank-major to expert-major; `_random` arms have
rows in random order instead.  `rebase_tokens` is the transposing pass of a wgrad with K = D columns of activations and the N columns of
gradients of `_GRADIENT_WIDTHS`, in 8 groups.  `bias_grad` sums the rows of each of 8 groups: it reads alone.  With few rows what a call
costs, of the kernels that differ there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from mxep import reference
from mxep.bench.memory_bound import FEW_ROWS, Mover, checked_rows, memory_cases, random_rows
from mxep.bench.registry import Case, Setting
from mxep.bench.roads import fp8_functions
from mxep.bias import bias_grad
from mxep.device import available_gemm_paths
from mxep.reference import rebase as twins
from mxep.reference.rebase import SPAN, WIDE_ABOVE, RebasedRows, RebasedTokens
from mxep.shapes import MX_BLOCK

_RANKS, _EXPERTS = 8, 8
_INT32, _FLOAT32 = 4, 4  # bytes
_RANDOM_TARGET, _NARROW_SPANS_TARGET = 0.85, 0.82  # rows in random order; spans of 128 columns at D <= 2048
_GRADIENT_WIDTHS = {8192: 5120, 7168: 2048, 2048: 1408, 128: 96}  # K -> N; the last one is the tiny case
_WITH_FEW_ROWS = ("gather_mx_rows", "gather_rebase_auto", "gather_rebase_span", "rebase_tokens")

Movers = dict[str, Mover]


def permuting_map(num_rows: int, device: torch.device) -> torch.Tensor:
    """(T,) int32: rank-major rows, sorted by expert within a rank, into expert-major order; T a multiple of 64."""
    runs = torch.arange(num_rows, dtype=torch.int32, device=device).view(_RANKS, _EXPERTS, -1)
    return runs.transpose(0, 1).reshape(-1).contiguous()


def random_map(num_rows: int, device: torch.device) -> torch.Tensor:
    """(T,) int32: every row once, in random order."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randperm(num_rows, device=device, generator=generator).int()


def _rebased(rebase: Callable[..., RebasedRows], *operands: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
    """What a rebase defines: spans of rows that are not wide are left out."""
    rows = rebase(*operands)
    spans = () if rows.spans is None else (torch.where(rows.scale < 0, rows.spans, 0.0),)
    return (rows.data, rows.scale, rows.spread, *spans)


def _transposed(rebase: Callable[..., RebasedTokens], *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a rebase along tokens defines when no group is empty."""
    tokens = rebase(*operands)
    end = int(tokens.ends[-1])  # host sync: of the check
    return (tokens.grad[:, :end], tokens.a[:, :end], tokens.grad_scale, tokens.a_scale, tokens.ends, tokens.order)


def _plain_movers(x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> Movers:
    """Rows and MX rows, moved once: bytes stay what they are."""
    ops = torch.ops.mxep
    (T, D), device = x.shape, x.device
    n = checked_rows(T)
    row_map, few_map = permuting_map(T, device), permuting_map(n, device)
    mixed, few_mixed = random_map(T, device), random_map(n, device)
    mx_bytes, plain_bytes, map_bytes = T * (D + D // MX_BLOCK), 2 * T * D, _INT32 * T
    sums_like, whole = (torch.Size((_EXPERTS, D)), torch.float32), x[:n].round().clamp(-8, 8)  # sums of these are exact
    ends, few_ends = (torch.arange(1, 1 + _EXPERTS, dtype=torch.int32, device=device) * (rows // _EXPERTS) for rows in (T, n))
    scores = torch.full((T,), 0.5, device=device)
    return {
        "bias_grad": Mover(
            lambda: bias_grad(x, ends, *sums_like),
            lambda: (bias_grad(whole, few_ends, *sums_like),),
            lambda: (whole.float().unflatten(0, (_EXPERTS, -1)).sum(1),),
            plain_bytes,
            None,
        ),
        "bias_grad_scored": Mover(
            lambda: bias_grad(x, ends, *sums_like, scores),
            lambda: (bias_grad(whole, few_ends, *sums_like, scores[:n]),),
            lambda: (0.5 * whole.float().unflatten(0, (_EXPERTS, -1)).sum(1),),
            plain_bytes + 4 * T,
            None,
        ),
        "gather_mx_rows": Mover(
            lambda: ops.gather_mx_rows(qdata, scale, row_map),
            lambda: ops.gather_mx_rows(qdata[:n], scale[:n], few_map),
            lambda: reference.gather_mx_rows(qdata[:n], scale[:n], few_map),
            2 * mx_bytes + map_bytes,
            0.90,
        ),
        "gather_mx_rows_random": Mover(
            lambda: ops.gather_mx_rows(qdata, scale, mixed),
            lambda: ops.gather_mx_rows(qdata[:n], scale[:n], few_mixed),
            lambda: reference.gather_mx_rows(qdata[:n], scale[:n], few_mixed),
            2 * mx_bytes + map_bytes,
            _RANDOM_TARGET,
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


def _rebase_movers(rebase: Callable[..., RebasedRows], qdata: torch.Tensor, scale: torch.Tensor) -> Movers:
    """Rows gathered and rebased, by every road, in permute's order and in random order."""
    (T, D), device = qdata.shape, qdata.device
    n = checked_rows(T)
    movers: Movers = {}
    for suffix, order, target in (("", permuting_map, 0.90), ("_random", random_map, _RANDOM_TARGET)):
        row_map, few_map = order(T, device), order(n, device)
        for road, wide in WIDE_ABOVE.items():
            scales = _FLOAT32 * T * (1 + (-(-D // SPAN) if road == "span" else 0)) + T
            movers[f"gather_rebase_{road}{suffix}"] = Mover(
                partial(rebase, qdata, scale, wide, row_map),
                partial(_rebased, rebase, qdata[:n], scale[:n], wide, few_map),
                partial(_rebased, twins.rebase_rows, qdata[:n], scale[:n], wide, few_map),
                T * (2 * D + D // MX_BLOCK + _INT32) + scales,
                _NARROW_SPANS_TARGET if road == "span" and D <= 2048 else target,
            )
    return movers


def _token_mover(rebase: Callable[..., RebasedTokens], qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor) -> Mover:
    """Both operands of a wgrad, transposed and rebased along the tokens of 8 groups; the check's groups are of different size."""
    T, width, n = qa.shape[0], qa.shape[1] + qg.shape[1], checked_rows(qa.shape[0])
    numbers = torch.arange(1, _EXPERTS + 1, device=qa.device)
    offs, few_offs = (numbers * T // _EXPERTS).int(), (numbers**2 * n // _EXPERTS**2).int()
    few = (qg[:n], sg[:n], qa[:n], sa[:n], few_offs)
    return Mover(
        partial(rebase, qg, sg, qa, sa, offs),
        partial(_transposed, rebase, *few),
        partial(_transposed, twins.rebase_tokens, *few),
        T * (2 * width + width // MX_BLOCK),
        0.85,
    )


def cases(setting: Setting) -> Iterator[Case]:
    """(T, D) rows, moved once."""
    functions = fp8_functions(setting.device) if setting.tiny or not available_gemm_paths(setting.device)["fp8"] else None

    def movers_of(T: int, D: int) -> tuple[str, Movers]:
        x = random_rows(setting, T, D)
        qdata, scale = torch.ops.mxep.quantize(x, "rceil")
        movers = _plain_movers(x, qdata, scale)
        if functions is not None:
            movers |= _rebase_movers(functions.rebase_rows, qdata, scale)
            if D in _GRADIENT_WIDTHS:
                qg, sg = torch.ops.mxep.quantize(random_rows(setting, T, _GRADIENT_WIDTHS[D]), "rceil")
                movers["rebase_tokens"] = _token_mover(functions.rebase_tokens, qg, sg, qdata, scale)
        if T in FEW_ROWS:
            movers = {name: mover for name, mover in movers.items() if name in _WITH_FEW_ROWS}
        return "gather_mx_rows", movers

    return memory_cases(setting, movers_of, few=True)
