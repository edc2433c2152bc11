"""The five blocks under torch.compile (aot_eager, CPU): supported graphs with the bits of eager, and graph breaks that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.chains import by_plan
from tests.ranks import run_ranks
from tests.truth import assert_same, make_case, raises_naming, sent_bytes
from torch.utils.checkpoint import checkpoint

import mxep.grouped_mm.function
from mxep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_and_pad,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
    to_mxfp8_then_scaled_grouped_mm,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.ep import blocks
from mxep.ep.exchange_plan import ExchangePlan
from mxep.recipe import RECIPES, resolve_recipe

D, N, L, ROWS = 64, 96, 2, 45
COUNTS = torch.tensor([5, 40])
graph_break = torch._dynamo.graph_break
Chain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def refused() -> Any:
    """The message about the graph break, by itself or inside the compiler's error."""
    errors = (ValueError, torch._dynamo.exc.InternalTorchDynamoError)
    return pytest.raises(errors, match=r"(?s)an MX tensor of shape .*left a compiled graph.*one graph.*torch\.compiler\.disable")


def compiled(function: Callable, fullgraph: bool = False) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def dispatch(x: torch.Tensor) -> torch.Tensor:
    return a2a_dispatch_mxfp8_fwd_hp_bwd(x, [ROWS], [ROWS])


def permute(rows: torch.Tensor) -> tuple:
    return permute_mxfp8_fwd_hp_bwd(rows, COUNTS, 1, L)


def gemm(rows: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs, out_dtype=w.dtype, wgrad_with_hp=True)


def unpermute(y: torch.Tensor, row_map: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return unpermute_hp_fwd_mxfp8_bwd(y, row_map, shape)


def combine(y: torch.Tensor) -> torch.Tensor:
    return a2a_combine_hp_fwd_mxfp8_bwd(y, [ROWS], [ROWS])


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = permute(dispatch(x))
    return combine(unpermute(gemm(rows, w, offs), row_map, shape))


def scored(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A multiply between the GEMM and unpermute, one on the MX activation, a residual and a second consumer."""
    mx = dispatch(x)
    shape, rows, row_map, _, offs = permute(mx)
    y = unpermute(gemm(rows, w, offs) * 2.0, row_map, shape)
    return combine(y) + combine(y) * 0.5 + torch.cat([mx, mx[:, : N - D]], 1) * 3.0


def with_break_after(block: str) -> Chain:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mx = dispatch(x)
        if block == "dispatch":
            graph_break()
        shape, rows, row_map, _, offs = permute(mx)
        if block == "permute":
            graph_break()
        y = gemm(rows, w, offs)
        if block == "gemm":
            graph_break()
        y = unpermute(y, row_map, shape)
        if block == "unpermute":
            graph_break()
        return combine(y)

    return broken


def checkpointed(function: Callable) -> Callable:
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


eager_dispatch, eager_permute, eager_unpermute, eager_combine = map(torch.compiler.disable, (dispatch, permute, unpermute, combine))


def exchanges_eager(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = permute(eager_dispatch(x))
    return eager_combine(unpermute(gemm(rows, w, offs), row_map, shape))


def movers_eager_too(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    shape, rows, row_map, _, offs = eager_permute(eager_dispatch(x))
    return eager_combine(eager_unpermute(gemm(rows, w, offs), row_map, shape))


def with_only(gemm_like: Callable = gemm, combine_like: Callable = combine, unpermute_like: Callable = unpermute) -> Chain:
    """Eager except for the given blocks."""

    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shape, rows, row_map, _, offs = permute(dispatch(x))
        return combine_like(unpermute_like(gemm_like(rows, w, offs), row_map, shape))

    return mixed


# name: (function to run, the eager truth, what the backward of the GEMM must have seen; None for either)
CASES: dict[str, tuple[Callable[[], Chain], Chain, str | None]] = {
    "one graph": (lambda: compiled(chain, True), chain, "MXTensor"),
    "one graph of dynamic shapes": (lambda: torch.compile(chain, backend="aot_eager", dynamic=True, fullgraph=True), chain, "MXTensor"),
    "one graph with ops between": (lambda: compiled(scored, True), scored, None),
    "checkpoint over the graph": (lambda: checkpointed(compiled(chain, True)), chain, "MXTensor"),
    "checkpoint inside the graph": (lambda: compiled(checkpointed(chain), True), chain, "MXTensor"),
    "checkpoint without a graph": (lambda: checkpointed(chain), chain, "MXTensor"),
    "exchanges left eager": (lambda: compiled(exchanges_eager), chain, None),
    "exchanges and movers left eager": (lambda: compiled(movers_eager_too), chain, None),
    "only the GEMM compiled": (lambda: with_only(compiled(gemm, True)), chain, None),
    "only combine compiled": (lambda: with_only(combine_like=compiled(combine, True)), chain, "Tensor"),
    "only unpermute compiled": (lambda: with_only(unpermute_like=compiled(unpermute, True)), chain, None),
    "a break after the GEMM": (lambda: compiled(with_break_after("gemm")), chain, None),
    "a break after unpermute": (lambda: compiled(with_break_after("unpermute")), chain, None),
}


@pytest.fixture
def saw(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Iterator[list[str]]:
    """Types of the gradients that the backward of the GEMM met, in a process group of one rank."""
    seen: list[str] = []
    original = mxep.grouped_mm.function.wgrad_gemm

    def spy(grad: Any, *args: Any) -> torch.Tensor:
        seen.append(type(grad).__name__)
        return original(grad, *args)

    monkeypatch.setattr(mxep.grouped_mm.function, "wgrad_gemm", spy)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def run(function: Chain, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """(out, dx, dw)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, D, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(L, N, D, generator=generator).to(dtype).requires_grad_()
    out = function(x, w)
    out.square().sum().backward()
    return [out.detach(), x.grad, w.grad]


def assert_runs_like(function: Chain, truth: Chain, dtype: torch.dtype, seed: int = 0) -> None:
    for name, got, want in zip(("out", "dx", "dw"), run(function, dtype, seed), run(truth, dtype, seed), strict=True):
        assert_same(got, want, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_eager(case: str, dtype: torch.dtype, saw: list[str]) -> None:
    build, truth, expected = CASES[case]
    function = build()
    run(function, dtype)
    if expected is not None:
        assert set(saw) == {expected}, "the MX gradient is kept"
    assert_runs_like(function, truth, dtype, seed=1)  # the second call of a graph that is there already


# What torch's own backward hands on as it is would bring an MX gradient to an input of the graph.
HANDED_ON: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda y: y + 1.0,
    "residual": lambda y: y + y.detach(),
    "clone": lambda y: y.clone(),
    "view": lambda y: y.view_as(y),
    "negation": lambda y: -y,
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_no_mx_gradient_reaches_an_input_of_a_graph(name: str, saw: list[str]) -> None:
    change = HANDED_ON[name]

    def changed_combine(y: torch.Tensor) -> torch.Tensor:
        return combine(change(y))

    def changed_unpermute(y: torch.Tensor, row_map: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return unpermute(change(y), row_map, shape)

    def residual_from_outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shape, rows, row_map, _, offs = permute(dispatch(x))
        return combine(change(unpermute(gemm(rows, w, offs), row_map, shape)) + change(torch.cat([x, x[:, : N - D]], 1)))

    def movers_alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shape, rows, row_map, _, _ = permute_and_pad(change(x), COUNTS, 1, L, 32)
        return combine(unpermute(rows, row_map, shape)) + w.sum()

    assert_runs_like(with_only(combine_like=compiled(changed_combine, True)), with_only(combine_like=changed_combine), torch.float32)
    mine, truth = with_only(unpermute_like=compiled(changed_unpermute, True)), with_only(unpermute_like=changed_unpermute)
    assert_runs_like(mine, truth, torch.float32)
    assert_runs_like(compiled(residual_from_outside, True), residual_from_outside, torch.bfloat16)
    assert_runs_like(compiled(movers_alone, True), movers_alone, torch.float32)


@pytest.mark.parametrize("block", ["dispatch", "permute"])
def test_a_graph_break_that_mx_cannot_cross_raises_our_message(block: str, saw: list[str]) -> None:
    with refused():
        run(compiled(with_break_after(block)), torch.float32)


def test_a_compiled_producer_with_an_eager_consumer_raises_our_message(saw: list[str]) -> None:
    plan = ExchangePlan.from_counts(COUNTS, dist.group.WORLD)
    consumers: dict[str, Callable] = {
        "permute": permute,
        "the layer's permute": lambda mx: blocks.permute(mx, plan, resolve_recipe(None)),
        "permute_and_pad": lambda mx: permute_and_pad(mx, COUNTS, 1, L, 32),
        "the GEMM": lambda mx: gemm(mx, torch.randn(1, N, D), torch.tensor([ROWS])),
        "a multiply": lambda mx: mx * 2,
        "dequantize": lambda mx: mx.dequantize(),
        "unpermute": lambda mx: unpermute(mx, torch.arange(ROWS), torch.Size([ROWS + 1, D])),
        "another graph": compiled(lambda mx: mx * 2),
    }
    mx = compiled(dispatch)(torch.randn(ROWS, D, requires_grad=True))
    for name, consume in consumers.items():
        with refused():
            consume(mx)
            pytest.fail(name)


def test_without_gradients_every_graph_break_works(saw: list[str]) -> None:
    x, w = torch.randn(ROWS, D, requires_grad=True), torch.randn(L, N, D, requires_grad=True)
    for block in ("dispatch", "permute", "gemm"):
        with torch.no_grad():
            assert_same(compiled(with_break_after(block))(x, w), chain(x, w))


def test_other_exchanges_in_one_graph(saw: list[str]) -> None:
    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = to_mxfp8_a2a_dequant(x, [ROWS], [ROWS])
        shape, rows, row_map, _, offs = permute_and_pad(rows, COUNTS, 1, L, 32)
        y = to_mxfp8_then_scaled_grouped_mm(
            rows, w.transpose(-2, -1), offs, torch.ones(L, N, dtype=w.dtype), w.dtype, pad_token_groups_for_grouped_mm=True
        )
        return a2a_combine_hp_fwd_mxfp8_bwd(unpermute(y, row_map, shape), [ROWS], [ROWS], mxfp8_bwd=False)

    for dtype in (torch.bfloat16, torch.float32):
        assert_runs_like(compiled(plain, True), plain, dtype)


@pytest.mark.parametrize("name", list(RECIPES))
def test_plan_and_recipe_in_one_graph(name: str, saw: list[str]) -> None:
    recipe = RECIPES[name]
    for group in (None, dist.group.WORLD):
        plan = ExchangePlan.from_counts(COUNTS, group)

        def layer(x: torch.Tensor, w: torch.Tensor, plan: ExchangePlan = plan) -> torch.Tensor:
            return by_plan(x, w, plan, recipe)

        assert_runs_like(compiled(layer, True), layer, torch.bfloat16)


def test_offsets_are_still_checked_outside_of_graphs(saw: list[str]) -> None:
    with raises_naming("do not decrease"):
        gemm(torch.randn(64, D), torch.randn(L, N, D), torch.tensor([64, 32]))


def on_ranks(rank: int, world: int) -> None:
    """One graph over an exchange between ranks whose splits change from step to step."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(9)
    w = torch.randn(2, N, D, generator=generator)

    def step(x: torch.Tensor, w: torch.Tensor, outs: list[int], ins: list[int], counts: torch.Tensor, group: Any) -> torch.Tensor:
        mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, outs, ins, group)
        shape, rows, row_map, _, offs = permute_mxfp8_fwd_hp_bwd(mx, counts, world, 2)
        y = unpermute_hp_fwd_mxfp8_bwd(gemm(rows, w, offs), row_map, shape)
        return a2a_combine_hp_fwd_mxfp8_bwd(y, ins, outs, group)

    graph = compiled(step, True)
    for seed, kind in enumerate(["random", "uneven", "starved"]):
        case = make_case(kind, world, 2, rows=30 + 3 * seed, seed=seed)
        for group in (dist.group.WORLD, None) if seed == 0 else (None,):
            results = []
            for function in (graph, step):
                x, weight = case.inputs(D, torch.float32)[rank].requires_grad_(), w.clone().requires_grad_()
                with sent_bytes() as calls:
                    out = function(x, weight, case.received(rank), case.sent(rank), case.rank_major(rank), group)
                    out.square().sum().backward()
                assert len(calls) == 4, "one exchange per block and direction"
                results.append([out.detach(), x.grad, weight.grad])
            for name, got, want in zip(("out", "dx", "dw"), *results, strict=True):
                assert_same(got, want, f"{kind} {name}")


def test_two_ranks_with_changing_splits() -> None:
    run_ranks(on_ranks, 2)
