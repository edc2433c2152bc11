"""The autograd function of the fused layer; fused/layer.py has the public calls, which check and resolve its arguments.

forward   `_forward` ends with what backward reads: route, dispatch, gate and up where they are kept.  `_outputs` has the rest and saves
          nothing: the experts chunk by chunk (fused/expert_chunks.py), their sums, combine
recomputation  a non-reentrant checkpoint stops once everything that it saved is there again.  So under hooks of saved tensors, which it
          sets, `_outputs` is a function of its own, `_Outputs`, which the checkpoint runs a second time only if something after the layer,
          in the same checkpoint, saves a tensor: it may have read the output
backward  dispatch the output's gradient, the experts' backward chunk by chunk, send the scores' gradients and dx to the tokens' ranks while
          the weights' gradients are computed, and the router's part as last term of dx
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.comm import transport_of
from mxep.fused.dispatcher import TokenDispatcher
from mxep.fused.expert_chunks import ChunkBounds, ChunkedReduction, ExpertChunks, concat_chunks
from mxep.fused.make_dispatcher import make_dispatcher
from mxep.fused.options import FusedOptions, TopK, allowed_topk, make_options
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.grouped_mm.products import saved_tensors, shared_form
from mxep.grouped_mm.wgrad_gemm import empty_wgrad
from mxep.moe.config import MoEConfig
from mxep.moe.expert_mlp import (
    NO_CACHES,
    NO_FORMS,
    TENSORS,
    Caches,
    ExpertGemms,
    ExpertLora,
    ExpertRows,
    ExpertWeights,
    GateUp,
    NeedsGrad,
    WeightForms,
    activation_gradients,
    down_bias_gradients,
    down_gemm,
    expert_gemms,
    gate_up_gemm,
    rows_gradient,
    weight_gradients,
)
from mxep.moe.router import logits_backward, logits_of, route_tokens, router_gradients
from mxep.mx.first_order import first_order
from mxep.mx.tensor import MXTensor, dequantize_data
from mxep.operators import direct
from mxep.ops.activation.functions import SwiGLU
from mxep.ops.runtime.for_backward import ForBackward, Memory, memory_of
from mxep.ops.runtime.replay import replayed
from mxep.recipe import Recipe

OUTSIDE_OF_GRAPHS = "fused_moe and fused_experts may read the splits of their exchanges on the host; compile the code around them"
_NUM_WEIGHTS = len(TENSORS)


class SavedTensors(NamedTuple):
    """Tensors that forward saves for backward, in addition to the dispatcher's; None for those that nothing will read."""

    x: Tensor | None  # (T, D), the input itself
    logits: Tensor | None  # (T, E); computed again where x is kept
    columns: Tensor | None  # (T, C) int16, where each score was in the caller's scores; None for a router's
    rows: Tensor | None  # (R, D), the dispatched tokens: qdata or plain
    scale: Tensor | None  # (R, D/32)
    gate_up: Tensor | None  # (P, 2H) or (P, H), qdata or plain
    gate_up_scale: Tensor | None  # (P, 2H/32) or (P, H/32)
    xa: Tensor | None  # (P, r), with gate_up where there is an adapter of its weight
    gate_up_weight: Tensor | None  # (L, D, 2H) as dgrad reads it, one byte a value; forms from caches may be saved apart
    gate_up_weight_scale: Tensor | None  # (L, D)
    down_weight: Tensor | None  # (L, H, D)
    down_weight_scale: Tensor | None  # (L, H)


_NUM_SAVED = len(SavedTensors._fields)
_GATE_UP_FORM, _DOWN_FORM = -4, -2  # which of them are what dgrad reads of the weights
_NUM_FORMS = 4  # tensors of both forms


def _as_rows(data: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Saved rows, MX or plain."""
    return data if data is None or scale is None else MXTensor(data, scale, dtype)


def _gradient_flags(needs: NeedsGrad, redispatch: bool) -> int:
    """`DispatchSpec.gradients`, the number that encodes what backward's exchanges depend on."""
    read = (needs.reads_x, needs.activation) if redispatch else ()
    return 1 + sum(bit << index for index, bit in enumerate((needs.x, needs.scores, *read)))


def _recomputes_gate_up(dispatcher: TokenDispatcher, options: FusedOptions, chunks: ExpertChunks) -> bool:
    """Whether backward reads the dispatched rows to make gate and up of some chunks again.

    All ranks must agree, since backward may dispatch the tokens again for it.  Where P is the received number of rows, ranks differ in
    their number of chunks, so the answer does not depend on that number there.
    """
    runtime = options.runtime
    may = runtime.redispatch_x_in_backward and dispatcher.expected_rows is None and isinstance(runtime.scratch_rows, int)
    return may or len(chunks) > 1


class _GradientReturn:
    """Sends gradients to the tokens' ranks: each kind as soon as the last chunk, which has most rows, is computed.

    Attributes:
        rows, scores: what `RowExchange.start_to_tokens` and `TokenDispatcher.start_scores_to_tokens` return; None before.
    """

    def __init__(self, dispatcher: TokenDispatcher, scaling_mode: str, columns: Tensor | None, score_dtype: torch.dtype) -> None:
        self._dispatcher, self._scaling_mode, self._of_scores = dispatcher, scaling_mode, (columns, score_dtype)
        self._reduction, self._chunks, self._d_scores = ChunkedReduction(dispatcher.dispatch), list[ExpertRows](), list[Tensor]()
        self.rows: Callable[[Tensor | None], Tensor] | None = None
        self.scores: Callable[[], Tensor] | None = None

    def add_scores(self, d_scores: Tensor, chunk: ExpertRows) -> None:
        """Gradients of the next chunk's scores (P,)."""
        self._chunks.append(chunk)
        self._d_scores.append(d_scores)
        if chunk.last:
            of_all = concat_chunks(self._chunks, self._d_scores, self._dispatcher.scores.shape[0])
            self.scores = self._dispatcher.start_scores_to_tokens(of_all, *self._of_scores)

    def add_rows(self, d_rows: Tensor, chunk: ExpertRows) -> None:
        """Gradients of the next chunk's rows (P, D)."""
        assert chunk.token_map is not None
        if chunk.last:
            earlier = None if chunk.chunk is None else self._reduction.finish(d_rows, chunk.token_map, chunk.chunk)
            self.rows = self._dispatcher.dispatch.start_to_tokens(d_rows, self._scaling_mode, earlier)
        else:
            assert chunk.chunk is not None
            self._reduction.add(d_rows, chunk.token_map, chunk.chunk)


def _empty_grads(weights: ExpertWeights, gemms: ExpertGemms, needs: NeedsGrad) -> dict[str, Tensor]:
    """Memory for the gradients of weights: each expert's rows are in one chunk, which writes that expert's. Biases' are added up."""
    wanted = ("w1", weights.w1, needs.w1, gemms[0]), ("w2", weights.w2, needs.w2, gemms[1]), ("w3", weights.w3, needs.w3, gemms[0])
    return {
        name: empty_wgrad(weight, gemm.wgrad_dtype, weights.transposed(name))
        for name, weight, needed, gemm in wanted
        if weight is not None and needed
    }


def _writes_new_gradients(gemms: ExpertGemms, options: FusedOptions, chunks: ExpertChunks) -> bool:
    """True if no chunk writes into a gradient of other chunks. Results must not depend on what the host already knows."""
    if len(chunks) == 1:
        return True
    gemm = options.experts.gemm
    return chunks.single() and (gemm is None or gemm.wgrad_is_chunk_invariant(gemms[0].wgrad_dtype))


def _backward_over_chunks(
    grad: Tensor,
    saved: SavedTensors,
    weights: ExpertWeights,
    dispatcher: TokenDispatcher,
    chunks: ExpertChunks,
    options: FusedOptions,
    caches: Caches,
    needs: NeedsGrad,
    forms: WeightForms,
    forward: WeightForms,
) -> tuple[_GradientReturn, list[Tensor | None]]:
    """The experts' backward, from the output's gradient (R, D) as it was received: gradients that are being sent to the tokens' ranks, and
    the gradients of `weights`."""
    gemm = options.experts.gemm
    returned = _GradientReturn(dispatcher, options.scaling_modes.dispatch_backward, saved.columns, options.score_dtype)
    rows, gate_up = _as_rows(saved.rows, saved.scale, grad.dtype), _as_rows(saved.gate_up, saved.gate_up_scale, grad.dtype)
    makes_gate_up = (gate_up is None or _recomputes_gate_up(dispatcher, options, chunks)) and needs.activation
    redispatch = rows is None and options.runtime.redispatch_x_in_backward and (needs.reads_x or makes_gate_up)
    if redispatch:
        assert saved.x is not None
        arriving = dispatcher.dispatch.start_to_experts(saved.x, options.scaling_modes.dispatch)

    @cache  # waits at the first use, which is as late as possible
    def read_x() -> Tensor:
        if redispatch:
            return shared_form(arriving(), gemm)
        assert rows is not None
        return rows

    values = grad if weights.b2 is not None and (needs.b2 or needs.scores) else None  # as they came, for b2
    grad = shared_form(grad, gemm)
    made = (saved.gate_up_weight, saved.gate_up_weight_scale), (saved.down_weight, saved.down_weight_scale)
    dgrad = [form if form[0] is not None else cached for form, cached in zip(made, forms, strict=True)]
    gemms = expert_gemms(weights, options.experts, caches, not chunks.single(), dgrad, forward)
    grads = {} if _writes_new_gradients(gemms, options, chunks) else _empty_grads(weights, gemms, needs)
    for chunk in chunks:
        bias_scores = None if values is None else down_bias_gradients(values, weights, chunk, needs, grads)
        if not needs.activation:
            continue
        kept = GateUp(gate_up, saved.xa) if chunk.last and gate_up is not None else None  # only the last chunk's was kept
        activation_grads = activation_gradients(grad, read_x, kept, weights, gemms, chunk, options.experts, needs, options.keep_as)
        # What other ranks wait for comes first: it is sent while the weights' gradients are computed.
        if activation_grads.scores is not None and needs.scores:
            returned.add_scores(activation_grads.scores if bias_scores is None else activation_grads.scores + bias_scores, chunk)
        if needs.x:
            d_rows, activation_grads = rows_gradient(activation_grads, weights, gemms, chunk, options.experts)
            returned.add_rows(d_rows, chunk)
            del d_rows
        weight_gradients(grad, read_x, activation_grads, weights, gemms, chunk, options.experts, needs, grads)
        del activation_grads
    if redispatch:
        read_x()  # every rank takes part in the exchange to its end, also one whose chunks were all empty
    # Cast while rows are on their way, and one after the other, so that no two gradients exist in two dtypes.
    own = zip(TENSORS, weights.tensors, strict=True)
    return returned, [None if value is None or name not in grads else grads.pop(name).to(value.dtype) for name, value in own]


class _CallOptions(NamedTuple):
    """Everything that a call depends on except for its tensors; hashable.

    Attributes:
        fused: the options.  needs: which inputs need a gradient.  saves: whether there will be a backward.
        saves_x: whether the router's weight needs a gradient, which reads the tokens.
        autocast: whether autocast is on.
        caches: the weights' entries in a `WeightCache`.
    """

    fused: FusedOptions
    needs: NeedsGrad
    saves: bool
    saves_x: bool
    autocast: bool = False
    caches: Caches = NO_CACHES


class _Dispatched(NamedTuple):
    """What `_forward` leaves for `_outputs`: the dispatched tokens (R, D), and gate and up of the last chunk where they are kept."""

    dispatcher: TokenDispatcher
    rows: Tensor
    first: GateUp | None
    weights: ExpertWeights
    gemms: ExpertGemms
    chunks: ExpertChunks


class _Forward(NamedTuple):
    """What `_forward` returns.

    Attributes:
        options: the call's options, with those that depend on the number of tokens.
        counts, shares, z: as in `Routing`; None without a router.
        left: what `_outputs` reads, a `_Dispatched`.
        saved: the dispatcher's tensors and `SavedTensors`, and the dispatcher without its tensors; None without a backward.
    """

    options: FusedOptions
    counts: Tensor | None
    shares: Tensor | None
    z: Tensor | None
    left: Any
    saved: ForBackward | None = None


def _forward(
    call: _CallOptions,
    x: Tensor,
    router: Tensor | None,
    weights: ExpertWeights,
    expert_bias: Tensor | None,
    experts: Tensor | None,
    scores: Tensor | None,
    forms: WeightForms = NO_FORMS,
) -> _Forward:
    """All but the experts' outputs, which `_outputs` makes. `forms`: what forward reads of the weights, from caches."""
    options, needs, saves, saves_x, autocast, caches = call
    runtime, modes = options.runtime, options.scaling_modes
    alignment, config = options.recipe.group_size_multiple_of, options.router
    logits = counts = shares = z = columns = None
    if router is not None:
        logits, (scores, experts, counts, shares, z) = route_tokens(x, router, expert_bias, config)
    assert experts is not None
    assert scores is not None
    if router is None:
        options = options._replace(score_dtype=scores.dtype)
        experts, scores, columns = direct.sort_topk(experts, scores, config.num_experts, *allowed_topk(options.group_name, runtime))
    spec = options.spec
    if saves:
        spec = spec._replace(gradients=_gradient_flags(needs, runtime.redispatch_x_in_backward))
    dispatcher, rows = make_dispatcher(spec, experts, scores, x, modes.dispatch, options.group_name, saves)
    if options.recipe.hp_below_rows:
        options = options.for_rows(dispatcher.tokens)
    gemm = options.experts.gemm
    rows = shared_form(rows, gemm)  # (R, D)
    chunks = ExpertChunks.of(dispatcher, runtime, alignment)
    gemms = expert_gemms(weights, options.experts, caches, keep=not chunks.single(), forward=forms)
    # Of the last chunk alone: backward makes gate and up of the others again.
    keeps = saves and runtime.keep_first_product
    makes_both = saves and runtime.keep_dgrad_weights and gemm is not None and gemm.rebased is not None
    gate_up_form = gemms[0].make_both() if makes_both and needs.saves_gate_up_weight else (None, None)
    first = gate_up_gemm(rows, weights, gemms, chunks.last, options.experts, options.keep_as) if keeps else None
    down_form = gemms[1].make_both() if makes_both and needs.w2 else (None, None)
    made = _Forward(options, counts, shares, z, _Dispatched(dispatcher, rows, first, weights, gemms, chunks))
    if not saves:
        return made
    gate_up, xa = (None, None) if first is None else first[:2]  # (P, 2H), (P, r)
    reads_rows = needs.reads_x or gate_up is None or _recomputes_gate_up(dispatcher, options, chunks)
    kept_rows = rows if reads_rows and not runtime.redispatch_x_in_backward else None
    kept_x = x if saves_x or (reads_rows and kept_rows is None) else None
    # Logits are computed again from tokens that are kept anyway, unless autocast has rounded them here.
    recomputes = kept_x is not None and (config.router_dtype == "fp32" or not autocast)
    kept_logits, columns = None if recomputes else logits, columns if needs.scores else None
    rows_and_gate_up = saved_tensors(kept_rows, gate_up)  # two each
    saved = SavedTensors(kept_x, kept_logits, columns, *rows_and_gate_up, xa, *gate_up_form, *down_form)  # type: ignore[call-arg]
    bare, of_dispatcher = dispatcher.for_backward(reads_experts=router is not None and needs.scores)
    return made._replace(saved=ForBackward((*of_dispatcher, *saved), bare))


def _outputs(call: _CallOptions, left: _Dispatched) -> Tensor:
    """The experts' outputs, summed for each token: (T, D)."""
    options, (dispatcher, rows, first, weights, gemms, chunks) = call.fused, left
    reduction = ChunkedReduction(dispatcher.combine)
    for chunk in chunks:
        kept = first if chunk.last and first is not None else gate_up_gemm(rows, weights, gemms, chunk, options.experts)
        out = down_gemm(kept, weights, gemms, chunk, options.experts)  # (P, D)
        del kept
        assert chunk.grad_map is not None
        if chunk.last:
            earlier = None if chunk.chunk is None else reduction.finish(out, chunk.grad_map, chunk.chunk)
            return dispatcher.combine.to_tokens(out, options.scaling_modes.combine, earlier)
        assert chunk.chunk is not None
        reduction.add(out, chunk.grad_map, chunk.chunk)
        del out
    raise AssertionError("there is always a last chunk")


def _backward(
    call: _CallOptions,
    dy: Tensor,
    d_shares: Tensor | None,
    d_z: Tensor | None,
    kept: ForBackward,
    router: Tensor | None,
    weights: ExpertWeights,
    forms: WeightForms = NO_FORMS,
    forward: WeightForms = NO_FORMS,
    bounds: ChunkBounds | None = None,
) -> tuple[Any, ...]:
    """Gradients of x, of the router's weight, of the weights, and of the scores (T, C), from the output's (T, D).

    `forms`, `forward`: what dgrad and forward read of the weights, from caches.
    """
    options, needs, config = call.fused, call.needs, call.fused.router
    tensors, bare = kept.tensors(), kept.rest
    saved, dispatcher = SavedTensors(*tensors[-_NUM_SAVED:]), bare.refilled(tensors[:-_NUM_SAVED])
    grad = dispatcher.combine.to_experts(dy, options.scaling_modes.combine_backward)  # (R, D)
    chunks = ExpertChunks.of(dispatcher, options.runtime, options.recipe.group_size_multiple_of, bounds)
    returned, d_weights = _backward_over_chunks(grad, saved, weights, dispatcher, chunks, options, call.caches, needs, forms, forward)
    d_x = d_router = of_router = None
    d_scores = None if returned.scores is None else returned.scores()  # (T, C)
    if router is not None and d_scores is not None:
        logits = saved.logits
        if logits is None:
            assert saved.x is not None
            with torch.autocast(dy.device.type, enabled=False):  # as in forward, whatever is on around backward
                logits = logits_of(saved.x, router, config.router_dtype)
        d_logits = router_gradients(logits, dispatcher.experts, d_scores, d_shares, d_z, config, dy.dtype)
        assert not call.saves_x or saved.x is not None
        tokens, d_scores = saved.x if call.saves_x else None, None
        of_router, d_router = logits_backward(d_logits, tokens, router, config.router_dtype, dy.dtype, needs.x)
    if needs.x:
        assert returned.rows is not None
        d_x = returned.rows(of_router)  # (T, D), the router's part is the last term
    return d_x, d_router, d_weights, d_scores


# ---------------------------------------------------------------- replayed calls


def _replays(options: FusedOptions, device: torch.device) -> bool:
    """Whether a call sends nothing and reads nothing on the host: on one GPU, all rows at once."""
    if device.type != "cuda" or isinstance(options.runtime.scratch_rows, int):
        return False
    transport = transport_of(options.group_name, device) if options.group_name else None
    return transport is None or (transport.world == 1 and transport.name == "collective")


def _forward_tensors(call: _CallOptions, *arguments: Any) -> _Forward:
    """`_forward` with arguments of `_outputs_of_tensors` as `left`."""
    made = _forward(call, *arguments)
    left: _Dispatched = made.left
    forms = left.gemms[0].made("forward"), left.gemms[1].made("forward")
    return made._replace(left=(left.rows, left.dispatcher, left.first, forms))


def _whole_forward(call: _CallOptions, *arguments: Any) -> _Forward:
    """`_forward` with the output (T, D) as `left`."""
    made = _forward(call, *arguments)
    return made._replace(left=_outputs(call._replace(fused=made.options), made.left))


def _outputs_of_tensors(
    call: _CallOptions, rows: Tensor, dispatcher: TokenDispatcher, first: GateUp | None, forms: WeightForms, weights: ExpertWeights
) -> Tensor:
    options = call.fused
    chunks = ExpertChunks.of(dispatcher, options.runtime, options.recipe.group_size_multiple_of)
    gemms = expert_gemms(weights, options.experts, call.caches, forward=forms)
    return _outputs(call, _Dispatched(dispatcher, rows, first, weights, gemms, chunks))


def _cached_forms(call: _CallOptions, caches: Caches, weights: ExpertWeights, *names: str) -> tuple[WeightForms, WeightForms]:
    """The forms of these names, "" for none, of the weights of gate and up and of down, where caches keep them; and dgrad's forms, as far
    as the same entries have them.
    """
    if caches == NO_CACHES or call.fused.experts.gemm is None or not any(names):
        return NO_FORMS, NO_FORMS
    first, second = expert_gemms(weights, call.fused.experts, caches)
    forms = [gemm.cached(which) if which else (None, None) for gemm, which in zip((first, second), names, strict=True)]
    return (forms[0], forms[1]), (first.made("dgrad"), second.made("dgrad"))


@first_order
class _FusedMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Callable[[], Tensor] | None]:
        """The output (T, D), counts, shares, z, and None.

        With `apart`, a tensor without values in the place of the output, and as last result a function that returns the output.
        `rest`: the weights' tensors, and what the next line names; options are `FusedOptions`.
        """
        *tensors, expert_bias, experts, scores, options, caches, grad_enabled, apart = rest
        saves, needs = grad_enabled and any(ctx.needs_input_grad), _needs_grad(ctx, router is not None)
        call = _CallOptions(options, needs, saves, ctx.needs_input_grad[1], torch.is_autocast_enabled(x.device.type), caches)
        w1, w2, w3, b1, b2, b3, *lora = tensors
        weights = ExpertWeights(w1, w2, w3, b1, b2, b3, lora=ExpertLora(*lora))
        arguments = x, router, weights, expert_bias, experts, scores
        bounds: ChunkBounds | None = None
        dgrad = NO_FORMS
        if _replays(options, x.device):
            forms = NO_FORMS
            if caches != NO_CACHES:
                call = call._replace(fused=options.for_rows(x.shape[0]), caches=NO_CACHES)
                forms, dgrad = _cached_forms(call, caches, weights, "forward", "forward")
            made = replayed(_forward_tensors if apart else _whole_forward, call, *arguments, forms)
            call = call._replace(fused=made.options)
            outputs = partial(replayed, _outputs_of_tensors, call, *made.left, weights) if apart else None
        else:
            made = _forward(call, *arguments)
            call, bounds = call._replace(fused=made.options), made.left.chunks.bounds
            outputs = partial(_outputs, call, made.left)
            if not apart:
                made, outputs = made._replace(left=outputs()), None
        _, counts, shares, z, left, saved = made
        if saved is not None:
            of_chunks = (None, None) if bounds is None else (bounds.on_device, bounds.on_host)
            # Right after those that forward makes, of which a checkpoint's second forward may make more or fewer.
            of_caches = (*dgrad[0], *dgrad[1]) if options.runtime.keep_dgrad_weights else (None,) * _NUM_FORMS
            ctx.save_for_backward(router, *tensors, *of_chunks, *saved.kept, *of_caches)
            ctx.saved = ForBackward((), saved.rest, saved.packing)
            ctx.call, ctx.caches, ctx.output = call, caches, (x.shape, x.dtype, x.device)
            ctx.set_materialize_grads(False)  # zeros for counts, and for losses that are off, would be a launch each
        # The layer keeps its last losses.  A disabled loss must stay out of the graph, which would hold all that this function saved.
        config = options.router
        off = counts, None if config.balance_loss else shares, None if config.z_loss else z
        ctx.mark_non_differentiable(*(tensor for tensor in off if tensor is not None))
        return x.new_empty_strided(x.shape, (0, 0)) if apart else left, counts, shares, z, outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        router, tensors, (on_device, on_host), kept, of_caches = _split_saved(ctx.saved_tensors)
        call = ctx.call._replace(needs=_needs_grad(ctx, router is not None), saves_x=ctx.needs_input_grad[1])
        shape, dtype, device = ctx.output
        dy = torch.zeros(shape, dtype=dtype, device=device) if grads[0] is None else dequantize_data(grads[0]).contiguous()
        weights, needs, saved = ExpertWeights.of(tensors), call.needs, ctx.saved.with_saved(kept)
        arguments = dy, grads[2], grads[3], saved, router, weights
        if _replays(call.fused, device):
            gate_up, down = of_caches[:2], of_caches[2:]
            asks_gate_up = needs.x and not saved.has(_GATE_UP_FORM) and gate_up[0] is None
            asks_down = needs.activation and not saved.has(_DOWN_FORM) and down[0] is None
            found, _ = _cached_forms(call, ctx.caches, weights, "dgrad" * asks_gate_up, "dgrad" * asks_down)
            forms = found[0] if asks_gate_up else gate_up, found[1] if asks_down else down
            again = needs.activation and not call.fused.runtime.keep_first_product
            forward, _ = _cached_forms(call, ctx.caches, weights, "forward" * again, "")
            made = replayed(_backward, call, *arguments, forms, forward)
        else:
            made = _backward(call, *arguments, NO_FORMS, NO_FORMS, None if on_host is None else ChunkBounds(on_device, on_host))
        d_x, d_router, d_weights, d_scores = made
        return d_x, d_router, *d_weights, None, None, d_scores, None, None, None, None


def _split_saved(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `_FusedMoE` saves: the router's weight, the experts' weights, bounds of chunks, what `ForBackward.with_saved` takes, and the
    weights' forms from caches.
    """
    router, *rest = saved
    split = _NUM_WEIGHTS + 2
    return router, rest[:_NUM_WEIGHTS], rest[_NUM_WEIGHTS:split], rest[split:-_NUM_FORMS], tuple(rest[-_NUM_FORMS:])


class _Outputs(torch.autograd.Function):
    """Values for the tensor without values that `_FusedMoE` returns: a function of its own, and one that saves nothing.

    A second derivative goes through its backward, which is the identity, to the error of `_FusedMoE`.
    """

    @staticmethod
    def forward(ctx: Any, empty: Tensor, outputs: Callable[[], Tensor]) -> Tensor:
        return outputs()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _needs_grad(ctx: Any, routes: bool) -> NeedsGrad:
    """Which inputs need a gradient; `routes`: the router is one of the inputs."""
    x, router, *rest = ctx.needs_input_grad
    needs = NeedsGrad(x, *rest[:_NUM_WEIGHTS])
    return needs._replace(scores=x or router if routes else rest[_NUM_WEIGHTS + 2])


@torch.compiler.disable(reason=OUTSIDE_OF_GRAPHS)
def run_layer(
    where: str,
    x: Tensor,
    router: Tensor | None,
    weights: ExpertWeights,
    config: MoEConfig,
    recipe: Recipe,
    runtime: RuntimeEPConfig | None,
    swiglu: SwiGLU,
    group_name: str,
    *,
    topk: TopK | None = None,
    expert_bias: Tensor | None = None,
    caches: Caches = NO_CACHES,
    weight_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Output (T, D); then, with a router, counts (E,), shares (E,) and z () of `Routing`. `topk` without a router.

    Raises ValueError, which names the call `where`, for options or weights that do not fit.
    """
    options = make_options(where, x, router, weights, config, recipe, runtime, swiglu, group_name, weight_dtype)
    chosen = (None, None) if topk is None else topk
    inputs = (x, router, *weights.tensors, expert_bias, *chosen)
    apart = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    y, *routed, outputs = _FusedMoE.apply(*inputs, options, caches, torch.is_grad_enabled(), apart)
    return _Outputs.apply(y, outputs) if apart else y, *routed


def is_fused(node: object) -> bool:
    """Whether an autograd node is this function's."""
    return type(node).__name__ == f"{_FusedMoE.__name__}Backward"


def saved_memory(node: Any) -> dict[str, list[Memory | None]]:
    """Memory that a node of this function keeps, but for the weights, by the keys of `saved_bytes`."""
    *_, kept, of_caches = _split_saved(node.saved_tensors)
    memory = node.saved.with_saved(kept).memory()
    x, logits, columns, rows, scale, *of_gate_up = memory[-_NUM_SAVED:-_NUM_FORMS]  # gate and up, scales, adapter
    return {
        "input": [x],
        "dispatched tokens": [rows, scale],
        "first product": of_gate_up,
        "weights for dgrad": [*memory[-_NUM_FORMS:], *map(memory_of, of_caches)],
        "routing": [logits, columns, *memory[:-_NUM_SAVED]],
    }
