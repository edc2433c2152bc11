"""Launches with fixed arguments as one CUDA graph, which costs the host as much as one of them."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable

import torch

from mxep.ops.runtime.nvrtc import CAPTURE_MODE_RELAXED, DriverFunction, relaxed_capture

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_POINTER = ctypes.c_void_p
_create_stream = DriverFunction("cuStreamCreate", _POINTER, ctypes.c_uint)
_begin = DriverFunction("cuStreamBeginCapture_v2", _POINTER, ctypes.c_int)
_end = DriverFunction("cuStreamEndCapture", _POINTER, _POINTER)
_instantiate = DriverFunction("cuGraphInstantiateWithFlags", _POINTER, _POINTER, ctypes.c_ulonglong)
_destroy_graph = DriverFunction("cuGraphDestroy", _POINTER)
_launch = DriverFunction("cuGraphLaunch", _POINTER, _POINTER)
_destroy = DriverFunction("cuGraphExecDestroy", _POINTER)
_capturing = threading.Lock()


@functools.cache
def _stream_of(device: torch.device) -> int:
    """A stream that only captures use."""
    stream = _POINTER()
    _create_stream(device, ctypes.addressof(stream), _NON_BLOCKING)
    assert stream.value is not None
    return stream.value


class LaunchGraph:
    """A CUDA graph of what `launch` puts on the stream that it is given; nothing runs until `run`.

    Args:
        device: the current GPU.
        launch: launches kernels and fills memory; allocates nothing.

    Raises:
        RuntimeError: the driver cannot make the graph, for example for want of memory.

    Attributes:
        alive: number of graphs in this process.
    """

    alive = 0

    def __init__(self, device: torch.device, launch: Callable[[int], None]) -> None:
        graph, ready = _POINTER(), _POINTER()
        with _capturing:
            stream = _stream_of(device)
            _begin(device, stream, CAPTURE_MODE_RELAXED)  # other threads may call CUDA meanwhile
            try:
                launch(stream)
            finally:
                _end(device, stream, ctypes.addressof(graph))
        assert graph.value is not None
        try:
            _instantiate(device, ctypes.addressof(ready), graph.value, 0)
        finally:
            _destroy_graph(device, graph.value)
        assert ready.value is not None
        self._device, self._ready, self._running = device, ready.value, threading.Lock()
        LaunchGraph.alive += 1
        weakref.finalize(self, _end_of_life, device, self._ready).atexit = False

    def run(self, stream: int) -> None:
        """Launch it on a stream."""
        with self._running:  # the driver takes a graph from one thread at a time
            _launch(self._device, self._ready, stream)


def _end_of_life(device: torch.device, ready: int) -> None:
    LaunchGraph.alive -= 1
    with relaxed_capture():  # else it would end a capture of this thread, in which the last reference or the garbage collector lets it go
        _destroy(device, ready)  # the driver waits until it has run
