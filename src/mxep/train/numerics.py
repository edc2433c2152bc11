"""Counts what MXFP8 does to the rows of each MoE layer: non-finite blocks, codes at the end of the range, zeros.

Separate blocks: rows are counted as they enter the experts, and gradients as they enter the experts' backward. That is after the exchange:
one row per (token, expert) pair, padding rows included, gradients multiplied by their scores.

A fused layer: tokens and the output's gradient are counted before the exchange, each token (T, D) once, without padding and scores.

Rows that are not in MX yet are quantised 1x32 for the count only. A step that counts is slower, and its numbers are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxep.comm.collective import gather_objects
from mxep.moe import MoE
from mxep.mx import MXTensor, quantize_mx

COUNTS = ("blocks", "nonfinite_blocks", "values", "largest_codes", "zeros")
_NAN_SCALE, _LARGEST, _MAGNITUDE = 0xFF, 0x7E, 0x7F  # bytes of e8m0 and e4m3: a NaN block's scale, 448, all bits but the sign


@torch.no_grad()
def count_codes(rows: Tensor, scaling_mode: Any) -> Tensor:
    """(5,) float64, in the order of COUNTS: 1x32 blocks, blocks that held NaN or Inf, values, values at +-448, values that are 0.

    Rows of zeros (padding) count like others.

    >>> count_codes(torch.tensor([[448.0] + [0.0] * 31, [float("inf")] * 32]), "rceil").tolist()
    [2.0, 1.0, 64.0, 1.0, 31.0]
    """
    mx = rows if isinstance(rows, MXTensor) else quantize_mx(rows.detach(), scaling_mode=scaling_mode)
    codes, scales = mx.qdata.contiguous().view(torch.uint8), mx.scale.contiguous().view(torch.uint8)
    magnitudes = codes & _MAGNITUDE
    sums = [(scales == _NAN_SCALE).sum(), (magnitudes == _LARGEST).sum(), (magnitudes == 0).sum()]
    nonfinite, largest, zeros = (total.double() for total in sums)
    blocks, values = (torch.tensor(float(part.numel()), dtype=torch.float64, device=codes.device) for part in (scales, codes))
    return torch.stack([blocks, nonfinite, values, largest, zeros])


class NumericsWatch:
    """Counts codes in every MoE layer whose experts run in MXFP8, inside of `counting`.

    Args:
        layers: MoE layers of this rank by name.
        stage: ranks that have the same layers; None: all ranks.
        pipeline: one rank of each pipeline stage; None without a pipeline.
    """

    def __init__(self, layers: dict[str, MoE], stage: dist.ProcessGroup | None = None, pipeline: dist.ProcessGroup | None = None) -> None:
        self.layers = {name: layer for name, layer in layers.items() if layer.experts.recipe.gemm == "mxfp8"}
        self.stage, self.pipeline = stage, pipeline
        self._counts: dict[tuple[str, str], Tensor] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every forward and backward inside; earlier counts are dropped."""
        self._counts = {}
        hooks = [hook for name, layer in self.layers.items() for hook in self._watch(name, layer.experts)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, name: str, experts: nn.Module) -> Sequence[Any]:
        def entering(_: nn.Module, inputs: tuple) -> None:
            if torch._C._current_graph_task_id() == -1:  # not in a forward that backward recomputes
                self._add(name, "rows", inputs[0], experts)

        def leaving(_: nn.Module, __: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            y = output[0] if isinstance(output, tuple) else output  # fused experts also return the router's loss and load
            if y.requires_grad:
                y.register_hook(lambda grad: self._add(name, "gradients", grad, experts))

        return experts.register_forward_pre_hook(entering), experts.register_forward_hook(leaving)

    def _add(self, name: str, kind: str, rows: Tensor, experts: Any) -> None:
        if rows.shape[0]:
            read = rows if isinstance(rows, MXTensor) else experts.operands(rows)[0]
            counts = count_codes(read, experts.recipe.scaling_mode)
            self._counts[name, kind] = self._counts.get((name, kind), 0) + counts

    def records(self) -> list[dict[str, Any]]:
        """One record for each layer and kind of rows, summed over all ranks. A collective."""
        records: list[dict[str, Any]] = []
        for name in self.layers:
            for kind in ("rows", "gradients"):
                here = next(self.layers[name].parameters()).device  # the stage's group sums on this device
                counts = self._counts.get((name, kind), torch.zeros(len(COUNTS), dtype=torch.float64, device=here))
                if dist.is_initialized():
                    dist.all_reduce(counts, group=self.stage)
                records.append({"layer": name, "of": kind, **dict(zip(COUNTS, map(int, counts.tolist()), strict=True))})
        if self.pipeline is None:
            return records
        return [record for stage in gather_objects(records, self.pipeline) for record in stage]
