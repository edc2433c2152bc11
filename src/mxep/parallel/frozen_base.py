"""A frozen base in MX: weights of linear layers and of experts stored in MXFP8 alone, 33/32 bytes a value.

What computes with them stays as it is, and reads either the bytes (experts and linear layers of this package, by their recipes) or the
dequantised values (everything else: torch.nn.Linear, torch's grouped GEMM).

forward   the bytes, which were rounded once.  On Hopper's FP8 path a copy with one exponent per output column, one byte a value, which is
          dropped after the GEMM
backward  dgrad contracts over the other dimension: the values, exact in bf16, are quantised again along that dimension, one layer at a
          time, and dropped; on Hopper's FP8 path in one pass over the bytes.  They keep their significands: only values below 2^-13.8 of
          the largest in their new block change, by at most 2^-17.8 of it (docs/numerics.md).  Recipes with GEMMs in high precision read
          the values themselves.  Weights have no gradients
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.checks import check_model
from mxep.moe import Experts, Router
from mxep.moe.init import local_tensor
from mxep.mx.weight import MXWeight, check_weight
from mxep.parallel.linears import ADAPTERS, KEPT_APART
from mxep.parallel.module_names import as_patterns, check_patterns, matches_any, shown_names

_log = logging.getLogger(__name__)
_WHERE = "quantize_base"


def base_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The weights that may be frozen in MX, by name: the module that has each, and its name there.

    They are the weights of linear layers and the stacked weights of experts, without adapters.
    """
    everywhere = dict(model.named_modules(remove_duplicate=False))
    routers = tuple(f"{name}." for name, module in everywhere.items() if isinstance(module, Router))
    found: dict[str, tuple[nn.Module, str]] = {}
    for fqn, module in everywhere.items():
        if matches_any(fqn, ADAPTERS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear) and name == "weight" and not fqn.startswith(routers)
            # A first dimension of 1 is that of embeddings and tokens, (1, N, D), which no GEMM reads.
            several = parameter.dim() == 3 and (parameter.shape[0] > 1 or isinstance(module, Experts))
            stacked = several and not isinstance(module, (nn.modules.conv._ConvNd, nn.Bilinear))
            if linear or stacked:
                found[f"{fqn}.{name}" if fqn else name] = module, name
    return found


def quantize_base(
    model: nn.Module,
    fqns: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    keep_dgrad_form: bool = False,
) -> list[str]:
    """Freeze weights of linear layers and of experts in MXFP8, in place, one after the other; before sharding and compilation.

    Each parameter becomes an `mxep.mx.MXWeight` under its name, by the scaling mode RCEIL, and the bf16 one is released before the next is
    converted.  A module's attribute `is_transposed` says that it stores (E, K, N), as transformers' experts do; otherwise weights are
    (..., N, K).  `convert_experts`, `convert_linears` and `experts_implementation="mxep"` say how they are multiplied, before or after this
    call.  Adapters of peft stay as they are.

    A model whose bf16 weights never exist as a whole: build it on the meta device, call this, `to_empty(device=...)`, and hand each tensor
    of the checkpoint to `load_state_dict({name: tensor}, strict=False)`, which quantises it.

    Args:
        model: converted in place.
        fqns: names of modules or parameters or parts of them, with wildcards ("experts", "layers.*.self_attn"); None: all but
            `mxep.parallel.linears.KEPT_APART`, which are routers and projections to logits.
        skip: names of those that stay as they are, in the same form.
        keep_dgrad_form: keep the form that dgrad reads from its first use on, instead of making it in every backward: 33/32 bytes more for
            each value (1 byte on Hopper's FP8 path), after the first step.

    Returns:
        the names of the parameters that are frozen in MX.

    Raises:
        ValueError: a name that matches no such weight, nothing to convert, a sharded weight, one that is shared with another module, a
            dtype or width that MXFP8 does not have. No weight is changed then.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> mxep.quantize_base(model, skip="2")
        ['0.weight']
        >>> model[0].weight
        MXWeight(shape=(128, 64), dtype=torch.float32, device=cpu)
    """
    check_model(_WHERE, model)
    chosen = chosen_weights(model, fqns, skip)
    for fqn, (module, name) in chosen.items():  # all of them before the first one changes
        _check_weight(module, module.get_parameter(name), fqn)
    for fqn, (module, name) in chosen.items():
        parameter = module.get_parameter(name)
        if not isinstance(parameter, MXWeight):  # one module may have several names
            freeze_weight(module, name, parameter, fqn, keep_dgrad_form)
    return list(chosen)


def chosen_weights(model: nn.Module, fqns: str | Sequence[str] | None, skip: str | Sequence[str]) -> dict[str, tuple[nn.Module, str]]:
    """The weights that `quantize_base` freezes, by name. Raises ValueError as it does."""
    known, patterns, left_out = base_weights(model), as_patterns(fqns), as_patterns(skip) or []
    check_patterns(_WHERE, [*(patterns or []), *left_out], "weight of a linear layer or of experts", known)
    left_out += KEPT_APART if patterns is None else ()
    chosen = {name: place for name, place in known.items() if matches_any(name, patterns) and not matches_any(name, left_out)}
    if not chosen:
        want = f"one of {shown_names(known)}" if known else "linear layers or experts, of which there are none"
        raise ValueError(f"{_WHERE}: nothing is left to convert, want {want}")
    names = {id(module._parameters[name]): (fqn, (module, name)) for fqn, (module, name) in chosen.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            fqn, place = names.get(id(parameter), ("", (module, name)))
            if place != (module, name):
                raise ValueError(
                    f"{_WHERE}: {fqn} is also {name} of a {type(module).__name__} (tied weights), which would keep it as it is; leave it "
                    "out with skip=, or untie them"
                )
    return chosen


def freeze_weight(
    module: nn.Module,
    name: str,
    values: Tensor,
    fqn: str,
    keep_dgrad_form: bool = False,
) -> None:
    """Make a parameter of a module a weight that is frozen in MX, of these values. Raises ValueError for what MXFP8 does not have."""
    _check_weight(module, values, fqn)
    weight = MXWeight.of(values, stored_transposed(module, values), keep_dgrad_form)
    module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    _log.info("%s is frozen in MXFP8", fqn)


def _check_weight(module: nn.Module, values: Tensor, fqn: str) -> None:
    if isinstance(values, DTensor):
        raise ValueError(f"{_WHERE}: {fqn} is a DTensor {tuple(values.shape)}, want a model that is not sharded yet; convert it before")
    try:
        check_weight(values, stored_transposed(module, values))
    except ValueError as error:
        raise ValueError(f"{_WHERE}: {fqn}: {error}") from error


def stored_transposed(module: nn.Module, weight: Tensor) -> bool:
    """Whether a module stores its stacked weights as (E, K, N): transformers' experts say so."""
    return weight.dim() == 3 and bool(getattr(module, "is_transposed", False))


def dequantize_weight(module: nn.Module, name: str) -> Tensor:
    """Make a parameter that is frozen in MX a plain one with the same values, in place and still frozen; returns the parameter."""
    parameter = module._parameters[name]
    if isinstance(parameter, MXWeight):
        parameter = module._parameters[name] = nn.Parameter(parameter.dequantize().contiguous(), requires_grad=False)
    assert parameter is not None
    return parameter


def dequantize_base(model: nn.Module, fqns: str | Sequence[str] | None = None) -> list[str]:
    """Undo `quantize_base`: weights in the dtype that they had, with the values of the MX bytes, in place and still frozen.

    Args:
        model: converted in place.
        fqns: names as in `quantize_base`; None: every weight that is frozen in MX.

    Returns:
        the names of the parameters that are plain now.

    Raises:
        ValueError: a name that matches no frozen weight, a frozen weight that is sharded. No weight is changed then.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        >>> mxep.quantize_base(model)
        ['0.weight', '1.weight']
        >>> mxep.dequantize_base(model, "1")
        ['1.weight']
    """
    check_model("dequantize_base", model)
    known, patterns = base_weights(model), as_patterns(fqns)
    frozen = {name: place for name, place in known.items() if isinstance(local_tensor(place[0].get_parameter(place[1])), MXWeight)}
    check_patterns("dequantize_base", patterns or [], "weight frozen in MX", frozen)
    chosen = {name: place for name, place in frozen.items() if matches_any(name, patterns)}
    for fqn, (module, name) in chosen.items():
        if isinstance(weight := module.get_parameter(name), DTensor):
            raise ValueError(
                f"dequantize_base: {fqn} is a DTensor {tuple(weight.shape)} of MX bytes, want a model that is not sharded; dequantise it "
                "before, or take the whole values of one weight by full_tensor()"
            )
    for module, name in chosen.values():
        dequantize_weight(module, name)
    return list(chosen)
