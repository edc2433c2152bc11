"""MXFP8 folders: compressed-tensors' own code reads them, `mxep` reads them back byte by byte, and folders change their format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxep.models.decoder import Decoder
from mxep.models.families import build_model
from mxep.models.huggingface_files import INDEX, SINGLE, PublishedFiles, load_published
from mxep.models.huggingface_writer import WeightFiles, convert_published, in_mxfp8, save_published
from mxep.models.presets import DeepSeekV3Config, ModelConfig, Qwen3MoEConfig, Yarn
from mxep.mx import quantize_mx
from mxep.recipe import resolve_recipe

COMMON: dict[str, Any] = {"vocab_size": 40, "dim": 64, "expert_hidden": 32, "num_experts": 4, "top_k": 2, "num_heads": 2, "num_layers": 2}
CONFIGS: dict[str, ModelConfig] = {
    "qwen3": Qwen3MoEConfig(**COMMON, num_kv_heads=2, head_dim=16, max_seq_len=64),
    "v3": DeepSeekV3Config(
        **COMMON, num_dense_layers=1, dense_hidden=96, num_shared_experts=1, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, q_lora_rank=24, score_function="sigmoid", renormalize=True, yarn=Yarn(),
    ),
}  # fmt: skip
NARROW = ["model.layers.0.self_attn.q_b_proj", "model.layers.1.self_attn.q_b_proj"]  # of v3, whose inputs are 24 wide


def build(config: ModelConfig, seed: int = 1) -> Decoder:
    model = build_model(config, resolve_recipe("hp"))
    model.init_weights(seed)
    for moe in model.moe_layers():
        moe.expert_bias.fill_(0.1 if config.score_function == "sigmoid" else 0.0)  # no bf16
    return model


def write(config: ModelConfig, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write an MXFP8 folder; returns what a plain one holds."""
    model = build(config)
    save_published(config, model.state_dict().items(), folder, **{"mxfp8": True, **options})
    plain = folder.with_name(f"{folder.name}_plain")
    save_published(config, model.state_dict().items(), plain)
    return load_file(plain / SINGLE)


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("file_bytes", [10**9, 20_000])
def test_linear_layers_are_in_mxfp8(kind: str, file_bytes: int, tmp_path: Path) -> None:
    """The bytes are those that the GEMMs of a bf16 run multiply; a weight and its scales are in one file."""
    plain = write(CONFIGS[kind], tmp_path / "mx", file_bytes=file_bytes)
    found = folder_tensors(tmp_path / "mx")
    expected = dict(plain)
    for name, value in plain.items():
        if in_mxfp8(name, tuple(value.shape)):
            mx = quantize_mx(value)
            expected |= {name: mx.qdata, f"{name}_scale": mx.scale.view(torch.uint8)}
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], value) for name, value in expected.items())
    assert (tmp_path / "mx" / INDEX).exists() == (file_bytes == 20_000)
    if file_bytes == 20_000:
        file_of = json.loads((tmp_path / "mx" / INDEX).read_text())["weight_map"]
        assert all(file_of[name] == file_of[name.removesuffix("_scale")] for name in file_of)
    described = json.loads((tmp_path / "mx" / "config.json").read_text())["quantization_config"]
    scaled = {name.removesuffix(".weight_scale") for name in found if name.endswith("_scale")}
    matrices = {name.removesuffix(".weight") for name, value in plain.items() if value.ndim == 2}
    assert set(described["ignore"]) == matrices - scaled
    routers = [name for name in matrices if name.endswith("mlp.gate")]
    assert sorted(matrices - scaled) == sorted(["lm_head", "model.embed_tokens", *routers, *(NARROW if kind == "v3" else [])])


@pytest.mark.parametrize("kind", CONFIGS)
def test_compressed_tensors_reads_it(kind: str, tmp_path: Path) -> None:
    """Its configuration accepts ours and takes each scheme for its MXFP8; its converter gives the values that our reader gives."""
    compressed_tensors = pytest.importorskip("compressed_tensors.entrypoints.convert", reason="the oracle is a development tool")
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    write(CONFIGS[kind], tmp_path / "mx", file_bytes=20_000)
    described = json.loads((tmp_path / "mx" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(described).config_groups.values()
    preset = preset_name_to_scheme("MXFP8", ["Linear"])
    assert (scheme.weights, scheme.input_activations) == (preset.weights, preset.input_activations)
    assert infer_module_format(torch.nn.Linear, scheme).value == scheme.format == "mxfp8-quantized"
    theirs = compressed_tensors.CompressedTensorsDequantizer(tmp_path / "mx", ignore=["re:.*norm$"], dtype=torch.float32)
    compressed_tensors.convert_checkpoint(tmp_path / "mx", tmp_path / "theirs", theirs, device="cpu")
    found, ours = folder_tensors(tmp_path / "theirs"), PublishedFiles(tmp_path / "mx")
    assert found.keys() == ours.names.keys()
    for name, value in found.items():
        assert torch.equal(value.float(), ours.read(name).float()), name
    fresh = build(CONFIGS[kind], seed=2)
    load_published(fresh, tmp_path / "theirs")  # a plain folder of the same model
    again = build(CONFIGS[kind], seed=3)
    load_published(again, tmp_path / "mx")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in fresh.state_dict().items())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_in_another_format(kind: str, tmp_path: Path) -> None:
    """MXFP8 stays as it is, or becomes plain; plain becomes what the run itself would have written. Other files come along."""
    template = "additional_chat_templates/tool_use.jinja"
    plain = write(CONFIGS[kind], tmp_path / "mx", token_ids={"eos_token_id": 3}, files={"tokenizer.json": b"{}", template: b"x"})
    for file in ("notes.txt", "pytorch_model.bin", "hf_quant_config.json"):
        (tmp_path / "mx" / file).write_text(file)
    told: list[str] = []
    convert_published(tmp_path / "mx", tmp_path / "same", mxfp8=True, report=told.append)
    for folder in ("same", "again"):
        if folder == "again":
            convert_published(tmp_path / "mx_plain", tmp_path / "again", mxfp8=True, file_bytes=20_000)
        found, want = folder_tensors(tmp_path / folder), folder_tensors(tmp_path / "mx")
        assert found.keys() == want.keys()
        assert all(same_bytes(found[name], value) for name, value in want.items())
    copied = {path.relative_to(tmp_path / "same").as_posix() for path in (tmp_path / "same").rglob("*") if path.is_file()}
    assert copied == {SINGLE, "config.json", "generation_config.json", "tokenizer.json", "notes.txt", template}
    assert len(told) == len(plain)
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == json.loads((tmp_path / "mx" / "config.json").read_text())
    convert_published(tmp_path / "mx", tmp_path / "dense", torch.float32)
    described = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert (described["torch_dtype"], "quantization_config" in described) == ("float32", False)
    dense, files = folder_tensors(tmp_path / "dense"), PublishedFiles(tmp_path / "mx")
    assert all(same_bytes(dense[name], files.read(name).float()) for name in files.names)
    convert_published(tmp_path / "mx", tmp_path / "bf16")
    kept = {name for name, value in folder_tensors(tmp_path / "bf16").items() if value.dtype != torch.bfloat16}
    assert kept == ({"model.layers.1.mlp.gate.e_score_correction_bias"} if kind == "v3" else set())


def test_multi_token_prediction_is_converted_too(tmp_path: Path) -> None:
    write(CONFIGS["v3"], tmp_path / "mx")
    stored = load_file(tmp_path / "mx_plain" / SINGLE)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(64, 128), "model.layers.2.mlp.down_proj.weight": torch.ones(64, 96)}
    save_file({**stored, **extra}, tmp_path / "mx_plain" / SINGLE)
    convert_published(tmp_path / "mx_plain", tmp_path / "out", mxfp8=True)
    names = PublishedFiles(tmp_path / "out").names
    assert [names[name].name for name in extra] == ["plain", "mxfp8"]


def test_invalid_folders_are_not_written(tmp_path: Path) -> None:
    """No file is left."""
    config = CONFIGS["qwen3"]
    model = build(config)
    model.state_dict()["layers.1.moe.experts.w2"][3, 5, 7] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.3\.down_proj\.weight has values that are no finite numbers"):
        save_published(config, model.state_dict().items(), tmp_path / "out", mxfp8=True)
    mx = quantize_mx(torch.randn(4, 64))
    mx.qdata.view(torch.uint8)[3, 5] = 0xFF
    (tmp_path / "one").mkdir()
    with pytest.raises(ValueError, match="frozen has values that are no finite numbers"):
        WeightFiles(tmp_path / "one").add("frozen", mx)
    write(config, tmp_path / "mx")
    with pytest.raises(ValueError, match="exists already"):
        convert_published(tmp_path / "mx", tmp_path / "mx_plain")
    stored = load_file(tmp_path / "mx" / SINGLE)
    save_file({name: value for name, value in stored.items() if name != "model.norm.weight"}, tmp_path / "mx" / SINGLE)
    with pytest.raises(ValueError, match=r"1 tensors are missing, model\.norm\.weight first"):
        convert_published(tmp_path / "mx", tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="link exists already"):
        convert_published(tmp_path / "mx_plain", tmp_path / "link")
    assert {path.name for path in tmp_path.iterdir()} == {"link", "mx", "mx_plain", "one"}


@pytest.mark.parametrize("mxfp8", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (5, 64)),
        ("model.layers.1.mlp.experts.3.down_proj.weight", (64,)),
        ("model.layers.1.mlp.experts.0.up_proj.weight", (0, 64)),
    ],
)
def test_tensors_of_another_shape_are_not_converted(name: str, shape: tuple[int, ...], mxfp8: bool, tmp_path: Path) -> None:
    stored = write(CONFIGS["qwen3"], tmp_path / "mx")
    save_file({**stored, name: torch.zeros(shape)}, tmp_path / "mx_plain" / SINGLE)
    message = rf"{re.escape(name)} is {re.escape(str(shape))}, want {re.escape(str(tuple(stored[name].shape)))}"
    with pytest.raises(ValueError, match=message):
        convert_published(tmp_path / "mx_plain", tmp_path / "out", mxfp8=mxfp8)
    assert not (tmp_path / "out").exists()


def test_two_conversions_to_one_folder(tmp_path: Path) -> None:
    """The second starts while the first writes, and the first ends while the second writes: the folder is the first's."""
    write(CONFIGS["qwen3"], tmp_path / "mx")
    second_writes, first_ended = Event(), Event()

    def convert(mxfp8: bool, during: Callable[[], object]) -> None:
        told: list[str] = []

        def report(text: str) -> None:
            told.append(text)
            if len(told) == 5:
                during()

        convert_published(tmp_path / "mx_plain", tmp_path / "out", file_bytes=20_000, mxfp8=mxfp8, report=report)

    def wait_for_first() -> None:
        second_writes.set()
        assert first_ended.wait(60)

    with ThreadPoolExecutor(1) as thread:

        def start_second() -> None:
            found.append(thread.submit(convert, True, wait_for_first))
            assert second_writes.wait(60)

        found: list[Future[None]] = []
        try:
            convert(False, start_second)
        finally:
            first_ended.set()
        with pytest.raises(OSError, match="out"):
            found[0].result()
    want, got = folder_tensors(tmp_path / "mx_plain"), folder_tensors(tmp_path / "out")
    assert got.keys() == want.keys()
    assert all(same_bytes(got[name], value) for name, value in want.items())
    assert {path.name for path in tmp_path.iterdir()} == {"out", "mx", "mx_plain"}
