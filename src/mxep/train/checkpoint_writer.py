"""Writes checkpoints in the background: one copy of the rank's shard in host memory, and a thread that writes it.

The writer threads communicate in a gloo group of their own, so their messages never mix with those of the training."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.comm.collective import gather_objects
from mxep.ops.runtime.nvrtc import relaxed_capture
from mxep.train.checkpoint import save_checkpoint
from mxep.train.durable_files import NotWrittenError
from mxep.train.run_lock import RunLock

PATIENCE_S = 120.0
_ALIGNMENT = 64  # bytes


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time; all ranks call `save` and `wait` together.

    `lost` returns the errors of checkpoints that could not be written. Only the error of the last one is raised, by `wait`: a disk that is
    full for a while costs a checkpoint, not the run.

    Args:
        folder: of all checkpoints.
        keep: number of newest checkpoints to keep.
        background: return from `save` as soon as everything is copied.
        timeout: how long a rank may be silent during a save before the others give that checkpoint up.
        lock: of the run's folder, on rank 0.
    """

    def __init__(self, folder: Path, keep: int, background: bool, timeout: timedelta, lock: RunLock | None = None) -> None:
        self.folder, self.keep, self.background, self.timeout, self.lock = folder, keep, background, timeout, lock
        self._group = dist.new_group(backend="gloo", timeout=timeout) if background and dist.is_initialized() else None
        self._staging: HostStaging | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lost = deque[Exception]()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After an error, let the current save finish; not for ever, since other ranks may be gone."""
        if kind is not None and self._thread is not None:
            self._thread.join(PATIENCE_S)

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Allocate and pin the host memory for tensors of these shapes; otherwise the first `save` does."""
        if self.background and self._staging is None:
            self._staging = HostStaging(tensors)

    def save(self, step: int, tensors: dict[str, Tensor], rank_tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save the current state, see `save_checkpoint`; first waits for the previous save.

        Raises:
            NotWrittenError: the previous save is still running after twice the timeout.
        """
        self._join()
        self._renew_group()
        self._failure = None
        if not self.background:
            self._write(step, tensors, rank_tensors, facts)
            return
        self.prepare(tensors)
        assert self._staging is not None
        own = {name: tensor.clone() for name, tensor in rank_tensors.items()}
        arguments = step, self._staging.copy(tensors), own, copy.deepcopy(facts)
        self._thread = threading.Thread(target=self._write, args=arguments, name="mxep-checkpoint", daemon=True)
        self._thread.start()

    def _renew_group(self) -> None:
        """After a save that failed: gloo closes a group's connections for good when a rank is silent for too long. All ranks are here."""
        if self._group is not None and any(gather_objects(self._failure is not None)):
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)

    def wait(self) -> None:
        """Wait for the last save.

        Raises:
            NotWrittenError: the last checkpoint could not be written, or its save is still running after twice the timeout.
        """
        self._join()
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        """Wait for the thread. A silent rank and a hanging file system can delay it by one timeout each."""
        if self._thread is None:
            return
        limit_s = 2 * self.timeout.total_seconds()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise NotWrittenError(f"checkpoint: nothing was written in {self.folder} for {limit_s:.0f} s; its file system or a rank hangs")
        self._thread = None

    def lost(self) -> list[Exception]:
        """Errors of checkpoints that this rank could not write since the last call."""
        return [self._lost.popleft() for _ in range(len(self._lost))]  # the thread may append meanwhile

    def _write(self, step: int, tensors: dict[str, Tensor], rank_tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        try:
            save_checkpoint(self.folder, step, tensors, rank_tensors, facts, self.keep, self._group, self.lock)
        except Exception as error:  # may be in a thread: `lost` and `wait` hand it to the caller
            self._failure = error
            self._lost.append(error)


class HostStaging:
    """Host memory for one copy of a rank's tensors, pinned if they are on a GPU, reused for every copy.

    Args:
        tensors: their shapes, dtypes and devices; of DTensors those of the local shard.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        local = {name: _local(tensor) for name, tensor in tensors.items()}
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in local.values()]
        # One block: torch's pinned allocations take a power of two bytes each, up to twice the shard.
        block = torch.empty(sum(sizes), dtype=torch.uint8).fill_(0)  # written once, so that the first copy has no page faults
        if sum(sizes) and any(tensor.is_cuda for tensor in local.values()):
            _pin(block)
            weakref.finalize(self, _unpin, block).atexit = False
        parts = zip(local.items(), block.split(sizes), strict=True)
        self._copies = {name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for (name, tensor), part in parts}

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in host memory, DTensors with their placements; valid until the next call. Waits for the copies from the GPU."""
        local = [_local(tensor).detach() for tensor in tensors.values()]
        if local:
            torch._foreach_copy_([self._copies[name] for name in tensors], local, non_blocking=True)
        if any(tensor.is_cuda for tensor in local):
            torch.cuda.synchronize()  # the next step changes what is copied
        return {
            name: DTensor(self._copies[name], tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else self._copies[name]
            for name, tensor in tensors.items()
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _pin(block: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)))


def _unpin(block: Tensor) -> None:
    with relaxed_capture():  # a step may be recorded as a CUDA graph when the last reference goes
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr())))
