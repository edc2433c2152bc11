"""The package's registered operators (`torch.ops.mxep.*`), one table: schema, module of the reference, module of the launcher.

torch.compile sees opaque operators.  The reference is the CPU form, the launcher the CUDA form, `ops/fakes.py` has the fake form of those
that return something.  Only here are e4m3 data and e8m0 scales two separate arguments; elsewhere an `MXTensor` has both.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def _name_of(schema: str) -> str:
    """The operator's name; `NAME.out` is the overload of NAME that writes into its argument `out`."""
    return schema.split("(", 1)[0].removesuffix(".out")


# (module of the references, module of the CUDA launchers), both below mxep.ops: the schemas of their operators
_FAMILIES: dict[tuple[str, str], tuple[str, ...]] = {
    ("quantize.reference", "quantize.triton"): (
        # format: x (..., D) -> (qdata (..., D) e4m3, scale (..., D/32) e8m0)
        "quantize(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
        # x (T, D) -> records (T, record_bytes(D)) uint8: D bytes e4m3, D/32 bytes e8m0, zero padding to 16 bytes
        "quantize_packed(Tensor x, str scaling_mode) -> Tensor",
        "quantize_packed_into(Tensor x, Tensor(a!) records, str scaling_mode) -> ()",
    ),
    ("quantize.reference", "quantize.columnwise"): (
        # 32x1: x (..., R, C) -> MX of the transpose: (qdata (..., C, R), scale (..., C, R/32))
        "quantize_columnwise(Tensor x, str scaling_mode) -> (Tensor, Tensor)",
        # both from one read: (qdata, scale, qdata_t, scale_t)
        "quantize_rowwise_columnwise(Tensor x, str scaling_mode) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    ("quantize.reference", "quantize.dequantize"): (
        "dequantize_packed_into(Tensor records, Tensor(a!) values) -> ()",
        # with row_map (P,): row p of the result is row row_map[p] of qdata, zeros where it is -1
        "dequantize(Tensor qdata, Tensor scale, ScalarType dtype, Tensor? row_map=None, Tensor? num_valid_rows=None) -> Tensor",
    ),
    ("activation.reference", "activation.forward"): (
        # an activation of x, gate and up (T, 2H) "concatenated" or "interleaved", or (T, H) where it has no gate; h times scores (T,): h
        # (T, H) in the forms "none", "mx", "hp", "mx+hp", "rebased" or "rebased+hp" (data, scale, block_scale of RebasedRows with scales of
        # that granularity), then x itself in MX; form: SwiGLU's limit, alpha, offset.  num_valid_rows (1,): only so many rows are
        # computed, here and wherever an operator takes it
        "activate(Tensor x, str layout, str scaling_mode, bool exact=False, Tensor? scores=None, Tensor? num_valid_rows=None, "
        "str activation='swiglu', float[] form=[], str h='mx', bool quantize_x=False, str granularity='auto') -> Tensor[]",
    ),
    ("activation.reference", "activation.backward"): (
        # from dh (T, H): dx of x's width and h (T, H), each in the forms "none", "mx", "hp" or "mx+hp", dx also with "rebased" in between;
        # with scores their gradient (T,) too; with offs (G,) then the sums (G, x's width) float32 of dx's rows in groups that end there;
        # with x_scale, x is the qdata of MX rows and hp is dh's dtype
        "activate_backward(Tensor dh, Tensor x, str layout, str scaling_mode, bool exact=False, str dx='mx', str h='mx', "
        "Tensor? scores=None, Tensor? x_scale=None, Tensor? num_valid_rows=None, str activation='swiglu', float[] form=[], "
        "str granularity='auto', Tensor? offs=None) -> Tensor[]",
    ),
    ("grouped_gemm.reference", "grouped_gemm.bias"): (
        # rows (M, N) plus bias (G, N) of the group that ends at offs (G,), times the row's score (M,) if given
        "add_group_bias(Tensor(a!) rows, Tensor bias, Tensor offs, Tensor? scores=None) -> ()",
        # from the result's gradient, read through row_map (M,) if given (zeros where it is -1): (G, N) that of the bias if sums, and (M,)
        # that of the scores with a bias
        "group_bias_grads(Tensor rows, Tensor offs, Tensor? bias=None, Tensor? scores=None, Tensor? row_map=None, bool sums=True) "
        "-> Tensor[]",
        # inner (num_rows, 16) and lora_b (G, N, 16) with which grouped_mm_mx adds scores times a bias (G, N)
        "group_bias_factors(Tensor bias, Tensor? scores, SymInt num_rows) -> (Tensor, Tensor)",
    ),
    # GEMMs over row groups that end at offs (G,) int32; rows past the last end are zero, or not defined (padding_rows 'skip')
    ("grouped_gemm.reference", "grouped_gemm.triton"): (
        # (M, K) x (G, N, K) -> (M, N)
        "grouped_mm_hp(Tensor a, Tensor b, Tensor offs, ScalarType out_dtype, str padding_rows='zero') -> Tensor",
    ),
    ("grouped_gemm.reference", "grouped_gemm.lora"): (
        # adds (x @ a.T) @ b.T of rows x (R, K), through row_map (M,) if given (zeros where it is -1), a (G, r, K) and b (G, N, r) to
        # out (M, N); returns x @ a.T (M, r)
        "add_group_lora(Tensor(a!) out, Tensor x, Tensor a, Tensor b, Tensor offs, Tensor? row_map=None) -> Tensor",
        # the first product alone
        "group_lora_inner(Tensor x, Tensor a, Tensor offs, Tensor? row_map=None) -> Tensor",
    ),
    ("grouped_gemm.reference", "grouped_gemm.wgrad"): (
        # (M, N), (M, K) -> (G, N, K); with grad_map (M,) row m of the gradient is grad[grad_map[m]], zeros where it is -1
        "grouped_wgrad_hp(Tensor grad, Tensor a, Tensor offs, ScalarType out_dtype, *, Tensor? grad_map=None) -> Tensor",
        # writes the gradients of the groups that have rows into out, or adds them to it (accumulate)
        "grouped_wgrad_hp.out(Tensor grad, Tensor a, Tensor offs, ScalarType out_dtype, *, Tensor(a!) out, bool accumulate=False) -> ()",
        # into[g] = made[g], (G, N, K), of the groups that have rows
        "copy_expert_grads(Tensor(a!) into, Tensor made, Tensor offs) -> ()",
    ),
    ("grouped_gemm.reference", "grouped_gemm.paths"): (
        # sb: (G, N, K/32) e8m0, or float32 (G, N) of quantize_weight; row_map (M,): row m of a is qa[row_map[m]], zeros where it is -1;
        # sa: (M, K/32) e8m0, or float32 (M,) of RebasedRows, with block_scale (ceil(K/128), M) unless no row is wide
        "grouped_mm_mx(Tensor qa, Tensor sa, Tensor qb, Tensor sb, Tensor offs, ScalarType out_dtype, str path, "
        # inner (M, 16) and lora_b (G, N, 16): the second product of an adapter, which is added before rounding
        "Tensor? row_map=None, str padding_rows='zero', Tensor? block_scale=None, Tensor? inner=None, Tensor? lora_b=None) -> Tensor",
        # grouped_wgrad_hp of the dequantised values of MX rows, 1x32 along the columns: qg (M, N), qa (M, K); with maps (M,) token m is row
        # g_map[m] of qg and a_map[m] of qa; mostly_padding: most tokens, or all, may be in no group
        "grouped_wgrad_mx(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
        "Tensor? g_map=None, Tensor? a_map=None) -> Tensor",
        "grouped_wgrad_mx.out(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
        "Tensor? g_map=None, Tensor? a_map=None, *, Tensor(a!) out, bool accumulate=False, bool mostly_padding=False) -> ()",
        # of the left and of the right half of grad's columns, qg (M, 2N)
        "grouped_wgrad_mx_gate_up(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
        "Tensor? a_map=None) -> (Tensor, Tensor)",
        "grouped_wgrad_mx_gate_up.out(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path, "
        "Tensor? a_map=None, *, Tensor(a!) out_gate, Tensor(b!) out_up, bool mostly_padding=False) -> ()",
        # both operands 32x1 along M: qg (N, M), qa (K, M)
        "grouped_wgrad_mx_columnwise(Tensor qg, Tensor sg, Tensor qa, Tensor sa, Tensor offs, ScalarType out_dtype, str path) -> Tensor",
    ),
    ("grouped_gemm.hopper.rebase_reference", "grouped_gemm.hopper.quantize_weight"): (
        # weights (G, R, C) and (G, S, C), concatenated along R, one exponent per row: e4m3 (G, R + S, C) with scales (G, R + S) float32,
        # and of the transpose (G, C, R + S) with (G, C); of MX weights, which have scales (G, R, C/32) and (G, S, C/32) e8m0, the values
        # in bf16
        "quantize_weight(Tensor first, Tensor? second, str scaling_mode, bool rowwise, bool columnwise, bool round_to_bf16=False, "
        "Tensor? scale=None, Tensor? second_scale=None) -> Tensor[]",
    ),
    ("grouped_gemm.reference", "grouped_gemm.hopper.rows_gemm"): (
        # grouped_mm_mx of plain rows x (M, K), rebased with scales of that granularity, and weights of quantize_weight; with mx then x in
        # MX (qdata, scale)
        "quantize_grouped_mm(Tensor x, Tensor qb, Tensor sb, Tensor offs, ScalarType out_dtype, str scaling_mode, str granularity, "
        "bool mx, str padding_rows='zero', Tensor? inner=None, Tensor? lora_b=None) -> Tensor[]",
    ),
    ("grouped_gemm.hopper.rebase_reference", "grouped_gemm.hopper.rebase"): (
        # the same of a weight (G, N, K) that is in MX already
        "rebase_weight(Tensor qdata, Tensor scale) -> (Tensor, Tensor)",
    ),
    ("cross_entropy.reference", "cross_entropy.triton"): (
        # of rows of logits (T, V) and labels (T,), IGNORE -100: losses (T,) at least float32; and their gradient in the logits' place
        "cross_entropy(Tensor logits, Tensor labels) -> Tensor",
        "cross_entropy_to_gradient(Tensor(a!) logits, Tensor labels) -> Tensor",
    ),
    ("attention.reference", "attention.flash_attention_4"): (
        # q (B, S, H, width), k and v (B, S, heads, ...), causal within documents that begin at starts (N + 1,) int32 -> (B, S, H, value
        # width) and the scores' log-sum-exp, (B, H, S) or with starts (H, B * S)
        "causal_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? starts=None, SymInt longest=0) -> (Tensor, Tensor)",
        "causal_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, float scale, "
        "Tensor? starts=None, SymInt longest=0) -> (Tensor, Tensor, Tensor)",
    ),
    ("optimizer.reference", "optimizer.adamw_step"): (
        # AdamW of the n values of a parameter that are on this rank, in place: moments (n,) as the parameter's, or codes (n * bits / 8,)
        # and scales (n / block,); runs: where the values are in the whole parameter; hyperparameters: both betas, weight decay, eps;
        # squares () grows by the sum of the gradient's
        "adamw_step(Tensor(a!) parameter, Tensor gradient, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? exp_avg_scale, "
        "Tensor(e!)? exp_avg_sq_scale, Tensor(f!) step, Tensor lr, Tensor? grad_scale, Tensor? found_inf, int key, int[] runs, "
        "float[] hyperparameters, Tensor(g!)? squares=None) -> ()",
    ),
    ("routing.router_reference", "routing.router"): (
        # logits (T, E), bias (E,) -> weights (T, C), experts (T, C) in rising order, counts (E,) of the C best or of forced balance, and
        # what the balance loss and the z-loss are made of: shares (E,), z ()
        "route_tokens(Tensor logits, Tensor? expert_bias, int top_k, str score_function, int num_groups, int top_groups, bool forced, "
        "bool renormalize, float route_scale, bool with_shares, bool with_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        # of logits (T, E) whose experts (T, C) were chosen: their gradient, from d_weights (T, C) and those of shares (E,) and z (); in
        # `dtype`, or as (T, 3, E) bf16 whose sum is that in float32
        "router_backward(Tensor logits, Tensor experts, Tensor d_weights, Tensor? d_shares, Tensor? d_z, str score_function, "
        "bool renormalize, float route_scale, ScalarType dtype, bool in_parts=False) -> Tensor",
    ),
    ("routing.index_reference", "routing.index"): (
        # counts (W*L,) rank-major -> (row_map (P,), padded counts (L,), END offsets (L,)), int32
        "permute_indices(Tensor counts, int ep_degree, int num_local_experts, int alignment, SymInt num_padded_rows) -> (Tensor, Tensor, "
        "Tensor)",
        # choices (T, C) in any order -> in rising order of the experts: experts int64, scores float32, and the column that each had, int16;
        # asserted on the device: experts from 0, or from -1 (minus_one), to num_experts - 1, none twice in a row unless duplicates
        "sort_topk(Tensor experts, Tensor scores, int num_experts, bool minus_one, bool duplicates) -> (Tensor, Tensor, Tensor)",
        # top-k ids and scores (T, C) -> their table (S, 2C) int32 for all ranks
        "pack_topk(Tensor experts, Tensor scores, SymInt most) -> Tensor",
        # (slots, return_slots, ranks) of mxep.fused.symmetric_dispatcher.SymmetricSendIndex; ranks is empty in modes that send to columns
        "send_index(Tensor experts, str mode, int num_local_experts, int world, SymInt most) -> (Tensor, Tensor, Tensor)",
        # END rows (L,) of experts -> bounds (count + 1,) of chunks of at most `capacity` rows
        "chunk_bounds(Tensor ends, int capacity, int count) -> Tensor",
        # offs (L,), scores and maps (P,) of all expert rows -> those of a chunk (2,), at most `capacity` rows
        "chunk_rows(Tensor offs, Tensor scores, Tensor token_map, Tensor? grad_map, Tensor chunk, int capacity) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        # values[index], 0 where index is -1; with columns (T, C) in column columns[t, c] of the result (T, C); in `dtype`, or in values'
        "gather_or_zero(Tensor index, Tensor values, Tensor? columns=None, ScalarType? dtype=None) -> Tensor",
    ),
    ("routing.index_reference", "routing.expert_rows"): (
        # top-k ids (R, C) of L experts -> (expert rows (R, C), END offsets (L,), the id in each expert row (P,)), int32
        "index_expert_rows(Tensor experts, int num_local_experts, int alignment, SymInt num_expert_rows) -> (Tensor, Tensor, Tensor)",
        # the same of ids among the experts of all ranks, with scores (R, C); and the row of each id (P,) int32 and its score (P,) float32
        "index_topk(Tensor experts, Tensor scores, int rank, int num_local_experts, int alignment, SymInt num_expert_rows) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    ("rows.reference", "rows.permute"): (
        # movers: out[p] = rows[row_map[p]], zeros where row_map[p] is -1; for p below num_valid_rows (1,), if given
        "gather_rows(Tensor rows, Tensor row_map, Tensor? num_valid_rows=None) -> Tensor",
        "gather_mx_rows(Tensor qdata, Tensor scale, Tensor row_map, Tensor? num_valid_rows=None) -> (Tensor, Tensor)",
        # out[row_map[p]] = rows[p], (num_rows, ...) with zeros where no p points
        "scatter_rows(Tensor rows, Tensor row_map, SymInt num_rows) -> Tensor",
        "scatter_mx_rows(Tensor qdata, Tensor scale, Tensor row_map, SymInt num_rows) -> (Tensor, Tensor)",
    ),
    ("rows.reference", "quantize.triton"): (
        "gather_quantize(Tensor rows, Tensor row_map, str scaling_mode) -> (Tensor, Tensor)",  # plain rows in, MX out
    ),
    ("rows.reference", "rows.reduce"): (
        # out[n] = the sum over s of rows[slots[n, s]], each times weights[n, s] (float32), then of added[n], in float32; slots (N, S), -1:
        # none
        "reduce_rows(Tensor rows, Tensor slots, Tensor? added=None, Tensor? weights=None) -> Tensor",
        # its gradients in rows (N*S, D), each of them in one slot, and in weights
        "reduce_rows_backward(Tensor grad, Tensor rows, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
        # reduce_rows over a chunk of expert rows: chunk (2,) int32, rows[0] is expert row chunk[0], row_map (P,) int32 names each
        # row's sum; partial sums stay in out and carry (N, D) int16, which bf16 needs, until the last chunk that has one of their slots
        "reduce_rows_chunk(Tensor rows, Tensor slots, Tensor row_map, Tensor chunk, Tensor(a!) out, Tensor(b!)? carry=None) -> ()",
    ),
    ("peer_write.reference", "peer_write.p2p"): (
        # row t to slots[t, j] of the memory at addresses[ranks[t, j]], or addresses[j], as it is or (mode: a scaling mode) as its packed
        # record
        "p2p_scatter_rows(Tensor rows, Tensor slots, Tensor? ranks, int[] addresses, int pitch, str mode) -> ()",
        # reduce_rows of rows (P, D) and slots (W * region, J), `region` sums to each of W addresses; with a chunk, of the last chunk's
        # rows and of the partial sums that reduce_rows_chunk left in partial_sums and carry
        "p2p_reduce_rows(Tensor rows, Tensor slots, int region, int[] addresses, int pitch, str mode, Tensor? chunk=None, "
        "Tensor? partial_sums=None, Tensor? carry=None) -> ()",
    ),
}
# in comm/transport.py, for rows of any device
_EXCHANGES = (
    # all-to-all of rows (T', ...) -> (sum(output_splits), ...)
    "exchange_rows(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name) -> Tensor",
    # the same of the packed records of rows (T', D): quantised on the way
    "exchange_quantized(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name, str scaling_mode) -> Tensor",
    # and of the values of these records (R, D) in rows' dtype: quantised before, dequantised after
    "exchange_dequantized(Tensor rows, SymInt[] output_splits, SymInt[] input_splits, str group_name, str scaling_mode) -> Tensor",
)

# operator: module of its reference, module of its CUDA launcher
REFERENCES: dict[str, str] = {_name_of(schema): f"mxep.ops.{pair[0]}" for pair, schemas in _FAMILIES.items() for schema in schemas}
LAUNCHERS: dict[str, str] = {_name_of(schema): f"mxep.ops.{pair[1]}" for pair, schemas in _FAMILIES.items() for schema in schemas}
OPERATORS: tuple[str, ...] = (*REFERENCES, *map(_name_of, _EXCHANGES))
_SCHEMAS = (*(schema for schemas in _FAMILIES.values() for schema in schemas), *_EXCHANGES)
OVERLOADS: tuple[str, ...] = tuple(schema.split("(", 1)[0] for schema in _SCHEMAS)

_TRANSPORT = "mxep.comm.transport"
_WRITE_TO_PEERS = ("p2p_scatter_rows", "p2p_reduce_rows")  # no tensor of a graph has that memory: a compiler must not drop them


def _deferred(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when the function is first called: launchers load Triton, the transport loads this module."""
    found: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(module), name))
        return found[0](*args, **kwargs)

    return call


def _reference(name: str) -> Callable[..., Any]:
    """The CPU form of an operator: the reference itself, so that a call enters no other function on its way there."""
    if name not in REFERENCES:
        return _deferred(_TRANSPORT, name)
    return getattr(importlib.import_module(REFERENCES[name]), name)  # type: ignore[no-any-return]


def _form(function: Callable[..., Any], operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """A form of an operator.  The overload "out" returns nothing: a compiler cannot handle a result that is an argument."""
    if operator._schema.returns:
        return function

    def write(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return write


def _apart(function: Callable[..., Any], operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """A form whose results share no memory in a graph, as parts of one allocation do: later ones are copied.

    They are not under a profiler, which should see the operations of a plain call.
    """
    returned = operator._schema.returns
    if len(returned) < 2 and (not returned or str(returned[0].type) != "List[Tensor]"):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        if torch.autograd._profiler_enabled():
            return results
        separate, memory = [], set[int]()
        for result in results:
            storage = result.untyped_storage()._cdata
            separate.append(result.clone() if storage in memory else result)
            memory.add(storage)
        return separate if isinstance(results, list) else tuple(separate)

    return call


def _fake(name: str, schema: torch.FunctionSchema) -> Callable[..., Any]:
    """The fake form of an operator: what `mxep.ops.fakes` says of its arguments, None where it only writes to them.

    torch calls it for real tensors too where one of them is on the meta device, and its result would be uninitialised memory: a ValueError.
    """
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    shapes = _deferred("mxep.ops.fakes", name)

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        on = {argument: value.device for argument, value in given.items() if isinstance(value, torch.Tensor)}
        if len({device.type for device in on.values()}) > 1 and "meta" in {device.type for device in on.values()}:
            where = ", ".join(f"{argument} on {device}" for argument, device in on.items())
            raise ValueError(f"mxep::{name}: {where}, want one device; load or initialise what is on meta")
        return shapes(SimpleNamespace(**{**defaults, **given})) if schema.returns else None

    return fake


_library = torch.library.Library("mxep", "DEF")
for _schema, _overload in zip(_SCHEMAS, OVERLOADS, strict=True):
    _name = _name_of(_schema)
    _library.define(_schema)
    _operator = getattr(getattr(torch.ops.mxep, _name), "out" if _overload != _name else "default")
    _launcher = _deferred(LAUNCHERS.get(_name, _TRANSPORT), _name)
    _library.impl(_overload, _form(_reference(_name), _operator), "CPU")
    _library.impl(_overload, _apart(_form(_launcher, _operator), _operator), "CUDA")
    torch.library.register_fake(f"mxep::{_overload}", _fake(_name, _operator._schema), lib=_library)
    if _name in _WRITE_TO_PEERS:
        torch.fx.node.has_side_effect(_operator)


# ---------------------------------------------------------------- calls past the dispatcher

_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.dtype, type(None), str, bool, int, float, list, tuple}


class _Forms(dict[str, Callable[..., Any]]):
    """An operator's forms by device type, imported when they are first asked for; the operator itself where it has no form."""

    def __init__(self, name: str) -> None:
        self.name, self.operator = name, getattr(torch.ops.mxep, name)

    def __missing__(self, device_type: str) -> Callable[..., Any]:
        if device_type == "cpu":
            form = _reference(self.name)
        elif device_type == "cuda":
            form = getattr(importlib.import_module(LAUNCHERS.get(self.name, _TRANSPORT)), self.name)
        else:
            form = self.operator
        self[device_type] = form
        return form


forms_of: Callable[[str], _Forms] = functools.cache(_Forms)  # of the operator of that name


def _direct(name: str) -> Callable[..., Any]:
    forms = forms_of(name)

    def call(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        given = first, *rest, *options.values()
        differentiates = torch.is_grad_enabled() and torch._C._any_requires_grad(*given)
        dispatches = differentiates or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
        watched = dispatches or torch.autograd._profiler_enabled() or not _PLAIN.issuperset(map(type, given))
        return (forms.operator if watched else forms[first.device.type])(first, *rest, **options)

    return call


class DirectOperators:
    """`torch.ops.mxep` outside of graphs: the operator's form for its first argument's device, called at once.

    torch's dispatcher costs the host as much as a launch, and has nothing to do there: no gradients, plain tensors, no mode.  Where it has
    (a compiler's trace, a dispatch mode, vmap, a profiler that wants the operators' names), the operator itself is called.

    >>> qdata, scale = direct.quantize(torch.ones(1, 32), "rceil")
    >>> qdata.shape, scale.shape
    (torch.Size([1, 32]), torch.Size([1, 1]))
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in OPERATORS:
            raise AttributeError(f"torch.ops.mxep has no operator {name!r}")
        found = _direct(name)
        setattr(self, name, found)
        return found


direct = DirectOperators()
