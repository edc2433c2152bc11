"""`mxep bench attention`: causal attention of `mxep train`'s models, forward and backward, by each `--attn-implementation`.

`sdpa` is torch's, `flash_attention_4` the package flash-attn-4 (extra flash_attn); without the package its arm is left out.  Sequences are
whole, or hold documents of random lengths that attention does not leave.  The limit is a dense GEMM in bf16 with as many operations.
Errors are those of the first sequence against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch

from mxep.bench.accuracy import gradients
from mxep.bench.peers import relative_errors
from mxep.bench.registry import Case, Figure, Setting, speed_ups
from mxep.bench.timing import Arm, run_arm
from mxep.models.document_mask import DocumentMask, PackedDocuments, attend, document_mask, document_starts
from mxep.models.presets import AttnImplementation
from mxep.ops.attention import reference
from mxep.ops.attention.flash_attention_4 import check_flash_attention_4

BASELINE, FASTER, _LIMIT = "sdpa", "flash_attention_4", "dense"
MODELS = {  # heads, heads of k and v, width, value width
    "Qwen3-30B-A3B": (32, 4, 128, 128),
    "DeepSeek-V3-16B": (16, 16, 192, 128),
}
DOCUMENTS = {"none": None, "64 to 1500 tokens": (64, 1500), "9000 to 12000 tokens": (9000, 12000)}
_MOST = 0.01  # relative error of y, dq, dk, dv in bf16
_CHECK = f"relative errors of y, dq, dk and dv of the first sequence against float64: at most {_MOST}"
_SEED = 7


class AttentionProblem:
    """One shape with one kind of documents: its data and arms.

    Attributes:
        masks: of each arm.  left_out: why there is no other arm.  tflop: of each stage.
        errors: of every arm's results against float64.
    """

    def __init__(self, setting: Setting, B: int, S: int, shape: tuple[int, int, int, int], lengths: tuple[int, int] | None) -> None:
        heads, kv_heads, width, value_width = shape
        generator = torch.Generator(setting.device).manual_seed(_SEED)
        self.q, self.k, self.v, self.dy = (
            torch.randn(B, S, *of, device=setting.device, generator=generator).bfloat16()
            for of in ((heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width))
        )
        self.documents = None if lengths is None else random_documents(B, S, lengths, setting.device)
        positions = torch.arange(S).expand(B, S) if self.documents is None else self.documents.positions
        pairs = int((positions + 1).sum())  # of a token and one that it attends to
        flops = (2 * pairs * heads * of for of in (width + value_width, 3 * width + 2 * value_width))  # backward repeats a product
        self.tflop = dict(zip(("forward", "backward"), (found / 1e12 for found in flops), strict=True))
        self.masks: dict[str, DocumentMask | None] = {}
        self.left_out: dict[str, str] = {}
        arms: tuple[AttnImplementation, ...] = get_args(AttnImplementation)
        for arm in arms:
            try:
                if arm == FASTER and not setting.tiny:  # on a CPU its reference runs
                    check_flash_attention_4("bench attention", setting.device)
                self.masks[arm] = document_mask(self.documents, torch.bfloat16, arm)
            except ValueError as error:
                self.left_out[arm] = str(error)
        self.y = self.dy
        self.errors: dict[str, dict[str, dict[str, float]]] = {}

    def stages(self, arm: str) -> Arm:
        """Forward and backward of an arm."""

        def forward() -> None:
            self.q, self.k, self.v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
            self.y = attend(self.q, self.k, self.v, self.masks[arm])

        return {"forward": forward, "backward": lambda: self.y.backward(self.dy)}

    def limit(self) -> Arm:
        """A GEMM in bf16 for each stage, with as many operations."""
        side = 8192 if self.q.is_cuda else 16
        weight = torch.randn(side, side, device=self.q.device).bfloat16()

        def product(tflop: float) -> Callable[[], object]:
            x = torch.randn(max(round(tflop * 1e12 / (2 * side**2)), 1), side, device=self.q.device).bfloat16()
            return lambda: x @ weight

        return {stage: product(tflop) for stage, tflop in self.tflop.items()}

    def check(self) -> str | None:
        """Every arm's first sequence against float64; keeps the errors."""
        q, k, v, dy = (x.detach()[:1].double() for x in (self.q, self.k, self.v, self.dy))
        starts = None if self.documents is None else document_starts(self.documents._replace(positions=self.documents.positions[:1]))
        made = reference.causal_attention(q, k, v, q.shape[3] ** -0.5, starts)
        grads = reference.causal_attention_backward(dy, q, k, v, *made, q.shape[3] ** -0.5, starts)
        want = {"y": made[0], **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
        for arm in self.masks:
            run_arm(self.stages(arm))
            found = self.y.detach(), *gradients((self.q, self.k, self.v))
            pairs = zip(want.values(), found, strict=True)
            errors = [relative_errors(exact.flatten(0, 2), mine[:1].flatten(0, 2)) for exact, mine in pairs]
            self.errors[arm] = dict(zip(want, errors, strict=True))
            for name, error in self.errors[arm].items():
                if not error["all"] <= _MOST:
                    return f"{arm}: {name} is off by {error['all']:.3g}, want at most {_MOST}"
        return None

    def after(self) -> dict[str, Any]:
        """Further fields of the record."""
        return {"errors": self.errors, "left_out": self.left_out}


def random_documents(B: int, S: int, lengths: tuple[int, int], device: torch.device) -> PackedDocuments:
    """B sequences of S tokens, cut from documents of random lengths from the first to the second, one after the other."""
    index, generator, end = torch.arange(B * S), torch.Generator().manual_seed(_SEED), 0
    begins = index % S == 0
    while end < B * S:
        begins[end] = True
        end += int(torch.randint(lengths[0], lengths[1] + 1, (1,), generator=generator))
    found = PackedDocuments.of((index - index.where(begins, 0).cummax(0).values).view(B, S))
    return found._replace(positions=found.positions.to(device))


def compute_figures(ms: Mapping[str, float]) -> dict[str, Figure]:
    """Speed of `flash_attention_4` against `sdpa`."""
    if f"{FASTER}_total" not in ms:
        return {}
    return speed_ups(ms, FASTER, BASELINE, _LIMIT, f"{FASTER}_{{stage}}_vs_{BASELINE}")


def cases(setting: Setting) -> Iterator[Case]:
    """Both models, with and without documents."""
    every = [(name, 8, 4096, shape, kind) for name, shape in MODELS.items() for kind in DOCUMENTS]
    tiny = [("tiny", 2, 64, (4, 2, 16, 8), kind) for kind in DOCUMENTS]
    for name, B, S, shape, kind in setting.choose(every, tiny):
        lengths = DOCUMENTS[kind]
        problem = AttentionProblem(setting, B, S, shape, (5, 40) if lengths is not None and setting.tiny else lengths)
        facts: dict[str, Any] = {"check": _CHECK, "model": name, "documents": kind, "tflop": problem.tflop}
        yield Case(
            f"{name}, documents: {kind}",
            dict(zip(("B", "S", "heads", "kv_heads", "width", "value_width"), (B, S, *shape), strict=True)),
            {**{arm: problem.stages(arm) for arm in problem.masks}, _LIMIT: problem.limit()},
            problem.check,
            compute_figures,
            facts,
            after=problem.after,
        )
