"""The optional packages of mxep: what each extra of pyproject.toml gives, and the command that installs it."""

from __future__ import annotations

from typing import NamedTuple


class Extra(NamedTuple):
    modules: tuple[str, ...]  # that it brings
    gives: str


EXTRAS = {
    "flash_attn": Extra(("flash_attn",), "`mxep train --attn-implementation flash_attention_4`"),
    "liger": Extra(("liger_kernel",), "RMSNorms by liger-kernel in `transformers_5.accelerate`, on a GPU"),
    "parquet": Extra(("pyarrow",), "Parquet and Arrow files in `mxep train --data`"),
    "peers": Extra(("liger_kernel", "torchao", "deep_gemm"), "other packages' experts in `mxep bench peers`"),
    "tensorboard": Extra(("tensorboard",), "`mxep train --tensorboard`"),
    "tokenizers": Extra(("tokenizers",), "`mxep train --tokenizer` with a tokenizer.json"),
    "torchao": Extra(("torchao",), "`mxep train --optimizer adamw8bit` and `adamw4bit`, `--dtype bfloat16`"),
    "torchtitan": Extra(("torchtitan",), "MXFP8 in torchtitan 0.2.2's trainer"),
    "transformers": Extra(("transformers", "accelerate"), "MXFP8 in Hugging Face transformers"),
}


def install_command(extra: str) -> str:
    """What a user types to get an extra. No package index has mxep, so the command installs from a checkout.

    >>> install_command("parquet")
    'pip install ".[parquet]" in the checkout of mxep'
    """
    assert extra in EXTRAS, extra
    return f'pip install ".[{extra}]" in the checkout of mxep'
