"""Input that the public functions of this package would have computed wrongly without an error is a ValueError; so are wrong types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.truth import raises_naming

import mxep
from mxep.ep.exchange_plan import ExchangePlan
from mxep.ep.token_sort import combine_topk, sort_tokens_by_expert
from mxep.grouped_mm import expert_mm
from mxep.parallel import MXLinear

ROWS, D = 64, 64
COUNTS, OFFS = torch.tensor([32, 32]), torch.tensor([32, 64], dtype=torch.int32)
META = torch.device("meta")


def rows() -> torch.Tensor:
    return torch.randn(ROWS, D)


def weight() -> torch.Tensor:
    return torch.randn(2, 32, D)


@pytest.mark.parametrize("counts", [[32, 31], [0, 0], [32, 33], [2**62, 2**62], [2**63 - 1, 66]])
def test_counts_of_other_rows(counts: list[int]) -> None:
    """Without this error rows beyond the counts were dropped."""
    for call, where in ((lambda: mxep.permute_mxfp8_fwd_hp_bwd(mxep.quantize_mx(rows()), torch.tensor(counts), 1, 2), "permute"),
                        (lambda: mxep.permute_and_pad(rows(), torch.tensor(counts), 1, 2, 32), "permute_and_pad")):  # fmt: skip
        with raises_naming(where, f"add up to {sum(counts)}", "64 rows", "pass the counts that came with these rows"):
            call()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row_map: torch.where(row_map == 3, 4, row_map), "has row 3 of 64 0 times"),
        (lambda row_map: torch.where(row_map == 3, -1, row_map), "has row 3 of 64 0 times"),
        (lambda row_map: torch.where(row_map == -1, 5, row_map), "has row 5 of 64 65 times"),
        (lambda row_map: torch.where(row_map == 3, -7, row_map), "points to row -7"),
        (lambda row_map: torch.where(row_map == 3, 64, row_map), "points to row 64"),
    ],
)
def test_row_maps_that_lose_rows(change: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    shape, padded, row_map, _, _ = mxep.permute_and_pad(rows(), COUNTS, 1, 2, 32)
    with raises_naming("unpermute", said):
        mxep.unpermute_hp_fwd_mxfp8_bwd(padded, change(row_map), shape)
    with raises_naming("unpermute", "has row 64 of 99 0 times"):
        mxep.unpermute_hp_fwd_mxfp8_bwd(padded, row_map, torch.Size([100, D]))


@pytest.mark.parametrize(("inputs", "outputs"), [([63], [64]), ([64], [63]), ([63], [63]), ([65], [65]), ([-1], [-1]), ([64, 0], [64, 0])])
def test_splits_of_other_rows_without_a_group(inputs: list[int], outputs: list[int]) -> None:
    """Without this error the splits were ignored, and all rows stayed."""
    for call in (
        lambda: mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(rows(), outputs, inputs, ""),
        lambda: mxep.a2a_combine_hp_fwd_mxfp8_bwd(rows(), outputs, inputs, ""),
        lambda: mxep.a2a_combine_hp_fwd_mxfp8_bwd(rows(), outputs, inputs, "", mxfp8_bwd=False),
        lambda: mxep.to_mxfp8_a2a_dequant(rows(), outputs, inputs, ""),
        lambda: mxep.ep_grouped_mm(rows(), weight(), inputs, outputs, COUNTS, ""),
    ):
        with raises_naming("of 64 rows without a group", "want [64] twice", "pass the group"):
            call()


def test_tensors_on_another_device() -> None:
    """Without this error a meta tensor among CPU tensors gave a result without values."""
    grouped = mxep.to_mxfp8_then_scaled_grouped_mm
    w = weight().transpose(-2, -1)
    for name, call in {
        "num_tokens_per_expert": lambda: mxep.permute_and_pad(rows(), COUNTS.to(META), 1, 2, 32),
        "permuted_indices": lambda: mxep.unpermute_hp_fwd_mxfp8_bwd(rows(), torch.arange(ROWS, device=META), torch.Size([65, D])),
        "offs": lambda: grouped(rows(), w, OFFS.to(META)),
        "B_t": lambda: grouped(rows(), w.to(META), OFFS),
        "bias": lambda: grouped(rows(), w, OFFS, torch.zeros(32, device=META)),
    }.items():
        with raises_naming(f"{name} is on meta, want cpu", "move it there"):
            call()


def test_arguments_that_are_no_tensor() -> None:
    chosen = torch.zeros(ROWS, 1, dtype=torch.int64)
    w1, w2 = torch.randn(2, 64, D), torch.randn(2, D, 32)
    for name, call in {
        "input": lambda: mxep.permute_and_pad([[1.0]], COUNTS, 1, 2, 32),
        "num_tokens_per_expert": lambda: mxep.permute_and_pad(rows(), [32, 32], 1, 2, 32),
        "tokens_per_expert_group": lambda: mxep.generate_permute_indices([32, 32], 2, 1, 128, 32),
        "permuted_indices": lambda: mxep.unpermute_hp_fwd_mxfp8_bwd(rows(), [0] * ROWS, torch.Size([65, D])),
        "A": lambda: mxep.to_mxfp8_then_scaled_grouped_mm([1.0], weight(), OFFS),
        "x": lambda: mxep.fused_experts([1.0], chosen, chosen.float(), w1, None, w2, None, num_experts=2, group=""),
        "experts": lambda: mxep.fused_experts(rows(), chosen.tolist(), chosen.float(), w1, None, w2, None, num_experts=2, group=""),
        "w1": lambda: mxep.fused_experts(rows(), chosen, chosen.float(), w1.tolist(), None, w2, None, num_experts=2, group=""),
        "b1": lambda: mxep.fused_experts(rows(), chosen, chosen.float(), w1, [[0.0] * 64] * 2, w2, None, num_experts=2, group=""),
        "b2": lambda: mxep.fused_moe(rows(), w1[:, 0], w1, None, w2, [[0.0] * D] * 2, top_k=1, num_experts=2, group=""),
        "weight": lambda: mxep.ep_grouped_mm(rows(), [1.0], [ROWS], [ROWS], COUNTS, ""),
        "data": lambda: mxep.quantize_mx([1.0]),
        "hidden": lambda: mxep.linear_cross_entropy([1.0], w2[0], chosen),
        "MoE: x": lambda: mxep.MoE(mxep.MoEConfig(D, 32, 2, 1))([1.0]),
        "FusedMoE: x": lambda: mxep.FusedMoE(mxep.MoEConfig(D, 32, 2, 1))([1.0]),
        "MXLinear: input": lambda: MXLinear(torch.nn.Linear(D, 32), mxep.Recipe.named("mxfp8_gemm"))([1.0]),
        "grouped_mm: w": lambda: expert_mm(rows(), [1.0], OFFS, mxep.Recipe.named("hp")),
        "permute: input": lambda: mxep.permute_mxfp8_fwd_hp_bwd([1.0], COUNTS, 1, 2),
        "main_grad": lambda: mxep.to_mxfp8_then_scaled_grouped_mm(
            rows(), weight().requires_grad_().transpose(1, 2), OFFS, wgrad_with_hp=True, main_grad=[1.0]
        ),
        "lora b2": lambda: mxep.fused_experts(
            rows(), chosen, chosen.float(), w1, None, w2, None, num_experts=2, group="", lora=mxep.moe.ExpertLora(None, None, w2, [1.0])
        ),
    }.items():
        with raises_naming(f"{name} is list, want a torch.Tensor"):
            call()


def test_nothing_where_a_tensor_is_wanted() -> None:
    chosen = torch.zeros(ROWS, 1, dtype=torch.int64)
    w1, w2 = torch.randn(2, 64, D), torch.randn(2, D, 32)
    for name, call in {
        "input": lambda: mxep.a2a_dispatch_mxfp8_fwd_hp_bwd(None, [ROWS], [ROWS], ""),
        "A": lambda: mxep.to_mxfp8_then_scaled_grouped_mm(None, weight(), OFFS),
        "x": lambda: mxep.fused_experts(None, chosen, chosen.float(), w1, None, w2, None, num_experts=2, group=""),
        "data": lambda: mxep.to_mx(None),
        "permute: input": lambda: mxep.permute_mxfp8_fwd_hp_bwd(None, COUNTS, 1, 2),
        "router_weight": lambda: mxep.fused_moe(rows(), None, w1, None, w2, None, top_k=1, num_experts=2, group=""),
    }.items():
        with raises_naming(f"{name} is None, want a torch.Tensor"):
            call()
    with raises_naming("global_router_loss: no layers"):
        mxep.moe.global_router_loss([])
    with raises_naming("build_meshes: world_size=0"):
        mxep.parallel.build_meshes(0, mxep.parallel.ParallelDims(), "cpu")
    with raises_naming("from_qdata_and_scales", "qdata () with scales ()"):
        mxep.MXTensor.from_qdata_and_scales(torch.zeros((), dtype=torch.float8_e4m3fn), torch.zeros((), dtype=torch.uint8), torch.float32)


def test_other_types() -> None:
    chosen, config = torch.zeros(ROWS, 1, dtype=torch.int64), mxep.MoEConfig(D, 32, 2, 1)
    w1, w2 = torch.randn(2, 64, D), torch.randn(2, D, 32)
    models = mxep.convert_experts, mxep.convert_linears, mxep.quantize_base, mxep.dequantize_base, mxep.unconvert
    for call in models:
        with raises_naming(f"{call.__name__}: model is None, want Module"):
            call(None)
    for call, *named in (
        (lambda: mxep.MoE(None), "MoE: config is None, want MoEConfig"),
        (lambda: mxep.moe.Router(64), "Router: config is int, want MoEConfig"),
        (lambda: mxep.FusedMoE.of(None), "FusedMoE.of: moe is None, want MoE"),
        (lambda: ExchangePlan.from_counts(COUNTS, "ep"), "ExchangePlan: group is str, want ProcessGroup"),
        (lambda: mxep.MoE(config, ["hp"]), "recipe: ['hp'] is unknown, want one of"),
        (lambda: mxep.linear_cross_entropy(rows(), w2[0].t(), chosen[:, 0], recipe=None), "linear_cross_entropy: recipe is None", "'hp'"),
        (
            lambda: mxep.fused_experts(rows(), chosen, chosen.float(), w1, None, w2, None, num_experts=2, group="", lora=3),
            "lora is int, want ExpertLora",
        ),
        (
            lambda: mxep.to_mxfp8_then_scaled_grouped_mm(rows(), weight().transpose(1, 2), OFFS, kernel_preference="cuda"),
            "kernel_preference='cuda' is unknown, want one of auto, emulated",
        ),
    ):
        with raises_naming(*named):
            call()


def test_a_second_backward_into_a_gradient_in_mx() -> None:
    """Autograd adds to it in place; the error says what to do, and that works."""
    x = rows().requires_grad_()

    def backward() -> None:
        mxep.a2a_combine_hp_fwd_mxfp8_bwd(x, [ROWS], [ROWS], "").sum().backward()

    backward()
    assert isinstance(x.grad, mxep.MXTensor)
    first = x.grad.dequantize()
    with raises_naming("writes into an MXTensor", "x.grad = x.grad.dequantize()"):
        backward()
    x.grad = x.grad.dequantize()
    backward()
    assert torch.equal(x.grad, 2 * first)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "1", None])
def test_invalid_counts(wrong: object) -> None:
    for name, call in {
        "ep_degree": lambda: mxep.permute_and_pad(rows(), COUNTS, wrong, 2, 32),
        "num_local_experts": lambda: mxep.permute_and_pad(rows(), COUNTS, 1, wrong, 32),
        "alignment": lambda: mxep.permute_and_pad(rows(), COUNTS, 1, 2, wrong),
        "padded_shape[0]": lambda: mxep.unpermute_hp_fwd_mxfp8_bwd(rows(), torch.arange(ROWS), (wrong, D)),
    }.items():
        with raises_naming(f"{name}={wrong!r}", "want a positive whole number"):
            call()
    if wrong != 0:
        with raises_naming(f"max_len={wrong!r}", "want a whole number from 0 on"):
            mxep.generate_permute_indices(COUNTS, 2, 1, wrong, 32)
    with raises_naming(f"group_size_multiple_of={wrong!r}", "want a positive multiple of 32"):
        mxep.permute_mxfp8_fwd_hp_bwd(mxep.quantize_mx(rows()), COUNTS, 1, 2, wrong)
    with raises_naming("unpermute", "want Size([R+1, anything])"):
        mxep.unpermute_hp_fwd_mxfp8_bwd(rows(), torch.arange(ROWS), 65)


def test_an_invalid_order() -> None:
    sorted_rows, order, _ = sort_tokens_by_expert(rows(), torch.tensor([[0, 1]] * ROWS), 2)
    for wrong in (torch.zeros_like(order), order + 5):
        with raises_naming("combine_topk", "order has not each of 0 to 127 once"):
            combine_topk(sorted_rows, wrong, 2)


def test_negative_counts() -> None:
    with raises_naming("ExchangePlan", "[3, -1]", "at least 0"):
        ExchangePlan.from_counts(torch.tensor([3, -1]), None)
