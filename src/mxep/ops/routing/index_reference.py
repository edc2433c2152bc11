"""Index arithmetic of the fused layer: a token's choices in order, top-k ids before an exchange over symmetric memory, and expert rows
before a chunk.

mxep/fused/symmetric_dispatcher.py describes regions and tables, mxep/fused/expert_chunks.py the chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

INVALID_TOPK = "fused_experts: a token has an expert below 0 or from num_experts on, or the same one twice; MXEP_CHECK=1 says which"
_SCORES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = ("rank_dedup", "all_to_all", "all_ranks")  # of a row exchange (mxep/fused/dispatcher.py), in the order of `count_rows`'s columns


def sort_topk(
    experts: torch.Tensor, scores: torch.Tensor, num_experts: int, minus_one: bool, duplicates: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token's choices in rising order of their experts, in which they are summed; an expert that is chosen twice keeps its order.

    Args:
        experts: (T, C) int64, as `topk_valid` wants them.  scores: (T, C) of 16, 32 or 64 bits.
        num_experts, minus_one, duplicates: arguments of `topk_valid`.

    Returns:
        experts (T, C) int64; scores (T, C) float32; the column in which each choice was (T, C) int16.

    Raises:
        ValueError: arguments that do not fit.
        RuntimeError: choices that are not valid; on a GPU by a later call.

    >>> experts, scores, columns = sort_topk(torch.tensor([[3, 0]]), torch.tensor([[0.75, 0.25]]), 4, False, False)
    >>> experts.tolist(), scores.tolist(), columns.tolist()
    ([[0, 3]], [[0.25, 0.75]], [[1, 0]])
    """
    check_sort_topk(experts, scores)
    torch._assert_async(topk_valid(experts, num_experts, minus_one, duplicates), INVALID_TOPK)
    ordered, columns = experts.contiguous().sort(dim=1, stable=True)
    return ordered, scores.float().gather(1, columns), columns.to(torch.int16)


def topk_valid(experts: torch.Tensor, num_experts: int, minus_one: bool, duplicates: bool) -> torch.Tensor:
    """() bool: choices (T, C) are all from 0 to E - 1, or -1 for none if `minus_one`, and distinct in each row unless `duplicates`.

    >>> [bool(topk_valid(torch.tensor([[3, 3]]), 4, False, duplicates)) for duplicates in (False, True)]
    [False, True]
    """
    in_range = ((experts >= -minus_one) & (experts < num_experts)).all()
    return in_range if duplicates else in_range & ~has_duplicates(experts)


def has_duplicates(experts: torch.Tensor) -> torch.Tensor:
    """() bool: an expert, not -1, is more than once in a row of experts (T, C)."""
    ordered = experts.sort(1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()


def check_sort_topk(experts: torch.Tensor, scores: torch.Tensor) -> None:
    """Raise ValueError unless `sort_topk` accepts the arguments."""
    fits = experts.dim() == 2 and experts.dtype == torch.int64 and scores.shape == experts.shape and scores.dtype in _SCORES
    if not fits or experts.shape[1] > torch.iinfo(torch.int16).max:
        got = f"experts {tuple(experts.shape)} {experts.dtype} and scores {tuple(scores.shape)} {scores.dtype}"
        raise ValueError(f"sort_topk: {got}, want (T, C) int64 and float of at least 16 bits, C below 2^15")


def pack_topk(experts: torch.Tensor, scores: torch.Tensor, most: int) -> torch.Tensor:
    """This rank's table of top-k ids and scores, which every rank receives.

    Args:
        experts: (T, C) int64, from 0 on, or -1 for none.  scores: (T, C) float32.  most: S, at least T.

    Returns:
        (S, 2C) int32, experts and the bits of their scores, -1 after the last token.

    >>> pack_topk(torch.tensor([[1, 2]]), torch.zeros(1, 2), 3).tolist()
    [[1, 2, 0, 0], [-1, -1, -1, -1], [-1, -1, -1, -1]]
    """
    check_pack_topk(experts, scores, most)
    table = torch.cat((experts.contiguous().int(), scores.contiguous().view(torch.int32)), 1)
    return F.pad(table, (0, 0, 0, most - table.shape[0]), value=-1)


def check_pack_topk(experts: torch.Tensor, scores: torch.Tensor, most: int) -> None:
    """Raise ValueError unless `pack_topk` accepts the arguments."""
    if experts.dim() != 2 or experts.dtype != torch.int64 or scores.shape != experts.shape or scores.dtype != torch.float32:
        got = f"experts {tuple(experts.shape)} {experts.dtype} and scores {tuple(scores.shape)} {scores.dtype}"
        raise ValueError(f"pack_topk: {got}, want (T, C) int64 and float32")
    if most < experts.shape[0]:
        raise ValueError(f"pack_topk: {experts.shape[0]} tokens, room for {most}, want room for all")


def send_index(
    experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The receive slots of this rank's rows on other ranks, and their rows on return.

    Args:
        experts: (T, C) int64, from 0 to W * L - 1.  mode: of `MODES`.  num_local_experts: L.  world: W.  most: S, at least T.

    Returns:
        slots, return_slots: (T, W) or, in all_to_all, (T, C) int32, as in `SymmetricSendIndex`; ranks: (T, C) int32 in all_to_all, else
        (0, C).
    """
    check_send_index(experts, mode, num_local_experts, world, most)
    (T, C), device = experts.shape, experts.device
    tokens = torch.arange(T, device=device, dtype=torch.int32)[:, None]
    ranks = torch.div(experts.contiguous(), num_local_experts, rounding_mode="floor").int()
    if mode == "all_to_all":
        kept = min(C, num_local_experts)
        before = torch.ones(C, C, dtype=torch.bool, device=device).tril(-1)
        number = ((ranks[:, :, None] == ranks[:, None, :]) & before).sum(-1)  # of an id among those of its token on its rank
        slots = (tokens * kept + number).int()
        return slots, ranks * (most * kept) + slots, ranks
    chosen = torch.zeros(T, world, dtype=torch.bool, device=device).scatter_(1, ranks.long(), True)
    regions = torch.arange(world, device=device, dtype=torch.int32) * most
    slots = tokens.expand(T, world).contiguous() if mode == "all_ranks" else torch.where(chosen, tokens, -1)
    return slots, torch.where(chosen, regions + tokens, -1), ranks[:0]


def check_send_index(experts: torch.Tensor, mode: str, num_local_experts: int, world: int, most: int) -> None:
    """Raise ValueError unless `send_index` accepts the arguments."""
    if experts.dim() != 2 or experts.dtype != torch.int64 or mode not in MODES:
        raise ValueError(f"send_index: experts {tuple(experts.shape)} {experts.dtype} in mode {mode!r}, want (T, C) int64, {MODES}")
    if num_local_experts < 1 or world < 1 or most < experts.shape[0] or world * most * experts.shape[1] >= 2**31:
        got = f"{experts.shape[0]} tokens, room for {most}, {num_local_experts} experts on each of {world} ranks"
        raise ValueError(f"send_index: {got}; want room, experts and ranks, and fewer than 2^31 ids")


def chunk_bounds(ends: torch.Tensor, capacity: int, count: int) -> torch.Tensor:
    """Bounds of the chunks of expert rows: from the last expert on, each chunk takes earlier experts while they fit.

    Args:
        ends: (L,) int32 END rows of the experts, none of which has more than `capacity`.  count: of chunks, the most that can be needed.

    Returns:
        (count + 1,) int32: chunk c has the rows from [c] to [c + 1].

    >>> chunk_bounds(torch.tensor([4, 12, 16, 20, 32], dtype=torch.int32), 12, 5).tolist()
    [0, 0, 0, 12, 20, 32]
    """
    starts = torch.cat((ends.new_zeros(1), ends))  # (L + 1,), where expert e begins
    leading = torch.searchsorted(starts, starts - capacity)  # the first expert of a chunk that ends before e
    expert = torch.full((1,), ends.shape[0], device=ends.device)
    firsts = [expert]
    for _ in range(count):
        expert = leading.take(expert)
        firsts.append(expert)
    return starts.take(torch.cat(firsts[::-1]))


def chunk_rows(
    offs: torch.Tensor, scores: torch.Tensor, token_map: torch.Tensor, grad_map: torch.Tensor | None, chunk: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, scores and maps of one chunk, counted from its start.

    Args:
        offs: (L,) int32 END rows.  scores: (P,) float32.  token_map: (P,) int32.  grad_map: the same, or None where it is token_map.
        chunk: (2,) int32, the chunk's first row and its end.  capacity: the most rows of a chunk.

    Returns:
        (L,) int32 END rows; scores (capacity,), 0 after the chunk's end; the maps (capacity,) int32, -1 there; (0,) for no grad_map.
    """
    here = torch.arange(capacity, device=chunk.device)
    inside, source = here < chunk[1:] - chunk[:1], (here + chunk[:1]).clamp(max=max(scores.shape[0] - 1, 0))
    maps = [torch.where(inside, row_map[source], -1) for row_map in (token_map, grad_map) if row_map is not None]
    if grad_map is None:
        maps.append(token_map.new_empty(0))
    return (offs.clamp(max=chunk[1:]) - chunk[:1]).clamp(min=0), torch.where(inside, scores[source], 0.0), maps[0], maps[1]


def gather_or_zero(
    index: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """values[index], 0 where index is -1.

    Args:
        index: integers of any shape, (T, C) with `columns`.
        values: (N,), which may be empty.
        columns: (T, C) integers, a permutation of the columns in each row: what index[t, c] names goes to column columns[t, c].  So
            gradients of `sort_topk`'s scores become those of the scores that it was given; -0.0 becomes 0.0, as in torch's.
        dtype: of the result; None for that of `values`.

    >>> index, values = torch.tensor([[1, -1]]), torch.tensor([5.0, 7.0])
    >>> gather_or_zero(index, values).tolist(), gather_or_zero(index, values, torch.tensor([[1, 0]])).tolist()
    ([[7.0, 0.0]], [[0.0, 7.0]])
    """
    found = torch.cat((values, values.new_zeros(1)))[index.long()]
    if columns is not None:
        found = torch.zeros_like(found).scatter_add_(1, columns.long(), found)
    return found.to(dtype or values.dtype).contiguous()


# ---------------------------------------------------------------- padded groups of received rows


def permute_indices(
    counts: torch.Tensor, ep_degree: int, num_local_experts: int, alignment: int, num_padded_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row map, padded group sizes and group ends from the counts of the exchange.

    Args:
        counts: (W*L,) int32 or int64, rank-major: rows from rank r for local expert e at r*L + e.
        ep_degree: W.  num_local_experts: L.
        alignment: rows; every group is padded to ceil(max(n, alignment) / alignment) * alignment, so an empty expert owns `alignment` rows.
        num_padded_rows: P, at least the last end.

    Returns:
        row_map (P,) int32, the source row of each padded row or -1; padded counts (L,) int32; END offsets (L,) int32.

    Two ranks, two experts; rank 0 sends 2 and 0 rows, rank 1 sends 1 and 3; padded to 4:

    >>> import torch
    >>> row_map, padded, ends = permute_indices(torch.tensor([2, 0, 1, 3]), 2, 2, 4, 12)
    >>> padded.tolist(), ends.tolist()
    ([4, 4], [4, 8])
    >>> row_map.tolist()
    [0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1]
    """
    table = counts.view(ep_degree, num_local_experts).long()  # (W, L)
    sizes = table.sum(0)
    padded = (sizes.clamp(min=alignment) + alignment - 1) // alignment * alignment
    ends = padded.cumsum(0)
    source_start = (table.flatten().cumsum(0) - table.flatten()).view_as(table)  # first received row of each (rank, expert)
    target_start = (ends - padded) + table.cumsum(0) - table  # its first padded row
    row_map = torch.full((num_padded_rows,), -1, dtype=torch.int32, device=counts.device)
    for rank in range(ep_degree):
        for expert in range(num_local_experts):
            n, source, target = int(table[rank, expert]), int(source_start[rank, expert]), int(target_start[rank, expert])
            row_map[target : target + n] = torch.arange(source, source + n, dtype=torch.int32, device=counts.device)
    return row_map, padded.int(), ends.int()


# ---------------------------------------------------------------- rows of the experts


def index_expert_rows(
    experts: torch.Tensor, num_local_experts: int, alignment: int, num_expert_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row of every top-k id in the order of the experts, then of its row, then of its column; every group is padded.

    Args:
        experts: (R, C) int32 or int64, from 0 to L - 1; other values belong to other ranks.
        num_local_experts: L.
        alignment: rows; every group is padded as `permute_indices` does, so an empty expert owns `alignment` rows.  0: no padding.
        num_expert_rows: P, at least the last end.

    Returns:
        expert rows (R, C) int32, -1 for ids of other ranks; END offsets (L,) int32; and the inverse, (P,) int32: the id in each
        expert row as row * C + column, -1 in padding.

    Raises:
        ValueError: experts that are no matrix of integers, or sizes that are none.

    Two tokens with two ids each; the first id belongs to another rank:

    >>> expert_rows, ends, topk_ids = index_expert_rows(torch.tensor([[-1, 1], [0, 1]]), 2, 4, 9)
    >>> expert_rows.tolist(), ends.tolist(), topk_ids.tolist()
    ([[-1, 4], [0, 5]], [4, 8], [2, -1, -1, -1, 1, 3, -1, -1, -1])
    """
    check_index_expert_rows(experts, num_local_experts, alignment, num_expert_rows)
    flat, device = experts.flatten().long(), experts.device
    here = (flat >= 0) & (flat < num_local_experts)
    key = torch.where(here, flat, num_local_experts)
    sizes = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=device).scatter_add_(0, key, torch.ones_like(key))
    padded = (sizes[:-1].clamp(min=alignment) + alignment - 1) // alignment * alignment if alignment else sizes[:-1]
    ends = padded.cumsum(0)
    order = key.argsort(stable=True)
    # The row of an id: the start of its expert's group, plus its number among that expert's ids.
    shift = torch.cat((ends - padded, ends.new_zeros(1))) - (sizes.cumsum(0) - sizes)
    expert_row = torch.empty_like(flat).scatter_(0, order, torch.arange(flat.shape[0], device=device) + shift[key[order]])
    expert_rows = torch.where(here, expert_row, -1).int()
    topk_ids = torch.full((num_expert_rows + 1,), -1, dtype=torch.int32, device=device)  # the last one takes ids of other ranks
    topk_ids.scatter_(0, torch.where(here, expert_row, num_expert_rows), torch.arange(flat.shape[0], dtype=torch.int32, device=device))
    topk_ids[num_expert_rows] = -1
    return expert_rows.view(experts.shape), ends.int(), topk_ids[:num_expert_rows].clone()


def check_index_expert_rows(experts: torch.Tensor, num_local_experts: int, alignment: int, num_expert_rows: int) -> None:
    """Raise ValueError unless these are `index_expert_rows`' arguments."""
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"index_expert_rows: experts are {tuple(experts.shape)} {experts.dtype}, want (R, C) int32 or int64")
    if (
        num_local_experts < 1
        or alignment < 0
        or num_expert_rows < num_local_experts * alignment
        or max(experts.numel(), num_expert_rows) >= 2**31
    ):
        raise ValueError(
            f"index_expert_rows: {experts.numel()} ids of {num_local_experts} experts in {num_expert_rows} rows, alignment {alignment};"
            " want at least one expert, `alignment` rows for each, and numbers below 2^31"
        )


def index_topk(
    experts: torch.Tensor, scores: torch.Tensor, rank: int, num_local_experts: int, alignment: int, num_expert_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`index_expert_rows` of top-k ids among the experts of all ranks, and the contents of each expert row.

    Args:
        experts: (R, C) int32 or int64.  scores: (R, C) float32.  rank: whose experts, from rank * L on, are here.
        num_local_experts, alignment, num_expert_rows: as in `index_expert_rows`.

    Returns:
        expert rows (R, C), END offsets (L,) and ids (P,) as `index_expert_rows`; the row of each id (P,) int32, -1 in padding; its score
        (P,) float32, 0 in padding.

    Raises:
        ValueError: scores that do not fit, or what `index_expert_rows` raises.
    """
    check_index_topk(experts, scores, num_local_experts, alignment, num_expert_rows)
    local = experts - rank * num_local_experts
    expert_rows, ends, topk_ids = index_expert_rows(local, num_local_experts, alignment, num_expert_rows)
    rows = torch.div(topk_ids, max(experts.shape[1], 1), rounding_mode="floor")
    return expert_rows, ends, topk_ids, rows, gather_or_zero(topk_ids, scores.flatten())


def check_index_topk(experts: torch.Tensor, scores: torch.Tensor, num_local_experts: int, alignment: int, num_expert_rows: int) -> None:
    """Raise ValueError unless these are `index_topk`'s arguments."""
    if scores.shape != experts.shape or scores.dtype != torch.float32:
        raise ValueError(
            f"index_topk: scores {tuple(scores.shape)} {scores.dtype} of experts {tuple(experts.shape)}, want the same shape and float32"
        )
    check_index_expert_rows(experts, num_local_experts, alignment, num_expert_rows)
