"""The registered operators: results have shape, dtype and strides of their fakes, writes follow the schema, nothing aliases an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.operator_calls import OperatorCalls
from tests.programs.host_cost import frames_in
from tests.truth import raw
from torch._subclasses import FakeTensorMode

from mxep import operators, reference
from mxep.operators import OVERLOADS, direct
from mxep.ops.grouped_gemm.hopper import rebase_reference
from mxep.ops.grouped_gemm.hopper.rebase_reference import MAX_SPREAD

pytestmark = pytest.mark.usefixtures("every_device")
M, K, N, G = 96, 64, 32, 3


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mx(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.quantize(torch.randn(shape), "rceil")


def rebased() -> rebase_reference.RebasedWeight:
    return rebase_reference.rebase_weight(*mx(G, N, K))


def attentions() -> list[tuple]:
    """Other widths for values, and grouped heads within documents, of which one is empty."""
    if torch.get_default_device().type == "cuda":
        pytest.importorskip("flash_attn.cute")
    starts = torch.tensor([0, 2, 5, 9, 10, 10], dtype=torch.int32)
    shapes = ((4, 16), (4, 16), (4, 8)), ((4, 16), (2, 16), (2, 16))
    whole, grouped = ([torch.randn(2, 5, *shape).bfloat16() for shape in three] for three in shapes)
    return [(*whole, 0.3), (*grouped, 0.3, starts, 4)]


def records(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """MX rows as strided views into packed records."""
    packed = reference.quantize_packed(torch.randn(rows, width), "rceil")
    return packed[:, :width].view(torch.float8_e4m3fn), packed[:, width : width + width // 32].view(torch.float8_e8m0fnu)


def offs() -> torch.Tensor:
    return torch.tensor([32, 32, 64], dtype=torch.int32)


def row_map() -> torch.Tensor:
    return torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)


def slots() -> torch.Tensor:
    return torch.tensor([[0, 3, -1], [-1, -1, -1], [2, -1, 1]], dtype=torch.int32)


_held: list[torch.Tensor] = []


def memory(ranks: int) -> list[int]:
    """Addresses that may be written to, 1 KiB each."""
    _held.extend(torch.zeros(1024, dtype=torch.uint8) for _ in range(ranks))
    return [held.data_ptr() for held in _held[-ranks:]]


def tokens() -> torch.Tensor:
    """A row map of M rows into three."""
    return row_map().repeat(20)[:M]


ADD, PADDING = {"accumulate": True}, {"mostly_padding": True}


def lora(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def gate_up() -> dict[str, torch.Tensor]:
    return {"out_gate": torch.randn(G, N, K), "out_up": torch.randn(G, N, K)}


def path() -> str:
    return "reference" if torch.get_default_device().type == "cpu" else "exact"


# operator: calls to check
CALLS: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "quantize": lambda: [(torch.randn(5, K), "rceil"), (torch.randn(2, 3, K).bfloat16(), "floor"), (torch.randn(0, K), "rceil")],
    "quantize_columnwise": lambda: [(torch.randn(M, 5), "rceil"), (torch.randn(2, M, 3).bfloat16(), "floor")],
    "quantize_rowwise_columnwise": lambda: [
        (torch.randn(M, K), "rceil"),
        (torch.randn(2, N, K).bfloat16(), "floor"),
        (torch.randn(0, K), "rceil"),
    ],
    "quantize_packed": lambda: [(torch.randn(5, K), "rceil"), (torch.randn(0, K), "floor"), (torch.randn(()).expand(3, K), "rceil")],
    "quantize_packed_into": lambda: [
        (torch.randn(5, K), torch.empty(5, 80, dtype=torch.uint8), "rceil"),
        (torch.randn(3, K).bfloat16(), torch.empty(3, 80, dtype=torch.uint8), "floor"),
    ],
    "dequantize_packed_into": lambda: [
        (torch.randint(0, 100, (5, 80), dtype=torch.uint8), torch.empty(5, K)),
        (torch.randint(0, 100, (3, 80), dtype=torch.uint8), torch.empty(3, K).bfloat16()),
    ],
    "dequantize": lambda: [
        (*mx(5, K), torch.bfloat16),
        (*records(5, K), torch.float32),
        (*mx(0, K), torch.float32),
        (*records(3, K), torch.bfloat16, row_map(), offs()[:1]),
    ],
    "activate": lambda: [
        (torch.randn(5, 2 * K), "concatenated", "rceil"),
        (torch.randn(5, 200).bfloat16()[:, 3 : 3 + 2 * K], "interleaved", "floor", True),
        (torch.randn(0, 2 * K), "concatenated", "rceil"),
        (torch.randn(M, 2 * K), "interleaved", "rceil", False, torch.rand(M)),
        (torch.randn(M, 2 * K), "concatenated", "rceil", False, torch.rand(M), offs()[-1:]),
        (torch.randn(M, 2 * K), "concatenated", "rceil", False, None, None, "geglu"),
        (torch.randn(M, K), "concatenated", "rceil", True, None, offs()[-1:], "relu2"),
        (torch.randn(5, 2 * K).bfloat16(), "concatenated", "rceil", {"h": "hp"}),
        (torch.randn(0, 2 * K), "interleaved", "floor", True, {"h": "mx+hp", "quantize_x": True}),
        (torch.randn(M, 2 * K), "interleaved", "rceil", False, torch.rand(M), {"h": "hp"}),
        (torch.randn(M, 2 * K), "interleaved", "rceil", False, torch.rand(M), None, "geglu_tanh", {"h": "mx+hp"}),
        (torch.randn(M, K).bfloat16(), "concatenated", "rceil", False, torch.rand(M), None, "relu2", {"h": "hp"}),
        (torch.randn(5, 2 * K).bfloat16(), "concatenated", "rceil", {"quantize_x": True}),
        *((torch.randn(M, 2 * K), "interleaved", "rceil", {"h": "rebased", "granularity": name}) for name in ("auto", "row", "span")),
        (torch.randn(5, K), "concatenated", "floor", True, torch.rand(5), None, "relu2", {"h": "rebased+hp"}),
        (torch.randn(M, 2 * K), "interleaved", "rceil", False, torch.rand(M), {"quantize_x": True}),
        (torch.randn(M, K), "concatenated", "rceil", False, torch.rand(M), None, "relu2", {"quantize_x": True}),
    ],
    "activate_backward": lambda: [
        (torch.randn(5, K).bfloat16(), torch.randn(5, 2 * K).bfloat16(), "interleaved", "rceil"),
        (torch.randn(()).expand(5, K), torch.randn(5, 200)[:, : 2 * K], "concatenated", "floor", True),
        (torch.randn(0, K), torch.randn(0, 2 * K), "concatenated", "rceil", False, "mx+hp", "mx+hp"),
        (torch.randn(5, K), torch.randn(5, 2 * K).bfloat16(), "concatenated", "rceil", False, "mx+hp", "hp"),
        (torch.randn(5, K), torch.randn(5, 2 * K), "interleaved", "rceil", False, "none", "none"),
        (torch.randn(M, K), torch.randn(M, 2 * K), "concatenated", "rceil", False, "none", "mx", torch.rand(M)),
        (torch.randn(5, K).bfloat16(), mx(5, 2 * K)[0], "concatenated", "rceil", False, "mx+hp", "hp", None, mx(5, 2 * K)[1]),
        (torch.randn(5, K), torch.randn(5, 2 * K), "interleaved", "rceil", True, "hp", "mx", None, None, None, "geglu"),
        (torch.randn(5, K), torch.randn(5, 2 * K), "interleaved", "rceil", True, "mx+rebased+hp", "mx", {"scores": torch.rand(5)}),
        (torch.randn(0, K), torch.randn(0, 2 * K), "concatenated", "rceil", False, "rebased", "none", {"granularity": "row"}),
        (torch.randn(M, K), torch.randn(M, K), "concatenated", "rceil", False, "mx+hp", "mx+hp", torch.rand(M), None, None, "relu2"),
        (torch.randn(5, K), mx(5, K)[0], "concatenated", "floor", False, "mx", "mx", None, mx(5, K)[1], None, "relu2"),
        (torch.randn(M, K), torch.randn(M, 2 * K).bfloat16(), "interleaved", "rceil", False, "none", "none", {"offs": offs()}),
        (torch.randn(M, K), torch.randn(M, 2 * K), "interleaved", "rceil", False, "mx", "hp", torch.rand(M), {"offs": offs().long()}),
        (torch.randn(M, K), torch.randn(M, 2 * K), "concatenated", "rceil", False, "rebased", "mx", torch.rand(M), {"offs": offs()}),
        (torch.randn(0, K), torch.randn(0, 2 * K), "concatenated", "rceil", False, "rebased", "none", {"offs": offs() * 0}),
    ],
    "add_group_bias": lambda: [
        (torch.randn(M, N).bfloat16(), torch.randn(G, N), offs()),
        (torch.randn(M, 2 * N)[:, :N], torch.randn(G, N).bfloat16(), offs().long()),
        (torch.randn(M, N).bfloat16(), torch.randn(G, N), offs(), torch.rand(M)),
    ],
    "group_bias_grads": lambda: [
        (torch.randn(M, N).bfloat16(), offs(), torch.randn(G, N), torch.rand(M)),
        (torch.randn(3, N), offs(), torch.randn(G, N), None, row_map()),
        (torch.randn(N, M).t(), offs().long(), torch.randn(G, N).bfloat16(), None, None, False),
        (torch.randn(M, N), offs()),
        (torch.randn(M, N), offs()[:0], torch.randn(0, N)),
    ],
    "group_bias_factors": lambda: [(torch.randn(G, N), None, 5), (torch.randn(N, G).bfloat16().t(), torch.rand(M), M)],
    "cross_entropy": lambda: [
        (torch.randn(3, 7), torch.tensor([6, -100, 0])),
        (torch.randn(2, 8).bfloat16(), torch.tensor([[1, 2], [3, 4]])[:, 0]),
        (torch.randn(0, 8).double(), torch.zeros(0, dtype=torch.int64)),
    ],
    "cross_entropy_to_gradient": lambda: [
        (torch.randn(3, 7), torch.tensor([6, -100, 0])),
        (torch.randn(2, 8).bfloat16(), torch.tensor([[1, 2], [3, 4]])[:, 0]),
    ],
    "causal_attention": lambda: [*attentions()],
    "causal_attention_backward": lambda: [
        (torch.randn(2, 5, 4, given[2].shape[3]).bfloat16(), *given[:3], *torch.ops.mxep.causal_attention(*given), *given[3:])
        for given in attentions()
    ],
    "gather_rows": lambda: [
        (torch.randn(3, 7), row_map()),
        (torch.randn(14, 3).t()[:3], row_map()),
        (torch.randn(3, 8).bfloat16(), row_map()),
    ],
    "gather_mx_rows": lambda: [(*mx(3, K), row_map()), (*records(3, K), row_map()), (*mx(3, K), row_map(), offs()[:1])],
    "gather_quantize": lambda: [
        (torch.randn(3, K), row_map(), "rceil"),
        (torch.randn(3, 2 * K).bfloat16()[:, 1 : 1 + K], row_map(), "floor"),
    ],
    "scatter_rows": lambda: [(torch.randn(5, 7), row_map(), 3), (torch.randn(5, 8).bfloat16(), row_map(), 4)],
    "scatter_mx_rows": lambda: [(*mx(5, K), row_map(), 3), (*records(5, K), row_map(), 4)],
    "reduce_rows": lambda: [
        (torch.randn(4, 7), slots()),
        (torch.randn(4, 20).bfloat16()[:, 1:9], slots(), torch.randn(3, 8)),
        (torch.randn(0, 8), slots() * 0 - 1, torch.randn(8, 3).t().bfloat16()),
        (torch.randn(4, 8).bfloat16(), slots(), None, torch.rand(3, 3).t()),
    ],
    "reduce_rows_backward": lambda: [
        (torch.randn(3, 8), torch.randn(6, 8), torch.tensor([[5, 0], [2, 1], [3, 4]], dtype=torch.int32), torch.rand(3, 2)),
        (
            torch.randn(()).expand(2, 8).bfloat16(),
            torch.randn(20, 4).bfloat16().t()[:, 1:9],
            torch.tensor([[3, 1], [0, 2]], dtype=torch.int32).t(),
            torch.rand(2, 2).t(),
        ),
        (torch.randn(0, 8).bfloat16(), torch.randn(0, 8).bfloat16(), slots()[:0, :2], torch.rand(0, 2)),
    ],
    "index_expert_rows": lambda: [
        (torch.tensor([[0, 2], [-1, 1]]), 3, 4, 16),
        (torch.tensor([[0, 2, 2]], dtype=torch.int32), 3, 0, 3),
        (torch.zeros(0, 2, dtype=torch.int64), 2, 1, 4),
    ],
    "adamw_step": lambda: [
        (
            torch.randn(512).bfloat16(),
            torch.randn(512).bfloat16(),
            *(torch.full((512,), 77, dtype=torch.uint8) for _ in range(2)),
            *(torch.ones(2) for _ in range(2)),
            *(torch.full((), value) for value in (3.0, 1e-2, 2.0, 0.0)),
            7,
            (512, 512, 0),
            (0.9, 0.95, 0.1, 1e-8),
        ),
        (
            *(torch.rand(7) for _ in range(4)),
            *(None, None, torch.zeros(()), torch.ones(()), None, None, 7, (7, 7, 0), (0.9, 0.95, 0.1, 1e-8)),
            torch.zeros((), dtype=torch.float64),
        ),
    ],
    "route_tokens": lambda: [
        (torch.randn(4, 6), torch.randn(6), 2, "sigmoid", 3, 2, False, True, 2.0, True, True),
        (torch.randn(5, 6).bfloat16(), None, 3, "softmax", 1, 1, True, False, 1.0, False, False),
    ],
    "router_backward": lambda: [
        (torch.randn(4, 6), torch.rand(4, 6).argsort(1)[:, :3], torch.randn(4, 3), *how)
        for how in (
            (torch.ones(6), None, "softmax", True, 2.0, torch.bfloat16),
            (None, torch.ones(()), "sigmoid", False, 1.0, torch.float32),
            (None, None, "softmax", True, 1.0, torch.float32, True),
        )
    ],
    "index_topk": lambda: [
        (torch.tensor([[3, 4, 7, 7], [-1, 9, 0, 0]], dtype=torch.int32)[:, :2], torch.rand(2, 2), 1, 3, 4, 16),
        (torch.tensor([[0, 2, -1]]), torch.rand(3, 1).t(), 0, 3, 4, 16),
        (torch.zeros(0, 4, dtype=torch.int32), torch.rand(0, 4), 0, 2, 1, 4),
    ],
    "sort_topk": lambda: [
        (torch.tensor([[3, 1, 2], [0, 2, 3]]), torch.rand(2, 3).bfloat16(), 4, False, False),
        (torch.tensor([[3, -1, 3], [0, 2, 3]]).t(), torch.rand(2, 3).double().t(), 4, True, True),
        (torch.zeros(0, 2, dtype=torch.int64), torch.rand(0, 2), 4, False, False),
    ],
    "pack_topk": lambda: [
        (torch.tensor([[0, 2], [3, 1]]), torch.rand(2, 2), 5),
        (torch.tensor([[0, 3], [2, 1]]).t(), torch.rand(2, 2).t(), 2),
    ],
    "send_index": lambda: [(torch.tensor([[0, 2], [3, 1]]), mode, 2, 2, 5) for mode in ("rank_dedup", "all_to_all", "all_ranks")],
    "chunk_bounds": lambda: [(offs(), 64, 4)],
    "chunk_rows": lambda: [
        (offs(), torch.rand(96), *(torch.arange(96, dtype=torch.int32) for _ in range(maps)), *[None] * (2 - maps), offs()[1:], 64)
        for maps in (1, 2)
    ],
    "gather_or_zero": lambda: [
        (slots(), torch.rand(4)),
        (slots() * 0 - 1, torch.rand(0)),
        (slots(), torch.rand(4), torch.tensor([[0, 1, 2], [2, 0, 1], [2, 1, 0]]).short(), torch.bfloat16),
        (slots().long(), torch.rand(4), None, torch.float64),
    ],
    "p2p_scatter_rows": lambda: [
        (torch.randn(3, 4), slots(), None, memory(3), 16, ""),
        (torch.randn(3, K).bfloat16(), slots(), slots().clamp(min=0) % 2, memory(2), 96, "floor"),
    ],
    "p2p_reduce_rows": lambda: (
        [(torch.randn(4, K), slots(), 1, memory(3), 80, "rceil"), (torch.randn(4, 8), slots(), 3, memory(1), 32, "")]
        + [(torch.randn(4, 8), slots(), 3, memory(1), 32, "", torch.tensor([2, 6], dtype=torch.int32), torch.randn(3, 8))]
    ),
    "reduce_rows_chunk": lambda: [
        (
            torch.randn(4, 7),
            slots(),
            torch.tensor([2, 0, -1, -1], dtype=torch.int32),
            torch.tensor([2, 6], dtype=torch.int32),
            torch.randn(3, 7),
        ),
        (
            torch.randn(4, 20).bfloat16()[:, 1:9],
            slots(),
            torch.tensor([0, 2, -1, -1], dtype=torch.int32),
            torch.tensor([0, 2], dtype=torch.int32),
            torch.randn(3, 8).bfloat16(),
            torch.full((3, 8), 77, dtype=torch.int16),
        ),
    ],
    "permute_indices": lambda: [(torch.tensor([2, 0, 1, 3]), 2, 2, 32, 96), (torch.tensor([2, 0], dtype=torch.int32), 1, 2, 32, 64)],
    "exchange_dequantized": lambda: [
        (torch.randn(5, K), [5], [5], dist.group.WORLD.group_name, "rceil"),
        (torch.randn(0, K).bfloat16(), [0], [0], dist.group.WORLD.group_name, "floor"),
    ],
    "exchange_quantized": lambda: [
        (torch.randn(5, K), [5], [5], dist.group.WORLD.group_name, "rceil"),
        (torch.randn(0, K).bfloat16(), [0], [0], dist.group.WORLD.group_name, "floor"),
    ],
    "exchange_rows": lambda: [(torch.randn(5, 7), [5], [5], dist.group.WORLD.group_name)],
    "grouped_mm_hp": lambda: [
        (torch.randn(M, K), torch.randn(G, N, K), offs(), torch.bfloat16),
        (torch.randn(M, K).bfloat16(), torch.randn(G, K, N).bfloat16().transpose(-2, -1), offs(), torch.float32),
    ],
    "add_group_lora": lambda: [
        (torch.randn(M, N), torch.randn(M, K), torch.randn(G, 8, K), torch.randn(G, N, 8), offs()),
        (*(torch.randn(shape).bfloat16() for shape in ((5, N), (3, K), (G, 8, K), (G, N, 8))), offs() * 0 + 5, row_map()),
    ],
    "group_lora_inner": lambda: [
        (torch.randn(M, K), torch.randn(G, 8, K), offs()),
        (torch.randn(3, K).bfloat16(), torch.randn(G, K, 8).bfloat16().transpose(-2, -1), offs() * 0 + 5, row_map()),
    ],
    "rebase_weight": lambda: [mx(G, N, K)],
    "quantize_grouped_mm": lambda: [
        (torch.randn(M, K).bfloat16(), *rebased(), offs(), torch.bfloat16, "rceil", "auto", True),
        (torch.randn(M, 2 * K)[:, :K], *rebased(), offs(), torch.float32, "floor", "row", False, "skip"),
        (torch.randn(0, K), *rebased(), offs() * 0, torch.float32, "rceil", "span", True),
        (
            torch.randn(M, K).bfloat16(),
            *rebase_reference.rebase_weight(*mx(G, N, K)),
            offs(),
            torch.bfloat16,
            "rceil",
            "auto",
            True,
            "zero",
            lora(M, 16),
            lora(G, N, 16),
        ),
    ],
    "quantize_weight": lambda: [
        (torch.randn(2, N, K), torch.randn(2, 32, K), "rceil", True, True, True),
        (torch.randn(2, K, N).bfloat16().transpose(1, 2), None, "floor", False, True),
        (torch.randn(2, N, K).bfloat16(), torch.randn(2, 0, K).bfloat16(), "rceil", True, False),
        (mx(2, N, K)[0], mx(2, 32, K)[0], "rceil", False, True, False, mx(2, N, K)[1], mx(2, 32, K)[1]),
        (mx(2, N, K)[0], None, "floor", True, True, {"scale": mx(2, N, K)[1]}),
    ],
    "grouped_mm_mx": lambda: [
        (*mx(M, K), *mx(G, N, K), offs(), torch.bfloat16, path()),
        (*records(M, K), *mx(G, N, K), offs(), torch.float32, path()),
        (*records(3, K), *mx(G, N, K), offs(), torch.bfloat16, path(), tokens()),
        (*mx(M, K), *mx(G, N, K), offs(), torch.bfloat16, path(), None, "skip"),
        *(
            (*rows[:2], *mx(G, N, K), offs(), torch.bfloat16, path(), None, "zero", rows.block_scale)
            for rows in (rebase_reference.rebase_rows(*mx(M, K), MAX_SPREAD[name]) for name in ("auto", "row"))
            if path() == "reference"  # of a GPU's only the FP8 paths take them
        ),
        *(
            (*mx(M, K), *mx(G, N, K), offs(), torch.bfloat16, path(), {"inner": lora(M, 16), "lora_b": lora(G, N, 16)})
            for _ in range(path() == "reference")  # likewise
        ),
    ],
    "grouped_wgrad_hp": lambda: [
        (torch.randn(M, N).bfloat16(), torch.randn(M, K).bfloat16(), offs(), torch.bfloat16),
        (torch.randn(M, N), torch.randn(M, K).bfloat16(), offs(), torch.float32),
        (torch.randn(3, N), torch.randn(5, 8), offs() * 0 + 5, torch.float32, {"grad_map": row_map()}),
    ],
    "grouped_wgrad_hp.out": lambda: [
        (torch.randn(M, N), torch.randn(M, K).bfloat16(), offs(), torch.bfloat16, {"out": torch.randn(G, N, K).bfloat16()}),
        (torch.randn(M, N).bfloat16(), torch.randn(M, K).bfloat16(), offs(), torch.float32, {"out": torch.randn(G, N, K), **ADD}),
        (torch.randn(N, M).t(), torch.randn(M, K), offs().long(), torch.float32, {"out": torch.randn(G, N, K), **ADD}),
    ],
    "grouped_wgrad_mx": lambda: [
        (*records(M, N), *records(M, K), offs(), torch.float32, path()),
        (*records(3, N), *mx(3, K), offs(), torch.bfloat16, path(), tokens(), tokens()),
        (*mx(M, N), *records(3, K), offs(), torch.float32, path(), None, tokens()),
    ],
    "grouped_wgrad_mx.out": lambda: [
        (*records(M, N), *records(M, K), offs(), torch.float32, path(), {"out": torch.randn(G, N, K), **ADD}),
        (*records(M, N), *records(M, K), offs(), torch.float32, path(), {"out": torch.randn(G, N, K), **PADDING}),
        (
            *records(3, N),
            *mx(3, K),
            offs(),
            torch.bfloat16,
            path(),
            tokens(),
            tokens(),
            {"out": torch.randn(G, N, K).bfloat16(), **PADDING},
        ),
    ],
    "grouped_wgrad_mx_gate_up": lambda: [
        (*records(M, 2 * N), *records(M, K), offs(), torch.float32, path()),
        (*mx(M, 2 * N), *mx(M, K), offs(), torch.bfloat16, path()),
        (*mx(M, 2 * N), *records(3, K), offs(), torch.bfloat16, path(), tokens()),
    ],
    "grouped_wgrad_mx_gate_up.out": lambda: [
        (*records(M, 2 * N), *mx(3, K), offs(), torch.float32, path(), tokens(), {**gate_up(), **PADDING}),
    ],
    "copy_expert_grads": lambda: [
        (torch.randn(G, N, K), torch.randn(G, N, K), offs()),
        (torch.randn(G, N, K).bfloat16(), torch.randn(G, 2 * N, K).bfloat16()[:, :N], offs()),
    ],
    "grouped_wgrad_mx_columnwise": lambda: [(*mx(N, M), *mx(K, M), offs(), torch.bfloat16, path())],
}


def test_every_operator_is_checked() -> None:
    assert set(CALLS) == set(OVERLOADS)


def test_a_tensor_on_the_meta_device_among_others_is_refused() -> None:
    """torch calls the fake for it, whose result has no values."""
    rows, ends = torch.randn(4, 64), torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mxep::add_group_bias: rows on (\S+), bias on meta, offs on \1, want one device"):
        torch.ops.mxep.add_group_bias(rows, torch.randn(1, 64, device="meta"), ends)


def operator_and_calls(name: str) -> tuple[Any, list[tuple[tuple, dict]]]:
    """The overload, and (arguments, options) of each of its calls."""
    packet, _, overload = name.partition(".")
    calls = [(call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {}) for call in CALLS[name]()]
    return getattr(getattr(torch.ops.mxep, packet), overload or "default"), calls


def with_its_fake(operator: Any, arguments: Sequence[object], options: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(result, result of the fake) for each result of a call."""
    out = operator(*arguments, **options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in (*arguments, *options.values())]
        fake = operator(*faked[: len(arguments)], **dict(zip(options, faked[len(arguments) :], strict=True)))
    outs, fakes = ((out,), (fake,)) if isinstance(out, torch.Tensor) else (out or (), fake or ())
    return [*zip(outs, fakes, strict=True)]


@pytest.mark.parametrize("name", OVERLOADS)
def test_results_are_those_of_the_fake(name: str) -> None:
    operator, calls = operator_and_calls(name)
    for arguments, options in calls:
        inputs = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
        given = [*zip(operator._schema.arguments, arguments, strict=False)]
        given += [(argument, options[argument.name]) for argument in operator._schema.arguments if argument.name in options]
        written = [value for argument, value in given if argument.is_write]
        before = [raw(value).clone() for value in inputs]
        results = with_its_fake(operator, arguments, options)
        for value, same in zip(inputs, before, strict=True):
            assert torch.equal(raw(value), same) != any(value is target for target in written), "writes where its schema says"
        held = {value.untyped_storage().data_ptr() for value in inputs if value.numel()}
        for real, promised in results:
            assert (real.shape, real.dtype, real.device) == (promised.shape, promised.dtype, promised.device)
            assert not real.numel() or real.stride() == promised.stride()
            assert not real.numel() or real.untyped_storage().data_ptr() not in held, "aliases no input, and no other result"
            held.add(real.untyped_storage().data_ptr())


def test_results_of_one_memory_are_apart_in_a_graph() -> None:
    memory = torch.arange(8.0)
    form = operators._apart(lambda: (memory[:2], memory[2:5], torch.ones(3)), torch.ops.mxep.quantize_rowwise_columnwise.default)
    first, second, third = form()
    assert first.data_ptr() == memory.data_ptr()
    assert [part.untyped_storage().nbytes() for part in (first, second, third)] == [32, 12, 12]
    assert second.tolist() == [2.0, 3.0, 4.0]


def column_major(value: object) -> object:
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    plain = value.view(torch.uint8) if value.element_size() == 1 else value  # FP8 dtypes lack a copy
    return plain.transpose(-1, -2).contiguous().transpose(-1, -2).view(value.dtype)


@pytest.mark.parametrize("name", OVERLOADS)
def test_results_are_those_of_the_fake_for_other_strides(name: str) -> None:
    """A compiled graph goes by the fake's strides. Operands that an operator refuses do not count."""
    operator, calls = operator_and_calls(name)
    for arguments, options in calls:
        for index in range(len(arguments)):
            varied = [column_major(value) if place == index else value for place, value in enumerate(arguments)]
            try:
                operator(*varied, **options)
            except (ValueError, RuntimeError):
                continue
            for real, promised in with_its_fake(operator, varied, options):
                differ = [dim for dim, size in enumerate(real.shape) if size > 1 and real.stride(dim) != promised.stride(dim)]
                assert not real.numel() or not differ, f"argument {index}: {real.stride()}, its fake {promised.stride()}"


def _dispatched(call: Callable[[], object]) -> int:
    """How many of this package's operators a call passes to torch's dispatcher."""
    packet = torch._ops.OpOverloadPacket

    def ours(frame: FrameType) -> bool:
        return frame.f_code is packet.__call__.__code__ and frame.f_locals["self"]._qualified_op_name.startswith("mxep::")

    with torch._C.DisableTorchFunction():  # a default device is a mode that calls each operator once more
        return frames_in(call, ours)


def test_direct_calls_enter_the_dispatcher_only_if_needed() -> None:
    x = torch.randn(4, 64)
    want = torch.ops.mxep.quantize(x, "rceil")
    assert _dispatched(lambda: direct.quantize(x, "rceil")) == 0
    leaf = x.clone().requires_grad_()
    assert _dispatched(lambda: direct.quantize(leaf, "rceil")) == 1, "a gradient is wanted"
    with torch.no_grad():
        assert _dispatched(lambda: direct.quantize(leaf, "rceil")) == 0
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(want, direct.quantize(x, "rceil"), strict=True))
        with OperatorCalls():
            assert _dispatched(lambda: direct.quantize(x, "rceil")) == 1
        assert _dispatched(lambda: torch.vmap(lambda rows: direct.quantize(rows, "rceil"))(torch.stack((x, x)))) == 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            direct.quantize(x, "rceil")
        assert "mxep::quantize" in {event.name for event in profiler.events()}
        with FakeTensorMode() as fake:
            qdata, _ = direct.quantize(fake.from_tensor(x), "rceil")
        assert qdata.shape == x.shape
        qdata, _ = direct.quantize(torch.empty(4, 64, device="meta"), "rceil")
        assert qdata.device.type == "meta"
    with pytest.raises(AttributeError, match="no operator 'quantise'"):
        _ = direct.quantise
