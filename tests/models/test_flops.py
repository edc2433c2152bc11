"""FLOPs per token: against hand arithmetic for presets, and against torch's counter on whole models with every recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mxep.models.families import build_model
from mxep.models.flops import flops_per_token
from mxep.models.presets import MODELS
from mxep.moe import fuse_layers
from mxep.parallel import Recompute, recompute_blocks
from mxep.recipe import resolve_recipe


def test_qwen3_30b_a3b_by_hand() -> None:
    """Matrices of a layer: q and o of 32 heads of 128, k and v of 4 heads, the router of 128 experts, 8 experts of three matrices."""
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768
    attention = 2 * 2 * 4096 * 4096  # forward of scores and of values: 4096 tokens, 32 heads of 128
    found = flops_per_token(MODELS["qwen3_30b_a3b"], 4096, "full")
    assert found.products == 6 * (48 * layer + 151936 * 2048)
    assert found.attention == 3 * 48 * attention
    assert found.recomputed == 48 * (2 * layer + attention // 2)
    assert found.model == found.products + found.attention
    assert found.model_causal == found.products + found.attention // 2
    assert found.hardware == found.model_causal + found.recomputed
    assert flops_per_token(MODELS["qwen3_30b_a3b"], 4096, "selective").recomputed == 48 * 2 * 8 * 3 * 2048 * 768


def test_dsv3_16b_by_hand() -> None:
    """Multi-head latent attention without a latent for queries; 27 layers, the first with a dense FFN, the others with 2 shared experts."""
    mla = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    moe = 64 * 2048 + (6 + 2) * 3 * 2048 * 1408
    found = flops_per_token(MODELS["dsv3_16b"], 4096, "full")
    assert found.products == 6 * (27 * mla + 3 * 2048 * 10944 + 26 * moe + 102400 * 2048)
    assert found.attention == 6 * 27 * 16 * (192 + 128) * 4096
    forward = 27 * mla + 3 * 2048 * 10944 + 26 * moe
    down = 2048 * 10944  # of the dense FFN
    assert found.recomputed == 2 * (forward - down) + 27 * 16 * (192 + 128) * 4096


@pytest.mark.parametrize("name", ["qwen3_debug_cpu", "dsv3_debug_cpu"])
@pytest.mark.parametrize("fused_layer", [False, True])
@pytest.mark.parametrize("recompute", ["none", "keep_moe", "selective", "full", ("full", "keep_moe")])
def test_counts_are_those_of_torch(name: str, recompute: Recompute | tuple[Recompute, ...], fused_layer: bool) -> None:
    """torch's counter sees the products that run on a CPU, where attention computes what the mask discards."""
    config = replace(MODELS[name], num_layers=2, num_dense_layers=min(MODELS[name].num_dense_layers, 1))
    model = build_model(config, resolve_recipe("hp"), force_balance=True)
    model.init_weights(0)
    if fused_layer:
        fuse_layers(model)
    modes = (recompute,) * 2 if isinstance(recompute, str) else recompute
    for layer, mode in zip(model.layers.values(), modes, strict=True):
        recompute_blocks([layer], mode)
    tokens = torch.randint(0, 256, (2, 64))  # each of 8 experts gets 32 rows, so that no group is padded

    def grouped(rows: Tensor, other: Tensor, ends: Tensor, *_: Any, **__: Any) -> int:
        """Two FLOPs for each row of a group and each value of its matrix (N, K): of the product, or of wgrad's result."""
        return 2 * int(ends[-1]) * rows.shape[-1] * other.shape[-1 if other.dim() == 2 else -2]

    grouped._get_raw = True  # type: ignore[attr-defined]
    ours = dict.fromkeys([torch.ops.mxep.grouped_mm_hp, torch.ops.mxep.grouped_wgrad_hp], grouped)
    with FlopCounterMode(display=False, custom_mapping=ours) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    found = flops_per_token(config, tokens.shape[1], recompute, fused_layer)
    again = sum(mode in ("keep_moe", "full") for mode in modes)
    whole_attention = again * (found.attention // 12)  # the count halves what is recomputed of each of two layers
    assert counter.get_total_flops() == tokens.numel() * (found.model + found.recomputed + whole_attention)
