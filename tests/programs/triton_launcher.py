"""Launches by the installed Triton's own C function, through Triton's runner and through `mxep.ops.runtime.launch`: one line of JSON.

    LD_LIBRARY_PATH=FOLDER TRITON_LIBCUDA_PATH=FOLDER python triton_launcher.py

FOLDER has `fake_driver.c` as libcuda.so.1.  Each launch is [grid and threads, stream, the arguments' low halves].
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaDriver

from mxep.ops.runtime import launch

STREAM = 77


@triton.jit
def kernel(x, n, y, m, SIZE: tl.constexpr, z):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < n, other=0.0)
    if z is not None:
        value += tl.load(z + at, mask=at < m, other=0.0)
    tl.store(y + at, value * m, mask=at < n)


def pretend() -> None:
    """A Hopper GPU, for torch and Triton."""
    torch._C._cuda_getCurrentRawStream = lambda index: STREAM  # type: ignore[assignment]
    CudaDriver.get_device_capability = lambda self, index=0: (9, 0)
    driver = CudaDriver()
    driver.get_current_stream = lambda index: STREAM
    driver.get_current_device = lambda: 0
    driver.get_device_capability = lambda index=0: (9, 0)
    triton.runtime.driver.set_active(driver)
    launch.current_gpu = lambda: -1  # tensors of the host are there


def main() -> None:
    pretend()
    driver: Any = ctypes.CDLL("libcuda.so.1")
    driver.fake_value.restype = driver.fake_stream.restype = ctypes.c_uint64
    x, y, more = (torch.zeros(64) for _ in range(3))
    found = []
    for z in (None, more):
        given = {"x": x, "n": 32, "y": y, "m": 7, "SIZE": 64, "z": z}
        arguments = [value for name, value in given.items() if name != "SIZE" and value is not None]
        wanted = [value.data_ptr() % 2**32 if isinstance(value, torch.Tensor) else value for value in arguments]
        driver.fake_expect(len(arguments))
        for _ in range(2):  # the first one by Triton's runner
            launch.launch(kernel, (5, 3), given, num_warps=8)
            shape = [driver.fake_shape(i) for i in range(4)]
            found.append([shape, driver.fake_stream(), [driver.fake_value(i) for i in range(len(arguments))] == wanted])
    direct = [variant.function is not None for variant in launch._variants.values()]
    print(json.dumps({"triton": triton.__version__, "launches": driver.fake_launches(), "found": found, "direct": direct}))


if __name__ == "__main__":
    main()
