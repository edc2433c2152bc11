"""The experts' grouped GEMM as an autograd function: one group of rows per expert, in MXFP8 or in high precision.

Before: permute.  After: unpermute.
Forward: A (M, K) 1x32 along K times w (G, N, K) 1x32 along K -> out (M, N).  Backward: dgrad multiplies the gradient, 1x32 along N,
with w quantised along N; wgrad multiplies both operands as they came ("hp"), the MX bytes that forward and dgrad multiply ("mx"), or
both quantised 32x1 along M ("mxfp8"); see grouped_mm/products.py.
dW is w's gradient, or is added to a float32 main gradient, unrounded.
Saves w, and A as wgrad reads it, if at all: as it came for "hp", its MX bytes for "mx", those of its transpose for "mxfp8".
On FP8 paths also what dgrad reads of a trained w, which one pass makes with what forward reads.
Host syncs: none on GPUs outside of checking mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mxep.checks import HIGH_PRECISION, check_tensors, values_checked
from mxep.device import GEMM_PATHS
from mxep.grouped_mm.bias import add_bias, bias_grad, check_bias
from mxep.grouped_mm.products import (
    GemmOptions,
    GroupBias,
    LoraProduct,
    SavedForm,
    Weights,
    bias_product,
    gemm_options,
    multiply_rows,
    saved_operand,
    saved_tensors,
)
from mxep.grouped_mm.wgrad_gemm import add_wgrad, wgrad_gemm
from mxep.mx.compile import in_graph
from mxep.mx.rows import scatter
from mxep.mx.tensor import MXTensor, dequantize_data, reject_graph_output
from mxep.mx.weight import MXWeight
from mxep.mx.weight_cache import CachedWeight
from mxep.ops.runtime.for_backward import ForBackward
from mxep.ops.runtime.replay import replayed, writable
from mxep.recipe import KernelPreference, Recipe, ScaleCalculationMode, resolve_recipe, scaling_mode_name
from mxep.shapes import MX_BLOCK, round_up

_WHERE = "grouped_mm"
_DGRAD = 4  # which of the saved tensors is the weight's form for dgrad
_ALIGNMENT_BYTES = 16  # of what the copy engine adds to


class MXInputRequiresHPWgradError(ValueError, AssertionError):
    """An MX input with a wgrad that would have to quantise it a second time.

    Examples:
        >>> a, weight = mxep.quantize_mx(torch.randn(32, 64)), torch.randn(1, 64, 32)
        >>> try:
        ...     mxep.to_mxfp8_then_scaled_grouped_mm(a, weight, torch.tensor([32]))
        ... except mxep.grouped_mm.MXInputRequiresHPWgradError:
        ...     print("pass wgrad_with_hp=True")
        pass wgrad_with_hp=True
    """


def _pad_map(offs: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row map and END offsets after padding every group to whole MX blocks, as permute would."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    padded_rows = round_up(num_rows + offs.shape[0] * MX_BLOCK, MX_BLOCK)
    row_map, _, ends = torch.ops.mxep.permute_indices(counts, 1, offs.shape[0], MX_BLOCK, padded_rows)
    return row_map, ends


def _of_groups(w: torch.Tensor) -> torch.Tensor:
    """w as (G, N, K); a dense layer's (N, K) is one group. Frozen weights bypass torch's dispatcher, which is as slow as a launch."""
    if w.dim() == 3:
        return w
    return w._like(w.qdata.unsqueeze(0), w.scale.unsqueeze(0), kept=w.kept) if isinstance(w, MXWeight) else w.unsqueeze(0)


def multiply(
    ctx: Any,
    a: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    gemm: GemmOptions | None,
    weight_dtype: torch.dtype | None = None,
    kept: CachedWeight | None = None,
    main_grad: torch.Tensor | None = None,
    lora: LoraProduct | None = None,
    bias_in_gemm: bool = False,
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
    """Forward of an autograd function: rows a (M, K) times weights w (G, N, K) -> (M, N), and what is saved for `gradients`.

    With one group w may be (N, K); its gradient is then (N, K) too.
    `lora`: as in `multiply_rows`.  `bias_in_gemm`: without an adapter the GEMM adds the bias before it rounds, if it `adds_lora`.
    """
    # dgrad multiplies on the path of a's dtype.  A frozen weight keeps no second form.
    one_path = gemm is not None and (a.dtype == gemm.out_dtype or gemm.path_to(a.dtype) == gemm.path_to(gemm.out_dtype))
    ctx.gemm, ctx.a_like, ctx.weight_dtype, ctx.kept, ctx.main_grad = gemm, (a.shape[0], a.dtype), weight_dtype, kept, main_grad
    ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
    weights = None if kept is None or gemm is None else Weights(_of_groups(w), None, gemm, kept, dtype=weight_dtype)
    form = (None, None) if weights is None else weights.cached("forward")
    for_dgrad = one_path and all(ctx.needs_input_grad[:2])
    out, saved = replayed(_multiply, (gemm, weight_dtype, for_dgrad and form[0] is None, bias_in_gemm), a, w, offs, bias, form, lora)
    ctx.saved = ForBackward((), saved.rest, saved.packing)
    dgrad = weights.made("dgrad") if weights is not None and form[0] is not None and for_dgrad else (None, None)
    return out, (*saved.kept, *dgrad, w)


def _multiply(
    options: tuple[GemmOptions | None, torch.dtype | None, bool, bool],
    a: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    form: SavedForm,
    lora: LoraProduct | None,
) -> tuple[torch.Tensor, ForBackward]:
    """What `multiply` does on the device: the result, and what is saved but for w. `form`: what it reads of w, from a cache."""
    gemm, weight_dtype, for_dgrad, bias_in_gemm = options
    w = _of_groups(w)
    pad_map, ends = _pad_map(offs, a.shape[0]) if gemm is not None and gemm.pad_groups else (None, offs)
    weights = Weights(w, None, gemm, dtype=weight_dtype, forward=form)
    dgrad_form = weights.make_both() if for_dgrad else (None, None)
    if bias is not None and lora is None and bias_in_gemm:
        lora = bias_product(GroupBias(bias.expand(w.shape[0], w.shape[1])), gemm, a.shape[0])
        bias = bias if lora is None else None
    out, operand, _ = multiply_rows(a, weights, "forward", ends, pad_map, lora=lora)
    assert out is not None
    if pad_map is not None:
        out = scatter(out, pad_map, a.shape[0])
    # For wgrad: rows and not their padded copy (the map is small and the copy is not), or the MX bytes that it will multiply.
    saved = ForBackward((*saved_tensors(operand), pad_map, None if pad_map is None else ends, *dgrad_form))
    if bias is not None:
        out = writable(out)
        add_bias(out, bias, offs)
    return out, saved


def gradients(
    ctx: Any,
    saved: Sequence[Any],
    offs: torch.Tensor,
    grad: torch.Tensor,
    needs_a: bool,
    needs_w: bool,
    needs_bias: bool,
    lora: LoraProduct | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a, w and bias from that of `multiply`'s result, (M, N), MX or plain; None for one that is not needed.

    `lora`: as in `multiply_rows`.
    """
    *kept, dgrad_data, dgrad_scale, w = saved
    form, made = (dgrad_data, dgrad_scale), ctx.saved.with_saved(kept)
    d_gemm = ctx.gemm if ctx.gemm is None or ctx.gemm.out_dtype == ctx.a_like[1] else ctx.gemm.with_out_dtype(ctx.a_like[1])
    if needs_a and form[0] is None and not made.has(_DGRAD) and ctx.kept is not None and d_gemm is not None:
        form = Weights(_of_groups(w), None, d_gemm, ctx.kept, dtype=ctx.weight_dtype, dgrad=form).cached("dgrad")
    needs = needs_a, needs_w, needs_bias and ctx.bias_like is not None
    options = ctx.gemm, d_gemm, ctx.a_like, ctx.weight_dtype, ctx.bias_like, needs
    d_a, d_w, d_bias = replayed(_gradients, options, grad, made, form, w, offs, ctx.main_grad, lora)
    return d_a, d_w, d_bias


def _gradients(
    options: tuple[Any, ...],
    grad: torch.Tensor,
    saved: ForBackward,
    form: SavedForm,
    w: torch.Tensor,
    offs: torch.Tensor,
    main_grad: torch.Tensor | None,
    lora: LoraProduct | None,
) -> tuple[torch.Tensor | None, ...]:
    """What `gradients` does on the device. `form`: what dgrad reads of w, from a cache."""
    gemm, d_gemm, (num_rows, a_dtype), weight_dtype, bias_like, (needs_a, needs_w, needs_bias) = options
    data, scale, pad_map, ends, *made = saved.tensors()
    form = form if made[0] is None else (made[0], made[1])
    ends = offs if ends is None else ends
    grad = grad if isinstance(grad, MXTensor) and gemm is not None else dequantize_data(grad).contiguous()
    d_w = None
    d_bias = bias_grad(dequantize_data(grad), offs, *bias_like) if needs_bias else None
    weights = Weights(_of_groups(w), None, d_gemm, dtype=weight_dtype, dgrad=form)
    d_a, operand, row_map = multiply_rows(grad, weights, "dgrad", ends, pad_map, needs_a, needs_w, lora)
    if d_a is not None and pad_map is not None:
        d_a = scatter(d_a, pad_map, num_rows)
    if needs_w:
        maps = row_map, row_map
        assert operand is not None
        assert data is not None
        both = operand, saved_operand(data, scale, a_dtype, gemm)
        if main_grad is None:
            d_w = wgrad_gemm(*both, ends, gemm, weights.wgrad_dtype, *maps, weights.transposed).to(w.dtype)
            d_w = d_w if w.dim() == 3 else d_w.squeeze(0)
        else:
            add_wgrad(main_grad, *both, ends, gemm, *maps)
    return d_a, d_w, d_bias


@in_graph
class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        w: torch.Tensor,
        offs: torch.Tensor,
        bias: torch.Tensor | None,
        gemm: GemmOptions | None,
        weight_dtype: torch.dtype | None,
        kept: CachedWeight | None = None,
        main_grad: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out, saved = multiply(ctx, a, w, offs, bias, gemm, weight_dtype, kept, main_grad)
        ctx.save_for_backward(offs, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        needs_a, needs_w, _, needs_bias, *_ = ctx.needs_input_grad
        if ctx.main_grad is not None:  # not asked for in `torch.autograd.grad(loss, x)`
            needs_w = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        offs, *saved = ctx.saved_tensors
        d_a, d_w, d_bias = gradients(ctx, saved, offs, grads[0], needs_a, needs_w, needs_bias)
        return d_a, d_w, None, d_bias, None, None, None, None


def _check_main_grad(main_grad: torch.Tensor, b_t: torch.Tensor) -> None:
    """Raise ValueError unless main_grad is a contiguous float32 tensor of w's shape (L, N, K) on its device."""
    check_tensors(_WHERE, main_grad=main_grad)
    want = (b_t.shape[0], b_t.shape[2], b_t.shape[1])
    if torch.compiler.is_compiling():
        raise ValueError(f"{_WHERE}: main_grad in a compiled graph, want an eager call; a graph cannot add to it in backward")
    if torch.is_grad_enabled() and not b_t.requires_grad:
        raise ValueError(f"{_WHERE}: main_grad with a B_t that needs no gradient, want requires_grad=True, or no main_grad")
    fits = main_grad.dtype == torch.float32 and tuple(main_grad.shape) == want and main_grad.is_contiguous()
    aligned = main_grad.data_ptr() % _ALIGNMENT_BYTES == 0
    if not (fits and aligned) or main_grad.device != b_t.device or main_grad.requires_grad:
        raise ValueError(
            f"{_WHERE}: main_grad is {tuple(main_grad.shape)} {main_grad.dtype} on {main_grad.device}, want {want} float32, contiguous, "
            f"from a multiple of {_ALIGNMENT_BYTES} bytes on, on {b_t.device}, without a gradient of its own; "
            "torch.zeros_like(w, dtype=torch.float32)"
        )


def check_operands(a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """Raise ValueError unless A, B_t and offs belong together; returns offs as int32."""
    check_tensors(_WHERE, getattr(a, "device", None), A=a, B_t=b_t)
    if a.dim() != 2 or b_t.dim() != 3 or a.shape[1] != b_t.shape[1]:
        raise ValueError(f"{_WHERE}: A {tuple(a.shape)} and B_t {tuple(b_t.shape)}, want (M, K) and (L, K, N); B_t = w.transpose(-2, -1)")
    if a.shape[1] % MX_BLOCK or b_t.shape[2] % MX_BLOCK:
        raise ValueError(f"{_WHERE}: K = {a.shape[1]}, N = {b_t.shape[2]}, want multiples of {MX_BLOCK} (one MX block); pad the weights")
    for name, value in (("A", a), ("B_t", b_t)):
        if value.dtype not in HIGH_PRECISION:
            raise ValueError(f"{_WHERE}: {name} is {value.dtype}, want bfloat16 or float32 (A may be an MXTensor); cast it first")
    if isinstance(b_t, MXTensor) and not isinstance(b_t, MXWeight):
        do = "it is quantised along K and along N inside; a frozen one may be an MXWeight"
        raise ValueError(f"{_WHERE}: B_t is an MXTensor, want the bf16 or float32 weight; {do}")
    if isinstance(a, MXWeight):
        raise ValueError(f"{_WHERE}: A is an MXWeight, want rows, plain or an MXTensor; dequantise it")
    if out_dtype not in HIGH_PRECISION:
        raise ValueError(f"{_WHERE}: out_dtype={out_dtype}, want bfloat16 or float32")
    return _check_offsets(offs, b_t.shape[0], a)


def _check_offsets(offs: torch.Tensor | None, num_groups: int, a: torch.Tensor) -> torch.Tensor:
    """END offsets as int32 (G,). Raises ValueError for a wrong shape or dtype; in checking mode also for wrong values (host sync)."""
    if not isinstance(offs, torch.Tensor) or offs.dtype not in (torch.int32, torch.int64) or tuple(offs.shape) != (num_groups,):
        got = f"{tuple(offs.shape)} {offs.dtype}" if isinstance(offs, torch.Tensor) else "None" if offs is None else type(offs).__name__
        raise ValueError(f"{_WHERE}: offs is {got}, want ({num_groups},) int32 or int64, the END row of every group on A's device")
    check_tensors(_WHERE, a.device, offs=offs)
    if values_checked(offs):
        ends = offs.tolist()  # host sync: only in checking mode
        if any(end < start for start, end in zip([0, *ends], ends, strict=False)) or (ends and ends[-1] > a.shape[0]):
            raise ValueError(
                f"{_WHERE}: offs={ends}, want END rows that do not decrease, from 0 to at most M = {a.shape[0]}; use cumsum of the counts"
            )
    return offs.int()


def _check_block_groups(offs: torch.Tensor, num_rows: int, pad_groups: bool) -> None:
    """32x1 blocks must not cross groups: raise ValueError unless groups are whole blocks or get padded."""
    if pad_groups:
        return
    advice = f"want multiples of {MX_BLOCK} for a 32x1 wgrad; pass pad_token_groups_for_grouped_mm=True, or use wgrad_with_hp=True"
    if num_rows % MX_BLOCK:
        raise ValueError(f"{_WHERE}: M = {num_rows} rows, {advice}")
    if values_checked(offs) and any(end % MX_BLOCK for end in offs.tolist()):  # host sync: checking
        raise ValueError(f"{_WHERE}: groups end at {offs.tolist()}, {advice}")


def to_mxfp8_then_scaled_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference: KernelPreference | str = KernelPreference.AUTO,
    wgrad_with_hp: bool = False,
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    pad_token_groups_for_grouped_mm: bool = False,
    main_grad: torch.Tensor | None = None,
) -> torch.Tensor:
    """Differentiable MXFP8 grouped GEMM: out[rows of g] = A[rows of g] @ B_t[g].

    Args:
        A: (M, K) bf16 or float32 (quantised here), or an MXTensor (used as it is; requires wgrad_with_hp).
        B_t: (L, K, N) bf16 or float32, or a frozen `mxep.mx.MXWeight`: the transpose of a weight (L, N, K).  K and N are multiples of 32.
        offs: (L,) int32 or int64 END offsets of the groups in rows; empty groups and rows past the last end are fine.
        bias: (N,), or (L, N) per group, added in out_dtype; None for none.
        out_dtype: bfloat16 or float32.
        kernel_preference: AUTO, EMULATED (dequantise and multiply), or the name of a GEMM path (`mxep.device.available_gemm_paths`).
            On Hopper AUTO is "fp8" for results in bf16 and "exact" for results in float32; "fp8" by name is "fp8" for both.
        wgrad_with_hp: multiply wgrad's operands as they came, instead of both quantised 32x1 along M.
        scale_calculation_mode: scaling mode.
        pad_token_groups_for_grouped_mm: pad groups to whole MX blocks inside (the 32x1 wgrad needs it where they are not).
        main_grad: (L, N, K) float32, to which backward adds dW, unrounded, instead of giving B_t a gradient: for sums over micro-batches.
            Not for use in a compiled graph.

    Returns:
        (M, N) out_dtype; rows past offs[-1] are zero.  dA comes in A's dtype, dB_t in B_t's; an empty group's dB_t is exactly zero.

    Raises:
        ValueError: shapes, dtypes, offsets or a path that do not fit; an MXTensor A without wgrad_with_hp.

    Examples:
        >>> a, weight = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(2, 96, 128, dtype=torch.bfloat16)
        >>> offs = torch.tensor([32, 64], dtype=torch.int32)  # rows 0..31 of expert 0, 32..63 of expert 1
        >>> out = mxep.to_mxfp8_then_scaled_grouped_mm(a, weight.transpose(-2, -1), offs, wgrad_with_hp=True)
        >>> out.shape, out.dtype
        (torch.Size([64, 96]), torch.bfloat16)
    """
    check_tensors(_WHERE, A=A, B_t=B_t)
    name = str(getattr(kernel_preference, "value", kernel_preference))
    if name not in ("auto", "emulated", *GEMM_PATHS):
        raise ValueError(
            f"{_WHERE}: kernel_preference={kernel_preference!r} is unknown, want one of auto, emulated, {', '.join(GEMM_PATHS)}; use 'auto'"
        )
    mode = scaling_mode_name(_WHERE, scale_calculation_mode)
    options = gemm_options(A.device, out_dtype, name, "hp" if wgrad_with_hp else "mxfp8", mode, pad_token_groups_for_grouped_mm)
    return _checked_grouped_mm(A, B_t, offs, bias, out_dtype, options, main_grad)


def _checked_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    options: GemmOptions | None,
    main_grad: torch.Tensor | None,
    weight_dtype: torch.dtype | None = None,
    kept: CachedWeight | None = None,
) -> torch.Tensor:
    """Check what belongs together, then multiply: without options in high precision, of a weight that is rounded to `weight_dtype`."""
    reject_graph_output(A, _WHERE)
    offs = check_operands(A, B_t, offs, out_dtype)
    if bias is not None:
        check_tensors(_WHERE, A.device, bias=bias)
        check_bias(_WHERE, bias, B_t.shape[0], B_t.shape[2])
    if main_grad is not None:
        _check_main_grad(main_grad, B_t)
    if options is None:
        return _GroupedMM.apply(A, B_t.transpose(-2, -1), offs, bias, None, weight_dtype, None, main_grad).to(out_dtype)
    if isinstance(A, MXTensor) and options.wgrad == "mxfp8":
        raise MXInputRequiresHPWgradError(
            f"{_WHERE}: A is an MXTensor, quantised 1x32 along K, and a 32x1 wgrad would have to quantise it again; pass wgrad_with_hp=True"
        )
    if options.wgrad == "mxfp8":
        _check_block_groups(offs, A.shape[0], options.pad_groups)
    if not (torch.is_grad_enabled() and B_t.requires_grad):
        # Not by _replace, which loses its fields under dynamo of torch 2.11.
        o = options
        options = GemmOptions(o.out_dtype, "none", o.mode, o.path, o.float32_path, o.rebased, o.pad_groups, o.weight_dtype)
    return _GroupedMM.apply(A, B_t.transpose(-2, -1), offs, bias, options, None, kept, main_grad)


# The name under which users of torchao know it.
_to_mxfp8_then_scaled_grouped_mm = to_mxfp8_then_scaled_grouped_mm


def expert_mm(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    recipe: str | Recipe,
    kept: CachedWeight | None = None,
    weight_dtype: torch.dtype | None = None,
    pad_groups: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert GEMM in the precision and on the GEMM path of a recipe.

    Args:
        x: (P, K), MX or plain.
        w: (L, N, K); also an MXWeight.
        offs: (L,) int32 or int64 END offsets.
        recipe: precision and GEMM path, or a preset's name.
        kept: w's entry in a `WeightCache`; None quantises w in every call. Not for use in a compiled graph.
        weight_dtype: to which w is rounded wherever it is read, None: not at all.  Backward keeps w and not its rounded copy.
        pad_groups: groups that are not whole MX blocks are padded inside, for a wgrad that wants these.
        bias: (N,), or (L, N) per group, bf16 or float32, rounded to x's dtype and added; None for none.

    Returns:
        (P, N) in x's dtype; rows past offs[-1] are zero.

    Raises:
        ValueError: operands that do not fit, an unknown recipe, or a GEMM path that this device does not run.

    Examples:
        >>> x, weight = torch.randn(64, 128), torch.randn(2, 96, 128)
        >>> offs = torch.tensor([32, 64], dtype=torch.int32)  # rows 0..31 of expert 0, 32..63 of expert 1
        >>> mxep.grouped_mm.expert_mm(x, weight, offs, "mxfp8_gemm").shape
        torch.Size([64, 96])
    """
    if not (isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)):
        check_tensors(_WHERE, x=x, w=w)
    recipe = resolve_recipe(recipe)
    if recipe.gemm == "hp":
        if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
            raise ValueError(f"{_WHERE}: x {tuple(x.shape)} and w {tuple(w.shape)}, want (M, K) and (L, N, K)")
        if x.dtype not in HIGH_PRECISION or w.dtype not in HIGH_PRECISION:
            raise ValueError(f"{_WHERE}: x is {x.dtype}, w is {w.dtype}, want bfloat16 or float32; cast them first")
        offs = _check_offsets(offs, w.shape[0], x)
        if bias is not None:
            check_tensors(_WHERE, x.device, bias=bias)
            check_bias(_WHERE, bias, *w.shape[:2])
        return _GroupedMM.apply(x, w, offs, bias, None, weight_dtype)
    return recipe_grouped_mm(x, w.transpose(-2, -1), offs, bias, x.dtype, recipe, pad_groups, kept, weight_dtype=weight_dtype)


def recipe_grouped_mm(
    A: torch.Tensor,
    B_t: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    recipe: str | Recipe,
    pad_groups: bool = False,
    kept: CachedWeight | None = None,
    main_grad: torch.Tensor | None = None,
    weight_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`to_mxfp8_then_scaled_grouped_mm` with the GEMMs of a recipe.

    Args:
        A: (M, K) bf16 or float32, or an MXTensor where the recipe's wgrad takes one.
        B_t: (L, K, N) bf16 or float32, or an MXWeight: the transpose of a weight (L, N, K).
        offs: (L,) int32 or int64 END offsets of the groups in rows.
        bias: (N,), or (L, N) per group, added in out_dtype; None for none.
        out_dtype: bfloat16 or float32.
        recipe: precision and GEMM path, or a preset's name; below its `hp_below_rows` the values of A are multiplied.
        pad_groups: pad groups to whole MX blocks inside.
        kept: the weight's entry in a `WeightCache`; None quantises it in every call.
        main_grad: (L, N, K) float32, to which backward adds dW instead of giving B_t a gradient.
        weight_dtype: dtype to which the weight is rounded when it is read; None reads it as it is.

    Returns:
        (M, N) out_dtype; rows past offs[-1] are zero.

    Raises:
        ValueError: shapes, dtypes, offsets or a path that do not fit, an unknown recipe.

    Examples:
        >>> a, weight = torch.randn(64, 128), torch.randn(2, 96, 128)
        >>> offs = torch.tensor([32, 64], dtype=torch.int32)
        >>> mxep.grouped_mm.recipe_grouped_mm(a, weight.transpose(-2, -1), offs, None, torch.float32, "hp").shape
        torch.Size([64, 96])
    """
    recipe = resolve_recipe(recipe)
    options, mode = None, recipe.scaling_mode.value
    if not recipe.multiplies_in_hp(A.shape[0], B_t.shape[0]):
        options = gemm_options(A.device, out_dtype, recipe.gemm_path, recipe.wgrad, mode, pad_groups, weight_dtype)
    return _checked_grouped_mm(A, B_t, offs, bias, out_dtype, options, main_grad, weight_dtype, kept)
