"""Rows straight into the memory of other ranks, at addresses: what dispatch and combine do over symmetric memory.

A rank's memory is an address of this process and rows that start `pitch` bytes apart.  On a CPU these are addresses of the host; here
two ranks with three rows each, of which token 0 takes one on both and token 1 one on rank 0:

>>> import torch
>>> memory = torch.zeros(2, 3, 1, dtype=torch.int32)
>>> addresses = [rank.data_ptr() for rank in memory]
>>> slots = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
>>> p2p_scatter_rows(torch.tensor([[5], [6]], dtype=torch.int32), slots, None, addresses, 4, "")
>>> memory.flatten(1).tolist()
[[5, 6, 0], [0, 0, 5]]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mxep.ops.quantize.reference import check_scaling_mode, quantize_packed
from mxep.ops.rows.reference import add_chunk_rows, check_chunk_sums, reduce_rows
from mxep.shapes import MX_BLOCK, RECORD_ALIGNMENT, record_bytes

_VALUES = (torch.bfloat16, torch.float32)


def sent_bytes(where: str, rows: torch.Tensor, mode: str) -> int:
    """Bytes of a row as it is sent. Raises ValueError unless rows (N, D) can be sent in that mode, "" or a scaling mode."""
    if rows.dim() != 2:
        raise ValueError(f"{where}: rows are {tuple(rows.shape)}, want (N, D); flatten the leading dimensions")
    if not mode:
        return rows.shape[1] * rows.element_size()
    check_scaling_mode(where, mode)
    if rows.dtype not in _VALUES or rows.shape[1] % MX_BLOCK:
        want = f"(N, D) bfloat16 or float32, D a multiple of {MX_BLOCK} (one MX block)"
        raise ValueError(f"{where}: rows are {tuple(rows.shape)} {rows.dtype}, want {want}; convert or pad them")
    return record_bytes(rows.shape[1])


def check_slots(
    where: str, size: int, rows: torch.Tensor, addresses: Sequence[int], pitch: int, mode: str, **indices: torch.Tensor | None
) -> None:
    """Raise ValueError unless rows of `size` bytes fit in their slots and the indices are matrices of int32 on the rows' device."""
    if pitch < size:
        raise ValueError(f"{where}: pitch={pitch} bytes from row to row, want at least {size}, the bytes of a row; make room for it")
    if mode and any(place % RECORD_ALIGNMENT for place in (pitch, *addresses)):
        want = f"want multiples of {RECORD_ALIGNMENT}, where a record may start; align them"
        raise ValueError(f"{where}: pitch={pitch} with addresses {[hex(address) for address in addresses]}, {want}")
    for name, index in indices.items():
        if index is not None and (index.dim() != 2 or index.dtype != torch.int32 or index.device != rows.device):
            got = f"{tuple(index.shape)} {index.dtype} on {index.device}"
            raise ValueError(f"{where}: {name} are {got}, want a matrix of int32 on {rows.device}; convert them")


def check_p2p_scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor | None, addresses: Sequence[int], pitch: int, mode: str
) -> int:
    """Bytes of a row on its way; raises ValueError for what `p2p_scatter_rows` cannot do."""
    where = "p2p_scatter_rows"
    size = sent_bytes(where, rows, mode)
    check_slots(where, size, rows, addresses, pitch, mode, slots=slots, ranks=ranks)
    if slots.shape[0] != rows.shape[0]:
        raise ValueError(f"{where}: slots {tuple(slots.shape)} for {rows.shape[0]} rows, want one row of slots for each row")
    if ranks is None and slots.shape[1] != len(addresses):
        raise ValueError(f"{where}: {slots.shape[1]} slots of a row for {len(addresses)} addresses, want as many; or pass ranks")
    if ranks is not None and ranks.shape != slots.shape:
        raise ValueError(f"{where}: ranks {tuple(ranks.shape)} with slots {tuple(slots.shape)}, want a rank for every slot")
    return size


def check_p2p_reduce_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    region: int,
    addresses: Sequence[int],
    pitch: int,
    mode: str,
    chunk: torch.Tensor | None,
    partial_sums: torch.Tensor | None,
    carry: torch.Tensor | None,
) -> int:
    """Bytes of a sum on its way; raises ValueError for what `p2p_reduce_rows` cannot do."""
    where = "p2p_reduce_rows"
    size = sent_bytes(where, rows, mode)
    if rows.dtype not in _VALUES:
        raise ValueError(f"{where}: rows are {rows.dtype}, want bfloat16 or float32, which can be summed; convert them")
    check_slots(where, size, rows, addresses, pitch, mode, slots=slots)
    if region < 0 or slots.shape[0] != region * len(addresses):
        want = f"{len(addresses)} addresses with {region} sums each"
        raise ValueError(f"{where}: slots {tuple(slots.shape)} for {want}, want {region * len(addresses)} lines; pass the region's size")
    if chunk is not None and partial_sums is not None:
        check_chunk_sums(where, rows, slots, chunk, partial_sums, carry, called="partial_sums")
    elif chunk is not None or partial_sums is not None or carry is not None:
        given = {"chunk": chunk, "partial_sums": partial_sums, "carry": carry}
        there = " and ".join(name for name, value in given.items() if value is not None)
        missing = " and ".join(name for name in ("chunk", "partial_sums") if given[name] is None)
        raise ValueError(f"{where}: {there} without {missing}, want all that reduce_rows_chunk had, or none for sums of these rows alone")
    return size


def check_on_host(where: str, rows: torch.Tensor, launcher: str) -> None:
    """Raise ValueError unless rows are on the CPU, whose memory a reference reads and writes at addresses."""
    if rows.device.type != "cpu":
        raise ValueError(f"{where}: rows on {rows.device}, want the CPU, whose memory the reference writes; call {launcher}")


def _write(address: int, pitch: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """rows (N, B) uint8 to slots (N,), none of them negative, of memory at `address`; bytes between the rows stay as they are."""
    count, size = rows.shape
    if count and size:
        reach = int(slots.max()) * pitch + size
        memory = torch.frombuffer((ctypes.c_uint8 * reach).from_address(address), dtype=torch.uint8)
        memory.as_strided((int(slots.max()) + 1, size), (pitch, 1))[slots.long()] = rows


def p2p_scatter_rows(
    rows: torch.Tensor, slots: torch.Tensor, ranks: torch.Tensor | None, addresses: Sequence[int], pitch: int, mode: str
) -> None:
    """Each row to its slots on other ranks: to addresses[ranks[t, j]] + slots[t, j] * pitch for every slots[t, j] that is not negative.

    Args:
        rows: (T, D), of any dtype if they are sent as they are.  slots: (T, J) int32, -1 for none; no two rows to one slot.
        ranks: (T, J) int32, whose slot it is, from 0 to W - 1; None: column j's are rank j's, and J is W.
        addresses: of the W ranks' memory, as this process sees it; the caller vouches for them.
        pitch: bytes from slot to slot.  mode: "": the bytes of the row; a scaling mode's name: its packed record, as of `quantize_packed`,
            which wants a pitch and addresses in multiples of 16.

    Raises:
        ValueError: shapes, dtypes, a pitch or a mode that do not fit; a rank that has no address.
    """
    check_p2p_scatter_rows(rows, slots, ranks, addresses, pitch, mode)
    check_on_host("p2p_scatter_rows", rows, "torch.ops.mxep.p2p_scatter_rows")
    if not rows.numel():
        return  # there is nothing to look at as bytes, whatever the strides are
    sent = quantize_packed(rows, mode) if mode else rows.contiguous().view(torch.uint8)
    owner = torch.arange(len(addresses), dtype=torch.int32).expand_as(slots) if ranks is None else ranks
    there = slots >= 0
    if bool((there & ((owner < 0) | (owner >= len(addresses)))).any()):
        raise ValueError(
            f"p2p_scatter_rows: ranks from {int(owner.min())} to {int(owner.max())}, want 0 to {len(addresses) - 1}, one per address"
        )
    for rank, address in enumerate(addresses):
        row, column = (there & (owner == rank)).nonzero(as_tuple=True)
        _write(address, pitch, slots[row, column], sent[row])


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
    """Sums of rows to other ranks: sum r of the region of rank s = r // region to addresses[s] + (r % region) * pitch.

    The sum is that of rows[slots[r, j]] over the slots that are not negative, in float32, j from left to right, rounded once to
    rows' dtype: the bits of `reduce_rows`.  A line without slots is not sent.

    Args:
        rows: (P, D) bf16 or float32.  slots: (W * region, J) int32, every value in [-1, P).
        region: sums of each rank.  addresses, pitch, mode: as in `p2p_scatter_rows`.
        chunk, partial_sums, carry: rows has the rows of the last chunk alone, from expert row chunk[0] on, and these are the chunk, out and
            carry of `reduce_rows_chunk` after the earlier chunks; they stay as they are.  None: rows has all expert rows.

    Raises:
        ValueError: shapes, dtypes, a pitch or a mode that do not fit.
    """
    check_p2p_reduce_rows(rows, slots, region, addresses, pitch, mode, chunk, partial_sums, carry)
    check_on_host("p2p_reduce_rows", rows, "torch.ops.mxep.p2p_reduce_rows")
    if chunk is None or partial_sums is None:
        sums = reduce_rows(rows, slots)
    else:
        sums = partial_sums.clone()
        first, end = chunk.tolist()
        mine = ((slots >= first) & (slots < end)).any(1)
        add_chunk_rows(rows, slots, mine, first, end, sums, None if carry is None else carry.clone())
    sent = quantize_packed(sums, mode) if mode else sums.view(torch.uint8)
    full = (slots >= 0).any(1)
    for rank, address in enumerate(addresses):
        index = full[rank * region : (rank + 1) * region].nonzero().flatten()
        _write(address, pitch, index, sent[rank * region + index])
