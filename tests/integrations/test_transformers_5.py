"""transformers' experts by mxep's recipes: against its own grouped GEMMs, layer by layer and as models, in one process and on two ranks."""

from __future__ import annotations

import copy
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.operator_calls import OperatorCalls
from tests.ranks import run_ranks
from tests.truth import sqnr
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import mxep
from mxep.comm import TRANSPORTS, close_transports
from mxep.recipe import Recipe

transformers = pytest.importorskip("transformers", minversion="5.23", reason="the library that is adapted")

from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.integrations.moe import ExpertsInterface  # noqa: E402

from mxep.integrations import transformers_5  # noqa: E402

E, C, D, TOKENS = 8, 2, 64, 37
COMMON = {
    "vocab_size": 256, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 32, "num_experts_per_tok": C,
}  # fmt: skip
QUICK = "Qwen3Moe with quick GELU"  # an activation that mxep lacks
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
ALL_ATTENTION = {"layer_types": ["full_attention"] * 2}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": E},
    "Mixtral": {"num_local_experts": E},
    QUICK: {"num_experts": E, "hidden_act": "quick_gelu"},
    "DeepseekV3": {"n_routed_experts": E, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, **LATENT},
    # biases, weights stored transposed, gate and up interleaved, a SwiGLU of another form
    "GptOss": {"num_local_experts": E, "swiglu_limit": 3.0, **ALL_ATTENTION},
    # no gate, squared ReLU
    "NemotronH": {
        "n_routed_experts": E, "n_groups": 1, "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 64,
        "layers_block_type": ["attention", "moe"],
    },
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"num_experts": E, "shared_expert_intermediate_size": 64},
    "Qwen3Next": {"num_experts": E, "shared_expert_intermediate_size": 64, **ALL_ATTENTION},
    "Olmoe": {"num_experts": E},
    "FlexOlmo": {"num_experts": E},
    "Glm4Moe": {"n_routed_experts": E, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "Dots1": {"n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "Ernie4_5_Moe": {"moe_num_experts": E, "moe_k": C, "moe_layer_start_index": 0},
    "GraniteMoe": {"num_local_experts": E},
    "Phimoe": {"num_local_experts": E},
    "Lfm2Moe": {"num_experts": E, "num_dense_layers": 1, **ALL_ATTENTION},
    "MiniMax": {"num_local_experts": E, **ALL_ATTENTION},
    "HunYuanMoEV1": {"num_experts": E, "moe_topk": C},
    "Qwen3Moe with GELU": {"num_experts": E, "hidden_act": "gelu"},
    "Qwen3Moe with GELU by tanh": {"num_experts": E, "hidden_act": "gelu_pytorch_tanh"},
}
OF_EXPERTS = "model.layers.0.mlp.experts.down_proj"
NAMES = {"hp": "mxep_hp", "mxfp8_wgrad_with_hp": "mxep", "mxfp8_wgrad_with_mx": "mxep_mx", "mxfp8": "mxep_32x1"}


def register_all() -> None:
    for recipe, name in NAMES.items():
        transformers_5.register(recipe, name)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_all()
    yield
    for name in NAMES.values():
        del ExpertsInterface._global_mapping[name], transformers_5.EPImplementationInterface._global_mapping[name]


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(1)
    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**COMMON | (MODELS | OTHERS)[name] | changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def experts_of(name: str) -> nn.Module:
    """The experts of a model, with weights and biases that are not near zero."""
    experts = next(module for module in build(name).modules() if hasattr(module, "_is_expert_parallel"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.15)
    return experts


def routing(choices: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices, of which two experts get none, and scores."""
    tokens, logits = torch.randn(TOKENS, D), torch.randn(TOKENS, E)
    logits[:, 2:4] = -torch.inf
    scores, best = logits.softmax(1).topk(C)
    return tokens.requires_grad_(), best if choices is None else choices, scores.requires_grad_()


def run(experts: nn.Module, implementation: str, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients by name."""
    experts.config._experts_implementation = implementation
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    experts.zero_grad()
    y = experts(*leaves)
    y.backward(grad)
    weights = {name: p.grad for name, p in experts.named_parameters()}
    return {"y": y.detach(), "dx": leaves[0].grad, "dscores": leaves[2].grad} | weights


@pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, recipe) for name in MODELS for recipe in NAMES if name in ("Qwen3Moe", "GptOss") or recipe in ("hp", "mxfp8_wgrad_with_hp")]
    + [(name, "mxfp8_wgrad_with_hp") for name in OTHERS],
)
def test_experts_are_those_of_grouped_mm(name: str, recipe: str) -> None:
    experts, inputs, grad = experts_of(name), routing(), torch.randn(TOKENS, D)
    want = run(experts, "grouped_mm", inputs, grad)
    for key, value in run(experts, NAMES[recipe], inputs, grad).items():
        assert value.dtype == want[key].dtype
        found, rounded = sqnr(want[key], value), recipe != "hp" and key != "down_proj_bias"  # the sum of a gradient that is plain
        least = 19 if key == "dscores" else 21  # 74 numbers, each after three products
        assert least < found < 40 if rounded else found > 100, f"{key}: {found:.1f} dB"


@pytest.mark.parametrize("name", MODELS | OTHERS)
def test_experts_run_as_one_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    fused = transformers_5.fused_experts
    monkeypatch.setattr(transformers_5, "fused_experts", lambda *args, **options: ran.append(1) or fused(*args, **options))
    run(experts_of(name), "mxep", routing(), torch.randn(TOKENS, D))
    assert bool(ran) == (name != QUICK)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_mx"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "NemotronH", "DeepseekV3", "GptOss"])
def test_experts_are_one_graph(name: str, recipe: str, dynamic: bool | None) -> None:
    """Compiled whole, forward and backward, with the bits of the eager function; of any number of tokens where sizes are dynamic."""
    experts, inputs, grad = experts_of(name), routing(), torch.randn(TOKENS, D)
    want = run(experts, NAMES[recipe], inputs, grad)
    torch._dynamo.reset()
    experts.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for key, value in run(experts, NAMES[recipe], inputs, grad).items():
        assert torch.equal(value, want[key]), key


def test_adapters_that_come_after_the_compilation() -> None:
    experts, (tokens, choices, scores) = experts_of("Qwen3Moe"), routing()
    experts.config._experts_implementation = "mxep"
    compiled = torch.compile(experts, backend="aot_eager")
    found = [compiled(tokens, choices, scores).detach()]
    factors = transformers_5.lora_factors(experts)
    for _ in range(2):
        factors["down_proj"] = torch.randn(E, 8, 32) / 4, torch.randn(E, D, 8)
        assert torch.equal(compiled(tokens, choices, scores), experts(tokens, choices, scores))
        found.append(compiled(tokens, choices, scores).detach())
    factors.clear()
    assert torch.equal(compiled(tokens, choices, scores), found[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_follows_the_limit_of_a_gate(dynamic: bool | None) -> None:
    """A gate of a model's own, with constants that another layer has otherwise, or that change after the first call."""
    experts, inputs, grad = experts_of("GptOss"), routing(), torch.randn(TOKENS, D)
    torch._dynamo.reset()
    compiled = copy.deepcopy(experts)
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for limit in (0.5, 1.0, 0.25):
        experts.limit = compiled.limit = limit
        want = run(experts, "mxep", inputs, grad)
        for key, value in run(compiled, "mxep", inputs, grad).items():
            assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_compiled_layer_is_one_graph(checkpoint: bool) -> None:
    """Each decoder layer for itself, as docs/howto/transformers.md compiles them; also recomputed inside of the graph."""
    model, tokens = build("Qwen3Moe", torch.bfloat16).train(), torch.randint(3, 256, (2, 21))
    model.set_experts_implementation("mxep")
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        for layer in model.model.layers if compiled else ():
            inner = (
                functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False) if checkpoint else layer.forward
            )
            layer.forward = torch.compile(inner, backend="aot_eager", fullgraph=True)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


def test_choices_of_experts_elsewhere_add_nothing() -> None:
    """As transformers' own EP implementations pass them: E stands for an expert of another rank, with a score of 0."""
    experts, (tokens, choices, scores) = experts_of("GptOss"), routing()
    grad, elsewhere = torch.randn(TOKENS, D), torch.rand(TOKENS, C) < 0.5
    experts._is_expert_parallel = True
    inputs = tokens, choices.masked_fill(elsewhere, E), scores.detach().masked_fill(elsewhere, 0).requires_grad_()
    want = run(experts, "grouped_mm", inputs, grad)
    found = run(experts, "mxep_hp", inputs, grad)
    assert found["dscores"][elsewhere].eq(0).all()
    for key, value in found.items():
        torch.testing.assert_close(value, want[key], rtol=1e-4, atol=1e-4)


def test_no_token_at_all() -> None:
    experts = experts_of("GptOss")
    inputs = tuple(t.detach()[:0].requires_grad_(t.is_floating_point()) for t in routing())
    made = run(experts, "mxep", inputs, torch.randn(0, D))
    assert made["y"].shape == (0, D)
    assert all(p.grad.eq(0).all() for p in experts.parameters())


@pytest.mark.parametrize(
    ("around", "name"), [*((around, "Qwen3Moe") for around in ("plain", "checkpoint", "compile", "autocast")), ("compile", "GptOss")]
)
def test_a_model_trains(around: str, name: str, tmp_path: Path) -> None:
    """A training step in common set-ups is near transformers' own; then the model generates text and is saved as usual."""
    model = build(name, torch.bfloat16 if around in ("checkpoint", "compile") else torch.float32)
    plain, tokens = copy.deepcopy(model), torch.randint(3, 256, (2, 21))
    model.set_experts_implementation("mxep")
    if around == "checkpoint":
        model.train()
        model.activation_checkpointing_enable()
    asked = torch.compile(model, backend="aot_eager") if around == "compile" else model
    losses = []
    for one in (plain, asked):
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "autocast"):
            losses.append(one(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    want, found = plain.get_parameter(OF_EXPERTS).grad, model.get_parameter(OF_EXPERTS).grad
    assert 21 < sqnr(want, found) < 40
    if around == "plain":
        assert model.eval().generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 24)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="mxep")
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_activation_checkpointing_runs_the_down_gemm_once() -> None:
    """No operation after the experts of a layer saves a tensor: of a step's products only each layer's first forward product runs twice."""
    products, tokens, model = [], torch.randint(3, 256, (1, 21)), build("Qwen3Moe", torch.float32)
    model.set_experts_implementation("mxep")
    for checkpoints in (False, True):
        if checkpoints:
            model.train()
            model.activation_checkpointing_enable()
        with OperatorCalls() as calls:
            model(input_ids=tokens, labels=tokens).loss.backward()
        products.append(calls.counts["grouped_mm_mx"])
    assert products[1] - products[0] == model.config.num_hidden_layers


PARALLEL: list[tuple[str, dict[str, Any], str]] = [  # of what, and where transformers' own name and ours go
    ("Qwen3Moe", {"fsdp_size": 2, "ep_size": 2}, "ep_implementation"),
    ("NemotronH", {"fsdp_size": 2, "ep_size": 2}, "ep_implementation"),
    ("GptOss", {"fsdp_size": 2, "ep_size": 2}, "ep_implementation"),
    (QUICK, {"fsdp_size": 2, "ep_size": 2}, "ep_implementation"),
    ("Qwen3Moe", {"tp_size": 2, "ep_size": 2}, "ep_implementation"),
    ("Qwen3Moe", {"fsdp_size": 2}, "experts_implementation"),
    ("Qwen3Moe", {"tp_size": 2}, "experts_implementation"),
]


def on_two_ranks(rank: int, world: int, folder: str, device: str, transport: str) -> None:
    """Loss and gradients are those of transformers' own exchange and experts: a batch for each rank, and under TP one that both share."""
    register_all()
    mxep.set_transport(transport)
    for name, sizes, asked in PARALLEL:
        of_rank = 0 if "tp_size" in sizes else rank
        tokens = torch.randint(3, 256, (2, 5 + 8 * of_rank), generator=torch.Generator().manual_seed(of_rank)).to(device)
        found: dict[str, dict[str, Tensor]] = {}
        for how in ("all_to_all" if asked == "ep_implementation" else "grouped_mm", "mxep_hp", "mxep"):
            config = DistributedConfig(**sizes, **{asked: how} if asked == "ep_implementation" else {})
            named = {asked: how} if asked == "experts_implementation" else {}
            model = transformers.AutoModelForCausalLM.from_pretrained(
                f"{folder}/{name}", dtype=torch.float32, distributed_config=config, **named
            )
            assert model.device.type == device
            with mock.patch.object(transformers_5, "fused_experts", wraps=transformers_5.fused_experts) as fused:
                loss = model(input_ids=tokens, labels=tokens).loss
            ours = how == "mxep" or (how == "mxep_hp" and asked == "ep_implementation")
            assert (fused.call_count > 0) == (ours and name != QUICK)
            loss.backward()
            found[how] = {n: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
            found[how]["loss"] = loss.detach()
        want, exact, rounded = found.values()
        for key in want:
            assert sqnr(want[key], exact[key]) > 90, (name, sizes, key)
            assert sqnr(want[key], rounded[key]) > (17 if key.endswith("_proj.bias") else 20), (name, sizes, key)  # sums of few tokens
        of_experts = [key for key in want if key.endswith("experts.down_proj")]
        assert of_experts
        assert all(sqnr(want[key], rounded[key]) < 40 for key in of_experts), (name, sizes)
    close_transports()


def save_models(folder: Path) -> None:
    # gpt-oss' experts add so much that rounding in a first layer would change choices of a second one.
    one_layer: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    for name in {name for name, *_ in PARALLEL}:
        model = build(name, moe_intermediate_size=64, **one_layer if name == "GptOss" else {})  # under TP each rank has half of the width
        model.save_pretrained(folder / name)


def test_every_parallelism_on_two_ranks(tmp_path: Path) -> None:
    save_models(tmp_path)
    run_ranks(on_two_ranks, 2, str(tmp_path), "cpu", "auto", timeout=240)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_parallelism_on_two_gpus(transport: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    run_ranks(on_two_ranks, 2, str(tmp_path), "cuda", transport, backend="cpu:gloo,cuda:nccl", timeout=240)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_experts_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near float32 on the CPU, and without a host sync."""
    monkeypatch.setenv("MXEP_CHECK", "0")  # checks read choices on the host
    experts, inputs, grad = experts_of(name), routing(), torch.randn(TOKENS, D)
    want = run(experts, "grouped_mm", inputs, grad)
    there = copy.deepcopy(experts).cuda()
    on_gpu, grad = tuple(t.detach().cuda().requires_grad_(t.requires_grad) for t in inputs), grad.cuda()
    run(there, "mxep", on_gpu, grad)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(there, "mxep", on_gpu, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for key, value in found.items():
        assert sqnr(want[key], value.cpu()) > (19 if key == "dscores" else 21), key


@pytest.mark.gpu
def test_a_model_generates_on_a_gpu() -> None:
    """For decoding transformers would switch to another implementation; ours is kept."""
    model, tokens = build("Qwen3Moe", torch.bfloat16).cuda().eval(), torch.randint(3, 256, (2, 21), device="cuda")
    model.set_experts_implementation("mxep")
    assert model.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 24)


def test_unsupported_models_raise() -> None:
    with pytest.raises(ValueError, match="'fp7' is unknown"):
        transformers_5.register("fp7")
    for name in ("eager", "grouped_mm", "all_to_all"):
        with pytest.raises(ValueError, match=f"name='{name}' is transformers' own, want another one"):
            transformers_5.register(name=name)
    experts = experts_of("Qwen3Moe")
    tokens, choices, scores = routing()
    experts.config._experts_implementation = "mxep"
    with pytest.raises(ValueError, match="experts from 0 to 8, want experts of 0 to 7, or -1 for none, for each token"):
        experts(tokens, torch.full_like(choices, E).index_fill_(0, torch.tensor(0), 0), scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_weights_that_no_recipe_multiplies_raise(dtype: torch.dtype) -> None:
    """Half precision and quantised checkpoints, where they are loaded under expert parallelism, else in the first forward."""
    experts, want = experts_of("Qwen3Moe").to(dtype), f"weights of Qwen3MoeExperts are {dtype}, want bfloat16 or float32; load"
    experts.config._experts_implementation = "mxep"
    with pytest.raises(ValueError, match=want):
        experts(*routing())
    with pytest.raises(ValueError, match=want):
        transformers_5.ExpertExchange(experts, None, None, Recipe("any"))


def test_experts_outside_of_the_registry_raise_where_they_are_loaded() -> None:
    """Step-3.7's plan exchanges tokens, but its experts say nothing of how they keep their weights."""
    config = transformers.Qwen3MoeConfig(**COMMON | {"num_local_experts": E})
    experts = importlib.import_module("transformers.models.step3p7.modeling_step3p7").Step3p7Experts(config)
    with pytest.raises(ValueError, match=r"Step3p7Experts without is_transposed, .*want experts of .*; use ep_implementation='auto'"):
        transformers_5.ExpertExchange(experts, None, None, Recipe("any"))


def test_a_recipe_of_a_user() -> None:
    transformers_5.register(Recipe.named("mxfp8_wgrad_with_mx"), "mxep")  # replaces the one before
    experts, inputs, grad = experts_of("Mixtral"), routing(), torch.randn(TOKENS, D)
    first, second = (run(experts, name, inputs, grad) for name in ("mxep", "mxep_mx"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_older_transformers_is_named(tmp_path: Path) -> None:
    """One without the registry for expert parallelism."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mxep.integrations.transformers_5"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert 'want 5.23 or later; pip install ".[transformers]" in the checkout of mxep (No module named \'transformers.' in ended.stderr


def test_convert_experts_converts_them_too() -> None:
    """By name, and each with its recipe; it replaces transformers' grouped GEMM."""
    model = build("Mixtral", torch.bfloat16)
    plain, tokens = copy.deepcopy(model), torch.randint(3, 256, (2, 21))
    assert mxep.convert_experts(model, "experts") == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    for one in (plain, model):
        one(input_ids=tokens, labels=tokens).loss.backward()
    assert 21 < sqnr(plain.get_parameter(OF_EXPERTS).grad, model.get_parameter(OF_EXPERTS).grad) < 40
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"called neither torch\._grouped_mm nor"):
        model(tokens)
