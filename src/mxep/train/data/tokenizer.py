"""Tokenizers: bytes, or a tokenizer.json of Hugging Face's `tokenizers` library, with separators between documents. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from mxep.extras import install_command
from mxep.json_files import read_json_object, typed
from mxep.train.data.text_files import cut_text

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Names of the special token that ends a document, if no file names it: the first one that the vocabulary has.
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>", "<eos>")
_PIECE_BYTES = 1 << 22  # encoded at once; the library needs some hundred bytes per token
_Text = TypeVar("_Text", str, bytes)


class Encoder(Protocol):
    """What a corpus needs to know of a tokenizer.

    Attributes:
        name: for messages.
        dtype: of the ids.
        fingerprint: equal for encoders that give the same ids.
        marks_ends: whether the ids of a corpus tell where its documents end, as by a separator.
    """

    name: str
    dtype: np.dtype
    fingerprint: str
    marks_ends: bool

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document with its separators, `dtype` (tokens,)."""


class Tokenizer(Encoder, Protocol):
    """The tokenizer interface of the trainer.

    Attributes:
        unit: the word for one token, for messages.
        vocab_size: the highest id plus 1.
        first: ids that begin each document: BOS, or none.
        end: the id that ends each document: EOS, or the BOS of the next one.
    """

    unit: str
    vocab_size: int

    @property
    def first(self) -> list[int]: ...

    @property
    def end(self) -> int: ...

    def encode(self, document: bytes) -> np.ndarray:
        """UTF-8 -> ids without separators, `dtype` (tokens,)."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids -> text."""


class ByteTokenizer:
    """One token per UTF-8 byte; id 0 (NUL, which is never in a document) separates documents.

    >>> ByteTokenizer().encode(b"ab").tolist()
    [97, 98]
    """

    name = "bytes"
    unit = "byte"
    vocab_size = 256
    dtype = np.dtype(np.uint8)
    marks_ends = True
    fingerprint = "bytes"
    separator = end = 0

    @property
    def first(self) -> list[int]:
        """No id begins a document."""
        return []

    def encode(self, document: bytes) -> np.ndarray:
        """Bytes -> ids, uint8 (number of bytes,)."""
        return np.frombuffer(document, dtype=np.uint8)

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document with a separator after it, uint8 (tokens,)."""
        return [self.encode(document + bytes([self.separator])) for document in documents]

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids -> text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json, run by the `tokenizers` library.

    EOS follows each document. BOS precedes it if tokenizer_config.json has `add_bos_token`, or if there is no EOS. tokenizer_config.json or
    special_tokens_map.json next to the file names both; otherwise a special token with a usual name is EOS. Documents are encoded in pieces
    of at most 4 MiB, cut at the end of a line if possible. The name of a special token in a document is plain text.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        ValueError: there is no such file or it is not readable, neither EOS nor BOS is named, or the library is missing.
    """

    unit = "token"
    marks_ends = True

    def __init__(self, path: Path) -> None:
        self.file = _tokenizer_file(path)
        vocabulary = vocabulary_fingerprint(self.file)  # also checks that the file is JSON of limited size
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"tokenizer: {path} needs the tokenizers library; {install_command('tokenizers')}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.file))
        except BaseException as error:  # the library raises Exception; a panic of its Rust code is a BaseException
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"tokenizer: {self.file} is not a tokenizer that the tokenizers library reads: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # as text: "<|endoftext|>" in a document does not end it
        self.name = str(path)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise ValueError(f"tokenizer: {self.file}: model.vocab is empty, want tokens")
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self._settings = {path: _read_json(path) for path in map(self.file.with_name, SETTINGS_FILES)}
        self._special = self._special_in_settings()
        self.eos = self.special_token("eos_token")
        self.bos = self.special_token("bos_token")
        if self.eos is None and self.bos is None:
            self.eos = self._usual_end()
        first, adds_bos = self.file.with_name(SETTINGS_FILES[0]), False
        if (named := self._settings[first].get("add_bos_token")) is not None:
            adds_bos = typed(named, bool, f"tokenizer: {first}: add_bos_token")
        if self.eos is not None and not adds_bos:
            self.bos = None
        separators = f"{self.bos} {self.eos}"
        self.fingerprint = hashlib.blake2b(f"{vocabulary} {separators}".encode(), digest_size=16).hexdigest()

    @property
    def first(self) -> list[int]:
        """BOS, or none."""
        return [] if self.bos is None else [self.bos]

    @property
    def end(self) -> int:
        """EOS, or the BOS of the next document."""
        found = self.bos if self.eos is None else self.eos
        assert found is not None  # one of them ends a document
        return found

    def vocabulary(self) -> dict[str, int]:
        """Id of every token, added ones too."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def added(self) -> set[int]:
        """Ids of the tokens that text never has in parts."""
        return set(self._tokenizer.get_added_tokens_decoder())

    def encode(self, document: bytes) -> np.ndarray:
        """UTF-8 -> ids without EOS and BOS, uint16 or uint32 (tokens,)."""
        return np.concatenate([np.array([], dtype=self.dtype), *self._encode(_pieces(document))])

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids -> text, without the special tokens of all files."""
        return str(self._tokenizer.decode([int(token) for token in tokens if int(token) not in self._special]))

    def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each document with its BOS and EOS, if the tokenizer has them; uint16 or uint32 (tokens,)."""
        before, after = (np.array([] if special is None else [special], dtype=self.dtype) for special in (self.bos, self.eos))
        pieces = [list(_pieces(document)) for document in documents]
        encoded = self._encode(piece for parts in pieces for piece in parts)
        return [np.concatenate([before, *(next(encoded) for _ in parts), after]) for parts in pieces]

    def _encode(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Ids of each piece, `dtype` (tokens,); in batches that limit the library's memory."""
        for group in batches(pieces, _PIECE_BYTES):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=self.dtype)

    def special_token(self, kind: str) -> int | None:
        """The id of "eos_token", "bos_token" or "pad_token"; None if no file names it.

        Raises:
            ValueError: the vocabulary lacks the token.
        """
        path = next((path for path, found in self._settings.items() if found.get(kind) is not None), None)
        if path is None:
            return None
        named, key = self._settings[path][kind], kind
        if isinstance(named, dict):
            named, key = named.get("content"), f"{kind}.content"
        text = typed(named, str, f"tokenizer: {path}: {key}")
        token = self._tokenizer.token_to_id(text)
        if token is None:
            raise ValueError(f"tokenizer: {self.file} has no token {text[:200]!r}, which {path} calls its {kind}")
        return token

    def _special_in_settings(self) -> set[int]:
        """Ids of the tokens that the files next to this one call special, whatever else these files have wrong."""
        names: list[Any] = []
        for found in self._settings.values():
            names += [value for key, value in found.items() if key.endswith("_token")]
            more, added = found.get("additional_special_tokens"), found.get("added_tokens_decoder")
            names += more if isinstance(more, list) else []
            described = added.values() if isinstance(added, dict) else []
            names += [token for token in described if isinstance(token, dict) and token.get("special") is True]
        texts = [name.get("content") if isinstance(name, dict) else name for name in names]
        ids = {self._tokenizer.token_to_id(text) for text in texts if isinstance(text, str)}
        return {token for token in ids if token is not None}

    def text_of(self, token: int) -> str:
        """The vocabulary's text of a token."""
        return str(self._tokenizer.id_to_token(token))

    def _usual_end(self) -> int:
        special = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        for name in _USUAL_ENDS:
            if name in special:
                return special[name]
        raise ValueError(
            f"tokenizer: nothing says which token of {self.file} ends a document; want a {SETTINGS_FILES[0]} next to it with an eos_token"
        )


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a file or folder; None: of bytes. Raises ValueError as `FileTokenizer` does."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def vocabulary_fingerprint(file: Path) -> str:
    """Hash of the parts of a tokenizer.json that determine ids; layout, padding and truncation do not count."""
    return hash_of({key: value for key, value in _read_json(file).items() if key not in ("padding", "truncation")})


def hash_of(values: Any) -> str:
    """Hash of JSON values; the order of an object's keys does not count."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_origin(tokenizer: Tokenizer, folder: Path) -> str:
    """A line about how the run's tokenizer relates to the weights in `folder` (--init-from).

    Raises:
        ValueError: the folder has a tokenizer, and the run uses a different one from a file.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return f"the data's tokens are {tokenizer.unit}s, whatever those were trained on"
    theirs = folder / TOKENIZER_FILE
    if not theirs.is_file():
        return f"the data's tokens are those of {tokenizer.name}, whatever those were trained on"
    if vocabulary_fingerprint(theirs) != vocabulary_fingerprint(tokenizer.file):
        raise ValueError(f"--init-from={folder} has another tokenizer than --tokenizer={tokenizer.name}; use --tokenizer {folder}")
    return "the data's tokens are those of its tokenizer"


def _tokenizer_file(path: Path) -> Path:
    path = path.expanduser()
    if not path.exists():
        raise ValueError(f"tokenizer: {path} does not exist, want a tokenizer.json or its folder; without --tokenizer tokens are bytes")
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    other = (
        "; its tokenizer.model is SentencePiece's, which the transformers library converts" if (path / "tokenizer.model").exists() else ""
    )
    raise ValueError(f"tokenizer: {path} holds no {TOKENIZER_FILE}{other}")


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json_object(file, "tokenizer") if file.exists() else {}


def batches(texts: Iterable[_Text], size: int) -> Iterator[list[_Text]]:
    """Texts in lists of about `size` characters or bytes, at least one text each."""
    batch: list[_Text] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _pieces(document: bytes) -> Iterator[str]:
    """A document as text of at most _PIECE_BYTES each, at least one; see `cut_text`."""
    start = 0
    while start < max(len(document), 1):
        end = cut_text(document, start, _PIECE_BYTES)
        yield document[start:end].decode()
        start = max(end, 1)
