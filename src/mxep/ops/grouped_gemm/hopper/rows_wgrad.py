"""The wgrad of MX rows on FP8 tensor cores: `rebase_tokens`, then `fp8_wgrad`, by one call on the host.

As in rows_gemm.py, memory that only the launches use is one allocation.  All that depends on shapes, strides and dtypes is
checked and made once for each combination of them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.device import multiprocessors
from mxep.ops.grouped_gemm.hopper import gemm
from mxep.ops.grouped_gemm.hopper.rebase import LOAD_BYTES, TokenPlan, in_words, launch_tokens, rebase_tokens, token_plan
from mxep.ops.runtime.nvrtc import Kernel
from mxep.ops.runtime.plans import KEPT_PLANS, Like, like
from mxep.shapes import MX_BLOCK

_SCALES = (torch.float8_e8m0fnu, torch.uint8)


class _WgradPlan(NamedTuple):
    """A call without its addresses."""

    tokens: TokenPlan
    multiply: Kernel
    programs: int


_Operand = tuple[Like, Like, Like | None]  # qdata, scale, map


def _fits(operand: _Operand, device: torch.device) -> bool:
    """Whether the kernels read these MX rows as they are, but for strides."""
    (shape, dtype, of_rows), (scale_shape, scale_dtype, of_scale), of_map = operand
    if len(shape) != 2 or not shape[1] or shape[1] % MX_BLOCK or scale_shape != (shape[0], shape[1] // MX_BLOCK):
        return False
    mapped = of_map is None or (len(of_map[0]) == 1 and of_map[1:] == (torch.int32, device))
    return mapped and dtype == torch.float8_e4m3fn and scale_dtype in _SCALES and device == of_rows == of_scale


@functools.lru_cache(maxsize=KEPT_PLANS)
def _plan(
    grad: _Operand,
    a: _Operand,
    offs: Like,
    out: Like | None,
    out_dtype: torch.dtype,
    accumulate: bool,
    walk: bool,
    words_a: bool,
    words_g: bool,
) -> _WgradPlan | None:
    """The plan; None for operands that are copied or refused, and without tokens."""
    device = offs[2]
    if not (_fits(grad, device) and _fits(a, device)) or offs[1] != torch.int32 or len(offs[0]) != 1:
        return None
    M, other = ((qdata if row_map is None else row_map)[0][0] for qdata, _, row_map in (grad, a))  # tokens
    N, K, G = grad[0][0][1], a[0][0][1], offs[0][0]
    if other != M or not (M and G) or out_dtype not in (torch.bfloat16, torch.float32):
        return None
    if out not in (None, ((G, N, K), out_dtype, device)) or (accumulate and (out is None or out_dtype != torch.float32)):
        return None
    tokens = token_plan(M, K, N, G, words_a, words_g, a[2] is not None, grad[2] is not None, walk)
    kernel = gemm.kernel_of(True, False, out_dtype, accumulate, out is not None and not accumulate)
    return _WgradPlan(tokens, kernel, multiprocessors(device.index))


def rows_wgrad(
    qg: Tensor,
    sg: Tensor,
    qa: Tensor,
    sa: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    g_map: Tensor | None = None,
    a_map: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    mostly_padding: bool = False,
) -> Tensor:
    """out[g] (+)= grad[rows of g].T @ a[rows of g] of MX rows; arguments and result as `grouped_wgrad_mx` of paths.py has them."""
    plan, into, g_like, a_like, starts = None, None, None, None, qg.data_ptr() | qa.data_ptr()
    readable = qg.stride(1) == qa.stride(1) == sg.stride(1) == sa.stride(1) == 1 and offs.is_contiguous()
    if g_map is not None:
        g_like, readable = like(g_map), readable and g_map.is_contiguous()
    if a_map is not None:
        a_like, readable = like(a_map), readable and a_map.is_contiguous()
    if out is not None:
        into, starts, readable = like(out), starts | out.data_ptr(), readable and out.is_contiguous()
    if readable and not (starts | qg.stride(0) | qa.stride(0)) % LOAD_BYTES:
        operands = (like(qg), like(sg), g_like), (like(qa), like(sa), a_like)
        plan = _plan(*operands, like(offs), into, out_dtype, accumulate, mostly_padding, in_words(sa), in_words(sg))
    if plan is None:
        tokens = rebase_tokens(qg, sg, qa, sa, offs, g_map, a_map, mostly_padding=mostly_padding)
        return gemm.fp8_wgrad(tokens, out_dtype, out, accumulate, "zero" if out is None or accumulate else "skip")
    K, N, _, G = plan.tokens.shape
    memory = qg.new_empty(plan.tokens.end, dtype=torch.uint8)
    made = qg.new_empty((G, N, K), dtype=out_dtype) if out is None else out
    start, T = memory.data_ptr(), plan.tokens.num_tokens
    launch_tokens(plan.tokens, start, (qg, sg, g_map), (qa, sa, a_map), offs)
    of_grad, of_a = (start + plan.tokens.grad, T, start + plan.tokens.grad_scale), (start + plan.tokens.a, T, start + plan.tokens.a_scale)
    rest = start + plan.tokens.ends, start + plan.tokens.order, made.data_ptr(), out_dtype == torch.bfloat16
    plan.multiply.run(offs.device.index, plan.programs, gemm.wgrad_arguments(T, N, K, G, *of_grad, *of_a, *rest))
    return made
