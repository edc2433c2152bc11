"""Fine-tunes Qwen3-30B-A3B with LoRA by unsloth and times the steps; a run of its own, since unsloth changes transformers, peft and trl.

    python tests/programs/finetune_unsloth.py FOLDER --write --layers 48                          # with mxep and its transformers
    python tests/programs/finetune_unsloth.py FOLDER --sequences 4 --seq-len 4096 --steps 8       # with unsloth, without mxep

The first command writes the model of `mxep bench finetune` (`mxep.bench.random_models`) in the published layout, and a tokenizer of a few
words, which unsloth wants.  The second one trains it in bf16 as `mxep bench finetune` trains its LoRA arms: the same tokens, adapters of
the same rank and alpha on attention and experts, and the same optimizer.  From unsloth are the loading, the adapters and their
initialisation, the experts, the loss and the recomputation, with the options of unsloth's notebook for this model.  The forward pass is
under autocast, as in a Trainer with `bf16=True`, since the adapters are in float32.  Prints a line for each step, and one of JSON in the
end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
PACKAGES = "torch", "triton", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "datasets", "xformers", "unsloth", "unsloth_zoo"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"]  # the last four: experts
SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
LR = 1e-3
_SHARD, _SHOWN_KERNELS, _NAME_LENGTH = "4GB", 15, 100


def write(folder: Path, layers: int, tiny: bool) -> None:
    """Write a model of random weights and a tokenizer."""
    import torch

    from mxep.bench.random_models import random_model
    from mxep.bench.transformers_step import model_config

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(model_config(layers, tiny, "Qwen3-30B-A3B"), device, in_mx=False)
    model.save_pretrained(folder, max_shard_size=_SHARD)
    write_tokenizer(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(json.dumps({"folder": str(folder), "layers": layers, "weights_gib": gib(size)}), flush=True)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a few words; training takes random tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def load(options: argparse.Namespace) -> Any:
    """unsloth's model with adapters on attention and experts."""
    import torch
    from unsloth import FastLanguageModel

    checkpointing = {"unsloth": "unsloth", "true": True, "false": False}[options.checkpointing]
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(options.folder),
        max_seq_length=options.seq_len,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        load_in_16bit=True,
        use_gradient_checkpointing=checkpointing,
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=options.rank,
        target_modules=TARGETS,
        lora_alpha=2 * options.rank,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=checkpointing,
        random_state=0,
    )
    return FastLanguageModel.for_training(model) or model


def make_step(model: Any, options: argparse.Namespace) -> Callable[[], Any]:
    """A training step, which returns the loss before the update."""
    import torch

    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(0)
    size = options.sequences, options.seq_len
    tokens = torch.randint(model.config.vocab_size, size, device=device, generator=generator)

    def step() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gib(count: int) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 3)


def versions() -> dict[str, str | None]:
    """Of the packages that matter; None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def adapters(model: Any) -> dict[str, Any]:
    """What is trained: parameters by name with a star for the number of a layer, and whether experts are among them."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    kinds = Counter(f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} {parameter.dtype}".replace("torch.", "") for name, parameter in trained)
    shapes = {tuple(parameter.shape) for name, parameter in trained if ".experts." in name}
    return {
        "trainable": sum(parameter.numel() for _, parameter in trained),
        "trainable_tensors": dict(kinds),
        "experts_have_adapters": bool(shapes),
        "shapes_on_experts": sorted(shapes),
    }


def experts_trained(model: Any) -> str:
    """How many of the factors on experts that start as zeros are no longer zero."""
    seconds = [parameter for name, parameter in model.named_parameters() if ".experts." in name and "lora_B" in name]
    return f"{sum(bool(parameter.any()) for parameter in seconds)} of {len(seconds)}"


def moe_backend(model: Any) -> dict[str, Any]:
    """How unsloth says that it computes experts, as far as it can be asked."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("UNSLOTH_") and "\n" not in value}
    found: dict[str, Any] = {"settings": settings}
    try:
        utils = importlib.import_module("unsloth_zoo.temporary_patches.moe_utils")
        found |= {"backend": utils.select_moe_backend(), "separated_lora": utils._should_use_separated_lora()}
    except Exception as error:
        found["backend"] = f"{type(error).__name__}: {error}"
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            forward = type(module).forward
            found["forward_of_experts"] = f"{forward.__module__}.{forward.__qualname__}"
            break
    config = getattr(model, "config", None)
    found["attention"] = getattr(config, "_attn_implementation", None)
    return found


def slowest_kernels(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Of one step: name, milliseconds and calls of the kernels that take the longest."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda event: event.self_device_time_total, reverse=True)
    total = sum(event.self_device_time_total for event in kernels)
    shown = [
        {"name": event.key[:_NAME_LENGTH], "ms": round(event.self_device_time_total / 1e3, 2), "calls": event.count}
        for event in kernels[:_SHOWN_KERNELS]
    ]
    return [{"name": "all", "ms": round(total / 1e3, 2), "calls": sum(event.count for event in kernels)}, *shown]


def train(options: argparse.Namespace) -> None:
    """Load, train and print."""
    os.environ |= {name: os.environ.get(name, value) for name, value in OFFLINE.items()}
    importlib.import_module("unsloth")  # before transformers, peft and trl
    import torch

    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    model = load(options)
    synchronize()
    found: dict[str, Any] = {"versions": versions(), "device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    found |= {"load_s": round(time.perf_counter() - began, 1), "checkpointing": options.checkpointing}
    found |= {"sequences": options.sequences, "seq_len": options.seq_len, "rank": options.rank, "layers": model.config.num_hidden_layers}
    found |= adapters(model)
    print(json.dumps(found), flush=True)
    if not found["experts_have_adapters"]:
        raise SystemExit("no adapters on experts")
    step = make_step(model, options)
    seconds, losses = list[float](), list[float]()
    for number in range(options.warm_up + options.steps):
        if on_gpu and number == options.warm_up:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        loss = step()
        synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
        what = "warm-up" if number < options.warm_up else "timed"
        print(f"{what} step {number}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s", flush=True)
    timed = seconds[options.warm_up :]
    found["tokens_per_s"] = round(options.sequences * options.seq_len / statistics.median(timed), 1)
    found |= {"steps_s": [round(value, 4) for value in timed], "warm_up_s": [round(value, 2) for value in seconds[: options.warm_up]]}
    found |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if on_gpu:
        found |= {"peak_allocated_gib": gib(torch.cuda.max_memory_allocated()), "peak_reserved_gib": gib(torch.cuda.max_memory_reserved())}
    found |= {"experts_trained": experts_trained(model), "moe": moe_backend(model)}
    try:
        found["slowest_kernels"] = slowest_kernels(step)
    except Exception as error:  # the times are measured
        found["slowest_kernels"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tunes Qwen3-30B-A3B with LoRA by unsloth and times the steps.")
    parser.add_argument("folder", type=Path, help="of config.json, safetensors and a tokenizer")
    parser.add_argument("--write", action="store_true", help="write the folder, with mxep, instead of training")
    parser.add_argument("--layers", type=int, default=48, help="of --write")
    parser.add_argument("--tiny", action="store_true", help="--write with the widths of a test")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8, help="timed ones")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters; alpha is twice that")
    parser.add_argument(
        "--checkpointing", choices=("true", "unsloth", "false"), default="true", help="unsloth: layers' inputs wait on the CPU"
    )
    options = parser.parse_args()
    if options.write:
        write(options.folder, options.layers, options.tiny)
    else:
        train(options)


if __name__ == "__main__":
    main()
