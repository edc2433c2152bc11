"""Every .cu compiles for Hopper by NVRTC, which mxep uses at run time: without spills, and without ptxas's reports of serialised wgmma."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.ops import sass

from mxep.device import compiler_problem
from mxep.ops.activation import backward, rebased
from mxep.ops.activation.columns import Variant
from mxep.ops.activation.functions import SwiGLU
from mxep.ops.grouped_gemm.hopper import bf16_wgrad, quantize_rows, quantize_weight, rebase
from mxep.ops.grouped_gemm.hopper import gemm as fp8_grouped_mm
from mxep.ops.optimizer import adamw_step
from mxep.ops.peer_write import p2p, slots
from mxep.ops.routing import expert_rows
from mxep.ops.runtime import nvrtc, tiles
from mxep.recipe import SCALING_MODES

BF16, FLOAT32 = torch.bfloat16, torch.float32
WITH_COMPILER = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
HEADERS = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh")


def gemm(**kind: object) -> tuple[tuple[str, ...], dict]:
    variant = {"wgrad": False, "block_scales": False, "out_dtype": torch.bfloat16, "accumulate": False, "skip": False, **kind}
    return fp8_grouped_mm.FILES, fp8_grouped_mm.options_of(**variant)


def wgrad_of_bf16(out_dtype: torch.dtype, accumulate: bool = False, skip: bool = False) -> tuple[tuple[str, ...], dict]:
    return bf16_wgrad.FILES, bf16_wgrad.options_of(out_dtype=out_dtype, accumulate=accumulate, skip=skip)


def quantizer(both: bool, item_bytes: int, scaling_mode: str = "rceil", narrow: int = 0) -> tuple[tuple[str, ...], dict]:
    files = (*HEADERS, "quantize/tile.cuh", "quantize/columnwise.cu")
    return files, tiles.TRANSPOSE[both, item_bytes][narrow].options(SCALING_MODES.index(scaling_mode))


def weight(item_bytes: int, rowwise: bool, columnwise: bool, rounds: bool = False) -> tuple[tuple[str, ...], dict]:
    return quantize_weight.FILES, quantize_weight.options_of(item_bytes, rowwise, columnwise, rounds, "rceil")


def quantized_rows(
    width: int, item_bytes: int = 2, wide: bool = True, block_scales: bool = True, mx: bool = True, mode: str = "rceil"
) -> tuple:
    return quantize_rows.FILES, quantize_rows.options_of(width, item_bytes, wide, block_scales, mx, mode)


def rows(width: int, block_scales: bool, mapped: bool, num_valid_rows: bool = False) -> tuple[tuple[str, ...], dict]:
    return rebase.ROWS_FILES, rebase.rows_options(width, block_scales, mapped, num_valid_rows)


def tokens(file: str, width_a: int, width_g: int, simple: bool, walk: bool = False) -> tuple[tuple[str, ...], dict]:
    a, g = (rebase.TokenRows(width, words=simple, mapped=not simple) for width in (width_a, width_g))
    return (*HEADERS, file), rebase.tokens_options(file, a, g, walk)


def swiglu(width: int, layout: str, **variant: object) -> tuple[tuple[str, ...], dict]:
    return activated("swiglu", width, layout=layout, **variant)


def activated(activation: str, width: int, **variant: object) -> tuple[tuple[str, ...], dict]:
    single_row = bool(variant.pop("single_row", False))
    options = {"layout": "concatenated", "scaling_mode": "rceil", **variant}
    return backward.FILES, backward.options_of(Variant(width, activation=activation, **options), single_row)


def rebasing(activation: str, width: int, dx: str = "", h: str = "none", block_scales: bool = True, **variant: object) -> tuple:
    """Forward without a `dx`, else the gradient in these forms."""
    options = {"layout": "concatenated", "scaling_mode": "rceil", "forms": (dx or "none", h), **variant}
    return rebased.FILES, rebased.options_of(Variant(width, activation=activation, **options), not dx, block_scales)


def summing(activation: str, width: int, dx: str, h: str, **variant: object) -> tuple:
    """The gradient with sums of its rows."""
    return rebasing(activation, width, dx, h, **{"scores": True, "sums": True, **variant})


def p2p_of(
    sums: bool, mode: str, item_bytes: int, row_chunks: int, word_bytes: int = 16, chunk: bool = False
) -> tuple[tuple[str, ...], dict]:
    return p2p.FILES, p2p.options_of(sums, mode, item_bytes, word_bytes, row_chunks, chunk)


def adamw(bits: int, dtype: torch.dtype, vectors: bool = True, runs: int = adamw_step.ONE_RUN) -> tuple[tuple[str, ...], dict]:
    return adamw_step.FILES, adamw_step.options_of(bits, (dtype == FLOAT32,) * 2, vectors, runs)


VARIANTS = {
    "grouped_mm": gemm(block_scales=True),
    "grouped_mm_float32": gemm(block_scales=True, out_dtype=torch.float32),
    "grouped_mm_row": gemm(),
    "wgrad": gemm(wgrad=True),
    "wgrad_float32": gemm(wgrad=True, out_dtype=torch.float32),
    "wgrad_accumulate": gemm(wgrad=True, out_dtype=torch.float32, accumulate=True),
    "grouped_mm_skip": gemm(block_scales=True, skip=True),
    "grouped_mm_lora": gemm(block_scales=True, skip=True, lora=True),
    "grouped_mm_row_lora": gemm(lora=True),
    "wgrad_skip": gemm(wgrad=True, skip=True),
    "wgrad_skip_float32": gemm(wgrad=True, out_dtype=torch.float32, skip=True),
    "bf16_wgrad": wgrad_of_bf16(BF16),
    "bf16_wgrad_skip": wgrad_of_bf16(BF16, skip=True),
    "bf16_wgrad_float32": wgrad_of_bf16(FLOAT32),
    "bf16_wgrad_accumulate": wgrad_of_bf16(FLOAT32, accumulate=True, skip=True),
    "quantize_rows": quantized_rows(2048),
    "quantize_rows_rebased_alone": quantized_rows(10944, mx=False),
    "quantize_rows_row": quantized_rows(576, block_scales=False, mode="floor"),
    "quantize_rows_odd": quantized_rows(32, wide=False),
    "quantize_rows_float32": quantized_rows(2816, item_bytes=4),
    "quantize_rows_widest": quantized_rows(tiles.QUANTIZE_ROWS_WIDEST),
    "rebase_rows": rows(8192, block_scales=True, mapped=True),
    "rebase_rows_of_eight": rows(4096, block_scales=True, mapped=True),
    "rebase_rows_live": rows(4096, block_scales=True, mapped=True, num_valid_rows=True),
    "rebase_rows_live_wide": rows(7168, block_scales=True, mapped=False, num_valid_rows=True),
    "rebase_rows_live_far": rows(16384, block_scales=True, mapped=False, num_valid_rows=True),
    "rebase_rows_odd": rows(1376, block_scales=False, mapped=False),
    "rebase_rows_far": rows(16384, block_scales=True, mapped=False),
    "rebase_tokens": tokens("grouped_gemm/hopper/rebase_tokens.cu", 7168, 2048, True),
    "rebase_tokens_walk": tokens("grouped_gemm/hopper/rebase_tokens.cu", 4096, 3072, False, walk=True),
    "rebase_tokens_odd": tokens("grouped_gemm/hopper/rebase_tokens.cu", 96, 1376, False),
    "token_maxima": tokens("grouped_gemm/hopper/token_maxima.cu", 7168, 2048, True),
    "token_maxima_odd": tokens("grouped_gemm/hopper/token_maxima.cu", 9312, 32, False),
    "token_maxima_far": tokens("grouped_gemm/hopper/token_maxima.cu", 16384, 16384, True),
    "token_plan": (("runtime/hopper.cuh", "grouped_gemm/hopper/token_plan.cu"), {}),
    "quantize_rowwise_columnwise": quantizer(both=True, item_bytes=2),
    "quantize_rowwise_columnwise_narrow": quantizer(both=True, item_bytes=2, scaling_mode="floor", narrow=1),
    "quantize_rowwise_columnwise_float32": quantizer(both=True, item_bytes=4, scaling_mode="floor"),
    "quantize_columnwise": quantizer(both=False, item_bytes=2, scaling_mode="floor"),
    "quantize_columnwise_float32": quantizer(both=False, item_bytes=4),
    "quantize_weight": weight(2, True, True),
    "quantize_weight_rowwise": weight(2, True, False),
    "quantize_weight_columnwise": weight(2, False, True),
    "quantize_weight_float32": weight(4, True, True),
    "quantize_weight_rounded": weight(4, True, True, rounds=True),
    "quantize_weight_mx": weight(1, True, True),
    "quantize_weight_mx_rowwise": weight(1, True, False),
    "quantize_weight_mx_columnwise": weight(1, False, True),
    "index_expert_rows": (expert_rows.FILES, expert_rows.options_of(8, long=False, scored=False)),
    "index_expert_rows_long": (expert_rows.FILES, expert_rows.options_of(2, long=True, scored=False)),
    "index_topk": (expert_rows.FILES, expert_rows.options_of(8, long=False, scored=True)),
    "index_topk_long": (expert_rows.FILES, expert_rows.options_of(2, long=True, scored=True)),
    "p2p_records": p2p_of(False, "rceil", 2, 448),
    "p2p_records_short": p2p_of(False, "rceil", 4, 2),
    "p2p_scatter_rows": p2p_of(False, "", 1, 896),
    "p2p_scatter_rows_odd": p2p_of(False, "", 1, 17, word_bytes=1),
    "p2p_reduce_rows": p2p_of(True, "", 2, 896),
    "p2p_reduce_rows_records_float32": p2p_of(True, "floor", 4, 4),
    "p2p_reduce_rows_chunk": p2p_of(True, "", 2, 512, chunk=True),
    "p2p_reduce_rows_chunk_odd": p2p_of(True, "", 2, 17, word_bytes=2, chunk=True),
    "p2p_reduce_rows_chunk_records": p2p_of(True, "rceil", 2, 256, chunk=True),
    "p2p_reduce_rows_chunk_float32": p2p_of(True, "", 4, 7, chunk=True),
    "send_slots": (slots.FILES, slots.send_options("rceil", 2, 320, 2)),
    "send_slots_float32": (slots.FILES, slots.send_options("floor", 4, 6, 64)),
    "recv_slots": (slots.FILES, slots.recv_options(2, 640, 8)),
    "recv_slots_float32": (slots.FILES, slots.recv_options(4, 8, 1)),
    "swiglu_backward": swiglu(7168, "concatenated"),
    "swiglu_backward_interleaved": swiglu(1408, "interleaved"),
    "swiglu_backward_exact": swiglu(96, "interleaved", scaling_mode="floor", exact=True),
    "swiglu_backward_hp": swiglu(2048, "concatenated", forms=("mx+hp", "hp")),
    "swiglu_backward_every_form": swiglu(1056, "interleaved", forms=("mx+hp", "mx+hp"), scores=True),
    "swiglu_backward_single_row": swiglu(1376, "concatenated", exact=True, forms=("mx+hp", "mx+hp"), wide=False, single_row=True),
    "swiglu_backward_float32": swiglu(4096, "interleaved", x=FLOAT32, dh=FLOAT32, forms=("mx+hp", "mx+hp"), scores=True),
    "swiglu_backward_of_mx": swiglu(1536, "concatenated", x_mx=True, scores=True),
    "swiglu_backward_live": swiglu(1536, "concatenated", scores=True, num_valid_rows=True),
    "swiglu_backward_live_of_mx": swiglu(1408, "interleaved", x_mx=True, scores=True, forms=("mx+hp", "hp"), num_valid_rows=True),
    "swiglu_backward_of_mx_every_form": swiglu(
        1056, "interleaved", x_mx=True, x=FLOAT32, dh=FLOAT32, exact=True, forms=("mx+hp", "mx+hp"), scores=True, single_row=True
    ),
    "swiglu_backward_limit": swiglu(7168, "concatenated", scores=True, swiglu=SwiGLU(10.0)),
    "swiglu_backward_gpt_oss": swiglu(2880, "interleaved", forms=("mx+hp", "hp"), scores=True, swiglu=SwiGLU(7.0, 1.702, 1.0)),
    "swiglu_backward_mixed": swiglu(8192, "concatenated", exact=True, x=FLOAT32, forms=("hp", "mx"), scores=True),
    "geglu_backward": activated("geglu", 7168),
    "geglu_backward_exact": activated("geglu", 1056, layout="interleaved", exact=True, forms=("mx+hp", "mx+hp"), scores=True),
    "geglu_backward_tanh": activated("geglu_tanh", 2816, layout="interleaved", forms=("mx+hp", "hp"), scores=True, num_valid_rows=True),
    "geglu_backward_tanh_exact": activated("geglu_tanh", 1408, exact=True, x_mx=True, x=FLOAT32, dh=FLOAT32, scores=True),
    "reglu_backward": activated("reglu", 1408, layout="interleaved", scores=True),
    "reglu_backward_exact": activated("reglu", 1056, exact=True, forms=("mx+hp", "mx+hp"), x_mx=True),
    "relu2_backward": activated("relu2", 2048),
    "relu2_backward_every_form": activated("relu2", 1056, forms=("mx+hp", "mx+hp"), scores=True, num_valid_rows=True),
    "relu2_backward_single_row": activated("relu2", 1376, exact=True, forms=("mx+hp", "mx+hp"), wide=False, single_row=True),
    "relu2_backward_of_mx": activated("relu2", 1856, x_mx=True, scores=True, forms=("mx+hp", "hp")),
    "swiglu_rebased": rebasing("swiglu", 768, scores=True, num_valid_rows=True),
    "swiglu_rebased_hp": rebasing("swiglu", 768, h="rebased+hp", scores=True, num_valid_rows=True),
    "swiglu_rebased_row": rebasing("swiglu", 1408, block_scales=False),
    "swiglu_rebased_interleaved": rebasing("swiglu", 2048, layout="interleaved", scores=True),
    "swiglu_rebased_gpt_oss": rebasing("swiglu", 2880, layout="interleaved", scores=True, swiglu=SwiGLU(7.0, 1.702, 1.0)),
    "swiglu_rebased_far": rebasing("swiglu", 14336, scores=True),
    "swiglu_rebased_exact": rebasing("swiglu", 96, scaling_mode="floor", exact=True, wide=False),
    "swiglu_rebased_float32": rebasing("swiglu", 32, x=FLOAT32, layout="interleaved", num_valid_rows=True),
    "geglu_rebased": rebasing("geglu", 1536, scores=True),
    "relu2_rebased": rebasing("relu2", 1856, scores=True, num_valid_rows=True),
    "swiglu_rebased_gradient": rebasing("swiglu", 768, "mx+rebased", "mx", scores=True, num_valid_rows=True),
    "swiglu_rebased_gradient_hp": rebasing("swiglu", 768, "rebased+hp", "hp", scores=True, num_valid_rows=True),
    "swiglu_rebased_gradient_row": rebasing("swiglu", 1408, "rebased", block_scales=False),
    "swiglu_rebased_gradient_interleaved": rebasing("swiglu", 1408, "mx+rebased", "mx", layout="interleaved", scores=True),
    "swiglu_rebased_gradient_gpt_oss": rebasing(
        "swiglu", 2880, "rebased+hp", "hp", layout="interleaved", scores=True, swiglu=SwiGLU(7.0, 1.702, 1.0)
    ),
    "swiglu_rebased_gradient_far": rebasing("swiglu", 14336, "mx+rebased", "mx", scores=True),
    "swiglu_rebased_gradient_every_form": rebasing("swiglu", 1056, "mx+rebased+hp", "mx+hp", layout="interleaved", scores=True, exact=True),
    "swiglu_rebased_gradient_of_mx": rebasing("swiglu", 1536, "mx+rebased", "mx", scores=True, x_mx=True, num_valid_rows=True),
    "swiglu_rebased_gradient_float32": rebasing("swiglu", 96, "mx+rebased+hp", "mx+hp", x=FLOAT32, dh=FLOAT32, scores=True, wide=False),
    "geglu_rebased_gradient": rebasing("geglu", 7168, "mx+rebased", "mx", scores=True),
    "relu2_rebased_gradient": rebasing("relu2", 1856, "mx+rebased+hp", "mx+hp", scores=True, num_valid_rows=True),
    "swiglu_rebased_sums_gpt_oss": summing("swiglu", 2880, "mx+rebased", "mx", layout="interleaved", swiglu=SwiGLU(7.0, 1.702, 1.0)),
    "swiglu_rebased_sums_gpt_oss_hp": summing(
        "swiglu", 2880, "rebased", "hp", layout="interleaved", swiglu=SwiGLU(7.0, 1.702, 1.0), num_valid_rows=True
    ),
    "swiglu_rebased_sums_gpt_oss_of_mx": summing(
        "swiglu", 2880, "mx+rebased", "mx", layout="interleaved", swiglu=SwiGLU(7.0, 1.702, 1.0), num_valid_rows=True, x_mx=True
    ),
    "swiglu_rebased_sums_of_mx": summing("swiglu", 2048, "rebased", "none", block_scales=False, scores=False, x_mx=True),
    "swiglu_rebased_sums_far": summing("swiglu", 6144, "mx+rebased", "mx", num_valid_rows=True),
    "swiglu_rebased_sums_odd": summing("swiglu", 3136, "mx+rebased", "mx", layout="interleaved", wide=False),
    "swiglu_rebased_sums_every_form": summing("swiglu", 1056, "mx+rebased+hp", "mx+hp", exact=True),
    "swiglu_rebased_sums_float32": summing("swiglu", 32, "rebased+hp", "hp", x=FLOAT32, dh=FLOAT32),
    "geglu_rebased_sums": summing("geglu", 3072, "mx+rebased", "mx"),
    "relu2_rebased_sums": summing("relu2", 1856, "mx+rebased+hp", "mx+hp", num_valid_rows=True),
    "relu2_backward_float32": activated("relu2", 4096, x=FLOAT32, dh=FLOAT32, forms=("hp", "mx"), scores=True),
    "adamw_step_8bit": adamw(8, BF16),
    "adamw_step_8bit_cut": adamw(8, BF16, runs=adamw_step.WHOLE_LANES),
    "adamw_step_8bit_float32": adamw(8, FLOAT32),
    "adamw_step_4bit": adamw(4, BF16),
    "adamw_step_4bit_float32": adamw(4, FLOAT32),
    "adamw_step_plain": adamw(0, BF16),
    "adamw_step_plain_odd": adamw(0, BF16, vectors=False, runs=adamw_step.ANY),
    "adamw_step_plain_float32": adamw(0, FLOAT32),
}


def compiled(text: str, name: str) -> tuple[bytes, str]:
    """The cubin, and what ptxas says of it."""
    return nvrtc.compiled(text, name, nvrtc.CHIP, "--ptxas-options=-v")


def assert_no_complaint(report: str) -> None:
    """No warning, no wgmma that ptxas serialises, no register in memory."""
    assert not re.search(r"C75\d\d|warning", report), report
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    assert set(spills) == {"0"}, report


@WITH_COMPILER
@pytest.mark.parametrize("file", sorted({files[-1] for files, _ in VARIANTS.values()}))
def test_compiles(file: str) -> None:
    """All variants of a file."""
    cubins = {}
    for variant, (files, options) in VARIANTS.items():
        if files[-1] == file:
            cubins[variant], report = compiled(nvrtc.source(*files, options=options), variant)
            assert cubins[variant][:4] == b"\x7fELF"
            assert_no_complaint(report)
    if sass.disassembler() is not None:
        for variant, lines in zip(cubins, sass.instructions([*cubins.values()], "SM90a"), strict=True):
            assert_sound(variant, lines)


SERIALISED = """
extern "C" __global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; ++i) {
    asm volatile("{wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b + i));
    d[0] += 1.0f;
  }
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(volatile float* p) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 64; ++i) p[(63 - i) * 1024 + threadIdx.x] = v[i];
}
"""


@WITH_COMPILER
@pytest.mark.parametrize("text", [SERIALISED, SPILLING], ids=["serialised wgmma", "spills"])
def test_the_check_finds(text: str) -> None:
    _, report = compiled(text, "planted")
    with pytest.raises(AssertionError, match="ptxas info"):
        assert_no_complaint(report)


def assert_sound(variant: str, lines: list[str]) -> None:
    """No packed bytes are taken from the stack pointer; activations use maxima that keep NaN, and their backward has no barrier."""
    assert not sass.stack_pointer_as_data(lines), f"{variant} is miscompiled: {sass.stack_pointer_as_data(lines)}"
    code = " ".join(lines)
    if "p2p" in variant or "slots" in variant:
        widths = {1: "STG.E.U8", 2: "STG.E.U16", 16: "STG.E.128"}
        assert widths[VARIANTS[variant][1]["WORD"]] in code, "stores as wide as they may be"
    if "quantize/eight_columns.cuh" in VARIANTS[variant][0]:
        assert "FMNMX.NAN" in code
        assert "FMNMX " not in code
    if "activation/backward.cu" in VARIANTS[variant][0]:
        assert "BAR." not in code


@WITH_COMPILER
@pytest.mark.parametrize("chip", ["sm_89", "sm_100"])
@pytest.mark.parametrize("variant", ["swiglu_backward", "p2p_records", "send_slots", "recv_slots_float32"])
def test_nvrtc_compiles_for_other_chips(variant: str, chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The activations' backward, peer writes and slots have one kernel for every GPU with e4m3."""
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path))
    files, options = VARIANTS[variant]
    cubin = nvrtc.cubin(nvrtc.source(*files, options=options), variant, chip)
    assert cubin[:4] == b"\x7fELF"
    assert cubin != nvrtc.cubin(nvrtc.source(*files, options=options), variant)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "mm" in name or "wgrad" in name])
def test_shared_memory_fits(variant: str):
    files, options = VARIANTS[variant]
    assert (bf16_wgrad if files == bf16_wgrad.FILES else fp8_grouped_mm).shared_bytes(options) <= 232448
