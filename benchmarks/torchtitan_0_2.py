"""torchtitan 0.2's own trainer on this machine's GPUs, as it is and with mxep's adapter: the record of docs/howto/torchtitan.md.

    python benchmarks/torchtitan_0_2.py --ranks 2 --layers 8

Needs torchtitan 0.2.2 in the environment of mxep.  Starts the ranks once for each arm: torchtitan's experts in bf16 over NCCL, then the
adapter by two recipes, with one seed, the same text (Python's own files, byte by byte) and the first layers of torchtitan's DeepSeek-V3
16B.  A step's time is that between two logged losses on rank 0.  Checks first that the losses of the first step agree and that losses
fall.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mxep.bench.records import device_name, origin, write_beside
from mxep.bench.timing import Timing

BASELINE = "bf16"
RECIPES = ("mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx")
SWITCH_ON = ("--job.custom_config_module=mxep.integrations.torchtitan_0_2", "--model.converters=mxep")
ATTENTION = ("flex", "sdpa")
FLAVOR, DATASET = "first_layers", "files_of_python"
WARM_STEPS, TIMED_STEPS = 10, 20  # flex attention is compiled in the first ones
NEAR, FALLS = 2e-3, 0.5  # accepted difference of first losses, relative; least decrease of the loss over all steps


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of 256 bytes and the end of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def register(of: str, layers: int, attention: str) -> None:
    """Make the model's first layers a flavor, and the text a data set, known to torchtitan."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS
    from torchtitan.models.deepseek_v3 import deepseekv3_args

    shape = copy.deepcopy(deepseekv3_args[of])
    shape.n_layers, shape.attn_type = layers, attention
    if attention == "sdpa":
        shape.attn_mask_type = "causal"
    deepseekv3_args[FLAVOR] = shape

    def load(path: str) -> Dataset:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return Dataset.from_dict({"text": [file.read_text(errors="replace") for file in files]})

    DATASETS[DATASET] = DatasetConfig(path="", loader=load, sample_processor=lambda sample: sample["text"])


def train(options: list[str]) -> dict[str, Any]:
    """Run torchtitan's trainer; losses and seconds of every step, and the memory that it took, of this rank."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    trainer = Trainer(ConfigManager().parse_args(options))
    losses, stamps, log = list[float](), list[float](), trainer.metrics_processor.log

    def note(step: int, loss: float, *more: Any, **named: Any) -> None:
        losses.append(loss)
        stamps.append(time.perf_counter())  # the loss was read on the host: the step has ended
        log(step, loss, *more, **named)

    trainer.metrics_processor.log = note
    trainer.train()
    memory = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    trainer.close()
    return {"losses": losses, "step_ms": [1e3 * (b - a) for a, b in itertools.pairwise(stamps)], "memory_gib": round(memory, 3)}


def options_of(arm: str, arguments: argparse.Namespace, folder: str, world: int) -> list[str]:
    """torchtitan's options."""
    switched = [] if arm == BASELINE else [*SWITCH_ON, f"--mxep.recipe={arm}", *(["--mxep.no-fused"] if arguments.blocks else [])]
    return [
        "--model.name=deepseek_v3", f"--model.flavor={FLAVOR}", f"--model.hf_assets_path={folder}", f"--job.dump_folder={folder}/out",
        f"--training.dataset={DATASET}", f"--training.seq_len={arguments.seq_len}", f"--training.local_batch_size={arguments.batch}",
        f"--training.steps={WARM_STEPS + TIMED_STEPS}", f"--parallelism.expert_parallel_degree={world}", "--optimizer.lr=3e-4",
        "--lr_scheduler.warmup_steps=2", "--activation_checkpoint.mode=none", "--metrics.log_freq=1", "--debug.seed=0",
        "--debug.moe_force_load_balance", *switched,
    ]  # fmt: skip


def run_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `train` gives for an arm, in a process that has a rank's environment."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        register(arguments.of, arguments.layers, arguments.attention)
        return train(options_of(arguments.arm, arguments, folder, int(os.environ["WORLD_SIZE"])))


def problem_of(runs: dict[str, dict[str, Any]]) -> str | None:
    """Describes wrong losses; None if they are right."""
    first = runs[BASELINE]["losses"][0]
    for arm, run in runs.items():
        if not abs(run["losses"][0] / first - 1) < NEAR:
            return f"{arm}: first loss {run['losses'][0]:.4f}, {BASELINE} has {first:.4f}"
        if not run["losses"][-1] < run["losses"][0] - FALLS:
            return f"{arm}: the loss went from {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}"
    return None


def record_of(runs: dict[str, dict[str, Any]], arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """The record of all arms."""
    times = {arm: Timing.of(run["step_ms"][-TIMED_STEPS:], rounds=2) for arm, run in runs.items()}
    return {
        "benchmark": "torchtitan",
        "device": device,
        "world_size": arguments.ranks,
        "shape": {"T": arguments.ranks * arguments.batch * arguments.seq_len},
        "model": f"DeepSeek-V3 {arguments.of}, {arguments.layers} layers",
        "attention": arguments.attention,
        "layers": "blocks" if arguments.blocks else "one function",
        "torchtitan": importlib.metadata.version("torchtitan"),
        "routing": "forced balance",
        "check": f"first losses within {NEAR:g} of {BASELINE}'s, losses fall by {FALLS} in {WARM_STEPS + TIMED_STEPS} steps",
        "arms": {arm: asdict(timing) for arm, timing in times.items()},
        "losses": {arm: [round(loss, 4) for loss in run["losses"]] for arm, run in runs.items()},
        "memory_gib": {arm: run["memory_gib"] for arm, run in runs.items()},
        "ratios": {f"{arm}_vs_{BASELINE}": round(times[BASELINE].median_ms / times[arm].median_ms, 4) for arm in RECIPES},
        "limit": {},
        **origin(),
    }


def compared(record: dict[str, Any]) -> tuple[object, ...]:
    """Records of other models, attentions, layers or tokens stay in the file of a new one."""
    return record["model"], record["attention"], record["layers"], record["shape"]["T"]


def parser() -> argparse.ArgumentParser:
    """Its options, those of a rank among them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2, help="GPUs, and the expert parallel degree (default 2)")
    options.add_argument("--of", default="16B", help="torchtitan's flavor of DeepSeek-V3 (default 16B)")
    options.add_argument("--layers", type=int, default=8, help="its first layers (default 8)")
    options.add_argument("--attention", choices=ATTENTION, default="flex", help="torchtitan's attn_type (default flex, what 16B has)")
    options.add_argument("--blocks", action="store_true", help="the adapter's exchange and experts one after the other (--mxep.no-fused)")
    options.add_argument("--batch", type=int, default=4, help="sequences of a GPU (default 4)")
    options.add_argument("--seq-len", type=int, default=4096, help="tokens of a sequence (default 4096)")
    options.add_argument("--arm", choices=(BASELINE, *RECIPES), help=argparse.SUPPRESS)
    options.add_argument("--result", help=argparse.SUPPRESS)
    return options


def main() -> None:
    arguments = parser().parse_args()
    if arguments.arm:
        result = run_rank(arguments)
        if os.environ["RANK"] == "0":
            Path(arguments.result).write_text(json.dumps(result))
        return
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in (BASELINE, *RECIPES):
            out = f"{folder}/{arm}.json"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}", *sys.argv]
            subprocess.run([*torchrun, "--arm", arm, "--result", out], check=True)
            runs[arm] = json.loads(Path(out).read_text())
            print(f"{arm}: {Timing.of(runs[arm]['step_ms'][-TIMED_STEPS:]).median_ms:.1f} ms a step", flush=True)
    problem = problem_of(runs)
    if problem is not None:
        sys.exit(f"FAILED: {problem}; no record")
    print("wrote", write_beside(record_of(runs, arguments, device_name(torch.device("cuda"))), compared))


if __name__ == "__main__":
    main()
