"""Documents to token windows: held-out split, and the iterator that training and resuming share.

The order of the training windows is a function of (seed, number of the sequence) alone.  Position and sharding are therefore one
integer: rank r of W ranks takes sequences r*B .. r*B+B-1 of every W*B, and a run resumes exactly from the count of sequences that
all ranks have seen, on any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxep.models.loss import IGNORE
from mxep.train.documents import TEXT_FIELD
from mxep.train.sources import read_documents
from mxep.train.tokenizer import ByteTokenizer as ByteTokenizer  # its place before there were others
from mxep.train.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Two token streams, documents in a fixed order with a separator after each.

    Attributes:
        train, held_out: token ids; no document is in both, not even as a copy.
        num_train_documents, num_held_out_documents: how many documents each stream holds.
        held_out_bytes: UTF-8 bytes of the held-out text, and one for each document's end.
        fingerprint: hash of everything above; two corpora with the same one give the same batches.
    """

    train: np.ndarray
    held_out: np.ndarray
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


def split_documents(documents: Sequence[bytes], held_out_share: float) -> tuple[list[bytes], list[bytes]]:
    """(training, held-out) documents by the hash of their content, order kept.

    Where the hash would leave one side empty, the document with the smallest hash is held out; a corpus of a single document
    gives its last `held_out_share`, cut at a line's end where there is one.
    """
    shares = [document_share(document) for document in documents]
    held_out = [document for document, share in zip(documents, shares, strict=True) if share < held_out_share]
    train = [document for document, share in zip(documents, shares, strict=True) if share >= held_out_share]
    if train and held_out:
        return train, held_out
    if len(set(documents)) == 1:
        text = documents[0]
        cut = int(len(text) * (1 - held_out_share))
        cut = text.rfind(b"\n", cut // 2, cut) + 1 or cut
        return [text[:cut]], [text[cut:]]
    smallest = min(shares)
    held_out = [document for document, share in zip(documents, shares, strict=True) if share == smallest]
    return [document for document, share in zip(documents, shares, strict=True) if share != smallest], held_out


def load_corpus(data: Sequence[str], tokenizer: Tokenizer, held_out_share: float = 0.02, field: str = TEXT_FIELD) -> Corpus:
    """Read and split what `mxep.train.sources.read_documents` finds.

    Raises:
        ValueError: see `read_documents`; or a share outside (0, 0.5].
    """
    if not 0 < held_out_share <= 0.5:
        raise ValueError(f"data: held_out_share={held_out_share}, want more than 0 and at most 0.5")
    train, held_out = split_documents(read_documents(data, field), held_out_share)
    streams = [tokenizer.encode_all(documents) for documents in (train, held_out)]
    digest = hashlib.blake2b(digest_size=16)
    for stream in streams:
        digest.update(len(stream).to_bytes(8, "big"))
        digest.update(stream.tobytes())
    held_out_bytes = sum(len(document) + 1 for document in held_out)
    return Corpus(streams[0], streams[1], len(train), len(held_out), held_out_bytes, digest.hexdigest())


class TrainingWindows:
    """Endless, sharded, exactly resumable batches of (inputs, labels), each (B, S) int64; labels are the next tokens.

    Each epoch cuts the stream into windows of S + 1 tokens that overlap by one, from a start of its own below S, and goes through
    them in an order of its own; both follow from (seed, epoch).

    Args:
        stream: token ids.
        seq_len: S, tokens a sequence.
        batch: B, sequences of this rank a batch.
        rank, world: which of how many data-parallel ranks this is.
        seed: of the order.

    Raises:
        ValueError: the stream is shorter than one window.
    """

    def __init__(self, stream: np.ndarray, seq_len: int, batch: int, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        if len(stream) < seq_len + 1:
            raise ValueError(f"data: {len(stream)} tokens of training text, want at least seq_len + 1 = {seq_len + 1}; lower --seq-len")
        self.stream, self.seq_len, self.batch = stream, seq_len, batch
        self.rank, self.world, self.seed = rank, world, seed
        self.sequences = 0  # seen by all ranks together
        self.windows = max((len(stream) - seq_len) // seq_len, 1)  # of an epoch, whatever its start
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._start = 0

    def state_dict(self) -> dict[str, Any]:
        """{"sequences": seen by all ranks, "seed": of the order}."""
        return {"sequences": self.sequences, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Raises ValueError when it belongs to another order."""
        if state.get("seed") != self.seed:
            raise ValueError(f"data: the position belongs to seed {state.get('seed')}, this run has seed {self.seed}")
        self.sequences = int(state["sequences"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This rank's next batch: inputs (B, S), labels (B, S), int64."""
        first = self.sequences + self.rank * self.batch
        rows = torch.from_numpy(np.stack([self.window(first + i) for i in range(self.batch)]).astype(np.int64))
        self.sequences += self.world * self.batch
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def window(self, sequence: int) -> np.ndarray:
        """Tokens (S + 1,) of the training sequence with this number, counted over all ranks and epochs."""
        epoch, place = divmod(sequence, self.windows)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            spare = len(self.stream) - (self.windows * self.seq_len + 1)
            self._start = int(random.integers(min(spare, self.seq_len - 1) + 1))
            self._order = random.permutation(self.windows)
            self._epoch = epoch
        start = self._start + int(self._order[place]) * self.seq_len
        return self.stream[start : start + self.seq_len + 1]


def held_out_batches(
    stream: np.ndarray, seq_len: int, batch: int, max_tokens: int, rank: int = 0, world: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Held-out (inputs, labels), each (B, S) int64: the same windows whatever the number of ranks, shared out evenly.

    At most `max_tokens` targets, from windows spread over the whole stream.  Every rank gets the same number of batches (expert
    parallelism needs all of them in every forward); what is not there is padded with labels IGNORE.
    """
    windows = max(-(-(len(stream) - 1) // seq_len), 1)
    wanted = max(min(windows, max_tokens // seq_len), 1)
    chosen = np.arange(wanted) * windows // wanted
    batches = -(-wanted // (batch * world))
    result = []
    for index in range(batches):
        inputs = torch.zeros(batch, seq_len, dtype=torch.int64)
        labels = torch.full((batch, seq_len), IGNORE, dtype=torch.int64)
        for row in range(batch):
            place = (index * world + rank) * batch + row
            if place >= wanted:
                continue
            start = int(chosen[place]) * seq_len
            tokens = torch.from_numpy(stream[start : start + seq_len + 1].astype(np.int64))
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = tokens[1:]
        result.append((inputs, labels))
    return result
