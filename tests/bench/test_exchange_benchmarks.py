"""`mxep bench a2a` and `mxep bench layer` on a CPU: two ranks, the records, the tables, and checks that notice what is wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tests.bench_cases import CPU, FAST, check_schema, check_tables, measured, measured_on_ranks
from tests.once import once
from tests.ranks import run_ranks
from tests.virtual import run_virtual

from mxep.bench import a2a, command, imbalance, layer, layer_tables, markdown_tables, registry, timing
from mxep.bench.records import read_records, write_records
from mxep.cli import main
from mxep.comm import transport_of
from mxep.comm.symmetric import SymmetricTransport


def test_a2a_on_two_ranks() -> None:
    records = run_ranks(measured_on_ranks, 2, "a2a")[0]
    check_schema("a2a", records)
    assert set(records[0]["ratios"]) == {"total_vs_bf16", "forward_vs_bf16", "backward_vs_bf16", "dispatch_vs_nccl_bf16"}
    page = markdown_tables.a2a_table(records)
    check_tables(page)
    assert "256 x 128" in page
    target_met = {"ratios": {**records[0]["ratios"], "home_vs_peer_copy": 0.97}, "limit": {**records[0]["limit"], "home_vs_peer_copy": 1.0}}
    assert "0.97x of 1.00x" in markdown_tables.a2a_table([{**records[0], **target_met}])
    older = {name: {key: value for key, value in records[0][name].items() if "placed" not in key} for name in ("arms", "ratios", "limit")}
    table = markdown_tables.a2a_table([{**records[0], **older}])
    assert {line.count("|") for line in table.splitlines()} == {page.splitlines()[0].count("|")}


def _speed_rank(rank: int, world: int, ms: list[float]) -> str:
    try:
        timing.check_equal_speed(CPU, torch.distributed.group.WORLD, lambda device: ms[rank])
    except ValueError as error:
        return str(error)
    return ""


def test_a_slow_gpu_stops_a_measurement() -> None:
    """A GPU that another process uses as well would be recorded as the layer's speed."""
    assert run_ranks(_speed_rank, 2, [20.0, 24.0]) == ["", ""]
    for text in run_ranks(_speed_rank, 2, [20.0, 40.5]):
        assert "rank 1 in 40.5 ms, and 20.0 ms on the fastest rank" in text
    timing.check_equal_speed(CPU, None, lambda device: 1 / 0)
    assert timing.product_ms(CPU, side=32, products=2) > 0


@pytest.fixture
def layer_records(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return once(tmp_path_factory, "layer_records", lambda: run_ranks(measured_on_ranks, 2, "layer")[0])


def test_layer_on_two_ranks(layer_records: list[dict]) -> None:
    records = layer_records
    check_schema("layer", records)
    assert [record["routing"] for record in records] == ["balanced", "zipf"]
    for record in records:
        assert record["shape"]["T"] * 2 == record["shape"]["T_global"]
        assert set(record["differences"]) == {"nccl_bf16_one_function", "bf16", "mxfp8_blocks", "mxfp8"}
        assert all(set(found) == set(layer.RESULTS) for found in record["differences"].values())
        assert record["saved_bytes"]["mxfp8"]["dispatched tokens"] < record["saved_bytes"]["bf16"]["dispatched tokens"]
        whole, in_mx = (record["saved_bytes"][audit]["first product"] for audit in ("mxfp8", "mxfp8_first_product_in_mx"))
        assert in_mx * 64 == whole * 33
    assert records[0]["load_max_over_mean"] < records[1]["load_max_over_mean"]
    assert "exposed_ms" not in records[0], "a CPU's trace says nothing about it"
    exposed = {"mxfp8": {"dispatch": 1.0, "combine": 2.5, "combine's backward": 0.25, "dispatch's backward": 0.0}}
    last = layer_tables.layer_tables([{**records[0], "exposed_ms": exposed}]).split("\n\n")[-1]
    assert "| `mxfp8` | 1.00 ms | 2.50 ms | 0.25 ms | 0.00 ms |" in last
    check_tables(layer_tables.layer_tables(records))


def test_uneven_loads_of_two_ranks(layer_records: list[dict]) -> None:
    """A rank with 300 of 400 rows works 4 ms, the other one 2: 0.01 ms a row, and of a layer of 10 ms the busiest rank costs 1 ms."""
    record = {**layer_records[1], "device": "h100", "busy_ms": {"mxfp8": [4.0, 2.0]}}
    assert len(record["choices"]) == record["shape"]["E"]
    assert sum(record["choices"]) == record["shape"]["T_global"] * record["shape"]["C"]
    record["choices"] = [200, 50, 25, 25, 60, 20, 10, 10]
    record["arms"]["mxfp8_total"]["median_ms"] = 10.0
    costs, placements = layer_tables.layer_tables([record]).split("\n\n")[-2:]
    row = costs.splitlines()[-1]
    assert "| 10.00 ms | 1.50 | 4.00 / 3.00 ms | 1.00 ms, 10% | 0.60 ms, 6% | 0.95 ms, 10% | 0.90 ms, 9% |" in row
    assert row.endswith("| 1.00 ms, 10% |"), "an even load saves what the busiest rank costs"
    assert placements.splitlines()[2].endswith("| 4 | 2.50 | 2.10 | 1.10 | 1.15 | 1.09 |"), "250, 210, 110, 115 and 108.75 of a mean of 100"
    assert len(placements.splitlines()) == 4, "no more ranks than experts"


def test_placements_of_hot_experts() -> None:
    assert imbalance.rows_of_ranks([200, 50, 25, 25, 60, 20, 10, 10], 2) == [300, 100]
    assert imbalance.rows_of_busiest([200, 50, 25, 25, 60, 20, 10, 10], 2) == 240, "the hottest one, with the three coldest"
    assert imbalance.rows_of_busiest([9, 1, 1, 1], 4, copies=1) == 9 / 4 + 1, "three experts left for four ranks"
    assert set(imbalance.saved_ms([5, 5], [1.0, 3.0]).values()) == {0.0}, "no difference of rows explains that of the times"


def test_layer_that_one_gpu_cannot_hold() -> None:
    """Without the arm that needs all memory there is no scaling, and this rank's tokens without an exchange are the limit."""
    times = {f"{arm}_{stage}": ms
             for ms, arm in ((8.0, "nccl_bf16"), (6.0, "nccl_bf16_one_function"), (3.0, "mxfp8"), (2.0, "local"), (0.3, "router_fp32"),
                             (0.15, "router_bf16"))
             for stage in ("total", "forward", "backward", "inference")}  # fmt: skip
    found = layer.compute_figures(times, layer.SIZES[1], "zipf", 4)
    assert (found["total_vs_nccl_bf16"].value, found["total_vs_nccl_bf16"].limit) == (2.0, 3.0)
    assert not [name for name in found if "scaling" in name]
    alone = {name: ms for name, ms in times.items() if not name.startswith("local")}
    none = layer.compute_figures(alone, layer.SIZES[1], "zipf", 4)
    assert {name: figure.value for name, figure in none.items()} == {name: figure.value for name, figure in found.items()}
    assert (none["total_vs_nccl_bf16"].limit, none["inference_vs_nccl_bf16"].limit) == (None, None), "no reference without all experts"
    assert (found["router_total_share"].value, found["router_total_share"].limit) == (pytest.approx(0.1), pytest.approx(0.05))
    one_gpu = {f"one_gpu_{stage}": 4.0 for stage in ("total", "forward", "backward")}
    whole = layer.compute_figures(times | one_gpu, layer.SIZES[1], "zipf", 4)
    assert (whole["total_vs_nccl_bf16"].limit, whole["scaling_efficiency_forward"].value) == (6.0, pytest.approx(1 / 3))


def test_layer_of_one_size_without_memory_for_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_FULL", 0)
    records = measured("layer", size=layer.parse_size("64,32,32,4,2"))
    assert records[0]["shape"] == dict(T=64, T_global=64, D=32, H=32, E=4, C=2, L=4)
    assert not [arm for arm in records[0]["arms"] if arm.startswith(("local", "one_gpu"))]
    assert records[0]["ratios"]["total_vs_nccl_bf16"] > 0
    check_tables(layer_tables.layer_tables(records))


def test_wrong_sizes_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1,2,3", "a,b,c,d,e", "64,32,32,0,2"):
        with pytest.raises(ValueError, match="want five positive numbers"):
            layer.parse_size(wrong)
    assert main(["bench", "rows", "--device", "cpu", "--quick", "--thiek", "64,32,32,4,2"]) == 2
    assert "mxep bench layer" in capsys.readouterr().err


def test_a_layer_of_one_size_leaves_the_records_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ({"benchmark": "layer", "shape": {"T": tokens}, "routing": "balanced"} for tokens in (32, 64))
    write_records("layer", "cpu", 1, [old], tmp_path)
    monkeypatch.setattr(command, "is_rank", lambda: True)
    monkeypatch.setattr(command, "rank_group", lambda *_: contextlib.nullcontext((CPU, None)))
    monkeypatch.setattr(command, "run", lambda *_: [new])
    monkeypatch.setattr(command, "tables", lambda _: [])
    monkeypatch.setitem(markdown_tables.TABLES, "layer", lambda _: "")
    run = ["bench", "layer", "--device", "cpu", "--quick", "--record", "--out", str(tmp_path)]
    assert main([*run, "--thiek", "64,32,32,4,2"]) == 0
    assert read_records("layer", tmp_path) == [old, new]
    assert main(run) == 0
    assert read_records("layer", tmp_path) == [new], "a whole run replaces the file"


def test_layer_check_fails_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer.LayerProblem(registry.Setting(CPU), layer.Size(64, 32, 32, 4, 2), "balanced")
    results = problem.results
    monkeypatch.setattr(problem, "results", lambda arm: [value * (1 + 0.3 * (arm == "mxfp8")) for value in results(arm)])
    assert "mxfp8: o at" in str(problem.check())


def _a2a_over_shared_memory(rank: int, world: int, name: str) -> None:
    exchange = a2a.RowExchangeProblem(registry.Setting(CPU), 96, 64, shared=name)
    assert exchange.best[2] == name != exchange.there[2]
    assert exchange.check() is None
    ms = {arm: found.median_ms for arm, found in timing.time_arms(exchange.arms(CPU), CPU, FAST).items()}
    figure = a2a.compute_figures(ms, *a2a.DISPATCH)["home_vs_peer_copy"]
    assert figure.value == ms["peer_copy"] / ms["home"]
    assert figure.target == a2a.DISPATCH_BACKWARD_TARGET


def _peer_copies(rank: int, world: int, name: str) -> None:
    """Each rank's rows are copied to the other ranks, into a region of the sender's own, and nothing else is copied."""
    transport, exchange = transport_of(name, CPU), a2a.RowExchangeProblem(registry.Setting(CPU), 96, 64, shared=name)
    assert isinstance(transport, SymmetricTransport)
    exchange.splits, exchange.there = [32] * world, ([32] * world, [32] * world, "")
    exchange.g = torch.full((96, 64), float(rank), dtype=torch.bfloat16)
    opened, take = [], transport.open
    transport.open = lambda *facts: opened.append(take(*facts)) or opened[0]  # type: ignore[method-assign]
    copy = exchange.peer_copies(transport)
    for _ in range(2):
        opened[0].buffers[0].fill_(0xFF)
        transport.rendezvous.all_gather([])
        copy()
        transport.rendezvous.all_gather([])
        received = opened[0].buffers[0][: world * 32 * 128].view(torch.bfloat16).view(world, -1)
        for peer in range(world):
            assert received[peer].isnan().all() if peer == rank else (received[peer] == peer).all()
        transport.rendezvous.all_gather([])


def test_peer_copies() -> None:
    run_virtual(_peer_copies, 3)


def test_a2a_over_shared_memory() -> None:
    run_virtual(_a2a_over_shared_memory, 1)


def test_a2a_check_fails_for_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = a2a.RowExchangeProblem(registry.Setting(CPU), 64, 64)
    assert exchange.check() is None
    moved = a2a.exchange_mx
    monkeypatch.setattr(a2a, "exchange_mx", lambda rows, *rest: moved(rows.flip(0), *rest))
    assert "rows are not" in str(exchange.check())
