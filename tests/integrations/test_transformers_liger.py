"""RMSNorms and rotary embeddings of transformers models: their forms, and their conversion by `accelerate`, without liger-kernel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.spies import spy_on
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_accelerate import gradients, labelled, model_of, tokens_of  # noqa: E402

from mxep.integrations import transformers_5, transformers_liger  # noqa: E402
from mxep.integrations.transformers_liger import (  # noqa: E402
    RMSNormForm,
    RotaryForm,
    _form_of,
    _forward_with_liger,
    _liger_rotary,
    _rotary_form_of,
    convert_norm,
    convert_rotary,
    norm_kernel,
    rms_norm_form,
    rotary_form,
    why_modules_stay,
)
from mxep.parallel import recompute_blocks  # noqa: E402


def test_forms_of_rms_norms() -> None:
    forms = {family: rms_norm_form(model_of(family).model.norm) for family in ("Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "Qwen3Next")}
    llama, scaled = RMSNormForm("llama", 0.0), RMSNormForm("gemma", 0.0)
    assert forms == {
        "Qwen3Moe": llama,
        "Mixtral": llama,
        "DeepseekV3": llama,
        "GptOss": scaled,
        "Qwen3Next": RMSNormForm("gemma", 1.0),
    }
    assert rms_norm_form(nn.RMSNorm(64)) is None  # eps is None
    assert rms_norm_form(nn.LayerNorm(64)) is None


def test_forms_do_not_depend_on_the_default_device() -> None:
    model = model_of()
    norm, attention = model.model.norm, model.model.layers[0].self_attn
    _form_of.cache_clear()
    _rotary_form_of.cache_clear()
    with torch.device("meta"):
        assert rms_norm_form(norm) == RMSNormForm("llama", 0.0)
        assert rotary_form(attention) == RotaryForm(1)


def test_the_kernel_that_computes_a_norm() -> None:
    kind = type(model_of().model.norm)
    llama, scaled, gemma = RMSNormForm("llama", 0.0), RMSNormForm("gemma", 0.0), RMSNormForm("gemma", 1.0)
    assert [norm_kernel(kind(2048), form) for form in (llama, scaled, gemma)] == ["torch", "torch", "liger-kernel"]
    assert norm_kernel(kind(128), llama) == "liger-kernel"


def test_a_converted_norm_on_a_cpu_is_the_models_own() -> None:
    model = model_of()
    norm, x = model.model.norm, torch.randn(3, 64).bfloat16()
    want = norm(x)
    undo = convert_norm(norm, RMSNormForm("llama", 0.0))
    assert torch.equal(norm(x), want)
    undo()
    assert "forward" not in vars(norm)
    assert "need a GPU" in str(why_modules_stay(model))


def test_forms_of_rotary_embeddings() -> None:
    forms = {}
    for family in ("Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "Qwen3Next"):
        found = {rotary_form(module) for module in model_of(family).modules()} - {None}
        forms[family] = next(iter(found), None)
        assert len(found) <= 1
    assert forms == {
        "Qwen3Moe": RotaryForm(1),
        "Mixtral": RotaryForm(1),
        "DeepseekV3": None,  # pairs of neighbours, by another function of its file
        "GptOss": RotaryForm(2),
        "Qwen3Next": RotaryForm(1),
    }
    halves = model_of("DeepseekV3", rope_interleave=False)
    assert rotary_form(halves.model.layers[0].self_attn) == RotaryForm(1)
    assert rotary_form(nn.Linear(4, 4)) is None

    class OfItsOwn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.apply_rotary_pos_emb(x)  # type: ignore[no-any-return, operator]

    assert rotary_form(OfItsOwn()) is None


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_a_converted_attention_calls_another_function(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is the file's own, so results are the same bits; the file's global and other models stay."""
    model, tokens = model_of(family).eval(), tokens_of(1)
    attention = [module for module in model.modules() if rotary_form(module) is not None]
    want, rotary = model(input_ids=tokens).logits, spy_on(monkeypatch, transformers_liger, "_liger_rotary")
    _forward_with_liger.cache_clear()
    undo = [convert_rotary(module) for module in attention]
    copied = copy.deepcopy(model)
    assert torch.equal(model(input_ids=tokens).logits, want)
    assert rotary.call_count == len(attention) == 2
    copied.model.layers[0].self_attn.o_proj.weight.data.zero_()  # the copy's forward is that of the copy
    assert not torch.equal(copied(input_ids=tokens).logits, want)
    rotary.reset_mock()
    for one in undo:
        one()
    assert torch.equal(model(input_ids=tokens).logits, want)
    assert not rotary.called
    _forward_with_liger.cache_clear()


def convert_with_a_kernel_that_writes(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[list[nn.Module], list[RotaryForm]]:
    """Converts the model's attention on a CPU, as if liger's kernel ran there; returns it, and a list that grows with each call."""
    calls = []

    def writes(own: Any, form: RotaryForm, *args: Any) -> tuple[Tensor, Tensor]:
        calls.append(form)
        q, k, *angles = args
        rotated: tuple[Tensor, Tensor] = own(q.clone(), k.clone(), *angles)
        for before, after in zip((q, k), rotated, strict=True):
            before.data.copy_(after)  # past autograd's count of versions, as a kernel does
        return rotated

    monkeypatch.setattr("mxep.integrations.transformers_liger._liger_rotary", writes)
    _forward_with_liger.cache_clear()
    attention = [module for module in model.modules() if rotary_form(module) is not None]
    for module in attention:
        convert_rotary(module)
    return attention, calls


@pytest.mark.parametrize("hooks", ["forward", "backward", "global"])
def test_a_hook_sees_projections_before_rotation(hooks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, kept = model_of("Mixtral"), tokens_of(1), list[Tensor]()
    attention, calls = convert_with_a_kernel_that_writes(model, monkeypatch)
    projection = attention[0].q_proj

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        if module is projection:
            kept.append(out)

    def see(module: nn.Module, before: Any, after: Any) -> None:
        kept.append(after[0])

    if hooks == "global":
        handle = nn.modules.module.register_module_forward_hook(keep)
    else:
        handle = projection.register_forward_hook(keep) if hooks == "forward" else projection.register_full_backward_hook(see)
    rows = list[Tensor]()
    before = projection.register_forward_pre_hook(lambda module, args: rows.append(args[0].detach()))
    model(input_ids=tokens).logits.sum().backward()
    assert len(calls) == (0 if hooks == "global" else 1)  # the other layer's
    (seen,) = kept
    if hooks != "backward":
        assert torch.equal(seen, nn.functional.linear(rows[0], projection.weight))
    handle.remove()
    before.remove()
    model(input_ids=tokens)
    assert len(calls) == (2 if hooks == "global" else 3)
    _forward_with_liger.cache_clear()


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_converted_attention_whose_projections_are_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel overwrites the projections' results that selective checkpointing keeps for the second forward."""
    model = model_of(family)
    want = gradients(model, **labelled())
    attention, calls = convert_with_a_kernel_that_writes(model, monkeypatch)
    for mode, times in (("none", 1), ("full", 2), ("selective", 0)):
        calls.clear()
        recomputed = copy.deepcopy(model)
        recompute_blocks(recomputed.model.layers, mode)  # type: ignore[arg-type]
        got = gradients(recomputed, **labelled(), use_cache=False)
        assert len(calls) == times * len(attention), mode
        assert torch.equal(got[0], want[0]), mode
        assert all(torch.equal(got[1][name], grad) for name, grad in want[1].items()), mode
    _forward_with_liger.cache_clear()


def test_other_calls_of_a_rotation_are_its_own() -> None:
    """No GPU is asked for: each has arguments that the kernel does not take."""
    q, k, angle = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 3, 16)
    for args, kwargs in (
        ((q,), {"cos": angle, "sin": angle}),
        ((q, k, angle, angle), {"unsqueeze_dim": 2}),
        ((q, k, angle, angle, 2), {}),
        ((q, k, angle[0], angle[0]), {}),  # of a function that takes nothing else
        ((q, None, angle, angle), {"position_ids": None}),
    ):
        seen: list[Any] = []
        _liger_rotary(lambda *args, **kwargs: seen.extend((args, kwargs)), RotaryForm(1), *args, **kwargs)  # type: ignore[arg-type, return-value]  # noqa: B023
        assert seen == [args, kwargs]


@pytest.mark.parametrize(("family", "rotates"), [("Qwen3Moe", True), ("DeepseekV3", False), ("GptOss", True), ("Qwen3Next", False)])
def test_rotary_embeddings_that_are_converted(family: str, rotates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with liger-kernel; DeepseekV3 rotates pairs of neighbours, Qwen3Next a quarter of each head."""
    monkeypatch.setattr(transformers_5, "why_modules_stay", lambda model: None)
    model = model_of(family)
    done = transformers_5.accelerate(model, experts=False, linears=None, norms=False, routers=False)
    converted = [name for name, what in done.converted.items() if what.startswith("rotary")]
    assert len(converted) == (2 if rotates else 0), str(done)
    assert ("rotary" in done.left) == (not rotates)
    done.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_that_needs_more_than_plain_attributes_is_of_no_form() -> None:
    class GroupedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon, self.group_size = nn.Parameter(torch.ones(64)), 1e-6, None

        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states if self.group_size is None else hidden_states * self.weight

    assert rms_norm_form(GroupedRMSNorm()) is None
