"""Schemas of the package's registered operators (`torch.ops.mxep.*`), one table.

Opaque operators are what torch.compile sees: `reference/` has the CPU and the fake form of each, `kernels/` the CUDA one, `comm/` the
exchange.  e4m3 data and e8m0 scales travel as two tensors here and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_SCHEMAS = (
    # format: x (..., D) -> (qdata (..., D) e4m3, scale (..., D/32) e8m0)
    "quantize(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
    # 32x1: x (..., R, C) -> MX of the transpose: (qdata (..., C, R), scale (..., C, R/32))
    "quantize_transposed(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
    # both from one read: (qdata, scale, qdata_t, scale_t)
    "quantize_both(Tensor x, str scaling_mode) -> (Tensor, Tensor, Tensor, Tensor)",
    # x (T, D) -> records (T, record_bytes(D)) uint8: D bytes e4m3, D/32 bytes e8m0, zero padding to 16 bytes
    "quantize_packed(Tensor x, str scaling_mode) -> Tensor",
    "quantize_packed_into(Tensor x, Tensor(a!) records, str scaling_mode) -> ()",
    "dequantize_packed_into(Tensor records, Tensor(a!) values) -> ()",
    "dequantize(Tensor qdata, Tensor scale, ScalarType dtype, Tensor? live=None) -> Tensor",  # of the first live (1,) rows, if given
    # stacked weights (G, R, C) and (G, S, C) joined along their rows: MX (G, R + S, C), or of the transpose, 32x1, MX (G, C, R + S)
    "quantize_joined(Tensor a, Tensor b, str scaling_mode) -> (Tensor, Tensor)",
    "quantize_joined_transposed(Tensor a, Tensor b, str scaling_mode) -> (Tensor, Tensor)",
    # an activation of x, gate and up (T, 2H) "concatenated" or "interleaved", or (T, H) where it has no gate; bias (G, 2H) for the rows
    # that end at offs, h times scores (T,): h (T, H) in x's dtype, or in MX; of the first live (1,) rows, where that is given; form:
    # SwiGLU's limit, alpha, offset, plain where not given
    "activate(Tensor x, str layout, bool exact=False, Tensor? bias=None, Tensor? offs=None, Tensor? scores=None, "
    "Tensor? live=None, str activation='swiglu', float[] form=[]) -> Tensor",
    "activate_quantize(Tensor x, str layout, str scaling_mode, bool exact=False, Tensor? bias=None, Tensor? offs=None, "
    "Tensor? scores=None, Tensor? live=None, str activation='swiglu', float[] form=[]) -> (Tensor, Tensor)",
    # the same, and x itself in MX behind it: (h's qdata and scale, x's qdata (T, 2H) and scale (T, 2H/32))
    "activate_quantize_both(Tensor x, str layout, str scaling_mode, bool exact=False, Tensor? bias=None, Tensor? offs=None, "
    "Tensor? scores=None, Tensor? live=None, str activation='swiglu', float[] form=[]) -> (Tensor, Tensor, Tensor, Tensor)",
    # from dh (T, H): dx of x's width and h (T, H), each in the forms "none", "mx", "hp" or "mx+hp"; with scores their gradient (T,) too;
    # with x_scale, x is the qdata of MX rows and hp is dh's dtype
    "activate_backward(Tensor dh, Tensor x, str layout, str scaling_mode, bool exact=False, str dx='mx', str h='mx', "
    "Tensor? bias=None, Tensor? offs=None, Tensor? scores=None, Tensor? x_scale=None, Tensor? live=None, "
    "str activation='swiglu', float[] form=[]) -> Tensor[]",
    # rows (M, N) plus bias (G, N) of the group that ends at offs (G,), times the row's score (M,) if given; each row's product with it (M,)
    "add_group_bias(Tensor rows, Tensor bias, Tensor offs, Tensor? scores=None) -> Tensor",
    "dot_group_bias(Tensor rows, Tensor bias, Tensor offs) -> Tensor",
    # of rows of logits (T, V) and labels (T,), IGNORE -100: losses (T,) at least float32; and their gradient in the logits' place
    "cross_entropy(Tensor logits, Tensor labels) -> Tensor",
    "cross_entropy_to_gradient(Tensor(a!) logits, Tensor labels) -> Tensor",
    # logits (T, E), bias (E,) -> weights (T, C), experts (T, C) in rising order, counts (E,) of the C best or of forced balance, and what
    # the balance loss and the z-loss are made of: shares (E,), z ()
    "route_tokens(Tensor logits, Tensor? expert_bias, int top_k, str score_function, int num_groups, int top_groups, bool forced, "
    "bool renormalize, float route_scale, bool with_shares, bool with_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # of logits (T, E) whose experts (T, C) were chosen: their gradient, from d_weights (T, C) and those of shares (E,) and z ()
    "router_backward(Tensor logits, Tensor experts, Tensor d_weights, Tensor? d_shares, Tensor? d_z, str score_function, "
    "bool renormalize, float route_scale, ScalarType dtype) -> Tensor",
    # movers: out[p] = rows[row_map[p]], zeros where row_map[p] is -1; for p below live (1,), if given
    "gather_rows(Tensor rows, Tensor row_map, Tensor? live=None) -> Tensor",
    "gather_mx_rows(Tensor qdata, Tensor scale, Tensor row_map, Tensor? live=None) -> (Tensor, Tensor)",
    "gather_quantize(Tensor rows, Tensor row_map, str scaling_mode) -> (Tensor, Tensor)",  # plain rows in, MX out
    # out[row_map[p]] = rows[p], (num_rows, ...) with zeros where no p points
    "scatter_rows(Tensor rows, Tensor row_map, SymInt num_rows) -> Tensor",
    "scatter_mx_rows(Tensor qdata, Tensor scale, Tensor row_map, SymInt num_rows) -> (Tensor, Tensor)",
    # out[n] = the sum over s of rows[slots[n, s]], each times weights[n, s] (float32), then of added[n], in float32; slots (N, S), -1: none
    "sum_rows(Tensor rows, Tensor slots, Tensor? added=None, Tensor? weights=None) -> Tensor",
    # its gradients in rows (N*S, D), each of them in one slot, and in weights
    "sum_rows_backward(Tensor grad, Tensor rows, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
    # sum_rows over passes: window (2,) int32, rows[0] is place window[0] and row_map (P,) int32 the sum of each; sums with slots there go
    # on in out and carry (N, D) int16, which is there for bf16, and are finished in the last window that has one of their slots
    "sum_rows_within(Tensor rows, Tensor slots, Tensor row_map, Tensor window, Tensor(a!) out, Tensor(b!)? carry=None) -> ()",
    # row t to slots[t, j] of the memory at addresses[ranks[t, j]], or addresses[j], as it is or (mode: a scale rule) as its packed record
    "push_rows(Tensor rows, Tensor slots, Tensor? ranks, int[] addresses, int pitch, str mode) -> ()",
    # sum_rows of placed (P, D) and slots (W * region, J), `region` sums to each of W addresses; with a window, of the last one's rows
    # and of what sum_rows_within left in begun and carry
    "push_sums(Tensor placed, Tensor slots, int region, int[] addresses, int pitch, str mode, Tensor? window=None, Tensor? begun=None, "
    "Tensor? carry=None) -> ()",
    # counts (W*L,) rank-major -> (row_map (P,), padded counts (L,), END offsets (L,)), int32
    "group_index(Tensor counts, int ep_degree, int num_local_experts, int alignment, SymInt num_padded_rows) -> (Tensor, Tensor, Tensor)",
    # choices (R, C) of L experts -> (places (R, C), END offsets (L,), the choice in each place (P,)), int32
    "place_choices(Tensor experts, int num_local_experts, int alignment, SymInt num_places) -> (Tensor, Tensor, Tensor)",
    # the same of all ranks' tables (R, 2C) of pack_choices; and the row in each place (P,) int32 and its score (P,) float32
    "place_table(Tensor table, int rank, int num_local_experts, int alignment, SymInt num_places) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    # choices (T, C) of the fused layer: their table (S, 2C) int32 for all ranks
    "pack_choices(Tensor experts, Tensor scores, SymInt most) -> Tensor",
    # (slots, home, ranks) of mxep.ep.regions.Sent; ranks is empty in modes that send to columns
    "sent_regions(Tensor experts, str mode, int num_local_experts, int world, SymInt most) -> (Tensor, Tensor, Tensor)",
    # END places (L,) of experts -> bounds (count + 1,) of windows of at most so many places
    "cut_windows(Tensor ends, int capacity, int count) -> Tensor",
    # offs (L,), scores and maps (P,) of all places -> those of one window (2,) with `capacity` places
    "window_places(Tensor offs, Tensor scores, Tensor token_map, Tensor? grad_map, Tensor window, int capacity) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "pick_values(Tensor index, Tensor values) -> Tensor",  # values[index], 0 where index is -1
    # all-to-all of rows (T', ...) -> (sum(output_splits), ...)
    "exchange_rows(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name) -> Tensor",
    # the same of the packed records of rows (T', D): quantised on the way
    "exchange_quantized(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name, str scaling_mode) -> Tensor",
    # and of the values of these records (R, D) in rows' dtype: quantised before, dequantised behind
    "exchange_dequantized(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name, str scaling_mode) -> Tensor",
    # GEMMs over row groups that end at offs (G,) int32; rows past the last end come out as zero, or as they happen to be (tail 'skip')
    "grouped_mm_hp(Tensor a, Tensor b, Tensor offs, ScalarType out_dtype, str tail='zero') -> Tensor",  # (M, K) x (G, N, K) -> (M, N)
    # a weight's MX form (G, N, K) with one exponent per output column: data e4m3, scale (G, N) float32
    "rebase_weight(Tensor qdata, Tensor scale) -> (Tensor, Tensor)",
    # sb: (G, N, K/32) e8m0, or what rebase_weight made of it; row_map (M,): row m of a is qa[row_map[m]], zeros where it is -1
    "grouped_mm_mx(Tensor qa, Tensor sa, Tensor qb, Tensor sb, Tensor offs, ScalarType out_dtype, str path, "
    "Tensor? row_map=None, str tail='zero') -> Tensor",
    "grouped_wgrad_hp(Tensor grad, Tensor a, Tensor offs, ScalarType out_dtype) -> Tensor",  # (M, N), (M, K) -> (G, N, K)
    # the same from MX rows, 1x32 along the columns: qg (M, N), qa (M, K); the numbers of their dequantised values; with maps (M,) token m
    # is row g_map[m] of qg and a_map[m] of qa
    "grouped_wgrad_mx_rows(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
    "Tensor? g_map=None, Tensor? a_map=None) -> Tensor",
    # the sums of these two added to a float32 gradient (G, N, K)
    "grouped_wgrad_hp_add(Tensor(a!) into, Tensor grad, Tensor a, Tensor offs) -> ()",
    "grouped_wgrad_mx_rows_add(Tensor(a!) into, Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, str path) -> ()",
    # of the left and of the right half of grad's columns, qg (M, 2N)
    "grouped_wgrad_mx_halves(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
    "Tensor? a_map=None) -> (Tensor, Tensor)",
    # into[g] = made[g], (G, N, K), of the groups that have rows, or of the empty ones
    "copy_groups(Tensor(a!) into, Tensor made, Tensor offs, bool empty=False) -> ()",
    # the groups that have rows, written into a gradient (G, N, K) whose other groups stay as they are
    "grouped_wgrad_hp_into(Tensor(a!) into, Tensor grad, Tensor a, Tensor offs) -> ()",
    # few: any share of the tokens may be in a group, none too
    "grouped_wgrad_mx_rows_into(Tensor(a!) into, Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, str path, Tensor? g_map=None, "
    "Tensor? a_map=None, bool few=True) -> ()",
    "grouped_wgrad_mx_halves_into(Tensor(a!) left, Tensor(b!) right, Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, str path, "
    "Tensor? a_map=None, bool few=True) -> ()",
    # both operands 32x1 along M: qg (N, M), qa (K, M)
    "grouped_wgrad_mx(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path) -> Tensor",
)

OPERATORS: tuple[str, ...] = tuple(schema.split("(", 1)[0] for schema in _SCHEMAS)

# Where each form lives: a function of the operator's name. Imported when it is first called, so that nothing heavy loads before.
_HOMES = {"CPU": "mxep.reference", "CUDA": "mxep.kernels"}
_FAKES = "mxep.reference.fakes"
_TRANSPORT = "mxep.comm.transport"  # takes rows of any device
_TRANSPORTED = ("exchange_rows", "exchange_quantized", "exchange_dequantized")
_PUSHED = ("push_rows", "push_sums")  # write where no tensor of a graph is: a compiler must not drop them


def _deferred(module: str, name: str) -> Callable[..., Any]:
    found: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(module), name))
        return found[0](*args, **kwargs)

    return call


_library = torch.library.Library("mxep", "DEF")
for _schema, _name in zip(_SCHEMAS, OPERATORS, strict=True):
    _library.define(_schema)
    for _key, _home in _HOMES.items():
        _library.impl(_name, _deferred(_TRANSPORT if _name in _TRANSPORTED else _home, _name), _key)
    torch.library.register_fake(f"mxep::{_name}", _deferred(_FAKES, _name), lib=_library)
    if _name in _PUSHED:
        torch.fx.node.has_side_effect(getattr(torch.ops.mxep, _name).default)
