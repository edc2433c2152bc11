"""Fake forms of `torch.ops.mxep.*` for torch.compile and meta tensors: shapes and dtypes of the results, one function per operator.

Each takes the operator's arguments as attributes by their names in the schema, defaults filled in.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from mxep.ops.activation.functions import is_gated
from mxep.ops.grouped_gemm.hopper.rebase_reference import empty_rebased
from mxep.ops.grouped_gemm.reference import FUSED_RANK
from mxep.ops.quantize.reference import empty_mx
from mxep.shapes import record_bytes

Call = SimpleNamespace  # an operator's arguments
_INT32, _FLOAT32 = torch.int32, torch.float32


def quantize(call: Call) -> tuple[Tensor, ...]:
    return empty_mx(call.x, *call.x.shape)


def quantize_columnwise(call: Call) -> tuple[Tensor, ...]:
    return empty_mx(call.x, *call.x.mT.shape)


def quantize_rowwise_columnwise(call: Call) -> tuple[Tensor, ...]:
    return *quantize(call), *quantize_columnwise(call)


def quantize_packed(call: Call) -> Tensor:
    return call.x.new_empty((call.x.shape[0], record_bytes(call.x.shape[1])), dtype=torch.uint8)


def dequantize(call: Call) -> Tensor:
    shape = call.qdata.shape if call.row_map is None else (call.row_map.shape[0], call.qdata.shape[1])
    return call.qdata.new_empty(shape, dtype=call.dtype)


def _forms(like: Tensor, shape: tuple[int, ...], forms: str, granularity: str = "auto") -> list[Tensor]:
    mx = empty_mx(like, *shape) if "mx" in forms else ()
    rebased = empty_rebased(like, shape[0], shape[1], granularity != "row") if "rebased" in forms else ()
    out = [*mx, *(part for part in rebased if part is not None)]
    return [*out, like.new_empty(shape)] if "hp" in forms else out


def activate(call: Call) -> list[Tensor]:
    rows, width = call.x.shape
    h = _forms(call.x, (rows, width // (1 + is_gated(call.activation))), call.h, call.granularity)
    return h + _forms(call.x, (rows, width), "mx" if call.quantize_x else "none")


def activate_backward(call: Call) -> list[Tensor]:
    like = call.x if call.x_scale is None else call.dh
    out = _forms(like, call.x.shape, call.dx, call.granularity) + _forms(like, call.dh.shape, call.h)
    out += [] if call.scores is None else [torch.empty_like(call.scores, memory_format=torch.contiguous_format)]
    return out if call.offs is None else [*out, call.x.new_empty((call.offs.shape[0], call.x.shape[1]), dtype=_FLOAT32)]


def group_bias_grads(call: Call) -> list[Tensor]:
    count = (call.rows if call.row_map is None else call.row_map).shape[0]
    sums = [call.rows.new_empty((call.offs.shape[0], call.rows.shape[1]), dtype=_FLOAT32)] if call.sums else []
    return sums if call.bias is None else [*sums, call.rows.new_empty(count, dtype=_FLOAT32)]


def group_bias_factors(call: Call) -> tuple[Tensor, ...]:
    return tuple(call.bias.new_empty((*lead, FUSED_RANK), dtype=torch.bfloat16) for lead in ((call.num_rows,), call.bias.shape))


def cross_entropy(call: Call) -> Tensor:
    return call.logits.new_empty(call.labels.shape, dtype=torch.promote_types(call.logits.dtype, _FLOAT32))


cross_entropy_to_gradient = cross_entropy


def causal_attention(call: Call) -> tuple[Tensor, ...]:
    batch, length, heads = call.q.shape[:3]
    sums = (batch, heads, length) if call.starts is None else (heads, batch * length)
    wide = torch.promote_types(call.q.dtype, _FLOAT32)
    return call.q.new_empty((batch, length, heads, call.v.shape[3])), call.q.new_empty(sums, dtype=wide)


def causal_attention_backward(call: Call) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (call.q, call.k, call.v))


def _gathered(rows: Tensor, count: int) -> Tensor:
    return rows.new_empty((count, *rows.shape[1:]))


def gather_rows(call: Call) -> Tensor:
    return _gathered(call.rows, call.row_map.shape[0])


def gather_mx_rows(call: Call) -> tuple[Tensor, ...]:
    return _gathered(call.qdata, call.row_map.shape[0]), _gathered(call.scale, call.row_map.shape[0])


def gather_quantize(call: Call) -> tuple[Tensor, ...]:
    return empty_mx(call.rows, call.row_map.shape[0], call.rows.shape[1])


def scatter_rows(call: Call) -> Tensor:
    return _gathered(call.rows, call.num_rows)


def scatter_mx_rows(call: Call) -> tuple[Tensor, ...]:
    return _gathered(call.qdata, call.num_rows), _gathered(call.scale, call.num_rows)


def reduce_rows(call: Call) -> Tensor:
    return _gathered(call.rows, call.slots.shape[0])


def reduce_rows_backward(call: Call) -> tuple[Tensor, ...]:
    return call.rows.new_empty(call.rows.shape), call.weights.new_empty(call.weights.shape)


def grouped_mm_hp(call: Call) -> Tensor:
    return call.a.new_empty((call.a.shape[0], call.b.shape[1]), dtype=call.out_dtype)


def add_group_lora(call: Call) -> Tensor:
    return call.x.new_empty((call.out.shape[0], call.a.shape[1]))


def group_lora_inner(call: Call) -> Tensor:
    return call.x.new_empty(((call.x if call.row_map is None else call.row_map).shape[0], call.a.shape[1]))


def quantize_weight(call: Call) -> list[Tensor]:
    (G, R, C), S = call.first.shape, 0 if call.second is None else call.second.shape[1]
    shapes = [(G, R + S, C)] * call.rowwise + [(G, C, R + S)] * call.columnwise
    forms = ((call.first.new_empty(s, dtype=torch.float8_e4m3fn), call.first.new_empty(s[:2], dtype=_FLOAT32)) for s in shapes)
    return [tensor for form in forms for tensor in form]


def quantize_grouped_mm(call: Call) -> list[Tensor]:
    out = call.x.new_empty((call.x.shape[0], call.qb.shape[1]), dtype=call.out_dtype)
    return [out, *(empty_mx(call.x, *call.x.shape) if call.mx else ())]


def rebase_weight(call: Call) -> tuple[Tensor, ...]:
    data = torch.empty_like(call.qdata, memory_format=torch.contiguous_format)
    return data, call.scale.new_empty(call.qdata.shape[:2], dtype=_FLOAT32)


def grouped_mm_mx(call: Call) -> Tensor:
    rows = call.qa if call.row_map is None else call.row_map
    return call.qa.new_empty((rows.shape[0], call.qb.shape[1]), dtype=call.out_dtype)


def _gradient(call: Call, like: Tensor, N: int, K: int) -> Tensor:
    return like.new_empty((call.offs.shape[0], N, K), dtype=call.out_dtype)


def grouped_wgrad_hp(call: Call) -> Tensor:
    return _gradient(call, call.a, call.grad.shape[1], call.a.shape[1])


def grouped_wgrad_mx(call: Call) -> Tensor:
    return _gradient(call, call.qa, call.qg.shape[1], call.qa.shape[1])


def grouped_wgrad_mx_gate_up(call: Call) -> tuple[Tensor, ...]:
    N, K = call.qg.shape[1] // 2, call.qa.shape[1]
    return _gradient(call, call.qa, N, K), _gradient(call, call.qa, N, K)


def grouped_wgrad_mx_columnwise(call: Call) -> Tensor:
    return _gradient(call, call.qa, call.qg.shape[0], call.qa.shape[0])


def route_tokens(call: Call) -> tuple[Tensor, ...]:
    T, E = call.logits.shape
    shapes = (((T, call.top_k), _FLOAT32), ((T, call.top_k), torch.int64), ((E,), torch.int64), ((E,), _FLOAT32), ((), _FLOAT32))
    return tuple(call.logits.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def router_backward(call: Call) -> Tensor:
    T, E = call.logits.shape
    return call.logits.new_empty((T, 3, E), dtype=torch.bfloat16) if call.in_parts else call.logits.new_empty((T, E), dtype=call.dtype)


def permute_indices(call: Call) -> tuple[Tensor, ...]:
    sizes = (call.num_padded_rows, call.num_local_experts, call.num_local_experts)
    return tuple(call.counts.new_empty(size, dtype=_INT32) for size in sizes)


def index_expert_rows(call: Call) -> tuple[Tensor, ...]:
    shapes = (call.experts.shape, (call.num_local_experts,), (call.num_expert_rows,))
    return tuple(call.experts.new_empty(shape, dtype=_INT32) for shape in shapes)


def index_topk(call: Call) -> tuple[Tensor, ...]:
    return *index_expert_rows(call), *(call.experts.new_empty(call.num_expert_rows, dtype=dtype) for dtype in (_INT32, _FLOAT32))


def sort_topk(call: Call) -> tuple[Tensor, ...]:
    return tuple(call.experts.new_empty(call.experts.shape, dtype=dtype) for dtype in (torch.int64, _FLOAT32, torch.int16))


def pack_topk(call: Call) -> Tensor:
    return call.experts.new_empty((call.most, 2 * call.experts.shape[1]), dtype=_INT32)


def send_index(call: Call) -> tuple[Tensor, ...]:
    (T, C), every = call.experts.shape, call.mode == "all_to_all"
    slots = (T, C if every else call.world)
    return tuple(call.experts.new_empty(shape, dtype=_INT32) for shape in (slots, slots, (T if every else 0, C)))


def chunk_bounds(call: Call) -> Tensor:
    return call.ends.new_empty(call.count + 1)


def chunk_rows(call: Call) -> tuple[Tensor, ...]:
    token_map, grad_map = (call.token_map.new_empty(0 if given is None else call.capacity) for given in (call.token_map, call.grad_map))
    return call.offs.new_empty(call.offs.shape), call.scores.new_empty(call.capacity), token_map, grad_map


def gather_or_zero(call: Call) -> Tensor:
    return call.values.new_empty(call.index.shape, dtype=call.dtype)


def exchange_rows(call: Call) -> Tensor:
    return _gathered(call.rows, sum(call.output_splits))


def exchange_quantized(call: Call) -> Tensor:
    return call.rows.new_empty((sum(call.output_splits), record_bytes(call.rows.shape[1])), dtype=torch.uint8)


exchange_dequantized = exchange_rows
