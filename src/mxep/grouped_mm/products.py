"""The engine of all grouped GEMMs: forward and dgrad, each in the precision that its options name; wgrad is in `wgrad_gemm`.

Every autograd function around an expert's weight calls `rows_gemm` and `wgrad_gemm.wgrad_gemm`.  Callers never choose the precision:

    GEMMs   high precision without `GemmOptions`, else MXFP8: rows 1x32 along the contraction, weights quantised for the same dimension
    wgrad   "hp": the operands' values.  "mx": the MX bytes that forward and dgrad read.  "mxfp8": both operands quantised 32x1 along M

Rows are in the experts' order, or are read through a row map (P,): the source row of each row, -1 for padding.  Received rows are read
through their map, so no copy in the experts' order is kept.  On the FP8 paths the rebase kernel also gathers.  Where MX rows are
multiplied in high precision, the pass that dequantises them gathers.  Rows that an activation makes come rebased (`GemmOptions.rebased`).
Plain rows in the experts' order are quantised and rebased in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mxep.device import GEMM_PATHS, checking, resolve_gemm_path
from mxep.mx.rows import gather
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.mx.weight import MXWeight
from mxep.mx.weight_cache import CachedWeight
from mxep.operators import direct
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows
from mxep.ops.grouped_gemm.reference import FUSED_RANK, fuses_lora
from mxep.ops.runtime.replay import writable

Bytes = tuple[Tensor, Tensor]  # qdata, scale; of a weight also the parts of `RebasedWeight`
SavedForm = tuple[Tensor | None, Tensor | None]  # dgrad's form of a weight, which forward has made: data and scale, or None of both
_DIRECTIONS = "forward", "dgrad"  # which form of a weight: (L, N, K), or (L, K, N)


class GemmOptions(NamedTuple):
    """How one grouped GEMM multiplies, without its operands; hashable, so that a compiled graph can hold it."""

    out_dtype: torch.dtype
    wgrad: str  # "hp", "mx" or "mxfp8", as in Recipe; "none" if the weight gets no gradient
    mode: str  # a scaling mode's name
    path: str  # resolved GEMM path
    float32_path: str  # the path of float32 results
    rebased: str | None  # granularity with which rows of forward and dgrad are rebased, None where these multiply MX rows
    pad_groups: bool
    weight_dtype: torch.dtype | None = None  # to which a weight is rounded wherever it is read, None: not at all

    def path_to(self, out_dtype: torch.dtype) -> str:
        """The GEMM path of results in `out_dtype`."""
        return self.float32_path if out_dtype == torch.float32 else self.path

    def with_out_dtype(self, out_dtype: torch.dtype) -> GemmOptions:
        """The same options for results of another dtype, which may take another path and other rows."""
        return self._replace(out_dtype=out_dtype, rebased=GEMM_PATHS[self.path_to(out_dtype)].granularity)

    def wgrad_path(self, dtype: torch.dtype) -> str:
        """The path of dW in `dtype`.  A weight that is read in bf16 takes the bf16 path for a float32 dW too."""
        return self.path_to(self.weight_dtype or dtype)

    def wgrad_is_chunk_invariant(self, dtype: torch.dtype) -> bool:
        """Whether dW in `dtype` has the same bits in one chunk and in several; False for MX rows on paths that dequantise them."""
        return self.wgrad != "mx" or GEMM_PATHS[self.wgrad_path(dtype)].wgrad_multiplies_mx

    def wgrad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which wgrad writes dW of a weight of `dtype`; the autograd functions cast the result.

        FP8 tensor cores write float32 as well as bf16.  torch's bf16 GEMM, which multiplies high-precision operands, writes bf16 alone.
        """
        if self.weight_dtype is None or (self.wgrad == "mx" and GEMM_PATHS[self.path].wgrad_multiplies_mx):
            return dtype
        return self.weight_dtype


def gemm_options(
    device: torch.device,
    out_dtype: torch.dtype,
    name: str,
    wgrad: str,
    mode: str,
    pad_groups: bool = False,
    weight_dtype: torch.dtype | None = None,
) -> GemmOptions:
    """Options with the GEMM path of that name resolved on a device; `wgrad` as in Recipe."""
    resolve = _resolved_options if torch.compiler.is_compiling() else _kept_options
    return resolve(device, out_dtype, name, wgrad, mode, pad_groups, weight_dtype)


def _resolved_options(
    device: torch.device, out_dtype: torch.dtype, name: str, wgrad: str, mode: str, pad_groups: bool, weight_dtype: torch.dtype | None
) -> GemmOptions:
    path = resolve_gemm_path(name, device)
    # "fp8" sums in 14 bits between promotions (errors of 1e-4 to 6e-4): fine for bf16 results, too inexact for float32.
    float32_path = "exact" if name == "auto" and path == "fp8" else path
    rebased = GEMM_PATHS[float32_path if out_dtype == torch.float32 else path].granularity
    return GemmOptions(out_dtype, wgrad, mode, path, float32_path, rebased, pad_groups, weight_dtype)


_kept_options = functools.lru_cache(maxsize=1024)(_resolved_options)  # a device's paths do not change; dynamo would trace into a cache


# ---------------------------------------------------------------- operands


Operand = Tensor | Bytes  # rows of a wgrad: plain or an `MXTensor`; or bytes, 1x32 along K for wgrad "mx" and 32x1 along M for "mxfp8"


class Forms(NamedTuple):
    """The same rows as MX, in high precision, and rebased for an FP8 GEMM; None: not made."""

    mx: MXTensor | None
    hp: Tensor | None
    rebased: RebasedRows | None = None


def quantized(value: Tensor, mode: str) -> Bytes:
    """(qdata, scale) 1x32 along the last dimension; an MX tensor's own bytes."""
    return _bytes(value) if isinstance(value, MXTensor) else direct.quantize(value.contiguous(), mode)


def _bytes(value: MXTensor) -> Bytes:
    return value.qdata, value.scale


def as_mx(value: Tensor, mode: str) -> MXTensor:
    """Rows (M, K) as MX, 1x32 along K."""
    return value if isinstance(value, MXTensor) else MXTensor(*quantized(value, mode), value.dtype)


def shared_form(rows: Tensor, gemm: GemmOptions | None) -> Tensor:
    """Rows for a GEMM and a wgrad: quantised once if both read the same MX bytes, else as they are."""
    return rows if gemm is None or gemm.wgrad != "mx" or isinstance(rows, MXTensor) else as_mx(rows, gemm.mode)


def multiply_rows(
    rows: Tensor,
    weights: Weights,
    which: str,
    offs: Tensor,
    row_map: Tensor | None = None,
    for_gemm: bool = True,
    for_wgrad: bool = True,
    lora: LoraProduct | None = None,
) -> tuple[Tensor | None, Operand | None, Tensor | None]:
    """`rows_gemm` of rows (R, K), MX or plain, and the rows as a wgrad reads them.

    Returns:
        the product, None unless it is wanted; the rows for wgrad, None unless they are wanted; the map through which wgrad reads them.
        32x1 blocks and high precision get a copy in the experts' order.
    """
    gemm, operand = weights.gemm, rows
    wgrad: Operand | None = None
    if gemm is not None and gemm.wgrad != "mxfp8":
        if for_gemm and _rebases(rows, gemm, row_map):
            mx = for_wgrad and gemm.wgrad == "mx"
            made = _quantize_gemm(rows, weights, which, offs, mx, "zero", lora)
            return made[0], (made[1], made[2]) if mx else rows if for_wgrad and gemm.wgrad == "hp" else None, None
        operand = shared_form(rows, gemm)
        wgrad = operand if gemm.wgrad != "none" else None
    else:
        if row_map is not None:
            operand, row_map = gather(rows, row_map), None
        if gemm is None:
            wgrad = operand
        elif for_gemm and for_wgrad and not isinstance(operand, MXTensor):  # both from one read
            qdata, scale, *columns = direct.quantize_rowwise_columnwise(operand, gemm.mode)
            operand, wgrad = MXTensor(qdata, scale, rows.dtype), (columns[0], columns[1])
        elif for_wgrad:
            wgrad = quantized_columnwise(operand, gemm.mode)
    out = _gemm(operand, weights, which, offs, row_map, "zero", lora) if for_gemm else None
    return out, wgrad if for_wgrad else None, row_map


def _rebases(rows: Tensor, gemm: GemmOptions, row_map: Tensor | None) -> bool:
    """Whether one pass quantises and rebases these rows: plain rows in order, on an FP8 path."""
    return gemm.rebased is not None and row_map is None and not isinstance(rows, MXTensor)


def saved_tensors(*operands: Operand | None) -> tuple[Tensor | None, ...]:
    """Two tensors that autograd can save for each operand of a wgrad: data and scale, rows and None, or None twice."""
    saved: list[Tensor | None] = []
    for operand in operands:
        saved += operand if isinstance(operand, tuple) else _bytes(operand) if isinstance(operand, MXTensor) else (operand, None)
    return tuple(saved)


def saved_operand(data: Tensor, scale: Tensor | None, dtype: torch.dtype, gemm: GemmOptions | None) -> Operand:
    """The operand that `saved_tensors` took apart; `dtype` is that of its values."""
    if scale is None or gemm is None or gemm.wgrad == "hp":
        return data if scale is None else MXTensor(data, scale, dtype)
    return data, scale


def form_names(gemm: GemmOptions | None, dgrad: bool, wgrad: bool, values: bool = False) -> str:
    """The forms of rows that a dgrad, a wgrad and a reader of values need: "none", or some of "mx+rebased+hp" (`activate_backward`)."""
    wgrad_reads_mx, rebased = gemm is not None and gemm.wgrad == "mx", gemm is not None and gemm.rebased is not None
    mx = gemm is not None and ((dgrad and not rebased) or (wgrad and wgrad_reads_mx))
    hp = values or (wgrad and not wgrad_reads_mx) or (dgrad and gemm is None)
    return "+".join(name for name, wanted in (("mx", mx), ("rebased", dgrad and rebased), ("hp", hp)) if wanted) or "none"


def dgrad_form(forms: Forms, gemm: GemmOptions | None) -> Tensor | RebasedRows:
    """The one of these forms that dgrad reads."""
    form = forms.hp if gemm is None else forms.mx if gemm.rebased is None else forms.rebased
    assert form is not None
    return form


def wgrad_form(forms: Forms, gemm: GemmOptions | None) -> Tensor:
    """The one of these forms that `wgrad_gemm` reads."""
    form = forms.mx if gemm is not None and gemm.wgrad == "mx" else forms.hp
    assert form is not None
    return form


def quantized_columnwise(rows: Tensor, mode: str) -> Bytes:
    """Rows (M, K) quantised 32x1 along M: the MX form of their transpose, qdata (K, M) and scale (K, M/32)."""
    return direct.quantize_columnwise(dequantize_data(rows), mode)  # type: ignore[no-any-return]


def row_values(rows: Tensor, row_map: Tensor | None, offs: Tensor) -> Tensor:
    """Rows (R, K), MX or plain, in high precision and in the experts' order (P, K); those past the last group are undefined."""
    if isinstance(rows, MXTensor):
        return direct.dequantize(rows.qdata, rows.scale, rows.orig_dtype, row_map, offs[-1:])
    return rows if row_map is None else direct.gather_rows(rows, row_map, offs[-1:])


# ---------------------------------------------------------------- weights


def is_transposed(weight: Tensor) -> bool:
    """Whether a weight (L, N, K) is stored as (L, K, N). Its gradient is then written as (L, K, N) too, which saves a transposing copy."""
    return weight.stride(-2) == 1 and weight.stride(-1) > 1


def _quantize_weight(weight: Tensor, mode: str) -> Bytes:
    """(qdata, scale) of (G, N, K) 1x32 along K, any strides; a transposed view is read without a copy."""
    if is_transposed(weight):
        return direct.quantize_columnwise(weight.transpose(-2, -1), mode)
    return direct.quantize(weight.contiguous(), mode)


def _concat_bytes(parts: list[Tensor], dim: int) -> Tensor:
    """Data or scales of several weights as one tensor."""
    if len(parts) == 1:
        return parts[0].contiguous()  # a slice along K starts where kernels that read words cannot
    return torch.cat([part.view(torch.uint8) for part in parts], dim).view(parts[0].dtype)


class Weights:
    """One weight (L, N, K), or two that are concatenated along N, as the GEMMs read them.

    Args:
        first, second: the weights, bf16 or float32, any strides, or frozen in MX (`MXWeight`); second may be None.
        gemm: how to multiply, None for high precision.
        cache: keeps quantised forms from call to call; None, or a cache that is switched off now, keeps none.
        keep: whether this object keeps each form that it has made.  Several chunks share it then; for one chunk it would only take memory.
        dtype: to which high-precision GEMMs round the weights, None: not at all.  `gemm.weight_dtype` says so for the others.
        forward, dgrad: data and scale of forms that are made already, a pair of None for none.
    """

    def __init__(
        self,
        first: Tensor,
        second: Tensor | None,
        gemm: GemmOptions | None,
        cache: CachedWeight | None = None,
        keep: bool = False,
        dtype: torch.dtype | None = None,
        dgrad: SavedForm = (None, None),
        forward: SavedForm = (None, None),
    ) -> None:
        self.gemm, self._dtype = gemm, dtype if gemm is None else gemm.weight_dtype
        parts: tuple[Tensor, ...] = (first,) if second is None else (first, second)
        self._frozen: tuple[MXWeight, ...] = ()
        if isinstance(first, MXWeight) or isinstance(second, MXWeight):
            frozen = tuple(part for part in parts if isinstance(part, MXWeight))
            if len(frozen) == len(parts):
                self._frozen = frozen
            else:
                parts = tuple(dequantize_data(part) for part in parts)
        self._parts, self._keep = parts, keep
        self._cache = cache if cache is not None and not self._frozen and cache.cache.serves() else None
        self._concat: Tensor | None = None
        self._forms: dict[str, Bytes] = {}
        for which, (data, scale) in zip(_DIRECTIONS, (forward, dgrad), strict=True):
            if data is not None and scale is not None:
                self._forms[which] = data, scale

    @property
    def transposed(self) -> bool:
        """Whether the gradient is stored as (L, K, N): see `is_transposed`; of two weights it never is."""
        return len(self._parts) == 1 and is_transposed(self._parts[0])

    @property
    def wgrad_dtype(self) -> torch.dtype:
        """The dtype in which `wgrad_gemm` writes the gradient."""
        own = self._parts[0].dtype
        return (self._dtype or own) if self.gemm is None else self.gemm.wgrad_dtype(own)

    def concat(self) -> Tensor:
        """(L, N, K) in high precision."""
        if self._concat is not None:
            return self._concat
        if self._frozen:
            parts = [dequantize_data(part, self._dtype) for part in self._frozen]
        else:
            parts = [part if self._dtype is None else part.to(self._dtype) for part in self._parts]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        self._concat = weight if self._keep else None
        return weight

    def quantized(self, which: str) -> Bytes:
        """The form that "forward", (L, N, K), or "dgrad", (L, K, N), reads: MX bytes, or the rebased form on paths that rebase."""
        gemm = self.gemm
        assert gemm is not None
        if which in self._forms:
            return self._forms[which] if self._keep or which == "dgrad" else self._forms.pop(which)
        if self._cache is not None:
            # One pass makes both forms of a weight that is trained, since they stay.
            trained = self._parts[0].requires_grad or self._parts[-1].requires_grad
            names = _DIRECTIONS if trained and gemm.rebased is not None else (which,)
            key = gemm.mode, "+".join(names), gemm.path_to(gemm.out_dtype), self._dtype
            kept = self._cache.find(self._parts, key, lambda: tuple(tensor for form in self._make(names) for tensor in form))
            if kept is not None:
                forms = dict(zip(names, zip(kept[::2], kept[1::2], strict=True), strict=True))
                found = forms.pop(which)
                if not self._compares():
                    self._forms |= forms  # the other one, if there are both
                return found
        made = self._frozen_form(which) if self._frozen else self._make((which,))[0]
        if self._keep and self._cache is None:
            self._forms[which] = made
        return made

    def _compares(self) -> bool:
        """Whether the cache compares every form with the weight."""
        return self._cache is not None and checking(self._parts[0].device)

    def made(self, which: str) -> SavedForm:
        """The form if it has been made, else a pair of None."""
        return self._forms.get(which, (None, None))

    def cached(self, which: str) -> SavedForm:
        """The form if it has been made or if a cache keeps it, else a pair of None."""
        return self.quantized(which) if self._cache is not None and which not in self._forms else self.made(which)

    def make_both(self) -> SavedForm:
        """Make what "forward" and "dgrad" read in one pass: for 1.4 times the cost of one of them.

        `quantized` returns forward's form, once unless it is kept.  An autograd function saves the result, dgrad's form (data and scale),
        and passes it to the `Weights` of its backward.  The result is a pair of None where two passes make the forms, where forward's is
        made already, and in checking mode with a cache, so that backward asks the cache, which compares.
        """
        if self.gemm is None or self.gemm.rebased is None or self._frozen or "forward" in self._forms:
            return None, None
        if self._cache is not None:
            return (None, None) if self._compares() else self.quantized("dgrad")
        forward, dgrad = self._make(_DIRECTIONS)
        self._forms |= {"forward": forward} | ({"dgrad": dgrad} if self._keep else {})
        data, scale = dgrad
        return data, scale

    def _frozen_form(self, which: str) -> Bytes:
        """A form of weights that are frozen in MX: their bytes; along the other dimension the values, quantised once more."""
        gemm = self.gemm
        assert gemm is not None
        if all(part.transposed == (which == "dgrad") for part in self._frozen):
            along = 1 if which == "forward" else 2
            form = _concat_bytes([w.qdata for w in self._frozen], along), _concat_bytes([w.scale for w in self._frozen], along)
            return form if gemm.rebased is None else direct.rebase_weight(*form)
        keeps = [part.kept for part in self._frozen if part.kept is not None]
        if len(keeps) < len(self._frozen):
            return self._quantized_again(which)
        # Another weight is compared as an object, which the entry holds: an address may be that of one that is gone.
        forms, key = keeps[0].forms, (which, gemm.mode, gemm.path_to(gemm.out_dtype))
        facts = keeps[0].writes, *((kept, kept.writes) for kept in keeps[1:])
        if key not in forms or forms[key][0] != facts:
            forms[key] = facts, self._quantized_again(which)
        return forms[key][1]  # type: ignore[no-any-return]

    def _quantized_again(self, which: str) -> Bytes:
        """The values of frozen weights in bf16, which holds e4m3 times a power of two exactly, quantised along the other dimension.

        For an FP8 path one pass reads the bytes, and the values are never in memory; except where one of two weights is transposed, which
        that pass cannot join.
        """
        assert self.gemm is not None
        first, second = self._frozen[0], self._frozen[1] if len(self._frozen) > 1 else None
        if self.gemm.rebased is not None and (second is None or not (first.transposed or second.transposed)):
            qdata, scale = (None, None) if second is None else (second.qdata, second.scale)
            made = direct.quantize_weight(first.qdata, qdata, self.gemm.mode, False, True, scale=first.scale, second_scale=scale)
            return made[0], made[1]
        values = [dequantize_data(part, torch.bfloat16) for part in self._frozen]
        (form,) = Weights(values[0], None if second is None else values[1], self.gemm)._make((which,))
        return form

    def _make(self, names: tuple[str, ...]) -> Sequence[Bytes]:
        """The forms of these names, as the GEMM path reads them: MX bytes, or e4m3 with one exponent per output column."""
        assert self.gemm is not None
        mode = self.gemm.mode
        if self.gemm.rebased is None:
            weight = self.concat()
            return [_quantize_weight(weight if name == "forward" else weight.transpose(-2, -1), mode) for name in names]
        first, second = self._parts[0], self._parts[1] if len(self._parts) > 1 else None
        transposed = self.transposed  # read without a copy
        directions = "forward" in names, "dgrad" in names
        rowwise, columnwise = directions[::-1] if transposed else directions
        rounds = self._dtype == torch.bfloat16 and first.dtype == torch.float32
        first = first.transpose(-2, -1) if transposed else first
        forms = iter(direct.quantize_weight(first, second, mode, rowwise, columnwise, rounds))
        made = list(zip(forms, forms, strict=True))
        return made[::-1] if transposed else made


# ---------------------------------------------------------------- forward and dgrad


LoraProduct = tuple[Tensor, Tensor]  # inner (P, r), what an adapter's first factor made of the rows, and its second one (L, N, r)


def adds_lora(gemm: GemmOptions | None, rank: int) -> bool:
    """Whether the GEMMs of these options add an adapter of this rank to their sums, without a separate pass."""
    if gemm is None or gemm.pad_groups:
        return False
    return GEMM_PATHS[gemm.path_to(gemm.out_dtype)].adds_lora and fuses_lora(rank, gemm.out_dtype)


class Lora(NamedTuple):
    """An adapter of row groups: x @ w.T becomes x @ w.T + (x @ a.T) @ b.T.

    Attributes:
        x: the rows (R, K) that `a` multiplies, MX or plain, through their `row_map` (P,).  a: (L, r, K).  b: (L, N, r).
    """

    x: Tensor
    a: Tensor
    b: Tensor
    row_map: Tensor | None = None


class GroupBias(NamedTuple):
    """A bias of row groups, values (L, N), times the rows' scores (P,) float32; None: times one."""

    values: Tensor
    scores: Tensor | None = None


def bias_product(bias: GroupBias, gemm: GemmOptions | None, num_rows: int) -> LoraProduct | None:
    """A bias of that many rows as the product that a GEMM adds before it rounds; None where no GEMM of these options `adds_lora`."""
    if not adds_lora(gemm, FUSED_RANK):
        return None
    inner, factor = direct.group_bias_factors(bias.values, bias.scores, num_rows)
    return inner, factor


def rows_gemm(
    rows: Tensor | RebasedRows,
    weights: Weights,
    which: str,
    offs: Tensor,
    lora: Lora | None = None,
    row_map: Tensor | None = None,
    padding_rows: str = "zero",
    bias: GroupBias | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Products of row groups with their weights, and with an adapter's, plus a bias.

    A GEMM that `adds_lora` adds one of the two before it rounds: an adapter of the rank that it takes, else the bias.  Passes add the rest.

    Args:
        rows: (R, K), MX, plain, or rebased and in order.  weights: (L, N, K).
        which: "forward", or "dgrad": rows (R, N) times the weights' transposes.
        padding_rows: rows past the last group are "zero", or undefined with "skip".

    Returns:
        (P, N) in the experts' order, or (P, K); and x @ a.T (P, r), None without an adapter.
    """
    factors = inner = None
    if lora is not None:
        if isinstance(lora.x, MXTensor):
            lora = lora._replace(x=row_values(lora.x, lora.row_map, offs), row_map=None)
        if adds_lora(weights.gemm, lora.a.shape[1]):
            inner = direct.group_lora_inner(lora.x, lora.a, offs, lora.row_map)
            factors = inner, lora.b
    if bias is not None and factors is None:
        num_rows = (row_map if row_map is not None else rows.data if isinstance(rows, RebasedRows) else rows).shape[0]
        factors = bias_product(bias, weights.gemm, num_rows)
        bias = bias if factors is None else None
    out = _gemm(rows, weights, which, offs, row_map, padding_rows, factors)
    if (lora is not None and inner is None) or bias is not None:
        out = writable(out)
    if lora is not None and inner is None:
        inner = direct.add_group_lora(out, lora.x, lora.a, lora.b, offs, lora.row_map)
    if bias is not None:
        direct.add_group_bias(out, bias.values, offs, bias.scores)
    return out, inner


def _gemm(
    rows: Tensor | RebasedRows,
    weights: Weights,
    which: str,
    offs: Tensor,
    row_map: Tensor | None,
    padding_rows: str,
    lora: LoraProduct | None = None,
) -> Tensor:
    if (gemm := weights.gemm) is not None:
        operand: Bytes | RebasedRows
        if isinstance(rows, RebasedRows):
            operand = rows
        elif _rebases(rows, gemm, row_map):
            return _quantize_gemm(rows, weights, which, offs, False, padding_rows, lora)[0]
        else:
            operand = quantized(rows, gemm.mode)
        return mx_gemm(operand, weights.quantized(which), offs, gemm, row_map, padding_rows, lora)
    assert not isinstance(rows, RebasedRows)
    weight, rows = weights.concat(), row_values(rows, row_map, offs)
    return direct.grouped_mm_hp(rows, weight if which == "forward" else weight.transpose(-2, -1), offs, rows.dtype, padding_rows)


def _quantize_gemm(
    rows: Tensor, weights: Weights, which: str, offs: Tensor, mx: bool, padding_rows: str, lora: LoraProduct | None
) -> list[Tensor]:
    """The product of plain rows on an FP8 path, which `_rebases`, then with `mx` their qdata and scale."""
    gemm = weights.gemm
    assert gemm is not None
    made = weights.quantized(which)
    return direct.quantize_grouped_mm(rows, *made, offs, gemm.out_dtype, gemm.mode, gemm.rebased, mx, padding_rows, *(lora or ()))


def mx_gemm(
    rows: Bytes | RebasedRows,
    weight: Bytes,
    offs: Tensor,
    gemm: GemmOptions,
    row_map: Tensor | None = None,
    padding_rows: str = "zero",
    lora: LoraProduct | None = None,
) -> Tensor:
    """A product of operands that are quantised already.  `lora`: what is added before the result is rounded, where `adds_lora` says so."""
    block_scale = rows.block_scale if isinstance(rows, RebasedRows) else None
    path = gemm.path_to(gemm.out_dtype)
    return direct.grouped_mm_mx(*rows[:2], *weight, offs, gemm.out_dtype, path, row_map, padding_rows, block_scale, *(lora or ()))
