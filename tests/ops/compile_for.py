"""Compiles every kernel for a GPU that need not be there, through the launchers; prints one JSON line per compiled kernel.

    python tests/ops/compile_for.py 90

Run by test_kernel_compile.py in a process of its own: it replaces Triton's driver and turns every launch into a compilation.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable

import sass
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

from mxep.ops import kernels

BF16, FLOAT32, E4M3, E8M0 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu
_INSTRUCTIONS = re.compile(
    r"\b(?:ld\.global|st\.global|\w+[\w.]*\.ftz|cvt[\w.]*e4m3x2[\w.]*|fma\.rn\.f32|wgmma\.mma|tcgen05\.mma|mma\.sync)[\w.:]*|__assertfail\b"
)


class _Driver:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _NoVariant:
    """The result of a launch: there is no variant to launch."""

    run = None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None


def _compile_instead(run=jit.JITFunction.run) -> dict[int, tuple[str, CompiledKernel]]:
    """Make launches compile only; returns a dict that will have each compiled kernel by its name."""
    compiled_kernels: dict[int, tuple[str, CompiledKernel]] = {}

    def compile_only(self, *args, grid, warmup, **options) -> _NoVariant:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        compiled_kernels[id(compiled)] = (self.__name__, compiled)
        return _NoVariant()

    jit.JITFunction.run = compile_only
    return compiled_kernels


def _launch_all() -> None:
    ends = torch.zeros(8, dtype=torch.int32)
    for width in (7168, 1056):
        x = torch.zeros(64, width, dtype=BF16)
        record = (width + width // 32 + 15) // 16 * 16
        records = torch.zeros(64, record, dtype=torch.uint8)
        data, scale = records[:, :width].view(E4M3), records[:, width : width + width // 32].view(E8M0)
        index = torch.zeros(96, dtype=torch.int32)
        kernels.quantize(x, "rceil")
        kernels.quantize(x.float(), "floor")
        kernels.quantize_packed(x, "rceil")
        kernels.quantize_columnwise(x, "rceil")
        kernels.dequantize(data, scale, BF16)
        kernels.dequantize(data, scale, FLOAT32)
        both = x[:, : width // 64 * 64]
        for layout in ("concatenated", "interleaved"):
            for mode, exact in (("rceil", False), ("floor", True)):
                kernels.activate(both, layout, mode, exact)
                kernels.activate(both, layout, mode, exact, torch.zeros(64))
            kernels.activate(both, layout, "rceil", False, torch.zeros(64), h="hp")
            kernels.activate(both, layout, "rceil", False, torch.zeros(64), quantize_x=True)
            kernels.activate(both, layout, "rceil", False, torch.zeros(64), ends[:1])
            kernels.activate(both, layout, "rceil", False, torch.zeros(64), ends[:1], h="hp")
            kernels.activate(both, layout, "rceil", form=(10.0,))
            kernels.activate(both, layout, "rceil", True, torch.zeros(64), ends[:1], "swiglu", (7.0, 1.702, 1.0))
            kernels.activate(both, layout, "rceil", activation="geglu")
            kernels.activate(both, layout, "floor", False, torch.zeros(64), activation="geglu_tanh", quantize_x=True)
            kernels.activate(both, layout, "rceil", True, torch.zeros(64), ends[:1], "geglu", h="hp")
        kernels.activate(x, "concatenated", "rceil", activation="relu2")
        kernels.activate(x, "concatenated", "rceil", False, torch.zeros(64), ends[:1], "relu2", quantize_x=True)
        kernels.add_group_bias(x, x[:8].float(), ends)
        kernels.add_group_bias(x, x[:8], ends, torch.zeros(64))
        kernels.group_bias_grads(x, ends, x[:8], torch.zeros(64))
        kernels.group_bias_grads(x, ends, x[:8].float(), None, index, False)
        kernels.group_bias_grads(x.float(), ends)
        kernels.group_bias_factors(x[:8], torch.zeros(64), 64)
        kernels.group_bias_factors(x[:8].float(), None, 64)
        kernels.cross_entropy(x, index[:64].long())
        kernels.cross_entropy_to_gradient(x.float(), index[:64].long())
        kernels.cross_entropy_to_gradient(x, index[:64].long())
        kernels.gather_rows(x, index)
        kernels.gather_mx_rows(data, scale, index)
        kernels.gather_mx_rows(data, scale, index, ends[:1])
        kernels.dequantize(data, scale, BF16, index, ends[:1])
        kernels.gather_quantize(x, index, "rceil")
        kernels.scatter_mx_rows(data, scale, index[:64], 80)
        kernels.reduce_rows(x, index.view(12, 8))
        kernels.reduce_rows(x.float(), index.view(24, 4), x[:24])
        kernels.reduce_rows(x, index[:64].view(8, 8), None, torch.zeros(8, 8))
        kernels.reduce_rows_backward(x[:8], x, index[:64].view(8, 8), torch.zeros(8, 8))
        kernels.reduce_rows_backward(x[:8], x.float(), index[:64].view(8, 8), torch.zeros(8, 8))
        chunk, carry = torch.zeros(2, dtype=torch.int32), torch.zeros(12, width, dtype=torch.int16)
        kernels.reduce_rows_chunk(x, index.view(12, 8), index[:64], chunk, x[:12], carry)
        kernels.reduce_rows_chunk(x.float(), index.view(12, 8), index[:64], chunk, x[:12].float())
    kernels.permute_indices(torch.zeros(256, dtype=torch.int64), 8, 32, 32, 4096)
    offs = torch.zeros(8, dtype=torch.int32)
    experts = torch.zeros(300, 6, dtype=torch.int64)
    for how in ((torch.zeros(24), torch.zeros(()), "softmax", True, 1.0, BF16), (None, None, "sigmoid", False, 1.0, FLOAT32)):
        kernels.router_backward(torch.zeros(300, 24), experts, torch.zeros(300, 6), *how, in_parts=how[-1] == FLOAT32)
    for logits, losses in ((torch.zeros(300, 24), True), (torch.zeros(300, 24, dtype=BF16), False)):
        for choice in (("softmax", 1, 1, False), ("sigmoid", 4, 2, False), ("softmax", 1, 1, True)):
            kernels.route_tokens(logits, torch.zeros(24) if losses else None, 6, *choice, True, 2.5, losses, losses)
    kernels.pack_topk(experts, torch.zeros(300, 6), 400)
    for mode in ("rank_dedup", "all_to_all", "all_ranks"):
        kernels.send_index(experts, mode, 4, 2, 400)
    kernels.chunk_bounds(offs, 64, 3)
    for other in (None, offs):
        kernels.chunk_rows(offs, torch.zeros(8), offs, other, offs[:2], 96)
    kernels.gather_or_zero(offs, torch.zeros(8))
    kernels.gather_or_zero(experts, torch.zeros(8), experts.short(), BF16)
    for allowed in ((False, False), (True, True)):
        kernels.sort_topk(experts, torch.zeros(300, 6, dtype=BF16), 24, *allowed)
    for a, out in ((BF16, FLOAT32), (FLOAT32, FLOAT32)):
        kernels.grouped_mm_hp(torch.zeros(64, 128, dtype=a), torch.zeros(8, 96, 128, dtype=BF16), offs, out)
        kernels.grouped_wgrad_hp(torch.zeros(64, 96, dtype=a), torch.zeros(64, 128, dtype=BF16), offs, out)
        narrow = torch.zeros(64, 96, dtype=a), torch.zeros(64, 8, dtype=a), offs, FLOAT32
        kernels.grouped_wgrad_hp(*narrow)
        kernels.grouped_wgrad_hp(*narrow, grad_map=torch.zeros(64, dtype=torch.int32))
        operands, into = (torch.zeros(64, 96, dtype=a), torch.zeros(64, 128, dtype=BF16), offs, FLOAT32), torch.zeros(8, 96, 128)
        kernels.grouped_wgrad_hp(*operands, into)
        kernels.grouped_wgrad_hp(*operands, into, accumulate=True)
    for dtype in (BF16, FLOAT32):
        kernels.copy_expert_grads(torch.zeros(8, 96, 128, dtype=dtype), torch.zeros(8, 96, 128, dtype=dtype), offs)
        x, a, b = (torch.zeros(shape, dtype=dtype) for shape in ((64, 128), (8, 16, 128), (8, 96, 16)))
        kernels.add_group_lora(torch.zeros(64, 96, dtype=dtype), x, a, b, offs, torch.zeros(64, dtype=torch.int32))
        kernels.add_group_lora(torch.zeros(64, 128, dtype=dtype), x[:, :96], b.mT, a.mT, offs)
    from mxep.ops.activation.forward import row_sums
    from mxep.ops.grouped_gemm.bias import sum_parts

    sum_parts(torch.zeros(10, 5760), ends, 64, 64)
    row_sums(torch.zeros(64, 48), None)
    row_sums(torch.zeros(64, 44), offs[:1])
    from mxep.ops.grouped_gemm.triton import zero_padding_rows

    zero_padding_rows(torch.zeros(64, 128, dtype=BF16), offs)


if __name__ == "__main__":
    driver.set_active(_Driver(int(sys.argv[1])))
    found = _compile_instead()
    _launch_all()
    cubins = [compiled.asm["cubin"] for _, compiled in found.values()]
    for (name, compiled), code in zip(found.values(), sass.instructions(cubins, f"SM{sys.argv[1]}a"), strict=True):
        line = {"kernel": name, "instructions": Counter(_INSTRUCTIONS.findall(compiled.asm["ptx"]))}
        line |= {"cubin_bytes": len(compiled.asm["cubin"]), "stack_pointer_as_data": sass.stack_pointer_as_data(code)}
        print(json.dumps(line))
