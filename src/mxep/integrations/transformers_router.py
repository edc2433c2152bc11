"""Routers of transformers' models by this package's two kernels for routing, where they compute the same but for rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxep.moe.router import RouterProduct, RouteTokens
from mxep.ops.routing.router_reference import LOGITS
from mxep.parallel.forwards import replace_forward

_PROBED_TOKENS, _PROBED_LOGITS = 16, 256
_BIASES = ((1 / 8, 0.0), (1.0, 0.0), (1 / 8, -2.0))  # standard deviation and mean
_SAME = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # relative difference of weights that are the same but for rounding
_BIAS = "e_score_correction_bias"  # of the choice alone (DeepSeek-V3)


class RouterForm(NamedTuple):
    """How a router makes weights of its logits; fields without a line here are as in `MoEConfig`.

    Attributes:
        in_float32: the product is in float32, whatever the dtypes of tokens and weight.
        as_logits: the weights of the choices have the logits' dtype; False: float32.
    """

    top_k: int
    score_function: str
    num_groups: int
    top_groups: int
    renormalize: bool
    route_scale: float
    in_float32: bool
    as_logits: bool


def router_form(router: nn.Module) -> RouterForm | None:
    """How a module routes, found by running its class's forward on bf16 values on a CPU; None: it is no router, or routes in another way,
    perhaps only in training, or in float64.

    Modules whose class is called ...Router, with a weight (E, D), `top_k`, and (logits, weights, experts) as outputs, are tried.
    """
    kind: Any = type(router)
    weight = router._parameters.get("weight")
    if not kind.__name__.endswith("Router") or weight is None or weight.dim() != 2 or not hasattr(router, "top_k"):
        return None
    tensors = *router.named_parameters(recurse=False), *router.named_buffers(recurse=False)
    if any(tensor.is_floating_point() and tensor.dtype not in LOGITS for _, tensor in tensors):
        return None
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors)
    with torch.device("cpu"):
        of_modes = {_form_of(kind, shapes, (*_attributes(router), ("training", mode))) for mode in (False, True)}
    return of_modes.pop() if len(of_modes) == 1 else None


def _attributes(router: nn.Module) -> tuple[tuple[str, object], ...]:
    """The numbers and words that a router may route by, without its mode."""
    return tuple((name, value) for name, value in vars(router).items() if isinstance(value, int | float | str) and name != "training")


@functools.cache
def _form_of(kind: Any, shapes: tuple[tuple[str, tuple[int, ...]], ...], plain: tuple[tuple[str, object], ...]) -> RouterForm | None:
    generator = torch.Generator().manual_seed(0)
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(plain)
    for name, shape in shapes:
        values = torch.randn(shape, generator=generator)
        setattr(probe, name, nn.Parameter(values.bfloat16() if name != _BIAS else values / 8, requires_grad=False))
    D = probe.weight.shape[1]
    tokens = (torch.randn(_PROBED_TOKENS, D, generator=generator) / D**0.5).bfloat16()
    try:
        wanted = kind.forward(probe, tokens)
        form = next((form for form in _candidates(probe, wanted) if _same(_route(probe, form, tokens), wanted)), None)
        return form if form is None or _chooses_alike(probe, form, generator) else None
    except Exception:  # of other outputs, options or shapes
        return None


def _chooses_alike(probe: Any, form: RouterForm, generator: torch.Generator) -> bool:
    """Whether a router of that form makes the same choices of logits and biases for which rules that are nearly the same differ.

    Few experts of a token have large logits, so the largest score of a group and the sum of its two largest ones rank groups in another
    order; in some tokens one group has the largest logit of all and every other group two that are a bit smaller.  Negative biases tell
    experts of other groups that are left out from those whose score becomes 0.
    """
    E, D = probe.weight.shape
    if E > D:
        return form.num_groups == form.top_groups  # no weight gives every expert a logit of its own
    probe.weight.copy_(torch.eye(E, D))
    large = torch.rand(_PROBED_LOGITS, E, generator=generator) < 0.2
    ranks = torch.rand(_PROBED_LOGITS, E, generator=generator).argsort(1) / E  # no two of a token are equal
    logits = torch.where(large, 2 + 2 * ranks, -1 - 7 * ranks)
    if (size := E // form.num_groups) > 1:
        groups = torch.arange(form.num_groups)
        single = (-5 - ranks[: len(groups)]).unflatten(1, (-1, size))  # (tokens, groups, experts)
        single[:, :, :2] = 3.4 + 0.5 * ranks[: len(groups), : 2 * len(groups)].unflatten(1, (-1, 2))
        single[groups, groups, 0], single[groups, groups, 1] = 4.0, -8.0
        logits = torch.cat((logits, single.flatten(1)))
    tokens = F.pad(logits, (0, D - E)).bfloat16()
    for deviation, mean in _BIASES if hasattr(probe, _BIAS) else ((0.0, 0.0),):
        if hasattr(probe, _BIAS):
            getattr(probe, _BIAS).copy_(mean + deviation * torch.randn(E, generator=generator))
        if not _same(_route(probe, form, tokens), type(probe).forward(probe, tokens)):
            return False
    return True


def _candidates(router: Any, wanted: tuple[Tensor, Tensor, Tensor]) -> Iterator[RouterForm]:
    logits, weights, _ = wanted
    groups = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
    in_float32 = logits.dtype == torch.float32
    for score_function in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            for scale in (1.0, float(getattr(router, "routed_scaling_factor", 1.0))):
                yield RouterForm(router.top_k, score_function, *groups, renormalize, scale, in_float32, weights.dtype == logits.dtype)


def _same(got: tuple[Tensor, Tensor, Tensor], wanted: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether logits and weights are the same, and the choices but for ties, in any order of a token's choices."""
    (logits, weights, experts), (want_logits, want_weights, want_experts) = got, wanted
    if not torch.equal(logits, want_logits) or weights.dtype != want_weights.dtype:
        return False
    chosen, want_chosen = (logits.gather(1, indices).sort(1).values for indices in (experts, want_experts))
    sorted_weights, want_sorted = (values.float().sort(1).values for values in (weights, want_weights))
    near = (sorted_weights - want_sorted).abs() <= _SAME[weights.dtype] * want_sorted
    return torch.equal(chosen, want_chosen) and bool(near.all())


def convert_router(router: nn.Module, form: RouterForm) -> Callable[[], None]:
    """Let a module of that form route by our kernels; returns what undoes it. Names and parameters stay."""
    return replace_forward(router, _router_forward, form, _attributes(router))


def _router_forward(
    router: nn.Module, form: RouterForm, attributes: tuple[tuple[str, object], ...], hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The class's own forward runs where the module's attributes are others than when it was converted."""
    if torch.compiler.is_compiling():  # a graph cannot go through all attributes
        same = all(getattr(router, name, None) == value for name, value in attributes)
    else:
        same = _attributes(router) == attributes
    if not same:
        return type(router).forward(router, hidden_states)  # type: ignore[no-any-return]
    return _route(router, form, hidden_states)


def _route(router: Any, form: RouterForm, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (..., D) -> logits (T, E), weights (T, C) and experts (T, C) in rising order."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if form.in_float32:
        logits = RouterProduct.apply(tokens, router.weight)
    else:
        logits = F.linear(tokens, router.weight, getattr(router, "bias", None))
    rules = form.top_k, form.score_function, form.num_groups, form.top_groups, False, form.renormalize, form.route_scale, False, False
    dtype = logits.dtype if form.as_logits else torch.float32
    weights, experts, *_ = RouteTokens.apply(logits, getattr(router, _BIAS, None), dtype, *rules)
    return logits, weights, experts
