"""Adapters of the experts' GEMMs: outputs and gradients against dense float64, without a matrix of a weight's size."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.operator_calls import OperatorCalls
from tests.truth import raises_naming, sqnr
from torch import Tensor

import mxep
from mxep.device import GEMM_PATHS
from mxep.grouped_mm.products import GemmOptions
from mxep.moe.expert_mlp import ExpertLora, ExpertWeights
from mxep.moe.ffn import expert_ffn
from mxep.mx import MXWeight
from mxep.ops.grouped_gemm.reference import FUSED_RANK

D, H, L, R, T, C = 64, 32, 4, 8, 96, 2


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def case(R: int = R) -> dict[str, Tensor]:
    names = {
        "w1": (L, 2 * H, D), "w2": (L, D, H), "a1": (L, R, D), "b1": (L, 2 * H, R), "a2": (L, R, H), "b2": (L, D, R), "x": (T, D)
    }  # fmt: skip
    return {
        name: draw(*shape, seed=seed, scale=1.0 if name == "x" else shape[-1] ** -0.5) for seed, (name, shape) in enumerate(names.items())
    }


def routing() -> tuple[Tensor, Tensor]:
    scores, experts = torch.rand(T, L, generator=torch.Generator().manual_seed(9)).topk(C)
    experts[experts == 3] = 0  # an expert without rows, and a token with one expert twice
    return experts, scores


def truth(given: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients of every leaf in float64."""
    leaf = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    experts, scores = routing()
    y = torch.zeros(T, D, dtype=torch.float64)
    for expert in range(L):
        w1, w2 = (leaf[f"w{i}"][expert] + leaf[f"b{i}"][expert] @ leaf[f"a{i}"][expert] for i in (1, 2))
        gate, up = (leaf["x"] @ w1.T).chunk(2, -1)
        y = y + ((F.silu(gate) * up) @ w2.T) * ((experts == expert) * scores).sum(-1, keepdim=True)
    y.backward(dy.double())
    return {"y": y} | {name: value.grad for name, value in leaf.items()}


def ours(given: dict[str, Tensor], dy: Tensor, recipe: str, freeze: bool, **options: Any) -> dict[str, Tensor]:
    leaf = {name: value.detach().requires_grad_() for name, value in given.items()}
    w1, w2 = (MXWeight.of(given[name]) if freeze else leaf[name] for name in ("w1", "w2"))
    experts, scores = routing()
    lora = ExpertLora(*(leaf[name] for name in ("a1", "b1", "a2", "b2")))
    y = mxep.fused_experts(leaf["x"], experts, scores, w1, None, w2, None, L, group="", recipe=recipe, lora=lora, **options)
    y.backward(dy)
    return {"y": y} | {name: value.grad for name, value in leaf.items() if value.grad is not None}


@pytest.mark.parametrize("rank", [8, FUSED_RANK])
@pytest.mark.parametrize(("recipe", "least"), [("hp", 45), ("mxfp8_wgrad_with_hp", 21), ("mxfp8_wgrad_with_mx", 20)])
def test_gradients_against_float64(recipe: str, least: float, rank: int) -> None:
    """A frozen base in MX; the truth has its dequantised values. In high precision only bf16 rounds."""
    given, dy = case(rank), draw(T, D, seed=20)
    want = truth(given | {name: MXWeight.of(given[name]).dequantize() for name in ("w1", "w2")}, dy)
    got = ours(given, dy, recipe, freeze=True)
    assert set(got) == {"y", "x", "a1", "b1", "a2", "b2"}, "no gradients of frozen weights"
    for name, value in got.items():
        assert sqnr(want[name], value) > least, name
    assert got["a1"][3].count_nonzero() == got["b2"][3].count_nonzero() == 0


def test_the_activation_rebases_the_operands_of_fp8_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """h rebased for the down projection and in high precision for the adapter, as on Hopper."""
    monkeypatch.setitem(GEMM_PATHS, "reference", GEMM_PATHS["reference"]._replace(granularity="auto"))
    monkeypatch.setattr(GemmOptions, "rebased", "auto")
    given, dy = case(), draw(T, D, seed=20)
    got = ours(given, dy, "mxfp8_wgrad_with_mx", freeze=False)
    monkeypatch.setattr(GemmOptions, "rebased", None)
    for name, want in ours(given, dy, "mxfp8_wgrad_with_mx", freeze=False).items():
        assert sqnr(want, got[name]) > 45, name


def test_adapters_of_trained_weights() -> None:
    given, dy = case(), draw(T, D, seed=20)
    want, got = truth(given, dy), ours(given, dy, "hp", freeze=False)
    assert set(got) == set(want)
    for name, value in got.items():
        assert sqnr(want[name], value) > 43, name


@pytest.mark.parametrize("rank", [8, FUSED_RANK])
def test_in_chunks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a bounded size, and gate and up computed again in backward, change nothing but the order of sums."""
    given, dy = case(rank), draw(T, D, seed=20)
    distinct = torch.rand(T, L, generator=torch.Generator().manual_seed(9)).topk(C)
    monkeypatch.setattr(sys.modules[__name__], "routing", lambda: (distinct.indices, distinct.values))
    want = ours(given, dy, "mxfp8_wgrad_with_hp", freeze=True)
    for runtime in ({"scratch_rows": 96}, {"scratch_rows": 96, "keep_first_product": False}, {"redispatch_x_in_backward": True}):
        got = ours(given, dy, "mxfp8_wgrad_with_hp", freeze=True, config=mxep.RuntimeEPConfig(**runtime))
        assert set(got) == set(want)
        for name, value in got.items():
            assert sqnr(want[name], value) > 45, (runtime, name)


def test_experts_block_is_the_layer() -> None:
    """`expert_ffn` of rows that are in the experts' order, with padding after them."""
    given, counts = case(), [32, 0, 40, 20]
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)
    leaf = {name: value.requires_grad_(name[0] in "abx") for name, value in given.items()}
    lora = ExpertLora(*(leaf[name] for name in ("a1", "b1", "a2", "b2")))
    weights = ExpertWeights(MXWeight.of(given["w1"]), MXWeight.of(given["w2"]), lora=lora)
    recipe, dy = mxep.Recipe.named("mxfp8_wgrad_with_hp"), draw(T, D, seed=21)
    out = expert_ffn(leaf["x"], weights, ends, recipe)
    out.backward(dy)
    merged = [weights.w1.dequantize() + leaf["b1"] @ leaf["a1"], weights.w2.dequantize() + leaf["b2"] @ leaf["a2"]]
    assert sqnr(expert_ffn(leaf["x"], ExpertWeights(*merged), ends, recipe), out) > 22
    assert out[92:].count_nonzero() == 0
    grads = torch.autograd.grad(
        expert_ffn(leaf["x"], ExpertWeights(*merged), ends, recipe), [leaf[n] for n in ("x", "a1", "b1", "a2", "b2")], dy
    )
    for name, grad in zip(("x", "a1", "b1", "a2", "b2"), grads, strict=True):
        assert sqnr(grad, leaf[name].grad) > 20, name


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a1": draw(L, 4, D, seed=0), "b1": draw(L, 2 * H, 4, seed=0)}, ("lora a1", "R a multiple of 8")),
        ({"b2": None}, ("lora a2 and b2", "None", "(4, 64, R)")),
        ({"a1": torch.zeros(L, R, D)}, ("float32", "torch.bfloat16", "cast or move them")),
        ({"a1": torch.zeros(L, R, D, dtype=torch.bfloat16, device="meta")}, ("on meta", "on cpu", "cast or move them")),
    ],
    ids=["rank", "one alone", "dtype", "device"],
)
def test_adapters_that_do_not_fit(changed: dict[str, Tensor | None], words: tuple[str, ...]) -> None:
    given, (experts, scores) = case(), routing()
    lora = ExpertLora(*(({**given, **changed})[name] for name in ("a1", "b1", "a2", "b2")))
    with raises_naming("fused_experts", *words):
        mxep.fused_experts(given["x"], experts, scores, given["w1"], None, given["w2"], None, L, group="", lora=lora)


@pytest.mark.parametrize(("rank", "launches"), [(8, {"add_group_lora": 4}), (FUSED_RANK, {"group_lora_inner": 4})])
def test_adapters_add_no_pass_over_gathered_rows(rank: int, launches: dict[str, int]) -> None:
    """With a frozen base: one launch for each GEMM, two small products for gradients, and rows that are read through their maps."""
    with OperatorCalls() as operators:
        ours(case(rank), draw(T, D, seed=20), "mxfp8_wgrad_with_hp", freeze=True)
    calls = operators.counts
    assert {name: count for name, count in calls.items() if "lora" in name} == launches
    assert calls["grouped_wgrad_hp"] == 4
    assert calls["grouped_mm_hp"] == 1, "h times a2, which forward does not keep"
    assert calls["gather_rows"] == 0


@pytest.mark.parametrize(("rank", "passes"), [(8, 0), (FUSED_RANK, 2)])
def test_a_gemm_adds_the_bias_unless_it_adds_an_adapter(rank: int, passes: int) -> None:
    given, (experts, scores), biases = case(rank), routing(), (draw(L, 2 * H, seed=30), draw(L, D, seed=31))
    lora, made = ExpertLora(*(given[name] for name in ("a1", "b1", "a2", "b2"))), []
    for recipe in ("mxfp8_wgrad_with_hp", "hp"):
        with OperatorCalls() as operators:
            weights = given["w1"], biases[0], given["w2"], biases[1]
            made.append(mxep.fused_experts(given["x"], experts, scores, *weights, L, group="", recipe=recipe, lora=lora))
        assert operators.counts["add_group_bias"] == (2 if recipe == "hp" else passes)
    assert sqnr(made[1], made[0]) > 24


def test_rows_that_need_no_gradient() -> None:
    """As those of a frozen embedding: the adapters' gradients stay."""
    given, dy = case(), draw(T, D, seed=20)
    want = ours(given, dy, "hp", freeze=True)
    leaf = {name: given[name].detach().requires_grad_() for name in ("a1", "b1", "a2", "b2")}
    w1, w2 = (MXWeight.of(given[name]) for name in ("w1", "w2"))
    experts, scores = routing()
    options = {"group": "", "recipe": "hp", "lora": ExpertLora(**leaf)}
    mxep.fused_experts(given["x"], experts, scores, w1, None, w2, None, L, **options).backward(dy)
    for name, value in leaf.items():
        assert torch.equal(value.grad, want[name]), name
