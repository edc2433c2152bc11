"""Undoes `convert_experts` and `convert_linears`, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from mxep.checks import check_model
from mxep.moe.experts import Experts
from mxep.parallel.conversion import converted_recipe, restore_experts
from mxep.parallel.linears import MXLinear, restore_linear
from mxep.parallel.module_names import as_patterns, check_patterns, matches_any

_log = logging.getLogger(__name__)


def _is_converted(module: nn.Module) -> bool:
    if isinstance(module, Experts):
        return module.unconverted_recipe is not None
    return isinstance(module, MXLinear) or converted_recipe(module) is not None


def unconvert(model: nn.Module, fqns: str | Sequence[str] | None = None) -> list[str]:
    """Give converted experts and linear layers back the class, forward and recipe that they had before, in place.

    Modules stay the same objects, with their parameters, hooks and FSDP2 state, so the model may be sharded, copied or trained by now, and
    torch.compile compiles what changed again.  A CUDA graph replays what it captured; capture it again.  Quantised weights that
    `cache_quantized_weights` kept for a linear layer are dropped.

    Args:
        model: in which modules were converted, or not.
        fqns: dotted names or parts of them, with wildcards, as in `convert_experts`. None: every converted module.

    Returns:
        the names of the modules that were converted; those of other modules are left out.

    Raises:
        ValueError: a name that matches no converted module; a converted forward that something has wrapped (`recompute_blocks` or
            torch.compile on the module itself). No module is changed then.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
        >>> mxep.convert_linears(model, ["0", "1"])
        ['0', '1']
        >>> mxep.unconvert(model, "1")
        ['1']
        >>> model
        Sequential(
          (0): MXLinear(in_features=64, out_features=96, bias=True, recipe=mxfp8_wgrad_with_hp)
          (1): Linear(in_features=96, out_features=64, bias=True)
        )
    """
    check_model("unconvert", model)
    patterns = as_patterns(fqns)
    modules = model.named_modules(remove_duplicate=False)  # one layer may have several names
    converted = {name: module for name, module in modules if _is_converted(module)}
    check_patterns("unconvert", patterns or [], "converted module", converted)
    chosen = {name: module for name, module in converted.items() if matches_any(name, patterns)}
    restore: dict[nn.Module, Callable[[], None] | None] = {}
    for name, module in chosen.items():
        restore[module] = restore_experts(module, name) or restore_linear(module, name)
    for undo in filter(None, restore.values()):
        undo()
    for name in chosen:
        _log.info("%s is no longer converted", name)
    return list(chosen)
