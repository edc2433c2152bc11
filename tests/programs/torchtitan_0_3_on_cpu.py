"""torchtitan 0.3 with mxep's override on a CPU: config tree, routed experts on one rank and on two (gloo), steps of its debug model.

`python torchtitan_0_3_on_cpu.py COMMANDS.json RESULTS.json`: COMMANDS is a list of torchtitan command lines that switch the override on.
RESULTS has what test_torchtitan_0_3.py reads.  Its trainer runs too, on two gloo ranks; what a CPU lacks is put in from here: a device
module, gloo's sums, text and a tokenizer, and attention, since FlexAttention has no backward on a CPU.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
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
from unittest import mock

import spmd_types as spmd
import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

# torchtitan asks at import which accelerator there is, and takes "cuda" where there is none.
_cpu = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("device_count", "set_device", "synchronize", "Stream", "stream", "current_stream")},
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 34),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    is_available=lambda: True,
)
_device_module = torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: _cpu if kind == "cpu" else _device_module(kind)

from datasets import Dataset  # noqa: E402
from torchtitan.config import ConfigManager, apply_overrides  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention  # noqa: E402
from torchtitan.models.common.moe import RoutedExperts  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import torchtitan_0_2 as benchmark  # noqa: E402  for its tokenizer

TARGET = "mxep.integrations.torchtitan_0_3.mxfp8_experts"
BASE = ["--module=deepseek_v3", "--config=deepseek_v3_debugmodel"]
GPT_OSS = ["--module=gpt_oss", "--config=gpt_oss_debugmodel"]
FUSED_SWIGLU = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"
WORLD_SIZE = 2
TOKENS, SEED = 96, 7


def with_recipe(recipe: str | None, base: list[str] = BASE) -> list[str]:
    """torchtitan's options of a debug model, its own or by a recipe; in blocks, where "blocks" follows its name."""
    if recipe is None:
        return base
    name, _, how = recipe.partition(" ")
    return [*base, "--override.imports", f"{TARGET}={json.dumps({'recipe': name} | ({'fused': False} if how == 'blocks' else {}))}"]


def configured(options: list[str]) -> tuple[Any, list[str]]:
    """The model's configuration by a command line, and torchtitan's lines about what was replaced."""
    config = ConfigManager().parse_args(options)
    lines = apply_overrides(config.override, config)
    return config.model_spec.model, lines


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def shapes(model_config: Any) -> dict[str, list[int]]:
    with torch.device("meta"):
        return {name: list(value.shape) for name, value in model_config.build().state_dict().items()}


def tree() -> dict[str, Any]:
    plain, _ = configured(BASE)
    converted, lines = configured(with_recipe("mxfp8_gemm"))
    routed = [config for _, config, _, _ in converted.traverse(RoutedExperts.Config)]

    def others(model_config: Any) -> str:
        """Everything but the experts and their dispatchers, and the fields of these that both have."""
        model_config = copy.deepcopy(model_config)
        for _, config, _, _ in model_config.traverse(RoutedExperts.Config):
            for child in (config.inner_experts, config.token_dispatcher):
                config.param_init = {**(config.param_init or {}), "fields": {k: v for k, v in child.to_dict().items() if k != "recipe"}}
            config.inner_experts = config.token_dispatcher = None
        return json.dumps(model_config.to_dict(), default=repr, sort_keys=True)

    return {
        "lines": lines,
        "recipes": [[config.inner_experts.recipe, config.token_dispatcher.recipe] for config in routed],
        "kinds": sorted({type(config).__qualname__ for config in routed}),
        "rest is the same": others(plain) == others(converted),
        "state is the same": shapes(plain) == shapes(converted),
    }


def run(routed: Any, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """(y, dx, dscores, and the gradients of the experts' weights) of routed experts; x (T, D), scores and ids (T, K)."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=routed.token_dispatcher.num_experts)
    y = routed(x[None], scores[None], ids[None], counts)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(SEED)).to(y.dtype))
    return [y.detach(), x.grad, scores.grad, *(weight.grad for weight in routed.inner_experts.parameters())]


def sqnr_db(reference: torch.Tensor, value: torch.Tensor) -> float:
    noise = (reference.double() - value.double()).norm().item()
    return 999.0 if noise == 0 else 20 * math.log10(reference.double().norm().item() / noise)


def compare(rank: int, mesh: Any, base: list[str] = BASE) -> dict[str, Any]:
    """dB of y, dx, dscores and dw against torchtitan's own experts in bf16, by recipe."""
    ranks = 1 if mesh is None else mesh.size()
    generator = torch.Generator().manual_seed(SEED + rank)
    found: dict[str, list[torch.Tensor]] = {}
    of_recipes = [name + how for name in ("hp", "mxfp8_wgrad_with_hp", "mxfp8_gemm") for how in ("", " blocks")]
    for recipe in (None, *of_recipes, "hp split"):
        config = next(config for _, config, _, _ in configured(with_recipe(recipe, base))[0].traverse(RoutedExperts.Config))
        # Its own exchange over DTensor's groups needs no mesh of spmd_types; mxep's is run with the default.
        set_spmd_backend("partial_dtensor" if recipe is None else "spmd_types")
        routed = config.build()
        draw = torch.Generator().manual_seed(SEED)
        for name, weight in list(routed.inner_experts.named_parameters()):
            full = torch.randn(weight.shape, generator=draw) * 0.05
            routed.inner_experts.register_parameter(name, torch.nn.Parameter(full.chunk(ranks)[rank].bfloat16()))
        routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        dispatcher = config.token_dispatcher
        generator.manual_seed(SEED + 1 + rank)
        x = torch.randn(TOKENS, config.inner_experts.dim, generator=generator).bfloat16()
        chances = torch.rand(TOKENS, dispatcher.num_experts, generator=generator)
        scores, ids = chances.topk(dispatcher.top_k)
        split = recipe == "hp split"  # as if by tensor parallelism
        with mock.patch("mxep.integrations.torchtitan_0_3._is_split", return_value=True) if split else contextlib.nullcontext():
            found[recipe or "plain"] = run(routed, x, scores, ids)
    result: dict[str, Any] = {name: [sqnr_db(a, b) for a, b in zip(found["plain"], values, strict=True)] for name, values in found.items()}
    if mesh is None:
        routed.compile(backend="aot_eager", fullgraph=True)
        result["compiled"] = error_of(lambda: run(routed, x, scores, ids))
        with mock.patch.object(spmd, "is_type_checking", return_value=True):
            result["type checked"] = error_of(lambda: routed.token_dispatcher.dispatch(x, scores, ids, torch.bincount(ids.flatten())))
    return result


def losses(recipe: str | None, steps: int) -> list[float]:
    """Of the debug model in bf16, which learns one batch by heart."""
    config, _ = configured(with_recipe(recipe))
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(SEED)
    model = config.build()
    with torch.no_grad():
        model.init_states()
    model.bfloat16()
    tokens = torch.randint(0, 256, (2, 65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    found = []
    for _ in range(steps):
        out = model(tokens[:, :-1], torch.arange(64).expand(2, 64))
        loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def compare_on_ranks(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("ep",))
    return {"deepseek": compare(rank, mesh), "gpt-oss": compare(rank, mesh, GPT_OSS)}


def attention(
    self: Any, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, *, scale: float, out_transform: Callable, **others: Any
) -> torch.Tensor:
    """gpt-oss' VarlenAttention as torch operations, without its windows and borders of documents."""
    q, k, v = (value.transpose(1, 2) for value in (q_BLNH, k_BLNH, v_BLNH))
    k, v = (value.repeat_interleave(q.shape[1] // k.shape[1], 1) for value in (k, v))
    logits = (q.float() @ k.float().transpose(-1, -2)) * scale
    logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = (logits.softmax(-1) @ v.float()).to(q.dtype)
    return out_transform(out.transpose(1, 2), logits.logsumexp(-1).transpose(1, 2))


def divide_after_a_sum(self: FSDPModule, factor: float, divide: Callable[..., None] = FSDPModule.set_gradient_divide_factor) -> None:
    """gloo has no scaled sum; torchtitan asks for a divisor of one, which is a plain sum."""
    divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


def train(rank: int, options: list[str]) -> dict[str, Any]:
    """Steps of torchtitan's trainer: [loss, gradient norm] of each, and which modules its routed experts are."""
    VarlenAttention.__init__, VarlenAttention.forward = lambda self, config: super(VarlenAttention, self).__init__(), attention
    FSDPModule.set_gradient_divide_factor = divide_after_a_sum
    lines = [pathlib.Path(__file__).read_text()] * 4
    DATASETS["c4_test"].loader = lambda path: Dataset.from_dict({"text": lines})
    DATASETS["c4_test"].sample_processor = lambda sample: sample["text"]
    config = ConfigManager().parse_args(options)
    if "deepseek_v3" in options[0]:
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    result: dict[str, Any] = {"steps": [], "error": None, "kinds": []}
    try:
        trainer = config.build()
        trainer.metrics_processor.log = lambda step, loss, most, norm, **more: result["steps"].append([float(loss), float(norm)])
        modules = [module for part in trainer.model_parts for module in part.modules()]
        result["kinds"] = sorted({type(module).__name__ for module in modules if isinstance(module, RoutedExperts)})
        trainer.train()
        trainer.close()
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def rank_main(rank: int, port: int, out: pathlib.Path, run_rank: Callable[[int], Any]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        out.with_suffix(f".{rank}").write_text(json.dumps(run_rank(rank)))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # past gloo's threads, which may still hold tensors


def two_ranks(run_rank: Callable[[int], Any] = compare_on_ranks) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "rank"
        ranks = []
        for rank in range(WORLD_SIZE):
            process = os.fork()
            if process == 0:
                rank_main(rank, port, out, run_rank)
            ranks.append(process)
        for process in ranks:
            os.waitpid(process, 0)
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(WORLD_SIZE)]


def trained() -> dict[str, dict[str, Any]]:
    """The last rank's results of the trainer's runs, which has the loss of a pipeline.

    torchtitan's own exchange needs DTensors here: `spmd_types`, the default, fails on gloo.
    """
    steps = ["--training.steps=2", "--training.seq_len=64", "--training.local_batch_size=1", "--debug.seed=0", "--metrics.log_freq=1"]
    shared = [*steps, "--compile.no-enable", "--training.disable_cuda_graphs", "--lr_scheduler.warmup_steps=0"]
    dtensors = ["--parallelism.spmd_backend=partial_dtensor"]
    experts = [*BASE, *shared, "--parallelism.expert_parallel_degree=2"]
    tensors = [*GPT_OSS, *shared, "--validator.no-enable", "--parallelism.tensor_parallel_degree=2"]
    degrees = {
        "tp": ["--parallelism.tensor_parallel_degree=2"],
        "tp ep": ["--parallelism.tensor_parallel_degree=2", "--parallelism.expert_parallel_degree=2"],
        "pp": ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B", "--validator.no-enable"],
    }
    others = {name: [*BASE, *shared, *dtensors, *degree, "--training.local_batch_size=2"] for name, degree in degrees.items()}
    saved = [*experts, "--training.steps=3", "--checkpoint.enable", "--checkpoint.folder=saved"]
    read = [*saved, "--checkpoint.load_only", "--checkpoint.load_step=1"]
    runs = {
        "plain": [*experts, *dtensors],
        "hp": with_recipe("hp", experts),
        "hp blocks": with_recipe("hp blocks", experts),
        "mxfp8_wgrad_with_hp": with_recipe("mxfp8_wgrad_with_hp", experts),
        "saved": with_recipe("hp", [*saved, "--checkpoint.interval=1"]),
        "read by one": with_recipe("hp", [*read, "--parallelism.expert_parallel_degree=1"]),
        "read by plain": [*read, *dtensors],
        **{f"{name} plain": options for name, options in others.items()},
        **{
            f"{name} {recipe}": with_recipe(recipe, options) for name, options in others.items() for recipe in ("hp", "mxfp8_wgrad_with_hp")
        },
        "gpt-oss plain": [*tensors, *dtensors],
        "gpt-oss hp": with_recipe("hp", [*tensors, *dtensors]),
        "gpt-oss spmd_types": with_recipe("hp", tensors),
        "gpt-oss spmd_types blocks": with_recipe("hp blocks", tensors),
    }
    with tempfile.TemporaryDirectory() as folder:
        benchmark.write_tokenizer(pathlib.Path(folder))
        here = [f"--hf_assets_path={folder}", f"--dump_folder={folder}/out"]
        return {name: two_ranks(lambda rank, options=options: train(rank, [*options, *here]))[-1] for name, options in runs.items()}


def refused() -> dict[str, str]:
    """What the override says of other experts, dispatchers and recipes."""
    fused = next(config for _, config, _, _ in configured([*BASE, "--override.imports", FUSED_SWIGLU])[0].traverse(RoutedExperts.Config))
    return {
        "recipe": error_of(lambda: configured(with_recipe("fp7"))),
        "dispatcher": error_of(
            lambda: configured(["--module=deepseek_v3", "--config=deepseek_v3_debugmodel_minimal_async_ep", "--override.imports", TARGET])
        ),
        "experts": error_of(lambda: importlib.import_module(TARGET.rpartition(".")[0]).mxfp8_experts(fused)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone = {"deepseek": compare(0, None), "gpt-oss": compare(0, None, GPT_OSS)}
    results = {"two ranks": two_ranks(), "one rank": alone, "tree": tree(), "refused": refused()}
    results["trained"] = trained()
    results["losses"] = {
        "plain": losses(None, 2),
        "hp": losses("hp", 2),
        "hp blocks": losses("hp blocks", 2),
        "mxfp8_wgrad_with_hp": losses("mxfp8_wgrad_with_hp", 4),
    }
    documented = json.loads(pathlib.Path(sys.argv[1]).read_text())
    results["documented"] = [len(configured(options)[1]) for options in documented]
    pathlib.Path(sys.argv[2]).write_text(json.dumps(results))
