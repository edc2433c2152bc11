"""`mxep bench optimizer`: AdamW's step as `mxep train` takes it, against a device copy that reads and writes as many bytes.

One parameter of (T, D) values steps with each optimizer, which is given clipping's factor.  "torch_fused" is torch's fused step on float32;
it writes the gradients back.  The others are the operator `adamw_step`, under the names of `--optimizer` and `--dtype`.  Before they are
timed, the first update of each is compared with that of torch's plain AdamW in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mxep.bench.memory_bound import Mover, Movers, memory_case
from mxep.bench.registry import Case, Setting
from mxep.train.optimizer import BETAS, build_optimizer
from mxep.train.state_precision import StatePrecision

SIZES = ((16384, 8192), (131072, 4096))  # (T, D)
_LR, _DECAY, _DIVISOR, _TARGET = 1e-3, 0.1, 2.0, 0.85
_TORCH = "torch_fused"
_ARMS = {
    _TORCH: StatePrecision(),
    "adamw": StatePrecision(),
    "adamw_bfloat16": StatePrecision("adamw", "bfloat16"),
    "adamw8bit": StatePrecision("adamw8bit"),
    "adamw8bit_bfloat16": StatePrecision("adamw8bit", "bfloat16"),
    "adamw4bit_bfloat16": StatePrecision("adamw4bit", "bfloat16"),
}


def cases(setting: Setting) -> Iterator[Case]:
    """One parameter (T, D)."""

    def make_movers(T: int, D: int) -> tuple[str, Movers]:
        return _TORCH, {arm: _mover(setting, T, D, arm, precision) for arm, precision in _ARMS.items()}

    for T, D in ((256, 256),) if setting.tiny else SIZES[:1] if setting.quick else SIZES:
        yield memory_case(setting, T, D, make_movers)


def _mover(setting: Setting, T: int, D: int, arm: str, precision: StatePrecision) -> Mover:
    generator = torch.Generator(setting.device).manual_seed(0)
    values, grad = (torch.randn(T, D, device=setting.device, generator=generator).to(precision.torch_dtype) for _ in range(2))
    model = nn.ParameterDict({"weight": nn.Parameter(values)})
    weight = model["weight"]
    weight.grad = grad
    optimizer: Any
    if arm == _TORCH:
        optimizer = torch.optim.AdamW([weight], _LR, BETAS, weight_decay=_DECAY, fused=True, capturable=True)
    else:
        optimizer = build_optimizer(model, _LR, _DECAY, precision)
    optimizer.grad_scale = torch.full((), _DIVISOR, device=setting.device)
    moved = 3 * values.nbytes + 2 * precision.moment_bytes(values.shape, values.numel()) + grad.nbytes * (arm == _TORCH)

    def agrees() -> bool:
        want = _first_update(values, grad)
        optimizer.step()
        spacing = torch.finfo(precision.torch_dtype).eps
        return bool(((weight.detach().double() - want).abs() <= spacing * want.abs() + 1e-6).all())  # host sync: of the check

    return Mover(optimizer.step, agrees, moved, _TARGET if arm == "adamw" else None)


def _first_update(values: Tensor, grad: Tensor) -> Tensor:
    """(T, D) float64 after one step of torch's AdamW."""
    parameter = nn.Parameter(values.double())
    parameter.grad = grad.double() / _DIVISOR
    torch.optim.AdamW([parameter], lr=_LR, betas=BETAS, weight_decay=_DECAY, foreach=False).step()
    return parameter.detach()
