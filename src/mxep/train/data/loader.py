"""Documents to token windows: where the tokens are kept, and the iterator that training and resuming share.

The order of the training windows is a function of (seed, number of the sequence) alone.  Position and sharding are therefore one
integer: rank r of W ranks takes sequences r*B .. r*B+B-1 of every W*B, and a run resumes exactly from the count of sequences that
all ranks have seen, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mxep.json_files import typed
from mxep.models.document_mask import PackedDocuments
from mxep.models.loss import IGNORE
from mxep.private_folders import cache_folder, make_private
from mxep.train.data.corpus import FORMAT, Corpus, StreamWriter, prepared, split_by_share, watched, without
from mxep.train.data.text_files import TEXT_FIELD, check_cache, find_sources, reading, stream_documents
from mxep.train.data.tokenizer import ByteTokenizer, Tokenizer

_IN_MEMORY_BYTES = 1 << 27  # of files whose bytes are the tokens; beyond, and with other tokenizers, tokens are kept in files


def load_corpus(
    data: Sequence[str],
    tokenizer: Tokenizer,
    held_out_share: float = 0.02,
    *,
    field: str = TEXT_FIELD,
    validation: Sequence[str] = (),
    cache: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Read, split and tokenise what `mxep.train.data.text_files.find_sources` finds, or map what an earlier run made of it.

    Args:
        data, field: see `mxep.train.data.text_files.stream_documents`.
        tokenizer: of both streams.
        held_out_share: of the documents, by the hash of their content.
        validation: held-out documents of their own, instead of a share; none of them is trained on.
        cache: where token files are kept; None means "tokens" in the folder of compiled kernels (`mxep.private_folders`).
        tell: takes texts for people while this takes long.

    Raises:
        ValueError: what the text is wrong about; a share outside (0, 0.5]; token files that cannot be read or written, or would
            be written into a folder of `data`.
    """
    if not 0 < held_out_share <= 0.5:
        raise ValueError(f"data: held_out_share={held_out_share}, want more than 0 and at most 0.5")
    sources, others = find_sources(data), find_sources(validation) if validation else []
    stats = {path: path.stat() for source in [*sources, *others] for path in source.files}

    def fill(writer: StreamWriter) -> None:
        """Write all documents, with those of a validation set held out where there are any, else a share."""
        if next(stream_documents(others, field), None) is None:
            split = split_by_share(watched(stream_documents(sources, field), writer.tell), held_out_share)
        else:
            writer.write(stream_documents(others, field), lambda batch: ([], list(batch)))
            split = without(watched(stream_documents(others, field), writer.tell))
        writer.write(stream_documents(sources, field), split)

    if isinstance(tokenizer, ByteTokenizer) and sum(stat.st_size for stat in stats.values()) <= _IN_MEMORY_BYTES:
        ids: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        starts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

        def store(side: int, more: np.ndarray, begins: np.ndarray) -> None:
            ids[side].append(more)
            starts[side].append(begins)

        writer = StreamWriter(tokenizer, store, tell)
        fill(writer)
        streams = [np.concatenate([np.empty(0, dtype=tokenizer.dtype), *part]) for part in ids]
        return writer.corpus(*streams, *(np.concatenate([np.empty(0, dtype=np.int64), *part]) for part in starts))
    if cache is None:
        with contextlib.suppress(OSError):  # whoever writes there says what is wrong
            make_private(cache_folder())  # code is run from it
        cache = cache_folder() / "tokens"
    cache = cache.expanduser()
    check_cache([*data, *validation], cache)
    files = [  # a link's own name decides how it is read, as in Hugging Face's cache, where files have no names of their own
        [[str(path.resolve()), reading(path), stats[path].st_size, stats[path].st_mtime_ns] for s in found for path in s.files]
        for found in (sources, others)
    ]
    key = json.dumps([FORMAT, tokenizer.fingerprint, field, held_out_share, [source.searched for source in sources], files])
    folder = cache / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return prepared(folder, tokenizer, fill, lambda text: tell(f"token files {folder}: {text}"))


class Batch(NamedTuple):
    """Sequences and what follows each of their tokens.

    Attributes:
        inputs, labels: (B, S) int64; a document's last token has the next one's first for a label.
        documents: where documents lie in `inputs`, None where attention is not to know.
    """

    inputs: Tensor
    labels: Tensor
    documents: PackedDocuments | None


def positions_in_documents(starts: np.ndarray, first: int, tokens: int) -> np.ndarray:
    """Positions (tokens,) int64, in its document, of each token of a stream from `first` on; what is cut before `first` begins there.

    >>> positions_in_documents(np.array([0, 3, 8]), 1, 9)
    array([0, 1, 0, 1, 2, 3, 4, 0, 1])

    Args:
        starts: index of each document's first token, ascending.
    """
    begins = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, first + tokens, "left")] - first
    begins = np.concatenate([np.zeros(1, dtype=np.int64), begins])
    return np.arange(tokens) - np.repeat(begins, np.diff(begins, append=tokens))


class TrainingWindows:
    """Endless, sharded, exactly resumable batches; labels are the next tokens.

    Each epoch cuts the stream into windows of S + 1 tokens that overlap by one, from a start of its own below S, and goes through
    them in an order of its own; both follow from (seed, epoch).

    Args:
        stream: token ids.
        seq_len: S, tokens a sequence.
        batch: B, sequences of this rank a batch.
        rank, world: which of how many data-parallel ranks this is.
        seed: of the order.
        starts: index of each document's first token, for batches that know their documents.

    Raises:
        ValueError: the stream is shorter than one window.
    """

    def __init__(
        self,
        stream: np.ndarray,
        seq_len: int,
        batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        starts: np.ndarray | None = None,
    ) -> None:
        if len(stream) < seq_len + 1:
            raise ValueError(f"data: {len(stream)} tokens of training text, want at least seq_len + 1 = {seq_len + 1}; lower --seq-len")
        self.stream, self.seq_len, self.batch = stream, seq_len, batch
        self.rank, self.world, self.seed, self.starts = rank, world, seed, starts
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
        self.sequences = typed(state.get("sequences"), int, "data: the position's number of sequences")

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> Batch:
        """This rank's next batch."""
        first = self.sequences + self.rank * self.batch
        begins = [self.start_of(first + i) for i in range(self.batch)]
        rows = torch.from_numpy(np.stack([self.stream[begin : begin + self.seq_len + 1] for begin in begins]).astype(np.int64))
        self.sequences += self.world * self.batch
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), _documents(self.starts, begins, self.seq_len))

    def start_of(self, sequence: int) -> int:
        """Index in the stream of the first token of the training sequence with this number, counted over all ranks and epochs."""
        epoch, place = divmod(sequence, self.windows)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            spare = len(self.stream) - (self.windows * self.seq_len + 1)
            self._start = int(random.integers(min(spare, self.seq_len - 1) + 1))
            self._order = random.permutation(self.windows)
            self._epoch = epoch
        return self._start + int(self._order[place]) * self.seq_len


def _documents(starts: np.ndarray | None, begins: Sequence[int], seq_len: int) -> PackedDocuments | None:
    """Of sequences that begin there in the stream, where `starts` says where its documents do."""
    if starts is None:
        return None
    return PackedDocuments.of(torch.from_numpy(np.stack([positions_in_documents(starts, begin, seq_len) for begin in begins])))


def held_out_batches(
    stream: np.ndarray, seq_len: int, batch: int, max_tokens: int, rank: int = 0, world: int = 1, starts: np.ndarray | None = None
) -> list[Batch]:
    """Held-out batches: the same windows whatever the number of ranks, shared out evenly; `starts` as for `TrainingWindows`.

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
        begins = [len(stream)] * batch  # behind all documents: what is not there
        for row in range(batch):
            place = (index * world + rank) * batch + row
            if place >= wanted:
                continue
            start = begins[row] = int(chosen[place]) * seq_len
            tokens = torch.from_numpy(stream[start : start + seq_len + 1].astype(np.int64))
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = tokens[1:]
        result.append(Batch(inputs, labels, _documents(starts, begins, seq_len)))
    return result
