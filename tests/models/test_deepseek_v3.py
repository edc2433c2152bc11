"""DeepSeek-V3: shapes, parameter counts, RoPE with YaRN, attention against plain arithmetic, causality, gradient flow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mxep.models.deepseek_v3 import DeepSeekV3, LatentAttention, attention_scale, rotate
from mxep.models.families import build_model
from mxep.models.presets import MODELS, DeepSeekV3Config, Yarn, resolve_model
from mxep.models.rope import rope_frequencies, rope_table
from mxep.recipe import resolve_recipe

SMALL = dataclasses.replace(MODELS["dsv3_debug_cpu"], num_layers=2, max_seq_len=64)


def build(config: DeepSeekV3Config = SMALL, recipe: str = "hp", seed: int = 0) -> DeepSeekV3:
    model = DeepSeekV3(config, resolve_recipe(recipe))
    model.init_weights(seed)
    return model


def test_unknown_preset_and_bad_shapes() -> None:
    with pytest.raises(ValueError, match="'gpt' is unknown, want one of dsv3_debug_cpu"):
        resolve_model("gpt")
    for change in ({"dim": 100}, {"expert_hidden": 33}, {"num_dense_layers": 9}, {"qk_rope_head_dim": 15}):
        with pytest.raises(ValueError, match="DeepSeekV3Config"):
            dataclasses.replace(SMALL, **change)


def test_products_of_rotations_are_real() -> None:
    """torch.compile generates no code for complex operators, so of these only views of the table may be left."""
    graph = make_fx(rotate, tracing_mode="fake")(torch.randn(1, 3, 2, 8, dtype=torch.bfloat16), rope_table(1e4, 8, 3))
    is_complex = {node for node in graph.graph.nodes if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_complex()}
    takes_complex = {node.target for node in graph.graph.nodes if is_complex & set(node.all_input_nodes)}
    assert takes_complex == {torch.ops.aten.view_as_real.default}


def test_rope_without_yarn() -> None:
    table = rope_table(1e4, 8, 64)
    assert table.shape == (64, 4)
    assert torch.allclose(table[5, 1].angle(), torch.tensor(5 * 1e4**-0.25), atol=1e-6)
    x = torch.randn(2, 64, 3, 8)
    turned = rotate(x, table)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[:, 0], x[:, 0])
    cos, sin = math.cos(7), math.sin(7)  # the first pair turns by one radian a token
    a, b = x[1, 7, 2, 0], x[1, 7, 2, 1]
    assert torch.allclose(turned[1, 7, 2, :2], torch.stack([a * cos - b * sin, a * sin + b * cos]), atol=1e-5)
    scores = torch.einsum("bshd,bthd->bst", rotate(x[:, :1].expand_as(x), table), rotate(x[:, :1].expand_as(x), table))
    assert torch.allclose(scores[:, 9, 4], scores[:, 25, 20], rtol=1e-4)  # only the distance counts


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain, yarn = rope_frequencies(1e4, 64), rope_frequencies(1e4, 64, Yarn())
    assert torch.equal(yarn[:8], plain[:8])
    assert torch.allclose(yarn[-4:], plain[-4:] / 40)
    assert bool((yarn[:-1] >= yarn[1:]).all())
    turns = plain * 4096 / (2 * math.pi)
    assert torch.equal((yarn == plain)[turns > 33], torch.ones_like((turns > 33)[turns > 33]))


def test_attention_scale() -> None:
    """YaRN is what a shape has or has not, at any length: a model of 16384 tokens without it is one of plain positions."""
    for shape in (SMALL, dataclasses.replace(SMALL, max_seq_len=16384)):
        assert attention_scale(shape) == SMALL.qk_head_dim**-0.5
        table = DeepSeekV3(shape, resolve_recipe("hp")).rope(torch.device("cpu"))
        assert torch.equal(table[:64], rope_table(1e4, SMALL.qk_rope_head_dim, 64))
    config = dataclasses.replace(SMALL, yarn=Yarn(mscale=0.7))
    assert attention_scale(config) == pytest.approx(SMALL.qk_head_dim**-0.5 * (0.07 * math.log(40) + 1) ** 2)
    assert not torch.equal(build(config).rope(torch.device("cpu")), build().rope(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"Yarn: factor=1, "):
        Yarn(factor=1)


@pytest.mark.parametrize("q_lora_rank", [0, 32])
def test_attention_against_plain_arithmetic(q_lora_rank: int) -> None:
    config = dataclasses.replace(SMALL, q_lora_rank=q_lora_rank)
    torch.manual_seed(0)
    attention = LatentAttention(config)
    attention.init_weights(0.1, 0.1)
    table = rope_table(config.rope_theta, config.qk_rope_head_dim, 12)
    x = torch.randn(2, 12, config.dim)
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    queries = attention.wq_b(attention.q_norm(attention.wq_a(x))) if q_lora_rank else attention.wq(x)
    compressed = attention.wkv_a(x)
    keys_values = attention.wkv_b(attention.kv_norm(compressed[..., :rank])).view(2, 12, config.num_heads, -1)
    position_key = rotate(compressed[..., None, rank:], table)[:, :, 0]
    out = torch.zeros(2, 12, config.num_heads, config.v_head_dim)
    for head in range(config.num_heads):
        q = queries.view(2, 12, config.num_heads, -1)[:, :, head]
        q_position = rotate(q[..., None, nope:], table)[:, :, 0]
        scores = q[..., :nope] @ keys_values[:, :, head, :nope].transpose(1, 2) + q_position @ position_key.transpose(1, 2)
        scores = (scores * config.qk_head_dim**-0.5).masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
        out[:, :, head] = scores.softmax(-1) @ keys_values[:, :, head, nope:]
    assert torch.allclose(attention(x, table), attention.wo(out.flatten(2)), atol=1e-5)


def check_causal(model: nn.Module) -> None:
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert first.shape == (2, 16, 256)
    assert torch.allclose(first[:, :9], second[:, :9], atol=1e-6)
    assert not torch.allclose(first[:, 9:], second[:, 9:], atol=1e-3)


def check_gradients(model: nn.Module) -> None:
    """After a backward: every parameter has one."""
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name
        assert bool(p.grad.any()), name


def test_causal() -> None:
    check_causal(build().eval())


def test_initialisation() -> None:
    first, second, other = build(seed=5), build(seed=5), build(seed=6)
    for (name, p), q, r in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.ndim > 1:
            assert not torch.equal(p, r), name
            assert 0.002 < float(p.detach().std()) < 0.1, name
            assert abs(float(p.detach().mean())) < 0.2 * float(p.detach().std()), name
        else:
            assert bool((p == 1).all()), name


@pytest.mark.parametrize("seed", [18_446_688_734_371, 2**60, 2**64, 2**80 + 1])
def test_seeds_of_any_size(seed: int) -> None:
    """As a clock gives them in nanoseconds: torch's generators take 64 bits, and each layer's seed is a multiple of this one."""
    first, second, other = build(seed=seed), build(seed=seed), build(seed=seed + 1)
    assert torch.equal(first.output.weight, second.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)


def test_meta_then_init_equals_direct() -> None:
    with torch.device("meta"):
        model = DeepSeekV3(SMALL, resolve_recipe("hp"))
    model.to_empty(device="cpu")
    model.init_weights(0)
    for (name, value), (_, want) in zip(model.state_dict().items(), build().state_dict().items(), strict=True):
        assert torch.equal(value, want), name
    tokens = torch.arange(32).view(1, 32)
    assert torch.equal(model(tokens), build()(tokens))


@pytest.mark.parametrize("recipe", ["hp", "mxfp8_wgrad_with_hp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_parameter(recipe: str, dtype: torch.dtype) -> None:
    config = dataclasses.replace(SMALL, balance_loss=0.01, z_loss=0.001)
    model = build(config, recipe).to(dtype)
    tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
    assert model.rope(tokens.device).dtype == torch.complex64
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) + model.router_loss()
    loss.backward()
    check_gradients(model)


def test_dense_only_model_has_no_router_loss() -> None:
    model = build(dataclasses.replace(SMALL, num_dense_layers=2))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert float(model.router_loss()) == 0.0
    assert model.moe_layers() == []


def test_sequence_too_long() -> None:
    with pytest.raises(ValueError, match="65 tokens in a sequence, want at most max_seq_len=64"):
        build()(torch.zeros(1, 65, dtype=torch.int64))


def test_a_wrapped_output_projection_that_returns_no_loss_raises() -> None:
    """An adapter of peft added its logits to the loss of the projection that it wraps: a loss for each logit, without an error."""

    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor, *args: Any) -> Tensor:
            return self.base(x, *args) + x @ self.base.weight.t()

    model = build_model(MODELS["dsv3_debug"], resolve_recipe("hp"))
    model.init_weights(0)
    model.output = Wrapped(model.output)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"with labels Wrapped returned \(1, 8, \d+\), want a loss \(\); .* leave it out"):
        model(tokens, tokens)
