"""The autograd function of the fused layer.

Everything that is no tensor comes in as `How`; the public calls, which check and resolve it, stand in fused/layer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxep.fused import activation
from mxep.fused.dispatcher import DispatchSpec, TokenDispatcher
from mxep.fused.expert_chunks import News, Passes, Places, Sums, capacity_of, joined_scores, places_of
from mxep.fused.fused_call import fit
from mxep.fused.fused_operands import Choices, FusedWeights, How, Kept, Needs, takes_of
from mxep.fused.make_dispatcher import make_dispatcher
from mxep.grouped_mm.bias import bias_grad
from mxep.grouped_mm.products import (
    Weights,
    as_mx,
    dgrad_form,
    dgrad_gemm,
    empty_wgrad,
    form_names,
    forward_gemm,
    shared_form,
    wgrad_form,
    wgrad_gate_up,
    wgrad_gemm,
)
from mxep.moe.ffn import gate_up_bias
from mxep.moe.router import route_without_gradient, router_gradients
from mxep.moe.router_product import logits_backward, logits_of
from mxep.mx.first_order import first_order
from mxep.mx.tensor import MXTensor, dequantize_data

OUTSIDE_OF_GRAPHS = "fused_moe and fused_experts may read the splits of their exchanges on the host; compile what stands around them"
_SKIP = "skip"  # the rows of the experts' GEMMs past the last expert are not computed: nothing reads them


def _passes(dispatcher: TokenDispatcher, how: How, news: News | None = None) -> Passes:
    alignment = how.recipe.group_size_multiple_of
    return Passes(places_of(dispatcher), capacity_of(dispatcher, how.runtime.scratch_rows, alignment), dispatcher.tokens, alignment, news)


def _reads_again(dispatcher: TokenDispatcher, how: How, passes: Passes) -> bool:
    """Whether backward reads rows to make first products of passes again; where that dispatches tokens once more, the same on every rank.

    All ranks take part in that or none, but where P is what came, each rank has a number of passes of its own.
    """
    runtime = how.runtime
    may = runtime.redispatch_x_in_backward and dispatcher.expected_rows is None and isinstance(runtime.scratch_rows, int)
    return may or len(passes) > 1


def _factors(weights: FusedWeights, how: How, passes: Passes) -> tuple[Weights, Weights]:
    """The weights of the first and of the second product, as all passes of a forward or of a backward read them."""
    keep = not passes.single()
    first = Weights(weights.w1, weights.w3, how.gemm, how.kept[0], keep, how.weight_dtype)
    return first, Weights(weights.w2, None, how.gemm, how.kept[1], keep, how.weight_dtype)


def _activation_rows(weights: FusedWeights, places: Places) -> activation.Rows:
    bias = gate_up_bias(weights.w1, weights.b1, weights.b3, weights.w3 is not None)
    return activation.Rows(bias, places.offs, places.scores)


def _activate(first: Tensor, rows: activation.Rows, how: How, keep: bool | str) -> tuple[Tensor, Tensor | None]:
    """h (P, H), and of the first product what backward shall find."""
    if keep == "mxfp8":
        return activation.forward_and_keep(first, rows, how.activation, how.recipe.scaling_mode.value)
    return activation.forward(first, rows, how.activation), first if keep else None


def _experts(
    rows: Tensor, weights: FusedWeights, factors: tuple[Weights, Weights], places: Places, how: How, keep: bool | str
) -> tuple[Tensor, Tensor | None]:
    """Rows (R, D) -> the experts' weighted outputs in their places (P, D), and what is kept of the first product (P, 2H)."""
    first = forward_gemm(rows, factors[0], places.offs, places.token_map, _SKIP)
    h, kept = _activate(first, _activation_rows(weights, places), how, keep)  # (P, H)
    placed = forward_gemm(h, factors[1], places.offs, padding_rows=_SKIP)  # (P, D)
    if weights.b2 is not None:
        placed = torch.ops.mxep.add_group_bias(placed, weights.b2, places.offs, places.scores)
    return placed, kept


def _as_kept(rows: Tensor | None) -> Tensor:
    """Dispatched rows that forward has kept."""
    assert rows is not None
    return rows


def _parts(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Data and scales as `Kept` has them."""
    return (rows.qdata, rows.scale) if isinstance(rows, MXTensor) else (rows, None)


def _whole(data: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return data if data is None or scale is None else MXTensor(data, scale, dtype)


def _needs(ctx: Any, routes: bool) -> Needs:
    """`routes`: the router is one of the inputs."""
    inputs = ctx.needs_input_grad
    scores = (inputs[0] or inputs[1]) if routes else inputs[10]
    return Needs(*(*inputs[:8], scores))


class _ExpertGradients(NamedTuple):
    """What backward makes on the experts' rank.

    Attributes:
        rows, scores: what `RowExchange.start_to_tokens` and `TokenDispatcher.start_scores_to_tokens` return; None if not needed.
        weights: gradients of weights and biases.
    """

    rows: Callable[[Tensor | None], Tensor] | None
    scores: Callable[[], Tensor] | None
    weights: FusedWeights


class _Homeward:
    """What the experts' rank sends home in backward, each thing as soon as the last pass, which has most rows, has made its part.

    Attributes:
        rows, scores: as in `_ExpertGradients`.
    """

    def __init__(self, dispatcher: TokenDispatcher, how: How) -> None:
        self._dispatcher, self._how = dispatcher, how
        self._sums, self._windows, self._d_scores = Sums(dispatcher.dispatch), list[Places](), list[Tensor]()
        self.rows: Callable[[Tensor | None], Tensor] | None = None
        self.scores: Callable[[], Tensor] | None = None

    def add_scores(self, d_scores: Tensor, places: Places) -> None:
        """Gradients of the next pass's scores (P,)."""
        self._windows.append(places)
        self._d_scores.append(d_scores)
        if places.last:
            whole = joined_scores(self._windows, self._d_scores, self._dispatcher.scores.shape[0])
            self.scores = self._dispatcher.start_scores_to_tokens(whole)

    def add_rows(self, placed: Tensor, places: Places) -> None:
        """Gradients of the dispatched rows (P, D) in the places of the next pass."""
        if places.last:
            precision = self._how.runtime.dispatch_backward
            self.rows = self._sums.start_to_tokens(placed, places.token_map, places.window, self._how.on_wire(precision))
        else:
            self._sums.add(placed, places.token_map, places.window)


def _unwritten(weights: FusedWeights, how: How, needs: Needs) -> dict[str, Tensor]:
    """Memory for the gradients of weights: every expert has places in one pass, which writes its own. Those of biases are added up."""
    wanted = ("w1", weights.w1, needs.w1), ("w2", weights.w2, needs.w2), ("w3", weights.w3, needs.w3)
    dtypes = {name: how.wgrad_dtype(w.dtype) for name, w, need in wanted if w is not None and need}
    return {name: empty_wgrad(w, dtypes[name], weights.transposed(name)) for name, w, _ in wanted if w is not None and name in dtypes}


def _writes_afresh(weights: FusedWeights, how: How, passes: Passes) -> bool:
    """Whether no pass finds parts of gradients that others made; what the host happens to know must not change a bit."""
    if len(passes) == 1:
        return True
    return passes.single() and (how.gemm is None or how.gemm.wgrad_same_in_parts(how.wgrad_dtype(weights.w1.dtype)))


def _backward_in_passes(
    grad: Tensor, kept: Kept, weights: FusedWeights, dispatcher: TokenDispatcher, news: News | None, how: How, needs: Needs
) -> _ExpertGradients:
    """From the output's gradient (R, D) as it was received; `news` of the forward's passes."""
    passes, homeward = _passes(dispatcher, how, news), _Homeward(dispatcher, how)
    rows, first = _whole(kept.rows, kept.scale, grad.dtype), _whole(kept.first, kept.first_scale, grad.dtype)
    makes_first = (first is None or _reads_again(dispatcher, how, passes)) and (needs.first or needs.w2 or needs.scores)
    reads_rows = needs.w1 or needs.w3 or makes_first
    read: Callable[[], Tensor] = partial(_as_kept, rows)
    again = rows is None and how.runtime.redispatch_x_in_backward and reads_rows
    if again:
        assert kept.x is not None
        arriving = dispatcher.dispatch.start_to_experts(kept.x, how.on_wire(how.recipe.dispatch))
        read = cache(lambda: shared_form(arriving(), how.gemm))  # when the first product or wgrad reads them, beside all that comes before
    of_b2 = grad if weights.b2 is not None and (needs.b2 or needs.scores) else None  # gradients of the values that came
    grad = shared_form(grad, how.gemm)
    made, factors = {} if _writes_afresh(weights, how, passes) else _unwritten(weights, how, needs), _factors(weights, how, passes)
    for places in passes:
        kept_here = first if places.last else None  # the last pass's alone was kept
        _backward_of_experts(grad, of_b2, read, kept_here, weights, factors, places, how, needs, made, homeward)
    if again:
        read()  # where no pass of this rank has: all take part in an exchange to its end
    # Cast while rows are on their way, and one after the other, so that no two of them are there in two dtypes.
    cast = (None if w is None or name not in made else made.pop(name).to(w.dtype) for name, w in weights._asdict().items())
    return _ExpertGradients(homeward.rows, homeward.scores, FusedWeights(*cast))  # type: ignore[arg-type]


def _backward_of_experts(
    grad: Tensor,
    of_b2: Tensor | None,
    read: Callable[[], Tensor],
    first: Tensor | None,
    weights: FusedWeights,
    factors: tuple[Weights, Weights],
    places: Places,
    how: How,
    needs: Needs,
    done: dict[str, Tensor],
    homeward: _Homeward,
) -> None:
    """Gradients of weights and biases, from the output's gradient (R, D), as products and as b2 read it, what reads the dispatched rows,
    and a first product if kept.

    `done` are these gradients by name, after the passes before; memory before the first of several.  Each pass puts those of its own
    experts there, and of what it replaces nothing is held.
    """
    gemm, offs, g_map = how.gemm, places.offs, places.grad_map
    needs_w13, needs_b13 = needs.w1 or needs.w3, needs.b1 or needs.b3
    of_bias = None
    if weights.b2 is not None and of_b2 is not None:
        placed = torch.ops.mxep.gather_rows(dequantize_data(of_b2), g_map)
        if needs.b2:
            _add(done, "b2", bias_grad(placed, offs, weights.b2.shape, weights.b2.dtype, places.scores))
        if needs.scores:
            of_bias = torch.ops.mxep.dot_group_bias(placed, weights.b2, offs)  # (P,), the bias is weighted by the score too
        del placed
    if not (needs.first or needs.w2 or needs.scores):
        return

    if first is None:
        first = forward_gemm(read(), factors[0], offs, places.token_map, _SKIP)
        if how.runtime.keep_first_product == "mxfp8":
            first = as_mx(first, how.recipe.scaling_mode.value)  # as the last pass kept it: the number of passes changes no bit
    dh = dgrad_gemm(grad, factors[1], offs, g_map, _SKIP)  # (P, H)
    first_forms, h_forms = form_names(gemm, needs.x, needs_w13, needs_b13), form_names(gemm, False, needs.w2)
    made = activation.backward(dh, first, _activation_rows(weights, places), how.activation, first_forms, h_forms)
    del dh, first

    # What others wait for first: it travels beside the weights' gradients where the transport can.
    if needs.scores:
        homeward.add_scores(made.scores if of_bias is None else made.scores + of_bias, places)
    if needs.x:
        placed = dgrad_gemm(dgrad_form(made.first, gemm), factors[0], offs, padding_rows=_SKIP)  # (P, D)
        homeward.add_rows(placed, places)
        del placed
    if needs.w2:
        maps, form = (g_map, None), (weights.transposed("w2"), places.last)
        done["w2"] = wgrad_gemm(grad, wgrad_form(made.h, gemm), offs, gemm, done.pop("w2", factors[1].wgrad_dtype), *maps, *form)
    if needs_w13:
        made_in = factors[0].wgrad_dtype
        operands = wgrad_form(made.first, gemm), read()
        if weights.w3 is None:
            done["w1"] = wgrad_gemm(
                *operands, offs, gemm, done.pop("w1", made_in), None, places.token_map, weights.transposed("w1"), places.last
            )
        else:
            into = [done.pop(name, None) for name in ("w1", "w3")]
            halves = wgrad_gate_up(*operands, offs, gemm, made_in, (needs.w1, needs.w3), places.token_map, into, places.last)
            done |= {name: half for name, half in zip(("w1", "w3"), halves, strict=True) if half is not None}
    if needs_b13:
        assert made.first.hp is not None
        both = bias_grad(made.first.hp, offs, torch.Size((weights.w1.shape[0], made.first.hp.shape[1])), torch.float32)
        parts = both.chunk(2, 1) if weights.w3 is not None else (both, None)
        for name, part, bias in zip(("b1", "b3"), parts, (weights.b1, weights.b3), strict=True):
            if part is not None and bias is not None:
                _add(done, name, part.to(bias.dtype))


def _add(done: dict[str, Tensor], name: str, of_pass: Tensor) -> None:
    """A bias's gradient: an expert's is 0 in all passes but one."""
    done[name] = done[name] + of_pass if name in done else of_pass


@first_order
class _FusedMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        router: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        b1: Tensor | None,
        b2: Tensor | None,
        b3: Tensor | None,
        expert_bias: Tensor | None,
        experts: Tensor | None,
        scores: Tensor | None,
        how: How,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        weights, recipe, runtime = FusedWeights(router, w1, w2, w3, b1, b2, b3), how.recipe, how.runtime
        logits = counts = shares = z = None
        if router is not None:
            logits = logits_of(x, router, how.router.router_dtype)
            scores, experts, counts, shares, z = route_without_gradient(logits, expert_bias, how.router)
        assert experts is not None
        assert scores is not None
        needs = _needs(ctx, router is not None)
        saves, number = how.saves and any(needs), 1024 * runtime.number + recipe.number
        spec = DispatchSpec(
            how.router.num_experts,
            how.router.top_k,
            x.shape[1],
            x.element_size(),
            number,
            runtime.wires,
            recipe.group_size_multiple_of,
            needs.number(runtime.redispatch_x_in_backward) if saves else 0,
            runtime.cpu_sync_on_runtime,
        )
        dispatcher, rows = make_dispatcher(spec, experts, scores, x, how.on_wire(recipe.dispatch), how.group_name, saves)
        rows = shared_form(rows, how.gemm)  # (R, D)
        passes, sums = _passes(dispatcher, how), Sums(dispatcher.combine)
        factors = _factors(weights, how, passes)
        for places in passes:  # all but the last make their first product again in backward
            keep = runtime.keep_first_product if saves and places.last else False
            placed, first = _experts(rows, weights, factors, places, how, keep)  # (P, D)
            if places.last:
                y = sums.to_tokens(placed, places.grad_map, places.window, how.on_wire(runtime.combine_forward))  # (T, D)
            else:
                sums.add(placed, places.grad_map, places.window)
            del placed

        if saves:
            read_again = needs.w1 or needs.w3 or first is None or _reads_again(dispatcher, how, passes)
            kept_rows = rows if read_again and not runtime.redispatch_x_in_backward else None
            kept_x = x if needs.router or (read_again and kept_rows is None) else None
            # Made again from tokens that are kept anyway, unless autocast has rounded them here.
            again = kept_x is not None and (how.router.router_dtype == "fp32" or not torch.is_autocast_enabled(x.device.type))
            kept = Kept(kept_x, None if again else logits, *_parts(kept_rows), *_parts(first))
            ctx.dispatcher, tensors = dispatcher.for_backward()
            windows = (None, None) if passes.news is None else (passes.news.bounds, passes.news.told)
            ctx.save_for_backward(*kept, *weights, *tensors, *windows)
            ctx.how = how
        # A loss that is off must not hang on the graph: the layer keeps it, and with it whatever this function saved.
        off = counts, None if how.router.balance_loss else shares, None if how.router.z_loss else z
        ctx.mark_non_differentiable(*(tensor for tensor in off if tensor is not None))
        return y, counts, shares, z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (*saved, bounds, told), how = ctx.saved_tensors, ctx.how
        split = len(Kept._fields), len(Kept._fields) + len(FusedWeights._fields)
        kept, weights = Kept(*saved[: split[0]]), FusedWeights(*saved[split[0] : split[1]])
        router, needs = weights.router, _needs(ctx, weights.router is not None)
        dispatcher = ctx.dispatcher.refilled(saved[split[1] :])
        dy = dequantize_data(grads[0]).contiguous()
        grad = dispatcher.combine.to_experts(dy, how.on_wire(how.recipe.combine_backward))  # (R, D)
        made = _backward_in_passes(grad, kept, weights, dispatcher, None if told is None else News(bounds, told), how, needs)
        d_x = d_router = of_router = None
        d_scores = None if made.scores is None else made.scores()  # (T, C)
        if router is not None and d_scores is not None:
            logits = kept.logits
            if logits is None:
                assert kept.x is not None
                with torch.autocast(dy.device.type, enabled=False):  # as forward was, whatever is around backward
                    logits = logits_of(kept.x, router, how.router.router_dtype)
            made_in = torch.float32 if how.router.router_dtype == "fp32" else dy.dtype
            d_logits = router_gradients(logits, dispatcher.experts, d_scores, grads[2], grads[3], how.router, made_in)  # (T, E)
            assert not needs.router or kept.x is not None
            tokens, d_scores = kept.x if needs.router else None, None
            of_router, d_router = logits_backward(d_logits, tokens, router, how.router.router_dtype, dy.dtype, needs.x)
        if needs.x:
            assert made.rows is not None
            d_x = made.rows(of_router)  # (T, D), the router's part is the last term
        return d_x, d_router, *made.weights[1:], None, None, d_scores, None


@torch.compiler.disable(reason=OUTSIDE_OF_GRAPHS)
def run_layer(
    x: Tensor, weights: FusedWeights, expert_bias: Tensor | None, choices: Choices | None, how: How
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Output (T, D); then, of a router among the weights, counts (E,), shares (E,) and z () of `Routing`. `choices` where there is none."""
    given = (None, None) if choices is None else choices
    if choices is not None and x.is_cuda:  # nobody may have read them; wrong ones would lead rows to where others' are
        torch._assert_async(fit(choices.experts, how.router.num_experts, *takes_of(how.group_name, how.runtime)))
    return _FusedMoE.apply(x, *weights, expert_bias, *given, how._replace(saves=torch.is_grad_enabled()))


def is_fused(node: object) -> bool:
    """Whether an autograd node is this function's."""
    return type(node).__name__ == f"{_FusedMoE.__name__}Backward"
