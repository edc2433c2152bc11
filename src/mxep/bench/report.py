"""`mxep bench report`: writes the records' tables into README and pages of docs, and draws docs/plots.

A pair of markers in a page names the block between them; a test compares the pages with the records.  From the records of
`mxep bench linears` it also writes the table that `mxep.parallel.linear_gains` reads.
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mxep.bench import dense_linears
from mxep.bench.layer import BASELINES
from mxep.bench.markdown_tables import (
    TABLES,
    Records,
    by_run,
    limit_of,
    markdown,
    published_table,
    run_table,
    trained,
    worst_db,
)
from mxep.bench.plots import draw
from mxep.bench.records import Record, device_title, median_ms, of_most_ranks, of_newest, read_records, record_place
from mxep.bench.timing import MAX_SPREAD
from mxep.bench.training import BASELINE, ONE_FUNCTION
from mxep.shapes import record_bytes

_GUIDES = (
    "performance",
    "performance_kernels",
    "howto/torchtitan",
    "migration",
    "training/results",
    "training/optimizers",
    "howto/transformers",
    "howto/finetune",
    "howto/lora",
)
PAGES = ("README.md", *(f"docs/{guide}.md" for guide in _GUIDES))
GAINS = Path("src/mxep/parallel/linear_gains.json")
_BLOCK = re.compile(r"(<!-- measured: (\w+), written by `mxep bench report` -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
_FIVE_BLOCKS, _ONE_CALL = "five blocks over NCCL", "`ep_grouped_mm`"
_MARKER = re.compile(r"<!-- (?:measured|end of)\b")


def markers(name: str) -> tuple[str, str]:
    """The lines of a page before and after a block."""
    return f"<!-- measured: {name}, written by `mxep bench report` -->", f"<!-- end of {name} -->"


def gpu_tests_line(records: Records) -> str:
    """One sentence: how many tests passed on which GPUs, at which commit; a line for each record."""
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
    >>> _commits([{"commit": "a1"}, {"commit": "b2"}, {"commit": "a1, c3"}])
    'commits a1, b2, c3'
    """
    names = list(dict.fromkeys(name for entry in entries for name in entry["commit"].split(", ")))
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def sanitizer_line(records: Records) -> str:
    """A sentence for each tool: the findings of tests/programs/sanitize.py."""
    runs: dict[str, list[str]] = {}
    for record in records:
        passed, failed, errors = (sum(found[kind] for found in record["files"].values()) for kind in ("passed", "failed", "errors"))
        missing = record["missing"]
        runs.setdefault(record["benchmark"].removeprefix("sanitizer_"), []).append(
            f"{errors} errors in {passed} passed and {failed} failed tests on {device_title(record['device'])}\n"
            f"({_commits(record['files'].values())})"
            + (f",\nwithout some or all tests of {len(missing)} of {len({*missing, *record['files']})} files" if missing else "")
        )
    return "\n".join(f"The kernels' tests under compute-sanitizer {tool}: {'; '.join(found)}." for tool, found in runs.items())


def learning_line(records: Records) -> str:
    """Held-out losses of `mxep convergence`, one sentence for each record."""
    lines = []
    for record in records:
        arms = dict(record["arms"])
        base = arms.pop("bf16")
        others = (f"{arm['held_out_mean']:.4f} with `{name}`" for name, arm in arms.items())
        low, high = base["held_out_range"]
        lines.append(
            f"{record['model']['name']}, {record['model']['parameters'] / 1e6:.0f} million parameters, {record['steps']} steps on"
            f" {record_place(record)}, {record['seeds']} seeds each:\nheld-out loss {base['held_out_mean']:.4f} in bf16"
            f" ({low:.4f} to {high:.4f}),\n{', '.join(others)} (commit {record['commit']})."
        )
    return "\n".join(lines)


def _largest(records: Records, ratio: str) -> Records:
    """Balanced records of the most GPUs that have this ratio."""
    found = [record for record in records if record["routing"] == "balanced" and record["device"] != "cpu" and ratio in record["ratios"]]
    return of_most_ranks(found)


def _speeds(layers: Records, pipelines: Records, choose: Callable[[Records], Records] = list) -> list[list[str]]:
    """Operation, GPUs, both times, the speed-up, its reference if the reference bounds it, and bf16 over the same transport.

    Of the records on the most GPUs those that `choose` leaves.
    """
    rows = []

    def add(what: str, record: Record, base: float, ours: str, ratio: str, limited: bool, same_transport: str = "") -> None:
        limit = limit_of(record, ratio) if limited else None
        timed = f"{ours}_total"
        times = f"{base:.1f} ms", f"{median_ms(record)[timed]:.1f} ms" + " (unsteady)" * (timed in record.get("unsteady", ()))
        cells = f"**{record['ratios'][ratio]:.2f}x**", "" if limit is None else f"{limit:.2f}x", same_transport
        rows.append([what, record_place(record), *times, *cells])

    for record in choose(_largest(layers, "total_vs_nccl_bf16")):
        shape, ms = record["shape"], median_ms(record)
        what = f"a layer, {shape['T_global']} tokens, D {shape['D']}, H {shape['H']}, {shape['E']} experts, top {shape['C']}"
        what += f", `{record['recipe']}`"
        shared = record["mxfp8_over"] == "symmetric"
        same_transport = f"{ms['bf16_total']:.1f} ms, **{ms['bf16_total'] / ms['mxfp8_total']:.2f}x**" if shared else ""
        add(what, record, min(ms[f"{arm}_total"] for arm in BASELINES), "mxfp8", "total_vs_nccl_bf16", True, same_transport)
    for ours, ratio, name in (("mxfp8", "total_vs_bf16", _ONE_CALL), ("mxfp8_nccl", "nccl_total_vs_bf16", _FIVE_BLOCKS)):
        for record in choose(_largest(pipelines, ratio)):
            shape = record["shape"]
            what = f"{name}, {shape['T']} rows a GPU, D {shape['D']}, N {shape['N']}"
            add(what, record, median_ms(record)["bf16_total"], ours, ratio, name != _ONE_CALL)
    return rows


def _training_steps(trainings: Records) -> list[tuple[str, str, float, list[float | None]]]:
    """On the most GPUs, for every arm but the baselines: what is trained, the GPUs, a step's ms, and the ms of both baselines in bf16."""
    rows = []
    for record in of_most_ranks(trainings):
        step_ms = median_ms(record)
        bases = [step_ms.pop(arm, None) for arm in (BASELINE, ONE_FUNCTION)]
        rows += [(f"{trained(record)}, `{arm}`", record_place(record), ms, bases) for arm, ms in step_ms.items()]
    return rows


def summary(pipelines: Records, layers: Records, trainings: Records) -> str:
    """README's table: layers, `ep_grouped_mm` and training steps on the most GPUs, each against the fastest arm in bf16 over NCCL.

    Of the last day, and of one kind of GPU; no run in which MXFP8 is a CUDA graph, which bf16 over NCCL cannot be.
    """
    alike = [record for record in trainings if "cuda_graph" not in record["options"]]
    rows = [[*row[:5], row[6]] for row in _speeds(layers, pipelines, of_newest) if not row[0].startswith(_FIVE_BLOCKS)]
    steps = _training_steps(of_newest(of_most_ranks(alike)))
    options = {what.partition(", ")[2] for what, *_ in steps}
    shared = options.pop() if len(options) == 1 else ""  # said once, below the table
    for what, place, ms, bases in steps:
        base = min(filter(None, bases))
        of = what.removesuffix(f", {shared}")
        rows.append([f"a training step, {of}", place, f"{base:.0f} ms", f"{ms:.0f} ms", f"**{base / ms:.2f}x**", ""])
    if not rows:
        return ""
    columns = "bf16 over NCCL", "MXFP8", "speed-up", "bf16 over the same shared memory"
    table = markdown(["forward + backward, or a training step", "hardware", *columns], rows)
    note = textwrap.fill(f"The training steps: {shared}.", 140, break_on_hyphens=False)
    return f"{table}\n\n{note}" if shared else table


def overview(pipelines: Records, layers: Records, trainings: Records, accuracies: Records, tests: Records, *sanitized: Records) -> str:
    """Tables of layers and of training steps against every baseline; accuracy; which tests passed on which GPUs."""
    parts = []
    if speeds := _speeds(layers, pipelines):
        columns = "bf16 over NCCL", "MXFP8", "faster", "reference in that run", "bf16 over the same shared memory"
        parts.append(markdown(["forward + backward", "on", *columns], speeds))
    if steps := _training_steps(trainings):
        rows = []
        for what, place, ms, bases in steps:
            pairs = (("", "") if base is None else (f"{base:.0f} ms", f"**{base / ms:.2f}x**") for base in bases)
            rows.append([what, place, f"{ms:.0f} ms", *itertools.chain(*pairs)])
        against = "bf16 in separate blocks over NCCL", "faster", "bf16 in one function over NCCL", "faster"
        parts.append(markdown(["a training step", "on", "MXFP8", *against], rows))
    if accuracies:
        out, dx, dw = worst_db(accuracies)
        runs = sorted(by_run(accuracies))
        where = ", ".join(f"{world} {'CPU ranks' if device == 'cpu' else device_title(device)}" for device, world in runs)
        saved = 2 * accuracies[0]["shape"]["D"] / record_bytes(accuracies[0]["shape"]["D"])
        parts.append(
            f"The five blocks against the same in bf16: out {out:.1f} dB, dx {dx:.1f} dB, dW {dw:.1f} dB,\n"
            f"the worst of {where} and around one grouped GEMM (a layer has three in a row, and lies lower). A row sent in MXFP8\n"
            f"has {saved:.2f} times fewer bytes."
        )
    if tests:
        parts.append(gpu_tests_line(tests))
    if found := [record for of_tool in sanitized for record in of_tool]:
        parts.append(sanitizer_line(found))
    return "\n\n".join(parts)


def doubts_line(records: Records) -> str:
    """How many times of these records are unreliable, "" if none is; the records name the arms."""

    def count(field: str) -> int:
        return sum(len(record.get(field, [])) for record in records)

    unsteady, waited, busy = count("unsteady"), count("host_bound"), count("host_unsteady")
    found = {
        f"in {unsteady} the medians of rounds differ by more than {MAX_SPREAD - 1:.0%}": unsteady,
        f"in {waited} the device may have waited for the host": waited,
    }
    lines = [f"Of these records' {count('arms')} times: {'; '.join(text for text, number in found.items() if number)}."]
    lines = lines if unsteady or waited else []
    lines += [f"Of the host's {count('host_us')} times {busy} differed between batches: it was busy elsewhere."] if busy else []
    return "\n".join(lines)


_BLOCKS: dict[str, tuple[Any, ...]] = {  # name -> what writes it, and the benchmarks whose records it gets
    "summary": (summary, "pipeline", "layer", "train"),
    "overview": (overview, "pipeline", "layer", "train", "accuracy", "gpu_tests", "sanitizer_memcheck", "sanitizer_racecheck"),
    **{name: (write, name) for name, write in TABLES.items()},
    "learning": (learning_line, "convergence"),
    "published": (published_table, "train"),
    "tutorial": (partial(run_table, "tutorial"),),
    "all_parameters": (partial(run_table, "all_parameters"),),
}


def block(name: str) -> str:
    """The block of that name from the records, "" without records. Raises ValueError for an unknown name."""
    if name not in _BLOCKS:
        raise ValueError(f"report: no block {name!r}, want one of {', '.join(_BLOCKS)}")
    write, *benchmarks = _BLOCKS[name]
    given = [read_records(benchmark) for benchmark in benchmarks]
    if benchmarks != [name]:
        text: str = write(*given)
        return text
    return "\n\n".join(filter(None, [write(*given), doubts_line(*given)])) if given[0] else ""


def render(text: str, page: str) -> str:
    """A page's text with new blocks. Raises ValueError for a page without blocks, or with a marker that has no partner."""
    written, found = _BLOCK.subn(lambda match: "\n".join([match[1].rstrip("\n"), *filter(None, [block(match[2])]), match[3]]), text)
    if not found or len(_MARKER.findall(text)) != 2 * found:
        raise ValueError(f"report: {page} has {found} whole blocks, want at least one, each between {' and '.join(markers('NAME'))}")
    return written


def main() -> int:
    """Writes pages, linear_gains.json and plots. Raises ValueError outside of a checkout."""
    if missing := [page for page in PAGES if not Path(page).is_file()]:
        raise ValueError(f"report: no {', '.join(missing)} in {Path.cwd()}, want a checkout of mxep: the records' tables go into its pages")
    for page in PAGES:
        path = Path(page)
        path.write_text(render(path.read_text(), page))
        print("wrote", path)
    if linears := read_records("linears"):
        GAINS.write_text(dense_linears.gains_table(linears))
        print("wrote", GAINS)
    for plot in draw({name: read_records(name) for name in TABLES}):
        print("wrote", plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
