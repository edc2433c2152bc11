"""docs/extending.md is right: its files and names exist, and one small extension of each kind is added in the files that it lists."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pages import DOCS, ROOT, cells
from tests.ranks import run_ranks
from torch import Tensor, nn

import mxep
from mxep import device, reference
from mxep.comm.collective import CollectiveTransport
from mxep.comm.transport import MAKERS
from mxep.device import GEMM_PATHS, GemmPath
from mxep.fused import collective_dispatcher
from mxep.fused.make_dispatcher import PLANNERS
from mxep.models import families, presets
from mxep.models.decoder import Attention, Decoder
from mxep.models.document_mask import DocumentMask, attend
from mxep.models.presets import DecoderConfig, TrainDefaults
from mxep.models.qwen3_moe import rotate_halves
from mxep.ops.quantize import reference as quantize_reference
from mxep.recipe import RECIPES, Recipe

PAGE = DOCS / "extending.md"
PACKAGE = ROOT / "src" / "mxep"
log = logging.getLogger("tests.extending")


# ---- the page ----


def listed() -> list[tuple[str, Path, str]]:
    """(section, file, what to write in it) of every row of the page that names a file."""
    rows, section = [], ""
    for line in PAGE.read_text().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            file, what = cells(line)
            name = file.strip("`")
            rows.append((section, (ROOT if name.startswith(("tests/", "docs/")) else PACKAGE) / name, what))
    return rows


def files_of(section: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for title, path, _ in listed() if title == section}


@pytest.mark.parametrize(("section", "path", "what"), listed(), ids=lambda value: value.name if isinstance(value, Path) else "")
def test_each_listed_file_has_the_names_that_the_page_mentions(section: str, path: Path, what: str) -> None:
    assert path.exists(), f"{section}: no file {path}"
    for name in re.findall(r"`([A-Za-z_]\w*(?:\.[a-z_]+)?)`", what):
        assert name.rpartition(".")[2] in path.read_text(), f"{section}: {path.name} has no {name}"


def test_commands_name_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/]+(?:\.py)?", "".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


# ---- an activation: ReGLU was added so ----


def test_reglu_is_in_the_files_of_the_activation_and_in_no_other() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("src", "tests/ops", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cu", ".cuh", ".md"} and "reglu" in path.read_text().lower()
    }
    optional = {"src/mxep/integrations/transformers_activations.py", "docs/migration.md", "docs/howto/own_model.md"}
    pages = {"docs/extending.md", "docs/log.md"}
    assert found - pages - optional <= files_of("An activation")
    assert {file for file in files_of("An activation") if file.startswith("src")} <= found


# ---- a GEMM path ----


def test_a_gemm_path_is_a_class_and_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    paths, exact = import_module("mxep.ops.grouped_gemm.paths"), import_module("mxep.ops.grouped_gemm.exact")
    calls: list[str] = []

    class LoggingPath(exact.ExactPath):  # type: ignore[name-defined, misc]
        def gemm(self, rows: Any, weight: Any, *rest: Any) -> Tensor:
            calls.append("gemm")
            offs, out_dtype, row_map, padding_rows = rest
            return reference.grouped_mm_mx(*rows, *weight, offs, out_dtype, "reference", row_map, padding_rows)

    monkeypatch.setitem(paths.PATHS, "logging", LoggingPath())
    monkeypatch.setitem(GEMM_PATHS, "logging", GemmPath(lambda major, minor: None if major == 9 else f"needs SM90, this GPU is SM{major}"))
    monkeypatch.setattr(device, "compute_capability", lambda index: (9, 0))
    assert device.resolve_gemm_path("logging", torch.device("cuda", 0)) == "logging"
    assert mxep.device.available_gemm_paths(torch.device("cpu"))["logging"] == "needs a CUDA GPU, this tensor is on cpu"
    monkeypatch.setattr(device, "compute_capability", lambda index: (8, 9))
    monkeypatch.setattr(device, "compiler_problem", lambda: None)
    with pytest.raises(ValueError, match="gemm_path='logging': needs SM90, this GPU is SM8; this device runs exact"):
        device.resolve_gemm_path("logging", torch.device("cuda", 0))

    monkeypatch.setattr(paths, "path_of", lambda name, on: paths.PATHS[name])  # the operands are on a CPU
    a, b, offs = (
        reference.quantize(torch.randn(64, 64), "rceil"),
        reference.quantize(torch.randn(2, 32, 64), "rceil"),
        torch.tensor([32, 64]),
    )
    got = paths.grouped_mm_mx(*a, *b, offs, torch.float32, "logging")
    assert calls == ["gemm"]
    assert torch.equal(got, reference.grouped_mm_mx(*a, *b, offs, torch.float32, "reference"))


# ---- a transport ----


class LoggingTransport(CollectiveTransport):
    name = "logging"

    def exchange(self, rows: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]) -> Tensor:
        log.info("rank %d sends %d rows", self.rank, sum(input_splits))
        return super().exchange(rows, output_splits, input_splits)


def logging_plan(spec: Any, experts: Tensor, scores: Tensor, tokens: Tensor, mode: str, group_name: str, saved_dtype: Any = None) -> Any:
    log.info("dispatch %d tokens", tokens.shape[0])
    return collective_dispatcher.plan(spec, experts, scores, tokens, mode, group_name, saved_dtype)


def results_over(transport: str, rank: int) -> list[Tensor]:
    """Output and gradient of a fused layer and of `ep_grouped_mm` over one transport."""
    assert mxep.set_transport(transport) == transport
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(48, 64, generator=generator, requires_grad=True)
    w1, w2 = torch.randn(2, 64, 64, generator=generator) / 8, torch.randn(2, 64, 32, generator=generator) / 8
    chosen = torch.rand(48, 4, generator=generator).topk(2)
    y = mxep.fused_experts(x, chosen.indices, chosen.values, w1, None, w2, None, num_experts=4, group=torch.distributed.group.WORLD)
    rows = mxep.ep_grouped_mm(x, w1.transpose(-2, -1), [24, 24], [24, 24], torch.tensor([8, 16, 8, 16]))
    y.square().sum().add(rows.square().sum()).backward()
    assert x.grad is not None
    return [y.detach(), rows.detach(), x.grad]


def logging_rank(rank: int, world: int) -> None:
    MAKERS["logging"] = LoggingTransport.make
    PLANNERS["logging"] = logging_plan
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    want = results_over("collective", rank)
    assert messages == []
    got = results_over("logging", rank)
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, other)
    assert "dispatch 48 tokens" in messages
    assert f"rank {rank} sends 48 rows" in messages


def test_a_transport_that_logs_and_delegates_has_the_same_bits() -> None:
    run_ranks(logging_rank, 2)


# ---- a scaling mode ----


def even_exponent(amax: Tensor) -> Tensor:
    """The biased exponent of amax rounded to the three bits of e4m3's mantissa, as torchao's EVEN."""
    return (((amax.view(torch.int32) + (1 << 19)) >> 23) - 8).clamp(min=0)


def test_a_scaling_mode_is_a_function_and_three_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = (*mxep.recipe.SCALING_MODES, "even")
    for module in (mxep.recipe, quantize_reference):
        monkeypatch.setattr(module, "SCALING_MODES", modes)
    monkeypatch.setitem(quantize_reference._EXPONENT, "even", even_exponent)
    monkeypatch.setitem(quantize_reference._LEAST_MULTIPLIER, "even", 2.0**126)
    even: Any = "even"  # in the package it is a member of ScaleCalculationMode
    block = torch.tensor([[500.0] + [1.0] * 31])
    assert mxep.quantize_mx(block, even).scale.view(torch.uint8).item() == 128  # 500 rounds up to 512
    assert mxep.quantize_mx(block, mxep.ScaleCalculationMode.FLOOR).scale.view(torch.uint8).item() == 127
    a, w = torch.randn(64, 64, requires_grad=True), torch.randn(2, 64, 32)
    out = mxep.to_mxfp8_then_scaled_grouped_mm(a, w, torch.tensor([32, 64]), scale_calculation_mode=even, wgrad_with_hp=True)
    out.sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"scaling_mode='odd', want ScaleCalculationMode\.FLOOR or RCEIL or EVEN"):
        mxep.quantize_mx(block, "odd")  # type: ignore[arg-type]


def test_cuda_numbers_scaling_modes_and_activations_as_python_does() -> None:
    from mxep.ops.activation.functions import ACTIVATIONS

    for file, names in (("ops/runtime/mx_bytes.cuh", mxep.recipe.SCALING_MODES), ("ops/activation/functions.cuh", ACTIVATIONS)):
        numbered = ", ".join(f"{name.upper()} = {number}" for number, name in enumerate(names))
        assert f"constexpr int {numbered};" in (PACKAGE / file).read_text()


# ---- a recipe ----


def test_a_recipe_is_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mxep.cli import main

    monkeypatch.setitem(RECIPES, "mxfp8_gemm_floor", Recipe("mxfp8_gemm_floor", "hp", "hp", scaling_mode=mxep.ScaleCalculationMode.FLOOR))
    moe = mxep.MoE(mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2), "mxfp8_gemm_floor")
    moe.init_weights(0.02)
    moe(torch.randn(1, 8, 64)).sum().backward()
    main(["explain", "--recipe", "mxfp8_gemm_floor"])
    assert "mxfp8_gemm_floor" in capsys.readouterr().out


# ---- a model family ----


@dataclass(frozen=True, kw_only=True)
class PlainConfig(DecoderConfig):
    """Multi-head attention, nothing normed."""

    rope_theta: float = 1e4

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def rope_width(self) -> int:
        return self.head_dim

    @property
    def scores_width(self) -> int:
        return 2 * self.dim

    @property
    def attention_kept(self) -> int:
        return 4 * self.dim

    def attention_matrices(self) -> int:
        return 4 * self.dim * self.dim

    def attention_parameters(self) -> int:
        return self.attention_matrices()


class PlainAttention(Attention):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        self.heads = config.num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, table: Tensor, mask: DocumentMask | None = None) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.wq, self.wk, self.wv))
        return self.wo(attend(rotate_halves(q, table[: x.shape[1]]), rotate_halves(k, table[: x.shape[1]]), v, mask).flatten(2))


class PlainDecoder(Decoder):
    config: PlainConfig
    attention = PlainAttention


def test_a_model_family_is_three_classes_and_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:

    shape = PlainConfig(vocab_size=256, dim=64, num_layers=2, expert_hidden=32, num_experts=4, top_k=2, num_heads=4, max_seq_len=512)
    monkeypatch.setitem(presets.MODELS, "plain_debug", shape)  # type: ignore[arg-type]
    monkeypatch.setitem(presets.TRAIN_DEFAULTS, "plain_debug", TrainDefaults(steps=2, batch=2, seq_len=32, lr=1e-3, warmup=1))
    monkeypatch.setitem(presets.SHAPES, "PlainConfig", PlainConfig)  # type: ignore[arg-type]
    monkeypatch.setitem(families.FAMILIES, PlainConfig, PlainDecoder)
    assert presets.resolve_model("plain_debug") is shape
    assert presets.shape_from_json(presets.shape_to_json(shape)) == shape  # type: ignore[arg-type, comparison-overlap]
    model = families.build_model(shape, RECIPES["hp"])
    assert sum(p.numel() for p in model.parameters()) == shape.parameters()[0]
    model.init_weights(seed=0)
    tokens = torch.randint(0, 256, (2, 32))
    model(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
