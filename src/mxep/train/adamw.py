"""AdamW for weights in bf16 or float32, with moments in their dtype or in 8 or 4 bits; usable as torch.optim.AdamW is.

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

import importlib
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from mxep.extras import install_command
from mxep.moe.init import local_shard, local_tensor
from mxep.operators import direct
from mxep.ops.optimizer import reference
from mxep.ops.optimizer.codes import code_tables
from mxep.ops.optimizer.reference import check_adamw_step, fused_adamw_step
from mxep.train.state_precision import moment_blocks, zeros_by_block

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOST_SMALL_VALUES = 1 << 20  # on all ranks; the kernel takes an H100 11 us for so many, and the host 22 us for its two launches


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with bf16 weights that are rounded stochastically and, if wanted, moments in 8 or 4 bits.

    A bf16 weight needs no float32 copy: each new value is rounded up or down at random, right on average, where rounding to nearest loses
    every update below half of the distance to the next bf16 number.  One kernel reads weight, gradient and moments once and writes weight
    and moments once.  Float32 weights with float32 moments get torch's numbers.

    Parameters and gradients are plain tensors or DTensors on any meshes, and each rank updates its own shard.  A fused step of torch on the
    DTensors themselves leaks one DTensorSpec per parameter and step in host memory (pytorch issue 188174), and refuses parameters on
    several meshes.

    The state is made in the first step, or by `make_states`: plain tensors and DTensors, "exp_avg" and "exp_avg_sq" in the parameter's
    dtype, or "exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes" and "exp_avg_sq_scale" of quantised moments, and "step" on the
    parameter's device.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either, as torch's; float32 or bf16, contiguous.  Names choose the random
            bits; without names the position among all parameters does.
        lr: learning rate; a number, or () float32 on the parameters' device, which a CUDA graph can read.
        betas: decay of both moments.  Moments in bf16 are rounded to nearest, as torch's are: with a second beta above 0.996 the second
            moment cannot fall, as its change is below half of the distance to the next number.  Take 0.95, or `state_bits`.
        eps: added to the second moment's root.
        weight_decay: of groups without their own.
        state_bits: 8 or 4 for moments as torchao's codes, with a float32 scale for each 256 or 128 values, which needs torchao; parameters
            of fewer than 4096 values, or of no whole blocks, keep moments in their dtype.  With None all of them do.
        seed: of the random bits.

    Attributes:
        grad_scale: () float32 on the parameters' device, what gradients are divided by; None: 1.
        found_inf: () float32 there, above 0 to skip the step; None: 0.

    Raises:
        ValueError: a number out of range; a parameter of another dtype, or not contiguous; torchao is missing.  In `make_states` and the
            first step: a shard of a parameter that ends within a block of quantised moments.

    Examples:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = mxep.train.AdamW(model.named_parameters(), lr=1e-3, betas=(0.9, 0.95))
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: Literal[8, 4] | None = None,
        seed: int = 0,
    ) -> None:
        if state_bits not in (None, 8, 4):
            raise ValueError(f"AdamW: state_bits={state_bits!r}, want 8, 4 or None")
        self.state_bits, self.seed = state_bits, seed
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._keys: dict[nn.Parameter, int] = {}  # of the random bits
        self._together: set[nn.Parameter] = set()  # in float32, stepped by one call of torch's
        self._runs: dict[nn.Parameter, tuple[int, int, int]] = {}  # of this rank's shards; to find them takes longer than a step
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's has its own attributes alone."""
        names = "state_bits", "seed", "grad_scale", "found_inf", "_keys", "_together", "_runs"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for numbers and parameters that a step cannot use."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group, self.state_bits)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def make_states(self) -> None:
        """Moments of zeros for every parameter that has none; the first step would make those with a gradient.

        Raises:
            ValueError: a parameter's shard ends within a block.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._runs:
                    self._prepare(parameter)

    def _name(self, parameter: nn.Parameter) -> str:
        """Its own or, without names, its number."""
        count = 0
        for group in self.param_groups:
            for number, other in enumerate(group["params"]):
                if other is parameter:
                    return str(group["param_names"][number] if "param_names" in group else count + number)
            count += len(group["params"])
        raise ValueError("AdamW: a parameter of no group; add one by add_param_group")

    def _prepare(self, parameter: nn.Parameter) -> None:
        """State of a parameter that may have none yet, and what is known of its shard."""
        name, local = self._name(parameter), local_tensor(parameter)
        if not self.state[parameter]:
            try:
                self.state[parameter] = self._new_state(parameter)
            except ValueError as error:
                raise ValueError(f"AdamW: {name}: {error}") from error
        plain = local.dtype == torch.float32 and "exp_avg" in self.state[parameter]
        if plain and (not local.is_cuda or parameter.numel() <= _MOST_SMALL_VALUES):
            self._together.add(parameter)
        self._keys[parameter] = zlib.crc32(f"{self.seed}/{name}".encode())
        self._runs[parameter] = local.numel(), local.numel(), 0
        if local.dtype == torch.bfloat16:  # only rounding asks where a shard lies
            self._runs[parameter] = _runs(parameter.shape, local_shard(parameter)[1])

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        device = local_shard(parameter)[0].device
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        blocks = moment_blocks(self.state_bits, parameter.shape)
        if blocks is not None:
            code_tables(blocks.bits, device)  # made here, since a step may run on another stream
        for moment in _MOMENTS:
            if blocks is None:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            else:
                state[f"{moment}_codes"] = zeros_by_block(parameter, 8 // blocks.bits, torch.uint8)
                state[f"{moment}_scale"] = zeros_by_block(parameter, blocks.size, torch.float32)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy what `state_dict()` of this class, or of torch.optim.AdamW, returned into the state, in its own dtypes and on its devices.

        A parameter without a state there has not been stepped: its moments become zeros.

        Raises:
            ValueError: it is of other parameters or of another precision.
        """
        self.make_states()
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})  # which would cast codes and scales to the parameter's dtype
        self.state = state
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            found, own = state_dict["state"].get(number, {}), state[parameter]
            if found and {key: value.shape for key, value in found.items()} != {key: value.shape for key, value in own.items()}:
                got = {key: tuple(value.shape) for key, value in found.items()}
                want = {key: tuple(value.shape) for key, value in own.items()}
                raise ValueError(f"AdamW: state {number} is {got}, want {want}; load a state of the same precision and parameters")
            for key, value in own.items():
                value.copy_(found[key]) if found else value.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure`, which computes loss and gradients again, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[torch.device, list[nn.Parameter]] = {}
            rates = dict[torch.device, Tensor]()
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self._runs:
                    self._prepare(parameter)
                if parameter in self._together:
                    together.setdefault(parameter.device, []).append(parameter)
                    continue
                if parameter.device not in rates:
                    rates[parameter.device] = _as_tensor(group["lr"], parameter.device)
                self.step_parameter(parameter, group | {"lr": rates[parameter.device]})
            for parameters in together.values():
                self._step_together(parameters, group)
        return loss

    @torch.no_grad()
    def step_parameter(self, parameter: nn.Parameter, group: dict[str, Any], squares: Tensor | None = None) -> None:
        """Update one parameter of that group, which has a gradient; `squares`, () float64, grows by the squares of this rank's part."""
        if parameter not in self._runs:
            self._prepare(parameter)
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


def _check_group(group: dict[str, Any], state_bits: int | None) -> None:
    """Raise ValueError for numbers and parameters that a step cannot use."""
    lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    if not ((isinstance(lr, Tensor) or lr >= 0) and 0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0 and decay >= 0):
        got = f"lr={lr}, betas={(beta1, beta2)}, eps={eps}, weight_decay={decay}"
        raise ValueError(f"AdamW: {got}, want lr, eps and weight_decay of at least 0 and betas from 0 to below 1")
    locals_ = [local_tensor(parameter) for parameter in group["params"]]
    for number, local in enumerate(locals_):
        if local.dtype not in (torch.bfloat16, torch.float32) or not local.is_contiguous():
            name = group["param_names"][number] if "param_names" in group else f"parameter {number} of its group"
            got = f"{local.dtype} with strides {local.stride()}"
            raise ValueError(f"AdamW: {name} is {got}, want contiguous bfloat16 or float32; make it so before")
    if state_bits or any(local.dtype == torch.bfloat16 and not local.is_cuda for local in locals_):
        try:
            importlib.import_module("torchao.optim")
        except ImportError as error:
            asked = f"state_bits={state_bits} needs" if state_bits else "bf16 parameters on a CPU need"
            raise ValueError(f"AdamW: {asked} torchao 0.18 or later; {install_command('torchao')} ({error})") from error


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
