"""transformers models that are frozen in MX while they are loaded, and their files by `save_pretrained`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.truth import raises_naming
from torch import Tensor, nn

import mxep
from mxep.mx import MXWeight, mxfp4_to_mxfp8

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import ALL_ATTENTION, COMMON, build
from transformers import GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.utils.quantization_config import Mxfp4Config

from mxep.bench.random_models import write_mxfp4
from mxep.integrations import transformers_5, transformers_quantizer
from mxep.integrations.transformers_quantizer import MXFP8Config, config_without_mxfp4

FAMILIES: dict[str, dict[str, Any]] = {"Qwen3Moe": {}, "GptOss": {"num_hidden_layers": 1, "layer_types": ALL_ATTENTION["layer_types"][:1]}}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    transformers_5.register()
    yield
    del ExpertsInterface._global_mapping["mxep"], transformers_5.EPImplementationInterface._global_mapping["mxep"]


@pytest.fixture(params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A bf16 model whose files are in tmp_path / "source"."""
    model = build(request.param, **FAMILIES[request.param]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    return model


def load(kind: Any, folder: Path, how: Any = None, **options: Any) -> Any:
    return kind.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="mxep", quantization_config=how, **options)


def frozen(model: nn.Module) -> dict[str, MXWeight]:
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, MXWeight)}


def raw(weight: MXWeight) -> Tensor:
    return torch.cat([part.view(torch.uint8).flatten() for part in (weight.qdata, weight.scale)])


def assert_same(got: nn.Module, want: nn.Module) -> None:
    assert list(frozen(got)) == list(frozen(want))
    for name, parameter in want.named_parameters():
        other = got.get_parameter(name)
        assert torch.equal(raw(other), raw(parameter)) if isinstance(parameter, MXWeight) else torch.equal(other, parameter), name


def test_loading_is_quantising(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of `quantize_base`; at no time is more than one weight of the base in bf16."""
    most, freeze = [0], transformers_quantizer.freeze_weight

    def freeze_and_count(module: nn.Module, name: str, values: Tensor, *args: Any, **options: Any) -> None:
        freeze(module, name, values, *args, **options)
        plain = [p for n, p in loading[0].named_parameters() if n in want and not isinstance(p, MXWeight) and not p.is_meta]
        most[0] = max(most[0], len(plain))

    loading: list[nn.Module] = []
    prepare = transformers_quantizer.MXFP8Quantizer._process_model_before_weight_loading
    monkeypatch.setattr(transformers_quantizer, "freeze_weight", freeze_and_count)
    monkeypatch.setattr(
        transformers_quantizer.MXFP8Quantizer,
        "_process_model_before_weight_loading",
        lambda self, model, **kwargs: (loading.append(model), prepare(self, model, **kwargs))[1],
    )
    mxep.quantize_base(source)
    want = frozen(source)
    model = load(type(source), tmp_path / "source", MXFP8Config())
    assert most == [0]
    assert_same(model, source)
    assert [name for name in frozen(model) if "experts" in name]
    assert not [name for name in frozen(model) if "lm_head" in name or "router" in name or "embed" in name]
    tokens = torch.randint(3, 256, (2, 21), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert model.get_input_embeddings().weight.grad.count_nonzero()


@pytest.mark.parametrize("save_as", ["bf16", "mxfp8"])
def test_saved_files(source: Any, save_as: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(type(source), tmp_path / "source", MXFP8Config(save_as=save_as))
    with caplog.at_level(logging.WARNING, "mxep"):
        model.save_pretrained(tmp_path / "saved")
    assert f"save_pretrained writes {'MX bytes' if save_as == 'mxfp8' else 'torch.bfloat16'}" in caplog.text
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.get("quantization_config", {}).get("quant_method") == (None if save_as == "bf16" else "mxep")
    again = load(type(source), tmp_path / "saved")
    if save_as == "mxfp8":
        assert_same(again, model)
        again.save_pretrained(tmp_path / "resaved")
        assert_same(load(type(source), tmp_path / "resaved"), model)
        size = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
        assert size < 0.8 * sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    else:
        assert not frozen(again)
        for name, weight in frozen(model).items():
            assert torch.equal(again.get_parameter(name), weight.dequantize())


def test_weights_that_files_hold_joined_are_not_saved_in_mx(tmp_path: Path) -> None:
    """LaraMini's files have one weight for four projections; their MX bytes were written so, and read as random weights."""
    lara = pytest.importorskip("transformers.models.lara_mini", reason="a model of this form")
    source = lara.LaraMiniForCausalLM(lara.LaraMiniConfig(**COMMON, num_experts=8)).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    with raises_naming("save_as='mxfp8'", "linear_attn.in_proj_qkv.weight", "skip="):
        load(type(source), tmp_path / "source", MXFP8Config(save_as="mxfp8"))
    for config in (MXFP8Config(save_as="mxfp8", skip=["linear_attn.in_proj_*"]), MXFP8Config()):
        model = load(type(source), tmp_path / "source", config)
        model.save_pretrained(tmp_path / "saved")
        for name, parameter in load(type(source), tmp_path / "saved").named_parameters():
            want, got = (p.dequantize() if isinstance(p, MXWeight) else p for p in (model.get_parameter(name), parameter))
            assert torch.equal(got, want), name


def test_parts_of_a_model(tmp_path: Path) -> None:
    source = build("Qwen3Moe").to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    model = load(type(source), tmp_path, MXFP8Config(fqns=["experts"], keep_dgrad_form=True))
    assert frozen(model)
    assert all("experts" in name and weight.kept is not None for name, weight in frozen(model).items())
    with raises_naming("quantize_base", "'moe' matched no weight", "experts"):
        load(type(source), tmp_path, MXFP8Config(fqns=["moe"]))
    with raises_naming("MXFP8Config", "save_as='mx'", "'mxfp8'"):
        MXFP8Config(save_as="mx")


def test_files_of_a_model_that_was_frozen_in_place(tmp_path: Path) -> None:
    model = build("Qwen3Moe").to(torch.bfloat16)
    mxep.quantize_base(model)
    with raises_naming("frozen in MX", "safetensors", "dequantize_base", "MXFP8Config"):
        model.save_pretrained(tmp_path)


@pytest.fixture
def in_mxfp4(tmp_path: Path) -> Path:
    """gpt-oss in MXFP4, with scales of many binades."""
    folder = tmp_path / "mxfp4"
    write_mxfp4(build("GptOss", **FAMILIES["GptOss"]).config, folder, torch.device("cpu"))
    change(folder, lambda name, value: torch.randint_like(value, 1, 200) if name.endswith("_scales") else value)
    return folder


def change(folder: Path, changed: Callable[[str, Tensor], Tensor | None]) -> None:
    """Replace tensors of a folder; None: drop it."""
    values = {name: changed(name, value) for name, value in load_file(folder / "model.safetensors").items()}
    kept = {name: value for name, value in values.items() if value is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load_mxfp4(folder: Path, **options: Any) -> Any:
    return load(GptOssForCausalLM, folder, MXFP8Config(**options), config=config_without_mxfp4(folder))


def test_mxfp4_is_read_without_loss(in_mxfp4: Path) -> None:
    """Experts have the values that transformers dequantises, in the bytes of `mxfp4_to_mxfp8`; what is not in MXFP4 is quantised."""
    theirs = load(GptOssForCausalLM, in_mxfp4, Mxfp4Config(dequantize=True))
    model, stored = load_mxfp4(in_mxfp4), load_file(in_mxfp4 / "model.safetensors")
    weights = frozen(model)
    of_experts = {name: weight for name, weight in weights.items() if "experts" in name}
    assert [name.rpartition(".")[2] for name in of_experts] == ["gate_up_proj", "down_proj"]
    for name, weight in of_experts.items():
        want = mxfp4_to_mxfp8(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert stored[f"{name}_blocks"].unique().numel() == 256
        assert torch.equal(raw(weight), raw(want))  # type: ignore[arg-type]
        assert torch.equal(weight.dequantize(), theirs.get_parameter(name))
    for name, parameter in model.named_parameters():
        if name not in of_experts:
            want = theirs.get_parameter(name)
            assert torch.equal(raw(parameter), raw(MXWeight.of(want))) if name in weights else torch.equal(parameter, want), name


def test_experts_in_mxfp4_that_are_not_frozen_are_dequantised(in_mxfp4: Path) -> None:
    theirs, model = load(GptOssForCausalLM, in_mxfp4, Mxfp4Config(dequantize=True)), load_mxfp4(in_mxfp4, fqns=["self_attn"])
    assert all("self_attn" in name for name in frozen(model))
    for name, parameter in model.model.layers[0].mlp.named_parameters():
        assert torch.equal(parameter, theirs.model.layers[0].mlp.get_parameter(name))
        assert parameter.is_contiguous()


@pytest.mark.parametrize("save_as", ["bf16", "mxfp8"])
def test_saved_files_of_mxfp4(in_mxfp4: Path, save_as: str, tmp_path: Path) -> None:
    model = load_mxfp4(in_mxfp4, save_as=save_as)
    model.save_pretrained(tmp_path / "saved")
    again = load(GptOssForCausalLM, tmp_path / "saved")
    for name, parameter in model.named_parameters():
        values = (value.dequantize() if isinstance(value, MXWeight) else value for value in (parameter, again.get_parameter(name)))
        assert torch.equal(*values), name
    assert bool(frozen(again)) == (save_as == "mxfp8")


OF_ONE_EXPERT_LESS = "down_proj is (7, 96, 64) in the file, want (8, 96, 64)"


@pytest.mark.parametrize(
    ("ends", "changed", "problem"),
    [
        ("gate_up_proj_scales", lambda value: None, "gate_up_proj has gate_up_proj_blocks in the file, want its blocks and its scales"),
        ("down_proj_scales", lambda value: value.fill_(255), "down_proj has values or scales that are no finite numbers"),
        ("down_proj_scales", lambda value: value.view(torch.float8_e8m0fnu), "scales of MXFP4 are other numbers than bytes"),
        ("down_proj_scales", lambda value: value[:, :, :-1].contiguous(), "mxfp4_to_mxfp8: blocks"),
        (("down_proj_blocks", "down_proj_scales"), lambda value: value[:7].contiguous(), OF_ONE_EXPERT_LESS),
    ],
    ids=["no scales", "NaN", "e8m0", "few scales", "few experts"],
)
def test_files_in_mxfp4_that_are_damaged(
    in_mxfp4: Path, ends: Any, changed: Callable[[Tensor], Tensor | None], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers reports what we say of each tensor, and raises."""
    change(in_mxfp4, lambda name, value: changed(value) if name.endswith(ends) else value)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            load_mxfp4(in_mxfp4)
    finally:
        logger.removeHandler(caplog.handler)
    assert problem in caplog.text


def test_configurations(in_mxfp4: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantized with Mxfp4Config but you are passing a MXFP8Config"):
        load(GptOssForCausalLM, in_mxfp4, MXFP8Config())
    assert not hasattr(config_without_mxfp4(in_mxfp4), "quantization_config")
    config = config_without_mxfp4(in_mxfp4)
    config.save_pretrained(tmp_path / "plain")
    assert config_without_mxfp4(tmp_path / "plain").to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path / "plain")}
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path / "fp8")
    with raises_naming("fp8: quant_method is 'fp8'", "want mxfp4 or none", "take the bf16 files"):
        config_without_mxfp4(tmp_path / "fp8")


def of_another_shape(folder: Path, **changes: Any) -> Any:
    """Of the files in `folder`, but with a configuration that was changed."""
    config = Qwen3MoeConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return Qwen3MoeForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16, quantization_config=MXFP8Config())


def test_parameters_that_files_lack_and_shapes_that_differ(tmp_path: Path) -> None:
    """A bias is transformers' zeros beside a frozen weight; weights of another shape are no model's."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)).to(torch.bfloat16).save_pretrained(tmp_path)
    projection = of_another_shape(tmp_path, attention_bias=True).model.layers[0].self_attn.q_proj
    assert isinstance(projection.weight, MXWeight)
    assert not projection.bias.any()
    for changes in ({"moe_intermediate_size": 32}, {"num_attention_heads": 2}, {"num_key_value_heads": 1}):
        with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
            of_another_shape(tmp_path, **changes)


def test_offloading_is_refused(source: Any, tmp_path: Path) -> None:
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu") | {"model.layers": "disk"}
    with raises_naming("device_map offloads", "model.layers", "want it all on GPUs"):
        load(type(source), tmp_path / "source", MXFP8Config(), device_map=places, offload_folder=str(tmp_path / "offloaded"))
    assert frozen(load(type(source), tmp_path / "source", MXFP8Config(), device_map="cpu"))


@pytest.mark.parametrize("unknown", ["modules_to_not_convert", "keep_dgrad"])
def test_unknown_options(unknown: str) -> None:
    with pytest.raises(ValueError, match=f"{unknown} is unknown, want fqns, skip"):
        MXFP8Config(**{unknown: ["self_attn"]})
