"""peft's LoRA under FSDP2 on two ranks: gradients and updates of adapters are those of one process, on a base in MX and on a plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import mxep
from mxep.mx import MXWeight

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from tests.integrations.test_transformers_5 import build  # noqa: E402

from mxep.integrations import peft_0_21, transformers_5  # noqa: E402

ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(in_mx: bool) -> Any:
    """A float32 model, so that FSDP's sums round as those of one process, with adapters whose product is not 0."""
    transformers_5.register(None, "mxep_fsdp")
    base = build("Qwen3Moe")
    base.set_experts_implementation("mxep_fsdp")
    for name, parameter in base.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.05)
    if in_mx:
        mxep.quantize_base(base)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=ON_EXPERTS)
    model = peft.get_peft_model(base, peft_0_21.register(lora)).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.03)
    return model


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_two_ranks(rank: int, world: int, in_mx: bool) -> None:
    alone, sharded = adapted(in_mx), adapted(in_mx)
    layers = sharded.base_model.model.model.layers
    for layer in layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    models = alone, sharded
    trained = [{name: value for name, value in model.named_parameters() if value.requires_grad} for model in models]
    assert trained[0]
    assert all("lora_" in name and isinstance(value, DTensor) for name, value in trained[1].items())
    frozen = [value for value in alone.parameters() if isinstance(value, MXWeight)]
    assert bool(frozen) == in_mx
    optimizers = [torch.optim.AdamW(values.values(), lr=1e-2) for values in trained]
    tokens = torch.randint(3, 256, (world, 2, 21), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        sharded(input_ids=tokens[rank], labels=tokens[rank]).loss.backward()
        for batch in tokens:  # one after the other, as the ranks compute them
            (alone(input_ids=batch, labels=batch).loss / world).backward()
        for name, value in trained[0].items():
            assert value.grad is not None
            assert value.grad.any(), name
            assert torch.equal(whole(trained[1][name].grad), value.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in trained[0].items():
        assert torch.equal(whole(trained[1][name]), value), name


@pytest.mark.parametrize("in_mx", [True, False], ids=["MX base", "plain base"])
def test_adapters_are_those_of_one_process(in_mx: bool) -> None:
    run_ranks(on_two_ranks, 2, in_mx)
