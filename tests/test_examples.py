"""The examples run as their first lines say, and a program written for torchao runs with only its import lines changed."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).parent.parent


def migration_table() -> dict[str, str]:
    """Modules of torchao and where the same names are here, read from the table in docs/migration.md."""
    rows = re.findall(r"(?m)^\| `(torchao[\w.]*)\.(\w+)`[^|]*\| `(mxep[\w.]*)\.(\w+)` \|", (ROOT / "docs/migration.md").read_text())
    return {there: here for there, name, here, now in rows if name.strip("_") == now.strip("_")}


def torchrun(program: Path, world: int = 2, gpus: bool = False) -> str:
    """Output of the program on `world` ranks, without GPUs unless asked."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if gpus else {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def change_imports(source: str) -> str:
    """Rewrite `from torchao... import` lines by the migration table; nothing else."""
    table = migration_table()
    return re.sub(r"(?m)^(\s*from )(torchao[\w.]*)( import )", lambda found: found[1] + table[found[2]] + found[3], source)


def test_code_written_for_torchao_runs_with_other_imports(tmp_path: Path) -> None:
    source = (ROOT / "tests/programs/written_for_torchao.py").read_text()
    migrated = change_imports(source)
    changed = [(a, b) for a, b in zip(source.splitlines(), migrated.splitlines(), strict=True) if a != b]
    assert changed
    assert all(line.lstrip().startswith("from ") for pair in changed for line in pair)
    assert not any("torchao" in (node.module or "") for node in ast.walk(ast.parse(migrated)) if isinstance(node, ast.ImportFrom))
    program = tmp_path / "program.py"
    # No GPU here: cuda reads as cpu, and the dimensions are small.
    program.write_text(migrated.replace("cuda", "cpu").replace("nccl", "gloo").replace("7168, 2048, 16, 131072", "64, 96, 4, 512"))
    assert run_ranks(run_as_main, 2, str(program), free_port(), backend=None) == [None, None]


def run_as_main(rank: int, world: int, program: str, port: int) -> None:
    """Run a program as torchrun would, without its start-up time."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runpy.run_path(program, run_name="__main__")


@pytest.mark.multi_gpu
def test_code_written_for_torchao_runs_on_two_gpus_as_it_is(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(change_imports((ROOT / "tests/programs/written_for_torchao.py").read_text()))
    assert torchrun(program, gpus=True).count("is done") == 2


def test_names_of_the_migration_table_come_from_the_package_too() -> None:
    import mxep

    source = (ROOT / "tests/programs/written_for_torchao.py").read_text()
    names = [
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchao")
        for name in node.names
    ]
    assert len(set(names)) >= 12
    for name in names:
        assert getattr(mxep, name) is not None


def check_example(printed: str, names: tuple[str, ...] = ("output", "dx", "dw1", "dw2", "dw3")) -> None:
    values = re.findall(r"(\w+) ([\d.]+) dB", printed)
    assert sorted(name for name, _ in values) == sorted(2 * names)
    assert all(22 < float(db) < 40 for _, db in values), printed  # 40: it is the quantised pipeline that ran


def test_expert_parallel_example() -> None:
    check_example(torchrun(ROOT / "examples/expert_parallel.py"))


@pytest.mark.multi_gpu
def test_expert_parallel_example_on_two_gpus() -> None:
    check_example(torchrun(ROOT / "examples/expert_parallel.py", gpus=True))


def check_training(printed: str) -> None:
    """Every rank says the same four losses; both precisions learn, and end near each other."""
    said = re.findall(r"loss ([\d.]+) to ([\d.]+) in MXFP8, ([\d.]+) to ([\d.]+) in bf16", printed)
    assert len(said) == 2, printed
    assert said[0] == said[1], printed
    start, mxfp8, start_bf16, bf16 = map(float, said[0])
    assert start != start_bf16, "it is the converted model that ran"
    assert abs(start / start_bf16 - 1) < 0.01
    assert abs(mxfp8 / bf16 - 1) < 0.02
    assert mxfp8 < start / 2


def test_own_model_example() -> None:
    check_training(torchrun(ROOT / "examples/own_model.py"))


@pytest.mark.multi_gpu
def test_own_model_example_on_two_gpus() -> None:
    check_training(torchrun(ROOT / "examples/own_model.py", gpus=True))


FUSED = ("output", "dx", "drouter", "dw1", "dw2")


def run_and_print(rank: int, world: int, program: str, port: int) -> str:
    """What a program prints that is run as `run_as_main` does, without GPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_as_main(rank, world, program, port)
    return printed.getvalue()


def test_fused_layer_example() -> None:
    printed = run_ranks(run_and_print, 2, str(ROOT / "examples/fused_layer.py"), free_port(), backend=None)
    check_example("".join(printed), FUSED)


@pytest.mark.multi_gpu
def test_fused_layer_example_on_two_gpus() -> None:
    check_example(torchrun(ROOT / "examples/fused_layer.py", gpus=True), FUSED)


def run_example(name: str, *arguments: str) -> str:
    """Output of an example as a user starts it, without GPUs."""
    pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
    command = [sys.executable, "-W", "error:`gradient_checkpointing:FutureWarning", str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def check_losses(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 5, printed
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


def test_lora_example(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="a development tool")
    data = tmp_path / "chat.jsonl"
    talk = [{"role": "user", "content": "Which day is it?"}, {"role": "assistant", "content": "It is Monday."}]
    data.write_text("".join(json.dumps(record) + "\n" for record in [{"messages": talk}, {"text": "It is Monday."}] * 20))
    printed = run_example("finetune_lora.py", "--data", str(data), "--seq-len", "64", "--out", str(tmp_path / "adapter"))
    check_losses(printed)
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()


def test_data_and_folders_of_the_fine_tuning_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings may hold every line separator of Unicode; a file has no room for a model, which is said before the first step."""
    pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import chat_data

    folder, data = chat_data.make_tiny_folder(tmp_path / "model"), tmp_path / "chat.jsonl"
    record = json.dumps({"text": "a\u2028b\x85c\x0bd"}, ensure_ascii=False)
    data.write_text(f"{record}\n\n{record}\n")
    assert chat_data.read_sequences(folder, data, 22).shape == (1, 22)
    for line, says in (('{"text": "a', "line 4 is not JSON"), ('{"body": 1}', "line 4 has body, want"), ('"text"', "line 4 has str, want")):
        data.write_text(f"{record}\n\n{record}\n{line}\n")
        with pytest.raises(ValueError, match=says):
            chat_data.read_sequences(folder, data, 8)
    for out in (data, data / "tuned"):
        with pytest.raises(SystemExit):
            chat_data.option_parser("", "model", 1e-3).parse_args(["--out", str(out)])
    assert chat_data.option_parser("", "model", 1e-3).parse_args(["--out", str(tmp_path / "new")]).out == tmp_path / "new"


def test_full_fine_tuning_example(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="its quantised moments")
    check_losses(run_example("finetune_full.py", "--out", str(tmp_path / "tuned")))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "tuned").iterdir()}
