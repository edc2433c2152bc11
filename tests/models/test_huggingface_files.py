"""Published formats are read as their libraries read them: FP8 with block scales, MXFP4, MXFP8; by regions, in order; damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.spies import spy_on

from mxep.models import huggingface_files
from mxep.models.families import build_model
from mxep.models.huggingface_files import INDEX, SINGLE, PublishedFiles, load_published, read_tensors
from mxep.models.huggingface_writer import in_mxfp8, quantization_config, save_published
from mxep.models.presets import Qwen3MoEConfig
from mxep.mx import MXTensor, mxfp4_to_mxfp8, quantize_mx
from mxep.recipe import resolve_recipe

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
NAME = "layers.0.up_proj.weight"
QWEN = Qwen3MoEConfig(
    vocab_size=40, dim=128, expert_hidden=256, num_experts=4, top_k=2, num_heads=2, num_layers=2, num_kv_heads=2, head_dim=64,
    max_seq_len=64,
)  # fmt: skip


def write(folder: Path, tensors: dict[str, torch.Tensor], quantised: dict[str, Any] | None) -> PublishedFiles:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({} if quantised is None else {"quantization_config": quantised}))
    save_file(tensors, folder / SINGLE)
    return PublishedFiles(folder)


def fp8(shape: tuple[int, int], block: tuple[int, int] = (128, 128)) -> dict[str, torch.Tensor]:
    grid = [-(-length // size) for length, size in zip(shape, block, strict=True)]
    return {NAME: (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.rand(grid) * 0.01 + 1e-4}


def products(tensors: dict[str, torch.Tensor], block: tuple[int, int] = (128, 128)) -> torch.Tensor:
    """The values in float64, element by element."""
    data, scale = tensors[NAME].double(), tensors[f"{NAME}_scale_inv"].double()
    rows, columns = torch.arange(data.shape[0]) // block[0], torch.arange(data.shape[1]) // block[1]
    return data * scale[rows][:, columns]


def spans(*ends: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in ends)


# ---- FP8 with block scales ----


@pytest.mark.parametrize("shape", [(128, 256), (200, 160), (5, 32), (129, 384)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_fp8_and_its_ragged_blocks(shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Qwen3-FP8 has bf16 scales, DeepSeek-V3 float32, later ones e8m0."""
    tensors = fp8(shape)
    tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"].to(dtype)
    files = write(tmp_path, {**tensors, "norm.weight": torch.ones(3, dtype=torch.bfloat16)}, FP8)
    want = products(tensors)
    assert set(files.names) == {NAME, "norm.weight"}
    assert torch.equal(files.read(NAME), want.float())
    assert torch.equal(files.read(NAME, dtype=torch.bfloat16), want.float().bfloat16())
    assert files.read("norm.weight").dtype == torch.bfloat16
    for region in (spans((0, 1), (31, 32)), spans((3, 5), (0, 17)), spans((0, 0), (0, 32)), spans((4, shape[0]), (15, shape[1]))):
        assert torch.equal(files.read(NAME, region), want.float()[region])


def test_fp8_in_mxfp8_is_one_rounding_away(tmp_path: Path) -> None:
    tensors = fp8((200, 160))
    files = write(tmp_path, tensors, FP8)
    mx, want = files.read_mx(NAME), products(tensors)
    step = mx.scale.float().double().repeat_interleave(32, -1) * 2**-9  # between e4m3's subnormal values
    error = (mx.dequantize(torch.float32).double() - want).abs()
    assert (error <= torch.maximum(want.abs() * 2**-4, step / 2) * (1 + 1e-6)).all()  # half of the last place of 4 significant bits
    assert error.max() > 0
    tensors[f"{NAME}_scale_inv"] = torch.tensor([[2.0**-7, 2.0**-12], [2.0**3, 2.0**-9]])
    files = write(tmp_path, tensors, FP8)
    assert torch.equal(files.read_mx(NAME).dequantize(torch.float32).double(), products(tensors))  # powers of two lose nothing


def test_fp8_as_transformers_writes_and_reads_it(tmp_path: Path) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="the oracle is a development tool")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    tensors = integration.Fp8Quantize(quantizer).convert({NAME: torch.randn(256, 384)})
    files = write(tmp_path, tensors, FP8)
    theirs = integration.Fp8Dequantize(quantizer).convert(tensors)[NAME]
    assert torch.equal(files.read(NAME), theirs[0])


def fp8_model(folder: Path) -> torch.nn.Module:
    """A Qwen3-MoE folder whose linear layers transformers' own quantiser has written in FP8, scales in a file of their own."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="the oracle is a development tool")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    model = build_model(QWEN, resolve_recipe("hp"))
    model.init_weights(1)
    save_published(QWEN, model.state_dict().items(), folder, torch.bfloat16)
    stored = load_file(folder / SINGLE)
    linear = {name: value for name, value in stored.items() if in_mxfp8(name, tuple(value.shape))}
    quantised = integration.Fp8Quantize(quantizer).convert(linear)
    scales = {name: value for name, value in quantised.items() if name.endswith("_scale_inv")}
    assert len(scales) == len(linear) == 2 * (4 + 3 * 4)
    (folder / SINGLE).unlink()
    kinds = {"a": {**stored, **{name: quantised[name] for name in linear}}, "b": scales}
    for kind, tensors in kinds.items():
        save_file(tensors, folder / f"model-{kind}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"model-{kind}.safetensors" for kind, tensors in kinds.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return model


def test_a_model_starts_from_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is the one that transformers dequantises; each file is opened once."""
    fp8_model(tmp_path / "hf")
    opened = spy_on(monkeypatch, huggingface_files, "safe_open")
    ours, told = build_model(QWEN, resolve_recipe("hp")), list[str]()
    load_published(ours, tmp_path / "hf", report=told.append)
    assert [call.args[0].name for call in opened.call_args_list] == ["model-a.safetensors", "model-b.safetensors"]
    count = len(load_file(tmp_path / "hf" / "model-a.safetensors"))
    assert told[-1] == f"{tmp_path / 'hf'}: read {count} of {count} tensors"
    transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    tokens = torch.arange(24).view(1, 24) % 40
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours.eval()(tokens), rtol=2e-4, atol=2e-4)
    stacked = dict(theirs.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]  # (E, 2H, D)
    assert torch.equal(ours.state_dict()["layers.1.moe.experts.w1"], stacked[:, :256])
    assert torch.equal(ours.state_dict()["layers.1.moe.experts.w3"], stacked[:, 256:])


# ---- MXFP4 ----


def mxfp4(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 125, (experts, rows, columns // 32), dtype=torch.uint8)


def test_gpt_oss_as_transformers_reads_it(tmp_path: Path) -> None:
    """Nibbles, transposition and the alternating rows of gate_up_proj are pinned by transformers' parameters."""
    transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
    config = transformers.GptOssConfig(
        vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    prefix = "model.layers.0.mlp.experts"
    for name, (rows, columns) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
        del stored[f"{prefix}.{name}"]
        stored[f"{prefix}.{name}_blocks"], stored[f"{prefix}.{name}_scales"] = mxfp4(3, rows, columns)
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "quantization_config": MXFP4}))
    theirs = dict(
        transformers.GptOssForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
        ).named_parameters()
    )
    seen: dict[str, list[torch.Tensor]] = {}
    for name, expert, value in read_tensors(tmp_path, lambda name: name.endswith("down_proj")):
        assert (expert is not None) == name.endswith(("gate_up_proj", "down_proj"))
        assert isinstance(value, MXTensor) == name.endswith("down_proj")
        assert expert in (None, len(seen.get(name, [])))
        seen.setdefault(name, []).append(value)
    assert seen.keys() == theirs.keys()
    for name, values in seen.items():
        if len(values) == 1:
            assert torch.equal(values[0], theirs[name]), name
        else:
            want = theirs[name].transpose(1, 2)  # (E, N, K)
            assert torch.equal(torch.stack([v.dequantize() if isinstance(v, MXTensor) else v for v in values]), want), name
            assert values[0].dtype == torch.bfloat16


def test_regions_of_mxfp4(tmp_path: Path) -> None:
    blocks, scales = mxfp4(2, 8, 128)
    files = write(tmp_path, {"w_blocks": blocks, "w_scales": scales.view(torch.float8_e8m0fnu)}, MXFP4)
    whole = mxfp4_to_mxfp8(blocks, scales, torch.float32)
    assert files.names.keys() == {"w"}
    assert files.shape("w") == (2, 8, 128)
    assert torch.equal(files.read("w"), whole.dequantize())
    assert torch.equal(files.read("w", (1, *spans((3, 7), (17, 97)))), whole.dequantize()[1, 3:7, 17:97])
    part = files.read_mx("w", spans((1, 2), (0, 8), (32, 96)))
    assert torch.equal(part.qdata.view(torch.uint8), whole.qdata[1:2, :, 32:96].view(torch.uint8))
    assert torch.equal(part.scale.view(torch.uint8), whole.scale[1:2, :, 1:3].view(torch.uint8))
    with pytest.raises(ValueError, match=r"w_blocks has no whole blocks in columns 16 to 64 of \(2, 8, 128\), want multiples of 32"):
        files.read_mx("w", (0, *spans((0, 8), (16, 64))))


def test_one_expert_and_two_files_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = mxfp4(3, 8, 64)
    tensors = {name: tensor for layer in range(4) for name, tensor in ((f"{layer}.w_blocks", blocks), (f"{layer}.w_scales", scales))}
    write(tmp_path, {"unused": torch.ones(1)}, MXFP4)
    (tmp_path / SINGLE).unlink()
    file_of = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / file_of[name])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": file_of}))
    plain = huggingface_files.safe_open
    alive = [0, 0]  # files that are open now, and the most at a time

    class Opened:
        def __init__(self, path: Path, **options: Any) -> None:
            self.file = plain(path, **options)
            alive[0] += 1
            alive[1] = max(alive)

        def __del__(self) -> None:
            alive[0] -= 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    monkeypatch.setattr(huggingface_files, "safe_open", Opened)
    decoded = spy_on(monkeypatch, huggingface_files, "mxfp4_to_mxfp8")
    told: list[str] = []
    assert [expert for _, expert, _ in read_tensors(tmp_path, lambda name: True, report=told.append)] == [0, 1, 2] * 4
    assert (alive[1], {tuple(call.args[0].shape) for call in decoded.call_args_list}) == (2, {(8, 2, 16)})
    assert told[0] == f"{tmp_path}: read 1 of 4 tensors"


# ---- MXFP8 and bf16 ----


@pytest.mark.parametrize("described", [quantization_config([]), MODELOPT], ids=["compressed-tensors", "modelopt"])
def test_mxfp8_is_read_as_it_stands(described: dict[str, Any], tmp_path: Path) -> None:
    mx = quantize_mx(torch.randn(48, 96))
    files = write(tmp_path, {NAME: mx.qdata, f"{NAME}_scale": mx.scale.view(torch.uint8), "lm_head.weight": torch.ones(2, 2)}, described)
    assert files.names.keys() == {NAME, "lm_head.weight"}
    read = files.read_mx(NAME, dtype=torch.float32)
    assert torch.equal(read.qdata.view(torch.uint8), mx.qdata.view(torch.uint8))
    assert torch.equal(read.scale.view(torch.uint8), mx.scale.view(torch.uint8))
    assert torch.equal(files.read(NAME, spans((5, 9), (40, 41))), mx.dequantize()[5:9, 40:41])


def test_plain_tensors_keep_their_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 64).bfloat16(), "b": torch.randn(4, 64), "half": torch.randn(4, 64).half(), "c": torch.tensor(2.5)}
    write(tmp_path, tensors, None)
    read = {name: value for name, _, value in read_tensors(tmp_path)}
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in tensors.items())
    for name, _, mx in read_tensors(tmp_path, lambda name: name != "c", dtype=torch.float32):
        if name != "c":
            assert torch.equal(mx.dequantize(), quantize_mx(tensors[name].float()).dequantize())
    for name in ("c", "norm"):
        files = write(tmp_path, {"c": tensors["c"], "norm": torch.ones(48)}, None)
        with pytest.raises(ValueError, match=f"{name} has no whole blocks in columns 0 to .*; read its values"):
            files.read_mx(name)


# ---- damage ----

Tensors = dict[str, torch.Tensor]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def put(value: float | int) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return act


def mx_tensors() -> Tensors:
    mx = quantize_mx(torch.randn(4, 64))
    return {NAME: mx.qdata, f"{NAME}_scale": mx.scale.view(torch.uint8)}


def fp4_tensors() -> Tensors:
    return dict(zip(("w_blocks", "w_scales"), mxfp4(2, 4, 64), strict=True))


INVERSE, SCALE = f"{NAME}_scale_inv", f"{NAME}_scale"
E4M3_NAN = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn).float().item()
DAMAGE: dict[str, tuple[Callable[[], Tensors], dict[str, Any] | None, Callable[[Tensors], object], str]] = {
    "fp8 without scales": (lambda: fp8((4, 64)), FP8, lambda t: t.pop(INVERSE), f"{NAME} is F8_E4M3, want .* or fp8 with {INVERSE}"),
    "fp8 scales alone": (lambda: fp8((4, 64)), FP8, lambda t: t.pop(NAME), f"{INVERSE} scales {NAME}, which is not there"),
    "fp8 scales of another shape": (
        lambda: fp8((200, 160)), FP8, changed(INVERSE, lambda s: s[:1]), rf"{INVERSE} is \(1, 2\), want \(2, 2\), one for 128x128"
    ),
    "fp8 scales of another dtype": (lambda: fp8((4, 64)), FP8, changed(INVERSE, torch.Tensor.int), f"{INVERSE} is I32, want F32 or"),
    "fp8 scale NaN": (lambda: fp8((200, 160)), FP8, changed(INVERSE, put(torch.nan)), f"{INVERSE} has 1 scales that are no finite"),
    "fp8 scale Inf": (lambda: fp8((200, 160)), FP8, changed(INVERSE, put(torch.inf)), f"{INVERSE} has 1 scales that are no finite"),
    "fp8 scale below 0": (lambda: fp8((200, 160)), FP8, changed(INVERSE, put(-1.0)), f"{INVERSE} has 1 scales that are no finite"),
    "fp8 value NaN": (lambda: fp8((4, 64)), FP8, changed(NAME, put(E4M3_NAN)), f"{NAME} has values that are no finite numbers"),
    "fp8 products beyond float32": (lambda: fp8((4, 64)), FP8, changed(INVERSE, lambda s: s + 3e38), f"{NAME} has values that are no"),
    "fp8 of a dense tensor": (lambda: fp8((4, 64)), FP8, changed(NAME, torch.Tensor.float), f"{NAME} is F32, want F8_E4M3"),
    "fp8 that config.json does not name": (lambda: fp8((4, 64)), None, len, f"{INVERSE} is of a quantised tensor, want a config.json with"),
    "mxfp4 without scales": (fp4_tensors, MXFP4, lambda t: t.pop("w_scales"), "w_blocks has no scales, want w_scales"),
    "mxfp4 scales alone": (fp4_tensors, MXFP4, lambda t: t.pop("w_blocks"), "w_scales scales w_blocks, which is not there"),
    "mxfp4 scales of another shape": (
        fp4_tensors, MXFP4, changed("w_scales", lambda s: s[:, :3]), r"w_scales is \(2, 3, 2\), want \(2, 4, 2\), one for 1x32"
    ),
    "mxfp4 blocks of another shape": (
        fp4_tensors, MXFP4, changed("w_blocks", lambda b: b[..., :8]), r"w_blocks is \(2, 4, 2, 8\), want \(..., N, K/32, 16\)"
    ),
    "mxfp4 scale 255": (fp4_tensors, MXFP4, changed("w_scales", put(255)), "w_scales has 1 scales that are no finite"),
    "mxfp4 beyond float32": (fp4_tensors, MXFP4, changed("w_scales", lambda s: s.fill_(254)), "w_blocks has values that are no finite"),
    "mxfp8 without scales": (mx_tensors, MODELOPT, lambda t: t.pop(SCALE), f"{NAME} is F8_E4M3, want .* or mxfp8 with {SCALE}"),
    "mxfp8 scales of another shape": (mx_tensors, MODELOPT, changed(SCALE, lambda s: s[:, :1]), rf"{SCALE} is \(4, 1\), want \(4, 2\)"),
    "mxfp8 of half a block": (
        mx_tensors, MODELOPT, changed(NAME, lambda q: q[:, :48]), rf"{NAME} is \(4, 48\), want \(..., N, K\), K a multiple of 32"
    ),
    "fp8 of no matrix": (lambda: fp8((4, 64)), FP8, changed(NAME, torch.Tensor.flatten), rf"{NAME} is \(256,\), want \(..., N, K\)"),
    "mxfp8 scale 255": (mx_tensors, MODELOPT, changed(SCALE, put(255)), f"{SCALE} has 1 scales that are no finite"),
    "mxfp8 value NaN": (mx_tensors, MODELOPT, changed(NAME, put(E4M3_NAN)), f"{NAME} has values that are no finite numbers"),
}  # fmt: skip


def test_a_file_that_is_cut_off_names_its_tensor(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(64), "b": torch.ones(64), "c": torch.ones(64)}, None)
    whole = (tmp_path / SINGLE).read_bytes()
    for size, named in ((len(whole) - 300, ", b is cut off:"), (len(whole) - 1, ", c is cut off:"), (20, ":"), (4, ":")):
        (tmp_path / SINGLE).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{SINGLE} is damaged or no safetensors file{named}"):
            PublishedFiles(tmp_path)


def read_damaged(kind: str, folder: Path, read: Callable[[PublishedFiles, str], torch.Tensor]) -> None:
    make, described, damage, message = DAMAGE[kind]
    tensors = make()
    damage(tensors)

    def read_all() -> None:
        files = write(folder, {name: tensor.contiguous() for name, tensor in tensors.items()}, described)
        for name in files.names:
            read(files, name)

    with pytest.raises(ValueError, match=rf"{SINGLE}: {message}"):
        read_all()


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_with_file_and_tensor(kind: str, tmp_path: Path) -> None:
    read_damaged(kind, tmp_path, PublishedFiles.read)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind.endswith(("NaN", "255"))])
def test_mxfp8_bytes_hold_no_nan(kind: str, tmp_path: Path) -> None:
    read_damaged(kind, tmp_path, PublishedFiles.read_mx)


def test_plain_values_that_mxfp8_cannot_hold(tmp_path: Path) -> None:
    files = write(tmp_path, {NAME: put(torch.inf)(torch.zeros(2, 32))}, None)
    with pytest.raises(ValueError, match=f"{NAME} has values that are no finite numbers"):
        files.read_mx(NAME)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq', want fp8, mxfp4, compressed-tensors or modelopt"),
        ({}, "quant_method is None, want"),
        ("fp8", "quantization_config is 'fp8', want an object"),
        ({"quant_method": "fp8"}, "weight_block_size is missing, want a list"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\], want two lengths"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\], want two lengths"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format of compressed-tensors is 'pack-quantized', want"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo of modelopt is 'NVFP4', want 'MXFP8'"),
    ],
)
def test_other_formats_are_refused(described: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        write(tmp_path, {"a": torch.ones(1)}, described)
