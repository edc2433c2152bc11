"""The chunked loss with MXFP8 products: against float64, against bf16, its memory, its weight cache, errors."""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.test_loss import case, plain
from tests.operator_calls import LargestTensor, OperatorCalls
from torch import Tensor, nn

import mxep
from mxep.models.loss import IGNORE, OutputProjection
from mxep.mx.weight_cache import WeightCache
from mxep.parallel import cache_quantized_weights
from mxep.recipe import Recipe, ScaleCalculationMode, resolve_recipe

WGRADS = {"hp": "mxfp8_wgrad_with_hp", "mx": "mxfp8_wgrad_with_mx", "mxfp8": "mxfp8"}


def operands_of(kind: str, dtype: torch.dtype, words: int = 512, tokens: int = 300) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of width 128.

    "random": logits near 1 that are independent of the labels.  "aligned": hidden states are correlated with their label's row
    of the weight, and the loss is near 1.
    """
    hidden, weight, labels = case(tokens, 128, words, torch.float64)
    hidden, weight = hidden.detach(), weight.detach()
    if kind == "random":
        hidden *= 0.3
    else:
        rows = weight[labels.clamp(min=0)]
        hidden = 0.6 * hidden + 0.17 * 128**0.5 * rows / rows.norm(dim=-1, keepdim=True)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def decibels(got: Tensor, want: Tensor) -> float:
    return 20 * float(torch.log10(want.norm() / (got.double() - want).norm()))


def truth(operands: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients in float64, summed."""
    hidden, weight = (operand.detach().double().requires_grad_() for operand in operands[:2])
    loss = plain(hidden, weight, operands[2])
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("words", [512, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("kind", ["random", "aligned"])
def test_gradients_have_the_error_of_one_product(kind: str, wgrad: str, dtype: torch.dtype, words: int) -> None:
    """Chunks of 64 tokens, the last one of 44; 500 words are no whole MX blocks. One MXFP8 product has 28.5 dB on normal data."""
    operands = operands_of(kind, dtype, words)
    want, d_hidden, d_weight = truth(operands)
    got = mxep.linear_cross_entropy(*operands, 64, recipe=WGRADS[wgrad])
    assert got.dtype == torch.float32
    assert float(got.detach()) == pytest.approx(float(want), rel=5e-3)
    (got * 0.3).backward()
    for operand, gradient, least in zip(operands[:2], (d_hidden, d_weight), (27.0, 31.0 if wgrad == "hp" else 27.0), strict=True):
        assert operand.grad.dtype == dtype
        assert decibels(operand.grad, 0.3 * gradient) > least


@pytest.mark.parametrize(("mode", "least", "most"), [("rceil", 0.98, 1.02), ("floor", 0.87, 0.91)])
def test_floor_shortens_the_gradients(mode: str, least: float, most: float) -> None:
    """By up to 1/8: the gradient at the label of an unlikely word is near -1, in a block that saturates at -0.875."""
    recipe = Recipe(f"loss_{mode}", wgrad="mx", scaling_mode=ScaleCalculationMode(mode))
    operands = operands_of("random", torch.float32)
    _, *wanted = truth(operands)
    mxep.linear_cross_entropy(*operands, recipe=recipe).backward()
    for operand, want in zip(operands[:2], wanted, strict=True):
        along = float((operand.grad.double() * want).sum() / want.square().sum())
        assert least < along < most
        assert 17 < decibels(operand.grad, want) < 20 or mode == "rceil"


@pytest.fixture(scope="module")
def trained() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels of a small network that has learned to predict the next byte of Python, on other text."""
    torch.manual_seed(0)
    learned, held_out = (torch.tensor(list(Path(module.__file__).read_bytes())).unfold(0, 5, 1) for module in (argparse, tarfile))
    embedding, first, second, weight = nn.Embedding(256, 32), nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 256, bias=False)
    network = nn.Sequential(embedding, nn.Flatten(), first, nn.GELU(), second, nn.RMSNorm(128))
    optimizer = torch.optim.AdamW([*network.parameters(), *weight.parameters()], lr=3e-3, fused=True)
    for _ in range(300):
        batch = learned[torch.randint(len(learned), (512,))]
        F.cross_entropy(weight(network(batch[:, :4])), batch[:, 4]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network(held_out[:20000, :4]).detach(), weight.weight.detach(), held_out[:20000, 4].contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_is_within_a_thousandth_of_bf16(dtype: torch.dtype, trained: tuple[Tensor, Tensor, Tensor]) -> None:
    """On random and on trained logits."""
    for hidden, weight, labels in (operands_of("random", dtype, 500, 6000), trained):
        with torch.no_grad():
            want, got = (
                mxep.linear_cross_entropy(hidden.to(dtype), weight.to(dtype), labels, recipe=recipe, reduction="mean")
                for recipe in ("hp", "mxfp8_wgrad_with_mx")
            )
        assert float(got) == pytest.approx(float(want), rel=1e-3)
        assert not torch.equal(got, want)


@pytest.mark.parametrize("recipe", ["hp", *WGRADS.values()])
def test_mean_is_that_of_torch(recipe: str) -> None:
    hidden, weight, labels = operands_of("random", torch.float32)
    mean, total = (mxep.linear_cross_entropy(hidden, weight, labels, 64, recipe=recipe, reduction=name) for name in ("mean", "sum"))
    torch.testing.assert_close(mean, total / (labels != IGNORE).sum())
    torch.testing.assert_close(mean, F.cross_entropy(hidden @ weight.t(), labels), rtol=5e-3, atol=0.0)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (mean, total / (labels != IGNORE).sum())), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recipe", ["hp", *WGRADS.values()])
@pytest.mark.parametrize("tokens", [9, 0])
def test_no_label_to_learn(recipe: str, tokens: int) -> None:
    """As torch: 0 as sum, NaN as mean, and gradients that are 0 and not NaN."""
    for reduction in ("sum", "mean"):
        hidden, weight = torch.randn(tokens, 64, requires_grad=True), torch.randn(40, 64, requires_grad=True)
        labels = torch.full((tokens,), IGNORE)
        loss = mxep.linear_cross_entropy(hidden, weight, labels, recipe=recipe, reduction=reduction)  # type: ignore[arg-type]
        want = F.cross_entropy(hidden @ weight.t(), labels, reduction=reduction)
        torch.testing.assert_close(loss, want, equal_nan=True)
        loss.backward()
        assert not hidden.grad.count_nonzero()
        assert not weight.grad.count_nonzero()


@pytest.mark.parametrize("wgrad", WGRADS)
def test_only_one_chunk_of_logits_exists(wgrad: str) -> None:
    """2048 tokens in chunks of 64: no tensor with a column for each word has more rows than a chunk, or than the width of 64."""
    hidden, weight = torch.randn(2048, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
    labels = torch.randint(512, (2048,))
    with LargestTensor(lambda tensor: 512 in tensor.shape) as seen:
        mxep.linear_cross_entropy(hidden, weight, labels, 64, recipe=WGRADS[wgrad]).backward()
    assert seen.size == 64 * 512


def test_only_requested_gradients_are_computed() -> None:
    """Three chunks. The weight is quantised once for each direction, hidden states once a chunk, and so is the logits' gradient."""
    counts = {(True, True): (2 + 6, 6, 3), (True, False): (2 + 6, 6, 0), (False, True): (1 + 6, 3, 3), (False, False): (1 + 3, 3, 0)}
    for needed, expected in counts.items():
        operands = operands_of("random", torch.float32)
        for operand, wants in zip(operands, needed, strict=False):
            operand.requires_grad_(wants)
        with OperatorCalls() as calls:
            mxep.linear_cross_entropy(*operands, 100, recipe="mxfp8_wgrad_with_mx")
        made = tuple(
            sum(name.startswith(kind) for name in calls.short_names("mxep")) for kind in ("quantize", "grouped_mm", "grouped_wgrad")
        )
        assert made == expected, needed


def test_a_cache_keeps_the_weight_for_a_step() -> None:
    projection = OutputProjection(64, 96)
    with pytest.raises(ValueError, match="fp7"):
        projection.recipe = "fp7"
    projection.recipe = "mxfp8_wgrad_with_mx"
    assert projection.recipe == resolve_recipe("mxfp8_wgrad_with_mx")
    hidden, labels = torch.randn(2, 8, 64), torch.randint(96, (2, 8))
    plain_loss = projection(hidden, labels)
    (plain_gradient,) = torch.autograd.grad(plain_loss, projection.weight)
    optimizer = torch.optim.SGD(projection.parameters(), lr=1.0)
    cache = cache_quantized_weights(projection, optimizer)
    for fills in (2, 2):  # forward's and dgrad's form
        projection(hidden.requires_grad_(), labels).backward()
        assert cache.fills == fills
    assert torch.equal(projection(hidden, labels), plain_loss)
    assert torch.equal(projection.weight.grad, 2 * plain_gradient)
    optimizer.step()
    assert not torch.equal(projection(hidden, labels), plain_loss)
    assert cache.fills > 2


def test_a_projection_in_high_precision_keeps_nothing() -> None:
    projection = OutputProjection(64, 96)
    projection.keep_quantized(WeightCache())
    assert projection._kept is None


def test_compiled_gradients_are_the_eager_ones() -> None:
    results = []
    for compiled in (False, True):
        hidden, weight, labels = operands_of("random", torch.bfloat16, 500)

        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return mxep.linear_cross_entropy(hidden * 2, weight, labels, 128, recipe="mxfp8_wgrad_with_mx", reduction="mean")

        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        run(hidden, weight, labels).backward()
        results.append((hidden.grad, weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "mxfp9"}, "'mxfp9' is unknown"),
        ({"hidden": torch.zeros(3, 48), "weight": torch.zeros(5, 48)}, "D = 48 with recipe 'mxfp8', want a multiple of 32"),
        ({"hidden": torch.zeros(3, 64).double(), "weight": torch.zeros(5, 64).double()}, "float64 with recipe 'mxfp8', want bfloat16"),
        ({"reduction": "none"}, "reduction='none', want 'sum' or 'mean'"),
        ({"recipe": Recipe("other", gemm_path="fp9")}, "fp9"),
    ],
)
def test_refused(change: dict, message: str) -> None:
    labels = torch.zeros(3, dtype=torch.int64)
    right = {"hidden": torch.zeros(3, 64), "weight": torch.zeros(5, 64), "labels": labels, "recipe": "mxfp8"}
    with pytest.raises(ValueError, match=message):
        mxep.linear_cross_entropy(**{**right, **change})


@pytest.mark.parametrize("recipe", [None, *WGRADS.values()])
@pytest.mark.parametrize("label", [70, 75, 95, 96])
def test_labels_beyond_the_words(recipe: str | None, label: int) -> None:
    """Also those of words that fill the last MX block and do not exist."""
    hidden, weight, labels = operands_of("random", torch.bfloat16, words=70, tokens=4)
    labels = torch.tensor([1, 2, 3, label])
    with pytest.raises(ValueError, match=f"label {label}, want 0 to 69"):
        mxep.linear_cross_entropy(hidden, weight, labels, recipe=recipe)
