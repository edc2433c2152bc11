"""Checkpoints written beside the training: a copy of everything in the CPU's memory first, then a thread that writes it.

The thread's ranks talk in a gloo group of their own, so that its messages never meet those of the training.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mxep.train.checkpoint import save_checkpoint

PATIENCE_S = 120.0


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time; all ranks call `save` and `wait` together.

    A checkpoint that cannot be written is told by `news`, and is an error only when it was the last one: a disk that is full for a while
    costs a checkpoint, not the run.

    Args:
        folder: where checkpoints live.
        keep: newest checkpoints that stay.
        background: return from `save` as soon as everything is copied.
    """

    def __init__(self, folder: Path, keep: int, background: bool) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self._group = dist.new_group(backend="gloo") if background and dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._untold = deque[Exception]()
        self._buffers: dict[str, Tensor] = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """What ends the training does not take the checkpoint along that is being written; not for ever, since other ranks may be gone."""
        if kind is not None and self._thread is not None:
            self._thread.join(PATIENCE_S)

    def save(self, step: int, tensors: dict[str, Tensor], rank_tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save this moment, see `save_checkpoint`; first waits until the checkpoint before is written, or lost."""
        if self._thread is not None:
            self._thread.join()
        self._failure = None
        if not self.background:
            self._write(self.folder, step, tensors, rank_tensors, facts, self.keep)
            return
        staged, own = self._copied(tensors), self._copied(rank_tensors, "rank.")
        arguments = (self.folder, step, staged, own, copy.deepcopy(facts), self.keep, self._group)
        self._thread = threading.Thread(target=self._write, args=arguments, name="mxep-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises the OSError of the last checkpoint where it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def news(self) -> list[Exception]:
        """Why checkpoints were lost that nobody has been told of yet, as far as that is known here."""
        return [self._untold.popleft() for _ in range(len(self._untold))]  # beside a thread that may add one

    def _write(self, *arguments: Any) -> None:
        try:
            save_checkpoint(*arguments)
        except Exception as error:  # a thread of its own has nobody above it: `news` and `wait` tell the one that trains
            self._failure = error
            self._untold.append(error)

    def _copied(self, tensors: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """The same tensors in the CPU's memory, DTensors still knowing their whole; buffers are used again from save to save."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            buffer = self._buffers.get(prefix + name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
                self._buffers[prefix + name] = buffer
            buffer.copy_(local.detach(), non_blocking=local.is_cuda)
            copies[name] = DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the copies must be complete before the next step changes what they copy
        return copies
