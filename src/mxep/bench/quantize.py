"""`mxep bench quantize`: quantise 1x32, 32x1 (transposed), both from one read, into packed records, and dequantise.

At the speed of memory with many rows; with few rows what a call costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mxep import reference
from mxep.bench.memory_bound import Mover, checked_rows, memory_cases, random_rows
from mxep.bench.registry import Case, Setting
from mxep.shapes import MX_BLOCK, record_bytes

_MODE = "rceil"


def cases(setting: Setting) -> Iterator[Case]:
    """(T, D) bf16 in, MX out, and back."""

    def movers_of(T: int, D: int) -> tuple[str, dict[str, Mover]]:
        x = random_rows(setting, T, D)
        qdata, scale = torch.ops.mxep.quantize(x, _MODE)
        few, n = x[: checked_rows(T)], checked_rows(T)
        mx_bytes, bf16_bytes = T * (D + D // MX_BLOCK), 2 * T * D
        ops = torch.ops.mxep
        return "quantize", {
            "quantize": Mover(
                lambda: ops.quantize(x, _MODE),
                lambda: ops.quantize(few, _MODE),
                lambda: reference.quantize(few, _MODE),
                bf16_bytes + mx_bytes,
                0.90,
            ),
            "quantize_packed": Mover(
                lambda: ops.quantize_packed(x, _MODE),
                lambda: (ops.quantize_packed(few, _MODE),),
                lambda: (reference.quantize_packed(few, _MODE),),
                bf16_bytes + T * record_bytes(D),
                0.90,
            ),
            "quantize_transposed": Mover(
                lambda: ops.quantize_transposed(x, _MODE),
                lambda: ops.quantize_transposed(few, _MODE),
                lambda: reference.quantize_transposed(few, _MODE),
                bf16_bytes + mx_bytes,
                0.85,
            ),
            "quantize_both": Mover(
                lambda: ops.quantize_both(x, _MODE),
                lambda: ops.quantize_both(few, _MODE),
                lambda: reference.quantize_both(few, _MODE),
                bf16_bytes + 2 * mx_bytes,
                0.85,
            ),
            "dequantize": Mover(
                lambda: ops.dequantize(qdata, scale, torch.bfloat16),
                lambda: (ops.dequantize(qdata[:n], scale[:n], torch.bfloat16),),
                lambda: (reference.dequantize(qdata[:n], scale[:n], torch.bfloat16),),
                bf16_bytes + mx_bytes,
                0.90,
            ),
        }

    return memory_cases(setting, movers_of, few=True)
