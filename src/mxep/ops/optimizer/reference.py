"""One parameter's AdamW step: torch's fused one in float32; else torchao's arithmetic, moments quantised or bf16 rounded stochastically.

Stochastic rounding needs random bits.  They are a hash of a key, the step and the position of the value in the whole parameter.  No
generator has a state, and a parameter has the same bits on any number of ranks.  All but float32 needs torchao.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mxep.ops.optimizer.codes import BLOCKS, code_tables, dequantize, quantize

_LOW_32_BITS = 0xFFFFFFFF


def bits_of(parameter: Tensor, codes: Tensor, scale: Tensor | None) -> int:
    """Bits of a moment's codes; 0: it is not quantised."""
    return 0 if scale is None else 8 * codes.numel() // max(1, parameter.numel())


def check_adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    scalars: tuple[Tensor | None, ...],
    squares: Tensor | None = None,
) -> None:
    """Raises ValueError unless the tensors are those of `adamw_step`; scalars: step, lr, grad_scale, found_inf."""
    moments = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    n, bits = parameter.numel(), bits_of(parameter, exp_avg, exp_avg_scale)
    block = BLOCKS.get(bits, 1)
    dtype, scales = (torch.uint8, ((n // block,), torch.float32)) if bits else (parameter.dtype, None)
    wanted = [((n * bits // 8 if bits else n,), dtype)] * 2 + [scales] * 2
    found = [None if moment is None else (tuple(moment.shape), moment.dtype) for moment in moments]
    floats = {parameter.dtype, gradient.dtype} <= {torch.bfloat16, torch.float32}
    given = [tensor for tensor in (parameter, gradient, *moments) if tensor is not None]
    if not floats or parameter.shape != gradient.shape or parameter.dim() != 1 or found != wanted or n % block or bits not in (0, *BLOCKS):
        raise ValueError(
            f"adamw_step: parameter {tuple(parameter.shape)} {parameter.dtype}, gradient {tuple(gradient.shape)} {gradient.dtype}, moments "
            f"{found}, want (n,) bfloat16 or float32 and moments in the parameter's dtype, or uint8 codes of 8 or 4 bits with a float32 "
            "scale for every 256 or 128 values"
        )
    numbers = [number for number in scalars if number is not None]
    if any(number.shape or number.dtype != torch.float32 for number in numbers):
        got = [f"{tuple(number.shape)} {number.dtype}" for number in numbers]
        raise ValueError(f"adamw_step: step, lr, grad_scale and found_inf that are there are {got}, want () float32")
    if squares is not None and (squares.shape or squares.dtype != torch.float64):
        raise ValueError(f"adamw_step: squares is {tuple(squares.shape)} {squares.dtype}, want () float64")
    if {tensor.device for tensor in (*given, *numbers, *([] if squares is None else [squares]))} != {parameter.device}:
        raise ValueError(f"adamw_step: a tensor on another device than the parameter's, {parameter.device}; move all of them there")
    if not all(tensor.is_contiguous() for tensor in given):
        raise ValueError("adamw_step: a tensor that is not contiguous, want contiguous ones; the step writes in place")


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    step: Tensor,
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    key: int,
    runs: Sequence[int],
    hyperparameters: Sequence[float],
    squares: Tensor | None = None,
) -> None:
    """One AdamW step of the n values that this rank has of a parameter, in place.

    Args:
        parameter: (n,) bf16 or float32.  gradient: (n,) bf16 or float32.
        exp_avg, exp_avg_sq: (n,) in the parameter's dtype, or codes (n * bits / 8,) uint8, n then a multiple of the block.
        exp_avg_scale, exp_avg_sq_scale: (n / block,) float32 of codes, else None.
        step: () float32, steps taken.
        lr: () float32.
        grad_scale: () float32, what gradients are divided by; None: 1.
        found_inf: () float32, above 0 to leave everything as it is; None: 0.
        key: of the random bits, 0 to 2**32 - 1.
        runs: length of a run of values that are consecutive in the whole parameter, distance of the runs' starts, first position.
        hyperparameters: both betas, weight decay, eps.
        squares: () float64, to which the sum of the gradient's squares, before its division, is added unless the step is skipped.
    """
    check_adamw_step(parameter, gradient, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, (step, lr, grad_scale, found_inf), squares)
    skipped = torch.zeros_like(step) > 0 if found_inf is None else found_inf > 0
    if squares is not None:
        squares += torch.where(skipped, 0.0, gradient.double().square().sum())
    beta1, beta2, weight_decay, eps = hyperparameters
    bits = bits_of(parameter, exp_avg, exp_avg_scale)
    if not bits and parameter.dtype == torch.float32:
        lists = [parameter], [gradient.float()], [exp_avg], [exp_avg_sq], [step]
        fused_adamw_step(*lists, lr, grad_scale, found_inf, hyperparameters)
        return
    from torchao.optim.adam import single_param_adam

    now = step + 1
    new = parameter.to(torch.float32, copy=True)
    if exp_avg_scale is None or exp_avg_sq_scale is None:
        averages = [moment.to(torch.float32, copy=True) for moment in (exp_avg, exp_avg_sq)]
    else:
        values = code_tables(bits, parameter.device)[0]
        averages = [dequantize(exp_avg, exp_avg_scale, values[0], bits), dequantize(exp_avg_sq, exp_avg_sq_scale, values[1], bits)]
    scaled = gradient.float() if grad_scale is None else gradient.float() / grad_scale
    single_param_adam(new, scaled, now, *averages, None, lr, beta1, beta2, weight_decay, eps, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False)
    old, after = [parameter, exp_avg, exp_avg_sq, step], [new, *averages, now]
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        (codes, scale), (codes_sq, scale_sq) = (quantize(average, values[n], bits) for n, average in enumerate(averages))
        old, after = [*old, exp_avg_scale, exp_avg_sq_scale], [new, codes, codes_sq, now, scale, scale_sq]
    if parameter.dtype == torch.bfloat16:
        after[0] = round_stochastically(new, random_bits(positions_of(runs, new), key + now.long()))
    for into, value in zip(old, after, strict=True):
        into.copy_(torch.where(skipped, into, value.to(into.dtype)))


def fused_adamw_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    hyperparameters: Sequence[float],
) -> None:
    """torch's fused step of many parameters by one call, in place.

    torch would write divided gradients back. Here gradients keep their values, and their quotients take as much memory again.

    Args:
        parameters, gradients, exp_avgs, exp_avg_sqs: contiguous float32 on one device, of any shapes that are not empty.
        steps: () float32 each.
        lr, grad_scale, found_inf, hyperparameters: as in `adamw_step`.
    """
    beta1, beta2, weight_decay, eps = hyperparameters
    skipped = None if found_inf is None else (found_inf > 0).float()  # torch skips at 1 alone
    if skipped is None:
        torch._foreach_add_(steps, 1)
    else:  # a list: of one tensor for all torch reads the value on the host
        torch._foreach_add_(steps, [1 - skipped] * len(steps))
    torch._fused_adamw_(
        parameters,
        gradients if grad_scale is None else torch._foreach_div(gradients, grad_scale),
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skipped,
    )


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


def positions_of(runs: Sequence[int], values: Tensor) -> Tensor:
    """(n,) int64: where values (n,) of a shard are in the whole parameter; `runs` as in `adamw_step`.

    >>> positions_of((3, 6, 15), torch.zeros(6)).tolist()
    [15, 16, 17, 21, 22, 23]
    """
    run, stride, first = runs
    here = torch.arange(values.numel(), device=values.device)
    return first + here // run * stride + here % run


def random_bits(positions: Tensor, key: Tensor) -> Tensor:
    """(n,) int64 in 0 to 65535 for the values at those positions; positions that are 2**32 apart get the same bits.

    Two consecutive positions share a hash of 32 bits.

    Args:
        positions: (n,) int64.
        key: () int64.
    """
    hashes = _hash(_hash((positions & _LOW_32_BITS) >> 1) ^ _hash(key & _LOW_32_BITS))
    return hashes >> (positions & 1) * 16 & 0xFFFF


def _hash(x: Tensor) -> Tensor:
    """A bijection of 32 bits in int64, whose every bit depends on all; the constants are those of hash-prospector's best "lowbias32"."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW_32_BITS
    return x ^ (x >> 15)
