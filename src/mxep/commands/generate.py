"""`mxep generate`: continues a prompt with the model of a run or of a Hugging Face folder, to see what was learned.

Each token is one forward over all tokens before it: there is no KV cache, so a token costs more the longer the text is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mxep.models.decoder import Decoder
    from mxep.train.data.tokenizer import Tokenizer

_INTERRUPTED = 130  # exit status after Ctrl-C, as a shell gives it


@dataclass(frozen=True)
class GenerateConfig:
    """Sample text from a trained model: one process, high precision (bf16 on a GPU, float32 on a CPU), no KV cache."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, whose newest checkpoint is taken, of one checkpoint, or of a Hugging Face model with its tokenizer.json."""
    prompt: Annotated[Positional[str], tyro.conf.arg(metavar="PROMPT")] = ""
    """Text to continue; default: the beginning of a document."""
    max_new_tokens: int = 64
    """Tokens to sample, at most; the end of a document or of the assistant's turn (EOS) ends them earlier, and so do the tokens that a
    Hugging Face folder names as its ends."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token each time."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    seed: int = 0
    """Seed of the sampling."""
    chat: bool = False
    """The prompt is a user's message, written by the tokenizer's chat template; the assistant's answer is sampled."""
    step: int | None = None
    """The run's checkpoint after this step, not the newest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto uses a GPU if there is one."""

    def check(self) -> None:
        """Raise ValueError for values that are not possible."""
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens={self.max_new_tokens}, want 1 or more")
        if not self.temperature >= 0:
            raise ValueError(f"--temperature={self.temperature}, want 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p={self.top_p}, want more than 0 and at most 1")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"--seed={self.seed}, want a number of at most 64 bits")
        if self.chat and not self.prompt:
            raise ValueError("--chat without a prompt, want the user's message")


def command(argv: Sequence[str]) -> int:
    """Run `mxep generate <argv>`; returns the exit status. Raises ValueError for wrong arguments."""
    config = tyro.cli(GenerateConfig, args=list(argv), prog="mxep generate")
    status = 0
    try:
        for piece in stream(config):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    print()
    return status


def stream(config: GenerateConfig) -> Iterator[str]:
    """The prompt (not in a chat) and what the model makes of it, in pieces as they are sampled; a line about the model goes to stderr.

    Raises:
        ValueError: an option that is not possible, no model or tokenizer there, a chat without a template, a prompt longer than the model's
            sequences.
    """
    import torch

    from mxep.device import device_type_of
    from mxep.train.data.chat import ChatTemplate

    config.check()
    device = torch.device(device_type_of(config.device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer, what, ends = _load(config, device, dtype)
    stop = {tokenizer.end, *ends}
    if config.chat:
        template = ChatTemplate(tokenizer)
        ids = template.encode([{"role": "user", "content": config.prompt}], generation_prompt=True)
        stop |= template.end_of_turn()
    else:
        ids = [*tokenizer.first, *tokenizer.encode(config.prompt.encode()).tolist()] or [tokenizer.end]
    longest = model.config.max_seq_len
    if len(ids) >= longest:
        raise ValueError(f"generate: a prompt of {len(ids)} tokens, want fewer than the model's {longest}")
    if (last := max(ids)) >= model.config.vocab_size:
        raise ValueError(
            f"generate: the prompt has token {last} of the tokenizer of {what}, want one below the model's vocab_size "
            f"{model.config.vocab_size}; put the model's own tokenizer there"
        )
    print(f"{what}, {device.type}, {str(dtype).removeprefix('torch.')}, no KV cache", file=sys.stderr)
    shown = len(tokenizer.decode(ids))
    if not config.chat:
        yield config.prompt
    limit, generator = min(config.max_new_tokens, longest - len(ids)), torch.Generator().manual_seed(config.seed)
    tokens = torch.tensor([ids], device=device)
    for _ in range(limit):
        with torch.no_grad():
            logits = model(tokens)[0, -1, : tokenizer.vocab_size]  # the model may have more words
        logits = logits.float().cpu()  # where draws are the same for every device
        if not logits.isfinite().all():
            raise ValueError(f"generate: {what} has logits that are no finite numbers; take an earlier checkpoint (--step)")
        token = draw_token(logits, config.temperature, config.top_p, generator)
        if token in stop:
            break
        tokens = torch.cat([tokens, tokens.new_tensor([[token]])], dim=1)
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else a character whose other bytes are in the next tokens
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]
    if limit < config.max_new_tokens and len(ids) == longest:
        print(f"\nended at {longest} tokens, the model's longest sequence", file=sys.stderr)


def _load(config: GenerateConfig, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, Tokenizer, str, set[int]]:
    """(model, its tokenizer, a line about both, further tokens that end a text)."""
    from mxep.models.huggingface import published_ends
    from mxep.models.huggingface_files import INDEX, SINGLE
    from mxep.train.data.tokenizer import load_tokenizer
    from mxep.train.loaded_model import load_model, load_published_model

    if (config.run / INDEX).exists() or (config.run / SINGLE).exists():
        if config.step is not None:
            raise ValueError(f"--step={config.step}: {config.run} is a Hugging Face model, want the folder of a run")
        return load_published_model(config.run, device, dtype), load_tokenizer(config.run), f"{config.run}", published_ends(config.run)
    loaded = load_model(config.run, config.step, device, dtype, recipe="bf16")
    if loaded.tokenizer is None:
        raise ValueError(f"generate: the tokenizer of {config.run} is gone or another one, want {loaded.config.tokenizer} as it was")
    return loaded.model, loaded.tokenizer, f"{loaded.checkpoint} (step {loaded.step})", set()


def draw_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token by its logits (V,) float32.

    >>> import torch
    >>> logits, generator = torch.tensor([0.5, 0.3, 0.2]).log(), torch.Generator().manual_seed(0)
    >>> {draw_token(logits, 1.0, 0.6, generator) for _ in range(99)}, draw_token(logits, 0.0, 1.0, generator)
    ({0, 1}, 0)
    """
    import torch

    if temperature == 0:
        return int(logits.argmax())
    below = (logits - logits.max()).double() / temperature  # float32 has no temperatures below 1e-45
    likely, tokens = torch.softmax(below.float(), dim=0).sort(descending=True)
    likely[1:][likely.cumsum(0)[:-1] >= top_p] = 0.0  # the most likely one is always left
    return int(tokens[torch.multinomial(likely, 1, generator=generator)])
