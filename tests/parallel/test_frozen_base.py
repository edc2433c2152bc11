"""Bases that are frozen in MX: what is converted, that it computes with the values of its bytes, and what moves and saves such models."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.ranks import run_ranks
from tests.spies import spy_on
from tests.truth import raises_naming, sqnr
from tests.user_experts import PublicExperts
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mxep
from mxep.grouped_mm import expert_mm
from mxep.mx import MXWeight
from mxep.mx.tensor import dequantize_data
from mxep.operators import direct


class Block(nn.Module):
    """Dense layers around a MoE layer, and a projection to logits that is left alone."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        config = mxep.MoEConfig(dim=64, hidden=32, num_experts=4, top_k=2)
        self.wq, self.act, self.wo = nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)
        self.moe = (mxep.FusedMoE if fused else mxep.MoE)(config, "mxfp8_wgrad_with_hp")
        self.output = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.moe(self.wo(self.act(self.wq(x)))))


FROZEN = ["wq.weight", "wo.weight", "moe.experts.w1", "moe.experts.w2", "moe.experts.w3"]


def block(fused: bool = False) -> Block:
    torch.manual_seed(0)
    made = Block(fused).bfloat16()
    made.moe.init_weights(0.1)
    return made


def rows(seed: int = 1) -> Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()


def run(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = rows()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


def same_bytes(one: Tensor, other: Tensor) -> bool:
    assert isinstance(one, MXWeight)
    assert isinstance(other, MXWeight)
    return torch.equal(one.qdata.view(torch.uint8), other.qdata.view(torch.uint8)) and torch.equal(
        one.scale.view(torch.uint8), other.scale.view(torch.uint8)
    )


@pytest.mark.parametrize("fused", [False, True], ids=["MoE", "FusedMoE"])
@pytest.mark.parametrize("linears", ["torch", "mxep"])
def test_computes_with_the_values_of_its_bytes(fused: bool, linears: str) -> None:
    """Against the same recipes on the dequantised weights: bit for bit, since both quantise these for dgrad alike."""
    model = block(fused)
    if linears == "mxep":
        mxep.convert_linears(model, ["wq", "wo"])
    names = mxep.quantize_base(model)
    assert names == FROZEN
    parameters = dict(model.named_parameters())
    assert all(isinstance(parameters[name], MXWeight) and isinstance(parameters[name], nn.Parameter) for name in names)
    plain = copy.deepcopy(model)
    assert mxep.dequantize_base(plain) == FROZEN
    for got, want in zip(run(model), run(plain), strict=True):
        assert torch.equal(got, want)
    assert all(parameters[name].grad is None for name in names)
    assert model.output.weight.grad is not None
    stored = sum(p.qdata.nbytes + p.scale.nbytes for p in parameters.values() if isinstance(p, MXWeight))
    assert stored * 32 == sum(parameters[name].numel() for name in names) * 33


@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["normal", "lognormal"])
def test_the_second_rounding_is_nearly_exact(spread: float) -> None:
    """docs/numerics.md: values below 2^-13.8 of their block's largest change, by at most 2^-17.8 of it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 128, 128, generator=generator) * torch.exp(spread * torch.randn(4, 128, 128, generator=generator))
    values = MXWeight.of(weight.bfloat16()).dequantize()
    again = dequantize_data(MXWeight.of(values, transposed=True), torch.float32)
    largest = values.float().unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
    error = (again - values.float()).abs()
    assert (error <= largest * 2**-17.8).all()
    assert error[values.float().abs() >= largest * 2**-13.8].count_nonzero() == 0
    assert (error.count_nonzero() > 100) == (spread > 0)


def test_high_precision_reads_the_values() -> None:
    model = block()
    mxep.quantize_base(model)
    model.moe.experts.recipe = "hp"
    plain = copy.deepcopy(model)
    mxep.dequantize_base(plain)
    for got, want in zip(run(model), run(plain), strict=True):
        assert torch.equal(got, want)


def test_experts_that_call_torch() -> None:
    """Converted ones read the bytes; others the values."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": PublicExperts(64, 32, 4)}).bfloat16()
    mxep.quantize_base(model, "experts")
    x, counts = rows(), torch.tensor([16, 0, 20, 12])
    values = model.experts(x, counts)
    plain = copy.deepcopy(model)
    mxep.dequantize_base(plain)
    assert torch.equal(plain.experts(x, counts), values)
    mxep.convert_experts(model, "experts")
    y = model.experts(x, counts)
    y.sum().backward()
    assert 20 < sqnr(values, y) < 45
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("keep", [False, True])
def test_the_form_of_dgrad_is_kept_if_asked_for(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = block(fused=True)
    mxep.quantize_base(model, "experts", keep_dgrad_form=keep)
    quantise = spy_on(monkeypatch, direct, "quantize_columnwise")
    first = run(model)
    assert quantise.call_count == 2, "of gate and up together, and of down"
    second = run(model)
    assert quantise.call_count == (2 if keep else 4)
    for got, want in zip(second, first, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        model.moe.experts.w2.copy_(-model.moe.experts.w2.dequantize())
    changed = run(model)
    assert quantise.call_count == (3 if keep else 6), "a weight that was written is quantised again"
    assert not torch.equal(changed[1], first[1])


def test_state_dict_to_and_copies() -> None:
    model = block()
    mxep.quantize_base(model)
    want = run(model)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    assert list(state) == list(block().state_dict())
    other = block()
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    mxep.quantize_base(other)
    other.load_state_dict(state)
    copied = copy.deepcopy(model)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    for again in (other, copied, loaded, model.to("cpu"), model.float().bfloat16()):
        assert isinstance(again.moe.experts.w1, nn.Parameter)
        assert not again.moe.experts.w1.requires_grad
        assert same_bytes(again.moe.experts.w1, state["moe.experts.w1"])
        again.zero_grad()
        for got, expected in zip(run(again), want, strict=True):
            assert torch.equal(got, expected)
    plain = block()
    plain.load_state_dict(state)
    assert type(plain.wq.weight) is nn.Parameter
    assert torch.equal(plain.wq.weight, model.wq.weight.dequantize())


def test_a_checkpoint_written_in_the_background_has_the_bytes(tmp_path: Path) -> None:
    model, other = block(), block()
    for parameter in other.parameters():
        nn.init.ones_(parameter)
    for each in (model, other):
        mxep.quantize_base(each)
    dcp.async_save(model.state_dict(), checkpoint_id=tmp_path).result()
    dcp.load(other.state_dict(), checkpoint_id=tmp_path)
    for name in FROZEN:
        assert same_bytes(other.get_parameter(name), model.get_parameter(name))


def test_a_model_that_never_exists_in_bf16() -> None:
    """Built on the meta device, and filled tensor by tensor."""
    want = block()
    with torch.device("meta"):
        model = Block().bfloat16()
    mxep.quantize_base(model)
    model.to_empty(device="cpu")
    for name, tensor in want.state_dict().items():
        model.load_state_dict({name: tensor}, strict=False)
    mxep.quantize_base(want)
    for name, parameter in want.named_parameters():
        got = model.get_parameter(name)
        assert same_bytes(got, parameter) if name in FROZEN else torch.equal(got, parameter)


@pytest.mark.parametrize("transposed", [False, True])
def test_compiled(transposed: bool) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_transposed = transposed
            self.weight = nn.Parameter(torch.randn(2, *((64, 96) if transposed else (96, 64)), dtype=torch.bfloat16) / 8)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            weight = self.weight.transpose(-2, -1) if transposed else self.weight
            return mxep.grouped_mm.expert_mm(x, weight, ends, mxep.Recipe.named("mxfp8_wgrad_with_hp"))

    torch.manual_seed(0)
    layer, ends = Layer(), torch.tensor([16, 48], dtype=torch.int32)
    mxep.quantize_base(layer)
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = rows()
        y = function(x, ends)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


def test_a_compiled_linear_layer_of_torch() -> None:
    layer = nn.Linear(64, 96).bfloat16()
    mxep.quantize_base(layer)
    want = run(layer)
    torch._dynamo.reset()
    for got, expected in zip(run(torch.compile(layer, backend="aot_eager", fullgraph=True)), want, strict=True):
        torch.testing.assert_close(got, expected)


def to_shard(seed: int = 0) -> nn.Sequential:
    """A layer in MXFP8, one of torch, and stacked weights that are stored transposed, all frozen."""
    torch.manual_seed(seed)
    experts = nn.Module()
    experts.is_transposed = True
    experts.weight = nn.Parameter(torch.randn(4, 64, 32, dtype=torch.bfloat16))
    experts.forward = lambda x: torch.bmm(x.expand(4, -1, -1), experts.weight)  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), experts).bfloat16()
    mxep.convert_linears(model, ["0"])
    mxep.quantize_base(model)
    return model


def shard(rank: int, world: int) -> dict[str, Any]:
    model = to_shard()
    plain = copy.deepcopy(model)
    want = run(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    local = model[0].weight.to_local()
    got = [run(model) for _ in range(2)]
    state = model.state_dict()
    uneven = nn.Linear(64, 3, bias=False).bfloat16()
    mxep.quantize_base(uneven)
    fully_shard(uneven)
    try:
        uneven(rows())
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {
        "refused": "want equal parts of the first dimension" in refused,
        "same": all(torch.equal(a, b) for each in got for a, b in zip(each, want, strict=True)),
        "local": (type(local).__name__, tuple(local.shape), tuple(model[2].weight.to_local().shape)),
        "full": torch.equal(state["2.weight"].full_tensor(), plain[2].weight.dequantize()),
        "sharded": isinstance(model[0].weight, DTensor),
        "kind": type(state["0.weight"].to_local()).__name__,
        "bytes": model[2].weight.to_local().qdata.nbytes,
        "world": dist.get_world_size(),
    }


def test_fsdp_shards_the_bytes() -> None:
    for result in run_ranks(shard, 2):
        assert result == {
            "refused": True, "same": True, "local": ("MXWeight", (48, 64), (2, 64, 32)), "full": True, "sharded": True, "kind": "MXWeight",
            "bytes": 2 * 64 * 32, "world": 2,
        }  # fmt: skip


def test_fsdp_over_one_rank_reads_the_bytes_of_now(one_rank: None) -> None:
    """torch copies the first of the tensors that are gathered alone where there is nothing to gather."""
    model, other = to_shard(), to_shard(seed=1)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for values in (to_shard(), other):
        want, state = run(values), {name: dequantize_data(value) for name, value in values.state_dict().items()}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
        for _ in range(2):
            assert all(torch.equal(got, part) for got, part in zip(run(model), want, strict=True))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (block, {"fqns": "attention"}, ("'attention' matched no weight", "moe.experts.w1")),
        (block, {"fqns": "wq", "skip": "wq"}, ("nothing is left", "wq")),
        (nn.ReLU, {}, ("nothing is left", "want linear layers or experts, of which there are none")),
        (lambda: nn.Linear(40, 64), {}, ("weight", "(64, 40)", "multiple of 32", "leave it out")),
        (lambda: nn.Linear(64, 64).half(), {}, ("weight", "float16")),
        (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()), {"fqns": "1"}, ("'1' matched no weight",)),
    ],
    ids=["no match", "nothing left", "nothing there", "width", "dtype", "no weights"],
)
def test_modules_that_cannot_be_converted(make: Any, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with raises_naming("quantize_base", *words):
        mxep.quantize_base(make(), **options)


@pytest.mark.parametrize("last", [nn.Linear(40, 64), nn.Linear(64, 64).half()], ids=["width", "dtype"])
def test_an_error_leaves_every_weight_as_it_was(last: nn.Linear) -> None:
    model = nn.Sequential(nn.Linear(64, 64), last)
    with raises_naming("quantize_base: 1.weight"):
        mxep.quantize_base(model)
    assert type(model[0].weight.data) is torch.Tensor
    assert model[0].weight.requires_grad


def test_tied_weights_are_refused() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model.head.weight = model.embed.weight
    with raises_naming("head.weight", "weight of a Embedding", "tied", "skip="):
        mxep.quantize_base(model, "head")


def test_frozen_weights_cannot_learn() -> None:
    model = block()
    mxep.quantize_base(model)
    with raises_naming("requires_grad_(True)", "LoRA", "dequantize_base"):
        model.wq.weight.requires_grad_(True)
    with torch.no_grad(), raises_naming("writes into an MXTensor", "dequantize_base"):
        model.wq.weight.add_(1)
    with raises_naming("assignment to .data", "dequantize_base"):
        model.wq.weight.data = torch.zeros_like(model.wq.weight.dequantize())
    with raises_naming("assignment to .data", "dequantize_base"):
        copy.deepcopy(model).half()


@pytest.mark.parametrize("transposed", [False, True])
def test_zeros_of_another_kind_are_plain(transposed: bool) -> None:
    weight = MXWeight.of(torch.randn(64, 32), transposed)
    for options in ({"dtype": torch.bool}, {"dtype": torch.float64}, {"device": "meta"}):
        made = weight.new_zeros(64, 32, **options)
        assert type(made) is torch.Tensor
        assert made.dtype == options.get("dtype", weight.dtype)
        assert made.device.type == options.get("device", "cpu")
    if transposed:
        with raises_naming("flat view of a transposed weight", "flatten()"):
            weight.view(-1).sum()
        assert torch.equal(weight.flatten(), weight.dequantize().flatten())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_every_optimizer_raises_for_frozen_weights(options: dict[str, bool]) -> None:
    model = nn.Linear(64, 64)
    mxep.quantize_base(model)
    model.weight.requires_grad = True
    model(torch.randn(8, 64)).sum().backward()
    with raises_naming("writes into an MXTensor", "dequantize_base"):
        torch.optim.AdamW(model.parameters(), **options).step()


def test_data_is_that_of_another_weight() -> None:
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    mxep.quantize_base(model, keep_dgrad_form=True)
    weight, before = model.weight, copy.deepcopy(model.weight)
    weight.data = weight.data.to(torch.float32)
    assert model.weight is weight
    assert weight.dtype == weight.orig_dtype == weight.dequantize().dtype == torch.float32
    assert same_bytes(weight, before)
    weight.data = MXWeight.of(torch.full((64, 64), 3.0))
    assert torch.equal(model(torch.eye(64)), torch.full((64, 64), 3.0))


def test_the_files_of_a_bf16_model_fill_a_frozen_one(tmp_path: Path) -> None:
    want, path = block(), tmp_path / "state.pt"
    torch.save(want.state_dict(), path)
    model = block()
    mxep.quantize_base(model)
    model.load_state_dict(torch.load(path))
    mxep.quantize_base(want)
    assert same_bytes(model.wo.weight, want.wo.weight)


def _sharded(rank: int, world: int) -> list[tuple[bool, bool]]:
    """By kind of layer: whether the rank's shards are their parts of the frozen weights, and its outputs those of the whole layer."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    found = []
    for fused in (False, True):
        model = block(fused)
        mxep.quantize_base(model, "moe.experts", keep_dgrad_form=True)
        whole, x = copy.deepcopy(model.moe), rows(rank)
        mxep.apply_mxfp8_expert_parallel(model.moe, mesh["ep"])
        same = []
        for name in ("w1", "w2", "w3"):
            shard, of_whole = getattr(model.moe.experts, name).to_local(), getattr(whole.experts, name)
            same.append(torch.equal(shard.dequantize(), of_whole.dequantize().chunk(world)[rank]) and shard.kept is not None)
        found.append((all(same), sqnr(whole(x).detach(), model.moe(x).detach()) > 40))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_expert_parallelism_of_a_frozen_base(world: int) -> None:
    assert run_ranks(_sharded, world) == [[(True, True)] * 2] * world


@pytest.mark.parametrize("how", ["expert parallelism", "FSDP2"])
def test_a_sharded_base_is_not_silently_left_in_mx(how: str, one_rank: None) -> None:
    model, mesh = block(), init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    mxep.quantize_base(model)
    if how == "FSDP2":
        fully_shard(model)
    else:
        mxep.apply_mxfp8_expert_parallel(model.moe, mesh["ep"])
    sharded = {"FSDP2": "wq.weight", "expert parallelism": "moe.experts.w1"}[how]
    for fqns in (None, sharded):
        with raises_naming(f"{sharded} is a DTensor", "not sharded", "full_tensor()"):
            mxep.dequantize_base(model, fqns)
    assert isinstance(model.wq.weight.to_local() if how == "FSDP2" else model.wq.weight, MXWeight)  # nothing was changed


def test_a_weight_at_the_address_of_a_freed_one_has_a_form_of_its_own() -> None:
    """As when a merged adapter is frozen again: the new weight may get the address of the freed one."""
    layer = mxep.FusedMoE(mxep.MoEConfig(64, 32, 4, 2), "mxfp8_wgrad_with_hp")
    mxep.quantize_base(layer, "experts", keep_dgrad_form=True)
    x = torch.randn(32, 64, requires_grad=True)
    for number in range(8):
        w3 = layer.experts.w3.dequantize() * -1.3
        layer.experts.w3 = None
        layer.experts.w3 = nn.Parameter(MXWeight.of(w3, keep_dgrad_form=True), requires_grad=False)
        got, want = (torch.autograd.grad(moe(x).square().sum(), x)[0] for moe in (layer, copy.deepcopy(layer)))
        assert torch.equal(got, want), number
    assert len(layer.experts.w1.kept.forms) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_views_of_whole_rows_write_into_the_weight(transposed: bool) -> None:
    """As files of experts are loaded one by one: a copy into a view of dequantised values would be lost."""
    new = torch.randn(4, 64, 96, dtype=torch.bfloat16)
    want = MXWeight.of(new, transposed)

    def by_view(write: Callable[[Tensor], Any]) -> Tensor:
        weight = MXWeight.of(torch.zeros_like(new), transposed, keep_dgrad_form=True)
        with torch.no_grad():
            write(weight)
        assert weight.kept is not None
        assert weight.kept.writes > 0
        return weight.dequantize()

    def each(weight: Tensor) -> None:
        for part, value in zip(weight, new, strict=True):
            part.copy_(value)

    def by_number(weight: Tensor) -> None:
        for number in range(4):
            weight[number].copy_(new[number])

    def by_rows(weight: Tensor) -> None:
        for half in (slice(0, 32), slice(32, 64)):
            weight[:, half].copy_(new[:, half])

    views: dict[str, Callable[[Tensor], Any]] = {
        "loop": each,
        "select": by_number,
        "view": lambda w: w.view(2, 2, 64, 96).copy_(new.view(2, 2, 64, 96)),
        "squeeze": lambda w: w.unsqueeze(0).squeeze(0).copy_(new),
        "unflatten": lambda w: w.unflatten(0, (2, -1)).copy_(new.unflatten(0, (2, -1))),
        "permute": lambda w: w.permute(0, 2, -2).copy_(new.permute(0, 2, 1)),
    }
    if not transposed:
        views["flatten"] = lambda w: w.flatten(0, 1).copy_(new.flatten(0, 1))
        views["rows"] = by_rows
    for name, write in views.items():
        assert torch.equal(by_view(write), want.dequantize()), name
    assert type(want.flatten(1)) is torch.Tensor, "its blocks would be cut"
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        assert torch.equal(want.permute(order), want.dequantize().permute(order)), order
    assert torch.equal(want.flatten(1), want.dequantize().flatten(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(32, 64), (4, 32, 64)])
def test_views_of_single_rows_and_of_whole_blocks_write_into_the_weight(shape: tuple[int, ...], transposed: bool) -> None:
    """Rows are the ones that blocks run along: those of N, of a transposed weight (..., K, N) its columns."""
    last = shape[::-1][:2] if transposed else shape[-2:]
    new = torch.randn(*shape[:-2], *last, dtype=torch.bfloat16)
    n, k, rows = (-1, -2, (slice(None),)) if transposed else (-2, -1, ())
    want = MXWeight.of(new, transposed).dequantize()
    views: dict[str, Callable[[Tensor], Iterable[Tensor]]] = {
        "select": lambda w: [w.select(n, number) for number in range(32)],
        "unbind": lambda w: w.unbind(n),
        "slices of blocks": lambda w: [w.narrow(k, 0, 32), w.narrow(k, 32, 32)],
        "chunks of blocks": lambda w: w.chunk(2, dim=k),
        "no start, an end beyond": lambda w: [w[..., :32, *rows], w[..., 32:999, *rows]],
        "rows of an expert": lambda w: [row for part in (w if w.dim() == 3 else [w]) for row in part.unbind(n)],
    }
    for name, view in views.items():
        weight = MXWeight.of(torch.zeros_like(new), transposed, keep_dgrad_form=True)
        with torch.no_grad():
            for part, value in zip(view(weight), view(new), strict=True):
                assert isinstance(part, MXWeight)
                assert part.shape == value.shape
                part.copy_(value)
        assert torch.equal(weight.dequantize(), want), name
        assert weight.kept is not None
        assert weight.kept.writes == len(list(view(new)))
    cut = MXWeight.of(new, transposed)
    for part in (cut.narrow(k, 0, 16), cut.select(k, 3), cut.chunk(4, dim=k)[1]):
        assert type(part) is torch.Tensor, "its blocks would be cut"


def test_slices_along_k_are_multiplied_as_they_are() -> None:
    whole, offs = MXWeight.of(torch.randn(2, 32, 128, dtype=torch.bfloat16)), torch.tensor([32, 64], dtype=torch.int32)
    for start in (0, 32, 64):
        part, rows = whole[..., start : start + 64], torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
        alone = part.clone()
        assert isinstance(part, MXWeight)
        got, want = (expert_mm(rows, weight, offs, mxep.Recipe.named("mxfp8_wgrad_with_hp")) for weight in (part, alone))
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(out.sum(), rows)[0] for out in (got, want)))


def test_writing_an_expert_renews_its_dgrad_form() -> None:
    """Expert by expert, as a checkpoint may be loaded; also through parts of a split."""
    experts = mxep.moe.Experts(64, 32, 4, "mxfp8_gemm")
    mxep.quantize_base(nn.ModuleDict({"experts": experts}), "experts", keep_dgrad_form=True)
    x, counts = torch.randn(128, 64, requires_grad=True), torch.tensor([32] * 4)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(experts(x, counts).sum(), x)
        return found

    gradient()
    with torch.no_grad():
        for expert, values in enumerate(torch.randn(4, 32, 64)):
            experts.w1[expert].copy_(values)
        experts.w3.split(2)[1].copy_(torch.randn(2, 32, 64))
    got = gradient()
    for weight in (experts.w1, experts.w2, experts.w3):
        weight.kept.forms.clear()
    assert torch.equal(got, gradient())


def test_embeddings_of_three_dimensions_stay() -> None:
    """(1, N, D), as those of positions: no GEMM reads them."""
    model = nn.Module()
    model.position, model.experts = nn.Parameter(torch.randn(1, 32, 64)), nn.Parameter(torch.randn(4, 32, 64))
    assert mxep.quantize_base(model) == ["experts"]
    assert type(model.position) is nn.Parameter
    single = nn.Sequential(mxep.MoE(mxep.MoEConfig(64, 32, 1, 1), "hp"))
    assert mxep.quantize_base(single) == ["0.experts.w1", "0.experts.w2", "0.experts.w3"], "one expert is one"


@pytest.mark.parametrize("converted", [False, True], ids=["nn.Linear", "MXLinear"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_weight_that_is_written_before_backward_is_an_error(converted: bool, frozen: bool) -> None:
    """Else backward would read other bytes than forward did."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    if converted:
        mxep.convert_linears(model, "0", "mxfp8_wgrad_with_hp")
    if frozen:
        mxep.quantize_base(model)
    out = model(torch.randn(8, 64, requires_grad=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
