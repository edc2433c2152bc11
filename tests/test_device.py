"""GEMM paths by device: available paths, and errors for others. GPUs are mocked here, and the tests are named so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.utils._device

from mxep import device

CPU = torch.device("cpu")


def test_cpu_paths() -> None:
    assert device.resolve_gemm_path("auto", CPU) == "reference"
    assert device.resolve_gemm_path("emulated", CPU) == "reference"
    assert device.resolve_gemm_path("reference", CPU) == "reference"
    assert device.checking(CPU)


@pytest.mark.parametrize("name", ["exact", "fp8", "fp8_span", "blackwell"])
def test_gpu_path_without_a_gpu(name: str) -> None:
    with pytest.raises(ValueError, match=r"needs a CUDA GPU.*runs reference"):
        device.resolve_gemm_path(name, CPU)


def test_unknown_path_and_device() -> None:
    with pytest.raises(ValueError, match="is unknown"):
        device.resolve_gemm_path("fastest", CPU)
    with pytest.raises(ValueError, match="nothing runs on meta"):
        device.resolve_gemm_path("auto", torch.device("meta"))


@pytest.mark.parametrize(("capability", "auto"), [((8, 9), "exact"), ((9, 0), "fp8"), ((10, 0), "blackwell"), ((12, 0), "exact")])
def test_mocked_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], auto: str) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda index: capability)
    monkeypatch.setattr(device, "compiler_problem", lambda: None)
    gpu = torch.device("cuda", 0)
    assert device.resolve_gemm_path("auto", gpu) == auto
    for path in device.FP8_PATHS:
        if capability[0] == 9:
            assert device.resolve_gemm_path(path, gpu) == path
        else:
            with pytest.raises(ValueError, match="needs SM90"):
                device.resolve_gemm_path(path, gpu)
    assert device.resolve_gemm_path("emulated", gpu) == "exact"
    if capability[0] != 10:
        with pytest.raises(ValueError, match="needs SM100"):
            device.resolve_gemm_path("blackwell", gpu)
    with pytest.raises(ValueError, match="runs on the CPU only"):
        device.resolve_gemm_path("reference", gpu)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_without_a_compiler_is_an_error(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path has kernels besides its GEMMs that are compiled at run time."""
    monkeypatch.setattr(device, "compute_capability", lambda index: capability)
    monkeypatch.setattr(device, "compiler_problem", lambda: "nvrtc: not found (test)")
    for path in ("auto", "emulated", "exact", *(["fp8"] if capability == (9, 0) else [])):
        with pytest.raises(ValueError, match="nvrtc: not found"):
            device.resolve_gemm_path(path, torch.device("cuda", 0))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_mocked_old_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No instruction of theirs converts e4m3."""
    monkeypatch.setattr(device, "compute_capability", lambda index: capability)
    monkeypatch.setattr(device, "compiler_problem", lambda: None)
    with pytest.raises(ValueError, match="nothing runs on"):
        device.resolve_gemm_path("auto", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"needs conversions to and from e4m3 \(SM89 or newer\), this GPU is SM"):
        device.resolve_gemm_path("exact", torch.device("cuda", 0))


def test_checking_on_gpus_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXEP_CHECK", "1")
    assert device.checking(torch.device("cuda", 0))
    monkeypatch.delenv("MXEP_CHECK")
    assert not device.checking(torch.device("cuda", 0))


def test_machine_facts() -> None:
    facts = device.machine_facts()
    assert facts["torch"] == torch.__version__
    assert f"{os.cpu_count()} cores" in facts["cpu"]
    assert "gloo" in facts["process-group backends"]


@pytest.fixture
def forgotten():
    device.nvrtc_version.cache_clear()
    yield
    device.nvrtc_version.cache_clear()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("cuda", "words"), [(None, "without CUDA"), ("99.1", "99.1")])
def test_a_foreign_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch, cuda: str | None, words: str):
    if cuda is not None and device.compiler_problem() is not None:
        pytest.skip("no NVRTC to be foreign")
    device.nvrtc_version.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert words in (device.compiler_problem() or "")
    assert "reinstall torch" in (device.compiler_problem() or "")


@pytest.mark.usefixtures("forgotten")
def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match="not found"):
        device.nvrtc_version()


def test_poisoned_memory_is_on_the_default_device(request: pytest.FixtureRequest) -> None:
    """torch caches the functions that obey the default device; it must not cache the fixture instead of `torch.empty`."""
    torch.utils._device._device_constructors.cache_clear()
    request.getfixturevalue("poison")
    with torch.device("meta"):
        assert torch.empty(1).is_meta


@pytest.mark.usefixtures("poison")
def test_new_memory_is_poisoned() -> None:
    """Launchers allocate outputs in both ways."""
    like = torch.zeros(2, dtype=torch.bfloat16)
    made = torch.empty(3), like.new_empty(3), like.new_empty((2, 2), dtype=torch.float8_e4m3fn), like.new_empty(0)
    assert all(value.float().isnan().all() for value in made)
    assert like.new_empty(1, dtype=torch.int32).view(torch.uint8).tolist() == [0xA5] * 4


def test_a_launcher_of_ranks_does_not_import_dynamo() -> None:
    code = "import sys, mxep.device, mxep.train.rank_launcher; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_what_a_graph_takes_as_constant() -> None:
    """The mark is torch's own."""
    marked = torch.compiler.assume_constant_result(lambda: None)
    for function in (device.compiler_problem, device._compute_capability):
        assert vars(marked).items() <= vars(function).items()


def test_no_capture_on_a_cpu() -> None:
    assert device.capture_number(torch.device("cpu")) == 0
