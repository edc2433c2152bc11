"""What writing a checkpoint in the background costs the training, on one rank.

    python benchmarks/checkpoint_stops.py [--gib 2] [--device cuda] [--record]

Arms, each in a process of its own: `mxep`, the writer of `mxep train`; `torch_safetensors` and `torch_distcp`, torch's
`dcp.async_save` with its safetensors and its default writer.  Each saves the same shard several times and reads it back once.

    held_ms      how long a save blocks the training thread, without the first save
    copy_ms      one plain copy of the shard to the host's memory (pinned if there is a GPU), which a save cannot avoid
    stop_ms      the longest time in which another Python thread did not run, from a save until its files are written
    host_gib     growth of the process' peak host memory
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from mxep.bench.records import device_name, origin, write_records
from mxep.train.checkpoint import load_checkpoint, read_manifest
from mxep.train.checkpoint_writer import CheckpointWriter
from mxep.train.run_folder import find_checkpoint

ARMS = ("mxep", "torch_safetensors", "torch_distcp")
SAVES = 4
LAYERS = 16  # tensors of a layer: 4 large and 8 small, each with two moments


class LongestStop:
    """Context manager: a second thread measures the longest time in which it did not run, in ms."""

    def __enter__(self) -> LongestStop:
        self.worst_ms, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._ended.is_set():
            time.sleep(5e-4)
            now = time.perf_counter()
            self.worst_ms = max(self.worst_ms, (now - last) * 1e3)
            last = now


def shard(gib: float, device: str) -> dict[str, Tensor]:
    """Float32 tensors of `gib` GiB in all."""
    small, values = 2048, int(gib * 2**30 / 4 / 3 / LAYERS)
    large = (values - 8 * small) // 4
    sizes = {f"layers.{layer}.{i}": large if i < 4 else small for layer in range(LAYERS) for i in range(12)}
    return {
        f"{kind}.{name}": torch.randn(size, device=device) for name, size in sizes.items() for kind in ("model", "exp_avg", "exp_avg_sq")
    }


def timed_ms(device: str, act: Any) -> float:
    """How long `act` blocks the calling thread; the GPU is idle when it starts."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1e3


def plain_copy_ms(tensors: dict[str, Tensor], device: str) -> float:
    """Median milliseconds of a plain copy of every tensor into memory that is allocated already."""
    pinned = device == "cuda"
    into = [torch.empty(tensor.shape, pin_memory=pinned).fill_(0) for tensor in tensors.values()]

    def copy() -> None:
        for target, tensor in zip(into, tensors.values(), strict=True):
            target.copy_(tensor, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()

    return statistics.median(timed_ms(device, copy) for _ in range(5))


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(arm: str, gib: float, device: str, folder: Path) -> dict[str, float]:
    """Saves SAVES times in this arm, reads the last checkpoint back, and returns the figures."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = shard(gib, device)
    if device == "cuda":
        torch.zeros(1).pin_memory()
    gc.freeze()  # as `mxep train` does: a full collection would look at every object of torch's modules, 0.1 s
    before, held, stops, written = peak_gib(), [], [], []
    writer = CheckpointWriter(folder, keep=1, background=True, timeout=timedelta(minutes=5))
    if arm == "mxep":
        writer.prepare(tensors)
    for step in range(1, SAVES + 1):
        pending: Any = None

        def save(step: int = step) -> None:
            nonlocal pending
            if arm == "mxep":
                writer.save(step, tensors, {}, {})
            else:
                path = folder / f"step_{step}"
                to = HuggingFaceStorageWriter(str(path), save_distributed=True) if arm == "torch_safetensors" else None
                pending = dcp.async_save(tensors, checkpoint_id=path if to is None else None, storage_writer=to)

        with LongestStop() as stop:
            begun = time.perf_counter()
            held.append(timed_ms(device, save))
            if arm == "mxep":
                writer.wait()
            else:
                pending.result()
            written.append(time.perf_counter() - begun)
        stops.append(stop.worst_ms)
    host_gib = peak_gib() - before
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    if arm == "mxep":
        load_checkpoint(read_manifest(find_checkpoint(folder)), back)
    else:
        path = folder / f"step_{SAVES}"
        reader = HuggingFaceStorageReader(str(path)) if arm == "torch_safetensors" else dcp.FileSystemReader(path)
        dcp.load(back, storage_reader=reader)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items()), f"{arm}: what was read differs from what was written"
    copy_ms = plain_copy_ms(tensors, device)
    return {
        "held_first_ms": held[0],
        "held_ms": statistics.median(held[1:]),
        "copy_ms": copy_ms,
        "stop_ms": max(stops),
        "written_s": statistics.median(written),
        "host_gib": host_gib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the rank's shard")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/checkpoint-DEVICE-1.json")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.arm, options.gib, options.device, Path(folder))))
        return
    arms: dict[str, dict[str, float]] = {}
    table = Table("arm", "held, first ms", "held ms", "plain copy ms", "longest stop ms", "written s", "host GiB")
    for arm in ARMS:
        line = [sys.executable, __file__, "--gib", str(options.gib), "--device", options.device, "--arm", arm]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        arms[arm] = json.loads(done.stdout.splitlines()[-1])
        table.add_row(arm, *(f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in arms[arm].values()))
    Console(width=140).print(table)
    if options.record:
        ours = arms["mxep"]
        record = {
            "benchmark": "checkpoint",
            "device": device_name(torch.device(options.device)),
            "world_size": 1,
            "shape": {"gib": options.gib, "tensors": 36 * LAYERS},
            "arms": {arm: {key: round(value, 3) for key, value in figures.items()} for arm, figures in arms.items()},
            "ratios": {"held_vs_copy": round(ours["held_ms"] / ours["copy_ms"], 4), "stop_ms": round(ours["stop_ms"], 2)},
            "limit": {"held_vs_copy": 1.0},
            "target": {"held_vs_copy": 1.2, "stop_ms": 50.0},
            **origin(),
        }
        print("wrote", write_records("checkpoint", record["device"], 1, [record]))


if __name__ == "__main__":
    main()
