"""The experts' three weights and the activation between them, forward and backward: what every autograd function around them computes.

before  rows (R, D), MX or plain, and where the rows of each expert are: `ExpertRows`
after   rows (P, D) in the experts' order, each times its score where there are scores
forward   gate and up in one GEMM, with their bias -> (P, 2H), or (P, H) without a gate; the activation in float32, times the score,
          straight to the form that the down GEMM reads -> h (P, H); the down GEMM, with its bias, times the score
          An adapter's products, in high precision, are added to its weight's GEMM (`mxep.grouped_mm.products.rows_gemm`)
backward  `activation_gradients`: the down GEMM's dgrad, then one pass for the gradient of gate and up and that of their bias, h again and
          the scores' gradient.  The caller then runs `rows_gradient`, and may send the result while `weight_gradients` runs
saves     the callers keep gate and up, and not h: backward reads gate and up anyway and computes h from them.  With an
          adapter of gate and up they keep its rows between the two factors (P, R) too

The score acts on h, since the down GEMM is linear.  On GPUs the activation is one pass where H is a multiple of 32, else plain torch
operations in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep import reference
from mxep.checks import check_tensors
from mxep.grouped_mm.products import (
    Forms,
    GemmOptions,
    GroupBias,
    Lora,
    SavedForm,
    Weights,
    as_mx,
    dgrad_form,
    form_names,
    is_transposed,
    quantized,
    rows_gemm,
    wgrad_form,
)
from mxep.grouped_mm.wgrad_gemm import wgrad_gate_up, wgrad_gemm
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.mx.weight_cache import CachedWeight
from mxep.operators import direct
from mxep.ops.activation.functions import is_gated
from mxep.ops.grouped_gemm.hopper.rebase_reference import RebasedRows
from mxep.shapes import MX_BLOCK


class ExpertLora(NamedTuple):
    """Low-rank adapters (LoRA) of L experts: x @ w.T becomes x @ w.T + (x @ a.T) @ b.T, without a matrix of w's size.

    Several adapters of a weight are concatenated along R, and an adapter's scaling is part of one of its factors.

    Attributes:
        a1: (L, R, D), R a multiple of 8 (pad with zeros); None for no adapter of w1 (and w3).
        b1: (L, 2H, R), rows as those of gate and up; (L, H, R) without a gate.
        a2: (L, R, H); None for no adapter of w2.
        b2: (L, D, R).

    Examples:
        >>> x, w1, w2 = torch.randn(16, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
        >>> experts, scores = torch.tensor([[0, 3]]).expand(16, 2), torch.full((16, 2), 0.5)
        >>> lora = mxep.moe.ExpertLora(a1=torch.randn(4, 8, 64), b1=torch.zeros(4, 64, 8))  # none of w2
        >>> mxep.fused_experts(x, experts, scores, w1, None, w2, None, num_experts=4, group="", lora=lora).shape
        torch.Size([16, 64])
    """

    a1: Tensor | None = None
    b1: Tensor | None = None
    a2: Tensor | None = None
    b2: Tensor | None = None


class ExpertWeights(NamedTuple):
    """The weights, biases and adapters of L experts.

    Attributes:
        w1: gate (L, H, D); or gate and up concatenated (L, 2H, D) where w3 is None; or (L, H, D) of an activation without a gate.
        w2: down (L, D, H).
        w3: up (L, H, D) or None.
        b1, b2, b3: biases like the rows of w1, w2 and w3; each may be None.
        layout: of a w1 that has gate and up: "concatenated", the H rows of gate before those of up, or "interleaved", gate in even rows
            and up in odd ones.  A model that stores its weights transposed, (L, D, 2H) and (L, H, D), passes `.transpose(-2, -1)` of them.
        lora: adapters.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None
    layout: str = "concatenated"
    lora: ExpertLora = ExpertLora()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights, biases and adapters as autograd functions take them, in the order of `TENSORS`."""
        return self.w1, self.w2, self.w3, self.b1, self.b2, self.b3, *self.lora

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> ExpertWeights:
        """The inverse of `tensors`."""
        w1, w2, w3, b1, b2, b3, *lora = tensors
        assert w1 is not None
        assert w2 is not None
        return ExpertWeights(w1, w2, w3, b1, b2, b3, lora=ExpertLora(*lora))

    def transposed(self, name: str) -> bool:
        """Whether a weight's gradient is stored as (L, K, N), as the weight is: see `is_transposed`. Never for separate gate and up."""
        return is_transposed(getattr(self, name)) and (name == "w2" or self.w3 is None)


_LORA_ALIGNMENT = 8  # 16 bytes of bf16, what a grouped GEMM on a GPU wants rows to be multiples of
TENSORS = (*ExpertWeights._fields[:6], *(f"lora_{name}" for name in ExpertLora._fields))


class ExpertRows(NamedTuple):
    """The rows of the experts, of all of them or of one chunk.

    Attributes:
        offs: (L,) int32 END offsets of the experts, from the chunk's start; an expert outside of the chunk repeats the previous offset.
        scores: (P,) float32, 0 in padding; None for experts whose outputs are not weighted.
        token_map: (P,) int32, the dispatched row that each expert row reads, -1 in padding; None: row p reads row p.
        grad_map: the same for rows of the output's gradient.
        chunk: (2,) int32, first row and end of the chunk among all rows; None for all of them.
        last: true if no chunk follows.
    """

    offs: Tensor
    scores: Tensor | None = None
    token_map: Tensor | None = None
    grad_map: Tensor | None = None
    chunk: Tensor | None = None
    last: bool = True


class Activation(NamedTuple):
    """Which activation, and how gate and up are stored.

    Attributes:
        name: one of `ACTIVATIONS`.
        layout: as in `ExpertWeights`.
        form: (limit, alpha, offset) of `SwiGLU`; plain numbers, since a graph holds no subclass of a tuple.
    """

    name: str
    layout: str
    form: tuple[float, ...]


class ExpertOptions(NamedTuple):
    """The options of a call, without its tensors; hashable, so that a compiled graph can hold them.

    Attributes:
        gemm: None multiplies in high precision.
        activation: which one.
        weight_dtype: to which weights are rounded wherever they are read, None: not at all.
        padding_rows: rows past the last expert are "zero", or undefined with "skip".
    """

    gemm: GemmOptions | None
    activation: Activation
    weight_dtype: torch.dtype | None = None
    padding_rows: str = "zero"

    @property
    def mode(self) -> str:
        """The scaling mode of MX results, "" for no MX."""
        return "" if self.gemm is None else self.gemm.mode

    @property
    def granularity(self) -> str | None:
        """The granularity with which the activation rebases rows for the next GEMM; None where that GEMM reads other forms."""
        return None if self.gemm is None else self.gemm.rebased


class NeedsGrad(NamedTuple):
    """Which inputs need a gradient."""

    x: bool
    w1: bool
    w2: bool
    w3: bool
    b1: bool
    b2: bool
    b3: bool
    lora_a1: bool = False
    lora_b1: bool = False
    lora_a2: bool = False
    lora_b2: bool = False
    scores: bool = False

    @property
    def lora1(self) -> bool:
        """Whether adapters of gate and up need a gradient."""
        return self.lora_a1 or self.lora_b1

    @property
    def lora2(self) -> bool:
        """Whether adapters of the down projection need a gradient."""
        return self.lora_a2 or self.lora_b2

    @property
    def reads_x(self) -> bool:
        """Whether gradients of weights or adapters read the rows."""
        return self.w1 or self.w3 or self.lora1

    @property
    def saves_gate_up_weight(self) -> bool:
        """Whether forward keeps what dgrad reads of gate and up: of weights that are trained, not of a frozen base."""
        return self.x and (self.w1 or self.w3)

    @property
    def gate_up(self) -> bool:
        """Whether the gradient of gate and up is needed."""
        return self.x or self.reads_x or self.b1 or self.b3

    @property
    def activation(self) -> bool:
        """Whether backward goes through the activation."""
        return self.gate_up or self.w2 or self.lora2 or self.scores


class ActivationGradients(NamedTuple):
    """Gradient of gate and up (P, 2H), h (P, H) times its score, and the scores' gradient (P,); None where it is not needed.

    bias: the gradient (L, 2H) float32 of gate and up's bias: sums of the gradient of gate and up over each expert's rows; None where it
        is not needed.
    xa: that of `GateUp`.
    d_xa, d_ha: gradients (P, R) of the rows between the two factors of the adapters of w1, which `rows_gradient` makes, and of w2; None
        without them.
    """

    gate_up: Forms
    h: Forms
    scores: Tensor | None
    bias: Tensor | None
    xa: Tensor | None = None
    d_xa: Tensor | None = None
    d_ha: Tensor | None = None


ExpertGemms = tuple[Weights, Weights]  # gate and up, down
Caches = tuple[CachedWeight | None, CachedWeight | None]  # entries of a `WeightCache`: of gate and up, and of down
NO_CACHES: Caches = (None, None)
WeightForms = tuple[SavedForm, SavedForm]  # of gate and up, and of down
NO_FORMS: WeightForms = (None, None), (None, None)


def expert_gemms(
    weights: ExpertWeights,
    options: ExpertOptions,
    caches: Caches,
    keep: bool = False,
    dgrad: Sequence[SavedForm] = NO_FORMS,
    forward: Sequence[SavedForm] = NO_FORMS,
) -> ExpertGemms:
    """The weights as the GEMMs read them; `caches` and `keep` as in `Weights`, `dgrad` and `forward` the forms of each that are made."""
    dtype = options.weight_dtype
    gate_up = Weights(weights.w1, weights.w3, options.gemm, caches[0], keep, dtype, dgrad[0], forward[0])
    return gate_up, Weights(weights.w2, None, options.gemm, caches[1], keep, dtype, dgrad[1], forward[1])


def _product(x: Tensor, factor: Tensor | None, rows: ExpertRows, options: ExpertOptions) -> Tensor:
    """Rows x (P, K) times an adapter's factor (L, N, K) -> (P, N) in x's dtype."""
    return direct.grouped_mm_hp(x, factor, rows.offs, x.dtype, options.padding_rows)


class GateUp(NamedTuple):
    """The result of `gate_up_gemm`.

    Attributes:
        gate_up: gate and up (P, 2H) as they are kept for backward, MX or plain; (P, H) without a gate.
        xa: (P, r), the rows between the two factors of an adapter of w1; None without one.
        h: (P, H) where the pass that quantised gate and up made it, else None.
    """

    gate_up: Tensor
    xa: Tensor | None = None
    h: Forms | None = None


def _gate_up_gemm(x: Tensor, weights: ExpertWeights, gemms: ExpertGemms, rows: ExpertRows, options: ExpertOptions) -> GateUp:
    """Rows x (R, D) -> gate and up as they are, with their bias."""
    lora, bias = weights.lora, _gate_up_bias(weights)
    adapter = None if lora.a1 is None or lora.b1 is None else Lora(x, lora.a1, lora.b1, rows.token_map)
    return GateUp(*rows_gemm(x, gemms[0], "forward", rows.offs, adapter, rows.token_map, options.padding_rows, bias))


def _gate_up_bias(weights: ExpertWeights) -> GroupBias | None:
    """The bias (L, 2H) of gate and up, in their layout."""
    bias = weights.b1
    if weights.w3 is not None and (bias is not None or weights.b3 is not None):
        zeros = weights.w1.new_zeros(weights.w1.shape[:2])
        bias = torch.cat((zeros if bias is None else bias, zeros if weights.b3 is None else weights.b3), 1)
    return None if bias is None else GroupBias(bias)


def gate_up_gemm(
    x: Tensor, weights: ExpertWeights, gemms: ExpertGemms, rows: ExpertRows, options: ExpertOptions, keep_as: str = ""
) -> GateUp:
    """Rows x (R, D), MX or plain -> gate and up: all that backward reads of a forward.

    `keep_as`: scaling mode with which gate and up are returned as MX; "" returns them as they are.
    """
    first = _gate_up_gemm(x, weights, gemms, rows, options)
    if not keep_as:
        return first
    h, gate_up = activate(first.gate_up, weights, rows, options, keep_as)
    return first._replace(gate_up=gate_up, h=h)


def down_gemm(first: GateUp, weights: ExpertWeights, gemms: ExpertGemms, rows: ExpertRows, options: ExpertOptions) -> Tensor:
    """The experts' outputs (P, D): activation and down GEMM."""
    h = activate(first.gate_up, weights, rows, options, "")[0] if first.h is None else first.h
    form = next(form for form in (h.rebased, h.mx, h.hp) if form is not None)
    adapter = None
    if weights.lora.a2 is not None and weights.lora.b2 is not None:
        assert h.hp is not None
        adapter = Lora(h.hp, weights.lora.a2, weights.lora.b2)
    bias = None if weights.b2 is None else GroupBias(weights.b2, rows.scores)
    return rows_gemm(form, gemms[1], "forward", rows.offs, adapter, padding_rows=options.padding_rows, bias=bias)[0]


def _activation_arguments(rows: ExpertRows, options: ExpertOptions) -> dict[str, Any]:
    return {
        "scores": rows.scores,
        "num_valid_rows": rows.offs[-1:] if options.padding_rows == "skip" else None,
        "activation": options.activation.name,
        "form": options.activation.form,
        "granularity": options.granularity or "auto",
    }


def _operators(gate_up: Tensor, activation: Activation) -> Any:
    """The operators; their references for widths that the operators do not take.  Callers that want MX have checked H."""
    return direct if gate_up.shape[1] % (MX_BLOCK * (1 + is_gated(activation.name))) == 0 else reference


def _next_forms(made: Iterator[Tensor], names: str, options: ExpertOptions, dtype: torch.dtype) -> Forms:
    """The forms of these names, which an activation made in its order."""
    mx = MXTensor(next(made), next(made), dtype) if "mx" in names else None
    rebased = RebasedRows(*islice(made, 2 if options.granularity == "row" else 3)) if "rebased" in names else None
    return Forms(mx, next(made) if "hp" in names else None, rebased)


def activate(gate_up: Tensor, weights: ExpertWeights, rows: ExpertRows, options: ExpertOptions, keep_as: str) -> tuple[Forms, Tensor]:
    """h times its score (P, H), rounded once: MX with a scaling mode or rebased, else, and for an adapter, in high precision; and gate and
    up, as MX if asked for."""
    activation, arguments, dtype = options.activation, _activation_arguments(rows, options), gate_up.dtype
    if mode := options.mode:
        both, hp = mode == keep_as, weights.lora.a2 is not None  # from one read
        rebased = options.granularity is not None and not both
        forms = ("rebased" if rebased else "mx") + ("+hp" if hp else "")
        made = iter(direct.activate(gate_up, activation.layout, mode, **arguments, h=forms, quantize_x=both))
        h = _next_forms(made, forms, options, dtype)
        if both:
            return h, MXTensor(next(made), next(made), dtype)
    else:
        h = Forms(None, *_operators(gate_up, activation).activate(gate_up, activation.layout, "rceil", **arguments, h="hp"))
    return h, MXTensor(*quantized(gate_up, keep_as), dtype) if keep_as else gate_up


def activation_gradients(
    grad: Tensor,
    read_x: Callable[[], Tensor],
    first: GateUp | None,
    weights: ExpertWeights,
    gemms: ExpertGemms,
    rows: ExpertRows,
    options: ExpertOptions,
    needs: NeedsGrad,
    keep_as: str = "",
) -> ActivationGradients:
    """The gradients around the activation, from the output's gradient (R, D) in the form that the GEMMs read.

    `first` None: computed again from the rows that `read_x` returns, with the `keep_as` of `gate_up_gemm`.
    """
    gemm, lora = options.gemm, weights.lora
    if first is None:
        first = _gate_up_gemm(read_x(), weights, gemms, rows, options)
        first = first._replace(gate_up=as_mx(first.gate_up, keep_as)) if keep_as else first
    adapter = None
    if lora.a2 is not None and lora.b2 is not None:
        adapter = Lora(grad, lora.b2.transpose(-2, -1), lora.a2.transpose(-2, -1), rows.grad_map)
    dh, d_ha = rows_gemm(grad, gemms[1], "dgrad", rows.offs, adapter, rows.grad_map, options.padding_rows)  # (P, H)
    adapts = lora.b1 is not None and (needs.x or needs.lora1)
    forms = form_names(gemm, needs.x, needs.w1 or needs.w3, adapts), form_names(gemm, False, needs.w2, needs.lora2)
    made = activate_backward(dh, first.gate_up, rows, options, forms, bias=needs.b1 or needs.b3)
    return made._replace(xa=first.xa, d_ha=d_ha)


def rows_gradient(
    activation_grads: ActivationGradients, weights: ExpertWeights, gemms: ExpertGemms, rows: ExpertRows, options: ExpertOptions
) -> tuple[Tensor, ActivationGradients]:
    """The gradient of the rows, in the experts' order (P, D); and what `weight_gradients` reads of `activation_grads`, with d_xa.

    The rows that this function alone reads are not in the result, so that their memory can be freed.
    """
    lora, d_gate_up = weights.lora, activation_grads.gate_up
    form = dgrad_form(d_gate_up, options.gemm)
    adapter = None
    if lora.a1 is not None and lora.b1 is not None:
        assert d_gate_up.hp is not None
        adapter = Lora(d_gate_up.hp, lora.b1.transpose(-2, -1), lora.a1.transpose(-2, -1))
    d_x, d_xa = rows_gemm(form, gemms[0], "dgrad", rows.offs, adapter, padding_rows=options.padding_rows)
    return d_x, activation_grads._replace(gate_up=d_gate_up._replace(rebased=None), d_xa=d_xa)


def activate_backward(
    dh: Tensor, gate_up: Tensor, rows: ExpertRows, options: ExpertOptions, forms: tuple[str, str], *, bias: bool
) -> ActivationGradients:
    """The activation's backward, from the gradient (P, H) of h times its score. A `gate_up` in MX is dequantised.

    `forms`: those of the gradient of gate and up, and of h, as `form_names` returns them.
    """
    activation, arguments = options.activation, _activation_arguments(rows, options)
    data, scale = (gate_up.qdata, gate_up.scale) if isinstance(gate_up, MXTensor) else (gate_up, None)
    layout, mode, offs = activation.layout, options.mode or "rceil", rows.offs if bias else None
    backward = _operators(gate_up, activation).activate_backward
    made = iter(backward(dh, data, layout, mode, False, *forms, **arguments, x_scale=scale, offs=offs))
    d_gate_up, h = (_next_forms(made, names, options, dh.dtype) for names in forms)
    d_scores = None if rows.scores is None else next(made)
    return ActivationGradients(d_gate_up, h, d_scores, next(made, None))


def down_bias_gradients(
    values: Tensor, weights: ExpertWeights, rows: ExpertRows, needs: NeedsGrad, grads: dict[str, Tensor]
) -> Tensor | None:
    """Adds b2's gradient to `grads`, from the output's gradient (R, D); returns the part of the scores' gradient (P,) that b2 makes."""
    assert weights.b2 is not None
    bias = weights.b2 if needs.scores else None
    made = direct.group_bias_grads(dequantize_data(values), rows.offs, bias, rows.scores, rows.grad_map, needs.b2)
    if needs.b2:
        _add(grads, "b2", made[0].to(weights.b2.dtype))
    return made[-1] if needs.scores else None  # the bias is weighted by the score too


def weight_gradients(
    grad: Tensor,
    read_x: Callable[[], Tensor],
    activation_grads: ActivationGradients,
    weights: ExpertWeights,
    gemms: ExpertGemms,
    rows: ExpertRows,
    options: ExpertOptions,
    needs: NeedsGrad,
    grads: dict[str, Tensor],
) -> None:
    """Gradients of w1, w2, w3, b1, b3 and the adapters, from the output's gradient and the rows of `read_x`, (R, D) as GEMMs read them.

    `grads` has those of earlier chunks by name, or memory for all chunks.
    """
    gemm, offs = options.gemm, rows.offs
    if needs.w2:
        maps = rows.grad_map, None, weights.transposed("w2"), rows.last
        grads["w2"] = wgrad_gemm(grad, wgrad_form(activation_grads.h, gemm), offs, gemm, grads.pop("w2", gemms[1].wgrad_dtype), *maps)
    if needs.w1 or needs.w3:
        d_gate_up, dtype = wgrad_form(activation_grads.gate_up, gemm), gemms[0].wgrad_dtype
        if weights.w3 is None:
            args = None, rows.token_map, weights.transposed("w1"), rows.last
            grads["w1"] = wgrad_gemm(d_gate_up, read_x(), offs, gemm, grads.pop("w1", dtype), *args)
        else:
            into = [grads.pop(name, None) for name in ("w1", "w3")]
            both = wgrad_gate_up(d_gate_up, read_x(), offs, gemm, dtype, (needs.w1, needs.w3), rows.token_map, into, rows.last)
            grads |= {name: part for name, part in zip(("w1", "w3"), both, strict=True) if part is not None}
    _lora_gradients(grad, read_x, activation_grads, weights, rows, options, needs, grads)
    if needs.b1 or needs.b3:
        bias = activation_grads.bias
        assert bias is not None
        parts = (bias, None) if weights.w3 is None else bias.chunk(2, 1)
        for name, part, own, needed in zip(("b1", "b3"), parts, (weights.b1, weights.b3), (needs.b1, needs.b3), strict=True):
            if needed and part is not None and own is not None:
                _add(grads, name, part.to(own.dtype))


def _lora_gradients(
    grad: Tensor,
    read_x: Callable[[], Tensor],
    activation_grads: ActivationGradients,
    weights: ExpertWeights,
    rows: ExpertRows,
    options: ExpertOptions,
    needs: NeedsGrad,
    grads: dict[str, Tensor],
) -> None:
    """Adds the adapters' gradients to `grads`: wgrads in high precision, of rows as they came."""
    lora, offs, d_xa, d_gate_up = weights.lora, rows.offs, activation_grads.d_xa, activation_grads.gate_up.hp
    if lora.b1 is not None and needs.lora1:
        assert d_gate_up is not None
        if needs.lora_a1:
            d_xa = _product(d_gate_up, lora.b1.transpose(-2, -1), rows, options) if d_xa is None else d_xa  # rows without a gradient
            # Transposed, since the map is then that of the gradient's side, which the GEMM reads through.
            _add(grads, "lora_a1", wgrad_gemm(d_xa, read_x(), offs, None, lora.b1.dtype, None, rows.token_map, transposed=True))
        if needs.lora_b1:
            assert activation_grads.xa is not None
            _add(grads, "lora_b1", wgrad_gemm(d_gate_up, activation_grads.xa, offs, None, lora.b1.dtype))
    if lora.a2 is not None and needs.lora2:
        h, d_ha = activation_grads.h.hp, activation_grads.d_ha
        assert h is not None
        assert d_ha is not None
        if needs.lora_a2:
            _add(grads, "lora_a2", wgrad_gemm(d_ha, h, offs, None, lora.a2.dtype))
        if needs.lora_b2:
            _add(grads, "lora_b2", wgrad_gemm(grad, _product(h, lora.a2, rows, options), offs, None, lora.a2.dtype, rows.grad_map))


def check_lora(where: str, x: Tensor, weights: ExpertWeights) -> None:
    """Raise ValueError unless adapters belong to the weights, in the rows' dtype."""
    L, first, D = weights.w1.shape
    first += 0 if weights.w3 is None else weights.w3.shape[1]
    for side, (a, b), (N, K) in (("1", weights.lora[:2], (first, D)), ("2", weights.lora[2:], (D, weights.w2.shape[-1]))):
        if a is None and b is None:
            continue
        for name, factor in (("a", a), ("b", b)):
            if factor is not None and not isinstance(factor, Tensor):
                check_tensors(where, **{f"lora {name}{side}": factor})
        R = 0 if a is None else a.shape[1]
        shapes = (L, R, K), (L, N, R)
        found = [None if f is None else (tuple(f.shape), f.dtype, f.device) for f in (a, b)]
        if R % _LORA_ALIGNMENT or found != [(shape, x.dtype, x.device) for shape in shapes]:
            got = " and ".join("None" if f is None else f"{tuple(f.shape)} {f.dtype} on {f.device}" for f in (a, b))
            raise ValueError(
                f"{where}: lora a{side} and b{side} are {got}, want ({L}, R, {K}) and ({L}, {N}, R) {x.dtype} on {x.device}, R a multiple "
                f"of {_LORA_ALIGNMENT}; cast or move them, and pad R with zeros"
            )


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Adds a chunk's gradient of a bias or of an adapter: an expert's is 0 in all chunks but one."""
    grads[name] = grads[name] + grad if name in grads else grad
