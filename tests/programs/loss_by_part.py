"""Which part of a Qwen3 in MXFP8 moves its loss: the loss of each precision on the same weights and tokens, along one training run.

A part whose loss differs on the same weights rounds in forward; one whose own run drifts from bf16's, measured in bf16, learns otherwise.

    python loss_by_part.py --layers 16 --train hp             # the run itself in bf16
    python loss_by_part.py --layers 16 --train linears        # only attention.wq and attention.wo in MXFP8, as `mxep train` chooses them
    python loss_by_part.py --layers 16 --train hp --noise 0.0377  # bf16, with random errors of the size of an MXFP8 product's
    python loss_by_part.py --device cpu --thin --layers 2 --steps 3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mxep.models.presets import MODELS, first_layers
from mxep.moe import Experts
from mxep.parallel.linears import MXLinear
from mxep.recipe import Recipe, resolve_recipe
from mxep.train.build import Build, Linears, build_whole
from mxep.train.optimizer import build_optimizer, clipping_divisor, gradient_norm
from mxep.train.state_precision import StatePrecision

MX, HP = resolve_recipe("mxfp8_wgrad_with_mx"), resolve_recipe("hp")
PARTS = ("experts", "linears", "output")  # of these any combination, joined by "+", is a precision
ALL = "+".join(PARTS)
EXACT = f"exact+{ALL}"  # on a GPU: the same MX bytes, dequantised and multiplied in high precision
PEAK_LR, WARM_UP = 2.2e-4, 200
THIN = {
    "dim": 128,
    "expert_hidden": 64,
    "num_experts": 8,
    "top_k": 2,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "vocab_size": 4096,
}


def use(model: torch.nn.Module, precision: str) -> None:
    """Run the named parts in MXFP8 from now on, the others in bf16; "hp": all in bf16."""
    parts = precision.split("+")
    mx = dataclasses.replace(MX, gemm_path="exact") if "exact" in parts else MX

    def recipe(part: str) -> Recipe:
        return mx if part in parts else HP

    for module in model.modules():
        if isinstance(module, MXLinear):
            module.recipe = recipe("linears")
        elif isinstance(module, Experts):
            module.recipe = recipe("experts")
    model.output.recipe = recipe("output")  # type: ignore[union-attr, assignment]


@contextlib.contextmanager
def noisy(model: torch.nn.Module, size: float) -> Iterator[None]:
    """Normal errors of this relative size on what the linear layers that may be in MXFP8, and the norm before the output, return."""

    def disturb(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output + size * output.detach().square().mean().sqrt() * torch.randn_like(output)

    modules = [module for module in model.modules() if isinstance(module, MXLinear) or module is model.norm]
    handles = [module.register_forward_hook(disturb) for module in modules if size]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def batch(data: torch.Tensor, step: int, count: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels (count, seq_len) of a step, the same in every run."""
    starts = torch.randint(0, data.numel() - seq_len - 1, (count,), generator=torch.Generator().manual_seed(step)).tolist()
    rows = torch.stack([data[start : start + seq_len + 1].long() for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="hp", help=f"the run's precision: hp, or of {', '.join(PARTS)} those in MXFP8, joined by +")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--experts", type=int, help="of a layer; default the model's own, which do not fit one GPU in 48 layers")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--compare-every", type=int, default=3, help="steps from one comparison of all precisions to the next; 0: none")
    parser.add_argument("--rounding-seed", type=int, default=0, help="of stochastic rounding alone: how far two runs in bf16 part")
    parser.add_argument("--noise", type=float, default=0.0, help="see `noisy`; in the run alone, not in what it is compared with")
    parser.add_argument("--linear-fqns", default="attention.wq,attention.wo")
    parser.add_argument("--thin", action="store_true", help="narrow layers, for a CPU")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    shape = first_layers("qwen3_30b_a3b", MODELS["qwen3_30b_a3b"], given.layers)[1]
    if given.thin:
        shape = dataclasses.replace(shape, **THIN)
    if given.experts:
        shape = dataclasses.replace(shape, num_experts=given.experts)
    linears = Linears(MX, tuple(given.linear_fqns.split(",")))
    model = build_whole(shape, Build(recipe=MX, linears=linears, output=MX, force_balance=True, dtype=torch.bfloat16))
    model.to_empty(device=device)
    model.init_weights(0)
    optimizer = build_optimizer(model, PEAK_LR, 0.1, StatePrecision("adamw8bit", "bfloat16"), given.rounding_seed)
    data = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(Path(torch.__path__[0]).glob("*.py")))), dtype=torch.uint8
    )

    def loss_in(precision: str, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        use(model, precision)
        loss: torch.Tensor = model(tokens, labels) / labels.numel()
        return loss

    precisions = (*PARTS, ALL, *([EXACT] if device.type == "cuda" else []))
    print(f"step, loss in hp on the weights of {given.train}; minus that: {', '.join(precisions)}")
    rows = given.batch * given.accumulate
    for step in range(1, given.steps + 1):
        batches = [values.to(device).split(given.batch) for values in batch(data, step, rows, given.seq_len)]
        if given.compare_every and (step - 1) % given.compare_every == 0:
            tokens, labels = (values[0] for values in batches)
            with torch.no_grad():
                base, *others = (loss_in(precision, tokens, labels).item() for precision in ("hp", *precisions))
            print(f"{step:2d} {base:.4f} " + " ".join(f"{other - base:+.4f}" for other in others), flush=True)
        total = 0.0
        for tokens, labels in zip(*batches, strict=True):
            with noisy(model, given.noise):
                loss = loss_in(given.train, tokens, labels) / given.accumulate
            (loss + model.router_loss() / given.accumulate).backward()
            total += loss.item()
        print(f"{step:2d} loss {total:.4f}", flush=True)
        optimizer.grad_scale = clipping_divisor(gradient_norm(model.parameters()).to(device), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(PEAK_LR * step / WARM_UP, device=device)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
