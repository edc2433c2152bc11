"""Measure the accuracy tables of docs/numerics.md on the CPU and print them.

    python docs/measure_numerics.py

All but the router's table, per cent of tokens, is SQNR = 20 log10(|ref| / |ref - x|) in dB against the same computation in float32 from
the same bf16 inputs, so a bf16 row shows what bf16 itself costs.  Seeds are fixed; tests/test_docs_numbers.py measures again and compares
within 0.3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist

import mxep
from mxep import FusedMoE, MoE, MoEConfig, ScaleCalculationMode
from mxep.ep.exchange_plan import ExchangePlan
from mxep.moe import RuntimeEPConfig
from mxep.moe.router import logits_of

ROWS, D, N, L = 1024, 512, 256, 4
RECIPES = tuple(name if name != "hp" else "bf16" for name in mxep.recipe.RECIPES)


def sqnr_db(ref: torch.Tensor, x: torch.Tensor) -> float:
    """Signal to quantisation noise in dB; inf where the two are equal."""
    ref, x = ref.double(), x.double()
    noise = (ref - x).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(ref.norm().item() / noise)


@contextlib.contextmanager
def one_rank_group() -> Iterator[None]:
    """A gloo group of this process alone, unless there is a group already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def format_accuracy() -> dict[str, float]:
    """Quantise and dequantise normal data, 1x32."""
    x = torch.randn(4096, D, generator=torch.Generator().manual_seed(0))
    return {
        mode.name: sqnr_db(x, mxep.MXTensor.to_mx(x, torch.float8_e4m3fn, 32, mode).dequantize())
        for mode in (ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR)
    }


def exchange_accuracy() -> dict[str, float]:
    """`to_mxfp8_a2a_dequant`, forward and backward."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, D, generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(ROWS, D, generator=generator).bfloat16()
    out = mxep.to_mxfp8_a2a_dequant(x, [ROWS], [ROWS])
    out.backward(grad)
    assert x.grad is not None
    return {"out": sqnr_db(x.detach(), out.detach()), "grad": sqnr_db(grad, x.grad)}


def _present(values: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    missing = [name for name, value in values.items() if value is None]
    assert not missing, f"no gradient: {missing}"
    return {name: value for name, value in values.items() if value is not None}


def pipeline(recipe: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """dispatch, permute, one grouped GEMM, unpermute, combine, forward and backward; uneven groups, one of them empty."""
    from mxep.ep.blocks import combine, dispatch, permute, unpermute
    from mxep.grouped_mm import expert_mm
    from mxep.recipe import resolve_recipe

    options = resolve_recipe(recipe)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, D, generator=generator).bfloat16().to(dtype).requires_grad_()
    w = (torch.randn(L, N, D, generator=generator) * D**-0.5).bfloat16().to(dtype).requires_grad_()
    grad = torch.randn(ROWS, N, generator=generator).bfloat16().to(dtype)
    plan = ExchangePlan.from_counts(torch.tensor([96, 0, 416, 512]), dist.group.WORLD)
    padded = permute(dispatch(x, plan, options), plan, options)
    out = expert_mm(padded.rows, w, padded.offsets, options)
    out = combine(unpermute(out, padded), plan, options)
    out.backward(grad)
    return _present({"out": out.detach(), "dx": x.grad, "dW": w.grad})


def layer(recipe: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A whole `MoE` layer, 8 experts, 2 choices, forward and backward; the choice of experts is the same in every recipe."""
    generator = torch.Generator().manual_seed(3)
    moe = MoE(MoEConfig(dim=256, hidden=256, num_experts=8, top_k=2), recipe=recipe)
    moe.init_weights(std=256**-0.5, generator=generator)
    moe.to(torch.bfloat16).to(dtype)
    x = torch.randn(512, 256, generator=generator).bfloat16().to(dtype).requires_grad_()
    grad = torch.randn(512, 256, generator=generator).bfloat16().to(dtype)
    y = moe(x)
    y.backward(grad)
    experts = moe.experts
    gradients = {"y": y.detach(), "dx": x.grad, "d gate": moe.router.gate.weight.grad}
    gradients |= {"dw1": experts.w1.grad, "dw2": experts.w2.grad, "dw3": experts.w3.grad}
    return _present(gradients)


def kept_in_mx(dtype: torch.dtype, keep: Literal[True, "mxfp8"]) -> dict[str, torch.Tensor]:
    """The fused layer of `layer`'s sizes with SwiGLU's input kept for backward as it is, or in MX."""
    generator = torch.Generator().manual_seed(3)
    recipe = "hp" if dtype == torch.float32 else "mxfp8_wgrad_with_mx"
    runtime = RuntimeEPConfig(keep_first_product=keep)
    moe = FusedMoE(MoEConfig(dim=256, hidden=256, num_experts=8, top_k=2), recipe, runtime)
    moe.init_weights(std=256**-0.5, generator=generator)
    moe.to(torch.bfloat16).to(dtype)
    x = torch.randn(512, 256, generator=generator).bfloat16().to(dtype).requires_grad_()
    y = moe(x)
    y.backward(torch.randn(512, 256, generator=generator).bfloat16().to(dtype))
    experts = moe.experts
    gradients = {"y": y.detach(), "dx": x.grad, "d gate": moe.router.gate.weight.grad}
    return _present(gradients | {"dw1": experts.w1.grad, "dw2": experts.w2.grad, "dw3": experts.w3.grad})


def router_choices(tokens: int = 4096) -> dict[str, dict[str, float]]:
    """Per cent of normal bf16 tokens to which a router product in bf16 gives other experts, and of those with a tie at its border."""
    found = {}
    for width, experts, choices in ((2048, 64, 6), (2048, 128, 8), (7168, 256, 8)):
        generator = torch.Generator().manual_seed(4)
        x, gate = torch.randn(tokens, width, generator=generator).bfloat16(), torch.randn(experts, width, generator=generator) * 0.02
        exact, rounded = logits_of(x, gate, "fp32"), logits_of(x, gate, "bf16")
        chosen = [logits.topk(choices).indices.sort(1).values for logits in (exact, rounded)]
        best = rounded.float().topk(choices + 1).values
        shares = (chosen[0] != chosen[1]).any(1), best[:, -1] == best[:, -2]
        row = dict(zip(("other experts", "tie"), (100 * share.float().mean().item() for share in shares), strict=True))
        found[f"{width} / {experts} / {choices}"] = row
    return found


def against_float32(run: Callable[[str, torch.dtype], dict[str, torch.Tensor]]) -> dict[str, dict[str, float]]:
    """Every recipe in bf16 against recipe "hp" in float32: recipe -> quantity -> dB."""
    truth = run("hp", torch.float32)
    return {recipe: {k: sqnr_db(truth[k], v) for k, v in run(recipe, torch.bfloat16).items()} for recipe in RECIPES}


def tables() -> dict[str, str]:
    """Every accuracy table of numerics.md in markdown, by name."""
    with one_rank_group():
        single = {"quantise 1x32, " + k: v for k, v in format_accuracy().items()}
        single |= {"to_mxfp8_a2a_dequant, " + k: v for k, v in exchange_accuracy().items()}
        found = {"pipeline": against_float32(pipeline), "layer": against_float32(layer)}
        truth, kept = (
            kept_in_mx(torch.float32, True),
            {"True": kept_in_mx(torch.bfloat16, True), "mxfp8": kept_in_mx(torch.bfloat16, "mxfp8")},
        )
    found["kept"] = {f"`keep_first_product={name}`": {k: sqnr_db(truth[k], v) for k, v in run.items()} for name, run in kept.items()}
    found["router"] = router_choices()
    lines = {"format": ["| what | dB |", "|---|---|", *(f"| {k} | {v:.1f} |" for k, v in single.items())]}
    for name, by_recipe in found.items():
        columns = list(next(iter(by_recipe.values())))
        head = [
            "| " + {"kept": "option", "router": "D / E / C"}.get(name, "recipe") + " | " + " | ".join(columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        lines[name] = head + ["| " + " | ".join([r, *(f"{v:.1f}" for v in row.values())]) + " |" for r, row in by_recipe.items()]
    return {name: "\n".join(rows) for name, rows in lines.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _name, _table in tables().items():
        print(f"{_name}\n\n{_table}\n")
