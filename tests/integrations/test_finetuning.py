"""Statements of the how-to pages on peft, TRL and Accelerate about models with mxep's experts; tests/test_docs.py runs their code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.truth import sqnr
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")
trl = pytest.importorskip("trl", reason="a development tool")

from accelerate import Accelerator  # noqa: E402
from datasets import Dataset  # noqa: E402
from tests.integrations.test_peft_0_21 import byte_tokenizer, tokens_of  # noqa: E402
from tests.integrations.test_transformers_5 import ALL_ATTENTION, build  # noqa: E402
from transformers.integrations.moe import ExpertsInterface  # noqa: E402

from mxep.integrations import transformers_5  # noqa: E402

ON_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
ON_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
FAMILIES: dict[str, dict[str, Any]] = {"Qwen3Moe": {}, "GptOss": {"num_hidden_layers": 1, "layer_types": ALL_ATTENTION["layer_types"][:1]}}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    transformers_5.register()
    yield
    del ExpertsInterface._global_mapping["mxep"], transformers_5.EPImplementationInterface._global_mapping["mxep"]


def adapted(family: str, **targets: Any) -> Any:
    """A model with adapters whose product is not 0, so that both of their matrices have gradients."""
    model = peft.get_peft_model(build(family, **FAMILIES[family]), peft.LoraConfig(r=8, **targets))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_of_grouped_mm(family: str) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for how in ("grouped_mm", "mxep"):
        model = adapted(family, **ON_ATTENTION, **ON_EXPERTS)
        model.base_model.model.set_experts_implementation(how)
        with mock.patch.object(transformers_5, "fused_experts", wraps=transformers_5.fused_experts) as fused:
            model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
        assert (fused.call_count > 0) == (how == "mxep")
        found[how] = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    want, ours = found.values()
    of_experts = [name for name in want if ".experts." in name]
    assert len(of_experts) == 4 * (1 if family == "GptOss" else 2)
    assert len(want) > len(of_experts)
    assert all("lora_" in name for name in want)
    for name in want:
        assert 17 < sqnr(want[name], ours[name]) < 60, name


@pytest.mark.parametrize(("targets", "learn"), [(ON_ATTENTION, False), (ON_EXPERTS, True)], ids=["attention", "experts"])
def test_frozen_experts_have_no_gradients_of_weights(targets: dict[str, Any], learn: bool) -> None:
    model = adapted("Qwen3Moe", **targets)
    model.base_model.model.set_experts_implementation("mxep")
    loss = model(input_ids=tokens_of(0), labels=tokens_of(0)).loss
    with OperatorCalls() as calls:
        loss.backward()
    assert any("wgrad" in name for name in calls.names) == learn
    assert any("mxep.grouped_mm" in name for name in calls.names)  # dgrad


def test_a_merged_model_is_the_adapted_one() -> None:
    model = adapted("Qwen3Moe", **ON_ATTENTION, **ON_EXPERTS).eval()
    model.base_model.model.set_experts_implementation("mxep")
    want = model(input_ids=tokens_of(0)).logits
    merged = model.merge_and_unload()
    assert merged.get_experts_implementation() == {"": "mxep"}
    assert not [name for name, _ in merged.named_parameters() if "lora_" in name]
    assert sqnr(want, merged(input_ids=tokens_of(0)).logits) > 40


def preferences() -> dict[str, Any]:
    """Arguments of DPOTrainer besides its models."""
    rows = [{"prompt": f"{n} plus 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(4)]
    return {"train_dataset": Dataset.from_list(rows), "processing_class": byte_tokenizer()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL 1.16 still says it
@pytest.mark.parametrize(
    ("policy", "reference", "runs"),
    [("a path", None, "mxep"), ("a model", None, "grouped_mm"), ("a model", "a copy", "mxep")],
    ids=["loaded by TRL", "reference loaded by TRL", "reference given"],
)
def test_the_reference_of_dpo(policy: str, reference: str | None, runs: str, tmp_path: Path) -> None:
    """Which experts it has, and that policy and reference agree at first where these are the policy's."""
    build("Qwen3Moe").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    folder, ours = str(tmp_path / "model"), {"dtype": "bfloat16", "experts_implementation": "mxep"}
    own = None if policy == "a path" else type(build("Qwen3Moe")).from_pretrained(folder, **ours)
    options = trl.DPOConfig(
        str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, max_length=32, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, model_init_kwargs=ours if own is None else None,
    )  # fmt: skip
    trainer = trl.DPOTrainer(own or folder, copy.deepcopy(own) if reference else None, args=options, **preferences())
    assert trainer.ref_model.get_experts_implementation() == {"": runs}
    assert trainer.model.get_experts_implementation() == {"": "mxep"}
    trainer.train()
    (margin,) = (entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry)
    assert (margin == 0) == (runs == "mxep")


def accelerated(rank: int, world: int) -> dict[str, Tensor]:
    """Gradients of a step under DDP, a batch for each rank."""
    transformers_5.register()
    model = build("Qwen3Moe")
    model.set_experts_implementation("mxep")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    model = accelerator.prepare(model)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    accelerator.backward(model(input_ids=tokens_of(rank), labels=tokens_of(rank)).loss)
    return {name: parameter.grad for name, parameter in accelerator.unwrap_model(model).named_parameters()}


def test_accelerate_on_two_ranks() -> None:
    """Both ranks have the mean of what each batch gives alone."""
    first, second = run_ranks(accelerated, 2)
    model = build("Qwen3Moe")
    model.set_experts_implementation("mxep")
    for rank in range(2):
        (model(input_ids=tokens_of(rank), labels=tokens_of(rank)).loss / 2).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.grad, rtol=1e-4, atol=1e-6)
