"""peft's LoRA on a base that is frozen in MX: gradients against float64, files, merging, and trainers of TRL."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.truth import raises_naming, sqnr
from torch import Tensor, nn

import mxep
from mxep.mx import MXWeight

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
peft = pytest.importorskip("peft", reason="a development tool")

from tests.integrations.test_transformers_5 import ALL_ATTENTION, build  # noqa: E402
from transformers.integrations.moe import ExpertsInterface  # noqa: E402

from mxep.integrations import peft_0_21, transformers_5  # noqa: E402

NAMES = {"mxep": None, "mxep_hp": "hp"}
ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_hidden_layers": 1},
    "GptOss": {"num_hidden_layers": 1, "layer_types": ALL_ATTENTION["layer_types"][:1]},  # stored transposed, gate and up interleaved
    "Qwen3Moe with quick GELU": {"num_hidden_layers": 1},  # an activation that mxep lacks
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for name, recipe in NAMES.items():
        transformers_5.register(recipe, name)
    yield
    for name in NAMES:
        del ExpertsInterface._global_mapping[name], transformers_5.EPImplementationInterface._global_mapping[name]


def config_of(**changes: Any) -> Any:
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ON_EXPERTS} | changes
    return peft_0_21.register(peft.LoraConfig(r=4, lora_alpha=8, **targets))


def base_of(family: str, how: str = "mxep", quantise: bool = True) -> Any:
    """A bf16 model, frozen in MX."""
    base = build(family, **FAMILIES[family]).to(torch.bfloat16)
    base.set_experts_implementation(how)
    torch.manual_seed(3)
    for name, parameter in base.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.05)
    if quantise:
        mxep.quantize_base(base)
    return base


def adapted(family: str, how: str = "mxep", quantise: bool = True, **changes: Any) -> Any:
    """A base with adapters whose product is not 0."""
    model = peft.get_peft_model(base_of(family, how, quantise), config_of(**changes), autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.03)
    return model


def experts_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp.experts


def tokens_of(seed: int) -> Tensor:
    return torch.randint(3, 256, (2, 21), generator=torch.Generator().manual_seed(seed))


def dense_gradients(wrapped: Any, x: Tensor, choices: Tensor, scores: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and gradients in float64, of the model's own experts with weights W + scaling * B A of the dequantised base."""
    experts = copy.deepcopy(wrapped.get_base_layer())
    mxep.dequantize_base(experts)
    experts.config = copy.deepcopy(experts.config)
    experts.config._experts_implementation = "eager"
    experts.double()
    leaf, layer = {"x": x.detach().double().requires_grad_()}, wrapped
    while isinstance(layer, peft_0_21.ParamWrapper):
        name = layer.parameter_name
        a, b = (getattr(layer, f"lora_{letter}")["default"].weight.detach().double().requires_grad_() for letter in "AB")
        leaf |= {f"{name}.A": a, f"{name}.B": b}
        joined = torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, layer.num_experts), a.reshape(layer.num_experts, -1, a.shape[1]))
        joined = joined.transpose(-2, -1) if experts.is_transposed else joined
        weight = getattr(experts, name).detach() + layer.scaling["default"] * joined
        del experts._parameters[name]
        setattr(experts, name, weight)
        layer = layer.base_layer
    y = experts(leaf["x"], choices, scores.double())
    y.backward(dy.double())
    return {"y": y} | {name: value.grad for name, value in leaf.items()}


@pytest.mark.parametrize(("how", "least"), [("mxep_hp", 45), ("mxep", 17)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_against_float64(family: str, how: str, least: float) -> None:
    model = adapted(family, how)
    wrapped = experts_of(model)
    assert isinstance(wrapped.get_base_layer().down_proj, MXWeight)
    x, dy = (torch.randn(200, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    scores, choices = torch.rand(200, 8, generator=torch.Generator().manual_seed(3)).topk(2)
    want = dense_gradients(wrapped, x, choices, scores, dy)
    x.requires_grad_()
    y = wrapped(x, choices, scores)
    y.backward(dy)
    got, layer = {"y": y, "x": x.grad}, wrapped
    while isinstance(layer, peft_0_21.ParamWrapper):
        for letter in "AB":
            got[f"{layer.parameter_name}.{letter}"] = getattr(layer, f"lora_{letter}")["default"].weight.grad
        layer = layer.base_layer
    assert set(got) == set(want)
    for name, value in got.items():  # the model's own activation rounds every operation to bf16
        assert sqnr(want[name], value) > (least - 1 if "quick" in family else least), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_factors_of_experts_and_their_gradients(dtype: torch.dtype) -> None:
    """Bit for bit those of the same in plain torch, as one node of the graph; a frozen factor learns nothing."""
    wrapped = experts_of(adapted("Qwen3Moe"))
    wrapped.scaling["default"] = 0.3  # no power of 2
    down, up = (getattr(wrapped, f"lora_{letter}")["default"].weight for letter in "AB")
    down.data, up.data, E = down.to(dtype), up.to(dtype), wrapped.num_experts
    want_a = (down.reshape(E, -1, down.shape[1]) * 0.3).bfloat16()
    want_b = up.reshape(len(up), -1, E).permute(2, 0, 1).bfloat16()
    d_a, d_b = torch.randn_like(want_a.transpose(1, 2)).transpose(1, 2), torch.randn_like(want_b)
    padding = (0, 0, 0, 4), (0, 4)  # of the rank to 8
    found = []
    for a, b in ((want_a, want_b), wrapped.factors(["default"])):
        padded = a.shape[1] == 8
        gradients = [nn.functional.pad(grad, pad) if padded else grad for grad, pad in zip((d_a, d_b), padding, strict=True)]
        found.append([a[:, :4], b[..., :4], *torch.autograd.grad((a, b), (down, up), gradients, retain_graph=True)])
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got)
        assert want.dtype == got.dtype
    assert found[1][2].is_contiguous()
    assert found[1][3].is_contiguous()
    down.requires_grad_(False)
    a, b = wrapped.factors(["default"])
    assert not a.requires_grad
    assert b.requires_grad


def test_frozen_factors_of_experts() -> None:
    found = []
    for frozen in ("", "lora_A", "lora_B"):
        model = adapted("Qwen3Moe", "mxep_hp", target_modules=[])
        for name, parameter in model.named_parameters():
            torch.manual_seed(len(name))
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.03)
                parameter.requires_grad_(not frozen or frozen not in name)
        model(input_ids=tokens_of(0)).logits.float().square().mean().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
    every, *some = found
    assert len(every) == 4
    for frozen, grads in zip(("lora_A", "lora_B"), some, strict=True):
        assert set(grads) == {name for name in every if frozen not in name}
        assert all(torch.equal(every[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("quantise", [True, False], ids=["MX", "bf16"])
def test_no_delta_is_materialised(quantise: bool) -> None:
    wrapped = experts_of(adapted("Qwen3Moe", quantise=quantise))
    scores, choices = torch.rand(5, 8, generator=torch.Generator().manual_seed(3)).topk(2)
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    least = wrapped.get_base_layer().down_proj.numel()

    def makes_a_plain_tensor(function: Any, args: Any, made: Any) -> bool:
        """As large as a weight."""
        values = made if isinstance(made, tuple | list) else (made,)
        plain = [value for value in values if isinstance(value, Tensor) and not isinstance(value, MXWeight)]
        return any(value.dim() == 3 and value.numel() >= least for value in plain)

    with OperatorCalls(makes_a_plain_tensor) as forward:
        y = wrapped(x, choices, scores)
    with OperatorCalls(makes_a_plain_tensor) as backward:
        y.sum().backward()
    views = {"aten.transpose.int", "aten.view.dtype", "aten.detach.default", "aten.alias.default"}
    views |= {"mxep.quantize.default", "mxep.quantize_columnwise.default"}  # MX bytes
    assert set(forward.names) - views == set()
    assert set(backward.names) - views - {"mxep.dequantize.default"} == set()  # dgrad's form of a base in MX, dropped after use
    assert wrapped.lora_A["default"].weight.grad.count_nonzero()


def test_another_implementation_is_pefts_own() -> None:
    model = adapted("Qwen3Moe", quantise=False)
    ours = model(input_ids=tokens_of(0)).logits
    model.base_model.model.set_experts_implementation("grouped_mm")
    own = model(input_ids=tokens_of(0)).logits
    assert 17 < sqnr(own, ours) < 60
    assert not vars(experts_of(model).get_base_layer()).get("_mxep_lora_factors")


def test_an_implementation_that_would_add_to_mx_bytes() -> None:
    model = adapted("Qwen3Moe")
    model.base_model.model.set_experts_implementation("grouped_mm")
    with raises_naming("down_proj", "frozen in MX", "set_experts_implementation('mxep')", "dequantize_base"):
        model(input_ids=tokens_of(0))
    with model.disable_adapter():
        assert model(input_ids=tokens_of(0)).logits.isfinite().all()


@pytest.mark.parametrize("rank", [16, 32])  # of one MX block, and of less
@pytest.mark.parametrize("fqns", [None, "self_attn"])
def test_adapters_that_are_there_already_stay_as_they_are(rank: int, fqns: str | None) -> None:
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"], "target_parameters": None}
    model = peft.get_peft_model(base_of("Qwen3Moe", quantise=False), peft_0_21.register(peft.LoraConfig(r=rank, **saved)))
    learn = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen, converted = mxep.quantize_base(model, fqns), mxep.convert_linears(model, fqns)
    assert len(learn) == 3
    for name in (*frozen, *converted):
        assert "lora_" not in name
        assert "modules_to_save" not in name
    assert any(name.endswith("q_proj.base_layer.weight") for name in frozen)
    for name, parameter in learn.items():
        assert model.get_parameter(name) is parameter
        assert parameter.requires_grad
    with pytest.raises(ValueError, match=r"'lora_A' matched .*never converted"):
        mxep.convert_linears(model, "lora_A")


def test_an_initialisation_that_would_change_mx_bytes() -> None:
    """PiSSA subtracts the initial adapter from the weight."""
    with raises_naming("assignment to .data", "dequantize_base"):
        adapted("Qwen3Moe", init_lora_weights="pissa", target_parameters=None)


def test_adapters_are_saved_and_loaded_in_pefts_format(tmp_path: Path) -> None:
    model = adapted("Qwen3Moe").eval()
    want = model(input_ids=tokens_of(0)).logits
    model.save_pretrained(tmp_path)
    by_peft = peft.PeftModel.from_pretrained(base_of("Qwen3Moe", "grouped_mm", quantise=False), tmp_path).eval()
    assert sqnr(by_peft(input_ids=tokens_of(0)).logits, want) > 15
    config = peft_0_21.register(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(base_of("Qwen3Moe"), tmp_path, config=config, autocast_adapter_dtype=False).eval()
    assert torch.equal(again(input_ids=tokens_of(0)).logits, want)


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_merging_writes_bf16(family: str, tmp_path: Path) -> None:
    model = adapted(family)
    layer, want = experts_of(model), {}
    while isinstance(layer, peft_0_21.ParamWrapper):
        want[layer.parameter_name] = layer.get_param().dequantize() + layer.get_delta_weight("default")
        layer = layer.base_layer
    attention = model.base_model.model.model.layers[0].self_attn
    q_proj = attention.q_proj.weight.dequantize() + attention.q_proj.get_delta_weight("default")
    merged = model.merge_and_unload()
    for name, weight in want.items():
        got = getattr(merged.model.layers[0].mlp.experts, name)
        assert type(got) is nn.Parameter
        assert sqnr(weight, got) > 50
    assert sqnr(q_proj, merged.model.layers[0].self_attn.q_proj.weight) > 50
    assert isinstance(merged.model.layers[0].self_attn.k_proj.weight, MXWeight), "a weight without an adapter"
    mxep.dequantize_base(merged)
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, weight in merged.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_base_in_mx_is_accelerated_before_it_gets_adapters() -> None:
    """The loss and gradients of the same base without `accelerate`, and a merged model is one of transformers again."""
    found: dict[bool, dict[str, Tensor]] = {}
    for accelerates in (False, True):
        base = base_of("Qwen3Moe")
        if accelerates:
            done = transformers_5.accelerate(base, linears=["q_proj", "k_proj"], norms=False)
            assert {what.partition(",")[0] for what in done.converted.values()} == {
                "experts",
                "linear",
                "loss in chunks of tokens",
                "router",
            }
        base.activation_checkpointing_enable({"use_reentrant": False})
        model = peft.get_peft_model(base, config_of()).train()
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.03, generator=torch.Generator().manual_seed(len(name)))
        output = model(input_ids=tokens_of(0), labels=tokens_of(0), use_cache=False)
        assert (output.logits is None) == accelerates
        output.loss.backward()
        found[accelerates] = {name: value.grad for name, value in model.named_parameters() if value.requires_grad} | {"loss": output.loss}
    assert found[True]["loss"].item() == pytest.approx(found[False]["loss"].item(), rel=2e-3)
    for name, value in found[False].items():
        assert sqnr(value, found[True][name]) > 10, name
    assert isinstance(model.base_model.model.model.layers[0].self_attn.q_proj.get_base_layer(), mxep.parallel.MXLinear)
    merged = model.merge_and_unload().eval()
    assert type(merged.model.layers[0].self_attn.q_proj.weight) is nn.Parameter
    assert merged(input_ids=tokens_of(1)).logits.isfinite().all()


def test_two_adapters_and_none() -> None:
    model = adapted("Qwen3Moe", "mxep_hp").eval()
    with model.disable_adapter():
        bare = model(input_ids=tokens_of(0)).logits
    one = model(input_ids=tokens_of(0)).logits
    model.add_adapter("other", config_of())
    assert isinstance(experts_of(model).base_layer, peft_0_21.ParamWrapper)
    assert not isinstance(experts_of(model).base_layer.base_layer, peft_0_21.ParamWrapper)
    assert torch.equal(model(input_ids=tokens_of(0)).logits, one)
    model.base_model.set_adapter(["default", "other"])
    assert sqnr(one, model(input_ids=tokens_of(0)).logits) > 40, "the second adapter is still zero"
    assert sqnr(bare, one) < 30


def test_adapted_experts_are_one_graph() -> None:
    """With the bits of the eager function."""
    wrapped = experts_of(adapted("Qwen3Moe"))
    scores, choices = torch.rand(40, 8, generator=torch.Generator().manual_seed(3)).topk(2)
    found = []
    torch._dynamo.reset()
    for function in (wrapped, torch.compile(wrapped, backend="aot_eager", fullgraph=True)):
        wrapped.zero_grad()
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = function(x, choices, scores)
        y.sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in wrapped.named_parameters() if parameter.grad is not None}
        found.append({"y": y.detach(), "x": x.grad} | grads)
    want, got = found
    assert set(got) == set(want)
    assert len(want) == 6
    for name, value in got.items():
        assert torch.equal(want[name], value), name


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())][:256]
    by_bytes = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=by_bytes, pad_token="<pad>", eos_token="<eos>")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL 1.16 still says it
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_trains_adapters_on_a_frozen_base(kind: str, tmp_path: Path) -> None:
    """Loaded in MX; activation checkpointing is on, as TRL has it by default; the base stays, checkpoints have adapters alone."""
    trl = pytest.importorskip("trl", reason="a development tool")
    from datasets import Dataset

    from mxep.integrations.transformers_quantizer import MXFP8Config

    source = base_of("Qwen3Moe", quantise=False)
    source.save_pretrained(tmp_path / "base")
    model = type(source).from_pretrained(
        tmp_path / "base", dtype=torch.bfloat16, experts_implementation="mxep", quantization_config=MXFP8Config()
    )
    before = {name: p.qdata.clone() for name, p in model.named_parameters() if isinstance(p, MXWeight)}
    rows = [{"prompt": f"{n} plus 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(8)]
    if kind == "SFT":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    options = getattr(trl, f"{kind}Config")(
        str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=8, max_length=32, logging_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model, args=options, train_dataset=Dataset.from_list(rows), processing_class=byte_tokenizer(), peft_config=config_of()
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    if kind == "DPO":
        assert next(entry for entry in trainer.state.log_history if "loss" in entry)["rewards/margins"] == 0, "the reference is the base"
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    for name, p in model.named_parameters():
        key = name.replace("base_model.model.", "").replace(".base_layer", "")
        if isinstance(p, MXWeight):
            assert torch.equal(p.qdata.view(torch.uint8), before[key].view(torch.uint8)), name
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_an_adapter_of_an_experts_bias_is_pefts_own() -> None:
    found = []
    for ours in (True, False):
        model = base_of("GptOss", "mxep_hp" if ours else "grouped_mm", quantise=False).float()
        on_bias = ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"]
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=on_bias)
        wrapped = peft.get_peft_model(model, peft_0_21.register(config) if ours else config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        logits = wrapped(input_ids=tokens_of(1)).logits
        logits.square().mean().backward()
        adapters = {name: parameter.grad for name, parameter in wrapped.named_parameters() if "lora" in name}
        assert all(grad is not None for grad in adapters.values())
        found.append((logits.detach(), adapters))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    for name, grad in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [mxep.MoE, mxep.FusedMoE])
def test_adapters_of_our_layers_experts_are_pefts_own(kind: type[mxep.MoE]) -> None:
    torch.manual_seed(0)
    layer = kind(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), "mxfp8_wgrad_with_hp")
    layer.init_weights(0.1)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["experts.w1", "experts.w2"], init_lora_weights=False)
    wrapped, x = peft.get_peft_model(nn.Sequential(layer), config), torch.randn(16, 64)
    y = wrapped(x)
    y.sum().backward()
    assert all(parameter.grad.count_nonzero() for name, parameter in wrapped.named_parameters() if "lora" in name)
    torch.testing.assert_close(wrapped.merge_and_unload()(x), y.detach())
