"""AdamW with torchao's quantised moments, and with bf16 parameters whose updates are rounded stochastically.

The arithmetic is torchao's: AdamW in float32, 8-bit and 4-bit codes with a scale for each block.  Around it, one function updates a
parameter: it divides the gradient by clipping's factor, and leaves everything as it was if the step is skipped, without the host.  On a GPU
torch.compile makes one kernel or two of it; on a CPU it runs as it is.

Stochastic rounding needs random bits.  They are a hash of the run's seed, the parameter's name, the step and the position of the value in
the whole parameter.  No generator has a state that a checkpoint would have to keep, replicas of a parameter stay equal, and a run resumes
with the same bits on any number of ranks.  Importing this module needs torchao.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import dequant_with_qmap, quantize_4bit_with_qmap, quantize_8bit_with_qmap, scale_tensor
from torchao.optim.subclass_4bit import get_qmap_signed as signed_4bit
from torchao.optim.subclass_4bit import get_qmap_unsigned as unsigned_4bit
from torchao.optim.subclass_8bit import get_qmap_signed as signed_8bit
from torchao.optim.subclass_8bit import get_qmap_unsigned as unsigned_8bit

from mxep.moe.init import local_shard
from mxep.train.state_precision import MomentBlocks, StatePrecision, zeros_by_block

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = {8: (signed_8bit, unsigned_8bit), 4: (signed_4bit, unsigned_4bit)}  # values of the codes of each moment, by bits
_LOW_32_BITS = 0xFFFFFFFF


class LowMemoryAdamW(torch.optim.Optimizer):
    """AdamW for what `StatePrecision` names; parameters and gradients are plain tensors or DTensors, on any meshes.

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
        self._keys: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                try:
                    self.init_state(parameter)
                except ValueError as error:
                    raise ValueError(f"optimizer: {name}: {error}") from error
                key = zlib.crc32(f"{seed}/{name}".encode())
                self._keys[parameter] = torch.tensor(key, dtype=torch.int64, device=self.state[parameter]["step"].device)

    def init_state(self, parameter: nn.Parameter) -> None:
        """Moments of zeros. Raises ValueError if the parameter's shard ends within a block."""
        device = local_shard(parameter)[0].device
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        blocks = self.precision.blocks(parameter.shape)
        if blocks is not None:
            _code_values(blocks.bits, device)  # made here, since a step may run on another stream
        for moment in _MOMENTS:
            if blocks is None:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            else:
                state[f"{moment}_codes"] = zeros_by_block(parameter, 8 // blocks.bits, torch.uint8)
                state[f"{moment}_scale"] = zeros_by_block(parameter, blocks.size, torch.float32)
        self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_parameter(parameter, group)

    @torch.no_grad()
    def step_parameter(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Update one parameter of that group, which has a gradient."""
        state, blocks = self.state[parameter], self.precision.blocks(parameter.shape)
        (local, region), gradient = local_shard(parameter.detach()), local_shard(parameter.grad)[0]  # type: ignore[arg-type]
        if not local.numel():
            return
        run, stride, first = _runs(parameter.shape, region)
        width = run if blocks is None else blocks.size
        starts = torch.arange(0, local.numel(), width, device=local.device)
        starts = (first + starts if run == local.numel() else first + starts // run * stride + starts % run)[:, None]
        moments = [local_shard(value)[0] for name, value in state.items() if name != "step"]
        one, zero = (torch.full((), value, device=local.device) for value in (1.0, 0.0))
        lr = group["lr"]
        update = _compiled_update() if local.is_cuda else _update
        with torch._dynamo.utils.disable_cache_limit():  # each shape of a shard is compiled once
            update(
                local.view(-1, width),
                gradient.reshape(-1, width),
                [moment.view(-1, width) if blocks is None else moment.view(-1) for moment in moments],
                () if blocks is None else _code_values(blocks.bits, local.device),
                blocks,
                state["step"],
                starts,
                self._keys[parameter],
                lr if isinstance(lr, Tensor) else torch.full((), lr, device=local.device),
                one if self.grad_scale is None else self.grad_scale,
                zero if self.found_inf is None else self.found_inf,
                (*group["betas"], group["weight_decay"], group["eps"]),
            )


def _update(
    parameter: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    code_values: tuple[Tensor, ...],
    blocks: MomentBlocks | None,
    step: Tensor,
    starts: Tensor,
    key: Tensor,
    lr: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    constants: tuple[float, float, float, float],
) -> None:
    """One parameter's step, in place.

    Args:
        parameter, gradient: (R, width); width is the block of quantised moments.
        moments: both (R, width), or codes (R * width * bits / 8) uint8 and scales (R,) float32 of both.
        code_values: (2**bits,) float32 of each quantised moment.
        step: () float32, steps taken.
        starts: (R, 1) int64, position of each row's first value in the whole parameter.
        key: () int64, of the random bits.
        lr, grad_scale, found_inf: () float32.
        constants: both betas, weight decay, eps.
    """
    skipped = found_inf > 0
    now = step + 1
    new = parameter.to(torch.float32, copy=True)
    if blocks is None:
        averages = [moment.to(torch.float32, copy=True) for moment in moments]
    else:
        averages = [_dequantize(moments[2 * n], moments[2 * n + 1], code_values[n], blocks) for n in (0, 1)]
    beta1, beta2, weight_decay, eps = constants
    scaled = gradient.float() / grad_scale
    single_param_adam(new, scaled, now, *averages, None, lr, beta1, beta2, weight_decay, eps, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False)
    if blocks is None:
        after = averages
    else:
        after = [part for n in (0, 1) for part in _quantize(averages[n], code_values[n], blocks)]
    if parameter.dtype == torch.bfloat16:
        new = round_stochastically(new, _random_bits(starts, parameter.shape[1], key + now.long()))
    for old, value in ((parameter, new), *zip(moments, after, strict=True), (step, now)):
        old.copy_(torch.where(skipped, old, value.to(old.dtype)))


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """With fixed shapes: a parameter runs through the same kernels in every step, also after a resume."""
    return torch.compile(_update, fullgraph=True, dynamic=False)


@functools.cache
def _code_values(bits: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values(), device=device) for values in _CODES[bits])


def _dequantize(codes: Tensor, scale: Tensor, values: Tensor, blocks: MomentBlocks) -> Tensor:
    """(R * size * bits / 8) codes and (R,) scales -> (R, size) float32."""
    if blocks.bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    return dequant_with_qmap(codes.view(-1, blocks.size), values, scale)


def _quantize(moment: Tensor, values: Tensor, blocks: MomentBlocks) -> tuple[Tensor, Tensor]:
    """The inverse of `_dequantize`, to the nearest code."""
    scaled, scale = scale_tensor(moment, blocks.size)
    if blocks.bits == 8:
        return quantize_8bit_with_qmap(scaled, values).view(-1), scale
    codes = quantize_4bit_with_qmap(scaled, values).view(-1, 2)
    return (codes[:, 0] << 4) | codes[:, 1], scale


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bf16, up or down with probabilities that make it right on average.

    Args:
        values: float32.
        bits: of the same shape, int64, uniform in 0 to 65535; value x and bits b give the bf16 below |x| + b / 65536 of its spacing.

    Examples:
        >>> x = torch.full((4,), 1 + 1 / 512)  # a quarter of the way from 1 to the next bf16, 1 + 1/128
        >>> round_stochastically(x, torch.tensor([0, 49151, 49152, 65535])).tolist()
        [1.0, 1.0, 1.0078125, 1.0078125]
    """
    rounded = ((values.view(torch.int32) + bits.int()) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).bfloat16()


def _random_bits(starts: Tensor, width: int, key: Tensor) -> Tensor:
    """(R, width) int64 in 0 to 65535 for the values at `starts` (R, 1) and after; positions that are 2**32 apart get the same bits."""
    positions = starts + torch.arange(width, device=starts.device)
    return _hash(_hash(positions & _LOW_32_BITS) ^ _hash(key & _LOW_32_BITS)) >> 16


def _hash(x: Tensor) -> Tensor:
    """A bijection of 32 bits in int64, whose every bit depends on all; the constants are those of hash-prospector's best "lowbias32"."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW_32_BITS
    return x ^ (x >> 15)


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
