"""`transformers_5.accelerate`: a loaded model against itself unconverted, under Trainer, compiled, checkpointed, saved, and undone."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.operator_calls import LargestTensor
from tests.truth import sqnr
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import build  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

from mxep.integrations import transformers_5, transformers_loss  # noqa: E402
from mxep.models.loss import IGNORE, linear_cross_entropy  # noqa: E402
from mxep.parallel import MXLinear, convert_experts, quantize_base, unconvert  # noqa: E402
from mxep.parallel.forwards import replaced_by  # noqa: E402
from mxep.recipe import Recipe  # noqa: E402
from mxep.train import AdamW  # noqa: E402

FAMILIES = {"Qwen3Moe": "self_attn", "Mixtral": "self_attn", "GptOss": "self_attn", "DeepseekV3": "o_proj"}  # linear layers to convert
MX = "mxfp8_wgrad_with_mx"
WORDS = 256


def model_of(family: str = "Qwen3Moe", **changes: Any) -> Any:
    return build(family, **changes).to(torch.bfloat16).train()


def tokens_of(seed: int, rows: int = 2, length: int = 37) -> Tensor:
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def labelled() -> dict[str, Tensor]:
    tokens = tokens_of(0)
    labels = tokens.clone()
    labels[:, :5] = IGNORE
    return {"input_ids": tokens, "labels": labels}


def gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_before_and_is_undone(family: str) -> None:
    """Tokens that change their experts move the router's gradient most; of a bias of keys, attention sees rounding errors alone."""
    model, inputs = model_of(family), labelled()
    want, of_bf16 = gradients(model, **inputs)
    done = transformers_5.accelerate(model, MX, linears=FAMILIES[family], head_recipe=MX)
    kinds = [what.split(",")[0] for what in done.converted.values()]
    assert (kinds.count("experts"), kinds.count("linear") > 0, kinds.count("loss in chunks of tokens")) == (2, True, 1)
    assert list(done.left) == ["norms", "rotary"]
    assert "need a GPU, and the model is on cpu" in str(done)
    output = model(**inputs)
    assert output.logits is None
    assert "logits" not in output
    loss, ours = gradients(model, **inputs)
    assert float(loss) == pytest.approx(float(want), rel=2e-3)
    assert set(ours) == set(of_bf16)
    for name, gradient in of_bf16.items():
        assert gradient.count_nonzero()
        assert sqnr(gradient, ours[name]) > (3 if "router" in name or "gate.weight" in name or "k_proj.bias" in name else 10), name
    done.undo()
    assert done.converted == {}
    assert not any(isinstance(module, MXLinear) or "forward" in vars(module) for module in model.modules())
    again, of_undone = gradients(model, **inputs)
    assert torch.equal(again, want)
    assert all(torch.equal(of_undone[name], gradient) for name, gradient in of_bf16.items())


def test_layers_that_are_alike_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up after 8 graphs of a function. Norms and rotary embeddings are converted as on a GPU, and run the class's forward."""
    monkeypatch.setattr(transformers_5, "why_modules_stay", lambda _: None)
    model, inputs = model_of(num_hidden_layers=9), labelled() | {"use_cache": False}
    done = transformers_5.accelerate(model, MX, linears=["self_attn"])
    assert not done.left
    want = gradients(model, **inputs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    got = gradients(model, **inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(gradient, want[1][name]) for name, gradient in got[1].items())
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1  # the graphs are of another number
    changed = model(**inputs).loss
    done.undo()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch.equal(changed, want[0])


def test_copies_have_their_own_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_5, "why_modules_stay", lambda _: None)
    model = model_of()
    done = transformers_5.accelerate(model, MX)
    copied = copy.deepcopy(model)
    assert all(module.forward.__self__ is module for module in copied.model.layers.modules() if "forward" in vars(module))
    done.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_pickled_models_compute_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads one does not know the experts' implementation yet."""
    monkeypatch.setattr(transformers_5, "why_modules_stay", lambda _: None)
    model, inputs, file = model_of("GptOss"), labelled(), io.BytesIO()
    done = transformers_5.accelerate(model, MX, linears="o_proj")
    torch.save(model, file)
    want, ours = gradients(model, **inputs)
    replaced = [type(module).__name__ for module in model.modules() if replaced_by(module)]
    monkeypatch.delitem(transformers_5.ExpertsInterface._global_mapping, f"mxep_{MX}")
    file.seek(0)
    read = torch.load(file, weights_only=False)
    found = [module for module in read.modules() if replaced_by(module)]
    assert [type(module).__name__ for module in found] == replaced
    assert all(module.forward.__self__ is module for module in found)
    assert {module.forward.__func__ for module in found} == {module.forward.__func__ for module in model.modules() if replaced_by(module)}
    got, gradients_read = gradients(read, **inputs)
    assert torch.equal(got, want)
    assert all(torch.equal(gradients_read[name], gradient) for name, gradient in ours.items())
    done.undo()
    assert not any(name.startswith("_mxep") for module in model.modules() for name in vars(module))
    assert torch.equal(read(**inputs).loss, want)


@pytest.mark.parametrize("part", ["experts", "head", "routers"])
def test_copies_are_converted_already(part: str) -> None:
    parts = dict.fromkeys(("experts", "head", "routers"), False) | {part: True}
    model = model_of()
    done = transformers_5.accelerate(model, MX, linears=None, **parts)
    for converted in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="a model with converted modules"):
            transformers_5.accelerate(converted, MX)
    done.undo()
    transformers_5.accelerate(model, MX)


@pytest.mark.parametrize("returns_dict", [True, False])
def test_backward_hooks_of_the_head(returns_dict: bool) -> None:
    """torch gives what follows the hook a view of the output."""
    model, inputs, seen = model_of(), labelled(), []
    want, of_model = gradients(model, **inputs)
    transformers_5.accelerate(model, "bf16", experts=False, linears=None, routers=False)
    model.lm_head.register_full_backward_hook(lambda module, d_inputs, d_outputs: seen.append(d_inputs[0].shape[-1]))
    model.zero_grad()
    output = model(**inputs, return_dict=returns_dict)
    assert returns_dict or output[1] is None
    output[0].backward()
    assert seen == [model.config.hidden_size]
    torch.testing.assert_close(output[0], want, rtol=2e-3, atol=0.0)
    assert sqnr(of_model["lm_head.weight"], model.lm_head.weight.grad) > 40


def test_a_loss_that_is_set_afterwards_is_the_models() -> None:
    model, inputs = model_of(), labelled()
    done = transformers_5.accelerate(model, "bf16", experts=False, linears=None, routers=False)

    def of_last_token(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        return nn.functional.cross_entropy(logits[:, -2].float(), labels[:, -1])

    model.loss_function = of_last_token
    output = model(**inputs)
    assert torch.equal(output.loss, of_last_token(output.logits, inputs["labels"]))
    done.undo()
    assert model.loss_function is of_last_token


def test_another_projection_is_an_error() -> None:
    model = model_of()
    transformers_5.accelerate(model, MX)
    model.resize_token_embeddings(WORDS + 44)
    with pytest.raises(ValueError, match="has another projection now"):
        model(**labelled())


def test_a_router_with_a_forward_of_its_own_stays() -> None:
    model = model_of()
    router = model.model.layers[1].mlp.gate
    router.forward = own = functools.partial(type(router).forward, router)
    done = transformers_5.accelerate(model, MX)
    assert done.left["model.layers.1.mlp.gate"] == "a forward of its own replaces that of its class (a hook, an offload)"
    done.undo()
    assert router.forward is own


def test_without_labels_and_in_eval_mode_the_head_changes_nothing() -> None:
    model, inputs = model_of(), labelled()
    tokens = inputs["input_ids"]

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            model.train()
            found = [model(input_ids=tokens).logits, model(input_ids=tokens, logits_to_keep=3).logits]
            model.eval()
            evaluated = model(**inputs)
            return [*found, evaluated.loss, evaluated.logits, model.generate(tokens[:1, :6], max_new_tokens=4, do_sample=False)]

    before = outputs()
    transformers_5.accelerate(model, MX, experts=False, linears=None, head_recipe=MX)
    assert all(torch.equal(*pair) for pair in zip(before, outputs(), strict=True))


@pytest.mark.parametrize("options", [{"num_items_in_batch": 50}, {"num_items_in_batch": torch.tensor(50)}, {"ignore_index": 7}, {}])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_is_that_of_transformers(options: dict[str, Any], shifted: bool) -> None:
    model, inputs = model_of(), labelled()
    inputs["labels"][0, 20:30] = options.get("ignore_index", IGNORE)
    if "ignore_index" in options:
        inputs["labels"][inputs["labels"] == IGNORE] = 7
    if shifted:
        options = {**options, "shift_labels": tokens_of(5)}
    want = model(**inputs, **options).loss
    transformers_5.accelerate(model, "bf16", experts=False, linears=None)
    for return_dict in (True, False):
        output = model(**inputs, **options, return_dict=return_dict)
        torch.testing.assert_close(output[0], want, rtol=2e-3, atol=0.0)
    assert output[1] is None


def test_router_losses_are_added() -> None:
    model, inputs = model_of(router_aux_loss_coef=0.5), labelled()
    want = model(**inputs, output_router_logits=True)
    transformers_5.accelerate(model, "bf16", experts=False, linears=None)
    got = model(**inputs, output_router_logits=True, return_dict=False)
    torch.testing.assert_close(got[0], want.loss, rtol=2e-3, atol=0.0)
    assert got[1] is not None
    assert float(want.loss) > float(model(**inputs).loss) + 0.1


def test_no_label_to_learn() -> None:
    """As transformers: NaN as mean, 0 where the number of items is given."""
    model, tokens = model_of(), tokens_of(0)
    transformers_5.accelerate(model, MX)
    labels = torch.full_like(tokens, IGNORE)
    assert model(input_ids=tokens, labels=labels).loss.isnan()
    loss, found = gradients(model, input_ids=tokens, labels=labels, num_items_in_batch=3)
    assert float(loss) == 0.0
    assert not any(gradient.count_nonzero() for gradient in found.values())


def test_only_one_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(), tokens_of(0, 4, 128)
    monkeypatch.setattr(transformers_loss, "linear_cross_entropy", functools.partial(linear_cross_entropy, chunk_tokens=128))
    with LargestTensor(lambda tensor: tensor.shape[-1:] == (WORDS,)) as plain:
        model(input_ids=tokens, labels=tokens).loss.backward()
    transformers_5.accelerate(model, MX)
    with LargestTensor(lambda tensor: tensor.shape[-1:] == (WORDS,)) as ours:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert (plain.size, ours.size) == (512 * WORDS, 128 * WORDS)


def losses_of_trainer(model: Any, folder: Path) -> list[float]:
    data = [{"input_ids": row, "labels": row} for row in tokens_of(3, 8, 32).tolist()]
    options = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1,
        activation_checkpointing=True, use_cpu=True, report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=data, eval_dataset=data[:2])
    trainer.train()
    return [record[key] for record in trainer.state.log_history for key in ("loss", "eval_loss") if key in record]


def test_trainer_with_activation_checkpointing(tmp_path: Path) -> None:
    """Two microbatches a step, whose number of labels Trainer hands to the loss."""
    plain, ours = model_of(), model_of()
    transformers_5.accelerate(ours, MX, linears="self_attn")
    want, got = losses_of_trainer(plain, tmp_path / "plain"), losses_of_trainer(ours, tmp_path / "ours")
    assert len(got) == 3
    assert got == pytest.approx(want, rel=5e-3)
    assert got != want


def test_trainer_with_an_optimizer_of_ours(tmp_path: Path) -> None:
    """bf16 weights and 8-bit moments; a run that goes on from a checkpoint ends with the same bits.

    Trainer does not read a checkpoint's experts, which are stored one by one, so the model is loaded from it.
    """
    data = [{"input_ids": row, "labels": row} for row in tokens_of(3, 8, 32).tolist()]
    options = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    model_of().save_pretrained(tmp_path / "before")
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-1")):
        model = AutoModelForCausalLM.from_pretrained(checkpoint or tmp_path / "before", dtype=torch.bfloat16)
        optimizer = AdamW(model.named_parameters(), lr=1e-3, state_bits=8)
        Trainer(model, options, train_dataset=data, optimizers=(optimizer, None)).train(resume_from_checkpoint=checkpoint)
        assert "exp_avg_codes" in optimizer.state[model.lm_head.weight]
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *ends))
    assert not any(map(torch.equal, ends[0], model_of().parameters()))


def test_compiled() -> None:
    model, inputs = model_of(), labelled()
    transformers_5.accelerate(model, MX, linears="self_attn")
    want, eager = gradients(model, **inputs)
    model.compile(backend="aot_eager")
    got, compiled = gradients(model, **inputs)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0.0)  # experts in a graph work GEMM by GEMM
    for name, gradient in eager.items():
        assert sqnr(gradient, compiled[name]) > 15, name


def test_saved_loaded_and_copied(tmp_path: Path) -> None:
    model, inputs = model_of(), labelled()
    plain_loss = model(**inputs).loss
    done = transformers_5.accelerate(model, MX, linears="self_attn")
    copied = copy.deepcopy(model)
    want = model(**inputs).loss
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    assert type(loaded) is type(model)
    assert loaded.get_experts_implementation() != model.get_experts_implementation()
    done.undo()
    before, after = model.state_dict(), loaded.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    torch.testing.assert_close(loaded(**inputs).loss, plain_loss, rtol=1e-3, atol=0.0)  # its rotary frequencies are float32
    nn.init.zeros_(model.lm_head.weight)
    assert torch.equal(copied(**inputs).loss, want)  # of its own parts


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft", reason="a development tool")
    losses = []
    for converts in (False, True):
        model = model_of()
        if converts:
            transformers_5.accelerate(model, MX)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        output = adapted(**labelled())
        assert (output.logits is None) == converts
        output.loss.backward()
        assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
        losses.append(float(output.loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_a_base_that_is_frozen_in_mx() -> None:
    model = model_of()
    want = model(**labelled()).loss.detach()
    quantize_base(model)
    transformers_5.accelerate(model, MX, linears="self_attn")
    loss = model(**labelled()).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(want), rel=2e-3)
    assert model.model.embed_tokens.weight.grad.count_nonzero()


def test_autocast_rounds_the_head_as_a_linear_layer() -> None:
    model, inputs = build("Qwen3Moe").train(), labelled()
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs).loss
        transformers_5.accelerate(model, "bf16", experts=False, linears=None)
        torch.testing.assert_close(model(**inputs).loss, want, rtol=1e-3, atol=0.0)


def test_autocast_to_float16_is_refused_before_the_first_layer() -> None:
    model = model_of()
    transformers_5.accelerate(model, "bf16", experts=False, linears=None)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"autocast to float16, want torch\.bfloat16"):
        model.forward(input_ids=None, labels=tokens_of(0))


def test_linear_layers_that_are_faster_in_mxfp8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    done = transformers_5.accelerate(model, MX)
    assert done.left["model.layers.1.self_attn.k_proj"] == "linear, 64 -> 32 does not gain"
    done.undo()
    monkeypatch.setattr("mxep.parallel.linears.linear_gains", lambda K, N, recipe, tokens: N == 64)
    done = transformers_5.accelerate(model, MX)
    converted = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    assert converted == [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qo"]
    assert "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj: linear, 64 -> 32 does not gain" in str(done)


@pytest.mark.parametrize("own", ["class", "configuration"])
def test_experts_that_transformers_leaves_out_are_converted(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' `set_experts_implementation` changes no class in a user's file, and no experts with a configuration of their layer."""
    model = model_of()
    experts = [module for module in model.modules() if hasattr(module, "has_gate")]
    if own == "class":
        monkeypatch.setattr(type(model), "_can_set_experts_implementation_cached_value", False, raising=False)
    else:
        experts[1].config = copy.deepcopy(model.config)
    before = [module.config._experts_implementation for module in experts]
    done = transformers_5.accelerate(model, MX)
    assert [what for what in done.converted.values() if what.startswith("experts")] == [f"experts, {MX}"] * 2
    assert all(transformers_5.computes(module) for module in experts)
    done.undo()
    assert [module.config._experts_implementation for module in experts] == before


def test_linear_layers_of_a_dense_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are converted by their full names: "experts", which are left, name none, and a short name is no part of a longer one."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    model.k_proj = nn.Linear(64, 96, dtype=torch.bfloat16)  # does not gain, and is a part of the name of one that does
    monkeypatch.setattr("mxep.parallel.linears.linear_gains", lambda K, N, recipe, tokens: N != 96)
    done = transformers_5.accelerate(model, MX)
    assert done.left["experts"] == "the model has none that transformers can switch"
    converted = {name for name, module in model.named_modules() if isinstance(module, MXLinear)}
    assert converted == {name for name, what in done.converted.items() if what.startswith("linear, ")}
    assert converted == {f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.down")}
    model(**labelled()).loss.backward()


@pytest.mark.parametrize(
    ("family", "changes", "kind", "reason"),
    [
        ("GraniteMoe", {"logits_scaling": 2.0}, "head", "the model changes its logits before the loss (logits_scaling=2.0)"),
        ("Phimoe", {"lm_head_bias": True}, "head", "it is a Linear with a bias, want a torch.nn.Linear without one"),
        ("Qwen3Moe", {"moe_intermediate_size": 24}, "experts", "their widths [(48, 64), (64, 24)] are no multiples of 32 (one MX block)"),
    ],
)
def test_layers_that_stay_are_named(family: str, changes: dict[str, Any], kind: str, reason: str) -> None:
    model, inputs = model_of(family, **changes), labelled()
    done = transformers_5.accelerate(model, MX)
    assert done.left[kind] == reason
    model(**inputs).loss.backward()


@pytest.mark.parametrize("read", [lambda logits: logits.shape[-1], lambda logits: logits[..., :32]])
def test_a_model_that_reads_its_logits_is_an_error(read: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inkling does for its vocabulary's size. Errors before the projection are not changed."""
    model, inputs = model_of(), labelled()
    forward = type(model).forward

    def reads(self: Any, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        read(logits)
        return self.loss_function(logits=logits, labels=labels, vocab_size=64)

    transformers_5.accelerate(model, MX)
    monkeypatch.setattr(type(model), "forward", reads)
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM reads its logits before its loss \(.*accelerate\(\.\.\., head=False\)"):
        model(input_ids=inputs["input_ids"], labels=inputs["labels"])
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model(input_ids=inputs["input_ids"], labels=inputs["labels"], nothing=1)
    monkeypatch.setattr(type(model), "forward", forward)
    model(**inputs).loss.backward()


def test_a_model_that_changes_its_logits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_loss, "_SCALES", ())
    model, inputs = model_of("GraniteMoe", logits_scaling=2.0), labelled()
    transformers_5.accelerate(model, MX)
    with pytest.raises(ValueError, match="the model or a hook changes its logits between its projection and its loss"):
        model(**inputs)
    assert model(input_ids=inputs["input_ids"]).logits.shape[-1] == WORDS  # the failed call leaves no state


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"accelerate: a Linear, want a transformers\.PreTrainedModel"):
        transformers_5.accelerate(nn.Linear(32, 32))
    model = model_of()
    with pytest.raises(ValueError, match="'mxfp9' is unknown"):
        transformers_5.accelerate(model, "mxfp9")
    with pytest.raises(ValueError, match="nothing of Qwen3MoeForCausalLM can be converted"):
        transformers_5.accelerate(model, MX, experts=False, head=False, routers=False)
    before = model.get_experts_implementation()
    with pytest.raises(ValueError, match=r"'attn' matched no torch\.nn\.Linear"):
        transformers_5.accelerate(model, MX, linears="attn")
    assert model.get_experts_implementation() == before
    for parts in ({}, {"head": False, "routers": False}, {"head": False, "experts": False}):
        done = transformers_5.accelerate(model, MX, **parts)
        with pytest.raises(ValueError, match=r"a model with converted modules, .* undo\(\)"):
            transformers_5.accelerate(model, MX)
        done.undo()
    convert_experts(model, recipe=MX)
    with pytest.raises(ValueError, match=r"a model with converted modules, .* mxep\.unconvert"):
        transformers_5.accelerate(model, MX)
    unconvert(model)
    for _ in range(2):  # linear layers that something else has restored
        done = transformers_5.accelerate(model, MX, linears="self_attn", experts=False, head=False, routers=False)
        assert unconvert(model)
        done.undo()
    with pytest.raises(ValueError, match=f"another recipe is called '{MX}' already"):
        transformers_5.accelerate(model_of(), Recipe(MX))


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = model_of()
    before = model.get_experts_implementation()
    with pytest.raises(ValueError, match="mxfp9"):
        transformers_5.accelerate(model, "mxfp8_wgrad_with_mx", linears="self_attn", head_recipe="mxfp9")
    assert model.get_experts_implementation() == before
    assert not any(isinstance(module, MXLinear) or "forward" in vars(module) for module in model.modules())


def test_a_scale_of_one_is_a_change_of_the_logits() -> None:
    model = model_of("GraniteMoe").train()
    assert model.config.logits_scaling == 1.0
    done = transformers_5.accelerate(model, "bf16", linears=None)
    assert "logits_scaling" in done.left["head"]
    assert model(**labelled()).loss.isfinite()


def test_an_encoder_with_a_decoder_keeps_its_loss() -> None:
    """Moonshine hands its labels to the loss as they are: its decoder's inputs are shifted instead."""
    layers = {f"{part}_num_hidden_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_num_{kind}_heads": 4 for part in ("encoder", "decoder") for kind in ("attention", "key_value")}
    tokens = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.MoonshineConfig(vocab_size=128, hidden_size=64, intermediate_size=96, **layers, **heads, **tokens)
    model = transformers.MoonshineForConditionalGeneration(config).train()
    given = {"input_values": torch.randn(2, 4000), "labels": torch.randint(3, 128, (2, 11))}
    want = model(**given).loss
    with pytest.raises(ValueError, match="nothing of MoonshineForConditionalGeneration can be converted"):
        transformers_5.accelerate(model, "bf16", linears=None, norms=False, rotary=False, routers=False)
    assert torch.equal(model(**given).loss, want)
