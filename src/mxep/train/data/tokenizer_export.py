"""Writes the tokenizer of a run as files that `transformers.AutoTokenizer` loads. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxep.json_files import read_json_object
from mxep.models.huggingface import MORE_TEMPLATES
from mxep.train.data.chat import ChatTemplate
from mxep.train.data.tokenizer import SETTINGS_FILES, TOKENIZER_FILE, ByteTokenizer, FileTokenizer

_CONFIG_FILE = SETTINGS_FILES[0]
_COPIED = (*SETTINGS_FILES[1:], "chat_template.jinja")
_ANY_CLASS = "PreTrainedTokenizerFast"  # of transformers, for any tokenizer.json
_BYTE_END = "<|endoftext|>"  # the separator's token in a tokenizer.json of bytes


@dataclass(frozen=True)
class PublishedTokenizer:
    """A tokenizer's files for a Hugging Face folder.

    Attributes:
        files: content by name; empty if there is no tokenizer to write.
        token_ids: of config.json: bos_token_id, eos_token_id, pad_token_id; empty if they are unknown.
        stop_ids: further tokens that end an answer.
        note: a line for the user.
    """

    files: dict[str, bytes]
    token_ids: dict[str, int | None]
    note: str
    stop_ids: tuple[int, ...] = ()


def publish_tokenizer(path: str | None, fingerprint: str, chat: bool = False) -> PublishedTokenizer:
    """The tokenizer that a run read from `path`. Nothing is written if it is gone or has changed since then.

    `eos_token_id` is the token that ends each document in training: EOS, or BOS of the next document if the tokenizer has no EOS.

    Args:
        chat: the run was trained on conversations, which end with what the chat template ends a turn with.
    """
    if path is None or fingerprint == ByteTokenizer.fingerprint:
        ids = {"bos_token_id": None, "eos_token_id": ByteTokenizer.separator, "pad_token_id": None}
        return PublishedTokenizer(_byte_files(), ids, "with a tokenizer of bytes")
    try:
        tokenizer = FileTokenizer(Path(path))
    except ValueError as error:
        return PublishedTokenizer({}, {}, f"without its tokenizer, which cannot be read any more: {error}")
    if tokenizer.fingerprint != fingerprint:
        return PublishedTokenizer({}, {}, f"without its tokenizer: {path} is another one than the run was trained with")
    try:
        pad = tokenizer.special_token("pad_token")
    except ValueError:  # training needs none
        pad = None
    bos, eos = tokenizer.special_token("bos_token"), tokenizer.eos
    folder = tokenizer.file.parent
    templates = (str(file.relative_to(folder)) for file in folder.glob(MORE_TEMPLATES))
    found = {name: folder / name for name in (_CONFIG_FILE, *_COPIED, *templates)}
    described = read_json_object(found[_CONFIG_FILE], "tokenizer") if found[_CONFIG_FILE].exists() else {}
    named = {name: tokenizer.text_of(token) for name, token in (("eos_token", eos), ("bos_token", bos)) if token is not None}
    added = {name: text for name, text in {"tokenizer_class": _ANY_CLASS, **named}.items() if described.get(name) is None}
    files = {name: file.read_bytes() for name, file in found.items() if file.is_file()}
    files[TOKENIZER_FILE] = tokenizer.file.read_bytes()
    if added:
        files[_CONFIG_FILE] = _json_bytes({**described, **added})
    ids = {"bos_token_id": bos, "eos_token_id": tokenizer.end, "pad_token_id": pad}
    note, stop = f"with its tokenizer {path}", set[int]()
    if chat:
        try:
            stop = ChatTemplate(tokenizer).end_of_turn() - {tokenizer.end}
        except ValueError as error:
            note += f", without what ends a turn, since its chat template cannot be read any more: {error}"
    return PublishedTokenizer(files, ids, note, tuple(sorted(stop)))


def _byte_files() -> dict[str, bytes]:
    """`ByteTokenizer` as a byte-level BPE without merges, in which the id of a byte is its value."""
    vocabulary = {_BYTE_END: ByteTokenizer.separator, **{_byte_level(byte): byte for byte in range(1, 256)}}
    end = {"id": ByteTokenizer.separator, "content": _BYTE_END, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"tokenizer_class": _ANY_CLASS, "eos_token": _BYTE_END, "clean_up_tokenization_spaces": False}
    return {TOKENIZER_FILE: _json_bytes(tokenizer), _CONFIG_FILE: _json_bytes(config)}


def _byte_level(byte: int) -> str:
    """The character for a byte in byte-level vocabularies (GPT-2's): the byte's own if it is visible, else one from U+0100 on.

    >>> _byte_level(65), _byte_level(32) == chr(0x120)
    ('A', True)
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [other for other in range(256) if other not in visible]
    return chr(byte if byte in visible else 256 + hidden.index(byte))


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
