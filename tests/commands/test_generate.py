"""`mxep generate`: it prints text that a run learned, streamed; runs and Hugging Face folders, bytes and tokenizers, chats; wrong use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.chat_data import write_chat_tokenizer, write_conversations

from mxep.cli import main
from mxep.commands.generate import GenerateConfig, draw_token, stream
from mxep.models.huggingface_files import SINGLE
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.trainer import Trainer

TEXT = "The caf\u00e9 is open.\n"


def train(out: Path, **options: object) -> Path:
    """A tiny run that has learned its data by heart."""
    small = {"model": "dsv3_debug_cpu", "layers": 2, "device": "cpu", "batch": 8, "steps": 60, "recipe": "bf16", "lr": 3e-3, "warmup": 5}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = Trainer(TrainConfig(**{**small, "eval_tokens": 128, **options}), Ranks(0, 1, torch.device("cpu")), out)  # type: ignore[arg-type]
        for _ in range(run.settings.steps):
            loss = run.finish(run.step()).loss
        assert loss < 0.5
        run.save()
    finally:
        dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 60)
    (folder / "held_out.txt").write_text("The bar is closed.\n")
    data = {"data": (str(folder / "text.jsonl"),), "validation_data": (str(folder / "held_out.txt"),)}
    return train(folder / "run", **data, seq_len=64, bias_update_rate=0.0)  # the published model has no expert bias


@pytest.fixture(scope="module")
def of_chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("chats")
    turns = [("hi", "good day."), ("why?", "no idea."), ("bye", "see you.")]
    rows = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in turns]
    tokenizer, data = write_chat_tokenizer(folder / "tokenizer"), write_conversations(folder / "data.jsonl", rows * 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXEP_CACHE", str(folder / "cache"))
        options = {"validation_data": (str(write_conversations(folder / "held.jsonl", [rows[0][:1] + rows[1][1:]])),)}
        yield train(folder / "run", data=(str(data),), tokenizer=tokenizer, chat=True, mask_documents=True, seq_len=128, **options)


def test_learned_text_is_generated(of_bytes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy; the end of a document ends it. The same from the Hugging Face folder of the run."""
    words = ["The caf", "--temperature", "0", "--max-new-tokens", "200", "--device", "cpu"]
    assert main(["generate", str(of_bytes), *words]) == 0
    out, err = capsys.readouterr()
    assert out == TEXT + "\n"
    assert "(step 60), cpu, float32, no KV cache" in err
    assert main(["convert", str(of_bytes), str(tmp_path / "published"), "--dtype", "float32"]) == 0
    assert main(["generate", str(tmp_path / "published"), *words]) == 0
    assert capsys.readouterr().out.endswith(out)


@pytest.mark.parametrize(
    ("file", "ends", "text"),
    [("generation_config.json", [0, ord("o")], "The caf\u00e9 is "), ("config.json", ord("s"), "The caf\u00e9 i")],
)
def test_the_ends_that_a_folder_names(of_bytes: Path, tmp_path: Path, file: str, ends: object, text: str) -> None:
    """As in transformers: generation_config.json may name several tokens, of which the tokenizer knows one; without it config.json."""
    folder = tmp_path / "published"
    assert main(["convert", str(of_bytes), str(folder), "--dtype", "float32"]) == 0
    described = json.loads((folder / file).read_text())
    (folder / "generation_config.json").unlink()
    (folder / file).write_text(json.dumps({**described, "eos_token_id": ends}))
    config = GenerateConfig(folder, "The caf", 200, temperature=0.0, device="cpu")
    assert "".join(stream(config)) == text
    (folder / file).write_text(json.dumps({**described, "eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="eos_token_id is '</s>', want an integer"):
        list(stream(config))


def test_a_piece_has_whole_characters_and_is_printed_at_once(of_bytes: Path) -> None:
    """One token after the other; the two bytes of a character are one piece."""
    pieces = stream(GenerateConfig(of_bytes, "The caf", max_new_tokens=6, temperature=0.0, device="cpu"))
    assert next(pieces) == "The caf"
    assert list(pieces) == ["\u00e9", " ", "i", "s", " ", ""]


@pytest.mark.gpu
def test_a_gpu_generates_the_same_text(of_bytes: Path) -> None:
    assert "".join(stream(GenerateConfig(of_bytes, "The caf", 200, temperature=0.0, device="cuda"))) == TEXT


def test_seeds(of_bytes: Path) -> None:
    """Hot, so that seeds differ; the same seed gives the same text."""
    texts = ["".join(stream(GenerateConfig(of_bytes, "T", 12, temperature=5.0, seed=seed, device="cpu"))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    cold = GenerateConfig(of_bytes, "The caf", 12, temperature=5.0, top_p=1e-6, seed=3, device="cpu")
    assert "".join(stream(cold)) == TEXT[:18], "the most likely token alone"
    assert "".join(stream(GenerateConfig(of_bytes, "", 7, temperature=0.0, device="cpu"))) == "The caf", "the beginning of a document"


def test_the_lowest_temperatures_take_the_most_likely_token() -> None:
    logits, generator = torch.tensor([0.0, 9.0, 8.0]), torch.Generator().manual_seed(0)
    assert {draw_token(logits, temperature, 1.0, generator) for temperature in (1e-300, 1e-40, 1e-3, 0.0)} == {1}


def test_the_most_likely_token_is_left_of_the_smallest_share() -> None:
    logits, generator = torch.tensor([0.0, 9.0, 8.0]), torch.Generator().manual_seed(0)
    assert {draw_token(logits, 1.0, top_p, generator) for top_p in (1e-300, 1e-40, 1e-3)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_diverged(temperature: float, of_bytes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    assert main(["convert", str(of_bytes), str(folder)]) == 0
    stored = load_file(folder / SINGLE)
    save_file({**stored, "model.norm.weight": stored["model.norm.weight"] * torch.nan}, folder / SINGLE)
    with pytest.raises(ValueError, match=r"published has logits that are no finite numbers; take an earlier checkpoint"):
        list(stream(GenerateConfig(folder, "The caf", temperature=temperature, device="cpu")))


def test_a_tokenizer_with_more_tokens_than_the_model(of_bytes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    assert main(["convert", str(of_bytes), str(folder)]) == 0
    stored, described = load_file(folder / SINGLE), json.loads((folder / "config.json").read_text())
    rows = {name: stored[name][:104].contiguous() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({**stored, **rows}, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({**described, "vocab_size": 104}))
    assert len("".join(stream(GenerateConfig(folder, "abc", 2, device="cpu")))) >= 3
    with pytest.raises(ValueError, match=r"the prompt has token 104 of the tokenizer of .*published, want one below .* 104"):
        list(stream(GenerateConfig(folder, "fgh", 2, device="cpu")))


def test_a_chat(of_chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template asks for the answer, which ends at the end of the turn, though EOS is another token."""
    for asked, said in (("hi", "good day."), ("bye", "see you.")):
        assert main(["generate", str(of_chats), asked, "--chat", "--temperature", "0", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.replace("<think>\n\n</think>\n\n", "") == said + "\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x", "--max-new-tokens", "0"], "--max-new-tokens=0, want 1 or more"),
        (["x", "--temperature", "-1"], "--temperature=-1.0, want 0 or more"),
        (["x", "--top-p", "0"], "--top-p=0.0, want more than 0"),
        (["x", "--seed", str(2**64)], f"--seed={2**64}, want a number of at most 64 bits"),
        (["--chat"], "--chat without a prompt"),
        (["x", "--chat"], "got tokens of bytes"),
        (["x", "--step", "7"], "no checkpoint of step 7"),
        (["x", "--device", "cuda"], "--device cuda, but torch sees no CUDA GPU here"),
        (["x" * 4096], "a prompt of 4096 tokens, want fewer than the model's 4096"),
    ],
)
def test_wrong_use(
    words: list[str], says: str, of_bytes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mxep.device.default_device_type", lambda: "cpu")
    assert main(["generate", str(of_bytes), *words]) == 2
    assert says in capsys.readouterr().err


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "x"]) == 2
    assert "is neither a checkpoint nor a run with one, want a folder of `mxep train`, or of Hugging Face" in capsys.readouterr().err
