"""The command of torchao's tutorial "MXFP8 Expert Parallel Training", its options word for word; paths, sizes and degrees are smaller."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT

from mxep.train.config import TrainConfig
from mxep.train.option_parser import read_options

TUTORIAL = [
    "--metrics.log_freq=10",
    "--training.steps=1500",
    "--parallelism.data_parallel_shard_degree=8",
    "--parallelism.expert_parallel_degree=8",
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.expert_tensor_parallel_degree=1",
    "--training.seq_len=8192",
    "--activation_checkpoint.mode=full",
    "--model.print_after_conversion",
    "--training.local_batch_size=16",
    "--quantize.linear.mx.mxfp8_dim0_cast_kernel_choice=triton",
    "--quantize.linear.mx.mxfp8_dim1_cast_kernel_choice=cuda",
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp",
    "--compile.enable",
    "--compile.components=model,loss",
    "--debug.moe_force_load_balance",
    "--model.converters=quantize.grouped_mm.mx",
]
SMALLER = {
    "--metrics.log_freq": "1",
    "--training.steps": "3",
    "--parallelism.data_parallel_shard_degree": "2",
    "--parallelism.expert_parallel_degree": "2",
    "--training.seq_len": "32",
    "--training.local_batch_size": "2",
}


def test_every_option_sets_a_field() -> None:
    config = read_options([f"--config={ROOT / 'configs' / 'deepseek_v3_16b.toml'}", *TUTORIAL])
    assert (config.model_name, config.model_flavor, config.lr) == ("deepseek_v3", "16B", 2.2e-4)  # the file's
    want = {
        "log_every": 10, "steps": 1500, "dp_shard": 8, "ep": 8, "tp": 1, "expert_tp": 1, "seq_len": 8192, "activation_checkpoint": "full",
        "print_model": True, "batch": 16, "rows_cast_kernel": "triton", "columns_cast_kernel": "cuda", "mx_fqns": "experts",
        "recipe": "mxfp8_wgrad_with_hp", "compile": True, "compile_components": "model,loss", "force_balance": True,
        "converters": "quantize.grouped_mm.mx",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in want} == want
    assert len(want) == len(TUTORIAL)
    assert config != TrainConfig()


def test_the_command_runs(tmp_path: Path, text: str) -> None:
    """On two gloo ranks; its step lines read like the tutorial's."""
    small = tmp_path / "small.toml"
    options = 'model = "dsv3_debug_cpu"\ndevice = "cpu"\neval_tokens = 256\n[compile]\nbackend = "eager"\n'  # inductor takes minutes
    small.write_text(f'{options}[training]\ndataset_path = "{text}"\n')
    words = [f"{name}={SMALLER.get(name, value)}" if value else name for name, _, value in (word.partition("=") for word in TUTORIAL)]
    environment = {name: value for name, value in os.environ.items() if name != "NGPU"}
    environment |= {"CONFIG_FILE": str(small), "PYTHON": sys.executable}
    command = [str(ROOT / "run_train.sh"), *words, "--job.dump_folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    number = r"[\d,]+(?:\.\d+)?"
    figures = rf"loss: +{number}  grad_norm: +{number}  memory: +{number}GiB\({number}%\)  tps: {number}  tflops: {number}  "
    figures += "mfu: n/a  mfu_causal: n/a  hfu: n/a"
    step = rf"step: +(\d+)  {figures}"
    assert re.findall(step, done.stdout) == ["1", "2", "3"]
    assert "--rows-cast-kernel=triton changes nothing: what quantises 1x32" in done.stdout
    assert "(moe): FusedMoE(" in done.stdout  # the model, printed
    assert "expert load max/mean: 1.00" in done.stdout  # balance was forced
