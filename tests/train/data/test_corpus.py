"""Token files: the same corpus as in memory, written once by the first process, completely or not at all; runs that resume with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import RankError, run_ranks

from mxep.train import distributed
from mxep.train.config import TrainConfig
from mxep.train.data import corpus, loader
from mxep.train.data.loader import ByteTokenizer, TrainingSequences, load_corpus
from mxep.train.distributed import Ranks
from mxep.train.metrics import progress_notes
from mxep.train.trainer import Trainer


@pytest.fixture
def texts(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text("".join(f"{number} line {line}\n" for line in range(number % 7 + 5)))
    return str(folder)


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are, bytes go to token files, and in small batches."""
    monkeypatch.setattr(loader, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(corpus, "_BATCH_BYTES", 300)
    monkeypatch.setattr(corpus, "_HASH_BYTES", 128)
    monkeypatch.setattr(corpus, "_BLOCK_BYTES", 256)


def corpora(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if not path.name.endswith(".lock"))


def same(one: corpus.Corpus, other: corpus.Corpus) -> bool:
    counts = [(c.num_train_documents, c.num_held_out_documents, c.held_out_bytes, c.fingerprint) for c in (one, other)]
    streams = [(c.train, c.held_out, c.train_starts, c.held_out_starts) for c in (one, other)]
    return counts[0] == counts[1] and all(map(np.array_equal, *streams))


def test_starts_are_where_documents_begin(texts: str) -> None:
    """Of bytes a NUL, which no text holds, ends each document."""
    found = load_corpus([texts, f"{texts}/08.txt"], ByteTokenizer(), 0.3)
    for stream, starts in ((found.train, found.train_starts), (found.held_out, found.held_out_starts)):
        assert np.array_equal(starts, np.concatenate([[0], np.flatnonzero(stream == 0)[:-1] + 1]))
    assert (len(found.train_starts), len(found.held_out_starts)) == (found.num_train_documents, found.num_held_out_documents)


@pytest.mark.parametrize("share", [0.3, 1e-9])  # the second leaves the held-out side empty but for the smallest hash
def test_files_hold_what_memory_holds(share: float, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [texts, f"{texts}/0*.txt", f"{texts}/08.txt"]
    whole = [load_corpus(name, ByteTokenizer(), share) for name in ([texts], names, [f"{texts}/08.txt"], [f"{texts}/08.txt"] * 3)]
    monkeypatch.setattr(loader, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(corpus, "_BATCH_BYTES", 300)
    for name, wanted in zip(([texts], names, [f"{texts}/08.txt"], [f"{texts}/08.txt"] * 3), whole, strict=True):
        assert same(load_corpus(name, ByteTokenizer(), share, cache=tmp_path / "cache"), wanted)
    assert isinstance(load_corpus([texts], ByteTokenizer(), share, cache=tmp_path / "cache").train.base, np.memmap)


@pytest.mark.usefixtures("in_files")
def test_the_folder_of_compiled_kernels_stays_private(texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files may be the first thing in it; a folder that the user names is made as the umask says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MXEP_CACHE", "~/cache")
    before = os.umask(0o002)
    try:
        load_corpus([texts], ByteTokenizer())
        load_corpus([texts], ByteTokenizer(), cache=tmp_path / "shared")
    finally:
        os.umask(before)
    assert len(corpora(tmp_path / "cache" / "tokens")) == 1
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("cache", "shared")] == [0o700, 0o775]


def test_files_are_written_once(texts: str, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    printed: list[str] = []
    first = load_corpus([texts], ByteTokenizer(), 0.3, cache=cache, report=printed.append)
    assert any("60 documents" in text for text in printed)
    assert any("checksum" in text for text in printed)
    monkeypatch.setattr(ByteTokenizer, "encode_all", None)
    assert same(load_corpus([texts], ByteTokenizer(), 0.3, cache=cache), first)
    monkeypatch.undo()
    assert len(corpora(cache)) == 1


def test_other_text_is_another_folder(texts: str, tmp_path: Path, in_files: None) -> None:
    cache = tmp_path / "cache"
    found = [load_corpus([texts], ByteTokenizer(), share, cache=cache).fingerprint for share in (0.3, 0.4)]
    (Path(texts) / "07.txt").write_text("something else")
    found.append(load_corpus([texts], ByteTokenizer(), 0.3, cache=cache).fingerprint)
    (Path(texts) / "a.jsonl").write_text('{"text": "x", "code": "y"}\n')
    found += [load_corpus([texts], ByteTokenizer(), 0.3, cache=cache, field=field).fingerprint for field in ("text", "code")]
    assert len(set(found)) == len(corpora(cache)) == 5


def test_names_decide_how_a_file_is_read(tmp_path: Path, in_files: None) -> None:
    (tmp_path / "blob").write_text('{"text": "one"}\n{"text": "two"}\n')
    for name in ("a.jsonl", "a.txt", "b.md"):
        (tmp_path / name).symlink_to("blob")
    found = [load_corpus([str(tmp_path / name)], ByteTokenizer(), 0.3, cache=tmp_path / "cache") for name in ("a.jsonl", "a.txt", "b.md")]
    assert sorted(bytes(found[0].train) + bytes(found[0].held_out)) == sorted(b"one\0two\0")
    assert b"{" in bytes(found[1].train)
    assert same(found[1], found[2])
    assert len(corpora(tmp_path / "cache")) == 2


def test_token_files_among_the_texts(texts: str, in_files: None) -> None:
    with pytest.raises(ValueError, match="is read as a part of it by the next run"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=Path(texts) / "cache")


def test_a_folder_that_lost_its_manifest_is_written_again(texts: str, tmp_path: Path, in_files: None) -> None:
    first = load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    (folder,) = corpora(tmp_path / "cache")
    (folder / "corpus.json").unlink()
    with pytest.warns(UserWarning, match=r"No such file .*corpus\.json'; it is written again"):
        assert same(load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache"), first)


@pytest.mark.parametrize("validated", [True, False])
def test_it_reports_progress_while_it_reads_to_split(validated: bool, texts: str, tmp_path: Path, in_files: None) -> None:
    """Waiting processes give up on a writer that prints nothing."""
    printed: list[str] = []
    cut = dict(validation=[f"{texts}/0*.txt"]) if validated else dict(held_out_share=1e-9)
    load_corpus([texts], ByteTokenizer(), cache=tmp_path / "cache", report=printed.append, **cut)  # type: ignore[arg-type]
    looks = [text for text in printed if "looked at" in text]
    assert len(looks) > 1
    assert "looked at 5 documents, 0 MiB of text" in looks[0]


@pytest.mark.parametrize("memory", [True, False])
def test_a_validation_set_of_its_own(memory: bool, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memory:
        monkeypatch.setattr(loader, "_IN_MEMORY_BYTES", 0)
    validation = tmp_path / "validation.jsonl"
    shared = (Path(texts) / "05.txt").read_text()
    validation.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("of its own", shared)))
    found = load_corpus([texts], ByteTokenizer(), validation=[str(validation)], cache=tmp_path / "cache")
    assert bytes(found.held_out) == b"of its own\0" + shared.encode() + b"\0"
    assert (found.num_train_documents, found.num_held_out_documents) == (59, 2)
    assert shared.encode() not in bytes(found.train)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        load_corpus([f"{texts}/05.txt"], ByteTokenizer(), validation=[str(validation)], cache=tmp_path / "cache")


def test_a_failed_write_leaves_no_files(texts: str, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (Path(texts) / "zz.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=cache)
    assert corpora(cache) == []
    (Path(texts) / "zz.jsonl").unlink()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ValueError, match=r"cannot be read or written: No space left on device; choose another folder with --data-cache"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=cache)
    assert corpora(cache) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be read or written"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "file")


def flip(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 4]) + content[len(content) // 2 + 1 :]


DAMAGES = {
    "a flipped bit": flip,
    "zeros": lambda content: bytes(len(content)),
    "other ids": lambda content: bytes([255]) * len(content),
    "cut short": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "train_starts.bin", "held_out_starts.bin", "corpus.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_written_again(damage: str, name: str, texts: str, tmp_path: Path, in_files: None) -> None:
    first = load_corpus([texts], ByteTokenizer(), 0.3)
    load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    (folder,) = corpora(tmp_path / "cache")
    path = folder / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"data: .* is damaged: .*; it is written again"):
        assert same(load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache"), first)
    assert corpora(tmp_path / "cache") == [folder]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache"), first)


def test_the_damaged_file_is_named(texts: str, tmp_path: Path, in_files: None) -> None:
    load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    (folder,) = corpora(tmp_path / "cache")
    content = bytearray((folder / "train.bin").read_bytes())
    content[300] ^= 1
    (folder / "train.bin").write_bytes(content)
    with pytest.warns(UserWarning, match=r"train\.bin has another checksum than when it was written, from byte 256 on"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    (folder / "train_starts.bin").unlink()
    with pytest.warns(UserWarning, match=r"No such file .*train_starts\.bin"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")


def test_a_folder_of_others_is_read_and_never_replaced(texts: str, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that this user may not write is used as it is; one that may not be read is not taken for damaged."""
    first = load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if self.suffix == ".lock" or (self.name == denied):
            raise PermissionError(13, "Permission denied")
        return opened(self, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", read_only)
    denied = ""
    assert same(load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache"), first)
    denied = "train.bin"
    with pytest.raises(ValueError, match="cannot be read or written: Permission denied"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    assert len(corpora(tmp_path / "cache")) == 1


def test_two_machines_without_common_locks(texts: str, tmp_path: Path, in_files: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes under names of its own; the first that is done gives the folder."""
    written: list[Path] = []
    write = corpus._write

    def write_twice(folder: Path, *args: Any) -> None:
        written.append(folder)
        if len(written) == 1:
            monkeypatch.setattr(corpus.socket, "gethostname", lambda: "other")
            with monkeypatch.context() as context:
                context.setattr(corpus.fcntl, "flock", lambda *_: None)
                load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
            monkeypatch.undo()
            monkeypatch.setattr(loader, "_IN_MEMORY_BYTES", 0)
        write(folder, *args)

    monkeypatch.setattr(corpus, "_write", write_twice)
    found = load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    assert len(written) == 2
    assert len(corpora(tmp_path / "cache")) == 1
    assert same(found, load_corpus([texts], ByteTokenizer(), 0.3))


def test_one_writes_for_all(texts: str, tmp_path: Path, in_files: None) -> None:
    encoded: list[int] = []

    class Slow(ByteTokenizer):
        def encode_all(self, documents: Sequence[bytes]) -> list[np.ndarray]:
            encoded.append(len(documents))
            time.sleep(0.02)
            return super().encode_all(documents)

    with ThreadPoolExecutor(4) as pool:  # a lock belongs to an open file, so threads take turns as processes do
        futures = [pool.submit(load_corpus, [texts], Slow(), 0.3, cache=tmp_path / "cache") for _ in range(4)]
        assert len({future.result().fingerprint for future in futures}) == 1
    assert sum(encoded) == 60
    assert len(corpora(tmp_path / "cache")) == 1


@pytest.fixture
def held_lock(texts: str, tmp_path: Path, in_files: None) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the corpus, which is not written yet, and sleeps."""
    load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")
    (folder,) = corpora(tmp_path / "cache")
    (folder / "corpus.json").rename(tmp_path / "corpus.json")
    for path in folder.iterdir():
        path.unlink()
    folder.rename(corpus._hidden(folder))
    lock = folder.with_name(f".{folder.name}.lock")
    code = f"import fcntl, time; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_waiting_has_an_end(held_lock: subprocess.Popen[str], texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_PATIENCE_S", 0.3)
    with pytest.raises(ValueError, match=r"has not got on for 0 s \(process \d+: .*\); end it"):
        load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache")


def test_a_writer_that_is_killed_is_replaced(held_lock: subprocess.Popen[str], texts: str, tmp_path: Path) -> None:
    killer = threading.Timer(0.5, held_lock.send_signal, [signal.SIGKILL])
    killer.start()
    printed: list[str] = []
    found = load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache", report=printed.append)
    assert "another process writes them" in printed[0]
    assert found.num_train_documents + found.num_held_out_documents == 60
    assert [path.name.startswith(".") for path in corpora(tmp_path / "cache")] == [False]


def test_long_work_reports_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mxep.train.metrics._NOTE_S", 0.0)
    for enabled in (True, False):
        progress_notes(enabled)("12 documents [x]")
    assert capsys.readouterr().out == "12 documents [x]\n"


# ---- sharding and resuming ----


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 400), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(1, 4))
def test_every_sequence_once_over_all_ranks(length: int, seq_len: int, batch: int, world: int, seed: int, later_world: int) -> None:
    """For any number of ranks, before and after resuming, the sequences are those of one rank, each once and in order."""
    stream = np.arange(length, dtype=np.uint16)

    def rows(windows: list[TrainingSequences]) -> list[list[int]]:
        return [row.tolist() for part in windows for row in part.next_batch()[0]]

    parts = [TrainingSequences(stream, seq_len, batch, rank, world, seed) for rank in range(world)]
    seen = [row for _ in range(3) for row in rows(parts)]
    later = [TrainingSequences(stream, seq_len, batch, rank, later_world, seed) for rank in range(later_world)]
    for part in later:
        part.load_state_dict(parts[0].state_dict())
    seen += [row for _ in range(2) for row in rows(later)]
    alone = TrainingSequences(stream, seq_len, 1, seed=seed)
    assert seen == [row for _ in seen for row in rows([alone])]
    assert len({tuple(row) for row in seen[: alone.per_epoch]}) == min(len(seen), alone.per_epoch)


def test_resuming_with_token_files_on_other_ranks(texts: str, tmp_path: Path, in_files: None) -> None:
    def windows(rank: int, world: int) -> TrainingSequences:
        return TrainingSequences(load_corpus([texts], ByteTokenizer(), 0.3, cache=tmp_path / "cache").train, 16, 4 // world, rank, world)

    alone = windows(0, 1)
    wanted = [alone.next_batch()[1] for _ in range(6)]
    two = [windows(rank, 2) for rank in range(2)]
    seen = [torch.cat([part.next_batch()[1] for part in two]) for _ in range(3)]
    four = [windows(rank, 4) for rank in range(4)]
    for part in four:
        part.load_state_dict(two[0].state_dict())
    seen += [torch.cat([part.next_batch()[1] for part in four]) for _ in range(3)]
    assert torch.equal(torch.stack(seen), torch.stack(wanted))


@pytest.mark.usefixtures("in_files", "one_rank")
def test_ranks_that_read_different_text(texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = dist.all_gather_object

    def another_rank_reads(found: list[object], mine: object, group: Any = None) -> None:
        gather(found[:1], mine, group=group)
        if isinstance(mine, str):
            found[:] = [mine, "another"]

    monkeypatch.setattr(dist, "all_gather_object", another_rank_reads)
    config = TrainConfig(device="cpu", data=(texts,), data_cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="ranks 0 and 1 read different text"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), tmp_path / "run")


def raised(error: BaseException) -> None:
    raise error


def waits_for_a_slow_rank(rank: int, world: int, store: str) -> None:
    """Longer than the timeout of the ranks' group, and once more where the slow one fails."""
    slow = rank == world - 1
    one_second = timedelta(seconds=1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=one_second)
    assert distributed.on_all_ranks(lambda: time.sleep(3.0 * slow) or rank) == rank
    with pytest.raises(KeyError if slow else ValueError, match="x" if slow else rf"KeyError: 'x' \(rank {world - 1}\)"):
        distributed.on_all_ranks(lambda: {}["x"] if slow else None)


def test_ranks_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(waits_for_a_slow_rank, 2, str(tmp_path / "store"), backend=None)


def fails_beside_a_rank_that_hangs(rank: int, world: int, folder: str) -> None:
    failed = Path(folder) / "failed"

    def hangs() -> None:
        while not failed.exists():
            time.sleep(0.05)

    if rank == 1:
        distributed.on_all_ranks(hangs)
        return
    distributed._GRACE_S = 1.0
    begun = time.monotonic()
    with pytest.raises(KeyError, match="x"):
        distributed.on_all_ranks(lambda: {}["x"])
    assert time.monotonic() - begun < 10
    failed.touch()
    time.sleep(1)  # a thread of this process notifies the other rank


def test_an_error_is_raised_although_another_rank_hangs(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 failed:(.|\n)*KeyError: 'x' \(rank 0\)"):
        run_ranks(fails_beside_a_rank_that_hangs, 2, str(tmp_path))


def test_a_panic_of_a_library_is_raised(one_rank: None) -> None:
    class Panic(BaseException):
        pass

    for failure in (KeyError("x"), MemoryError(), Panic("a library's")):
        with pytest.raises(type(failure)):
            distributed.on_all_ranks(lambda error=failure: raised(error))
