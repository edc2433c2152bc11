"""Every number, table and picture of docs/ is computed again: dataflow.md, mx_format.md, numerics.md, optimizers.md."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.pages import DOCS, cells, plain, prose, resolves, script, table
from torch.utils._python_dispatch import TorchDispatchMode

import mxep
from mxep.mx import MXTensor
from mxep.recipe import ALIASES, RECIPES
from mxep.reference import dequantize, quantize
from mxep.shapes import record_bytes
from mxep.train.state_precision import StatePrecision

# ---- training/optimizers.md ----


def test_optimizers_bytes_of_a_parameter() -> None:
    values = 2**20
    for optimizer, dtype, weight, gradient, moments, together in table(DOCS / "training" / "optimizers.md", "`--optimizer`"):
        precision = StatePrecision(plain(optimizer).split()[0], plain(dtype).split()[0])  # type: ignore[arg-type]
        size, both = precision.torch_dtype.itemsize, precision.moment_bytes((values,), values) / values
        assert [float(text) for text in (weight, gradient, moments, together)] == [size, size, round(both, 2), round(2 * size + both, 2)]


# ---- dataflow.md ----


def test_dataflow_tables_and_picture_are_computed() -> None:
    numbers, drawing = script("dataflow_numbers"), script("draw_dataflow")
    config = numbers.Configuration()
    page = (DOCS / "dataflow.md").read_text()
    for name, text in numbers.tables(config).items():
        assert text in page, f"dataflow.md: table {name!r} is not what dataflow_numbers.py computes; run it and paste"
    picture = drawing.Picture(config)
    assert (DOCS / "dataflow.svg").read_text() == picture.svg(), "run docs/draw_dataflow.py"
    for i, a in enumerate(picture.texts):
        assert 0 <= a.box[0] < a.box[2] <= picture.width, f"{a.text!r} leaves the picture"
        for b in picture.texts[:i]:
            apart = a.box[0] >= b.box[2] or b.box[0] >= a.box[2] or a.box[1] >= b.box[3] or b.box[1] >= a.box[3]
            assert apart, f"dataflow.svg: {a.text!r} overlaps {b.text!r}"


def test_dataflow_prose_quotes_computed_numbers() -> None:
    numbers = script("dataflow_numbers")
    config = numbers.Configuration()
    known = {str(value) for value in (*config.sizes.values(), config.W * config.L, config.rows_per_pair, numbers.TRACE_EXPERT)}
    known |= {str(row) for _, row in numbers.trace(config).values()}
    known |= {str(numbers.HP_BYTES * config.D), str(record_bytes(config.D))}
    mib = 2**20
    known |= {f"{config.sizes['P'] * config.D * 2 / mib:.0f}", f"{config.sizes['P'] * (config.D + config.D // 32) / mib:.0f}"}
    text = "\n".join(line for line in prose(DOCS / "dataflow.md").splitlines() if not line.startswith("|"))
    for number in re.findall(r"(?<![\w.])\d{3,}(?![\w.]*\d)", text):
        assert number in known, f"dataflow.md: {number} is not a number of this configuration"
    wire = numbers.wire_bytes(config)
    assert f"{wire['all four in bf16'] / (sum(wire.values()) - wire['all four in bf16']):.2f} times" in text
    assert f"{numbers.HP_BYTES * config.D / record_bytes(config.D):.2f} times" in text


class Experts(TorchDispatchMode):
    """Intermediate tensors of the experts' function: gate and up, h, and their gradients, from its SwiGLU operators."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.mxep.activate.default:
            self.forward = [args[0], MXTensor(*out, args[0].dtype)]
        elif func is torch.ops.mxep.activate_backward.default:
            self.gradients = [MXTensor(*out[:2], args[0].dtype), args[0]]
        return out


def trace_layer(config, moe) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, int]]:
    """`MoE.forward` with every tensor kept: forward tensors, their gradients, and bytes saved by storage."""
    from mxep.ep.blocks import combine, dispatch, permute, unpermute
    from mxep.ep.exchange_plan import ExchangePlan
    from mxep.ep.token_sort import sort_tokens_by_expert

    recipe, experts = moe.experts.recipe, moe.experts
    weights = {w.untyped_storage().data_ptr() for w in (experts.w1, experts.w2, experts.w3)}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for part in (tensor.qdata, tensor.scale) if isinstance(tensor, MXTensor) else (tensor,):
            storage = part.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    forward: list[torch.Tensor] = []
    gradients: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        number = len(forward)
        forward.append(tensor)
        tensor.register_hook(lambda grad: gradients.update({number: grad}))
        return tensor

    x = torch.randn(config.T, config.D).bfloat16().requires_grad_()
    chosen = (torch.arange(config.T * config.C) % (config.W * config.L)).view(config.T, config.C)
    scores = torch.rand(config.T, config.C).requires_grad_()
    inside = Experts()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        keep(x)
        rows, order, counts = sort_tokens_by_expert(x, chosen, config.W * config.L)
        plan = ExchangePlan.from_counts(counts, dist.group.WORLD)
        received = keep(dispatch(keep(rows), plan, recipe))
        padded = permute(received, plan, recipe)
        with inside:
            out = moe.experts(keep(padded.rows), padded.padded_counts)
        out = keep(combine(keep(unpermute(keep(out), padded)), plan, recipe))
        y = keep(moe._sum_choices(out, scores, order))
    with inside:
        y.backward(torch.randn_like(y))
    behind = [gradients[i] for i in range(len(forward))]
    return forward[:4] + inside.forward + forward[4:], behind[:4] + inside.gradients + behind[4:], saved


def form_and_bytes(tensor: torch.Tensor) -> tuple[str, int]:
    """("mxfp8" or "bf16", bytes); off the wire the data and scales are views into records, whose bytes count whole."""
    if not isinstance(tensor, MXTensor):
        return {torch.bfloat16: "bf16"}[tensor.dtype], tensor.numel() * tensor.element_size()
    shared = tensor.qdata.untyped_storage().data_ptr() == tensor.scale.untyped_storage().data_ptr()
    return "mxfp8", tensor.qdata.untyped_storage().nbytes() + (0 if shared else tensor.scale.untyped_storage().nbytes())


def test_dataflow_is_what_the_blocks_do() -> None:
    numbers, measure = script("dataflow_numbers"), script("measure_numerics")
    config = numbers.Configuration(D=64, H=96, W=1, C=2, L=4, T=34)
    with measure.one_rank_group():
        moe = mxep.MoE(mxep.MoEConfig(dim=config.D, hidden=config.H, num_experts=config.L, top_k=config.C)).bfloat16()
        forward, backward, saved = trace_layer(config, moe)
    for tensors, edges in ((forward, numbers.forward_edges(config)), (backward, numbers.backward_edges(config))):
        assert len(tensors) == len(edges)
        for tensor, edge in zip(tensors, edges, strict=True):
            got = (tuple(tensor.shape), *form_and_bytes(tensor))
            assert got == (edge.shape, edge.dtype, edge.total_bytes), edge.name
    assert sum(saved.values()) == sum(numbers.saved_bytes(config).values())


# ---- mx_format.md ----

FORMAT = DOCS / "mx_format.md"
VALUES = {"nan": math.nan, "inf": math.inf, "largest": torch.finfo(torch.float32).max}


def value_of(cell: str) -> float:
    return float(eval(plain(cell), {"__builtins__": {}}, VALUES))


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


def test_e4m3_table() -> None:
    for byte, value in table(FORMAT, "e4m3 byte", "value"):
        code = torch.tensor([int(plain(byte), 16)], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert same(code.float().item(), value_of(value)), byte


def test_rceil_table() -> None:
    from mxep.ops.quantize.reference import _rceil_exponent

    for bits, byte in table(FORMAT, "bits of amax / 448", "scale byte"):
        quotient = torch.tensor([int(plain(bits), 16)], dtype=torch.int32).view(torch.float32).double()
        amax = quotient * 448
        if amax.item() < VALUES["largest"]:
            assert _rceil_exponent(amax.float()).item() == int(byte), bits
        else:  # no float32 amax leads there: take the rule as it is written
            exponent, mantissa = int(plain(bits), 16) >> 23, int(plain(bits), 16) & 0x7FFFFF
            assert exponent + (mantissa > 0) == int(byte), bits


def test_special_cases_table() -> None:
    rows = table(FORMAT, "value", "RCEIL: scale")
    assert {plain(row[0]) for row in rows} >= {"0.0", "448", "449", "511", "largest", "nan", "inf", "-inf"}
    for row in rows:
        block = torch.zeros(1, 32)
        block[0, 0] = value_of(row[0])
        for mode, (scale_byte, data_byte, reads_back) in (("rceil", row[1:4]), ("floor", row[4:7])):
            qdata, scale = quantize(block, mode)
            data = qdata.view(torch.uint8)[0]
            assert scale.view(torch.uint8).item() == int(scale_byte), (row[0], mode)
            assert data[0].item() == int(data_byte, 16), (row[0], mode)
            assert (data[1:] == int(row[7], 16)).all(), (row[0], mode)
            assert f"{dequantize(qdata, scale, torch.float32)[0, 0].item():.6g}" == reads_back, (row[0], mode)


def equal_to_torchao(blocks: torch.Tensor) -> list[bool]:
    """Whether the bytes of scales and values, in RCEIL and in FLOOR, are torchao's."""
    pytest.importorskip("torchao", reason="the oracle is a development tool")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype.mx_formats.config import ScaleCalculationMode as OracleMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx as oracle_to_mx
    equal = []
    for mode in OracleMode.RCEIL, OracleMode.FLOOR:
        scale, qdata = oracle_to_mx(blocks, torch.float8_e4m3fn, 32, mode)
        ours_q, ours_s = quantize(blocks, mode.name.lower())
        equal += [torch.equal(a.view(torch.uint8).flatten(), b.view(torch.uint8).flatten()) for a, b in ((scale, ours_s), (qdata, ours_q))]
    return equal


def test_special_cases_as_torchao() -> None:
    for row in table(FORMAT, "value", "RCEIL: scale"):
        block = torch.zeros(1, 32)
        block[0, 0] = value_of(row[0])
        assert ("yes" if all(equal_to_torchao(block)) else "no") == row[8], row[0]


def test_bytes_equal_torchao_on_every_finite_bf16_value() -> None:
    values = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    blocks_of = torch.zeros(values.numel(), 32, dtype=torch.bfloat16)
    blocks_of[:, 0], blocks_of[:, 1] = values, -values
    assert all(equal_to_torchao(blocks_of))


def test_record_table() -> None:
    for width, data, scales, record, bf16, ratio in table(FORMAT, "D", "e4m3"):
        D = int(width)
        assert [int(data), int(scales), int(record), int(bf16)] == [D, D // 32, record_bytes(D), 2 * D]
        assert ratio == f"{2 * D / record_bytes(D):.2f}"
        assert torch.ops.mxep.quantize_packed(torch.ones(1, D), "rceil").shape == (1, int(record))


def test_layout_functions_exist() -> None:
    for name, *_ in table(FORMAT, "function of `mxep.mx`"):
        assert resolves("mxep.mx." + plain(name))


# ---- numerics.md ----

NUMERICS = DOCS / "numerics.md"


def test_accuracy_tables_measure_the_same() -> None:
    for name, text in script("measure_numerics").tables().items():
        head, _, *measured = text.splitlines()
        written = table(NUMERICS, *cells(head))
        assert [cells(row)[0] for row in measured] == [row[0] for row in written]
        for row, now in zip(written, map(cells, measured), strict=True):
            for a, b in zip(row[1:], now[1:], strict=True):
                assert abs(float(a) - float(b)) <= 0.3, f"numerics.md, {name}, {row[0]}: written {row[1:]}, measured {now[1:]}"


def test_recipe_table() -> None:
    rows = table(NUMERICS, "recipe", "dispatch forward")
    assert [plain(row[0]) for row in rows] == list(RECIPES)
    for name, *fields in rows:
        r = RECIPES[plain(name)]
        assert fields == [r.dispatch, r.combine_backward, r.gemm, r.wgrad, r.scaling_mode.name]
    (line,) = re.findall(r"^Aliases: (.*)\.$", NUMERICS.read_text(), re.MULTILINE)
    assert dict(re.findall(r"`(\w+)` is `(\w+)`", line)) == ALIASES


def test_gemm_path_table() -> None:
    from mxep.device import GEMM_PATHS

    assert [plain(row[0]) for row in table(NUMERICS, "path", "runs on")] == list(GEMM_PATHS)
