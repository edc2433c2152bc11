"""A small tokenizer with a chat template, and conversations, for tests of what reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ALPHABET = "abcdefghijklmnopqrstuvwxyz ABC.,?!<>/\n"
# Like Qwen3's: the last message of the assistant has a block that earlier ones do not have, and nothing marks its tokens.
QWEN_LIKE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
WITH_TOOLS = (  # shows tools, a greeting that the row gives, and calls of tools
    "{%- if tools %}{{- 'tools ' + tools[0].name + '\n' }}{%- endif %}{{- greeting | default('') }}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content | default('') }}"
    "{%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
OPEN_ENDED = (  # like GLM's: nothing follows an answer
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{{- m.content }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (  # refuses system messages
    "{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system message here') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_chat_tokenizer(folder: Path, template: str | None = QWEN_LIKE) -> Path:
    """A tokenizer of single characters of ALPHABET, with the template, in `folder`."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: index for index, character in enumerate(ALPHABET)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conversations(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Different conversations of two to six messages."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices("abcdefgh ", k=draw.randint(2, 12)))

    return [[{"role": role, "content": text()} for _ in range(draw.randint(1, 3)) for role in ("user", "assistant")] for _ in range(count)]


def write_conversations(path: Path, rows: list[list[dict[str, Any]]]) -> Path:
    """One row of `messages` for each conversation."""
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path
