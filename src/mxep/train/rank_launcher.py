"""`mxep train`: starts the ranks (unless torchrun did), and ends all of them when one fails."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from mxep.private_folders import record_process, scratch_folder
from mxep.recipe import resolve_recipe
from mxep.train.compare import train_both
from mxep.train.config import TrainConfig, flag_of
from mxep.train.data.chat import ChatTemplate
from mxep.train.data.text_files import check_paths
from mxep.train.data.tokenizer import check_origin, load_tokenizer
from mxep.train.durable_files import NotWrittenError
from mxep.train.option_parser import PROGRAM, read_options
from mxep.train.output import surviving_output
from mxep.train.rank_control import (
    FAILURES_VARIABLE,
    GUARD_VARIABLE,
    STOP_SIGNALS,
    STORE_VARIABLE,
    describe_guard,
    is_second_request,
    stop_signals,
    watch_starter,
)
from mxep.train.resolved_config import ResolvedConfig, resolve
from mxep.train.run_folder import choose_run_folder
from mxep.train.run_lock import RunLockLostError

CPU_RANKS = 2
_POLL_S = 0.05
_WRONG_USE, _INTERRUPTED = 2, 130
_ENDED_BY_SIGNAL = (
    _INTERRUPTED,
    *(-number for number in STOP_SIGNALS),
)  # status of a rank without its handler yet


@surviving_output()
def command(argv: Sequence[str]) -> int:
    """Run `mxep train <argv>`; returns the exit status: 0 done or stopped by a signal, 1 failed, 2 wrong arguments, 130 aborted.

    Failing output streams do not change the status.
    """
    try:
        config = read_options(argv)
        watch_starter()
        if "RANK" not in os.environ:
            return start_ranks(config, argv)[0] if config.compare is None else start_both(config, argv)
        if config.compare is not None:
            raise ValueError("--compare starts its ranks itself; leave torchrun out, or train the two recipes one after the other")
        status = run_rank(config, argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips Python's shutdown, in which gloo's threads may still hold tensors and abort the process
    except ValueError as error:
        rank = os.environ.get("RANK", "0")  # the error may concern the machine of this rank only
        print(f"{PROGRAM}: error: {error}" + ("" if rank == "0" else f" (rank {rank})"), file=sys.stderr, flush=True)
        return _WRONG_USE


def run_rank(config: TrainConfig, argv: Sequence[str]) -> int:
    """Run one rank. A failure is reported in the starter's folder; under torchrun it is raised."""
    from mxep.train.distributed import init_distributed
    from mxep.train.run import run

    failures = os.environ.get(FAILURES_VARIABLE)
    gc.freeze()  # a full collection over the imported modules would stop all threads for 0.1 s
    try:
        with init_distributed(config.device) as ranks:
            run(config, argv, ranks)
        return 0
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)
    except Exception as error:
        if failures is None:
            raise
        line, status = _in_a_line(error)
        report = {"time_s": time.time(), "line": line, "status": status, "trace": traceback.format_exc()}
        path = Path(failures) / f"rank_{os.environ['RANK']}.json"
        try:
            path.with_suffix(".part").write_text(json.dumps(report))
            path.with_suffix(".part").rename(path)
            sys.stdout.flush()
        except OSError as problem:  # a full disk, maybe that of the error
            os.write(2, f"{report['trace']}{path}: {problem}\n".encode(errors="backslashreplace"))
        os._exit(1)  # destroying a process group that lost a member may hang


def _in_a_line(error: Exception) -> tuple[str | None, int]:
    """(the error in one line, or None if the user needs its traceback; exit status)."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))  # errors during clean-up
    if isinstance(error, ValueError):
        return f"{error}{notes}", _WRONG_USE
    if isinstance(error, (FloatingPointError, RunLockLostError)):
        return f"{error}{notes}", 1
    if isinstance(error, NotWrittenError) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        return f"{error}; make room there, or name another folder with --out{notes}", 1
    return None, 1


def start_both(config: TrainConfig, argv: Sequence[str]) -> int:
    """Run `start_ranks` for --recipe and for --compare, each in its own folder, then compare; see `mxep.train.compare`."""
    assert config.compare is not None
    if resolve_recipe(config.recipe) == resolve_recipe(config.compare):
        raise ValueError(f"--compare={config.compare} is the recipe that is trained anyway, want another than --recipe={config.recipe}")
    settings = resolve(config, *plan_ranks(config))
    folder, recipes = choose_run_folder(config, settings.model), (config.recipe, config.compare)
    arms: dict[str, tuple[TrainConfig, list[str]]] = {}
    for recipe in recipes:  # both are checked before the first one is trained
        arm = dataclasses.replace(config, recipe=recipe, out=folder / recipe, compare=None)
        own = ["--recipe", recipe, "--out", str(arm.out), "--compare", "None"]
        if resolve_recipe(recipe).gemm == "hp":  # then all of it is in high precision
            arm = dataclasses.replace(arm, **config.without_mxfp8())  # type: ignore[arg-type]
            own += [word for name, value in config.without_mxfp8().items() for word in (flag_of(name), value)]
        choose_run_folder(arm, settings.model)
        _check_buildable(arm, settings)
        arms[recipe] = arm, [*argv, *own]
    return train_both(recipes, folder, lambda recipe, _: start_ranks(*arms[recipe]), settings.last_step)


def _check_buildable(config: TrainConfig, settings: ResolvedConfig) -> None:
    """Raise the ValueError that every rank would raise where it builds the model."""
    import torch

    from mxep.train.build import build_options, build_whole
    from mxep.train.linear_choice import choose_linears

    chosen = choose_linears(config, settings.shape, settings.forward_tokens, torch.device("cpu"))  # "auto" names what can be converted
    build_whole(settings.shape, build_options(chosen))


def start_ranks(config: TrainConfig, argv: Sequence[str]) -> tuple[int, bool]:
    """Start all ranks of this machine as processes, and wait for them; returns the exit status, and whether a signal asked to end.

    The first SIGINT, SIGTERM or SIGHUP is forwarded, so that every rank ends after its step; a second request ends all ranks at once.

    Raises:
        ValueError: errors that show before a rank is started.
    """
    device_type, world = plan_ranks(config)
    choose_run_folder(config, resolve(config, device_type, world).model)
    for recipe in (config.recipe, config.linear_recipe, config.output_recipe):
        resolve_recipe(recipe)
    check_paths([*config.data, *config.validation_data])
    tokenizer = load_tokenizer(config.tokenizer)
    if config.chat:
        ChatTemplate(tokenizer)
    if config.init_from is not None and not config.resume:
        check_origin(tokenizer, config.init_from)
    with scratch_folder("train") as scratch:
        guard_read, guard_write = os.pipe()
        children = [_start(argv, rank, world, device_type, scratch, guard_read) for rank in range(world)]
        os.close(guard_read)
        for child in children:  # if this process is killed, they use the folder for another step and a checkpoint
            record_process(scratch, child.pid)
        forwarder = _SignalForwarder(children)
        with stop_signals(forwarder):
            try:
                while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                    time.sleep(_POLL_S)
                    forwarder.announce()
                if all(child.poll() == 0 for child in children):
                    return 0, forwarder.first is not None
                time.sleep(4 * _POLL_S)  # ranks that failed at the same time finish their reports
                return _INTERRUPTED if forwarder.aborted else _explain_failure(children, scratch), forwarder.first is not None
            finally:
                _kill(children)
                os.close(guard_write)


def plan_ranks(config: TrainConfig) -> tuple[str, int]:
    """(device type, ranks to start): the number that --nproc or the degrees ask for, else all GPUs of this machine, else two CPU ranks.

    Raises:
        ValueError: more GPUs are asked for than there are.
    """
    asked = config.nproc or (config.dp_replicate * config.dp_shard * config.tp * config.pp if config.dp_shard > 0 else None)
    if config.device == "cpu":
        return "cpu", asked or CPU_RANKS
    import torch

    from mxep.device import device_type_of

    if device_type_of(config.device) == "cpu":
        return "cpu", asked or CPU_RANKS
    gpus = torch.cuda.device_count()
    if asked and asked > gpus:
        raise ValueError(f"{asked} ranks asked for, but this machine has {gpus} GPUs; change --nproc or the degrees, or use torchrun")
    return "cuda", asked or gpus


def _start(argv: Sequence[str], rank: int, world: int, device_type: str, scratch: Path, guard: int) -> subprocess.Popen[bytes]:
    """Start one rank in its own session, so that only this process gets Ctrl-C. Rank 0 prints; the others write to a log file."""
    environment = dict(os.environ)
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    environment |= {STORE_VARIABLE: str(scratch / "store"), FAILURES_VARIABLE: str(scratch), GUARD_VARIABLE: describe_guard(guard)}
    environment.pop("MASTER_ADDR", None)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if device_type == "cuda" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(environment):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # row counts change with every step, which fragments fixed segments
    if device_type == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elsewhere = None if rank == 0 else (scratch / f"rank_{rank}.log").open("wb")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mxep", "train", *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=elsewhere,
            stderr=elsewhere,
            pass_fds=(guard,),
            start_new_session=True,
        )
    finally:
        if elsewhere is not None:
            elsewhere.close()


class _SignalForwarder:
    """Forwards the first signal to every rank; a second request kills them. A second Ctrl-C counts at once, since ranks get no Ctrl-C."""

    def __init__(self, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self.children = children
        self.first: int | None = None
        self.killed = False
        self._since = 0.0
        self._announced = False

    @property
    def aborted(self) -> bool:
        """True if the ranks were killed, or got the signal before they could handle it.

        A rank that fails in another way after a signal, for example in its last checkpoint, has an error to report.
        """
        unhandled = any(child.poll() in _ENDED_BY_SIGNAL for child in self.children)
        return self.killed or (self.first is not None and unhandled)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        second = is_second_request(number, time.monotonic() - self._since)  # asked of the first one too, which may be the guard's
        if self.first is not None:
            if second or number == self.first == signal.SIGINT:
                self.killed = True
                _kill(self.children)
            return
        self.first, self._since = number, time.monotonic()
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)

    def announce(self) -> None:
        """Print once that the run is ending. The handler does not print, since it may interrupt another line."""
        if self.first is not None and not self._announced:
            self._announced = True
            print(
                f"{PROGRAM}: {signal.Signals(self.first).name}: ending after this step (once more to break off)",
                file=sys.stderr,
                flush=True,
            )


def _kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
    for child in children:
        child.wait()


def _explain_failure(children: Sequence[subprocess.Popen[bytes]], scratch: Path) -> int:
    """Print why the first rank failed; returns the exit status. The other ranks fail because of the first."""
    killed = [(rank, child.returncode) for rank, child in enumerate(children) if child.returncode is not None and child.returncode < 0]
    if killed:
        rank, status = killed[0]
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        log = "" if -status == signal.SIGKILL else _log_tail(scratch, rank)  # NCCL's watchdog and C++ print the reason before they abort
        print(f"{log}{PROGRAM}: rank {rank} was ended by {signal.Signals(-status).name}{hint}; the others were ended", file=sys.stderr)
        return 1
    paths = [(rank, scratch / f"rank_{rank}.json") for rank in range(len(children))]
    reports = [(rank, json.loads(path.read_text())) for rank, path in paths if path.exists()]
    if not reports:
        rank, status = next((rank, child.returncode) for rank, child in enumerate(children) if child.returncode)
        print(f"{PROGRAM}: rank {rank} ended with status {status}\n{_log_tail(scratch, rank)}", file=sys.stderr)
        return _WRONG_USE if status == _WRONG_USE else 1
    rank, report = min(reports, key=lambda entry: entry[1]["time_s"])
    if report["line"] is not None:
        print(f"{PROGRAM}: error: {report['line']}", file=sys.stderr)
        return report["status"]
    print(f"{report['trace']}{PROGRAM}: rank {rank} failed first; the others were ended", file=sys.stderr)
    return 1


def _log_tail(scratch: Path, rank: int) -> str:
    """The end of a rank's log, in whole lines; empty for rank 0, which prints to our own output."""
    log = scratch / f"rank_{rank}.log"
    tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    return tail if not tail or tail.endswith("\n") else f"{tail}\n"
