"""Cross-entropy of rows of logits: each row's loss, and its gradient in the logits' own memory."""

from __future__ import annotations

import torch

IGNORE = -100  # label that takes no part in the loss


def check_labelled_rows(where: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise ValueError unless `logits` is (T, V) bf16, float32 or float64, contiguous, and `labels` (T,) int64."""
    fits = logits.dim() == 2 and labels.shape == logits.shape[:1] and labels.dtype == torch.int64 and logits.is_contiguous()
    if not fits or logits.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"{where}: logits {tuple(logits.shape)} {logits.dtype} with strides {logits.stride()}, labels {tuple(labels.shape)} "
            f"{labels.dtype}, want contiguous (T, V) bfloat16, float32 or float64 with (T,) int64"
        )


def _log_shares(where: str, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_softmax (T, V), at least float32; each row's label (T, 1), 0 where it is IGNORE; where it is, (T, 1)."""
    check_labelled_rows(where, logits, labels)
    ignored = labels == IGNORE
    wrong = labels[~ignored & ((labels < 0) | (labels >= logits.shape[1]))]
    if wrong.numel():  # host sync: on a GPU of float64 alone, which no kernel takes
        raise ValueError(f"{where}: label {int(wrong[0])}, want 0 to {logits.shape[1] - 1} or {IGNORE}, which takes no part")
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=wide), labels.masked_fill(ignored, 0).unsqueeze(-1), ignored.unsqueeze(-1)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Each row's cross-entropy in nats, 0 where its label is IGNORE.

    Args:
        logits: (T, V) bf16, float32 or float64, contiguous.  labels: (T,) int64, each 0 to V - 1 or IGNORE.

    Returns:
        (T,) float32, float64 where logits are.

    Raises:
        ValueError: operands of another kind; a label that is neither a column nor IGNORE (on GPUs such a row's numbers are NaN).
    """
    log_shares, wanted, ignored = _log_shares("cross_entropy", logits, labels)
    return -log_shares.gather(-1, wanted).masked_fill(ignored, 0.0).squeeze(-1)


def cross_entropy_to_gradient(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`cross_entropy`; its gradient overwrites the logits: softmax less 1 at the label, 0 where that is IGNORE, rounded once.

    >>> logits = torch.zeros(2, 4)
    >>> cross_entropy_to_gradient(logits, torch.tensor([1, IGNORE])).exp().tolist(), logits.tolist()
    ([4.0, 1.0], [[0.25, -0.75, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    """
    log_shares, wanted, ignored = _log_shares("cross_entropy_to_gradient", logits, labels)
    losses = -log_shares.gather(-1, wanted).masked_fill(ignored, 0.0).squeeze(-1)
    gradient = log_shares.exp_()
    gradient.scatter_add_(-1, wanted, torch.full_like(wanted, -1, dtype=gradient.dtype))
    logits.copy_(gradient.masked_fill_(ignored, 0.0))
    return losses
