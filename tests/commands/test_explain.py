"""`mxep explain`: stages and rows by hand, the verdict on memory, and errors."""

from __future__ import annotations

import re

import pytest
import torch
from tests.pages import DOCS

from mxep.cli import main
from mxep.commands.explain import command, fused_rows, layer_stages
from mxep.fused import RuntimeEPConfig
from mxep.models.decoder import moe_config
from mxep.models.flops import flops_per_token
from mxep.models.presets import MODELS
from mxep.moe.router import route
from mxep.parallel import Recompute
from mxep.parallel_dims import ParallelDims
from mxep.recipe import resolve_recipe
from mxep.train.memory import peak_memory


def test_layer_stages_by_hand() -> None:
    """2 ranks, 4 tokens, top-2 of 4 experts, D 64, H 32: 8 rows, half of them are sent to the other rank."""
    stages = {stage.name: stage for stage in layer_stages(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe(None))}
    assert stages["dispatch"].out == (8, 64)
    assert stages["dispatch"].wire_bytes == (4 * 80, 4 * 128)  # 64 + 2 bytes padded to 80; bf16 back
    assert stages["combine"].wire_bytes == (4 * 128, 4 * 80)
    assert stages["permute"].out == (96, 64)  # 8 + 2 * 32 rows, rounded up to 32
    assert stages["w2"].flops == (2 * 8 * 64 * 32, 4 * 8 * 64 * 32)
    plain = {stage.name: stage for stage in layer_stages(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe("bf16"))}
    assert plain["dispatch"].wire_bytes == (4 * 128, 4 * 128)


def test_fused_rows_by_hand() -> None:
    """2 ranks, top-2 of 4 experts: 5 of the 6 pairs of experts have one on the other rank. Top-1: a choice is a row in both."""
    assert fused_rows(T=60, E=4, C=2, W=2) == {"rank_dedup": 50, "all_to_all": 60, "all_gather / reduce_scatter": 60}
    assert fused_rows(T=60, E=4, C=1, W=4) == {"rank_dedup": 45, "all_to_all": 45, "all_gather / reduce_scatter": 180}


@pytest.mark.parametrize("fused", [True, False])
def test_bytes_sent_are_those_of_the_layer_that_trains(fused: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """In the line and in both tables: a token once to each rank, or once for each choice."""
    model, T = MODELS["dsv3_16b"], 8192
    sizes = T, model.num_experts, model.top_k, 4
    runtime = RuntimeEPConfig()
    assert runtime.dispatch == runtime.combine == "rank_dedup"
    rows = fused_rows(*sizes)["rank_dedup"] if fused else T * model.top_k * 3 // 4
    mx, bf16 = (f"{2 * rows * (dispatched + 4096) / 2**20:,.0f}" for dispatched in (2112, 4096))
    assert command(["--ep", "4", "--tokens", str(T), *([] if fused else ["--no-fused-layer"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    way = "as one function" if fused else "in separate blocks"
    assert any(line.startswith(f"sent per layer, fwd + bwd, {way}: {mx} MiB, in bf16 {bf16} MiB (") for line in lines)
    (recipe,) = (line for line in lines if line.strip().startswith("mxfp8_wgrad_with_mx "))
    assert recipe.split()[4] == mx
    (degree,) = (line for line in lines if line.split()[:2] == ["4", "16"])
    assert degree.split()[2] == mx


@pytest.mark.parametrize(("name", "ep"), [("dsv3_671b", 8), ("dsv3_671b", 64), ("dsv3_small", 4), ("dsv3_16b", 8)])
def test_rows_are_those_of_the_models_router(name: str, ep: int) -> None:
    """DeepSeek-V3 takes a token's experts from a few groups, so the token goes to fewer ranks than with a free choice."""
    model, T = MODELS[name], 4096
    routing = route(torch.randn(T, model.num_experts), torch.zeros(model.num_experts), moe_config(model))
    reached = torch.zeros(T, ep).scatter(1, routing.experts // (model.num_experts // ep), 1.0)
    found = fused_rows(T, model.num_experts, model.top_k, ep, model.num_groups, model.top_groups)["rank_dedup"]
    assert found == pytest.approx(reached[:, 1:].sum().item(), rel=0.02)


def explained(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command(words.split()) == 0
    return capsys.readouterr().out


def test_ranks_of_a_tp_group_share_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Outside of attention and dense FFNs a TP rank has its share of the tokens, and sends and keeps rows of that."""
    whole, shared = (explained(f"--ep 8 --tokens {tokens} {more}", capsys) for tokens, more in ((8192, ""), (16384, "--tp 2 --ranks 8")))
    parts = ("  T ", " dispatch ", " w1 and w3 ", "sent per layer", " rank_dedup ", " mxfp8_wgrad_with_mx ")
    for part in parts:
        assert [line for line in whole.splitlines() if part in line] == [line for line in shared.splitlines() if part in line]


def test_ep_degrees_are_those_that_a_run_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    """EP divides the ranks of a pipeline stage and replica."""

    def degrees(words: str) -> list[int]:
        table = explained(words, capsys).partition("EP degrees, one MoE layer")[2].partition("TFLOP of forward")[0]
        return [int(words[0]) for line in table.splitlines() if len(words := line.split()) == 4 and words[0].isdigit()]

    assert degrees("--ep 2 --ranks 16") == [1, 2, 4, 8, 16]
    assert degrees("--ep 2 --ranks 16 --pp 2") == [1, 2, 4, 8]
    assert degrees("--ep 2 --ranks 16 --pp 2 --dp-replicate 2") == [1, 2, 4]


@pytest.mark.parametrize("name", ["dsv3_16b", "qwen3_30b_a3b"])
def test_operations_of_a_layer_have_its_flops(name: str) -> None:
    """Shared experts are a part of the layer: all MoE layers together, and everything else, are what a step is said to take."""
    model, T = MODELS[name], 4096
    letters = T, model.dim, model.expert_hidden, model.num_experts, model.top_k, 4
    of_layer = sum(sum(stage.flops) for stage in layer_stages(*letters, resolve_recipe(None), model.num_shared_experts))
    dense = model.num_layers * model.attention_matrices() + model.num_dense_layers * 3 * model.dim * model.dense_hidden
    others = 6 * T * (dense + model.vocab_size * model.dim)
    assert model.num_moe_layers * of_layer + others == T * flops_per_token(model, 4096).products


def test_shared_experts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained("--model dsv3_16b --tokens 65536 --recipe mxfp8_wgrad_with_mx", capsys)
    (line,) = (line for line in text.splitlines() if " shared w1, w3 " in line)
    assert line.split()[3:6] == ["65536x2816", "mxfp8", "mxfp8,"]
    assert "shared w1" not in explained("--model qwen3_30b_a3b", capsys).partition("sent per layer")[0]


def test_fewer_tokens_are_advised_only_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline gathers the weights of all layers of a stage and adds up their whole gradients, whatever the tokens are."""
    text = " ".join(explained("--model dsv3_671b --ep 8 --pp 2 --ranks 64 --tokens 4096", capsys).split())
    assert "more GPUs do not help, nor do fewer --tokens; raise --pp, --ep or --tp" in text
    assert "lower it" not in text
    assert "more GPUs do not help at --tokens 4096, lower it" in " ".join(
        explained("--model dsv3_671b --ep 64 --tokens 4096 --ranks 256", capsys).split()
    )


def test_explain_prints_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--model", "dsv3_671b", "--ep", "32"]) == 0
    text = capsys.readouterr().out
    assert "671.03 billion parameters" in text
    assert "dispatch" in text
    assert "rank_dedup" in text
    assert command(["--layers", "8", "--ep", "2"]) == 0
    assert "dsv3_16b_of_8_layers: 4.59 billion parameters" in capsys.readouterr().out


def test_the_page_shows_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of "Memory of a run", and the lines below it."""
    section = (DOCS / "training" / "parallelism.md").read_text().partition("## Memory of a run\n")[2]
    called, shown = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("bash", "text"))
    assert called
    assert shown
    monkeypatch.setenv("COLUMNS", "200")
    assert main(called[1].split()[1:]) == 0
    assert set(shown[1].splitlines()) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("fused", [False, True])
def test_explain_counts_a_step(fused: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The three counts of a step, for each recomputation, and what they are shares of."""
    options = ["--model", "qwen3_30b_a3b", "--ep", "8", "--tokens", "8192", "--seq-len", "2048"]
    assert command(options if fused else [*options, "--no-fused-layer"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    counts = [flops_per_token(MODELS["qwen3_30b_a3b"], 2048, mode, fused) for mode in ("none", "keep_moe", "selective", "full")]
    for label, name in (("mfu: ", "model"), ("mfu_causal: ", "model_causal"), ("hfu: ", "hardware")):
        line = next(line for line in lines if line.strip().startswith(label))
        assert line.split()[-4:] == [f"{8192 * getattr(flops, name) / 1e12:,.1f}" for flops in counts]
    assert "dense peak in bf16, in MXFP8 as well: H100 NVL 835" in " ".join(text.split())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "gpt5"], "unknown"),
        (["--layers", "1"], "1 layers of dsv3_16b, want 2"),
        (["--ep", "7"], "--ep=7 does not divide the 64 experts of dsv3_16b"),
        (["--keep-first-product", "mxfp8", "--no-fused-layer"], "with --no-fused-layer, whose separate blocks keep it as it is"),
        (["--optimizer-in-backward", "--pp", "2"], "--optimizer-in-backward with --pp=2"),
        (["--recipe", "fp4"], "is unknown"),
        (["--tokens", "0"], "more than 0"),
        (["--seq-len", "0"], "--seq-len=0, want more than 0"),
        (["--seq-len", "1000000000"], "--seq-len=1000000000, want at most dsv3_16b's max_seq_len=16384"),
        (["--ranks", "0"], "--ranks=0, want more than 0"),
        (["--ranks", "-8"], "--ranks=-8, want more than 0"),
        *((["--gpu-gb", size], f"--gpu-gb={float(size)}, want more than 0 and less than infinity") for size in ("0", "-3", "nan", "inf")),
    ],
)
def test_explain_refuses(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *argv]) == 2
    assert says in capsys.readouterr().err


def test_explain_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model", "dsv3_debug", "--ep", "1", "--tokens", "16384"]
    assert command(small) == 0
    text = capsys.readouterr().out
    for mode in ("none", "keep_moe", "selective", "full"):
        assert f"{mode}: fits on 1 x 80 GB" in text
    assert "auto: of 6 layers 6 keep everything (at most" in text
    assert command([*small, "--gpu-gb", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"none: does not fit on 1 x 4 GB \([\d.]+ GiB on each\); more GPUs do not help at --tokens 16384, lower it", text)
    assert "full: fits on 1 x 4 GB" in text
    assert "keep everything" in text
    assert "of 4.0 GiB)" in text
    assert command(["--layers", "10", "--ep", "1", "--tokens", "1024"]) == 0
    assert re.search(r"full: does not fit on 1 x 80 GB \([\d.]+ GiB on each\); needs 2 GPUs", " ".join(capsys.readouterr().out.split()))
    assert command(["--layers", "8", "--ep", "1", "--tokens", "1024", "--optimizer", "adamw8bit", "--dtype", "bfloat16"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "(bf16 weights, bf16 compute)" in text
    assert "full: fits on 1 x 80 GB" in text


def test_each_mode_has_the_pipeline_rank_that_needs_most(capsys: pytest.CaptureFixture[str]) -> None:
    """Where layers keep little, the last stage with its loss needs more than the first one with more microbatches in flight."""
    modes: tuple[Recompute, ...] = ("none", "keep_moe", "selective", "full")
    text = explained("--model dsv3_16b --ep 4 --pp 2 --tokens 4096", capsys)
    plan = MODELS["dsv3_16b"], resolve_recipe("mxfp8_wgrad_with_hp"), ParallelDims(ep=4, pp=2), 8, 4096
    peaks = [[peak.total / 2**30 for peak in peak_memory(*plan, recompute=mode, fused_layer=True)] for mode in modes]
    (stages,) = (line for line in text.splitlines() if "PP rank of 0 to 1 that needs most" in line)
    assert stages.split()[-5:-1] == [str(totals.index(max(totals))) for totals in peaks] == ["0", "1", "1", "1"]
    for mode, totals in zip(modes, peaks, strict=True):
        assert f"{mode}: fits on 8 x 80 GB ({max(totals):,.1f} GiB at most)" in text
    assert re.search(r"auto, PP rank \d: of 1[34] layers", text)
    interleaved = explained("--model dsv3_16b --ep 4 --pp 2 --tokens 4096 --pp-schedule Interleaved1F1B", capsys)
    most = max(peak.total for peak in peak_memory(*plan, schedule="Interleaved1F1B", fused_layer=True)) / 2**30
    assert most > max(peaks[0])
    assert f"none: fits on 8 x 80 GB ({most:,.1f} GiB at most)" in interleaved


@pytest.mark.parametrize("columns", ["80", None])
def test_names_of_layers_are_whole(columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal of 80 columns and in a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert command(["--model", "dsv3_16b"]) == 0
    text = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "layers.*.attention.wkv_a" in text


def test_saved_bytes_depend_on_the_form_of_the_first_product(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for form in ("hp", "mxfp8"):
        assert main(["explain", "--ep", "4", "--keep-first-product", form]) == 0
        shown.append(capsys.readouterr().out.partition("Recipes, one MoE layer")[2].partition("EP")[0])
    assert shown[0] != shown[1]


@pytest.mark.parametrize(
    ("recipe", "tokens", "counted"),
    [("mxfp8_wgrad_with_mx", 65536, True), ("mxfp8_wgrad_with_mx", 8192, False), ("mxfp8_wgrad_with_hp", 65536, False)],
)
def test_inputs_that_attention_keeps_in_mx_are_counted(recipe: str, tokens: int, counted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """With 8192 tokens the dense FFN gains, and attention does not."""
    assert main(["explain", "--ep", "4", "--tokens", str(tokens), "--recipe", recipe]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "what all layers keep for backward" in line)
    model, dims = MODELS["dsv3_16b"], ParallelDims(ep=4)
    kept = [
        peak_memory(model, resolve_recipe(recipe), dims, 4, tokens, mx_linears=mx, fused_layer=True)[0].kept / 2**30 for mx in (False, True)
    ]
    assert kept[1] > kept[0] + 0.1
    assert line.split()[-5] == f"{kept[counted]:,.2f}"


def test_gradients_that_add_up_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP keeps them whole between the microbatches of a step: half the batch, accumulated twice, takes more memory."""
    peaks = []
    for tokens, accumulate in ((8192, 1), (4096, 2)):
        assert main(["explain", "--ep", "1", "--ranks", "8", "--tokens", str(tokens), "--accumulate", str(accumulate)]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = {name: next((line for line in lines if name in line), "") for name in ("gradients that add up", "peak: parts")}
        assert bool(rows["gradients that add up"]) == (accumulate > 1)
        peaks.append(float(rows["peak: parts"].split()[-2]))  # of full recomputation
    model, recipe = MODELS["dsv3_16b"], resolve_recipe("mxfp8_wgrad_with_hp")
    (accumulated,) = peak_memory(model, recipe, ParallelDims(ep=1), 8, 4096, recompute="full", accumulate=2, fused_layer=True)
    assert peaks[1] == pytest.approx(accumulated.total / 2**30, abs=0.01)
    assert peaks[1] > 2 * peaks[0]
