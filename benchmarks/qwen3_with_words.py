"""A Qwen3 shape of 112 million parameters whose tokens are 32,768 pieces of words: `python benchmarks/qwen3_with_words.py FOLDER`.

Writes config.json and tokenizer.json, from random weights for `mxep train` and `mxep convergence`:

    mxep convergence --out runs/words -- --model FOLDER --tokenizer FOLDER --steps 2000 --batch 24 --seq-len 512 --lr 6e-4 --warmup 100

The tokenizer is a byte-level BPE of the .py files of this Python installation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mxep.train.data.text_files import installed_python_files

VOCABULARY, TEXT_BYTES = 32768, 64_000_000  # pieces; of text that the tokenizer is trained on
END = "<|endoftext|>"
SHAPE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 1e-3,
    "initializer_range": 0.02,
}


def texts(most_bytes: int) -> Iterator[str]:
    """Source files until they have this many bytes."""
    read = 0
    for path in installed_python_files():
        if read >= most_bytes:
            return
        text = path.read_bytes()
        read += len(text)
        yield text.decode(errors="replace")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES, help=f"of source for the tokenizer (default {TEXT_BYTES:,})")
    options = parser.parse_args(arguments)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(options.text_bytes), trainer)
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.folder / "tokenizer.json"))
    (options.folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")
    (options.folder / "config.json").write_text(json.dumps(SHAPE, indent=1) + "\n")
    print(f"{options.folder}: {tokenizer.get_vocab_size():,} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
