"""LoRA of a Mixture-of-Experts model on a base that is frozen in MXFP8: 33/32 bytes a parameter instead of 2.

    python examples/finetune_lora.py  # a tiny model with random weights
    python examples/finetune_lora.py --model Qwen3-30B-A3B --data chat.jsonl --out adapter  # a published model's folder, bf16 or MXFP4

Weights are quantised one by one while the model is loaded, so it never exists in bf16.  Adapters are those of peft: on attention, and on
the experts, whose adapters are never multiplied out.  Runs on one GPU, or on the CPU where there is none.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from chat_data import make_tiny_folder, option_parser, read_sequences
from mxep.integrations import peft_0_21, transformers_5
from mxep.integrations.transformers_graph import GraphedStep
from mxep.integrations.transformers_quantizer import MXFP8Config, config_without_mxfp4
from mxep.integrations.transformers_recompute import RecomputeBudget


def parse() -> argparse.Namespace:
    parser = option_parser(__doc__, "adapter", lr=2e-3)
    parser.add_argument("--recipe", default="mxfp8_wgrad_with_hp", help="precision of the base's products (default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default %(default)s)")
    parser.add_argument("--cuda-graph", action="store_true", help="replay each step as a CUDA graph, on a GPU")
    return parser.parse_args()


def main(options: argparse.Namespace, folder: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how = {"config": config_without_mxfp4(folder), "quantization_config": MXFP8Config()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device, **how)
    print(transformers_5.accelerate(model, options.recipe))
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})  # no layer has dropout
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = get_peft_model(model, peft_0_21.register(lora)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in trained)
    print(f"{frozen:,} parameters frozen, {sum(p.numel() for p in trained):,} of adapters trained on {device}")

    sequences = read_sequences(folder, options.data, options.seq_len)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0, fused=on_gpu, capturable=on_gpu)
    budget = RecomputeBudget(model, options.memory_gib) if on_gpu else None  # on a CPU all layers are recomputed

    def train_step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step_of: Callable[[Tensor], Tensor] = train_step
    if options.cuda_graph:
        step_of, budget = GraphedStep(model, train_step, budget), None  # which calls it
    begin = time.perf_counter()
    for step in range(options.steps):
        chosen = torch.arange(step * options.batch, (step + 1) * options.batch) % len(sequences)
        tokens = sequences[chosen].to(device)
        loss = step_of(tokens)
        if budget is not None:
            budget.after_step()
        if step % 5 == 0 or step == options.steps - 1:
            per_s = (step + 1) * tokens.numel() / (time.perf_counter() - begin)
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else ""
            print(f"step {step + 1}: loss {loss.item():.3f}, {per_s:,.0f} tokens/s{memory}")
    if options.out is not None:
        model.save_pretrained(options.out)
        print(f"adapter in {options.out}; merged into the model by model.merge_and_unload()")


if __name__ == "__main__":
    given = parse()
    with tempfile.TemporaryDirectory() as scratch:
        main(given, given.model or make_tiny_folder(Path(scratch)))
