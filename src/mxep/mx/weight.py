"""`MXWeight`: a frozen weight that is stored in MX bytes alone, 33/32 bytes a value, in the place of a parameter.

It has the shape and dtype of the weight that it replaces, so a module keeps its parameters' names, and code that knows nothing of MX
reads the dequantised values.  The GEMMs of this package read the bytes (`mxep.grouped_mm.products.Weights`).

Blocks run along the contraction of forward.  A model that stores a weight as (..., K, N) has an MXWeight of that shape whose bytes are
those of the transpose (..., N, K): forward then reads weights that were rounded once, however the model stores them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from mxep.checks import HIGH_PRECISION
from mxep.mx.tensor import MXTensor, dequantize_data, from_pickle
from mxep.recipe import ScaleCalculationMode
from mxep.shapes import MX_BLOCK

aten = torch.ops.aten
_WHERE = "MXWeight"
_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)
# Operators over one dimension, and which of their arguments names it.
_ALONG = {
    aten.unsqueeze.default: 1,
    aten.squeeze.dim: 1,
    aten.select.int: 1,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.unbind.int: 1,
}


class KeptForms:
    """Quantised forms of a weight that are kept from call to call, such as the one that dgrad reads.

    Attributes:
        forms: by key, a pair: this weight's count of writes when the form was made, with other weights' `KeptForms` and counts; the form.
        writes: how often the weight was written.
    """

    def __init__(self, written: list[int] | None = None) -> None:
        self.forms: dict[Any, tuple[tuple, Any]] = {}
        self._written = [0] if written is None else written

    @property
    def writes(self) -> int:
        return self._written[0]

    def wrote(self) -> None:
        """Counts a write."""
        self._written[0] += 1

    def of_part(self) -> KeptForms:
        """The `KeptForms` of a view of a part: a write to the part counts as one to the whole."""
        return KeptForms(self._written)


def check_weight(weight: torch.Tensor, transposed: bool) -> None:
    """Raise ValueError for a shape or dtype that MXFP8 does not have; `transposed` as in `MXWeight.of`."""
    if weight.dim() < 2 or weight.dtype not in HIGH_PRECISION or weight.shape[-2 if transposed else -1] % MX_BLOCK:
        raise ValueError(
            f"{_WHERE}: {tuple(weight.shape)} {weight.dtype}, want bfloat16 or float32 of two dimensions or more, and a multiple of "
            f"{MX_BLOCK} (one MX block) in the {'second last' if transposed else 'last'}; leave it out"
        )


class MXWeight(MXTensor):
    """A frozen weight (..., N, K), or (..., K, N) where it is `transposed`, in MX format.

    Attributes:
        qdata: (..., N, K) float8_e4m3fn.
        scale: (..., N, K/32) float8_e8m0fnu.
        orig_dtype: dtype of the values that it represents, bf16 or float32.
        transposed: whether the last two dimensions are swapped against those of qdata.
        kept: where `mxep.grouped_mm.products.Weights` keeps the form that dgrad reads; None: it is made in every backward.

    Examples:
        >>> weight = mxep.mx.MXWeight.of(torch.randn(8, 64, 96, dtype=torch.bfloat16), transposed=True)  # blocks along 64
        >>> weight.shape, weight.qdata.shape, weight.dtype
        (torch.Size([8, 64, 96]), torch.Size([8, 96, 64]), torch.bfloat16)
        >>> (weight.qdata.nbytes + weight.scale.nbytes) / weight.numel()
        1.03125
    """

    transposed: bool
    kept: KeptForms | None
    _parts = (*MXTensor._parts, "transposed", "kept")
    _instead_of_writing = "mxep.dequantize_base makes it a plain weight"

    @staticmethod
    def __new__(  # type: ignore[override]
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        orig_dtype: torch.dtype,
        transposed: bool = False,
        kept: KeptForms | None = None,
    ) -> MXWeight:
        # Strides are those of a contiguous tensor also where it is transposed: FSDP2 asks for it.
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, _swapped(qdata.shape, transposed), dtype=orig_dtype, device=qdata.device
        )
        self.qdata, self.scale, self.orig_dtype, self.transposed, self.kept = qdata, scale, orig_dtype, transposed, kept
        return self

    @staticmethod
    def of(weight: torch.Tensor, transposed: bool = False, keep_dgrad_form: bool = False) -> MXWeight:
        """Quantise a weight, with the scaling mode RCEIL.

        Args:
            weight: (..., N, K) bf16 or float32, or (..., K, N) with `transposed`; K a multiple of 32, two dimensions or more.
            transposed: the weight is stored as (..., K, N).
            keep_dgrad_form: keep the form that dgrad reads from its first use on: about another byte a value.

        Raises:
            ValueError: a shape or dtype that MXFP8 does not have.
        """
        check_weight(weight, transposed)
        kept = KeptForms() if keep_dgrad_form else None
        return MXWeight(*_quantized(weight, transposed), weight.dtype, transposed, kept)

    def requires_grad_(self, requires_grad: bool = True) -> MXWeight:
        """Raises ValueError for True: MX bytes cannot hold the sum of a weight and an update."""
        if requires_grad:
            raise ValueError(
                f"{_WHERE}: requires_grad_(True) on a weight {tuple(self.shape)} that is frozen in MX, want False; train an "
                "adapter (LoRA), or make it bfloat16 again by mxep.dequantize_base"
            )
        return self

    def storage(self) -> Any:
        """Raises ValueError: safetensors, which asks for it, can write plain tensors alone."""
        raise ValueError(
            f"{_WHERE}: a weight {tuple(self.shape)} that is frozen in MX has two storages, want a plain tensor for safetensors; "
            "mxep.dequantize_base first, or load the model with mxep.integrations.transformers_quantizer.MXFP8Config"
        )

    def _wrote(self) -> None:
        if self.kept is not None:
            self.kept.wrote()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stored = ", transposed" if self.transposed else ""
        return f"MXWeight(shape={tuple(self.shape)}, dtype={self.orig_dtype}, device={self.device}{stored})"

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (default: orig_dtype); of bf16, exact."""
        return dequantize_data(self, dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        parts = self.qdata.view(torch.uint8), self.scale.view(torch.uint8)
        return _rebuild, (*parts, self.orig_dtype, self.transposed, self.kept is not None, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> MXWeight:
        if id(self) not in memo:
            copied = self._like(*copy.deepcopy((self.qdata, self.scale), memo), kept=None if self.kept is None else KeptForms())
            memo[id(self)] = torch.nn.Parameter(copied, False) if isinstance(self, torch.nn.Parameter) else copied
        return memo[id(self)]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["qdata", "scale"], {"orig_dtype": self.orig_dtype, "transposed": self.transposed}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any) -> MXWeight:
        return MXWeight(inner["qdata"], inner["scale"], meta["orig_dtype"], meta["transposed"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """What FSDP2 gathers: the bytes of this rank's rows or experts; in one tensor on one rank, where torch reads the first alone.

        Raises:
            ValueError: on every rank, for shards that are not equal parts of the first dimension.
        """
        if self.shape != (outer_size[0] // mesh.size(), *outer_size[1:]) or outer_size[0] % mesh.size():
            raise ValueError(
                f"{_WHERE}: FSDP2 shards a weight {tuple(outer_size)} that is frozen in MX over {mesh.size()} ranks, this one has "
                f"{tuple(self.shape)}, want equal parts of the first dimension; leave it out with ignored_params, or dequantise it"
            )
        parts = self.qdata.view(torch.uint8), self.scale.view(torch.uint8)
        return ((torch.cat([part.flatten() for part in parts]),) if mesh.size() == 1 else parts), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The gathered weight, which has the memory of `outputs`; FSDP2 fills and empties that memory in later steps."""
        if out is not None:
            return None
        parts = outputs
        if len(outputs) == 1:
            data, scales = outputs[0].split([self.qdata.numel(), self.scale.numel()])
            parts = data.view(self.qdata.shape), scales.view(self.scale.shape)
        qdata, scale = parts
        return self._like(qdata.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), kept=None), outputs

    def _like(self, qdata: torch.Tensor, scale: torch.Tensor, **changed: Any) -> MXWeight:
        return MXWeight(qdata, scale, **{"orig_dtype": self.orig_dtype, "transposed": self.transposed, **changed})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs, weight = kwargs or {}, args[0] if args else None
        if func is aten.copy_.default and isinstance(weight, MXWeight):
            return _write(weight, args[1])
        if isinstance(weight, MXWeight):
            made = _kept_in_mx(func, weight, args, kwargs)
            if made is not None:
                return made if func is aten._to_copy.default else return_and_correct_aliasing(func, args, kwargs, made)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _swapped(sizes: Any, transposed: bool) -> tuple[int, ...]:
    return (*sizes[:-2], *sizes[-2:][::-1]) if transposed else tuple(sizes)


def _quantized(weight: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weight, mode = weight.detach(), ScaleCalculationMode.RCEIL.value
    return torch.ops.mxep.quantize_columnwise(weight, mode) if transposed else torch.ops.mxep.quantize(weight.contiguous(), mode)


def _kept_in_mx(func: Any, weight: MXWeight, args: tuple, kwargs: dict) -> Any:
    """The result of an operator that moves bytes and computes nothing, in MX; None of another operator."""
    qdata, scale = weight.qdata, weight.scale
    if func in _SAME or (func is aten.view.default and tuple(args[1]) == tuple(weight.shape)):
        same = aten.alias.default if func is aten.view.default else func
        return weight._like(same(qdata), same(scale), kept=weight.kept if func is not aten.clone.default else None)
    if func is aten._to_copy.default:
        device, lazily = kwargs.get("device"), bool(kwargs.get("non_blocking"))
        dtype = kwargs.get("dtype") or weight.orig_dtype
        if dtype not in HIGH_PRECISION:
            return None
        parts = (part.to(device or part.device, non_blocking=lazily, copy=True) for part in (qdata, scale))
        return weight._like(*parts, orig_dtype=dtype, kept=None if weight.kept is None else KeptForms())
    if func in (aten.t.default, aten.transpose.int, aten.permute.default):
        dims = range(-weight.dim(), 0)
        if func is aten.permute.default:
            swapped = {d for d, given in zip(dims, args[1], strict=True) if dims[given] != d}
        else:
            swapped = {-1, -2} if func is aten.t.default else {dims[d] for d in args[1:3]}
        return weight._like(qdata, scale, transposed=not weight.transposed, kept=weight.kept) if swapped == {-1, -2} else None
    same_shape = func is aten.empty_like.default or (func is aten.new_empty.default and tuple(args[1]) == tuple(weight.shape))
    if same_shape and kwargs.get("dtype") in (None, weight.orig_dtype):  # `dcp.async_save` fills the parts of a new one
        device = kwargs.get("device") or weight.device
        return weight._like(torch.empty_like(qdata, device=device), torch.empty_like(scale, device=device))
    if func in _ALONG:
        return _along(func, weight, args, kwargs)
    made = _of_fsdp(func, weight, args, kwargs)
    return _viewed(weight, args[1]) if made is None and func is aten.view.default else made


def _viewed(weight: MXWeight, sizes: list[int]) -> MXWeight | None:
    """A view with other leading dimensions; None where blocks would be cut. The last two dimensions of a transposed weight stay."""
    shape, stays = torch.empty(weight.shape, device="meta").view(sizes).shape, 2 if weight.transposed else 1
    if len(shape) < 2 or shape[-stays:] != weight.shape[-stays:]:
        return None
    rows = _swapped(shape, weight.transposed)
    parts = weight.qdata.view(rows), weight.scale.view(*rows[:-1], rows[-1] // MX_BLOCK)
    return weight._like(*parts, kept=weight.kept and weight.kept.of_part())


def _of_fsdp(func: Any, weight: MXWeight, args: tuple, kwargs: dict) -> MXWeight | None:
    """Results of FSDP2's other operators on a parameter: a shard with padding; the same, flat, which nothing reads; the gathered one."""
    qdata, scale = weight.qdata, weight.scale
    is_like = kwargs.get("dtype") in (None, weight.orig_dtype) and kwargs.get("device") in (None, weight.device)
    of_rows = func is aten.new_zeros.default and is_like and len(args[1]) == weight.dim()
    if of_rows and _swapped(args[1], weight.transposed)[-1] == qdata.shape[-1]:
        rows = _swapped(args[1], weight.transposed)
        return weight._like(qdata.new_zeros(rows), scale.new_zeros((*rows[:-1], rows[-1] // MX_BLOCK)))
    if func is aten.view.default and tuple(args[1]) == (-1,):  # a transposed one cannot be dequantised in this shape
        return weight._like(qdata.view(-1), scale.view(-1))
    if func is aten.as_strided.default and tuple(args[1]) == tuple(weight.shape) and tuple(args[2]) == weight.stride():
        return weight._like(aten.alias.default(qdata), aten.alias.default(scale))
    return None


def _along(func: Any, weight: MXWeight, args: tuple, kwargs: dict) -> Any:
    """Results of `_ALONG`'s operators along leading dimensions, rows of blocks, or whole blocks; None where blocks would be cut."""
    at = _ALONG[func]
    given = args[at] if len(args) > at else kwargs.get("dim", 0)
    dims = weight.dim() + (func is aten.unsqueeze.default)
    dim = given % dims
    of_rows, of_blocks = (dims - 1, dims - 2) if weight.transposed else (dims - 2, dims - 1)  # the dimensions of N and of K
    if dim >= dims - 2 and func in (aten.unsqueeze.default, aten.squeeze.dim):
        return None
    inner = {of_rows: dims - 2, of_blocks: dims - 1}.get(dim, dim)
    before, after = args[1:at], args[at + 1 :]
    rest = {name: value for name, value in kwargs.items() if name != "dim"}
    of_scale = before, after
    if dim == of_blocks:
        whole = _in_blocks(func, before, after, weight.qdata.shape[-1])
        if whole is None or rest:
            return None
        of_scale = whole
    parts = (weight.qdata, before, after), (weight.scale, *of_scale)
    called = [func(part, *first, inner, *then, **rest) for part, first, then in parts]
    kept = weight.kept
    # One row of blocks has no second dimension to be swapped with.
    transposed = weight.transposed and not (dim == of_rows and func in (aten.select.int, aten.unbind.int))
    if func in (aten.split.Tensor, aten.unbind.int):
        return [weight._like(*parts, transposed=transposed, kept=kept and kept.of_part()) for parts in zip(*called, strict=True)]
    same = func in (aten.unsqueeze.default, aten.squeeze.dim)
    return weight._like(*called, transposed=transposed, kept=kept if same else kept and kept.of_part())


def _in_blocks(func: Any, before: tuple, after: tuple, columns: int) -> tuple[tuple, tuple] | None:
    """The arguments of a slice or split along K in units of blocks, before and after the dimension; None of what would cut blocks."""
    numbers, others = (before, ()) if func is aten.split.Tensor else (after[:2], after[2:])
    ends = [number if number is None else min(number, columns) for number in numbers]
    cut = any(end is not None and end % MX_BLOCK for end in ends)
    if cut or func not in (aten.slice.Tensor, aten.split.Tensor) or others not in ((), (1,)):
        return None
    whole = tuple(end if end is None else end // MX_BLOCK for end in ends)
    return (whole, after) if func is aten.split.Tensor else (before, (*whole, *others))


def _write(weight: MXWeight, source: torch.Tensor) -> MXWeight:
    """`copy_` into a weight, as load_state_dict calls it: MX bytes as they are, other values quantised."""
    if weight.shape != source.shape:
        raise ValueError(f"{_WHERE}: copy of {tuple(source.shape)} into {tuple(weight.shape)}, want one shape")
    if isinstance(source, MXWeight) and source.transposed == weight.transposed:
        parts = source.qdata, source.scale
    else:
        values = dequantize_data(source)
        parts = _quantized(values if values.dtype == torch.bfloat16 else values.to(torch.float32), weight.transposed)
    for own, other in zip((weight.qdata, weight.scale), parts, strict=True):
        own.copy_(other)
    weight._wrote()
    return weight


def _rebuild(qdata: object, scale: object, orig_dtype: torch.dtype, transposed: bool, keeps: bool, parameter: bool) -> MXWeight:
    """Makes the weight when a pickle is read."""
    mx = from_pickle(_WHERE, qdata, scale, orig_dtype)
    weight = MXWeight(mx.qdata, mx.scale, orig_dtype, bool(transposed), KeptForms() if keeps else None)
    return torch.nn.Parameter(weight, False) if parameter else weight  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True) reads MX weights once this module is imported
