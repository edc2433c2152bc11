"""Experts of an existing model computed in MXFP8, by name."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mxep.checks import check_model
from mxep.grouped_mm.function import recipe_grouped_mm
from mxep.moe.experts import Experts
from mxep.parallel.forwards import is_forward_wrapped, replace_forward, replaced_by, restore_forward
from mxep.parallel.module_names import as_patterns, how_to_name, matches_any, matches_name, shown_names
from mxep.recipe import Recipe, resolve_recipe

_log = logging.getLogger(__name__)


_OPERANDS = {"self": "a", "mat_a": "a", "mat2": "b", "mat_b": "b"}  # names in torch._grouped_mm and in F.grouped_mm


class _GroupedMMSwap(TorchFunctionMode):
    """While active, torch's grouped GEMMs of 2-D rows with stacked 3-D weights run in the precisions of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm or func is F.grouped_mm:
            return self._grouped_mm(func, *args, **{_OPERANDS.get(name, name): value for name, value in kwargs.items()})
        return func(*args, **kwargs)

    def _grouped_mm(
        self, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        rows_times_experts = a.dim() == 2 and b.dim() == 3
        self.calls += rows_times_experts
        if not rows_times_experts or self.recipe.gemm != "mxfp8":
            return func(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
        out_dtype = a.dtype if out_dtype is None else out_dtype
        return recipe_grouped_mm(a, b, offs, bias, out_dtype, self.recipe, pad_groups=self.recipe.wgrad == "mxfp8")  # 32x1 blocks


def _converted_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    swap = _GroupedMMSwap(self._mxep_recipe)  # type: ignore[arg-type]
    with swap:
        out = type(self).forward(self, *args, **kwargs)
    if swap.calls == 0 and swap.recipe.gemm == "mxfp8":
        if any(isinstance(value, Tensor) and not value.numel() for value in (*args, *kwargs.values())):
            return out  # a forward may leave early without rows
        raise ValueError(
            f"convert_experts: the forward of {type(self).__name__} called neither torch._grouped_mm nor torch.nn.functional.grouped_mm "
            "with 2-D rows and stacked 3-D weights, so this conversion changes nothing of it; switch its grouped GEMM on (transformers: "
            'set_experts_implementation("grouped_mm")), or leave it out; after accelerate, or with implementation "mxep", it is in MXFP8 '
            "already"
        )
    return out


def _compiler_sees_grouped_mm() -> bool:
    """Put torch._grouped_mm among the functions that torch.compile offers to function modes; False if torch has no such list.

    torch 2.11 lists public functions only, so a converted module would compute in bf16 inside a compiled graph.
    """
    try:
        from torch._dynamo.variables.torch import get_overridable_functions
    except ImportError:
        return False
    get_overridable_functions().add(torch._grouped_mm)
    return torch._grouped_mm in get_overridable_functions()


def restore_experts(module: nn.Module, fqn: str) -> Callable[[], None] | None:
    """A function that undoes `convert_experts` on a module; None for one that it has not converted.

    Raises:
        ValueError: something wrapped the converted forward, and would still call it.
    """
    if isinstance(module, Experts):
        before = module.unconverted_recipe

        def restore_recipe() -> None:
            module.recipe, module.unconverted_recipe = before, None  # type: ignore[assignment]

        return None if before is None else restore_recipe
    if converted_recipe(module) is None:
        return None
    function = replaced_by(module)
    if function is None or inspect.unwrap(function) is not _converted_forward or is_forward_wrapped(module):
        raise ValueError(
            f"unconvert: the converted forward of {fqn} ({type(module).__name__}) is wrapped (recomputation, compilation, a hook), want it "
            'as convert_experts left it; convert_experts with recipe="bf16" gives the same numbers, or remove the wrapper first'
        )

    def restore() -> None:
        restore_forward(module)
        del module._mxep_recipe

    return restore


def converted_recipe(module: nn.Module) -> Recipe | None:
    """The recipe that `convert_experts` gave a module; None for one that is not converted."""
    return module.recipe if isinstance(module, Experts) else getattr(module, "_mxep_recipe", None)


def convert_experts(
    model: nn.Module, fqns: str | Sequence[str] = "experts", recipe: str | Recipe | Mapping[str, str | Recipe] | None = None
) -> list[str]:
    """Make the experts of an existing model compute in MXFP8, in place.

    A `mxep.moe.Experts` gets the recipe.  Any other module with stacked 3-D weights has the grouped GEMMs that its forward calls
    (`torch._grouped_mm`, `torch.nn.functional.grouped_mm`) replaced while its forward runs; checkpoint and compile around it, not
    inside.  Parameters, names and checkpoints stay as they are.  Another call gives converted modules another recipe, "bf16" too, and
    `unconvert` undoes it.

    Args:
        model: converted in place.
        fqns: dotted names or parts of them, with wildcards: "experts", "layers.*.moe.experts", "layers.3".
        recipe: for all of them, or a dict from such names to recipes, of which the first that fits a module decides.

    Returns:
        the names of the converted modules.

    Raises:
        ValueError: a name that matched no module with expert weights (the message lists those it saw), an unknown recipe, a module
            whose own forward replaces that of its class, a module with another recipe inside of a converted one.

    Examples:
        >>> model = torch.nn.Sequential(mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), "hp"))
        >>> mxep.convert_experts(model, recipe={"0.experts": "mxfp8_wgrad_with_mx"})
        ['0.experts']
        >>> model[0].experts.recipe.name
        'mxfp8_wgrad_with_mx'
    """
    check_model("convert_experts", model)
    patterns = as_patterns(fqns) or []
    of_names = recipe if isinstance(recipe, Mapping) else {"*": recipe}
    recipes = {pattern: resolve_recipe(value) for pattern, value in of_names.items()}
    seen = {fqn: module for fqn, module in model.named_modules() if any(p.dim() == 3 for p in module.parameters(recurse=False))}
    for pattern in [*patterns, *recipes]:
        if not any(matches_name(fqn, pattern) for fqn in seen):
            modules = [name for name, _ in model.named_modules()][1:]
            saw = shown_names(seen) if seen else f"none; its modules are {shown_names(modules)}"
            do = how_to_name(pattern, seen or modules)
            raise ValueError(f"convert_experts: {pattern!r} matched no module with stacked 3-D expert weights; saw {saw}; {do}")
    chosen = {fqn: module for fqn, module in seen.items() if matches_any(fqn, patterns)}
    if not chosen:
        raise ValueError(f"convert_experts: fqns={fqns!r} names nothing, want one of {shown_names(seen)}")
    decided: dict[str, Recipe] = {}
    for fqn, module in chosen.items():
        fitting = [value for pattern, value in recipes.items() if matches_name(fqn, pattern)]
        if not fitting:
            raise ValueError(f"convert_experts: no recipe for {fqn}, the dict has {', '.join(recipes)}; add it, or '*' for the rest")
        decided[fqn] = fitting[0]
        if "forward" in vars(module) and converted_recipe(module) is None:
            raise ValueError(
                f"convert_experts: {fqn} ({type(module).__name__}) has a forward of its own (recomputation, compilation, a hook), which "
                "the conversion would drop, want its class's; convert it before that, or leave it out"
            )
    given = {fqn: decided.get(fqn) or converted_recipe(module) for fqn, module in seen.items()}
    swapped = {fqn: of for fqn, of in given.items() if of is not None and not isinstance(seen[fqn], Experts)}
    for (outer, around), (inner, within) in itertools.product(swapped.items(), given.items()):
        if inner.startswith(f"{outer}." if outer else "") and within is not None and within != around:
            raise ValueError(
                f"convert_experts: {inner} with recipe {within.name} is inside of {outer or 'the model'} with recipe {around.name}, "
                "which replaces the grouped GEMMs of all that its forward calls; want one recipe for both, or leave the outer one out"
            )
    # Without that list, converted modules run outside of compiled graphs.
    forward = _converted_forward if _compiler_sees_grouped_mm() else torch.compiler.disable(_converted_forward)
    for fqn, module in chosen.items():
        if isinstance(module, Experts):
            if module.unconverted_recipe is None:
                module.unconverted_recipe = module.recipe
            module.recipe = decided[fqn]  # type: ignore[assignment]
        else:
            if converted_recipe(module) is None:
                replace_forward(module, forward)
            module._mxep_recipe = decided[fqn]  # type: ignore[assignment]  # its forward reads it
        _log.info("%s computes with recipe %s", fqn, decided[fqn].name)
    return list(chosen)
