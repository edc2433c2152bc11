"""convert_experts: an existing model's grouped GEMMs in MXFP8, by name; it refuses to do nothing."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.truth import sqnr
from tests.user_experts import CallingExperts, PublicExperts, StackedExperts, TitanExperts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mxep.moe import Experts, MoE, MoEConfig
from mxep.parallel import convert_experts, recompute_blocks, unconvert

COUNTS = torch.tensor([32, 64, 0, 96])


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.shared_experts = nn.Linear(64, 64, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, COUNTS)


def model(kind: type[StackedExperts] = TitanExperts, num_layers: int = 2) -> nn.Module:
    layers = nn.ModuleList([Layer(kind(64, 96, 4, seed=seed)) for seed in range(num_layers)])
    return nn.ModuleDict({"layers": layers}).bfloat16()


def run(net: nn.Module, recompute: bool = False) -> list[Tensor]:
    """Output, dx and the weights' gradients of both layers."""
    x = torch.randn(192, 64, generator=torch.Generator().manual_seed(7)).bfloat16().requires_grad_()
    y = x
    for layer in net["layers"]:
        y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
    y.backward(torch.randn(192, 64, generator=torch.Generator().manual_seed(8)).bfloat16())
    return [y.detach(), x.grad, *(p.grad for name, p in net.named_parameters() if "shared" not in name)]


@pytest.mark.parametrize("kind", [TitanExperts, PublicExperts])
def test_conversion_computes_in_mxfp8(kind: type[StackedExperts]) -> None:
    plain, converted = model(kind), model(kind)
    assert convert_experts(converted, "experts", "mxfp8_wgrad_with_hp") == ["layers.0.experts", "layers.1.experts"]
    for reference, value, called in zip(run(plain), run(converted), run(model(CallingExperts)), strict=True):
        assert not torch.equal(reference, value)
        assert sqnr(reference, value) >= 20  # through two layers of three GEMMs; one GEMM alone below
        assert torch.equal(value, called)  # the numbers of code that calls the MXFP8 GEMM itself
    assert list(plain.state_dict()) == list(converted.state_dict())


def test_one_converted_gemm_is_as_exact_as_mxfp8_is() -> None:
    class Single(StackedExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))

    plain = Single(64, 96, 4).bfloat16()
    converted = copy.deepcopy(plain)
    convert_experts(converted, "*", "mxfp8_wgrad_with_hp")
    results = []
    for experts in (plain, converted):
        x = torch.randn(192, 64, generator=torch.Generator().manual_seed(7)).bfloat16().requires_grad_()
        y = experts(x, COUNTS)
        y.backward(torch.randn(192, 96, generator=torch.Generator().manual_seed(8)).bfloat16())
        results.append((y, x.grad, experts.w1.grad))
    for name, floor_db, reference, value in zip(("o", "dx", "dw"), (27, 25, 24), *results, strict=True):
        assert sqnr(reference, value) >= floor_db, name
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_gemm", "mxfp8"])
def test_conversion_survives_checkpointing_compiling_and_copying(recipe: str) -> None:
    net = model()
    convert_experts(net, "experts", recipe)
    twin, compiled, both = copy.deepcopy(net), copy.deepcopy(net), copy.deepcopy(net)
    want = run(net)
    for layers in (compiled["layers"], both["layers"]):
        for index in range(2):
            layers[index] = torch.compile(layers[index], backend="aot_eager")
    for name, got in (("checkpoint", run(twin, recompute=True)), ("compile", run(compiled)), ("both", run(both, recompute=True))):
        for reference, value in zip(want, got, strict=True):
            assert torch.equal(reference, value), name


def test_layers_that_are_alike_share_a_graph() -> None:
    """torch gives up after 8 graphs of a function; with `fullgraph` that is an error."""
    net = model(num_layers=9)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(0.25)  # or the last layers' values overflow
    convert_experts(net, "experts", "mxfp8_wgrad_with_hp")
    want = run(net)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in net["layers"]:
        layer.compile(backend="aot_eager", fullgraph=True)
    for reference, value in zip(want, run(net), strict=True):
        assert torch.equal(reference, value)
        assert reference.isfinite().all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_converted_model_that_was_saved_whole_is_read_again() -> None:
    net, file = model(), io.BytesIO()
    convert_experts(net, "experts", "mxfp8_wgrad_with_hp")
    torch.save(net, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with torch.no_grad():  # what the copy computes with are its own weights
        for weight in (*net.parameters(), *read.parameters()):
            weight.mul_(2)
    for reference, value in zip(run(net), run(read), strict=True):
        assert torch.equal(reference, value)
    assert unconvert(read) == ["layers.0.experts", "layers.1.experts"]


def test_recipes_per_layer() -> None:
    plain, mixed, first = model(), model(), model()
    convert_experts(mixed, "experts", {"layers.0": "mxfp8_wgrad_with_hp", "*": "hp"})
    convert_experts(first, "layers.0.experts", "mxfp8_wgrad_with_hp")
    for a, b in zip(run(mixed), run(first), strict=True):
        assert torch.equal(a, b)
    first.zero_grad()
    convert_experts(first, "layers.0.experts", "hp")  # converting again replaces the recipe
    for a, b in zip(run(plain), run(first), strict=True):
        assert torch.equal(a, b)


class Around(StackedExperts):
    """Stacked experts that call other experts."""

    def __init__(self) -> None:
        super().__init__(64, 96, 4)
        self.inner = TitanExperts(64, 96, 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.inner(x, counts)


def test_a_module_inside_a_converted_one_has_its_recipe() -> None:
    """The outer module's swap would catch the inner one's grouped GEMMs in high precision."""
    net = nn.ModuleDict({"experts": Around()})
    for recipes in ({"experts.inner": "hp", "*": "mxfp8_wgrad_with_hp"}, {"experts.inner": "mxfp8_wgrad_with_mx", "*": "hp"}):
        with pytest.raises(
            ValueError, match=r"experts\.inner with recipe \w+ is inside of experts with recipe \w+, .* one recipe for both"
        ):
            convert_experts(net, "*", recipes)
    assert "forward" not in vars(net["experts"])
    convert_experts(net, "*", "mxfp8_wgrad_with_hp")
    with pytest.raises(ValueError, match=r"inside of experts with recipe mxfp8_wgrad_with_hp"):
        convert_experts(net, "experts.inner", "hp")
    convert_experts(net, "*", "hp")


class Batched(nn.Module):
    """A grouped GEMM of as many rows for each expert, which the conversion leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 64, 64).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x.unflatten(0, (4, -1)), self.w.transpose(-2, -1)).flatten(0, 1)


def test_a_module_without_rows_times_experts_raises() -> None:
    net, x = nn.ModuleDict({"experts": Batched()}), torch.randn(128, 64).bfloat16()
    plain = net["experts"](x)
    convert_experts(net, "experts", "mxfp8_wgrad_with_hp")
    with pytest.raises(ValueError, match=r"Batched called neither .* with 2-D rows and stacked 3-D weights, so this conversion changes no"):
        net["experts"](x)
    convert_experts(net, "experts", "bf16")
    assert torch.equal(net["experts"](x), plain), "no part of it may run in MXFP8"


def test_layers_of_mxep_only_get_the_recipe() -> None:
    net = nn.ModuleList([MoE(MoEConfig(64, 96, 4, 2), "hp") for _ in range(2)])
    assert convert_experts(net, ["0.experts"], "mxfp8_wgrad_with_hp") == ["0.experts"]
    assert [moe.experts.recipe.name for moe in net] == ["mxfp8_wgrad_with_hp", "hp"]
    assert isinstance(net[0].experts, Experts)
    assert "forward" not in vars(net[0].experts)


def test_a_replaced_forward_is_not_lost() -> None:
    """A forward that was replaced before is refused; a forward around a converted module stays when it is converted again."""
    net = model()
    recompute_blocks([net["layers"][1].experts], "full")
    with pytest.raises(ValueError, match=r"layers\.1\.experts \(TitanExperts\) has a forward of its own.* convert it before that"):
        convert_experts(net)
    assert "forward" not in vars(net["layers"][0].experts), "all or nothing"

    net = model()
    plain = run(net)
    net.zero_grad()
    convert_experts(net, recipe="mxfp8")
    calls = []
    for layer in net["layers"]:
        layer.experts.forward = lambda *args, inner=layer.experts.forward: calls.append(inner) or inner(*args)
    assert not torch.equal(run(net)[0], plain[0])
    net.zero_grad()
    convert_experts(net, recipe="bf16")
    assert all(torch.equal(a, b) for a, b in zip(run(net), plain, strict=True))
    assert len(calls) == 4


def test_conversion_that_matched_nothing_raises() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"'moe.experts' matched no module .* saw layers\.\*\.experts; .* the nearest is '\*\.experts'"):
        convert_experts(net, ["experts", "moe.experts"])
    with pytest.raises(ValueError, match=r"'shared_experts' matched no module"):  # no stacked weights in there
        convert_experts(net, "shared_experts")
    with pytest.raises(ValueError, match="names nothing"):
        convert_experts(net, [])
    with pytest.raises(ValueError, match=r"saw none; its modules are \*; give whole parts"):
        convert_experts(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "experts")
    with pytest.raises(ValueError, match=r"'experts' matched no module .* saw the model itself; give .* or wildcards"):
        convert_experts(TitanExperts(64, 96, 4), "experts")
    with pytest.raises(ValueError, match="'mxfp9' is unknown"):
        convert_experts(net, "experts", "mxfp9")
    with pytest.raises(ValueError, match=r"no recipe for layers\.1\.experts"):
        convert_experts(net, "experts", {"layers.0": "mxfp8"})
    assert all("forward" not in vars(module) for module in net.modules())


def test_a_forward_without_grouped_gemm_raises() -> None:
    class Loop(StackedExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return torch.cat([part @ w.t() for part, w in zip(x.split(counts.tolist()), self.w1, strict=True)])

    experts = Loop(64, 96, 4)
    convert_experts(experts, "*")
    with pytest.raises(ValueError, match="Loop called neither"):
        experts(torch.randn(192, 64), COUNTS)


def test_a_forward_may_leave_early_without_rows() -> None:
    """Under expert parallelism one rank alone may have none, and would end while the others wait."""

    class Early(TitanExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return super().forward(x, counts) if len(x) else x

    experts = Early(64, 96, 4).bfloat16()
    convert_experts(experts, "*")
    nothing = torch.randn(0, 64, dtype=torch.bfloat16)
    assert experts(nothing, torch.zeros(4, dtype=torch.int64)) is nothing


@pytest.mark.parametrize("names", [("self", "mat2"), ("mat_a", "mat_b")])
def test_operands_by_name(names: tuple[str, str]) -> None:
    class ByName(TitanExperts):
        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            grouped_mm = torch._grouped_mm if names[1] == "mat2" else torch.nn.functional.grouped_mm
            offs, second = counts.cumsum(0, dtype=torch.int32), self.w1.transpose(-2, -1)
            if names[0] == "self":
                return grouped_mm(x, offs=offs, **{names[1]: second})
            return grouped_mm(**dict(zip(names, (x, second), strict=True)), offs=offs)

    experts = ByName(64, 96, 4, seed=0).bfloat16()
    x = torch.randn(192, 64, dtype=torch.bfloat16)
    want = experts(x, COUNTS)
    net = nn.ModuleDict({"experts": experts})
    convert_experts(net, "experts", "mxfp8_wgrad_with_hp")
    assert 20 < sqnr(want, net["experts"](x, COUNTS)) < 60
