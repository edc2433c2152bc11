"""The MoE layer in float64, expert by expert in plain torch: the truth for the fused layer, and layers with the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.activation_cases import hidden
from torch import Tensor

from mxep.moe import FusedMoE, MoE, MoEConfig
from mxep.moe.experts import Experts
from mxep.ops.activation.functions import ACTIVATIONS as ACTIVATION_NAMES

D, H, E, C = 64, 96, 8, 3
WEIGHTS = ("w1", "w2", "w3", "b1", "b2", "b3")
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    **{name: {"activation": name} for name in ACTIVATION_NAMES if name != "swiglu"},
    "clamped": {"swiglu_limit": 2.0, "swiglu_alpha": 1.702, "swiglu_offset": 1.0},  # gpt-oss' with a limit that some are beyond
}


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(**{"dim": D, "hidden": H, "num_experts": E, "top_k": C, "renormalize": True, **changes})


def make(kind: type[MoE], recipe: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> MoE:
    """A layer whose weights depend on the seed alone, on the device of the tests; biases are not zero."""
    generator = torch.Generator().manual_seed(seed)
    moe = kind(config(**changes), recipe).cpu()
    with torch.no_grad():
        for parameter in moe.parameters():
            spread = 0.3 if parameter.dim() == 2 and parameter.shape != (E, D) else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * spread)
    return moe.to(torch.get_default_device(), dtype)


def _of_expert(how: Experts | MoEConfig, parameters: dict[str, Tensor], e: int, x: Tensor) -> Tensor:
    """Expert e of rows x; `parameters` of the experts."""
    w1, w2, w3, b1, b2, b3 = (parameters[name][e] if name in parameters else None for name in WEIGHTS)
    assert w1 is not None
    assert w2 is not None
    first = x @ w1.T + (0 if b1 is None else b1)
    up = None if w3 is None else x @ w3.T + (0 if b3 is None else b3)
    return hidden(first, up, how.activation, how.swiglu) @ w2.T + (0 if b2 is None else b2)


def _of_experts(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts' own among a layer's parameters."""
    return {name.removeprefix("experts."): value for name, value in parameters.items() if name.startswith("experts.")}


def experts_truth(module: Experts, x: Tensor, dy: Tensor, counts: list[int]) -> dict[str, Tensor]:
    """y, dx and the gradient of every parameter of experts on their rows, float64; rows after the last expert's give zeros."""
    parameters = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    x, dy = (x + 0).detach().double().requires_grad_(), (dy + 0).double()
    *parts, rest = x.split([*counts, x.shape[0] - sum(counts)])
    y = torch.cat([*(_of_expert(module, parameters, e, part) for e, part in enumerate(parts)), torch.zeros_like(rest)])
    return {"y": y.detach(), **dict(zip(["dx", *parameters], torch.autograd.grad(y, [x, *parameters.values()], dy), strict=True))}


def outputs(moe: MoE, parameters: dict[str, Tensor], x: Tensor, experts: Tensor) -> Tensor:
    """y (T, D) of tokens x whose choices (T, C) are given; differentiable in parameters and x."""
    how = moe.config
    logits = x @ parameters["router.gate.weight"].T
    scores = (logits.softmax(-1) if how.score_function == "softmax" else logits.sigmoid()).gather(-1, experts)
    scores = (scores / scores.sum(-1, keepdim=True) if how.renormalize else scores) * how.route_scale
    y, own = torch.zeros_like(x), _of_experts(parameters)
    for e in range(how.num_experts):
        token, choice = (experts == e).nonzero(as_tuple=True)
        y = y.index_add(0, token, scores[token, choice][:, None] * _of_expert(how, own, e, x[token]))
    return y


def choice_gradients(moe: MoE, parameters: dict[str, Tensor], x: Tensor, dy: Tensor, experts: Tensor) -> Tensor:
    """Gradients of the choices' scores (T, C): the product of dy and the expert's output."""
    out, own = torch.zeros(experts.shape, dtype=x.dtype, device=x.device), _of_experts(parameters)
    for e in range(moe.config.num_experts):
        token, choice = (experts == e).nonzero(as_tuple=True)
        out[token, choice] = (dy[token] * _of_expert(moe.config, own, e, x[token])).sum(-1)
    return out


def truth(moe: MoE, x: Tensor, dy: Tensor, experts: Tensor) -> dict[str, Tensor]:
    """y, dx and the gradient of every parameter of a whole (not sharded) layer, float64."""
    parameters = {name: value.detach().double().requires_grad_() for name, value in moe.named_parameters()}
    x = x.detach().double().requires_grad_()
    y = outputs(moe, parameters, x, experts)
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.double())
    return {"y": y.detach(), **dict(zip(["dx", *parameters], grads, strict=True))}


def walk(moe: MoE, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The same results from a layer itself."""
    x = x.detach().requires_grad_()
    y = moe(x)
    grads = torch.autograd.grad(y, [x, *moe.parameters()], dy)
    return {"y": y.detach(), **dict(zip(["dx", *(name for name, _ in moe.named_parameters())], grads, strict=True))}


def error(got: Tensor, want: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-300))


def error_ratios(results: Iterable[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]) -> dict[str, float]:
    """Of (ours, theirs, truth) each: our error over theirs, both root mean squares over all results, by name."""
    squares: dict[str, list[float]] = {}
    for ours, theirs, want in results:
        for name, got in ours.items():
            assert (got.dtype, got.shape) == (theirs[name].dtype, theirs[name].shape)
            both_squares = squares.setdefault(name, [0.0, 0.0])
            for at, value in enumerate((got, theirs[name])):
                both_squares[at] += error(value, want[name]) ** 2
    return {name: (ours / theirs) ** 0.5 for name, (ours, theirs) in squares.items()}


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal values of a generator of the CPU, on the device of the tests."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def both(recipe: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> tuple[MoE, MoE]:
    """The layer on the five blocks and the fused one, of the same weights."""
    return make(MoE, recipe, dtype, **changes), make(FusedMoE, recipe, dtype, **changes)


def tokens(count: int = 160, dtype: torch.dtype = torch.bfloat16, kind: str = "normal", width: int = D) -> tuple[Tensor, Tensor]:
    """x and dy (T, width)."""
    generator = torch.Generator().manual_seed(7)
    x, dy = (draw(generator, count, width) for _ in range(2))
    if kind == "student":
        x = x / draw(generator, count, width).abs()
    if kind == "outliers":
        x[:, :4] *= 30
        dy = dy * torch.exp(1.5 * draw(generator, count, 1))
    return x.to(dtype), dy.to(dtype)
