"""Documents to two token streams, training and held-out, batch by batch: in memory, or through whatever else stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mxep.train.tokenizer import Tokenizer, batches

TRAIN, HELD_OUT = 0, 1
_BATCH_BYTES = 1 << 22  # of text, tokenised at once
_BLOCK_BYTES = 1 << 26  # of a stream, hashed at once
Split = Callable[[Iterable[bytes]], tuple[list[bytes], list[bytes]]]  # documents -> (training, held-out)


@dataclass(frozen=True)
class Corpus:
    """Two token streams, documents in a fixed order with a separator after each.

    Attributes:
        train, held_out: token ids; no document is in both, not even as a copy.
        train_starts, held_out_starts: the index in its stream of each document's first token, int64 (documents,), ascending.
        num_train_documents, num_held_out_documents: how many documents each stream holds.
        held_out_bytes: UTF-8 bytes of the held-out text, and one for each document's end.
        fingerprint: hash of the two streams; two corpora with the same one give the same batches.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_starts: np.ndarray
    held_out_starts: np.ndarray
    num_train_documents: int
    num_held_out_documents: int
    held_out_bytes: int
    fingerprint: str

    @property
    def tokens_per_byte(self) -> float:
        """Of the held-out text; 1 when tokens are bytes."""
        return len(self.held_out) / self.held_out_bytes


def document_share(document: bytes) -> float:
    """A number in [0, 1) that depends on the document's content alone, evenly spread."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big") / 2**64


def split_by_share(documents: Iterable[bytes], held_out_share: float) -> Split:
    """How to split these documents by the hash of their content; reads as many of them as it must to know.

    Where the hash would leave one side empty, the document with the smallest hash is held out; a corpus of a single document
    gives its last `held_out_share`, cut at a line's end where there is one, else between two characters.
    """
    smallest, largest = 1.0, 0.0
    for document in documents:
        share = document_share(document)
        smallest, largest = min(smallest, share), max(largest, share)
        if smallest < held_out_share <= largest:
            return lambda batch: _divided(batch, lambda share: share < held_out_share)
    if smallest != largest:
        return lambda batch: _divided(batch, lambda share: share == smallest)
    copies: list[bytes] = []

    def cut(batch: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
        """The two parts of the document at its first copy."""
        for text in batch:
            if copies:
                break
            copies.append(text)
            end = min(int(len(text) * (1 - held_out_share)), len(text) - 1)
            end = text.rfind(b"\n", end // 2, end) + 1 or end
            while text[end] & 0xC0 == 0x80:  # inside of a character
                end -= 1
            return [text[:end]], [text[end:]]
        return [], []

    return cut


def without(validation: Iterable[bytes]) -> Split:
    """How to keep documents out of the training that are in a validation set of its own."""
    known = {document_share(document) for document in validation}
    return lambda batch: ([document for document in batch if document_share(document) not in known], [])


def watched(documents: Iterable[bytes], tell: Callable[[str], None]) -> Iterator[bytes]:
    """These documents, with a text for people after every few MiB: for who reads them and writes nothing."""
    size = told = 0
    for count, document in enumerate(documents, 1):
        yield document
        size += len(document)
        if size - told >= _BATCH_BYTES:
            told = size
            tell(f"looked at {count:,} documents, {size / 2**20:,.0f} MiB of text")


def _divided(documents: Iterable[bytes], held_out: Callable[[float], bool]) -> tuple[list[bytes], list[bytes]]:
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for document in documents:
        sides[held_out(document_share(document))].append(document)
    return sides


class StreamWriter:
    """Tokenises documents into the two streams and counts them.

    Args:
        tokenizer: of both.
        store: takes TRAIN or HELD_OUT, the next ids of that stream, (tokens,), and where in the whole stream its documents begin,
            int64 (documents,).
        tell: takes a text for people after each batch.
    """

    def __init__(self, tokenizer: Tokenizer, store: Callable[[int, np.ndarray, np.ndarray], object], tell: Callable[[str], None]) -> None:
        self.tokenizer, self.store, self.tell = tokenizer, store, tell
        self.documents = [0, 0]
        self.nbytes = [0, 0]  # of the text, and one for each document's end
        self.tokens = [0, 0]

    def write(self, documents: Iterable[bytes], split: Split) -> None:
        """Add these documents, in this order, to the sides that `split` says."""
        for batch in batches(documents, _BATCH_BYTES):
            for side, part in enumerate(split(batch)):
                if not part:
                    continue
                ids = self.tokenizer.encode_all(part)
                tokens = np.concatenate(ids)
                ends = self.tokens[side] + np.cumsum([len(document) for document in ids], dtype=np.int64)
                self.store(side, tokens, np.concatenate([[self.tokens[side]], ends[:-1]]))
                self.documents[side] += len(part)
                self.nbytes[side] += sum(len(document) + 1 for document in part)
                self.tokens[side] += len(tokens)
            mib, count = sum(self.nbytes) / 2**20, sum(self.documents)
            self.tell(f"{count:,} documents, {mib:,.0f} MiB of text, {sum(self.tokens):,} tokens")

    def corpus(self, train: np.ndarray, held_out: np.ndarray, train_starts: np.ndarray, held_out_starts: np.ndarray) -> Corpus:
        """What was written, given what `store` made of it. Raises ValueError when a stream holds nothing."""
        if not len(train):
            raise ValueError("data: every document is in the validation set too, nothing is left to train on")
        fingerprint = _fingerprint((train, held_out), self.tell)
        counts = (self.documents[TRAIN], self.documents[HELD_OUT], self.nbytes[HELD_OUT])
        return Corpus(train, held_out, train_starts, held_out_starts, *counts, fingerprint)


def _fingerprint(streams: tuple[np.ndarray, np.ndarray], tell: Callable[[str], None]) -> str:
    """Hash of the ids of both."""
    digest = hashlib.blake2b(digest_size=16)
    for stream in streams:
        digest.update(len(stream).to_bytes(8, "big"))
        content = stream.view(np.uint8)
        for start in range(0, len(content), _BLOCK_BYTES):
            digest.update(content[start : start + _BLOCK_BYTES].data)
            if start:
                tell(f"checksum, {start / 2**20:,.0f} MiB of tokens")
    return digest.hexdigest()
