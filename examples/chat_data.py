"""What both fine-tuning examples share: options, conversations as sequences of tokens, and a tiny model's folder for a first run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

_COLOURS = ("red", "green", "blue", "black", "white")
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"Which colour has box {n}?"}, {"role": "assistant", "content": f"It is {_COLOURS[n % 5]}."}]}
    for n in range(40)
]
_TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"


def option_parser(description: str | None, saved: str, lr: float) -> argparse.ArgumentParser:
    """A parser with the options of both examples; `saved`: what goes to --out; `lr`: the learning rate if none is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a published model (default: a tiny one with random weights)")
    parser.add_argument("--data", type=Path, help='.jsonl of {"messages": [...]} or {"text": ...} (default: a few conversations)')
    parser.add_argument("--out", type=_folder, help=f"folder for the {saved} (default: not saved)")
    parser.add_argument("--steps", type=int, default=20, help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step (default %(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sequence (default %(default)s)")
    parser.add_argument("--lr", type=float, default=lr, help="(default %(default)s)")
    parser.add_argument("--memory-gib", type=float, help="limit within which activations are kept (default: 90%% of the GPU's memory)")
    return parser


def _folder(name: str) -> Path:
    """Of --out: transformers and peft write nothing where a file has that name."""
    path = Path(name)
    if (path if path.exists() else path.parent).is_file():
        raise argparse.ArgumentTypeError(f"{name} is a file or below one, want the name of a folder")
    return path


def make_tiny_folder(folder: Path) -> Path:
    """A Qwen3-MoE model of 0.2 million random weights with a tokenizer of bytes, in the files of a published model."""
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|user|>", "<|assistant|>", "<|end|>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=_TEMPLATE)
    wrapped.save_pretrained(folder)
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(wrapped), **sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _record(data: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{data} line {number} is not JSON: {error}") from error
    if not isinstance(record, dict) or not {"messages", "text"} & record.keys():
        got = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{data} line {number} has {got}, want messages or text")
    return record


def read_sequences(folder: Path, data: Path | None, seq_len: int) -> Tensor:
    """Sequences (N, seq_len) int64 of conversations: a .jsonl of {"messages": [...]} or {"text": ...}, or the tiny ones of this file.

    Conversations follow each other; what is left of the last sequence is dropped.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [] if data is None else data.read_bytes().splitlines()  # of bytes: at \n and \r alone
    records = CONVERSATIONS if data is None else [_record(data, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    tokens: list[int] = []
    for record in records:
        if "messages" in record:
            text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        else:
            text = record["text"] + (tokenizer.eos_token or "")
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(tokens) < seq_len:
        raise ValueError(f"{data}: {len(tokens)} tokens in all, want {seq_len} for one sequence; lower --seq-len")
    return torch.tensor(tokens[: len(tokens) // seq_len * seq_len]).view(-1, seq_len)
