"""Functions without a second derivative raise on every way to one; tensors that backward does not need are neither made nor saved."""

from __future__ import annotations

import ast
import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from tests.derivative_cases import CASES, SYMMETRIC, Case, leaf, values
from tests.operator_calls import OperatorCalls
from tests.truth import saved_tensors
from tests.virtual import run_virtual
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import mxep
from mxep import ep_grouped_mm, to_mxfp8_a2a_dequant
from mxep.grouped_mm.function import expert_mm
from mxep.moe.experts import Experts
from mxep.parallel import ColumnShards, GatheredRegion, RowShards
from mxep.recipe import RECIPES

OFFS = torch.tensor([32, 64], dtype=torch.int32)
SOURCE = Path(mxep.__file__).parent
TWICE = "differentiate this function twice.*once_differentiable.*plain torch"


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and w (G, N, K), leaves in float32."""
    return torch.randn(64, 96).requires_grad_(), torch.randn(2, 32, 96).requires_grad_()


def refuse_second(case: Case, constant: bool, residual: bool) -> None:
    """From every gradient to every leaf; with a constant gradient or not, and with another path to the leaves or not."""
    out = values(case.run(*case.leaves))
    loss = out.sum() if constant else out.square().sum()
    if residual:
        loss = loss + sum(leaf.pow(3).sum() for leaf in case.leaves)
    firsts = torch.autograd.grad(loss, case.leaves, create_graph=True)
    for first in firsts[: case.ours]:
        for wanted in case.leaves[: case.ours]:
            with pytest.raises(RuntimeError, match=TWICE):
                torch.autograd.grad(first.square().sum(), wanted, retain_graph=True, allow_unused=True)
        with pytest.raises(RuntimeError, match=TWICE):
            first.square().sum().backward(retain_graph=True)
    assert all(leaf.grad is None for leaf in case.leaves)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_an_error(name: str, constant: bool, residual: bool) -> None:
    refuse_second(CASES[name](), constant, residual)


def test_a_second_derivative_of_a_layer_with_outputs_of_their_own_is_an_error() -> None:
    """Under hooks of saved tensors, as in a checkpoint, the outputs of a fused layer are a function of their own."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        case = CASES["FusedMoE"]()
        assert "_OutputsBackward" in names_before(values(case.run(*case.leaves)))
        refuse_second(case, constant=False, residual=True)


def names_before(tensor: Tensor) -> set[str]:
    """Names of the autograd functions that made a tensor."""
    found, nodes = set[str](), [tensor.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None:
            found.add(type(node).__name__)
            nodes += [earlier for earlier, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", SYMMETRIC)
def test_a_second_derivative_over_symmetric_memory_is_an_error(name: str) -> None:
    run_virtual(lambda rank, world, group: refuse_second(SYMMETRIC[name](group), constant=False, residual=True), 1)


@pytest.mark.parametrize("name", CASES)
def test_a_first_derivative_in_a_graph_is_the_same(name: str) -> None:
    case = CASES[name]()
    wanted = torch.autograd.grad(values(case.run(*case.leaves)).square().sum(), case.leaves)
    got = torch.autograd.grad(values(case.run(*case.leaves)).square().sum(), case.leaves, create_graph=True)
    for a, b in zip(wanted, got, strict=True):
        assert b.requires_grad
        assert (a - b).norm() <= 1e-2 * a.norm()  # torch's own backward of silu rounds otherwise in a graph


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["hvp", "vhp", "jvp", "hessian"])
def test_the_double_backward_of_torch_functional(name: str, kind: str) -> None:
    case = CASES[name]()
    rows = case.leaves[0].detach()[:, :1]

    def of_rows(column: Tensor) -> Tensor:
        out = values(case.run(column + case.leaves[0].detach()[:, 1:].new_zeros(case.leaves[0].shape), *case.leaves[1:]))
        return out.flatten() if kind == "jvp" else out.square().sum() + column.pow(3).sum()

    vectors = () if kind == "hessian" else (torch.ones_like(rows),)
    with pytest.raises(RuntimeError, match=TWICE):
        getattr(torch.autograd.functional, kind)(of_rows, rows, *vectors)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_an_error(name: str) -> None:
    case = CASES[name]()
    for number in range(len(case.leaves)):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(case.leaves[number], torch.ones_like(case.leaves[number]))
            leaves = (*case.leaves[:number], dual, *case.leaves[number + 1 :])
            if name in MODULES and number:
                continue  # a parameter of a module
            with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)jvp|forward.*AD"):
                case.run(*leaves)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_through_backward_is_an_error(name: str) -> None:
    case = CASES[name]()
    out = values(case.run(*case.leaves))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match=f"{TWICE}|use forward AD with aten::silu_backward that does not support it"):
            torch.autograd.grad(out, case.leaves, dual)


MODULES = ("experts, fused", "experts, fused, mx", "experts, one by one", "MoE", "MoE, hp", "FusedMoE", "MXLinear", "converted experts")
TRANSFORMS: dict[str, Callable[[Callable, Tensor], object]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CASES)
def test_transforms_of_torch_func_are_an_error(name: str, transform: str) -> None:
    case = CASES[name]()

    def loss(x: Tensor) -> Tensor:
        return values(case.run(x, *(leaf.detach() for leaf in case.leaves[1:]))).sum() + x.sum()

    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        TRANSFORMS[transform](loss, case.leaves[0].detach())


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_a_batch_are_right_or_an_error(name: str) -> None:
    case = CASES[name]()
    out = values(case.run(*case.leaves))
    batch = torch.randn(2, *out.shape)
    wanted = [torch.autograd.grad(out, case.leaves, grad, retain_graph=True) for grad in batch]
    try:
        got = torch.autograd.grad(out, case.leaves, batch, is_grads_batched=True)
    except (RuntimeError, NotImplementedError, ValueError):
        return
    for number, of_leaf in enumerate(got):
        for a, b in zip(of_leaf, (grads[number] for grads in wanted), strict=True):
            torch.testing.assert_close(a, b)


def test_derivatives_that_do_not_reach_our_functions_are_allowed() -> None:
    """Second derivatives of plain torch after a function of ours, whose first derivatives are in the same graph."""
    x, w = leaf(64, 64), leaf(3, 64)
    features = to_mxfp8_a2a_dequant(x, [64], [64], "")
    first_x, first_w = torch.autograd.grad((features @ w.T).pow(3).sum(), (x, w), create_graph=True)
    (second,) = torch.autograd.grad(first_w.square().sum(), w, retain_graph=True)
    fixed, again = features.detach(), w.detach().requires_grad_()
    (first,) = torch.autograd.grad((fixed @ again.T).pow(3).sum(), again, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), again)[0])
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(first_x.sum(), w)


def test_a_model_without_our_functions_has_second_derivatives() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    assert torch.autograd.gradgradcheck(model, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_the_record_of_the_inputs_keeps_none_of_them_alive() -> None:
    x = leaf(64, 64) * 1.0  # no leaf: nothing but a graph could hold it
    kept = weakref.ref(x.untyped_storage())
    out = to_mxfp8_a2a_dequant(x, [64], [64], "")
    del x
    gc.collect()
    assert kept() is None
    out.sum().backward()


LINEAR = {"_Outputs"}  # whose backward is the identity, and the next node's is an error: a test above covers it


def functions_in(path: Path) -> list[str]:
    bases = {"torch.autograd.Function", "autograd.Function", "Function"}
    return [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and bases & {*map(ast.unparse, node.bases)}
    ]


@pytest.mark.parametrize("path", [p for p in sorted(SOURCE.rglob("*.py")) if functions_in(p)], ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_autograd_function_is_of_first_order(path: Path) -> None:
    module = importlib.import_module(".".join(("mxep", *path.relative_to(SOURCE).with_suffix("").parts)))
    for name in {*functions_in(path)} - LINEAR:
        assert getattr(module, name).backward.__qualname__.startswith(name), name
        assert getattr(module, name).backward.__wrapped__, f"{path}: {name} is no first_order function"


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_evaluation_quantises_rows_alone(name: str) -> None:
    a, w = operands()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, OperatorCalls() as ran, saved_tensors() as saved:
            expert_mm(a, w, OFFS, RECIPES[name])
        assert ran.short_names("mxep") == ["quantize", "quantize", "grouped_mm_mx"]
        assert saved == []


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
def test_ep_grouped_mm_makes_nothing_for_wgrad_in_evaluation(name: str) -> None:
    a, w = operands()
    with torch.no_grad(), OperatorCalls() as ran, saved_tensors() as saved:
        out = ep_grouped_mm(a, w, [64], [64], torch.tensor([32, 32]), "", name)
    assert {"quantize_rowwise_columnwise", "quantize_columnwise"}.isdisjoint(ran.short_names("mxep"))
    assert ran.short_names("mxep").count("grouped_mm_mx") == 1
    assert saved == []
    trained = ep_grouped_mm(a, w, [64], [64], torch.tensor([32, 32]), "", name)
    assert torch.equal(out, trained)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.gemm == "mxfp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_frozen_weights_keep_no_input(name: str, fused: bool) -> None:
    experts = Experts(64, 32, 2, name)
    experts.fused = fused
    experts.requires_grad_(False)
    x = torch.randn(64, 64).requires_grad_()
    with saved_tensors() as saved:
        y = experts(x, torch.tensor([32, 32]))
    weights = {w.untyped_storage().data_ptr() for w in experts.parameters()}
    kept = [t for t in saved if t.untyped_storage().data_ptr() not in weights]
    assert not [t for t in kept if t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()]
    assert not [t for t in kept if t.shape == x.shape and t.dtype == torch.float8_e4m3fn]
    y.sum().backward()
    assert x.grad is not None


@pytest.fixture
def mesh(one_rank: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))


def test_second_derivatives_of_sharded_experts(mesh: DeviceMesh) -> None:
    """torch's own `to_local` would cut the graph in backward, and all of the experts' part of the second derivative with it."""
    moe = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2))
    mxep.apply_mxfp8_expert_parallel(moe, mesh)
    weight, x = moe.experts.w1, leaf(16, 64)
    (first,) = torch.autograd.grad(moe(x).square().sum() + weight.pow(3).sum().full_tensor(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=TWICE):
        torch.autograd.grad(first.pow(2).sum().full_tensor(), weight, retain_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=TWICE):
        first.pow(2).sum().full_tensor().backward()


def test_second_derivatives_through_tensor_parallelism(mesh: DeviceMesh) -> None:
    region = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False))
    parallelize_module(region, mesh, {"0": ColumnShards(), "2": RowShards(), "": GatheredRegion(1)})
    x = leaf(2, 8, 64)
    (first,) = torch.autograd.grad(region(x).square().sum() + x.pow(3).sum(), x, create_graph=True)
    for wanted in (x, *region.parameters()):
        with pytest.raises(RuntimeError, match=TWICE):
            torch.autograd.grad(first.square().sum(), wanted, retain_graph=True, allow_unused=True)
