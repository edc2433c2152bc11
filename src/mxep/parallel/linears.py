"""Dense linear layers in MXFP8: the grouped GEMM with one group, in place of torch.nn.Linear and under its names.

forward  x (..., K) 1x32 along K times weight (N, K) 1x32 along K -> (..., N)
backward  dgrad: the gradient 1x32 along N times the weight 1x32 along N; wgrad as the recipe says (`mxep.Recipe.wgrad`)
Parameters, their names and checkpoints are those of torch.nn.Linear; a converted layer can be sharded by FSDP2 and by the styles of
parallel/tensor_parallel.py, where each rank quantises its own shard.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.checks import check_model
from mxep.grouped_mm.dense import DenseLora, dense_mm
from mxep.moe import Router
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.parallel.linear_gains import linear_gains
from mxep.parallel.module_names import as_patterns, check_patterns, matches_any, matches_name, shown_names
from mxep.placements import to_local
from mxep.recipe import Recipe, TakesRecipe, resolve_recipe
from mxep.shapes import MX_BLOCK

_log = logging.getLogger(__name__)
_WHERE = "convert_linears"
ADAPTERS = ("lora_*", "modules_to_save")  # modules of peft, which are trained in high precision
KEPT_APART = ("router", "gate", "lm_head", "output")  # routers and projections to logits: small GEMMs that are sensitive to precision


class MXLinear(TakesRecipe, nn.Linear):
    """A torch.nn.Linear whose products run in MXFP8.

    Args:
        linear: the layer whose parameters, the same objects, and hooks it takes over.
        recipe: a `Recipe` or a preset's name; GEMM, wgrad, scaling mode and path are what it reads of it.
        fqn: its name in errors.

    Raises:
        ValueError: widths that are no multiples of 32, a recipe without MXFP8 GEMMs, a forward that replaces the layer's.

    Examples:
        >>> linear = mxep.parallel.MXLinear(torch.nn.Linear(64, 128, bias=False), mxep.Recipe.named("mxfp8_gemm"))
        >>> linear(torch.randn(4, 16, 64)).shape
        torch.Size([4, 16, 128])
    """

    def __init__(self, linear: nn.Linear, recipe: str | Recipe, fqn: str = "MXLinear") -> None:
        nn.Module.__init__(self)
        self.fqn, self.recipe = fqn, recipe  # type: ignore[assignment]
        if self.recipe.gemm != "mxfp8":
            raise ValueError(
                f"{fqn}: recipe {self.recipe.name!r} multiplies in high precision, want one with gemm='mxfp8', or leave it as it is"
            )
        if "forward" in vars(linear):
            raise ValueError(
                f"{fqn}: a forward of its own replaces that of {type(linear).__name__} (recomputation, compilation, sharding), "
                "want none yet; convert it before that, or leave it out"
            )
        vars(self).update(vars(linear))  # hooks as well, and what they read: handles know hooks by the dicts these are in
        self._kept: CachedWeight | None = None
        self.unconverted_forward: Callable[[nn.Linear, Tensor], Tensor] | None = None  # of its own shard; None: its class's
        self.check_widths()

    def check_widths(self) -> None:
        """Raise ValueError unless the weight (N, K), or this rank's shard of it, consists of whole MX blocks both ways."""
        shape, whole = tuple(to_local(self.weight).shape), tuple(self.weight.shape)
        if shape[0] % MX_BLOCK or shape[1] % MX_BLOCK:
            part = "" if shape == whole else f", of which a rank has {shape}"
            raise ValueError(
                f"{self.fqn}: a weight {whole}{part}, want multiples of {MX_BLOCK} both ways (one MX block); leave it out with skip= "
                "(mxep train --linear-skip)"
            )

    def keep_quantized(self, cache: WeightCache | None) -> None:
        """Quantise the weight once per step of `cache`, None: in every call. See `mxep.parallel.cache_quantized_weights`."""
        self._kept = None if cache is None else CachedWeight(cache, self, "weight")

    def forward(self, input: Tensor, lora: DenseLora | None = None) -> Tensor:
        """input (..., K) bf16 or float32 -> (..., N), same dtype; with an adapter its part is added."""
        kept = self._kept
        if kept is not None and torch.compiler.is_compiling():
            kept = None  # a graph would keep the bytes of its first call for ever
        bias = None if self.bias is None else to_local(self.bias)
        return dense_mm(input, to_local(self.weight), bias, self._recipe, kept, lora)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def restore_linear(module: nn.Module, fqn: str) -> Callable[[], None] | None:
    """A function that makes an `MXLinear` a torch.nn.Linear again, the same object; None for other modules.

    Raises:
        ValueError: something wrapped its forward, and would still call it.
    """
    if not isinstance(module, MXLinear):
        return None
    if "forward" in vars(module):
        raise ValueError(
            f"unconvert: the forward of {fqn} (MXLinear) is wrapped (recomputation, compilation, a hook), want it as convert_linears left "
            "it; remove the wrapper first"
        )

    def restore() -> None:
        forward = module.unconverted_forward
        del module.fqn, module._recipe, module._kept, module.unconverted_forward
        module.__class__ = _plain_class(type(module))
        if forward is not None:
            module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]

    return restore


def _plain_class(kind: type) -> type:
    """torch.nn.Linear, or the class that FSDP2 and parametrizations make of it by inheritance, as they made `kind` of MXLinear."""
    if kind is MXLinear:
        return nn.Linear
    bases = tuple(_plain_class(base) if issubclass(base, MXLinear) else base for base in kind.__bases__)
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("MXLinear", "Linear"), bases, body)


def why_linear_stays(name: str, linear: nn.Linear, recipe: Recipe, tokens: int | None = None, tp: int = 1) -> str | None:
    """Why a linear layer of this name stays in high precision unless it is named; None: in MXFP8 it is faster by its shape.

    Args:
        name: in its model.
        tokens: of one forward; None: as many as in the measurements of `linear_gains`.
        tp: tensor-parallel ranks, each with a part of one of its two widths.
    """
    K, N = linear.in_features, linear.out_features
    if matches_any(name, ADAPTERS):
        return "of an adapter"
    if matches_any(name, KEPT_APART):
        return "sensitive to precision"
    if K % (MX_BLOCK * tp) or N % (MX_BLOCK * tp):
        return f"{K} -> {N} are no multiples of {MX_BLOCK}{f' on each of {tp} ranks' * (tp > 1)} (one MX block)"
    if not linear_gains(K // tp, N // tp, recipe, tokens):
        with_more = tokens is not None and linear_gains(K // tp, N // tp, recipe)
        return f"{K} -> {N} gains with more tokens than {tokens:,} a forward" if with_more else f"{K} -> {N} does not gain"
    if linear.weight.dtype not in (torch.bfloat16, torch.float32) or isinstance(linear.weight, DTensor) or "forward" in vars(linear):
        return f"{linear.weight.dtype}{', sharded' * isinstance(linear.weight, DTensor)}, or with a forward of its own"
    return None


def convert_linears(
    model: nn.Module, fqns: str | Sequence[str] | None = None, recipe: str | Recipe | None = None, skip: str | Sequence[str] = ()
) -> list[str]:
    """Make dense linear layers of a model compute in MXFP8, in place; before sharding, compilation and recomputation are applied to it.

    Another call gives converted layers another recipe, after these too; "bf16" makes them torch.nn.Linear again, as `unconvert` does.
    Never converted are mxep's own routers, embeddings, peft's adapters, subclasses of torch.nn.Linear (a projection to logits with a loss
    of its own), and the layers of a torch.nn.TransformerEncoderLayer, which multiplies their weights itself when it evaluates.  A router
    that is a torch.nn.Linear stays without `fqns` if it is called as in `KEPT_APART`; else name it in `skip`.

    Args:
        model: converted in place.
        fqns: dotted names or parts of them, with wildcards ("attention", "layers.*.feed_forward"); None: all but `KEPT_APART`.
        recipe: see `MXLinear`.
        skip: names of those that stay as they are, in the same form.

    Returns:
        the names of the converted layers.

    Raises:
        ValueError: a name that matches no linear layer, nothing to convert, a layer whose widths are no multiples of 32, a recipe
            in high precision where no layer is converted yet.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> mxep.convert_linears(model, recipe="mxfp8", skip=["2"])
        ['0']
    """
    check_model("convert_linears", model)
    chosen_recipe = resolve_recipe(recipe)
    patterns, skipped = as_patterns(fqns), as_patterns(skip) or []
    everywhere = dict(model.named_modules(remove_duplicate=False))  # one layer may have several names
    routers = tuple(f"{name}." for name, module in everywhere.items() if isinstance(module, Router))
    seen = {name: module for name, module in everywhere.items() if isinstance(module, nn.Linear)}
    uncalled = {linear for layer in everywhere.values() if isinstance(layer, nn.TransformerEncoderLayer) for linear in layer.children()}
    able = {
        name: module
        for name, module in seen.items()
        if isinstance(module, MXLinear)
        or (type(module) is nn.Linear and module not in uncalled and not name.startswith(routers) and not matches_any(name, ADAPTERS))
    }
    for pattern in patterns or []:
        matched = [name for name in seen if matches_name(name, pattern)]
        if matched and able.keys().isdisjoint(matched):
            what = "which is never converted (routers, adapters, subclasses of torch.nn.Linear, torch.nn.TransformerEncoderLayer)"
            raise ValueError(f"{_WHERE}: {pattern!r} matched {shown_names(matched)} alone, {what}; leave it out")
    check_patterns(_WHERE, patterns or [], "torch.nn.Linear", able)
    check_patterns(_WHERE, skipped, "torch.nn.Linear", seen)
    left_out = [*skipped, *(KEPT_APART if patterns is None else ())]
    chosen = {name: linear for name, linear in able.items() if matches_any(name, patterns) and not matches_any(name, left_out)}
    if "" in chosen:
        raise ValueError(f"{_WHERE}: the model is a torch.nn.Linear itself, want a module that holds it, such as torch.nn.Sequential")
    if not chosen:
        want = f"one of {shown_names(able)}" if able else "linear layers, of which there are none"
        raise ValueError(f"{_WHERE}: nothing is left to convert, want {want}")
    if chosen_recipe.gemm != "mxfp8" and (converted := {name: linear for name, linear in chosen.items() if isinstance(linear, MXLinear)}):
        restored = {linear: restore_linear(linear, name) for name, linear in converted.items()}
        for restore in filter(None, restored.values()):
            restore()
        return list(converted)
    switch_linears(chosen, chosen_recipe)
    return list(chosen)


def switch_linears(chosen: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    """Make exactly these layers, by their full names, compute by a recipe. They stay the same objects, which other places may hold."""
    switched: dict[nn.Linear, MXLinear] = {}
    for name, linear in chosen.items():
        if not isinstance(linear, MXLinear) and linear not in switched:
            switched[linear] = MXLinear(linear, recipe, name)
    for linear, layer in switched.items():  # no layer, if one of them is an error
        vars(linear).update(vars(layer))
        linear.__class__ = MXLinear
    for name, linear in chosen.items():
        linear.recipe = recipe  # type: ignore[assignment]  # an MXLinear by now
        _log.info("%s computes with recipe %s", name, recipe.name)
