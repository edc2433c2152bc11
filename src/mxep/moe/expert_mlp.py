"""The experts' three weights and the activation between them, forward and backward: what every autograd function around them computes.

before  rows (R, D), MX or plain, and where the rows of each expert are: `ExpertRows`
after   rows (P, D) in the experts' order, each times its score where there are scores
forward   gate and up in one GEMM -> (P, 2H), or (P, H) without a gate; bias and activation in float32, times the score, straight to the
          form that the down GEMM reads -> h (P, H); the down GEMM; its bias, times the score
backward  `activation_gradients`: the down GEMM's dgrad, then one pass for the gradient of gate and up, h again and the scores' gradient.
          The caller then runs `dgrad_gemm` for gate and up, and may send the result while `weight_gradients` runs
saves     the callers keep gate and up, and not h: backward reads gate and up anyway and makes h again without another read

The score acts on h, since the down GEMM is linear.  On GPUs the activation is one pass where H is a multiple of 32, else plain torch
operations in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep import reference
from mxep.grouped_mm.bias import bias_grad
from mxep.grouped_mm.products import (
    Forms,
    GemmOptions,
    Weights,
    as_mx,
    dgrad_gemm,
    form_names,
    forward_gemm,
    is_transposed,
    quantized,
    wgrad_form,
    wgrad_gate_up,
    wgrad_gemm,
)
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.mx.weight_cache import CachedWeight
from mxep.operators import direct
from mxep.ops.activation.functions import is_gated
from mxep.shapes import MX_BLOCK


class ExpertWeights(NamedTuple):
    """The weights and biases of L experts.

    Attributes:
        w1: gate (L, H, D); or gate and up concatenated (L, 2H, D) where w3 is None; or (L, H, D) of an activation without a gate.
        w2: down (L, D, H).
        w3: up (L, H, D) or None.
        b1, b2, b3: biases like the rows of w1, w2 and w3; each may be None.
        layout: of a w1 that has gate and up: "concatenated", the H rows of gate before those of up, or "interleaved", gate in even rows
            and up in odd ones.  A model that stores its weights transposed, (L, D, 2H) and (L, H, D), passes `.transpose(-2, -1)` of them.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None
    layout: str = "concatenated"

    def transposed(self, name: str) -> bool:
        """Whether a weight's gradient is stored as (L, K, N), as the weight is: see `is_transposed`. Never for separate gate and up."""
        return is_transposed(getattr(self, name)) and (name == "w2" or self.w3 is None)


class ExpertRows(NamedTuple):
    """The rows of the experts, of all of them or of one chunk.

    Attributes:
        offs: (L,) int32 END offsets of the experts, from the chunk's start; an expert outside of the chunk repeats the previous offset.
        scores: (P,) float32, 0 in padding; None for experts whose outputs are not weighted.
        token_map: (P,) int32, the dispatched row that each expert row reads, -1 in padding; None: row p reads row p.
        grad_map: the same for rows of the output's gradient.
        chunk: (2,) int32, first row and end of the chunk among all rows; None for all of them.
        last: whether no chunk follows.
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
        mode: scale rule of MX results, "" for no MX.
        form: (limit, alpha, offset) of `SwiGLU`.
    """

    name: str
    layout: str
    mode: str
    form: tuple[float, float, float]


class ExpertOptions(NamedTuple):
    """Everything about a call that is no tensor; hashable, so that a graph can hold it.

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


class NeedsGrad(NamedTuple):
    """Which inputs need a gradient."""

    x: bool
    w1: bool
    w2: bool
    w3: bool
    b1: bool
    b2: bool
    b3: bool
    scores: bool = False

    @property
    def gate_up(self) -> bool:
        """Whether the gradient of gate and up is needed."""
        return self.x or self.w1 or self.w3 or self.b1 or self.b3

    @property
    def activation(self) -> bool:
        """Whether backward goes through the activation."""
        return self.gate_up or self.w2 or self.scores


class ActivationGradients(NamedTuple):
    """Gradient of gate and up (P, 2H), h (P, H) times its score, and the scores' gradient (P,); None where it is not needed."""

    gate_up: Forms
    h: Forms
    scores: Tensor | None


ExpertGemms = tuple[Weights, Weights]  # gate and up, down


def expert_gemms(
    weights: ExpertWeights, options: ExpertOptions, caches: tuple[CachedWeight | None, CachedWeight | None], keep: bool = False
) -> ExpertGemms:
    """The weights as the GEMMs read them; `caches` and `keep` as in `Weights`."""
    gate_up = Weights(weights.w1, weights.w3, options.gemm, caches[0], keep, options.weight_dtype)
    return gate_up, Weights(weights.w2, None, options.gemm, caches[1], keep, options.weight_dtype)


def expert_forward(
    x: Tensor, weights: ExpertWeights, gemms: ExpertGemms, rows: ExpertRows, options: ExpertOptions, keep_as: str = ""
) -> tuple[Tensor, Tensor]:
    """Rows x (R, D), MX or plain -> the experts' outputs (P, D), and gate and up (P, 2H) for backward.

    `keep_as`: scale rule with which gate and up are returned as MX; "" returns them as they are.
    """
    gate_up = forward_gemm(x, gemms[0], rows.offs, rows.token_map, options.padding_rows)
    h, gate_up = activate(gate_up, weights, rows, options, keep_as)
    out = forward_gemm(h, gemms[1], rows.offs, padding_rows=options.padding_rows)
    if weights.b2 is not None:
        out = direct.add_group_bias(out, weights.b2, rows.offs, rows.scores)
    return out, gate_up


def _activation_arguments(weights: ExpertWeights, rows: ExpertRows, options: ExpertOptions) -> dict[str, Any]:
    bias = weights.b1
    if weights.w3 is not None and (bias is not None or weights.b3 is not None):
        zeros = weights.w1.new_zeros(weights.w1.shape[:2])
        bias = torch.cat((zeros if bias is None else bias, zeros if weights.b3 is None else weights.b3), 1)
    return {
        "bias": bias,  # (L, 2H) in the layout of gate and up
        "offs": None if bias is None else rows.offs,
        "scores": rows.scores,
        "num_valid_rows": rows.offs[-1:] if options.padding_rows == "skip" else None,
        "activation": options.activation.name,
        "form": options.activation.form,
    }


def _operators(gate_up: Tensor, activation: Activation) -> Any:
    """The operators, or their references for widths that the operators do not take; callers of MX have checked H."""
    return direct if gate_up.shape[1] % (MX_BLOCK * (1 + is_gated(activation.name))) == 0 else reference


def activate(gate_up: Tensor, weights: ExpertWeights, rows: ExpertRows, options: ExpertOptions, keep_as: str) -> tuple[Tensor, Tensor]:
    """h times its score (P, H), MX with a scale rule, rounded once; and gate and up, as MX if asked for."""
    activation, arguments, dtype = options.activation, _activation_arguments(weights, rows, options), gate_up.dtype
    if activation.mode:
        both = activation.mode == keep_as  # from one read
        qdata, scale, *kept = direct.activate(gate_up, activation.layout, activation.mode, **arguments, quantize_x=both)
        h = MXTensor(qdata, scale, dtype)
        if both:
            return h, MXTensor(kept[0], kept[1], dtype)
    else:
        (h,) = _operators(gate_up, activation).activate(gate_up, activation.layout, "rceil", **arguments, h="hp")
    return h, MXTensor(*quantized(gate_up, keep_as), dtype) if keep_as else gate_up


def activation_gradients(
    grad: Tensor,
    read_x: Callable[[], Tensor],
    gate_up: Tensor | None,
    weights: ExpertWeights,
    gemms: ExpertGemms,
    rows: ExpertRows,
    options: ExpertOptions,
    needs: NeedsGrad,
    keep_as: str = "",
) -> ActivationGradients:
    """From the output's gradient (R, D), in the form that the GEMMs read.

    `gate_up` (P, 2H), MX or plain; None: computed again from the rows that `read_x` returns, with the `keep_as` of
    `expert_forward`.
    """
    gemm = options.gemm
    if gate_up is None:
        gate_up = forward_gemm(read_x(), gemms[0], rows.offs, rows.token_map, options.padding_rows)
        gate_up = as_mx(gate_up, keep_as) if keep_as else gate_up
    dh = dgrad_gemm(grad, gemms[1], rows.offs, rows.grad_map, options.padding_rows)  # (P, H)
    forms = form_names(gemm, needs.x, needs.w1 or needs.w3, needs.b1 or needs.b3), form_names(gemm, False, needs.w2)
    return activate_backward(dh, gate_up, weights, rows, options, forms)


def activate_backward(
    dh: Tensor, gate_up: Tensor, weights: ExpertWeights, rows: ExpertRows, options: ExpertOptions, forms: tuple[str, str]
) -> ActivationGradients:
    """From the gradient (P, H) of h times its score; `forms` of the gradient of gate and up and of h, as `form_names` gives them.

    A `gate_up` in MX is dequantised.
    """
    activation, arguments = options.activation, _activation_arguments(weights, rows, options)
    data, scale = (gate_up.qdata, gate_up.scale) if isinstance(gate_up, MXTensor) else (gate_up, None)
    layout, mode = activation.layout, activation.mode or "rceil"
    results = iter(_operators(gate_up, activation).activate_backward(dh, data, layout, mode, False, *forms, **arguments, x_scale=scale))
    d_gate_up, h = (
        Forms(MXTensor(next(results), next(results), dh.dtype) if "mx" in form else None, next(results) if "hp" in form else None)
        for form in forms
    )
    return ActivationGradients(d_gate_up, h, next(results, None))


def down_bias_gradients(
    values: Tensor, weights: ExpertWeights, rows: ExpertRows, needs: NeedsGrad, grads: dict[str, Tensor]
) -> Tensor | None:
    """Adds b2's gradient to `grads`, from the output's gradient (R, D); returns the part of the scores' gradient (P,) that b2 makes."""
    assert weights.b2 is not None
    grad_rows = dequantize_data(values)
    if rows.grad_map is not None:
        grad_rows = direct.gather_rows(grad_rows, rows.grad_map)
    if needs.b2:
        _add(grads, "b2", bias_grad(grad_rows, rows.offs, weights.b2.shape, weights.b2.dtype, rows.scores))
    # The bias is weighted by the score too.
    return direct.dot_group_bias(grad_rows, weights.b2, rows.offs) if needs.scores else None


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
    """Gradients of w1, w2, w3, b1 and b3, from the output's gradient and the rows of `read_x`, both (R, D) as the GEMMs read them.

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
            halves = [grads.pop(name, None) for name in ("w1", "w3")]
            both = wgrad_gate_up(d_gate_up, read_x(), offs, gemm, dtype, (needs.w1, needs.w3), rows.token_map, halves, rows.last)
            grads |= {name: half for name, half in zip(("w1", "w3"), both, strict=True) if half is not None}
    if needs.b1 or needs.b3:
        values = activation_grads.gate_up.hp
        assert values is not None
        bias = bias_grad(values, offs, torch.Size((weights.w1.shape[0], values.shape[1])), torch.float32)
        parts = (bias, None) if weights.w3 is None else bias.chunk(2, 1)
        for name, part, own, needed in zip(("b1", "b3"), parts, (weights.b1, weights.b3), (needs.b1, needs.b3), strict=True):
            if needed and part is not None and own is not None:
                _add(grads, name, part.to(own.dtype))


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Adds up a bias's gradient over the chunks: an expert's is 0 in all chunks but one."""
    grads[name] = grads[name] + grad if name in grads else grad
