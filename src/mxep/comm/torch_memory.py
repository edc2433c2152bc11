"""Where slabs come from on GPUs: torch's symmetric memory of one process group."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mxep.comm.board import Board
from mxep.comm.collective import resolve_group
from mxep.comm.pool import Slab, slab_bytes

FLAG_BYTES = 4


class TorchMemory:
    """torch's symmetric memory of one process group on one GPU. NVLink multicast stays off."""

    def __init__(self, group_name: str, device: torch.device, board: Board) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._group_name, self._device, self._board = group_name, device, board

    def allocate(self, size: int) -> Slab:
        """A new slab of `size` bytes on every rank.

        Raises:
            torch.OutOfMemoryError: a rank has not that much left, on every rank.
        """
        import torch.distributed._symmetric_memory as symmetric

        if torch.cuda.mem_get_info(self._device)[0] < size:
            torch.cuda.empty_cache()  # what torch's own allocator keeps for later is no use to this one
        memory = None
        try:
            # Not symmetric.empty: it may take a part of a pool's segment, and the pointers are those of the segments.
            memory = symmetric._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, self._device)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
        free = torch.cuda.mem_get_info(self._device)[0]
        short = {rank: left for rank, (there, left) in enumerate(self._board.show([memory is not None, free])) if not there}
        if memory is None or short:
            memory = None  # before the error is raised: its traceback keeps this frame, while others may try again
            left = ", ".join(f"rank {rank} has {free} left" for rank, free in short.items())
            raise torch.OutOfMemoryError(
                f"exchange: no room for {size} bytes of symmetric memory: {left}; want smaller batches, or the transport 'collective'"
            )
        handle = symmetric.rendezvous(memory, resolve_group("symmetric memory", self._group_name))
        addresses = list(handle.buffer_ptrs)
        assert addresses[handle.rank] == memory.data_ptr(), "a slab starts where its allocation does"
        return Slab(memory, addresses, handle)

    def release(self, slabs: Sequence[Slab]) -> None:
        """Let go of slabs, on every rank."""
        torch.cuda.synchronize(self._device)  # host sync: what was queued before may read there, or write there on another rank
        self._board.show([])
        for slab in slabs:
            slab.let_go()
        self._board.show([])  # a GPU has its memory back when its peers have let go of it too

    def flags(self, count: int) -> Slab:
        """`count` words of 32 bits, zero on every rank."""
        slab = self.allocate(slab_bytes(count * FLAG_BYTES))
        slab.memory.zero_()
        torch.cuda.synchronize(self._device)  # host sync, once: the words are zero before a peer may write one
        self._board.show([])
        return slab
