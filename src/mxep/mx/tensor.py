"""`MXTensor`: e4m3 data and e8m0 scales in one self-checking object, which autograd takes as a value and as a gradient.

A wrapper subclass: its shape and dtype are those of the values that it represents.  Kept in MX: detach, alias, clone, view_as itself and
moves between devices.  Every other operator sees the dequantised values, so code between the blocks never breaks.  Writing into an MX
tensor is an error, since the written values would be lost.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.serialization
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from mxep.checks import HIGH_PRECISION, check_tensors
from mxep.operators import direct
from mxep.recipe import ScaleCalculationMode, check_block_size, scaling_mode_name
from mxep.shapes import MX_BLOCK

aten = torch.ops.aten
_TAKES_ANY_STRIDES = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default)
_COMPILED_NODE = "CompiledFunctionBackward"  # autograd's node of a torch.compile'd graph


def _check_quantisable(where: str, data: torch.Tensor, elem_dtype: torch.dtype, block_size: int) -> None:
    check_tensors(where, data=data)
    if data.dtype not in HIGH_PRECISION:
        raise ValueError(f"{where}: data is {data.dtype}, want bfloat16 or float32; cast it first")
    if data.dim() < 1 or data.shape[-1] % MX_BLOCK:
        raise ValueError(f"{where}: last dimension of {tuple(data.shape)}, want a multiple of {MX_BLOCK} (one MX block); pad it with zeros")
    if elem_dtype != torch.float8_e4m3fn:
        raise ValueError(f"{where}: elem_dtype={elem_dtype}, want torch.float8_e4m3fn (MXFP8 here is e4m3)")
    check_block_size(where, block_size)


def to_mx(
    data: torch.Tensor,
    elem_dtype: torch.dtype = torch.float8_e4m3fn,
    block_size: int = MX_BLOCK,
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise 1x32 along the last dimension; not differentiable.

    Args:
        data: (..., D) bf16 or float32, D a multiple of 32.
        elem_dtype: torch.float8_e4m3fn.
        block_size: 32.
        scaling_mode: FLOOR by default here (torchao's default), RCEIL elsewhere.

    Returns:
        (scale, qdata), in this order: (..., D/32) float8_e8m0fnu and (..., D) float8_e4m3fn.

    Raises:
        ValueError: dtype, width, element type or block size that MXFP8 does not have.

    Examples:
        >>> scale, qdata = mxep.to_mx(torch.full((1, 32), 0.75), scaling_mode=mxep.ScaleCalculationMode.RCEIL)
        >>> scale.float().item(), qdata[0, 0].float().item()  # 0.75 = 2**-9 * 384
        (0.001953125, 384.0)
    """
    _check_quantisable("to_mx", data, elem_dtype, block_size)
    qdata, scale = torch.ops.mxep.quantize(data.detach(), scaling_mode_name("to_mx", scaling_mode))
    return scale, qdata


def quantize_mx(data: torch.Tensor, scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL) -> MXTensor:
    """Quantise 1x32 along the last dimension into an `MXTensor`; not differentiable.

    Args:
        data: (..., D) bf16 or float32, D a multiple of 32.
        scaling_mode: scaling mode.

    Returns:
        MXTensor (..., D), which represents values of data's dtype.

    Raises:
        ValueError: dtype or width that MXFP8 does not have.

    Examples:
        >>> mx = mxep.quantize_mx(torch.randn(4, 64, dtype=torch.bfloat16))
        >>> mx.shape, mx.scale.shape, mx.dequantize().dtype
        (torch.Size([4, 64]), torch.Size([4, 2]), torch.bfloat16)
    """
    return MXTensor.to_mx(data, torch.float8_e4m3fn, MX_BLOCK, scaling_mode)


class MXTensor(torch.Tensor):
    """A tensor in MX format: e4m3 data and one e8m0 scale per 32 values of a row.

    `to_mx`, `quantize_mx` and `from_qdata_and_scales` create one.

    Attributes:
        qdata: (..., D) float8_e4m3fn; may be a row-strided view into packed records.
        scale: (..., D/32) float8_e8m0fnu, row-major; may be such a view too.
        orig_dtype: dtype of the values that it represents, bf16 or float32.

    Examples:
        >>> mx = mxep.quantize_mx(torch.full((4, 64), 3.0))
        >>> mx.qdata.dtype, mx.scale.shape
        (torch.float8_e4m3fn, torch.Size([4, 2]))
        >>> torch.equal(mx.dequantize(), torch.full((4, 64), 3.0))
        True
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    transposed: bool = False  # True of some `MXWeight`
    _parts: tuple[str, ...] = ("qdata", "scale", "orig_dtype")
    # Autograd adds to a leaf's gradient in place, where its user writes nothing.
    _instead_of_writing = (
        "use the out-of-place operator, or .dequantize() first; before a second backward, x.grad = x.grad.dequantize(), or None"
    )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, orig_dtype: torch.dtype) -> MXTensor:
        self = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=orig_dtype, device=qdata.device)  # type: ignore[attr-defined]
        # Attributes are set here and not in __init__: torch 2.11's tracer reads them before __init__ has run.
        self.qdata, self.scale, self.orig_dtype = qdata, scale, orig_dtype
        return self

    def _wrote(self) -> None:
        """Called after a write into the bytes."""

    def share_memory_(self) -> Self:
        """Moves both parts into shared memory, as `torch.Tensor.share_memory_` does."""
        self.qdata.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether both parts are in shared memory."""
        return self.qdata.is_shared() and self.scale.is_shared()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Raises ValueError: DLPack describes one storage."""
        raise ValueError(
            f"MXTensor: {tuple(self.shape)} values in MX have two storages, want a plain tensor for DLPack; use their dequantize()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Reads no data: the compiler prints tensors that have none.
        return f"MXTensor(shape={tuple(self.shape)}, dtype={self.orig_dtype}, device={self.device})"

    @staticmethod
    def to_mx(
        data: torch.Tensor,
        elem_dtype: torch.dtype = torch.float8_e4m3fn,
        block_size: int = MX_BLOCK,
        scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
    ) -> MXTensor:
        """Quantise `data` (..., D), with torchao's argument order and default mode. Raises ValueError as the function `to_mx`."""
        scale, qdata = to_mx(data, elem_dtype, block_size, scaling_mode)
        return MXTensor(qdata, scale, data.dtype)

    @staticmethod
    def from_qdata_and_scales(
        qdata: torch.Tensor, scales: torch.Tensor, orig_dtype: torch.dtype, *, block_size: int = MX_BLOCK
    ) -> MXTensor:
        """Wrap bytes that are MX already, without a copy.

        Args:
            qdata: (..., D) float8_e4m3fn.
            scales: (..., D/32) float8_e8m0fnu (uint8 bytes are taken as such).
            orig_dtype: dtype of the values that the result represents, bf16 or float32.
            block_size: 32.

        Raises:
            ValueError: shapes, dtypes or devices that do not belong together.
        """
        where = "MXTensor.from_qdata_and_scales"
        check_block_size(where, block_size)
        check_tensors(where, qdata=qdata, scales=scales)
        if qdata.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{where}: qdata is {qdata.dtype}, want torch.float8_e4m3fn; view bytes as it first")
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        if scales.dtype != torch.float8_e8m0fnu:
            raise ValueError(f"{where}: scales are {scales.dtype}, want torch.float8_e8m0fnu or uint8 bytes")
        want = (*qdata.shape[:-1], qdata.shape[-1] // MX_BLOCK) if qdata.dim() else ("...", "D/32")
        if not qdata.dim() or qdata.shape[-1] % MX_BLOCK or tuple(scales.shape) != want:
            raise ValueError(
                f"{where}: qdata {tuple(qdata.shape)} with scales {tuple(scales.shape)}, want scales {want}: one per 32 values"
            )
        if qdata.device != scales.device:
            raise ValueError(f"{where}: qdata on {qdata.device}, scales on {scales.device}, want one device")
        if orig_dtype not in HIGH_PRECISION:
            raise ValueError(f"{where}: orig_dtype={orig_dtype}, want bfloat16 or float32")
        return MXTensor(qdata, scales, orig_dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickles both parts as bytes, since pickle cannot read torch 2.11's e8m0; torch.save calls this too. Strides stay."""
        parts = self.qdata.view(torch.uint8), self.scale.view(torch.uint8)
        return _rebuild, (*parts, self.orig_dtype, self.requires_grad, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> MXTensor:
        """Copies a leaf, as any tensor; strides stay, and parts that share a storage share one in the copy."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("deepcopy: this MXTensor is part of a graph, want a leaf, as of any tensor; copy mx.detach()")
        parts = copy.deepcopy((self.qdata, self.scale), memo)
        copied = memo[id(self)] = _leaf(MXTensor(*parts, self.orig_dtype), self.requires_grad, isinstance(self, torch.nn.Parameter))
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    @property
    def scales(self) -> torch.Tensor:
        """The same as `scale`."""
        return self.scale

    @property
    def elem_dtype(self) -> torch.dtype:
        """The dtype of qdata, float8_e4m3fn."""
        return self.qdata.dtype

    @property
    def block_size(self) -> int:
        """32, the values that share a scale."""
        return MX_BLOCK

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor of `dtype` (default: orig_dtype), multiplied in float32 and rounded once; differentiable."""
        return aten._to_copy.default(self, dtype=self.orig_dtype if dtype is None else dtype)

    def apply_(self, *args: Any) -> Any:
        """Raises ValueError: torch would write to memory that this tensor does not have."""
        raise _write_error("apply_", self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _write_error("assignment to rows", self)  # torch would write into a copy of them

    @property
    def data(self) -> torch.Tensor:
        """As `torch.Tensor.data`; raises ValueError for an assignment of anything but MX bytes."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) is not type(self):
            raise _write_error("assignment to .data", self)  # torch would keep the bytes
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in self._parts:
            setattr(self, name, getattr(value, name))

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        reject_graph_output(self, "torch.compile", while_tracing=True)
        return ["qdata", "scale"], {"orig_dtype": self.orig_dtype}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: dict[str, Any], outer_size: Any, outer_stride: Any) -> MXTensor:
        return MXTensor(inner["qdata"], inner["scale"], meta["orig_dtype"])

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected_type: type | None = None) -> torch.Tensor | None:
        """The values, for a compiled backward that was traced for a plain gradient and gets an MX one: the same numbers in more bytes."""
        return dequantize_data(self) if expected_type is torch.Tensor else None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        as_itself = func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)  # which FSDP's hooks call
        if as_itself or func in (aten.detach.default, aten.alias.default, aten.clone.default):
            mx, same = args[0], aten.alias.default if as_itself else func
            return return_and_correct_aliasing(func, args, kwargs, MXTensor(same(mx.qdata), same(mx.scale), mx.orig_dtype))
        if func is aten._to_copy.default and kwargs.get("device") is not None and kwargs.get("dtype") in (None, args[0].orig_dtype):
            mx, device, lazily = args[0], kwargs["device"], bool(kwargs.get("non_blocking"))
            qdata, scale = (part.to(device, non_blocking=lazily, copy=True) for part in (mx.qdata, mx.scale))
            return MXTensor(qdata, scale, mx.orig_dtype)
        if func.namespace == "c10d" and func.__name__ == "broadcast_.default" and all(isinstance(mx, MXTensor) for mx in args[0]):
            return _broadcast(func, args, kwargs)
        _reject_writes(func, args, kwargs)
        if func is aten._to_copy.default:
            reject_graph_output(args[0], "dequantize")
            dtype = kwargs.get("dtype") or args[0].orig_dtype
            if dtype in (*HIGH_PRECISION, torch.float16):
                return dequantize_data(args[0], dtype)

        def plain(value: Any) -> Any:
            if not isinstance(value, MXTensor):
                return value
            reject_graph_output(value, str(func))
            values = dequantize_data(value)
            return values if func in _TAKES_ANY_STRIDES else values.contiguous()

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _leaf(mx: MXTensor, requires_grad: bool, parameter: bool) -> MXTensor:
    if parameter:
        return torch.nn.Parameter(mx, requires_grad)  # type: ignore[return-value]
    mx.requires_grad_(requires_grad)
    return mx


def from_pickle(where: str, qdata: object, scale: object, orig_dtype: torch.dtype) -> MXTensor:
    """An `MXTensor` from both parts' bytes. Raises ValueError for parts that do not belong together: a file may hold anything."""
    if not isinstance(qdata, torch.Tensor) or not isinstance(scale, torch.Tensor) or qdata.dtype != torch.uint8 or qdata.dim() < 1:
        raise ValueError(f"{where}: a pickle holds something else under its name, want the bytes of two tensors; save it again")
    return MXTensor.from_qdata_and_scales(qdata.view(torch.float8_e4m3fn), scale, orig_dtype)


def _rebuild(qdata: object, scale: object, orig_dtype: torch.dtype, requires_grad: bool, parameter: bool = False) -> MXTensor:
    """Makes the tensor when a pickle is read."""
    return _leaf(from_pickle("MXTensor", qdata, scale, orig_dtype), requires_grad, parameter)


torch.serialization.add_safe_globals([_rebuild])  # torch.load(weights_only=True) reads MX tensors once this module is imported


def from_records(records: torch.Tensor, width: int, dtype: torch.dtype) -> MXTensor:
    """MX (R, width) as views into packed records (R, record_bytes(width)) uint8, with values of `dtype`."""
    qdata = records[:, :width].view(torch.float8_e4m3fn)
    scale = records[:, width : width + width // MX_BLOCK].view(torch.float8_e8m0fnu)
    return MXTensor(qdata, scale, dtype)


def dequantize_data(value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of an MX tensor as a plain tensor (a plain one comes back cast); no gradient, for use inside autograd functions."""
    if isinstance(value, MXTensor):
        if value.transposed and value.dim() < 2:  # FSDP2 makes it, and reads its bytes
            raise ValueError("MXWeight: a flat view of a transposed weight has no values, want its rows; flatten() copies them")
        values = direct.dequantize(value.qdata, value.scale, value.orig_dtype if dtype is None else dtype)
        return values.transpose(-2, -1) if value.transposed else values
    return value if dtype is None else value.to(dtype)


def reject_graph_output(mx: torch.Tensor, where: str, *, while_tracing: bool = False) -> None:
    """Raise ValueError for an MX tensor that a compiled graph returned and that needs a gradient.

    The graph's backward was compiled for an MX gradient, but operators outside of the graph return a plain one.  Torch would fail in the
    middle of backward with a message about tangents.

    `while_tracing` False checks in eager code alone: the inputs of a graph are checked when they are flattened.
    """
    if not isinstance(mx, MXTensor) or (torch.compiler.is_compiling() and not while_tracing):
        return
    if mx.requires_grad and type(mx.grad_fn).__name__ == _COMPILED_NODE:
        raise ValueError(
            f"{where}: an MX tensor of shape {tuple(mx.shape)} left a compiled graph (a break after dispatch or permute) and its "
            "gradient cannot enter that graph again; compile the blocks from dispatch to the grouped GEMM as one graph "
            "(fullgraph=True shows the break), or leave dispatch and permute eager with torch.compiler.disable"
        )


def _broadcast(func: Any, args: tuple, kwargs: dict) -> tuple[list[MXTensor], Any]:
    """Broadcasts both parts. DistributedDataParallel calls it for frozen weights that are larger than one of its buckets."""
    tensors, *rest = args
    _, work = func([mx.qdata.view(torch.uint8) for mx in tensors], *rest, **kwargs)
    work.wait()
    _, work = func([mx.scale.view(torch.uint8) for mx in tensors], *rest, **kwargs)
    for mx in tensors:
        mx._wrote()
    return tensors, work


def _reject_writes(func: Any, args: tuple, kwargs: dict) -> None:
    if func.namespace == "c10d" and args and not func._schema.name.endswith("::send"):  # they write into the first without saying so
        for value in tree_leaves(args[0]):
            if isinstance(value, MXTensor):
                raise ValueError(
                    f"{func}: writes into an MX tensor of shape {tuple(value.shape)}, want its bytes, or for a sum its dequantize(); "
                    "exchange w.qdata.view(torch.uint8) and w.scale.view(torch.uint8)"
                )
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for value in tree_leaves(given.get(argument.name)):  # a list of a fused optimizer
            if isinstance(value, MXTensor):
                raise _write_error(str(func), value)


def _write_error(where: str, mx: MXTensor) -> ValueError:
    return ValueError(
        f"{where}: writes into an MXTensor of shape {tuple(mx.shape)}, whose bytes cannot hold the result; {mx._instead_of_writing}"
    )
