"""Dense linear layers in MXFP8 against float64 and bf16; layers that are converted, that stay, and that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.truth import sqnr
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from mxep import MoE, MoEConfig, convert_linears
from mxep.grouped_mm.dense import DenseLora
from mxep.models.decoder import FeedForward
from mxep.models.loss import OutputProjection
from mxep.mx import MXWeight, quantize_mx
from mxep.parallel import MXLinear, apply_fsdp, build_meshes, cache_quantized_weights, recompute_blocks
from mxep.recipe import RECIPES, Recipe

MXFP8_RECIPES = [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"]


def results(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients, float64."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(leaf)
    y.backward(grad.to(y.dtype))
    assert leaf.grad is not None
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert {value.dtype for value in (y, leaf.grad, *grads.values())} == {x.dtype}
    return {name: value.detach().double() for name, value in {"y": y, "dx": leaf.grad, **grads}.items()}


@pytest.mark.parametrize("recipe", MXFP8_RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [(2, 45), (64,)])  # 90 rows are no whole 32x1 blocks
def test_against_float64_and_high_precision(recipe: str, dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(160, 96).to(dtype)
    x, grad = torch.randn(*tokens, 160).to(dtype), torch.randn(*tokens, 96).to(dtype)
    truth = results(copy.deepcopy(linear).double(), x.double(), grad.double())
    plain = results(linear, x, grad)
    found = results(MXLinear(linear, RECIPES[recipe]), x, grad)
    for name, least in {"y": 27.5, "dx": 27.0, "weight": 26.0, "bias": 45.0}.items():
        assert found[name].shape == truth[name].shape
        assert sqnr(truth[name], found[name]) > least, name
    if RECIPES[recipe].wgrad == "hp":
        assert torch.equal(found["weight"], plain["weight"]) or sqnr(truth["weight"], found["weight"]) > 50, "the operands unchanged"


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
def test_the_gemm_adds_the_bias_before_it_rounds(recipe: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(160, 96).bfloat16()
    nn.init.normal_(linear.bias)
    x = torch.randn(300, 160).bfloat16()
    want = quantize_mx(x).dequantize().double() @ quantize_mx(linear.weight.detach()).dequantize().double().T + linear.bias.double()
    wrong = [(y != want.bfloat16()).float().mean() for y in (MXLinear(linear, recipe)(x), (want - linear.bias).bfloat16() + linear.bias)]
    assert wrong[0] < 1e-3 < 0.1 < wrong[1], "the second one is rounded twice"
    linear.bias.data[:2] = torch.tensor([torch.inf, -torch.inf])
    assert MXLinear(linear, recipe)(x)[:, :3].isinf().tolist() == [[True, True, False]] * 300


def test_no_rows_and_no_gradient_of_the_weight() -> None:
    layer = MXLinear(nn.Linear(64, 32, bias=False), RECIPES["mxfp8_wgrad_with_mx"])
    assert layer(torch.randn(2, 0, 64)).shape == (2, 0, 32)
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None


def test_names_and_parameters_stay() -> None:
    ffn = FeedForward(64, 96)
    before = {name: (id(p), p.data_ptr()) for name, p in ffn.named_parameters()}
    assert convert_linears(ffn, recipe="mxfp8") == ["w1", "w2", "w3"]
    assert {name: (id(p), p.data_ptr()) for name, p in ffn.named_parameters()} == before
    ffn.load_state_dict(FeedForward(64, 96).state_dict())
    assert "recipe=mxfp8" in repr(ffn.w1)


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx", "mxfp8"])
def test_compiled_and_recomputed_have_the_bits_of_eager(recipe: str) -> None:
    torch.manual_seed(0)
    ffn = FeedForward(64, 96)
    convert_linears(ffn, recipe=recipe)
    x, grad = torch.randn(2, 32, 64), torch.randn(2, 32, 64)
    eager = results(ffn, x, grad)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = ffn

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.ffn, x, use_reentrant=False)

    compiled = torch.compile(ffn, backend="aot_eager", fullgraph=True)
    for found in (results(Again(), x, grad), results(compiled, x, grad)):
        assert all(torch.equal(a, b) for a, b in zip(eager.values(), found.values(), strict=True))


def test_a_compiled_graph_quantises_the_input_of_siblings_once() -> None:
    """With the partitioner of torch.compile's default backend; the bytes are also saved once."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    qkv = nn.ModuleList(nn.Linear(64, 96, bias=False) for _ in range(3))
    convert_linears(qkv, recipe="mxfp8_wgrad_with_mx")
    torch.compile(lambda x: sum(linear(x) for linear in qkv), backend=backend)(torch.randn(64, 64).requires_grad_()).sum().backward()
    forward, _ = graphs
    assert forward.count("mxep.grouped_mm_mx.default") == 3
    assert forward.count("mxep.quantize.default") == 4, "x, and three weights"


class Block(nn.Module):
    """A user's model with everything that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.attention = nn.ModuleDict({"wq": nn.Linear(64, 96), "wo": nn.Linear(96, 64)})
        self.moe = MoE(MoEConfig(64, 32, 4, 2, num_shared_experts=1), "hp")
        self.lm_head = nn.Linear(64, 16, bias=False)
        self.logits = OutputProjection(64, 32)


def test_layers_that_are_converted() -> None:
    shared = [f"moe.shared_experts.w{number}" for number in (1, 2, 3)]
    block = Block()
    assert convert_linears(block) == ["attention.wq", "attention.wo", *shared]
    assert {name for name, module in block.named_modules() if isinstance(module, MXLinear)} == {"attention.wq", "attention.wo", *shared}
    assert convert_linears(Block(), ["attention", "shared_experts"], "mxfp8", skip=["wo", "w2"]) == ["attention.wq", shared[0], shared[2]]
    assert convert_linears(Block(), skip="shared_experts") == ["attention.wq", "attention.wo"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fqns": "attentoin"}, r"'attentoin' matched no torch\.nn\.Linear, saw attention\.wq, attention\.wo.*nearest is 'attention'"),
        ({"fqns": "att"}, r"'att' matched no torch\.nn\.Linear.*whole parts between dots"),
        ({"fqns": "router"}, r"'router' matched moe\.router\.gate alone, which is never converted.*leave it out"),
        ({"fqns": "logits"}, r"'logits' matched logits alone, which is never converted"),
        ({"skip": ["wk"]}, r"'wk' matched no torch\.nn\.Linear"),
        ({"skip": "wk"}, r"'wk' matched no torch\.nn\.Linear"),
        ({"fqns": [5]}, r"names of layers are \[5\], want a string"),
        ({"skip": 5}, r"names of layers are 5, want a string"),
        ({"fqns": "lm_head"}, r"lm_head: a weight \(16, 64\), want multiples of 32 both ways.*skip= \(mxep train --linear-skip\)"),
        ({"fqns": "wq", "skip": ["attention"]}, r"nothing is left to convert, want one of attention\.wq"),
        ({"recipe": "bf16"}, r"attention\.wq: recipe 'hp' multiplies in high precision"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    block = Block()
    with pytest.raises(ValueError, match=message):
        convert_linears(block, **arguments)
    assert not [module for module in block.modules() if isinstance(module, MXLinear)], "all or nothing"


def test_the_recipe_of_a_layer_changes_by_name() -> None:
    layer = MXLinear(nn.Linear(64, 64), "mxfp8_gemm")
    layer.recipe = "mxfp8_wgrad_with_mx"
    assert layer.recipe == Recipe.named("mxfp8_wgrad_with_mx")
    with pytest.raises(ValueError, match="fp7"):
        layer.recipe = "fp7"
    with pytest.raises(ValueError, match="MXLinear: recipe 'hp' multiplies in high precision"):
        MXLinear(nn.Linear(64, 64), "hp")


def test_a_cache_refuses_weights_that_count_no_edits() -> None:
    with torch.inference_mode():
        ffn = FeedForward(64, 96)
    convert_linears(ffn)
    with pytest.raises(ValueError, match=r"w1\.weight was made in inference mode, whose edits nothing counts"):
        cache_quantized_weights(ffn, torch.optim.SGD(ffn.parameters()))


def test_a_linear_layer_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model is a torch\.nn\.Linear itself, want a module that holds it"):
        convert_linears(nn.Linear(64, 64))


def test_layers_that_torch_reads_itself_stay() -> None:
    """In evaluation a TransformerEncoderLayer multiplies its weights by a kernel of its own, in high precision."""
    model = nn.ModuleDict({"encoder": nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), "head": nn.Linear(64, 64)})
    assert convert_linears(model) == ["head"]
    with pytest.raises(ValueError, match=r"'encoder' matched encoder.*which is never converted"):
        convert_linears(model, "encoder")


def test_rows_that_are_a_transposed_frozen_weight() -> None:
    rows, linear = torch.randn(64, 64), nn.Linear(64, 32, bias=False)
    convert_linears(holder := nn.Sequential(linear), recipe="mxfp8_wgrad_with_hp")
    frozen = MXWeight.of(rows.t().contiguous()).t()
    torch.testing.assert_close(holder(frozen), holder(frozen.dequantize()), rtol=0, atol=0)


def test_one_layer_in_several_places_is_converted_in_all_of_them() -> None:
    linear = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": linear, "layers": nn.ModuleList([linear, nn.Linear(64, 64), linear])})
    assert convert_linears(model) == ["a", "layers.0", "layers.1", "layers.2"]
    assert isinstance(model["a"], MXLinear)
    assert model["layers"][0] is model["a"]
    assert model["layers"][2] is model["a"]
    assert len(list(model.parameters())) == 4


def test_hooks_stay() -> None:
    """Those of a user, and those that make the weight: torch's old weight_norm, pruning."""
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(40, 64), []
    handle = model[0].register_forward_hook(lambda module, inputs, output: seen.append((type(module), output.shape)))
    prune.random_unstructured(model[1], "weight", amount=0.5)
    parameters, want = list(model.named_parameters()), model(x)
    assert "1.weight_orig" in dict(parameters)
    convert_linears(model)
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(name, id(p)) for name, p in parameters]
    with torch.no_grad():
        model[1].weight_orig.mul_(2)
    out = model(x)
    assert seen == [(nn.Linear, (40, 96)), (MXLinear, (40, 96))]
    assert sqnr(2 * (want - model[1].bias) + model[1].bias, out) > 20
    out.sum().backward()
    assert model[1].weight_orig.grad is not None
    assert torch.equal(model[1].weight_orig.grad == 0, model[1].weight_mask == 0)
    handle.remove()
    model(x)
    assert len(seen) == 2


def test_a_replaced_forward_is_not_lost() -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    recompute_blocks([model[1]], "full")
    with pytest.raises(ValueError, match=r"1: a forward of its own.* convert it before that, or leave it out"):
        convert_linears(model)
    assert type(model[0]) is nn.Linear, "all or nothing"


def test_weights_are_quantised_once_a_step() -> None:
    torch.manual_seed(0)
    ffn = FeedForward(64, 96)
    convert_linears(ffn, recipe="mxfp8_wgrad_with_mx")
    plain = copy.deepcopy(ffn)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ffn, plain)]
    cache = cache_quantized_weights(ffn, optimizers[0])
    x = torch.randn(40, 64, requires_grad=True)
    for step in range(2):
        for model in (ffn, plain):
            for _ in range(2):
                model(x).square().sum().backward()
        assert cache.fills == 6 * (step + 1), "forward and dgrad of three weights"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ffn.parameters(), plain.parameters(), strict=True))


def sharded(rank: int, world: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(FeedForward(64, 96), FeedForward(64, 96))
    convert_linears(whole, recipe="mxfp8_wgrad_with_mx")
    shards = copy.deepcopy(whole)
    x = torch.randn(world * 32, 64)
    whole(x).square().sum().backward()
    apply_fsdp(shards, build_meshes(world, 1, "cpu"), blocks=list(shards))
    shards(x.chunk(world)[rank]).square().sum().backward()
    for a, b in zip(whole.parameters(), shards.parameters(), strict=True):
        assert isinstance(b.grad, DTensor)
        assert a.grad is not None
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-5, atol=1e-3)


def test_sharded_by_fsdp() -> None:
    run_ranks(sharded, 2)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.randn(4, 96), None, r"MXLinear: input \(\.\.\., 96\) torch\.float32 on cpu and weight \(96, 64\).*want \(\.\.\., K\)"),
        (torch.randn(4, 64).half(), None, r"input \(\.\.\., 64\) torch\.float16.*bfloat16 or float32"),
        (torch.randn(4, 64), torch.zeros(64), r"a bias \(64,\) torch\.float32 on cpu, want \(96,\)"),
    ],
)
def test_operands_that_do_not_fit(x: Tensor, bias: Tensor | None, message: str) -> None:
    """In every call, also after one that fitted: results of checks are cached by shapes, dtypes and devices."""
    layer = MXLinear(nn.Linear(64, 96), RECIPES["mxfp8_gemm"])
    assert layer(torch.randn(4, 64)).shape == (4, 96)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            layer(x)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_dtype_of_few_rows_under_autocast(adapter: bool) -> None:
    """That of x, as with many rows, and the values of a call without autocast."""
    linear = MXLinear(nn.Linear(64, 96), Recipe("few", hp_below_rows=100))
    lora = DenseLora(torch.randn(8, 64), torch.randn(96, 8), 2.0) if adapter else None
    for rows in (32, 128):
        x = torch.randn(rows, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x, lora)
        assert y.dtype == torch.float32
        assert torch.equal(y, linear(x, lora)) or (rows == 128 and adapter)


def test_a_layer_that_a_list_holds_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    held = [model[0]]
    convert_linears(model)
    assert held == [*model]
    convert_linears(model, recipe="bf16")
    assert held == [*model]
