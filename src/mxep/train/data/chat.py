"""Chat data: a row's messages become token ids through the tokenizer's chat template, with marks on the tokens that are trained on.

A conversation is a document like any other: it is held out by a hash of its content, concatenated, cut into sequences and kept in token
files.  Its bytes are its ids as little-endian uint32.  `mxep.train.data.corpus.NO_TARGET` is set in ids that are no target.  Imports no
torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mxep.extras import install_command
from mxep.train.data.corpus import NO_TARGET
from mxep.train.data.text_files import TEXT_FIELD
from mxep.train.data.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer, hash_of

MESSAGES_FIELD = "messages"
_PAIR = ("prompt", "completion")
_TOOLS, _VALUES = "tools", "chat_template_kwargs"  # further fields, as TRL reads them
_RESERVED = {  # arguments of `apply_chat_template`
    *("self", "messages", "conversation", "chat_template", "generation_prompt", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "tokenizer_kwargs", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask"),
}
_ASSISTANT, _TOOL = "assistant", "tool"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "\ue000"  # a private-use character: an answer that no conversation has


class ChatTemplate:
    """The chat template of a tokenizer's folder, run by transformers.

    Args:
        tokenizer: of the run.

    Raises:
        ValueError: the tokens are bytes, transformers is missing or does not read the folder, or there is no template.

    Attributes:
        template: in Jinja; by name where there are several, of which "tool_use" is for rows with tools.
        special_tokens: that it may name, and as "added" those of the vocabulary that only other files of the folder make tokens of text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, FileTokenizer) or tokenizer.file.name != TOKENIZER_FILE:
            got = f"{tokenizer.unit}s" if not isinstance(tokenizer, FileTokenizer) else str(tokenizer.file)
            raise ValueError(f"chat: got tokens of {got}, want --tokenizer with the folder of a {TOKENIZER_FILE} and its chat template")
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise ValueError(f"chat: chat templates need the transformers library; {install_command('transformers')}") from error
        folder = tokenizer.file.parent
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            self._tokenizer.get_chat_template()  # raises where there is none
            self.template: str | dict[str, str] = self._tokenizer.chat_template
        except Exception as error:  # of many kinds, for files that it does not read
            raise ValueError(f"chat: {folder} has no chat template that transformers reads: {type(error).__name__}: {error}") from error
        self.special_tokens: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        known, padding = tokenizer.vocabulary(), self._tokenizer.pad_token  # which no text holds
        added = self._tokenizer.get_added_vocab().items()
        if more := {name: token for name, token in added if known.get(name) != token and name != padding}:
            name, token = next(iter(more.items()))
            raise ValueError(
                f"chat: transformers has tokens that are not in {tokenizer.file}, {name!r} as {token} first ({len(more)} in all), want all "
                "tokens in that file; save the tokenizer by transformers' save_pretrained, which writes them there"
            )
        added_here = {token: str(text) for token, text in self._tokenizer.added_tokens_decoder.items() if str(text) != padding}
        if by_others := sorted(added_here[token] for token in added_here.keys() - tokenizer.added()):
            self.special_tokens["added"] = by_others

    def render(self, messages: Sequence[dict[str, Any]], generation_prompt: bool = False, **values: Any) -> str:
        """The conversation as text; with `generation_prompt`, up to where the assistant's next message begins.

        Args:
            values: what else the template reads, such as `tools`.

        Raises:
            ValueError: the template failed.
        """
        with _template_errors():
            return str(
                self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt, **values)
            )

    def encode(self, messages: Sequence[dict[str, Any]], generation_prompt: bool = False, **values: Any) -> list[int]:
        """Ids of `render`; the names of special tokens are special tokens, in the messages as well."""
        return list(self._tokenizer(self.render(messages, generation_prompt, **values), add_special_tokens=False)["input_ids"])

    def end_of_turn(self) -> set[int]:
        """The last special token that the template puts after an assistant's content, which need not be EOS; empty if there is none."""
        asked = {"role": "user", "content": "a"}
        ends = _common_end(*(self.render([asked, {"role": _ASSISTANT, "content": content}]) for content in ("a", _PROBE)))
        special = set(self._tokenizer.get_added_vocab().values())
        return set([token for token in self._tokenizer(ends, add_special_tokens=False)["input_ids"] if token in special][-1:])

    def encode_with_mask(self, messages: Sequence[dict[str, Any]], **values: Any) -> tuple[list[int], list[bool]]:
        """(ids, whether the assistant wrote each token) of a whole conversation.

        A template with `{% generation %}` marks the assistant's tokens itself. For others they are those between the prompt that asks for
        the message and the end of what the template puts after the message's content.

        Args:
            values: as in `render`.

        Raises:
            ValueError: the template failed, or has no marks and the assistant's messages cannot be found.
        """
        if _GENERATION.search(self._tokenizer.get_chat_template(tools=values.get(_TOOLS))):
            with _template_errors():
                found = self._tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True, **values)
            return list(found["input_ids"]), [bool(trained) for trained in found["assistant_masks"]]
        text = self.render(messages, **values)
        spans = [self._span(messages, index, text, values) for index, message in enumerate(messages) if message["role"] == _ASSISTANT]
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = found["offset_mapping"]  # a token that begins in the prompt, " yes" after "assistant: ", is the answer's as well
        return list(found["input_ids"]), [any(begin < end and stop > first for first, end in spans) for begin, stop in offsets]

    def _span(self, messages: Sequence[dict[str, Any]], index: int, text: str, values: dict[str, Any]) -> tuple[int, int]:
        """(first, end) in `text`, the whole conversation, of the assistant's message `index`.

        The message is replaced to see what follows it: templates may render a last message differently, as Qwen3's does.
        """
        until = [*messages[:index], messages[index]]
        other = {**messages[index], "content": _PROBE}
        prompt = self.render(messages[:index], generation_prompt=True, **values) if index else None
        after = _common_end(text, self.render([*messages[:index], other, *messages[index + 1 :]], **values))
        closing = _common_end(self.render(until, **values), self.render([*messages[:index], other], **values))
        content_end = len(text) - len(after)
        if prompt is None or not text.startswith(prompt) or not after.startswith(closing):
            raise ValueError(
                f"the chat template does not show where the assistant's message {index + 1} is; want one with {{% generation %}} around it"
                + ("" if index else ", or a conversation that begins with another role")
            )
        return len(prompt), content_end + len(closing)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turns whatever a template raises into a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error


def _common_end(one: str, other: str) -> str:
    """
    >>> _common_end("you.<end>", "me.<end>")
    '.<end>'
    """
    pairs = zip(reversed(one), reversed(other), strict=False)
    length = next((equal for equal, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return one[len(one) - length :]


class ChatRows:
    """Reads rows of conversations as documents (`mxep.train.data.text_files.RowReader`), and encodes those documents for a corpus.

    A row has `messages`, a list of {"role": ..., "content": ...}, or strings `prompt` and `completion`: a message of the user and one of
    the assistant.  `tools`, a list, and the values of `chat_template_kwargs` go to the template as they are.

    Args:
        tokenizer: of the run.
        assistant_only_loss: only the assistant's tokens are targets; else all are.
        field: the messages' name; "text", the default of --data-field, is "messages".

    Raises:
        ValueError: what `ChatTemplate` raises.
    """

    dtype = np.dtype(np.uint32)
    marks_ends = False  # a template need not
    text_files = False
    optional_columns = (_TOOLS, _VALUES)

    def __init__(self, tokenizer: Tokenizer, assistant_only_loss: bool = True, field: str = TEXT_FIELD) -> None:
        self.template = ChatTemplate(tokenizer)
        self.name, self.assistant_only_loss = tokenizer.name, assistant_only_loss
        self.field = MESSAGES_FIELD if field == TEXT_FIELD else field
        facts = ["chat 4", tokenizer.fingerprint, self.template.template, self.template.special_tokens, assistant_only_loss]
        self.fingerprint = hash_of(facts)

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document, uint32 (tokens,)."""
        return [np.frombuffer(document, dtype="<u4").astype(self.dtype) for document in documents]

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The columns of a conversation that a table has."""
        others = [name for name in self.optional_columns if name in names]
        if self.field in names:
            return [self.field, *others]
        if set(_PAIR) <= set(names):
            return [*_PAIR, *others]
        raise ValueError(f"data: {where} has {self._wanted()}, got {list(names)}; --data-field names the messages")

    def document(self, row: object, where: str) -> bytes:
        """The ids of one row's conversation, empty if the template shows none of it."""
        messages, values = self._messages(row, where), _template_values(row, where)
        try:
            if self.assistant_only_loss:
                ids, trained = self.template.encode_with_mask(messages, **values)
            else:
                ids = self.template.encode(messages, **values)
                trained = [True] * len(ids)
        except ValueError as error:
            raise ValueError(f"data: {where}: {error}") from error
        tokens = np.array(ids, dtype="<u4")  # of an empty list, too
        return np.where(np.array(trained, dtype=bool), tokens, tokens | np.uint32(NO_TARGET)).astype("<u4").tobytes()

    def _wanted(self) -> str:
        return f"neither {self.field!r} nor {' and '.join(map(repr, _PAIR))}"

    def _messages(self, row: object, where: str) -> list[dict[str, Any]]:
        """The messages of a row, without keys that are None."""
        if not isinstance(row, dict):
            raise ValueError(f"data: {where} is {type(row).__name__}, want an object with {self.field!r}")
        if self.field not in row:
            if not set(_PAIR) <= set(row):
                raise ValueError(f"data: {where} has {self._wanted()}, got fields {sorted(row)}; --data-field names the messages")
            pair = dict(zip(("user", _ASSISTANT), (row[name] for name in _PAIR), strict=True))
            if wrong := [name for name in _PAIR if not isinstance(row[name], str)]:
                raise ValueError(
                    f"data: {where}: field {wrong[0]!r} is {type(row[wrong[0]]).__name__}, want a string; put a list into 'messages'"
                )
            return [{"role": role, "content": content} for role, content in pair.items()]
        found = row[self.field]
        if not isinstance(found, list) or not found:
            got = "empty" if found == [] else type(found).__name__
            raise ValueError(f"data: {where}: {self.field!r} is {got}, want a list of messages")
        messages = []
        for number, message in enumerate(found, 1):
            if not isinstance(message, dict):
                raise ValueError(f"data: {where}: message {number} is {type(message).__name__}, want an object with a role and a content")
            given = {key: value for key, value in message.items() if value is not None}
            if not isinstance(given.get("role"), str):
                raise ValueError(f"data: {where}: message {number} has no role, got {sorted(given)}; want a string such as 'user'")
            if "content" not in given and len(given) == 1:
                raise ValueError(f"data: {where}: message {number} of role {given['role']!r} has no content")
            if "content" in given:
                given["content"] = content = _joined(given["content"])
                if not isinstance(content, str) and given["role"] != _TOOL:  # whose results may be objects, and are for the template
                    wanted = 'a string, or parts {"type": "text", "text": ...}'
                    raise ValueError(f"data: {where}: message {number} has content {str(content)[:80]!r}, want {wanted}")
            messages.append(given)
        return messages


def _template_values(row: Any, where: str) -> dict[str, Any]:
    """What a row gives its template beside the messages; `tools` may be JSON, since a table's columns have one type."""
    values, tools = row.get(_VALUES) or {}, row.get(_TOOLS) or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or []
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {where}: {_TOOLS!r} is no JSON: {error}") from error
    for name, value, kind in ((_VALUES, values, dict), (_TOOLS, tools, list)):
        if not isinstance(value, kind):
            raise ValueError(f"data: {where}: {name!r} is {type(value).__name__}, want {'an object' if kind is dict else 'a list'}")
    if reserved := sorted(values.keys() & _RESERVED):
        raise ValueError(f"data: {where}: {_VALUES!r} has {', '.join(reserved)}, which the trainer decides; leave it out")
    return {**values, _TOOLS: tools} if tools else values


def _joined(content: Any) -> Any:
    """A list of parts of text as one string, since many templates leave out a content that is no string; all else as it is.

    >>> _joined([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])
    'a b'
    """
    parts = content if isinstance(content, list) else [None]
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"]
    whole = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content
