"""RMSNorms of transformers' models on a GPU by liger-kernel, where its kernel computes the same."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mxep.extras import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RMSNormForm(NamedTuple):
    """What liger-kernel calls the two ways in which models' RMSNorms differ."""

    casting_mode: str  # "llama" rounds to the input's dtype before it multiplies by the weight, "gemma" after
    offset: float  # added to the weight


_FORMS = RMSNormForm("llama", 0.0), RMSNormForm("gemma", 0.0), RMSNormForm("gemma", 1.0)


def _reference(x: Tensor, weight: Tensor, eps: float, form: RMSNormForm) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form.casting_mode == "llama":
        return weight * normal.to(x.dtype)
    return ((form.offset + weight.float()) * normal).to(x.dtype)


def _epsilon(norm: nn.Module) -> float | None:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def rms_norm_form(norm: nn.Module) -> RMSNormForm | None:
    """How a module computes an RMSNorm, found by running its class's forward on bf16 values on a CPU; None: in no way of liger-kernel's.

    Modules whose class is called ...RMSNorm, with one weight (D,) and a forward of hidden states alone, are tried.
    """
    kind: Any = type(norm)
    parameters, eps = dict(norm.named_parameters()), _epsilon(norm)
    if not kind.__name__.endswith("RMSNorm") or list(parameters) != ["weight"] or eps is None or parameters["weight"].dim() != 1:
        return None
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and hidden states
        return None
    plain = tuple((name, value) for name, value in vars(norm).items() if isinstance(value, int | float | str))
    return _form_of(kind, parameters["weight"].shape[0], eps, plain)


@functools.cache
def _form_of(kind: Any, width: int, eps: float, plain: tuple[tuple[str, object], ...]) -> RMSNormForm | None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, width), (width,)))
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(plain)
    probe.weight = nn.Parameter(weight, requires_grad=False)
    got = kind.forward(probe, x)
    return next((form for form in _FORMS if torch.equal(got, _reference(x, weight, eps, form))), None)


def why_norms_stay(model: PreTrainedModel) -> str | None:
    """Why no norm of a model can run by liger-kernel here; None if some may."""
    if model.device.type != "cuda":
        return f"liger-kernel's kernels need a GPU, and the model is on {model.device}; move it there before"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed; {install_command('liger')}"
    return None


def convert_norm(norm: nn.Module, form: RMSNormForm) -> Callable[[], None]:
    """Let a module compute by liger-kernel's kernel; returns what undoes it. Names and parameters stay."""
    norm.forward = functools.partial(_liger_forward, norm, form)  # type: ignore[method-assign]

    def undo() -> None:
        del norm.forward

    return undo


def _liger_forward(norm: nn.Module, form: RMSNormForm, hidden_states: Tensor) -> Tensor:
    """In a compiled graph, which fuses it, and where a dtype is another than the weight's, the class's own forward runs."""
    if torch.compiler.is_compiling() or not hidden_states.is_cuda or hidden_states.dtype != norm.weight.dtype:
        return type(norm).forward(norm, hidden_states)
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(hidden_states, norm.weight, _epsilon(norm), form.offset, form.casting_mode, in_place=False)
