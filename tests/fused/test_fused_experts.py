"""`fused_experts` with given choices: the bits of the layer whose router makes the same choices, errors against float64, several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fused.test_fused_ranks import KINDS, batch, layer
from tests.fused.test_fused_symmetric import gather_without_a_process_group, spread  # noqa: F401  a fixture
from tests.moe_truth import C, D, E, H, draw, error_ratios, make, truth
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.spies import spy_on
from tests.truth import assert_same, raises_naming
from tests.virtual import collective_group, run_virtual
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mxep.fused import autograd
from mxep.fused import options as fused_options
from mxep.moe import FusedMoE, MoE, RuntimeEPConfig, SwiGLU, fused_experts, fused_moe, saved_bytes
from mxep.moe.router import logits_of, route_without_gradient
from mxep.recipe import RECIPES
from mxep.shapes import round_up


def shuffled(experts: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same choices, in a random order for each token."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(experts.shape, generator=generator, device="cpu").to(experts.device).argsort(1)
    return experts.gather(1, order), scores.gather(1, order).detach().requires_grad_()


def joined(moe: MoE) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """w1, b1, w2, b2 of a layer's experts as the functions take them."""
    own = moe.experts
    w1, w2 = own.w1 if own.w3 is None else torch.cat((own.w1, own.w3), 1), own.w2
    b1 = own.b1 if own.b1 is None or own.b3 is None else torch.cat((own.b1, own.b3), 1)
    return tuple(None if w is None else w.detach().requires_grad_() for w in (w1, b1, w2, own.b2))  # type: ignore[return-value]


def gradients(y: Tensor, dy: Tensor, **leaves: Tensor | None) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    return {"y": y.detach(), **dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), dy), strict=True))}


def check_bits(
    recipe: str,
    dtype: torch.dtype,
    config: RuntimeEPConfig,
    monkeypatch: pytest.MonkeyPatch,
    same: Callable[[Tensor, Tensor, str], None] = assert_same,
) -> None:
    """y and every gradient but that of x, which lacks the router's part, are those of `fused_moe`; `same` is for gradients."""
    moe, generator = make(FusedMoE, recipe, dtype, expert_biases=True), torch.Generator().manual_seed(7)
    x, dy = (draw(generator, 150, D).to(dtype) for _ in range(2))
    router, options = moe.router.gate.weight.detach().requires_grad_(), {"group": "", "recipe": recipe}
    of_router = spy_on(monkeypatch, autograd, "router_gradients")
    w1, b1, w2, b2 = joined(moe)
    y = fused_moe(x, router, w1, b1, w2, b2, C, E, config, **options)  # type: ignore[arg-type]
    want = gradients(y, dy, router=router, w1=w1, b1=b1, w2=w2, b2=b2)
    routing = route_without_gradient(logits_of(x, router, "fp32"), None, replace(moe.config, renormalize=True))
    experts, scores = shuffled(routing.experts, routing.scores)
    y = fused_experts(x, experts, scores, w1, b1, w2, b2, E, config, **options)  # type: ignore[arg-type]
    assert sum(saved_bytes(y).values()) > 0
    got = gradients(y, dy, scores=scores, w1=w1, b1=b1, w2=w2, b2=b2)
    with pytest.raises(ValueError, match="saved_bytes: the backward of this tensor has freed what was kept"):
        saved_bytes(y)
    d_scores = of_router.call_args.args[2]  # there a token's choices are in the experts' order
    want["scores"] = d_scores.gather(1, experts.argsort(1).argsort(1))
    for name, value in got.items():
        (assert_same if name == "y" else same)(value, want[name], name)


@pytest.mark.parametrize(
    "config", [RuntimeEPConfig(), RuntimeEPConfig("all_to_all", "all_to_all", scratch_rows=160)], ids=["one", "chunks"]
)
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_the_bits_of_the_layer_with_its_router(recipe: str, config: RuntimeEPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits(recipe, torch.bfloat16, config, monkeypatch)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_separate_gate_and_up(recipe: str) -> None:
    """The bits of the joined ones."""
    moe, generator = make(FusedMoE, recipe, expert_biases=True), torch.Generator().manual_seed(7)
    x, dy = (draw(generator, 150, D).bfloat16() for _ in range(2))
    best, (w1, b1, w2, b2) = draw(generator, 150, E).topk(C), joined(moe)
    choices = best.indices, best.values.softmax(-1)
    want = gradients(fused_experts(x, *choices, w1, b1, w2, b2, E, group="", recipe=recipe), dy, w1=w1, b1=b1, w2=w2, b2=b2)
    assert w1 is not None
    assert b1 is not None
    (gate, up), (b_gate, b_up) = ([half.detach().clone().requires_grad_() for half in both.chunk(2, 1)] for both in (w1, b1))
    y = fused_experts(x, *choices, gate, b_gate, w2, b2, E, group="", recipe=recipe, w3=up, b3=b_up)
    got = gradients(y, dy, gate=gate, up=up, b_gate=b_gate, b_up=b_up, w2=w2, b2=b2)
    got |= {"w1": torch.cat((got.pop("gate"), got.pop("up")), 1), "b1": torch.cat((got.pop("b_gate"), got.pop("b_up")), 1)}
    for name, value in got.items():
        assert_same(value, want[name], name)


@pytest.mark.parametrize("rows", ["auto", 160], ids=["one", "chunks"])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_weights_that_are_stored_transposed(recipe: str, rows: Any) -> None:
    """As gpt-oss stores them: the same numbers, and gradients in the same layout."""
    check_transposed(recipe, RuntimeEPConfig(scratch_rows=rows), assert_same)


def check_transposed(recipe: str, config: RuntimeEPConfig, same: Callable[[Tensor, Tensor, str], None]) -> None:
    moe, generator = make(FusedMoE, recipe, expert_biases=True), torch.Generator().manual_seed(7)
    x, dy = (draw(generator, 150, D).bfloat16() for _ in range(2))
    best, (w1, b1, w2, b2) = draw(generator, 150, E).topk(C), joined(moe)
    found: list[dict[str, Tensor]] = []
    for transposed in (False, True):
        views = [w.detach().transpose(1, 2).contiguous().requires_grad_().transpose(1, 2) if transposed else w for w in (w1, w2)]
        leaf = x.clone().requires_grad_()
        y = fused_experts(leaf, best.indices, best.values.softmax(-1), views[0], b1, views[1], b2, E, config, group="", recipe=recipe)
        found.append(gradients(y, dy, x=leaf, w1=views[0], w2=views[1], b1=b1, b2=b2))
    for name, got in found[1].items():
        same(got, found[0][name], name)
    assert all((found[1][name].transpose(1, 2)).is_contiguous() for name in ("w1", "w2"))


@pytest.mark.parametrize("rows", ["auto", 160], ids=["one", "chunks"])
@pytest.mark.parametrize("modes", [("rank_dedup", "rank_dedup"), ("all_to_all", "all_to_all"), ("all_gather", "reduce_scatter")])
def test_missing_and_repeated_experts(modes: tuple[str, str], rows: Any) -> None:
    check_missing_and_repeated_experts(modes, rows)


def check_missing_and_repeated_experts(modes: tuple[str, str], rows: Any) -> None:
    """On one rank: a choice of -1 adds nothing and has no gradient, a token may have no expert, an expert chosen twice counts twice.

    A chunk has rows for each token once per expert, so with several chunks no expert is chosen twice.
    """
    moe, generator = make(FusedMoE, "hp", torch.float32, expert_biases=True), torch.Generator().manual_seed(7)
    x, dy = (draw(generator, 150, D) for _ in range(2))
    experts, scores, none = draw(generator, 150, E).topk(C).indices, draw(generator, 150, C).sigmoid(), draw(generator, 150, C) < -0.5
    none[5] = True
    if rows == "auto":
        experts[::2], none[7] = 3, False  # more rows than tokens for one expert
    leaf, given, weights = x.clone().requires_grad_(), scores.clone().requires_grad_(), joined(moe)
    y = fused_experts(
        leaf, experts.masked_fill(none, -1), given, *weights, E, RuntimeEPConfig(*modes, scratch_rows=rows), group="", recipe="hp"
    )
    got = gradients(y, dy, x=leaf, scores=given, **dict(zip(("w1", "b1", "w2", "b2"), weights, strict=True)))
    w1, b1, w2, b2 = (w.detach().double().requires_grad_() for w in weights if w is not None)
    leaf, given = x.double().requires_grad_(), scores.double().requires_grad_()
    first = torch.einsum("td,tchd->tch", leaf, w1[experts]) + b1[experts]
    gate, up = first.chunk(2, -1)
    out = torch.einsum("tch,tcdh->tcd", torch.nn.functional.silu(gate) * up, w2[experts]) + b2[experts]
    want = gradients((given.masked_fill(none, 0)[..., None] * out).sum(1), dy.double(), x=leaf, scores=given, w1=w1, b1=b1, w2=w2, b2=b2)
    for name, value in got.items():
        torch.testing.assert_close(value.double(), want[name], rtol=1e-4, atol=1e-4, msg=name)
    assert not got["y"][5].any()
    assert not got["scores"][none].any()


def check_errors_with_a_plain_router(recipe: str) -> None:
    """With a router in plain torch each error against float64 is at most 1.05 times that of the whole layer."""
    results = []
    for seed in range(3):
        moe, generator = make(FusedMoE, recipe, seed=seed), torch.Generator().manual_seed(seed)
        x, dy = (draw(generator, 400, D).bfloat16() for _ in range(2))
        leaf, gate, (w1, b1, w2, b2) = x.clone().requires_grad_(), moe.router.gate.weight.detach().requires_grad_(), joined(moe)
        best = torch.nn.functional.linear(leaf, gate).float().topk(C)
        y = fused_experts(leaf, best.indices, best.values.softmax(-1), w1, b1, w2, b2, E, group="", recipe=recipe)
        got = gradients(y, dy, dx=leaf, router=gate, w1=w1, w2=w2)
        leaf = x.clone().requires_grad_()
        y = fused_moe(leaf, gate, w1, b1, w2, b2, C, E, group="", recipe=recipe)
        of_layer = gradients(y, dy, dx=leaf, router=gate, w1=w1, w2=w2)
        want = truth(moe, x, dy, best.indices)
        want |= {"router": want["router.gate.weight"], "w2": want["experts.w2"]}
        want["w1"] = torch.cat((want["experts.w1"], want["experts.w3"]), 1)
        results.append((got, of_layer, want))
    for name, ratio in error_ratios(results).items():
        assert ratio <= 1.05, f"{name}: {ratio:.3f}"


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "hp"])
def test_errors_with_a_plain_router(recipe: str) -> None:
    check_errors_with_a_plain_router(recipe)


@pytest.mark.parametrize("wanted", ["x", "scores", "w1", "w2", "b2", ""])
def test_one_gradient_alone(wanted: str) -> None:
    """A gradient alone has the bits that it has together with all others; inputs have leading dimensions and scores in bf16."""
    moe = make(FusedMoE, "mxfp8_wgrad_with_hp", expert_biases=True)
    generator = torch.Generator().manual_seed(7)
    x, dy = (draw(generator, 2, 30, D).bfloat16() for _ in range(2))
    best = draw(generator, 2, 30, E).topk(C)
    scores = best.values.softmax(-1).bfloat16()
    results = list[tuple[Tensor, dict[str, Tensor | None]]]()
    for every in (True, False):
        w1, b1, w2, b2 = joined(moe)
        leaves = {"x": x, "scores": scores, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
        asked = {name: None if leaf is None else leaf.detach().requires_grad_(every or name == wanted) for name, leaf in leaves.items()}
        x_leaf, scores_leaf, *weights = asked.values()
        y = fused_experts(x_leaf, best.indices, scores_leaf, *weights, E, group="")  # type: ignore[arg-type, misc]
        assert (y.shape, y.requires_grad) == (x.shape, every or bool(wanted))
        if y.requires_grad:
            y.backward(dy)
        results.append((y.detach(), asked))
    (y, leaves), (alone, frozen) = results
    assert_same(alone, y)
    for name, leaf in frozen.items():
        if name == wanted:
            assert_same(leaf.grad, leaves[name].grad, name)  # type: ignore[union-attr]
        else:
            assert leaf is None or leaf.grad is None, name


@pytest.mark.parametrize("wanted", ["x", "scores"])
def test_saved_bytes_of_the_choices(wanted: str) -> None:
    """Saved are the rows of the choices and, in two bytes each, the positions of their scores, but not the choices: there is no router."""
    moe, generator = make(FusedMoE, "hp"), torch.Generator().manual_seed(7)
    best, x = draw(generator, 160, E).topk(C), draw(generator, 160, D).bfloat16().requires_grad_(wanted == "x")
    w1, b1, w2, b2 = joined(moe)
    y = fused_experts(x, best.indices, best.values.requires_grad_(wanted == "scores"), w1, b1, w2, b2, E, group="", recipe="hp")
    rows = round_up(160 * C + E * 32, 32)
    assert saved_bytes(y)["routing"] == rows * (4 + 4) + E * 4 + 160 * C * (4 + 2 * (wanted == "scores"))


_ALLOCATIONS_AND_VIEWS = {"empty", "new_empty", "new_empty_strided", "slice", "view", "transpose", "detach"}


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8", "hp"])
def test_torch_launches_no_kernels_of_its_own(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the package's operators torch only allocates and makes views. The choices take one operator, their gradient another."""
    monkeypatch.setattr(fused_options, "values_checked", lambda tensor: False)
    moe, generator = make(FusedMoE, recipe), torch.Generator().manual_seed(7)
    best, x, dy = draw(generator, 160, E).topk(C), draw(generator, 160, D).bfloat16().requires_grad_(), draw(generator, 160, D).bfloat16()
    w1, b1, w2, b2 = joined(moe)
    scores = best.values.bfloat16().requires_grad_()
    with OperatorCalls() as calls:
        fused_experts(x, best.indices, scores, w1, b1, w2, b2, E, group="", recipe=recipe).backward(dy)
    assert scores.grad is not None
    assert set(calls.short_names("aten")) <= _ALLOCATIONS_AND_VIEWS
    routing = ("sort_topk", "index_topk", "gather_or_zero", "pack_topk")
    assert [calls.short_names("mxep").count(name) for name in routing] == [1, 1, 1, 0]


def over_ranks(rank: int, world: int) -> None:
    """Every routing on gloo ranks, some without tokens, against float64 on all tokens at once."""
    for kind in KINDS:
        x, dy = batch(world, kind, torch.float32)
        whole = layer("hp", torch.float32, kind, expert_biases=True)
        routed = [whole.router(part, whole.expert_bias) for part in x]
        want = truth(whole, torch.cat(x), torch.cat(dy), torch.cat([routing.experts for routing in routed]))
        local = E // world
        mine, sizes = slice(rank * local, (rank + 1) * local), [len(part) for part in x]
        w1, b1, w2, b2 = (None if w is None else w.detach()[mine].clone().requires_grad_() for w in joined(whole))
        leaf, gate = x[rank].clone().requires_grad_(), whole.router.gate
        routing = whole.router(leaf, whole.expert_bias)
        y = fused_experts(leaf, routing.experts, routing.scores, w1, b1, w2, b2, E, recipe="hp")
        got = gradients(y, dy[rank], dx=leaf, router=gate.weight, w1=w1, b1=b1, w2=w2, b2=b2)
        dist.all_reduce(got["router"])
        wanted = {"y": want["y"].split(sizes)[rank], "dx": want["dx"].split(sizes)[rank], "router": want["router.gate.weight"]}
        for name, parts in (("w1", ("w1", "w3")), ("b1", ("b1", "b3")), ("w2", ("w2",)), ("b2", ("b2",))):
            wanted[name] = torch.cat([want[f"experts.{part}"][mine] for part in parts], 1)
        for name, value in got.items():
            largest = float(wanted[name].abs().max()) if wanted[name].numel() else 0.0
            assert ((value.double() - wanted[name]).abs() <= 2e-5 * largest + 1e-6).all(), f"{kind} {name}"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int) -> None:
    run_ranks(over_ranks, world)


def sharded(rank: int, world: int) -> None:
    """A DTensor, as expert parallelism shards a weight, is an error: the rank's own part is wanted."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    w1, w2 = (distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for shape in ((E, 2 * H, D), (E, D, H)))
    experts, scores = torch.arange(C).expand(5, C), torch.zeros(5, C)
    with raises_naming("fused_experts", "w1 is a DTensor", "pass w1.to_local()"):
        fused_experts(torch.zeros(5, D), experts, scores, w1, None, w2, None, E)


def test_sharded_weights_raise() -> None:
    run_ranks(sharded, 2)


def over_symmetric_memory(me: int, world: int, name: str) -> None:
    plain = collective_group(name)
    for kind in KINDS:
        x, dy = batch(world, kind, torch.bfloat16)
        moe = spread(layer("mxfp8_wgrad_with_hp", torch.bfloat16, kind, expert_biases=True), me, world, name)
        routing = route_without_gradient(moe.router.gate(x[me]), moe.expert_bias, moe.config)
        results = []
        for group in (name, plain):
            leaf, (experts, scores), (w1, b1, w2, b2) = (
                x[me].clone().requires_grad_(),
                shuffled(routing.experts, routing.scores),
                joined(moe),
            )
            y = fused_experts(leaf, experts, scores, w1, b1, w2, b2, E, group=group)
            results.append(gradients(y, dy[me], dx=leaf, scores=scores, w1=w1, b1=b1, w2=w2, b2=b2))
        for key, value in results[0].items():
            assert_same(value, results[1][key], f"{kind} {key}")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.usefixtures("poison", "gather_without_a_process_group")
def test_transports_have_the_same_bits(world: int) -> None:
    run_virtual(over_symmetric_memory, world)


def test_wrong_choices_raise() -> None:
    x, w1, w2 = torch.zeros(5, D), torch.zeros(E, 2 * H, D), torch.zeros(E, D, H)
    experts, scores = torch.arange(C).expand(5, C).contiguous(), torch.zeros(5, C)

    def call(tokens: Tensor = x, experts: Tensor = experts, scores: Tensor = scores, num_experts: int = E, **options: Any) -> Tensor:
        return fused_experts(tokens, experts, scores, w1, None, w2, None, num_experts, group="", recipe="hp", **options)

    assert call().shape == x.shape
    shapes = "want (..., C) int64 and float for 5 tokens"
    for wrong in (experts[:4], experts.int(), experts.double(), experts.flatten(), torch.zeros(5, 0, dtype=torch.int64), torch.tensor(1)):
        with raises_naming("fused_experts", f"experts {tuple(wrong.shape)} {wrong.dtype}", shapes):
            call(experts=wrong)
    for wrong in (scores[:, :1], scores.long(), scores.to("meta")):
        with raises_naming("fused_experts", f"scores {tuple(wrong.shape)} {wrong.dtype} on {wrong.device}", shapes):
            call(scores=wrong)
    with raises_naming("fused_experts", shapes, f"C from 1 to {C - 1}"):
        call(num_experts=C - 1)
    for change, got in ((-2, "experts from -2 to 2"), (E, f"experts from 0 to {E}")):
        wrong = experts.clone()
        wrong[3, 0] = change
        with raises_naming("fused_experts", got, f"want experts of 0 to {E - 1}, or -1 for none, for each token"):
            call(experts=wrong)
    wrong = experts.clone()
    wrong[3, 2] = 1
    assert call(experts=wrong).shape == x.shape
    with raises_naming("fused_experts", "experts from 0 to 2, one of them twice for a token", f"want C different ones of 0 to {E - 1}"):
        call(experts=wrong, config=RuntimeEPConfig(scratch_rows=160))
    with raises_naming("fused_experts: activation='gelu'", "want one of swiglu, geglu"):
        call(activation="gelu")
    layer_with_no_runtime = make(FusedMoE, "hp", torch.float32)
    layer_with_no_runtime.runtime = "fast"
    with raises_naming("FusedMoE: runtime is a bool", "RuntimeEPConfig(**options)"):
        FusedMoE(layer_with_no_runtime.config, runtime=False)  # type: ignore[arg-type]
    with raises_naming("fused_moe: config is a str", "RuntimeEPConfig(**options)"):
        layer_with_no_runtime(x)
    for options, words in (
        ({"layout": "joined"}, ("layout='joined'", "interleaved")),
        ({"config": "fast"}, ("config is a str", "RuntimeEPConfig(**options)")),
        ({"activation": "relu2"}, (f"w1 is ({E}, {2 * H}, {D})", f"want ({E}, {H}, {D})")),
        ({"tokens": x.half()}, ("torch.float16", "cast it first")),
        ({"w3": torch.zeros(E, H, D), "layout": "interleaved"}, ("w3 with layout='interleaved'", "not concatenated")),
        ({"w3": torch.zeros(E, H, D), "activation": "relu2"}, ("w3 with", "activation='relu2'")),
        ({"b3": torch.zeros(E, H)}, ("b3 without w3",)),
        ({"w3": torch.zeros(E, H, D)}, (f"w1 is ({E}, {2 * H}, {D})", f"want ({E}, {H}, {D})")),
        ({"num_experts": 2 * E}, (f"want ({2 * E}, {2 * H}, {D})",)),
    ):
        with raises_naming("fused_experts", *words):
            call(**options)
    for where, call_of in (
        ("fused_experts", call),
        ("fused_moe", lambda **o: fused_moe(x, torch.zeros(E, D), w1, None, w2, None, C, E, group="", recipe="hp", **o)),
    ):
        with raises_naming(f"{where}: swiglu=(7.0,)", "want a mxep.SwiGLU"):
            call_of(swiglu=(7.0,))
        with raises_naming(f"{where}: swiglu=SwiGLU(limit=7.0", "with activation='geglu'"):
            call_of(swiglu=SwiGLU(7.0), activation="geglu")
