"""The whole MoE layer, router to output, as one autograd function: `fused_moe`, and as a module `FusedMoE`; with the choices of the
caller's router: `fused_experts`.

before, after  tokens (T, D) on their rank; their outputs on the same rank
forward   route (moe/router.py); quantise each token 1x32 once and send it once to every rank that has one of its experts
          (fused/dispatcher.py); GEMM of gate and up, which reads rows through a row map; activation times score, in float32, straight to
          MX; down GEMM (moe/expert_mlp.py); sum the rows of each token on the experts' rank, then over the ranks on the token's rank, in
          float32, each rounded once
backward  quantise the output's gradient once per token and send it the same way; dgrad and wgrad of the down GEMM read these bytes; dgrad
          of gate and up is summed and sent back like the outputs; the router's part is the last term of that sum
saves     the dispatched tokens as they were received, and gate and up (either can be recomputed instead, `RuntimeEPConfig`); top-k choices
          and scores; for a router the tokens, of which its logits are computed again.  Tokens in the experts' order are never stored.
          `saved_bytes` counts
transports  torch.distributed, or symmetric memory for groups that have it (`mxep.set_transport`): the same bits
host syncs  over torch.distributed one in forward on more than one rank, for the splits of its exchanges; none in backward.  Over symmetric
          memory none, unless `RuntimeEPConfig.cpu_sync_on_runtime` asks for one.  There exchanges overlap with the indexing of rows in
          forward and with wgrad in backward
CUDA graphs  forward and backward over symmetric memory can be captured, on every rank alike, after an eager run: a replay takes other
          tokens and other routing without the hosts
memory    a row for each received row where the host knows their number, else the balanced share and its usual deviation; more rows are
          computed in chunks of experts (fused/expert_chunks.py, `RuntimeEPConfig.scratch_rows`); no token is dropped under any skew
torch.compile  breaks the graph before the layer and continues after it (fullgraph=True is refused), but for experts of transformers on one
          rank (integrations/transformers_5.py)

The input is this rank's tokens (data parallel), the experts are sharded over the group (expert parallel), and the outputs are this rank's
tokens again: DP -> EP -> DP.  The router's weight is replicated; its gradient is that of this rank's tokens, so trainers add it up over
the ranks, as for every replicated weight.  Gradients of the experts' weights have every rank's tokens of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mxep.checks import check_tensors, check_type
from mxep.comm import group_name_of
from mxep.fused.autograd import is_fused, run_layer, saved_memory
from mxep.fused.options import allowed_topk, check_layout, check_topk, kept_config, resolve_runtime
from mxep.fused.runtime_config import RuntimeEPConfig
from mxep.moe.config import MoEConfig, RouterDtype, ScoreFunction, check_activation
from mxep.moe.expert_mlp import ExpertLora, ExpertWeights
from mxep.moe.experts import Experts
from mxep.moe.layer import MoE
from mxep.moe.router import Router, check_router, is_patched
from mxep.mx.rows import unflatten_rows
from mxep.ops.activation.functions import ActivationName, SwiGLU, is_gated
from mxep.placements import to_local
from mxep.recipe import Recipe, resolve_recipe

_WHERE, _GIVEN = "fused_moe", "fused_experts"
_STATE_HOOKS = "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
_STEPS = "_routed_experts", "_weigh_inputs", "_sum_choices"  # of `MoE`, which a fused layer does in its own way


def fused_moe(
    x: Tensor,
    router_weight: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    num_experts: int,
    config: RuntimeEPConfig | None = None,
    activation: ActivationName = "swiglu",
    *,
    group: str | ProcessGroup | None = None,
    recipe: str | Recipe | None = None,
    score_function: ScoreFunction = "softmax",
    renormalize: bool = True,
    route_scale: float = 1.0,
    layout: str = "concatenated",
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008  immutable
    router_dtype: RouterDtype = "fp32",
) -> Tensor:
    """A whole MoE layer: route, dispatch, experts, combine. Differentiable in everything that has values.

    Args:
        x: (..., D) bf16 or float32, this rank's tokens; their number may differ between ranks and may be 0.
        router_weight: (E, D), the same on every rank.  Its gradient is this rank's part: add it up over the ranks.
        w1: (L, 2H, D), gate and up of this rank's L = E / W experts, rank r holding experts r*L to r*L + L - 1; (L, H, D) for "relu2".
        b1: (L, 2H), (L, H) for "relu2", or None.
        w2: (L, D, H).
        b2: (L, D) or None.
        top_k: C, experts per token.
        num_experts: E.
        config: modes and precisions of the exchanges, the same on every rank; None is `RuntimeEPConfig()`.
        activation: as in `MoEConfig`; "relu2" has no gate.
        group: process group of the W ranks, its name, or None for WORLD; "" is this rank alone, without torch.distributed.
        recipe: a `Recipe`, a preset's name, or None for the default preset.
        score_function: as in `MoEConfig`; with the default and `renormalize` it is softmax over the top-k logits.
        renormalize: as in `MoEConfig`, but on by default.
        route_scale: as in `MoEConfig`.
        layout: of gate and up in w1 and b1: "concatenated", gate first, or "interleaved", gate in even rows and up in odd ones.
        swiglu: its form; `SwiGLU(10.0)` clamps gate and up as DeepSeek-V4 does, `SwiGLU(7.0, 1.702, 1.0)` is gpt-oss'.
        router_dtype: of the product with `router_weight`, as in `MoEConfig`.

    Returns:
        y of x's shape and dtype.

    Raises:
        ValueError: shapes, dtypes, devices, options or a recipe that do not fit; on every rank if ranks disagree on E, C, D, x's dtype,
            config, recipe, or on what needs a gradient: x, the router, and with `redispatch_x_in_backward` the experts, also where T is 0.

    Examples:
        >>> x, router_weight = torch.randn(16, 64), torch.randn(4, 64)
        >>> w1, w2 = torch.randn(4, 64, 64), torch.randn(4, 64, 32)  # 4 experts of width 32; w1 holds gate and up
        >>> mxep.fused_moe(x, router_weight, w1, None, w2, None, top_k=2, num_experts=4, group="").shape
        torch.Size([16, 64])
    """
    check_layout(_WHERE, x, w1, w2, layout)
    check_tensors(_WHERE, router_weight=router_weight)
    check_activation(_WHERE, activation, swiglu)
    hidden = w2.shape[-1]
    router = kept_config(
        x.shape[-1], hidden, num_experts, top_k, score_function=score_function, renormalize=renormalize, route_scale=route_scale,
        activation=activation, router_dtype=router_dtype,
    )  # fmt: skip
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    group_name = group_name_of(_WHERE, group)
    weights = ExpertWeights(w1, w2, None, b1, b2, None, layout)
    y, *_ = run_layer(_WHERE, tokens, router_weight, weights, router, resolve_recipe(recipe), config, swiglu, group_name)
    return y if x.dim() == 2 else unflatten_rows(y, x.shape[:-1])


def fused_experts(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    num_experts: int,
    config: RuntimeEPConfig | None = None,
    activation: ActivationName = "swiglu",
    *,
    group: str | ProcessGroup | None = None,
    recipe: str | Recipe | None = None,
    layout: str = "concatenated",
    swiglu: SwiGLU = SwiGLU(),  # noqa: B008
    w3: Tensor | None = None,
    b3: Tensor | None = None,
    lora: ExpertLora | None = None,
) -> Tensor:
    """`fused_moe` with the choices of your own router: dispatch, experts, combine. Differentiable in x, scores, weights and biases.

    Args:
        x: (..., D) bf16 or float32, this rank's tokens; their number may differ between ranks and may be 0.
        experts: (..., C) int64, the choices of each token among the experts of all ranks, each at most once, in any order.  A choice that
            is to be dropped has a score of 0 and names any expert that the token has not chosen; it costs as much as another choice.  With
            the group "" it may be -1 instead, which costs memory only, and an expert that is named twice counts twice, unless
            `config.scratch_rows` is a number.
        scores: (..., C), floats of 16 to 64 bits, their weights in the sum over a token's choices; computed in float32.
        w1: gate and up of this rank's L = E / W experts, as in `fused_moe`.
        b1: their biases or None, as in `fused_moe`.
        w2: (L, D, H), down.
        b2: (L, D) or None.
        num_experts: E.
        config: as in `fused_moe`.
        activation: as in `fused_moe`.
        group: as in `fused_moe`.
        recipe: as in `fused_moe`.
        layout: as in `fused_moe`.
        swiglu: as in `fused_moe`.
        w3: (L, H, D), up, if it is not part of w1.  w1 and b1 are then gate only, (L, H, D) and (L, H).
        b3: (L, H) or None, the bias of w3.
        lora: low-rank adapters of the weights, in x's dtype; none by default.

    Returns:
        y of x's shape and dtype, the weighted sum of the experts' outputs.

    Raises:
        ValueError: shapes, dtypes, devices, options or a recipe that do not fit; in checking mode an expert out of range, or named twice
            for a token where that is not allowed; on every rank if ranks disagree as in `fused_moe`, with scores for the router.
        RuntimeError: such experts on a GPU without checking mode: a device-side assertion of CUDA, raised by a later call.

    Examples:
        >>> x, w1, w2 = torch.randn(16, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
        >>> experts = torch.tensor([[0, 3]]).expand(16, 2)  # the choices of your own router
        >>> scores = torch.full((16, 2), 0.5)
        >>> mxep.fused_experts(x, experts, scores, w1, None, w2, None, num_experts=4, group="").shape
        torch.Size([16, 64])
    """
    check_layout(_GIVEN, x, w1, w2, layout)
    check_activation(_GIVEN, activation, swiglu)
    if (w3 is not None and (layout != "concatenated" or not is_gated(activation))) or (w3 is None and b3 is not None):
        raise ValueError(
            f"{_GIVEN}: {'b3 without w3' if w3 is None else 'w3'} with layout={layout!r} and activation={activation!r}, want w3, and b3 "
            "with it, only for gate and up that are not concatenated"
        )
    tokens = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    group_name, runtime = group_name_of(_GIVEN, group), resolve_runtime(_GIVEN, config)
    topk = check_topk(_GIVEN, tokens, experts, scores, num_experts, allowed_topk(group_name, runtime))
    # int: sizes may be symbols while a graph is traced, which then is for these sizes alone.
    sizes = int(x.shape[-1]), int(w2.shape[-1]), num_experts, int(topk.experts.shape[1])
    shape = kept_config(*sizes, activation=activation)
    lora = ExpertLora() if lora is None else lora
    check_type(_GIVEN, ExpertLora, "lora", lora, "mxep.moe.ExpertLora holds the factors")
    weights = ExpertWeights(w1, w2, w3, b1, b2, b3, layout, lora)
    y, *_ = run_layer(_GIVEN, tokens, None, weights, shape, resolve_recipe(recipe), runtime, swiglu, group_name, topk=topk)
    return y if x.dim() == 2 else unflatten_rows(y, x.shape[:-1])


class FusedExperts(Experts):
    """The weights of `Experts`, and the whole layer as their forward."""

    def forward(self, tokens: Tensor, layer: FusedMoE) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Tokens (T, D) -> outputs (T, D), and of the router for this rank's tokens: counts (E,), shares (E,), z (), as in `Routing`.

        `layer` has the router's weight, bias, options and group.  FSDP would round tensors among the inputs to bf16, but not when a forward
        is recomputed.
        """
        tokens, weights = self.operands(tokens)
        gate, group_name = layer.router.gate.weight, "" if layer.group is None else layer.group.group_name
        router = to_local(gate) if isinstance(gate, DTensor) else gate
        return run_layer(  # type: ignore[return-value]  # with a router
            _WHERE, tokens, router, weights, layer.config, self._recipe, layer.runtime, self.swiglu, group_name,
            expert_bias=layer.expert_bias, caches=(self._kept.get("w13"), self._kept.get("w2")), weight_dtype=self.compute_dtype,
        )  # fmt: skip


class FusedMoE(MoE):
    """`MoE` on the fused layer: the same parameters, state and options, one autograd function from the router to the sum over the choices.

    Args:
        config: shape and routing of the layer.
        recipe: precision of GEMMs and exchanges: a `Recipe`, a preset's name, or None for the default preset.

    Attributes:
        runtime: how it exchanges; may be replaced at any time, on every rank alike.

    Examples:
        >>> config = mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2)
        >>> layer = mxep.FusedMoE(config, runtime=mxep.RuntimeEPConfig(keep_first_product="mxfp8"))
        >>> layer(torch.randn(8, 16, 64)).shape
        torch.Size([8, 16, 64])
    """

    _experts_class = FusedExperts

    def __init__(
        self, config: MoEConfig, recipe: str | Recipe | None = "mxfp8_wgrad_with_hp", runtime: RuntimeEPConfig | None = None
    ) -> None:
        super().__init__(config, recipe)
        if config.scores_before_experts:
            raise ValueError("FusedMoE: scores_before_experts=True, want False: a token is sent once for all of its choices; use MoE")
        self.runtime = resolve_runtime("FusedMoE", runtime, "runtime")

    @staticmethod
    def of(moe: MoE, runtime: RuntimeEPConfig | None = None) -> FusedMoE:
        """A fused layer with the parameters, buffers and group of `moe`: shared, not copied.

        Raises:
            ValueError: `moe` is wrapped already (FSDP), its configuration has no fused form, or the module or a part of it has another
                forward or hooks, which a fused layer would not run.
        """
        check_type("FusedMoE.of", MoE, "moe", moe, "convert_experts takes other models' layers")
        parts = (moe, MoE), (moe.router, Router), (moe.experts, Experts), (getattr(moe.router, "gate", None), nn.Linear)
        steps = *((part, kind, "forward") for part, kind in parts), *((moe, MoE, step) for step in _STEPS)
        if any(isinstance(part, FSDPModule) or getattr(type(part), step, None) is not getattr(kind, step) for part, kind, step in steps):
            got = f"{type(moe).__name__} with {type(moe.router).__name__} and {type(moe.experts).__name__}"
            raise ValueError(f"FusedMoE.of: {got}, want mxep.moe's own, neither subclassed nor wrapped; fuse before FSDP wraps them")
        for part, _ in parts:
            if is_patched(part):  # type: ignore[arg-type]  # no None any more
                raise ValueError(
                    f"FusedMoE.of: {type(moe).__name__}, whose {type(part).__name__} has hooks or a forward of its own (one that "
                    "recomputes or is compiled), which would be lost, want none yet; fuse before they are put there"
                )
        check_router("FusedMoE.of", moe.router)
        for part, kept in ((moe, ("router", "experts", "shared_experts")), (moe.experts, ())):
            lost = [name for name in part._modules if name not in kept]
            lost += [name for name in part._buffers if name not in ("expert_bias", "tokens_per_expert")]
            lost += [hooks for hooks in _STATE_HOOKS if vars(part)[hooks]]
            if lost:
                raise ValueError(
                    f"FusedMoE.of: {type(part).__name__} has {', '.join(lost)}, which would be lost, want mxep.moe's own modules, buffers "
                    "and hooks alone; fuse before they are put there"
                )
        if moe.experts.activation != moe.config.activation:
            raise ValueError(f"FusedMoE.of: experts.activation={moe.experts.activation!r}, want that of the configuration; change both")
        with torch.device("meta"):
            fused = FusedMoE(moe.config, moe.experts.recipe, runtime)
        fused.experts.unconverted_recipe = moe.experts.unconverted_recipe
        fused.router, fused.shared_experts, fused.group = moe.router, moe.shared_experts, moe.group
        for name, parameter in moe.experts.named_parameters(recurse=False):
            fused.experts.register_parameter(name, parameter)
        fused.experts.compute_dtype, fused.experts.swiglu = moe.experts.compute_dtype, moe.experts.swiglu
        fused.expert_bias, fused.tokens_per_expert = moe.expert_bias, moe.tokens_per_expert
        return fused.train(moe.training)

    def _routed_experts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`MoE._routed_experts` as one autograd function. Raises ValueError as `check_router` does."""
        routed = self.experts(self.router.hold_gate(tokens), self)
        if isinstance(self.router, FSDPModule):  # another backward, or a forward without gradients, may have freed what backward reads
            for result in routed:
                if result.requires_grad:
                    result.register_hook(lambda _: self.router.unshard())
        return routed  # type: ignore[no-any-return]


def fuse_layers(model: nn.Module, runtime: RuntimeEPConfig | None = None) -> list[str]:
    """Replace every `MoE` of a model by a `FusedMoE` with the same parameters and names, in place.

    Call it before FSDP and before `cache_quantized_weights`.

    Args:
        model: holds at least one `MoE`.
        runtime: modes and precisions of the exchanges; None is `RuntimeEPConfig()`.

    Returns:
        the layers' names.

    Raises:
        ValueError: no `MoE` inside the model, or one that has no fused form.

    Examples:
        >>> config = mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), mxep.MoE(config))
        >>> mxep.moe.fuse_layers(model), type(model[1]).__name__
        (['1'], 'FusedMoE')
    """
    places = [
        (parent, prefix, name, child)
        for prefix, parent in model.named_modules()
        for name, child in parent._modules.items()  # with those that are there twice
        if isinstance(child, MoE) and not isinstance(child, FusedMoE)
    ]
    if not places:
        raise ValueError(
            f"fuse_layers: no mxep.MoE inside {type(model).__name__}, want a model that has some; for a single one FusedMoE.of"
        )
    layers = dict.fromkeys(child for *_, child in places)
    fused = {child: FusedMoE.of(child, runtime) for child in layers}  # all of them, before any takes its place
    for parent, _, name, child in places:
        setattr(parent, name, fused[child])
    return [f"{prefix}.{name}" if prefix else name for _, prefix, name, _ in places]


def saved_bytes(output: Tensor) -> dict[str, int]:
    """Bytes that a fused layer saves for its backward, without its weights; each storage is counted once.

    Args:
        output: of `fused_moe`, `fused_experts` or a `FusedMoE` without shared experts, before its backward.

    Returns:
        "input" (the layer's input, in memory anyway while its producer or the residual stream holds it), "dispatched tokens" (as
        received), "first product" (gate and up, with scales where they are in MX, and an adapter's inner rows), "weights for dgrad" (one
        byte a weight, see `RuntimeEPConfig.keep_dgrad_weights`; a cache of quantised weights has the same tensors), "routing" (choices,
        maps, scores; logits where the input is not saved).

    Raises:
        ValueError: no fused layer made this tensor, or nothing is kept, as after its backward.

    Examples:
        >>> layer = mxep.FusedMoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
        >>> kept = mxep.moe.saved_bytes(layer(torch.randn(16, 64, requires_grad=True)))
        >>> sorted(kept)
        ['dispatched tokens', 'first product', 'input', 'routing', 'weights for dgrad']
    """
    node = output.grad_fn
    while node is not None and not is_fused(node):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    if node is None:
        raise ValueError("saved_bytes: this tensor is not the output of a fused layer that keeps anything; call it before the backward")
    try:
        kept = saved_memory(node)
    except RuntimeError as freed:
        raise ValueError("saved_bytes: the backward of this tensor has freed what was kept; call it before the backward") from freed
    sizes, seen = dict.fromkeys(kept, 0), set[int]()
    for name, memory in kept.items():
        for first, nbytes in filter(None, memory):
            sizes[name] += 0 if first in seen else nbytes
            seen.add(first)
    return sizes
