"""The experts' block: every expert on its own rows, as one autograd function (moe/ffn.py) or as separate grouped GEMMs.

before  rows (P, D) expert-major and padded (ep/permute.py), MX or plain; rows per expert (L,)
after   rows (P, D) in high precision; ep/unpermute.py is next
forward   y = (silu(x w1^T + b1) * (x w3^T + b3)) w2^T + b2, each product in the recipe's GEMM precision, the activation in the rows'
          dtype; biases are optional, other activations replace SwiGLU.  moe/ffn.py computes the activation in float32
backward  dgrad in the recipe's GEMM precision, wgrad in the recipe's wgrad precision, dx in the rows' dtype
host syncs  none
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mxep.checks import check_tensors
from mxep.grouped_mm.function import expert_mm
from mxep.moe.config import check_activation
from mxep.moe.expert_mlp import TENSORS, ExpertWeights
from mxep.moe.ffn import expert_ffn, runs_fused
from mxep.moe.init import init_normal_
from mxep.mx.weight_cache import CachedWeight, WeightCache
from mxep.ops.activation.functions import ActivationName, SwiGLU, differentiable, is_gated
from mxep.placements import to_local
from mxep.recipe import Recipe, TakesRecipe


def _check_counts(counts: Tensor, w1: Tensor) -> None:
    """Raise ValueError unless counts are whole numbers on the weights' device, one for each of their experts."""
    check_tensors("Experts", w1.device, num_tokens_per_expert=counts)
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != w1.shape[:1]:
        got = f"{tuple(counts.shape)} {counts.dtype}"
        raise ValueError(f"Experts: num_tokens_per_expert is {got}, want ({w1.shape[0]},) int32 or int64, each expert's rows; cast it")


class Experts(TakesRecipe, nn.Module):
    """E experts with stacked weights; under EP each rank holds L of the E.

    Args:
        dim: D.
        hidden: H, width of one expert.
        num_experts: E.
        recipe: precision of the GEMMs here and, in `mxep.moe.MoE`, of the exchanges around them; None is the default preset.
        bias: add b1, b3 and b2 to the three products.
        activation: as in `MoEConfig`; "relu2" has no w3 and no b3.
        swiglu: form of SwiGLU.

    Attributes:
        w1: (E, H, D), gate.
        w2: (E, D, H), down.
        w3: (E, H, D), up; None without a gate.
        b1: (E, H), or None.
        b2: (E, D), or None.
        b3: (E, H), or None.
        recipe: a name that is assigned is resolved.
        fused: True runs moe/ffn.py, one autograd function that saves half as much, where it has the recipe's numbers; False runs the GEMMs
            one by one.
        compute_dtype: dtype to which parameters and rows are rounded when they are read; None reads them as they are.  `apply_fsdp` sets it
            on experts that it leaves unsharded.  Backward keeps the parameters themselves and rounds them again.

    Examples:
        >>> experts = mxep.moe.Experts(dim=64, hidden=32, num_experts=2, recipe="mxfp8_gemm")
        >>> experts(torch.randn(64, 64), torch.tensor([32, 32])).shape  # 32 rows for each expert
        torch.Size([64, 64])
    """

    w3: nn.Parameter | None
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    b3: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        recipe: str | Recipe | None = None,
        bias: bool = False,
        activation: ActivationName = "swiglu",
        swiglu: SwiGLU = SwiGLU(),  # noqa: B008  immutable
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.recipe = recipe
        self.unconverted_recipe: Recipe | None = None  # the recipe before `mxep.convert_experts`; None: not converted
        check_activation("Experts", activation, swiglu)
        self.activation, self.swiglu = activation, swiglu
        gated = is_gated(activation)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.register_parameter("w3", nn.Parameter(torch.empty(num_experts, hidden, dim)) if gated else None)
        for name, width in (("b1", hidden), ("b2", dim), ("b3", hidden if gated else 0)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, width)) if bias and width else None)
        self.fused = True
        self.compute_dtype: torch.dtype | None = None
        self._kept: dict[str, CachedWeight] = {}
        self.init_weights(std=dim**-0.5)

    def keep_quantized(self, cache: WeightCache | None) -> None:
        """Quantise the weights once per step of `cache`, None: in every call. See `mxep.parallel.cache_quantized_weights`."""
        places = {"w1": ("w1",), "w2": ("w2",), "w3": ("w3",), "w13": ("w1", "w3")}  # filled when used: w13 when fused, else w1 and w3
        if self.w3 is None:
            places = {"w1": ("w1",), "w2": ("w2",), "w13": ("w1",)}
        self._kept = {} if cache is None else {place: CachedWeight(cache, self, *names) for place, names in places.items()}

    def init_weights(self, std: float, generator: torch.Generator | None = None) -> None:
        """w1, w2 and w3 from N(0, std^2), biases zero."""
        for weight in (self.w1, self.w2, self.w3):
            if weight is not None:
                init_normal_(weight, std, generator)
        for bias in (self.b1, self.b2, self.b3):
            if bias is not None:
                nn.init.zeros_(bias)

    def operands(self, rows: Tensor) -> tuple[Tensor, ExpertWeights]:
        """Rows and this rank's parameters as they are read: rows and biases rounded, weights as they are, since the GEMMs round them."""

        def read(value: Tensor | None, cast: bool) -> Tensor | None:
            value = to_local(value) if isinstance(value, DTensor) else value
            return value if value is None or not cast or dtype is None or value.dtype == dtype else value.to(dtype)

        dtype, weights, biases = self.compute_dtype, (self.w1, self.w2, self.w3), (self.b1, self.b2, self.b3)
        read_weights, read_biases = [read(weight, False) for weight in weights], [read(bias, True) for bias in biases]
        return read(rows, True), ExpertWeights(*read_weights, *read_biases)  # type: ignore[arg-type, return-value]

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Each expert's rows through its products.

        Args:
            x: (P, D) bf16 or float32, or an MXTensor of them; expert e's rows follow those of expert e-1.
            num_tokens_per_expert: (L,) int32 or int64, rows of each expert here, padding included.

        Returns:
            (P, D) in x's dtype, or in `compute_dtype`; rows past the last expert's are zero.

        Raises:
            ValueError: counts of another shape or dtype, parameters on another device than x; operands that the recipe does not take.
        """
        x, weights = self.operands(x)
        check_tensors("Experts", x.device, **{name: w for name, w in zip(TENSORS, weights.tensors, strict=True) if w is not None})
        _check_counts(num_tokens_per_expert, weights.w1)
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)  # (L,) where each expert's rows end
        kept = {} if torch.compiler.is_compiling() else self._kept  # a graph would keep the bytes of its first call for ever
        if self.fused and runs_fused(self.recipe):
            caches = kept.get("w13"), kept.get("w2")
            return expert_ffn(x, weights, offsets, self.recipe, caches, self.compute_dtype, self.swiglu, self.activation)  # (P, D)

        def product(rows: Tensor, weight: Tensor, bias: Tensor | None, place: str) -> Tensor:
            return expert_mm(rows, weight, offsets, self.recipe, kept.get(place), self.compute_dtype, bias=bias)

        w1, w2, w3, b1, b2, b3, *_ = weights
        gate, up = product(x, w1, b1, "w1"), None if w3 is None else product(x, w3, b3, "w3")  # (P, H)
        return product(differentiable(gate, up, self.activation, self.swiglu), w2, b2, "w2")  # (P, D)

    def extra_repr(self) -> str:
        activation = self.activation if self.swiglu == SwiGLU() else repr(self.swiglu)
        return f"w1={tuple(self.w1.shape)}, w2={tuple(self.w2.shape)}, {activation}, recipe={self.recipe.name}"


class SharedExperts(nn.Module):
    """The experts that see every token: one dense SwiGLU D -> H_shared -> D.

    Args:
        dim: D.
        hidden: H_shared, the widths of all shared experts together.
        swiglu: its form.

    Examples:
        >>> mxep.moe.SharedExperts(dim=64, hidden=96)(torch.randn(16, 64)).shape
        torch.Size([16, 64])
    """

    def __init__(self, dim: int, hidden: int, swiglu: SwiGLU = SwiGLU()) -> None:  # noqa: B008  immutable
        super().__init__()
        check_activation("SharedExperts", "swiglu", swiglu)
        self.swiglu = swiglu
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def init_weights(self, std: float, generator: torch.Generator | None = None) -> None:
        """w1, w2 and w3 from N(0, std^2)."""
        for linear in (self.w1, self.w2, self.w3):
            init_normal_(linear.weight, std, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D) in the weights' dtype, which x must have unless autocast decides. Raises ValueError for another one."""
        # A plain linear layer is asked: FSDP, an adapter or MXFP8 around one may take other dtypes.
        if type(self.w1) is nn.Linear and x.dtype != self.w1.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(f"shared experts: tokens are {x.dtype} and weights {self.w1.weight.dtype}, want one dtype; cast either")
        return self.w2(differentiable(self.w1(x), self.w3(x), "swiglu", self.swiglu))

    def extra_repr(self) -> str:
        return "" if self.swiglu == SwiGLU() else repr(self.swiglu)
