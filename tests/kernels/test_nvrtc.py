"""The compiler helper without a GPU: the cubin cache, its damage, its folder, and a kernel that does not compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mxep import device
from mxep.kernels import nvrtc

KERNEL = 'extern "C" __global__ void nothing() {}'
needs_nvrtc = pytest.mark.skipif(device.compiler_problem() is not None, reason=str(device.compiler_problem()))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never(*_: object) -> bytes:
    raise AssertionError("compiled again")


@needs_nvrtc
def test_a_kept_cubin_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = nvrtc.cubin(KERNEL, "nothing")
    assert first[:4] == b"\x7fELF"
    assert [path.name.split("-")[0] for path in cache.iterdir()] == ["nothing"]
    monkeypatch.setattr(nvrtc, "_compile", never)
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
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_compiled_again(cache: Path, damage: bytes | None):
    first = nvrtc.cubin(KERNEL, "nothing")
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    assert nvrtc.cubin(KERNEL, "nothing") == first
    assert path.read_bytes() == content
    assert len(list(cache.iterdir())) == 1  # nothing is left beside it


@needs_nvrtc
def test_ranks_that_compile_at_once_do_not_disturb_each_other(cache: Path):
    code = f"from mxep.kernels import nvrtc; assert nvrtc.cubin({KERNEL!r}, 'nothing')[:4] == b'\\x7fELF'"
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 1


@needs_nvrtc
def test_a_folder_that_cannot_be_written_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MXEP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="MXEP_CACHE"):
        assert nvrtc.cubin(KERNEL, "nothing")[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_kernel_that_does_not_compile_says_why(cache: Path):
    with pytest.raises(nvrtc.CudaCompilerError, match="undefined_thing"):
        nvrtc.cubin('extern "C" __global__ void wrong() { undefined_thing(); }', "wrong")
    assert not cache.exists()


def test_the_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MXEP_CACHE", "/a/b")
    assert nvrtc.cache_folder() == Path("/a/b")
    monkeypatch.delenv("MXEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert nvrtc.cache_folder() == Path("/xdg/mxep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert nvrtc.cache_folder() == Path.home() / ".cache" / "mxep"


def test_importing_needs_neither_compiler_nor_gpu():
    code = "import sys, mxep.kernels.fp8_grouped_mm, mxep.kernels.rebase; assert 'cuda.bindings' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
