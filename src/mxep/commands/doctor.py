"""`mxep doctor`: what this machine can do, which path each part takes and why, what is missing and how to get it."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mxep.device import (
    GEMM_PATHS,
    available_gemm_paths,
    default_backend,
    default_device_type,
    gpu_identity,
    machine_facts,
    peer_access_problem,
    resolve_gemm_path,
)
from mxep.extras import EXTRAS, install_command
from mxep.grouped_mm.function import to_mxfp8_then_scaled_grouped_mm
from mxep.mx import quantize_mx
from mxep.reference import grouped_mm_mx, quantize

TESTED = "torch 2.11.0 with Triton 3.6.0: CPU, H100 and H200 (SM90); torch 2.15.0 with Triton 3.9.0: CPU and H200"
NEVER_RUN = "never run on hardware; its layouts are tested on a CPU"


def _device() -> torch.device:
    return torch.device(default_device_type(), 0) if default_device_type() == "cuda" else torch.device("cpu")


def _paths(device: torch.device) -> list[tuple[str, str, str]]:
    """(part, what runs here, why) of every part that has several implementations."""
    backend = default_backend(device.type)
    kernels = "Triton kernels, on Hopper CUDA C++ too" if device.type == "cuda" else "plain PyTorch"
    paths = available_gemm_paths(device)
    chosen = "none" if None not in paths.values() else resolve_gemm_path("auto", device)
    wgrad = "exact" if chosen == "blackwell" else chosen
    gemm_why = {
        "reference": "float32 matmul per expert of exactly dequantised values",
        "exact": "dequantise to bf16, torch's bf16 grouped matmul: the exact numbers, not FP8 speed",
        "fp8": "FP8 tensor cores on rebased exponents; row tiles of wide spread take a scale per 128 of K",
        "blackwell": f"torch's scaled grouped GEMM on 128x4 blocked scales; {NEVER_RUN}",
        "none": f"{paths['exact']}; recipe 'bf16' may run",
    }[chosen]
    return [
        ("quantise, gather, scatter, permute indices", kernels, f"tensors live on {device.type}"),
        ("exchange", f"all-to-all over {backend}", "one packed exchange per direction; NVLink multicast is not used"),
        ("exchange inside one machine", *_shared_memory(device)),
        ("grouped GEMM, forward and dgrad", chosen, gemm_why),
        ("wgrad", wgrad, "operands as they came (wgrad_with_hp)" + ("; FP8 tensor cores where both came as MX" if chosen == "fp8" else "")),
        (
            "`mxep train`",
            f"{max(torch.cuda.device_count(), 1)} GPU rank(s)" if device.type == "cuda" else "2 CPU processes",
            "all GPUs, else 2",
        ),
    ]


def _shared_memory(device: torch.device) -> tuple[str, str]:
    """How ranks on the GPUs of this machine exchange, and why."""
    gpus = [gpu_identity(torch.device("cuda", i)) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    problem = peer_access_problem(device, gpus)
    if problem is None and len(gpus) > 1:
        return "symmetric memory", "between the GPUs, same bits; mxep.set_transport or MXEP_TRANSPORT=collective selects NCCL"
    return "torch.distributed", problem or "symmetric memory needs two GPUs"


def _missing_packages() -> list[tuple[str, str, str]]:
    """(packages, what they give, how to get them) of Triton and of every extra that is not complete here."""
    missing = [("triton", "GPU kernels", "comes with torch's Linux wheels")] if importlib.util.find_spec("triton") is None else []
    for name, extra in EXTRAS.items():
        if absent := [module for module in extra.modules if importlib.util.find_spec(module) is None]:
            missing.append((", ".join(absent), extra.gives, install_command(name)))
    return missing


def _self_test(device: torch.device) -> list[tuple[str, bool, str]]:
    """Small operations on the device against the references on the CPU: (check, passed, detail)."""
    generator = torch.Generator().manual_seed(0)
    a, w = torch.randn(160, 128, generator=generator), torch.randn(3, 96, 128, generator=generator)
    offs = torch.tensor([32, 32, 130], dtype=torch.int32)
    results = []
    mx = quantize_mx(a.to(device))
    want_q, want_s = quantize(a, "rceil")
    same = torch.equal(mx.qdata.cpu().view(torch.uint8), want_q.view(torch.uint8)) and torch.equal(
        mx.scale.cpu().view(torch.uint8), want_s.view(torch.uint8)
    )
    results.append(
        ("quantise", same, "bytes equal to plain PyTorch's on the CPU" if same else "bytes differ from plain PyTorch's on the CPU")
    )
    out = to_mxfp8_then_scaled_grouped_mm(a.to(device), w.to(device).transpose(-2, -1), offs.to(device), wgrad_with_hp=True).cpu().double()
    truth = grouped_mm_mx(want_q, want_s, *quantize(w, "rceil"), offs, torch.float32, "reference").double()
    error = ((out - truth).norm() / truth.norm()).item()
    results.append(("grouped GEMM", error < 3e-3, f"relative error {error:.1e} to the exact MX product (bf16 rounding alone: 1.7e-3)"))
    return results


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def command(argv: Sequence[str]) -> int:
    """Print the report; returns 0, or 1 when the self-test fails or no GEMM path runs here."""
    argparse.ArgumentParser(prog="mxep doctor", description=__doc__).parse_args(argv)
    console, device = Console(), _device()
    facts = machine_facts()
    facts["torch"] += f" (tested: {TESTED})"
    console.print(_table("Machine", (), [*facts.items()]))
    console.print(_table(f"What runs here (on {device})", ("part", "way", "why"), _paths(device)))
    paths = available_gemm_paths(device)
    notes = {"blackwell": NEVER_RUN}
    rows = [(name, "yes" if paths[name] is None else "no", paths[name] or notes.get(name, "ready")) for name in GEMM_PATHS]
    console.print(_table("GEMM paths by name (Recipe.gemm_path)", ("path", "runs", "note"), rows))
    if missing := _missing_packages():
        console.print(_table("Missing", ("package", "what it gives", "get it"), missing))
    if None not in paths.values():
        console.print("[bold red]MXFP8 does not run on this device[/]; the notes above say why")
        return 1
    tests = _self_test(device)
    console.print(_table("Self-test", ("check", "result", "detail"), [(n, "ok" if ok else "FAILED", d) for n, ok, d in tests]))
    failed = [name for name, ok, _ in tests if not ok]
    if failed:
        console.print(f"[bold red]mxep is broken on this machine: {', '.join(failed)}[/]; please report the tables above")
    return 1 if failed else 0
