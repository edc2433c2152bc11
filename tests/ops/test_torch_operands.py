"""Operands of torch's grouped GEMM: those that it accepts are passed on, others are copied."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mxep.ops.grouped_gemm.triton import for_torch


def test_operands_that_torch_accepts_are_not_copied() -> None:
    rows, weights = torch.randn(6, 64).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    for matrix in (rows, rows[2:4], rows[:, :32], weights, weights[1:, :8]):
        assert for_torch(matrix) is matrix


def test_rows_that_share_memory_are_copied() -> None:
    """torch refuses a row stride below the row's width; so do tensor maps."""
    rows = torch.randn(64).bfloat16()
    for matrix in (
        rows.expand(6, 64),
        rows.as_strided((4, 32), (8, 1)),
        torch.randn(64, 6).bfloat16().t(),
        torch.randn(6, 60).bfloat16()[:, :57],
    ):
        copied = for_torch(matrix)
        assert copied.is_contiguous()
        assert copied.data_ptr() != matrix.data_ptr()
        assert torch.equal(copied, matrix)
