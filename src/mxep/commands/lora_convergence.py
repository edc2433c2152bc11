"""`mxep lora-convergence`: LoRA adapters on a base frozen in MXFP8 and on the same base in bf16, several seeds of each, compared.

    mxep train --model qwen3_small --recipe bf16 --out runs/base
    mxep convert runs/base runs/base-hf
    mxep lora-convergence --base runs/base-hf --out runs/lora --seconds 540

The last command continues where it stopped when it is given again: after --seconds, Ctrl-C or a kill.  A seed decides the adapters'
initial values and the order of the text, both the same in both arms.  The base of `mxep train` has seen the Python standard library;
adapters learn the source of the transformers package, unless --data names another text.  A verdict needs what `mxep convergence` needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxep.bench.records import device_name, origin, write_records
from mxep.commands.convergence import arm_of, check_eval_every, check_positive, missing_for_verdict, without_folder
from mxep.commands.run_pool import RunPool, SeedRun, say
from mxep.device import device_type_of, resolve_gemm_path
from mxep.json_files import read_json_object
from mxep.models.loss import IGNORE
from mxep.recipe import Recipe
from mxep.train.config import flag_of
from mxep.train.data.loader import Batch, TrainingSequences, held_out_batches, load_corpus
from mxep.train.data.tokenizer import ByteTokenizer
from mxep.train.rank_control import starter_pid, stop_signals, watch_starter
from mxep.train.run_lock import lock_run_folder

PROGRAM = "mxep lora-convergence"
ARMS = {"lora_mx": "mxfp8_wgrad_with_hp", "lora_bf16": "hp"}  # recipe of the base's products; the last arm is the baseline
PLAN_FILE, STATE_FILE = "plan.json", "state.pt"
_POSITIVE = ("steps", "seeds", "rank", "batch", "seq_len", "eval_every", "eval_tokens", "lr", "seconds", "at_once")
_NOT_COMPARED = ("out", "seconds", "record", "at_once", "only")  # options that may change from piece to piece
_WARM_UP, _LAST_LR = 0.05, 0.1  # share of the steps, and of the learning rate at the end
_ON_ATTENTION, _ON_EXPERTS = ["q_proj", "k_proj", "v_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def command(argv: Sequence[str]) -> int:
    """Run `mxep lora-convergence <argv>`; returns 0 if done or stopped, 1 if a run failed. ValueError: wrong options, text or base."""
    started = time.monotonic()
    options = _parse(argv)
    deadline = None if options.seconds is None else started + options.seconds
    device = torch.device(device_type_of(options.device))
    runs = _runs(options)
    waiting = [run for run in runs if options.only in (None, run.name) and _step_of(run) < options.steps]
    at_once = min(options.at_once or (len(waiting) if device.type == "cuda" else 1), len(waiting))
    corpus = load_corpus(options.data, ByteTokenizer(), report=say)
    plan = options.out / PLAN_FILE
    _check_input(plan, "fingerprint", "--data", "text", corpus.fingerprint)
    if waiting and starter_pid() is None:  # the process that starts others has read the whole base for them
        _check_input(plan, "base_fingerprint", "--base", "base", _fingerprint_of(Path(options.base)))
    if at_once > 1:
        pool = RunPool(waiting, lambda run: ["lora-convergence", *argv, "--only", run.name], at_once, deadline, say)
        if pool.run(lambda: f"steps at the newest states: {', '.join(f'{run.name} {_step_of(run)}' for run in runs)}"):
            pool.print_failures(PROGRAM)
            return 1
    elif waiting:
        held_out = held_out_batches(corpus.held_out, options.seq_len, options.batch, options.eval_tokens)
        stops: list[int] = []

        def asked_to_stop() -> bool:
            return bool(stops) or (deadline is not None and time.monotonic() > deadline)

        with stop_signals(lambda number, frame: stops.append(number)):
            watch_starter()
            for run in waiting:
                sequences = TrainingSequences(corpus.train, options.seq_len, options.batch, seed=run.seed)
                run.folder.mkdir(exist_ok=True)
                lock = lock_run_folder(run.folder, say, starter_pid())
                try:
                    if asked_to_stop():
                        break
                    _train(run, options, sequences, held_out, device, asked_to_stop)
                finally:
                    lock.release()
                if _step_of(run) < options.steps:
                    break
    if options.only is not None:
        return 0
    if any(_step_of(run) < options.steps for run in runs):
        say(f"stopped; the same command continues in {options.out}")
        return 0
    data = {"documents": corpus.num_train_documents, "held_out_documents": corpus.num_held_out_documents, "fingerprint": corpus.fingerprint}
    records = {arm: [_read_state(run)["records"] for run in runs if run.recipe == arm] for arm in ARMS}
    _finish(records, options, device, data)
    return 0


def _runs(options: argparse.Namespace) -> list[SeedRun]:
    """Every run, seed by seed."""
    return [SeedRun(arm, seed, options.out / f"{arm}-seed{seed}", ()) for seed in range(options.seeds) for arm in ARMS]


def _check_input(path: Path, name: str, option: str, what: str, fingerprint: str) -> None:
    """Keep a fingerprint in the plan, as `name`. Raises ValueError if the runs there began with another one."""
    kept = read_json_object(path, "--out")
    if name not in kept:  # before other processes read the file
        path.write_text(json.dumps({**kept, name: fingerprint}, indent=1) + "\n")
    elif kept[name] != fingerprint:
        raise ValueError(f"{option}: the {what} is another one than that of the runs in {path.parent}; restore it, or choose another --out")


def _fingerprint_of(base: Path) -> str:
    """Hash of the base's shape and weights."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (base / "config.json", *sorted(base.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _read_state(run: SeedRun) -> dict[str, Any]:
    """What a run's newest state holds: step, adapters, optimizer, records. Empty without one. Tensors are read when they are used."""
    path = run.folder / STATE_FILE
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True) if path.exists() else {}


def _step_of(run: SeedRun) -> int:
    return _read_state(run).get("step", 0)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, which are kept in --out. Raises ValueError for a wrong one, or for others than those of the runs in --out."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder of a Qwen3-MoE model whose tokens are bytes, written by `mxep convert`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", nargs="+", default=None, help="text, as of `mxep train` (default: the transformers package)")
    parser.add_argument("--steps", type=int, default=2000, help="of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of each arm (default %(default)s, the least for a verdict)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default %(default)s)")
    parser.add_argument("--batch", type=int, default=24, help="sequences a step (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="bytes a sequence (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(default %(default)s)")
    parser.add_argument("--eval-every", type=int, default=40, help="steps between evaluations (default %(default)s)")
    parser.add_argument("--eval-tokens", type=int, default=98304, help="of an evaluation (default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time; the same command continues (default: never)")
    parser.add_argument(
        "--record", type=Path, default=None, metavar="FOLDER", help="write FOLDER/lora_convergence-DEVICE-1.json at the end"
    )
    parser.add_argument("--at-once", type=int, default=None, help="runs at the same time (default: all on a GPU, one on a CPU)")
    parser.add_argument("--only", default=None, metavar="RUN", help="train this run alone, as in lora_mx-seed0, without a verdict")
    options = parser.parse_args(list(argv))
    check_positive(options, _POSITIVE)
    check_eval_every(options.eval_every, options.steps)
    if options.eval_tokens < options.seq_len:
        got = f"--eval-tokens={options.eval_tokens}"
        raise ValueError(f"{got}, want at least the {options.seq_len} tokens of a sequence (--seq-len), all evaluated; raise it")
    names = [run.name for run in _runs(options)]
    if options.only not in (None, *names):
        raise ValueError(f"--only={options.only}, want one of {', '.join(names)}")
    if options.data is None:
        options.data = [str(_transformers_folder())]
    if not (Path(options.base) / "config.json").is_file():
        raise ValueError(f"--base: {options.base} has no config.json, want a folder that `mxep convert` wrote")
    plan = {name: value for name, value in vars(options).items() if name not in _NOT_COMPARED}
    path = options.out / PLAN_FILE
    if path.exists():
        kept = read_json_object(path, "--out")
        if changed := [f"{name}={value}, want {kept.get(name)}" for name, value in plan.items() if kept.get(name) != value]:
            raise ValueError(f"{options.out} holds runs with other options: {'; '.join(changed)}; give those, or choose another --out")
        return options
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plan, indent=1) + "\n")
    return options


def _transformers_folder() -> Path:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{PROGRAM}: {error}; want transformers and peft installed") from error
    return Path(transformers.__file__).parent


def lora_model(base: str, arm: str, rank: int, seed: int, device: torch.device) -> nn.Module:
    """The base in bf16, or frozen in MXFP8 for `lora_mx`, with new adapters of `rank` on attention and experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from mxep.integrations import peft_0_21, transformers_5
    from mxep.integrations.transformers_quantizer import MXFP8Config

    frozen = {"quantization_config": MXFP8Config()} if arm == "lora_mx" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map=device, **frozen)
    transformers_5.accelerate(model, ARMS[arm])
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_ON_ATTENTION, target_parameters=_ON_EXPERTS)
    torch.manual_seed(seed)
    wrapped: nn.Module = get_peft_model(model, peft_0_21.register(lora))
    return wrapped.train()


def _train(
    run: SeedRun,
    options: argparse.Namespace,
    sequences: TrainingSequences,
    held_out: Sequence[Batch],
    device: torch.device,
    asked_to_stop: Callable[[], bool],
) -> None:
    """Train one run from its newest state to the end, or until it is asked to stop, which is after a step; writes its state."""
    path, arm, seed = run.folder / STATE_FILE, run.recipe, run.seed
    state = _read_state(run)
    model = lora_model(options.base, arm, options.rank, seed, device)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=options.lr, weight_decay=0.0, fused=device.type == "cuda")
    start, records = 0, list[dict[str, Any]]()
    if state:
        start, records = state["step"], state["records"]
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["adapters"][name])
        optimizer.load_state_dict(state["optimizer"])
        sequences.load_state_dict({"sequences": start * options.batch, "seed": seed})
    records.append({"kind": "run", "step": start, "gemm_path": _gemm_path(arm, device)})
    if not start:
        records.append({"kind": "held_out", "step": 0, "loss": _evaluate(model, held_out, device)})
    for step in range(start + 1, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * _schedule(step, options.steps)
        loss = _loss(model, sequences.next_batch(), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"kind": "step", "step": step, "loss": loss.item()})
        evaluated, stopped = step % options.eval_every == 0, asked_to_stop()
        if evaluated:
            records.append({"kind": "held_out", "step": step, "loss": _evaluate(model, held_out, device)})
            say(f"{run.name} step {step} of {options.steps}: held-out loss {records[-1]['loss']:.4f}")
        if evaluated or stopped or step == options.steps:
            adapters = {name: parameter.detach() for name, parameter in trained.items()}
            partial = path.with_name(f".{path.name}.partial")
            torch.save({"step": step, "adapters": adapters, "optimizer": optimizer.state_dict(), "records": records}, partial)
            partial.replace(path)
        if stopped:
            return


def _gemm_path(arm: str, device: torch.device) -> str | None:
    """The path of the experts' GEMMs; None in bf16."""
    recipe = Recipe.named(ARMS[arm])
    return resolve_gemm_path(recipe.gemm_path, device) if recipe.gemm == "mxfp8" else None


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step from 1 on: rises linearly, then falls linearly.

    >>> [round(_schedule(step, 100), 3) for step in (1, 5, 100)]
    [0.2, 1.0, 0.1]
    """
    warm_up = max(int(steps * _WARM_UP), 1)
    if step <= warm_up:
        return step / warm_up
    return 1 - (1 - _LAST_LR) * (step - warm_up) / (steps - warm_up)


def _loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Mean loss in nats per byte, of all labels but the last of a sequence: transformers shifts labels by one itself."""
    labels = F.pad(batch.labels[:, :-1], (1, 0), value=IGNORE)
    loss: Tensor = model(input_ids=batch.inputs.to(device), labels=labels.to(device), use_cache=False).loss
    return loss


@torch.no_grad()
def _evaluate(model: nn.Module, batches: Sequence[Batch], device: torch.device) -> float:
    counts = [int((batch.labels[:, :-1] != IGNORE).sum()) for batch in batches]
    model.eval()
    losses = [_loss(model, batch, device).item() * count for batch, count in zip(batches, counts, strict=True)]
    model.train()
    return sum(losses) / sum(counts)


def compare_arms(runs: dict[str, list[list[dict[str, Any]]]], steps: int) -> dict[str, Any]:
    """Results of a record: each arm as in `mxep convergence`, with the standard deviation of its seeds; the last arm is the baseline.

    Returns:
        arms; `difference` of the means, nats per byte; whether it is at most the baseline's standard deviation; what is missing for a
        verdict.
    """
    arms = {name: arm_of(name, records, steps) for name, records in runs.items()}
    for arm in arms.values():
        arm["held_out_std"] = round(statistics.stdev(arm["held_out"]), 6) if len(arm["held_out"]) > 1 else None
    ours, base = arms.values()
    difference = round(ours["held_out_mean"] - base["held_out_mean"], 6)
    spread = base["held_out_std"]
    return {
        "arms": arms,
        "difference": difference,
        "within_spread": None if spread is None else abs(difference) <= spread,
        "no_verdict": missing_for_verdict(base, steps),
    }


def _finish(runs: dict[str, list[list[dict[str, Any]]]], options: argparse.Namespace, device: torch.device, data: dict[str, Any]) -> None:
    """Prints the table and the verdict, writes the record."""
    from mxep.bench.markdown_tables import lora_convergence_table

    of_default = options.data == [str(_transformers_folder())]
    texts = [] if of_default else [f"--data {' '.join(shlex.quote(without_folder(name)) for name in options.data)}"]
    asked = [f"{flag_of(name)} {value}" for name, value in vars(options).items() if name in _POSITIVE and value is not None]
    record: dict[str, Any] = {
        "benchmark": "lora_convergence",
        "device": device_name(device),
        "world_size": 1,
        "model": json.loads((Path(options.base) / "config.json").read_text()),
        "data": data,
        **{name: getattr(options, name) for name in ("steps", "seeds", "rank", "batch", "seq_len", "lr", "eval_every", "eval_tokens")},
        **compare_arms(runs, options.steps),
        **origin(f"{PROGRAM} --base FOLDER --out FOLDER {' '.join([*texts, *asked])}"),
    }
    say(lora_convergence_table([record]))
    if record["no_verdict"]:
        say(f"no verdict: {'; '.join(record['no_verdict'])}")
    if options.record is not None:
        say(f"record {write_records('lora_convergence', record['device'], 1, [record], options.record)}")
