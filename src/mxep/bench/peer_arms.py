"""Arms of `mxep bench peers` from other packages: experts of one GPU as a user of that package computes them.

Each one gets tokens x (T, D) and scores (T, C) in bf16, choices (T, C) int64, w1 (E, 2H, D) and w2 (E, D, H) in bf16, and returns the
weighted sums (T, D), differentiable in all but the choices.  mxep depends on none of these packages:

| arm | package | what runs |
| --- | --- | --- |
| liger | liger-kernel | `LigerFusedMoEFunction`, bf16, Triton kernels, tuned once per machine |
| torchao_rowwise | torchao | two FP8 grouped GEMMs with one scale per row, wgrad in FP8 too |
| torchao_blockwise | torchao, sgl-deep-gemm | two FP8 grouped GEMMs with a scale per 128 values of a row or 128 x 128 of a weight |
| sonicmoe | sonic-moe, quack-kernels | bf16, CuTe DSL kernels |

Around torchao's GEMMs runs code of ours under torch.compile, which does what torchtitan's does: it gathers rows by expert, pads each group
to the multiple that the GEMM needs, and computes SwiGLU, scores and the sum over choices.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, choices, scores, w1, w2 -> y
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows (P, K), weight (E, K, N), END offsets (E,) int32 -> (P, N)


def gather_padded(x: Tensor, choices: Tensor, num_experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert, each group padded with zeros to a multiple of `alignment`.

    Args:
        x: (T, D).  choices: (T, C) int64.

    Returns:
        rows (T*C + E*alignment, D), the place (T*C,) of each choice's row, and END offsets (E,) int32.
    """
    chosen = choices.reshape(-1)
    counts = (chosen.unsqueeze(1) == torch.arange(num_experts, device=x.device)).sum(0)
    padded = (counts + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    order = chosen.argsort(stable=True)
    first = (ends - padded) - (counts.cumsum(0) - counts)  # of each group: its place among padded rows less that among sorted ones
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=x.device) + first[chosen[order]]
    rows = x.new_zeros(order.numel() + num_experts * alignment, x.shape[1])
    return rows.index_copy(0, place, x.repeat_interleave(choices.shape[1], dim=0)), place, ends.int()


def swiglu(gate_up: Tensor) -> Tensor:
    """(P, 2H), gate and up concatenated -> (P, H)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted_sum(rows: Tensor, place: Tensor, scores: Tensor) -> Tensor:
    """Rows (P, D) at the places (T*C,) of the choices, times scores (T, C), summed over a token's choices -> (T, D)."""
    return (rows[place].view(*scores.shape, -1) * scores.unsqueeze(-1)).sum(1)


def grouped_experts(grouped_mm: GroupedMM, alignment: int, x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts by a package's grouped GEMM, whose groups are multiples of `alignment`."""
    gather, activate, combine = _compiled_parts() if x.is_cuda else (gather_padded, swiglu, weighted_sum)
    rows, place, offs = gather(x, choices, w1.shape[0], alignment)
    hidden = activate(grouped_mm(rows, w1.transpose(1, 2), offs))
    return combine(grouped_mm(hidden, w2.transpose(1, 2), offs), place, scores)


@functools.cache
def _compiled_parts() -> tuple[Callable, ...]:
    return tuple(torch.compile(part, dynamic=False) for part in (gather_padded, swiglu, weighted_sum))


def _liger() -> Experts:
    import triton

    triton.knobs.autotuning.cache = True  # read when the package's kernels are defined: its tuning takes minutes
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def experts(x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return function.apply(x, w1, w2, choices.int(), scores.float())

    return experts


def _torchao_rowwise() -> Experts:
    module = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    grouped_mm = partial(module._to_fp8_rowwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False)
    return partial(grouped_experts, grouped_mm, 16)


def _torchao_blockwise() -> Experts:
    importlib.import_module("deep_gemm")  # without it torchao emulates the GEMM in silence
    module = importlib.import_module("torchao.prototype.moe_training.blockwise_fp8.grouped_mm")
    grouped_mm = partial(module._to_fp8_blockwise_then_scaled_grouped_mm, pad_token_groups_for_grouped_mm=False)
    return partial(grouped_experts, grouped_mm, 128)


def _sonicmoe() -> Experts:
    functional, enums = (importlib.import_module(f"sonicmoe.{name}") for name in ("functional", "enums"))

    def experts(x: Tensor, choices: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0], device=x.device, dtype=torch.int32).repeat_interleave(choices.shape[1])
        y, _ = functional.moe_general_routing_inputs(
            x,
            scores.reshape(-1),
            tokens,
            choices.reshape(-1).int(),
            w1.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            w1.shape[0],
            torch.cuda.current_stream().cuda_stream,
            enums.ActivationType.SWIGLU,
            concat_layout=True,
        )
        return y

    return experts


PEERS: dict[str, Callable[[], Experts]] = {  # arm -> how it is imported
    "liger": _liger,
    "torchao_rowwise": _torchao_rowwise,
    "torchao_blockwise": _torchao_blockwise,
    "sonicmoe": _sonicmoe,
}
FP8_PEERS = ("torchao_rowwise", "torchao_blockwise")  # the others multiply in bf16


def load_peers(names: tuple[str, ...], device: torch.device) -> tuple[dict[str, Experts], dict[str, str]]:
    """The arms of these names that this machine can import, and why it cannot import the others."""
    found, left_out = dict[str, Experts](), dict[str, str]()
    for name in names:
        if device.type != "cuda":
            left_out[name] = "it needs a GPU"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = PEERS[name]()
        except Exception as error:
            left_out[name] = short_reason(error)
    return found, left_out


def short_reason(error: BaseException) -> str:
    """The kind and the first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
