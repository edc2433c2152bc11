"""The ParallelStyle on 2 and 4 gloo ranks, in one group and in two groups of two, against one process that quantises the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import RankError, run_ranks
from tests.truth import sqnr
from tests.user_experts import CallingExperts, TitanExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from mxep.ep.blocks import combine, dispatch, permute, unpermute
from mxep.ep.exchange_plan import ExchangePlan
from mxep.moe import MoE, MoEConfig, fuse_layers
from mxep.mx import MXTensor
from mxep.parallel import MXFP8ExpertParallel, apply_mxfp8_expert_parallel, build_meshes, convert_experts, unconvert
from mxep.recipe import resolve_recipe

D, H, E = 64, 96, 8
MXFP8 = "mxfp8_wgrad_with_hp"


class Case(NamedTuple):
    """Rows and gradients of every rank of one EP group."""

    counts: list[Tensor]
    rows: list[Tensor]
    grads: list[Tensor]


def make_case(kind: str, group_size: int, dtype: torch.dtype, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    counts = []
    for rank in range(group_size):
        if kind == "balanced":
            drawn = torch.full((E,), 16)
        elif kind == "starved":  # only the first rank's experts get rows
            drawn = torch.randint(0, 40, (E,), generator=generator) * (torch.arange(E) < E // group_size)
        else:
            drawn = torch.randint(0, 40, (E,), generator=generator)
        counts.append(drawn * 0 if kind == "no_tokens" and rank == 0 else drawn)
    rows = [torch.randn(int(n.sum()), D, generator=generator).to(dtype) for n in counts]
    grads = [torch.randn(int(n.sum()), D, generator=generator).to(dtype) for n in counts]
    return Case(counts, rows, grads)


def merge(case: Case, items: list[Tensor]) -> Tensor:
    """All ranks' rows as one process sorts them: by expert, inside an expert by rank."""
    parts = [item.split(n.tolist()) for item, n in zip(items, case.counts, strict=True)]
    return torch.cat([parts[rank][expert] for expert in range(E) for rank in range(len(parts))])


def unmerge(case: Case, merged: Tensor) -> list[Tensor]:
    sizes = [int(case.counts[rank][expert]) for expert in range(E) for rank in range(len(case.counts))]
    parts = merged.split(sizes)
    world = len(case.counts)
    return [torch.cat([parts[expert * world + rank] for expert in range(E)]) for rank in range(world)]


def one_process(experts: nn.Module, case: Case, recipe_name: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Outputs and dx per rank, and dW, of the whole group in one process, by the same blocks."""
    recipe = resolve_recipe(recipe_name)
    rows = merge(case, case.rows).requires_grad_()
    plan = ExchangePlan.from_counts(sum(case.counts), None)
    permuted = permute(dispatch(rows, plan, recipe), plan, recipe)
    out = combine(unpermute(experts(permuted.rows, permuted.padded_counts), permuted), plan, recipe)
    out.backward(merge(case, case.grads))
    return unmerge(case, out.detach()), unmerge(case, rows.grad), [p.grad for p in experts.parameters()]


def dense(experts: nn.Module, case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The same in float64, expert by expert, by plain autograd."""
    rows = merge(case, case.rows).double().requires_grad_()
    weights = [p.detach().double().requires_grad_() for p in (experts.w1, experts.w2, experts.w3)]
    parts = rows.split(sum(case.counts).tolist())
    out = torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in zip(parts, *weights, strict=True)])
    out.backward(merge(case, case.grads).double())
    return unmerge(case, out.detach()), unmerge(case, rows.grad), [w.grad for w in weights]


def check_style(mesh, dtype: torch.dtype, kind: str, recompute: bool, seed: int) -> None:
    rank, world = mesh.get_local_rank(), mesh.size()
    case = make_case(kind, world, dtype, seed)
    layer = nn.ModuleDict({"experts": CallingExperts(D, H, E)}).to(dtype)
    reference = copy.deepcopy(layer["experts"])
    parallelize_module(layer["experts"], mesh, MXFP8ExpertParallel())
    x = case.rows[rank].clone().requires_grad_()
    if recompute:
        y = checkpoint(layer["experts"], x, case.counts[rank], use_reentrant=False)
    else:
        y = layer["experts"](x, case.counts[rank])
    assert not isinstance(y, MXTensor)
    assert y.dtype == dtype
    y.backward(case.grads[rank])
    same = one_process(reference, case, MXFP8)
    truth = dense(reference, case)
    grads = [p.grad.full_tensor() for p in layer["experts"].parameters()]
    what = f"{kind} {dtype} rank {rank}"
    assert torch.equal(y.detach(), same[0][rank]), what
    assert torch.equal(x.grad, same[1][rank]), what
    assert sqnr(truth[0][rank], y.detach()) > 22 or not len(y), what
    assert sqnr(truth[1][rank], x.grad) > 22 or not len(y), what
    for grad, want, exact in zip(grads, same[2], truth[2], strict=True):
        assert sqnr(want, grad) > 40, what
        assert sqnr(exact, grad) > 22, what
    assert layer["experts"]._ep_dispatched is None


def step(call: Callable[[Tensor, Tensor], Tensor], layer: nn.Module, case: Case, rank: int) -> list[Tensor]:
    """Output and gradients of this rank's rows and experts; `call` runs the layer."""
    x = case.rows[rank].clone().requires_grad_()
    y = call(x, case.counts[rank])
    y.backward(case.grads[rank])
    return [y.detach(), x.grad, *(p.grad.to_local() for p in layer.parameters())]


def check_shared_style(mesh) -> None:
    """Two modules in a row, one style object, with and without recomputation over both."""
    rank = mesh.get_local_rank()
    case = make_case("random", mesh.size(), torch.bfloat16, 11)
    results = []
    for recompute in (False, True):
        net = nn.Sequential(CallingExperts(D, H, E, seed=1), CallingExperts(D, H, E, seed=2)).bfloat16()
        style = MXFP8ExpertParallel()
        parallelize_module(net, mesh, {"0": style, "1": style})

        def both(rows: Tensor, counts: Tensor, net: nn.Module = net) -> Tensor:
            return net[1](net[0](rows, counts), counts)

        results.append(step(partial(checkpoint, both, use_reentrant=False) if recompute else both, net, case, rank))
    for once, again in zip(*results, strict=True):
        assert torch.equal(once, again)


def check_converted(mesh) -> None:
    """A torch._grouped_mm module, converted and in the style: MX rows reach its GEMMs, bit-equal to calling ours."""
    rank = mesh.get_local_rank()
    case = make_case("random", mesh.size(), torch.bfloat16, 12)
    results = []
    for kind in (CallingExperts, TitanExperts):
        layer = nn.ModuleDict({"experts": kind(D, H, E)}).bfloat16()
        if kind is TitanExperts:
            convert_experts(layer, "experts", MXFP8)
        apply_mxfp8_expert_parallel(layer, mesh)
        results.append(step(layer["experts"], layer, case, rank))
    for called, converted in zip(*results, strict=True):
        assert torch.equal(called, converted)


def check_recipe_of_converted_experts(mesh) -> None:
    """Without a recipe of its own, the style exchanges in the one that the experts have at that time; bit-equal to naming it."""
    rank = mesh.get_local_rank()
    case = make_case("random", mesh.size(), torch.bfloat16, 14)

    def results(layer: nn.ModuleDict) -> list[Tensor]:
        layer.zero_grad()
        return step(layer["experts"], layer, case, rank)

    following = apply_mxfp8_expert_parallel(nn.ModuleDict({"experts": TitanExperts(D, H, E)}).bfloat16(), mesh)
    found = {}
    for recipe in (MXFP8, "mxfp8_gemm", "mxfp8", "hp"):
        convert_experts(following, "experts", recipe)
        found[recipe] = results(following)
        named = nn.ModuleDict({"experts": TitanExperts(D, H, E)}).bfloat16()
        convert_experts(named, "experts", recipe)
        for got, want in zip(found[recipe], results(apply_mxfp8_expert_parallel(named, mesh, recipe)), strict=True):
            assert torch.equal(got, want), recipe
    assert not torch.equal(found[MXFP8][2], found["mxfp8_gemm"][2]), "wgrad gets rows that came in MXFP8 in the first alone"
    unconvert(following)
    assert torch.isfinite(results(following)[0]).all()


class Scaled(nn.Module):
    """A layer around experts, something for the compiler to do on both sides of them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.experts(x * 1.5, counts) * 2.0


def check_compiled(mesh) -> None:
    """The exchanges stay eager, what is between and around them is compiled; bit-equal to eager."""
    rank = mesh.get_local_rank()
    case = make_case("random", mesh.size(), torch.bfloat16, 13)
    results = []
    for compiled in (False, True):
        layer = Scaled(TitanExperts(D, H, E)).bfloat16()
        convert_experts(layer, "experts", MXFP8)
        apply_mxfp8_expert_parallel(layer, mesh)
        results.append(step(torch.compile(layer, backend="aot_eager") if compiled else layer, layer, case, rank))
    for eager, graph in zip(*results, strict=True):
        assert torch.equal(eager, graph)


def check_moe(mesh, recipe: str, dtype: torch.dtype) -> None:
    """Our own layer over the group against one process; a NaN token on rank 0 stays alone on every rank."""
    rank, world = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(3)
    moe = MoE(MoEConfig(D, H, E, 3, num_shared_experts=1), recipe).to(dtype)
    twin = copy.deepcopy(moe)
    apply_mxfp8_expert_parallel(moe, mesh)
    assert moe.experts.w1.to_local().shape[0] == E // world
    tokens = [torch.randn(30 + 7 * r, D, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    tokens[0][5, 3] = float("nan")
    x, every = tokens[rank].clone().requires_grad_(), torch.cat(tokens).requires_grad_()
    y, want = moe(x), twin(every)
    y.sum().backward()
    want.sum().backward()
    start = sum(len(t) for t in tokens[:rank])
    mine = slice(start, start + len(x))
    poisoned_token = torch.arange(len(x)) == (5 if rank == 0 else -1)
    torch.testing.assert_close(y, want[mine], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(x.grad, every.grad[mine], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(y.isnan().any(1), poisoned_token)
    assert torch.equal(x.grad.isnan().any(1), poisoned_token)
    received = torch.zeros(E, dtype=torch.bool)
    received[twin.router(tokens[0][5:6]).experts[0]] = True
    for p in moe.experts.parameters():
        assert torch.equal(p.grad.full_tensor().isnan().flatten(1).any(1), received)


def two_ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    for seed, kind in enumerate(("random", "balanced", "starved", "no_tokens")):
        check_style(mesh, torch.bfloat16, kind, recompute=seed % 2 == 1, seed=seed)
    check_style(mesh, torch.float32, "random", recompute=True, seed=9)
    check_shared_style(mesh)
    check_converted(mesh)
    check_recipe_of_converted_experts(mesh)
    check_compiled(mesh)
    check_moe(mesh, "hp", torch.float32)
    check_moe(mesh, MXFP8, torch.float32)
    with pytest.raises(ValueError, match="divisible by it; change the number of experts"):
        parallelize_module(CallingExperts(D, H, 7), mesh, MXFP8ExpertParallel())
    with pytest.raises(ValueError, match="divisible by it"):
        apply_mxfp8_expert_parallel(MoE(MoEConfig(D, H, 7, 2)), mesh)
    with pytest.raises(ValueError, match="no module `experts`"):
        apply_mxfp8_expert_parallel(nn.Linear(4, 4), mesh)
    with pytest.raises(ValueError, match="is not divisible by the EP degree 3"):
        build_meshes(world, 3, "cpu")
    experts = parallelize_module(CallingExperts(D, H, E), mesh, MXFP8ExpertParallel())
    with pytest.raises(ValueError, match="got 1 positional inputs"):
        experts(torch.zeros(4, D))
    with pytest.raises(ValueError, match="multiples of 32"):
        experts(torch.zeros(8, 40), torch.ones(E, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"is \({E - world},\), its weights are of {E} experts; want \({E},\)"):
        experts(torch.zeros(E - world, D), torch.ones(E - world, dtype=torch.int64))


def four_ranks(rank: int, world: int) -> None:
    meshes = build_meshes(world, 2, "cpu")
    assert (meshes.dp.size(), meshes.ep.size(), meshes.dp_mod_ep.size()) == (4, 2, 2)
    assert meshes.ep.mesh.tolist() == ([0, 1] if rank < 2 else [2, 3])
    check_style(meshes.ep, torch.bfloat16, "random", recompute=False, seed=20 + rank // 2)  # each group its own rows
    check_style(meshes.ep, torch.bfloat16, "starved", recompute=True, seed=20)
    check_moe(meshes.ep, MXFP8, torch.float32)
    whole = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    check_style(whole, torch.bfloat16, "no_tokens", recompute=False, seed=22)
    check_style(whole, torch.bfloat16, "starved", recompute=False, seed=23)
    for names, message in (
        (("a", "ep"), r"dimensions \('a', 'ep'\), want one; pass mesh\['ep'\]$"),
        (("a", "b"), r"share the experts, as mesh\['b'\]$"),
        (None, r"the dimensions 2, want one; name them \(mesh_dim_names\)"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize_module(CallingExperts(D, H, E), init_device_mesh("cpu", (2, 2), mesh_dim_names=names), MXFP8ExpertParallel())


def test_style_on_two_ranks() -> None:
    run_ranks(two_ranks, 2)


def test_style_on_four_ranks_in_one_group_and_in_two() -> None:
    run_ranks(four_ranks, 4)


@pytest.mark.parametrize("layer", [MoE(MoEConfig(D, H, E, 2)), nn.ModuleDict({"experts": CallingExperts(D, H, E)})])
def test_invalid_meshes(layer: nn.Module) -> None:
    for mesh, got in (("ep", "'ep'"), (None, "None")):
        with pytest.raises(ValueError, match=rf"the mesh is {got}, want a torch DeviceMesh.*init_device_mesh"):
            apply_mxfp8_expert_parallel(layer, mesh)  # type: ignore[arg-type]


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="'mxfp9' is unknown"):
        MXFP8ExpertParallel("mxfp9")


def failing(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("told you so")
    torch.distributed.barrier()


def test_a_failing_rank_is_reported() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*told you so"):
        run_ranks(failing, 2)


def tied_experts(rank: int, world: int) -> list[tuple[int, bool, bool]]:
    """By kind of tie: parameters after sharding, whether both layers hold the same, and whether a step moves both."""
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)), []
    for kind in ("module", "fused", "parameters", "user's module"):
        a, b = (MoE(MoEConfig(64, 32, 4, 2), "hp") for _ in range(2))
        net = nn.Sequential(a, b)
        if kind in ("module", "fused"):
            b.experts = a.experts
        else:
            for name, parameter in a.experts.named_parameters():
                b.experts.register_parameter(name, parameter)
        if kind == "fused":
            fuse_layers(net)
        for layer in net:
            if kind == "user's module":
                parallelize_module(layer.experts, mesh, MXFP8ExpertParallel("hp"))
            else:
                apply_mxfp8_expert_parallel(layer, mesh)
        w1 = [layer.experts.w1 for layer in net]
        before = w1[0].full_tensor().clone()
        if kind != "user's module":
            net(torch.randn(8, 64)).square().sum().backward()
            torch.optim.SGD(net.parameters(), 1.0).step()
        moved = kind == "user's module" or not torch.equal(w1[1].full_tensor(), before)
        found.append((len(list(net.parameters())), w1[0] is w1[1], moved))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_tied_experts_stay_tied(world: int) -> None:
    assert run_ranks(tied_experts, world) == [[(5, True, True)] * 4] * world


def test_hooks_of_parameters_are_not_lost() -> None:
    run_ranks(hooks_of_parameters, 1)


def hooks_of_parameters(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        layer = MoE(MoEConfig(64, 32, 4, 2), "hp")
        getattr(layer.experts.w2, register)(print)
        with pytest.raises(ValueError, match=r"Experts.w2 has hooks, .*, want none yet; register them afterwards"):
            apply_mxfp8_expert_parallel(layer, mesh)
