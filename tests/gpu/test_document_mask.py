"""Attention within documents by torch's variable-length FlashAttention and by FlashAttention-4: errors, no host sync, whole runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from tests.models.test_document_mask import SHAPES, packed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mxep.models.document_mask import DocumentMask, PackedDocuments, attend, document_mask
from mxep.models.families import build_model
from mxep.models.presets import AttnImplementation
from mxep.parallel import compile_blocks, recompute_blocks
from mxep.recipe import resolve_recipe
from mxep.train.config import TrainConfig
from mxep.train.distributed import Ranks
from mxep.train.metrics import read_metrics
from mxep.train.trainer import Trainer

pytestmark = pytest.mark.gpu

LENGTHS = [[300, 1, 600, 122, 1], [1024], [1000, 24]]


@pytest.fixture(params=get_args(AttnImplementation))
def implementation(request: pytest.FixtureRequest) -> AttnImplementation:
    if request.param == "flash_attention_4":
        pytest.importorskip("flash_attn.cute")
    return request.param


def on_gpu(lengths: list[list[int]]) -> PackedDocuments:
    found = packed(lengths)
    return found._replace(positions=found.positions.cuda())


def relative_errors(found: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in zip(found, want, strict=True)]


def errors_of_flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[float]:
    """Of torch's FlashAttention on whole sequences, causal, widths padded as it wants them."""
    widest = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    found = {}
    for dtype, backend in ((torch.bfloat16, SDPBackend.FLASH_ATTENTION), (torch.float64, SDPBackend.MATH)):
        parts = [part.detach().to(dtype).requires_grad_() for part in (q, k, v)]
        heads = [F.pad(part, (0, widest - part.shape[-1])).transpose(1, 2) for part in parts]
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.07, enable_gqa=True).transpose(1, 2)
        out = out[..., : v.shape[-1]]
        out.backward(grad.to(dtype))
        found[dtype] = [out.detach(), *(part.grad for part in parts)]
    return relative_errors(found[torch.bfloat16], found[torch.float64])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(16, 16, 192, 128), (32, 4, 128, 128), (8, 8, 96, 64), (4, 2, 20, 32)]
)
def test_error_is_that_of_a_mask(implementation: AttnImplementation, heads: int, kv_heads: int, width: int, value_width: int) -> None:
    """Output and gradients of bf16 against float64: as near as torch's own attention, with a mask or, where that is not rounded on its way
    (SDPA runs other kernels for odd widths), as FlashAttention without one."""
    shapes = [(3, 1024, heads, width), (3, 1024, kv_heads, width), (3, 1024, kv_heads, value_width)]
    operands = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    grad = torch.randn(3, 1024, heads, value_width, device="cuda").bfloat16()
    documents = on_gpu(LENGTHS)
    masks = {
        "length": (torch.bfloat16, document_mask(documents, torch.bfloat16, implementation)),
        "mask": (torch.bfloat16, document_mask(documents, torch.float32)),
        "exact": (torch.float64, document_mask(documents, torch.float64)),
    }
    assert masks["length"][1].allowed is None
    assert masks["mask"][1].starts is None
    found = {}
    for name, (dtype, mask) in masks.items():
        parts = [part.detach().to(dtype).requires_grad_() for part in operands]
        out = attend(*parts, mask, 0.07)
        out.backward(grad.to(dtype))
        found[name] = [out.detach(), *(part.grad for part in parts)]
    errors = {name: relative_errors(found[name], found["exact"]) for name in ("length", "mask")}
    errors["flash"] = errors_of_flash(*operands, grad)
    for by_length, *others in zip(errors["length"], errors["mask"], errors["flash"], strict=True):
        assert by_length < 1.3 * max(others) + 1e-4, errors
        assert by_length < 0.01, errors


@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width"), [(16, 16, 192, 128), (32, 4, 128, 128), (8, 8, 96, 64)])
def test_whole_sequences_by_flash_attention_4(heads: int, kv_heads: int, width: int, value_width: int) -> None:
    pytest.importorskip("flash_attn.cute")
    q, k, v = (
        torch.randn(2, 700, *shape, device="cuda").bfloat16() for shape in ((heads, width), (kv_heads, width), (kv_heads, value_width))
    )
    grad, found = torch.randn(2, 700, heads, value_width, device="cuda").bfloat16(), {}
    for name, dtype, mask in (
        ("fa4", torch.bfloat16, document_mask(None, torch.bfloat16, "flash_attention_4")),
        ("sdpa", torch.bfloat16, None),
        ("exact", torch.float64, None),
    ):
        parts = [part.detach().clone().to(dtype).requires_grad_() for part in (q, k, v)]
        out = attend(*parts, mask)
        out.backward(grad.to(dtype))
        found[name] = [out.detach(), *(part.grad for part in parts)]
    for mine, torchs in zip(relative_errors(found["fa4"], found["exact"]), relative_errors(found["sdpa"], found["exact"]), strict=True):
        assert mine < 1.1 * torchs


def test_flash_attention_4_in_a_graph() -> None:
    """Recorded once, replayed with other values and other documents of the same bounds."""
    pytest.importorskip("flash_attn.cute")
    q, k, v = (torch.randn(3, 1024, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    documents = on_gpu(LENGTHS)
    positions = documents.positions.clone()

    def step() -> list[Tensor]:
        mask = document_mask(documents._replace(positions=positions), torch.bfloat16, "flash_attention_4")
        out = attend(q, k, v, mask)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), out.detach())]

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    with torch.no_grad():
        q.normal_()
        positions.copy_(on_gpu([[1024], [1, 2, 3, 1017, 1], [512, 512]]).positions)
    graph.replay()
    for found, want in zip(recorded, step(), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def test_the_host_does_not_wait(implementation: AttnImplementation) -> None:
    documents, operands = on_gpu(LENGTHS), [torch.randn(3, 1024, 4, 64, device="cuda").bfloat16() for _ in range(3)]
    attend(*operands, document_mask(documents, torch.bfloat16, implementation))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = document_mask(documents, torch.bfloat16, implementation)
        attend(*operands, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(mask, DocumentMask)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", SHAPES)
def test_models(family: str, mode: str, compiled: bool, implementation: AttnImplementation) -> None:
    """A packed sequence is its documents alone, to bf16's precision; other documents in the next batch, as torch.compile has to take."""
    with torch.device("cuda"):
        model = build_model(SHAPES[family], resolve_recipe("hp"))
        model.init_weights(0)
        model.bfloat16()
    tokens = torch.randint(256, (3, 32), device="cuda")
    want = {}
    batches = [[[5, 1, 18, 8], [32], [31, 1]], [[16, 16], [32], [2, 30]], [[4] * 8, [32], [11, 21]]]
    with torch.no_grad():
        for index, lengths in enumerate(batches):
            rows = [torch.cat([model(part[None]) for part in tokens[row].split(sizes)], 1) for row, sizes in enumerate(lengths)]
            want[index] = torch.cat(rows).float()
    model.attn_implementation = implementation
    if compiled:
        compile_blocks(model.layers.values())
    recompute_blocks(model.layers.values(), mode)  # type: ignore[arg-type]
    for index, lengths in enumerate(batches):
        logits = model(tokens, documents=on_gpu(lengths))
        logits.float().square().mean().backward()
        error = float((logits.float() - want[index]).norm() / want[index].norm())
        assert error < 0.05, (index, error)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_losses_of_whole_runs(tmp_path: Path, nccl: torch.device) -> None:
    """Losses do not depend on how layers are compiled and recomputed; they differ from those without the mask."""
    lines = [json.dumps({"text": f"document {number} says {number * number}" * (number % 5 + 1)}) for number in range(4000)]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(lines))
    ways: dict[str, dict[str, Any]] = {
        "masked": {"mask_documents": True},
        "recomputed": {"mask_documents": True, "activation_checkpoint": "full"},
        "compiled": {"mask_documents": True, "compile": True, "activation_checkpoint": "selective"},
        "one function": {"mask_documents": True, "fused_layer": True},
        "without": {},
    }
    if importlib.util.find_spec("flash_attn") is not None:
        ways["FlashAttention-4"] = ways["compiled"] | {"attn_implementation": "flash_attention_4"}
        ways["FlashAttention-4 without"] = {"attn_implementation": "flash_attention_4"}
    common: dict[str, Any] = {"model": "dsv3_debug_cpu", "device": "cuda", "data": (str(text),), "steps": 6}
    common |= {"batch": 4, "seq_len": 256, "recipe": "bf16", "eval_tokens": 8192}
    losses = {}
    for name, options in ways.items():
        out = tmp_path / name
        assert Trainer(TrainConfig(**common, **options), Ranks(0, 1, nccl), out).train()
        records = [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] in ("step", "held_out")]
        assert [record["kind"] for record in records].count("step") == 6
        assert records[-1]["kind"] == "held_out"
        losses[name] = [record["loss"] for record in records]
    for name in losses:
        assert losses[name] == pytest.approx(losses["without" if "without" in name else "masked"], rel=0.02), name
    assert losses["without"] != losses["masked"]
