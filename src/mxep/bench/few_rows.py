"""Few rows through an expert GEMM, part of `mxep bench grouped-mm`: device time against torch in bf16, and what a call costs the host.

At a few hundred rows a call takes microseconds on the device and more than that on the host, so an arm is one CUDA graph of `CALLS` calls:
its milliseconds are theirs together.  Weights are prepared outside the clock; the rebase of the rows is under it.  The host's
microseconds stand in the record as `host_us`: calls into an empty queue, nothing waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from mxep import reference
from mxep.bench.calls import CALLS, Call, captured, host_facts
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.roads import MOST_ERROR, FP8Functions, torch_bf16
from mxep.bench.timing import Rounds, Timing
from mxep.grouped_mm import to_mxfp8_then_scaled_grouped_mm
from mxep.reference.rebase import WIDE_ABOVE

ROWS = (128, 512, 2048, 8192)
SHAPES = ((7168, 2048), (2048, 1408))  # (K, N) of the forward weight
HOST_LIMIT_US = 30.0  # what the GEMM's launcher may cost
_GROUPS = 8
_LIMIT = 2.0  # half the bytes of the weights, or of the result where weights do not bound it
_BF16 = torch.bfloat16
_ROUNDS = Rounds(count=5, timed=6, warm_ms=40.0)  # bound by memory or latency: they leave the chip its clock


def cases(setting: Setting, functions: FP8Functions) -> Iterator[Case]:
    """Forward, dgrad and wgrad at every number of rows."""
    rows, shapes = ((64,), ((128, 64),)) if setting.tiny else (ROWS[:1], SHAPES[:1]) if setting.quick else (ROWS, SHAPES)
    for K, N in shapes:
        for M in rows:
            yield _case(M, K, N, setting, functions)


def _case(M: int, K: int, N: int, setting: Setting, f: FP8Functions) -> Case:
    device, G = setting.device, _GROUPS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=_BF16)

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qdata, scale = torch.ops.mxep.quantize(x, "rceil")
        return qdata, scale

    x, g, w = normal(M, K), normal(M, N), normal(G, N, K)
    w_t = w.transpose(1, 2).contiguous()  # (G, K, N): the weight of dgrad
    offs = (torch.arange(1, G + 1, device=device) * (M // G)).int()
    qx, qg, qw, qw_t = (quantized(value) for value in (x, g, w, w_t))
    weight, weight_t = f.rebase_weight(*qw), f.rebase_weight(*qw_t)
    path = "fp8" if device.type == "cuda" else "reference"
    auto = WIDE_ABOVE["auto"]
    ours: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: f.grouped_mm(f.rebase_rows(*qx, auto), weight, offs, _BF16),
        "dgrad": lambda: f.grouped_mm(f.rebase_rows(*qg, auto), weight_t, offs, _BF16),
        "wgrad": lambda: f.wgrad(f.rebase_tokens(*qg, *qx, offs), _BF16),
    }
    theirs: dict[str, Call] = {
        "forward": lambda: torch_bf16(x, w.transpose(1, 2), offs),
        "dgrad": lambda: torch_bf16(g, w_t.transpose(1, 2), offs),
        "wgrad": lambda: torch_bf16(g.t(), x, offs),
    }
    arms = {f"{kind}_torch_bf16": captured(call, device) for kind, call in theirs.items()}
    arms |= {f"{kind}_plain": captured(call, device) for kind, call in ours.items()}

    def check() -> str | None:
        truths = {
            "forward": reference.grouped_mm_mx(*qx, *qw, offs, torch.float32, "reference"),
            "dgrad": reference.grouped_mm_mx(*qg, *qw_t, offs, torch.float32, "reference"),
            "wgrad": reference.grouped_wgrad_mx_rows(*qg, *qx, offs, torch.float32, "reference"),
        }
        for kind, truth in truths.items():
            error = ((ours[kind]().float() - truth).norm() / truth.norm()).item()
            if not error <= MOST_ERROR:
                return f"{kind} is {error:.2e} from the exact product of its MX operands, want at most {MOST_ERROR:.1e}"
        return None

    def judge(times: Mapping[str, Timing]) -> dict[str, Figure]:
        ms = {name: timing.median_ms for name, timing in times.items()}
        return {f"{kind}_vs_torch_bf16": Figure(ms[f"{kind}_torch_bf16"] / ms[f"{kind}_plain"], _LIMIT, 1.0) for kind in ours}

    def after() -> dict[str, object]:
        rows, tokens = f.rebase_rows(*qx, auto), f.rebase_tokens(*qg, *qx, offs)
        calls: dict[str, Call] = {
            "torch_bf16": theirs["forward"],
            "launcher": lambda: f.grouped_mm(rows, weight, offs, _BF16),
            "wgrad_launcher": lambda: f.wgrad(tokens, _BF16),
            "grouped_mm_mx": lambda: torch.ops.mxep.grouped_mm_mx(*qx, *weight, offs, _BF16, path),
            "grouped_wgrad_mx_rows": lambda: torch.ops.mxep.grouped_wgrad_mx_rows(*qg, *qx, offs, _BF16, path),
            "to_mxfp8_then_scaled_grouped_mm": lambda: to_mxfp8_then_scaled_grouped_mm(x, w.transpose(1, 2), offs, wgrad_with_hp=True),
        }
        return {**host_facts(calls, device), "host_us_asked": {"launcher": HOST_LIMIT_US}}

    title = f"{M} rows, K {K}, N {N}, {G} groups, {CALLS} calls a run"
    shape = {"M": M, "K": K, "N": N, "G": G}
    host = after if ROWS[0] == M or setting.tiny else None
    return Case(title, shape, arms, check, judge, {"routing": "balanced", "calls": CALLS}, host, None if ROWS[-1] == M else _ROUNDS)
