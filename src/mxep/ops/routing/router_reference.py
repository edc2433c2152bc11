"""Which experts each token goes to and with which weight, the router's losses, and the gradient of its logits."""

from __future__ import annotations

import torch

SCORE_FUNCTIONS = ("softmax", "sigmoid")
FLOOR = 1e-20  # of what scores are divided by: keeps 0 / 0 out when every one underflowed
LOGITS = (torch.float32, torch.bfloat16, torch.float16)
FORCED_SEED = 44  # of forced balance's order of experts; the nearest of 0 to 199 to random experts' number of ranks
_CHOICES = (torch.int64, torch.int32, torch.int16, torch.int8)


def count_topk(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Top-k ids per expert: experts (T, C) int64 -> (E,) int64.

    The numbers of `torch.bincount`, which synchronises the host on a GPU and has no fixed output shape under torch.compile.

    >>> count_topk(torch.tensor([[0, 2], [2, 3]]), 5).tolist()
    [1, 0, 2, 1, 0]
    """
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=experts.device).scatter_add(0, flat, torch.ones_like(flat))


def score_experts(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Logits (T, E) float32 -> scores (T, E) float32."""
    return logits.softmax(dim=-1) if score_function == SCORE_FUNCTIONS[0] else logits.sigmoid()


def shuffled_experts(num_experts: int, device: torch.device) -> torch.Tensor:
    """All experts in forced balance's fixed random order, by the hash of their numbers (MurmurHash3's finalizer). Returns (E,) int64."""
    word = 0xFFFFFFFF
    hashed = torch.arange(num_experts, device=device) + FORCED_SEED
    hashed = hashed ^ hashed >> 16
    hashed = hashed * 0x85EBCA6B & word
    hashed = hashed ^ hashed >> 13
    hashed = hashed * 0xC2B2AE35 & word
    return (hashed ^ hashed >> 16).argsort()


def force_balance(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """Forced balance: each token has the C experts after those of the token before, in a fixed random order. Returns (T, C) int64, rising.

    Every expert gets the same number of tokens, up to one, and a token goes to as many ranks as with C random experts, within 4% in the
    shapes of common models. Neighbouring experts would be on the same rank, and little would be exchanged.

    >>> force_balance(3, 2, 3, torch.device("cpu")).tolist()
    [[0, 2], [0, 1], [1, 2]]
    """
    position = torch.arange(num_tokens * top_k, device=device).remainder(num_experts)
    return shuffled_experts(num_experts, device)[position].view(num_tokens, top_k).sort(dim=1).values


def keep_best_groups(ranking: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """-inf for every expert outside its token's best groups, by the sums of their two best: (T, E) -> (T, E)."""
    grouped = ranking.unflatten(-1, (num_groups, -1))  # (T, num_groups, E / num_groups)
    two_best = min(2, grouped.shape[-1])
    group_scores = grouped.topk(two_best, dim=-1).values.sum(dim=-1)  # (T, num_groups)
    best = group_scores.topk(top_groups, dim=-1).indices  # (T, top_groups)
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)


def weigh_topk(scores: torch.Tensor, experts: torch.Tensor, renormalize: bool, route_scale: float) -> torch.Tensor:
    """Weights of the top-k experts: scores (T, E), experts (T, C) -> (T, C) float32, renormalised and scaled."""
    chosen = scores.gather(-1, experts)
    if renormalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + FLOOR)
    return chosen * route_scale


def mean_shares(scores: torch.Tensor) -> torch.Tensor:
    """P_e, the mean over tokens of each expert's share of its token's scores: (T, E) -> (E,); zeros where there are no tokens."""
    return (scores / (scores.sum(dim=-1, keepdim=True) + FLOOR)).sum(dim=0) / max(scores.shape[0], 1)


def balance_loss(shares: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """E * sum_e f_e P_e, 1 when balanced, up to E / C when C experts take everything: shares P (E,), counts (E,) -> ().

    f_e is the share of top-k ids that fell on expert e (counts / their sum, no gradient); P as `mean_shares` has it (Switch Transformer,
    arXiv 2101.03961; for sigmoid scores DeepSeek-V3 eq. 17-20).  The counts may be those of more tokens than the shares (arXiv 2501.11873).
    """
    load = counts.float()
    return counts.numel() * (load / load.sum().clamp(min=1) * shares).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, arXiv 2202.08906). (T, E) -> ()."""
    return logits.logsumexp(dim=-1).square().sum() / max(logits.shape[0], 1)


def route_tokens(
    logits: torch.Tensor,
    expert_bias: torch.Tensor | None,
    top_k: int,
    score_function: str,
    num_groups: int,
    top_groups: int,
    forced: bool,
    renormalize: bool,
    route_scale: float,
    with_shares: bool,
    with_z: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The C experts of each token, their weights, and what the losses are made of; without a gradient (`router_backward` has it).

    Of experts that tie any may be chosen, and of groups.  No score is better than NaN, so a token of NaN has C experts too.

    Args:
        logits: (T, E) float32, bfloat16 or float16; everything is float32 from them on.
        expert_bias: (E,) float or None, added to the scores for the choice alone (DeepSeek-V3, arXiv 2412.19437, 2.1.2); finite where
            there are groups, for a group with a single expert above -inf is closed as one without any.
        top_k: C.  score_function: "softmax" over the experts, or "sigmoid".
        num_groups, top_groups: only experts of the best `top_groups` of `num_groups` equal groups are chosen; 1 and 1: of all.
        forced: choose as `force_balance` does instead.  renormalize, route_scale: of a token's weights.
        with_shares, with_z: whether `mean_shares` and `z_loss` are wanted.

    Returns:
        weights (T, C) float32, experts (T, C) int64 in rising order, counts (E,) int64 of top-k ids, shares (E,) float32 and z () float32,
        zero where not wanted.

    Raises:
        ValueError: operands that do not fit.
    """
    check_route_tokens(logits, expert_bias, top_k, score_function, num_groups, top_groups)
    (T, E), logits = logits.shape, logits.float()
    scores = score_experts(logits, score_function)
    if forced:
        experts = force_balance(T, top_k, E, logits.device)
    else:
        ranking = scores if expert_bias is None else scores + expert_bias.float()
        if num_groups > 1:
            ranking = keep_best_groups(ranking, num_groups, top_groups)
        experts = ranking.topk(top_k, dim=-1).indices.sort(dim=1).values
    counts = count_topk(experts, E)
    shares = mean_shares(scores) if with_shares else logits.new_zeros(E)
    z = z_loss(logits) if with_z else logits.new_zeros(())
    return weigh_topk(scores, experts, renormalize, route_scale), experts, counts, shares, z


def check_route_tokens(
    logits: torch.Tensor, expert_bias: torch.Tensor | None, top_k: int, score_function: str, num_groups: int, top_groups: int
) -> None:
    """Raise ValueError unless these are `route_tokens`'s operands."""
    if logits.dim() != 2 or logits.dtype not in LOGITS:
        raise ValueError(f"route_tokens: logits are {tuple(logits.shape)} {logits.dtype}, want (T, E) float32, bfloat16 or float16")
    E = logits.shape[1]
    if expert_bias is not None and (expert_bias.shape != (E,) or expert_bias.dtype not in LOGITS):
        raise ValueError(f"route_tokens: expert_bias is {tuple(expert_bias.shape)} {expert_bias.dtype}, want ({E},) float32 or 16 bits")
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"route_tokens: score_function={score_function!r}, want one of {SCORE_FUNCTIONS}")
    if num_groups < 1 or E % num_groups or not 1 <= top_groups <= num_groups or not 1 <= top_k <= top_groups * (E // num_groups):
        raise ValueError(
            f"route_tokens: {top_k} of {E} experts in the best {top_groups} of {num_groups} groups, want equal groups with enough experts"
        )


def bf16_parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors in bf16 whose sum is `value`: three of a float32 one, each the rounding of what those before it leave; a bf16 one itself.

    >>> [part.item() for part in bf16_parts(torch.tensor(1 + 2**-10 + 2**-20))]
    [1.0, 0.0009765625, 9.5367431640625e-07]
    """
    if value.dtype == torch.bfloat16:
        return (value,)
    first = value.bfloat16()
    rest = value - first
    second = rest.bfloat16()
    return first, second, (rest - second).bfloat16()


def router_backward(
    logits: torch.Tensor,
    experts: torch.Tensor,
    d_weights: torch.Tensor,
    d_shares: torch.Tensor | None,
    d_z: torch.Tensor | None,
    score_function: str,
    renormalize: bool,
    route_scale: float,
    dtype: torch.dtype,
    in_parts: bool = False,
) -> torch.Tensor:
    """Gradient of the logits, from those of the chosen weights, of `mean_shares` and of `z_loss`.

    Args:
        logits: (T, E) float32, bfloat16 or float16.  experts: (T, C) signed integers, distinct in each row.
        d_weights: (T, C) float32.  d_shares: (E,) float32 or None.  d_z: () float32 or None.
        score_function, renormalize, route_scale: how weights come from logits.
        dtype: of the result.  in_parts: as `bf16_parts` of the gradient in float32 instead.

    Returns:
        (T, E) `dtype`, or (T, 3, E) bfloat16.

    Raises:
        ValueError: operands that do not fit.
    """
    check_router_backward(logits, experts, d_weights, d_shares, score_function)
    T, logits, experts = logits.shape[0], logits.float(), experts.long()
    softmax = logits.softmax(-1)
    scores = softmax if score_function == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, experts)
    d_chosen = d_weights
    if renormalize:
        total = chosen.sum(1, keepdim=True) + FLOOR
        d_chosen = (d_weights - (d_weights * chosen).sum(1, keepdim=True) / total) / total
    d_scores = torch.zeros_like(logits).scatter_(1, experts, d_chosen * route_scale)
    if d_shares is not None:
        d_share = d_shares / max(T, 1)  # (E,), of a score's share of its token's scores
        total = scores.sum(1, keepdim=True) + FLOOR
        d_scores = d_scores + (d_share - (d_share * scores).sum(1, keepdim=True) / total) / total
    if score_function == "softmax":
        d_logits = scores * (d_scores - (d_scores * scores).sum(1, keepdim=True))
    else:
        d_logits = d_scores * scores * (1 - scores)
    if d_z is not None:
        d_logits = d_logits + d_z * 2 / max(T, 1) * logits.logsumexp(1, keepdim=True) * softmax
    return torch.stack(bf16_parts(d_logits), 1) if in_parts else d_logits.to(dtype).contiguous()


def check_router_backward(
    logits: torch.Tensor, experts: torch.Tensor, d_weights: torch.Tensor, d_shares: torch.Tensor | None, score_function: str
) -> None:
    """Raise ValueError unless these are `router_backward`'s operands."""
    (T, E), shape = logits.shape, experts.shape
    fits = experts.dim() == 2 and shape[0] == T and d_weights.shape == shape and shape[1] <= E
    fits &= d_shares is None or (d_shares.shape == (E,) and d_shares.dtype == torch.float32)
    if not fits or logits.dtype not in LOGITS or d_weights.dtype != torch.float32 or experts.dtype not in _CHOICES:
        given = (logits, experts, d_weights, *(() if d_shares is None else (d_shares,)))
        got = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in given)
        raise ValueError(
            f"router_backward: {got}; want logits (T, E) float32 or 16 bits, experts (T, C) signed integers, d_weights (T, C) float32, "
            "d_shares (E,) float32 or None"
        )
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"router_backward: score_function={score_function!r}, want one of {SCORE_FUNCTIONS}")
