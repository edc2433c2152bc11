"""What this machine can do. The only file that queries the hardware.

GEMM paths by name: "reference" (CPU: float32 matmul per expert of exactly dequantised values), "exact" (GPU: dequantise to
bf16, bf16 grouped matmul), "fp8" (SM90: FP8 tensor cores on rebased exponents, each row tile's scale granularity from its data;
"fp8_row" and "fp8_span" force one scale per row, or one per 128 columns), "blackwell" (SM100: torch's scaled grouped GEMM on blocked
scales; not run on hardware yet).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., object])


class GemmPath(NamedTuple):
    """What the rest of the package needs to know of a GEMM path; `mxep.ops.grouped_gemm.paths.PATHS` has its code.

    Attributes:
        problem: why a GPU of a compute capability (major, minor) does not run it, or None where it does.
        granularity: of the rows' scales on the FP8 paths, see mxep.ops.grouped_gemm.hopper.rebase_reference.MAX_SPREAD; None elsewhere.
            These paths read weights in the form of `torch.ops.mxep.quantize_weight`.
        wgrad_multiplies_mx: wgrad multiplies MX rows as they are, writes float32 as well as bf16, and has the same bits in chunks.
        adds_lora: a GEMM adds the second product of an adapter before it rounds (`mxep.ops.grouped_gemm.reference.fuses_lora`).
    """

    problem: Callable[[int, int], str | None]
    granularity: str | None = None
    wgrad_multiplies_mx: bool = False
    adds_lora: bool = False


def _reference_problem(major: int, minor: int) -> str | None:
    return "runs on the CPU only (it loops over experts on the host)"


def _exact_problem(major: int, minor: int) -> str | None:
    if (major, minor) < (8, 9):
        return f"needs conversions to and from e4m3 (SM89 or newer), this GPU is SM{major}{minor}"
    return compiler_problem()  # of kernels beside the GEMMs: routing, backward of the activation


def _fp8_problem(major: int, minor: int) -> str | None:
    return compiler_problem() if major == 9 else f"needs SM90 (Hopper), this GPU is SM{major}{minor}"


def _blackwell_problem(major: int, minor: int) -> str | None:
    # On Hopper torch's scaled grouped GEMM with 1x32 scales does not raise, it destroys the CUDA context: never let it through.
    return f"needs SM100, this GPU is SM{major}{minor}" if major != 10 else compiler_problem()


GEMM_PATHS = {
    "reference": GemmPath(_reference_problem, wgrad_multiplies_mx=True, adds_lora=True),
    "exact": GemmPath(_exact_problem),
    "fp8": GemmPath(_fp8_problem, "auto", wgrad_multiplies_mx=True, adds_lora=True),
    "fp8_row": GemmPath(_fp8_problem, "row", wgrad_multiplies_mx=True, adds_lora=True),
    "fp8_span": GemmPath(_fp8_problem, "span", wgrad_multiplies_mx=True, adds_lora=True),
    "blackwell": GemmPath(_blackwell_problem),
}
FP8_PATHS = {name: path.granularity for name, path in GEMM_PATHS.items() if path.granularity is not None}


def checking(device: torch.device) -> bool:
    """Whether checks that cost a collective or a device sync run: always on a CPU, on GPUs with MXEP_CHECK=1."""
    return device.type == "cpu" or os.environ.get("MXEP_CHECK", "0") == "1"


def is_capturing() -> bool:
    """Whether the current stream records a CUDA graph. Initialises no CUDA: False where this process has used no GPU yet."""
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def capture_number(device: torch.device) -> int:
    """The number of the CUDA graph capture that the current stream is in, from 1 on; 0 outside of any."""
    if device.type != "cuda" or not is_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if problem := _capture_info()(stream, ctypes.addressof(status), ctypes.addressof(number), 0, 0, 0):
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 failed with {problem}")
    return number.value


@functools.cache
def _capture_info() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    function.argtypes = [ctypes.c_void_p] * 6
    return function


def default_backend(device_type: str) -> str:
    """Process-group backend for a device type: "nccl" for cuda, "gloo" for cpu."""
    return "nccl" if device_type == "cuda" else "gloo"


def default_device_type() -> str:
    """ "cuda" when this machine has a usable GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_type_of(option: str) -> str:
    """What a command's `--device` means here: "auto" is the default device type.

    Raises:
        ValueError: "cuda" without a usable GPU.

    >>> device_type_of("cpu")
    'cpu'
    """
    if option == "auto":
        return default_device_type()
    if option == "cuda" != default_device_type():
        raise ValueError("--device cuda, but torch sees no CUDA GPU here; use --device cpu, or run `mxep doctor`")
    return option


def total_memory(device: torch.device) -> int:
    """Bytes of memory that programs on a device can have: of the GPU; or of the host, swap included, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first_number(Path("/sys/fs/cgroup/memory.max"), "")  # "max" without a limit
    swap = _first_number(Path("/proc/meminfo"), "SwapTotal:")
    return (host if limit is None else min(host, limit)) + 1024 * (swap or 0)


def _first_number(path: Path, key: str) -> int | None:
    """The number after `key` at the start of a line; None if there is no such file, line or number."""
    text = path.read_text() if path.exists() else ""
    found = re.search(rf"^{key}\s*(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])


def _constant_in_graphs(function: _F) -> _F:
    """`torch.compiler.assume_constant_result` without its import of torch._dynamo, for which a launcher of ranks would wait 3 seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compute_capability(index: int | None) -> tuple[int, int]:
    """(major, minor) of a CUDA device; None is the current one."""
    return torch.cuda.get_device_capability() if index is None else _compute_capability(index)


def chip_of(index: int | None) -> str:
    """A CUDA device as NVRTC names it: sm_90."""
    major, minor = compute_capability(index)
    return f"sm_{major}{minor}"


@_constant_in_graphs
@functools.cache
def _compute_capability(index: int) -> tuple[int, int]:
    """Asked once: torch's answer costs the host as much as a launch."""
    return torch.cuda.get_device_capability(index)


def available_gemm_paths(device: torch.device) -> dict[str, str | None]:
    """Every GEMM path by name, and why a device does not run it.

    Args:
        device: of the operands.

    Returns:
        path -> None where `device` runs it, else the reason.

    Examples:
        >>> paths = mxep.device.available_gemm_paths(torch.device("cpu"))
        >>> [path for path, problem in paths.items() if problem is None]
        ['reference']
    """
    if device.type == "cpu":
        reason = f"needs a CUDA GPU, this tensor is on {device}"
        return {path: None if path == "reference" else reason for path in GEMM_PATHS}
    if device.type != "cuda":
        return dict.fromkeys(GEMM_PATHS, f"no path for device type {device.type!r}, want cpu or cuda")
    major, minor = compute_capability(device.index)
    return {name: path.problem(major, minor) for name, path in GEMM_PATHS.items()}


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that this process would compile CUDA C++ with; it and its bindings come with torch's CUDA wheels.

    Raises:
        RuntimeError: NVRTC or its bindings are missing, or its major version is not that of torch's CUDA.
    """
    advice = "reinstall torch with its dependencies"
    if torch.version.cuda is None:
        raise RuntimeError(f"nvrtc: this torch ({torch.__version__}) was built without CUDA; {advice}")
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # ImportError; or the loader's own errors when the library is not there
        raise RuntimeError(f"nvrtc: not found ({type(error).__name__}: {error}); {advice}") from error
    if int(status) or major != int(torch.version.cuda.split(".")[0]):
        found = f"found version {major}.{minor} (status {int(status)})"
        raise RuntimeError(f"nvrtc: {found}, torch {torch.__version__} has CUDA {torch.version.cuda}; {advice}")
    return major, minor


@_constant_in_graphs
def compiler_problem() -> str | None:
    """Why this machine cannot compile CUDA C++ at run time, None when it can."""
    try:
        nvrtc_version()
    except RuntimeError as error:
        return str(error)
    return None


@functools.cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors a CUDA device has: the blocks of a persistent kernel."""
    return torch.cuda.get_device_properties(index).multi_processor_count


# Dense bf16 FLOP/s of a GPU by a part of its name, the longer one first (vendor's data sheets).
PEAK_BF16 = {
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
}


def peak_bf16_flops_of(gpu: str) -> float | None:
    """FLOP/s that the data sheet of a GPU of this name promises in dense bf16 products; None where it is not known.

    >>> peak_bf16_flops_of("NVIDIA H200"), peak_bf16_flops_of("NVIDIA RTX A1000"), peak_bf16_flops_of("CPU")
    (989000000000000.0, None, None)
    """
    return next((peak for part, peak in PEAK_BF16.items() if re.search(rf"\b{part}\b", gpu)), None)


def peak_bf16_flops(device: torch.device) -> float | None:
    """`peak_bf16_flops_of` a device, what MFU is measured against; None for a CPU."""
    return peak_bf16_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def host_identity() -> str:
    """The same text on all processes of one machine, another one on every other machine; `NCCL_HOSTID` names it, as for NCCL."""
    if named := os.environ.get("NCCL_HOSTID"):
        return named
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def gpu_identity(device: torch.device) -> str:
    """The GPU's own number (UUID), the same in every process; "cpu" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def peer_access_problem(device: torch.device, peers: Sequence[str]) -> str | None:
    """Why `device` cannot write into the memory of these GPUs (`gpu_identity`, its own may be among them), None when it can."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA GPUs, the rows are on {device}"
    here = {gpu_identity(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    own = torch.cuda.current_device() if device.index is None else device.index
    for peer in peers:
        if peer not in here:
            return f"GPU {peer} of another rank is not visible to this process; let every rank see all GPUs (CUDA_VISIBLE_DEVICES)"
        if here[peer] != own and not torch.cuda.can_device_access_peer(own, here[peer]):
            return f"GPU {own} has no peer access to GPU {here[peer]}"
    return None


def resolve_gemm_path(name: str, device: torch.device) -> str:
    """The GEMM path that a device runs under this name.

    Args:
        name: a path's name; "auto" for the fastest path of the device; "emulated" for its dequantising path.
        device: of the operands.

    Returns:
        the path's name.

    Raises:
        ValueError: unknown name, or a path that this device does not run (the message says why and what it runs instead).

    Examples:
        >>> mxep.device.resolve_gemm_path("auto", torch.device("cpu"))
        'reference'
    """
    paths = available_gemm_paths(device)
    usable = [path for path, reason in paths.items() if reason is None]
    if name in ("auto", "emulated"):
        order = ("blackwell", "fp8", "exact", "reference") if name == "auto" else ("exact", "reference")
        for path in order:
            if path in usable:
                return path
        raise ValueError(f"gemm_path={name!r}: nothing runs on {device}: {paths}")
    if name not in paths:
        raise ValueError(f"gemm_path={name!r} is unknown, want 'auto', 'emulated' or one of {', '.join(GEMM_PATHS)}")
    if paths[name] is not None:
        raise ValueError(f"gemm_path={name!r}: {paths[name]}; this device runs {', '.join(usable) or 'none of them'}, or use 'auto'")
    return name


def machine_facts() -> dict[str, str]:
    """What `mxep doctor` says of the machine; touches the GPUs only when there are some."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = map(compute_capability, gpus)
    named = [f"{torch.cuda.get_device_name(i)} (SM{major}{minor})" for i, (major, minor) in zip(gpus, capabilities, strict=True)]
    peers = all(torch.cuda.can_device_access_peer(0, i) for i in gpus[1:])
    backends = {"gloo": torch.distributed.is_gloo_available(), "nccl": torch.distributed.is_nccl_available()}
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "missing",
        "cuda of torch": torch.version.cuda or "none",
        "cpu": f"{platform.machine()}, {os.cpu_count() or 1} cores",
        "gpus": ", ".join(named) or "none that torch can use",
        "peer access between GPUs": "needs two GPUs" if len(gpus) < 2 else "yes" if peers else "no",
        "process-group backends": ", ".join(name for name, present in backends.items() if present),
    }
