"""What the recomputation of a block leaves out: what a fused layer does with its experts' first product; with "keep_moe" the whole MoE."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.test_blocks import Block, D
from tests.truth import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxep.grouped_mm.dense import DenseLora, dense_mm
from mxep.grouped_mm.function import expert_mm
from mxep.grouped_mm.products import Weights
from mxep.moe import FusedMoE, MoE, MoEConfig, RuntimeEPConfig, fused_experts
from mxep.moe.expert_mlp import ExpertLora, ExpertWeights
from mxep.moe.experts import Experts
from mxep.moe.ffn import expert_ffn
from mxep.parallel import Recompute, compile_blocks, recompute_blocks
from mxep.recipe import resolve_recipe

RUNTIMES = {
    "as it is": RuntimeEPConfig(),
    "first product in MX": RuntimeEPConfig(keep_first_product="mxfp8"),
    "no first product": RuntimeEPConfig(keep_first_product=False),
    "tokens sent again": RuntimeEPConfig(redispatch_x_in_backward=True),
    "chunks": RuntimeEPConfig(scratch_rows=64),
}
H = 2 * D
FIRST, SECOND = (H, "forward"), (D, "forward")  # forms of gate with up (rows of H) and of down (rows of D)
ATTENTION, SHARED = "_scaled_dot_product_flash_attention_for_cpu", "silu"


class Scaled(Block):
    """A block that reads the MoE's output: the gradient of a factor."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.scale = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def made(mode: Recompute, kind: type[Block] = Block, runtime: RuntimeEPConfig | None = RUNTIMES["as it is"]) -> Block:
    """A block, with a fused layer unless `runtime` is None."""
    block = kind(H)
    if runtime is not None:
        block.moe = FusedMoE.of(block.moe, runtime)
    recompute_blocks([block], mode)
    return block


def step(block: nn.Module) -> tuple[list[Tensor], Counter[str], Counter[tuple[int, str]]]:
    """Gradients; of forward and backward together, how often each operator ran, and how often each form of a weight was made."""
    x = torch.randn(2, 24, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    forms, make = Counter[tuple[int, str]](), Weights._make

    def noted(weights: Weights, names: tuple[str, ...]) -> object:
        forms.update((weights._parts[0].shape[1], name) for name in names)
        return make(weights, names)

    with pytest.MonkeyPatch.context() as patch, OperatorCalls() as calls:
        patch.setattr(Weights, "_make", noted)
        block(x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())], calls.counts, forms  # type: ignore[list-item]


def again(mode: Recompute, kind: type[Block] = Block, runtime: RuntimeEPConfig | None = RUNTIMES["as it is"]) -> tuple[Counter, Counter]:
    """Operators and forms of weights that run more often than without recomputation. Gradients have the same bits."""
    want, plain, plain_forms = step(made("none", kind, runtime))
    found, calls, forms = step(made(mode, kind, runtime))
    for a, b in zip(found, want, strict=True):
        assert_same(a, b)
    return calls - plain, forms - plain_forms


@pytest.mark.parametrize("name", RUNTIMES)
def test_the_down_gemm_runs_once(name: str) -> None:
    calls, forms = again("full", runtime=RUNTIMES[name])
    products = 0 if name == "no first product" else 1  # of several chunks, the last one's
    assert (calls[ATTENTION], calls[SHARED], calls["grouped_mm_mx"]) == (1, 1, products)
    assert forms == Counter([FIRST] * products)
    assert calls["activate"] == (name == "first product in MX"), "which quantises gate and up"
    assert not {"reduce_rows", "reduce_rows_chunk"} & set(calls)


@pytest.mark.parametrize("mode", ["full", "selective", "keep_moe"])
def test_an_output_that_is_read_is_made_again(mode: Recompute) -> None:
    calls, forms = again(mode, Scaled)
    assert calls["grouped_mm_mx"] == 2
    assert forms == Counter([FIRST, SECOND])


@pytest.mark.parametrize("runtime", [None, *RUNTIMES.values()])
def test_a_kept_moe_runs_once(runtime: RuntimeEPConfig | None) -> None:
    calls, forms = again("keep_moe", runtime=runtime)
    assert (calls[ATTENTION], calls[SHARED], calls["grouped_mm_mx"], calls["quantize"]) == (1, 0, 0, 0)
    assert not forms


def test_experts_alone() -> None:
    """The experts' block in a checkpoint of its own."""
    runs = []
    modes: tuple[Recompute, ...] = ("none", "full")
    for mode in modes:
        torch.manual_seed(0)
        experts = Experts(D, H, 4, bias=True)
        experts.init_weights(0.1)
        recompute_blocks([experts], mode)
        x, counts = torch.randn(128, D).requires_grad_(), torch.tensor([32, 0, 64, 32])
        with OperatorCalls() as calls:
            experts(x, counts).square().sum().backward()
        runs.append(([x.grad, *(parameter.grad for parameter in experts.parameters())], calls.counts))
    (want, plain), (found, calls) = runs
    for a, b in zip(found, want, strict=True):
        assert_same(a, b)
    assert calls["grouped_mm_mx"] - plain["grouped_mm_mx"] == 1
    assert calls["activate"] == plain["activate"]
    assert (plain["add_group_bias"], calls["add_group_bias"]) == (2, 3), "the first product's runs again with it"


def _kept(operators: list[str]) -> Callable[[], tuple]:
    """Contexts of a checkpoint that keeps the results of these operators."""
    kept = {getattr(torch.ops.mxep, name).default for name in operators} | {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}

    def policy(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize(
    ("what", "recipe"),
    [
        *(("bias", recipe) for recipe in ("hp", "mxfp8_gemm", "mxfp8")),
        *(("experts", recipe) for recipe in ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx")),
        *(("an adapter of experts", recipe) for recipe in ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx")),
        *(("a linear layer and its adapter", recipe) for recipe in ("hp", "mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx")),
    ],
)
def test_kept_results_are_not_written_to(what: str, recipe: str) -> None:
    """What a GEMM returned is kept by the checkpoint; a bias or an adapter that is added in place would be added twice."""
    torch.manual_seed(0)
    w1, w2, b1, b2 = (torch.randn(shape) / 8 for shape in ((2, 2 * H, D), (2, D, H), (2, 2 * H), (2, D)))
    lora = [torch.randn(shape) / 8 for shape in ((2, 8, D), (2, 2 * H, 8), (2, 8, H), (2, D, 8))]
    x, ends, of = torch.randn(64, D), torch.tensor([32, 64], dtype=torch.int32), resolve_recipe(recipe)
    functions: dict[str, Callable[..., Tensor]] = {
        "bias": lambda x, w1, w2, b1, b2, *lora: expert_mm(x, w1, ends, of, bias=b1),
        "experts": lambda x, w1, w2, b1, b2, *lora: expert_ffn(x, ExpertWeights(w1, w2, None, b1, b2), ends, of),
        "an adapter of experts": lambda x, w1, w2, b1, b2, *lora: expert_ffn(
            x, ExpertWeights(w1, w2, None, b1, b2, lora=ExpertLora(*lora)), ends, of
        ),
        "a linear layer and its adapter": lambda x, w1, w2, b1, b2, a, b, *rest: dense_mm(x, w1[0], b1[0], of, None, DenseLora(a[0], b[0])),
    }
    leaves = [leaf.requires_grad_() for leaf in (x, w1, w2, b1, b2, *lora)]

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return functions[what](x, *rest).sin()

    want = torch.autograd.grad(run(*leaves).square().sum(), leaves, allow_unused=True)
    context = _kept(["grouped_mm_mx", "grouped_mm_hp"])
    got = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False, context_fn=context).square().sum(), leaves, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_same(a, b)


def test_given_choices() -> None:
    """`fused_experts` in a checkpoint of its own, and with a product after it."""
    choices, scores = torch.tensor([[0, 3], [2, 1]]).repeat(8, 1), torch.rand(16, 2)
    leaves = [torch.randn(shape).requires_grad_() for shape in ((16, D), (4, 2 * H, D), (4, D, H))]

    def layer(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return fused_experts(x, choices, scores, w1, None, w2, None, 4, group="")

    def grads(run: object, *args: object, **options: object) -> tuple[tuple[Tensor, ...], int]:
        with OperatorCalls() as calls:
            found = torch.autograd.grad(run(*args, **options).square().sum(), leaves)  # type: ignore[operator]
        return found, calls.counts["grouped_mm_mx"]

    for function, more in ((layer, 1), (lambda *inputs: layer(*inputs).sin(), 2)):
        (want, plain), (found, twice) = grads(function, *leaves), grads(checkpoint, function, *leaves, use_reentrant=False)
        assert twice - plain == more
        for a, b in zip(found, want, strict=True):
            assert_same(a, b)


class Residual(nn.Module):
    """The identity where all parameters are 0."""

    def __init__(self, kind: type[MoE]) -> None:
        super().__init__()
        self.linear, self.moe = nn.Linear(64, 64), kind(MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2, num_shared_experts=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.linear(x))


@pytest.mark.parametrize("mode", ["full", "selective", "keep_moe", "compile", "compile, keep_moe"])
@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_a_copy_runs_its_own_weights(kind: type[MoE], mode: str) -> None:
    """As an average of the weights, or the reference model of DPO, which is a deepcopy."""
    block, x = Residual(kind), torch.randn(32, 64)
    if "compile" in mode:
        torch._dynamo.reset()
        compile_blocks([block], "aot_eager")
    if mode != "compile":
        recompute_blocks([block], mode.rpartition(" ")[2])  # type: ignore[arg-type]
    twin = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    y = twin(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert all(parameter.grad is None for parameter in block.parameters())
    assert not torch.equal(block(x), x)


class ChangesItsInput(nn.Module):
    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.linear, self.moe = nn.Linear(D, D), moe

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        y = self.moe(h)
        return y + h.mul_(2.0)


@pytest.mark.parametrize("kind", [MoE, FusedMoE])
def test_an_in_place_change_of_saved_tensors_of_an_moe_is_an_error(kind: type[MoE]) -> None:
    """As autograd has it without recomputation."""
    block = ChangesItsInput(kind(MoEConfig(D, 32, 4, 2), "hp"))
    recompute_blocks([block], "keep_moe")
    loss = block(torch.randn(32, D)).square().sum()
    with pytest.raises(RuntimeError, match=r"recompute_blocks: a tensor \(32, \d+\) that an MoE keeps .* was changed in place"):
        loss.backward()


@pytest.mark.parametrize("mode", ["keep_moe", "selective", "full"])
def test_dropout_drops_the_same_values_again(mode: Recompute) -> None:
    """A second forward with other random numbers gave a gradient that was wrong by its own size, without an error."""
    found = []
    for recomputed in ("none", mode):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Tanh(), nn.Linear(D, D))
        recompute_blocks([block], recomputed)
        x = torch.randn(8, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
