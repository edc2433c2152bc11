"""`--activation-checkpoint auto`: the choice fits, more memory never saves fewer layers, ranks agree, and no choice changes a bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tests.ranks import run_ranks
from tests.steps import done, same, state_of, trainer
from tests.train.test_build import DEEPSEEK, batch

from mxep.models.presets import MODELS
from mxep.parallel import ParallelDims, Recompute, build_meshes
from mxep.recipe import resolve_recipe
from mxep.train import recompute_budget
from mxep.train.build import Build, build_options, build_stages
from mxep.train.config import TrainConfig
from mxep.train.describe import describe_recompute
from mxep.train.memory import peak_memory, rank_memory, received_bytes
from mxep.train.recompute_budget import MARGIN, RecomputeChoice, agree_on_recompute, candidates, last_that_fits, recompute_choices
from mxep.train.resolved_config import resolve
from mxep.train.trainer import Trainer

MXFP8, DIMS = resolve_recipe(None), ParallelDims(ep=4)
SMALL = {"model": "dsv3_debug_cpu", "device": "cpu"}


def choices(tokens: int, dims: ParallelDims = DIMS, stage: int = 0, **options: Any) -> list[RecomputeChoice]:
    model, ranks = MODELS["dsv3_16b"], dims.ep * dims.pp
    return recompute_choices(rank_memory(model, MXFP8, dims, ranks)[stage], model, MXFP8, dims, tokens, dims.pp - stage, **options)


@pytest.mark.parametrize(("tokens", "fused", "pp"), [(2048, True, 1), (32768, True, 1), (32768, False, 1), (8192, True, 2)])
def test_more_memory_never_keeps_less(tokens: int, fused: bool, pp: int) -> None:
    for stage in range(pp):
        every = choices(tokens, ParallelDims(ep=4, pp=pp), stage, fused_layer=fused)
        assert all(below.peak.kept < above.peak.kept for below, above in pairwise(every))
        needs = sorted(choice.needed for choice in every)
        capacities = sorted(round(need / (1 - MARGIN)) + step for need in needs for step in (-2, 2))
        found = [last_that_fits(every, capacity) for capacity in capacities]
        assert found == sorted(found)
        for capacity, number in zip(capacities, found, strict=True):
            assert every[number].needed <= (1 - MARGIN) * capacity or number == 0
            assert every[number].peak.total <= every[number].needed
        assert found[0] == 0
        assert found[-1] == len(every) - 1, "everything is saved if it fits"


def test_the_first_and_last_candidates_are_full_and_none() -> None:
    every, plan = choices(8192, fused_layer=True), (MODELS["dsv3_16b"], MXFP8, DIMS, 4, 8192)
    assert [{*every[0].modes}, {*every[-1].modes}] == [{"full"}, {"none"}]
    for choice, mode in ((every[0], "full"), (every[-1], "none")):
        assert choice.peak == peak_memory(*plan, recompute=mode, fused_layer=True)[0]
    smallest = round(every[0].needed / (1 - MARGIN)) + 2
    assert set(every[last_that_fits(every, smallest)].modes) == {"full"}
    assert last_that_fits(every, 10**9) == 0, "nothing fits"
    assert "may run out of memory" in every[0].in_words(every[0].needed)
    assert "more than there is" in every[0].in_words(every[0].needed - 1)
    for choice in every:
        rows = sum(mode != "full" for mode in choice.modes[1:]) * received_bytes(8192, 2048, 1408, 64, 6, 4, MXFP8, fused_layer=True)
        assert choice.needed == choice.peak.total + round(rows / 4), "only what the experts get is uneven"
    even = choices(8192, fused_layer=True, force_balance=True)
    assert all(choice.needed == choice.peak.total for choice in even), "--force-balance gives every expert the same number of rows"
    one_rank = recompute_choices(rank_memory(MODELS["dsv3_16b"], MXFP8, ParallelDims(), 1)[0], *plan[:2], ParallelDims(), 8192, 1)
    assert all(choice.needed == choice.peak.total for choice in one_rank), "all rows are of this rank"


def test_a_first_product_in_mx_lets_more_layers_keep_theirs() -> None:
    plain, in_mx = (choices(32768, fused_layer=True, keep_first_product=form) for form in ("hp", "mxfp8"))
    kept = [[choice.modes.count("full") for choice in every][last_that_fits(every, 115 * 10**9)] for every in (plain, in_mx)]
    assert kept[0] > kept[1]


def agreed(rank: int, world: int) -> list[RecomputeChoice]:
    """With memory for everything on both ranks, then with little on rank 1."""
    config, device = TrainConfig(**SMALL, ep=2, batch=4, seq_len=256), torch.device("cuda")
    settings = resolve(config, "cpu", world)
    meshes, found = build_meshes(world, settings.degrees, "cpu"), []
    for capacities in ([10**12, 10**12], [10**12, 10**6]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recompute_budget, "total_memory", lambda _, most=capacities[rank]: most)
            found.append(agree_on_recompute(config, settings, settings.shape, MXFP8, meshes, device))
    return found


def test_ranks_agree_on_the_least() -> None:
    for found in run_ranks(agreed, 2):
        assert [set(choice.modes) for choice in found] == [{"none"}, {"full"}]


def balanced(rank: int, world: int) -> list[RecomputeChoice]:
    config = TrainConfig(**SMALL, ep=2, batch=4, seq_len=256)
    settings = resolve(config, "cpu", world)
    meshes, device = build_meshes(world, settings.degrees, "cpu"), torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_budget, "total_memory", lambda _: 10**12)
        configs = (replace(config, force_balance=on) for on in (False, True))
        return [agree_on_recompute(each, settings, settings.shape, MXFP8, meshes, device) for each in configs]


def test_routing_that_is_even_by_force_needs_no_allowance() -> None:
    for uneven, even in run_ranks(balanced, 2):
        assert even.needed == even.peak.total == uneven.peak.total < uneven.needed


def test_experts_gemm_by_gemm_keep_more(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_budget, "total_memory", lambda _: 10**12)
    needed = []
    blocks: dict[str, Any] = {"fused_layer": False}
    for options in (blocks, {**blocks, "fused_experts": False}, {**blocks, "mx_fqns": "layers.1"}, {}):
        config = TrainConfig(**SMALL, **options, batch=8, seq_len=256)  # type: ignore[arg-type]
        settings = resolve(config, "cpu", 1)
        meshes = build_meshes(1, settings.degrees, "cpu")
        needed.append(agree_on_recompute(config, settings, settings.shape, MXFP8, meshes, torch.device("cuda")).needed)
    as_one, separate, partly, layer = needed
    assert layer < as_one < separate == partly


@pytest.mark.parametrize("fused", [False, True])
def test_no_candidate_changes_a_bit(fused: bool, one_rank: None) -> None:
    """Loss and gradients of a model whose layers differ."""
    tokens, labels = batch()
    want = list[torch.Tensor]()
    every = candidates(DEEPSEEK.num_dense_layers, DEEPSEEK.num_layers - DEEPSEEK.num_dense_layers)
    for modes in (every[-1], every[0], every[2], every[4]):
        (model,) = build_stages(
            DEEPSEEK, Build(MXFP8, fused_layer=fused, recompute=modes), build_meshes(1, ParallelDims(), "cpu"), torch.device("cpu"), 0
        ).values()
        loss = model(tokens, labels)
        loss.backward()
        found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        want = want or found
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True)), modes


def test_a_run_resumes_with_another_choice(tmp_path: Path, text: str, one_rank: None) -> None:
    """Every start chooses again."""
    options = {"data": (text,), "steps": 4, "keep_first_product": "mxfp8"}
    full = trainer(0, 1, str(tmp_path), **options, activation_checkpoint="full")
    done(full)
    full.save()
    done(full)
    resumed = trainer(0, 1, str(tmp_path), **options, resume=True)
    assert not any("activation checkpointing" in line for line in resumed.describe()), "on a CPU all layers keep everything"
    assert resumed.facts()["recompute"] is None
    done(resumed)
    assert same(state_of(resumed), state_of(full)) == [*state_of(full)]


def test_lines_that_a_run_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    every, config = choices(8192, fused_layer=True), TrainConfig()
    monkeypatch.setattr("mxep.train.describe.total_memory", lambda _: 80 * 10**9)
    (line,) = describe_recompute(config, every[10], torch.device("cuda"))
    assert line.startswith("activation checkpointing auto: of 27 layers 10 keep what their MoE saves, 17 keep their inputs (at most ")
    assert build_options(config).recompute == "none"
    assert {*get_args(Recompute), "auto"} == set(get_args(get_type_hints(TrainConfig)["activation_checkpoint"]))


def interleaved(rank: int, world: int) -> tuple[RecomputeChoice, list[str], tuple[str, ...]]:
    """The choice of a rank with two stages of a pipeline, the modes with which its layers were built, and those of all layers."""
    config = TrainConfig(**SMALL, pp=2, pp_schedule="Interleaved1F1B", batch=4, seq_len=256)
    settings = resolve(config, "cpu", world)
    meshes, device = build_meshes(world, settings.degrees, "cpu"), torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute_budget, "total_memory", lambda _: 10**12)
        choice = agree_on_recompute(config, settings, settings.shape, MXFP8, meshes, device)
    modes, built = (("none", "full"), ("keep_moe", "none"))[rank], list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxep.train.build.recompute_blocks", lambda layers, mode, **_: built.append(mode))
        build = Build(MXFP8, recompute=modes, schedule="Interleaved1F1B")
        stages = build_stages(settings.shape, build, meshes, torch.device("meta"), 0)
    run = SimpleNamespace(config=config, recompute=choice._replace(modes=modes), meshes=meshes)
    return choice, built, Trainer._layer_modes(run, {number: len(stage.layers) for number, stage in stages.items()})  # type: ignore[arg-type]


def test_a_rank_with_two_stages() -> None:
    """Of four layers, the first rank has the first and the third."""
    first, second = run_ranks(interleaved, 2)
    assert [choice.modes for choice, *_ in (first, second)] == [("none", "none")] * 2
    assert (first[1], second[1]) == (["none", "full"], ["keep_moe", "none"])
    assert first[2] == second[2] == ("none", "keep_moe", "full", "none")


def of_many_microbatches(rank: int, world: int) -> list[set[str]]:
    config = TrainConfig(**SMALL, pp=2, batch=4, seq_len=256)
    settings = resolve(config, "cpu", world)
    meshes, device, found = build_meshes(world, settings.degrees, "cpu"), torch.device("cuda"), []
    for accumulate in (1, 10_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recompute_budget, "total_memory", lambda _: 10**9)
            choice = agree_on_recompute(replace(config, accumulate=accumulate), settings, settings.shape, MXFP8, meshes, device)
        found.append(set(choice.modes))
    return found


def test_what_the_stages_of_a_pipeline_receive_is_counted() -> None:
    """torch keeps it for every microbatch of a step."""
    assert run_ranks(of_many_microbatches, 2) == [[{"none"}, {"full"}]] * 2


def test_refused() -> None:
    with pytest.raises(ValueError, match="--keep-first-product=mxfp8 with --no-fused-layer"):
        resolve(TrainConfig(**SMALL, keep_first_product="mxfp8", fused_layer=False), "cuda", 2)
