"""The expert FFN's options: biases, joined weights in either layout, transposed storage, few or no rows, only some gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.activation_cases import hidden
from tests.moe_truth import error, experts_truth
from tests.ranks import run_ranks
from tests.truth import raises_naming
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxep.device import GEMM_PATHS
from mxep.grouped_mm.function import expert_mm
from mxep.grouped_mm.products import GemmOptions
from mxep.moe import MoE, MoEConfig, SharedExperts, SwiGLU, ffn
from mxep.moe.expert_mlp import ExpertWeights
from mxep.moe.experts import Experts
from mxep.moe.ffn import expert_ffn
from mxep.mx import MXTensor, quantize_mx
from mxep.ops.activation.functions import ACTIVATIONS
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD
from mxep.parallel import apply_mxfp8_expert_parallel, build_meshes, convert_experts
from mxep.recipe import resolve_recipe

P, D, H, L = 256, 128, 96, 4
COUNTS = torch.tensor([96, 0, 32, 64])  # an empty expert, and 64 rows of no expert at the end
ENDS = COUNTS.cumsum(0)
RECIPES = ("mxfp8_wgrad_with_hp", "mxfp8_gemm", "mxfp8_gemm_wgrad_with_mx")
NAMES = ("w1", "w2", "w3", "b1", "b2", "b3")
PLAIN, CLAMPED = SwiGLU(), SwiGLU(1.0, 1.702, 1.0)
FUNCTIONS = {
    "plain": {},
    "limit": {"swiglu": SwiGLU(1.0)},
    "gpt_oss": {"swiglu": CLAMPED},
    **{name: {"activation": name} for name in ACTIVATIONS if name != "swiglu"},
}


def experts(recipe: str = RECIPES[0], fused: bool = True, bias: bool = True, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Experts:
    torch.manual_seed(0)
    module = Experts(D, H, L, recipe, bias=bias, **how).to(dtype)
    module.fused = fused
    with torch.no_grad():
        for name in present(module):
            if name.startswith("b"):
                getattr(module, name).normal_()
    return module


def present(module: Experts) -> list[str]:
    """The names of its parameters: without a gate there is no w3, and no b3."""
    return [name for name in NAMES if getattr(module, name) is not None]


def rows(recipe: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, dy = torch.randn(P, D).to(dtype), torch.randn(P, D).to(dtype)
    return (x, dy) if resolve_recipe(recipe).dispatch == "hp" else (quantize_mx(x), quantize_mx(dy))


def grads(out: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_with_biases_are_those_of_the_separate_gemms(recipe: str, dtype: torch.dtype, function: str) -> None:
    x, dy = rows(recipe, dtype)
    modules = [experts(recipe, fused, True, dtype, **FUNCTIONS[function]) for fused in (True, False)]
    names = present(modules[0])
    want = experts_truth(modules[0], x, dy, COUNTS.tolist())
    results = []
    for module in modules:
        leaf = x.detach().requires_grad_()
        results.append(grads(module(leaf, COUNTS), dy, leaf, *(getattr(module, name) for name in names)))
    for name, fused, separate in zip(("y", "dx", *names), *results, strict=True):
        assert fused.dtype == separate.dtype == dtype
        assert error(fused, want[name]) <= 1.05 * error(separate, want[name]) + 1e-7, name
    for fused, _ in zip(*results, strict=True):
        assert not fused[1].any() or fused.shape[0] == P, "an empty expert has no gradient"
    assert not results[0][0][192:].any()
    assert not results[0][1][192:].any()


def test_a_bias_gradient_is_a_plain_sum() -> None:
    module, (x, dy) = experts("mxfp8_gemm"), rows("mxfp8_gemm")
    got = torch.autograd.grad(module(x, COUNTS), module.b2, dy)[0]
    want = torch.stack([part.float().sum(0) for part in dy.split([*COUNTS.tolist(), 64])[:-1]]).bfloat16()
    assert torch.equal(got, want)


@pytest.mark.parametrize("names", [("b1",), ("b3",), ("b2",), ("b1", "b2")])
def test_some_biases_are_zero_biases(names: tuple[str, ...]) -> None:
    module, (x, dy) = experts(), rows(RECIPES[0])
    for name in NAMES[3:]:
        if name not in names:
            torch.nn.init.zeros_(getattr(module, name))
    weights = ExpertWeights(module.w1, module.w2, module.w3, **{name: getattr(module, name) for name in names})
    own = [value for value in weights if isinstance(value, Tensor)]
    got = grads(expert_ffn(x, weights, ENDS, module.recipe), dy, *own)
    for a, b in zip(got, grads(module(x, COUNTS), dy, *own), strict=True):
        assert torch.equal(a, b)


def joined(module: Experts, layout: str, transposed: bool) -> ExpertWeights:
    """The same weights in one parameter, (L, 2H, D), or stored (L, D, 2H) and viewed so; new leaves."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat((a, b), 1) if layout == "concatenated" else torch.stack((a, b), 2).flatten(1, 2)

    w13, w2 = join(module.w1, module.w3).detach(), module.w2.detach()
    if transposed:
        w13, w2 = (w.transpose(1, 2).contiguous().requires_grad_().transpose(1, 2) for w in (w13, w2))
    b13 = join(module.b1, module.b3).detach()
    return ExpertWeights(w13.requires_grad_(), w2.requires_grad_(), None, b13.requires_grad_(), module.b2, None, layout)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_joined_weights_are_the_same_numbers(recipe: str, transposed: bool) -> None:
    module, (x, dy) = experts(recipe), rows(recipe)
    leaf = x.detach().requires_grad_()
    names = ("y", "dx", "w13", "w2", "b13", "b2")
    y, dx, w1, w2, w3, b1, b2, b3 = grads(module(leaf, COUNTS), dy, leaf, *(getattr(module, name) for name in NAMES))
    want = (y, dx, torch.cat((w1, w3), 1), w2, torch.cat((b1, b3), 1), b2)
    weights = joined(module, "concatenated", transposed)
    got = grads(expert_ffn(leaf, weights, ENDS, module.recipe), dy, leaf, weights.w1, weights.w2, weights.b1, weights.b2)
    for name, a, b in zip(names, got, want, strict=True):
        assert torch.equal(a, b), name
    weights = joined(module, "interleaved", transposed)
    got = grads(expert_ffn(leaf, weights, ENDS, module.recipe), dy, leaf, weights.w1, weights.w2, weights.b1, weights.b2)
    apart = got[2].unflatten(1, (H, 2)), got[4].unflatten(1, (H, 2))
    got[2], got[4] = (torch.cat((part[:, :, 0], part[:, :, 1]), 1) for part in apart)
    for name, a, b in zip(names, got, want, strict=True):
        if name in ("y", "w2", "b2", "b13") or (name == "w13" and "with_mx" not in recipe):
            assert torch.equal(a, b), name
        else:  # blocks of [dgate | dup] hold 16 gates and 16 ups
            assert error(a, b.double()) <= 0.06, name


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8", "hp"])
def test_gradients_have_the_layout_of_the_weights(recipe: str) -> None:
    """Gradients of weights that are stored transposed are made in that layout, and not transposed for the optimizer."""
    module, found = experts(recipe), list[bool]()
    x, dy = (value.dequantize() if isinstance(value, MXTensor) else value for value in rows(recipe))
    weights = [getattr(module, name).detach() for name in ("w1", "w2")]
    for turned in (False, True):
        views = [w.transpose(1, 2).contiguous().requires_grad_().transpose(1, 2) if turned else w.clone().requires_grad_() for w in weights]
        for view in views:
            view.register_hook(lambda grad, turned=turned: found.append((grad.transpose(1, 2) if turned else grad).is_contiguous()))
        h = expert_mm(expert_mm(x, views[0], ENDS, module.recipe, pad_groups=recipe == "mxfp8"), views[1], ENDS, module.recipe)
        h.backward(dy)
        if recipe in RECIPES:
            both = torch.cat((views[0].detach(), views[0].detach()), 1)
            joined = both.transpose(1, 2).contiguous().requires_grad_().transpose(1, 2) if turned else both.requires_grad_()
            joined.register_hook(lambda grad, turned=turned: found.append((grad.transpose(1, 2) if turned else grad).is_contiguous()))
            expert_ffn(x, ExpertWeights(joined, views[1].detach()), ENDS, module.recipe).backward(dy)
    assert found == [True] * (6 if recipe in RECIPES else 4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe: str) -> None:
    module = experts(recipe)
    for count in (0, 32):  # no rows, and rows of no expert
        x = torch.full((count, D), torch.nan, dtype=torch.bfloat16)
        x = (x if resolve_recipe(recipe).dispatch == "hp" else quantize_mx(x)).requires_grad_()
        y = module(x, torch.zeros_like(COUNTS))
        assert y.shape == (count, D)
        assert not y.any(), "a bias is added to the rows of its expert only"
        for grad in torch.autograd.grad(y.sum(), (x, *module.parameters())):
            assert not grad.any()


class Calls(TorchDispatchMode):
    """Records the requested forms of `activate` and `activate_backward`, and the GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.hidden: list[str] = []
        self.forms: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name()
        if name.startswith("mxep::"):
            self.names.append(name.removeprefix("mxep::"))
            if name == "mxep::activate":
                given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
                self.hidden.append((given | (kwargs or {})).get("h", "mx"))
            if "activate_backward" in name:
                self.forms.append(args[5:7])
        return func(*args, **(kwargs or {}))


def wanted() -> Iterator[tuple[str, tuple[str, ...], tuple[str, str], int]]:
    """Recipe, leaves, forms of dx and h, GEMMs of backward."""
    hp, mx = RECIPES[1:]
    yield hp, ("x", *NAMES[:3]), ("mx+hp", "hp"), 5
    yield mx, ("x", *NAMES[:3]), ("mx", "mx"), 4
    yield mx, ("x", *NAMES), ("mx", "mx"), 4
    yield hp, ("x",), ("mx", "none"), 2
    yield hp, ("w1",), ("hp", "none"), 2
    yield hp, ("w2",), ("none", "hp"), 2
    yield mx, ("w2",), ("none", "mx"), 2
    yield hp, ("b1",), ("none", "none"), 1


@pytest.mark.parametrize(("recipe", "leaves", "forms", "gemms"), list(wanted()))
def test_only_requested_gradients_are_computed(recipe: str, leaves: tuple[str, ...], forms: tuple[str, str], gemms: int) -> None:
    module, (x, dy) = experts(recipe), rows(recipe)
    every = grads(module(x.requires_grad_(), COUNTS), dy, x, *(getattr(module, name) for name in NAMES))
    want = dict(zip(("y", "x", *NAMES), every, strict=True))
    module.requires_grad_(False)
    x.requires_grad_("x" in leaves)
    own = [x if name == "x" else getattr(module, name).requires_grad_() for name in leaves]
    y = module(x, COUNTS)
    with Calls() as calls:
        got = torch.autograd.grad(y, own, dy)
    for name, grad in zip(leaves, got, strict=True):
        assert torch.equal(grad, want[name]), name
    assert calls.forms == [forms]
    assert sum(name.startswith("grouped_") for name in calls.names) == gemms


@pytest.mark.parametrize("granularity", MAX_SPREAD)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_activation_rebases_the_operands_of_fp8_gemms(recipe: str, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """h and the gradient of gate and up, as on Hopper; no gradient of a weight reads these."""
    monkeypatch.setitem(GEMM_PATHS, "reference", GEMM_PATHS["reference"]._replace(granularity=granularity))
    monkeypatch.setattr(GemmOptions, "rebased", granularity)
    module, (x, dy) = experts(recipe), rows(recipe)
    for bias in (module.b1, module.b3):  # gate and up then have the same bits in both runs
        torch.nn.init.zeros_(bias)
    held, weight_gradients = [], ffn.weight_gradients
    monkeypatch.setattr(ffn, "weight_gradients", lambda *args: (held.append(args[2].gate_up.rebased), weight_gradients(*args))[1])

    def run() -> tuple[dict[str, Tensor], Calls]:
        leaf = x.detach().requires_grad_()
        with Calls() as calls:
            found = grads(module(leaf, COUNTS), dy, leaf, *(getattr(module, name) for name in NAMES))
        return dict(zip(("y", "x", *NAMES), found, strict=True)), calls

    got, calls = run()
    assert calls.hidden == ["rebased"]
    assert calls.forms == [("mx+rebased", "mx") if resolve_recipe(recipe).wgrad == "mx" else ("rebased+hp", "hp")]
    monkeypatch.setattr(GemmOptions, "rebased", None)
    want, calls = run()
    assert calls.hidden == ["mx"]
    assert error(got["y"], want["y"]) < 1e-3
    assert error(got["x"], want["x"]) < 1e-3
    assert all(torch.equal(got[name], want[name]) for name in NAMES)
    assert held == [None, None], "memory that only dgrad reads"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "hp", "mxfp8"])
def test_compiles_without_a_break(recipe: str, fused: bool, bias: bool) -> None:
    module, (x, dy) = experts(recipe, fused, bias), rows(recipe)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for run in (module, compiled):
        leaf = x.detach().requires_grad_()
        results.append(grads(run(leaf, COUNTS), dy, leaf, *module.parameters()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    torch._dynamo.reset()


def test_a_layer_with_biases_trains() -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(64, 96, 4, 2, expert_biases=True))
    moe.init_weights(0.05)
    assert not any(getattr(moe.experts, name).any() for name in NAMES[3:])
    state = moe.state_dict()
    assert {f"experts.{name}" for name in NAMES} <= set(state)
    assert not {f"experts.{name}" for name in NAMES[3:]} & set(MoE(MoEConfig(64, 96, 4, 2)).state_dict())
    x = torch.randn(70, 64)
    first = moe(x)
    first.square().sum().backward()
    assert all(getattr(moe.experts, name).grad.any() for name in NAMES)
    torch.optim.SGD(moe.parameters(), 1e-4).step()
    assert all(getattr(moe.experts, name).any() for name in NAMES)
    assert moe(x).square().sum() < first.square().sum()


def test_a_converted_layer_keeps_its_biases() -> None:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(64, 96, 4, 2, expert_biases=True), "hp")
    moe.init_weights(0.1)
    with torch.no_grad():
        for name in NAMES[3:]:
            getattr(moe.experts, name).normal_()
    want = copy.deepcopy(moe)
    want.experts.recipe = "mxfp8_gemm"
    assert convert_experts(moe, ["experts"], "mxfp8_gemm") == ["experts"]
    x = torch.randn(40, 64)
    assert torch.equal(moe(x), want(x))


def biased_ranks(rank: int, world: int) -> None:
    """Each rank's tokens through experts on both ranks, biases sharded with the weights, against all tokens and all experts in one."""
    torch.manual_seed(0)
    moe = MoE(MoEConfig(64, 96, 4, 2, expert_biases=True), "mxfp8_gemm")
    moe.init_weights(0.1)
    with torch.no_grad():
        for name in NAMES[3:]:
            getattr(moe.experts, name).normal_()
    whole = copy.deepcopy(moe)
    apply_mxfp8_expert_parallel(moe, build_meshes(world, world, "cpu").ep)
    tokens = torch.randn(world, 40, 64)
    y, want = moe(tokens[rank]), whole(tokens.flatten(0, 1)).unflatten(0, (world, 40))
    torch.testing.assert_close(y, want[rank], rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
    want.square().sum().backward()
    for name in NAMES:
        local, every = getattr(moe.experts, name).grad.to_local(), getattr(whole.experts, name).grad
        torch.testing.assert_close(local, every.chunk(world)[rank], rtol=1e-3, atol=1e-3 * float(every.abs().max()))


def test_biases_are_sharded_with_their_experts() -> None:
    run_ranks(biased_ranks, 2)


def test_weights_that_do_not_fit_raise() -> None:
    module, x = experts(), rows("mxfp8_gemm")[0]
    w1, w2, w3, b1 = module.w1, module.w2, module.w3, module.b1
    for given, text in (
        (ExpertWeights(w1, w1, w3), r"want \(L, H, D\), \(L, D, H\)"),
        (ExpertWeights(w1, w2.float(), w3), "of one dtype"),
        (ExpertWeights(w1, w2), r"w1 \(4, 96, 128\) .* want \(L, 2H, D\), \(L, D, H\) of one dtype"),
        (ExpertWeights(w1, w2, w3, b1[:, :32]), r"b1 is \(4, 32\) torch.bfloat16, want \(4, 96\)"),
        (ExpertWeights(w1, w2, w3, layout="interleaved"), "layout='interleaved', want 'concatenated'"),
        (ExpertWeights(torch.cat((w1, w3), 1), w2, None, None, None, b1), "b3 is .* want None, as w3 is"),
        (ExpertWeights(torch.cat((w1, w3), 1), w2, layout="woven"), "layout='woven'"),
        (ExpertWeights(w1[:, :80], w2[:, :, :80], w3[:, :80]), "H = 80, want a multiple of 32"),
    ):
        with pytest.raises(ValueError, match=text):
            expert_ffn(x, given, ENDS, module.recipe)
    assert not isinstance(expert_ffn(x, ExpertWeights(w1, w2, w3), ENDS, module.recipe), MXTensor)


def test_forms_of_swiglu_in_a_compiled_graph() -> None:
    """Limits are constants of the graph, infinity among them."""
    for form in (CLAMPED, SwiGLU(alpha=1.702)):
        module, (x, dy) = experts(RECIPES[1], swiglu=form), rows(RECIPES[1])
        found = []
        for run in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
            leaf = x.detach().requires_grad_()
            found.append(grads(run(leaf, COUNTS), dy, leaf, *module.parameters()))
        for eager, compiled in zip(*found, strict=True):
            assert torch.equal(eager, compiled)


def test_shared_experts_have_the_form_of_the_layer() -> None:
    config = MoEConfig(D, H, L, 2, num_shared_experts=1, swiglu_limit=1.0, swiglu_alpha=1.702, swiglu_offset=1.0)
    shared, x = MoE(config, "hp").shared_experts, torch.randn(7, D)
    assert isinstance(shared, SharedExperts)
    torch.testing.assert_close(shared(x), shared.w2(hidden(shared.w1(x), shared.w3(x), form=CLAMPED)))
    assert MoE(config, "hp").experts.swiglu == config.swiglu == CLAMPED


def test_invalid_forms_of_swiglu() -> None:
    for limit in (0.0, -1.0):
        with raises_naming("SwiGLU: limit=", "want a limit above 0"):
            MoEConfig(D, H, L, 2, swiglu_limit=limit)
    for wrong in ({"swiglu_alpha": float("nan")}, {"swiglu_offset": float("inf")}):
        with raises_naming(f"MoEConfig: {next(iter(wrong))}=", "want a finite number"):
            MoEConfig(D, H, L, 2, **wrong)
    with raises_naming("MoEConfig", "activation='geglu', want", "activation='swiglu' with it"):
        MoEConfig(D, H, L, 2, activation="geglu", swiglu_limit=7.0)
    x, weights = torch.randn(P, D), (torch.randn(L, H, D), torch.randn(L, D, H), torch.randn(L, H, D))
    calls = {
        "Experts": lambda form: Experts(D, H, L, swiglu=form),
        "SharedExperts": lambda form: SharedExperts(D, H, form),
        "expert_ffn": lambda form: expert_ffn(x, weights, ENDS, resolve_recipe(RECIPES[0]), swiglu=form),
    }
    for where, call in calls.items():
        for wrong in ((7.0, 1.0, 0.0), 7.0, None):
            with raises_naming(f"{where}: swiglu={wrong!r}", "want a mxep.SwiGLU"):
                call(wrong)
    with raises_naming("Experts", "with activation='relu2'"):
        Experts(D, H, L, activation="relu2", swiglu=CLAMPED)


def test_a_form_is_shown() -> None:
    config = MoEConfig(D, H, L, 2, num_shared_experts=1, swiglu_limit=7.0)
    assert str(MoE(config)).count("SwiGLU(limit=7.0, alpha=1.0, offset=0.0)") == 2
    assert "SwiGLU" not in str(MoE(MoEConfig(D, H, L, 2, num_shared_experts=1)).experts)
