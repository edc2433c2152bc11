"""CUDA C++ at run time: compiled by NVRTC, kept on disk, loaded, launched; and the copy engine's tensor maps.

NVRTC and its Python bindings (`cuda.bindings`) come with torch's CUDA wheels; no nvcc, no headers, no build step.  A variant of a kernel
is a text (the files plus options in front) and compiles in about a second, once: the cubin is kept in a folder on disk under a hash of
text, flags, compiler version and chip.  Ranks may compile the same variant at the same time: a cubin is
written to a temporary file and renamed.

Folder: `mxep.private_folders.cache_folder`.  Where it cannot be written, or others than this user can write there, a warning says so once
and every process compiles for itself.  A kept cubin is loaded only if its digest fits its bytes and the name that they were kept under.
Compiling needs no GPU.  A kernel can run for the first time inside a CUDA graph capture (`relaxed_capture`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from mxep.device import nvrtc_version
from mxep.private_folders import cache_folder, read_private, write_private

OPS = Path(__file__).parent.parent
CHIP = "sm_90a"  # wgmma, setmaxnreg: Hopper only
FLAGS = ("--std=c++17", "--device-as-default-execution-space")  # the second: generic lambdas inside device functions
_DIGEST_BYTES = 32
_WORD = 2**64 - 1

# cuda.h
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_INVALID_CONTEXT = 201
CAPTURE_MODE_RELAXED = 2
_L2_PROMOTION_128 = 2
SWIZZLE_NONE, SWIZZLE_128 = 0, 3


class CudaCompilerError(RuntimeError):
    """NVRTC refused a kernel."""


# ---------------------------------------------------------------- compile


def source(*files: str, options: dict[str, bool | int]) -> str:
    """The text of `files` (paths below ops/) in order, with options in front as constants.

    >>> source(options={"WIDTH": 64, "MAP": False}).splitlines()
    ['constexpr int WIDTH = 64;', 'constexpr bool MAP = false;']
    """
    lines = []
    for name, value in options.items():
        kind, literal = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
        lines.append(f"constexpr {kind} {name} = {literal};")
    for file in files:
        lines += [f'#line 1 "{file}"', (OPS / file).read_text()]
    return "\n".join(lines)


def compiled(text: str, name: str, chip: str, *more_flags: str) -> tuple[bytes, str]:
    """The cubin of `text` and the compiler's log, without the cache; see `cubin`."""
    from cuda.bindings import nvrtc

    def call(function: str, *args: Any) -> Any:
        status, *result = getattr(nvrtc, function)(*args)
        if int(status):
            raise CudaCompilerError(f"nvrtc: {function} of {name} failed with {status}")
        return result[0] if result else None

    program = call("nvrtcCreateProgram", text.encode(), name.encode(), 0, [], [])
    flags = [flag.encode() for flag in (f"--gpu-architecture={chip}", *FLAGS, *more_flags)]
    failed = int(nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0])
    log = bytearray(call("nvrtcGetProgramLogSize", program))  # not bytes: NVRTC writes into it, and Python shares bytes of length one
    nvrtc.nvrtcGetProgramLog(program, log)
    report = log.rstrip(b"\0").decode(errors="replace")
    if failed:
        raise CudaCompilerError(f"nvrtc: {name} does not compile:\n{report}")
    code = bytearray(call("nvrtcGetCUBINSize", program))
    call("nvrtcGetCUBIN", program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), report


def _digest(path: Path, cubin: bytes) -> bytes:
    """SHA-256 of a file's name and of its cubin, so that a cubin under another kernel's name does not fit."""
    return hashlib.sha256(path.name.encode() + b"\0" + cubin).digest()


def _read(path: Path) -> bytes | None:
    """A kept cubin, None where there is none, others than this user can have written it, or its bytes are damaged."""
    try:
        content = read_private(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        _warn_unusable(path.parent, str(problem))
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if _digest(path, cubin) == digest else None


@functools.cache
def _warn_unusable(folder: Path, problem: str) -> None:
    warnings.warn(f"nvrtc: compiled kernels cannot be kept in {folder} ({problem}); set MXEP_CACHE to a folder that you alone can write")


def _keep(path: Path, cubin: bytes) -> None:
    try:
        write_private(path, _digest(path, cubin) + cubin)
    except OSError as problem:
        _warn_unusable(path.parent, str(problem))


def cubin(text: str, name: str, chip: str | None = None) -> bytes:
    """The compiled form of `text` (CUDA C++ for `chip`, else for `CHIP`), from disk where it is kept, else compiled now and kept.

    Raises:
        RuntimeError: no usable NVRTC (`mxep.device.nvrtc_version`).
        CudaCompilerError: the text does not compile (the log is in the message).
    """
    version, chip = "{}.{}".format(*nvrtc_version()), chip or CHIP
    key = hashlib.sha256("\0".join((text, *FLAGS, version, chip)).encode()).hexdigest()
    path = cache_folder() / f"{name}-{key}.cubin"
    found = _read(path)
    if found is None:
        found, _ = compiled(text, name, chip)
        _keep(path, found)
    return found


# ---------------------------------------------------------------- driver


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def _bind_context(device: int) -> None:
    """Give a thread that has not called CUDA yet the context that torch uses."""
    context = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow a capture on this thread what CUDA calls potentially unsafe, such as loading a module. It is done at once and not recorded.

    A graph can hold kernels that no call before it has run: it quantises weights that a `WeightCache` kept until then, maybe by another
    variant, and works on chunks of rows that the host knew to be empty.
    """
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)

    def exchange() -> None:
        _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")

    exchange()  # mode is that of before now
    try:
        yield
    finally:
        exchange()


class DriverFunction:
    """A function of the driver with declared argument types, so that plain ints need no wrapper. Resolved on its first call.

    Stream 0 belongs to the current device, whatever GPU is named. A caller that passes streams checks this once (`SymmetricTransport`).
    """

    def __init__(self, name: str, *types: Any) -> None:
        self.name, self._types = name, types
        self._function: Any = None
        self._exists: bool | None = None  # None: not looked for yet

    def exists(self) -> bool:
        """Whether this machine's driver has it."""
        if self._exists is None:
            function = getattr(ctypes.CDLL("libcuda.so.1"), self.name, None)
            if function is not None:
                function.argtypes = self._types
            self._function, self._exists = function, function is not None
        return self._exists

    def __call__(self, device: torch.device, *arguments: int | bytes) -> None:
        """Call it on a GPU, from any thread. Raises RuntimeError when it fails."""
        unrecorded(self.name)
        if self._function is None and not self.exists():
            raise RuntimeError(f"{self.name}: this machine's driver does not have it, want a newer one")
        status = self._function(*arguments)
        if status == _INVALID_CONTEXT:
            _bind_context(device.index)
            status = self._function(*arguments)
        if status:
            _check(status, self.name)


# address, value, bytes, stream
fill_bytes = DriverFunction("cuMemsetD8Async", ctypes.c_uint64, ctypes.c_uint8, ctypes.c_size_t, ctypes.c_void_p)


class Recorder(Protocol):
    """Records the launches of its thread: see `mxep.ops.runtime.replay`."""

    thread: int

    def kernel(self, kernel: Kernel, function: Any, blocks: int, arguments: Arguments | PackedStructure, own_stream: bool) -> None: ...

    def triton(self, function: Callable[..., None], grid: tuple[int, int], fixed: tuple, values: list[Any], tensors: list[int]) -> None: ...

    def unknown(self, what: str) -> None:
        """Notes that the device did work that no recording can repeat."""


recorders: list[Recorder] = []


def recorder_here() -> Recorder | None:
    """The recorder of this thread; None without one."""
    return next((recorder for recorder in tuple(recorders) if recorder.thread == threading.get_ident()), None)


def unrecorded(what: str) -> None:
    """Keep this thread's call from being replayed, because it does `what` on the device, which is not recorded: a library's launch, say."""
    if recorders and (recorder := recorder_here()) is not None:
        recorder.unknown(what)


# The current CUDA device of a process that uses CUDA. `torch.cuda.current_device` first checks that it does, for most of its time.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # a torch without CUDA has the second


@functools.cache
def _launch() -> Any:
    """cuLaunchKernelEx with declared argument types, so that plain ints need no wrapper."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch


class _Config(ctypes.Structure):  # CUlaunchConfig of cuda.h
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z", "shared_bytes")),
        *((name, ctypes.c_void_p) for name in ("stream", "attributes")),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.lru_cache(maxsize=4096)
def launch_config(blocks: int, threads: int, shared_bytes: int, stream: int) -> Any:
    """A CUlaunchConfig by reference; cached, since ctypes takes longer to build one than all the rest of a launch."""
    return ctypes.byref(_Config(blocks, 1, 1, threads, 1, 1, shared_bytes, stream, None, 0))


class Arguments:
    """A kernel's arguments in the driver's form, for any number of launches from any thread.

    A tensor passes its address, None a null pointer, an int a C int or long long, a TensorMap its 128 bytes, a ctypes structure itself.

    Attributes:
        given: the arguments; held, so that they exist as long as this object.
    """

    def __init__(self, *arguments: Any) -> None:
        self.given = arguments
        words, elsewhere = [], []
        for i, argument in enumerate(arguments):
            if isinstance(argument, int):
                words.append(argument & _WORD)
            elif isinstance(argument, torch.Tensor):
                words.append(argument.data_ptr())
            else:
                words.append(0)
                if argument is not None:
                    elsewhere.append((i, argument.address if isinstance(argument, TensorMap) else ctypes.addressof(argument)))
        self._words = array("Q", words)  # a C int is the lower half of its word
        address, count = self._words.buffer_info()
        self._pointers = array("Q", range(address, address + 8 * count, 8))
        for i, pointer in elsewhere:
            self._pointers[i] = pointer
        self.pointers = self._pointers.buffer_info()[0]


@functools.lru_cache(maxsize=4096)
def packed(*arguments: Any) -> Arguments:
    """`Arguments` of addresses and numbers; cached, since the allocator returns the same addresses in every step."""
    return Arguments(*arguments)


_OneArgument = ctypes.c_char_p * 1


class PackedStructure:
    """The arguments of a kernel whose only argument is a structure, given as its bytes."""

    def __init__(self, content: bytes) -> None:
        self.pointers = _OneArgument(content)  # keeps a reference to the bytes


class Kernel:
    """One function of one compiled variant; compiled and loaded at its first launch on a GPU.

    Args:
        entry: name of the `extern "C" __global__` function, and of the files on disk.
        files: paths below ops/, in order.  options: constants in front of them, bool or int.
        threads: of a block.  shared_bytes: dynamic shared memory of a block.
        chip: architecture to compile for, as `mxep.device.chip_of` names it; None is `CHIP`.  Kernels that use instructions of Hopper alone
            are compiled for `CHIP`.
    """

    def __init__(
        self,
        entry: str,
        files: tuple[str, ...],
        options: dict[str, bool | int],
        threads: int,
        shared_bytes: int = 0,
        chip: str | None = None,
    ) -> None:
        self.entry, self.files, self.options, self.chip = entry, files, dict(options), chip
        self.threads, self.shared_bytes = threads, shared_bytes
        self._loaded: dict[int, ctypes.c_void_p] = {}

    def compile(self) -> bytes:
        """The cubin; needs no GPU."""
        return cubin(source(*self.files, options=self.options), self.entry, self.chip)

    def _load(self, device: int) -> ctypes.c_void_p:
        _bind_context(device)
        code, module, function = self.compile(), ctypes.c_void_p(), ctypes.c_void_p()
        with relaxed_capture():
            _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"{self.entry}: cuModuleLoadData")
            _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, self.entry.encode()), f"{self.entry}: cuModuleGetFunction")
            if self.shared_bytes:  # 48 KiB are there without asking, but for these and static ones together
                status = _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared_bytes)
                _check(status, f"{self.entry}: {self.shared_bytes} bytes of shared memory")
        self._loaded[device] = function
        return function

    def launch(self, device: int, blocks: int, *arguments: Any) -> None:
        """Launch on torch's current stream of GPU `device`, with tensors, None, ints and tensor maps; structures go to `run`."""
        self.run(device, blocks, packed(*[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]))

    def run(self, device: int, blocks: int, arguments: Arguments | PackedStructure, stream: int | None = None) -> None:
        """`launch` with packed arguments, on the given stream of the GPU, or on torch's current one."""
        if device != current_gpu():
            with torch.cuda.device(device):
                return self.run(device, blocks, arguments, stream)
        function = self._loaded.get(device)
        if function is None:
            function = self._load(device)
        if recorders and (recorder := recorder_here()) is not None:
            recorder.kernel(self, function, blocks, arguments, stream is not None)
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(device)
        self.launch_as(launch_config(blocks, self.threads, self.shared_bytes, stream), device, function, arguments.pointers)

    def launch_as(self, config: Any, device: int, function: Any, pointers: Any) -> None:
        """Launch a loaded function on the current GPU, `device`, from any thread."""
        status = _launch()(config, function, pointers, None)
        if status == _INVALID_CONTEXT:
            _bind_context(device)
            status = _launch()(config, function, pointers, None)
        if status:
            _check(status, f"{self.entry}: cuLaunchKernelEx with {self.threads} threads a block")


# ---------------------------------------------------------------- tensor maps


class Box(NamedTuple):
    """The part of a row-major matrix that the copy engine moves at a time, and its layout in shared memory."""

    data_type: int  # CUtensorMapDataType
    element_bytes: int
    columns: int
    rows: int
    swizzle: int


U8, FLOAT32, BF16 = (0, 1), (7, 4), (9, 2)  # (CUtensorMapDataType, bytes of an element)


class TensorMap:
    """A CUtensorMap, 128 bytes on a 64-byte boundary, and the arguments of `tensor_map` that it was made of."""

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of
        self._memory = ctypes.create_string_buffer(192)
        self.address = ctypes.addressof(self._memory) + -ctypes.addressof(self._memory) % 64


@functools.lru_cache(maxsize=4096)
def tensor_map(box: Box, address: int, rows: int, columns: int, row_stride: int) -> TensorMap:
    """The map of a row-major matrix at `address` (16-byte aligned), row_stride in elements (a multiple of 16 bytes).

    Reads outside give zero, writes outside are dropped.
    """
    encoded = TensorMap(box, address, rows, columns, row_stride)
    two64, two32 = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.address),
        box.data_type,
        2,
        ctypes.c_void_p(address),
        two64(columns, rows),
        two64(row_stride * box.element_bytes, 0),
        two32(box.columns, box.rows),
        two32(1, 1),
        0,  # not interleaved
        box.swizzle,
        _L2_PROMOTION_128,
        0,  # zeros outside
    )
    _check(status, f"cuTensorMapEncodeTiled of {rows} x {columns}, stride {row_stride}, {box}")
    return encoded
