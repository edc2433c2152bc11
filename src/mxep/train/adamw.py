"""AdamW: in float32, with torchao's quantised moments, and with bf16 parameters whose updates are rounded stochastically.

The operator `adamw_step` updates a parameter.  It also divides the gradient by clipping's factor, and leaves everything as it was if the
step is skipped, without the host.  On a GPU it is one kernel.  On a CPU float32 is torch's fused step, all else torchao's functions: AdamW
in float32, 8-bit and 4-bit codes with a scale for each block.

Float32 parameters with float32 moments, on a GPU the small ones alone, take torch's fused step of many parameters by one call: so many
launches and checks would take the host longer than the update.  Steps during backward take it for one parameter, for the same bits.

Stochastic rounding needs random bits.  They are a hash of the run's seed, the parameter's name, the step and the position of the value in
the whole parameter.  No generator has a state that a checkpoint would have to keep, replicas of a parameter stay equal, and a run resumes
with the same bits on any number of ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mxep.moe.init import local_shard, local_tensor
from mxep.operators import direct
from mxep.ops.optimizer import reference
from mxep.ops.optimizer.codes import code_tables
from mxep.ops.optimizer.reference import check_adamw_step, fused_adamw_step
from mxep.train.state_precision import StatePrecision, zeros_by_block

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOST_SMALL_VALUES = 1 << 20  # on all ranks; the kernel takes an H100 11 us for so many, and the host 22 us for its two launches


class AdamW(torch.optim.Optimizer):
    """AdamW for what `StatePrecision` names; parameters and gradients are plain tensors or DTensors, on any meshes.

    AdamW is elementwise, so each shard is updated on its own.  A fused step of torch on the DTensors themselves leaks one DTensorSpec per
    parameter and step in host memory (pytorch issue 188174), and refuses parameters on several meshes.

    Its state is plain tensors and DTensors: "exp_avg" and "exp_avg_sq" in the parameter's dtype, or "exp_avg_codes", "exp_avg_scale",
    "exp_avg_sq_codes" and "exp_avg_sq_scale" of quantised moments, and "step" on the parameter's device.  All of it is made here.

    Args:
        groups: parameter groups, each with "params": [(name, parameter), ...] and "weight_decay".
        lr: learning rate; a number, or () float32 on the parameters' device.
        betas, eps: AdamW's.
        precision: of the moments; bf16 parameters are rounded stochastically whatever it says.
        seed: of the random bits.

    Attributes:
        grad_scale: () float32 on the parameters' device, what gradients are divided by; None: 1.
        found_inf: () float32 there, above 0 to skip the step; None: 0.

    Raises:
        ValueError: a shard of a parameter ends within a block of quantised moments.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        precision: StatePrecision,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.precision = precision
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._keys: dict[nn.Parameter, int] = {}  # of the random bits
        self._together: set[nn.Parameter] = set()  # in float32, stepped by one call of torch's
        self._runs: dict[nn.Parameter, tuple[int, int, int]] = {}  # of this rank's shards; to find them takes longer than a step
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                local = local_tensor(parameter)
                if local.dtype not in (torch.bfloat16, torch.float32) or not local.is_contiguous():
                    got = f"{local.dtype} with strides {local.stride()}"
                    raise ValueError(f"optimizer: {name} is {got}, want contiguous bfloat16 or float32; make it so before")
                try:
                    self.init_state(parameter)
                except ValueError as error:
                    raise ValueError(f"optimizer: {name}: {error}") from error
                plain = local.dtype == torch.float32 and "exp_avg" in self.state[parameter]
                if plain and (not local.is_cuda or parameter.numel() <= _MOST_SMALL_VALUES):
                    self._together.add(parameter)
                self._keys[parameter] = zlib.crc32(f"{seed}/{name}".encode())
                self._runs[parameter] = local.numel(), local.numel(), 0
                if local.dtype == torch.bfloat16:  # only rounding asks where a shard lies
                    self._runs[parameter] = _runs(parameter.shape, local_shard(parameter)[1])

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's has its own attributes alone."""
        names = "precision", "grad_scale", "found_inf", "_keys", "_together", "_runs"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while the optimizer is made; later a ValueError, since a step knows its parameters."""
        if hasattr(self, "_runs"):
            raise ValueError("AdamW: another group of parameters, want all of them at once; make a new optimizer, and load the old state")
        super().add_param_group(param_group)

    def init_state(self, parameter: nn.Parameter) -> None:
        """Moments of zeros. Raises ValueError if the parameter's shard ends within a block."""
        device = local_shard(parameter)[0].device
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        blocks = self.precision.blocks(parameter.shape)
        if blocks is not None:
            code_tables(blocks.bits, device)  # made here, since a step may run on another stream
        for moment in _MOMENTS:
            if blocks is None:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            else:
                state[f"{moment}_codes"] = zeros_by_block(parameter, 8 // blocks.bits, torch.uint8)
                state[f"{moment}_scale"] = zeros_by_block(parameter, blocks.size, torch.float32)
        self.state[parameter] = state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what `state_dict()` returned into the state, in its own dtypes and on its own devices.

        Raises:
            ValueError: it is of other parameters or of another precision.
        """
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})  # which would cast codes and scales to the parameter's dtype
        self.state = state
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            found, own = state_dict["state"].get(number, {}), state[parameter]
            if {key: value.shape for key, value in found.items()} != {key: value.shape for key, value in own.items()}:
                got = {key: tuple(value.shape) for key, value in found.items()}
                want = {key: tuple(value.shape) for key, value in own.items()}
                raise ValueError(f"optimizer: state {number} is {got}, want {want}; load a state of the same precision and parameters")
            for key, value in own.items():
                value.copy_(found[key])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            together: dict[torch.device, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter in self._together:
                    together.setdefault(parameter.device, []).append(parameter)
                else:
                    self.step_parameter(parameter, group)
            for parameters in together.values():
                self._step_together(parameters, group)

    @torch.no_grad()
    def step_parameter(self, parameter: nn.Parameter, group: dict[str, Any], squares: Tensor | None = None) -> None:
        """Update one parameter of that group, which has a gradient; `squares`, () float64, grows by the squares of this rank's part."""
        state = self.state[parameter]
        local, gradient = local_tensor(parameter), local_tensor(parameter.grad)  # type: ignore[arg-type]
        if not local.numel():
            return
        codes = "" if "exp_avg" in state else "_codes"
        moments = [local_tensor(state[f"{moment}{codes}"]).view(-1) for moment in _MOMENTS]
        scales = [local_tensor(state[f"{moment}_scale"]).view(-1) if codes else None for moment in _MOMENTS]
        step: Callable[..., None] = reference.adamw_step if parameter in self._together else direct.adamw_step
        step(
            local.view(-1),
            gradient.reshape(-1),
            *moments,
            *scales,
            state["step"],
            _as_tensor(group["lr"], local.device),
            self.grad_scale,
            self.found_inf,
            self._keys[parameter],
            self._runs[parameter],
            (*group["betas"], group["weight_decay"], group["eps"]),
            squares,
        )
        torch.autograd.graph.increment_version((parameter, local))  # kernels write past autograd

    def _step_together(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters of `_together`, of that group and of one device, which have gradients."""
        rows = []
        for parameter in parameters:
            local = local_tensor(parameter)
            if local.numel():
                state, gradient = self.state[parameter], local_tensor(parameter.grad).float().contiguous()  # type: ignore[arg-type]
                rows.append((local, gradient, *(local_tensor(state[moment]) for moment in _MOMENTS), state["step"]))
        if not rows:
            return
        parts, gradients, first, second, steps = (list(tensors) for tensors in zip(*rows, strict=True))
        lr = _as_tensor(group["lr"], steps[0].device)
        one = parts[0].view(-1), gradients[0].view(-1), first[0].view(-1), second[0].view(-1), None, None
        check_adamw_step(*one, (steps[0], lr, self.grad_scale, self.found_inf))  # the others are alike
        hyperparameters = (*group["betas"], group["weight_decay"], group["eps"])
        fused_adamw_step(parts, gradients, first, second, steps, lr, self.grad_scale, self.found_inf, hyperparameters)
        torch.autograd.graph.increment_version((*parameters, *parts))  # torch's step leaves versions as they are


def _as_tensor(lr: float | Tensor, device: torch.device) -> Tensor:
    return lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=device)


def _runs(shape: torch.Size, region: tuple[slice, ...]) -> tuple[int, int, int]:
    """Where a shard's values are in the whole tensor: (length of a run of neighbours, distance of the runs' starts, first position).

    Dimensions before the last one that is cut are whole, except for the first.

    >>> _runs(torch.Size([8, 6]), (slice(2, 4), slice(0, 6))), _runs(torch.Size([8, 6]), (slice(2, 4), slice(3, 6)))
    ((12, 48, 12), (3, 6, 15))
    """
    lengths = [part.stop - part.start for part in region]
    cut = max((dim for dim in range(1, len(shape)) if lengths[dim] < shape[dim]), default=0)
    assert all(lengths[dim] == shape[dim] for dim in range(1, cut)), (shape, region)
    first = 0
    for size, part in zip(shape, region, strict=True):
        first = first * size + part.start
    return math.prod(lengths[cut:]), math.prod(shape[cut:]), first
