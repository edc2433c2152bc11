"""Exchanges in CUDA graphs: what they can hold, and counts of the exchanges that replays have begun and ended.

A replay runs without the host, which neither opens the exchanges nor registers them with the watchdog: the GPU counts, and the host reads.
"""

from __future__ import annotations

import ctypes

import torch

from mxep.ops.runtime.nvrtc import CAPTURE_MODE_RELAXED, DriverFunction

MOST_CAPTURED = 4096  # exchanges in CUDA graphs, of one transport
_exchange_mode = DriverFunction("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)
_copy_to_host = DriverFunction("cuMemcpyDtoHAsync_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)


def allow_queries_during_captures(device: torch.device) -> None:
    """Let this thread query events while another one captures; otherwise a query would end the capture."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    _exchange_mode(device, ctypes.addressof(mode))  # exchanges it with the thread's mode


def captured_error() -> ValueError:
    """The error of an exchange that cannot be captured."""
    return ValueError("exchange: symmetric memory inside a CUDA graph capture, want an eager call; or mxep.set_transport('collective')")


def check_captured(indices: list[list[int]], exchanges: int) -> None:
    """Raise the same ValueError on every rank unless every rank has memory for an exchange in a CUDA graph."""
    short = [rank for rank, of_rank in enumerate(indices) if min(of_rank, default=0) < 0]
    if short:
        raise ValueError(
            f"exchange: no free symmetric memory on ranks {short} inside a CUDA graph capture, want that of an eager call of these sizes; "
            "run what is captured once before, as often as it is captured, and delete its results"
        )
    if exchanges > MOST_CAPTURED:
        raise ValueError(f"exchange: {exchanges} exchanges in CUDA graphs, want at most {MOST_CAPTURED}; set the transport anew")


class Progress:
    """Counts the exchanges that replays on one GPU have begun and ended, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self._read = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)

    def count(self, ended: bool) -> None:
        """In a capture: counts one more that has begun, or ended."""
        self._counts[int(ended)].add_(1)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _copy_to_host(self._device, self._read.data_ptr(), self._counts.data_ptr(), self._counts.nbytes, stream)

    def read(self) -> tuple[int, int]:
        """How many have begun, how many of them ended."""
        begun, ended = self._read.tolist()
        return begun, ended
