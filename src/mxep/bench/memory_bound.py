"""`mxep bench quantize`, `rows` and `swiglu`: memory-bound kernels, against a device copy that reads and writes as many bytes.

Every kernel's bytes are compared with its reference before it is timed.  With few rows a call is mostly its launch, so those records have
the host's time of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from mxep import reference
from mxep.bench.baselines import copy_of, fp8_functions
from mxep.bench.registry import Case, Figure, Setting
from mxep.bench.timing import CALLS, Call, captured, host_facts
from mxep.device import available_gemm_paths
from mxep.ops.activation.functions import ACTIVATIONS, SwiGLU, is_gated
from mxep.ops.grouped_gemm.hopper import rebase_reference
from mxep.ops.grouped_gemm.hopper.rebase_reference import BLOCK_128, MAX_SPREAD, RebasedRows, RebasedTokens
from mxep.shapes import MX_BLOCK, record_bytes

ROWS = 131072
FEW_ROWS = (128, 1024, 8192)
WIDTHS = (1408, 2048, 4096, 7168, 8192)
_CHECKED_ROWS = 4096  # references are slow and need float32 copies
_MODE = "rceil"
_MX = 1 + 1 / MX_BLOCK  # bytes of a value
_BF16, _INT32, _FLOAT32 = 2, 4, 4  # bytes of a value


class Mover(NamedTuple):
    """One memory-bound kernel.

    Attributes:
        run: calls it on all rows.
        agrees: whether its results on the first rows are those of its reference.
        moved_bytes: read and written by `run`.
        target: least accepted share of a copy's speed, None for a kernel that is only reported.
    """

    run: Callable[[], object]
    agrees: Callable[[], bool]
    moved_bytes: int
    target: float | None


Movers = dict[str, Mover]
MakeMovers = Callable[[int, int], tuple[str, Movers]]  # (T, D) -> the name of the main kernel, and all of them


def checked_rows(num_rows: int) -> int:
    """How many rows the check covers."""
    return min(num_rows, _CHECKED_ROWS)


def random_rows(setting: Setting, T: int, D: int) -> torch.Tensor:
    """(T, D) bf16, normal; the rows differ in magnitude."""
    generator = torch.Generator(setting.device).manual_seed(0)
    x = torch.randn(T, D, device=setting.device, dtype=torch.bfloat16, generator=generator)
    return x * torch.exp2(torch.randint(-8, 8, (T, 1), device=setting.device, generator=generator)).bfloat16()


def same_bytes(*results: torch.Tensor | tuple[torch.Tensor, ...]) -> bool:
    """Whether two tensors, or two tuples of as many tensors, have the same bytes."""
    got, want = ((result,) if isinstance(result, torch.Tensor) else result for result in results)
    return all(torch.equal(*(part.contiguous().view(torch.uint8) for part in pair)) for pair in zip(got, want, strict=True))


def mover(
    kernel: Callable[..., Any],
    truth: Callable[..., Any],
    every: tuple,
    first: tuple,
    moved_bytes: float,
    target: float | None,
    same: Callable[[Any, Any], bool] = same_bytes,
) -> Mover:
    """A kernel on the arguments `every`, compared with `truth` on the arguments `first`."""
    return Mover(partial(kernel, *every), lambda: same(kernel(*first), truth(*first)), round(moved_bytes), target)


# Arms whose name in records differs from their operator's.
_OPERATORS = {
    "quantize_transposed": "quantize_columnwise",
    "quantize_both": "quantize_rowwise_columnwise",
    "gather_dequantize": "dequantize",
}


def operator_movers(arguments: Callable[[int], dict[str, tuple]], T: int, figures: Mapping[str, tuple[float, float]]) -> Movers:
    """Movers of operators whose references have the same name.

    Args:
        arguments: number of rows -> arm -> the operator's arguments.  An arm is an operator's name, that name and "_random",
            or a key of `_OPERATORS`.
        T: rows.
        figures: arm -> (bytes moved over all rows, target).
    """
    every, first = arguments(T), arguments(checked_rows(T))
    movers = {}
    for arm, figure in figures.items():
        name = _OPERATORS.get(arm, arm.removesuffix("_random"))
        movers[arm] = mover(getattr(torch.ops.mxep, name), getattr(reference, name), every[arm], first[arm], *figure)
    return movers


def _problem(movers: Movers) -> str | None:
    return next((f"{name} differs from its reference" for name, mover in movers.items() if not mover.agrees()), None)


def compute_figures(ms: Mapping[str, float], main: str, movers: Movers, copied: int) -> dict[str, Figure]:
    """Each kernel's bytes per second as a share of the copy's."""
    rate = 2 * copied / ms["copy"]
    shares = {name: Figure(mover.moved_bytes / ms[name] / rate, 1.0, mover.target) for name, mover in movers.items()}
    return {"fraction_of_copy": shares[main], **{f"{name}_fraction_of_copy": share for name, share in shares.items()}}


def memory_cases(setting: Setting, make_movers: MakeMovers, wanted: tuple[int, ...] = WIDTHS) -> Iterator[Case]:
    """A case for every size, those with few rows last.

    A record's `bytes` are what a call reads and writes.  With few rows an arm is `calls` calls in one CUDA graph, `host_us` is what a call
    costs the host, and no share of a copy is asked for.
    """
    many, few, widths = (256, (64,), (128,)) if setting.tiny else (ROWS, FEW_ROWS, (7168,) if setting.quick else wanted)
    for T in (many, *few):
        for D in widths:
            if setting.device.type == "cuda":
                # The placement of a tensor's pages decides up to a tenth of a transposing kernel's time, so each size gets pages of its
                # own instead of pieces of another's.
                torch.cuda.empty_cache()
            yield memory_case(setting, T, D, make_movers, few=many != T)


def memory_case(setting: Setting, T: int, D: int, make_movers: MakeMovers, few: bool = False) -> Case:
    """Every kernel of one size, and the copy; with few rows an arm is many calls in one CUDA graph, see `memory_cases`."""
    main, movers = make_movers(T, D)
    copied = max(mover.moved_bytes for mover in movers.values()) // 2
    calls: dict[str, Call] = {"copy": copy_of(copied, setting.device), **{name: mover.run for name, mover in movers.items()}}
    moved = {"copy": 2 * copied, **{name: mover.moved_bytes for name, mover in movers.items()}}
    if few:
        movers = {name: mover._replace(target=None) for name, mover in movers.items()}

    def after() -> dict[str, Any]:
        return {"bytes": moved, **({"calls": CALLS, **host_facts(calls, setting.device)} if few else {})}

    return Case(
        f"{T} x {D}",
        {"T": T, "D": D},
        {name: captured(call, setting.device) if few else {"": call} for name, call in calls.items()},
        partial(_problem, movers),
        partial(compute_figures, main=main, movers=movers, copied=copied),
        after=after,
    )


def quantize_cases(setting: Setting) -> Iterator[Case]:
    """(T, D) bf16 in, MX out, and back."""
    fp8_runs = setting.tiny or not available_gemm_paths(setting.device)["fp8"]

    def make_movers(T: int, D: int) -> tuple[str, Movers]:
        x = random_rows(setting, T, D)
        qdata, scale = torch.ops.mxep.quantize(x, _MODE)
        values = T * D

        def arguments(rows: int) -> dict[str, tuple]:
            quantizers = ("quantize", "quantize_packed", "quantize_transposed", "quantize_both")
            return {**dict.fromkeys(quantizers, (x[:rows], _MODE)), "dequantize": (qdata[:rows], scale[:rows], torch.bfloat16)}

        figures = {
            "quantize": (values * (_BF16 + _MX), 0.90),
            "quantize_packed": (values * _BF16 + T * record_bytes(D), 0.90),
            "quantize_transposed": (values * (_BF16 + _MX), 0.85),
            "quantize_both": (values * (_BF16 + 2 * _MX), 0.85),
            "dequantize": (values * (_BF16 + _MX), 0.90),
        }
        return "quantize", operator_movers(arguments, T, figures) | (_rebased_movers(x) if fp8_runs else {})

    return memory_cases(setting, make_movers)


def _rebased_movers(x: torch.Tensor) -> Movers:
    """Plain rows as the FP8 GEMMs read them, with the rows in MX and alone: the first kernel of `quantize_grouped_mm`."""
    from mxep.ops.grouped_gemm.hopper.quantize_rows import quantize_rows  # loads Triton

    kernel = quantize_rows if x.is_cuda else rebase_reference.quantize_rows
    (T, D), n = x.shape, checked_rows(x.shape[0])

    def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
        return same_bytes(tuple(got[:-1]), tuple(want[:-1]))  # no row is wide, so that block scales are undefined

    def rows_mover(mx: bool) -> Mover:
        given = _MODE, "auto", mx
        moved = T * (D * (_BF16 + 1 + _MX * mx) + _FLOAT32)
        return mover(kernel, rebase_reference.quantize_rows, (x, *given), (x[:n], *given), moved, 0.85, same)

    return {"quantize_rows": rows_mover(True), "quantize_rows_rebased": rows_mover(False)}


_RANKS, _EXPERTS = 8, 8
_RANDOM_TARGET, _NARROW_BLOCKS_TARGET = 0.85, 0.82  # rows in random order; one scale per 128 columns at D <= 2048
_GRADIENT_WIDTHS = {8192: 5120, 7168: 2048, 2048: 1408, 128: 96}  # K -> N; the last one is the tiny case
_WITH_FEW_ROWS = ("gather_mx_rows", "gather_rebase_auto", "gather_rebase_span", "rebase_tokens")


def permuting_map(num_rows: int, device: torch.device) -> torch.Tensor:
    """(T,) int32: rows sorted by rank and then by expert into the order of experts; T a multiple of 64."""
    order = torch.arange(num_rows, dtype=torch.int32, device=device).view(_RANKS, _EXPERTS, -1)
    return order.transpose(0, 1).reshape(-1).contiguous()


def random_map(num_rows: int, device: torch.device) -> torch.Tensor:
    """(T,) int32: every row once, in random order."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randperm(num_rows, device=device, generator=generator).int()


def _row_movers(x: torch.Tensor, qdata: torch.Tensor, scale: torch.Tensor) -> Movers:
    """Rows and MX rows, moved once without a change of bytes."""
    T, D = x.shape

    def arguments(rows: int) -> dict[str, tuple]:
        row_map, mx = permuting_map(rows, x.device), (qdata[:rows], scale[:rows])
        tokens = rows // _EXPERTS  # every expert reads each of them
        token_map = torch.arange(rows, dtype=torch.int32, device=x.device) % tokens
        return {
            "gather_mx_rows": (*mx, row_map),
            "gather_mx_rows_random": (*mx, random_map(rows, x.device)),
            "scatter_mx_rows": (*mx, row_map, rows),
            "gather_rows": (x[:rows], row_map),
            "scatter_rows": (x[:rows], row_map, rows),
            "gather_dequantize": (qdata[:tokens], scale[:tokens], torch.bfloat16, token_map),
        }

    mx, plain = T * (2 * D * _MX + _INT32), T * (2 * D * _BF16 + _INT32)
    targets = {"gather_mx_rows": 0.90, "gather_mx_rows_random": _RANDOM_TARGET, "scatter_mx_rows": 0.90}
    figures = {**{arm: (mx, target) for arm, target in targets.items()}, "gather_rows": (plain, 0.90), "scatter_rows": (plain, 0.90)}
    figures["gather_dequantize"] = (T * (D * (_BF16 + _MX / _EXPERTS) + _INT32), 0.70)  # mostly writes: slower than a copy
    return {**_bias_movers(x), **operator_movers(arguments, T, figures)}


def _bias_movers(x: torch.Tensor) -> Movers:
    """Gradients of a bias per expert, without and with a score for each row."""
    T, n = x.shape[0], checked_rows(x.shape[0])
    whole = x[:n].round().clamp(-8, 8)  # their sums are exact
    ends, few_ends = (torch.arange(1, 1 + _EXPERTS, dtype=torch.int32, device=x.device) * (rows // _EXPERTS) for rows in (T, n))
    scores, grads = torch.full((T,), 0.5, device=x.device), (torch.ops.mxep.group_bias_grads, reference.group_bias_grads)
    return {
        "bias_grad": mover(*grads, (x, ends), (whole, few_ends), x.nbytes, None),
        "bias_grad_scored": mover(*grads, (x, ends, None, scores), (whole, few_ends, None, scores[:n]), x.nbytes + scores.nbytes, None),
    }


def _defined_rows(rows: RebasedRows) -> tuple[torch.Tensor, ...]:
    """What a rebase of rows defines: block scales exist only for rows of wide spread."""
    block_scale = None if rows.block_scale is None else torch.where(rows.scale < 0, rows.block_scale, 0.0)
    return tuple(part for part in (rows.data, rows.scale, rows.spread, block_scale) if part is not None)


def _defined_tokens(tokens: RebasedTokens) -> tuple[torch.Tensor, ...]:
    """What a rebase along tokens defines if no group is empty."""
    end = int(tokens.ends[-1])  # host sync: of the check
    return (tokens.grad[:, :end], tokens.a[:, :end], tokens.grad_scale, tokens.a_scale, tokens.ends, tokens.order)


def _rebase_movers(rebase: Callable[..., RebasedRows], qdata: torch.Tensor, scale: torch.Tensor) -> Movers:
    """Rows gathered and rebased, at every granularity, in permute's order and in random order."""
    (T, D), device = qdata.shape, qdata.device
    n = checked_rows(T)
    movers: Movers = {}
    for suffix, order, target in (("", permuting_map, 0.90), ("_random", random_map, _RANDOM_TARGET)):
        row_map, few_map = order(T, device), order(n, device)
        for granularity, max_spread in MAX_SPREAD.items():
            scales = _FLOAT32 * T * (1 + (-(-D // BLOCK_128) if granularity == "span" else 0)) + T
            movers[f"gather_rebase_{granularity}{suffix}"] = mover(
                rebase,
                rebase_reference.rebase_rows,
                (qdata, scale, max_spread, row_map),
                (qdata[:n], scale[:n], max_spread, few_map),
                T * (2 * D + D // MX_BLOCK + _INT32) + scales,
                _NARROW_BLOCKS_TARGET if granularity == "span" and D <= 2048 else target,
                lambda got, want: same_bytes(_defined_rows(got), _defined_rows(want)),
            )
    return movers


def _token_mover(rebase: Callable[..., RebasedTokens], qg: torch.Tensor, sg: torch.Tensor, qa: torch.Tensor, sa: torch.Tensor) -> Mover:
    """Both operands of a wgrad, transposed and rebased along the tokens of 8 groups; the groups of the check differ in size."""
    T, width, n = qa.shape[0], qa.shape[1] + qg.shape[1], checked_rows(qa.shape[0])
    numbers = torch.arange(1, _EXPERTS + 1, device=qa.device)
    offs, few_offs = (numbers * T // _EXPERTS).int(), (numbers**2 * n // _EXPERTS**2).int()
    every, few = (qg, sg, qa, sa, offs), (qg[:n], sg[:n], qa[:n], sa[:n], few_offs)
    return mover(
        rebase,
        rebase_reference.rebase_tokens,
        every,
        few,
        T * (2 * width + width // MX_BLOCK),
        0.85,
        lambda got, want: same_bytes(_defined_tokens(got), _defined_tokens(want)),
    )


def rows_cases(setting: Setting) -> Iterator[Case]:
    """(T, D) rows, moved once."""
    functions = fp8_functions(setting.device) if setting.tiny or not available_gemm_paths(setting.device)["fp8"] else None

    def make_movers(T: int, D: int) -> tuple[str, Movers]:
        x = random_rows(setting, T, D)
        qdata, scale = torch.ops.mxep.quantize(x, _MODE)
        movers = _row_movers(x, qdata, scale)
        if functions is not None:
            movers |= _rebase_movers(functions.rebase_rows, qdata, scale)
            if D in _GRADIENT_WIDTHS:
                qg, sg = torch.ops.mxep.quantize(random_rows(setting, T, _GRADIENT_WIDTHS[D]), _MODE)
                movers["rebase_tokens"] = _token_mover(functions.rebase_tokens, qg, sg, qdata, scale)
        if T in FEW_ROWS:
            movers = {name: mover for name, mover in movers.items() if name in _WITH_FEW_ROWS}
        return "gather_mx_rows", movers

    return memory_cases(setting, make_movers)


_ACTIVATION_TARGET = 0.90
# Middle of an arm's name -> what it writes: forms of h forward; of dx and of h backward, for a wgrad from MX bytes and for one from bf16.
_STAGES: dict[str, tuple[str, ...]] = {
    "quantize": ("mx",),
    "backward_quantize": ("mx", "mx"),
    "backward_hp_wgrad": ("mx+hp", "hp"),
}
_REBASING_STAGES: dict[str, tuple[str, ...]] = {  # the rows that the FP8 GEMM reads next come rebased
    "rebase": ("rebased",),
    "backward_rebase": ("mx+rebased", "mx"),
    "backward_rebase_hp_wgrad": ("rebased+hp", "hp"),
}
_HIDDEN_WIDTHS = (768, *WIDTHS)


class _Activation(NamedTuple):
    """An activation as it is timed: its name, the layout of gate and up, the form of SwiGLU, and whether it has its reference's bytes."""

    name: str
    layout: str = "concatenated"
    form: SwiGLU = SwiGLU()
    exact: bool = False


_ACTIVATIONS = {  # (name, suffix) of the arms -> the activation
    ("swiglu", ""): _Activation("swiglu"),
    ("swiglu", "_interleaved"): _Activation("swiglu", "interleaved"),
    ("swiglu", "_gpt_oss"): _Activation("swiglu", "interleaved", SwiGLU(7.0, 1.702, 1.0)),
    **{(name, ""): _Activation(name) for name in ACTIVATIONS[1:]},
    ("swiglu", "_exact"): _Activation("swiglu", exact=True),
}
_ROW_TOLERANCE = {"geglu": 2.0**-20}  # accepted error of the fast form, a share of the row's largest value: its erf is a polynomial


def swiglu_cases(setting: Setting) -> Iterator[Case]:
    """(T, 2H) bf16 in, (T, H) in MX out; (T, H) and (T, 2H) in, (T, 2H) and (T, H) out; without a gate H for 2H."""
    functions = fp8_functions(setting.device) if setting.tiny or not available_gemm_paths(setting.device)["fp8"] else None

    def make_movers(T: int, H: int) -> tuple[str, Movers]:
        generator = torch.Generator(setting.device).manual_seed(0)
        both = torch.randn(T, 2 * H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        dh = torch.randn(T, H, device=setting.device, dtype=torch.bfloat16, generator=generator)
        movers = {} if functions is None else _two_pass_movers(functions.rebase_rows, dh, both)
        for (name, suffix), activation in _ACTIVATIONS.items():
            x = both if is_gated(name) else both.view(2 * T, H)[:T]
            rebases = name == "swiglu" and not activation.exact
            for stage, forms in (_STAGES | _REBASING_STAGES if rebases else _STAGES).items():
                movers[f"{name}_{stage}{suffix}"] = _activation_mover(dh, x, activation, forms)
        return "swiglu_quantize", movers

    for case in memory_cases(setting, make_movers, _HIDDEN_WIDTHS):
        yield replace(case, shape={"T": case.shape["T"], "H": case.shape["D"]})


def _two_pass_movers(rebase: Callable[..., RebasedRows], dh: torch.Tensor, x: torch.Tensor) -> Movers:
    """What the arms `swiglu_rebase` and `swiglu_backward_rebase` write, in two passes: MX rows, then a rebase that reads them again."""
    (T, H), n, operators = dh.shape, checked_rows(dh.shape[0]), torch.ops.mxep
    plain, auto = ("concatenated", _MODE), MAX_SPREAD["auto"]

    def backward(dh: torch.Tensor, x: torch.Tensor) -> RebasedRows:
        return rebase(*operators.activate_backward(dh, x, *plain)[:2], auto)

    def same(got: RebasedRows, want: RebasedRows) -> bool:
        return same_bytes(_defined_rows(got._replace(spread=None)), _defined_rows(want))

    forward = (
        lambda x: rebase(*operators.activate(x, *plain), auto),
        lambda x: RebasedRows(*operators.activate(x, *plain, h="rebased")),
    )
    gradient = backward, lambda dh, x: RebasedRows(*operators.activate_backward(dh, x, *plain, False, "rebased", "none"))
    pass_bytes, rebase_bytes = T * H * (2 * _BF16 + _MX), T * H * (_MX + 1)
    return {
        "swiglu_quantize_then_rebase": mover(*forward, (x,), (x[:n],), pass_bytes + rebase_bytes, None, same),
        "swiglu_backward_quantize_then_rebase": mover(
            *gradient, (dh, x), (dh[:n], x[:n]), T * H * (3 * _BF16 + 3 * _MX) + 2 * rebase_bytes, None, same
        ),
    }


def _activation_mover(dh: torch.Tensor, x: torch.Tensor, activation: _Activation, forms: tuple[str, ...]) -> Mover:
    """Forward (one of `forms`) or backward.  The exact form has its reference's bytes; the fast form is compared with the exact one."""
    (T, H), n, columns = dh.shape, checked_rows(dh.shape[0]), 1 + is_gated(activation.name)  # columns of x for one of h
    options = {"activation": activation.name, "form": activation.form}

    def call(operators: Any, exact: bool, dh: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(forms) == 1:
            return tuple(operators.activate(x, activation.layout, _MODE, exact, **options, h=forms[0]))
        return tuple(operators.activate_backward(dh, x, activation.layout, _MODE, exact, *forms, **options))

    def written(form: str, width: int) -> float:
        """Bytes for a value of h, of rows `width` times as long; their scales of 32 values count, those of a row do not."""
        return width * (_MX * ("mx" in form) + ("rebased" in form) + _BF16 * ("hp" in form))

    backward = len(forms) == 2
    moved = _BF16 * (columns + backward) + sum(map(written, forms, (columns, 1) if backward else (1,)))
    kernel, truth = partial(call, torch.ops.mxep, activation.exact), partial(call, reference if activation.exact else torch.ops.mxep, True)
    every, first = (dh, x), (dh[:n], x[:n])
    if activation.exact:
        return mover(kernel, truth, every, first, T * H * moved, None)
    same = partial(_within_rounding, row_tolerance=_ROW_TOLERANCE.get(activation.name, 0.0))
    return mover(kernel, truth, every, first, T * H * moved, _ACTIVATION_TARGET, same)


def _within_rounding(fast: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...], row_tolerance: float = 0.0) -> bool:
    """Whether every value of the fast form is within a rounding step of the exact one, plus a share of its row's largest value."""
    pairs = iter(zip(fast, exact, strict=True))
    for got, want in pairs:
        if got.dtype == torch.float8_e4m3fn:
            got_scale, want_scale = next(pairs)
            if want_scale.dtype == torch.float32:
                got_blocks, want_blocks = next(pairs)
                rows = RebasedRows(got, got_scale, got_blocks), RebasedRows(want, want_scale, want_blocks)
                got, want = map(rebase_reference.dequantize_rows, rows)
                step = torch.maximum(want.abs() * 0.15, want.abs().amax(-1, keepdim=True) * 2**-15)
            else:
                got, want = (reference.dequantize(q, s, torch.float32) for q, s in ((got, got_scale), (want, want_scale)))
                least = want.unflatten(-1, (-1, MX_BLOCK)).abs().amax(-1, keepdim=True) * 2**-15
                step = torch.maximum(want.abs() * 0.15, least.expand(*least.shape[:-1], MX_BLOCK).flatten(-2))
        else:
            got, want = got.float(), want.float()
            step = want.abs() * 2**-7 + 2.0**-90 + row_tolerance * want.abs().amax(-1, keepdim=True)
        if not bool(((got - want).abs() <= step).all()):
            return False
    return True
