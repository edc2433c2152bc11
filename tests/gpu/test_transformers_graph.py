"""`GraphedStep` on a GPU: LoRA on a base in MX trains as eager steps do, to the bit, and what cannot be recorded is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from tests.integrations.test_transformers_5 import build  # noqa: E402

from mxep.integrations import peft_0_21, transformers_5  # noqa: E402
from mxep.integrations.transformers_graph import GraphedStep  # noqa: E402
from mxep.parallel.frozen_base import quantize_base  # noqa: E402
from mxep.step_graph import EAGER_STEPS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked")]
RECOMPUTED = {"use_reentrant": False, "preserve_rng_state": False}


class Run:
    """LoRA of a small model; `calls` counts what Python ran of its step."""

    def __init__(self, family: str, recipe: str, in_mx: bool) -> None:
        torch.manual_seed(0)
        model = build(family, num_hidden_layers=2).to(torch.bfloat16).cuda()
        if in_mx:
            quantize_base(model)
        transformers_5.accelerate(model, recipe)
        model.activation_checkpointing_enable(RECOMPUTED)
        lora = peft.LoraConfig(
            r=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        self.model: Any = peft.get_peft_model(model, peft_0_21.register(lora)).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True)
        self.calls = 0

    def step(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(run: Run, call: Callable[[Tensor], Tensor], steps: int = 8) -> list[float]:
    """Losses of steps whose batches differ and whose learning rate changes."""
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        run.optimizer.param_groups[0]["lr"].fill_(1e-2 / (step + 1))
        losses.append(call(torch.randint(3, 256, (4, 128), generator=generator).cuda()).item())
    return losses


@pytest.mark.parametrize("in_mx", [True, False], ids=["base in MX", "base in bf16"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_steps_are_those_without_a_graph(family: str, in_mx: bool) -> None:
    recipe = "mxfp8_wgrad_with_hp" if in_mx else "hp"
    eager, graphed = Run(family, recipe, in_mx), Run(family, recipe, in_mx)
    want, got = train(eager, eager.step), train(graphed, GraphedStep(graphed.model, graphed.step))
    assert got == want
    assert (eager.calls, graphed.calls) == (8, EAGER_STEPS + 1)
    for a, b in zip(eager.trained, graphed.trained, strict=True):
        assert torch.equal(a, b)
    assert len(set(want)) == 8, "each step has its own batch"


def test_a_step_that_reads_a_value_is_an_error() -> None:
    run = Run("Qwen3Moe", "hp", in_mx=False)

    def reads(tokens: Tensor) -> Tensor:
        loss = run.step(tokens)
        return loss if loss.item() > 0 else -loss

    with pytest.raises(RuntimeError, match=r"a CUDA graph cannot hold this step, run it without one .*captur"):
        train(run, GraphedStep(run.model, reads))
    assert torch.rand(2, device="cuda").isfinite().all()  # random numbers go on


def test_checks_that_read_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("Qwen3Moe", "hp", in_mx=False)
    monkeypatch.setenv("MXEP_CHECK", "1")
    with pytest.raises(ValueError, match=r"MXEP_CHECK=1, .*; unset it"):
        GraphedStep(run.model, run.step)
