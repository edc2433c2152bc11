"""convert_experts and convert_linears can be changed and undone: class, forward, names, hooks and bits are those of before."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.ranks import run_ranks
from tests.user_experts import PublicExperts, StackedExperts, TitanExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils.parametrizations import weight_norm

from mxep import FusedMoE, MoE, MoEConfig, convert_experts, convert_linears
from mxep.moe import fuse_layers
from mxep.parallel import ColumnShards, MXLinear, RowShards, cache_quantized_weights, recompute_blocks, unconvert

COUNTS = torch.tensor([32, 64, 0, 96])


class Layer(nn.Module):
    """A user's layer: two dense products around experts."""

    def __init__(self, kind: type[StackedExperts] = TitanExperts) -> None:
        super().__init__()
        self.up, self.experts, self.down = nn.Linear(64, 64), kind(64, 96, 4), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.experts(self.up(x), COUNTS))


def model(kind: type[StackedExperts] = TitanExperts) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(kind), Layer(kind)).bfloat16()


def run(net: Callable[[Tensor], Tensor], parameters: nn.Module | None = None) -> list[Tensor]:
    """Output, dx and all gradients."""
    owner = parameters or net
    assert isinstance(owner, nn.Module)
    owner.zero_grad()
    x = torch.randn(192, 64, generator=torch.Generator().manual_seed(7)).bfloat16().requires_grad_()
    y = net(x)
    y.backward(torch.randn(192, 64, generator=torch.Generator().manual_seed(8)).bfloat16())
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in owner.parameters() if p.grad is not None)]


def same(found: list[Tensor], want: list[Tensor]) -> bool:
    return len(found) == len(want) and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def convert(net: nn.Module, recipe: str = "mxfp8_wgrad_with_hp") -> None:
    convert_experts(net, "experts", recipe)
    convert_linears(net, ["up", "down"], recipe)


def state_of(net: nn.Module) -> list[tuple]:
    """Class, attributes and hooks of every module."""
    return [(name, type(module), sorted(vars(module)), len(module._forward_hooks)) for name, module in net.named_modules()]


@pytest.mark.parametrize("kind", [TitanExperts, PublicExperts])
def test_an_unconverted_model_equals_one_that_was_never_converted(kind: type[StackedExperts]) -> None:
    net, never = model(kind), model(kind)
    seen: list[str] = []
    for each in (net, never):
        each[0].up.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    parameters = {name: id(p) for name, p in net.named_parameters()}
    convert(net)
    converted = run(net)
    assert not same(converted, run(never))
    assert unconvert(net) == [f"{layer}.{part}" for layer in (0, 1) for part in ("up", "experts", "down")]
    assert same(run(net), run(never))
    assert seen == ["MXLinear", "Linear", "Linear", "Linear"]
    assert state_of(net) == state_of(never)
    assert repr(net) == repr(never)
    assert list(net.state_dict()) == list(never.state_dict())
    assert {name: id(p) for name, p in net.named_parameters()} == parameters
    assert unconvert(net) == []
    convert(net)
    assert same(run(net), converted)


def test_the_recipe_can_be_changed_and_by_name_undone() -> None:
    net, direct, never = model(), model(), model()
    convert(net)
    first = run(net)
    convert(net, "mxfp8")
    convert(direct, "mxfp8")
    assert same(run(net), run(direct))
    assert not same(run(net), first)
    assert "recipe=mxfp8" in repr(net[0].up)
    convert(net, "bf16")
    assert same(run(net), run(never))
    assert type(net[0].up) is nn.Linear
    convert(net)
    assert same(run(net), first)
    assert unconvert(net, ["0.experts", "down"]) == ["0.experts", "0.down", "1.down"]
    convert(never)
    unconvert(never, "0.experts")
    unconvert(never, ["0.down", "1.down"])
    assert same(run(net), run(never))
    assert convert_linears(net, ["up", "down"], "bf16") == ["0.up", "1.up"], "the others are not converted"
    with pytest.raises(ValueError, match="multiplies in high precision"):
        convert_linears(net, ["up", "down"], "bf16")


def test_copies_and_tied_layers() -> None:
    net = model()
    net[1].up = net[0].up
    convert(net)
    want, twin = run(net), copy.deepcopy(net)
    assert unconvert(twin) == ["0.up", "0.experts", "0.down", "1.up", "1.experts", "1.down"]
    assert same(run(net), want), "only the copy changed"
    assert twin[1].up is twin[0].up
    never = model()
    never[1].up = never[0].up
    assert same(run(twin), run(never))
    assert same(run(copy.deepcopy(twin)), run(never))


@pytest.mark.parametrize("place", ["around", "inside"])
def test_compiled_graphs_follow(place: str) -> None:
    torch._dynamo.reset()
    net, never = model(), model()
    convert(net)
    first = run(net)
    compiled = torch.compile(net, backend="aot_eager")
    if place == "inside":
        for layer in net:
            layer.compile(backend="aot_eager")
        compiled = net  # type: ignore[assignment]
    assert same(run(compiled, net), first)
    convert(net, "mxfp8")
    assert same(run(compiled, net), run_eagerly(net))
    convert(net)
    assert same(run(compiled, net), first)
    assert len(unconvert(compiled)) == 6
    assert same(run(compiled, net), run(never))
    convert_experts(net, "experts", "mxfp8_wgrad_with_hp")
    assert same(run(compiled, net), run_eagerly(net))
    convert_experts(net, "experts", "bf16")
    assert same(run(compiled, net), run(never))


def run_eagerly(net: nn.Module) -> list[Tensor]:
    with torch.compiler.set_stance("force_eager"):
        return run(net)


def test_layers_of_mxep_get_their_recipe_back() -> None:
    net = nn.Sequential(MoE(MoEConfig(64, 32, 4, 2), "mxfp8_gemm"), MoE(MoEConfig(64, 32, 4, 2), "hp"))
    convert_experts(net, "experts", "mxfp8")
    convert_experts(net, "0.experts", "bf16")
    fuse_layers(net)
    assert isinstance(net[0], FusedMoE)
    assert [moe.experts.recipe.name for moe in net] == ["hp", "mxfp8"]
    assert unconvert(copy.deepcopy(net), "1") == ["1.experts"]
    assert unconvert(net) == ["0.experts", "1.experts"]
    assert [moe.experts.recipe.name for moe in net] == ["mxfp8_gemm", "hp"]
    assert unconvert(net) == []


def test_kept_weights_and_parametrizations() -> None:
    net, never = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    never.load_state_dict(net.state_dict())
    convert_linears(net, ["0", "1"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cache_quantized_weights(net, optimizer)
    x = torch.randn(8, 64)
    net(x).sum().backward()
    unconvert(net)
    assert torch.equal(net(x), never(x))
    net.load_state_dict(never.state_dict())
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(64, 64))
    want = weight_norm(copy.deepcopy(normed[0]))(x)
    convert_linears(normed, "0")
    weight_norm(normed[0])
    assert type(normed[0]).__name__ == "ParametrizedMXLinear"
    unconvert(normed)
    assert type(normed[0]).__name__ == "ParametrizedLinear"
    assert torch.equal(normed[0](x), want)


def test_conversions_that_cannot_be_undone() -> None:
    net = model()
    convert(net)
    with pytest.raises(ValueError, match=r"'dwon' matched no converted module, saw \*\.up, \*\.experts.*nearest is 'down'"):
        unconvert(net, ["up", "dwon"])
    want = run(net)
    recompute_blocks([net[1].experts], "full")
    with pytest.raises(ValueError, match=r"converted forward of 1\.experts \(TitanExperts\) is wrapped .* recipe=\"bf16\" gives the same"):
        unconvert(net)
    assert isinstance(net[0].up, MXLinear), "all or nothing"
    assert same(run(net), want)
    net = model()
    convert(net)
    recompute_blocks([net[0].down], "full")
    for undo in (unconvert, lambda net: convert_linears(net, "down", "bf16")):
        with pytest.raises(ValueError, match=r"the forward of 0\.down \(MXLinear\) is wrapped"):
            undo(net)
    assert isinstance(net[1].down, MXLinear), "all or nothing"


def sharded(rank: int, world: int) -> None:
    x = torch.randn(192, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    mesh = init_device_mesh("cpu", (world,))
    results = []
    for converts in (True, False):
        net = model()
        if converts:
            convert(net)
        for layer in net:
            fully_shard(layer.up, mesh=mesh)  # an FSDP unit of its own
            fully_shard(layer.experts, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if converts:
            net(x).sum().backward()
            net.zero_grad()
            convert(net, "mxfp8")
            net(x).sum().backward()
            net.zero_grad()
            assert len(unconvert(net)) == 6
            assert [kind.__name__ for kind in type(net[0].up).__mro__[:3]] == ["FSDPLinear", "FSDPModule", "Linear"]
            assert type(net[0].experts).__name__ == "FSDPTitanExperts"
            assert isinstance(net[0].up, FSDPModule)
        y = net(x)
        y.float().square().sum().backward()
        assert all(module._get_fsdp_state() is not None for module in net.modules() if isinstance(module, FSDPModule))
        results.append((y.detach(), {name: p.grad.full_tensor() for name, p in net.named_parameters()}))  # type: ignore[union-attr]
    (y, grads), (want, want_grads) = results
    assert torch.equal(y, want)
    assert list(grads) == list(want_grads)
    assert all(torch.equal(grads[name], want_grads[name]) for name in grads)


def test_sharded_by_fsdp2() -> None:
    run_ranks(sharded, 2)


def tensor_parallel(rank: int, world: int) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    results = []
    for converts in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False))
        if converts:
            convert_linears(net, ["0", "1"])
        parallelize_module(net, init_device_mesh("cpu", (world,)), {"0": ColumnShards(), "1": RowShards()})
        if converts:
            assert unconvert(net) == ["0", "1"]
        results.append(net(x))
    assert torch.equal(*results)


def test_tensor_parallel_shards() -> None:
    run_ranks(tensor_parallel, 2)
