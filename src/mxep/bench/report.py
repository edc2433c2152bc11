"""Puts the records into the README and pages of docs and draws docs/plots: `mxep bench report`.

A page names the blocks that it wants by a pair of markers each; a test holds the pages to the records.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxep.bench.layer import BASELINES, RECIPE
from mxep.bench.plots import draw
from mxep.bench.readme_tables import TABLES, limit_of, markdown, trained
from mxep.bench.records import RESULTS, device_title, of_most_ranks, read_records, record_place
from mxep.bench.timing import MOST_SPREAD
from mxep.bench.training import BASELINE, ONE_FUNCTION
from mxep.shapes import record_bytes
from mxep.train.metrics import read_metrics

PAGES = ("README.md", "docs/performance.md", "docs/torchtitan.md", "docs/training.md", "docs/transformers.md")
_BLOCK = re.compile(r"(<!-- measured: (\w+), written by `mxep bench report` -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:measured|end of)\b")
Records = list[dict[str, Any]]


def markers(name: str) -> tuple[str, str]:
    """What stands on a page in front of a block and behind it."""
    return f"<!-- measured: {name}, written by `mxep bench report` -->", f"<!-- end of {name} -->"


def accuracy_table(records: Records) -> str:
    """Markdown table: the worst routing of every device and world size, against the same pipeline in bf16."""
    header = ["five blocks against bf16, worst of balanced, random, starved routing", "out", "dx", "dW"]
    rows = []
    for (device, world), group in _runs(records).items():
        shape = group[0]["shape"]
        worst = [min(record["sqnr_db"][name] for record in group) for name in ("out", "dx", "dw")]
        where = "CPU, gloo" if device == "cpu" else f"{device_title(device)}, NCCL"
        where += f", {world} ranks, ({shape['T']}, {shape['D']}) x ({shape['L']}, {shape['N']})"
        rows.append([where, *(f"{value:.1f} dB" for value in worst)])
    return markdown(header, rows)


def _runs(records: Records) -> dict[tuple[str, int], Records]:
    """Records by device and world size."""
    runs: dict[tuple[str, int], Records] = {}
    for record in sorted(records, key=lambda record: (record["device"], record["world_size"])):
        runs.setdefault((record["device"], record["world_size"]), []).append(record)
    return runs


def tutorial_table(folder: Path = RESULTS) -> str:
    """Markdown tables: steps of every run's metrics (`metrics.jsonl` of `mxep train`) that is kept under tutorial-*.jsonl."""
    parts = []
    for path in sorted(folder.glob("tutorial-*.jsonl")):
        run, *steps = read_metrics(path)
        options = run["settings"]
        device = path.stem.partition("-")[2].rpartition("-")[0]
        parts.append(
            f"{run['world']} x {device_title(device)}, {run['model']['name']}, EP {options['ep']}, {options['batch']} sequences of "
            f"{options['seq_len']} tokens a GPU,\n{options['activation_checkpoint']} recomputation"
            f"{', compiled' * options['compile']}, {options['recipe']}, {run['transport']} transport:"
        )
        shown = [step for step in steps if step["kind"] == "step" and (step["step"] <= 2 or step["step"] % 5 == 0)]
        rows = [
            [
                str(step["step"]),
                f"{step['loss']:.4f}",
                f"{step['grad_norm']:.2f}",
                f"{step['memory_gib']:.2f} GiB ({step['memory_share']:.1%})",
                f"{step['tps']:,.0f}",
                f"{step['tflops']:.1f}",
                f"{step['mfu']:.1%}",
            ]
            for step in shown
        ]
        parts.append(markdown(["step", "loss", "grad_norm", "memory", "tps", "tflops", "mfu"], rows))
    return "\n\n".join(parts)


def gpu_tests_line(records: Records) -> str:
    """One sentence: what passed on which GPUs, at which commit; a line for each."""
    runs = [
        f"{record['counts']['passed']} passed, {record['counts']['failed'] + record['counts']['error']} failed"
        + (f", {record['counts']['xfailed']} known to fail" if record["counts"].get("xfailed") else "")
        + f" on {record['world_size']} {device_title(record['device'])}"
        f" (torch {record['torch'].partition('+')[0]}, commit {record['commit']})"
        for record in records
    ]
    return "GPU tests: " + ";\n".join(runs) + "."


def _commits(entries: Iterable[Mapping[str, Any]]) -> str:
    """
    >>> _commits([{"commit": "a1"}, {"commit": "b2"}, {"commit": "a1"}])
    'commits a1, b2'
    """
    names = list(dict.fromkeys(entry["commit"] for entry in entries))
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def sanitizer_line(records: Records) -> str:
    """One sentence of what tests/programs/sanitize.py found."""
    runs = []
    for record in records:
        passed, failed, errors = (sum(found[kind] or 0 for found in record["files"].values()) for kind in ("passed", "failed", "errors"))
        silent = sum(found["errors"] is None for found in record["files"].values())
        runs.append(
            f"{errors} errors in {passed} passed and {failed} failed tests"
            + (f", {silent} files without a summary" if silent else "")
            + f" on {device_title(record['device'])} ({_commits(record['files'].values())})"
        )
    return f"The kernels' tests under compute-sanitizer memcheck: {'; '.join(runs)}."


def learning_line(records: Records) -> str:
    """Held-out losses of `mxep convergence`, in one sentence for each record."""
    lines = []
    for record in records:
        arms = dict(record["arms"])
        base = arms.pop("bf16")
        others = (f"{arm['held_out_mean']:.4f} with `{name}`" for name, arm in arms.items())
        low, high = base["held_out_range"]
        lines.append(
            f"{record['model']['name']}, {record['model']['parameters'] / 1e6:.0f} million parameters, {record['steps']} steps on"
            f" {record_place(record)}, {record['seeds']} seeds each:\nheld-out loss {base['held_out_mean']:.4f} in bf16"
            f" ({low:.4f} to {high:.4f}), {', '.join(others)} (commit {record['commit']})."
        )
    return "\n".join(lines)


def _largest(records: Records, ratio: str) -> Records:
    """Balanced ones of the most GPUs that have this ratio."""
    found = [record for record in records if record["routing"] == "balanced" and record["device"] != "cpu" and ratio in record["ratios"]]
    return of_most_ranks(found)


def _speeds(layers: Records, pipelines: Records) -> list[list[str]]:
    """What runs, on how many GPUs, both times, speed-up, and its reference where exchanges and GEMMs do not overlap or one GPU sets it."""
    rows = []

    def add(what: str, record: dict[str, Any], base: float, ours: str, ratio: str, limited: bool, same_way: str = "") -> None:
        times = f"{base:.1f} ms", f"{record['arms'][f'{ours}_total']['median_ms']:.1f} ms"
        limit = limit_of(record, ratio) if limited else None
        beside = "" if limit is None else f"{limit:.2f}x"
        rows.append([what, record_place(record), *times, f"**{record['ratios'][ratio]:.2f}x**", beside, same_way])

    for record in _largest(layers, "total_vs_nccl_bf16"):
        shape = record["shape"]
        what = f"a layer, {shape['T_global']} tokens, D {shape['D']}, H {shape['H']}, {shape['E']} experts, top {shape['C']}"
        what += f", `{record.get('recipe', RECIPE)}`"
        base = min(record["arms"][f"{arm}_total"]["median_ms"] for arm in BASELINES)
        ours, same_way = (record["arms"][f"{arm}_total"]["median_ms"] for arm in ("mxfp8", "bf16"))
        shared = f"{same_way:.1f} ms, **{same_way / ours:.2f}x**" if record["mxfp8_over"] == "symmetric" else ""
        add(what, record, base, "mxfp8", "total_vs_nccl_bf16", True, shared)
    ways = ("mxfp8", "total_vs_bf16", "`ep_grouped_mm`"), ("mxfp8_nccl", "nccl_total_vs_bf16", "five blocks over NCCL")
    for ours, ratio, way in ways:
        for record in _largest(pipelines, ratio):
            shape = record["shape"]
            what = f"{way}, {shape['T']} rows a GPU, D {shape['D']}, N {shape['N']}"
            add(what, record, record["arms"]["bf16_total"]["median_ms"], ours, ratio, way != "`ep_grouped_mm`")
    return rows


def _training_steps(trainings: Records) -> list[list[str]]:
    """What is trained in MXFP8 on the most GPUs, on how many, a step's time, then the time and the speed-up of either baseline in bf16."""
    rows = []
    for record in of_most_ranks(trainings):
        step_ms = {arm: timing["median_ms"] for arm, timing in record["arms"].items()}
        bases = [step_ms.pop(arm, None) for arm in (BASELINE, ONE_FUNCTION)]
        for arm, ms in step_ms.items():
            cells = [("", "") if base is None else (f"{base:.0f} ms", f"**{base / ms:.2f}x**") for base in bases]
            rows.append([f"{trained(record)}, `{arm}`", record_place(record), f"{ms:.0f} ms", *(cell for pair in cells for cell in pair)])
    return rows


def summary(
    pipelines: Records, layers: Records, trainings: Records, accuracies: Records, tests: Records, sanitized: Sequence[dict[str, Any]] = ()
) -> str:
    """The README's two tables, of layers and of training steps, and what stands behind them."""
    parts = []
    if speeds := _speeds(layers, pipelines):
        header = [
            "forward + backward",
            "on",
            "bf16 over NCCL",
            "MXFP8",
            "faster",
            "reference in that run",
            "bf16 over the same shared memory",
        ]
        parts.append(markdown(header, speeds))
    if steps := _training_steps(trainings):
        against = "bf16 in separate blocks over NCCL", "faster", "bf16 in one function over NCCL", "faster"
        parts.append(markdown(["a training step", "on", "MXFP8", *against], steps))
    if accuracies:
        worst = {name: min(record["sqnr_db"][name] for record in accuracies) for name in ("out", "dx", "dw")}
        where = ", ".join(f"{world} {'CPU ranks' if device == 'cpu' else device_title(device)}" for device, world in _runs(accuracies))
        saved = 2 * accuracies[0]["shape"]["D"] / record_bytes(accuracies[0]["shape"]["D"])
        parts.append(
            f"The five blocks against the same in bf16: out {worst['out']:.1f} dB, dx {worst['dx']:.1f} dB, dW {worst['dw']:.1f} dB,\n"
            f"the worst of {where} and around one grouped GEMM (a layer has three in a row, and lies lower). A row sent in MXFP8\n"
            f"has {saved:.2f} times fewer bytes."
        )
    if tests:
        parts.append(gpu_tests_line(tests))
    if sanitized:
        parts.append(sanitizer_line([*sanitized]))
    return "\n\n".join(parts)


def doubts_line(records: Records) -> str:
    """How many times of these records are worth little, "" where none is; the records name the arms."""
    times = sum(len(record["arms"]) for record in records if "arms" in record)
    unsteady, waited = (sum(len(record.get(field, [])) for record in records) for field in ("unsteady", "host_bound"))
    found = []
    if unsteady:
        found.append(f"in {unsteady} the medians of rounds differ by more than {MOST_SPREAD - 1:.0%}")
    if waited:
        found.append(f"in {waited} the device may have waited for the host")
    calls, busy = (sum(len(record.get(field, [])) for record in records) for field in ("host_us", "host_unsteady"))
    lines = [f"Of these records' {times} times: {'; '.join(found)}."] if found else []
    lines += [f"Of the host's {calls} times {busy} differed between batches: it was busy elsewhere."] if busy else []
    return "\n".join(lines)


def block(name: str) -> str:
    """What the records say under that name, "" where there are none. Raises ValueError for a name that nothing is written under."""
    if name == "summary":
        read = ("pipeline", "layer", "train", "accuracy", "gpu_tests", "sanitizer_memcheck")
        return summary(*(read_records(benchmark) for benchmark in read))
    if name == "tutorial":
        return tutorial_table()
    if name == "learning":
        return learning_line(read_records("convergence"))
    writers: dict[str, Callable[[Records], str]] = {"accuracy": accuracy_table, "gpu_tests": gpu_tests_line, **TABLES}
    if name not in writers:
        raise ValueError(f"report: no block {name!r}, want one of summary, {', '.join(writers)}, learning, tutorial")
    records = read_records(name)
    return "\n\n".join(filter(None, [writers[name](records), doubts_line(records)])) if records else ""


def render(text: str, page: str) -> str:
    """A page's text with its blocks written anew. Raises ValueError for a page without blocks, or with a marker that has no partner."""
    written, found = _BLOCK.subn(lambda match: "\n".join([match[1].rstrip("\n"), *filter(None, [block(match[2])]), match[3]]), text)
    if not found or len(_MARKER.findall(text)) != 2 * found:
        raise ValueError(f"report: {page} has {found} whole blocks, want at least one, each between {' and '.join(markers('NAME'))}")
    return written


def main() -> int:
    """Raises ValueError outside of a checkout."""
    if missing := [page for page in PAGES if not Path(page).is_file()]:
        raise ValueError(f"report: no {', '.join(missing)} in {Path.cwd()}, want a checkout of mxep: the records' tables go into its pages")
    for page in PAGES:
        path = Path(page)
        path.write_text(render(path.read_text(), page))
        print("wrote", path)
    for plot in draw({name: read_records(name) for name in TABLES}):
        print("wrote", plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
