"""Dispatch straight into the experts' places: the rows of dispatch and permute, bit for bit, and no permute over symmetric memory.

before  rows sorted by destination rank and inside a rank by expert, (T', D) bf16 or float32
after   the experts' grouped GEMM, MX (P, D) in the experts' order, every group padded with zeros; nothing for backward
over symmetric memory   a chunk of experts after the other is quantised and sent, copy engines behind quantising, as in
        `mxep.ep.chunked`; of every expert's rows each rank's are one piece in their place.  The receiver writes the padding
over torch.distributed  one packed exchange, which delivers by rank, then permute's pass
who     `mxep bench a2a` alone so far: the rows of `ep_grouped_mm` go by the same loop and land by rank, where its GEMM's rebasing pass, and
        wgrad's transposing one, gather them through the row map
host    reads the counts of all ranks over symmetric memory: a host sync where they are on a GPU, none where they are on the host
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxep.comm import transport_of
from mxep.comm.symmetric import SymmetricTransport
from mxep.ep.checks import check_rows
from mxep.ep.chunked import as_mx_rows, check_shown, send_chunks, told
from mxep.ep.dispatch import exchange_mx
from mxep.ep.permute import gather, index_rows
from mxep.ep.plan import ExchangePlan
from mxep.ep.runs import Runs, chunks_of, counts_of
from mxep.mx.tensor import MXTensor
from mxep.recipe import Recipe
from mxep.shapes import record_bytes

_WHERE = "dispatch_placed"
_PLACED = 13  # what a session does, the first fact on the board


def _send(rows: Tensor, plan: ExchangePlan, recipe: Recipe, num_places: int, transport: SymmetricTransport) -> MXTensor:
    """Over symmetric memory -> MX (P, D), P = num_places."""
    transport.check_device(rows)
    (_, D), W, alignment = rows.shape, transport.world, recipe.group_size_multiple_of
    shown = told(rows, plan.input_splits, plan.output_splits, plan.num_tokens_per_expert_received, W)
    facts = (_PLACED, D, plan.num_local_experts, rows.element_size(), alignment)
    with transport.open(facts, (num_places * record_bytes(D),), shown) as session:
        check_shown(_WHERE, session.shown, W)
        counts = counts_of([table[1 + 2 * W :] for table in session.shown])
        runs, chunks = Runs(counts, transport.rank, alignment), chunks_of(counts, record_bytes(D))
        records, placed = as_mx_rows(session.buffers[0], num_places, D, rows.dtype)
        send_chunks(session, chunks, runs.place, rows, recipe.scaling_mode.value, records)
        for start, end in runs.padding(num_places):
            records[start:end].zero_()  # a record of zeros stands for zeros
        session.arrive(len(chunks))
    return placed


@torch.no_grad()
def dispatch_placed(rows: Tensor, plan: ExchangePlan, recipe: Recipe) -> tuple[MXTensor, Tensor]:
    """Quantised rows in their experts' padded places, on the ranks that hold these.

    Args:
        rows: (T', D) bf16 or float32, sorted by expert, D a multiple of 32.
        plan: who sends how many rows where; over symmetric memory its counts are better on the host.

    Returns:
        MX (P, D) with P = round_up(R + L * multiple, multiple), zeros in padding and behind the last group; over symmetric
        memory its data and scales are views into the records where they landed.  END offsets (L,) int32 of the groups.

    Raises:
        ValueError: dtype or width that do not fit; splits and counts that differ between ranks, over symmetric memory on every rank.
    """
    check_rows(_WHERE, rows, quantised=True)
    received = sum(plan.output_splits)
    counts = plan.num_tokens_per_expert_received.to(rows.device, non_blocking=True)
    row_map, _, offs = index_rows(_WHERE, counts, received, plan.ep_degree, plan.num_local_experts, recipe.group_size_multiple_of)
    transport = transport_of(plan.group_name, rows.device) if plan.group_name else None
    if isinstance(transport, SymmetricTransport):
        return _send(rows, plan, recipe, row_map.shape[0], transport), offs
    arrived = exchange_mx(rows, plan.output_splits, plan.input_splits, plan.group_name, recipe.scaling_mode.value)
    placed = gather(arrived, row_map)
    assert isinstance(placed, MXTensor)
    return placed, offs
