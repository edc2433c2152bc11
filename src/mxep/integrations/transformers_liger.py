"""RMSNorms and rotary embeddings of transformers' models on a GPU by liger-kernel, wide RMSNorms by torch, where these compute the same."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxep.extras import install_command
from mxep.parallel.forwards import replace_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RMSNormForm(NamedTuple):
    """The two ways in which models' RMSNorms differ, by liger-kernel's names."""

    casting_mode: str  # "llama" rounds to the input's dtype before it multiplies by the weight, "gemma" after
    offset: float  # added to the weight


_WIDE = 1024  # columns from which on torch's kernel is faster, forward and backward together (2048: it is, 128: it is not)
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
    """How a module computes an RMSNorm, found by running its class's forward on bf16 values on a CPU; None if liger-kernel cannot.

    Modules whose class is called ...RMSNorm, with one weight (D,) and a forward of hidden states alone, are tried.
    """
    kind: Any = type(norm)
    parameters, eps = dict(norm.named_parameters()), _epsilon(norm)
    if not kind.__name__.endswith("RMSNorm") or list(parameters) != ["weight"] or eps is None or parameters["weight"].dim() != 1:
        return None
    if len(inspect.signature(kind.forward).parameters) != 2:  # self and hidden states
        return None
    plain = tuple((name, value) for name, value in vars(norm).items() if isinstance(value, int | float | str))
    with torch.device("cpu"):  # whatever the default device is
        return _form_of(kind, parameters["weight"].shape[0], eps, plain)


@functools.cache
def _form_of(kind: Any, width: int, eps: float, plain: tuple[tuple[str, object], ...]) -> RMSNormForm | None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, width), (width,)))
    probe = kind.__new__(kind)
    nn.Module.__init__(probe)
    vars(probe).update(plain)
    probe.weight = nn.Parameter(weight, requires_grad=False)
    try:
        got = kind.forward(probe, x)
    except Exception:  # of other attributes than plain ones
        return None
    return next((form for form in _FORMS if torch.equal(got, _reference(x, weight, eps, form))), None)


def why_modules_stay(model: PreTrainedModel) -> str | None:
    """Why no module of a model can run by liger-kernel here; None if some may."""
    if model.device.type != "cuda":
        return f"liger-kernel's kernels need a GPU, and the model is on {model.device}; move it there before"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed; {install_command('liger')}"
    return None


def convert_norm(norm: nn.Module, form: RMSNormForm) -> Callable[[], None]:
    """Let a module compute by a fused kernel; returns what undoes it. Names and parameters stay."""
    return replace_forward(norm, _norm_forward, form)


def norm_kernel(norm: Any, form: RMSNormForm) -> str:
    """The library whose kernel computes such a norm: "torch" for wide rows, where it is faster and rounds once, else "liger-kernel"."""
    return "torch" if norm.weight.numel() >= _WIDE and form.offset == 0.0 else "liger-kernel"


def _norm_forward(norm: Any, form: RMSNormForm, hidden_states: Tensor) -> Tensor:
    """The norm by a fused kernel. The class's own forward runs in a compiled graph, which fuses it, and for dtypes that differ."""
    if torch.compiler.is_compiling() or not hidden_states.is_cuda or hidden_states.dtype != norm.weight.dtype:
        return type(norm).forward(norm, hidden_states)
    if norm_kernel(norm, form) == "torch":
        return F.rms_norm(hidden_states, norm.weight.shape, norm.weight, _epsilon(norm))
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(hidden_states, norm.weight, _epsilon(norm), form.offset, form.casting_mode, in_place=False)


_ROTARY = "apply_rotary_pos_emb"  # what transformers' modeling files call the function of their attention modules


class RotaryForm(NamedTuple):
    """How models differ that rotate the first half of each head against the second, all of it."""

    width: int  # of cos and sin as a share of the head: 1, the angles twice, or 2, once


def rotary_form(attention: nn.Module) -> RotaryForm | None:
    """How an attention module rotates queries and keys, found by running its file's function on bf16 values on a CPU; None: in another
    way, or it is no module that does."""
    forward = inspect.unwrap(type(attention).forward)
    if not inspect.isfunction(forward) or _ROTARY not in forward.__code__.co_names:
        return None
    if getattr(getattr(attention, "config", None), "rope_interleave", False):  # its file has another function for that
        return None
    return _rotary_form_of(forward.__globals__.get(_ROTARY))  # a method's name is none of the file's


@functools.cache
def _rotary_form_of(rotate: Any) -> RotaryForm | None:
    with torch.device("cpu"):  # whatever the default device is
        generator = torch.Generator().manual_seed(0)
        q, k, once = (torch.randn(1, *shape, generator=generator).bfloat16() for shape in ((4, 3, 16), (2, 3, 16), (3, 8)))
        cos, sin = once.cos(), once.sin()
        want = [torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1) for x1, x2 in (x.chunk(2, -1) for x in (q, k))]
        for form in (RotaryForm(1), RotaryForm(2)):
            try:
                got = rotate(q, k, *(angle if form.width == 2 else torch.cat([angle, angle], -1) for angle in (cos, sin)))
            except Exception:  # of another signature, or other widths
                continue
            if all(torch.equal(one, other) for one, other in zip(got, want, strict=True)):
                return form
    return None


def convert_rotary(attention: nn.Module) -> Callable[[], None]:
    """Let an attention module of a form that `rotary_form` knows rotate by liger-kernel's kernel; returns what undoes it."""
    return replace_forward(attention, _attention_forward)


def _attention_forward(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The attention with liger-kernel's rotation, which overwrites queries and keys.

    The class's own forward runs in a compiled graph, which fuses it, and where something may keep what the kernel would overwrite: hooks on
    the modules inside, which get the projections, and dispatch modes.  Selective checkpointing keeps projections, and its second forward
    would rotate them again.
    """
    kind: Any = type(attention)
    own = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or _has_hooks(attention)
    return (kind.forward if own else _forward_with_liger(kind))(attention, *args, **kwargs)


def _has_hooks(attention: nn.Module) -> bool:
    """Whether hooks get the results of modules inside an attention module."""
    every = torch.nn.modules.module._has_any_global_hook()
    return bool(every) or any(part._forward_hooks or part._backward_hooks for part in attention.modules() if part is not attention)


@functools.cache
def _forward_with_liger(kind: Any) -> Callable[..., Any]:
    """The forward of a class, which finds another function under the name of its file's."""
    own = inspect.unwrap(kind.forward).__globals__[_ROTARY]
    form = _rotary_form_of(own)
    assert form is not None
    return _with_global(kind.forward, _ROTARY, functools.partial(_liger_rotary, own, form))


def _with_global(function: Any, name: str, value: object) -> Any:
    """A copy of a function, and of what it wraps, that finds `value` under a global name.  The file's other names are those of now."""
    wrapped = getattr(function, "__wrapped__", None)
    cells = tuple(
        types.CellType(_with_global(wrapped, name, value)) if wrapped is not None and cell.cell_contents is wrapped else cell
        for cell in function.__closure__ or ()
    )
    copied = types.FunctionType(
        function.__code__, function.__globals__ | {name: value}, function.__name__, function.__defaults__, cells or None
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _liger_rotary(own: Callable[..., tuple[Tensor, Tensor]], form: RotaryForm, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Queries (B, heads, S, d), keys (B, kv_heads, S, d), cos and sin (1 or B, S, d or d/2); the kernel writes over q and k.

    Calls with other arguments are those of the file's own function.
    """
    if len(args) != 4 or kwargs not in ({}, {"unsqueeze_dim": 1}):
        return own(*args, **kwargs)
    q, k, cos, _ = args
    whole = cos.dim() == 3 and cos.shape[-1] * form.width == q.shape[-1] == k.shape[-1]
    if not (q.is_cuda and whole and q.dtype == k.dtype == cos.dtype):
        return own(*args, **kwargs)
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    return liger_rotary_pos_emb(*args, rotary_dim=q.shape[-1])  # type: ignore[no-any-return]
