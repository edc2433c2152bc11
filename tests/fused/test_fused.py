"""The fused layer on one rank: errors against float64 compared with those of the five blocks, options, saved bytes, wrong input."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.moe_truth import ACTIVATIONS, C, D, E, H, both, choice_gradients, draw, error, error_ratios, make, tokens, truth, walk
from tests.spies import spy_on
from tests.truth import assert_same, raises_naming, saved_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.device import GEMM_PATHS, resolve_gemm_path
from mxep.fused import autograd
from mxep.moe import FusedMoE, MoE, MoEConfig, Router, RuntimeEPConfig, fuse_layers, fused_moe, saved_bytes
from mxep.parallel import cache_quantized_weights
from mxep.recipe import RECIPES, Recipe, resolve_recipe
from mxep.shapes import record_bytes, round_up

MX_RECIPES = [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"]
DISPATCH, COMBINE = ("rank_dedup", "all_to_all", "all_gather"), ("rank_dedup", "all_to_all", "reduce_scatter")


def pooled_errors(recipe: str, kind: str, seeds: int, **changes: object) -> dict[str, float]:
    """Errors of the fused layer over those of the blocks, both against float64, root mean square over seeds."""
    x, dy = tokens(600, kind=kind, width=128)
    layers = (both(recipe, seed=seed, dim=128, **changes) for seed in range(seeds))
    return error_ratios(
        (walk(fused, x, dy), walk(blocks, x, dy), truth(blocks, x, dy, blocks.router(x).experts)) for blocks, fused in layers
    )


@pytest.mark.parametrize("recipe", MX_RECIPES)
def test_errors_are_those_of_the_blocks(recipe: str) -> None:
    """Each one's error is at most 1.05 times the other's, for o, dx, drouter and every dW."""
    for name, ratio in pooled_errors(recipe, "normal", 3).items():
        assert 1 / 1.05 <= ratio <= 1.05, f"{name}: {ratio:.3f}"


@pytest.mark.parametrize("kind", ["student", "outliers"])
def test_errors_with_outlying_tokens_and_channels(kind: str) -> None:
    """The same for o and every dW. The router's gradient, and dx with it, depend on few tokens; the next test has the scores' gradients."""
    for name, ratio in pooled_errors("mxfp8_wgrad_with_hp", kind, 3).items():
        assert name in ("dx", "router.gate.weight") or 1 / 1.05 <= ratio <= 1.05, f"{name}: {ratio:.3f}"


@pytest.mark.parametrize("kind", ["normal", "student", "outliers"])
def test_errors_of_the_scores_gradient_are_those_of_the_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layer makes it from h and its gradient on the experts' rank, the blocks from the returned outputs: equal median errors."""
    of_fused = spy_on(monkeypatch, autograd, "router_gradients")
    errors: dict[str, list[Tensor]] = {"fused": [], "blocks": []}
    for seed in range(3):
        blocks, fused = both("mxfp8_wgrad_with_hp", seed=seed, dim=128)
        x, dy = tokens(600, kind=kind, width=128)
        routing = blocks.router(x)
        routing.scores.retain_grad()
        monkeypatch.setattr(blocks.router, "forward", lambda *args, routing=routing: routing)
        blocks(x).backward(dy)
        walk(fused, x, dy)
        parameters = {name: value.detach().double() for name, value in blocks.named_parameters()}
        want = choice_gradients(blocks, parameters, x.double(), dy.double(), routing.experts)
        in_order = of_fused.call_args.args[2]  # the fused layer has a token's choices in the order of the experts
        as_chosen = in_order.gather(1, routing.experts.argsort(1).argsort(1))
        for name, got in (("fused", as_chosen), ("blocks", routing.scores.grad)):
            errors[name].append((got.double() - want).abs().flatten())
    ours, theirs = (torch.cat(errors[name]) for name in errors)
    assert 1 / 1.05 <= float(ours.median() / theirs.median()) <= 1.05
    assert 1 / 1.05 <= float((ours / theirs).log().mean().exp()) <= 1.05


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8", "hp"])
def test_activations_and_biases(recipe: str, activation: str) -> None:
    """Not worse than the blocks, which round gate, up and their product to hp. The fused layer keeps float32: better in "hp" and db2."""
    changes = {"expert_biases": True, "score_function": "sigmoid", "route_scale": 1.5, **ACTIVATIONS[activation]}
    for name, ratio in pooled_errors(recipe, "normal", 3, **changes).items():
        assert ratio <= 1.05, f"{name}: {ratio:.3f}"


def test_a_layer_without_a_router_loss_keeps_no_saved_tensors_alive() -> None:
    """Its loss of 0 has no autograd graph, so the saved tensors are freed with the output (GPU memory; streams of a CUDA graph)."""
    x, _ = tokens(40)
    for factor in (0.0, 0.01):
        moe = make(FusedMoE, "mxfp8_wgrad_with_hp", balance_loss=factor)
        y = moe(x.clone().requires_grad_())
        assert moe.router_loss.requires_grad == (factor > 0)
        node = y.grad_fn
        while not autograd.is_fused(node):
            node = node.next_functions[0][0]
        saved = weakref.ref(node)
        gc.disable()
        try:
            del y, node
            assert (saved() is None) == (factor == 0)
        finally:
            gc.enable()


def test_outputs_are_a_function_of_their_own_under_hooks_alone() -> None:
    """A checkpoint sets such hooks, and then need not make the outputs again.  The values are the same."""
    x, _ = tokens(40)
    moe, found = make(FusedMoE, "mxfp8_wgrad_with_hp"), []
    for hooks in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if hooks else nullcontext():
            leaf = x.clone().requires_grad_()
            y = moe(leaf)
        node, between = y.grad_fn, list[str]()
        while not autograd.is_fused(node):
            between.append(type(node).__name__)
            node = node.next_functions[0][0]
        assert ("_OutputsBackward" in between) == hooks
        (grad,) = torch.autograd.grad(y.square().sum(), leaf)
        found.append((y, grad))
    for value, again in zip(*found, strict=True):
        assert torch.equal(value, again)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_the_function_has_the_modules_numbers(recipe: str, layout: str) -> None:
    """w1 is joined. Gate and up interleaved in one MX block of 32 change the rounding of MX gradients, and nothing in high precision."""
    check_joined(recipe, layout, assert_same)


def check_joined(recipe: str, layout: str, same: Callable[[Tensor, Tensor, str], None]) -> None:
    """`same` is for gradients that a GPU may sum in another order."""
    moe = make(FusedMoE, recipe, expert_biases=True)
    x, dy = tokens(200)
    want = walk(moe, x, dy)
    own = moe.experts
    join = (lambda a, b: torch.cat((a, b), 1)) if layout == "concatenated" else (lambda a, b: torch.stack((a, b), 2).flatten(1, 2))
    w1, b1 = (join(*(value.detach() for value in pair)).requires_grad_() for pair in ((own.w1, own.w3), (own.b1, own.b3)))
    leaves = x.clone().requires_grad_(), moe.router.gate.weight, w1, b1, own.w2, own.b2
    y = fused_moe(*leaves, C, E, RuntimeEPConfig(), group="", recipe=recipe, layout=layout)
    assert_same(y.detach(), want["y"])
    got = dict(zip(("dx", "router.gate.weight", "w1", "b1", "experts.w2", "experts.b2"), torch.autograd.grad(y, leaves, dy), strict=True))
    for name, parts in (("w1", ("w1", "w3")), ("b1", ("b1", "b3"))):
        apart = got.pop(name).chunk(2, 1) if layout == "concatenated" else (got[name][:, 0::2], got.pop(name)[:, 1::2])
        got |= {f"experts.{part}": value.contiguous() for part, value in zip(parts, apart, strict=True)}
    for name, value in got.items():
        if layout == "concatenated" or name in ("experts.w2", "experts.b2", "router.gate.weight"):
            same(value, want[name], name)
        else:
            assert error(value, want[name].double()) < (0.06 if recipe != "hp" else 1e-2), name


def test_modes_on_one_rank_agree() -> None:
    """All modes dispatch the same bytes. The combine mode decides how often a sum is rounded, which float32 hardly shows."""
    x, dy = tokens(150, torch.float32)
    moe = make(FusedMoE, "mxfp8_wgrad_with_hp", torch.float32, expert_biases=True)
    want = walk(moe, x, dy)
    for dispatch in DISPATCH:
        for combine in COMBINE:
            moe.runtime = RuntimeEPConfig(dispatch, combine)
            for name, got in walk(moe, x, dy).items():
                torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changed", ["combine_forward", "dispatch_backward"])
def test_sums_in_mxfp8_on_the_wire(changed: str) -> None:
    """An error of 31 dB in the sum that is exchanged, and none elsewhere."""
    x, dy = tokens(300)
    moe = make(FusedMoE, "hp")
    want = walk(moe, x, dy)
    for mode in DISPATCH if changed == "dispatch_backward" else COMBINE:
        moe.runtime = RuntimeEPConfig(**{changed: "mxfp8", "dispatch" if changed == "dispatch_backward" else "combine": mode})
        got = walk(moe, x, dy)
        hit = "y" if changed == "combine_forward" else "dx"
        assert 0.005 < error(got[hit], want[hit].double()) < 0.03
        for name in want:
            if name != hit:
                assert error(got[name], want[name].double()) < 1e-3 if mode != "rank_dedup" else torch.equal(got[name], want[name]), name


def test_precisions_of_the_exchanges_override_the_recipe() -> None:
    x, dy = tokens(100)
    moe = make(FusedMoE, "mxfp8_gemm")
    want = walk(make(FusedMoE, "mxfp8_wgrad_with_hp"), x, dy)
    moe.runtime = RuntimeEPConfig(dispatch_forward="mxfp8", combine_backward="mxfp8")
    for name, got in walk(moe, x, dy).items():
        assert_same(got, want[name], name)
    moe.experts.recipe = "hp"
    with raises_naming("gemm='hp' with an MXFP8 dispatch"):
        moe(x)


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_repeated_recomputed_checkpointed_and_cached_steps_have_the_same_bits(recipe: str) -> None:
    x, dy = tokens(130)
    moe = make(FusedMoE, recipe, expert_biases=True)
    want = walk(moe, x, dy)

    def same() -> None:
        for name, got in walk(moe, x, dy).items():
            assert_same(got, want[name], name)

    same()
    for keeps, redispatches in ((False, False), (True, True), (False, True)):
        moe.runtime = replace(moe.runtime, keep_first_product=keeps, redispatch_x_in_backward=redispatches)
        same()
    leaf = x.clone().requires_grad_()
    checkpoint(moe, leaf, use_reentrant=False).backward(dy)
    assert_same(leaf.grad, want["dx"])
    if resolve_recipe(recipe).gemm == "mxfp8":
        cache = cache_quantized_weights(moe, torch.optim.SGD(moe.parameters(), lr=0.1))
        same()
        both = GEMM_PATHS[resolve_gemm_path("auto", x.device)].granularity is not None  # one kernel makes both forms of a weight
        assert cache.fills == (2 if both else 4)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_gemm_wgrad_with_mx", "hp"])
@pytest.mark.parametrize("rows", ["auto", 96], ids=["one", "chunks"])
def test_frozen_parts(rows: Any, recipe: str) -> None:
    """A gradient that is not asked for changes no other one."""
    check_frozen_parts(recipe, assert_same, rows)


def check_frozen_parts(recipe: str, same: Callable[[Tensor, Tensor, str], None], rows: Any = "auto") -> None:
    """On a GPU the scores' gradients are summed by tiles, whose shape depends on the other gradients that are asked for."""
    x, dy = tokens(90)
    moe = make(FusedMoE, recipe, expert_biases=True)
    moe.runtime = RuntimeEPConfig(scratch_rows=rows)
    want = walk(moe, x, dy)
    names = [name for name, _ in moe.named_parameters()]
    for chosen in (["experts.b2"], ["experts.w3"], ["experts.w2"], ["router.gate.weight"], ["experts.b1", "experts.b3"], names, []):
        for keep in (True, False):
            moe.runtime = RuntimeEPConfig(keep_first_product=keep, redispatch_x_in_backward=not keep, scratch_rows=rows)
            for name, parameter in moe.named_parameters():
                parameter.requires_grad_(name in chosen)
            for needs_x in (True, False):
                if not chosen and not needs_x:
                    continue
                leaf = x.clone().requires_grad_(needs_x)
                found = dict(zip(names, moe.parameters(), strict=True))
                leaves = {"dx": leaf} if needs_x else {}
                leaves |= {name: found[name] for name in chosen}
                for name, got in zip(leaves, torch.autograd.grad(moe(leaf), list(leaves.values()), dy), strict=True):
                    same(got, want[name], f"{chosen} {name}")


def test_saved_bytes() -> None:
    """Saved are the dispatched bytes, the first product and index maps, but no tokens in expert order; in inference nothing is saved."""
    x, _ = tokens(160)
    expert_rows = round_up(160 * C + E * 32, 32)
    moe = make(FusedMoE, "mxfp8_wgrad_with_hp")
    kept = saved_bytes(moe(x))
    assert kept["input"] == x.nbytes
    assert kept["dispatched tokens"] == 160 * record_bytes(D)
    assert kept["first product"] == expert_rows * 2 * H * 2
    assert kept["routing"] < 160 * E * 4 + 160 * C * 20 + expert_rows * 12 + 8 * E
    moe.runtime = RuntimeEPConfig(keep_first_product=False)
    assert saved_bytes(moe(x)) == kept | {"first product": 0}
    moe.runtime = RuntimeEPConfig(redispatch_x_in_backward=True)
    assert saved_bytes(moe(x)) == kept | {"dispatched tokens": 0}
    with saved_tensors() as saved:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                y = moe(x)
            assert not saved
            with raises_naming("saved_bytes"):
                saved_bytes(y)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "hp"])
@pytest.mark.usefixtures("poison")
def test_few_tokens_and_all_tokens_at_one_expert(recipe: str) -> None:
    for count in (0, 1, 31, 33):
        for favourite in (None, 2):
            blocks, fused = both(recipe, top_k=1, renormalize=False, expert_biases=True)
            for moe in (blocks, fused):
                if favourite is not None:
                    moe.expert_bias[favourite] = 10
            x, dy = tokens(count)
            for (name, got), of_blocks in zip(walk(fused, x, dy).items(), walk(blocks, x, dy).values(), strict=True):
                assert got.shape == of_blocks.shape
                assert error(got, of_blocks.double()) < 0.1 or not of_blocks.any(), name
                assert got.any() or not of_blocks.any(), name
    leading = make(FusedMoE, recipe)
    x = torch.randn(2, 9, D).bfloat16()
    assert torch.equal(leading(x).flatten(0, 1), leading(x.flatten(0, 1)))


@pytest.mark.parametrize("rows", ["auto", 64], ids=["one", "chunks"])
@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_nan_stays_with_its_token_and_its_experts(recipe: str, rows: Any) -> None:
    moe = make(FusedMoE, recipe, torch.float32)
    moe.runtime = RuntimeEPConfig(scratch_rows=rows)
    x, dy = tokens(50, torch.float32)
    x[7, 3] = float("nan")
    got, others = walk(moe, x, dy), torch.arange(50) != 7
    assert got["y"][7].isnan().all()
    assert got["y"][others].isfinite().all()
    assert got["dx"][others].isfinite().all()
    poisoned = torch.zeros(E, dtype=torch.bool)
    poisoned[moe.router(x).experts[7]] = True
    for name in ("experts.w1", "experts.w2", "experts.w3"):
        assert torch.equal(got[name].isnan().flatten(1).any(1), poisoned), name


def test_the_module_has_the_attributes_of_moe() -> None:
    """Router loss with its gradient, load, shared experts, state: what MoE has."""
    moe, fused = both("hp", torch.float32, balance_loss=0.1, z_loss=0.01, num_shared_experts=1)
    fused.load_state_dict(moe.state_dict())
    x, dy = tokens(60, torch.float32)
    results = []
    for layer in (moe, fused):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        results.append([y.detach(), *torch.autograd.grad((y * dy).sum() + layer.router_loss, [leaf, *layer.parameters()])])
        assert layer.tokens_per_expert.sum() == 60 * C
    for got, want in zip(*results[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    copy.deepcopy(fused)(x)


def test_gradients_of_the_output_or_of_the_losses_alone() -> None:
    """A missing gradient equals a gradient of zeros."""
    x, dy = tokens(60, torch.float32)

    def gradients(scale: float | None, with_losses: bool, **losses: float) -> list[Tensor]:
        layer = make(FusedMoE, "hp", torch.float32, **losses)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        terms = [] if scale is None else [(y * dy).sum() * scale]
        total: Tensor = sum(terms + ([layer.router_loss] if with_losses else []))  # type: ignore[assignment]
        return list(torch.autograd.grad(total, [leaf, *layer.parameters()]))

    on = {"balance_loss": 0.1, "z_loss": 0.01}
    alone = gradients(None, True, **on)
    assert alone[0].any()
    for got, want in ((gradients(1.0, False, **on), gradients(1.0, False)), (alone, gradients(0.0, True, **on))):
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


def test_the_routers_product_is_in_float32_for_bf16_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients too: with the experts' part the same, d gate is that of float64 to float32's precision, and bf16's is not."""
    generator = torch.Generator().manual_seed(5)
    x, w1, w2 = (draw(generator, *shape).bfloat16() for shape in ((400, D), (E, 2 * H, D), (E, D, H)))
    router = draw(generator, E, D) / D**0.5
    chosen = (x.double() @ router.double().T).topk(C).indices
    found, asked, original = {}, list[Tensor](), autograd.router_gradients

    def spied(*given: object) -> Tensor:
        asked.append(original(*given))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(autograd, "router_gradients", spied)
    for router_dtype in ("fp32", "bf16"):
        leaf = router.clone().requires_grad_()
        moe = make(FusedMoE, "hp", torch.float32, router_dtype=router_dtype)
        moe.router.gate.weight.data.copy_(router)
        moe(x)
        load = moe.tokens_per_expert
        y = fused_moe(x, leaf, w1 / D**0.5, None, w2 / H**0.5, None, C, E, group="", recipe="hp", router_dtype=router_dtype)
        y.backward(x)
        assert asked[-1].dtype == (torch.float32 if router_dtype == "fp32" else torch.bfloat16)
        found[router_dtype] = error(leaf.grad, asked[-1].double().T @ x.double())
        assert torch.equal(load.long(), torch.bincount(chosen.flatten(), minlength=E)) == (router_dtype == "fp32")
    assert found["fp32"] < 1e-6 < 1e-4 < found["bf16"]
    with raises_naming("router_dtype='tf32'", "want 'fp32' or 'bf16'"):
        fused_moe(x, router, w1, None, w2, None, C, E, group="", router_dtype="tf32")  # type: ignore[arg-type]


def test_layers_of_a_model_are_fused_in_place() -> None:
    """The same parameters, names, load and bias; the loss of the model as it was."""
    model = torch.nn.Sequential(
        torch.nn.Linear(D, D), make(MoE, "hp", torch.float32, num_shared_experts=1), make(MoE, "hp", torch.float32, 1)
    )
    model[1].expert_bias[3] = 5
    x, _ = tokens(40, torch.float32)
    state, parameters, want = model.state_dict(), list(model.parameters()), model(x)
    assert fuse_layers(model, RuntimeEPConfig("all_gather")) == ["1", "2"]
    assert isinstance(model[1], FusedMoE)
    assert model[1].runtime.dispatch == "all_gather"
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert model[1].tokens_per_expert.sum() == 2 * 40 * C
    for again in (model, model[1]):
        with raises_naming("fuse_layers", "no mxep.MoE"):
            fuse_layers(again)
    with raises_naming("FusedMoE.of", "FusedExperts"):
        FusedMoE.of(model[1])
    model[1], model[2] = make(MoE, "hp"), make(MoE, "hp", scores_before_experts=True)
    with raises_naming("scores_before_experts"):
        fuse_layers(model)
    assert type(model[1]) is MoE, "all or none"


def test_torch_compile_breaks_the_graph_at_the_layer() -> None:
    moe = make(FusedMoE, "mxfp8_wgrad_with_hp")
    x, _ = tokens(40)
    compiled = torch.compile(lambda x: moe(x * 2) + 1, backend="eager")
    assert torch.equal(compiled(x), moe(x * 2) + 1)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="may read the splits of their exchanges"):
        torch.compile(moe, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_a_second_backward_is_an_error() -> None:
    moe, (x, _) = make(FusedMoE, "hp", torch.float32), tokens(5, torch.float32)
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(moe(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_wrong_input_is_an_error() -> None:
    x, router = torch.randn(5, D), torch.randn(E, D)
    w1, w2 = torch.randn(E, 2 * H, D), torch.randn(E, D, H)

    def call(
        x: Tensor = x, router: Tensor = router, w1: Tensor = w1, b1: Tensor | None = None, w2: Tensor = w2, **options: object
    ) -> Tensor:
        return fused_moe(x, router, w1, b1, w2, None, options.pop("top_k", C), E, group="", **options)  # type: ignore[arg-type]

    for words, given in (
        (("input is torch.float64", "want bfloat16"), {"x": x.double()}),
        (("router_weight is (7, 64)", "want (8, 64)"), {"router": router[:7]}),
        (("w1 is (8, 191, 64)", "want (8, 192, 64)"), {"w1": w1[:, 1:]}),
        (("w1 is (8, 192, 64)", "want (8, 96, 64)", "relu2"), {"activation": "relu2"}),
        (("b1 is (8, 96)", "want (8, 192)"), {"b1": torch.randn(E, H)}),
        (("w2 is (4, 64, 96)", "want (8, 64, 96)"), {"w2": w2[:4]}),
        (("w2 is (96,)", "(L, D, H)"), {"w2": w2[0, 0]}),
        (("H = 80", "multiple of 32"), {"w1": w1[:, :160], "w2": w2[..., :80]}),
        (("width in multiples of 32",), {"x": x[:, :40], "router": router[:, :40], "w1": w1[..., :40], "w2": w2[:, :40]}),
        (("top_k=9",), {"top_k": 9}),
        (("activation='tanh'",), {"activation": "tanh"}),
        (("layout='halves'",), {"layout": "halves"}),
        (("w1 is (4, 192, 64)", "want (8, 192, 64)"), {"w1": w1[:4], "w2": w2[:4]}),
        (("'mxfp9' is unknown",), {"recipe": "mxfp9"}),
        (("config is a dict", "want a RuntimeEPConfig", "RuntimeEPConfig(**"), {"config": {"dispatch": "all_gather"}}),
        (("gemm_path='blackwell'",), {"recipe": Recipe("mine", gemm_path="blackwell")}),
    ):
        with raises_naming(*words):
            call(**given)  # type: ignore[arg-type]
    with raises_naming("init_process_group"):
        fused_moe(x, router, w1, None, w2, None, C, E)
    with raises_naming("scores_before_experts", "use MoE"):
        make(FusedMoE, "hp", scores_before_experts=True)
    assert isinstance(make(FusedMoE, "hp"), MoE)


def test_a_router_that_would_not_run_is_an_error() -> None:
    """A bias of the gate, another router, and hooks: the layer reads the gate's weight and runs neither module."""

    class Other(Router):
        pass

    def biased(layer: MoE) -> None:
        layer.router.gate = nn.Linear(D, E)

    def replaced(layer: MoE) -> None:
        layer.router = Other(layer.config)
        layer.router.forward = lambda *arguments: None  # type: ignore[method-assign]

    def hooked(layer: MoE) -> None:
        layer.router.register_forward_hook(lambda *arguments: None)

    def hooked_gate(layer: MoE) -> None:
        layer.router.gate.register_forward_pre_hook(lambda *arguments: None)

    changes = {
        biased: "has a bias",
        replaced: "router is a Other with a forward",
        hooked: "router has hooks",
        hooked_gate: "gate has hooks",
    }
    for change, says in changes.items():
        layer = FusedMoE(MoEConfig(D, H, E, C))
        change(layer)
        with pytest.raises(ValueError, match=says):
            layer(torch.randn(4, D))
        layer = MoE(MoEConfig(D, H, E, C))
        change(layer)
        with pytest.raises(ValueError, match=r"FusedMoE\.of: "):
            FusedMoE.of(layer)


def test_fusing_refuses_hooks_and_attributes_that_it_would_lose() -> None:
    def hook(*arguments: object) -> None:
        pass

    changes: list[tuple[Callable[[MoE], object], str]] = [
        (lambda layer: layer.experts.register_load_state_dict_pre_hook(hook), "_load_state_dict_pre_hooks"),
        (lambda layer: layer.register_state_dict_pre_hook(hook), "_state_dict_pre_hooks"),
        (lambda layer: setattr(layer, "more", nn.Linear(2, 2)), "MoE has more"),
        (lambda layer: layer.experts.register_buffer("kept", torch.ones(1)), "Experts has kept"),
    ]
    for change, lost in changes:
        layer = MoE(MoEConfig(D, H, E, C))
        change(layer)
        with pytest.raises(ValueError, match=f"{lost}.*, which would be lost"):
            FusedMoE.of(layer)
