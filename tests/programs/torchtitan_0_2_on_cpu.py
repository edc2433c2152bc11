"""torchtitan 0.2's own trainer on two gloo ranks: what a CPU lacks is put in from here, nothing of it is in the library.

`python torchtitan_0_2_on_cpu.py RUNS.json RESULTS.json`: RUNS is {"train": {name: [torchtitan options]}, "build": {...},
"measure": {name: [options of benchmarks/torchtitan_0_2.py]}, "gpt-oss": {name: [recipes]}}.  Runs to train fork their ranks after the
imports; runs to build convert a model on the meta device as the trainer does, for any number of ranks, and end there; those of gpt-oss
are one layer of it, whose model has FlexAttention, which has no backward on a CPU.  RESULTS is {name: {"steps": [[loss, grad_norm], ...],
"error": text or null, "recipes": {module: its recipe}, "exchanged": modules that mxep sharded, "fused": modules that get tokens and
choices, "dB": {recipe and how: of y and every gradient against torchtitan's own layer}}}, of rank 0.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

WORLD_SIZE = 2
DEGREES = {"cp": "context", "tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert_tensor"}

# 1. A device module: torchtitan asks at import which accelerator there is, and takes "cuda" where there is none.
_memory = types.SimpleNamespace(total_memory=1 << 34)
_cpu = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize", "Stream", "stream")},
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: _memory,
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
_device_module = torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: _cpu if kind == "cpu" else _device_module(kind)


# 2. histc of whole numbers, which counts the tokens of each expert.
def _histc(values: torch.Tensor, bins: int, min: int, max: int) -> torch.Tensor:
    return (values[:, None] == torch.arange(bins)).sum(0)


torch.histc = _histc

import torchtitan.models.deepseek_v3.model.args as deepseek_args  # noqa: E402
import torchtitan.models.gpt_oss.model.moe as gpt_oss_moe  # noqa: E402
import torchtitan.models.moe.utils as moe_utils  # noqa: E402
import torchtitan.train  # noqa: E402
from datasets import Dataset  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.expert_parallel import ExpertParallel  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402
from torchtitan.protocols.model_converter import build_model_converters  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from mxep.integrations.torchtitan_0_2 import MXEP, MXEPConverter  # noqa: E402
from mxep.parallel.conversion import converted_recipe  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import torchtitan_0_2 as benchmark  # noqa: E402

# 3. Row maps of torchtitan's own permute come from a Triton kernel, unless asked.
_indices = moe_utils.generate_permute_indices
moe_utils.generate_permute_indices = lambda *args: _indices(*args, use_cpu=True)

# 4. gloo has no scaled sum; torchtitan asks for a divisor of one, which is a plain sum.
_divide = FSDPModule.set_gradient_divide_factor


def _divide_after_a_sum(self: FSDPModule, factor: float) -> None:
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _divide_after_a_sum

# 5. Its models multiply in a loop below SM90; converted experts need the grouped GEMM, which a CPU has.
deepseek_args.has_cuda_capability = lambda major, minor: True

# 6. Its trainer sleeps two seconds at the end.
torchtitan.train.time = types.SimpleNamespace(**{**vars(torchtitan.train.time), "sleep": lambda seconds: None})

# 7. Text and a tokenizer, which the wheel lacks: this file, byte by byte.
DATASETS["this_file"] = DatasetConfig(
    path="",
    loader=lambda path: Dataset.from_dict({"text": [pathlib.Path(__file__).read_text()] * 4}),
    sample_processor=lambda sample: sample["text"],
)


def train(options: list[str], result: dict[str, Any]) -> None:
    trainer = torchtitan.train.Trainer(ConfigManager().parse_args(options))
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, max_loss: float, grad_norm: float, **more: Any) -> None:
        result["steps"].append([loss, grad_norm])
        log(step, loss, max_loss, grad_norm, **more)

    trainer.metrics_processor.log = note
    note_recipes(trainer.model_parts[0], result)
    trainer.train()
    trainer.close()


def note_recipes(model: torch.nn.Module, result: dict[str, Any]) -> None:
    for name, module in model.named_modules():
        recipe = converted_recipe(module)
        if recipe is not None:
            result["recipes"][name.replace("_checkpoint_wrapped_module.", "")] = recipe.name
            result["exchanged"] += getattr(module, "_mxep_exchange", False)
            result["fused"] += hasattr(module, "_mxep_group")


def build(options: list[str]) -> dict[str, Any]:
    result = empty()
    try:
        config = ConfigManager().parse_args(options)
        degrees = {kind: getattr(config.parallelism, f"{name}_parallel_degree") for kind, name in DEGREES.items()}
        shard, replicate = config.parallelism.data_parallel_shard_degree, config.parallelism.data_parallel_replicate_degree
        world_size = shard * replicate * degrees["cp"] * degrees["tp"] * degrees["pp"]
        dims = ParallelDims(dp_shard=shard, dp_replicate=replicate, world_size=world_size, **degrees)
        spec = get_train_spec(config.model.name)
        shape = spec.model_args[config.model.flavor]
        shape.moe_impl = "standard"  # what a job sets; another one asks for a library of its own before any converter is made
        with torch.device("meta"):
            model = spec.model_cls(shape)
        build_model_converters(config, dims).convert(model)
        note_recipes(model, result)
        rows, counts = torch.empty(8, 256, device="meta"), torch.empty(8, device="meta")
        for name in result["recipes"]:
            model.get_submodule(name)(rows, counts)  # experts that no ExpertParallel has sharded
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def empty() -> dict[str, Any]:
    return {"steps": [], "error": None, "recipes": {}, "exchanged": 0, "fused": 0}


def measure(options: list[str], result: dict[str, Any]) -> None:
    """A rank of benchmarks/torchtitan_0_2.py with these options, fewer steps."""
    benchmark.WARM_STEPS, benchmark.TIMED_STEPS = 1, 2
    result["measured"] = benchmark.run_rank(benchmark.parser().parse_args(options))


def gpt_oss(recipes: list[str], result: dict[str, Any]) -> None:
    """A layer of gpt-oss over both ranks, and on one alone, by each recipe in one function and in blocks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("ep",))
    grouped, loop = (gpt_oss_layer(None, MXEP(recipe="hp"), grouped_mm) for grouped_mm in (True, False))
    result["loop"] = {"fused": str(all(torch.equal(value, loop[name]) for name, value in grouped.items()))}
    try:
        gpt_oss_layer(None, MXEP(fused=False), grouped_mm=False)
    except ValueError as error:
        result["loop"]["blocks"] = str(error)
    result["dB"] = {}
    for where, of_ranks in (("two ranks", mesh), ("one rank", None)):
        want = gpt_oss_layer(of_ranks, None)
        for recipe in recipes:
            for fused in (True, False):
                got = gpt_oss_layer(of_ranks, MXEP(recipe=recipe, fused=fused))
                how = "fused" if fused else "blocks"
                result["dB"][f"{recipe} {how} {where}"] = {name: sqnr_db(value, got[name]) for name, value in want.items()}


def gpt_oss_layer(mesh: Any, options: MXEP | None, grouped_mm: bool = True) -> dict[str, torch.Tensor]:
    """Output and gradients of this rank's tokens and experts; without options torchtitan's own. `grouped_mm`: as above SM90."""
    torch.manual_seed(0)
    args = MoEArgs(num_experts=8, num_shared_experts=0, route_norm=True, gate_bias=True, score_before_experts=False, top_k=2)
    holder = torch.nn.Module()
    holder.moe = moe = gpt_oss_moe.GptOssMoE(GptOssModelArgs(moe_args=args, swiglu_limit=2.0), 64, 96)
    moe.experts.use_grouped_mm = grouped_mm
    with torch.no_grad():
        moe.init_weights(0.2, torch.device("cpu"))
    if options is not None:
        dims = types.SimpleNamespace(ep_enabled=mesh is not None, tp_enabled=False, etp_enabled=False, pp_enabled=False)
        parallelism = types.SimpleNamespace(expert_parallel_comm_backend="standard", pipeline_parallel_expert_parallel_overlap=False)
        MXEPConverter(types.SimpleNamespace(mxep=options, parallelism=parallelism), dims).convert(holder)
    if mesh is not None:
        ExpertParallel()._apply(moe.experts, mesh)
    torch.manual_seed(1 + (0 if mesh is None else mesh.get_local_rank()))
    x, dy = torch.randn(2, 24, 64, requires_grad=True), torch.randn(2, 24, 64)
    y = moe(x)
    y.backward(dy)
    grads = {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in moe.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **{name: grad for name, grad in grads.items() if grad is not None}}


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    noise = (want.double() - got.double()).norm().item()
    return 999.0 if noise == 0 else 20 * math.log10(want.double().norm().item() / noise)


def rank_main(rank: int, port: int, options: list[str], out: pathlib.Path, run_one: Callable[[list[str], dict[str, Any]], None]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    result = empty()
    try:
        run_one(options, result)
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    if rank == (WORLD_SIZE - 1 if run_one is train else 0):  # the last one has the loss of a pipeline
        out.write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # past gloo's threads, which may still hold tensors


def run(options: list[str], folder: pathlib.Path, run_one: Callable[[list[str], dict[str, Any]], None] = train) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    ranks = []
    for rank in range(WORLD_SIZE):
        process = os.fork()
        if process == 0:
            rank_main(rank, port, options, out, run_one)
        ranks.append(process)
    for process in ranks:
        os.waitpid(process, 0)
    return json.loads(out.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        benchmark.write_tokenizer(pathlib.Path(folder))
        shared = [f"--model.hf_assets_path={folder}", f"--job.dump_folder={folder}/out", "--training.dataset=this_file"]
        results = {name: run([*shared, *options], pathlib.Path(folder)) for name, options in runs["train"].items()}
        results |= {name: build([*shared, *options]) for name, options in runs["build"].items()}
        results |= {name: run(options, pathlib.Path(folder), measure) for name, options in runs["measure"].items()}
        results |= {name: run(recipes, pathlib.Path(folder), gpt_oss) for name, recipes in runs["gpt-oss"].items()}
    pathlib.Path(sys.argv[2]).write_text(json.dumps(results))
