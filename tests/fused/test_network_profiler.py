"""The profiler of the fused layer's exchanges on gloo ranks: it times every mode, takes the cheaper one and follows a histogram."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

from mxep import NetworkProfiler, RuntimeEPConfig, cli
from mxep.fused.network_profiler import WAYS, ExchangeTime, draw_topk
from mxep.ops.routing.index_reference import MODES


def _profile_rank(rank: int, world: int) -> dict:
    profiler = NetworkProfiler(64 + rank, 64, 2, num_experts=8)
    config = profiler.profile()
    one = torch.zeros(8)
    one[0] = 1.0
    skewed = NetworkProfiler(32, 64, 1, num_experts=8)
    skewed.profile(one)
    assert profiler.found is not None
    assert skewed.found is not None
    found = profiler.found
    limit = (found.limit_gb_per_s, found.limit_of)
    return {"config": config.to_json(), "times": found.times, "limit": limit, "skewed": skewed.found.times}


def test_every_mode_is_timed_and_all_ranks_agree() -> None:
    both = run_ranks(_profile_rank, 2)
    first = both[0]
    assert first["config"] == both[1]["config"]
    assert first["times"] == both[1]["times"], "the slowest rank's times, known to all"
    assert {(t.mode, t.way, t.precision) for t in first["times"]} == {
        (mode, way, precision) for mode in MODES for way in WAYS for precision in ("mxfp8", "hp")
    }
    assert all(t.ms > 0 and t.gb_per_s > 0 for t in first["times"])
    assert first["limit"][0] > 0
    assert first["limit"] == (both[1]["limit"][0], "a plain all-to-all of such rows")
    by = {(t.mode, t.way, t.precision): t for t in first["times"]}
    assert by["rank_dedup", "to_experts", "mxfp8"].wire_bytes < by["rank_dedup", "to_experts", "hp"].wire_bytes
    assert by["rank_dedup", "to_experts", "hp"].wire_bytes <= by["all_to_all", "to_experts", "hp"].wire_bytes
    to_one = {(t.mode, t.way, t.precision): t for t in first["skewed"]}
    assert to_one["all_to_all", "to_experts", "hp"].wire_bytes == 32 * 64 * 2 / 2, "one of two ranks sends all of its rows"


def test_the_cheaper_sum_wins() -> None:
    profiler = NetworkProfiler(16, 32, 1, group="", config=RuntimeEPConfig(keep_first_product=False))
    cost = {"rank_dedup": 3.0, "all_to_all": 2.0, "all_ranks": 4.0}
    times = [
        ExchangeTime(mode, way, precision, cost[mode] + 2.0 * ((mode, precision) == ("all_to_all", "hp") and way != "to_experts"), 1.0)
        for mode in MODES
        for way in WAYS
        for precision in ("mxfp8", "hp")
    ]
    found = profiler._decide(times)
    assert found.dispatch_ms == {"rank_dedup": 6.0, "all_to_all": 6.0, "all_gather": 8.0}
    assert found.config == RuntimeEPConfig(dispatch="rank_dedup", combine="rank_dedup", keep_first_product=False)
    slow_kernels = [time._replace(ms=time.ms + 3.0 * (time.mode == "rank_dedup" and time.way == "to_tokens")) for time in times]
    found = profiler._decide(slow_kernels)
    assert (found.config.dispatch, found.config.combine) == ("rank_dedup", "all_to_all"), "the time of forward counts for combine alone"
    in_mx = NetworkProfiler(16, 32, 1, group="", config=RuntimeEPConfig(combine_forward="mxfp8", dispatch_backward="mxfp8"))
    assert (in_mx._decide(times).config.dispatch, in_mx._decide(times).config.combine) == ("all_to_all", "all_to_all")


def test_experts_follow_the_histogram() -> None:
    histogram = torch.tensor([5.0, 1.0, 0.0, 2.0])
    chosen = draw_topk(4000, 1, histogram, seed=0).flatten()
    shares = torch.bincount(chosen, minlength=4) / 4000
    assert (shares - histogram / histogram.sum()).abs().max() < 0.03
    several = draw_topk(500, 3, histogram, seed=1)
    assert all(len(set(row)) == 3 for row in several.tolist())
    assert (several != 2).all(), "three others have rows"


@pytest.mark.parametrize(
    ("histogram", "wanted"),
    [
        ([45.0, 25.0, 20.0, 10.0], [0.9, 0.5, 0.4, 0.2]),
        ([90.0, 5.0, 5.0, 0.0], [1.0, 0.5, 0.5, 0.0]),  # no token goes twice to an expert
        ([7.0, 0.0, 0.0, 0.0], [1.0, 1 / 3, 1 / 3, 1 / 3]),
        ([2.0, 2.0, 2.0, 2.0], [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_several_experts_of_a_token_follow_the_histogram(histogram: list[float], wanted: list[float]) -> None:
    """Drawn one after the other without replacement, the first expert of the first case had 0.76 rows a token instead of 0.9."""
    chosen = draw_topk(20000, 2, torch.tensor(histogram), seed=0)
    rows = torch.bincount(chosen.flatten(), minlength=4) / 20000
    assert rows.tolist() == pytest.approx(wanted, abs=0.02)
    assert bool((chosen[:, 0] != chosen[:, 1]).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"D": 33}, "multiple of 32"),
        ({"C": 99}, "C from 1"),
        ({"T_local": 0}, "T_local=0, want a positive whole number"),
        ({"T_local": 16.0}, "T_local=16.0, want a positive whole number"),
        ({"num_experts": 4.0}, "num_experts=4.0, want a positive whole number"),
        ({"dtype": torch.float16}, "bfloat16 or float32"),
    ],
)
def test_sizes_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NetworkProfiler(**{"T_local": 16, "D": 32, "C": 1, "group": "", **options})


def test_a_histogram_of_another_size() -> None:
    with pytest.raises(ValueError, match="want \\(16,\\)"):
        NetworkProfiler(16, 32, 1, group="").profile(torch.ones(3))
    with pytest.raises(ValueError, match=r"histogram is list, want a torch.Tensor"):
        NetworkProfiler(16, 32, 1, group="").profile([1] * 16)


def test_the_command_writes_a_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counts, out = tmp_path / "counts.json", tmp_path / "config.json"
    counts.write_text(json.dumps([3, 1, 0, 4]))
    arguments = ["profile", "--device", "cpu", "--tokens", "32", "--dim", "64", "--top-k", "2", "--histogram", str(counts)]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    assert "rank_dedup" in shown
    assert "fastest" in shown
    assert "limit, a plain all-to-all of such rows: " in shown
    modes = [line.split() for line in shown.splitlines() if "to tokens backward" in line]
    assert len(modes) == 3
    assert all(line.count("%") == 2 for line in map(" ".join, modes)), "each precision's share of the limit"
    assert RuntimeEPConfig.load(out).dispatch in ("rank_dedup", "all_to_all", "all_gather")
    counts.write_text("{}")
    assert cli.main(arguments) == 2
    assert "JSON list" in capfd.readouterr().err
