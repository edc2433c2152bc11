"""Qwen3-MoE: rotation, attention against plain arithmetic, causality, gradient flow, the loss with labels, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.models.test_deepseek_v3 import check_causal, check_gradients

from mxep.models.families import build_model
from mxep.models.presets import MODELS, Qwen3MoEConfig
from mxep.models.qwen3_moe import GroupedQueryAttention, Qwen3MoE, rotate_halves
from mxep.models.rope import rope_table
from mxep.recipe import resolve_recipe

SMALL = dataclasses.replace(MODELS["qwen3_debug_cpu"], num_layers=2, max_seq_len=64)


def build(recipe: str = "hp", seed: int = 0, **changes: object) -> Qwen3MoE:
    model = build_model(dataclasses.replace(SMALL, **changes), resolve_recipe(recipe))
    model.init_weights(seed)
    assert isinstance(model, Qwen3MoE)
    return model


def test_rotation_pairs_values_half_a_head_apart() -> None:
    table = rope_table(1e4, 8, 64)
    x = torch.randn(2, 64, 3, 8)
    turned = rotate_halves(x, table)
    assert torch.equal(turned[:, 0], x[:, 0])
    angle = torch.tensor(7 * 1e4 ** -(2 / 8), dtype=torch.float64)  # token 7, pair 1: values 1 and 5
    a, b = x[1, 7, 2, 1].double(), x[1, 7, 2, 5].double()
    want = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]).float()
    torch.testing.assert_close(turned[1, 7, 2, [1, 5]], want)


def test_attention_against_plain_arithmetic() -> None:
    torch.manual_seed(0)
    config = SMALL
    assert isinstance(config, Qwen3MoEConfig)
    attention = GroupedQueryAttention(config)
    attention.init_weights(0.1, 0.1)
    torch.nn.init.uniform_(attention.q_norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(attention.k_norm.weight, 0.5, 1.5)
    table = rope_table(config.rope_theta, config.head_dim, 12)
    x = torch.randn(2, 12, config.dim)
    heads = {name: getattr(attention, name)(x).view(2, 12, -1, config.head_dim) for name in ("wq", "wk", "wv")}

    def normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rotate_halves(values / (values.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight, table)

    q, k = normed(heads["wq"], attention.q_norm.weight), normed(heads["wk"], attention.k_norm.weight)
    out = torch.zeros(2, 12, config.num_heads, config.head_dim)
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) * config.head_dim**-0.5
        out[:, :, head] = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf")).softmax(-1) @ heads["wv"][:, :, shared]
    torch.testing.assert_close(attention(x, table), attention.wo(out.flatten(2)), atol=1e-5, rtol=1e-5)


def test_causal() -> None:
    check_causal(build().eval())


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_parameter(recipe: str, dtype: torch.dtype) -> None:
    model = build(recipe).to(dtype)
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, tokens) / tokens.numel() + model.router_loss()
    loss.backward()
    check_gradients(model)


@pytest.mark.parametrize("name", ["qwen3_debug_cpu", "dsv3_debug_cpu"])
def test_training_after_a_first_call_in_inference_mode(name: str) -> None:
    """What a decoder keeps from its first call is no inference tensor, which autograd cannot save."""
    model, tokens = build_model(MODELS[name], resolve_recipe("hp")), torch.randint(64, (1, 16))
    model.init_weights(0)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()


def test_labels_give_the_loss_of_the_logits() -> None:
    model = build()
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    want = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, labels), want)


def test_initialisation() -> None:
    model = build(init_by_depth=False, output_init_std=None, init_std=0.05)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert bool((p == 1).all()), name
        else:
            assert float(p.detach().std()) == pytest.approx(0.05, rel=0.1), name


def test_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=4, want a multiple of num_kv_heads=3"):
        dataclasses.replace(SMALL, num_kv_heads=3)
    with pytest.raises(ValueError, match="Qwen3MoE: 65 tokens in a sequence, want at most max_seq_len=64"):
        build()(torch.zeros(1, 65, dtype=torch.int64))
