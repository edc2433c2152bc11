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
from typing import Any, Literal, NamedTuple

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


class _ParameterInfo(NamedTuple):
    """What a step reads of a parameter besides its state; to find it takes longer than the step.

    Attributes:
        name: its own or, without names, its number.
        key: of the random bits.
        together: whether torch's step of many parameters takes it.
        runs: where this rank's shard lies, see `_runs`.
    """

    name: str
    key: int
    together: bool
    runs: tuple[int, int, int]


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
        lr: learning rate; a number, or a tensor of one, which a CUDA graph can read if it is on the parameters' device.
        betas: decay of both moments.  Moments in bf16 are rounded to nearest, as torch's are: with a second beta above 0.998, as the
            default, the second moment cannot fall, since its change is below half of the distance to the next number, and from 0.996 on
            it stops soon.  Take 0.95, or `state_bits`.
        eps: added to the second moment's root.
        weight_decay: of groups without their own.
        state_bits: 8 or 4 for moments as torchao's codes, with a float32 scale for each 256 or 128 values, which needs torchao; parameters
            of fewer than 4096 values, or of no whole blocks, keep moments in their dtype.  With None all of them do.
        seed: of the random bits.

    Attributes:
        grad_scale: () float32 on the parameters' device, what gradients are divided by; None: 1.
        found_inf: () float32 there, above 0 to skip the step; None: 0.

    Raises:
        ValueError: a number out of range; options of torch's that are not here; a parameter of another dtype, or not contiguous; torchao
            is missing.  In `make_states` and the first step: a shard of a parameter that ends within a block of quantised moments.

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
        if state_bits:
            _check_torchao(f"state_bits={state_bits} needs")
        self.state_bits, self.seed = state_bits, seed
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._info: dict[Tensor, _ParameterInfo] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's has its own attributes alone."""
        names = "state_bits", "seed", "grad_scale", "found_inf", "_info"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ValueError for numbers and parameters that a step cannot use."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
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
                self._state_of(parameter)

    def _info_of(self, parameter: Tensor) -> _ParameterInfo:
        """What a step reads of this parameter besides its state.

        It is found once.  Where a parameter is new, those that have left the groups are forgotten: Accelerate replaces what FSDP2 shards.
        """
        if parameter not in self._info:
            infos, count = dict[Tensor, _ParameterInfo](), 0
            for group in self.param_groups:
                parameters = group["params"]
                for name, one in zip(group.get("param_names") or range(count, count + len(parameters)), parameters, strict=True):
                    infos[one] = self._info.get(one) or _parameter_info(one, str(name), self.seed, self.state_bits)
                count += len(parameters)
            self._info = infos
            for gone in self.state.keys() - infos.keys():
                del self.state[gone]
        if parameter not in self._info:
            raise ValueError("AdamW: a parameter of no group; add one by add_param_group")
        return self._info[parameter]

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state, which is made if there is none."""
        if not self.state.get(parameter):
            name = self._info_of(parameter).name
            if parameter.dtype == torch.bfloat16 and local_tensor(parameter).device.type == "cpu":
                _check_torchao("a step of bf16 on a CPU needs")
            try:
                self.state[parameter] = self._new_state(parameter)
            except ValueError as error:
                raise ValueError(f"AdamW: {name}: {error}") from error
        return self.state[parameter]

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
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
        """Copy what `state_dict()` returned into the state, in its own dtypes and on its own devices; hooks see the groups alone.

        The dictionary of torch.optim.AdamW fits too, where moments have the parameter's dtype here.  A parameter without a state there has
        not been stepped: its moments become zeros.

        Raises:
            ValueError: it is of other parameters or of another precision, or asks for what this class does not do.  Nothing is changed.
        """
        groups, found = state_dict["param_groups"], dict[Tensor, dict[str, Tensor]]()
        if [len(group["params"]) for group in groups] == [len(group["params"]) for group in self.param_groups]:  # else torch raises
            for group, own_group in zip(groups, self.param_groups, strict=True):
                _check_numbers(group)
                for number, parameter in zip(group["params"], own_group["params"], strict=True):
                    if state_dict["state"].get(number):
                        found[parameter] = {key: torch.as_tensor(value) for key, value in state_dict["state"][number].items()}
        for one, values in found.items():
            got, want = ({key: tuple(value.shape) for key, value in state.items()} for state in (values, self._state_of(one)))
            if got != want:
                name = self._info_of(one).name
                raise ValueError(f"AdamW: the state of {name} is {got}, want {want}; load one of the same precision and parameters")
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})  # which would cast codes and scales to the parameter's dtype
        self.state = state
        for parameter, own in state.items():
            for key, value in own.items():
                value.copy_(found[parameter][key]) if parameter in found else value.zero_()

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
                if (self._info.get(parameter) or self._info_of(parameter)).together:
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
        info = self._info.get(parameter) or self._info_of(parameter)
        state = self.state.get(parameter) or self._state_of(parameter)
        local, gradient = local_tensor(parameter), local_tensor(parameter.grad)  # type: ignore[arg-type]
        if not local.numel():
            return
        codes = "" if "exp_avg" in state else "_codes"
        moments = [local_tensor(state[f"{moment}{codes}"]).view(-1) for moment in _MOMENTS]
        scales = [local_tensor(state[f"{moment}_scale"]).view(-1) if codes else None for moment in _MOMENTS]
        step: Callable[..., None] = reference.adamw_step if info.together else direct.adamw_step
        step(
            local.view(-1),
            gradient.reshape(-1),
            *moments,
            *scales,
            state["step"],
            _as_tensor(group["lr"], local.device),
            self.grad_scale,
            self.found_inf,
            info.key,
            info.runs,
            (*group["betas"], group["weight_decay"], group["eps"]),
            squares,
        )
        torch.autograd.graph.increment_version((parameter, local))  # kernels write past autograd

    def _step_together(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters that are stepped by one call, of that group and of one device, which have gradients."""
        rows = []
        for parameter in parameters:
            local, state = local_tensor(parameter), self._state_of(parameter)  # of empty shards too: all ranks have the same states
            if local.numel():
                gradient = local_tensor(parameter.grad).float().contiguous()  # type: ignore[arg-type]
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


def _parameter_info(parameter: Tensor, name: str, seed: int, state_bits: int | None) -> _ParameterInfo:
    local = local_tensor(parameter)
    plain = local.dtype == torch.float32 and moment_blocks(state_bits, parameter.shape) is None
    together = plain and (not local.is_cuda or parameter.numel() <= _MOST_SMALL_VALUES)
    runs = local.numel(), local.numel(), 0
    if local.dtype == torch.bfloat16:  # only rounding asks where a shard lies
        runs = _runs(parameter.shape, local_shard(parameter)[1])
    return _ParameterInfo(name, zlib.crc32(f"{seed}/{name}".encode()), together, runs)


def _check_numbers(group: dict[str, Any]) -> None:
    """Raise ValueError for options of a group that a step cannot follow."""
    lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    one_rate = lr.numel() == 1 if isinstance(lr, Tensor) else lr >= 0
    if not (one_rate and 0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0 and decay >= 0):
        got = f"lr={lr}, betas={(beta1, beta2)}, eps={eps}, weight_decay={decay}"
        raise ValueError(f"AdamW: {got}, want lr (one number), eps and weight_decay of at least 0 and betas from 0 to below 1")
    if asked := [name for name in ("amsgrad", "maximize", "differentiable") if group.get(name)]:
        raise ValueError(f"AdamW: a group with {asked[0]}=True, which this class does not do; take torch.optim.AdamW")


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError for options and parameters that a step cannot use."""
    _check_numbers(group)
    for number, parameter in enumerate(group["params"]):
        local = local_tensor(parameter)
        if local.dtype not in (torch.bfloat16, torch.float32) or not local.is_contiguous():
            name = group["param_names"][number] if "param_names" in group else f"parameter {number} of its group"
            got = f"{local.dtype} with strides {local.stride()}"
            raise ValueError(f"AdamW: {name} is {got}, want contiguous bfloat16 or float32; make it so before")


def _check_torchao(who_needs: str) -> None:
    try:
        importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ValueError(f"AdamW: {who_needs} torchao 0.18 or later; {install_command('torchao')} ({error})") from error


def _as_tensor(lr: float | Tensor, device: torch.device) -> Tensor:
    if not isinstance(lr, Tensor):
        return torch.full((), lr, dtype=torch.float32, device=device)
    fits = not lr.dim() and lr.dtype == torch.float32 and lr.device == device
    return lr if fits else lr.to(device, torch.float32).reshape(())


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
