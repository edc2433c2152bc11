"""Causal attention by FlashAttention-4 (the package flash-attn-4), in bf16 or float16; the reference says what the arguments are.

Heads have 8 to 256 values, a multiple of 8.  Without grouped heads the value width may differ from that of queries and keys.  The package
compiles a kernel for each combination of widths when it is first used, which takes seconds, but none for other numbers of tokens or
documents.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mxep.device import chip_of, compute_capability
from mxep.extras import install_command
from mxep.ops.runtime.nvrtc import unrecorded

_LEAST_SM = 9, 0


@functools.cache
def _package() -> Any:
    from flash_attn.cute import interface

    return interface


def check_flash_attention_4(where: str, device: torch.device) -> None:
    """Raise ValueError unless the package is installed and runs on this device."""
    if device.type != "cuda" or compute_capability(device.index) < _LEAST_SM:
        got = f"a GPU of {chip_of(device.index)}" if device.type == "cuda" else f"device {device.type}"
        raise ValueError(f"{where}: FlashAttention-4 on {got}, want a GPU of sm_90 (Hopper) or newer; take 'sdpa'")
    try:
        _package()
    except ImportError as error:
        raise ValueError(f"{where}: FlashAttention-4 needs the package flash-attn-4; {install_command('flash_attn')} ({error})") from error


def _documents(x: Tensor, starts: Tensor | None) -> Tensor:
    return x if starts is None else x.flatten(0, 1)


def _options(scale: float, starts: Tensor | None, longest: int) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
    if starts is not None:
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return options


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None = None, longest: int = 0
) -> tuple[Tensor, Tensor]:
    unrecorded("FlashAttention-4")
    rows = (_documents(x, starts) for x in (q, k, v))
    out, log_sums = _package()._flash_attn_fwd(*rows, return_lse=True, **_options(scale, starts, longest))[:2]
    return out.view(*q.shape[:3], v.shape[3]), log_sums


def causal_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
    starts: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    unrecorded("FlashAttention-4")
    rows = (_documents(x, starts) for x in (q, k, v, out, grad))
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = _package()._flash_attn_bwd(*rows, log_sums, deterministic=deterministic, **_options(scale, starts, longest))
    dq, dk, dv = (d.contiguous().view(x.shape) for d, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv
