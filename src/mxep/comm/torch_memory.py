"""Where slabs come from on GPUs: torch's symmetric memory of one process group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace

import torch

from mxep.comm.board import Board
from mxep.comm.collective import resolve_group
from mxep.comm.pool import Slab, slab_bytes

FLAG_BYTES = 4
# Ranks find each other's handles under a number that torch counts per process, not per group (source: StoreExchange in torch's
# CUDASymmetricMemoryUtils.hpp).  Processes that have set up memory in other groups a different number of times wait for each other in vain.
_set_up = SimpleNamespace(count=0)


class TorchMemory:
    """torch's symmetric memory of one process group on one GPU. NVLink multicast stays off."""

    def __init__(self, group_name: str, device: torch.device, board: Board) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._group_name, self._device, self._board = group_name, device, board

    def allocate(self, size: int) -> Slab:
        """A new slab of `size` bytes on every rank.

        Raises:
            torch.OutOfMemoryError: a rank has not that much left, on every rank.
            RuntimeError: the ranks have set up memory in other groups, and not as often, on every rank.
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
        shown = self._board.show([memory is not None, free, _set_up.count])
        short = {rank: left for rank, (there, left, _) in enumerate(shown) if not there}
        if memory is None or short:
            memory = None  # before the error is raised: its traceback keeps this frame, while others may try again
            left = ", ".join(f"rank {rank} has {free} left" for rank, free in short.items())
            raise torch.OutOfMemoryError(
                f"exchange: no room for {size} bytes of symmetric memory: {left}; want smaller batches, or the transport 'collective'"
            )
        counts = [count for _, _, count in shown]
        if len(set(counts)) > 1:
            memory = None  # as above
            raise RuntimeError(
                f"exchange: the ranks' processes have set up symmetric memory {counts} times, want as often on all, or torch waits "
                "in vain; where groups of different ranks share processes, take the transport 'collective' for all but one of them"
            )
        _set_up.count += 1
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
