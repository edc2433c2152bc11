"""transformers models that are frozen in MX while they are loaded, and what `save_pretrained` writes of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.truth import raises_naming
from torch import Tensor, nn

import mxep
from mxep.mx import MXWeight

pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from tests.integrations.test_transformers_5 import ALL_ATTENTION, build
from transformers.integrations.moe import ExpertsInterface

from mxep.integrations import transformers_5, transformers_quantizer
from mxep.integrations.transformers_quantizer import MXFP8Config

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


def load(kind: Any, folder: Path, config: MXFP8Config | None = None) -> Any:
    return kind.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="mxep", quantization_config=config)


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
def test_what_is_saved(source: Any, save_as: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(type(source), tmp_path / "source", MXFP8Config(save_as=save_as))
    with caplog.at_level(logging.WARNING, "mxep"):
        model.save_pretrained(tmp_path / "saved")
    assert f"save_pretrained writes {'MX bytes' if save_as == 'mxfp8' else 'torch.bfloat16'}" in caplog.text
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.get("quantization_config", {}).get("quant_method") == (None if save_as == "bf16" else "mxep")
    again = load(type(source), tmp_path / "saved")
    if save_as == "mxfp8":
        assert_same(again, model)
        size = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
        assert size < 0.8 * sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    else:
        assert not frozen(again)
        for name, weight in frozen(model).items():
            assert torch.equal(again.get_parameter(name), weight.dequantize())


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
