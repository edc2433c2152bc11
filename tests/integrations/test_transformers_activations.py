"""The activation of transformers' experts is recognised, whatever modes are active around the forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.operator_calls import OperatorCalls
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from mxep.integrations.transformers_activations import ExpertActivation, _find, activation_of
from mxep.moe import SwiGLU
from mxep.moe.config import ActivationName


def ours(activation: ActivationName, layout: str = "concatenated", swiglu: SwiGLU = SwiGLU()) -> ExpertActivation:  # noqa: B008
    return ExpertActivation(activation, layout, swiglu)


GPT_OSS = SwiGLU(7.0, 1.702, 1.0)
MODELS: dict[tuple[str, str, str], ExpertActivation | None] = {
    ("gpt_oss", "GptOss", "GptOss"): ours("swiglu", "interleaved", GPT_OSS),
    ("openai_privacy_filter", "OpenAIPrivacyFilter", "OpenAIPrivacyFilter"): ours("swiglu", "concatenated", GPT_OSS),
    ("minimax_m3_vl", "MiniMaxM3VL", "MiniMaxM3VLText"): ours("swiglu", "concatenated", GPT_OSS),
    ("deepseek_v4", "DeepseekV4", "DeepseekV4"): ours("swiglu", "concatenated", SwiGLU(10.0)),
    ("glm5_next", "Glm5NextText", "Glm5NextText"): ours("swiglu", "concatenated", SwiGLU(10.0)),
    ("hy_v4", "HYV4", "HYV4"): ours("swiglu", "concatenated", SwiGLU(10.0)),
    ("beam", "Beam", "Beam"): ours("swiglu"),
    ("qwen3_moe", "Qwen3Moe", "Qwen3Moe"): ours("swiglu"),
    ("inkling2", "Inkling2", "Inkling2Text"): None,
    ("nemotron_h", "NemotronH", "NemotronH"): ours("relu2"),
    ("gemma4", "Gemma4Text", "Gemma4Text"): ours("geglu_tanh"),
    ("diffusion_gemma", "DiffusionGemmaText", "DiffusionGemmaText"): ours("geglu_tanh"),
}


def experts_of(model: str, prefix: str, config: str) -> Any:
    """A model's experts by its default configuration, without weights."""
    package = f"transformers.models.{model}"
    shape = getattr(importlib.import_module(f"{package}.configuration_{model}"), f"{config}Config")()
    if model in ("gemma4", "diffusion_gemma"):  # dense by default
        shape.num_experts, shape.moe_intermediate_size = 8, 64
    with torch.device("meta"):
        return getattr(importlib.import_module(f"{package}.modeling_{model}"), f"{prefix}Experts")(shape)


@pytest.mark.parametrize("name", MODELS, ids=lambda name: name[0])
def test_activations_of_models(name: tuple[str, str, str]) -> None:
    assert activation_of(experts_of(*name)) == MODELS[name]


class Plain(nn.Module):
    """A class of experts as transformers' decorator makes it."""

    has_gate, is_concatenated = True, True
    _apply_gate = _default_apply_gate

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in {"act_fn": nn.SiLU(), **attributes}.items():
            setattr(self, name, value)


class Clamped(Plain):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class ClampedBehind(Plain):  # Step-3.7's
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class StraightThrough(Plain):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = (part + (part.clamp(-self.limit, self.limit) - part).detach() for part in gate_up.chunk(2, -1))
        gate = gate + (torch.minimum(gate, torch.tensor(self.limit)) - gate).detach()
        return F.silu(gate) * up


class WithBeta(Plain):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up * getattr(self, "beta", 1.0)


PLAIN, LIMITED = ours("swiglu"), ours("swiglu", "concatenated", SwiGLU(10.0))
CASES: dict[str, tuple[Callable[[], Any], ExpertActivation | None]] = {
    "default": (Plain, PLAIN),
    "default, said to be interleaved": (lambda: Plain(is_concatenated=False), PLAIN),  # it splits in halves nevertheless
    "default, gelu": (lambda: Plain(act_fn=nn.GELU()), ours("geglu")),
    "default, gelu by tanh": (lambda: Plain(act_fn=nn.GELU("tanh")), ours("geglu_tanh")),
    "default, transformers' gelu": (lambda: Plain(act_fn=ACT2FN["gelu"]), ours("geglu")),
    "default, quick gelu": (lambda: Plain(act_fn=ACT2FN["quick_gelu"]), None),
    "default, relu": (lambda: Plain(act_fn=ACT2FN["relu"]), ours("reglu")),
    "no gate, relu": (lambda: Plain(has_gate=False, act_fn=ACT2FN["relu"]), None),
    "default, squared relu": (lambda: Plain(act_fn=ACT2FN["relu2"]), None),
    "no gate": (lambda: Plain(has_gate=False), None),
    "no gate, squared relu": (lambda: Plain(has_gate=False, act_fn=ACT2FN["relu2"]), ours("relu2")),
    "of this one alone": (lambda: Plain(_apply_gate=lambda gate_up: gate_up), None),
    "clamped": (lambda: Clamped(limit=10.0), LIMITED),
    "clamped, whole": (lambda: Clamped(limit=10), LIMITED),
    "clamped far off": (lambda: Clamped(limit=2e4), ours("swiglu", "concatenated", SwiGLU(2e4))),
    "clamped nowhere": (lambda: Clamped(limit=float("inf")), PLAIN),
    "clamped by a tensor": (lambda: Clamped(limit=torch.tensor(10.0)), None),
    "clamped, gelu": (lambda: Clamped(limit=10.0, act_fn=nn.GELU()), None),
    "limit 0": (lambda: Clamped(limit=0.0), None),
    "limit of no float32": (lambda: Clamped(limit=1e-50), None),
    "limit by name": (lambda: Clamped(limit="auto"), None),
    "plain, other constants": (lambda: WithBeta(alpha=1e39, limit="none"), PLAIN),
    "limit None": (lambda: Clamped(limit=None), None),
    "no limit": (Clamped, None),
    "clamped behind": (lambda: ClampedBehind(limit=7.0), None),
    "clamped behind nowhere": (lambda: ClampedBehind(limit=float("inf")), PLAIN),
    "straight through": (lambda: StraightThrough(limit=7.0), None),
    "beta": (lambda: WithBeta(beta=2.0), None),
    "beta, learnt": (lambda: WithBeta(beta=nn.Parameter(torch.tensor(2.0))), None),
    "beta of 1": (WithBeta, PLAIN),
}


@pytest.mark.parametrize("case", CASES)
def test_activations_of_a_user(case: str) -> None:
    make, want = CASES[case]
    assert activation_of(make()) == want


def test_a_replaced_activation_is_recognised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = Clamped(limit=10.0)
    assert activation_of(experts) == LIMITED
    monkeypatch.setattr(Clamped, "_apply_gate", lambda self, gate_up: F.gelu(gate_up))
    assert activation_of(experts) is None


def in_graph(experts: Any, dynamic: bool) -> ExpertActivation | None:
    """What a graph without breaks sees."""

    def forward(x: Tensor) -> Any:
        how = activation_of(experts)
        return x + 1, None if how is None else (how.activation, how.layout, tuple(how.swiglu))

    torch._dynamo.reset()
    _, found = torch.compile(forward, backend="eager", fullgraph=True, dynamic=dynamic)(torch.ones(2))
    return None if found is None else ExpertActivation(found[0], found[1], SwiGLU(*found[2]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS, ids=lambda name: name[0])
def test_graphs_recognise_the_same(name: tuple[str, str, str], dynamic: bool) -> None:
    """Attributes are numbers of the graph there, or symbols where sizes are dynamic."""
    assert in_graph(experts_of(*name), dynamic) == MODELS[name]


@pytest.mark.parametrize("case", CASES)
def test_graphs_recognise_no_other_than_that_of_a_user(case: str) -> None:
    make, want = CASES[case]
    assert in_graph(make(), dynamic=False) in (want, None)  # None: the model's own gate runs


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def refuse(value: Any) -> Any:
    raise AssertionError("nothing of the probe is saved for the model's backward")


AROUND: dict[str, Callable[[], AbstractContextManager]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "counted": OperatorCalls,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
}


@pytest.mark.parametrize("around", AROUND)
def test_active_modes_change_nothing(around: str) -> None:
    """No mode sees the recognition: selective checkpointing would take its operations for the model's."""
    name = ("gpt_oss", "GptOss", "GptOss")
    experts = experts_of(*name)
    _find.cache_clear()
    with AROUND[around]() as mode:
        assert activation_of(experts) == MODELS[name]
    assert not (isinstance(mode, OperatorCalls) and mode.names)
