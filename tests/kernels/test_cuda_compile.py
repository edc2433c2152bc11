"""Every .cu compiles for Hopper: with nvcc where it is on PATH, without spills and without ptxas's warnings of serialised wgmma."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tests.kernels import sass

from mxep.device import compiler_problem
from mxep.kernels import activation_backward, fp8_grouped_mm, mail, nvrtc, places, push, rebase, tiles
from mxep.reference.activation_functions import SwiGLU

BF16, FLOAT32 = torch.bfloat16, torch.float32
HEADERS = ("hopper.cuh", "mx_bytes.cuh")


def gemm(**kind: object) -> tuple[tuple[str, ...], dict]:
    variant = {"wgrad": False, "roads": False, "out_dtype": torch.bfloat16, "accumulate": False, "skip": False, "promote": 128, **kind}
    return fp8_grouped_mm.FILES, fp8_grouped_mm.options_of(**variant)


def quantizer(both: bool, item_bytes: int, rceil: bool = True, narrow: int = 0) -> tuple[tuple[str, ...], dict]:
    return ("hopper.cuh", "mx_bytes.cuh", "quantize_both.cu"), tiles.TRANSPOSE[both, item_bytes][narrow].options(rceil)


def rows(width: int, spans: bool, mapped: bool, live: bool = False) -> tuple[tuple[str, ...], dict]:
    return (*HEADERS, "rebase_rows.cu"), rebase.rows_options(width, spans, mapped, live)


def tokens(file: str, width_a: int, width_g: int, simple: bool, walk: bool = False) -> tuple[tuple[str, ...], dict]:
    a, g = (rebase.TokenRows(width, words=simple, mapped=not simple) for width in (width_a, width_g))
    return (*HEADERS, file), rebase.tokens_options(file, a, g, walk)


def swiglu(width: int, layout: str, **variant: object) -> tuple[tuple[str, ...], dict]:
    return activated("swiglu", width, layout=layout, **variant)


def activated(activation: str, width: int, **variant: object) -> tuple[tuple[str, ...], dict]:
    options = {"layout": "concatenated", "rceil": True, "exact": False, **variant}
    return activation_backward.FILES, activation_backward.options_of(width, activation=activation, **options)


def pushed(
    sums: bool, mode: str, item_bytes: int, portions: int, word_bytes: int = 16, within: bool = False
) -> tuple[tuple[str, ...], dict]:
    return push.FILES, push.options_of(sums, mode, item_bytes, word_bytes, portions, within)


VARIANTS = {
    "grouped_mm": gemm(roads=True),
    "grouped_mm_float32": gemm(roads=True, out_dtype=torch.float32),
    "grouped_mm_row": gemm(),
    "grouped_mm_256": gemm(promote=256),
    "grouped_mm_never": gemm(promote=0),
    "wgrad": gemm(wgrad=True),
    "wgrad_float32": gemm(wgrad=True, out_dtype=torch.float32),
    "wgrad_accumulate": gemm(wgrad=True, out_dtype=torch.float32, accumulate=True),
    "grouped_mm_skip": gemm(roads=True, skip=True),
    "wgrad_skip": gemm(wgrad=True, skip=True),
    "wgrad_skip_float32": gemm(wgrad=True, out_dtype=torch.float32, skip=True),
    "rebase_rows": rows(8192, spans=True, mapped=True),
    "rebase_rows_of_eight": rows(4096, spans=True, mapped=True),
    "rebase_rows_live": rows(4096, spans=True, mapped=True, live=True),
    "rebase_rows_live_wide": rows(7168, spans=True, mapped=False, live=True),
    "rebase_rows_live_far": rows(16384, spans=True, mapped=False, live=True),
    "rebase_rows_odd": rows(1376, spans=False, mapped=False),
    "rebase_rows_far": rows(16384, spans=True, mapped=False),
    "rebase_tokens": tokens("rebase_tokens.cu", 7168, 2048, True),
    "rebase_tokens_walk": tokens("rebase_tokens.cu", 4096, 3072, False, walk=True),
    "rebase_tokens_odd": tokens("rebase_tokens.cu", 96, 1376, False),
    "token_maxima": tokens("token_maxima.cu", 7168, 2048, True),
    "token_maxima_odd": tokens("token_maxima.cu", 9312, 32, False),
    "token_maxima_far": tokens("token_maxima.cu", 16384, 16384, True),
    "token_plan": (("hopper.cuh", "token_plan.cu"), {}),
    "quantize_both": quantizer(both=True, item_bytes=2),
    "quantize_both_narrow": quantizer(both=True, item_bytes=2, rceil=False, narrow=1),
    "quantize_both_float32": quantizer(both=True, item_bytes=4, rceil=False),
    "quantize_transposed": quantizer(both=False, item_bytes=2, rceil=False),
    "quantize_transposed_float32": quantizer(both=False, item_bytes=4),
    "place_choices": (places.FILES, places.options_of("int32")),
    "place_choices_long": (places.FILES, places.options_of("int64")),
    "place_table": (places.FILES, places.options_of("table")),
    "push_records": pushed(False, "rceil", 2, 448),
    "push_records_short": pushed(False, "rceil", 4, 2),
    "push_rows": pushed(False, "", 1, 896),
    "push_rows_odd": pushed(False, "", 1, 17, word_bytes=1),
    "push_sums": pushed(True, "", 2, 896),
    "push_sums_records_float32": pushed(True, "floor", 4, 4),
    "push_sums_within": pushed(True, "", 2, 512, within=True),
    "push_sums_within_odd": pushed(True, "", 2, 17, word_bytes=2, within=True),
    "push_sums_within_records": pushed(True, "rceil", 2, 256, within=True),
    "push_sums_within_float32": pushed(True, "", 4, 7, within=True),
    "mail_rows": (mail.FILES, mail.mail_options("rceil", 2, 320, 2)),
    "mail_rows_float32": (mail.FILES, mail.mail_options("floor", 4, 6, 64)),
    "take_rows": (mail.FILES, mail.take_options(2, 640, 8)),
    "take_rows_float32": (mail.FILES, mail.take_options(4, 8, 1)),
    "swiglu_backward": swiglu(7168, "concatenated"),
    "swiglu_backward_interleaved": swiglu(1408, "interleaved"),
    "swiglu_backward_exact": swiglu(96, "interleaved", rceil=False, exact=True),
    "swiglu_backward_hp": swiglu(2048, "concatenated", forms=("mx+hp", "hp")),
    "swiglu_backward_every_form": swiglu(1056, "interleaved", forms=("mx+hp", "mx+hp"), bias=BF16, scores=True),
    "swiglu_backward_few": swiglu(1376, "concatenated", exact=True, forms=("mx+hp", "mx+hp"), bias=FLOAT32, wide=False, few=True),
    "swiglu_backward_float32": swiglu(4096, "interleaved", x=FLOAT32, dh=FLOAT32, forms=("mx+hp", "mx+hp"), bias=FLOAT32, scores=True),
    "swiglu_backward_of_mx": swiglu(1536, "concatenated", x_mx=True, scores=True),
    "swiglu_backward_live": swiglu(1536, "concatenated", scores=True, live=True),
    "swiglu_backward_live_of_mx": swiglu(1408, "interleaved", x_mx=True, scores=True, forms=("mx+hp", "hp"), bias=BF16, live=True),
    "swiglu_backward_of_mx_every_form": swiglu(
        1056, "interleaved", x_mx=True, x=FLOAT32, dh=FLOAT32, exact=True, forms=("mx+hp", "mx+hp"), bias=BF16, scores=True, few=True
    ),
    "swiglu_backward_limit": swiglu(7168, "concatenated", scores=True, how=SwiGLU(10.0)),
    "swiglu_backward_gpt_oss": swiglu(2880, "interleaved", forms=("mx+hp", "hp"), bias=BF16, scores=True, how=SwiGLU(7.0, 1.702, 1.0)),
    "swiglu_backward_mixed": swiglu(8192, "concatenated", exact=True, x=FLOAT32, forms=("hp", "mx"), scores=True),
    "geglu_backward": activated("geglu", 7168),
    "geglu_backward_exact": activated("geglu", 1056, layout="interleaved", exact=True, forms=("mx+hp", "mx+hp"), bias=BF16, scores=True),
    "geglu_backward_tanh": activated("geglu_tanh", 2816, layout="interleaved", forms=("mx+hp", "hp"), scores=True, live=True),
    "geglu_backward_tanh_exact": activated("geglu_tanh", 1408, exact=True, x_mx=True, x=FLOAT32, dh=FLOAT32, scores=True),
    "relu2_backward": activated("relu2", 2048),
    "relu2_backward_every_form": activated("relu2", 1056, forms=("mx+hp", "mx+hp"), bias=BF16, scores=True, live=True),
    "relu2_backward_few": activated("relu2", 1376, exact=True, forms=("mx+hp", "mx+hp"), bias=FLOAT32, wide=False, few=True),
    "relu2_backward_of_mx": activated("relu2", 1856, x_mx=True, scores=True, forms=("mx+hp", "hp")),
    "relu2_backward_float32": activated("relu2", 4096, x=FLOAT32, dh=FLOAT32, forms=("hp", "mx"), scores=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_nvcc_compiles(variant: str, tmp_path: Path):
    files, options = VARIANTS[variant]
    text = tmp_path / f"{variant}.cu"
    text.write_text(nvrtc.source(*files, options=options))
    target = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v"]
    run = subprocess.run(["nvcc", *target, str(text), "-o", str(tmp_path / "out.cubin")], capture_output=True, text=True, timeout=240)
    report = run.stdout + run.stderr
    if run.returncode and "compute_90a" in report:
        pytest.skip("this nvcc does not know sm_90a")
    assert run.returncode == 0, report[-3000:]
    assert not re.search(r"C75\d\d|warning", report), report
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    assert spills, report
    assert set(spills) == {"0"}, report
    if sass.disassembler() is not None:
        assert_sound(variant, (tmp_path / "out.cubin").read_bytes())


def assert_sound(variant: str, cubin: bytes) -> None:
    """No packed bytes out of the stack pointer; activations' backward without a barrier and with maxima that keep NaN."""
    (lines,) = sass.instructions([cubin], "SM90a")
    assert not sass.stack_pointer_as_data(lines), f"{variant} is miscompiled: {sass.stack_pointer_as_data(lines)}"
    code = " ".join(lines)
    if "push" in variant or "mail" in variant or "take" in variant:
        widths = {1: "STG.E.U8", 2: "STG.E.U16", 16: "STG.E.128"}
        assert widths[VARIANTS[variant][1]["WORD"]] in code, "stores as wide as they may be"
    if "lu_backward" in variant or "relu2" in variant:
        assert "FMNMX.NAN" in code
        assert "FMNMX " not in code
        assert "BAR." not in code


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
@pytest.mark.parametrize(
    "variant",
    [
        "grouped_mm",
        "wgrad",
        "wgrad_skip",
        "rebase_rows",
        "rebase_rows_live",
        "rebase_tokens",
        "token_maxima",
        "mail_rows",
        "take_rows",
        "swiglu_backward_interleaved",
    ],
)
def test_nvrtc_compiles(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path))
    files, options = VARIANTS[variant]
    cubin = nvrtc.cubin(nvrtc.source(*files, options=options), variant)
    assert cubin[:4] == b"\x7fELF"
    if sass.disassembler() is not None:
        assert_sound(variant, cubin)


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
@pytest.mark.parametrize("chip", ["sm_89", "sm_100"])
@pytest.mark.parametrize("variant", ["swiglu_backward", "push_records", "mail_rows", "take_rows_float32"])
def test_nvrtc_compiles_for_other_chips(variant: str, chip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The activations' backward, pushes and mailboxes have one kernel for every GPU with e4m3."""
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path))
    files, options = VARIANTS[variant]
    cubin = nvrtc.cubin(nvrtc.source(*files, options=options), variant, chip)
    assert cubin[:4] == b"\x7fELF"
    assert cubin != nvrtc.cubin(nvrtc.source(*files, options=options), variant)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "mm" in name or "wgrad" in name])
def test_shared_memory_fits(variant: str):
    assert fp8_grouped_mm.shared_bytes(VARIANTS[variant][1]) <= 232448
