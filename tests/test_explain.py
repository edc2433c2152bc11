"""`mxep explain`: its bytes are those that a layer keeps, its parameters those that the trainer puts on a rank."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mxep.degrees import Degrees
from mxep.explain.command import command
from mxep.explain.memory import rank_memory
from mxep.explain.stops import block_kept_bytes, fused_rows, kept_bytes, layer_stops
from mxep.models.families import build_model
from mxep.models.presets import MODELS
from mxep.moe import MoE, MoEConfig
from mxep.recipe import RECIPES, resolve_recipe


def saved_bytes(forward: Callable[[], Tensor], known: Iterable[Tensor]) -> int:
    """Bytes of the storages that autograd saves in a forward, those of `known` left out."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        for part in (tensor.qdata, tensor.scale) if hasattr(tensor, "qdata") else (tensor,):
            kept[part.untyped_storage().data_ptr()] = part.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = forward()
    assert out.requires_grad
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in there)


def test_layer_stops_by_hand() -> None:
    """2 ranks, 4 tokens, top-2 of 4 experts, D 64, H 32: 8 rows, half of them go away."""
    stops = {stop.name: stop for stop in layer_stops(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe(None))}
    assert stops["dispatch"].out == (8, 64)
    assert stops["dispatch"].wire_bytes == (4 * 80, 4 * 128)  # 64 + 2 bytes padded to 80; bf16 back
    assert stops["combine"].wire_bytes == (4 * 128, 4 * 80)
    assert stops["permute"].out == (96, 64)  # 8 + 2 * 32 rows, rounded up to 32
    assert stops["w2"].flops == (2 * 8 * 64 * 32, 4 * 8 * 64 * 32)
    plain = {stop.name: stop for stop in layer_stops(T=4, D=64, H=32, E=4, C=2, W=2, recipe=resolve_recipe("bf16"))}
    assert plain["dispatch"].wire_bytes == (4 * 128, 4 * 128)


def test_fused_rows_by_hand() -> None:
    """2 ranks, top-2 of 4 experts: 5 of the 6 pairs of experts have one on the other rank. Top-1: a choice is a row in both."""
    assert fused_rows(T=60, E=4, C=2, W=2) == {"rank_dedup": 50, "all_to_all": 60, "all_gather / reduce_scatter": 60}
    assert fused_rows(T=60, E=4, C=1, W=4) == {"rank_dedup": 45, "all_to_all": 45, "all_gather / reduce_scatter": 180}


def test_explain_prints_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--model", "dsv3_671b", "--ep", "32"]) == 0
    text = capsys.readouterr().out
    assert "671.03 billion parameters" in text
    assert "dispatch" in text
    assert "rank_dedup" in text
    assert command(["--layers", "8", "--ep", "2"]) == 0
    assert "dsv3_16b_of_8_layers: 4.59 billion parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "gpt5"], "unknown"),
        (["--layers", "1"], "1 layers of dsv3_16b, want 2"),
        (["--ep", "7"], "want a multiple"),
        (["--recipe", "fp4"], "is unknown"),
        (["--tokens", "0"], "more than 0"),
        (["--ranks", "0"], "--ranks=0, want more than 0"),
        (["--ranks", "-8"], "--ranks=-8, want more than 0"),
    ],
)
def test_explain_refuses(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(argv) == 2
    assert says in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shared", [0, 2])
def test_kept_bytes_are_what_a_layer_keeps(recipe: str, shared: int) -> None:
    """Storages that autograd saves in a bf16 forward, weights and the layer's input left out; indices are the 2% that the formula lacks."""
    T, D, H, E, C = 1024, 256, 96, 8, 2
    layer = MoE(MoEConfig(D, H, E, C, num_shared_experts=shared, force_balance=True), recipe).to(torch.bfloat16)
    layer.init_weights(0.1)
    x = torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True) * 1
    measured = saved_bytes(lambda: layer(x), [*layer.parameters(), x])
    assert kept_bytes(T, D, H, E, C, 1, shared, resolve_recipe(recipe)) == pytest.approx(measured, rel=0.02)


class FusedNorm(torch.autograd.Function):
    """What RMSNorm keeps on a GPU: what came in, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (x.float() * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        raise AssertionError("for its saved tensors alone")


class FusedAttention(FusedNorm):
    """What attention keeps on a GPU: its three inputs, its result (B, S, heads, width) and a number for each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = torch.zeros(*q.shape[:1], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:3]))
        return out


@pytest.mark.parametrize(("name", "index"), [("dsv3_debug", 0), ("dsv3_debug", 1), ("dsv3_671b", 2), ("qwen3_debug", 0)])
def test_block_kept_bytes_are_what_a_whole_layer_keeps(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight, norm.eps))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **options: FusedAttention.apply(q, k, v))
    small = {"dim": 256, "dense_hidden": 512, "expert_hidden": 128, "num_experts": 8, "num_groups": 1, "top_groups": 1, "vocab_size": 256}
    shape = dataclasses.replace(MODELS[name], **small, num_layers=index + 1, num_heads=4, max_seq_len=1024)
    shape = dataclasses.replace(shape, q_lora_rank=96) if name == "dsv3_671b" else shape
    recipe = resolve_recipe("mxfp8_wgrad_with_hp")
    model = build_model(shape, recipe, force_balance=True).to(torch.bfloat16)
    layer, x = model.layers[str(index)], torch.randn(1, 1024, 256, dtype=torch.bfloat16, requires_grad=True) * 1
    table = model.rope(x.device)
    measured = saved_bytes(lambda: layer(x, table), [*layer.parameters(), table])
    assert block_kept_bytes(1024, shape, 1, recipe, dense=index < shape.num_dense_layers) == pytest.approx(measured, rel=0.03)


def test_every_parameter_is_on_some_rank() -> None:
    model, recipe = MODELS["dsv3_16b"], resolve_recipe(None)
    total = model.parameters()[0]
    (alone,) = rank_memory(model, recipe, Degrees(), 1)
    assert alone.experts + alone.others == total
    assert alone.experts == 26 * 64 * 3 * 2048 * 1408
    (one,) = rank_memory(model, recipe, Degrees(ep=8), 8)
    assert (one.experts + one.others) * 8 == total
    assert (one.weights, one.moments, one.layers) == (total // 8 * 4, total // 8 * 8, 27)
    (replicated,) = rank_memory(model, recipe, Degrees(ep=4, replicate=2), 8)
    assert replicated.experts + replicated.others == total // 4
    first, last = rank_memory(model, recipe, Degrees(ep=4, pp=2), 8)
    assert (first.experts + first.others + last.experts + last.others) * 4 == total
    assert (first.layers + last.layers, first.loss) == (27, 0)
    (tensor,) = rank_memory(model, recipe, Degrees(ep=4, tp=2), 8)
    assert (tensor.experts + tensor.others) * 8 == pytest.approx(total, rel=1e-3)  # uneven shards are rounded up on this rank
    expert, outside = 3 * 2048 * 1408, 2 * 102400 * 2048 + 2048
    moe_layer = (8 + 2) * expert + 64 * 2048 + model.attention_parameters() + 2 * 2048
    assert one.gathered == 2 * (outside + 2 * moe_layer)
    dense_layer = model.attention_parameters() + 2 * 2048 + 3 * 2048 * 10944
    assert (one.dense_layers, one.moe_layers, one.summed) == (1, 26, 6 * dense_layer)
    assert rank_memory(model, recipe, Degrees(ep=2), 2)[0].summed == 6 * 32 * expert
    assert one.quantized == 26 * 8 * expert * 2 * 33 // 32
    (plain,) = rank_memory(model, resolve_recipe("bf16"), Degrees(ep=8), 8)
    assert (plain.quantized, plain.total) == (0, one.total)


def test_nothing_is_allocated() -> None:
    """671 billion parameters would be 2.7 TB: the process grows by less than 100 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (memory,) = rank_memory(MODELS["dsv3_671b"], resolve_recipe(None), Degrees(ep=64), 256)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert (memory.experts + memory.others) * 256 == pytest.approx(671e9, rel=1e-3)
