"""All parameters of a Mixture-of-Experts model on one GPU: bf16 weights rounded stochastically, 8-bit moments, MXFP8 products.

    python examples/finetune_full.py  # a tiny model with random weights
    python examples/finetune_full.py --model Qwen3-30B-A3B --data chat.jsonl --out tuned  # a published model's folder

Each parameter is updated during backward, as soon as its gradient is complete, and its gradient is freed: 4 bytes a parameter in all.  So
there is no clipping by the global norm, and a step whose loss is not finite is skipped as a whole.  Needs torchao.  Runs on the CPU where
there is no GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_data import make_tiny_folder, option_parser, read_sequences
from mxep.integrations import transformers_5
from mxep.integrations.transformers_recompute import RecomputeBudget
from mxep.train import AdamW, OptimizerInBackward


def parse() -> argparse.Namespace:
    parser = option_parser(__doc__, "tuned model", lr=1e-3)
    parser.add_argument("--recipe", default="mxfp8_wgrad_with_hp", help="precision of the products (default %(default)s)")
    parser.add_argument("--state-bits", type=int, choices=(8, 4), default=8, help="of AdamW's moments (default %(default)s)")
    return parser.parse_args()


def main(options: argparse.Namespace, folder: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    print(transformers_5.accelerate(model, options.recipe))
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = AdamW(model.named_parameters(), options.lr, (0.9, 0.95), weight_decay=0.0, state_bits=options.state_bits)
    in_backward = OptimizerInBackward(optimizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters trained on {device}")

    sequences = read_sequences(folder, options.data, options.seq_len)
    budget = RecomputeBudget(model, options.memory_gib) if device.type == "cuda" else None  # on a CPU all layers are recomputed
    begin = time.perf_counter()
    for step in range(options.steps):
        chosen = torch.arange(step * options.batch, (step + 1) * options.batch) % len(sequences)
        tokens = sequences[chosen].to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        in_backward.decide(loss)
        loss.backward()  # and the updates
        norm = in_backward.norm()
        optimizer.step()  # tells hooks of the new weights
        if budget is not None:
            budget.after_step()
        if step % 5 == 0 or step == options.steps - 1:
            per_s = (step + 1) * tokens.numel() / (time.perf_counter() - begin)
            memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}, {per_s:,.0f} tokens/s{memory}")
    if options.out is not None:
        model.save_pretrained(options.out)
        AutoTokenizer.from_pretrained(folder).save_pretrained(options.out)
        print(f"model in {options.out}")


if __name__ == "__main__":
    given = parse()
    with tempfile.TemporaryDirectory() as scratch:
        main(given, given.model or make_tiny_folder(Path(scratch)))
