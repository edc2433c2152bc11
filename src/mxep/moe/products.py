"""The grouped products of the fused layer, each in its recipe's precision, of rows that stand in order or are read through a map.

A map (P,) says which row stands in each place, -1 for padding.  Received rows are read through it, so that their copy in the experts'
order is stored nowhere; on the FP8 roads they are gathered in the pass that rebases them, elsewhere right before the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxep.gemm_options import GemmOptions
from mxep.grouped_mm import as_mx, forms, quantized
from mxep.moe.ffn import weight_bytes, wgrad_of_halves
from mxep.mx.tensor import MXTensor
from mxep.mx.weight_cache import CachedWeight
from mxep.mx.weight_forms import Bytes, for_path
from mxep.wgrad import WgradOperands

_TAIL = "skip"  # behind the last expert's rows stands nothing that anyone reads
Into = torch.dtype | Tensor  # of a gradient: a new one's dtype, or one of which an earlier pass made a part


class Weights:
    """One weight (L, N, K), or two that are joined along N, as products read them.

    Args:
        first, second: the weights; second may be None.
        gemm: how products run, None for high precision.
        cache: where forms are kept beyond this, None for nowhere.  One that does not serve now counts as none.
        keep: whether a form that a product has asked for is kept as long as this lives.  So passes share it, and those that find no rows
            cost next to nothing; for one pass it would take memory for nothing.
        dtype: in which products in high precision read them, None: as they are.  For the others `gemm` says so.
    """

    def __init__(
        self,
        first: Tensor,
        second: Tensor | None,
        gemm: GemmOptions | None,
        cache: CachedWeight | None,
        keep: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.gemm, self._dtype = gemm, dtype
        self._parts, self._keep = (first,) if second is None else (first, second), keep
        self._cache = cache if cache is not None and cache.cache.serves() else None
        self._joined: Tensor | None = None
        self._forms: dict[str, Bytes] = {}

    def joined(self) -> Tensor:
        """(L, N, K) in high precision."""
        if self._joined is not None:
            return self._joined
        parts = self._parts if self._dtype is None else [part.to(self._dtype) for part in self._parts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        self._joined = joined if self._keep else None
        return joined

    def quantized(self, which: str) -> Bytes:
        """What "forward" or "dgrad" reads: qdata and scale as the GEMM's path wants them."""
        assert self.gemm is not None
        if which in self._forms:
            return self._forms[which]
        form = weight_bytes(self._parts, self._cache, self.gemm, which)
        if self._keep and self._cache is None:
            form = self._forms[which] = for_path(form, self.gemm.path_to(self.gemm.out_dtype))
        return form


def _in_place(rows: Tensor, row_map: Tensor | None, offs: Tensor) -> Tensor:
    """Rows (P, D), MX or plain, in the experts' order; behind the last expert's not defined."""
    if row_map is None:
        return rows
    if isinstance(rows, MXTensor):
        qdata, scale = torch.ops.mxep.gather_mx_rows(rows.qdata, rows.scale, row_map, offs[-1:])
        return MXTensor(qdata, scale, rows.orig_dtype)
    return torch.ops.mxep.gather_rows(rows, row_map, offs[-1:])


def _values(rows: Tensor, row_map: Tensor | None, offs: Tensor) -> Tensor:
    """The same in high precision."""
    rows = _in_place(rows, row_map, offs)
    return torch.ops.mxep.dequantize(rows.qdata, rows.scale, rows.orig_dtype, offs[-1:]) if isinstance(rows, MXTensor) else rows


def multiply(rows: Tensor, row_map: Tensor | None, weights: Weights, offs: Tensor) -> Tensor:
    """rows (R, K), MX or plain, times weights (L, N, K) -> (P, N) in the experts' order; rows behind the last expert's are not defined."""
    return _product(rows, row_map, weights, offs, "forward")


def multiply_back(rows: Tensor, row_map: Tensor | None, weights: Weights, offs: Tensor) -> Tensor:
    """rows (R, N), gradients, times the weights' transposes -> (P, K); rows behind the last expert's are not defined."""
    return _product(rows, row_map, weights, offs, "dgrad")


def _product(rows: Tensor, row_map: Tensor | None, weights: Weights, offs: Tensor, which: str) -> Tensor:
    gemm = weights.gemm
    if gemm is None:
        w = weights.joined()
        rows = _in_place(rows, row_map, offs)
        return torch.ops.mxep.grouped_mm_hp(rows, w if which == "forward" else w.transpose(-2, -1), offs, rows.dtype, _TAIL)
    operands = *quantized(rows, gemm.mode), *weights.quantized(which)
    return torch.ops.mxep.grouped_mm_mx(*operands, offs, gemm.out_dtype, gemm.path_to(gemm.out_dtype), row_map, _TAIL)


def unwritten(weight: Tensor, dtype: torch.dtype, turned: bool) -> Tensor:
    """Memory for a weight's gradient; `turned` as in `wgrad`."""
    L, N, K = weight.shape
    if turned:
        return torch.empty((L, K, N), dtype=dtype, device=weight.device).transpose(-2, -1)
    return torch.empty((L, N, K), dtype=dtype, device=weight.device)


def wgrad(
    grad: Tensor,
    g_map: Tensor | None,
    a: Tensor,
    a_map: Tensor | None,
    offs: Tensor,
    gemm: GemmOptions | None,
    into: Into,
    last: bool = True,
    turned: bool = False,
) -> Tensor:
    """dW (L, N, K) from gradients (R, N) and rows (R, K), MX or plain, each through its map; all of it, or a pass's part beside `into`.

    `turned`: it is stored as (L, K, N), `into` too.  `last`: no pass follows, so it may be another tensor that has what the passes before
    have written.
    """
    if turned:
        into = into.transpose(-2, -1) if isinstance(into, Tensor) else into
        return wgrad(a, a_map, grad, g_map, offs, gemm, into, last).transpose(-2, -1)
    if isinstance(into, Tensor):
        return _wgrad_into(into, (grad, g_map), (a, a_map), offs, gemm, last)
    dtype = into
    if gemm is not None and gemm.wgrad == "mxfp8":
        columns = [forms(_in_place(*side, offs), gemm.mode, rows=False, columns=True)[1] for side in ((grad, g_map), (a, a_map))]
        assert columns[0] is not None
        assert columns[1] is not None
        return WgradOperands(columns[0], columns[1]).product(offs, gemm, dtype)
    if gemm is not None and gemm.wgrad == "mx":
        grad, a = as_mx(grad, gemm.mode), as_mx(a, gemm.mode)
    if gemm is not None and isinstance(grad, MXTensor) and isinstance(a, MXTensor):
        return WgradOperands(grad, a).product(offs, gemm, dtype, g_map, a_map)
    return torch.ops.mxep.grouped_wgrad_hp(_values(grad, g_map, offs), _values(a, a_map, offs), offs, dtype)


def _wgrad_hp_into(into: Tensor, grad: Tensor, a: Tensor, offs: Tensor, last: bool) -> Tensor:
    """dW of values: the last pass, which has most rows, by the faster GEMM, which knows no groups that stay and writes bf16 alone."""
    if not last or into.dtype != torch.bfloat16:
        torch.ops.mxep.grouped_wgrad_hp_into(into, grad, a, offs)
        return into
    made = torch.ops.mxep.grouped_wgrad_hp(grad, a, offs, into.dtype)
    torch.ops.mxep.copy_groups(made, into, offs, empty=True)
    return made


def _wgrad_into(
    into: Tensor, grad: tuple[Tensor, Tensor | None], a: tuple[Tensor, Tensor | None], offs: Tensor, gemm: GemmOptions | None, last: bool
) -> Tensor:
    """The part of `wgrad` that belongs to experts with rows, beside those of earlier passes."""
    if gemm is not None and gemm.wgrad == "mxfp8":
        torch.ops.mxep.copy_groups(into, wgrad(*grad, *a, offs, gemm, into.dtype), offs)
        return into
    left, right = grad[0], a[0]
    if gemm is not None and gemm.wgrad == "mx":
        left, right = as_mx(left, gemm.mode), as_mx(right, gemm.mode)
    if gemm is not None and isinstance(left, MXTensor) and isinstance(right, MXTensor):
        operands = left.qdata, left.scale, right.qdata, right.scale
        torch.ops.mxep.grouped_wgrad_mx_rows_into(into, *operands, offs, gemm.wgrad_path(into.dtype), grad[1], a[1], not last)
        return into
    return _wgrad_hp_into(into, _values(left, grad[1], offs), _values(right, a[1], offs), offs, last)


def _wgrad_apart_into(
    into: list[Tensor | None],
    grad: Tensor,
    a: Tensor,
    a_map: Tensor | None,
    offs: Tensor,
    gemm: GemmOptions | None,
    last: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The same of two weights that are joined in the product."""
    left, right = into
    if gemm is not None and gemm.wgrad == "mx":
        assert isinstance(grad, MXTensor)
        rows, wanted = as_mx(a, gemm.mode), [half for half in into if half is not None]
        both = [torch.empty_like(wanted[0]) if half is None else half for half in into]  # one alone would be other bits
        operands = grad.qdata, grad.scale, rows.qdata, rows.scale
        torch.ops.mxep.grouped_wgrad_mx_halves_into(*both, *operands, offs, gemm.wgrad_path(wanted[0].dtype), a_map, not last)
        return left, right
    if gemm is not None and gemm.wgrad == "mxfp8":
        dtypes = [half.dtype for half in into if half is not None]
        made = wgrad(grad, None, a, a_map, offs, gemm, dtypes[0]).chunk(2, 1)
        for half, new in zip(into, made, strict=True):
            if half is not None:
                torch.ops.mxep.copy_groups(half, new, offs)
        return left, right
    del left, right  # each is held until its successor is there, and no longer
    values, halves = _values(a, a_map, offs), list[Tensor | None]()
    for part in _values(grad, None, offs).chunk(2, -1):
        half = into.pop(0)
        halves.append(None if half is None else _wgrad_hp_into(half, part, values, offs, last))
    return halves[0], halves[1]


def wgrad_apart(
    grad: Tensor,
    a: Tensor,
    a_map: Tensor | None,
    offs: Tensor,
    gemm: GemmOptions | None,
    wanted: tuple[torch.dtype, bool, bool],
    into: list[Tensor | None],
    last: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dW (L, H, D) of two weights that are joined in the product, from gradients (P, 2H) in place; each where it is wanted.

    All of them, or a pass's part beside `into`, two that may be None; `last` as in `wgrad`.  `into` loses each
    half that another tensor replaces: it can be freed before the other half is made.
    """
    if any(half is not None for half in into):
        return _wgrad_apart_into(into, grad, a, a_map, offs, gemm, last)
    if gemm is not None and gemm.wgrad == "mxfp8":
        halves = wgrad(grad, None, a, a_map, offs, gemm, wanted[0]).chunk(2, 1)
        return halves[0] if wanted[1] else None, halves[1] if wanted[2] else None
    if gemm is not None and gemm.wgrad == "mx":
        return wgrad_of_halves(grad, as_mx(a, gemm.mode), offs, gemm, wanted, a_map)
    return wgrad_of_halves(_values(grad, None, offs), _values(a, a_map, offs), offs, gemm, wanted)
