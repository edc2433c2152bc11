"""Attention within documents: a packed sequence is its documents run alone, forward and backward, however it is computed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from tests.operator_calls import OperatorCalls
from torch import Tensor

from mxep.models import document_mask
from mxep.models.decoder import Decoder
from mxep.models.document_mask import DocumentMask, PackedDocuments, attend, document_starts
from mxep.models.families import build_model
from mxep.models.presets import MODELS, AttnImplementation, ModelConfig
from mxep.parallel import Recompute, compile_blocks, recompute_blocks
from mxep.recipe import resolve_recipe

LENGTHS = [[5, 1, 18, 8], [32], [31, 1]]  # of the documents in each sequence
SHAPES = {
    "deepseek": dataclasses.replace(MODELS["dsv3_debug_cpu"], num_layers=2, max_seq_len=32, v_head_dim=24),
    "qwen": dataclasses.replace(MODELS["qwen3_debug_cpu"], num_layers=2, max_seq_len=32, balance_loss=0.0),
}


def packed(lengths: list[list[int]] = LENGTHS) -> PackedDocuments:
    return PackedDocuments.of(torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths]))


def build(shape: ModelConfig) -> Decoder:
    model = build_model(shape, resolve_recipe("hp"))
    model.init_weights(0)
    return model


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (len(LENGTHS), 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: Decoder) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def alone(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of every document in a sequence of its own."""
    tokens, labels = tokens_and_labels()
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts = []
        for part, label in zip(tokens[row].split(lengths), labels[row].split(lengths), strict=True):
            parts.append(model(part[None]))
            F.cross_entropy(parts[-1][0], label, reduction="sum").backward()
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows).detach(), gradients(model)


def together(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = tokens_and_labels()
    with torch.no_grad():
        logits = model(tokens, documents=packed())
    model(tokens, labels, packed()).backward()
    return logits, gradients(model)


def assert_same(found: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], want[0], atol=2e-5, rtol=2e-5)
    assert found[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert float((found[1][name] - gradient).norm()) < 2e-5 * float(gradient.norm()), name


@pytest.mark.parametrize("way", ["plain", "full", "selective", "compiled", "compiled and selective"])
@pytest.mark.parametrize("implementation", get_args(AttnImplementation))
@pytest.mark.parametrize("family", SHAPES)
def test_a_packed_sequence_is_its_documents_alone(family: str, implementation: AttnImplementation, way: str) -> None:
    model = build(SHAPES[family])
    want = alone(model)
    model.attn_implementation = implementation
    if "compiled" in way:
        compile_blocks(model.layers.values(), "aot_eager")
    recompute_blocks(model.layers.values(), next((mode for mode in ("full", "selective") if mode in way), "none"))  # type: ignore[arg-type]
    assert_same(together(model), want)
    tokens, _ = tokens_and_labels()
    assert not torch.allclose(model(tokens), want[0], atol=1e-2), "without documents attention sees across their ends"


@pytest.mark.parametrize("family", SHAPES)
def test_one_document_is_no_mask(family: str) -> None:
    model = build(SHAPES[family])
    tokens, _ = tokens_and_labels()
    whole = PackedDocuments.of(torch.arange(32).expand(len(tokens), -1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, documents=whole), model(tokens), atol=2e-5, rtol=2e-5)


def varlen_reference(q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | int, scale: float, window_size: tuple[int, int]) -> Tensor:
    """What `varlen_attn` gives, and what it asks for: bounds that hold, one width, a multiple of 8."""
    starts, keys, longest, longest_key = lengths
    assert starts is keys
    assert longest == longest_key
    assert window_size == (-1, 0)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert not q.shape[-1] % 8
    assert isinstance(starts, Tensor)
    assert starts.dtype == torch.int32
    ends = starts.tolist()
    assert (ends[0], ends[-1]) == (0, len(q))
    sizes = [end - start for start, end in itertools.pairwise(ends)]
    assert 0 <= min(sizes) <= max(sizes) <= longest  # type: ignore[operator]
    rows = [
        F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in part), is_causal=True, scale=scale, enable_gqa=True)
        for part in zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        if len(part[0])
    ]
    return torch.cat([row.transpose(1, 2)[0] for row in rows])


@pytest.mark.parametrize("family", SHAPES)
def test_by_variable_length(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with a stand-in for the kernel."""

    def by_length(documents: PackedDocuments | None, *_: object) -> DocumentMask | None:
        return None if documents is None else DocumentMask(None, document_starts(documents), documents.longest)

    model = build(SHAPES[family])
    want = alone(model)
    monkeypatch.setattr(document_mask, "varlen_attn", varlen_reference)
    monkeypatch.setattr("mxep.models.decoder.document_mask", by_length)
    assert_same(together(model), want)


@pytest.mark.parametrize(("width", "value_width", "heads"), [(192, 128, 4), (64, 64, 2), (20, 33, 4), (8, 16, 1)])
def test_widths_and_heads(width: int, value_width: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_mask, "varlen_attn", varlen_reference)
    q, k, v = (torch.randn(3, 32, *shape) for shape in ((4, width), (heads, width), (heads, value_width)))
    documents = packed()
    by_mask = attend(q, k, v, document_mask.document_mask(documents, torch.float32))
    assert by_mask.shape == (3, 32, 4, value_width)
    loose = documents._replace(most=9, longest=32)  # bounds may be far
    for found, implementation in itertools.product((documents, loose), get_args(AttnImplementation)):
        by_length = DocumentMask(None, document_starts(found), found.longest, implementation)
        torch.testing.assert_close(attend(q, k, v, by_length), by_mask)
    torch.testing.assert_close(attend(q, k, v, DocumentMask(None, None, 0, "flash_attention_4")), attend(q, k, v, None))


@pytest.mark.parametrize("documents", [None, PackedDocuments.of(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]))])
def test_gradients_of_the_reference(documents: PackedDocuments | None) -> None:
    mask = document_mask.document_mask(documents, torch.float64, "flash_attention_4")
    operands = [torch.randn(2, 5, *shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 6), (2, 6), (2, 3))]
    torch.autograd.gradcheck(lambda *parts: attend(*parts, mask, 0.3), operands, check_batched_grad=False)


@pytest.mark.parametrize(("mode", "calls"), [("selective", 2), ("full", 4)])
def test_selective_recomputation_keeps_it(mode: Recompute, calls: int) -> None:
    model = build(SHAPES["qwen"])
    model.attn_implementation = "flash_attention_4"
    recompute_blocks(model.layers.values(), mode)
    with OperatorCalls() as called:
        model(*tokens_and_labels(), packed()).backward()
    assert called.counts["causal_attention"] == calls
    assert called.counts["causal_attention_backward"] == 2


def test_bounds_and_lengths() -> None:
    found = packed()
    assert (found.most, found.longest) == (4, 32)
    squares = [[length**2 for length in row] for row in LENGTHS]
    assert found.attended_tokens() == sum(map(sum, squares)) / (3 * 32)
    assert packed([[32]] * 2).attended_tokens() == 32
