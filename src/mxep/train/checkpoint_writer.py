"""Checkpoints written in the background: one copy of the rank's shard in host memory, and a thread that writes it.

The threads of all ranks communicate in a gloo group of their own, so that their messages never mix with those of the training."""

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

from mxep.train.checkpoint import save_checkpoint
from mxep.train.durable_files import NotWrittenError
from mxep.train.run_lock import RunLock

PATIENCE_S = 120.0
_ALIGNMENT = 64  # bytes


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time; all ranks call `save` and `wait` together.

    A checkpoint that cannot be written is told by `news`, and is an error only when it was the last one: a disk that is full for a while
    costs a checkpoint, not the run.

    Args:
        folder: where checkpoints live.
        keep: newest checkpoints that stay.
        background: return from `save` as soon as everything is copied.
        timeout: how long a rank may be silent while a checkpoint is written before the others give the checkpoint up.
        lock: of the run's folder, on rank 0.
    """

    def __init__(self, folder: Path, keep: int, background: bool, timeout: timedelta, lock: RunLock | None = None) -> None:
        self.folder, self.keep, self.background, self.timeout, self.lock = folder, keep, background, timeout, lock
        self._group = dist.new_group(backend="gloo", timeout=timeout) if background and dist.is_initialized() else None
        self._staging: HostStaging | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._untold = deque[Exception]()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """What ends the training does not take the checkpoint along that is being written; not for ever, since other ranks may be gone."""
        if kind is not None and self._thread is not None:
            self._thread.join(PATIENCE_S)

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Take the memory that `save` copies into, for tensors of these shapes; else the first `save` does, and pins it."""
        if self.background and (self._staging is None or not self._staging.fits(tensors)):
            self._staging = HostStaging(tensors)

    def save(self, step: int, tensors: dict[str, Tensor], rank_tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save this moment, see `save_checkpoint`; first waits until the checkpoint before is written, or lost.

        Raises:
            NotWrittenError: the checkpoint before is still being written after twice the timeout.
        """
        self._join()
        self._failure = None
        if not self.background:
            self._write(self.folder, step, tensors, rank_tensors, facts, self.keep, None, self.lock)
            return
        self.prepare(tensors)
        assert self._staging is not None
        own = {name: tensor.clone() for name, tensor in rank_tensors.items()}
        arguments = (self.folder, step, self._staging.copy(tensors), own, copy.deepcopy(facts), self.keep, self._group, self.lock)
        self._thread = threading.Thread(target=self._write, args=arguments, name="mxep-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            NotWrittenError: the last checkpoint could not be written, or is still being written after twice the timeout.
        """
        self._join()
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        """Wait for the thread, which every rank's silence and its own file system can hold up for one timeout each."""
        if self._thread is None:
            return
        limit_s = 2 * self.timeout.total_seconds()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise NotWrittenError(f"checkpoint: nothing was written in {self.folder} for {limit_s:.0f} s; its file system or a rank hangs")
        self._thread = None

    def news(self) -> list[Exception]:
        """Why checkpoints were lost that nobody has been told of yet, as far as that is known here."""
        return [self._untold.popleft() for _ in range(len(self._untold))]  # beside a thread that may add one

    def _write(self, *arguments: Any) -> None:
        try:
            save_checkpoint(*arguments)
        except Exception as error:  # a thread of its own has nobody above it: `news` and `wait` tell the one that trains
            self._failure = error
            self._untold.append(error)


class HostStaging:
    """Room in the host's memory for one copy of a rank's tensors, pinned where they are on a GPU, used again from copy to copy.

    Args:
        tensors: their shapes, dtypes and devices decide the room; DTensors take that of their local shard.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        local = {name: _local(tensor) for name, tensor in tensors.items()}
        self._layout = _layout(local)
        starts, end = dict[str, int](), 0
        for name, tensor in local.items():
            starts[name] = end
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # One block: torch's pinned allocations take a power of two bytes each, up to twice the shard.
        block = torch.empty(end, dtype=torch.uint8).fill_(0)  # written to once, so that the first copy meets no page fault
        if end and any(tensor.is_cuda for tensor in local.values()):
            _pin(block)
            weakref.finalize(self, _unpin, block).atexit = False
        self._copies = {
            name: block[starts[name] : starts[name] + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for name, tensor in local.items()
        }

    def fits(self, tensors: dict[str, Tensor]) -> bool:
        """True if these tensors have the names, shapes, dtypes and devices of those that the room was made for."""
        return _layout({name: _local(tensor) for name, tensor in tensors.items()}) == self._layout

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors in the host's memory, DTensors with their placement; valid until the next call. Waits for the GPU's copies."""
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


def _layout(local: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    return {name: (tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in local.items()}


def _pin(block: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)))


def _unpin(block: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(block.data_ptr())))
