"""From documents to batches: loads the corpus, and iterates over training and held-out sequences.

The order of the training sequences depends on (seed, number of the sequence) only. The state of the iterator is therefore one integer, the
number of sequences that all ranks have seen: rank r of W ranks takes sequences r*B .. r*B+B-1 of every W*B. A run resumes exactly from that
number, on any number of ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mxep.json_files import typed
from mxep.models.document_mask import PackedDocuments
from mxep.models.loss import IGNORE
from mxep.private_folders import cache_folder, make_private
from mxep.train.data.chat import ChatRows
from mxep.train.data.corpus import FORMAT, NO_TARGET, Corpus, StreamWriter, prepared, split_by_share, watched, without
from mxep.train.data.text_files import TEXT_FIELD, RowReader, TextRows, check_cache, find_sources, reading, stream_documents
from mxep.train.data.tokenizer import ByteTokenizer, Encoder, Tokenizer, hash_of

_IN_MEMORY_BYTES = 1 << 27  # larger corpora, and those of other tokenizers than bytes, are kept in token files


def load_corpus(
    data: Sequence[str],
    tokenizer: Tokenizer,
    held_out_share: float = 0.02,
    *,
    field: str = TEXT_FIELD,
    chat: ChatRows | None = None,
    validation: Sequence[str] = (),
    cache: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Read, split and tokenise the files of `mxep.train.data.text_files.find_sources`, or map the token files of an earlier run.

    Args:
        data: see `mxep.train.data.text_files.stream_documents`.
        tokenizer: of both streams.
        field: that holds the text.
        chat: reads conversations instead of text; `tokenizer` and `field` are then those that it was made with.
        held_out_share: of the documents, by the hash of their content.
        validation: names of held-out text, instead of a share; these documents are not trained on.
        cache: folder of token files; None: "tokens" in the folder of compiled kernels (`mxep.private_folders`).
        report: takes progress messages.

    Raises:
        ValueError: the text cannot be read, the share is outside of (0, 0.5], or token files cannot be read or written or would be
            written to a folder of `data`.
    """
    if not 0 < held_out_share <= 0.5:
        raise ValueError(f"data: held_out_share={held_out_share}, want more than 0 and at most 0.5")
    sources, others = find_sources(data), find_sources(validation) if validation else []
    times = [Counter(path.resolve() for source in found for path in source.files) for found in (sources, others)]
    if twice := [path for counts in times for path, count in counts.items() if count > 1]:
        warnings.warn(f"data: {len(twice)} files are named more than once and read as often, among them {twice[0]}; name each once")
    stats = {path: path.stat() for source in [*sources, *others] for path in source.files}

    encoder: Encoder = tokenizer if chat is None else chat
    rows: RowReader = TextRows(field) if chat is None else chat

    def fill(writer: StreamWriter) -> None:
        """Write all documents; held out are those of the validation set, else a share."""
        if next(stream_documents(others, rows), None) is None:
            split = split_by_share(watched(stream_documents(sources, rows), writer.report), held_out_share, divisible=chat is None)
        else:
            writer.write(stream_documents(others, rows), lambda batch: ([], list(batch)))
            split = without(watched(stream_documents(others, rows), writer.report))
        writer.write(stream_documents(sources, rows), split)

    if isinstance(encoder, ByteTokenizer) and sum(stat.st_size for stat in stats.values()) <= _IN_MEMORY_BYTES:
        ids: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        starts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

        def store(side: int, more: np.ndarray, begins: np.ndarray) -> None:
            ids[side].append(more)
            starts[side].append(begins)

        writer = StreamWriter(encoder, store, report)
        fill(writer)
        streams = [np.concatenate([np.empty(0, dtype=encoder.dtype), *part]) for part in ids]
        return writer.corpus(*streams, *(np.concatenate([np.empty(0, dtype=np.int64), *part]) for part in starts))
    if cache is None:
        with contextlib.suppress(OSError):  # the write below reports the error
            make_private(cache_folder())  # compiled code is loaded from it
        cache = cache_folder() / "tokens"
    cache = cache.expanduser()
    check_cache([*data, *validation], cache)
    files = [  # the link's name decides how a file is read: in Hugging Face's cache, targets have no suffixes
        [[str(path.resolve()), reading(path), stats[path].st_size, stats[path].st_mtime_ns] for s in found for path in s.files]
        for found in (sources, others)
    ]
    folder = cache / hash_of([FORMAT, encoder.fingerprint, field, held_out_share, [source.searched for source in sources], files])
    corpus = prepared(folder, encoder, fill, lambda text: report(f"token files {folder}: {text}"))
    if chat is not None and not (corpus.train < NO_TARGET).any():
        raise ValueError("data: the training conversations have no token of an assistant; check the roles, or --no-assistant-only-loss")
    return corpus


class Batch(NamedTuple):
    """Sequences of tokens and their next tokens.

    Attributes:
        inputs, labels: (B, S) int64; the label of a document's last token is the next document's first token. A label is IGNORE where that
            token is no target.
        documents: the documents in `inputs`; None: attention ignores them.
    """

    inputs: Tensor
    labels: Tensor
    documents: PackedDocuments | None


def targets_of(tokens: np.ndarray) -> Tensor:
    """Ids of a stream as labels, int64: IGNORE for those with `NO_TARGET`.

    >>> targets_of(np.array([5, NO_TARGET | 6, 7], dtype=np.uint32)).tolist()
    [5, -100, 7]
    """
    ids = tokens.astype(np.int64)
    return torch.from_numpy(np.where(ids & NO_TARGET, IGNORE, ids))


def ids_of(tokens: np.ndarray) -> Tensor:
    """Ids of a stream as inputs, int64.

    >>> ids_of(np.array([5, NO_TARGET | 6, 7], dtype=np.uint32)).tolist()
    [5, 6, 7]
    """
    return torch.from_numpy(tokens.astype(np.int64) & (NO_TARGET - 1))


def positions_in_documents(starts: np.ndarray, first: int, tokens: int) -> np.ndarray:
    """Position in its document of each token of a stream from `first` on, (tokens,) int64. A document that `first` cuts begins there.

    >>> positions_in_documents(np.array([0, 3, 8]), 1, 9)
    array([0, 1, 0, 1, 2, 3, 4, 0, 1])

    Args:
        starts: index of each document's first token, ascending.
    """
    begins = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, first + tokens, "left")] - first
    begins = np.concatenate([np.zeros(1, dtype=np.int64), begins])
    return np.arange(tokens) - np.repeat(begins, np.diff(begins, append=tokens))


class TrainingSequences:
    """Endless, sharded, exactly resumable batches; labels are the next tokens.

    The stream is a ring, whose first token follows its last one.  Each epoch cuts it into sequences of S + 1 tokens that overlap by one
    token, from a token on that depends on (seed, epoch), as their order does.  Tokens that are left over, fewer than S, are those before
    that token, so every epoch leaves out others.

    Args:
        stream: token ids.
        seq_len: S, tokens per sequence.
        batch: B, sequences per batch of this rank.
        rank, world: data-parallel rank, and number of such ranks.
        seed: of the order.
        starts: index of each document's first token, for batches with documents; None: batches without.

    Raises:
        ValueError: the stream is shorter than one sequence.
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
        self.per_epoch = len(stream) // seq_len
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._start = 0

    def state_dict(self) -> dict[str, Any]:
        """{"sequences": seen by all ranks, "seed": of the order}."""
        return {"sequences": self.sequences, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. Raises ValueError if it belongs to another seed."""
        if state.get("seed") != self.seed:
            raise ValueError(f"data: the position belongs to seed {state.get('seed')}, this run has seed {self.seed}")
        self.sequences = typed(state.get("sequences"), int, "data: the position's number of sequences")

    def next_batch(self) -> Batch:
        """This rank's next batch."""
        first = self.sequences + self.rank * self.batch
        begins = [self.start_of(first + i) for i in range(self.batch)]
        rows = np.stack([self._tokens_from(begin) for begin in begins])
        self.sequences += self.world * self.batch
        return Batch(ids_of(rows[:, :-1]), targets_of(rows[:, 1:]), _documents(self.starts, begins, self.seq_len, len(self.stream)))

    def start_of(self, sequence: int) -> int:
        """Index in the stream of the first token of this training sequence, numbered over all ranks and epochs."""
        epoch, index = divmod(sequence, self.per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self.seed, epoch])
            self._start = int(random.integers(len(self.stream)))
            self._order = random.permutation(self.per_epoch)
            self._epoch = epoch
        return (self._start + int(self._order[index]) * self.seq_len) % len(self.stream)

    def _tokens_from(self, begin: int) -> np.ndarray:
        """(S + 1,) tokens."""
        found = self.stream[begin : begin + self.seq_len + 1]
        missing = self.seq_len + 1 - len(found)
        return np.concatenate([found, self.stream[:missing]]) if missing else found


def _documents(starts: np.ndarray | None, begins: Sequence[int], seq_len: int, ring: int | None = None) -> PackedDocuments | None:
    """The documents of sequences that begin at `begins`; None without `starts`. `ring`: tokens of a stream that begins anew at its end."""
    if starts is None:
        return None
    rows = []
    for begin in begins:
        until_end = seq_len if ring is None else min(seq_len, ring - begin)
        parts = (begin, until_end), (0, seq_len - until_end)
        rows.append(np.concatenate([positions_in_documents(starts, first, tokens) for first, tokens in parts if tokens]))
    return PackedDocuments.of(torch.from_numpy(np.stack(rows)))


def held_out_batches(
    stream: np.ndarray, seq_len: int, batch: int, max_tokens: int, rank: int = 0, world: int = 1, starts: np.ndarray | None = None
) -> list[Batch]:
    """Held-out batches: the same sequences for any number of ranks, distributed evenly; `starts` as in `TrainingSequences`.

    At most `max_tokens` targets, from sequences spread over the whole stream.  Every rank gets the same number of batches (expert
    parallelism needs all ranks in every forward), padded with labels IGNORE.
    """
    sequences = max(-(-(len(stream) - 1) // seq_len), 1)
    wanted = max(min(sequences, max_tokens // seq_len), 1)
    chosen = np.arange(wanted) * sequences // wanted
    batches = -(-wanted // (batch * world))
    result = []
    for index in range(batches):
        inputs = torch.zeros(batch, seq_len, dtype=torch.int64)
        labels = torch.full((batch, seq_len), IGNORE, dtype=torch.int64)
        begins = [len(stream)] * batch  # padding: after all documents
        for row in range(batch):
            number = (index * world + rank) * batch + row
            if number >= wanted:
                continue
            start = begins[row] = int(chosen[number]) * seq_len
            tokens = stream[start : start + seq_len + 1]
            inputs[row, : len(tokens) - 1] = ids_of(tokens[:-1])
            labels[row, : len(tokens) - 1] = targets_of(tokens[1:])
        result.append(Batch(inputs, labels, _documents(starts, begins, seq_len)))
    return result
