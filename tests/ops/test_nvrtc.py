"""The compiler helper without a GPU: the cubin cache, its damage, its folder, and a kernel that does not compile."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mxep import device, reference
from mxep.ops.grouped_gemm.hopper import rebase_reference as reference_rebase
from mxep.ops.runtime import launch_graph, nvrtc

KERNEL = 'extern "C" __global__ void nothing() {}'
needs_nvrtc = pytest.mark.skipif(device.compiler_problem() is not None, reason=str(device.compiler_problem()))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never(*_: object) -> bytes:
    raise AssertionError("compiled again")


@needs_nvrtc
def test_a_cached_cubin_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = nvrtc.cubin(KERNEL, "nothing")
    assert first[:4] == b"\x7fELF"
    assert [path.name.split("-")[0] for path in cache.iterdir()] == ["nothing"]
    monkeypatch.setattr(nvrtc, "compiled", never)
    assert nvrtc.cubin(KERNEL, "nothing") == first
    for change in ({"CHIP": "sm_100a"}, {"FLAGS": ("--std=c++20",)}):
        with monkeypatch.context() as other:
            for name, value in change.items():
                other.setattr(nvrtc, name, value)
            with pytest.raises(AssertionError, match="compiled again"):
                nvrtc.cubin(KERNEL, "nothing")
    with pytest.raises(AssertionError, match="compiled again"):
        nvrtc.cubin(KERNEL + " ", "nothing")


@needs_nvrtc
def test_an_empty_log_writes_into_no_shared_bytes():
    """It is one byte long, a zero, and Python has one object for all bytes of the same one character."""
    code = f"""from mxep.ops.runtime import nvrtc
shared = [bytes([value]) for value in range(256)]
assert nvrtc.compiled({KERNEL!r}, "nothing", nvrtc.CHIP)[1] == ""
assert [value for value, one in enumerate(shared) if ord(one) != value] == []"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_compiled_again(cache: Path, damage: bytes | None):
    first = nvrtc.cubin(KERNEL, "nothing")
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    assert nvrtc.cubin(KERNEL, "nothing") == first
    assert path.read_bytes() == content
    assert len(list(cache.iterdir())) == 1  # no other file is left


@needs_nvrtc
def test_ranks_that_compile_at_once_do_not_disturb_each_other(cache: Path):
    code = f"from mxep.ops.runtime import nvrtc; assert nvrtc.cubin({KERNEL!r}, 'nothing')[:4] == b'\\x7fELF'"
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_nvrtc
def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="MXEP_CACHE"):
        assert nvrtc.cubin(KERNEL, "nothing")[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_folder_that_others_can_write_is_not_used(cache: Path):
    """Its files may be another user's code; they are neither loaded nor replaced."""
    nvrtc.cubin(KERNEL, "nothing")
    (path,) = cache.iterdir()
    planted = b"code of another one"
    path.write_bytes(nvrtc._digest(path, planted) + planted)
    assert nvrtc.cubin(KERNEL, "nothing") == planted, "another user can know the digest"
    cache.chmod(0o1777)
    with pytest.warns(UserWarning, match=r"cannot be kept in .*cache has mode drwxrwxrwt, want it writable by its.*MXEP_CACHE") as told:
        compiled = [nvrtc.cubin(KERNEL, "nothing")[:4] for _ in range(2)]
    assert compiled == [b"\x7fELF"] * 2
    assert len(told) == 1
    assert path.read_bytes().endswith(planted)


@needs_nvrtc
def test_a_file_that_others_can_write_is_compiled_again(cache: Path):
    nvrtc.cubin(KERNEL, "nothing")
    (path,) = cache.iterdir()
    planted = b"code of another one"
    path.write_bytes(nvrtc._digest(path, planted) + planted)
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="has mode -rw-rw-rw-"):
        assert nvrtc.cubin(KERNEL, "nothing")[:4] == b"\x7fELF"
    assert path.stat().st_mode & 0o777 == 0o600
    assert nvrtc._read(path)[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_cubin_under_the_name_of_another_kernel_is_not_loaded(cache: Path):
    other = 'extern "C" __global__ void other() {}'
    first, second = nvrtc.cubin(KERNEL, "nothing"), nvrtc.cubin(other, "other")
    one, two = sorted(cache.iterdir())
    two.replace(one)
    assert nvrtc.cubin(KERNEL, "nothing") == first
    assert nvrtc.cubin(other, "other") == second


@needs_nvrtc
def test_the_folder_is_this_users_alone(cache: Path):
    before = os.umask(0)
    try:
        nvrtc.cubin(KERNEL, "nothing")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (cache, *cache.iterdir())] == [0o700, 0o600]


@needs_nvrtc
def test_a_kernel_that_does_not_compile_says_why(cache: Path):
    with pytest.raises(nvrtc.CudaCompilerError, match="undefined_thing"):
        nvrtc.cubin('extern "C" __global__ void wrong() { undefined_thing(); }', "wrong")
    assert not cache.exists()


THREAD_LOCAL, RELAXED = 1, 2  # CUstreamCaptureMode of cuda.h


class Driver:
    """Records the driver calls of a launch; the thread has no context at first."""

    def __init__(self) -> None:
        self.context, self.launches, self.asked = 0, [], []
        self.capture_mode = THREAD_LOCAL  # of the thread

    def __getattr__(self, name: str):
        return lambda *arguments: self.asked.append(name) or 0

    def cuCtxGetCurrent(self, context) -> int:  # noqa: N802
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context) -> int:  # noqa: N802
        self.context = 7
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:  # noqa: N802
        mode._obj.value, self.capture_mode = self.capture_mode, mode._obj.value
        return 0

    def launch(self, *arguments: object) -> int:
        self.launches.append(arguments)
        return 0 if self.context else 201


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_launch", lambda: driver.launch)
    monkeypatch.setattr(nvrtc.Kernel, "compile", lambda self: b"")
    monkeypatch.setattr(nvrtc, "current_gpu", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    return driver


def test_arguments_of_a_launch(driver: Driver):
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))

    kernel = nvrtc.Kernel("nothing", (), {}, threads=64, shared_bytes=100_000)
    tensor, tensor_map, pair = torch.zeros(3), nvrtc.TensorMap(), Pair(5, 6)
    seen = []
    real = driver.launch

    def look(*arguments):
        pointers, word = (ctypes.c_int64 * 6).from_address(arguments[2]), ctypes.c_int64.from_address
        seen.append([*(word(pointers[i]).value for i in range(3)), ctypes.c_int.from_address(pointers[3]).value])
        seen.append([pointers[4], Pair.from_address(pointers[5]).b])
        return real(*arguments)

    driver.launch = look
    kernel.run(0, 12, nvrtc.Arguments(tensor, None, 2**40, -1, tensor_map, pair))
    assert seen == [[tensor.data_ptr(), 0, 2**40, -1], [tensor_map.address, 6]]
    config = driver.launches[0][0]._obj
    assert [getattr(config, name) for name, _ in config._fields_] == [12, 1, 1, 64, 1, 1, 100_000, 99, None, 0]
    assert ctypes.sizeof(config) == 56, "as in cuda.h"
    assert tensor_map.address % 64 == 0
    assert driver.asked == ["cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"]


@pytest.mark.parametrize("shared_bytes", [0, 1024, 48 * 1024])
def test_dynamic_shared_memory_is_asked_for(driver: Driver, shared_bytes: int):
    """48 KiB of it are too much without asking where the kernel has static shared memory, too."""
    nvrtc.Kernel("nothing", (), {}, threads=64, shared_bytes=shared_bytes).launch(0, 1)
    assert ("cuFuncSetAttribute" in driver.asked) == bool(shared_bytes)


@pytest.mark.parametrize("status", [0, 900])
def test_a_module_is_loaded_where_a_capture_allows_it(driver: Driver, status: int):
    """Nothing else is launched there, also if the driver refuses to load it."""
    modes = []
    driver.cuModuleLoadData = lambda *arguments: modes.append(driver.capture_mode) or status
    driver.cuModuleGetFunction = lambda *arguments: modes.append(driver.capture_mode) or 0
    launch, driver.launch = driver.launch, lambda *arguments: modes.append(driver.capture_mode) or launch(*arguments)
    kernel = nvrtc.Kernel("nothing", (), {}, threads=32)
    if status:
        with pytest.raises(RuntimeError, match="nothing: cuModuleLoadData: CUDA error 900"):
            kernel.launch(0, 1)
    else:
        kernel.launch(0, 1)
        kernel.launch(0, 1)
    assert modes == ([RELAXED] if status else [RELAXED, RELAXED, THREAD_LOCAL, THREAD_LOCAL])
    assert driver.capture_mode == THREAD_LOCAL


def test_packed_arguments_are_launched_again(driver: Driver):
    kernel, packed = nvrtc.Kernel("nothing", (), {}, threads=32), nvrtc.Arguments(7, None)
    for _ in range(2):
        kernel.run(0, 3, packed)
    (first, second) = (launch[2] for launch in driver.launches)
    assert first == second == packed.pointers
    assert ctypes.c_int64.from_address(ctypes.c_int64.from_address(first).value).value == 7


def test_equal_arguments_are_packed_once(driver: Driver):
    kernel, tensor = nvrtc.Kernel("nothing", (), {}, threads=32), torch.zeros(3)
    for argument in (tensor, tensor.view(3, 1), tensor[1:]):
        kernel.launch(0, 3, argument, None, 5)
    first, second, third = (launch[2] for launch in driver.launches)
    assert first == second != third
    assert [ctypes.c_int64.from_address(ctypes.c_int64.from_address(at).value).value for at in (first, third)] == [
        tensor.data_ptr(),
        tensor.data_ptr() + 4,
    ]


def test_the_gemm_packs_the_same_addresses_once(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """Equal tensors at the same address are not encoded again; other addresses are."""
    gemm = importlib.import_module("mxep.ops.grouped_gemm.hopper.gemm")
    monkeypatch.setattr(gemm, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(nvrtc, "current_gpu", lambda: None)  # what a CPU tensor's device has for an index
    out = torch.zeros(64, 32, dtype=torch.bfloat16)
    qa, qb = (reference.quantize(torch.randn(shape), "rceil") for shape in ((64, 128), (2, 32, 128)))
    rows, weight = reference_rebase.rebase_rows(*qa, 8), reference_rebase.rebase_weight(*qb)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape, **options: out)
    offs = torch.tensor([30, 64], dtype=torch.int32)
    encoded = []
    for call_rows in (rows, rows, rows._replace(data=rows.data.clone())):
        driver.asked.clear()
        gemm.fp8_grouped_mm(call_rows, weight, offs, torch.bfloat16)
        encoded.append(driver.asked.count("cuTensorMapEncodeTiled"))
    assert encoded == [5, 0, 1]
    assert [launch[0]._obj.blocks for launch in driver.launches] == [132] * 3


def test_adamw_passes_structures_to_its_kernel(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    launcher = importlib.import_module("mxep.ops.optimizer.adamw_step")
    monkeypatch.setattr(launcher, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launcher, "chip_of", lambda index: "sm_90")
    monkeypatch.setattr(launcher, "_problem", lambda index: None)
    monkeypatch.setattr(nvrtc, "current_gpu", lambda: None)
    parameter, gradient, average, squares = (torch.zeros(512, dtype=torch.bfloat16) for _ in range(4))
    step, lr = torch.zeros(()), torch.ones(())
    total = torch.zeros((), dtype=torch.float64)
    for measured in (None, total):
        driver.launches.clear()
        launcher.adamw_step(
            parameter, gradient, average, squares, None, None, step, lr, None, None, 7, (512, 512, 0), (0.9, 0.95, 0.1, 1e-8), measured
        )
        update, count = (launch[0]._obj for launch in driver.launches)
        assert (update.blocks, count.blocks, count.threads) == (1, 1, 32), "one warp counts the step"
    with pytest.raises(ValueError, match=r"adamw_step: squares is \(\) torch.float32, want \(\) float64"):
        launcher.adamw_step(
            parameter, gradient, average, squares, None, None, step, lr, None, None, 7, (512, 512, 0), (0.9,) * 4, torch.zeros(())
        )
    for wrong in (torch.zeros((), dtype=torch.float64), torch.zeros(1)):
        with pytest.raises(ValueError, match=r"step, lr, grad_scale and found_inf .* want \(\) float32"):
            launcher.adamw_step(parameter, gradient, average, squares, None, None, step, wrong, None, None, 7, (512, 512, 0), (0.9,) * 4)
    elsewhere = lr.to("meta")
    with pytest.raises(ValueError, match="a tensor on another device than the parameter's, cpu"):
        launcher.adamw_step(parameter, gradient, average, squares, None, None, step, elsewhere, None, None, 7, (512, 512, 0), (0.9,) * 4)


def test_a_thread_without_a_context_gets_torchs(driver: Driver):
    kernel = nvrtc.Kernel("nothing", (), {}, threads=32)
    kernel.launch(0, 1)
    assert (driver.context, len(driver.launches)) == (7, 1)
    driver.context = 0  # another thread, the kernel is loaded already
    kernel.launch(0, 1)
    assert (driver.context, len(driver.launches)) == (7, 3)


def test_an_error_of_the_driver_is_raised(driver: Driver):
    driver.launch = lambda *_: 700
    with pytest.raises(RuntimeError, match="nothing: cuLaunchKernelEx with 32 threads a block: CUDA error 700"):
        nvrtc.Kernel("nothing", (), {}, threads=32).launch(0, 3)


def test_importing_needs_neither_compiler_nor_gpu():
    """Later releases of torch import the bindings themselves, and may."""
    code = (
        "import sys, torch; of_torch = 'cuda.bindings' in sys.modules; "
        "import mxep.ops.grouped_gemm.hopper.gemm, mxep.ops.grouped_gemm.hopper.rebase; "
        "assert of_torch or 'cuda.bindings' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_driver_function_binds_the_context_and_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub library: a thread without a context at first, then success, then an error."""
    answers, bound = [nvrtc._INVALID_CONTEXT, 0, 1], []

    class Library:
        def __init__(self, name: str) -> None:
            self.cuThing = lambda *arguments: answers.pop(0)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", Library)
    monkeypatch.setattr(nvrtc, "_bind_context", bound.append)
    monkeypatch.setattr(nvrtc, "_check", lambda status, what: bound.append((status, what)))
    function = nvrtc.DriverFunction("cuThing", ctypes.c_uint64)
    function(torch.device("cuda", 3), 5)
    assert bound == [3]
    function(torch.device("cuda", 3), 5)
    assert bound == [3, (1, "cuThing")]


def test_a_graph_of_launches_ends_in_relaxed_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any other mode the driver refuses, and invalidates what the thread captures."""
    mode, before, seen = 0, launch_graph.LaunchGraph.alive, []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, wanted) -> int:  # noqa: N802
            nonlocal mode
            mode, wanted._obj.value = wanted._obj.value, mode
            return 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(launch_graph, "_destroy", lambda device, ready: seen.append((ready, mode)))
    monkeypatch.setattr(launch_graph.LaunchGraph, "alive", before + 1)
    launch_graph._end_of_life(torch.device("cpu"), 7)
    assert seen == [(7, nvrtc.CAPTURE_MODE_RELAXED)]
    assert (mode, launch_graph.LaunchGraph.alive) == (0, before)
