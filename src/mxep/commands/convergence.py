"""`mxep convergence`: several seeds trained in MXFP8 and in bf16, with the same initialisation and data for each seed, and compared.

Every run is an `mxep train` process; on a GPU all of them run at the same time.  `--seconds` stops them with a checkpoint each, `--resume`
continues.  Without `--data` among the options for `mxep train`, the text is every .py file of this Python installation.

`--arm NAME=OPTIONS` adds runs with options of their own, to compare optimizers for example:

    mxep convergence --out runs/optimizers --baseline bf16 --arm "8bit=--recipe bf16 --optimizer adamw8bit --dtype bfloat16"

A verdict needs at least 3 seeds, 3 evaluations in the last tenth of the steps, and a baseline whose held-out loss falls less within that
tenth than its seeds differ.  Otherwise the command says that there is no verdict, and what is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mxep.bench.records import device_name, origin, write_beside
from mxep.commands.run_pool import RunPool, SeedRun, say
from mxep.recipe import ALIASES, DEFAULT_RECIPE, RECIPES, resolve_recipe
from mxep.train.config import TrainConfig, flag_of, split_names
from mxep.train.data.text_files import check_paths, write_python_corpus
from mxep.train.durable_files import replace_file
from mxep.train.metrics import last_step, read_metrics
from mxep.train.option_parser import field_of, read_options, read_toml
from mxep.train.resolved_config import ResolvedConfig, resolve
from mxep.train.run_folder import METRICS_FILE

PROGRAM = "mxep convergence"
PLAN_FILE, CORPUS_FILE = "plan.json", "corpus.jsonl"
TAIL = 0.1  # share of the steps, at the end, over which losses are averaged
MAX_DIFFERENCE = 0.002  # largest allowed deviation of the ratio of means from 1
MIN_SEEDS = 3  # fewer are too few to estimate the spread
MIN_EVALUATIONS = 3  # in the last tenth
Metrics = Sequence[Mapping[str, Any]]  # records of one run's metrics.jsonl
_EVALUATIONS = 80  # of a run without --eval-every
# Options of `mxep train` that this command sets for each run.
_OURS = ("recipe", "seed", "out", "resume", "resume_step", "nproc", "stop_after", "compare")
_SHARED = ("data", "validation_data", "held_out_share", "steps", "seq_len", "batch", "accumulate", "eval_every", "eval_tokens", "model")
_NEEDED = {"evaluate": "the comparison uses the evaluations", "checkpoint": "--resume continues from the checkpoints"}


@dataclass(frozen=True)
class ComparisonPlan:
    """What is trained; saved in the folder, so that `--resume` continues the same runs.

    Attributes:
        recipes: recipes and names of `arms`; the last one is the baseline.
        seeds: how many, from 0.
        given: options of `mxep train` for every run, as given; see `train_options`.
        arms: by name, the options of `mxep train` that only these runs have, as given.
    """

    recipes: tuple[str, ...]
    seeds: int
    given: tuple[str, ...]
    arms: Mapping[str, str] = field(default_factory=dict)

    def runs(self, folder: Path) -> list[SeedRun]:
        """Every run, seed by seed, so that an unfinished comparison has all recipes of its first seeds."""
        return [
            SeedRun(name, seed, folder / f"{name}-seed{seed}", self.options_of(name)) for seed in range(self.seeds) for name in self.recipes
        ]

    def options_of(self, name: str) -> tuple[str, ...]:
        """The options of `mxep train` that make this arm: those of `arms`, or the recipe of this name.

        A recipe in high precision also takes back what `given` asks to be in MXFP8.
        """
        if name in self.arms:
            return tuple(shlex.split(self.arms[name]))
        words = "--recipe", name
        if resolve_recipe(name).gemm != "hp":
            return words
        given = read_options(self.given)
        changed = [(flag_of(key), value) for key, value in given.without_mxfp8().items() if getattr(given, key) != value]
        return *words, *(word for pair in changed for word in pair)


def command(argv: Sequence[str]) -> int:
    """Run `mxep convergence <argv>`; returns 0 if done or stopped with checkpoints, 1 if a run failed. ValueError: wrong options."""
    started = time.monotonic()
    options = _parser().parse_args(list(argv))
    return _train(_plan(options), options, None if options.seconds is None else started + options.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipes", action="extend", type=split_names, metavar="A,B", help=f"default {DEFAULT_RECIPE}")
    parser.add_argument("--arm", action="append", metavar="NAME=OPTIONS", help="runs with these options of `mxep train` as well")
    parser.add_argument("--baseline", default=None, help="recipe or arm to compare with (default bf16)")
    parser.add_argument("--seeds", type=int, default=None, help="of each recipe and arm (default 3, the least for a verdict)")
    parser.add_argument("--seconds", type=float, default=None, help="stop every run with a checkpoint after this time (default: never)")
    parser.add_argument("--resume", action="store_true", help="continue the runs in --out, with their options")
    parser.add_argument("--at-once", type=int, default=None, help="runs at the same time (default: all on a GPU, one on a CPU)")
    parser.add_argument("--record", type=Path, default=None, metavar="FOLDER", help="write FOLDER/convergence-DEVICE-1.json at the end")
    parser.add_argument("train", nargs="*", metavar="-- OPTION", help="options of `mxep train` (default model: dsv3_small)")
    return parser


def _plan(options: argparse.Namespace) -> ComparisonPlan:
    """The plan from the command line, or with --resume from the folder. Raises ValueError for invalid options."""
    check_positive(options, ("seeds", "at_once", "seconds"))
    path = options.out / PLAN_FILE
    if options.resume:
        return _kept_plan(path, options)
    if path.exists():
        raise ValueError(f"{options.out} holds runs already; continue them with --resume, or choose another --out")
    arms = _arms(options.arm or [])
    baseline = (options.baseline or "bf16").strip()
    ours = [*(options.recipes or ([] if arms else [DEFAULT_RECIPE])), *(name for name in arms if name != baseline)]
    recipes = (*ours, baseline)
    known: list[Any] = []
    for name in recipes:
        known.append(name if name in arms else resolve_recipe(name))
        if known[-1] in known[:-1]:
            raise ValueError(f"--recipes={','.join(ours)}, --baseline={recipes[-1]}: {name} is named twice, want different recipes")
    plan = ComparisonPlan(recipes, options.seeds or 3, tuple(options.train), arms)
    words = train_options(plan.given, options.out)
    for name in arms:
        _check_arm(plan, words, name)
    kept = asdict(plan) | {"fused_layer": TrainConfig.fused_layer, "file": _of_file(read_options(plan.given))}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--out: {path} cannot be written: {error.strerror}; choose another --out") from error
    return plan


def _of_file(config: TrainConfig) -> dict[str, Any]:
    """The options that the file of --config gives, as plain values."""
    values = {} if config.config is None else read_toml(config.config)
    return {name: value for name, value in replace(TrainConfig(), **values).to_json().items() if name in values}


def check_positive(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError for an option of these that is given and not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{flag_of(name)}={value}, want more than 0")


def check_eval_every(every: int, steps: int) -> None:
    """Raise ValueError if the last tenth of so many steps may have no evaluation."""
    if every > (most := max(steps // 10, 1)):
        raise ValueError(f"--eval-every={every} of {steps} steps, want an evaluation in the last tenth: {most} or less")


def _arms(given: Sequence[str]) -> dict[str, str]:
    """Options by arm. Raises ValueError for an arm without a name that can be a folder's, or without options.

    >>> _arms(["8bit=--optimizer adamw8bit"])
    {'8bit': '--optimizer adamw8bit'}
    """
    arms = dict[str, str]()
    for word in given:
        name, _, options = word.partition("=")
        if not name.replace("-", "").replace("_", "").isalnum() or not options.startswith("--"):
            raise ValueError(f"--arm={word}, want NAME=OPTIONS, as in --arm '8bit=--optimizer adamw8bit'")
        if name in (*arms, *RECIPES, *ALIASES):
            raise ValueError(f"--arm={word}: {name} is the name of another arm or of a recipe; give it another one")
        arms[name] = options
    return arms


def _check_arm(plan: ComparisonPlan, words: Sequence[str], name: str) -> None:
    """Raise ValueError for options of an arm that `mxep train` refuses beside those of all runs, that this command sets, or that change
    what is compared: its data, initial weights, steps or evaluations."""
    own = plan.options_of(name)
    for word in own:
        if field_of(word) in (*(set(_OURS) - {"recipe"}), *_SHARED, "config"):
            raise ValueError(f"--arm {name}: {word.partition('=')[0]} must be the same in all runs; give it after --, or leave it out")
    config, shared = read_options([*words, *own]), read_options(words)
    resolve_recipe(config.recipe)
    _check_needed(config)
    for option in ("init_from", "tokenizer", "data_field", "chat", "assistant_only_loss"):
        if getattr(config, option) != getattr(shared, option):
            raise ValueError(f"--arm {name}: {flag_of(option)} must be the same in all runs; give it after --, or leave it out")
    if _resolved(config).choice != _resolved(shared).choice:
        raise ValueError(f"--arm {name}: another model, which must be the same in all runs; give it after --, or leave it out")


def _check_needed(config: TrainConfig) -> None:
    """Raise ValueError if a run would have no evaluations or no checkpoints."""
    for name, why in _NEEDED.items():
        if not getattr(config, name):
            raise ValueError(f"--{name}=False: {why}; leave it out")


def _kept_plan(path: Path, options: argparse.Namespace) -> ComparisonPlan:
    """The saved plan. Raises ValueError if there is none, for options that it contains, and if the file of --config has changed."""
    if options.train or options.recipes or options.arm or options.baseline or options.seeds:
        raise ValueError("--resume continues the saved runs; leave out --recipes, --arm, --baseline, --seeds and options of `mxep train`")
    try:
        kept = json.loads(path.read_text())
        config = read_options(kept["given"])
        file = _of_file(config)
        # The default of older plans, which some of the runs have.
        separate = [] if kept.get("fused_layer") or "fused_layer" in file else ["--no-fused-layer"]
        plan = ComparisonPlan(tuple(kept["recipes"]), int(kept["seeds"]), (*separate, *kept["given"]), dict(kept.get("arms", {})))
        began = dict(kept.get("file", file))
        if "file" not in kept:  # an older plan: later pieces are compared with this one
            replace_file(path, (json.dumps({**kept, "file": file}, indent=1) + "\n").encode())
    except FileNotFoundError as error:
        raise ValueError(f"--resume: nothing to continue in {path.parent} (no {path.name}); leave --resume out") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: {path} is damaged: {error!r}; start again in another --out") from error
    if changed := sorted(name for name in {*file, *began} if file.get(name) != began.get(name)):
        shown = [f"{name}={file.get(name, 'not given')}, want {began.get(name, 'not given')}" for name in changed]
        raise ValueError(f"--config {config.config}: the runs began with others: {'; '.join(shown)}; restore it, or choose another --out")
    return plan


def train_options(given: Sequence[str], out: Path) -> list[str]:
    """Options of every run: defaults, then `given`. Raises ValueError for options that this command sets or cannot use."""
    for word in given:
        if field_of(word) in _OURS:
            raise ValueError(f"{word.partition('=')[0]} is set by mxep convergence for each run; leave it out")
    chosen = read_options(given)
    from_file = {} if chosen.config is None else read_toml(chosen.config)
    if ours := [name for name in from_file if name in _OURS]:
        raise ValueError(f"--config {chosen.config}: {', '.join(ours)}: set by mxep convergence for each run; leave it out")
    model = [] if chosen.model or chosen.model_name else ["--model", "dsv3_small"]
    config = read_options([*model, *given])
    _check_needed(config)
    check_paths(config.data)
    settings = _resolved(config)
    steps = settings.steps
    every = config.eval_every or max(steps // _EVALUATIONS, 1)
    check_eval_every(every, steps)
    data = [] if config.data else ["--data", str(out / CORPUS_FILE)]
    defaults = {
        "eval_tokens": ("--eval-tokens", str(max(98304, settings.seq_len))),
        "keep": ("--keep", "1"),
        "cache_weights": ("--cache-weights",),
        "log_every": ("--log-every", "100"),
    }
    kept = [word for name, words in defaults.items() if name not in from_file for word in words]
    return [*model, *data, *kept, *given, "--eval-every", str(every)]


def _resolved(config: TrainConfig) -> ResolvedConfig:
    """The options with all values, for one rank."""
    return resolve(config, "cuda" if config.device == "auto" else config.device, 1)


def _train(plan: ComparisonPlan, options: argparse.Namespace, deadline: float | None) -> int:
    """Runs what is not done yet; once all is done, write the record."""
    from mxep.device import device_type_of

    words = train_options(plan.given, options.out)
    config = read_options(words)
    device_type = device_type_of(config.device)
    steps, runs, corpus = resolve(config, device_type, 1).steps, plan.runs(options.out), options.out / CORPUS_FILE
    if str(corpus) in config.data and not corpus.exists():
        taken, left_out = write_python_corpus(corpus)
        size = corpus.stat().st_size / 1e6
        say(f"corpus: {taken:,} .py files of this Python, {left_out:,} left out (empty or not UTF-8), {size:,.0f} MB")
    at_once = options.at_once or (len(runs) if device_type == "cuda" else 1)
    waiting = [run for run in runs if run.step < steps]  # one with a checkpoint continues

    def train(run: SeedRun) -> list[str]:
        return ["train", *words, *run.options, "--seed", str(run.seed), "--out", str(run.folder), "--nproc", "1", "--resume", "auto"]

    pool = RunPool(waiting, train, at_once, deadline, say)
    say(f"{len(runs)} runs of {steps} steps, {len(waiting)} to do, up to {at_once} at once on {device_type}: {options.out}")
    if pool.run(lambda: _progress(runs)):
        pool.print_failures(PROGRAM)
        return 1
    if any(run.step < steps for run in runs):
        say(_progress(runs))
        say(f"stopped; continue with: {PROGRAM} --resume --out {options.out}")
        return 0
    _finish(plan, runs, options, config)
    return 0


def _progress(runs: Sequence[SeedRun]) -> str:
    steps = {run.name: last_step(read_metrics(run.folder / METRICS_FILE)) for run in runs}
    return "steps: " + ", ".join(f"{name} {step}" for name, step in steps.items())


def _finish(plan: ComparisonPlan, runs: Sequence[SeedRun], options: argparse.Namespace, config: TrainConfig) -> None:
    """Prints the table and the verdict, draws the plot, writes the record. `config`: the options of all runs."""
    import torch

    from mxep.bench.markdown_tables import convergence_table
    from mxep.bench.plots import convergence

    metrics = {run: read_metrics(run.folder / METRICS_FILE) for run in runs}
    by_recipe = {recipe: [metrics[run] for run in runs if run.recipe == recipe] for recipe in plan.recipes}
    starts = {run.name: record for run in runs for record in metrics[run] if record["kind"] == "run"}
    if len({record["data"]["fingerprint"] for record in starts.values()}) > 1:
        listed = ", ".join(f"{name} {record['data']['fingerprint'][:8]}" for name, record in starts.items())
        raise ValueError(
            f"the text has changed between the runs ({listed}), so their losses cannot be compared; start again in another --out"
        )
    start = next(record for record in metrics[runs[0]] if record["kind"] == "run")
    resolved = resolve(config, start["device"], 1)
    named = [name for name in plan.recipes[:-1] if name not in plan.arms]
    asked = ["--out", "FOLDER", *(["--recipes", ",".join(named)] if named else [])]
    for name in plan.arms:
        asked += ["--arm", shlex.quote(f"{name}={shlex.join(map(without_folder, plan.options_of(name)))}")]
    asked += ["--baseline", plan.recipes[-1], "--seeds", str(plan.seeds)]
    given = ["--", *map(shlex.quote, map(without_folder, plan.given))] if plan.given else []
    record: dict[str, Any] = {
        "benchmark": "convergence",
        "device": device_name(torch.device(start["device"])),
        **setting_of(start, config, resolved),
        "seeds": plan.seeds,
        **summarize(by_recipe, resolved.steps),
        **origin(" ".join([PROGRAM, *asked, "--record", "benchmarks/results", *given])),
    }
    for name, arm in record["arms"].items():
        if (lr := starts[f"{name}-seed0"]["settings"]["lr"]) not in (None, resolved.lr):
            arm["lr"] = lr
    say(convergence_table([record]))
    if record["no_verdict"]:
        say(f"no verdict: {'; '.join(record['no_verdict'])}")
    if options.record is not None:
        say(f"record {write_beside(record, compared, options.record)}")
    say(f"plot {convergence([record], options.out)}")


def without_folder(word: str) -> str:
    """The word with the last part of an absolute path alone, so that records name no path of a machine.

    >>> without_folder("--data=/data/text.jsonl"), without_folder("/data/text.jsonl"), without_folder("--lr=3e-4")
    ('--data=text.jsonl', 'text.jsonl', '--lr=3e-4')
    """
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else word


def compared(record: Mapping[str, Any]) -> list[Any]:
    """Records of other models, arms, lengths, batches or learning rates stay in the file of a new one."""
    return [record["model"], [*record["arms"]], *(record[name] for name in ("steps", "seq_len", "tokens", "lr"))]


def tail_mean(records: Metrics, kind: str, steps: int, run: str) -> float:
    """Mean loss of the records of that kind ("step" or "held_out") over the last tenth of `steps`, nats per token.

    Raises ValueError, which names the run, if there is none, since skipped steps have no loss, or if one is no finite number.

    >>> tail_mean([{"kind": "step", "step": step, "loss": float(step)} for step in range(1, 21)], "step", 20, "bf16-seed0")
    19.5
    """
    losses = [record["loss"] for record in records if record["kind"] == kind and record["step"] > steps * (1 - TAIL)]
    if not losses:
        raise ValueError(
            f"{run}: no {kind!r} record in the last tenth of {steps} steps, want one or more: its log.txt says which steps were skipped; "
            "start again in another --out, with a lower --lr after --"
        )
    if wrong := [loss for loss in losses if not math.isfinite(loss)]:
        where = f"{run}: a {kind!r} loss in the last tenth of {steps} steps is {wrong[0]}"
        raise ValueError(f"{where}, want finite numbers: it has diverged; start again in another --out, with a lower --lr")
    return statistics.fmean(losses)


def curve(records: Metrics) -> dict[str, list[float | None]]:
    """{"step": [...], "held_out": [...], "training": [...]}: by evaluation; "training" is the mean loss since the previous one, if any."""
    found: dict[str, list[float | None]] = {"step": [], "held_out": [], "training": []}
    since: list[float] = []
    for record in records:
        if record["kind"] == "step":
            since.append(record["loss"])
        elif record["kind"] == "held_out":
            found["step"].append(record["step"])
            found["held_out"].append(round(record["loss"], 5))
            found["training"].append(round(statistics.fmean(since), 5) if since else None)
            since = []
    return found


def arm_of(name: str, runs: Sequence[Metrics], steps: int) -> dict[str, Any]:
    """Results of the arm of this name: losses by seed, their mean and range, and the curves."""
    held_out, training = (
        [round(tail_mean(records, kind, steps, f"{name}-seed{seed}"), 6) for seed, records in enumerate(runs)]
        for kind in ("held_out", "step")
    )
    starts = [[record for record in records if record["kind"] == "run"] for records in runs]
    return {
        "held_out": held_out,
        "held_out_mean": round(statistics.fmean(held_out), 6),
        "held_out_range": [min(held_out), max(held_out)],
        "training": training,
        "gemm_path": starts[0][-1]["gemm_path"],
        "pieces": [len(found) for found in starts],
        "curves": [curve(records) for records in runs],
    }


def summarize(runs: Mapping[str, Sequence[Metrics]], steps: int) -> dict[str, Any]:
    """The results of a record; the last recipe is the baseline.

    Args:
        runs: by recipe, the metrics of each seed, in the same order for all recipes.
        steps: of each run.

    Returns:
        arms (see `arm_of`); ratios of held-out means to the last recipe's, their limit (1) and target; whether each mean lies within the
        range of that recipe's seeds; what is missing for a verdict; ratios seed by seed.
    """
    arms = {recipe: arm_of(recipe, metrics, steps) for recipe, metrics in runs.items()}
    *ours, baseline = arms
    base = arms[baseline]
    ratios = {f"{name}_held_out_vs_{baseline}": arms[name]["held_out_mean"] / base["held_out_mean"] for name in ours}
    least, most = base["held_out_range"]
    return {
        "arms": arms,
        "ratios": {name: round(ratio, 6) for name, ratio in ratios.items()},
        "limit": dict.fromkeys(ratios, 1.0),
        "target": dict.fromkeys(ratios, 1 + MAX_DIFFERENCE),
        "within_target": {name: abs(ratio - 1) <= MAX_DIFFERENCE for name, ratio in ratios.items()},
        "within_range": {name: least <= arms[name]["held_out_mean"] <= most for name in ours},
        "no_verdict": missing_for_verdict(base, steps),
        "by_seed": {
            name: [round(a / b, 6) for a, b in zip(arms[name]["held_out"], base["held_out"], strict=True)] for name in ours
        },
    }  # fmt: skip


def missing_for_verdict(baseline: Mapping[str, Any], steps: int) -> list[str]:
    """Why the runs are too few or too short for a verdict, with what they need; empty if there is one.

    Args:
        baseline: its arm, see `arm_of`.
        steps: of each run.
    """
    seeds = len(baseline["held_out"])
    tails = [
        [loss for step, loss in zip(curves["step"], curves["held_out"], strict=True) if step > steps * (1 - TAIL)]
        for curves in baseline["curves"]
    ]
    missing = []
    if seeds < MIN_SEEDS:
        missing.append(f"{seeds} {'seed has' if seeds == 1 else 'seeds have'} no spread, want --seeds {MIN_SEEDS} or more")
    if (evaluations := min(map(len, tails))) < MIN_EVALUATIONS:
        want = f"want {MIN_EVALUATIONS} or more: more --steps or a smaller --eval-every"
        missing.append(f"{evaluations} of the evaluations are in the last tenth of {steps} steps, {want}")
    falls, spread = statistics.fmean(tail[0] - tail[-1] for tail in tails), max(baseline["held_out"]) - min(baseline["held_out"])
    if not missing and falls > spread:
        fell = f"the baseline's loss falls by {falls:.4f} within the last tenth of {steps} steps, its seeds differ by {spread:.4f}"
        missing.append(f"{fell}; want more --steps")
    return missing


def setting_of(start: Mapping[str, Any], config: TrainConfig, resolved: ResolvedConfig) -> dict[str, Any]:
    """What was trained, for the record: shape, model, data, schedule. `start`: a run's first record; `config`: the options of all runs."""
    shape = resolved.shape
    tokens = resolved.batch * resolved.seq_len * config.accumulate
    tokenizer = start["data"]["tokenizer"]
    return {
        "world_size": start["world"],
        "shape": {"T": tokens, "D": shape.dim, "H": shape.expert_hidden, "E": shape.num_experts, "C": shape.top_k},
        "model": start["model"],
        "data": {**start["data"], "tokenizer": {**tokenizer, "name": without_folder(tokenizer["name"])}},
        "steps": resolved.steps,
        "tokens": resolved.steps * tokens,
        "seq_len": resolved.seq_len,
        "lr": resolved.lr,
        "warmup": resolved.warmup,
        "evaluation": {"every": resolved.eval_every, "tokens": config.eval_tokens, "averaged_over": TAIL},
        "options": {name: getattr(config, name) for name in ("cache_weights", "fused_experts", "fused_layer", "lr_floor")},
    }
