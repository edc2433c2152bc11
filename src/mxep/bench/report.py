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

from mxep.bench import dense_linears, layer_tables
from mxep.bench.layer import BASELINES
from mxep.bench.markdown_cells import Records, limit_of, markdown
from mxep.bench.markdown_tables import TABLES, peers_details, peers_speeds, published_table, run_table, trained
from mxep.bench.plots import draw
from mxep.bench.records import Record, device_title, median_ms, of_most_ranks, of_newest_device, of_one_device, read_records, record_place
from mxep.bench.timing import MAX_SPREAD
from mxep.bench.training import BASELINE, ONE_FUNCTION

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


def gpu_tests_table(records: Records) -> str:
    """How many tests passed on which GPUs, at which commit."""
    rows = []
    for record in records:
        counts = record["counts"]
        failed = f"{counts['failed'] + counts['error']}" + (f", and {counts['xfailed']} known to fail" if counts.get("xfailed") else "")
        place = f"{record['world_size']} x {device_title(record['device'])}", record["torch"].partition("+")[0]
        rows.append([*place, str(counts["passed"]), failed, record["commit"]])
    return markdown(["GPU tests on", "torch", "passed", "failed", "commit"], rows)


def _commits(entries: Iterable[Mapping[str, Any]]) -> str:
    """
    >>> _commits([{"commit": "a1"}, {"commit": "b2"}, {"commit": "a1, c3"}])
    'a1, b2, c3'
    """
    return ", ".join(dict.fromkeys(name for entry in entries for name in entry["commit"].split(", ")))


def sanitizer_table(records: Records) -> str:
    """The findings of tests/programs/sanitize.py, by tool and GPU."""
    rows = []
    for record in records:
        passed, failed, errors = (str(sum(found[kind] for found in record["files"].values())) for kind in ("passed", "failed", "errors"))
        missing = record["missing"]
        left = f"{len(missing)} of {len({*missing, *record['files']})}" if missing else "none"
        tool = record["benchmark"].removeprefix("sanitizer_")
        rows.append([tool, device_title(record["device"]), errors, passed, failed, left, _commits(record["files"].values())])
    columns = "errors found", "tests passed", "tests failed", "files without some or all tests", "commits"
    return markdown(["kernels' tests under compute-sanitizer", "on", *columns], rows)


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

    Of one kind of GPU. Training steps are those with the options and the routing of the newest one. No run in which MXFP8 is a CUDA graph,
    which bf16 over NCCL cannot be.
    """
    rows = [[*row[:5], row[6]] for row in _speeds(layers, pipelines, of_newest_device) if not row[0].startswith(_FIVE_BLOCKS)]
    alike = of_newest_device(of_most_ranks([record for record in trainings if "cuda_graph" not in record["options"]]))
    newest = max(alike, key=lambda record: record["date"], default=None)
    steps = _training_steps([record for record in alike if newest and all(record[name] == newest[name] for name in ("options", "routing"))])
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


def layers_overview(pipelines: Records, layers: Records) -> str:
    """Layers, `ep_grouped_mm` and the five blocks on the most GPUs, against bf16 over NCCL and over the same transport."""
    columns = "bf16 over NCCL", "MXFP8", "faster", "reference in that run", "bf16 over the same shared memory"
    speeds = _speeds(layers, pipelines)
    return markdown(["forward + backward", "on", *columns], speeds) if speeds else ""


def steps_overview(trainings: Records) -> str:
    """Training steps on the most GPUs, against both baselines in bf16; those of debug models, which the host limits, come last."""
    rows = []
    for what, place, ms, bases in sorted(_training_steps(trainings), key=lambda row: "debug" in row[0].partition(",")[0]):
        model, _, options = what.partition(", ")
        pairs = (("", "") if base is None else (f"{base:.0f} ms", f"**{base / ms:.2f}x**") for base in bases)
        rows.append([model, place, f"{ms:.0f} ms", *itertools.chain(*pairs), options])
    columns = "MXFP8", "bf16 in separate blocks over NCCL", "faster", "bf16 in one function over NCCL", "faster", "trained with"
    return markdown(["a training step of", "on", *columns], rows) if rows else ""


def tests_on_gpus(tests: Records, *sanitized: Records) -> str:
    """Which tests passed on which GPUs, and what the sanitizers found."""
    found = [record for of_tool in sanitized for record in of_tool]
    return "\n\n".join([*([gpu_tests_table(tests)] if tests else []), *([sanitizer_table(found)] if found else [])])


def doubts_line(records: Records) -> str:
    """How many times of these records are unreliable, "" if none is; the records name the arms."""

    def count(field: str) -> int:
        return sum(len(record.get(field, [])) for record in records)

    unsteady, waited, busy = count("unsteady"), count("host_bound"), count("host_unsteady")
    found = {
        f"in {unsteady} the medians of rounds differ by more than {MAX_SPREAD - 1:.0%}": unsteady,
        f"in {waited} the device may have waited for the host": waited,
    }
    lines = [f"The records have {count('arms')} times: {'; '.join(text for text, number in found.items() if number)}."]
    lines = lines if unsteady or waited else []
    if busy:
        lines.append(f"The records have {count('host_us')} times of the host: in {busy} of them batches differ, as it was busy elsewhere.")
    return "\n".join(lines)


_BLOCKS: dict[str, tuple[Any, ...]] = {  # name -> what writes it, and the benchmarks whose records it gets
    "summary": (summary, "pipeline", "layer", "train"),
    "steps_overview": (steps_overview, "train"),
    "layers_overview": (layers_overview, "pipeline", "layer"),
    "tests_on_gpus": (tests_on_gpus, "gpu_tests", "sanitizer_memcheck", "sanitizer_racecheck"),
    **{name: (write, name) for name, write in TABLES.items()},
    "layer": (layer_tables.speeds, "layer"),
    "layer_against_one_gpu": (layer_tables.against_one_gpu, "layer"),
    "layer_exchanges_alone": (layer_tables.exchanges_alone, "layer"),
    "layer_uneven_loads": (layer_tables.uneven_loads, "layer"),
    "peers": (peers_speeds, "peers"),
    "peers_details": (peers_details, "peers"),
    "learning": (learning_line, "convergence"),
    "published": (published_table, "train"),
    "tutorial": (partial(run_table, "tutorial"),),
    "all_parameters": (partial(run_table, "all_parameters"),),
}


def _last_run(records: Records) -> Records:
    return of_newest_device(of_most_ranks(records))


def _fewest_rows_of_one_device(records: Records) -> Records:
    """Many rows on all devices; of the launches of few rows the smallest, on one device."""
    few = of_one_device([record for record in records if "calls" in record])
    least = min((record["shape"]["T"] for record in few), default=0)
    return [record for record in records if "calls" not in record or (record in few and record["shape"]["T"] == least)]


_SHOWN: dict[str, Callable[[Records], Records]] = {  # which records a block shows, of blocks that do not show all
    "pipeline": _last_run,
    "a2a": _last_run,
    "layer": of_most_ranks,
    "layer_against_one_gpu": _last_run,
    "layer_exchanges_alone": lambda records: _last_run(records)[:1],
    "layer_uneven_loads": _last_run,
    "peers_details": lambda records: records[:1],
    "published": of_most_ranks,
    **dict.fromkeys(("quantize", "rows", "swiglu"), _fewest_rows_of_one_device),
}


def block(name: str) -> str:
    """The block of that name from the records, "" without records. Raises ValueError for an unknown name."""
    if name not in _BLOCKS:
        raise ValueError(f"report: no block {name!r}, want one of {', '.join(_BLOCKS)}")
    write, *benchmarks = _BLOCKS[name]
    given = [_SHOWN.get(name, list)(read_records(benchmark)) for benchmark in benchmarks]
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
