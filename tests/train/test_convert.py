"""A run becomes a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.full_disk import full_beyond
from tests.steps import trainer, written_before

from mxep.cli import main
from mxep.models.families import build_model
from mxep.models.huggingface_files import load_published
from mxep.models.huggingface_writer import save_published
from mxep.models.presets import resolve_model
from mxep.mx import quantize_mx
from mxep.recipe import resolve_recipe
from mxep.train.trainer import Trainer


def run_of(out: Path, text: str, **options: object) -> Trainer:
    return trainer(0, 1, out, **{"model": "qwen3_debug_cpu", "steps": 4, "data": (text,), **options})


@pytest.mark.parametrize(("preset", "layers"), [("qwen3_debug_cpu", None), ("dsv3_debug_cpu", None), ("dsv3_debug_cpu", 2)])
def test_a_run_becomes_a_folder(
    preset: str, layers: int | None, tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]
) -> None:
    model = preset if layers is None else f"{preset}_of_{layers}_layers"
    run = run_of(tmp_path / "run", text, model=preset, layers=layers)
    assert (run.facts()["model"]["name"], run.describe()[0].split(":")[0]) == (model, f"model {model}")
    run.step()
    checkpoint = run.save()
    arguments = ["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "float32"]
    biased = preset == "dsv3_debug_cpu"  # its biases moved, which DeepSeek-V2 has no place for
    assert main(arguments) == (2 if biased else 0)
    if biased:
        assert "moe.expert_bias is not zero (up to 0.0" in capsys.readouterr().err
        assert not list(tmp_path.glob("*hf*"))
        assert main([*arguments, "--drop-expert-bias"]) == 0
    said = capsys.readouterr().out
    assert f"(step 1, {model})" in said
    assert ("are left out: tokens choose other experts" in said) == biased
    fresh = build_model(resolve_model(model), resolve_recipe("hp"))
    load_published(fresh, tmp_path / "hf")
    trained = run.model.state_dict()
    for name, value in fresh.state_dict().items():
        whole = trained[name].full_tensor() if hasattr(trained[name], "full_tensor") else trained[name]
        assert torch.equal(value, torch.zeros_like(whole) if name.endswith("expert_bias") else whole), name
    assert main(["convert", str(checkpoint), str(tmp_path / "half"), "--drop-expert-bias"]) == 0
    assert load_file(tmp_path / "half" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_a_run_starts_from_a_folder(tmp_path: Path, text: str, one_rank: None) -> None:
    first = run_of(tmp_path / "first", text, seed=3)
    first.step()
    first.save()
    assert main(["convert", str(tmp_path / "first"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    second = run_of(tmp_path / "second", text, init_from=tmp_path / "hf", cache_weights=True)
    assert f"weights from {tmp_path / 'hf'}; the data's tokens are bytes" in "\n".join(second.describe())
    for (name, value), (_, want) in zip(second.model.named_parameters(), first.model.named_parameters(), strict=True):
        assert torch.equal(value, want), name
    assert second.evaluate() == first.evaluate()


def test_a_run_and_folders_in_mxfp8(tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is written in MXFP8, another starts from that, and the folder becomes bf16: the same weights everywhere, rounded once."""
    first = run_of(tmp_path / "first", text, seed=3)
    first.save()
    assert main(["convert", str(tmp_path / "first"), str(tmp_path / "mx"), "--dtype", "mxfp8"]) == 0
    assert main(["convert", str(tmp_path / "mx"), str(tmp_path / "bf16")]) == 0
    assert f"{tmp_path / 'mx'} -> {tmp_path / 'bf16'}, bfloat16" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "mx"), str(tmp_path / "third"), "--drop-expert-bias"]) == 2
    assert "--drop-expert-bias, but" in capsys.readouterr().err
    transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "bf16").decode([104, 105]) == "hi"
    described = json.loads((tmp_path / "mx" / "config.json").read_text())
    assert (described["torch_dtype"], described["quantization_config"]["format"]) == ("bfloat16", "mxfp8-quantized")
    second, third = (run_of(tmp_path / f"{name}_run", text, model=None, init_from=tmp_path / name) for name in ("mx", "bf16"))
    for (name, got), (_, plain) in zip(second.model.named_parameters(), first.model.named_parameters(), strict=True):
        in_mxfp8 = name.split(".")[-1] in ("w1", "w2", "w3") or ".attention.w" in name
        rounded = quantize_mx(plain.bfloat16()).dequantize().float() if in_mxfp8 else plain.bfloat16().float()
        assert torch.equal(got, rounded), name
    assert second.evaluate() == third.evaluate()


@pytest.mark.parametrize(("yarn", "scaling", "context"), [("auto", None, 4096), ("on", "yarn", 16384)])
def test_a_folder_describes_the_trained_model(
    yarn: str, scaling: str | None, context: int, tmp_path: Path, text: str, one_rank: None
) -> None:
    """Without YaRN a folder has no rope_scaling, and the library's logits and a run from the folder are those of the run."""
    run = run_of(tmp_path / "run", text, model="dsv3_debug", layers=2, yarn=yarn, recipe="bf16")
    run.model.init_weights(3)
    run.bias_hook.layers.clear()  # no bias, which the library would lack
    run.step()
    run.save()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert ((described["rope_scaling"] or {}).get("type"), described["max_position_embeddings"]) == (scaling, context)
    again = run_of(tmp_path / "again", text, model=None, init_from=tmp_path / "hf", recipe="bf16")
    assert again.settings.yarn == run.settings.yarn == (scaling is not None)
    tokens = torch.arange(48).view(2, 24) * 37 % 2048
    with torch.no_grad():
        want = run.model.eval()(tokens)
        assert torch.equal(again.model.eval()(tokens), want)
        transformers = pytest.importorskip("transformers", reason="the oracle is a development tool")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
        torch.testing.assert_close(theirs.eval()(tokens).logits, want, rtol=2e-4, atol=2e-4)


def test_a_checkpoint_from_before_shapes_were_kept(tmp_path: Path, text: str, one_rank: None) -> None:
    """It says the preset's name alone; its YaRN was applied at every length."""
    run = run_of(tmp_path / "run", text, model="dsv3_debug", layers=2, yarn="on")
    checkpoint = run.save()
    written_before(checkpoint, lambda facts: [facts["identity"].pop(name) for name in ("shape", "yarn")])
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_scaling"]["type"] == "yarn"
    resumed = run_of(tmp_path / "run", text, model="dsv3_debug", layers=2, resume=True, shape={})
    assert resumed.settings.yarn
    with pytest.raises(ValueError, match="yarn was on, is off"):
        run_of(tmp_path / "run", text, model="dsv3_debug", layers=2, resume=True, yarn="off")


def test_another_model_is_an_error_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(resolve_model("qwen3_debug_cpu"), resolve_recipe("hp"))
    save_published(resolve_model("qwen3_debug_cpu"), model.state_dict().items(), tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    messages = {"hf": "describes another model", "empty": "has no config.json", "nowhere": "does not exist, want a Hugging Face folder"}
    for folder, message in messages.items():
        assert main(["train", "--device", "cpu", "--model", "dsv3_debug_cpu", "--init-from", str(tmp_path / folder)]) == 2
        assert message in capsys.readouterr().err
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**described, "quantization_config": {"quant_method": "awq"}}))
    assert main(["train", "--device", "cpu", "--init-from", str(tmp_path / "hf")]) == 2
    assert "quant_method is 'awq', want fp8, mxfp4" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "out")]) == 2
    assert "quant_method is 'awq', want fp8, mxfp4" in capsys.readouterr().err


def test_runs_that_cannot_be_converted(tmp_path: Path, text: str, one_rank: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "hf")]) == 2
    assert "is neither a checkpoint nor a run with one" in capsys.readouterr().err
    run = run_of(tmp_path / "run", text)
    checkpoint = run.save()
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    assert main(["convert", str(checkpoint), str(tmp_path / "file" / "hf")]) == 1
    assert "file/hf was not written: [Errno 20] Not a directory" in capsys.readouterr().err
    with full_beyond(100_000):
        assert main(["convert", str(checkpoint), str(tmp_path / "hf")]) == 1
    assert "hf was not written: " in (told := capsys.readouterr().err)
    assert "File too large" in told
    assert told.endswith("make room there, or name another folder\n")
    assert main(["convert", str(checkpoint), str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    (path,) = (checkpoint / "tensors").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    assert main(["convert", str(checkpoint), str(tmp_path / "hf")]) == 2
    assert "is damaged: tensors/" in capsys.readouterr().err
    assert not list(tmp_path.glob("*hf*"))


def test_the_routers_options_reach_the_layers_and_the_folder(tmp_path: Path, text: str, one_rank: None) -> None:
    """The coefficient in transformers' meaning; a layer's own factor is that times top-k over the MoE layers."""
    options = {
        "router_dtype": "bf16",
        "balance_loss": 0.5,
        "balance_loss_type": "global_aux_loss",
        "z_loss": 0.25,
        "bias_update_rate": 0.125,
    }
    run = run_of(tmp_path / "run", text, **options)
    assert run.model.config.balance_loss_type == "global_aux_loss"
    for layer in run.model.moe_layers():
        found = layer.config
        assert (found.router_dtype, found.balance_loss, found.z_loss, found.bias_update_rate) == ("bf16", 0.5 * 2 / 4, 0.25, 0.125)
    run.step()
    run.save()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--drop-expert-bias"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["router_aux_loss_coef"] == 0.5
