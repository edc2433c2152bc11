"""`mxep convergence`: several seeds trained in MXFP8 and in bf16, the same initialisation and data for each seed, and what came of it.

Runs are `mxep train`, side by side on one GPU; `--seconds` ends them in good order, `--resume` goes on. Without --data in what goes to
`mxep train`, the text is every .py file of this Python, standard library and installed packages.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mxep.convergence.runs import Run, SideBySide, log_tail
from mxep.recipe import DEFAULT_RECIPE, resolve_recipe
from mxep.train.config import Settings, settle
from mxep.train.metrics import METRICS_FILE, last_step, read_metrics
from mxep.train.options import option_names, read_options
from mxep.train.sources import check_paths, write_python_corpus

PROGRAM = "mxep convergence"
PLAN_FILE, CORPUS_FILE = "plan.json", "corpus.jsonl"
_WRONG_USE, _FAILED = 2, 1
_EVALUATIONS = 80  # of a run, where --eval-every says nothing
# Options of mxep train that the runs need for themselves.
_OURS = ("recipe", "seed", "out", "resume", "resume_step", "nproc", "stop_after", "compare")
_NEEDED = {"evaluate": "evaluations are what is compared", "checkpoint": "every piece goes on from the checkpoint of the one before"}


@dataclass(frozen=True)
class Plan:
    """What is trained; kept in the folder, so that a later piece goes on with the same.

    Attributes:
        recipes: of the arms; the last one is what the others are measured against.
        seeds: how many, from 0.
        given: options of `mxep train` for every run, as they were given; see `train_options`.
    """

    recipes: tuple[str, ...]
    seeds: int
    given: tuple[str, ...]

    def runs(self, folder: Path) -> list[Run]:
        """Every run, seed by seed, so that the first pieces of few at once can be compared too."""
        return [Run(recipe, seed, folder / f"{recipe}-seed{seed}") for seed in range(self.seeds) for recipe in self.recipes]


def command(argv: Sequence[str]) -> int:
    """Run `mxep convergence <argv>`; returns 0 done or stopped in good order, 1 when a run failed, 2 called wrongly."""
    started = time.monotonic()
    options = _parser().parse_args(list(argv))
    try:
        plan = _plan(options)
        return _train(plan, options, None if options.seconds is None else started + options.seconds)
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return _WRONG_USE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipes", default=None, help=f"separated by commas (default {DEFAULT_RECIPE})")
    parser.add_argument("--baseline", default=None, help="recipe that they are measured against (default bf16)")
    parser.add_argument("--seeds", type=int, default=None, help="of each recipe (default 3)")
    parser.add_argument("--seconds", type=float, default=None, help="after which every run stops with a checkpoint (default: never)")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out; it knows its options")
    parser.add_argument("--at-once", type=int, default=None, help="runs side by side (default: all on a GPU, one on a CPU)")
    parser.add_argument("--record", type=Path, default=None, metavar="FOLDER", help="write FOLDER/convergence-DEVICE-1.json at the end")
    parser.add_argument("train", nargs="*", metavar="-- OPTION", help="options of `mxep train`; --model is dsv3_small without one")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    """What to train, from the command line or with --resume from the folder. Raises ValueError for what cannot be."""
    for name in ("seeds", "at_once", "seconds"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')}={value}, want more than 0")
    path = options.out / PLAN_FILE
    if options.resume:
        return _kept_plan(path, options)
    if path.exists():
        raise ValueError(f"{options.out} holds runs already; go on with --resume, or choose another --out")
    ours = (options.recipes or DEFAULT_RECIPE).split(",")
    recipes = tuple(name.strip() for name in (*ours, options.baseline or "bf16") if name.strip())
    for number, name in enumerate(recipes):
        if resolve_recipe(name) in [resolve_recipe(other) for other in recipes[:number]]:
            raise ValueError(f"--recipes={options.recipes}, --baseline={recipes[-1]}: {name} is there twice; name others")
    plan = Plan(recipes, options.seeds or 3, tuple(options.train))
    train_options(plan.given, options.out)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(plan), indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--out: {path} cannot be written: {error.strerror}; choose another --out") from error
    return plan


def _kept_plan(path: Path, options: argparse.Namespace) -> Plan:
    """The plan of the runs that go on. Raises ValueError when there is none, or when the command line asks for another."""
    if options.train or options.recipes or options.baseline or options.seeds:
        raise ValueError("--resume goes on with what was begun; leave out --recipes, --baseline, --seeds and options of `mxep train`")
    try:
        kept = json.loads(path.read_text())
        return Plan(tuple(kept["recipes"]), int(kept["seeds"]), tuple(kept["given"]))
    except FileNotFoundError as error:
        raise ValueError(f"--resume: nothing to go on with in {path.parent} (no {path.name}); leave --resume out") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: {path} is damaged: {error!r}; start anew in another --out") from error


def train_options(given: Sequence[str], out: Path) -> list[str]:
    """The options of every run, those that were given last. Raises ValueError for what the runs decide or need themselves."""
    for word in given:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and option_names().get(name) in _OURS:
            raise ValueError(f"{word.partition('=')[0]} is decided here for each run, leave it out")
    chosen = read_options(given)
    model = [] if chosen.model or chosen.model_name else ["--model", "dsv3_small"]
    config = read_options([*model, *given])
    for name, why in _NEEDED.items():
        if not getattr(config, name):
            raise ValueError(f"--{name}=False: {why}; leave it out")
    check_paths(config.data)
    steps = settle(config, "cuda" if config.device == "auto" else config.device, 1).steps
    every = config.eval_every or max(steps // _EVALUATIONS, 1)
    if every > max(steps // 10, 1):
        raise ValueError(f"--eval-every={every} of {steps} steps, want one in the last tenth at least: {max(steps // 10, 1)} or less")
    data = [] if config.data else ["--data", str(out / CORPUS_FILE)]
    kept = ["--eval-tokens", "98304", "--checkpoint-every", str(steps), "--cache-weights", "--log-every", "100"]
    return [*model, *data, *kept, *given, "--eval-every", str(every)]


def _train(plan: Plan, options: argparse.Namespace, deadline: float | None) -> int:
    """Run what is not done yet; the record when all is."""
    from mxep.device import default_device_type

    words = train_options(plan.given, options.out)
    config = read_options(words)
    device_type = default_device_type() if config.device == "auto" else config.device
    steps = settle(config, device_type, 1).steps
    runs = plan.runs(options.out)
    corpus = options.out / CORPUS_FILE
    if str(corpus) in config.data and not corpus.exists():
        taken, left_out = write_python_corpus(corpus)
        _say(
            f"corpus: {taken:,} .py files of this Python, {left_out:,} left out (empty or not UTF-8), {corpus.stat().st_size / 1e6:,.0f} MB"
        )
    at_once = options.at_once or (len(runs) if device_type == "cuda" else 1)
    together = SideBySide(runs, steps, words, at_once, deadline, _say)
    _say(f"{len(runs)} runs of {steps} steps, {len(together.waiting)} to do, up to {at_once} at once on {device_type}: {options.out}")
    failed = together.run(lambda: _progress(runs))
    for run, status in failed:
        print(f"{PROGRAM}: {run.name} ended with status {status}:\n{log_tail(run)}", file=sys.stderr)
    if failed:
        return _FAILED
    if any(run.step < steps for run in runs):
        _say(_progress(runs))
        _say(f"stopped; go on with: {PROGRAM} --resume --out {options.out}")
        return 0
    _finish(plan, runs, options, settle(config, device_type, 1))
    return 0


def _progress(runs: Sequence[Run]) -> str:
    steps = {run.name: last_step(read_metrics(run.folder / METRICS_FILE)) for run in runs}
    return "steps: " + ", ".join(f"{name} {step}" for name, step in steps.items())


def _finish(plan: Plan, runs: Sequence[Run], options: argparse.Namespace, settings: Settings) -> None:
    """Show the table, draw the plot, write the record."""
    import torch
    from rich.console import Console

    from mxep.bench.plots import convergence
    from mxep.bench.records import device_name, origin, write_records
    from mxep.convergence.record import setting_of, summarize, table_of

    metrics = {run: read_metrics(run.folder / METRICS_FILE) for run in runs}
    by_recipe = {recipe: [metrics[run] for run in runs if run.recipe == recipe] for recipe in plan.recipes}
    start = next(record for record in metrics[runs[0]] if record["kind"] == "run")
    asked = ["--out", "FOLDER", "--recipes", ",".join(plan.recipes[:-1]), "--baseline", plan.recipes[-1], "--seeds", str(plan.seeds)]
    record: dict[str, Any] = {
        "benchmark": "convergence",
        "device": device_name(torch.device(start["device"])),
        **setting_of(start, settings, settings.shape),
        "seeds": plan.seeds,
        **summarize(by_recipe, settings.steps),
        **origin(" ".join([PROGRAM, *asked, "--record", "benchmarks/results", *(["--", *plan.given] if plan.given else [])])),
    }
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table_of(record))
    if options.record is not None:
        _say(f"record {write_records('convergence', record['device'], record['world_size'], [record], options.record)}")
    _say(f"plot {convergence([record], options.out)}")


def _say(text: str) -> None:
    print(text, flush=True)
