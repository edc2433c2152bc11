"""The host cost of calls of this package: microseconds until a call returns, torch operators and Python function calls in it.

    PYTHONPATH=. python tests/programs/host_cost.py [--json] [--device cpu|cuda] [--profile CALL]

On a GPU the kernels run; a call is timed on an idle device, without a sync inside.  On a CPU the operators run their launchers for a Hopper
GPU, and the driver's functions do nothing: what remains is the host's work without the driver's.  Results are then undefined.  Python
function calls are counted on a CPU alone, where backward runs in this thread.  Operators count with those inside of them, as a profiler
sees them.  `--profile` prints the functions of one call by their time, backward included.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.virtual import alone
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import mxep
import mxep.operators as operators
from mxep.bench.timing import synchronize
from mxep.comm.transport import close_transports, register
from mxep.fused import autograd
from mxep.mx.weight_cache import WeightCache
from mxep.parallel import MXLinear
from mxep.recipe import RECIPES
from mxep.train.optimizer import build_optimizer
from mxep.train.optimizer_in_backward import OptimizerInBackward
from mxep.train.state_precision import StatePrecision

ROWS, D, N, H, EXPERTS, CHOICES = 64, 64, 128, 32, 8, 2
_MULTIPROCESSORS = 132
_RUNS = 100
_SYMMETRIC = "symmetric memory of one rank"
Call = Callable[[], object]


def launch_nothing() -> None:
    """Make the operators of a CPU run the launchers of a Hopper GPU with a driver that does nothing. For this whole process."""
    import triton

    from mxep import device
    from mxep.ops.grouped_gemm import wgrad
    from mxep.ops.quantize import columnwise
    from mxep.ops.runtime import launch, nvrtc, recording, replay

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *arguments: 0

    hopper: dict[str, Callable[..., Any]] = {
        "compute_capability": lambda index: (9, 0),
        "multiprocessors": lambda index: _MULTIPROCESSORS,
        "compiler_problem": lambda: None,
        "current_gpu": lambda: None,  # the index of a CPU, for nvrtc
        "checking": lambda of: False,
        "is_capturing": lambda: False,
        "available_gemm_paths": lambda of: {name: path.problem(9, 0) for name, path in device.GEMM_PATHS.items()},
    }
    for name in operators.OPERATORS:
        if name in operators.LAUNCHERS:
            importlib.import_module(operators.LAUNCHERS[name])
    for module in [module for name, module in sys.modules.items() if name.startswith("mxep.")]:
        for name, function in hopper.items():
            if name in vars(module):
                setattr(module, name, function)
    columnwise._runs = lambda of: True  # type: ignore[assignment]
    wgrad.bf16_wgrad_takes = lambda *arguments: True
    nvrtc._launch = lambda: lambda *arguments: 0  # type: ignore[assignment]
    nvrtc.Kernel._load = lambda self, index: self._loaded.setdefault(index, 1)  # type: ignore[assignment, method-assign, arg-type]
    nvrtc._driver = Driver  # type: ignore[assignment]
    launch.current_gpu = lambda: -1
    launch._compiled_kernel = lambda compiled: launch._CompiledKernel(compiled, lambda *arguments: None, (None,) * 9)
    triton.JITFunction.__getitem__ = lambda self, grid: lambda *arguments, **options: None
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    autograd._replays = lambda options, device: options.group_name != _SYMMETRIC  # type: ignore[assignment]
    replay._runs_on = lambda device: True  # type: ignore[assignment]
    recording._LEAST_ADDRESS = 1 << 22  # a CPU has memory at lower addresses than a GPU
    # CUDA's allocator gives a step the addresses of the one before, a CPU's does not.
    replay.itemgetter = lambda *slots: lambda addresses: None  # type: ignore[assignment, misc]
    replay.LaunchGraph = type("NoGraph", (), {"alive": 0, "__init__": lambda *given: None, "run": lambda *given: None})  # type: ignore[misc]
    replay.fill_bytes = lambda *given: None  # type: ignore[assignment]
    warnings.simplefilter("ignore", UserWarning)  # an operator's form is replaced
    library = torch.library.Library("mxep", "IMPL")
    _libraries.append(library)
    operators._reference = lambda name: getattr(importlib.import_module(operators.LAUNCHERS.get(name, operators._TRANSPORT)), name)
    for overload in operators.OVERLOADS:
        name = overload.removesuffix(".out")
        if name in operators.LAUNCHERS:
            operator = getattr(getattr(torch.ops.mxep, name), "out" if overload != name else "default")
            launcher = operators._deferred(operators.LAUNCHERS[name], name)
            library.impl(overload, operators._form(launcher, operator), "CPU", allow_override=True)


_libraries: list[torch.library.Library] = []  # an operator's form lives as long as the library that it came with


def calls(device: torch.device) -> dict[str, Call]:
    """The calls by name; names with "f+b" are forward plus backward."""

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    x, dy = values(ROWS, D).requires_grad_(), values(ROWS, N)
    linear = torch.nn.Linear(D, N, bias=False, dtype=torch.bfloat16, device=device)

    def step(forward: Callable[[], Tensor], grad: Tensor, *leaves: Tensor) -> Call:
        def run() -> None:
            for leaf in leaves:
                leaf.grad = None
            forward().backward(grad)

        return run

    found: dict[str, Call] = {"nn.Linear f+b": step(lambda: linear(x), dy, x, linear.weight)}
    for name in ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8"):
        layer = MXLinear(linear, RECIPES[name])
        found[f"MXLinear {name} f+b"] = step(lambda layer=layer: layer(x), dy, x, linear.weight)
    kept = MXLinear(linear, RECIPES["mxfp8_wgrad_with_mx"])
    kept.keep_quantized(WeightCache())
    found["MXLinear mxfp8_wgrad_with_mx, kept f+b"] = step(lambda: kept(x), dy, x, linear.weight)

    w1, w2 = (torch.nn.Parameter(values(EXPERTS, *shape)) for shape in ((2 * H, D), (D, H)))
    choices, scores = torch.rand(ROWS, EXPERTS, device=device).topk(CHOICES).indices, values(ROWS, CHOICES)
    for name in ("hp", "mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"):

        def experts(name: str = name) -> Tensor:
            return mxep.fused_experts(x, choices, scores, w1, None, w2, None, EXPERTS, group="", recipe=name)

        found[f"fused_experts {name} f+b"] = step(experts, values(ROWS, D), x, w1, w2)

    register(_SYMMETRIC, alone(device=device.type))  # exchanges as those of several ranks, of which none waits for another
    for group, where in ((None, ""), (SimpleNamespace(group_name=_SYMMETRIC), ", exchanges over symmetric memory")):
        moe = mxep.FusedMoE(mxep.MoEConfig(D, H, EXPERTS, CHOICES), "mxfp8_wgrad_with_mx").to(device)
        moe.init_weights(0.05)
        moe.bfloat16().experts.keep_quantized(WeightCache())
        moe.group = group  # type: ignore[assignment]
        found[f"FusedMoE mxfp8_wgrad_with_mx, kept{where} f+b"] = step(lambda moe=moe: moe(x), values(ROWS, D), x, *moe.parameters())

    weights = torch.nn.ParameterDict({"weight": torch.nn.Parameter(values(N, D))})
    updates = OptimizerInBackward(build_optimizer(weights, 1e-3, 0.1, StatePrecision("adamw8bit", "bfloat16")))

    def update() -> None:
        weights["weight"].grad = dw
        updates._step(weights["weight"])

    dw = values(N, D)
    updates.optimizer.param_groups[0]["lr"] = torch.full((), 1e-3, device=device)
    found["AdamW of a parameter in backward"] = update

    counts = torch.tensor([ROWS // 2, ROWS // 2], device=device)
    rows, splits = x.detach(), [ROWS]
    received = mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(rows, splits, splits)
    shape, permuted, row_map, _, offs = mxep.permute_mxfp8_fwd_hp_bwd(received, counts, 1, 2)
    w = values(2, N, D).transpose(-2, -1)
    out = mxep.to_mxfp8_then_scaled_grouped_mm(permuted, w, offs, wgrad_with_hp=True)
    unpermuted = mxep.unpermute_hp_fwd_mxfp8_bwd(out, row_map, shape)
    rows_of_w, main = torch.nn.Parameter(values(2, N, D)), torch.zeros(2, N, D, device=device)

    def with_main_grad() -> None:
        leaf = permuted.dequantize().requires_grad_()
        made = mxep.to_mxfp8_then_scaled_grouped_mm(leaf, rows_of_w.transpose(-2, -1), offs, wgrad_with_hp=True, main_grad=main)
        made.backward(made.detach())

    return found | {
        "dispatch": lambda: mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(rows, splits, splits),
        "permute": lambda: mxep.permute_mxfp8_fwd_hp_bwd(received, counts, 1, 2),
        "grouped mm with a main gradient f+b": with_main_grad,
        "grouped mm": lambda: mxep.to_mxfp8_then_scaled_grouped_mm(permuted, w, offs, wgrad_with_hp=True),
        "unpermute": lambda: mxep.unpermute_hp_fwd_mxfp8_bwd(out, row_map, shape),
        "combine": lambda: mxep.a2a_combine_hp_fwd_mxfp8_bwd(unpermuted, splits, splits),
    }


def frames_in(call: Call, wanted: Callable[[FrameType], bool]) -> int:
    """How many Python functions that are wanted a call enters in this thread."""
    entered = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal entered
        entered += event == "call" and wanted(frame)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def python_calls(call: Call) -> int:
    """Python functions that a call enters in this thread, without those of this file."""
    return frames_in(call, lambda frame: frame.f_code.co_filename != __file__)


def operators_in(call: Call) -> int:
    """Operators of torch and of this package that a call dispatches, with those inside of them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name.startswith(("aten::", "mxep::")) for event in profiler.events())


def host_us(call: Call, device: torch.device) -> float:
    """Microseconds of a call: on a GPU until it returns, on an idle device, median; on a CPU of this thread's processor time, the least."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    found = []
    for _ in range(_RUNS):
        synchronize(device)
        start = clock()
        call()
        found.append(1e6 * (clock() - start))
    return statistics.median(found) if device.type == "cuda" else min(found)


def measure(device: torch.device) -> dict[str, dict[str, float]]:
    """For every call `host_us`, `torch_operators` and, on a CPU, `python_calls`."""
    table: dict[str, dict[str, float]] = {}
    for name, call in calls(device).items():
        for _ in range(10):
            call()
        table[name] = {"host_us": round(host_us(call, device), 1), "torch_operators": operators_in(call)}
        if device.type == "cpu":
            table[name]["python_calls"] = python_calls(call)
    return table


def print_profile(call: Call) -> None:
    """Functions by the time spent in them and in what they call."""
    with torch.autograd.set_multithreading_enabled(False):  # backward in this thread, on a GPU too
        for _ in range(20):  # backward is recorded once forward is replayed
            call()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(_RUNS):
            call()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(80)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", metavar="CALL", help="its functions instead of a table")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if device.type == "cpu":
            launch_nothing()
        if options.profile is not None:
            return print_profile(calls(device)[options.profile])
        table = measure(device)
    finally:
        close_transports()
        dist.destroy_process_group()
    if options.json:
        print(json.dumps(table))
        return
    columns = list(next(iter(table.values())))
    print(f"{'call':40}" + "".join(f"{column:>17}" for column in columns))
    for name, row in table.items():
        print(f"{name:40}" + "".join(f"{row[column]:17,.1f}" if column == "host_us" else f"{row[column]:17,}" for column in columns))


if __name__ == "__main__":
    main()
