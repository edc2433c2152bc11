"""Parameters, gradients and optimizers for the tests of AdamW."""

from __future__ import annotations

import torch
from torch import nn

from mxep.train.adamw import AdamW
from mxep.train.state_precision import StatePrecision

SHAPES = {"matrix": (64, 128), "experts": (4, 64, 64), "narrow": (64, 96), "norm": (64,)}  # a block of 256 is 2, 4 and 8/3 rows
KINDS = [StatePrecision("adamw8bit"), StatePrecision("adamw4bit", "bfloat16"), StatePrecision("adamw", "bfloat16")]


def parameters_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for name, shape in SHAPES.items()}


def gradients_of(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(step + 1)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def optimizer_of(parameters: dict[str, nn.Parameter], precision: StatePrecision, seed: int = 0) -> AdamW:
    groups = [{"params": list(parameters.items()), "weight_decay": 0.1}]
    return AdamW(groups, 1e-2, (0.9, 0.95), state_bits=precision.state_bits, seed=seed)


def stepped(parameters: dict[str, nn.Parameter], optimizer: AdamW, steps: range) -> None:
    for step in steps:
        for name, grad in gradients_of(step, next(iter(parameters.values())).dtype).items():
            parameters[name].grad = grad
        optimizer.step()
