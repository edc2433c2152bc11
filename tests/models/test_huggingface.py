"""Hugging Face folders without their library: names word for word, round trips, shards of ranks, and what is damaged or foreign."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ranks import run_ranks
from torch.distributed.tensor import DTensor

from mxep.models.decoder import Decoder
from mxep.models.families import build_model
from mxep.models.huggingface import published_config, published_names
from mxep.models.huggingface_files import INDEX, SINGLE, PublishedFiles, load_published
from mxep.models.huggingface_writer import save_published
from mxep.models.presets import MODELS, DeepSeekV3Config, ModelConfig, Qwen3MoEConfig, Yarn
from mxep.parallel import build_meshes
from mxep.parallel_dims import ParallelDims
from mxep.recipe import resolve_recipe
from mxep.train.build import Build, build_stages, merge_stages

COMMON: dict[str, Any] = {"vocab_size": 40, "dim": 32, "expert_hidden": 32, "num_experts": 4, "top_k": 2, "num_heads": 2, "num_layers": 2}
QWEN = Qwen3MoEConfig(**COMMON, num_kv_heads=2, head_dim=16, max_seq_len=64)
V3 = DeepSeekV3Config(
    **COMMON, num_dense_layers=1, dense_hidden=48, num_shared_experts=1, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8, q_lora_rank=12, score_function="sigmoid", renormalize=True, yarn=Yarn(),
)  # fmt: skip
V2 = dataclasses.replace(V3, score_function="softmax", renormalize=False, q_lora_rank=0)
CONFIGS: dict[str, ModelConfig] = {"qwen3": QWEN, "v3": V3, "v2": V2}


def build(config: ModelConfig, seed: int = 1) -> Decoder:
    model = build_model(config, resolve_recipe("hp"))
    model.init_weights(seed)
    for moe in model.moe_layers():
        moe.expert_bias.fill_(0.125 if config.score_function == "sigmoid" else 0.0)
    return model


def write(config: ModelConfig, folder: Path, **options: Any) -> Decoder:
    model = build(config)
    save_published(config, model.state_dict().items(), folder, **{"dtype": torch.float32, **options})
    return model


QWEN_LAYER = [
    "input_layernorm", "mlp.experts.0.down_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.1.down_proj",
    "mlp.experts.1.gate_proj", "mlp.experts.1.up_proj", "mlp.experts.2.down_proj", "mlp.experts.2.gate_proj", "mlp.experts.2.up_proj",
    "mlp.experts.3.down_proj", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj", "mlp.gate", "post_attention_layernorm",
    "self_attn.k_norm", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
]  # fmt: skip
V3_DENSE = [
    "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm", "self_attn.kv_a_layernorm",
    "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj", "self_attn.q_a_layernorm", "self_attn.q_a_proj",
    "self_attn.q_b_proj",
]  # fmt: skip


def test_names_of_qwen3(tmp_path: Path) -> None:
    write(QWEN, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / SINGLE)
    layers = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in QWEN_LAYER]
    assert sorted(stored) == sorted(["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", *layers])
    assert stored["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (32, 32)
    assert stored["model.layers.1.self_attn.k_proj.weight"].shape == (32, 32)


def test_names_of_deepseek(tmp_path: Path) -> None:
    write(V3, tmp_path / "v3")
    names = set(load_file(tmp_path / "v3" / SINGLE))
    assert {name for name in names if name.startswith("model.layers.0.")} == {f"model.layers.0.{name}.weight" for name in V3_DENSE}
    routed = {name.removeprefix("model.layers.1.mlp.") for name in names if name.startswith("model.layers.1.mlp.")}
    projections = ("gate_proj", "up_proj", "down_proj")
    want = {f"experts.{e}.{name}.weight" for e in range(4) for name in projections}
    want |= {f"shared_experts.{name}.weight" for name in projections} | {"gate.weight", "gate.e_score_correction_bias"}
    assert routed == want
    write(V2, tmp_path / "v2")
    names = set(load_file(tmp_path / "v2" / SINGLE))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("q_a_proj" in name or "e_score" in name for name in names)


def test_names_of_the_big_presets_are_distinct() -> None:
    for name in ("dsv3_16b", "dsv3_671b", "qwen3_30b_a3b"):
        config = MODELS[name]
        with torch.device("meta"):
            ours = set(build_model(dataclasses.replace(config, num_layers=config.num_dense_layers + 1), resolve_recipe("hp")).state_dict())
        assert ours <= set(published_names(config))
        flat = [other for others in published_names(config).values() for other in others]
        assert len(set(flat)) == len(flat)


def test_configurations_of_the_hub() -> None:
    """What the published config.json files say of these models, the keys that decide what is computed."""
    qwen, lite, third = (published_config(MODELS[name]) for name in ("qwen3_30b_a3b", "dsv3_16b", "dsv3_671b"))
    assert (qwen["model_type"], qwen["intermediate_size"], qwen["head_dim"], qwen["rope_theta"]) == ("qwen3_moe", 6144, 128, 1e6)
    assert (qwen["num_experts"], qwen["num_key_value_heads"], qwen["norm_topk_prob"]) == (128, 4, True)
    assert (lite["model_type"], lite["q_lora_rank"], lite["topk_method"], lite["scoring_func"]) == (
        "deepseek_v2",
        None,
        "greedy",
        "softmax",
    )
    assert (third["model_type"], third["topk_method"], third["n_group"], third["topk_group"]) == ("deepseek_v3", "noaux_tc", 8, 4)
    assert (third["routed_scaling_factor"], third["first_k_dense_replace"], third["rope_scaling"]["factor"]) == (2.5, 3, 40)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("file_bytes", [10**9, 20_000])
def test_round_trip(config: ModelConfig, file_bytes: int, tmp_path: Path) -> None:
    ours, fresh = write(config, tmp_path / "hf", file_bytes=file_bytes), build(config, seed=2)
    assert (tmp_path / "hf" / INDEX).exists() == (file_bytes == 20_000)
    assert load_published(fresh, tmp_path / "hf") == []
    for name, value in ours.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    if file_bytes == 20_000:
        index = json.loads((tmp_path / "hf" / INDEX).read_text())
        sizes = {file: sum(v.nbytes for v in load_file(tmp_path / "hf" / file).values()) for file in set(index["weight_map"].values())}
        assert sum(sizes.values()) == index["metadata"]["total_size"]
        assert all(file.endswith(f"-of-{len(sizes):05d}.safetensors") for file in sizes)
        largest = max(value.numel() * 4 // (4 if name.endswith(("w1", "w2", "w3")) else 1) for name, value in ours.state_dict().items())
        assert max(sizes.values()) < 20_000 + largest


def test_bf16_and_the_bias(tmp_path: Path) -> None:
    ours = write(V3, tmp_path / "hf", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / SINGLE)
    assert {name for name, value in stored.items() if value.dtype != torch.bfloat16} == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    fresh = build(V3, seed=2)
    load_published(fresh, tmp_path / "hf")
    assert torch.equal(fresh.output.weight, ours.output.weight.bfloat16().float())


def sharded(rank: int, world: int, folder: str, kind: str, degrees: ParallelDims) -> int:
    """Load into this rank's share of a model, compare the whole with the file; returns how many experts' matrices were read."""
    config = CONFIGS[kind]
    meshes = build_meshes(world, degrees, "cpu")
    model = merge_stages(build_stages(config, Build(resolve_recipe("hp")), meshes, torch.device("cpu"), seed=2))
    read: set[str] = set()
    plain = PublishedFiles.read

    def counting(self: PublishedFiles, name: str, *arguments: Any, **options: Any) -> torch.Tensor:
        read.add(name)
        return plain(self, name, *arguments, **options)

    PublishedFiles.read = counting  # type: ignore[method-assign]
    load_published(model, Path(folder))
    PublishedFiles.read = plain  # type: ignore[method-assign]
    load_published(reference := build(config, seed=3), Path(folder))
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}
    want = reference.state_dict()
    for name, value in whole.items():
        assert torch.equal(value, want[name]), name
    assert len(whole) == len(want) if degrees.pp == 1 else 0 < len(whole) < len(want)
    return len([name for name in read if ".experts." in name])


@pytest.mark.parametrize(
    ("kind", "degrees", "mxfp8"),
    [
        ("v3", ParallelDims(ep=2), False),
        ("v3", ParallelDims(ep=4, tp=2), False),
        ("qwen3", ParallelDims(ep=2, tp=2), True),  # half of a block's columns on either rank
        ("v2", ParallelDims(ep=2, pp=2), False),
    ],
    ids=["ep2", "ep4_tp2", "qwen3_ep2_tp2_mxfp8", "ep2_pp2"],
)
def test_each_rank_reads_its_own_part(kind: str, degrees: ParallelDims, mxfp8: bool, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    write(config, tmp_path / "hf", file_bytes=20_000, mxfp8=mxfp8)
    moe_layers = config.num_layers - config.num_dense_layers
    for read in run_ranks(sharded, 4, str(tmp_path / "hf"), kind, degrees):
        assert read <= 3 * moe_layers * config.num_experts // degrees.ep


def edit(change: Callable[[dict[str, Any]], None], file: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return act


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        stored = load_file(folder / SINGLE)
        change(stored)
        save_file(stored, folder / SINGLE)

    return act


def cut(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another size": (edit(lambda c: c.update(hidden_size=64), "config.json"), "describes another model: hidden_size is 64, here 32"),
    "another family": (edit(lambda c: c.update(model_type="llama"), "config.json"), "model_type is 'llama', want one of deepseek_v2, "),
    "another rotation": (edit(lambda c: c["rope_scaling"].update(factor=8.0), "config.json"), "factor is 8.0, here 40.0"),
    "no YaRN": (edit(lambda c: c.update(rope_scaling=None), "config.json"), "rope is default, here yarn"),
    "rotation is a word": (
        edit(lambda c: c.update(rope_scaling="yarn"), "config.json"),
        "rope_scaling is 'yarn', want an object",
    ),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is a list, want an object"),
    "config is deep": (lambda folder: (folder / "config.json").write_text('{"a": ' * 200_000), "too deeply nested"),
    "config has digits": (
        lambda folder: (folder / "config.json").write_text(f'{{"hidden_size": {"9" * 5000}}}'),
        "a number of 5000 digits",
    ),
    "config is no UTF-8": (lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xe9"}'), "not UTF-8"),
    "a shape is an object": (
        edit(lambda c: c.update(hidden_size={"a": []}), "config.json"),
        "hidden_size is {'a': []}, want a whole number",
    ),
    "rotation is a list": (edit(lambda c: c.update(rope_scaling=[]), "config.json"), "rope_scaling is a list, want an object"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), "holds neither model.safetensors.index.json nor model.safetensors"),
    "cut off": (cut, "is damaged or no safetensors file"),
    "no safetensors": (lambda folder: (folder / SINGLE).write_text("x" * 999), "is damaged or no safetensors file"),
    "a tensor missing": (with_tensors(lambda t: t.pop(NORM)), "1 tensors are missing, model.norm.weight first"),
    "a foreign tensor": (with_tensors(lambda t: t.update(adapter=torch.ones(1))), "1 tensors are not in this model, adapter first"),
    "another shape": (with_tensors(lambda t: t.update({NORM: torch.ones(33)})), "model.norm.weight is (33,), want (32,)"),
    "another dtype": (
        with_tensors(lambda t: t.update({NORM: torch.ones(32, dtype=torch.int32)})),
        "model.norm.weight is I32, want BF16 or ",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_folders(kind: str, tmp_path: Path) -> None:
    write(V3, tmp_path / "hf")
    act, message = DAMAGE[kind]
    act(tmp_path / "hf")
    with pytest.raises(ValueError) as error:
        load_published(build(V3), tmp_path / "hf")
    assert message in str(error.value)
    assert str(tmp_path / "hf") in str(error.value)


def test_the_one_file_is_read_although_an_earlier_save_left_an_index(tmp_path: Path) -> None:
    """As transformers does."""
    write(V3, tmp_path / "hf", file_bytes=20_000)
    assert (tmp_path / "hf" / INDEX).exists()
    later = build(V3, seed=2)
    save_published(V3, later.state_dict().items(), tmp_path / "one", torch.float32)
    (tmp_path / "one" / SINGLE).rename(tmp_path / "hf" / SINGLE)
    loaded = build(V3)
    load_published(loaded, tmp_path / "hf")
    for name, want in later.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], want), name


def test_damaged_index(tmp_path: Path) -> None:
    write(V3, tmp_path / "hf", file_bytes=20_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    last = max(set(index["weight_map"].values()))
    (tmp_path / "hf" / last).unlink()
    with pytest.raises(ValueError, match=rf"names 1 files that are not there, {last} first"):
        load_published(build(V3), tmp_path / "hf")
    index["weight_map"] = dict.fromkeys(index["weight_map"], min(index["weight_map"].values()))
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks .* which the index places there"):
        load_published(build(V3), tmp_path / "hf")
    for content, reason in (
        ({"weight_map": 3}, r"weight_map is 3, want an object"),
        ({}, r"weight_map is missing, want an object"),
        ({"weight_map": {NORM: 3}}, rf"weight_map\['{NORM}'\] is 3, want a string"),
        ([], r"is a list, want an object"),
    ):
        (tmp_path / "hf" / INDEX).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"{INDEX}.*{reason}"):
            load_published(build(V3), tmp_path / "hf")


@pytest.mark.parametrize("name", ["../other.safetensors", "{0}/other.safetensors", "a/other.safetensors", "./other.safetensors", "..", ""])
def test_an_index_does_not_lead_out_of_its_folder(name: str, tmp_path: Path) -> None:
    """The file there is whole and has the tensor."""
    write(V3, tmp_path / "hf", file_bytes=20_000)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    (tmp_path / "hf" / "a").mkdir()
    outside = tmp_path / "hf" / index["weight_map"][NORM]
    for place in (tmp_path, tmp_path / "hf" / "a", tmp_path / "hf"):
        (place / "other.safetensors").write_bytes(outside.read_bytes())
    index["weight_map"][NORM] = name.format(tmp_path)
    (tmp_path / "hf" / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{INDEX}: weight_map\['{NORM}'\] is .*, want the name of a file in this folder"):
        load_published(build(V3), tmp_path / "hf")


def test_differences_that_are_warned_of(tmp_path: Path) -> None:
    write(V3, tmp_path / "hf")
    edit(lambda c: c.update(max_position_embeddings=163840), "config.json")(tmp_path / "hf")
    with_tensors(lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(2)}))(tmp_path / "hf")
    notes = load_published(build(V3), tmp_path / "hf")
    assert "max_position_embeddings is 163840, here 16384" in notes[0]
    assert "1 tensors of layers past the last (multi-token prediction) are not used" in notes[1]


def test_a_single_expert_is_a_matrix(tmp_path: Path) -> None:
    """As transformers has it, and as one of several is."""
    config = dataclasses.replace(QWEN, num_experts=1, top_k=1)
    model = write(config, tmp_path / "hf")
    assert {value.dim() for name, value in load_file(tmp_path / "hf" / SINGLE).items() if ".experts." in name} == {2}
    read = build(config, seed=2)
    load_published(read, tmp_path / "hf")
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_trained_bias_is_lost_only_when_asked(tmp_path: Path) -> None:
    """DeepSeek-V2 and Qwen3-MoE choose experts without one: a folder with it would be another model in every other program."""
    for config in (V2, QWEN):
        model = build(config)
        model.layers["1"].moe.expert_bias[2] = -0.25
        with pytest.raises(ValueError, match=r"layers\.1\.moe\.expert_bias is not zero \(up to 0.25\).*drop_expert_bias"):
            save_published(config, model.state_dict().items(), tmp_path / "kept")
        assert not list(tmp_path.glob("*kept*"))
        folder = tmp_path / type(config).__name__
        (note,) = save_published(config, model.state_dict().items(), folder, drop_expert_bias=True)
        assert "biases of 1 layers (up to 0.25) are left out" in note
        assert not [name for name in load_file(folder / SINGLE) if "bias" in name]
    write(V3, tmp_path / "v3", drop_expert_bias=True)  # whose router has it
    assert any("e_score_correction_bias" in name for name in load_file(tmp_path / "v3" / SINGLE))


def test_a_bias_written_before_is_still_read(tmp_path: Path) -> None:
    """Folders of earlier versions hold it for DeepSeek-V2 too."""
    write(V2, tmp_path / "hf")
    bias = {"model.layers.1.mlp.gate.e_score_correction_bias": torch.tensor([0.5, 0.0, -0.5, 0.0])}
    with_tensors(lambda t: t.update(bias))(tmp_path / "hf")
    load_published(model := build(V2, seed=2), tmp_path / "hf")
    assert model.layers["1"].moe.expert_bias.tolist() == [0.5, 0.0, -0.5, 0.0]


def test_a_folder_of_the_other_family(tmp_path: Path) -> None:
    write(QWEN, tmp_path / "hf")
    with pytest.raises(ValueError, match="describes another model: model_type is qwen3_moe, here deepseek_v3; choose"):
        load_published(build(V3), tmp_path / "hf")


def test_another_yarn_only_when_asked(tmp_path: Path) -> None:
    write(V3, tmp_path / "hf")
    other = build(dataclasses.replace(V3, yarn=None))
    with pytest.raises(ValueError, match="rope is yarn, here default"):
        load_published(other, tmp_path / "hf")
    assert load_published(other, tmp_path / "hf", any_yarn=True) == []


def test_models_that_cannot_be_written(tmp_path: Path) -> None:
    model = write(V3, tmp_path / "hf")
    with pytest.raises(ValueError, match="exists already"):
        write(V3, tmp_path / "hf")
    with pytest.raises(ValueError, match="tensors were not given, "):
        save_published(V3, list(model.state_dict().items())[:-1], tmp_path / "part")
    with pytest.raises(ValueError, match=r"layers\.1\.moe\.experts\.b1 is no tensor of DeepseekV3ForCausalLM"):
        save_published(V3, [*model.state_dict().items(), ("layers.1.moe.experts.b1", torch.ones(4, 32))], tmp_path / "part")
    assert not (tmp_path / "part").exists()
    for config in (dataclasses.replace(V2, renormalize=True), dataclasses.replace(QWEN, route_scale=2.0)):
        with pytest.raises(ValueError, match="this shape does"):
            published_config(config)
