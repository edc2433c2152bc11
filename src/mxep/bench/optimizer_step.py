"""`mxep bench optimizer`: AdamW's step as `mxep train` takes it, against a device copy that reads and writes as many bytes.

One parameter of (T, D) values steps with each optimizer, which is given clipping's factor.  "torch_fused" is torch's fused step on float32;
it writes the gradients back.  The others are the operator `adamw_step`, under the names of `--optimizer` and `--dtype`.  Before they are
timed, each takes two steps: the first update is compared with that of torch's plain AdamW in float64, which is the gradient's sign, and
the moments after both, on which clipping's factor, the betas and what quantised states keep depend, with those in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mxep.bench.memory_bound import Mover, Movers, memory_case
from mxep.bench.registry import Case, Setting
from mxep.ops.optimizer.codes import code_tables, dequantize
from mxep.train.optimizer import BETAS, build_optimizer
from mxep.train.state_precision import StatePrecision

SIZES = ((16384, 8192), (131072, 4096))  # (T, D)
_LR, _DECAY, _DIVISOR, _TARGET = 1e-3, 0.1, 2.0, 0.85
_TORCH = "torch_fused"
_MOMENTS = "exp_avg", "exp_avg_sq"
_MOST_OFF = {  # by the bytes that a moment's value takes: relative errors of both moments, of rounding or of their codes
    4: (1e-6, 1e-6),
    2: (4e-3, 4e-3),
    1: (0.03, 0.02),
    0: (0.3, 0.25),  # 4 bits
}
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

    for T, D in setting.choose(SIZES, tiny=[(256, 256)]):
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
    moment_bytes = precision.moment_bytes(values.shape, values.numel())
    moved, most_off = 3 * values.nbytes + 2 * moment_bytes + grad.nbytes * (arm == _TORCH), _MOST_OFF[moment_bytes // (2 * values.numel())]

    def agrees() -> bool:
        want, given = _first_update(values, grad), grad.clone()  # torch's step divides `grad` itself
        optimizer.step()
        spacing = torch.finfo(precision.torch_dtype).eps
        close = ((weight.detach().double() - want).abs() <= spacing * want.abs() + 1e-6).all()
        second = given.flip(0)
        grad.copy_(second)
        optimizer.step()
        grad.copy_(given)
        moments = zip(_moments(optimizer.state[weight], precision), _two_steps(given, second), strict=True)
        off = [((got.double().view_as(true) - true).norm() / true.norm()).item() for got, true in moments]  # host sync: of the check
        return bool(close) and all(error <= most for error, most in zip(off, most_off, strict=True))

    return Mover(optimizer.step, agrees, moved, _TARGET if arm == "adamw" else None)


def _moments(state: dict[str, Tensor], precision: StatePrecision) -> list[Tensor]:
    """AdamW's two moments as numbers, one after the other in memory."""
    if "exp_avg" in state:
        return [state[name].flatten() for name in _MOMENTS]
    bits = precision.state_bits
    assert bits is not None
    tables = code_tables(bits, state["step"].device)[0]
    parts = ((state[f"{name}_codes"].flatten(), state[f"{name}_scale"].flatten()) for name in _MOMENTS)
    return [dequantize(*part, table, bits) for part, table in zip(parts, tables, strict=True)]


def _two_steps(*grads: Tensor) -> list[Tensor]:
    """Both moments after steps with these gradients, float64."""
    first, second = (torch.zeros_like(grads[0], dtype=torch.float64) for _ in range(2))
    for grad in grads:
        divided = grad.double() / _DIVISOR
        first = BETAS[0] * first + (1 - BETAS[0]) * divided
        second = BETAS[1] * second + (1 - BETAS[1]) * divided**2
    return [first, second]


def _first_update(values: Tensor, grad: Tensor) -> Tensor:
    """(T, D) float64 after one step of torch's AdamW."""
    parameter = nn.Parameter(values.double())
    parameter.grad = grad.double() / _DIVISOR
    torch.optim.AdamW([parameter], lr=_LR, betas=BETAS, weight_decay=_DECAY, foreach=False).step()
    return parameter.detach()
