"""Rows, and sums of rows, straight into the memory of other ranks on the GPU: CUDA C++, one launch, every row read and quantised once.

Addresses are those of peers' memory as this GPU sees it (symmetric memory), or of its own.  Byte for byte like the references.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from mxep.device import chip_of
from mxep.ops.peer_write.reference import check_p2p_reduce_rows, check_p2p_scatter_rows
from mxep.ops.runtime import tiles
from mxep.ops.runtime.nvrtc import Arguments, Kernel
from mxep.recipe import SCALING_MODES

FILES = ("runtime/hopper.cuh", "runtime/mx_bytes.cuh", "peer_write/chunks.cuh", "peer_write/p2p.cu")
MOST_RANKS = 32  # addresses that a launch takes
_WIDEST = 16  # bytes of a load or store
_RECORD_CHUNK = 16  # values of a record that a lane takes at a time
_WARP, _LEAST_RECORD_LANES = 32, 8


def chunk_options(sums: bool, mode: str, item_bytes: int, word_bytes: int, row_chunks: int) -> dict[str, bool | int]:
    """The constants of chunks.cuh for rows of so many row_chunks: words of a plain row, 16 values each of a record."""
    lanes = min(1 << max(row_chunks - 1, 0).bit_length(), _WARP)
    if mode:
        lanes = max(lanes, _LEAST_RECORD_LANES)
    parts = tiles.P2P_PARTS[sums, bool(mode), item_bytes == 4] if row_chunks > _WARP else 1
    shape = {"ITEM": item_bytes, "WORD": word_bytes, "LANES": lanes, "PARTS": parts, "THREADS": tiles.P2P_THREADS}
    return {**shape, "QUANTISED": bool(mode), "SCALING": SCALING_MODES.index(mode) if mode else 0}


def options_of(sums: bool, mode: str, item_bytes: int, word_bytes: int, row_chunks: int, chunk: bool = False) -> dict[str, bool | int]:
    """The constants in front of p2p.cu, which has some more."""
    return {**chunk_options(sums, mode, item_bytes, word_bytes, row_chunks), "SUMS": sums, "CHUNK": chunk}


def most_chunks_of(row_chunks: int) -> int:
    """The chunks of a row that a variant is compiled for: `row_chunks` up to a power of two, or two warps' lanes for all longer rows."""
    return min(1 << max(row_chunks - 1, 0).bit_length(), 2 * _WARP)


@functools.cache
def _kernel(device: int, sums: bool, mode: str, item_bytes: int, word_bytes: int, most_chunks: int, chunk: bool) -> Kernel:
    """One variant; `most_chunks`: of `most_chunks_of`."""
    options = options_of(sums, mode, item_bytes, word_bytes, most_chunks, chunk)
    return Kernel("p2p", FILES, options, options["THREADS"], chip=chip_of(device))


def _word_bytes(*multiples: int) -> int:
    """The widest load or store for addresses and sizes that are multiples of these."""
    common = _WIDEST
    for multiple in multiples:
        common |= multiple
    return common & -common


def _launch(
    where: str,
    rows: torch.Tensor,
    slots: torch.Tensor,
    ranks: torch.Tensor | None,
    region: int | None,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    earlier: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> None:
    """`region`: of sums, None for rows.  `earlier`: chunk, partial_sums and carry of sums."""
    if len(addresses) > MOST_RANKS:
        raise ValueError(f"{where}: {len(addresses)} addresses, want at most {MOST_RANKS}; take a smaller group, or another transport")
    sums, device, item = region is not None, rows.device.index, rows.element_size()
    values = rows if rows.stride(1) == 1 else rows.contiguous()
    size = values.shape[1] * item
    partial_sums = [part.data_ptr() for part in earlier[1:] if part is not None]
    if mode and _word_bytes(*partial_sums) < _WIDEST:
        raise ValueError(f"{where}: partial_sums or carry start off {_WIDEST} bytes, want multiples of it, as the allocator's; clone them")
    word = _word_bytes(size, values.stride(0) * item, values.data_ptr(), *partial_sums, *([] if mode else [pitch, *addresses]))
    if mode and word < _WIDEST:
        values, word = values.clone(memory_format=torch.contiguous_format), _WIDEST
    elif sums and word < item:
        raise ValueError(f"{where}: pitch={pitch} or an address is no multiple of {item}, the bytes of a value; align them")

    row_chunks = values.shape[1] // _RECORD_CHUNK if mode else size // word
    kernel = _kernel(device, sums, mode, item if mode or sums else 1, word, most_chunks_of(row_chunks), bool(partial_sums))
    lanes, parts = kernel.options["LANES"], kernel.options["PARTS"]
    pieces = -(-row_chunks // (lanes * parts))
    blocks = -(-slots.shape[0] * pieces * lanes // kernel.threads)
    memory = (ctypes.c_uint64 * MOST_RANKS)(*addresses)
    of_ranks = None if ranks is None else ranks.contiguous()
    index = (slots.contiguous(), of_ranks, slots.shape[1], slots.shape[0], pieces, values.shape[0], region or 0, *earlier)
    arguments = Arguments(values, values.stride(0) * item, size, *index, memory, len(addresses), pitch)
    kernel.run(device, blocks, arguments)


def p2p_scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor | None, addresses: Sequence[int], pitch: int, mode: str
) -> None:
    """Each row to its slots on other ranks: to addresses[ranks[t, j]] + slots[t, j] * pitch.

    Args:
        rows: (T, D), of any dtype if they are sent as they are.  slots: (T, J) int32, -1 for none.
        ranks: (T, J) int32, or None: column j's are rank j's; to a rank that has no address nothing is sent here, the reference raises.
        addresses: of at most 32 ranks.  pitch: bytes.  mode: "" or a scaling mode's name; records want multiples of 16 for the last three.
    """
    size = check_p2p_scatter_rows(rows, slots, ranks, addresses, pitch, mode)

    if slots.numel() and size:
        _launch("p2p_scatter_rows", rows, slots, ranks, None, addresses, pitch, mode)


def p2p_reduce_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    region: int,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    chunk: torch.Tensor | None = None,
    partial_sums: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
) -> None:
    """Sums of rows to other ranks: sum r to addresses[r // region] + (r % region) * pitch.

    Args:
        rows: (P, D) bf16 or float32.  slots: (W * region, J) int32, every value in [-1, P); one past that adds nothing here and
            raises in the reference.  region: sums of each rank.  addresses, pitch, mode: as in `p2p_scatter_rows`.
        chunk, partial_sums, carry: rows has the rows of the last chunk alone, from expert row chunk[0] on, and these are the chunk, out and
            carry of `reduce_rows_chunk` after the earlier chunks.  None: rows has all expert rows.
    """
    size = check_p2p_reduce_rows(rows, slots, region, addresses, pitch, mode, chunk, partial_sums, carry)

    if slots.numel() and size:
        _launch("p2p_reduce_rows", rows, slots, None, region, addresses, pitch, mode, (chunk, partial_sums, carry))
