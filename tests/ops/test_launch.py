"""launch: a compiled variant is used again if, and only if, everything that it depends on is equal. tests/gpu runs Triton itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import jit

from mxep.ops.runtime import launch as launching
from mxep.ops.runtime.launch import launch


@triton.jit(do_not_specialize=["count"])
def _kernel(rows, stride, live, count, WIDTH: tl.constexpr):
    pass


ROWS = torch.zeros(64, dtype=torch.uint8)
PLAIN = {"rows": ROWS, "stride": 32, "live": None, "count": 7, "WIDTH": 64}


GPU = -1  # the index of these tensors' device

asked: list[dict] = []  # options of every kernel that Triton was asked for


class Compiled:
    """A stub for a kernel that Triton compiled: `run` launches it, as Triton's runner does without a known C function."""

    def __init__(self, made: list) -> None:
        self.made, self.run = made, None

    def __getitem__(self, grid):
        return lambda *values: self.made.append(("again", grid, values))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list:
    """Records launches, and an entry "compiled" for each compilation."""
    entries: list = []

    def run(self, *values, grid, warmup, **options):
        entries.append(("compiled", grid, values))
        asked.append(options)
        return Compiled(entries)

    asked.clear()
    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(launching, "current_gpu", lambda: GPU)
    monkeypatch.setattr(launching, "_variants", {})
    return entries


def test_arguments_come_in_the_kernels_order(made: list):
    for _ in range(2):
        launch(_kernel, 5, dict(reversed(PLAIN.items())), num_warps=4)
    assert [entry[0] for entry in made] == ["compiled", "again"]
    assert [grid for _, grid, _ in made] == [(5, 1, 1)] * 2
    assert made[0][2] == (ROWS, 32, None, 7, 64)
    assert made[1][2] == (ROWS.data_ptr(), 32, None, 7, 64)
    launch(_kernel, (5, 3), PLAIN, num_warps=4)
    assert made[-1][:2] == ("again", (5, 3, 1))


def test_triton_loads_a_variant_where_a_capture_allows_it(made: list, monkeypatch: pytest.MonkeyPatch):
    @contextlib.contextmanager
    def relaxed() -> Iterator[None]:
        made.append("relaxed")
        yield
        made.append("as before")

    monkeypatch.setattr(launching, "relaxed_capture", relaxed)
    for capturing in (True, False):
        monkeypatch.setattr(launching, "is_capturing", lambda capturing=capturing: capturing)
        for _ in range(2):
            launch(_kernel, 5, PLAIN, num_warps=4 + 4 * capturing)
    assert [entry if isinstance(entry, str) else entry[0] for entry in made] == [
        "relaxed", "compiled", "as before", "again", "compiled", "again"
    ]  # fmt: skip


def test_options_that_change_bits_are_passed_explicitly(made: list):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, PLAIN, num_warps=4, enable_fp_fusion=False)
    assert [entry[0] for entry in made] == ["compiled", "compiled"]
    assert [options["enable_fp_fusion"] for options in asked] == [True, False]


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        ({"rows": torch.ones(64, dtype=torch.uint8)}, False),
        ({"rows": ROWS[16:]}, False),
        ({"rows": ROWS[1:]}, True),
        ({"rows": ROWS.view(torch.int8)}, True),
        ({"stride": 48}, False),
        ({"stride": 24}, True),
        ({"stride": 1}, True),
        ({"stride": 2**31}, True),
        ({"live": ROWS}, True),
        ({"count": 16}, False),
        ({"count": 1}, False),
        ({"count": 2**31}, True),
        ({"WIDTH": 128}, True),
    ],
)
def test_keys_of_a_variant(made: list, change: dict, compiled: bool):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, {**PLAIN, **change}, num_warps=4)
    assert made[1][0] == ("compiled" if compiled else "again")


def test_options_and_the_gpu_distinguish_variants(made: list, monkeypatch: pytest.MonkeyPatch):
    launch(_kernel, 5, PLAIN, num_warps=4)
    launch(_kernel, 5, PLAIN, num_warps=8)
    monkeypatch.setattr(launching, "current_gpu", lambda: 1)
    elsewhere = SimpleNamespace(dtype=torch.uint8, data_ptr=lambda: 64, get_device=lambda: 1)
    launch(_kernel, 5, PLAIN | {"rows": elsewhere}, num_warps=4)
    launch(_kernel, 5, PLAIN | {"rows": elsewhere, "live": ROWS}, num_warps=4)
    launch(_kernel, 5, PLAIN | {"rows": elsewhere, "live": elsewhere}, num_warps=4)
    assert [entry[0] for entry in made] == ["compiled"] * 5, "a tensor on another device is passed to Triton, which refuses it"


def test_the_gpu_of_the_first_tensor_is_made_the_current_one(made: list, monkeypatch: pytest.MonkeyPatch):
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(launching, "current_gpu", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    launch(_kernel, 5, PLAIN | {"rows": SimpleNamespace(dtype=torch.uint8, data_ptr=lambda: 64, get_device=lambda: 3)}, num_warps=4)
    assert [entry[0] for entry in made] == ["compiled"]
    assert current == [0]


def test_a_host_tensor_is_passed_to_triton(made: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launching, "current_gpu", lambda: 0)
    launch(_kernel, 5, PLAIN, num_warps=4)
    assert [entry[0] for entry in made] == ["compiled"], "Triton raises"


def test_mx_data_and_scales_are_bytes(made: list):
    for dtype, compiled in ((torch.float8_e4m3fn, True), (torch.float8_e8m0fnu, True), (torch.float8_e4m3fn, False)):
        launch(_kernel, 5, PLAIN | {"rows": ROWS.view(dtype)}, num_warps=4)
        assert made[-1][0] == ("compiled" if compiled else "again")
        if compiled:
            assert made[-1][2][0].dtype == torch.uint8
            assert made[-1][2][0].data_ptr() == ROWS.data_ptr()


def test_a_known_c_function_launches_unless_a_profiler_is_active(made: list, monkeypatch: pytest.MonkeyPatch):
    def function(*given: object) -> None:
        made.append(("function", given))

    monkeypatch.setattr(launching, "_compiled_kernel", lambda compiled: launching._CompiledKernel(compiled, function, ("fixed",)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: f"stream of {index}", raising=False)
    for _ in range(2):
        launch(_kernel, (5, 3), PLAIN, num_warps=4)
    assert made[1] == ("function", (5, 3, 1, f"stream of {GPU}", "fixed", ROWS.data_ptr(), 32, None, 7, 64))
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(knobs.runtime, hook)
        chain.add(print)
        launch(_kernel, 5, PLAIN, num_warps=4)
        chain.remove(print)
        assert made[-1][0] == "again"
    launch(_kernel, 5, PLAIN, num_warps=4)
    assert made[-1][0] == "function"


def test_the_c_function_of_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch):
    """Scratch memory and other versions of Triton are left to Triton's runner."""
    run = object.__new__(nvidia.CudaLauncher)
    vars(run).update(launch=print, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False, launch_pdl=True)
    vars(run).update(arg_annotations="annotations", kernel_signature="signature")
    compiled = SimpleNamespace(run=run, function=123, packed_metadata=(4, 1, 0))
    assert launching._EACH or launching._AS_ONE, "the tested versions of torch have a version of Triton that is known"
    assert launching._compiled_kernel(compiled).function is not None
    run.profile_scratch_size = 8
    assert launching._compiled_kernel(compiled).function is None
    run.profile_scratch_size = 0
    for name in ("_EACH", "_AS_ONE"):
        monkeypatch.setattr(launching, name, False)
    assert launching._compiled_kernel(compiled).function is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as Triton does for its C function")
def test_launches_by_tritons_c_function(tmp_path: Path):
    """Triton's own C function, compiled against a stub driver that records its arguments."""
    programs = Path(__file__).parents[1] / "programs"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", programs / "fake_driver.c"], check=True)
    (tmp_path / "libcuda.so").symlink_to("libcuda.so.1")
    folders = {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | folders
    done = subprocess.run([sys.executable, programs / "triton_launcher.py"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["found"] == [[[5, 3, 1, 256], 77, True]] * 4
    assert (told["launches"], told["direct"]) == (4, [True, True])
