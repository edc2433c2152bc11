"""How one rank's shard of a checkpoint gets to its file: staged once in the host's memory, then written without holding Python's lock.

torch.distributed.checkpoint decides which rank writes what, and reads the files back on any number of ranks.
"""

from __future__ import annotations

import json
import weakref

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name, _HFStorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

_ALIGNMENT = 64  # bytes


class ShardWriter(HuggingFaceStorageWriter):
    """Storage writer of torch.distributed.checkpoint: one safetensors file a rank, straight from the tensors' memory.

    torch's own writer makes one `bytes` object of the whole shard first: two more copies in memory, and no other Python thread runs
    meanwhile.

    Args:
        path: folder of the files.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors that the plan gives to this rank. Tensors on a GPU are copied to the host first."""
        results, tensors, offsets = [], dict[str, Tensor](), dict[str, dict[str, list[int]]]()
        name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        for item in plan.items:
            tensor, key = planner.resolve_data(item), item.index.fqn
            assert isinstance(tensor, Tensor)
            assert item.tensor_data is not None
            assert key not in tensors, f"{key} has two pieces on one rank"
            tensors[key] = tensor.detach().cpu().contiguous()
            offsets[key] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensor.nbytes, _HFStorageInfo(name, tensor.shape, tensor.dtype)))
        if tensors:
            save_file(tensors, self.fs.concat_path(self.path, name), metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


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
