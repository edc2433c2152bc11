"""What this machine can do. The only file that asks; everything else is told.

GEMM paths by name: "reference" (CPU: float32 matmul per expert of exactly dequantised values), "exact" (GPU: dequantise to
bf16, bf16 grouped matmul), "blackwell" (SM100: torch's scaled grouped GEMM on blocked scales; not run on hardware yet).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass

import torch

GEMM_PATHS = ("reference", "exact", "blackwell")


def checking(device: torch.device) -> bool:
    """Whether checks that cost a collective or a device sync run: always on a CPU, on GPUs with MXEP_CHECK=1."""
    return device.type == "cpu" or os.environ.get("MXEP_CHECK", "0") == "1"


def default_backend(device_type: str) -> str:
    """Process-group backend for a device type: "nccl" for cuda, "gloo" for cpu."""
    return "nccl" if device_type == "cuda" else "gloo"


def default_device_type() -> str:
    """ "cuda" when this machine has a usable GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_capability(index: int | None) -> tuple[int, int]:
    """(major, minor) of a CUDA device; None is the current one."""
    return torch.cuda.get_device_capability(index)


def available_gemm_paths(device: torch.device) -> dict[str, str | None]:
    """Every GEMM path by name, with None where `device` runs it and the reason where it does not."""
    if device.type == "cpu":
        reason = f"needs a CUDA GPU, this tensor is on {device}"
        return {"reference": None, "exact": reason, "blackwell": reason}
    if device.type != "cuda":
        return dict.fromkeys(GEMM_PATHS, f"no path for device type {device.type!r}, want cpu or cuda")
    major, minor = compute_capability(device.index)
    paths: dict[str, str | None] = {
        "reference": "runs on the CPU only (it loops over experts on the host)",
        "exact": None,
        "blackwell": None,
    }
    if major < 8:
        paths["exact"] = f"needs bf16 tensor cores (SM80 or newer), this GPU is SM{major}{minor}"
    if major != 10:
        # On Hopper torch's scaled grouped GEMM with 1x32 scales does not raise, it destroys the CUDA context: never let it through.
        paths["blackwell"] = f"needs SM100, this GPU is SM{major}{minor}"
    return paths


def resolve_gemm_path(name: str, device: torch.device) -> str:
    """The GEMM path to take: `name` itself, or for "auto" the fastest and for "emulated" the dequantising one of `device`.

    Raises:
        ValueError: unknown name, or a path that this device does not run (the message says why and what it runs instead).
    """
    paths = available_gemm_paths(device)
    usable = [path for path, reason in paths.items() if reason is None]
    if name in ("auto", "emulated"):
        order = ("blackwell", "exact", "reference") if name == "auto" else ("exact", "reference")
        for path in order:
            if path in usable:
                return path
        raise ValueError(f"gemm_path={name!r}: nothing runs on {device}: {paths}")
    if name not in paths:
        raise ValueError(f"gemm_path={name!r} is unknown, want 'auto', 'emulated' or one of {', '.join(GEMM_PATHS)}")
    if paths[name] is not None:
        raise ValueError(f"gemm_path={name!r}: {paths[name]}; this device runs {', '.join(usable) or 'none of them'}, or use 'auto'")
    return name


@dataclass(frozen=True)
class Machine:
    """What `mxep doctor` prints about the machine."""

    python: str
    torch: str
    triton: str | None
    cuda: str | None
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    peer_access: bool
    backends: tuple[str, ...]


def read_machine() -> Machine:
    """Ask the machine; touches the GPUs only when there are some."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backends = tuple(
        name
        for name, present in (("gloo", torch.distributed.is_gloo_available()), ("nccl", torch.distributed.is_nccl_available()))
        if present
    )
    return Machine(
        python=sys.version.split()[0],
        torch=torch.__version__,
        triton=importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        cuda=torch.version.cuda,
        cpu=platform.machine(),
        cores=os.cpu_count() or 1,
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        capabilities=tuple(compute_capability(i) for i in range(count)),
        peer_access=count > 1 and all(torch.cuda.can_device_access_peer(0, i) for i in range(1, count)),
        backends=backends,
    )
